"""An optimizer's step as an elementwise rule (docs/ir.md): what one element of a weight, its gradient and its states become.

The optimizer's own Python runs on a small parameter, under a mode that writes down the ATen ops. A tensor of the parameter's is a
vector: what is computed from it becomes an op of the rule. All else (learning rates, step counters, bias corrections) is computed
as ever, and is a number of the step where an op uses it. In-place ops, copies and `out=` are names for values here:

    exp_avg.lerp_(grad, 1 - beta1)                 exp_avg = lerp(exp_avg, g, n0)          numbers: [0.1, ...]
    param.addcdiv_(exp_avg, denom, value=-lr)      w = addcdiv(w, exp_avg, t0, n4)

An op that is not of one element (a norm, a product) has no place in a rule and is refused by name.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
Operand = int | float  # the number of a value, or a number of the step

MAX_STATES = 6
RESERVED = re.compile(r"w|g|[nt](0|[1-9]\d*)")

_UNARY = {"neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "exp", "log", "tanh"}
_BINARY = {"mul": "mul", "div": "div", "maximum": "max", "minimum": "min", "fmax": "max", "fmin": "min"}
_BINARY |= {name: name for name in ("gt", "ge", "lt", "le", "eq", "ne")}
_SAME = {"clone", "detach", "alias", "view", "_unsafe_view", "reshape", "contiguous", "_to_copy", "to", "lift_fresh", "positive", "view_as"}
_FILL = {
    "zeros_like": 0.0, "ones_like": 1.0, "empty_like": 0.0, "new_zeros": 0.0, "new_ones": 1.0, "new_empty": 0.0, "full_like": None,
    "new_full": None,
}  # fmt: skip
_POWERS: dict[float, tuple[str, int]] = {2.0: ("mul", 2), 0.5: ("sqrt", 1), -0.5: ("rsqrt", 1), -1.0: ("reciprocal", 1)}


class Number(float):
    """A number that an op got, and where: the call, the name of its argument."""

    call: int
    argument: str
    sign = 1.0

    @staticmethod
    def of(x: Any, call: int, argument: str) -> Number:
        number = Number(x)
        number.call, number.argument = call, argument
        return number

    def __neg__(self) -> Number:
        number = Number.of(-float(self), self.call, self.argument)
        number.sign = -self.sign
        return number


def plain(t: Tensor) -> float:
    """The one element of a tensor, whatever mode watches."""
    with torch.utils._python_dispatch._disable_current_modes():
        return float(t.item())


@dataclasses.dataclass
class Op:
    result: int
    name: str
    operands: tuple[Operand, ...]


class NotElementwise(Exception):
    """An op without a place in a rule; its name."""


class Recording(TorchDispatchMode):
    """The values of one step, each with a number, and the ops that give them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._values: dict[int, int] = {}  # by storage
        self._kept: list[Tensor] = []  # a storage that is gone would give its place to another
        self._next = self._calls = 0

    def declare(self, t: Tensor, number: float | None = None) -> int:
        """The value of a vector that is there before the step; with a number, the step makes it of that."""
        value = self._new() if number is None else self._emit("copy", number)
        self._set(t, value)
        return value

    def value_of(self, t: Tensor) -> int | None:
        return self._values.get(t.untyped_storage()._cdata)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _set(self, t: Tensor, value: int) -> None:
        if t.is_complex():
            raise NotElementwise("a view of complex numbers")
        self._values[t.untyped_storage()._cdata] = value
        self._kept.append(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        flat = [*args, *kwargs.values()]
        flat += [x for a in flat if isinstance(a, (list, tuple)) for x in a]
        vectors = [a for a in flat if isinstance(a, Tensor) and self.value_of(a) is not None]
        if not vectors:
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            raise NotElementwise(str(func))
        name = func._schema.name.partition("::")[2]
        given = dict(zip(_argument_names(func), args, strict=False)) | kwargs
        named = {a.name: self._noted(a.name, given[a.name]) if a.name in given else a.default_value for a in func._schema.arguments}
        self._calls += 1
        if name.startswith("_foreach_"):
            return self._foreach(func, name.removeprefix("_foreach_"), named, args, kwargs)
        places = [named[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        value = self._apply(name.rstrip("_"), named, vectors[0])
        result = func(*args, **kwargs)
        for t in places or [result]:
            if not isinstance(t, Tensor) or t.numel() != vectors[0].numel():
                raise NotElementwise(f"aten.{name}")
            self._set(t, value)
        return result

    def _noted(self, name: str, x: Any) -> Any:
        """An argument; numbers, and tensors that are one, with where they came from."""
        if isinstance(x, (list, tuple)):
            return [self._noted(f"{name}.{i}", y) for i, y in enumerate(x)]
        if isinstance(x, Tensor) and self.value_of(x) is None and x.numel() == 1:
            return Number.of(plain(x), self._calls, name)
        return Number.of(x, self._calls, name) if type(x) in (int, float) else x

    # ---- ops ----

    def _emit(self, name: str, *operands: Operand) -> int:
        value = self._new()
        self.ops.append(Op(value, name, operands))
        return value

    def _operand(self, x: Any) -> Operand:
        """A vector's value, or a number."""
        if isinstance(x, Tensor):
            value = self.value_of(x)
            if value is not None:
                return value
            raise NotElementwise("a tensor that is not the parameter's")
        return x if isinstance(x, float) else float(x)

    def _vector(self, x: Any) -> int:
        operand = self._operand(x)
        return operand if isinstance(operand, int) else self._emit("copy", operand)

    def _apply(self, name: str, a: dict[str, Any], like: Tensor) -> int:
        """The value that an operator gives; `a`: its arguments by their names in the schema."""
        x = a.get("self", a.get("input"))
        if name in _UNARY:
            return self._emit(name, self._vector(x))
        if name == "sgn":
            return self._emit("sign", self._vector(x))
        if name == "square":
            return self._emit("mul", self._vector(x), self._vector(x))
        if name in _BINARY:
            if a.get("rounding_mode") is not None:
                raise NotElementwise(f"aten.{name} with rounding")
            return self._emit(_BINARY[name], self._operand(x), self._operand(a["other"]))
        if name in ("add", "sub"):
            alpha = self._operand(a.get("alpha", 1))
            return self._emit("add", self._operand(x), self._operand(a["other"]), alpha if name == "add" else -alpha)
        if name == "rsub":
            return self._emit("add", self._operand(a["other"]), self._operand(x), -self._operand(a.get("alpha", 1)))
        if name == "pow":
            exponent = self._operand(a["exponent"])
            if exponent in _POWERS and isinstance(exponent, float):
                short, count = _POWERS[exponent]
                return self._emit(short, *[self._vector(x)] * count)
            return self._emit("pow", self._operand(x), exponent)
        if name in ("addcmul", "addcdiv"):
            factors = [self._vector(a[t]) for t in ("tensor1", "tensor2")]
            return self._emit(name, self._vector(x), *factors, self._operand(a["value"]))
        if name == "lerp":
            return self._emit("lerp", self._vector(x), self._vector(a["end"]), self._operand(a["weight"]))
        return self._choice(name, a, x, like)

    def _choice(self, name: str, a: dict[str, Any], x: Any, like: Tensor) -> int:
        """Bounds, masks, copies and constants."""
        if name in ("clamp", "clamp_min", "clamp_max"):
            value = self._vector(x)
            for bound, short in (("min", "max"), ("max", "min")):
                if a.get(bound) is not None:
                    value = self._emit(short, value, self._operand(a[bound]))
            return value
        if name == "where":
            return self._emit("where", self._vector(a["condition"]), self._operand(x), self._operand(a["other"]))
        if name == "masked_fill":
            return self._emit("where", self._vector(a["mask"]), self._operand(a["value"]), self._vector(x))
        if name in ("index_put", "_index_put_impl"):
            mask = a["indices"]
            if len(mask) != 1 or mask[0] is None or mask[0].dtype != torch.bool or a["accumulate"] or mask[0].shape != like.shape:
                raise NotElementwise("a write to chosen elements")
            return self._emit("where", self._vector(mask[0]), self._operand(a["values"]), self._vector(x))
        if name in ("logical_and", "bitwise_and", "__and"):
            return self._emit("mul", self._vector(x), self._vector(a["other"]))
        if name in ("logical_or", "bitwise_or", "__or"):
            return self._emit("max", self._vector(x), self._vector(a["other"]))
        if name in ("logical_not", "bitwise_not"):
            return self._emit("eq", self._vector(x), 0.0)
        if name == "copy":
            return self._vector(a["src"])
        if name in _SAME:
            return self._vector(x)
        if name in ("zero", "fill"):
            return self._vector(0.0 if name == "zero" else a["value"])
        if name in _FILL:
            number = _FILL[name]
            return self._emit("copy", self._operand(a["fill_value"]) if number is None else number)
        raise NotElementwise(f"aten.{name}")

    def _foreach(self, func: OpOverload, name: str, named: dict[str, Any], args: tuple, kwargs: dict) -> Any:
        """An operator on lists, as those of its elements."""
        base = name.rstrip("_")
        second = {"addcmul": "value", "addcdiv": "value", "lerp": "weight", "pow": "exponent", "clamp_min": "min", "clamp_max": "max"}
        rename = {"scalar": second.get(base, "other"), "tensors1": "end", "weights": "weight", "tensor": "other"}
        rename |= {"scalars": rename["scalar"], "other": rename["scalar"]}
        values = []
        for i, x in enumerate(named["self"]):
            mine = {rename.get(k, k): v[i] if isinstance(v, list) else v for k, v in named.items()}
            values.append(self._apply(base, {"alpha": 1, "value": 1, **mine}, x))
        result = func(*args, **kwargs)
        for t, value in zip(result if base == name else named["self"], values, strict=True):
            self._set(t, value)
        return result


class Calls(TorchDispatchMode):
    """What tells one step from another as cheaply as can be: the operators, which tensors they got, and their numbers apart."""

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        super().__init__()
        self.key: list[Any] = []
        self.numbers: dict[tuple[int, str], float] = {}
        self._places: dict[int, int] = {}  # by storage
        self._kept: list[Tensor] = []
        for t in vectors:
            self._add(t)

    def _add(self, t: Tensor) -> None:
        self._kept.append(t)
        self._places.setdefault(t.untyped_storage()._cdata, len(self._places))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        entry: list[Any] = [func]
        numbers: list[tuple[str, float]] = []
        known = self._look(entry, numbers, zip(_argument_names(func), args, strict=False))
        known = self._look(entry, numbers, kwargs.items()) or known
        if not known:
            return func(*args, **kwargs)
        for name, x in numbers:
            self.numbers[len(self.key), name] = x
        self.key.append(tuple(entry))
        result = func(*args, **kwargs)
        for t in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(t, Tensor):
                self._add(t)
        return result

    def _look(self, entry: list[Any], numbers: list[tuple[str, float]], arguments: Iterable[tuple[str, Any]]) -> bool:
        """Notes arguments; whether a vector is among them."""
        known = False
        for name, x in arguments:
            if isinstance(x, Tensor):
                place = self._places.get(x.untyped_storage()._cdata)
                known = known or place is not None
                entry.append((name, place))
                if place is None and x.numel() == 1:
                    numbers.append((name, plain(x)))
            elif type(x) in (int, float):
                entry.append((name, x) if name == "exponent" else name)  # which decides the op
                numbers.append((name, x))
            elif isinstance(x, (list, tuple)):
                known = self._look(entry, numbers, ((f"{name}.{i}", y) for i, y in enumerate(x))) or known
            else:
                entry.append((name, x if isinstance(x, (int, float, str)) else str(x)))
        return known


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments) if isinstance(func, OpOverload) else ()


@dataclasses.dataclass
class Form:
    """One way that a step goes: its ops over registers, and the numbers of this step (Number where a call got them)."""

    lines: tuple[str, ...]
    numbers: list[float]
    ops: list[tuple[str, str, tuple[str, ...]]]  # result, name, operands as in the lines


def form_of(ops: Sequence[Op], finals: dict[str, int], initials: dict[int, str]) -> Form:
    """The text of a recording: values nobody needs are left out, the others get registers. `finals`: the value that the weight ("w") and
    each state has in the end; `initials`: the registers of the values there were, "g" among them."""
    needed = {v for name, v in finals.items() if initials.get(v) != name}
    live = []
    for op in reversed(ops):
        if op.result in needed:
            live.append(op)
            needed.update(v for v in op.operands if isinstance(v, int))
    live.reverse()
    last: dict[int, int] = {}  # use of a value
    for i, op in enumerate(live):
        last.update((v, i) for v in op.operands if isinstance(v, int))
    last.update((v, len(live)) for v in finals.values())
    wanted: dict[int, list[str]] = {}
    for name, v in finals.items():
        wanted.setdefault(v, []).append(name)
    place = dict(initials)  # value → register
    holds = {register: v for v, register in initials.items()}
    numbers: list[float] = []
    out: list[tuple[str, str, tuple[str, ...]]] = []

    def word(x: Operand) -> str:
        if isinstance(x, int):
            if x not in place:
                raise NotElementwise("a value of another parameter")
            return place[x]
        numbers.append(x)
        return f"n{len(numbers) - 1}"

    def free(register: str, now: int) -> bool:
        v = holds.get(register)
        return register != "g" and (v is None or last.get(v, -1) <= now)

    temporaries = 0
    for i, op in enumerate(live):
        operands = tuple(word(x) for x in op.operands)
        own = [r for r in wanted.get(op.result, ()) if free(r, i)]
        same = [place[x] for x in op.operands if isinstance(x, int) and free(place[x], i)]  # in place
        spare = [f"t{k}" for k in range(temporaries) if free(f"t{k}", i)]
        choice = [*own, *[r for r in same if r in finals], *[r for r in same if r not in finals], *spare]
        # A register of the weight or a state is not lent to a value that something else needs in the end.
        choice = [r for r in choice if r not in finals or r in own or op.result not in wanted]
        register = choice[0] if choice else f"t{temporaries}"
        temporaries += not choice
        place[op.result], holds[register] = register, op.result
        out.append((register, op.name, operands))
    moves = [(name, place[v]) for name, v in finals.items() if place[v] != name]
    targets = {name for name, _ in moves}
    if any(source in targets for _, source in moves):  # through registers of their own
        out += [(f"t{temporaries + k}", "copy", (source,)) for k, (_, source) in enumerate(moves)]
        moves = [(name, f"t{temporaries + k}") for k, (name, _) in enumerate(moves)]
    out += [(name, "copy", (source,)) for name, source in moves]
    return Form(tuple(f"{r} = {name}({', '.join(operands)})" for r, name, operands in out), numbers, out)


_EVALUATE: dict[str, Callable[..., Any]] = {
    "copy": lambda a: a, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "exp": torch.exp, "log": torch.log, "tanh": torch.tanh, "mul": torch.mul, "div": torch.div,
    "max": torch.maximum, "min": torch.minimum, "pow": torch.pow, "gt": torch.gt, "ge": torch.ge, "lt": torch.lt, "le": torch.le,
    "eq": torch.eq, "ne": torch.ne, "add": lambda a, b, n: a + n * b, "lerp": torch.lerp, "where": lambda m, a, b: torch.where(m != 0, a, b),
    "addcmul": lambda a, b, c, n: a + n * b * c, "addcdiv": lambda a, b, c, n: a + n * b / c,
}  # fmt: skip


def evaluate(form: Form, registers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The registers after a form, on flat tensors: the definition that a recording is held against."""
    registers = dict(registers)
    like = registers["w"]
    for register, name, operands in form.ops:
        values = [torch.full_like(like, form.numbers[int(o[1:])]) if o not in registers else registers[o] for o in operands]
        registers[register] = _EVALUATE[name](*values).to(like.dtype)
    return registers


def rule_text(number: int, name: str, states: Sequence[str], forms: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a rule in a program."""
    lines = [f'rule {number} "{name}" ({", ".join(states)}) {{']
    for form in forms:
        lines += ["  form {", *(f"    {line}" for line in form), "  }"]
    return [*lines, "}"]
