"""Embedding and layer norm gradients written in place: the bits of the ATen operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interlace._runtime import testing

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same_bits(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return ours.dtype == expected.dtype and torch.equal(ours.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "width"), [((1,), 1, 1), ((2, 7), 5, 33), ((4, 513), 101, 64), ((3, 100), 5000, 48)]
)
@pytest.mark.parametrize("padding_idx", [-1, 0])
def test_embedding(dtype: torch.dtype, tokens: tuple[int, ...], rows: int, width: int, padding_idx: int) -> None:
    torch.manual_seed(0)
    for index_dtype in (torch.int64, torch.int32):
        indices = torch.randint(rows, tokens, dtype=index_dtype)
        grad = torch.randn(*tokens, width).to(dtype)
        grad.view(-1)[::7] = -0.0
        expected = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding_idx, False)
        flat = torch.full((rows * width + 40,), 3.0, dtype=dtype)  # rubbish before, and neighbours that must stay
        out = flat[32 : 32 + rows * width].view(rows, width)
        assert testing.embedding_backward_into(grad, indices, rows, padding_idx, False, out)
        assert same_bits(out, expected)
        assert flat[:32].eq(3.0).all() and flat[32 + rows * width :].eq(3.0).all()


def test_embedding_without_tokens_clears_the_table() -> None:
    out = torch.ones(4, 8)
    assert testing.embedding_backward_into(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), 4, -1, False, out)
    assert out.eq(0).all()


def test_embedding_says_what_it_does_not_cover() -> None:
    grad, indices, out = torch.randn(3, 8), torch.tensor([0, 1, 1]), torch.ones(4, 8)
    cases = [
        (grad, indices, 4, -1, True, out),  # scaled by frequency
        (torch.randn(8, 3).t(), indices, 4, -1, False, out),
        (grad, indices, 4, -1, False, torch.ones(8, 4).t()),
        (grad, indices, 5, -1, False, out),
        (grad.double(), indices, 4, -1, False, out),
        (grad.to(torch.complex64), indices, 4, -1, False, out.to(torch.complex64)),
    ]
    for case in cases:
        before = case[-1].clone()
        assert not testing.embedding_backward_into(*case)
        assert torch.equal(case[-1], before)


def layer_norm_case(
    dtype: torch.dtype, parameter_dtype: torch.dtype, rows: tuple[int, ...], width: int
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x, grad = torch.randn(*rows, width).to(dtype), torch.randn(*rows, width).to(dtype)
    weight, bias = torch.randn(width).to(parameter_dtype), torch.randn(width).to(parameter_dtype)
    _, mean, rstd = torch.native_layer_norm(x, [width], weight, bias, 1e-5)
    return x, grad, weight, bias, mean, rstd


@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize(("rows", "width"), [((1,), 1), ((7,), 33), ((4, 16), 64), ((5, 3), 129), ((64,), 768)])
@pytest.mark.parametrize("with_dx", [True, False])
def test_layer_norm(
    dtype: torch.dtype, parameter_dtype: torch.dtype, rows: tuple[int, ...], width: int, with_dx: bool
) -> None:
    x, grad, weight, bias, mean, rstd = layer_norm_case(dtype, parameter_dtype, rows, width)
    expected = torch.ops.aten.native_layer_norm_backward(
        grad, x, [width], mean, rstd, weight, bias, [with_dx, True, True]
    )
    flat = torch.full((2 * width + 71,), 3.0, dtype=parameter_dtype)
    dweight, dbias = flat[3 : 3 + width], flat[width + 39 : 2 * width + 39]  # not aligned to vectors
    dx = torch.empty_like(x) if with_dx else None
    assert testing.layer_norm_backward_into(grad, x, width, mean, rstd, weight, dx, dweight, dbias)
    assert same_bits(dweight.clone(), expected[1]) and same_bits(dbias.clone(), expected[2])
    if dx is not None:
        assert same_bits(dx, expected[0])
    untouched = torch.ones_like(flat, dtype=torch.bool)
    untouched[3 : 3 + width] = untouched[width + 39 : 2 * width + 39] = False
    assert flat[untouched].eq(3.0).all()


def test_layer_norm_of_either_parameter_alone() -> None:
    x, grad, weight, bias, mean, rstd = layer_norm_case(torch.float32, torch.float32, (9,), 40)
    _, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad, x, [40], mean, rstd, weight, bias, [False, True, True]
    )
    out = torch.zeros(40)
    assert testing.layer_norm_backward_into(grad, x, 40, mean, rstd, weight, None, out, None)
    assert same_bits(out, dweight)
    assert testing.layer_norm_backward_into(grad, x, 40, mean, rstd, weight, None, None, out)
    assert same_bits(out, dbias)


def test_layer_norm_of_a_gradient_with_strides() -> None:
    x, grad, weight, bias, mean, rstd = layer_norm_case(torch.float32, torch.float32, (9,), 40)
    strided = grad.t().contiguous().t()
    expected = torch.ops.aten.native_layer_norm_backward(strided, x, [40], mean, rstd, weight, bias, [True, True, True])
    dx, dweight, dbias = torch.empty_like(x), torch.empty(40), torch.empty(40)
    assert testing.layer_norm_backward_into(strided, x, 40, mean, rstd, weight, dx, dweight, dbias)
    assert all(same_bits(a, b) for a, b in zip((dx, dweight, dbias), expected, strict=True))


def test_layer_norm_says_what_it_does_not_cover() -> None:
    x, grad, weight, _, mean, rstd = layer_norm_case(torch.float32, torch.float32, (9,), 40)
    out = torch.zeros(40)
    cases = [
        (grad, x, 39, mean, rstd, weight, None, out, None),
        (grad[:8], x, 40, mean, rstd, weight, None, out, None),
        (grad.double(), x, 40, mean, rstd, weight, None, out, None),
        (grad, x, 40, mean[:8], rstd, weight, None, out, None),
        (grad, x, 40, mean, rstd, weight, None, out.double(), None),
        (grad, x, 40, mean, rstd, weight, None, torch.zeros(80)[::2], None),
        (grad, x, 40, mean.double(), rstd, weight, None, out, None),
        (grad[:0], x[:0], 40, mean[:0], rstd[:0], weight, None, out, None),
    ]
    for case in cases:
        assert not testing.layer_norm_backward_into(*case)
    assert out.eq(0).all()
