"""Capture: an ordinary PyTorch model and loss function become program text (docs/ir.md)."""

from interlace.capture.casts import Casts
from interlace.capture.inputs import InputSpec, InputTensor
from interlace.capture.opaque import OpaqueCall, OpaqueTable
from interlace.capture.program import Captured, capture

__all__ = ["Captured", "Casts", "InputSpec", "InputTensor", "OpaqueCall", "OpaqueTable", "capture"]
