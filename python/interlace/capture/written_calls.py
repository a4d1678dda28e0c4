"""Where Python calls what attention is written with: matmul, bmm, baddbmm, einsum, @, scales, masks, softmax, dropout, views and casts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor

from interlace.capture.patches import patched

if TYPE_CHECKING:
    from interlace.capture.written import WrittenAttention

Tensor = torch.Tensor


def _calls(w: WrittenAttention) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name, and what is called in place of it: with the function before, and its arguments."""

    def product(f: Any, *args: Any, **named: Any) -> Any:
        given, more = _operands(args, named, "input", "other", "mat2", "tensor2")
        if len(given) != 2 or more:
            return f(*args, **named)
        found = w.attention(*given)
        return found if found is not None else w.track(f(*args, **named), w.product(*given))

    def added_product(f: Any, *args: Any, **named: Any) -> Any:
        result = f(*args, **named)
        given, more = _operands(args, named, "input", "batch1", "batch2")
        beta, alpha = more.pop("beta", 1), more.pop("alpha", 1)
        if len(given) == 3 and not more and isinstance(alpha, (int, float)) and alpha and beta in (0, 1):
            scores = w.product(*given[1:])
            w.track(result, dataclasses.replace(scores, scale=float(alpha)) if scores else None)
            if beta == 1:
                w.track(result, found) if (found := w.masked(result, given[0])) else w.forget(result)
        return result

    def einsum(f: Any, equation: Any, *operands: Any) -> Any:
        parts = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation.replace(" ", "")) if isinstance(equation, str) and len(operands) == 2 else None
        return f(equation, *operands) if parts is None else w.by_letters(f, equation, parts.groups(), *operands)

    def scale(divided: bool) -> Callable[..., Any]:
        def scaled(f: Any, *args: Any, **named: Any) -> Any:
            given, more = _operands(args, named, "input", "other")
            scores = None
            if len(given) == 2 and not more:
                scores = w.scaled(given[0], given[1], divided) or (None if divided else w.scaled(given[1], given[0]))
            return w.track(f(*args, **named), scores)

        return scaled

    def add(f: Any, *args: Any, **named: Any) -> Any:
        given, more = _operands(args, named, "input", "other")
        scores = w.masked(*given) or w.masked(given[1], given[0]) if len(given) == 2 and not more else None
        return w.track(f(*args, **named), scores)

    def fill(f: Any, *args: Any, **named: Any) -> Any:
        given, more = _operands(args, named, "input", "mask", "value")
        scores = w.masked(*given) if len(given) == 3 and not more else None
        return w.track(f(*args, **named), scores)

    def where(f: Any, condition: Any, *both: Any, **more: Any) -> Any:
        result = f(condition, *both, **more)
        if len(both) == 2 and isinstance(condition, FakeTensor) and condition.dtype == torch.bool:
            yes, no = both
            w.track(result, (w.scores(yes) and w.masked(yes, ~condition, no)) or (w.scores(no) and w.masked(no, condition, yes)) or None)
        return result

    def softmax(f: Any, *args: Any, **named: Any) -> Any:
        result, (given, _) = f(*args, **named), _operands(args, named, "input", "dim")
        return w.track(result, w.softmax(given[0], result, given[1]) if len(given) > 1 else None)

    def dropout(f: Any, *args: Any, **named: Any) -> Any:
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | named
        scores = w.dropped(given.get("input"), given.get("p", 0.5), given.get("training", True))
        return w.track(f(*args, **named), scores)

    def view(f: Any, *args: Any, **named: Any) -> Any:
        x = args[0] if args else None
        result = (torch.Tensor.reshape if f is torch.Tensor.view and w.is_result(x) else f)(*args, **named)
        return w.track(result, w.viewed(x, result))

    def cast(f: Any, x: Any, *args: Any, **named: Any) -> Any:
        result = f(x, *args, **named)
        return w.track(result, w.cast(x, result))

    methods: dict[Callable[..., Any], str] = {
        product: "matmul __matmul__ bmm", added_product: "baddbmm", scale(False): "mul __mul__ __rmul__ __imul__ mul_",
        scale(True): "div __truediv__ __itruediv__ div_", add: "add __add__ __radd__ __iadd__ add_", fill: "masked_fill masked_fill_",
        softmax: "softmax", view: "view reshape", cast: "to float double half bfloat16 type type_as contiguous",
    }  # fmt: skip
    functions = {
        product: "matmul bmm", added_product: "baddbmm", einsum: "einsum", scale(False): "mul", scale(True): "div", add: "add",
        fill: "masked_fill", where: "where", softmax: "softmax", dropout: "dropout", view: "reshape",
    }  # fmt: skip
    for owner, table in ((FakeTensor, methods), (torch, functions), (F, {dropout: "dropout"})):
        for instead, names in table.items():
            yield from ((owner, name, instead) for name in names.split())


def _operands(args: tuple[Any, ...], named: dict[str, Any], *names: str) -> tuple[list[Any], dict[str, Any]]:
    """Those that are given by place, then those by these names; and what else is named."""
    return [*args, *(named[name] for name in names if name in named)], {k: v for k, v in named.items() if k not in names}


@contextlib.contextmanager
def called(w: WrittenAttention) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, instead in list(_calls(w)):
            before = getattr(torch.Tensor if owner is FakeTensor else owner, name)
            made = functools.partialmethod(_method, instead, before) if owner is FakeTensor else functools.partial(instead, before)
            stack.enter_context(patched(owner, **{name: made}))
        yield


def _method(self: Tensor, instead: Callable[..., Any], before: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return instead(before, self, *args, **named)
