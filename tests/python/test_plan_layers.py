"""A model's layers as programs of their own: run one after another they give the whole model's loss and gradients."""

from __future__ import annotations

import re

import pytest
import torch
from evaluator import Evaluator
from torch import nn
from transformers import AutoModelForCausalLM

from interlace import _core
from interlace.capture.layers import ROLES, capture_layers
from interlace.errors import CaptureError, InterlaceError
from interlace.models import config_of, hf_loss
from interlace.plan.layers import find_blocks, model_text


def one_block(name, **options):
    config = config_of(name, 16)
    for key, value in {"num_hidden_layers": 1, **options}.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-tiny", {}), ("gpt2-tiny", {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})],
)
def test_layers_in_a_row_are_the_model(name, options):
    model = one_block(name, **options)
    ids = torch.randint(0, 512, (6, 14), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.clone()}
    loss = hf_loss(model, batch)
    loss.backward()
    _, blocks = find_blocks(model, name)
    programs = capture_layers(model, blocks, hf_loss, batch)

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts = {r: Evaluator(programs[r], tensors, {"b": 6, "s": 14}) for r in ROLES}
    shared = {}
    if name.startswith("llama"):
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(14)[None])
        shared = {"position_embeddings.0": cos, "position_embeddings.1": sin}

    def run(role, **given):
        known = {**batch, **shared, **{key.replace("_grad", ".grad"): t for key, t in given.items()}}
        part = parts[role]
        result = part.run([known[part.names[d.value]] for d in part.inputs])
        return result["outputs"], result["grads"]

    nothing = torch.zeros(6, 14, model.config.hidden_size)
    entering = run("embedding", hidden_grad=nothing)[0]["hidden"]
    leaving = run("block", hidden=entering, hidden_grad=nothing)[0]["hidden"]
    head, head_grads = run("head", hidden=leaving)
    block, block_grads = run("block", hidden=entering, hidden_grad=head["hidden.grad"])
    _, grads = run("embedding", hidden_grad=block["hidden.grad"])
    assert torch.equal(head["loss"], loss.detach())
    for found in (head_grads, block_grads):
        for key, grad in found.items():
            grads[key] = grads[key] + grad if key in grads else grad
    for key, p in model.named_parameters():
        torch.testing.assert_close(grads[key], p.grad, rtol=0, atol=0, msg=key)


def test_text_has_the_facts_and_three_programs():
    text = model_text("llama-tiny", seq=64)
    facts = dict(re.findall(r"(?m)^(\w+) (\S+)$", text.partition("\nprogram ")[0]))
    assert facts["blocks"] == "4" and facts["hidden"] == "128" and facts["heads"] == "4" and facts["kv_heads"] == "2"
    assert facts["dtype"] == "bf16" and facts["flash"] == "true" and facts["tied"] == "none"
    assert re.findall(r"(?m)^program (\w+) \d+$", text) == list(ROLES)
    assert "flash_attention" in text and "flash_attention" not in model_text("llama-tiny", flash=False)
    cost = _core.testing.layer_costs(text, "a100-40gb-8", 64, micro_batch=2, tp=2)["block"]
    assert cost["tp_forward_us"] > 0 and cost["boundary"] == 2 * 64 * 128  # bf16, half of the sequence
    assert 'tied "transformer.wte.weight"' in model_text("gpt2-tiny")


def test_a_70b_model_needs_no_memory():
    text = model_text("llama-3-70b", seq=4096)
    assert _core.testing.layer_costs(text, "h100-80gb-8", 4096)["block"]["parameters"] == 855_654_400


def test_models_that_cannot_be_planned_are_named():
    class Unlike(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)])

    with pytest.raises(
        InterlaceError, match=r"blocks 'layers\.0' and 'layers\.2' differ in attribute 'out_features'|differ in"
    ):
        find_blocks(Unlike(), "mine")
    with pytest.raises(InterlaceError, match="'mine' has no list of modules"):
        find_blocks(nn.Linear(2, 2), "mine")
    two = nn.Module()
    two.encoder, two.decoder = nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(InterlaceError, match="several lists of blocks \\('encoder' and 'decoder'\\)"):
        find_blocks(two, "mine")
    with pytest.raises(InterlaceError, match="unknown dtype 'int8'"):
        model_text("llama-tiny", dtype="int8")

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, input_ids, labels):
            return self.embed(input_ids).sum()

    model, ids = Skips(), torch.zeros(6, 154, dtype=torch.int64)
    with pytest.raises(CaptureError, match="did not call the blocks"):
        capture_layers(model, model.layers, lambda m, b: m(**b), {"input_ids": ids, "labels": ids})
