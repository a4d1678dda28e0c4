"""What a program depends on and Python may change between two steps: attributes, hooks, closures, globals, tensors.

A trace reads all of this once. A Watch remembers it by identity, in as few containers as there are, so that looking whether anything
has changed takes 0.4 ms for the 9,000 values of 32 layers (`_runtime.differing`) and can be done at every step:

    module 'enc'   {training: True, p: 0.1, _forward_hooks: {...}, ...}     one comparison of the values' identities
    loss_fn        cell 'beta', global 'SCALE', defaults

    watch = Watch(model, loss_fn)
    loss_fn.__closure__[0].cell_contents = 0.2
    watch.moved()     # [Change("'beta' of loss_fn", 0.1, 0.2)]

What is reached, and which names count, is found in reach.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import is_not
from typing import Any

import torch
from torch import nn

from interlace.capture.reach import MISSING, Held, Reach, setter, simple

Tensor = torch.Tensor
_OF_MODEL = re.compile(r"(?:\w+ )?'([^']*)' of (?:the model|module '[^']*')(?:\[([^\]]*)\])?")  # of a module, or in its list
_OF_SAVING = frozenset({"architectures", "transformers_version"})  # Hugging Face's save_pretrained writes them, on whatever rank saves


@dataclasses.dataclass
class Change:
    """A place that holds something else than it did. `kind`: parameter, buffer, module, tensor (written in place) or value."""

    where: str
    before: Any
    after: Any
    kind: str
    put: Callable[[Any], None]  # into the place; MISSING takes it away
    owner: str | None = None  # path of the module whose attribute it is
    reads: list[str] = dataclasses.field(default_factory=list)  # operators that asked for a number's value (effects.py)


def plain(x: Any) -> bool:
    return simple(x) or (isinstance(x, (tuple, frozenset)) and all(map(plain, x)))


def same(a: Any, b: Any) -> bool:
    """Whether a program made for one holds for the other."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    return plain(a) and (a == b or a != a)


def describe(x: Any) -> str:
    """A value in a message."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    text = repr(x) if x is MISSING or plain(x) else f"a {type(x).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."


def buffer_name(where: str, owner: str | None) -> str:
    """What a program calls the buffer that a tensor in a place is: as the model does, or where that does not look so deep, by the place."""
    own = _OF_MODEL.fullmatch(where) if owner is not None else None
    return where if own is None else ".".join(filter(None, (owner, own[1], own[2] and own[2].strip("'"))))


class Watch:
    """Everything reachable from a model and its loss function, as it is now. `varies`: that may be another value at each look."""

    def __init__(self, model: nn.Module, loss_fn: Any = None, prefix: str = "", known: Collection[int] = ()) -> None:
        """`prefix`: of the names of the loss function's tensors, which those of another one must not have. `known`: ids of tensors that need
        no look."""
        self._reach, self._prefix = Reach(model, loss_fn, known), prefix
        self.tells = True  # whether a program may call Python for what it hands on (reads.py): stages of a pipeline may not
        self.varies, self.names_of = self._reach.varies, self._reach.names_of
        self.typed, self.matches = list(self._reach.typed.values()), self._reach.matches
        self.outside = {prefix + where: t for where, t in self._reach.outside.items()}
        self._first = self._later = [get() for get, _ in self._reach.generators]
        self._dicts = [h for h in self._reach.tables if isinstance(h.holder, dict)]
        self._tables = tuple((h.holder, h.values) for h in self._dicts)
        self._lists = [h for h in self._reach.tables if isinstance(h.holder, list)]

    # ---- looking ----

    def moved(self, all_names: bool = False) -> list[Change]:
        """What has changed since; values that are equal in another object count as unchanged. `all_names`: attributes that no code mentions
        too."""
        from interlace import _runtime

        found: list[Change] = []
        for i in _runtime.differing(self._tables):
            found += self._in_dict(self._dicts[i], all_names)
        for h in self._lists:
            moved = len(h.holder) != len(h.values) or any(map(is_not, h.holder, h.values))
            if moved and not same(list(h.values), h.holder):
                found.append(Change(h.where(""), list(h.values), list(h.holder), h.kind, _fill(h.holder), h.owner))
        for p in self._reach.places:
            now = p.look()
            if now is p.value or same(p.value, now):
                continue
            if p.put is None:  # an array or tensor that was written
                found.append(Change(p.where, p.of, p.of, "tensor", lambda value: None, p.owner))
            else:
                found.append(Change(p.where, p.value, now, "value", p.put, p.owner))
        return found

    def changed(self) -> list[Change]:
        """As moved(), and attributes that no code mentions too."""
        return self.moved(all_names=True)

    def settle(self) -> None:
        """What there is now counts as unchanged."""
        for h in self._reach.tables:
            items = h.holder if isinstance(h.holder, dict) else dict(enumerate(h.holder))
            h.keys, h.values = tuple(items), tuple(items.values())
        self._tables = tuple((h.holder, h.values) for h in self._dicts)
        for p in self._reach.places:
            p.value = p.look()

    def restore(self) -> list[Change]:
        """Puts everything back; gives what had changed."""
        found = self.changed()
        for change in reversed(found):
            if change.kind != "tensor":
                change.put(change.before)
        for p in self._reach.places:  # NumPy's arrays
            if p.put is None and not isinstance(p.of, Tensor) and isinstance(p.value, bytes) and p.look() != p.value:
                with contextlib.suppress(TypeError, ValueError):  # one that nobody may write, or with gaps
                    memoryview(p.of).cast("B")[:] = p.value
        self._later = [get() for get, _ in self._reach.generators]
        for (_, put), state in zip(self._reach.generators, self._first, strict=True):
            put(state)
        return found

    def draw_on(self) -> None:
        """Generators of random numbers go on where they were when restore() put them back."""
        for (_, put), state in zip(self._reach.generators, self._later, strict=True):
            put(state)

    @contextlib.contextmanager
    def as_tensors(self, places: Collection[str], dtype: torch.dtype) -> Iterator[dict[int, tuple[str, Tensor]]]:
        """Tensors in place of the numbers at these places, put back at the end; gives the places and them by the tensors' ids."""
        found = [change for change in self._numbers() if change.where in places]
        tensors = [torch.tensor(change.before, dtype=torch.int64 if type(change.before) is int else dtype) for change in found]
        for change, t in zip(found, tensors, strict=True):
            change.put(t)
        try:
            yield {id(t): (change.where, t) for change, t in zip(found, tensors, strict=True)}
        finally:
            for change in found:
                change.put(change.before)

    def tensors(self) -> dict[str, Tensor]:
        """Those that are looked at and that the model does not count as its own, by the names of the buffers that they and `outside` are."""
        looked = [p for p in self._reach.places if isinstance(p.of, Tensor) and buffer_name(p.where, p.owner) == p.where]
        return {self._prefix + p.where if p.owner is None else p.where: p.of for p in looked}

    def replace(self, new: Mapping[str, Tensor]) -> bool:
        """Puts tensors into the places of others, by the names of the buffers that these are; says whether there were any."""
        found = False

        def of(x: Any, where: str, owner: str | None) -> Any:
            if isinstance(x, Tensor):
                return new.get(buffer_name(where, owner), x)
            if not isinstance(x, tuple):
                return x
            items = [of(item, f"{where}[{i}]", owner) for i, item in enumerate(x)]
            if not any(map(is_not, items, x)):
                return x
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)

        def put(x: Any, where: str, owner: str | None, into: Callable[[Any], None]) -> None:
            nonlocal found
            if (now := of(x, where, owner)) is not x:
                found = True
                into(now)

        for h in (*self._dicts, *self._lists):
            for key, value in zip(h.keys, h.values, strict=True) if h.kind == "value" else ():
                put(value, h.where(key), h.owner, setter(h.holder, key))
        for p in self._reach.places:
            if p.put is not None:
                put(p.value, p.where, p.owner, p.put)
        return found

    def values(self) -> Iterator[Change]:
        """Every place that can be written."""
        for h in (*self._dicts, *self._lists):
            for key, value in zip(h.keys, h.values, strict=True):
                if h.counts(key):
                    yield Change(h.where(key), value, value, h.kind, setter(h.holder, key), h.owner)
        for p in self._reach.places:
            if p.put is not None:
                yield Change(p.where, p.value, p.value, "value", p.put, p.owner)

    def _numbers(self) -> Iterator[Change]:
        """Every place that holds a number."""
        return (change for change in self.values() if type(change.before) in (int, float))

    def numbers(self) -> dict[str, int | float]:
        """The numbers, by place."""
        return {change.where: change.before for change in self._numbers()}

    def state(self) -> Iterator[tuple[str, str]]:
        """(place, value) of all that is plain, and which object the rest is: equal states make equal programs. Not what tensors hold, which
        is written into buffers of programs."""
        for h in (*self._dicts, *self._lists):
            for key, value in zip(h.keys, h.values, strict=True):
                if h.counts(key):
                    yield h.where(key), _mark(value)
        for p in self._reach.places:
            if not isinstance(p.of, Tensor) or (p.owner is not None and "]" in p.where):
                yield p.where, _mark(p.value)

    @staticmethod
    def _in_dict(h: Held, all_names: bool) -> list[Change]:
        before = dict(zip(h.keys, h.values, strict=True))
        found = []
        for key in dict.fromkeys((*h.keys, *h.holder)):
            if key in _OF_SAVING or not (all_names or h.counts(key)):
                continue
            old, new = before.get(key, MISSING), h.holder.get(key, MISSING)
            if old is not new and (all_names or not same(old, new)):
                found.append(Change(h.where(key), old, new, h.kind, setter(h.holder, key), h.owner))
        return found


def _fill(items: list) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        items[:] = value

    return put


_objects: dict[int, tuple[Callable[[], Any], int]] = {}  # by their ids, which others have when they are gone
_number = itertools.count()


def _mark(x: Any) -> str:
    if isinstance(x, bytes):
        return hashlib.sha256(x).hexdigest()
    if plain(x):
        return repr(x)
    if isinstance(x, tuple):
        return f"({', '.join(map(_mark, x))})"
    if isinstance(x, (list, dict)):  # what it holds has places of its own
        return f"{type(x).__name__} of {len(x)}"
    if type(x) is Tensor and x.layout == torch.strided:
        return f"a tensor {x.dtype} {tuple(x.shape)} {x.stride()}"
    known = _objects.get(id(x))
    if known is None or known[0]() is not x:
        try:
            here: Callable[[], Any] = weakref.ref(x, functools.partial(_forget, id(x)))
        except TypeError:
            here = lambda: x  # noqa: E731
        known = _objects[id(x)] = here, next(_number)
    return f"{type(x).__name__} {known[1]}"


def _forget(key: int, _: Any) -> None:
    _objects.pop(key, None)
