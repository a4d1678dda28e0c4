"""Whether a loss sees the padding behind a text, found out by evaluating one batch in two lengths.

    logits [2, 9, 61], loss 4.1032  and  logits [2, 12, 61], loss 4.1032    it does not; dimension 1 of logits is the text's
    start_logits [2, 9], loss 1.73  and  start_logits [2, 12], loss 1.98     it does: a softmax over positions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from interlace.integrations.padding import Sizes, filled, of_all_ranks, two_lengths

Tensor = torch.Tensor
Dimensions = dict[str, dict[int, tuple[str, ...]]]  # of each output: which are a text's, and whose


@dataclasses.dataclass
class Near:
    """How near numbers are that are the same: the loss, and what else is given."""

    loss: float
    outputs: float

    @staticmethod
    def of(model: nn.Module, cast: bool) -> Near:
        dtypes = {p.dtype for p in model.parameters()}
        if cast or not dtypes <= {torch.float32, torch.float64}:
            return Near(2e-3, 3e-2)
        return Near(1e-5, 1e-4) if torch.float32 in dtypes else Near(1e-6, 1e-5)  # transformers computes losses in float32


class Unseen:
    """What was found out so far, by loss function and by which texts have one length."""

    def __init__(self) -> None:
        self._known: dict[Any, Dimensions | None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self, batch: Mapping[str, Any], sizes: Sizes, evaluate: Callable[[dict[str, Any]], dict[str, Tensor]], kind: Any, most: int,
        near: Near, pad_id: int,
    ) -> Dimensions | None:  # fmt: skip
        """The dimensions of texts, or None where the loss or an output changes with the padding. Every rank must call it. `most`: the longest
        text that the model takes."""
        key = kind, sizes.groups()
        if key not in self._known:
            few, many, told = two_lengths(sizes, most)
            short = filled(batch, few, pad_id)
            first, again, other = (evaluate(b) for b in (short, short, filled(short, many, pad_id)))
            found = _compare(first, again, other, told, near)
            self._known[key] = found if all(of_all_ranks(found is not None)) else None
        return self._known[key]


def _compare(
    first: dict[str, Tensor], again: dict[str, Tensor], other: dict[str, Tensor], told: dict[int, tuple[str, ...]], near: Near
) -> Dimensions | None:
    found: Dimensions = {}
    for name, x in first.items():
        y = other[name]
        if not torch.equal(x.nan_to_num(), again[name].nan_to_num()):  # it draws random numbers
            return None
        found[name] = {}
        for dim, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)):
            if a != b:
                if b - a not in told:
                    return None
                found[name][dim] = told[b - a]
                y = y.narrow(dim, 0, a)
        limit = near.loss if name == "loss" else near.outputs
        if not torch.allclose(x, y, rtol=limit, atol=limit, equal_nan=True):
            return None
    return found
