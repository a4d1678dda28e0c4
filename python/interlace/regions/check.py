"""A compiled region against its body, on the same operands."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from interlace.regions.body import Func, Tensor, empty_of, function_of, head_of, operands_of, unchanged

ULPS = 4
MANY = 1 << 24  # numbers of the largest operand, from which on one draw is enough
CHUNK = 1 << 20  # numbers that are compared at once: they stay in the processor's cache


def call(library: ctypes.CDLL, func: Func, operands: list[Tensor]) -> list[Tensor]:
    """What the compiled region gives; nothing is written outside of its results and its workspace (bytes around them are compared)."""
    key = func["key"][:16]
    workspace = ctypes.c_int64.in_dll(library, f"w_{key}").value
    given = [empty_of(value) for value in func["gives"]]
    guard = 64
    scratch = torch.full((workspace + guard,), 0xA5, dtype=torch.uint8)
    pointers = [x.data_ptr() for x in [*operands, *given, scratch]]
    getattr(library, f"r_{key}")((ctypes.c_void_p * len(pointers))(*pointers))
    if not torch.equal(scratch[workspace:], torch.full((guard,), 0xA5, dtype=torch.uint8)):
        raise ValueError("it writes beyond its workspace")
    return given


# Ops that add up: how they do it is the code generation's choice, so equal bits on some operands promise none on others.
SUMS = ("sum", "mean", "_softmax", "_log_softmax", "native_layer_norm", "native_layer_norm_backward", "nll_loss_forward",
        "_softmax_backward_data", "_log_softmax_backward_data")  # fmt: skip


def added(func: Func) -> int:
    """How many numbers one sum of the region adds up at most; 1: it has none."""
    most = 1
    sizes = {value["id"]: _numbers(value) for value in func["operands"]}
    for op in func["ops"]:
        sizes |= {value["id"]: _numbers(value) for value in op["results"] if value["id"] >= 0}
        if op["name"].split(".")[1:2] and op["name"].split(".")[1] in SUMS:
            read = max((sizes[arg[1]] for arg in op["args"] if isinstance(arg, tuple) and arg[0] == "value"), default=1)
            made = min((sizes[value["id"]] for value in op["results"] if value["id"] >= 0), default=1)
            most = max(most, read // max(made, 1), 2)
    return most


def compare(library: ctypes.CDLL, func: Func) -> tuple[bool, str]:
    """Whether all bits are the body's, and what is wrong otherwise: "" where each result is within 4 units in the last place of the largest
    (times the rounds of a sum by halves) of the body's or of that in float64, or as near to the latter as the body's own."""
    sums = added(func)
    exact = sums == 1
    for seed in range(2 if max(map(_numbers, [*func["operands"], *func["gives"]])) < MANY else 1):
        operands = operands_of(func, seed)
        heads = [head_of(x) for x in operands]
        try:
            compiled = call(library, func, operands)
        except ValueError as e:
            return False, str(e)
        if not all(map(unchanged, operands, heads)):
            return False, "it changes an operand"
        with torch.no_grad():
            by_body = function_of(func)(*operands)
            if all(map(same, compiled, by_body)):
                continue
            exact = False
            ulps = ULPS * max(1.0, math.log2(sums))
            if all(within(made, body, ulps) for made, body in zip(compiled, by_body, strict=True)):
                continue
            exactly = function_of(func, wide=True)(*operands)
        for place, (made, body, wide) in enumerate(zip(compiled, by_body, exactly, strict=True)):
            if problem := difference(made, body, wide, ulps):
                return False, f"result {place}: {problem}"
    return exact, ""


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, but for the bits of what is no number."""
    return a.dtype == b.dtype and a.shape == b.shape and (torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def within(made: Tensor, body: Tensor, ulps: float) -> bool:
    """Whether a result is that near to the body's: then what it would be in float64 need not be known, which takes longest."""
    if not made.dtype.is_floating_point or not made.numel():
        return same(made, body)
    parts = zip(*(x.reshape(-1).split(CHUNK) for x in (made, body)), strict=True)
    found = [(_largest(a - b), _largest(b)) for a, b in parts]
    largest = max(b for _, b in found)
    # False where one of them is no number.
    return math.isfinite(largest) and all(error <= ulps * torch.finfo(made.dtype).eps * largest for error, _ in found)


def difference(made: Tensor, body: Tensor, wide: Tensor, ulps: float) -> str:
    """What is wrong with a result, given the body's and that in float64; empty: nothing."""
    if not made.dtype.is_floating_point:
        return "whole numbers differ"
    error = own = largest = 0.0
    for a, b, exactly in zip(*(x.reshape(-1).split(CHUNK) for x in (made, body, wide.double())), strict=True):
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return "other elements are not finite"
        finite &= torch.isfinite(exactly)
        if not finite.all():
            a, b, exactly = a[finite], b[finite], exactly[finite]
        if exactly.numel():
            error, own = max(error, _largest(a - exactly)), max(own, _largest(b - exactly))
            largest = max(largest, _largest(exactly))
    allowed = max(ULPS * own, ulps * torch.finfo(made.dtype).eps * largest)
    return "" if error <= allowed else f"{error:.3g} from the exact value, the body {own:.3g}"


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _numbers(value: dict[str, Any]) -> int:
    return math.prod(value["shape"])
