"""What is said of changes between two steps, and of a batch's form: parts of follow.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from interlace.capture.inputs import InputSpec, Path
from interlace.capture.reach import MISSING
from interlace.capture.watch import Change, describe

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Form:
    """Of a micro-batch that the program does not take, and why not. `numbers`: beside the tensors, which have changed, with the dtypes that
    stand for them; `differ`: whether they do between ranks."""

    spec: InputSpec
    why: str
    numbers: dict[Path, torch.dtype]
    differ: bool


def whole_inputs(spec: InputSpec) -> dict[Path, int]:
    """Whole numbers that are inputs: a fraction may come in their place."""
    return {t.path: 0 for t in spec.tensors if t.number and not t.dtype.is_floating_point}


def alike(before: InputSpec, after: InputSpec) -> bool:
    """Whether batches of both forms may be one loop's: sizes, lengths of lists, numbers and texts may differ, and None stand for a tensor.
    Entries that are missing or new or another dtype are mistakes more often. None was captured before: any may be the first."""
    if not before.tensors:
        return True
    whole = whole_inputs(before)
    was, now = ({**{t.path: t.dtype for t in spec.tensors}, **dict(spec.fixed())} for spec in (before, after))
    if {path for path in was if not any(type(p) is int for p in path)} ^ {path for path in now if not any(type(p) is int for p in path)}:
        return False
    for path in was.keys() & now.keys():
        one, other = was[path], now[path]
        one = 0 if path in whole and type(other) is float else one
        numbers = all(type(x) in (int, float, bool) for x in (one, other)) or type(one) is type(other) is str
        if not (numbers or one is None or other is None or (type(one) is type(other) and one == other)):
            return False
    return True


def pairs(before: Any, after: Any) -> list[tuple[Any, Any, Any]]:
    """(key, value before, value after) of what is another object, or was written, in a place or a list or tuple there."""
    if not isinstance(before, (list, tuple)):
        return [(None, before, after)]
    if type(before) is not type(after) or len(before) != len(after):
        return []
    return [(i, x, y) for i, (x, y) in enumerate(zip(before, after, strict=True)) if x is not y]


def within_place(where: str, places: set[str]) -> bool:
    """Whether a place is one of these, or in what one of them holds."""
    return bool(places) and (where in places or any(where.startswith(f"{place}[") for place in places))


def within(owner: str | None, paths: set[str]) -> bool:
    return owner is not None and any(owner == path or owner.startswith(f"{path}.") for path in paths)


def may_be_input(where: str) -> bool:
    """Not a probability of dropout, which is no operand of an op; those have their own way through the cache."""
    return "drop" not in where.lower() and not where.startswith("'p' of")


def said(changes: list[Change]) -> str:
    parts = []
    for c in changes[:3]:
        now = "is gone" if c.after is MISSING else "was written" if c.kind == "tensor" else f"is {describe(c.after)} now"
        before = "" if c.kind == "tensor" or c.before is MISSING else f" and was {describe(c.before)}"
        parts.append(f"{c.where} {now}{before}")
    more = f" (and {len(changes) - 3} more changes)" if len(changes) > 3 else ""
    return ", ".join(parts) + more
