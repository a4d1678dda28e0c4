"""Whether a program depends on what stands beside the tensors of a batch: names of files, texts, numbers of samples.

They are replaced by values that whoever reads them fails with, and the model is traced once more: the same text says that nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from interlace.capture.inputs import InputSpec, family, leaves, rebuild
from interlace.errors import CaptureError

_KEPT = frozenset(
    {"__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__dir__", "__init_subclass__", "__subclasshook__"}
)


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError("it is read")


def _made(base: type) -> type:
    asked = {name: _refused for name in dir(base) if name not in _KEPT and callable(getattr(base, name))}
    return type(base.__name__, (base,), asked)


_KINDS: dict[type, Any] = {base: _made(base) for base in (str, int, float)} | {bool: None}  # nobody can make other kinds of the rest


def stand_in(x: Any) -> Any:
    """Another text or number, for C++ reads it without asking; of a truth value the other one, for there are no more."""
    if type(x) is bool:
        return not x
    return _KINDS[type(x)](f"\x00{len(x)}" if type(x) is str else x + 1 if type(x) is int else 0.37 if x != 0.37 else 0.73)


def moved(before: InputSpec, after: InputSpec) -> set[str]:
    """Families of texts and numbers that both have, and that differ."""
    was, now = ({path: x for path, x in spec.fixed() if type(x) in _KINDS} for spec in (before, after))
    changed = {family(p) for p in was.keys() | now.keys() if type(was.get(p)) is not type(now.get(p)) or was.get(p) != now.get(p)}
    return changed & set(map(family, was)) & set(map(family, now))


def unread(micro_batch: Any, families: Collection[str], trace: Callable[[Any], Any]) -> set[str]:
    """Those of the families that nobody reads; `trace` gives what must stay the same."""

    def same(some: Collection[str]) -> bool:
        replaced = {path: stand_in(x) for path, x in leaves(micro_batch) if type(x) in _KINDS and family(path) in some}
        try:
            return bool(trace(rebuild(micro_batch, replaced)) == expected)
        except Exception:
            return False

    try:
        expected = trace(micro_batch)
    except Exception:
        return set()
    return set(families) if same(families) else {f for f in families if same([f])} if 1 < len(families) <= 8 else set()
