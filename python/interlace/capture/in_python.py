"""The text of a training step that runs in Python as one opaque module, on batches of any form (any_batch.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interlace.capture.any_batch import ANY, NUMBER, AnyBatch
from interlace.capture.casts import Casts
from interlace.capture.groups import optimizer_groups
from interlace.capture.inputs import InputSpec
from interlace.capture.literals import quote
from interlace.capture.model_tensors import check_parameters, collect, device_type
from interlace.capture.opaque import any_call
from interlace.capture.program import Captured, captured, default_loss
from interlace.capture.trace import Trace
from interlace.capture.tracing import without_collection


def takes_any(program: str) -> bool:
    """Whether it is such a step's."""
    return f" module={quote(ANY)} " in program


def capture_any(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any] | None, why: str, *, optimizer: torch.optim.Optimizer, rng_mode: str,
    casts: Casts, opens: bool,
) -> Captured:  # fmt: skip
    """`why`: what cannot be captured. `opens`: the loss function opens its regions of torch.autocast itself. No parameter is looked into, so
    they may be on meta. Error: as capture() has them of a model and an optimizer."""
    begin = time.perf_counter()
    tensors = collect(model)
    check_parameters(tensors)
    groups = optimizer_groups(optimizer, tensors)
    device = device_type(t.real for t in tensors)
    region = torch.get_autocast_dtype(device) if casts.autocast and not opens else None
    calls = {ANY: [any_call(AnyBatch(model, loss_fn or default_loss), model, why, region)]}
    batch = {NUMBER: torch.tensor(0)}
    with without_collection():
        trace = Trace(model, tensors, InputSpec.of(batch), False, calls, casts)
        trace.run(loss_fn or default_loss, batch)
        trace.check()
        text = trace.text(groups, 1, rng_mode)
    return captured(trace, text, begin, [])
