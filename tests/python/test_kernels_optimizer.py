"""Flat optimizer steps against torch.optim, and against their own formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
from interlace._runtime import testing

# Rounding of one step, relative: torch contracts a*b+c in its kernels, ours never does.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = [0, 1, 7, 32, 33, 511, 512, 513, 100_003]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def flat(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.double(), theirs.detach().double(), rtol=tolerance, atol=tolerance * 1e-1)


ADAM_CASES = [
    {"decoupled": True, "weight_decay": 0.1},
    {"decoupled": True, "weight_decay": 0.0, "maximize": True},
    {"decoupled": False, "weight_decay": 0.05},
    {"decoupled": False, "weight_decay": 0.0, "beta1": 0.3},  # torch's lerp from the other end
    {"decoupled": True, "weight_decay": 0.01, "beta1": 0.0, "beta2": 0.9, "eps": 1e-3},
]


@pytest.mark.parametrize("case", ADAM_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adam_follows_torch_for_ten_steps(case: dict[str, float], dtype: torch.dtype, threads: int) -> None:
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "maximize": False, **case}
    numel = 3 * 40_000 + 5
    ours = flat(numel, dtype, 1)
    exp_avg, exp_avg_sq = torch.zeros_like(ours), torch.zeros_like(ours)
    parameter = torch.nn.Parameter(ours.clone())
    kind = torch.optim.AdamW if options["decoupled"] else torch.optim.Adam
    optimizer = kind(
        [parameter],
        lr=options["lr"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        maximize=options["maximize"],
        fused=True,
    )
    for t in range(1, 11):
        gradient = flat(numel, dtype, 100 + t)
        parameter.grad = 0.5 * gradient
        optimizer.step()
        kept = gradient.clone()
        testing.adam_step(ours, gradient, exp_avg, exp_avg_sq, t=float(t), grad_scale=0.5, **options)
        assert torch.equal(gradient, kept)
    close(ours, parameter, dtype)
    close(exp_avg, optimizer.state[parameter]["exp_avg"], dtype)
    close(exp_avg_sq, optimizer.state[parameter]["exp_avg_sq"], dtype)


def adam_formula(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, lr: float, wd: float, t: int, math: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AdamW, betas 0.9 and 0.99, one tensor operation (one rounding) at a time, in the kernel's order."""

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64).to(math)

    dtype = w.dtype
    w, g, m, v = (x.to(math) for x in (w, g, m, v))
    w = w * number(1 - lr * wd)
    m = m + number(1 - 0.9) * (g - m)
    v = v * number(0.99) + number(1 - 0.99) * g * g
    root = torch.from_numpy(numpy.sqrt(v.numpy()))  # torch.sqrt may be one unit off
    denominator = root / number((1 - 0.99**t) ** 0.5) + number(1e-8)
    w = w + number(-(lr / (1 - 0.9**t))) * m / denominator
    return w.to(dtype), m.to(dtype), v.to(dtype)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_adam_has_the_bits_of_its_formula(numel: int, dtype: torch.dtype, threads: int) -> None:
    math = torch.float64 if dtype is torch.float64 else torch.float32
    # An odd start: the buffers are not aligned to vectors.
    w, g, m, v = (flat(numel + 1, dtype, seed)[1:] for seed in range(4))
    v.abs_()
    expected = adam_formula(w, g, m, v, lr=0.01, wd=0.1, t=3, math=math)
    testing.adam_step(w, g, m, v, lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, t=3.0)
    for ours, formula in zip((w, m, v), expected, strict=True):
        assert torch.equal(ours, formula)


SGD_CASES = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.8, "nesterov": True},
]


@pytest.mark.parametrize("case", SGD_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sgd_follows_torch_for_ten_steps(case: dict[str, float], dtype: torch.dtype, threads: int) -> None:
    numel = 3 * 40_000 + 5
    ours = flat(numel, dtype, 1)
    momentum_buffer = torch.full_like(ours, 7.0) if "momentum" in case else None  # the first step does not read it
    parameter = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.05, fused=True, **case)
    for t in range(1, 11):
        gradient = flat(numel, dtype, 100 + t)
        parameter.grad = 0.25 * gradient
        optimizer.step()
        testing.sgd_step(ours, gradient, momentum_buffer, lr=0.05, t=float(t), grad_scale=0.25, **case)
    close(ours, parameter, dtype)
    if momentum_buffer is not None:
        close(momentum_buffer, optimizer.state[parameter]["momentum_buffer"], dtype)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_has_the_bits_of_its_formula(numel: int, dtype: torch.dtype, nesterov: bool, threads: int) -> None:
    math = torch.float64 if dtype is torch.float64 else torch.float32

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64).to(math)

    w, g, b = (flat(numel + 1, dtype, seed)[1:] for seed in range(3))
    grad = g.to(math) * number(0.5) + w.to(math) * number(0.1)
    velocity = b.to(math) * number(0.9) + grad * number(1 - 0.3)
    direction = grad + velocity * number(0.9) if nesterov else velocity
    expected = (w.to(math) + direction * number(-0.02)).to(dtype)
    testing.sgd_step(
        w, g, b, lr=0.02, momentum=0.9, dampening=0.3, weight_decay=0.1, t=2.0, nesterov=nesterov, grad_scale=0.5
    )
    assert torch.equal(w, expected)
    assert torch.equal(b, velocity.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_numbers_convert_like_torch(dtype: torch.dtype) -> None:
    """Every 16-bit number there and back, and float32 numbers near rounding borders, through a step that copies."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    w = torch.zeros_like(finite)
    testing.sgd_step(w, finite, lr=-1.0)  # w = 0 + g * 1
    assert torch.equal(w, finite)
    # Sums of two numbers, computed exactly in float32 or rounded by it, then rounded to 16 bits.
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        a = finite[torch.randint(len(finite), (len(finite),), generator=generator)]
        w = a.clone()
        testing.sgd_step(w, finite, lr=-1.0)
        assert torch.equal(w, (a.float() + finite.float()).to(dtype))
        near = a.clone()
        testing.sgd_step(near, finite, lr=-(2.0**-11))
        assert torch.equal(near, (a.float() + finite.float() * 2.0**-11).to(dtype))
    special = torch.tensor([float("inf"), -float("inf"), float("nan")]).to(dtype)
    w = torch.zeros_like(special)
    testing.sgd_step(w, special, lr=-1.0)
    assert torch.equal(w.float().nan_to_num(nan=5.0), special.float().nan_to_num(nan=5.0))


def test_a_nan_stays_where_it_is() -> None:
    w, m, v = torch.ones(100), torch.zeros(100), torch.zeros(100)
    g = torch.ones(100)
    g[17], g[64] = float("nan"), float("inf")
    testing.adam_step(w, g, m, v)
    assert w.isnan().nonzero().flatten().tolist() == [17, 64]
    assert torch.equal(w[~w.isnan()], w[0].expand(98))


def test_the_device_form_follows_the_loops() -> None:
    """Accelerators run torch's fused operators; here on the CPU, where both exist."""
    for case in ADAM_CASES:
        options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "t": 3.0, "grad_scale": 0.5, **case}
        tensors = [flat(1000, torch.float64, seed) for seed in range(4)]
        tensors[3].abs_()
        copies = [x.clone() for x in tensors]
        testing.adam_step(*tensors, **options)
        consumed = [x.clone() for x in copies]
        testing.adam_step(*copies, aten=True, **options)
        testing.adam_step(*consumed, aten=True, consume=True, **options)
        for i, (ours, device, other) in enumerate(zip(tensors, copies, consumed, strict=True)):
            torch.testing.assert_close(ours, device, rtol=1e-13, atol=1e-14)
            assert torch.equal(other, device * 0.5 if i == 1 else device)  # a gradient that nobody reads any more
    for case in SGD_CASES:
        for t in (1.0, 2.0):
            tensors = [flat(1000, torch.float64, seed) for seed in range(3 if "momentum" in case else 2)]
            copies = [x.clone() for x in tensors]
            testing.sgd_step(*tensors, lr=0.1, t=t, grad_scale=0.5, **case)
            testing.sgd_step(*copies, lr=0.1, t=t, grad_scale=0.5, aten=True, **case)
            for ours, device in zip(tensors, copies, strict=True):
                torch.testing.assert_close(ours, device, rtol=1e-13, atol=1e-14)


def test_wrong_buffers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="gradient differs from the weights"):
        testing.adam_step(torch.zeros(4), torch.zeros(5), torch.zeros(4), torch.zeros(4))
    with pytest.raises(RuntimeError, match="exp_avg differs from the weights"):
        testing.adam_step(torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(4))
    with pytest.raises(RuntimeError, match="SGD of Int"):
        testing.sgd_step(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
