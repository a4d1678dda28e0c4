"""Structures of rank 0's calls for the other ranks: plain data, in containers and classes of data that a model's results are.

    text = pack((calls, names));  calls, names = unpack(text)

They come over the run's own store, never from a file. Even so nothing that could run code is made: only containers, dtypes, our own records
and classes of data (dict, tuple, dataclass) that this process has imported already.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from typing import Any

from interlace.errors import InterlaceError

_BUILTINS = {"dict", "list", "tuple", "set", "frozenset", "slice", "complex", "bytearray", "range"}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        if module == "builtins":
            allowed = name in _BUILTINS
        elif module == "torch" or module.startswith("torch."):
            # A dtype pickles as its name in torch.
            allowed = type(found).__name__ in ("dtype", "layout", "memory_format") or name in ("Size", "device")
        else:
            allowed = isinstance(found, type) and (issubclass(found, (dict, tuple)) or dataclasses.is_dataclass(found))
        if not allowed:
            raise InterlaceError(f"rank 0 sent a call with a value of {module}.{name}, which is no plain data")
        return found


def pack(x: Any) -> str:
    return pickle.dumps(x).hex()


def unpack(text: str) -> Any:
    """Error: a value that is no plain data, by its type."""
    return _Reader(io.BytesIO(bytes.fromhex(text))).load()
