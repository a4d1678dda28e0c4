"""What Python reads of the example batch and of small buffers while the model is traced, `if labels.max() >= 32:` say, or
`if self.initialized == 0:`: the way that the model takes.

The step is captured for what was read, and its text says so in a line `meta ways`: how it is computed from the inputs and buffers alone, and
what it was.

    [{"at": "net.py:12", "is": false, "ops": [["input", 1], ["aten.max", [{"v": 0}], {}, 0], ["aten.ge.Scalar", [{"v": 1}, 32], {}, 0]]}]

Lists of numbers and sizes that depend on the batch, of `labels[labels >= 0]` say, are read too: for sizes, the last operator has none in
place of the number of its result.
Before each step it is computed for the batch that comes and the buffers as they are; where that takes another way, the step is captured
again with it (train/follow.py), and a model that raises there raises. Only truth values and whole numbers are read, and numbers of buffers
only where the model leaves those as they are or gives them a constant (`if self.initialized.item() == 0:`): others would hardly ever come
again. What depends on parameters, on what a buffer holds once it was written, or on random numbers is no way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from interlace.capture.constants import SHAPE_ONLY, Constants, NotConstant
from interlace.capture.functional import omitted, op_name

Tensor = torch.Tensor
Way = dict[str, Any]
_MAX_CONST = 64  # elements of a constant in the text


class Counts(Exception):
    """At these places numbers are read of buffers that are others in each step: no ways."""

    def __init__(self, places: Collection[str]) -> None:
        self.places = places


class Ways:
    """Of one trace. `batch`: the example's tensors in the order of the inputs, None where nothing may be read. `undecided`: places
    ("net.py:12") that may not."""

    def __init__(self, constants: Constants, batch: Sequence[Tensor] | None, undecided: Collection[str]) -> None:
        self.constants, self.batch, self.undecided = constants, batch, undecided
        self.buffers: dict[str, Tensor] = {}  # that may be read, with what they hold
        self.numbers: set[tuple[str, Any]] = set()  # inputs and buffers that stand for numbers of Python's
        self.read: list[Way] = []
        self.counts: dict[str, str] = {}  # buffers of which numbers are read, and where

    def stands(self, fake: Tensor, kind: str, name: Any, real: Tensor | None = None) -> None:
        """For a number of Python's: an input, by its number, or the buffer `real`, by its name, if that does."""
        if real is not None and id(real) not in self.constants.numbers:
            return
        self.constants.numbers[id(fake)] = fake
        self.numbers.add((kind, name))
        if real is not None:
            self.constants.set_buffer(fake, name)
            self.buffers[name] = real

    def number(self, t: Tensor, place: str) -> Any:
        """What a tensor holds in the example batch, a number or a list, noted. Raises NotConstant."""
        if self.batch is None or t.dtype.is_floating_point or t.dtype.is_complex or t.numel() > _MAX_CONST:
            raise NotConstant
        ops: list[Any] = []
        self._write(t, ops, {})
        if t.dtype != torch.bool and any((op[0], op[1]) in self.numbers for op in ops if op[0] in ("input", "buffer")):
            raise NotConstant  # as a constant it would be read, and not looked at in each step
        way = self._note(ops, place)
        if t.dtype != torch.bool:
            self.counts |= {op[1]: place for op in ops if op[0] == "buffer"}
        return way["is"]

    def results(self, func: OpOverload, args: tuple, kwargs: dict, place: str) -> list[Tensor]:
        """What an operator gives in the example batch, its results' sizes noted. Raises NotConstant."""
        ops: list[Any] = []
        self._operator(func, args, kwargs, None, ops, {})
        self._note(ops, place)
        with no_dispatch():
            return computed(ops, self.batch or (), self.buffers.__getitem__)

    def _note(self, ops: list[Any], place: str) -> Way:
        if self.batch is None or any(x.is_meta for x in self.batch) or place in self.undecided:
            raise NotConstant
        with no_dispatch(), torch.no_grad():
            way = {"at": place, "is": value_of(ops, self.batch, self.buffers.__getitem__), "ops": ops}
        if way not in self.read:
            self.read.append(way)
        return way

    def _write(self, t: Tensor, ops: list[Any], known: dict[int, int]) -> int:
        """Appends what computes `t`; gives its number."""
        if id(t) in known:
            return known[id(t)]
        func, args, kwargs, index = self.constants.recipe(t)
        if func is not None:
            self._operator(func, args, kwargs, index, ops, known)
        elif kwargs:
            ops.append(list(*kwargs.items()))
        else:
            ops.append(const_of(args[0]))
        known[id(t)] = len(ops) - 1
        return known[id(t)]

    def _operator(self, func: OpOverload, args: tuple, kwargs: dict, index: int | None, ops: list[Any], known: dict[int, int]) -> None:
        def tensor(t: Tensor) -> Any:
            if func not in SHAPE_ONLY:
                return {"v": self._write(t, ops, known)}
            if not all(type(n) is int for n in t.shape):
                raise NotConstant
            ops.append(["const", _dtype(t), list(t.shape), None])
            return {"v": len(ops) - 1}

        ops.append([*operator(func, args, kwargs, tensor), index])


def operator(func: OpOverload, args: tuple, kwargs: dict, tensor: Callable[[Tensor], Any]) -> list[Any]:
    """The name, the arguments and the named ones, as JSON has them; `tensor`: what stands for one. Raises NotConstant."""

    def word(a: Any) -> Any:
        if isinstance(a, Tensor):
            return tensor(a)
        if isinstance(a, (list, tuple)):
            return [word(x) for x in a]
        if isinstance(a, torch.dtype):
            return {"dtype": _dtype(a)}
        if a is None or type(a) in (bool, int, float, str):
            return a
        raise NotConstant

    named = {k: word(a) for k, a in kwargs.items() if not omitted(k) and k != "memory_format"}
    return [op_name(func), [word(a) for a in args], named]


def const_of(real: Tensor) -> list[Any]:
    """Raises NotConstant."""
    if real.numel() > _MAX_CONST or real.is_complex():
        raise NotConstant
    with no_dispatch():
        return ["const", _dtype(real), list(real.shape), real.detach().cpu().reshape(-1).tolist()]


def _dtype(x: Tensor | torch.dtype) -> str:
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def buffer_of(model: nn.Module, name: str) -> Any:
    """A buffer or tensor attribute of a model or of a module in it."""
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def buffers_in(ways: list[Way]) -> set[str]:
    """The names of the buffers that are read."""
    return {op[1] for way in ways for op in way["ops"] if op[0] == "buffer"}


def value_of(ops: list[Any], inputs: Sequence[Tensor], buffer: Callable[[str], Tensor]) -> Any:
    """What is read, for other inputs and buffers: a number or several, or the sizes of results."""
    results = computed(ops, inputs, buffer)
    if ops[-1][-1] is None:
        return [list(r.shape) for r in results]
    return results[0].item() if results[0].numel() == 1 else results[0].tolist()


def computed(ops: list[Any], inputs: Sequence[Tensor], buffer: Callable[[str], Tensor]) -> list[Tensor]:
    """The result of the last operator, or all of them, on the CPU."""
    flat: list[Tensor] = []
    made: list[Tensor] = []

    def real(a: Any) -> Any:
        if isinstance(a, dict):
            return made[a["v"]] if "v" in a else getattr(torch, a["dtype"])
        return [real(x) for x in a] if isinstance(a, list) else a

    for name, *rest in ops:
        if name == "input":
            made.append(inputs[rest[0]].detach().cpu())
        elif name == "buffer":
            made.append(buffer(rest[0]).detach().cpu())
        elif name == "const":
            dtype, size, data = getattr(torch, rest[0]), rest[1], rest[2]
            made.append(torch.empty(size, dtype=dtype) if data is None else torch.tensor(data, dtype=dtype).reshape(size))
        else:
            space, op, *overload = name.split(".")
            func = getattr(getattr(getattr(torch.ops, space), op), overload[0] if overload else "default")
            out = func(*real(rest[0]), **{k: real(v) for k, v in rest[1].items()})
            flat = tree_leaves(out)
            made.append(flat[rest[2] or 0])
    return made[-1:] if ops[-1][-1] is not None else flat


def ways_of(program: Any) -> list[Way]:
    """Of a parsed program."""
    return json.loads(program.meta().get("ways", "[]"))


def other_way(
    ways: list[Way], micro_batches: Sequence[Sequence[Tensor]], buffer: Callable[[str], Tensor]
) -> tuple[int, list[Any]] | None:  # fmt: skip
    """The first of the ways that these inputs, with the buffers as they are, do not take, and what is read there in each micro-batch;
    None: they take them all."""
    for i, way in enumerate(ways):
        values = [value_of(way["ops"], inputs, buffer) for inputs in micro_batches]
        if any(v != way["is"] for v in values):
            return i, values
    return None
