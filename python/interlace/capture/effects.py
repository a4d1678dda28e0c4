"""What a run of the model does beside computing tensors: attributes that it stores, Python's and NumPy's random numbers that it draws.

A program does none of that, so the model is left as it was before the trace, and what the next run would read is refused by name. A
buffer or tensor attribute that is assigned anew becomes an `assign` of the program.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from interlace.capture.inputs import leaves
from interlace.capture.model_tensors import alike, items_of
from interlace.capture.reach import MISSING
from interlace.capture.sites import Sites, is_user_file
from interlace.capture.watch import Change
from interlace.errors import CaptureError

Tensor = torch.Tensor
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def generators() -> tuple[Any, Any]:
    """States of the generators that no program draws from."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])


def draws(device: str) -> list[bytes]:
    """States of torch's generators that modules on a device draw from."""
    return [bytes(state.tolist()) for state in states_of(device)]


@contextlib.contextmanager
def kept_draws(device: str, begin: int | list[Tensor] | None = None) -> Iterator[None]:
    """Puts torch's generators back, and has them begin with a seed, or where states_of() was taken."""
    before = states_of(device)
    try:
        if isinstance(begin, list):
            put_states(device, begin)
        elif begin is not None:
            torch.default_generator.manual_seed(begin)
            if device != "cpu":
                torch.get_device_module(device).manual_seed(begin)
        yield
    finally:
        put_states(device, before)


def states_of(device: str) -> list[Tensor]:
    return [torch.random.get_rng_state(), *([] if device == "cpu" else [torch.get_device_module(device).get_rng_state()])]


def put_states(device: str, states: list[Tensor]) -> None:
    torch.random.set_rng_state(states[0])
    if device != "cpu":
        torch.get_device_module(device).set_rng_state(states[1])


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    before, other = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(other)


@contextlib.contextmanager
def kept_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Tensors hold what they held before, in the memory that they had, whatever is written to them within."""
    saved = [(t, t.detach(), t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, alias, value in saved:
                t.data = alias
                t.copy_(value)


def drawing_line(run: Callable[[], Any], sites: Sites) -> tuple[str, str | None]:
    """ "file.py:12" of the first line of the user's or a library's code that draws, and the module that runs there."""
    state = generators()
    last: tuple[str, str | None] = ("", None)
    found: tuple[str, str | None] | None = None
    inside: dict[FrameType, str | None] = {}  # the module that each frame runs in

    def named(frame: FrameType) -> bool:
        """Not Python's own files: a line of theirs that has just run says nothing, and one that draws was asked to."""
        return is_user_file(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith(_STDLIB)

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal last, found
        if not named(frame):
            return None
        if found is None and generators() != state:
            found = last
        inside[frame] = sites.stack_paths[-1] if sites.stack_paths else None
        at: FrameType | None = frame
        if event == "return":  # what follows is in the line that has called
            del inside[frame]
            at = frame.f_back
            while at is not None and at not in inside:
                at = at.f_back
        if at is not None:
            last = (f"{at.f_code.co_filename}:{at.f_lineno}", inside[at])
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        run()
    finally:
        sys.settrace(before)
    return found or last


class Stored:
    """Parameters, buffers and tensor attributes by their places, those in lists, dicts and tuples too, while fakes are in them."""

    def __init__(self, model: nn.Module, fakes: dict[int, Any]) -> None:
        """`fakes`: what is declared, by the id of the fake."""
        self._places: list[tuple[dict, str, Any, Any, Tensor, Any, str]] = []
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers, vars(module)):
                for name, value in table.items():
                    before = copy.copy(value) if isinstance(value, (list, dict)) else value
                    for key, t in [(None, value)] if isinstance(value, Tensor) else items_of(value):
                        if isinstance(t, Tensor) and id(t) in fakes:
                            where = name if key is None else f"{name}.{key}"
                            self._places.append((table, name, before, key, t, fakes[id(t)], f"{path}.{where}" if path else where))

    def replaced(self) -> Iterator[tuple[Any, Tensor, str]]:
        """(what was declared, the tensor that is in its place now, the place's name)."""
        for table, name, before, key, fake, declared, where in self._places:
            now: Any = table.get(name)
            if key is not None:
                now = now[key] if alike(before, now) else None
            if isinstance(now, Tensor) and now is not fake:
                yield declared, now, where


@contextlib.contextmanager
def kept_places(model: nn.Module) -> Iterator[None]:
    """Tensors of the model's places, those in lists, dicts and tuples too, are in them afterwards whatever is put there meanwhile."""
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers, vars(m))]
    found = [(table, name, value, copy.copy(items_of(value))) for table in tables for name, value in table.items()]
    there = [x for x in found if isinstance(x[2], Tensor) or any(isinstance(t, Tensor) for _, t in x[3])]
    try:
        yield
    finally:
        for table, name, value, items in there:
            table[name] = value
            if isinstance(value, (list, dict)) and [(k, id(t)) for k, t in items_of(value)] != [(k, id(t)) for k, t in items]:
                value.clear()
                value.extend(t for _, t in items) if isinstance(value, list) else value.update(items)


def _without_fakes(x: Any, real: Callable[[Tensor], Tensor | None]) -> Any:
    """The value with real tensors in place of fake ones, zeros where nobody knows what they hold, to trace with; MISSING when it holds others
    than containers. Functions stay as they are: hooks that a model puts on its modules when it first runs."""
    if isinstance(x, Tensor):
        known = real(x)
        return torch.zeros((), dtype=x.dtype).expand(tuple(int(n) for n in x.shape)) if known is None else known
    if isinstance(x, (list, tuple)):
        items = [_without_fakes(item, real) for item in x]
        made: Any = getattr(type(x), "_make", type(x))
        return MISSING if any(item is MISSING for item in items) else made(items)
    if type(x) is dict:
        values = {k: _without_fakes(v, real) for k, v in x.items()}
        return MISSING if any(v is MISSING for v in values.values()) else values
    plain = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, FunctionType)
    return x if isinstance(x, plain) else MISSING


_ASKS = (
    "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__", "__mod__", "__rmod__", "__floordiv__", "__truediv__",
    "__rtruediv__", "__mul__", "__rmul__", "__pow__", "__rpow__", "__index__", "__int__", "__float__", "__hash__", "__neg__",
)  # fmt: skip


def _counted(number: float, reads: list[str]) -> Any:
    """The number, noting the operators that ask for it; additions do not, their sums note for themselves."""
    base = type(number)
    kind: Any = type(base.__name__, (base,), {})

    def asking(name: str) -> Callable[..., Any]:
        def ask(self: Any, *args: Any) -> Any:
            reads.append(name)
            return getattr(base, name)(self, *args)

        return ask

    def adding(name: str) -> Callable[..., Any]:
        def add(self: Any, other: Any) -> Any:
            found = getattr(base, name)(self, other)
            return kind(found) if type(found) is base else found

        return add

    for name in _ASKS:
        if hasattr(base, name):
            setattr(kind, name, asking(name))
    for name in ("__add__", "__radd__", "__sub__", "__rsub__"):
        setattr(kind, name, adding(name))
    return kind(number)


def grows(change: Change) -> bool:
    """Whether a list or queue has more items after the run."""
    before, after = change.before, change.after
    return isinstance(after, (list, tuple)) and type(before) is type(after) and len(after) > len(before)


def begins(change: Change) -> bool:
    """Whether a tensor, or several, are where there was nothing."""
    held = [leaf for _, leaf in leaves(change.after)] if change.before is None or change.before is MISSING else []
    return bool(held) and all(isinstance(leaf, Tensor) for leaf in held)


def alike_tensors(before: Any, after: Any) -> bool:
    """Whether a tensor may have the memory of the one before it, which needs no gradient."""
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)) or before.requires_grad or before.is_meta:
        return False
    return (before.dtype, before.shape, before.layout) == (after.dtype, after.shape, after.layout)


def kept_of(change: Change) -> list[Tensor]:
    """The tensors that are where there was nothing, or behind what a list has."""
    new = change.after if begins(change) else list(change.after[len(change.before) :]) if grows(change) else []
    return [leaf for _, leaf in leaves(new) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def as_after(changes: list[Change], real: Callable[[Tensor], Tensor | None], many: bool = False) -> Iterator[list[Change]]:
    """The model's attributes as its run left them, for another run; gives the changes that could be made. `real`: what a fake tensor holds,
    where that is known. `many`: what has grown has grown a thousand times."""
    made: list[Change] = []
    try:
        for change in changes:
            value = change.after if change.after is MISSING else _without_fakes(change.after, real)
            if many and value is not MISSING and grows(change):
                value = value + value[len(change.before) :] * 1000
            if type(change.before) is type(value) and type(value) in (int, float):
                value = _counted(value, change.reads)
            if change.kind == "value" and (value is not MISSING or change.after is MISSING):
                change.put(value)
                made.append(change)
        yield made
    finally:
        for change in reversed(made):
            change.put(change.before)


def refusal(made: list[Change]) -> CaptureError:
    names = ", ".join(c.where for c in made[:3])
    are = "is" if len(made) == 1 else "are"
    return CaptureError(
        f"{names} {are} changed by the model while it runs, and its next run would compute something else; keep such a value in a "
        "buffer that is changed in place (register_buffer), set it between the steps, or pass fullgraph=False to run that in Python"
    )
