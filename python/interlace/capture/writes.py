"""Parameters that a real run of the model writes: what they were before is kept, and put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.errors import CaptureError

Tensor = torch.Tensor


def written_by(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of an operator writes."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor))


class Writes(TorchDispatchMode):
    """Around the run. Copies nothing but what is written, just before an operator does so."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = {name: (t, t.detach()) for name, t in tensors.items() if not t.is_meta}
        self._names = {t.untyped_storage()._cdata: name for name, t in tensors.items() if not t.is_meta and t.numel()}
        self._before: dict[str, Tensor] = {}
        self.by: dict[str, set[str]] = {}  # operators, by the names of what they wrote

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for t in written_by(func, args, kwargs or {}):
            if t.layout == torch.strided:
                self._note(t, func._schema.name)
        return func(*args, **(kwargs or {}))

    def _note(self, t: Tensor, operator: str) -> None:
        name = self._names.get(t.untyped_storage()._cdata)
        if name is not None:
            if name not in self._before:
                self._before[name] = self._tensors[name][1].clone()
            self.by.setdefault(name, set()).add(operator)

    def note_others(self, before: Mapping[str, Tensor], model: nn.Module) -> None:
        """Parameters that other ones are in the places of."""
        for name, t in model.named_parameters():
            if before.get(name, t) is not t:
                self.by.setdefault(name, set()).add("assigned")

    def written(self) -> set[str]:
        """Names of what was written, or given other memory (`t.data = ...`)."""
        moved = {n for n, (t, alias) in self._tensors.items() if t.untyped_storage()._cdata != alias.untyped_storage()._cdata}
        return moved | self.by.keys()

    @torch.no_grad()
    def restore(self) -> None:
        """After the run: everything is as it was before, and `by` says what was not."""
        for name, (t, alias) in self._tensors.items():
            if t.untyped_storage()._cdata != alias.untyped_storage()._cdata:  # t.data = ...
                t.data = alias
                self.by.setdefault(name, set()).add("data")
            if name in self._before:
                alias.copy_(self._before[name])


class FrozenWritten(CaptureError):
    """Frozen parameters that the model writes while it runs; they can be captured as buffers (model_tensors.count_as_buffers)."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(said(min(names)))
        self.names = names


def refuse_writes(trains: Mapping[str, bool], by: Mapping[str, Collection[str]] | None = None) -> None:
    """Error: parameters were written that are none to be written. `trains`: whether they have gradients, by name; `by`: the operators."""
    for name, trainable in trains.items():
        # An embedding's max_norm: what is written once is written the same when backward runs forward again.
        again = by is not None and set(by[name]) == {"aten::embedding_renorm_"}
        if trainable and (not again or (dist.is_initialized() and dist.get_world_size() > 1)):
            raise CaptureError(said(name))
    frozen = [name for name, trainable in trains.items() if not trainable]
    if frozen:
        raise FrozenWritten(frozen)


def said(name: str) -> str:
    return (
        f"parameter '{name}' is changed in place while the model runs; compute from a copy instead (`self.weight * self.mask`), or change it "
        "between two steps (where only its first run does so, let it run once before interlace.compile), or take mode=\"eager\""
    )
