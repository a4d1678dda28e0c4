"""Pass `tensor`: a captured step cut over ranks gives the numbers of the whole one, line by line in torch, without a runtime.

The ranks of the axis run in one process (rank_evaluator.py), so that models, plans and degrees are cheap to try.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from evaluator import Evaluator
from rank_evaluator import RankEvaluator

from interlace import _core
from interlace.capture import capture

transformers = pytest.importorskip("transformers")

LAYER = "model.layers.*."
LLAMA = "model.embed_tokens.weight 0; lm_head.weight 0; " + "; ".join(
    f"{LAYER}{name}.weight {dim}" for name, dim in [
        ("self_attn.q_proj", 0), ("self_attn.k_proj", 0), ("self_attn.v_proj", 0), ("self_attn.o_proj", 1),
        ("mlp.gate_proj", 0), ("mlp.up_proj", 0), ("mlp.down_proj", 1),
    ]
)  # fmt: skip
GPT2 = "transformer.wte.weight 0; " + "; ".join(
    f"transformer.h.*.{entry}" for entry in [
        "attn.c_attn.weight 1 blocks 3", "attn.c_attn.bias 0 blocks 3", "attn.c_proj.weight 0", "mlp.c_fc.weight 1",
        "mlp.c_fc.bias 0", "mlp.c_proj.weight 0",
    ]
)  # fmt: skip
MIXTRAL = "model.embed_tokens.weight 0; lm_head.weight 0; " + "; ".join(
    f"{LAYER}{entry}" for entry in [
        "self_attn.q_proj.weight 0", "self_attn.k_proj.weight 0", "self_attn.v_proj.weight 0", "self_attn.o_proj.weight 1",
        "mlp.experts.gate_up_proj 1 blocks 2", "mlp.experts.down_proj 2",
    ]
)  # fmt: skip
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}


def cross_entropy(model, batch):
    """In the model's own dtype: the models' own losses are made in float32."""
    kept = batch if "decoder" in dict(model.named_children()) else {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**kept).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))


def tokens(batch=2, seq=16):
    return {"input_ids": torch.randint(0, 128, (batch, seq)), "labels": torch.randint(0, 128, (batch, seq))}


def llama(kv_heads=4, **more):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=kv_heads, max_position_embeddings=64, **more)
    return transformers.AutoModelForCausalLM.from_config(config), tokens(), LLAMA


def qwen3():
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    return transformers.AutoModelForCausalLM.from_config(config), tokens(), LLAMA


def gpt2(dropout=0.0):
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config), tokens(), GPT2


def mixtral():
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=4, num_local_experts=4, max_position_embeddings=64, experts_implementation="grouped_mm"
    )
    return transformers.AutoModelForCausalLM.from_config(config), tokens(), MIXTRAL


def named_plan(model, columns, rows):
    plan = [f"{n} 0" for n, _ in model.named_parameters() if re.search(columns, n)]
    return "; ".join(plan + [f"{n} 1" for n, _ in model.named_parameters() if re.search(rows, n)])


def t5():
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=128,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, tokens(), named_plan(model, r"(\.(q|k|v|wi)|^shared)\.weight$", r"\.(o|wo)\.weight$")


def falcon():
    """Queries, keys and values of a head side by side in one weight, taken out by an index; attention and MLP side by side."""
    config = transformers.FalconConfig(
        num_hidden_layers=2, num_attention_heads=4, num_kv_heads=4, hidden_size=64, vocab_size=128, new_decoder_architecture=True,
        hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    columns, rows = r"(query_key_value|dense_h_to_4h|embeddings)\.weight$", r"(attention\.dense|dense_4h_to_h)\.weight$"
    return model, tokens(), named_plan(model, columns, rows)


def vit():
    config = transformers.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=32, patch_size=8, num_labels=10)
    model = transformers.ViTForImageClassification(config)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}
    return model, batch, named_plan(model, r"\.(q_proj|k_proj|v_proj|fc1)\.(weight|bias)$", r"\.(o_proj|fc2)\.weight$")


def captured(made, dtype=torch.float64, loss=cross_entropy):
    model, batch, plan = made
    model = model.to(dtype).train()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    text = capture(model, loss, batch).text
    text = re.sub(r'^meta tensor ".*"\n', "", text, flags=re.MULTILINE)
    program = _core.Program.parse(text.replace("\nmeta rng", f'\nmeta tensor "{plan}"\nmeta rng', 1))
    program.run_passes("canonicalize")
    tensors = {n: t.detach() for n, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    whole = program.print()
    inputs = [batch[re.match(r'input .*"([^"]*)"', line)[1]] for line in whole.splitlines() if line.startswith("input ")]
    return program, tensors, inputs


def compare(made, ranks, options="", dtype=torch.float64, bound=1e-12, first="", loss=cross_entropy):
    """The cut text of the program; its loss and gradients are those of the whole one."""
    program, tensors, inputs = captured(made, dtype, loss)
    torch.manual_seed(7)
    expected = Evaluator(program.print(), tensors).run(inputs)
    if first:
        program.run_passes(first)
    program.run_passes(f"mesh(axes=dp:1+tp:{ranks}),tensor(axis=tp,plan=model{options})")
    text = program.print()
    assert _core.Program.parse(text).print() == text
    torch.manual_seed(7)
    cut = RankEvaluator(text, tensors, "tp", ranks)
    results = cut.run(inputs)
    for name, value in expected["outputs"].items():
        for result in results:
            torch.testing.assert_close(result["outputs"][name], value, rtol=bound, atol=bound)
    largest = max(g.abs().max().item() for g in expected["grads"].values())
    for name, gradient in expected["grads"].items():
        got = cut.whole(name, [r["grads"][name] for r in results])
        torch.testing.assert_close(got, gradient, rtol=bound, atol=bound * largest, msg=lambda m, n=name: f"{n}: {m}")
    return text


def count(text, kind):
    return text.count(f"= {kind}.start(")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [llama, qwen3, gpt2, t5, falcon], ids=lambda f: f.__name__)
def test_same_numbers_as_the_whole_program(make, ranks):
    torch.manual_seed(0)
    compare(make(), ranks)


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_a_number_is_added_to_a_sum_once(sequence):
    """Each rank holds a part of what the second product makes; 1 is no part of it."""

    def loss(model, batch):
        hidden = torch.tanh(model[0](batch["input_ids"].to(model[0].weight.dtype)))
        made = 0.5 * (model[1](hidden) + 1.0) - 0.25
        return F.cross_entropy(model[2](F.pad(made, (0, 1), value=2.0)[:, :-1] - 3), batch["labels"][:, 0])

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)), torch.nn.Linear(16, 128))
    compare((model, tokens(4), "0.weight 0; 1.weight 1"), 2, f",sequence={sequence}", loss=loss)


def test_vision():
    torch.manual_seed(0)
    compare(vit(), 2)


def test_experts_are_cut_inside():
    torch.manual_seed(0)
    text = compare(mixtral(), 2, dtype=torch.float32, bound=2e-5)
    assert '"model.layers.0.mlp.experts.gate_up_proj" trainable group 0 cut tp 1 blocks 2' in text


def test_megatrons_transfers():
    """Two gathers and two scattered sums a layer in each direction, and for vocabulary and loss: no logits, no weights."""
    torch.manual_seed(0)
    text = compare(llama(), 2)
    layers = 2
    # Each layer gathers before attention and before the MLP, forward and backward; so do the head (forward), the
    # embedding (backward) and the loss (a number a row).
    assert count(text, "all_gather") == 4 * layers + 3
    assert count(text, "reduce_scatter") == 4 * layers + 2
    whole = count(compare(llama(), 2, ",sequence=false"), "all_reduce")
    assert whole == 4 * layers + 3  # embedding, head and loss; norms need none
    assert not re.search(r": f64\[32,128\]", text), "whole logits"


def test_attention_beside_the_mlp_takes_one_sum():
    torch.manual_seed(0)
    text = compare(falcon(), 2)
    assert count(text, "reduce_scatter") == (1 + 2) * 2 + 2  # a layer's sum; of both norms the gradients; embedding, head
    assert count(text, "all_gather") == (2 + 1) * 2 + 3
    assert not re.search(r": f64\[2,16,4,3,16\] = aten.index", text)


def test_rows_between_the_products():
    torch.manual_seed(0)
    text = compare(llama(), 2)
    norms = re.findall(r": f\d\d\[([\d,]+)\] = aten.rsqrt", text)
    assert norms and all(sizes == "1,16,1" for sizes in norms)
    whole = compare(llama(), 2, ",sequence=false")
    assert all(sizes == "2,16,1" for sizes in re.findall(r": f\d\d\[([\d,]+)\] = aten.rsqrt", whole))


def test_gathered_again_for_the_backward_part():
    torch.manual_seed(0)
    text = compare(llama(), 2, ",regather=true")
    assert count(text, "all_gather") == 4 * 2 + 3 + 2 * 2 + 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_cut_at_a_table_that_stays_whole(ranks):
    """Where memory counts: else the first block would keep all rows of what it looked up, of their norm and its mask."""
    torch.manual_seed(0)
    model, batch, plan = gpt2(dropout=0.25)
    text = compare((model, batch, plan.removeprefix("transformer.wte.weight 0; ")), ranks, ",regather=true")
    found = re.findall(r"(?m)^  %\d+: f64\[([\d,]+)\] = aten.embedding\(", text)
    assert found == [{2: "1,16,64", 4: "2,4,64"}[ranks], "1,16,64"]
    compare(t5(), ranks, ",regather=true")


def test_fewer_key_value_heads_than_ranks():
    torch.manual_seed(0)
    compare(llama(kv_heads=1), 2)
    compare(llama(kv_heads=2), 4)


def test_a_mask_does_not_depend_on_the_ranks():
    torch.manual_seed(0)
    compare(gpt2(dropout=0.25), 2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("role", ["embedding", "block"])
def test_dropout_as_one_operator(role, ranks):
    """Of a layer as the planner has it: the mask of the whole program, of which a rank keeps its part for the backward part."""
    lines = (Path(__file__).parent.parent / "models" / "gpt2.model").read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith(f"program {role} "))
    program = _core.Program.parse("".join(lines[at + 1 : at + 1 + int(lines[at].split()[2])])).bind({"b": 2, "s": 16})
    program.run_passes("canonicalize")
    plan = GPT2.partition("; ")[2] if role == "block" else "transformer.wte.weight 0"
    text = program.print().replace("\nmeta rng", f'\nmeta tensor "{plan}"\nmeta rng', 1)
    program = _core.Program.parse(text)
    torch.manual_seed(0)
    tensors = {p["name"]: torch.randn(p["shape"]) * 0.1 for p in program.params()}
    whole = program.print()
    inputs = [
        torch.randint(0, 512, (2, 16)) if "i64" in line else torch.randn(2, 16, 96)
        for line in whole.splitlines() if line.startswith("input ")
    ]  # fmt: skip
    torch.manual_seed(7)
    expected = Evaluator(whole, tensors).run(inputs)
    program.run_passes(f"mesh(axes=dp:1+tp:{ranks}),tensor(axis=tp,plan=model)")
    text = program.print()
    assert re.search(rf"b8\[2,{16 // ranks},96\] = copy\(|b8\[{2 // ranks},16,96\] = copy\(", text)
    torch.manual_seed(7)
    cut = RankEvaluator(text, tensors, "tp", ranks)
    results = cut.run(inputs)
    for result in results:
        for name, value in expected["outputs"].items():
            torch.testing.assert_close(result["outputs"][name], value, rtol=1e-4, atol=1e-5)
    for name, gradient in expected["grads"].items():
        got = cut.whole(name, [r["grads"][name] for r in results])
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_odd_batches_are_cut_along_the_sequence():
    torch.manual_seed(0)
    model, _, plan = llama()
    text = compare((model, tokens(batch=3), plan), 2)
    assert re.search(r": f\d\d\[3,8,1\] = aten.rsqrt", text)
    text = compare((model, tokens(batch=3, seq=5), plan), 2)  # nothing to cut: whole
    assert re.search(r": f\d\d\[3,5,1\] = aten.rsqrt", text)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("model.layers.*.mlp.up_proj.weight", "entry 1 of the plan, 'model.layers.*.mlp.up_proj.weight', is not PARAMETER DIMENSION"),
        ("model.layers.*.mlp.up.weight 0", "the plan names 'model.layers.*.mlp.up.weight', and the model has no such parameter"),
        ("model.norm.weight 1", "'model.norm.weight' has 1 dimensions, so there is no dimension 1 to cut"),
        ("model.norm.weight 0; model.*.weight 0 blocks 2", "the plan cuts 'model.norm.weight' in two ways"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_plan_is_said(plan, message):
    model, batch, _ = llama()
    program, _, _ = captured((model, batch, plan))
    with pytest.raises(ValueError, match=re.escape(message)):
        program.run_passes("mesh(axes=dp:1+tp:2),tensor(axis=tp,plan=model)")


def test_a_weight_that_does_not_divide_stays_whole_or_is_refused(tmp_path):
    """Whole where the model's plan names it; an error where a file, written for this run, does."""
    model, batch, _ = llama()
    entry = "model.layers.0.mlp.up_proj.weight 0 blocks 5"
    program, _, _ = captured((model, batch, entry))
    (tmp_path / "cuts").write_text(entry + "\n")
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj.weight', 96 in 5 blocks"):
        program.clone().run_passes(f"mesh(axes=dp:1+tp:2),tensor(axis=tp,plan={tmp_path / 'cuts'})")
    program.run_passes("mesh(axes=dp:1+tp:2),tensor(axis=tp,plan=model)")
    assert " cut tp " not in program.print()


@pytest.mark.parametrize("make", [llama, gpt2, t5], ids=lambda f: f.__name__)
def test_halves_of_a_batch_side_by_side(make):
    """Split, cut over two ranks and ordered anew: the numbers of the whole batch."""
    torch.manual_seed(0)
    model, batch, plan = make()
    batch["labels"][0, :9] = -100  # unlike counts of tokens: the mean is over all of them
    text = compare((model, batch, plan), 2, "),canonicalize,overlap(cluster=local-2", first="split(parts=2),canonicalize")
    assert len(re.findall(r"= aten._scaled_dot_product_flash_attention_for_cpu\(|= aten._safe_softmax\(", text)) >= 4


def test_a_part_travels_while_another_is_computed():
    torch.manual_seed(0)
    text = compare(llama(), 2, "),canonicalize,overlap(cluster=local-2", first="split(parts=2),canonicalize")
    lines = text.splitlines()
    under_way, beside = {}, 0
    for line in lines:
        if found := re.match(r"\s*(%\d+)\S* .* = (all_gather|reduce_scatter)\.start", line):
            under_way[found[1].rstrip(":")] = 0
        elif found := re.match(r"\s*(all_gather|reduce_scatter)\.wait\((%\d+)\)", line):
            beside += under_way.pop(found[2]) > 0
        elif " = aten.mm(" in line:
            under_way = {name: products + 1 for name, products in under_way.items()}
    assert beside >= 12  # of the 40 transfers of activations, those with a product beside them


def test_parts_must_divide_the_batch():
    program, _, _ = captured(llama())
    with pytest.raises(ValueError, match="a micro-batch of 2 samples cannot be split into 3 equal parts"):
        program.run_passes("split(parts=3)")


def test_what_runs_again_is_gathered_once():
    """Rows of a recomputed norm are gathered once in the backward part: for the products that run again, and for gradients of weights."""
    torch.manual_seed(0)
    layers = 2
    text = compare(llama(), 2, first="recompute(mode=full)")
    again = compare(llama(), 2, ",regather=true", first="recompute(mode=full)")
    assert count(text, "all_gather") == 4 * layers + 3 + 2 * layers
    assert count(again, "all_gather") == count(text, "all_gather") + 1  # the head's, whose rows do not run again
    assert count(text, "reduce_scatter") == 4 * layers + 2 + layers  # of the sum behind attention, which the MLP's norm reads


def test_selective_recomputation_makes_no_sum_again():
    """Norms run again on a rank's rows, which are gathered once for the gradients of weights; products do not, nor their sums over ranks."""
    torch.manual_seed(0)
    layers = 2
    text = compare(llama(), 2, first="recompute(mode=selective)")
    assert count(text, "all_gather") == 4 * layers + 3 + 2 * layers
    assert count(text, "reduce_scatter") == 4 * layers + 2
