"""A tiny evaluator of program text at the level "captured", for tests: every line runs as a torch call.

It is deliberately strict: views are taken by the geometry in the text and must equal what the operator itself gives,
and every computed result must have the dtype, sizes and strides that the text promises.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool, 
    "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
FORMATS = {
    "preserve": torch.preserve_format,
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
}
_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|([A-Za-z_][\w.]*)(?==)|([^\s,\[\](){}="]+)|(.))')
_DECL = re.compile(r"^%(\d+): (\w+)\[([^\]]*)\](?:\{([^}]*)\})?(?: in %(\d+)(?:\+(\S+))?)?$")
_TYPED = r"%\d+: \w+\[[^\]]*\](?:\{[^}]*\})?(?: in %\d+(?:\+[^\s,]+)?)?"


def dim(text: str, binding: dict[str, int]) -> int:
    return int(eval(text, {"max": max, "min": min}, binding))  # sizes are Python expressions


@dataclasses.dataclass
class Decl:
    value: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    root: int | None
    offset: int


def parse_decl(text: str, binding: dict[str, int]) -> Decl:
    m = _DECL.match(text)
    assert m, f"not a declaration: {text!r}"
    size = tuple(dim(d, binding) for d in m[3].split(",") if d)
    if m[4] is not None:  # noqa: SIM108
        stride = tuple(dim(d, binding) for d in m[4].split(",") if d)
    else:
        stride = torch.empty(size, device="meta").stride()
    return Decl(int(m[1]), DTYPES[m[2]], size, stride, int(m[5]) if m[5] else None, dim(m[6] or "0", binding))


class Args:
    """Reads `%1, [2, none], dtype=f32` into Python values."""

    def __init__(self, text: str, values: dict[int, torch.Tensor], binding: dict[str, int]) -> None:
        self.tokens = [m for m in _TOKEN.finditer(text) if m[0].strip()]
        self.at, self.values, self.binding = 0, values, binding

    def read(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token[4] == ",":
                self.at += 1
            elif token[2]:
                self.at += 2
                kwargs[token[2]] = self.value()
            else:
                args.append(self.value())
        return args, kwargs

    def value(self) -> Any:
        token = self.tokens[self.at]
        self.at += 1
        if token[4] == "[":
            out = []
            while self.tokens[self.at][4] != "]":
                if self.tokens[self.at][4] == ",":
                    self.at += 1
                else:
                    out.append(self.value())
            self.at += 1
            return out
        text = token[0].strip()
        if text[0] == '"':
            return text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
        if text[0] == "%":
            return self.values[int(text[1:])]
        words = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}
        for table in (words, DTYPES, FORMATS):
            if text in table:
                return table[text]
        return (
            float(text)
            if re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text) and ("." in text or "e" in text)
            else dim(text, self.binding)
        )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaNs included."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


class Evaluator:
    def __init__(self, text: str, tensors: dict[str, torch.Tensor], binding: dict[str, int] | None = None) -> None:
        self.binding = binding or {}
        lines = text.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("phase micro_batch "))
        assert lines[-1] == "}"
        self.ops = [line.strip() for line in lines[start + 1 : -1]]
        self.header = lines[:start]
        self.inputs: list[Decl] = []
        self.names: dict[int, str] = {}
        self.start: dict[int, torch.Tensor] = {}
        for line in self.header:
            kind, _, rest = line.partition(" ")
            if kind not in ("param", "buffer", "input", "const"):
                continue
            m = re.match(rf'({_TYPED}) "([^"]*)"', rest)
            assert m, line
            d = parse_decl(m[1], self.binding)
            self.names[d.value] = m[2]
            if kind == "input":
                self.inputs.append(d)
            elif kind == "const":
                data = Args(line.partition(" = ")[2], {}, {}).value()
                self.start[d.value] = torch.tensor(data, dtype=d.dtype).reshape(d.size)
            else:
                t = tensors[m[2]].detach().clone()
                assert (t.dtype, tuple(t.shape), t.stride()) == (d.dtype, d.size, d.stride), line
                self.start[d.value] = t

    def run(self, inputs: list[torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """{"outputs": .., "grads": .., "assigned": ..}, by name. Random ops draw from torch's generator in program
        order."""
        values = dict(self.start)
        result: dict[str, dict[str, torch.Tensor]] = {"outputs": {}, "grads": {}, "assigned": {}}
        for d, x in zip(self.inputs, inputs, strict=True):
            assert (x.dtype, tuple(x.shape)) == (d.dtype, d.size)
            values[d.value] = x.detach().clone(memory_format=torch.contiguous_format)
        with torch.no_grad():
            for line in self.ops:
                try:
                    self._op(line, values, result)
                except Exception as e:
                    raise AssertionError(f"{e}\n  at: {line}") from e
        return result

    def python(self, module: str, part: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        raise AssertionError("an opaque module")

    def _op(self, line: str, values: dict[int, torch.Tensor], result: dict[str, dict[str, torch.Tensor]]) -> None:
        m = re.match(rf"((?:(?:{_TYPED}|_)(?:, )?)+ = )?([\w.]+)\((.*)\)( \{{.*\}})$", line)
        assert m, "not an op"
        decls = re.findall(rf"{_TYPED}|_", m[1] or "")
        name, tail = m[2], m[4]
        args, kwargs = Args(m[3], values, self.binding).read()
        if name == "grad":
            result["grads"][self.names[int(m[3].split(",")[0][1:])]] = args[1].clone()
        elif name == "output":
            result["outputs"][re.search(r'name="([^"]*)"', tail)[1]] = args[0].clone()  # type: ignore[index]
        elif name == "assign":
            result["assigned"][self.names[int(m[3].split(",")[0][1:])]] = args[1].clone()
        elif name == "view":
            d = parse_decl(decls[0], self.binding)
            values[d.value] = self._view(d, values)
        else:
            namespace, packet, *overload = name.split(".")
            if name == "call.python":
                module, part = (re.search(rf'{k}="([^"]*)"', tail)[1] for k in ("module", "part"))  # type: ignore[index]
                out = self.python(module, part, args)
            else:
                func = getattr(getattr(getattr(torch.ops, namespace), packet), overload[0] if overload else "default")
                out = func(*args, **kwargs)
            flat: list[Any] = []
            for r in out if isinstance(out, (tuple, list)) else (out,):
                flat += r if isinstance(r, (tuple, list)) else [r]
            if not decls:
                return
            assert len(flat) == len(decls), f"{len(flat)} results, {len(decls)} declared"
            for r, text in zip(flat, decls, strict=True):
                if text == "_":
                    continue
                d = parse_decl(text, self.binding)
                if d.root is not None and d.root in values:
                    view = self._view(d, values)
                    assert same(view, r), "the view by geometry differs from the operator's result"
                    r = view
                assert r.dtype == d.dtype and tuple(r.shape) == d.size, f"{r.dtype} {tuple(r.shape)}"
                moved = [i for i in range(r.dim()) if r.shape[i] > 1 and r.stride(i) != d.stride[i]]
                assert not moved or r.numel() == 0, f"strides {r.stride()}, declared {d.stride}"
                values[d.value] = r

    @staticmethod
    def _view(d: Decl, values: dict[int, torch.Tensor]) -> torch.Tensor:
        root = values[d.root]  # type: ignore[index]
        storage = torch.empty(0, dtype=d.dtype).set_(root.untyped_storage())  # type: ignore[call-overload]
        shift = root.storage_offset() * root.element_size()
        assert shift % storage.element_size() == 0
        return storage.as_strided(d.size, d.stride, d.offset + shift // storage.element_size())
