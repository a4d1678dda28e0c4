"""Tensors that stand for numbers of Python's: of a batch, of an attribute, of a closure. What Python computes of numbers alone is one, too.

    batch["step"] is 3      while traced: a tensor, int64, an input of the program
    batch["step"] / 10      float64, as Python has it, and not the default dtype
    min(1.0, ...)           torch.minimum; math.exp(...) is torch.exp: both would read what is in them

So is what Python reads of a step and computes with, where nothing else will do: `loss / mask.sum().item()`.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from interlace.capture.constants import Constants
from interlace.capture.patches import patched
from interlace.capture.sites import is_user_file

aten = torch.ops.aten
Tensor = torch.Tensor
_FRACTIONS = (aten.div, aten.true_divide, aten.reciprocal)


def as_python(recorder: Any, func: OpOverload, args: tuple) -> tuple[tuple, bool]:
    """The arguments of an operator, and whether it computes as Python would, of what stands for its numbers: whole numbers that become
    fractions do so in float64."""
    known = recorder.constants.numbers
    tensors = [a for a in args if isinstance(a, Tensor)] if known else ()
    if not tensors or not all(id(t) in known for t in tensors):
        return args, False
    fractions = func.overloadpacket in _FRACTIONS and func is not aten.div.Tensor_mode
    if not fractions and not any(type(a) is float or (isinstance(a, Tensor) and a.is_floating_point()) for a in args):
        return args, True
    whole = lambda a: isinstance(a, Tensor) and a.dtype in (torch.int64, torch.bool)  # noqa: E731
    return tuple(recorder.call(aten._to_copy.default, a, dtype=torch.float64) if whole(a) else a for a in args), True


_MATH = ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "pow")


@contextlib.contextmanager
def math_of_numbers(constants: Constants) -> Iterator[None]:
    """Python's math of tensors that stand for numbers, which it would read, and the lesser or greater of some."""
    before = {name: getattr(math, name) for name in _MATH}

    def of(name: str) -> Callable[..., Any]:
        def compute(*args: Any) -> Any:
            if not any(id(x) in constants.numbers for x in args):
                return before[name](*args)
            result = getattr(torch, name)(*(x.double() if id(x) in constants.numbers else x for x in args))
            constants.numbers[id(result)] = result
            return result

        return compute

    def bound(name: str, first: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **more: Any) -> Any:
            tensors = [x for x in args if id(x) in constants.numbers]
            if len(args) < 2 or more or not tensors or not all(type(x) in (int, float) or id(x) in constants.numbers for x in args):
                return first(*args, **more)
            whole = all(type(x) is int or (id(x) in constants.numbers and x.dtype == torch.int64) for x in args)
            result = reduce(getattr(torch, name), [torch.as_tensor(x, dtype=torch.int64 if whole else torch.float64) for x in args])
            constants.numbers[id(result)] = result
            return result

        return compute

    bounds = {"min": bound("minimum", min), "max": bound("maximum", max)}
    with patched(math, **{name: of(name) for name in _MATH}), patched(builtins, **bounds):
        yield


@contextlib.contextmanager
def asked_as_python(constants: Constants, spaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """What a tensor that stands for a number is to isinstance(), hasattr(), torch.is_tensor(), to type() in the code of the globals `spaces`,
    and in sets and dicts, which read it: `factors.get(epoch, 1.0)`."""
    is_one, has, is_tensor, own_hash, numbers = isinstance, hasattr, torch.is_tensor, torch.Tensor.__hash__, constants.numbers

    def asked(x: Any, depth: int = 2) -> bool:
        return id(x) in numbers and is_user_file(sys._getframe(depth).f_code.co_filename)

    def like(x: Tensor) -> Any:
        return 0.0 if x.is_floating_point() else x.dtype != torch.bool and 0

    def instance(x: Any, kind: Any, /) -> bool:
        return is_one(like(x) if asked(x) else x, kind)

    def has_one(x: Any, name: str, /) -> bool:
        return has(like(x) if asked(x) else x, name)

    def tensor(obj: Any, /) -> Any:
        return not asked(obj) and is_tensor(obj)

    def hashed(t: Tensor) -> int:
        return hash(aten._local_scalar_dense(t)) if asked(t) else own_hash(t)

    def kind_of(*args: Any, **named: Any) -> Any:
        return type(like(args[0]) if asked(args[0], 3) else args[0]) if len(args) == 1 else type(*args, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(builtins, isinstance=instance, hasattr=has_one))
        stack.enter_context(patched(torch, is_tensor=tensor))
        stack.enter_context(patched(torch.Tensor, __hash__=hashed))
        for space in spaces:
            stack.enter_context(_renamed(space, {"type": _called(type, kind_of)}))
        yield


def _called(base: Any, call: Callable[..., Any]) -> type:
    """What is `base` to isinstance() and issubclass(), and has another call."""

    class Kind(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, base)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, base)

        def __call__(cls, *args: Any, **named: Any) -> Any:
            return call(*args, **named)

    return Kind(base.__name__, (base,), {})


@contextlib.contextmanager
def _renamed(space: dict[str, Any], names: dict[str, Any]) -> Iterator[None]:
    """Globals of code with these names, where they have none of their own."""
    new = {name: value for name, value in names.items() if name not in space}
    space.update(new)
    try:
        yield
    finally:
        for name in new:
            space.pop(name, None)


@contextlib.contextmanager
def standing(constants: Constants, stands: dict[str, dict[str, Any]]) -> Iterator[None]:
    """`x.item()`, `int(x)` and `float(x)` of the user's lines `stands` give tensors that stand for the numbers: `loss / mask.sum().item()`.
    By the globals of the code there, whose names for Python's types are others meanwhile."""
    if not stands:
        yield
        return
    item = torch.Tensor.item

    def here(t: Any, depth: int = 2) -> bool:
        frame = sys._getframe(depth)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return place in stands and isinstance(t, FakeTensor) and t.numel() == 1 and not constants.knows(t)

    def number(t: Tensor, kind: type | None) -> Tensor:
        t = t.detach().reshape(())
        if kind is float or (kind is None and t.is_floating_point()):
            t = t.double()
        elif t.dtype != torch.bool or kind is int:
            t = (t.trunc() if t.is_floating_point() else t).long()
        constants.numbers[id(t)] = t
        return t

    def of_item(t: Tensor) -> Any:
        return number(t, None) if here(t) else item(t)

    def of_type(base: Any) -> type:
        def call(*args: Any, **named: Any) -> Any:
            return number(args[0], base) if len(args) == 1 and here(args[0], 3) else base(*args, **named)

        return _called(base, call)

    names = {base.__name__: of_type(base) for base in (int, float)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch.Tensor, item=of_item))
        for space in {id(space): space for space in stands.values()}.values():
            stack.enter_context(_renamed(space, names))
        yield
