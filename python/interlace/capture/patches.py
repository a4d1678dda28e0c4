"""Attributes of modules, classes and objects that are others for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """`owner` with these attributes; at the end it has those of before, and none of its own where it inherits them."""
    before = {name: own for name, own in vars(owner).items() if name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
