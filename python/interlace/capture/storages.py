"""What the recorder knows of a fake tensor: the storage that it lives in, and the value of the program that it has."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class Storage:
    """The current root value of a fake storage, and the root's geometry. Holding the storage keeps its id from being used again, whatever
    its tensor is given (`t.data = ...`)."""

    __slots__ = ("dtype", "memory", "root", "size", "stride", "version")

    def __init__(self, root: int, t: Tensor) -> None:
        self.root, self.version, self.memory = root, 0, t.untyped_storage()
        self.dtype, self.size, self.stride = t.dtype, tuple(t.shape), t.stride()


class Entry:
    """A tensor seen so far. Holding the tensor keeps its id and its storage's id from being used again."""

    __slots__ = ("storage", "tensor", "value", "version")

    def __init__(self, value: int, storage: Storage, tensor: Tensor) -> None:
        self.value, self.storage, self.version, self.tensor = value, storage, storage.version, tensor
