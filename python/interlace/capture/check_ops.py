"""Schemas can lie: every kind of op in a captured program is run once on small real tensors, and what it did is
compared with what the text says: which operands it wrote, which results share storage with which operands, dtypes,
sizes and strides.

Results are kept per operator for the life of the process. The sizes are those of the first call of the operator,
scaled down when they are large: by giving each distinct size a small one of its own (right for products and
elementwise ops), or by dropping factors of two (right for reshapes). An operator that cannot be run so is left
unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from interlace.capture import functional
from interlace.capture.functional import op_name
from interlace.capture.tracing import without_log
from interlace.errors import CaptureError

Tensor = torch.Tensor
RIGHT, UNCHECKED = "right", "unchecked"
_SMALL = 1 << 14  # elements of all operands of a call that is run at its own sizes
_verdicts: dict[OpOverload, str] = {}  # "right", "unchecked", or what is wrong


def check_op_kinds(calls: Iterable[tuple[OpOverload, tuple, dict]]) -> None:
    """Checks one call of each operator, given with fake arguments. Raises CaptureError for an operator that does not
    do what the program's text would say of it."""
    for func, args, kwargs in calls:
        if _verdicts.get(func, UNCHECKED) == UNCHECKED:  # sizes of before may have been symbols
            with without_log():
                _verdicts[func] = _check(func, args, kwargs)
        wrong = _verdicts[func]
        if wrong not in (RIGHT, UNCHECKED):
            raise CaptureError(
                f"operator {op_name(func)} {wrong}, which its schema and its fake implementation do not say; a "
                "program that uses "
                "it would be wrong. Use another operator, or fix its registration (torch.library)"
            )


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for item in x for t in _tensors(item)]
    if isinstance(x, dict):
        return [t for item in x.values() for t in _tensors(item)]
    return []


def verdicts() -> dict[str, str]:
    """What is known of each operator met so far in this process: "right", "unchecked" or what is wrong, by name."""
    return {op_name(func): verdict for func, verdict in _verdicts.items()}


def _check(func: OpOverload, args: tuple, kwargs: dict) -> str:
    operands = _tensors([args, kwargs])
    if not operands:
        return RIGHT  # nothing to write or to share
    if any(not isinstance(n, int) for t in operands for n in t.shape):
        return UNCHECKED
    small = sum(t.numel() for t in operands) <= _SMALL
    wrong = UNCHECKED
    for scale in [int] if small else [_distinct(operands, 2), _without_twos, _distinct(operands, 16)]:
        try:
            verdict = _run(func, args, kwargs, scale)
        except Exception:  # sizes that the operator does not take
            continue
        if verdict == RIGHT:  # what it does at other sizes may be their fault: padded rows where they are not aligned
            return RIGHT
        wrong = verdict
    return wrong


def _distinct(operands: list[Tensor], multiple: int) -> Callable[[int], int]:
    sizes = sorted({n for t in operands for n in t.shape if n > 1})
    small = {n: min(n, (2 + i) * multiple) for i, n in enumerate(sizes)}
    return lambda n: small.get(n, n)


def _without_twos(n: int) -> int:
    while n > 1 and n % 2 == 0:
        n //= 2
    return n


def _scaled_tensor(t: Tensor, scale: Callable[[int], int]) -> Tensor:
    """A real tensor of the scaled sizes with the dimensions in the same memory order; expanded ones stay expanded."""
    size = [scale(n) for n in t.shape]
    stride = [0] * len(size)
    step = 1
    for d in sorted(range(len(size)), key=lambda d: (t.stride(d), -d)):
        if t.stride(d) != 0 or size[d] == 1:
            stride[d] = step
            step *= max(size[d], 1)
    if torch.Size(size).numel() > 4 * _SMALL:
        raise ValueError("too big")
    base = torch.empty_strided(size, stride, dtype=t.dtype)
    memory = base.as_strided((step,), (1,))
    if t.dtype.is_floating_point or t.dtype.is_complex:
        generator = torch.Generator().manual_seed(0)
        memory.copy_(torch.rand(step, generator=generator) + 0.5)
    else:
        memory.fill_(1 if t.dtype == torch.bool else 0)
    return base


def _scaled(x: Any, scale: Callable[[int], int], made: dict[int, Tensor]) -> Any:
    if isinstance(x, Tensor):
        if id(x) not in made:
            made[id(x)] = _scaled_tensor(x, scale)
        return made[id(x)]
    if isinstance(x, (list, tuple)):
        return [_scaled(item, scale, made) for item in x]
    if type(x) is int and x > 1:
        return scale(x)
    return x


def _shares(results: list[Tensor], operands: list[Tensor]) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, r in enumerate(results)
        for j, t in enumerate(operands)
        if r.untyped_storage()._cdata == t.untyped_storage()._cdata and r.numel() and t.numel()
    ]


def _geometry(t: Tensor) -> tuple:
    strides = tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()
    return t.dtype, tuple(t.shape), strides


def _run(func: OpOverload, args: tuple, kwargs: dict, scale: Callable[[int], int]) -> str:
    with no_dispatch(), torch.random.fork_rng(devices=[]):
        made: dict[int, Tensor] = {}
        real_args = _scaled(args, scale, made)
        real_kwargs = {k: _scaled(v, scale, made) for k, v in kwargs.items() if k != "device"}
        operands = list(made.values())
        before = [t.clone() for t in operands]
        versions = [t.storage_offset() for t in operands]
    fakes = FakeTensorMode()
    with fakes:
        known: dict[int, Tensor] = {}

        def fake(x: Any) -> Any:
            if isinstance(x, Tensor):
                if id(x) not in known:
                    known[id(x)] = fakes.from_tensor(x)
                return known[id(x)]
            return [fake(item) for item in x] if isinstance(x, (list, tuple)) else x

        promised = _tensors(functional.promised(func, tuple(fake(real_args)), {k: fake(v) for k, v in real_kwargs.items()}))
        promised_operands = [fake(t) for t in operands]
    with no_dispatch(), torch.random.fork_rng(devices=[]), torch.no_grad():
        results = _tensors(func(*real_args, **real_kwargs))
    for i, (t, old) in enumerate(zip(operands, before, strict=True)):
        if not torch.equal(t, old) or t.storage_offset() != versions[i]:
            return f"writes to its tensor operand {i}"
    shares, promise = _shares(results, operands), _shares(promised, promised_operands)
    if shares != promise:
        i, j = next(iter(set(shares) ^ set(promise)))
        verb = "shares" if (i, j) in shares else "does not share"
        return f"gives a result {i} that {verb} storage with its tensor operand {j}"
    for i, (r, p) in enumerate(zip(results, promised, strict=False)):
        if _geometry(r) != _geometry(p):
            return f"gives a result {i} of another dtype, size or stride ({_text(r)} in place of {_text(p)})"
    return RIGHT


def _text(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} with strides {list(t.stride())}"
