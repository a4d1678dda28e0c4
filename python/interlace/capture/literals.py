"""Types and literals in the text form of docs/ir.md."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as sym

from interlace.errors import CaptureError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip
FORMATS = {
    torch.preserve_format: "preserve", torch.contiguous_format: "contiguous", torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}  # fmt: skip
_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"})


def quote(text: str) -> str:
    """A string literal."""
    return f'"{text.translate(_ESCAPES)}"'


def number(x: int | float | bool) -> str:
    if isinstance(x, bool):
        return "true" if x else "false"
    return repr(x) if isinstance(x, float) else str(x)


def dtype_name(dtype: torch.dtype) -> str:
    name = DTYPES.get(dtype)
    if name is None:
        raise CaptureError(f"tensors of dtype {dtype} have no place in a program; convert them (.to) in the model")
    return name


class DimPrinter:
    """Prints sizes; symbolic ones in the names that the user sees ("b", "s")."""

    def __init__(self) -> None:
        self.names: dict[sympy.Symbol, str] = {}
        self._texts: dict[Any, str] = {}
        self._types: dict[Any, str] = {}

    def dim(self, n: int | torch.SymInt) -> str:
        if type(n) is int:
            return str(n)
        expr = n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(int(n))
        text = self._texts.get(expr)
        if text is None:
            text = self._texts[expr] = self._expr(expr)
        return text

    def _expr(self, e: sympy.Expr) -> str:
        if e.is_Integer:
            return str(int(e))
        if e.is_Symbol:
            if e not in self.names:
                raise CaptureError(f"a size depends on data (symbol {e}); such a model cannot be captured")
            return self.names[e]
        if isinstance(e, sympy.Add):
            return "+".join(self._factor(a) for a in e.args)
        if isinstance(e, sympy.Mul):
            return "*".join(self._factor(a) for a in e.args)
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and int(e.exp) > 0:
            return "*".join([self._factor(e.base)] * int(e.exp))
        if isinstance(e, (sym.FloorDiv, sym.CleanDiv)):
            return f"{self._factor(e.args[0])}//{self._factor(e.args[1])}"
        if isinstance(e, (sym.Mod, sym.PythonMod, sympy.Mod)):
            return f"{self._factor(e.args[0])}%{self._factor(e.args[1])}"
        if isinstance(e, (sym.Max, sympy.Max)):
            return self._fold("max", e.args)
        if isinstance(e, (sym.Min, sympy.Min)):
            return self._fold("min", e.args)
        raise CaptureError(f"the size {e} cannot be written with sums, products, //, %, max and min; capture with numbers instead")

    def _fold(self, name: str, args: tuple[sympy.Expr, ...]) -> str:
        out = self._expr(args[0])
        for a in args[1:]:
            out = f"{name}({out},{self._expr(a)})"
        return out

    def _factor(self, e: sympy.Expr) -> str:
        text = self._expr(e)
        atomic = e.is_Symbol or (e.is_Integer and int(e) >= 0) or isinstance(e, (sym.Max, sym.Min))
        return text if atomic else f"({text})"

    def type(self, dtype: torch.dtype, size: tuple[Any, ...], stride: tuple[Any, ...]) -> str:
        """ "f32[2,3]", with strides when they are not the contiguous ones."""
        try:
            key = (dtype, size, stride)
            text = self._types.get(key)
        except TypeError:  # symbolic sizes have no hash
            return self._type(dtype, size, stride)
        if text is None:
            text = self._types[key] = self._type(dtype, size, stride)
        return text

    def _type(self, dtype: torch.dtype, size: tuple[Any, ...], stride: tuple[Any, ...]) -> str:
        text = f"{dtype_name(dtype)}[{','.join(map(self.dim, size))}]"
        want = contiguous_strides(size)
        if all(self.dim(a) == self.dim(b) for a, b in zip(stride, want, strict=True)):
            return text
        return f"{text}{{{','.join(map(self.dim, stride))}}}"


def contiguous_strides(size: tuple[Any, ...]) -> tuple[Any, ...]:
    out: list[Any] = []
    step: Any = 1
    for n in reversed(size):
        out.append(step)
        step = step * (max(n, 1) if type(n) is int else n)
    return tuple(reversed(out))
