"""Tensors whose values do not depend on the inputs, the parameters or the buffers: torch.arange(16), a mask made of
it, ...

Their values are known while the model is traced, so reading them (`if`, .item()) is no branch on data. Hugging Face
models ask in this way whether default position ids are those of one sequence. Nothing is computed until somebody
reads; then the recipe is run, for symbolic sizes at two sets of example sizes, which must agree.

Recipes of what depends on the inputs and small buffers too, and on nothing else, are kept beside them: see ways.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from interlace.errors import CaptureError

aten = torch.ops.aten
Tensor = torch.Tensor

_MAX_ELEMENTS = 1 << 22  # of one intermediate value
_MAX_CHANGES = 64  # of one storage, whose recipes lie in one another
# Results that depend on the sizes of their first argument only.
SHAPE_ONLY = frozenset(
    {
        aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.ones_like.default,
        aten.zeros_like.default, aten.full_like.default,
    }
)  # fmt: skip
_COMPARED = frozenset({"lt", "le", "gt", "ge"})
_UNKNOWN = frozenset({aten.empty.memory_format, aten.empty_strided.default})


def _is_whole(t: Tensor) -> bool:
    return t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()


class NotConstant(Exception):
    """The value depends on data, on the example sizes, or is too big to be worked out while tracing."""


class Constants:
    def __init__(self, size_of: Callable[[torch.SymInt, int], int]) -> None:
        # size_of(size, i): a symbolic size in example i, 0 or 1.
        self._size_of = size_of
        self._recipes: dict[int, tuple[OpOverload | None, tuple, dict, int]] = {}
        self._by_storage: dict[int, list[Tensor]] = {}
        self._of_inputs: set[int] = set()  # those of the recipes that depend on inputs
        self._uniform: dict[int, int] = {}  # storages of numbers that torch.rand has drawn
        self.numbers: dict[int, Tensor] = {}  # what stands for a number of Python's, and what is computed of such alone, by id
        self._bases: dict[int, Tensor] = {}  # those that show all of it, by storage
        self._changes: dict[int, int] = {}  # how often storages were written
        self._old: list[Tensor] = []  # stand for what tensors held before they were written
        self.writes = 0  # counted by rewrites.py alone
        self.copies: set[int] = set()  # storages of what eager PyTorch has views of
        self._complex: dict[tuple[complex, torch.dtype], Tensor] = {}

    def complex_number(self, number: complex, beside: tuple[torch.dtype, ...]) -> Tensor:
        """A number that the text has no literal for, as precise as what it is computed with."""
        dtype = torch.complex128 if not beside or {torch.float64, torch.complex128}.intersection(beside) else torch.complex64
        with _disable_current_modes():
            return self._complex.setdefault((number, dtype), torch.tensor(number, dtype=dtype))

    def knows(self, t: Tensor) -> bool:
        return id(t) in self._recipes and id(t) not in self._of_inputs

    def recipe(self, t: Tensor) -> tuple[OpOverload | None, tuple, dict, int]:
        """Operator, arguments and the number of the result; no operator for a value (the argument), an input (its number under "input") or
        a buffer (its name under "buffer"). Raises NotConstant."""
        if id(t) not in self._recipes:
            raise NotConstant
        return self._recipes[id(t)]

    def set_input(self, fake: Tensor, number: int) -> None:
        self._add(fake, (None, (), {"input": number}, 0), True)

    def set_buffer(self, fake: Tensor, name: str) -> None:
        self._add(fake, (None, (), {"buffer": name}, 0), True)

    def set_value(self, fake: Tensor, real: Tensor) -> None:
        self._add(fake, (None, (real,), {}, 0), False)

    def drawn(self, func: OpOverload, t: Tensor | None) -> None:
        """Called for every op that draws. The caller keeps the result alive."""
        if func is aten.rand.default and t is not None and t.dtype in (torch.float32, torch.float64) and t.numel() == 1:
            self._uniform[id(t)] = t.untyped_storage()._cdata

    def _sure(self, func: OpOverload, args: tuple) -> bool | None:
        """`torch.rand(1) > 0.0` and `torch.rand(1) < 1.0`, as layers have them whose dropout is turned off, are true whatever is drawn; that
        0 itself is drawn, once in 2^24, is left out."""
        name = func._schema.name.removeprefix("aten::")
        if name not in _COMPARED or id(args[0]) not in self._uniform or type(args[1]) not in (int, float) or 0 < args[1] < 1:
            return None
        return (args[1] <= 0) == (name in ("gt", "ge"))

    def note(self, func: OpOverload, args: tuple, kwargs: dict, results: list[Tensor | None]) -> None:
        """Called for every op that mutates nothing and draws no random numbers. The caller keeps the results alive."""
        if self._uniform and (t := results[0]) is not None:
            if func is aten.detach.default and id(args[0]) in self._uniform:
                self._uniform[id(t)] = t.untyped_storage()._cdata
            if (sure := self._sure(func, args)) is not None:
                with _disable_current_modes():
                    return self.set_value(t, torch.full(tuple(t.shape), sure))
        if func in _UNKNOWN or (func not in SHAPE_ONLY and not self._all_known(args)) or not self._all_known(kwargs.values()):
            return
        of_inputs = func not in SHAPE_ONLY and (self._any_of_inputs(args) or self._any_of_inputs(kwargs.values()))
        for i, r in enumerate(results):
            if r is not None:
                self._add(r, (func, args, kwargs, i), of_inputs)

    def whole(self, view: Tensor, of: Tensor) -> None:
        """`view` shows all of the storage of `of`."""
        base = self._bases.get(of.untyped_storage()._cdata)
        if base is not None and id(base) in self._recipes and (base.shape, base.dtype) == (view.shape, view.dtype):
            self._add(view, self._recipes[id(base)], id(base) in self._of_inputs)

    def written(self, t: Tensor, new: Tensor) -> None:
        """The storage of `t` has what `new` holds."""
        key = t.untyped_storage()._cdata
        if key in self.copies:
            raise CaptureError("what x[i] gives is written in place, where i is a tensor whose value a step computes; write x[i] = ...")
        base = t if _is_whole(t) else self._bases.get(key, t)
        made, of_inputs = self._recipes.get(id(new)), id(new) in self._of_inputs
        shown = [(x, self._recipes[id(x)], id(x) in self._of_inputs) for x in self._by_storage.get(key, ()) if id(x) in self._recipes]
        self.forget(t)
        self._changes[key] = self._changes.get(key, 0) + 1
        known = made is not None and _is_whole(base) and (base.shape, base.dtype) == (new.shape, new.dtype)
        if not known or self._changes[key] > _MAX_CHANGES or any(isinstance(n, torch.SymInt) for x, *_ in shown for n in x.shape):
            return
        with _disable_current_modes():  # `y[mask] = -100`: what was computed of y, and of what shows a part of it, goes on with what it was
            old = {id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x, *_ in shown}

        def swap(a: Any) -> Any:
            return old.get(id(a), a) if isinstance(a, Tensor) else type(a)(map(swap, a)) if type(a) in (list, tuple) else a

        for x, recipe, inputs in shown:
            self._add(old[id(x)], recipe, inputs)
            self._old.append(old[id(x)])
        for at, (func, args, kwargs, index) in list(self._recipes.items()) if shown else ():
            self._recipes[at] = func, swap(args), {k: swap(v) for k, v in kwargs.items()}, index
        func, args, kwargs, index = made  # type: ignore[misc]
        for x in (base, *(x for x, *_ in shown if x is not base and _is_whole(x) and (x.shape, x.dtype) == (base.shape, base.dtype))):
            self._add(x, (func, swap(args), {k: swap(v) for k, v in kwargs.items()}, index), of_inputs)
        self._bases[key] = base

    def forget(self, t: Tensor) -> None:
        """The storage of `t` was written."""
        self._uniform = {key: storage for key, storage in self._uniform.items() if storage != t.untyped_storage()._cdata}
        for x in self._by_storage.pop(t.untyped_storage()._cdata, ()):
            self._recipes.pop(id(x), None)
            self._of_inputs.discard(id(x))

    def number(self, t: Tensor) -> Any:
        """The Python number that a one-element tensor holds. Raises NotConstant."""
        return self.array(t).item()

    def array(self, t: Tensor) -> Tensor:
        """What a tensor of any known size holds, whatever symbolic sizes are. Raises NotConstant."""
        if not self.knows(t):
            raise NotConstant
        first, second = (self._evaluate(t, i, {}) for i in (0, 1))
        if not torch.equal(first, second):
            raise NotConstant
        return first.clone()

    def value(self, t: Tensor) -> Tensor:
        """What a tensor of known sizes holds. Raises NotConstant."""
        if not self.knows(t) or any(isinstance(n, torch.SymInt) for n in t.shape):
            raise NotConstant
        return self._evaluate(t, 0, {})

    def _add(self, t: Tensor, recipe: tuple[OpOverload | None, tuple, dict, int], of_inputs: bool) -> None:
        self._recipes[id(t)] = recipe
        if t.untyped_storage()._cdata not in self._bases and t.device.type != "meta" and _is_whole(t):
            self._bases[t.untyped_storage()._cdata] = t
        if of_inputs:
            self._of_inputs.add(id(t))
        self._by_storage.setdefault(t.untyped_storage()._cdata, []).append(t)

    def _all_known(self, args: Any) -> bool:
        for a in args:
            if isinstance(a, Tensor):
                if id(a) not in self._recipes:
                    return False
            elif isinstance(a, (list, tuple)) and not self._all_known(a):
                return False
        return True

    def _any_of_inputs(self, args: Any) -> bool:
        return bool(self._of_inputs) and any(
            id(a) in self._of_inputs if isinstance(a, Tensor) else isinstance(a, (list, tuple)) and self._any_of_inputs(a) for a in args
        )

    def _evaluate(self, t: Tensor, example: int, done: dict[int, Tensor]) -> Tensor:
        if id(t) in done:
            return done[id(t)]
        func, args, kwargs, index = self._recipes[id(t)]
        if func is None:
            return args[0]
        shape = [self._size(n, example) for n in t.shape]
        if torch.Size(shape).numel() > _MAX_ELEMENTS:
            raise NotConstant
        made: set[int] = set()
        if func in SHAPE_ONLY and not self.knows(args[0]):
            args = (torch.empty([self._size(n, example) for n in args[0].shape], dtype=args[0].dtype), *args[1:])
            made.add(id(args[0]))

        def real(a: Any) -> Any:
            if isinstance(a, Tensor):
                if not self.knows(a) and id(a) not in made:  # it was written since
                    raise NotConstant
                return self._evaluate(a, example, done) if self.knows(a) else a
            if isinstance(a, (list, tuple)):
                return [real(x) for x in a]
            return self._size(a, example) if isinstance(a, torch.SymInt) else a

        out = func(*[real(a) for a in args], **{k: real(v) for k, v in kwargs.items()})
        done[id(t)] = tree_leaves(out)[index]
        return done[id(t)]

    def _size(self, n: Any, example: int) -> int:
        return self._size_of(n, example) if isinstance(n, torch.SymInt) else n
