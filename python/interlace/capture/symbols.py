"""Symbolic sizes of the inputs: `b` for dimension 0, `s` for dimension 1.

A symbol is traced at an example size of its own (2 or more, no two equal, and unlike the sizes of common models), so
that no branch of the model can mistake it for another size. What the model asks about a symbol becomes its range; a
model that fixes a symbol to one number is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from interlace.capture.inputs import InputSpec
from interlace.errors import CaptureError

_EXAMPLE = {"b": 6, "s": 154}
_SECOND = {"b": 10, "s": 222}  # where reading a constant's value is tried again
_MAX = 1 << 20


@dataclasses.dataclass
class Symbols:
    env: ShapeEnv
    sizes: dict[str, torch.SymInt]  # by user name
    expressions: dict[sympy.Symbol, str]

    def size_in(self, size: torch.SymInt, example: int) -> int:
        """A symbolic size at the first or second set of example sizes."""
        values = _SECOND if example else _EXAMPLE
        return int(size.node.expr.xreplace({e: sympy.Integer(values[n]) for e, n in self.expressions.items()}))

    def rename(self, text: str) -> str:
        """A message of torch with the user's names of the symbols."""
        for symbol, name in self.expressions.items():
            text = re.sub(rf"\b{symbol}\b", name, text)
        return text

    def ranges(self) -> list[tuple[str, int, int]]:
        """(name, least, greatest) of each symbol. Error: the model works for some sizes only."""
        out = []
        for expr, name in self.expressions.items():
            fixed = self.env.replacements.get(expr)
            if fixed is not None:
                raise CaptureError(f"the model fixes the symbolic size {name} to {fixed}; capture with numbers instead (symbolic=False)")
            bounds = self.env.var_to_range[expr]
            low = max(2, int(bounds.lower))
            high = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < _MAX else _MAX
            out.append((name, low, high))
        for guard in self.env.guards:
            self._check(guard.expr, dict((n, (lo, hi)) for n, lo, hi in out))
        return out

    def _check(self, expr: sympy.Basic, ranges: dict[str, tuple[int, int]]) -> None:
        if isinstance(expr, sympy.Ne):
            return  # at an excluded size the model takes another branch for the same values (1 or equal sizes)
        free = expr.free_symbols
        if len(free) == 1 and isinstance(expr, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
            return  # a bound on one symbol: it is in the range
        statically = self.env._maybe_evaluate_static(expr)
        if statically is True or statically == sympy.true:
            return
        raise CaptureError(f"the model works only for sizes with {self.rename(str(expr))}; capture with numbers instead (symbolic=False)")


def make_symbols(spec: InputSpec, symbolic: bool | Collection[str]) -> tuple[Symbols | None, InputSpec]:
    """The symbols asked for and the spec with their names in its shapes."""
    if not symbolic:
        return None, spec
    names = ["b", "s"] if symbolic is True else sorted(symbolic)
    for name in names:
        if name not in _EXAMPLE:
            raise CaptureError(f"unknown symbolic size '{name}'; the sizes are 'b' (dimension 0) and 's' (dimension 1)")
    shapes = [list(t.shape) for t in spec.tensors]
    used = []
    for name in names:
        dim = 0 if name == "b" else 1
        size = next((t.shape[dim] for t in spec.tensors if len(t.shape) > dim), None)
        for shape, t in zip(shapes, spec.tensors, strict=True):
            if len(t.shape) > dim and t.shape[dim] == size:
                shape[dim] = name
                used.append(name)
    env = ShapeEnv()
    sizes: dict[str, Any] = {}
    expressions: dict[sympy.Symbol, str] = {}
    for name in dict.fromkeys(used):
        source = ConstantSource(name)
        symbol = env.create_symbol(_EXAMPLE[name], source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        sizes[name] = env.create_symintnode(symbol, hint=_EXAMPLE[name], source=source)
        expressions[symbol] = name
    return Symbols(env, sizes, expressions), spec.with_shapes([tuple(s) for s in shapes])
