"""Lightning Fabric's ranks, devices, precision and data loaders, with the training step compiled:

    fabric = Fabric(...)
    loader = fabric.setup_dataloaders(loader)
    trainer = setup(fabric, model, optimizer, loss_fn, next(iter(loader)))     # instead of fabric.setup(model, optimizer)
    for batch in loader:
        loss = trainer.step(batch)                                             # instead of backward, step and zero_grad
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, optim

import interlace
from interlace.capture.released import user_line
from interlace.config import Config
from interlace.errors import InterlaceError

_PRECISION: dict[str, dict[str, Any]] = {
    "32-true": {}, "64-true": {}, "bf16-mixed": {"param_dtype": "autocast"}, "16-mixed": {"param_dtype": "autocast", "loss_scale": "dynamic"},
}  # fmt: skip


def setup(
    fabric: Any, model: nn.Module, optimizer: optim.Optimizer, loss_fn: Callable[[nn.Module, Any], Any], example_batch: Any,
    config: Config | None = None,
) -> interlace.Trainer:  # fmt: skip
    """interlace.compile on the device, in the precision and among the ranks that a Fabric has.

    With mixed precision the loss function runs under the Fabric's autocast. Error: the model or the optimizer was given to
    fabric.setup before; a precision that is not one of 32-true, 64-true, bf16-mixed, 16-mixed.
    """
    for what in (model, optimizer):
        if type(what).__name__ in ("_FabricModule", "_FabricOptimizer"):
            raise InterlaceError("pass setup() the model and the optimizer themselves: what fabric.setup gives back is wrapped already")
    precision = str(fabric._precision.precision)
    if precision not in _PRECISION:
        known = ", ".join(_PRECISION)
        raise InterlaceError(f"precision {precision} of the Fabric is none of {known}: use one of them, or Config(param_dtype=...)")
    if precision == "64-true":
        model.double()
    if not any(p.is_meta for p in model.parameters()):
        model.to(fabric.device)
    mixed = precision.endswith("mixed")
    settings = dataclasses.replace(config or Config(), **_PRECISION[precision])
    trainer = interlace.compile(model, optimizer, _Cast(fabric.autocast, loss_fn) if mixed else loss_fn, example_batch, settings)
    refuse(fabric, trainer, model, ("clip_gradients",), "Config(clip_norm=...) of setup() has the step clip")
    way = "Config(accumulation=G) of setup() has trainer.step() take a list of G batches and make one step of them"
    refuse(fabric, trainer, model, ("no_backward_sync",), way)
    refuse_backward(fabric, trainer)
    return trainer


def refuse_backward(loop: Any, trainer: interlace.Trainer) -> None:
    """`loop.backward(loss)` of what trainer.step() gave, which an old loop may still have: it has no graph."""
    own, mine = loop.backward, weakref.ref(trainer)

    def backward(loss: Any, *args: Any, **more: Any) -> Any:
        trainer = mine()
        if trainer is not None and trainer._run.closed is None and isinstance(loss, torch.Tensor) and not loss.requires_grad:
            raise InterlaceError(
                f"{user_line()}: {type(loop).__name__}.backward() of a loss without a graph, such as trainer.step(batch) gives: that made "
                "backward and the optimizer's step; delete this line, optimizer.step() and optimizer.zero_grad()"
            )
        return own(loss, *args, **more)

    loop.backward = backward


def refuse(loop: Any, trainer: interlace.Trainer, model: nn.Module, names: tuple[str, ...], way: str) -> None:
    """Methods of somebody's loop that would do nothing to this model, silently, as long as the trainer has it."""
    own, mine = {id(model), *map(id, model.parameters())}, weakref.ref(trainer)

    def refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            given = list(args[0]) if args and isinstance(args[0], (Iterator, list, tuple)) else list(args)
            trainer = mine()
            if trainer is not None and trainer._run.closed is None and any(id(x) in own for x in (*given, *more.values())):
                raise InterlaceError(f"{type(loop).__name__}.{name}() does nothing to a compiled model, which has no gradients; {way}")
            return method(given, *args[1:], **more) if args and isinstance(args[0], Iterator) else method(*args, **more)

        return call

    for name in names:
        setattr(loop, name, refusing(name, getattr(loop, name)))


class _Cast:
    """A loss function under somebody's autocast."""

    opens_autocast = True

    def __init__(self, autocast: Callable[[], Any], loss_fn: Callable[[nn.Module, Any], Any]) -> None:
        self.autocast, self.loss_fn = autocast, loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        with self.autocast():
            return self.loss_fn(model, batch)
