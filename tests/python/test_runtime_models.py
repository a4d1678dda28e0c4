"""Captured models through the passes and the executor, one rank, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

_runtime = pytest.importorskip("interlace._runtime")
_core = pytest.importorskip("interlace._core")

from interlace.capture import capture

TINY = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def llama(**kw: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, "num_key_value_heads": 2, "use_cache": False, **kw}))


def gpt2(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


def tokens(batch: int = 2, seq: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(128, (batch, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def language_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Run:
    """A captured model in an executor, loaded with the model's own tensors."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable, passes: str = "", optimizer: Any = None, **options: Any) -> None:
        rng = options.get("rng", "keyed")
        self.captured = capture(model, loss, batch, optimizer=optimizer, rng_mode=rng)
        self.program = _core.Program.parse(self.captured.text, "captured")
        if passes:
            self.program.run_passes(passes)
        self.executor = _runtime.Executor(self.program.print(), "cpu", [], 10.0, options)
        self.buffer_ids = {b["name"]: b["value"] for b in self.program.buffers()}
        for name, value in self.buffer_ids.items():
            self.executor.tensor(value).copy_(self.captured.tensors[name])
        for name, param in self.params().items():
            param.copy_(self.captured.tensors[name].detach())
        self.hyper = [[0.0] * 7 for _ in self.program.groups()]

    def params(self) -> dict[str, torch.Tensor]:
        out = {}
        for p in self.program.params():
            if p["unit"] is None:
                out[p["name"]] = self.executor.tensor(p["value"])
            else:
                full, at = self.executor.gather_unit(p["unit"]), p["unit_offset"]
                like = self.captured.tensors[p["name"]]
                out[p["name"]] = full[at : at + like.numel()].view(like.shape)
        return out

    def step(self, batch: Any, step: int = 0) -> dict[str, Any]:
        return self.executor.step([self.captured.input_spec.flatten(batch)], self.hyper, step)


CASES = {
    "llama": (llama, tokens(), language_loss),
    "llama_bf16": (lambda: llama().bfloat16(), tokens(), language_loss),
    "gpt2": (lambda: gpt2(0.0), tokens(), language_loss),
    "conv": (ConvNet, {"x": torch.randn(4, 3, 16, 16), "y": torch.randint(10, (4,))}, image_loss),
}


@pytest.mark.parametrize("passes", ["", "canonicalize"])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_buffers_equal_eager_bit_by_bit(case: str, passes: str) -> None:
    make, batch, loss = CASES[case]
    model = make()
    run = Run(model, batch, loss, passes)
    result = run.step(batch)["outputs"]
    eager = copy.deepcopy(model)
    expected = loss(eager, batch)
    expected.backward()
    assert torch.equal(result["loss"][0], expected.detach())
    for name, param in eager.named_parameters():
        assert torch.equal(result["grad." + name][0], param.grad), name
    changed = 0
    for name, buffer in eager.named_buffers():
        if name in run.buffer_ids:
            assert torch.equal(run.executor.tensor(run.buffer_ids[name]), buffer), name
            changed += not torch.equal(buffer, dict(model.named_buffers())[name])
    assert changed == (3 if case == "conv" else 0)


def test_dropout_in_compat_mode_equals_eager() -> None:
    model, batch = gpt2(0.1), tokens()
    run = Run(model, batch, language_loss, "canonicalize", rng="compat")
    torch.manual_seed(5)
    loss = run.step(batch)["outputs"]["loss"][0]
    torch.manual_seed(5)
    assert torch.equal(loss, language_loss(model, batch).detach())
    assert not torch.equal(loss, run.step(batch)["outputs"]["loss"][0])


def test_keyed_dropout_depends_on_step_and_seed_only() -> None:
    model, batch = gpt2(0.1), tokens()
    run = Run(model, batch, language_loss, "canonicalize", seed=3)

    def grads(run: Run, step: int) -> torch.Tensor:
        out = run.step(batch, step)["outputs"]
        return torch.cat([v[0].flatten() for k, v in sorted(out.items())])

    first = grads(run, 7)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert not torch.equal(first, grads(run, 8))
    assert torch.equal(first, grads(run, 7))
    assert torch.equal(before, torch.get_rng_state())  # the user's generator is left alone
    assert torch.equal(first, grads(Run(model, batch, language_loss, seed=3), 7))
    assert not torch.equal(first, grads(Run(model, batch, language_loss, seed=4), 7))


OPTIMIZERS = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), lambda t: [1e-2, 0.9, 0.999, 1e-8, 1e-2, t, 0.0]),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), lambda t: [0.1, 0.9, 0.0, 0.0, 0.0, t, 0.0]),
}


@pytest.mark.parametrize("clip", ["none", "0.5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_torch_optim_in_float64(name: str, clip: str) -> None:
    make, hyper = OPTIMIZERS[name]
    model, batch = llama().double(), tokens()
    optimizer = make(model.parameters())
    runs = {
        kind: Run(model, batch, language_loss, f"canonicalize,{kind}(axis=dp,ranks=1),update(clip={clip})", optimizer)
        for kind in ("replicate", "shard", "zero1")
    }
    for step in range(5):
        optimizer.zero_grad()
        expected = language_loss(model, batch)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if clip != "none" else None
        optimizer.step()
        for run in runs.values():
            run.hyper = [hyper(step + 1.0)]
            result = run.step(batch, step)
            assert result["outputs"]["loss"][0].item() == pytest.approx(expected.item(), rel=1e-9)
            if norm is not None:
                assert result["norm"] == pytest.approx(norm.item(), rel=1e-9)
    for kind, run in runs.items():
        for key, value in run.params().items():
            assert torch.allclose(value, model.get_parameter(key), rtol=1e-7, atol=1e-9), (kind, key)
            assert torch.equal(value, runs["replicate"].params()[key]), (kind, key)
        assert run.executor.stats()["copied_bytes"] == 0, kind


@pytest.mark.parametrize("case", CASES)
def test_gradient_bytes_reach_their_place_without_a_copy(case: str) -> None:
    make, batch, loss = CASES[case]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    run = Run(model, batch, loss, "canonicalize,shard(axis=dp,ranks=1),update(clip=none)", optimizer)
    run.hyper = [[1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0]]
    run.step(batch)
    stats = run.executor.stats()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if case == "conv":  # a convolution's backward gives three results at once
        assert stats["placed_bytes"] + stats["copied_bytes"] == total
    else:
        assert (stats["placed_bytes"], stats["copied_bytes"]) == (total, 0)


def test_debug_describes_every_op_of_a_real_model() -> None:
    model, batch = llama(), tokens()
    run = Run(model, batch, language_loss, "canonicalize")
    report = run.executor.debug_step([run.captured.input_spec.flatten(batch)], 0, stop_at="model.layers.0.mlp")
    assert report["first_nonfinite"] is None
    shown = {op["module"] for op in report["ops"]}
    assert "model.layers.0.self_attn" in shown and "model.layers.1.mlp" not in shown
    hidden = {}
    model.model.layers[0].mlp.register_forward_hook(lambda m, i, o: hidden.setdefault("mlp", o.detach()))
    language_loss(model, batch)
    assert torch.equal(report["values"][-1][1].flatten(), hidden["mlp"].flatten())


def test_debug_names_the_module_of_a_poisoned_weight() -> None:
    model, batch = llama(), tokens()
    run = Run(model, batch, language_loss, "canonicalize", debug=True)
    with torch.no_grad():
        run.params()["model.layers.1.self_attn.o_proj.weight"].fill_(float("inf"))
    result = run.step(batch)
    assert result["finite"] is False
    assert result["nonfinite"]["module"] == "model.layers.1.self_attn.o_proj"
    assert result["nonfinite"]["name"] == "aten.mm"
