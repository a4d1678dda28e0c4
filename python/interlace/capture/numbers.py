"""Tensors that stand for numbers of Python's: of a batch, of an attribute, of a closure. What Python computes of numbers alone is one, too.

    batch["step"] is 3      while traced: a tensor, int64, an input of the program
    batch["step"] / 10      float64, as Python has it, and not the default dtype
    min(1.0, ...)           torch.minimum; math.exp(...) is torch.exp: both would read what is in them
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch._ops import OpOverload

from interlace.capture.constants import Constants

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
    before, bounds = {name: getattr(math, name) for name in _MATH}, (min, max)

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

    try:
        for name in _MATH:
            setattr(math, name, of(name))
        builtins.min, builtins.max = bound("minimum", min), bound("maximum", max)  # type: ignore[assignment]
        yield
    finally:
        builtins.min, builtins.max = bounds
        for name, function in before.items():
            setattr(math, name, function)
