"""Accelerate's ranks, devices, mixed precision and data loaders, with the training step compiled:

    accelerator = Accelerator(...)
    loader = accelerator.prepare(loader)
    trainer = setup(accelerator, model, optimizer, loss_fn, next(iter(loader)))     # instead of preparing the two
    for batch in loader:
        loss = trainer.step(batch)                                                  # instead of backward, step and zero_grad

With gradient_accumulation_steps=G a step takes a list of G batches (or one that can be cut into G). accelerator.save_state(folder) and
load_state(folder) have the trainer's checkpoint among what they keep. Clipping is Config(clip_norm=...).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn, optim

import interlace
from interlace.config import Config
from interlace.errors import InterlaceError
from interlace.integrations.fabric import _Cast, refuse, refuse_backward

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
    trainer = interlace.compile(model, optimizer, _Cast(accelerator.autocast, loss_fn) if mixed else loss_fn, example_batch, settings)
    _keep(accelerator, trainer)
    refuse(accelerator, trainer, model, ("clip_grad_norm_", "clip_grad_value_"), "Config(clip_norm=...) of setup() has the step clip")
    way = "trainer.step() takes a list of gradient_accumulation_steps batches and makes one step of them"
    refuse(accelerator, trainer, model, ("accumulate",), way)
    refuse_backward(accelerator, trainer)
    return trainer


def _keep(accelerator: Any, trainer: interlace.Trainer) -> None:
    """save_state and load_state have the trainer's checkpoint, too; each trainer of an Accelerator a folder of its own."""
    name = f"interlace_{len(accelerator._save_model_state_pre_hook)}"
    mine = weakref.ref(trainer)

    def save(models: Any, weights: Any, folder: Any) -> None:
        if (trainer := mine()) is not None and trainer._run.closed is None:
            trainer.save(Path(folder) / name)

    def load(models: Any, folder: Any) -> None:
        if (trainer := mine()) is not None and trainer._run.closed is None:
            trainer.load(Path(folder) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
