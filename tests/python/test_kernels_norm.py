"""The exact norm against rational arithmetic: the same bits under any split, order and number of threads."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from interlace._runtime import testing

LIMBS = 68
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def partial(flat: torch.Tensor, aten: bool = False) -> torch.Tensor:
    limbs = torch.zeros(LIMBS, dtype=torch.int64)
    testing.norm_partial(flat, limbs, aten=aten)
    return limbs


def coef(limbs: torch.Tensor, max_norm: float = -1.0, scale: float = 1.0) -> list[float]:
    out = torch.zeros(3, dtype=torch.float64)
    testing.norm_coef(limbs, max_norm, scale, out)
    return out.tolist()


def block_sums(flat: torch.Tensor) -> list[float]:
    """Sums of 32 squares in the order that base/exact_sum.h fixes, one float64 operation at a time."""
    x = torch.nn.functional.pad(flat.double(), (0, -flat.numel() % 32)).view(-1, 4, 8)
    q = x * x
    lanes = ((q[:, 0] + q[:, 1]) + q[:, 2]) + q[:, 3]
    return (
        ((lanes[:, 0] + lanes[:, 4]) + (lanes[:, 2] + lanes[:, 6]))
        + ((lanes[:, 1] + lanes[:, 5]) + (lanes[:, 3] + lanes[:, 7]))
    ).tolist()


def exact_norm(flat: torch.Tensor) -> float:
    return math.sqrt(float(sum((Fraction(s) for s in block_sums(flat)), Fraction(0))))


def sample(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(-12, 4, (numel,), generator=generator).double().exp2()
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * magnitude).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 64, 1023, 1024, 1025, 5000])
def test_norm_is_the_exact_sum_of_blocks(dtype: torch.dtype, numel: int) -> None:
    flat = sample(numel, dtype, numel)
    assert coef(partial(flat)) == [exact_norm(flat), 1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_split_order_or_threads(dtype: torch.dtype) -> None:
    flat = sample(32 * 20_000, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = partial(flat)
        torch.set_num_threads(2)
        assert torch.equal(partial(flat), whole)
    finally:
        torch.set_num_threads(before)
    # Shards at multiples of 32, added up in one accumulator in reverse, or in four that an all-reduce would add.
    pieces = flat.view(-1, 32 * 1250)
    limbs = torch.zeros(LIMBS, dtype=torch.int64)
    for piece in reversed(pieces):
        testing.norm_partial(piece, limbs)
    assert torch.equal(limbs, whole)
    reduced = sum(partial(quarter.flatten()) for quarter in pieces.view(4, -1, 32 * 1250))
    assert coef(reduced) == coef(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 33, 4096, 100_001])
def test_the_device_form_has_the_same_bits(dtype: torch.dtype, numel: int) -> None:
    flat = sample(numel, dtype, numel)
    assert coef(partial(flat, aten=True)) == coef(partial(flat))


def test_the_device_form_on_extremes() -> None:
    for values in ([1e-170, 3e-160], [1e150, 1e-150], [5e-324, 1.0], [0.0, -0.0], [1.3e154]):
        flat = torch.tensor(values, dtype=torch.float64)
        assert coef(partial(flat, aten=True)) == coef(partial(flat)), values
    for values in ([float("inf"), 1.0], [float("nan"), 1.0], [1e200]):
        flat = torch.tensor(values, dtype=torch.float64)
        ours, device = coef(partial(flat)), coef(partial(flat, aten=True))
        assert ours[2] == device[2] == 0.0
        assert torch.tensor(ours).allclose(torch.tensor(device), equal_nan=True)


def test_device_form_in_several_chunks() -> None:
    flat = sample((1 << 22) + 32 * 77 + 5, torch.float32)
    assert coef(partial(flat, aten=True)) == coef(partial(flat))


def test_empty_adds_nothing() -> None:
    assert partial(torch.zeros(0)).tolist() == [0] * LIMBS
    assert coef(partial(torch.zeros(0)), max_norm=1.0) == [0.0, 1.0, 1.0]


def test_padding_changes_nothing() -> None:
    flat = sample(45, torch.float32)
    assert torch.equal(partial(flat), partial(torch.nn.functional.pad(flat, (0, 19 + 64))))


def test_coefficient_and_scale() -> None:
    limbs = partial(torch.tensor([3.0, 4.0]))
    assert coef(limbs) == [5.0, 1.0, 1.0]
    assert coef(limbs, max_norm=1.0) == [5.0, 1.0 / (5.0 + 1e-6), 1.0]
    assert coef(limbs, max_norm=1.0, scale=0.25) == [1.25, 1.0 / (1.25 + 1e-6), 1.0]
    assert coef(limbs, max_norm=10.0) == [5.0, 1.0, 1.0]
    assert coef(limbs, max_norm=0.0) == [5.0, 0.0, 1.0]


def test_not_finite() -> None:
    norm, ratio, finite = coef(partial(torch.tensor([1.0, float("inf")])), max_norm=1.0)
    assert norm == math.inf and ratio == 0.0 and finite == 0.0
    norm, ratio, finite = coef(partial(torch.tensor([float("nan"), float("inf")])), max_norm=1.0)
    assert math.isnan(norm) and math.isnan(ratio) and finite == 0.0
    # Squares that overflow float64.
    assert coef(partial(torch.tensor([1e200], dtype=torch.float64)))[::2] == [math.inf, 0.0]
    # The largest float32 squares fit.
    assert coef(partial(torch.full((32,), torch.finfo(torch.float32).max)))[2] == 1.0


def test_clipping_agrees_with_torch() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (64, 1000, 33)]
    for index, parameter in enumerate(parameters):
        parameter.grad = sample(parameter.numel(), torch.float32, index)
    limbs = torch.zeros(LIMBS, dtype=torch.int64)
    for parameter in parameters:
        testing.norm_partial(parameter.grad, limbs)
    norm, ratio, _ = coef(limbs, max_norm=0.5)
    before = parameters[1].grad.clone()
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(parameters, 0.5).item(), norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(before * ratio, parameters[1].grad)
