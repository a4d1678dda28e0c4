"""A region's body (a dict of `Program.funcs()`) as a function of tensors, and tensors to call it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Func = dict[str, Any]

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
}  # fmt: skip
FORMATS = {"preserve": torch.preserve_format, "contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}


MOVES = ("embedding", "gather", "index", "index_select")  # ops that take few of many numbers: those are widened behind them


def function_of(func: Func, wide: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """Operands → what the func gives, by ATen's operators. `wide`: computed in float64, whatever floating dtypes the body names."""
    last = {id: place for place, op in enumerate(func["ops"]) for id in _read_by(op)}
    for value in func["gives"]:
        last.pop(value["id"], None)

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        values = {value["id"]: x for value, x in zip(func["operands"], operands, strict=True)}
        types = {value["id"]: value for value in func["operands"]}

        def read(arg: Any, widen: bool) -> Any:
            if isinstance(arg, list):
                return [read(item, widen) for item in arg]
            if not isinstance(arg, tuple):
                return arg
            kind, what = arg
            if kind == "value":
                if widen:
                    values[what] = widened(values[what])
                return values[what]
            if what in DTYPES:
                return WIDE.get(DTYPES[what], DTYPES[what]) if wide else DTYPES[what]
            return FORMATS.get(what, what)

        for place, op in enumerate(func["ops"]):
            results = op["results"]
            if op["name"] == "view":
                root = types[results[0]["root"]]
                made: Sequence[Any] = [view_of(values[root["id"]], root, results[0])]
            else:
                _, name, *overload = op["name"].split(".")
                operator = getattr(getattr(torch.ops.aten, name), overload[0] if overload else "default")
                widen = wide and name not in MOVES
                found = operator(*read(op["args"], widen), **{key: read(arg, widen) for key, arg in op["named"].items()})
                made = found if isinstance(found, (tuple, list)) else [found]
            for value, x in zip(results, made, strict=False):
                if value["id"] >= 0:
                    values[value["id"]], types[value["id"]] = x, value
            made = found = ()
            for id in [id for id in values if last.get(id) == place]:  # a whole vocabulary's logits are large
                del values[id]
        return tuple(values[value["id"]] for value in func["gives"])

    return run


def _read_by(op: Func) -> list[int]:
    if op["name"] == "view":
        return [op["results"][0]["root"]]
    found: list[int] = []
    left = [*op["args"], *op["named"].values()]
    while left:
        arg = left.pop()
        if isinstance(arg, list):
            left += arg
        elif isinstance(arg, tuple) and arg[0] == "value":
            found.append(arg[1])
    return found


def view_of(x: Tensor, root: Func, view: Func) -> Tensor:
    """The view that a type and an offset in the root's storage describe, made of views that code generation sees through: the root in the
    order of its memory, split and narrowed, its dimensions put in their order; as_strided where that is not enough."""
    order = sorted(range(len(root["shape"])), key=lambda d: (-root["strides"][d], d))
    count = 1
    for d in reversed(order):  # the root has to fill its memory
        if root["shape"][d] != 1 and root["strides"][d] != count:
            return x.as_strided(view["shape"], view["strides"], view["offset"])
        count *= root["shape"][d]
    real = [d for d, size in enumerate(view["shape"]) if size != 1 and view["strides"][d] != 0]
    real.sort(key=lambda d: -view["strides"][d])
    extent, left, shape, begins = count, view["offset"], [], []
    for stride in [view["strides"][d] for d in real] + [1]:
        if stride == 0 or extent % stride:
            return x.as_strided(view["shape"], view["strides"], view["offset"])
        shape.append(extent // stride)
        begins.append(left // stride)
        left, extent = left % stride, stride
    sizes = [view["shape"][d] for d in real] + [1]
    if any(begin + size > whole for begin, size, whole in zip(begins, sizes, shape, strict=True)):
        return x.as_strided(view["shape"], view["strides"], view["offset"])
    y = x.permute(order).reshape(shape)
    for d, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        if (begin, size) != (0, shape[d]):
            y = y.narrow(d, begin, size)
    y = y.squeeze(-1).permute([real.index(d) for d in sorted(real)])
    for d, size in enumerate(view["shape"]):
        if d not in real:
            y = y.unsqueeze(d)
            if size != 1:
                y = y.expand([*y.shape[:d], size, *y.shape[d + 1 :]])
    return y


PERIOD = 1_000_003  # numbers that are drawn of an operand, repeated; a prime: rows and heads are not alike


def operands_of(func: Func, seed: int = 0) -> list[Tensor]:
    """Tensors of the operands' types: normal numbers; integers are 0 or 1, so that they are indices of whatever they select from."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for value in func["operands"]:
        dtype, span = DTYPES[value["dtype"]], _span(value["shape"], value["strides"])
        drawn = min(span, PERIOD)
        block = torch.randn(drawn, generator=generator) if dtype.is_floating_point else torch.randint(0, 2, (drawn,), generator=generator)
        flat = block.to(dtype).repeat(-(-span // drawn))[:span]
        found.append(flat.as_strided(value["shape"], value["strides"]))
    return found


def head_of(operand: Tensor) -> Tensor:
    """What was drawn of a tensor of operands_of, as a copy."""
    return _flat(operand)[:PERIOD].clone()


def unchanged(operand: Tensor, head: Tensor) -> bool:
    """Whether a tensor of operands_of is still its head, repeated."""
    return all(torch.equal(part, head[: part.numel()]) for part in _flat(operand).split(PERIOD))


def moved(operand: Tensor, device: torch.device) -> Tensor:
    """On another device with the same strides, where `to` would leave out what lies between the numbers of a view."""
    return _flat(operand).to(device).as_strided(operand.shape, operand.stride())


def _flat(x: Tensor) -> Tensor:
    """All numbers of memory from a tensor's first to its last."""
    return x.as_strided([_span(x.shape, x.stride())], [1])


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Numbers from the first to the last of a tensor in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def empty_of(value: Func, device: str = "cpu") -> Tensor:
    return torch.empty_strided(value["shape"], value["strides"], dtype=DTYPES[value["dtype"]], device=device)


def widened(x: Tensor) -> Tensor:
    """The same in float64, with the same strides."""
    return _flat(x).to(torch.float64).as_strided(x.shape, x.stride()) if x.dtype in WIDE else x
