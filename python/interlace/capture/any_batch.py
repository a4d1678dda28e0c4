"""A training step whose program takes batches of any form: the loss function with the model in it is one opaque module, and its micro-batches
are no inputs of the program. They lie beside it, and the program gives the module their numbers.

    input %9: i64 "micro_batch"     %10: f32 = call.python(%9, parameters, buffers) {module="(any batch)" part="forward"}

So nothing is said of a batch's structure, sizes, dtypes or layouts, which may be others on each rank. Forward runs once, with its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interlace.capture.loss import outputs_of

Tensor = torch.Tensor
ANY, NUMBER = "(any batch)", "micro_batch"


class AnyBatch(nn.Module):
    """`given`: the micro-batches of the step that runs. `outputs`: what the loss function gave for each, by name."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.given: list[Any] = []
        self.outputs: dict[int, dict[str, Tensor]] = {}

    def forward(self, numbers: dict[str, Tensor]) -> Tensor:
        i = int(numbers[NUMBER])
        named = outputs_of(self.loss_fn(self.model, self.given[i]))
        self.outputs[i] = {name: t.detach() for name, t in named.items()}
        return named["loss"].to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the loss that the program has: as wide as the parameters, float32 at least."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.model.parameters()) else torch.float32
