"""What functools.lru_cache keeps of a trace.

A model that caches what it computes of a number (angles by the number of positions) would keep the fakes of the trace, and the next run would
meet them. Python has no list of such caches. To look for them in all modules takes a twentieth of a second, as long as the trace of a small
model: modules are looked at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


class Caches:
    """All functions with an lru_cache that there are."""

    def __init__(self) -> None:
        self.found: weakref.WeakSet[Any] = weakref.WeakSet()
        self._collections: list[int] = []
        self._modules: set[str] = set()

    def look(self) -> Iterable[Any]:
        """New objects are among the young ones until a collection of those. gc.freeze() hides all: those of modules are found by name."""
        collections = [generation["collections"] for generation in gc.get_stats()[1:]]
        objects = gc.get_objects() if collections != self._collections else gc.get_objects(generation=0) + gc.get_objects(generation=1)
        names = [name for name in list(sys.modules) if name not in self._modules]
        spaces = [vars(m) for name in names if isinstance(m := sys.modules.get(name), ModuleType)]
        spaces += [vars(x) for space in spaces for x in space.values() if issubclass(type(x), type)]
        objects += [x for space in spaces for x in space.values()]
        self._collections = collections
        self._modules.update(names)
        self.found.update([x for x in objects if type(x) is functools._lru_cache_wrapper])
        return self.found


_caches = Caches()


def _fakes(found: list[Any], hops: int = 4) -> bool:
    """Whether one of these is a fake, or holds one: a tuple or an object, its attributes."""
    if any(isinstance(x, FakeTensor) for x in found):
        return True
    found = [x for x in found if not isinstance(x, (type, ModuleType, FunctionType, nn.Module))]
    return bool(found and hops) and _fakes(gc.get_referents(*found)[:512], hops - 1)


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Caches that were given fakes to keep are empty afterwards."""
    before = {id(cache): cache.cache_info() for cache in _caches.found}
    try:
        yield
    finally:
        for cache in _caches.look():
            info = cache.cache_info()
            if info.currsize and info != before.get(id(cache)) and _fakes(gc.get_referents(cache)):
                cache.cache_clear()
