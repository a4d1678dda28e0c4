"""Captured models through the passes and the executor, one rank, against plain PyTorch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import on_device
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from runtime_support import ConvNet, Run, gpt2, image_loss, language_loss, llama, tokens

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
    run = Run(model, batch, loss, passes, own_kernels=False)
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


@pytest.mark.host("the CPU's generator; that of a device: tests/regress")
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
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda t: [0.1, 0.9, 0.0, 0.0, 0.0, t, 0.0]),
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
            assert torch.allclose(value.cpu(), model.get_parameter(key), rtol=1e-7, atol=1e-9), (kind, key)
            assert torch.equal(value, runs["replicate"].params()[key]), (kind, key)
        # Backward kernels of ours, which write to a gradient's place, are for CPUs.
        assert on_device.DEVICE != "cpu" or run.executor.stats()["copied_bytes"] == 0, kind


@pytest.mark.host("backward kernels of ours, which write to a gradient's place, are for CPUs")
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
    run = Run(model, batch, language_loss, "canonicalize", own_kernels=False)
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
