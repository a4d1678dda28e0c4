"""Attention of other devices against the CPU's own, which a captured program names."""

from __future__ import annotations

import math

import pytest
import torch
from interlace._runtime import testing

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2, 1])  # of keys and values, for four of queries
@pytest.mark.parametrize("causal, masked, scale", [(False, False, None), (True, False, None), (False, True, 0.3)])
def test_results_and_gradients_are_those_of_the_cpu(
    dtype: torch.dtype, causal: bool, masked: bool, scale: float | None, heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, n, 24, 16, generator=generator, dtype=torch.float64).to(dtype) for n in (4, heads, heads, 4))
    mask = torch.randn(2, 1, 24, 24, generator=generator).to(dtype) if masked else None
    if mask is not None:
        mask[0, 0, :, 3] = -math.inf
    out, logsumexp = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    ours, sums = testing.attention(q, k, v, 0.0, causal, mask, scale)
    assert (ours.shape, ours.dtype, sums.shape, sums.dtype) == (out.shape, out.dtype, logsumexp.shape, logsumexp.dtype)
    close = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, out, rtol=close, atol=close)
    torch.testing.assert_close(sums, logsumexp, rtol=close, atol=close)
    theirs = BACKWARD(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale)
    for a, b in zip(
        testing.attention_backward(grad, q, k, v, out, logsumexp, 0.0, causal, mask, scale), theirs, strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=10 * close, atol=10 * close)


@pytest.mark.accelerator
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("rows", [24, 32])  # the second are as the memory-efficient kernel has its sums
def test_each_kernel_of_a_device_takes_the_sums_as_a_program_has_them(kernel: str, heads: int, rows: int) -> None:
    """With heads inside, as the CPU's operator gives them; kernels that go by their address would read those of other rows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = torch.accelerator.current_accelerator(check_available=True)
    dtype = torch.bfloat16 if kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION") else torch.float32
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, n, rows, 64, generator=generator).to(dtype) for n in (4, heads, heads, 4)]
    q, k, v, grad = (x.double() for x in given)
    out, logsumexp = FORWARD(q, k, v, 0.0, True)
    theirs = BACKWARD(grad, q, k, v, out, logsumexp, 0.0, True)
    there = [x.to(device) for x in given]
    with sdpa_kernel([getattr(SDPBackend, kernel)]):
        ours, sums = testing.attention(*there[:3], 0.0, True, None, None)
        inside = torch.empty(2, rows, 4, dtype=sums.dtype, device=device).transpose(1, 2).copy_(sums)
        gradients = testing.attention_backward(there[3], *there[:3], ours, inside, 0.0, True, None, None)
    close = 4e-2 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip((ours, sums, *gradients), (out, logsumexp, *theirs), strict=True):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=close, atol=close)
