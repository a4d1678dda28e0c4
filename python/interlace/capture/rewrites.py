"""Trained parameters that the forward itself writes before it uses them: `self.weight.data *= self.mask`, a norm, max_norm of an embedding.

What is written must be computed from the model's tensors as a step finds them (and on one rank from its batch), in operators that draw no
random numbers. The program is that of parameters that nobody writes, whose values are the written ones:

    %6 = aten.mul.Tensor(%0, %2)              gone
    %7 = aten.mm.default(%3, %6)          →   %7 = aten.mm.default(%3, %0)

A line `meta rewrites` of the text says what is written, and how it is computed, as ways.py says what is read; whoever runs the program does
that first (train/rewriting.py).

    {"weight": [["buffer", "weight"], ["buffer", "mask"], ["aten.mul.Tensor", [{"v": 0}, {"v": 1}], {}, 0]]}

Where the model is called twice, it is written twice, and the first time must give what the second one gives: a name with "@" says so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from interlace.capture.constants import Constants, NotConstant, _is_whole
from interlace.capture.ways import const_of, operator
from interlace.errors import CaptureError

Tensor = torch.Tensor
_LINE = re.compile(r"  (?:([%_].*?) = )?([\w.]+)(\(.*)")


class Written(CaptureError):
    """Trained parameters that the model writes while it runs; another trace may find out how."""


class Rewrites(Constants):
    """Of a trace: what is computed from its tensors, whatever becomes of them later."""

    def __init__(self, size_of: Any) -> None:
        super().__init__(size_of)
        self._ops: dict[int, Any] = {}  # by the tensor's id: operator, arguments with such in the place of tensors, names, result
        self._there: dict[int, list[Tensor]] = {}  # that are known, by storage
        self._whole: dict[int, Tensor] = {}  # the model's tensors, by storage
        self._own: set[int] = set()  # their ids
        self.writes = 0

    def set_tensor(self, fake: Tensor, name: str) -> None:
        self._whole[fake.untyped_storage()._cdata] = fake
        self._own.add(id(fake))
        self._know(fake, ["buffer", name])

    def set_input(self, fake: Tensor, number: int) -> None:
        super().set_input(fake, number)
        self._know(fake, ["input", number])

    def set_value(self, fake: Tensor, real: Tensor) -> None:
        super().set_value(fake, real)
        with contextlib.suppress(NotConstant):
            self._know(fake, const_of(real))

    def note(self, func: OpOverload, args: tuple, kwargs: dict, results: list[Tensor | None]) -> None:
        super().note(func, args, kwargs, results)
        with contextlib.suppress(NotConstant):
            op = operator(func, args, kwargs, lambda t: (self._found(t),))
            for i, r in enumerate(results):
                if r is not None:
                    self._know(r, [*op, i])

    def whole(self, view: Tensor, of: Tensor) -> None:
        super().whole(view, of)
        fake = self._whole.get(of.untyped_storage()._cdata)
        if fake is not None and id(fake) in self._ops:
            self._know(view, self._ops[id(fake)])

    def written(self, t: Tensor, new: Tensor) -> None:
        key, op = t.untyped_storage()._cdata, self._ops.get(id(new))
        super().written(t, new)
        self.writes += 1
        if op is not None and key in self._whole:
            self._know(self._whole[key], op)
        elif op is not None and _is_whole(t) and (t.shape, t.dtype) == (new.shape, new.dtype):  # `made[:, rows] = self.weight`
            self._know(t, op)

    def forget(self, t: Tensor) -> None:
        super().forget(t)
        for other in self._there.pop(t.untyped_storage()._cdata, ()):
            self._ops.pop(id(other), None)

    def computed(self, t: Tensor) -> list[Any]:
        """How a tensor of the model's is computed, as ways are. Raises NotConstant."""
        ops: list[Any] = []
        done: dict[int, int] = {}

        def put(op: Any) -> int:
            if id(op) not in done:
                words = op if op[0] in ("buffer", "input", "const") else [op[0], word(op[1]), word(op[2]), op[3]]
                ops.append(words)
                done[id(op)] = len(ops) - 1
            return done[id(op)]

        def word(a: Any) -> Any:
            if isinstance(a, tuple):
                return {"v": put(a[0])}
            if isinstance(a, dict):
                return {k: word(x) for k, x in a.items()}
            return [word(x) for x in a] if isinstance(a, list) else a

        put(self._found(t))
        return ops

    def leave_out(
        self, lines: list[str], last: dict[int, int], like: Sequence[tuple[str, Tensor, int]], there: dict[int, Tensor]
    ) -> dict[str, list[Any]]:  # fmt: skip
        """Takes the writes of the parameters `like` (names, fakes, values) out of the ops; gives what is to be compared with what they write.
        `last`: their last values; `there`: the tensors that have values. Raises NotConstant."""
        compared: dict[str, list[Any]] = {}

        def same(n: int, name: str) -> int | None:
            """The parameter that a value may have been, for an operator that reads it."""
            t = there.get(n)
            if t is None or id(t) in self._own or id(t) not in self._ops:
                return None
            ops = self.computed(t)
            if ops[-1][0] == "aten.embedding_renorm" and name not in ("aten.embedding", "view"):
                return None
            for own, fake, value in like:
                if ["buffer", own] in ops and (t.shape, t.stride(), t.dtype) == (fake.shape, fake.stride(), fake.dtype):
                    compared[f"{own}@{len(compared)}"] = ops
                    return value
            return None

        lines[:] = _without(lines, last, same)
        return compared

    def _know(self, t: Tensor, op: Any) -> None:
        self._ops[id(t)] = op
        self._there.setdefault(t.untyped_storage()._cdata, []).append(t)

    def _found(self, t: Tensor) -> Any:
        key = t.untyped_storage()._cdata
        if id(t) in self._own and self._whole.get(key) is not t:  # t.data = ...
            same = (x for x in self._there.get(key, ()) if (x.shape, x.stride(), x.dtype) == (t.shape, t.stride(), t.dtype))
            t = next(same, t) if key not in self._whole else t
            return _unknown() if id(t) in self._own else self._ops[id(t)]
        fake = self._whole.get(key)
        if id(t) not in self._ops and fake is not None and t.storage_offset() == 0 and (t.shape, t.stride()) == (fake.shape, fake.stride()):
            t = fake if t.dtype == fake.dtype else t
        return self._ops[id(t)] if id(t) in self._ops else _unknown()


def _unknown() -> Any:
    raise NotConstant


def _without(lines: list[str], last: dict[int, int], same: Callable[[int, str], int | None]) -> list[str]:
    """The ops without those that compute the `last` values of parameters, which they read instead of these. `same`: the parameter whose last
    value another one is, for an operator. Raises NotConstant: they read what was there before, or something between, too."""
    parts, shown = [], dict[int, int]()
    for line in lines:
        found = _LINE.fullmatch(line)
        assert found is not None, line
        left, name, right = found[1] or "", found[2], found[3]
        made = {int(n) for n in re.findall(r"%(\d+):", left)}
        read = {int(n) for n in re.findall(r"%(\d+)\b", right)} | {int(n) for n in re.findall(r" in %(\d+)\+", left)}
        parts.append((made, set() if name == "grad" else read, name))
        if name == "view":
            shown |= dict.fromkeys(made, min(read))
    wanted, inside = set(last), set[int]()
    for i in reversed(range(len(lines))):
        if parts[i][0] & wanted:
            wanted |= parts[i][1]
            inside.add(i)
    first = frozenset(last.values())
    before = set(first)  # what depends on the parameters as they were
    for i in sorted(inside):
        if parts[i][1] & before:
            before |= parts[i][0]
    kept = []
    for i, (made, read, name) in enumerate(parts):
        if i in inside and made & (before | set(last)):
            continue
        for n in read & (before - set(last)):
            if n in first or shown.get(n) in first or (parameter := same(shown.get(n, n), name)) is None:
                raise NotConstant
            last[n] = parameter
        kept.append(re.sub(r"%(\d+)\b", lambda m: f"%{last.get(int(m[1]), m[1])}", lines[i]))
    return kept


def rewrites_of(program: Any) -> dict[str, list[Any]]:
    """Of a parsed program: how parameters are computed, by their names."""
    return json.loads(program.meta().get("rewrites", "{}"))


def leaves_of(rewrites: dict[str, list[Any]], kind: str = "buffer") -> Collection[Any]:
    """Names of the model's tensors that are read ("buffer"), or numbers of inputs ("input")."""
    return {op[1] for ops in rewrites.values() for op in ops if op[0] == kind}
