"""Models on the meta device: the same values at any number of ranks, from initializers or from files, a bit at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import torch.distributed as dist
import zoo
from safetensors.torch import save_file
from torch import nn

import interlace
from interlace.checkpoint.weights import Weights
from interlace.train.materialize import initialize

Tensor = torch.Tensor


def on_meta(case: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.CASES[case].build()


def start_values(case: str, **config: Any) -> dict[str, Tensor]:
    model = on_meta(case)
    opt = parity.make_optimizer("adamw", model)
    batch = zoo.CASES[case].batch(2, 0)
    with interlace.compile(model, opt, zoo.CASES[case].loss, batch, interlace.Config(**config)) as trainer:
        values = trainer.state_dict(all_ranks=True)
        trainer.step(batch)
        return values


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "batchnorm"])
def test_values_do_not_depend_on_ranks_or_strategy(case: str) -> None:
    one = ranks.run(start_values, 1, case, seed=5)[0]
    three = ranks.run(start_values, 3, case, seed=5)
    whole = ranks.run(start_values, 2, case, seed=5, strategy="replicate")
    for other in (*three, *whole):
        assert list(other) == list(one) and all(torch.equal(other[k], one[k]) for k in one)
    if case != "batchnorm":
        matrices = [v for v in one.values() if v.dim() > 1]
        assert all(0.005 < float(v.float().std()) < 0.03 for v in matrices), "initializer_range is 0.02"
    another = ranks.run(start_values, 1, case, seed=6)[0]
    assert any(not torch.equal(another[k], one[k]) for k in one)


def test_the_initializers_see_one_small_group_at_a_time() -> None:
    model = on_meta("llama")
    alive: list[int] = []
    seen: list[str] = []

    def place(name: str, value: Tensor) -> None:
        alive.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        seen.append(name)

    names = {n for n, _ in model.named_parameters()}
    initialize(model, names, 0, place)
    assert set(seen) == names and len(seen) == len(names)
    assert max(alive) == max(p.numel() for p in model.parameters()), "more than the largest matrix was alive"
    assert all(p.is_meta for p in model.parameters())


def test_a_parent_that_writes_its_childs_parameter_has_the_last_word() -> None:
    """GPT-2's blocks scale their projections down after the projections were initialized."""
    model = on_meta("gpt2")
    found: dict[str, Tensor] = {}
    initialize(model, {n for n, _ in model.named_parameters()}, 0, lambda n, v: found.__setitem__(n, v.clone()))
    scaled = float(found["transformer.h.0.mlp.c_proj.weight"].std())
    assert scaled == pytest.approx(0.02 / 2, rel=0.1) and float(
        found["transformer.h.0.mlp.c_fc.weight"].std()
    ) == pytest.approx(0.02, rel=0.1)


def test_a_parameter_without_an_initializer_is_named() -> None:
    model = on_meta("vit")
    opt = torch.optim.AdamW(model.parameters())
    with pytest.raises(interlace.InterlaceError) as e:
        interlace.compile(model, opt, zoo.class_loss, zoo.images(2, 0))
    assert str(e.value) == (
        "parameter 'token' (and 1 more) is on the meta device and nothing initializes it: give ViT a reset_parameters() or the model an "
        "_init_weights(module), read the values from a file (Config.weights), or build the model on the CPU"
    )


def from_files(case: str, source: str, **config: Any) -> dict[str, Tensor]:
    return start_values(case, weights=source, **config)


@pytest.mark.parametrize("size", [1, 3])
def test_weights_from_hugging_face_folders(size: int, tmp_path: Path) -> None:
    model = zoo.build("gpt2")
    model.save_pretrained(tmp_path / "one")  # type: ignore[operator]
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")  # type: ignore[operator]
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    expected = model.state_dict()
    for folder in ("one", "many"):
        found = ranks.run(from_files, size, "gpt2", str(tmp_path / folder))
        for f in found:
            assert list(f) == list(expected) and all(torch.equal(f[k], expected[k]) for k in f)
    # As the hub has GPT-2: without the prefix of the base model.
    bare = {k.removeprefix("transformer."): v.clone() for k, v in expected.items() if k != "lm_head.weight"}
    save_file(bare, tmp_path / "bare.safetensors")
    found = ranks.run(from_files, size, "gpt2", str(tmp_path / "bare.safetensors"))
    assert all(torch.equal(found[0][k], expected[k]) for k in expected)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in zoo.build("vit").state_dict().items()}
    whole = dict(state)
    lacking = {k: v for k, v in state.items() if k != "token"}
    other = {**whole, "head.bias": torch.zeros(6)}
    for name, tensors in (("whole", whole), ("lacking", lacking), ("other", other)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-100])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight": {}}))
    for name, message in {
        "lacking.safetensors": "has no 'token'; was it saved from another model?",
        "other.safetensors": "'head.bias' has shape (6,), the model's has (5,)",
        "cut.safetensors": "cannot be read as a safetensors file (cut off or edited?)",
        "none.safetensors": "no such file: ",
        "": "model.safetensors.index.json is no index of safetensors files",
    }.items():
        with pytest.raises(interlace.InterlaceError) as e:
            start_values("vit", weights=str(tmp_path / name))
        assert message in str(e.value), name


def test_reading_a_range_reads_what_the_flat_tensor_has(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(60).view(5, 3, 4), "b": torch.arange(7.0), "c": torch.tensor(3)}
    save_file(tensors, tmp_path / "t.safetensors")
    weights = Weights(tmp_path / "t.safetensors")
    for name, t in tensors.items():
        n = t.numel()
        for start in range(n + 1):
            for end in range(start, n + 1):
                assert torch.equal(weights.read_range(name, start, end), t.reshape(-1)[start:end])
    weights.close()


def memory_of_a_rank() -> tuple[int, int]:
    """(bytes that a rank keeps between steps, bytes of the whole model) of a Llama on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    opt = torch.optim.AdamW(model.parameters())
    with interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(1, dist.get_rank())) as trainer:
        trainer.step(zoo.tokens(1, dist.get_rank()))
        assert all(p.is_meta for p in model.parameters())
        return trainer.stats()["persistent_bytes"], sum(p.numel() for p in model.parameters()) * 4


def test_a_rank_keeps_its_shards_only() -> None:
    for kept, whole in ranks.run(memory_of_a_rank, 4):
        assert kept < 1.03 * 4 * whole / 4, "a quarter of parameters, gradients and both moments, and little padding"
