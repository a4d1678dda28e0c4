"""Capture: an ordinary PyTorch model and loss function become program text (docs/ir.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Captured", "Casts", "InputSpec", "InputTensor", "OpaqueCall", "OpaqueTable", "capture"]

if TYPE_CHECKING:
    from interlace.capture.casts import Casts
    from interlace.capture.inputs import InputSpec, InputTensor
    from interlace.capture.opaque import OpaqueCall
    from interlace.capture.opaque_run import OpaqueTable
    from interlace.capture.program import Captured, capture

_HOMES = {
    "Captured": "program", "Casts": "casts", "InputSpec": "inputs", "InputTensor": "inputs",
    "OpaqueCall": "opaque", "OpaqueTable": "opaque_run", "capture": "program",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are imported when first used: what only reads checkpoints must not wait for the tracer (torch._dynamo, sympy)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'interlace.capture' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(f"interlace.capture.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
