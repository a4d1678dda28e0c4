"""The exceptions of the Python front. Every message says what is wrong, where, and what to do about it."""

from __future__ import annotations


class InterlaceError(Exception):
    """Base of every error that Interlace raises on purpose."""


class CaptureError(InterlaceError):
    """The model, the loss function, the optimizer or the example batch cannot be turned into a program."""
