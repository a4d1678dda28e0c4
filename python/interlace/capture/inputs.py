"""How a user's batch becomes the program's inputs.

A batch is any nesting of dicts (and dict-likes such as Hugging Face's BatchEncoding), lists, tuples, named tuples and
tensors. Its tensors become the inputs, in the order of the containers; every other leaf is a compile-time constant.

    spec = InputSpec.of({"input_ids": ids, "labels": labels, "scale": 2.0})
    spec.flatten(batch)   # [ids, labels]; error when a name, dtype, size or constant differs from the example
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from interlace.errors import CaptureError

Path = tuple[Any, ...]  # keys and positions from the batch down to a leaf


def path_name(path: Path) -> str:
    """ "input_ids", "0", "images.left": the name of an input."""
    return ".".join(str(p) for p in path) or "batch"


def family(path: Path) -> str:
    """The name without positions: what lists hold belongs together."""
    return ".".join(str(p) for p in path if type(p) is not int)


def _children(x: Any, objects: bool = True) -> list[tuple[Any, Any]] | None:
    """(key, child) pairs of a container, or None for a leaf. `objects`: those with tensors as attributes are containers."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):  # Hugging Face's results are mappings too, without their None fields
        return [(f.name, getattr(x, f.name)) for f in dataclasses.fields(x)]
    if isinstance(x, Mapping):
        return list(x.items())
    if isinstance(x, (list, tuple)):
        return list(enumerate(x))
    return list(vars(x).items()) if objects and _holds(x) else None


def _holds(x: Any, depth: int = 2) -> bool:
    """Whether an object of a plain class has tensors as attributes, or in dicts and objects that are some (torch_geometric's graphs)."""
    if isinstance(x, (torch.Tensor, torch.nn.Module, type)) or type(getattr(x, "__dict__", None)) is not dict:
        return False
    values = [item for v in vars(x).values() for item in (v.values() if type(v) is dict else (v,))]
    return any(isinstance(v, torch.Tensor) or (depth > 0 and _holds(v, depth - 1)) for v in values)


def leaves(batch: Any, path: Path = (), objects: bool = True) -> list[tuple[Path, Any]]:
    """All leaves with their paths, in container order."""
    children = _children(batch, objects)
    if children is None:
        return [(path, batch)]
    out: list[tuple[Path, Any]] = []
    for key, child in children:
        out += leaves(child, (*path, key), objects)
    return out


def rebuild(batch: Any, replacement: Mapping[Path, Any], path: Path = ()) -> Any:
    """A copy of the batch's containers, with what is at the given paths replaced."""
    children = _children(batch) if path not in replacement else None
    if children is None:
        return replacement.get(path, batch)
    new = [(key, rebuild(child, replacement, (*path, key))) for key, child in children]
    if type(batch) in (dict, list, tuple):
        return dict(new) if type(batch) is dict else type(batch)(v for _, v in new)
    if isinstance(batch, torch.nn.utils.rnn.PackedSequence) and isinstance(new[1][1], torch.Tensor):
        new[1] = 1, new[1][1].cpu()  # its lengths lie in the host's memory, wherever the rest does
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named one
        return type(batch)(*(v for _, v in new))
    if dataclasses.is_dataclass(batch) and isinstance(batch, Mapping):  # it keeps its fields as items too
        return dataclasses.replace(batch, **dict(new))
    if dataclasses.is_dataclass(batch) or not isinstance(batch, (Mapping, list, tuple)):
        same = copy.copy(batch)  # no fields are computed anew
        for key, value in new:
            object.__setattr__(same, key, value)
        return same
    if isinstance(batch, Mapping):
        return type(batch)(dict(new))  # type: ignore[call-arg]
    return type(batch)(v for _, v in new)


def numbers_in(spec: InputSpec) -> dict[Path, int | float]:
    """The numbers beside the tensors that the program depends on."""
    return {path: x for path, x in spec.fixed() if type(x) in (int, float)}


def wider(x: int | float, y: int | float) -> torch.dtype:
    """What a tensor in the place of these numbers has."""
    return torch.float64 if float in (type(x), type(y)) else torch.int64


def differing(everyone: Sequence[Mapping[str, Any]], paths: Iterable[Path]) -> dict[Path, torch.dtype]:
    """The numbers beside the tensors that are not the same on all ranks, by their names on each, and what stands for them."""
    found = {path: [numbers[path_name(path)] for numbers in everyone] for path in paths}
    return {path: wider(xs[0], next((x for x in xs if type(x) is float), 0)) for path, xs in found.items() if len(set(map(repr, xs))) > 1}


def no_input(path: Path, error: CaptureError) -> str:
    return (
        f"batch entry '{path_name(path)}', beside the tensors, is another number on other ranks, and no tensor can stand for it ({error}); "
        "give it to the step as a tensor, or give all ranks the same"
    )


def with_numbers(micro_batch: Any, dtypes: Mapping[Path, torch.dtype]) -> Any:
    """A copy with tensors in the place of the numbers at these paths, for a program of which they are inputs."""
    found: dict[Path, torch.Tensor] = {}
    for path, x in leaves(micro_batch) if dtypes else ():
        dtype = dtypes.get(path)
        if type(x) is int or (type(x) is float and dtype is not None and dtype.is_floating_point):
            found |= {} if dtype is None else {path: torch.tensor(x, dtype=dtype)}
    for t in found.values():
        t.of_number = True  # type: ignore[attr-defined]
    return rebuild(micro_batch, found) if found else micro_batch


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch as PyTorch's own loop would have it: with its tensors on `device`, but those in the host's memory where some lie there
    already (lengths of sequences that are packed, say). The same object when nothing has to move."""
    tensors = [(path, x) for path, x in leaves(batch) if isinstance(x, torch.Tensor)]
    there = {path for path, x in tensors if x.device.type == device.type and device.index in (None, x.device.index)}
    moved = {p: x.to(device, non_blocking=True) for p, x in tensors if p not in there and not (there and x.device.type == "cpu")}
    return rebuild(batch, moved) if moved else batch


def of_rows(micro_batch: Any, rows: int, wanted: int) -> Any:
    """A micro-batch of so many samples with as many as are wanted: its own, repeated or left out. For its shapes."""
    resized = {
        path: x.repeat(-(-wanted // rows), *[1] * (x.dim() - 1))[:wanted]
        for path, x in leaves(micro_batch)
        if isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == rows
    }
    return rebuild(micro_batch, resized)


@dataclasses.dataclass(frozen=True)
class InputTensor:
    """One tensor of the batch. A size is an int, or the name of a symbol ("b", "s")."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    number: bool = False  # a number of the batch, which with_numbers has made a tensor

    def describe(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """The tensors of a micro-batch in input order, and the constants that were compiled in. `free`: families of those that nobody reads."""

    tensors: tuple[InputTensor, ...]
    constants: tuple[tuple[Path, Any], ...]
    free: frozenset[str] = frozenset()

    def numbers(self) -> dict[Path, torch.dtype]:
        """Those of the batch's numbers that are inputs."""
        return {t.path: t.dtype for t in self.tensors if t.number}

    def fixed(self) -> list[tuple[Path, Any]]:
        """The constants that the program depends on."""
        return [(path, x) for path, x in self.constants if family(path) not in self.free] if self.free else list(self.constants)

    @staticmethod
    def of(batch: Any) -> InputSpec:
        tensors, constants = [], []
        for path, leaf in leaves(batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.layout != torch.strided or leaf.is_nested:
                    kind = "nested" if leaf.is_nested else str(leaf.layout)
                    dense = "torch.nested.to_padded_tensor(t, 0.0)" if leaf.is_nested else ".to_dense()"
                    raise CaptureError(
                        f"batch entry '{path_name(path)}' is a {kind} tensor; pass a dense one ({dense}), or fullgraph=False to run "
                        "such steps in Python"
                    )
                number = hasattr(leaf, "of_number")
                tensors.append(InputTensor(path_name(path), path, leaf.dtype, tuple(leaf.shape), number))
            elif type(leaf).__module__ == "numpy" and hasattr(leaf, "shape"):
                raise CaptureError(f"batch entry '{path_name(path)}' is a NumPy array; pass a tensor (torch.from_numpy)")
            else:
                constants.append((path, leaf))
        names = [t.name for t in tensors]
        for name in names:
            if names.count(name) > 1:
                raise CaptureError(f"two entries of the batch are both called '{name}'; rename one of the keys")
        if not tensors:
            raise CaptureError(
                f"the example batch, a {type(batch).__name__}, holds no tensor in dicts, lists, tuples, dataclasses or attributes; pass a "
                "batch as the training loop would"
            )
        return InputSpec(tuple(tensors), tuple(constants))

    def with_shapes(self, shapes: list[tuple[int | str, ...]]) -> InputSpec:
        new = tuple(dataclasses.replace(t, shape=s) for t, s in zip(self.tensors, shapes, strict=True))
        return InputSpec(new, self.constants, self.free)

    def flatten(self, batch: Any, binding: Mapping[str, int] | None = None) -> list[torch.Tensor]:
        """The tensors of a micro-batch in input order.

        `binding` fixes the symbols' sizes; without it a symbol takes the first size met and must keep it within the
        batch. Errors: an entry is missing or new, or its dtype, a size or a constant differs from the example batch.
        """
        found = dict(leaves(batch))
        bound = dict(binding or {})
        out = []
        for t in self.tensors:
            if t.path not in found:
                raise CaptureError(f"batch entry '{t.name}' is missing; the program was compiled for {self._names()}")
            x = found.pop(t.path)
            if not isinstance(x, torch.Tensor):
                raise CaptureError(f"batch entry '{t.name}' is a {type(x).__name__}; compiled for a tensor {t.describe()}")
            if x.dtype != t.dtype or not self._fits(tuple(x.shape), t.shape, bound):
                got = InputTensor(t.name, t.path, x.dtype, tuple(x.shape)).describe()
                advice = "pass batches like the example batch, or compile again"
                if x.dtype == t.dtype and x.dim() == len(t.shape) and x.dim() > 0:
                    advice = (
                        "leave a smaller last batch out (DataLoader(drop_last=True)), or say with Config(pad={...}) what fills each entry "
                        "up that varies"
                    )
                raise CaptureError(f"batch entry '{t.name}' is {got}, but the program was compiled for {t.describe()}; {advice}")
            out.append(x)
        for path, value in self.fixed():
            if path not in found:
                raise CaptureError(f"batch entry '{path_name(path)}' is missing; it was {value!r} when compiled")
            got = found.pop(path)
            if got is not value and (type(got) is not type(value) or got != value):
                now = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
                raise CaptureError(
                    f"batch entry '{path_name(path)}' was the constant {value!r} when compiled and is {now} now; "
                    + ('leave it out of what the step gets, or take mode="eager",' if isinstance(got, str) else "make it a tensor")
                    + " if it changes, or compile again"
                )
        found = {path: x for path, x in found.items() if isinstance(x, torch.Tensor) or family(path) not in self.free} if self.free else found
        if found:
            name = path_name(next(iter(found)))
            raise CaptureError(f"batch entry '{name}' is new; the program was compiled for {self._names()}")
        return out

    def split(self, batch: Any, parts: int) -> list[Any]:
        """A batch cut into equal micro-batches along dimension 0; tensors of another first size go to all of them
        whole."""
        if parts == 1:
            return [batch]
        found = leaves(batch)
        sizes = [x.shape[0] for _, x in found if isinstance(x, torch.Tensor) and x.dim() > 0]
        if not sizes:
            raise CaptureError(f"a batch without a batch dimension cannot be cut into {parts} micro-batches")
        size = sizes[0]
        if size % parts:
            raise CaptureError(f"a batch of {size} cannot be cut into {parts} equal micro-batches; use a batch size divisible by {parts}")
        step = size // parts
        out = []
        for i in range(parts):
            cut = {
                path: x[i * step : (i + 1) * step]
                for path, x in found
                if isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == size
            }
            out.append(rebuild(batch, cut))
        return out

    def _names(self) -> str:
        return ", ".join(f"'{t.name}'" for t in self.tensors)

    @staticmethod
    def _fits(shape: tuple[int, ...], want: tuple[int | str, ...], bound: dict[str, int]) -> bool:
        if len(shape) != len(want):
            return False
        return all((bound.setdefault(w, n) if isinstance(w, str) else w) == n for n, w in zip(shape, want, strict=True))
