"""Attention with dropout as one operator, which torch's CPU takes apart: scores, shares and masks of all pairs of tokens are in memory then.

    F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
      →  %9, %10 = aten._scaled_dot_product_flash_attention_for_cpu(%1, %2, %3, 0.1, false) {fwd rng=0}
         ... = aten._scaled_dot_product_flash_attention_for_cpu_backward(%20, %1, %2, %3, %9, %10, 0.1, false) {bwd rng=0}

The runtime's own kernel (src/runtime/cpu_attention.h) drops the same in both, for they draw from one stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor

from interlace.capture.patches import patched

Tensor = torch.Tensor
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class OneAttention:
    """What attention is one operator of."""

    drops: bool  # that with dropout too
    always: bool  # what a model writes out (written.py) of every size, else where that is faster on CPUs

    @classmethod
    def of(cls, kernels: str, drops: bool, device: str = "cpu") -> OneAttention | None:
        """With Config.kernels, on this type of devices; None: attention is what torch makes of it. `drops`: dropout may draw other numbers
        than the single ops."""
        from interlace import _runtime

        return cls(drops and device == "cpu" and _runtime.attention_drops(), device != "cpu") if kernels == "auto" else None


def fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:  # fmt: skip
    """By the operator; what it takes is said by `fits`."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return FORWARD(q, k, v, dropout, is_causal, attn_mask=_added(mask, q), scale=scale)[0]


_wanted: list[OneAttention | None] = [None]


@contextlib.contextmanager
def attention_with_dropout(wanted: OneAttention | None) -> Iterator[None]:
    """In traces that are made within."""
    _wanted.append(wanted)
    try:
        yield
    finally:
        _wanted.pop()


@contextlib.contextmanager
def one_attention(here: Callable[[], bool]) -> Iterator[None]:
    """While a trace runs, and not around a look at what the model has changed: of what calls torch.nn.functional's function `here`."""
    if (wanted := _wanted[-1]) is None or not wanted.drops:
        yield
        return
    theirs = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if isinstance(dropout_p, float) and 0 < dropout_p < 1 and isinstance(query, FakeTensor) and here():
            q, k, v, mask = (_cast(t) for t in (query, key, value, attn_mask))
            if fits(q, k, v, mask, is_causal, enable_gqa):
                return fused(q, k, v, mask, dropout_p, is_causal, scale)
        return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    with patched(F, scaled_dot_product_attention=attention):
        yield


def _cast(t: Any) -> Any:
    """As an autocast region has it: its list of narrow functions names attention, not the operator."""
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype == torch.float64 or not torch.is_autocast_enabled("cpu"):
        return t
    return t.to(torch.get_autocast_dtype("cpu"))


def fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> bool:
    if any(t.dim() != 4 or t.dtype != q.dtype or t.shape[-1] != q.shape[-1] or t.shape[0] != q.shape[0] for t in (q, k, v)):
        return False
    if q.dtype not in _DTYPES or k.shape[1] != v.shape[1] or (k.shape[1] != q.shape[1] and not enable_gqa):
        return False
    if mask is None:
        return True
    fits = mask.dim() in (2, 4) and mask.dtype in (torch.bool, q.dtype) and not mask.requires_grad and not is_causal
    return fits and mask.shape[-1] == k.shape[2] and mask.shape[-2] in (1, q.shape[2])


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of what counts as one that is added."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask.logical_not(), float("-inf"))
