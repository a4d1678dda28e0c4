"""What Python reads of the example batch while the model is traced, `if labels.max() >= 32:` say: the way that the model takes.

The step is captured for what was read, and its text says so in a line `meta ways`: how it is computed from the inputs alone, and what it was.

    [{"at": "net.py:12", "is": false, "ops": [["input", 1], ["aten.max", [{"v": 0}], {}, 0], ["aten.ge.Scalar", [{"v": 1}, 32], {}, 0]]}]

Before each step it is computed for the batch that comes; where that takes another way, the step is captured again with it (train/follow.py),
and a model that raises there raises. Only truth values and whole numbers are read: others would hardly ever come again. What depends
on parameters, buffers or random numbers is no way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from interlace.capture.constants import SHAPE_ONLY, Constants, NotConstant
from interlace.capture.functional import omitted, op_name

Tensor = torch.Tensor
Way = dict[str, Any]
_MAX_CONST = 64  # elements of a constant in the text


class Ways:
    """Of one trace. `batch`: the example's tensors in the order of the inputs, None where nothing may be read. `undecided`: places
    ("net.py:12") that may not."""

    def __init__(self, constants: Constants, batch: Sequence[Tensor] | None, undecided: Collection[str]) -> None:
        self.constants, self.batch, self.undecided = constants, batch, undecided
        self.read: list[Way] = []

    def number(self, t: Tensor, place: str) -> Any:
        """What a one-element tensor holds in the example batch, noted. Raises NotConstant."""
        if self.batch is None or any(x.is_meta for x in self.batch) or place in self.undecided or t.dtype.is_floating_point or t.dtype.is_complex:
            raise NotConstant
        ops: list[Any] = []
        self._write(t, ops, {})
        with no_dispatch(), torch.no_grad():
            way = {"at": place, "is": value_of(ops, self.batch), "ops": ops}
        if way not in self.read:
            self.read.append(way)
        return way["is"]

    def _write(self, t: Tensor, ops: list[Any], known: dict[int, int]) -> int:
        """Appends what computes `t`; gives its number."""
        if id(t) in known:
            return known[id(t)]
        func, args, kwargs, index = self.constants.recipe(t)
        if func is None and kwargs:
            op = ["input", kwargs["input"]]
        elif func is None:
            if args[0].numel() > _MAX_CONST or args[0].is_complex():
                raise NotConstant
            with no_dispatch():
                op = ["const", _dtype(t), list(args[0].shape), args[0].detach().cpu().reshape(-1).tolist()]
        else:

            def word(a: Any) -> Any:
                if isinstance(a, Tensor):
                    if func in SHAPE_ONLY:
                        ops.append(["const", _dtype(a), [self._size(n) for n in a.shape], None])
                        return {"v": len(ops) - 1}
                    return {"v": self._write(a, ops, known)}
                if isinstance(a, (list, tuple)):
                    return [word(x) for x in a]
                if isinstance(a, torch.dtype):
                    return {"dtype": _dtype(a)}
                if a is None or type(a) in (bool, int, float, str):
                    return a
                raise NotConstant

            named = {k: word(a) for k, a in kwargs.items() if not omitted(k) and k != "memory_format"}
            op = [op_name(func), [word(a) for a in args], named, index]
        ops.append(op)
        known[id(t)] = len(ops) - 1
        return known[id(t)]

    @staticmethod
    def _size(n: Any) -> int:
        if type(n) is not int:
            raise NotConstant
        return n


def _dtype(x: Tensor | torch.dtype) -> str:
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def value_of(ops: list[Any], inputs: Sequence[Tensor]) -> Any:
    """What is read, for other inputs. It is computed on the CPU."""
    made: list[Tensor] = []

    def real(a: Any) -> Any:
        if isinstance(a, dict):
            return made[a["v"]] if "v" in a else getattr(torch, a["dtype"])
        return [real(x) for x in a] if isinstance(a, list) else a

    for name, *rest in ops:
        if name == "input":
            made.append(inputs[rest[0]].detach().cpu())
        elif name == "const":
            dtype, size, data = getattr(torch, rest[0]), rest[1], rest[2]
            made.append(torch.empty(size, dtype=dtype) if data is None else torch.tensor(data, dtype=dtype).reshape(size))
        else:
            space, op, *overload = name.split(".")
            func = getattr(getattr(getattr(torch.ops, space), op), overload[0] if overload else "default")
            out = func(*real(rest[0]), **{k: real(v) for k, v in rest[1].items()})
            flat: list[Tensor] = []
            for r in out if isinstance(out, (list, tuple)) else (out,):
                flat += r if isinstance(r, (list, tuple)) else [r]
            made.append(flat[rest[2]])
    return made[-1].item()


def ways_of(program: Any) -> list[Way]:
    """Of a parsed program."""
    return json.loads(program.meta().get("ways", "[]"))


def other_way(ways: list[Way], micro_batches: Sequence[Sequence[Tensor]]) -> tuple[int, list[Any]] | None:
    """The first of the ways that these inputs do not take, and what is read there in each micro-batch; None: they take them all."""
    for i, way in enumerate(ways):
        values = [value_of(way["ops"], inputs) for inputs in micro_batches]
        if any(v != way["is"] for v in values):
            return i, values
    return None
