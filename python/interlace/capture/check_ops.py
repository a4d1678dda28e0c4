"""Schemas can lie: every kind of op in a captured program is run once on small real tensors, and what it did is
compared with what the text says: which operands it wrote, which results share storage with which operands, dtypes and
sizes, and the strides of views. (A fresh result in another layout than the text's is copied by the runtime.)

A kind of op is an operator with the dtypes of its operands; what is found holds for one call, with its sizes, strides and
numbers, and is kept for the life of the process, so that it never depends on what was captured before. Large sizes are
scaled down: by giving each distinct size a small one of its own (right for products and elementwise ops), or by dropping
factors of two (right for reshapes). An operator that cannot be run so is left unchecked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from interlace.capture.effects import kept_draws
from interlace.capture.functional import op_name, promised
from interlace.capture.tracing import without_log
from interlace.errors import CaptureError

Tensor = torch.Tensor
RIGHT, UNCHECKED, MIXED = "right", "unchecked", "takes operands of one dtype"
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))  # on every device
_ONE_DTYPE = re.compile(r"same dtype|type \(.*\) .*should be the same|expected scalar type \w+ but found")  # of products, convolutions
_HALF = frozenset({torch.float16, torch.bfloat16})
_SMALL = 1 << 14  # elements of all operands of a call that is run at its own sizes
_verdicts: dict[Any, str] = {}  # of a call: "right", "unchecked", or what is wrong
_dtypes: dict[Any, tuple[torch.dtype | None, ...] | None] = {}  # of an operator's results, by what decides them


class MixedDtypes(CaptureError):
    """An operator whose operands must have one dtype has several, which its fake implementation does not mind."""

    def __init__(self, func: OpOverload, dtypes: Iterable[torch.dtype]) -> None:
        names = " and ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes if d.is_floating_point))
        super().__init__(f"{op_name(func)} {MIXED}, and has {names} here: cast one, as eager steps would need it")


def check_op_kinds(calls: Iterable[tuple[OpOverload, tuple, dict]]) -> None:
    """Checks calls, given with fake arguments. Raises CaptureError for an operator that does not do what the program's
    text would say of it."""
    for func, args, kwargs in calls:
        key = (func, _key(args), _key(kwargs))
        if key not in _verdicts:
            with without_log():
                _verdicts[key] = _check(func, args, kwargs)
        wrong = _verdicts[key]
        if wrong == MIXED:
            raise MixedDtypes(func, dtypes_of(args))
        if wrong not in (RIGHT, UNCHECKED):
            raise CaptureError(
                f"operator {op_name(func)} {wrong}, which its schema and its fake implementation do not say; a program that uses "
                "it would be wrong. Use another operator, or fix its registration (torch.library)"
            )


def _key(x: Any) -> Any:
    """What a verdict depends on; symbolic sizes by their names."""
    if isinstance(x, Tensor):
        sizes = (tuple(x.shape), x.stride())
        return x.dtype, sizes if all(type(n) is int for n in (*sizes[0], *sizes[1])) else str(sizes)
    if isinstance(x, (list, tuple)):
        return tuple(_key(item) for item in x)
    if isinstance(x, dict):
        return tuple((name, _key(item)) for name, item in x.items())
    return type(x), x if type(x) in (int, float, bool) else str(x)


def dtypes_of(args: Iterable[Any]) -> tuple[torch.dtype, ...]:
    """Of the tensors among the arguments, in their order."""
    found: list[torch.dtype] = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a.dtype)
        elif isinstance(a, (list, tuple)):
            found += [x.dtype for x in a if isinstance(x, Tensor)]
    return tuple(found)


def promise(func: OpOverload, args: tuple, kwargs: dict, device: str = "cpu") -> Any:
    """The results of a call on fake tensors, in the dtypes that the operator really gives on that type of device: fake implementations
    are wrong about the statistics of normalizations in half precision, which are float32 on CUDA."""
    results = promised(func, args, kwargs, device)
    dtypes = dtypes_of(args)
    if _HALF.isdisjoint(dtypes):
        return results
    true = _true_dtypes(func, args, kwargs, dtypes, device)
    if true is None or isinstance(results, list):
        return results
    several = isinstance(results, tuple)
    flat = results if several else (results,)
    if len(flat) != len(true):
        return results
    cast = [r if t is None or not isinstance(r, Tensor) or r.dtype == t else r.to(t) for r, t in zip(flat, true, strict=True)]
    return tuple(cast) if several else cast[0]


def _true_dtypes(func: OpOverload, args: tuple, kwargs: dict, dtypes: tuple, device: str) -> tuple[torch.dtype | None, ...] | None:
    """What a run on small tensors shows; None when it cannot be run."""
    operands = _tensors([args, kwargs])
    numbers = tuple(t.dim() == 0 for t in operands)  # these widen nothing
    key = (func, device, dtypes, numbers, tuple(x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)))
    if key not in _dtypes:
        _dtypes[key] = None
        if all(isinstance(n, int) for t in operands for n in t.shape):
            for scale in _scales(operands):
                with contextlib.suppress(Exception), without_log():
                    results = _run_real(func, args, kwargs, scale, device)
                    _dtypes[key] = tuple(None if r is None else r.dtype for r in results)
                    break
    return _dtypes[key]


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def verdicts() -> dict[str, str]:
    """What is known of each operator met so far in this process: "right", "unchecked" or what is wrong, by name."""
    return {op_name(key[0]): verdict for key, verdict in _verdicts.items()}


def _check(func: OpOverload, args: tuple, kwargs: dict) -> str:
    operands = _tensors([args, kwargs])
    if not operands:
        return RIGHT  # nothing to write or to share
    if any(not isinstance(n, int) for t in operands for n in t.shape):
        return UNCHECKED
    wrong = UNCHECKED
    mixed = op_name(func).split(".")[1] in _PRODUCTS and len({t.dtype for t in operands if t.is_floating_point()}) > 1
    for scale in _scales(operands):
        try:
            verdict = _run(func, args, kwargs, scale)
        except Exception as e:  # sizes that the operator does not take
            if mixed and _ONE_DTYPE.search(str(e)):
                return MIXED
            continue
        if verdict == RIGHT:  # what it does at other sizes may be their fault: padded rows where they are not aligned
            return RIGHT
        wrong = verdict
    return wrong


def _scales(operands: list[Tensor]) -> list[Callable[[int], int]]:
    if sum(t.numel() for t in operands) <= _SMALL:
        return [int]
    return [_distinct(operands, 2), _without_twos, _distinct(operands, 16)]


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


def _scaled(args: tuple, kwargs: dict, scale: Callable[[int], int]) -> tuple[tuple, dict, list[Tensor]]:
    """Real arguments and named ones, and the tensors among them."""
    made: dict[int, Tensor] = {}

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in made:
                made[id(x)] = _scaled_tensor(x, scale)
            return made[id(x)]
        return scale(x) if type(x) is int and x > 1 else x

    real = tree_map(one, args), tree_map(one, {k: v for k, v in kwargs.items() if k != "device"})
    return *real, list(made.values())


def _shares(results: list[Tensor], operands: list[Tensor]) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, r in enumerate(results)
        for j, t in enumerate(operands)
        if r.untyped_storage()._cdata == t.untyped_storage()._cdata and r.numel() and t.numel()
    ]


def _strides(t: Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Outside of the trace: no modes, no casts, and no random numbers of the model's are used up."""
    with no_dispatch(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        yield


def _run_real(func: OpOverload, args: tuple, kwargs: dict, scale: Callable[[int], int], device: str) -> list[Tensor | None]:
    """What the operator gives for small real arguments: tensors, and None for those it leaves out."""
    with _alone(), kept_draws(device), torch.no_grad():
        real_args, real_kwargs, operands = _scaled(args, kwargs, scale)
        there = {id(t): t.to(device) for t in operands}
        real_args, real_kwargs = tree_map(lambda x: there.get(id(x), x), (real_args, real_kwargs))
        return tree_leaves(func(*real_args, **real_kwargs))


def _run(func: OpOverload, args: tuple, kwargs: dict, scale: Callable[[int], int]) -> str:
    with _alone():
        real_args, real_kwargs, operands = _scaled(args, kwargs, scale)
        before = [t.clone() for t in operands]
        versions = [t.storage_offset() for t in operands]
    fakes = FakeTensorMode()
    with fakes, torch.autocast("cpu", enabled=False):  # a region may be open around everything
        known: dict[int, Tensor] = {id(t): fakes.from_tensor(t) for t in operands}
        fake_args, fake_kwargs = tree_map(lambda x: known.get(id(x), x), (real_args, real_kwargs))
        fake_results, fake_operands = _tensors(promise(func, fake_args, fake_kwargs)), list(known.values())
    with _alone(), torch.no_grad():
        results = _tensors(func(*real_args, **real_kwargs))
    for i, (t, old) in enumerate(zip(operands, before, strict=True)):
        if not torch.equal(t, old) or t.storage_offset() != versions[i]:
            return f"writes to its tensor operand {i}"
    shares, promised_shares = _shares(results, operands), _shares(fake_results, fake_operands)
    if shares != promised_shares:
        i, j = next(iter(set(shares) ^ set(promised_shares)))
        verb = "shares" if (i, j) in shares else "does not share"
        return f"gives a result {i} that {verb} storage with its tensor operand {j}"
    views = {i for i, _ in shares}
    for i, (r, p) in enumerate(zip(results, fake_results, strict=False)):
        same = (r.dtype, r.shape) == (p.dtype, p.shape) and (i not in views or _strides(r) == _strides(p))
        if not same:
            return f"gives a result {i} of another dtype, size or stride ({_text(r)} in place of {_text(p)})"
    return RIGHT


def _text(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} with strides {list(t.stride())}"
