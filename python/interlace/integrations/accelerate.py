"""Accelerate's ranks, devices, mixed precision and data loaders, with the training step compiled:

    accelerator = Accelerator(...)
    loader = accelerator.prepare(loader)
    trainer = setup(accelerator, model, optimizer, loss_fn, next(iter(loader)))     # instead of preparing the two
    for batch in loader:
        loss = trainer.step(batch)                                                  # instead of backward, step and zero_grad

With gradient_accumulation_steps=G a step takes a list of G batches (or one that can be cut into G).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn, optim

import interlace
from interlace.config import Config
from interlace.errors import InterlaceError
from interlace.integrations.fabric import _Cast

_PRECISION: dict[str, dict[str, Any]] = {
    "no": {}, "bf16": {"param_dtype": "autocast"}, "fp16": {"param_dtype": "autocast", "loss_scale": "dynamic"},
}  # fmt: skip


def setup(
    accelerator: Any, model: nn.Module, optimizer: optim.Optimizer, loss_fn: Callable[[nn.Module, Any], Any], example_batch: Any,
    config: Config | None = None,
) -> interlace.Trainer:  # fmt: skip
    """interlace.compile on the device, in the precision, with the accumulation and among the ranks that an Accelerator has.

    Error: FSDP, DeepSpeed or another plugin of its own for the model; a prepared model or optimizer; an unknown precision.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU"):
        raise InterlaceError(f"the Accelerator shards the model itself ({kind}); leave its plugin out, and say Config(strategy=...) instead")
    if type(optimizer).__name__ == "AcceleratedOptimizer" or model in accelerator._models:
        raise InterlaceError("pass setup() the model and the optimizer themselves, and accelerator.prepare() the data loaders alone")
    precision = str(accelerator.mixed_precision)
    if precision not in _PRECISION:
        raise InterlaceError(f"mixed_precision='{precision}' of the Accelerator is none of {', '.join(_PRECISION)}")
    if not any(p.is_meta for p in model.parameters()):
        model.to(accelerator.device)
    given = config or Config()
    count = int(accelerator.gradient_accumulation_steps)
    settings = dataclasses.replace(given, **_PRECISION[precision], accumulation=count if count > 1 else given.accumulation)
    mixed = precision != "no"
    return interlace.compile(model, optimizer, _Cast(accelerator.autocast, loss_fn) if mixed else loss_fn, example_batch, settings)
