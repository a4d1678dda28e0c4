"""The kernels on an accelerator against the same kernels on the CPU."""

from __future__ import annotations

import json
import re

import pytest
import torch
from interlace._runtime import testing
from torch import nn

import interlace
from interlace import _runtime

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine"),
]


def flat(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(dtype: torch.dtype, decoupled: bool) -> None:
    tensors = [flat(10_001, dtype, seed) for seed in range(4)]
    tensors[3].abs_()
    copies = [tensor.to(device()) for tensor in tensors]
    options = {"lr": 0.01, "weight_decay": 0.1, "t": 3.0, "grad_scale": 0.5, "decoupled": decoupled}
    testing.adam_step(*tensors, **options)
    testing.adam_step(*copies, **options)
    for ours, theirs in zip(tensors, copies, strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_adjacent_steps_are_given_to_the_device_as_one(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one group and dtype, and with the same bits; each has its part of the time."""
    executor = _runtime.Executor

    def trained(join: bool) -> tuple[list[torch.Tensor], int, list[float]]:
        monkeypatch.setattr(_runtime, "Executor", lambda *a: executor(*a[:4], {**a[4], "join_updates": join}, *a[5:]))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8)).to(device())
        wide = [p for p in model.parameters() if p.dim() > 1]
        flat = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 0.01}], lr=0.02)
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(device())
        config = interlace.Config(clip_norm=clip, profile="off", device_graphs=False)
        with interlace.compile(model, optimizer, lambda m, x: m(x).square().mean(), batch, config) as trainer:
            trainer.step(batch)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                trainer.step(batch)
            calls = sum(event.name == "interlace::adam_step_" for event in profile.events())
            trainer._run.executor.set_trace("on")
            trainer.step(batch)
            slices = json.loads(trainer._run.executor.trace())["traceEvents"]
            seconds = [e["dur"] for e in slices if e["ph"] == "X" and e["name"].startswith("update.adamw")]
            return [t.cpu().clone() for t in trainer.state_dict().values()], calls, seconds

    weights, calls, seconds = trained(True)
    others, each, _ = trained(False)
    assert (calls, each) == (2, 6)
    assert len(seconds) == 6 and all(s > 0 for s in seconds)
    assert all(map(torch.equal, weights, others))


def test_steps_of_other_scales_are_not_joined() -> None:
    scales = {0: 0.5, 1: 0.5, 2: 0.25}

    def of(unit: int, line: str) -> str:
        line = re.sub(r"P(\d+)", lambda m: f"%{int(m[1]) + unit}", line)
        return line.replace("U", f"u{unit}").replace("S", str(scales[unit]))

    def each(line: str) -> list[str]:
        """The line of each unit U; S: its scale, P9: its value of those from %9 on."""
        return [of(unit, line) for unit in scales]

    lines = ["interlace 1 scheduled", "mesh dp 1", "step 1 reduce_each", "group 0 adamw", *each("unit U dp f32 numel 32 shard 32")]
    lines += [*each('param P0: f32[32] in P3+0 "U" trainable group 0 unit U+0'), 'input %20: f32[32] "x"']
    lines += each("state P3: f32[32] U.full persistent") + each("state P6: f32[32] U.grad step")
    lines += each("state P9: f32[32] U.exp_avg persistent") + each("state P12: f32[32] U.exp_avg_sq persistent")
    lines += ["phase micro_batch takes () gives () {", *each("  P21: f32[32] into P6+0 = aten.exp(%20) {bwd}"), "}"]
    lines += ["phase update once takes () gives () {"]
    lines += [*each("  update.adamw(P3, P6, P9, P12) {upd units=[U] scale=S ranges=[0, 32, 0]}"), "}", ""]
    found = []
    for join in (True, False):
        executor = _runtime.Executor("\n".join(lines), str(device()), [], 10.0, {"join_updates": join})
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            executor.step([[flat(32, torch.float32, 5).to(device())]], [[0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 0.0]], 0)
        calls = sum(event.name == "interlace::adam_step_" for event in profile.events())
        found.append((calls, [executor.tensor(9 + i).cpu() for i in range(3)]))
    assert [calls for calls, _ in found] == [2, 3]
    for joined, alone, scale in zip(found[0][1], found[1][1], scales.values(), strict=True):
        assert torch.equal(joined, alone)
        torch.testing.assert_close(joined, 0.1 * scale * flat(32, torch.float32, 5).exp())


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_sgd(t: float) -> None:
    tensors = [flat(10_001, torch.float32, seed) for seed in range(3)]
    copies = [tensor.to(device()) for tensor in tensors]
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "t": t, "grad_scale": 0.5}
    testing.sgd_step(*tensors, **options)
    testing.sgd_step(*copies, **options)
    for ours, theirs in zip(tensors, copies, strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 33, 100_001])
def test_the_norm_has_the_bits_of_the_cpu(dtype: torch.dtype, numel: int) -> None:
    results = []
    for where in (torch.device("cpu"), device()):
        limbs = torch.zeros(68, dtype=torch.int64, device=where)
        testing.norm_partial(flat(numel, dtype, 1).to(where), limbs)
        out = torch.zeros(3, dtype=torch.float64, device=where)
        testing.norm_coef(limbs, 1.0, 0.5, out)
        results.append(out.tolist())
    assert results[0] == results[1]


def test_what_is_only_for_cpus_says_so() -> None:
    grad, indices, out = torch.zeros(3, 8), torch.tensor([0, 1, 1]), torch.zeros(4, 8)
    assert not testing.embedding_backward_into(grad.to(device()), indices.to(device()), 4, -1, False, out.to(device()))
    x, ones = torch.zeros(3, 8, device=device()), torch.ones(8, device=device())
    assert not testing.layer_norm_backward_into(
        x, x, 8, x[:, 0].clone(), x[:, 0].clone(), ones, None, ones.clone(), None
    )
