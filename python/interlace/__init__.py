"""Interlace compiles the training step of an ordinary PyTorch model into one scheduled, distributed program.

trainer = interlace.compile(model, optimizer, loss_fn, example_batch, interlace.Config(strategy="shard"))
for batch in loader:
    loss = trainer.step(batch)
trainer.save("checkpoint")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlace.version import __version__

__all__ = ["CaptureError", "Config", "InterlaceError", "Trainer", "__version__", "compile"]

if TYPE_CHECKING:
    from interlace.config import Config
    from interlace.errors import CaptureError, InterlaceError
    from interlace.train.compile import compile
    from interlace.train.trainer import Trainer

_HOMES = {
    "compile": "interlace.train.compile", "Config": "interlace.config", "Trainer": "interlace.train.trainer",
    "InterlaceError": "interlace.errors", "CaptureError": "interlace.errors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `interlace opt --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'interlace' has no attribute '{name}'")
    import importlib

    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        if name in ("compile", "Trainer"):
            importlib.import_module("interlace._runtime")  # whether it loads is known before anything is compiled
    except ImportError as error:
        from interlace.errors import InterlaceError, what_to_install

        said = what_to_install(error)
        if said is None:
            raise
        raise InterlaceError(f"interlace.{name}: {said}") from error
    globals()[name] = value
    return value
