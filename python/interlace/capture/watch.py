"""What a program depends on and Python may change between two steps: attributes, hooks, closures, globals, tensors.

A trace reads all of this once. A Watch remembers it by identity, in as few containers as there are, so that looking whether anything
has changed takes about 30 ns a value and can be done at every step:

    module 'enc'   {training: True, p: 0.1, _forward_hooks: {...}, ...}     one comparison of the values' identities
    loss_fn        cell 'beta', global 'SCALE', defaults

    watch = Watch(model, loss_fn)
    loss_fn.__closure__[0].cell_contents = 0.2
    watch.moved()     # [Change("'beta' of loss_fn", 0.1, 0.2)]

Of code of the user's own only names that it mentions count, so that what a training loop keeps beside (histories, counters) is not
followed; code that reads attributes by computed names may read all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterator
from operator import is_not
from typing import Any

import torch
from torch import nn

from interlace.capture.sites import is_installed

Tensor = torch.Tensor
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_ANY_NAME = frozenset({"getattr", "setattr", "vars", "__dict__", "hasattr"})
_OF_LOGS = (logging.Filterer, logging.Manager)  # loggers remember which levels they were asked for
_MANY = 4096  # items of a container beyond which only its identity and size count


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


_OF_SAVING = frozenset({"architectures", "transformers_version"})  # Hugging Face's save_pretrained writes them, on whatever rank saves


def plain(x: Any) -> bool:
    return isinstance(x, _PLAIN) or (isinstance(x, (tuple, frozenset)) and all(map(plain, x)))


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
    text = repr(x) if plain(x) else f"a {type(x).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."


@dataclasses.dataclass
class _Held:
    """The values of one container."""

    holder: Any
    keys: tuple
    values: tuple
    where: Callable[[Any], str]
    kind: str
    owner: str | None


class Watch:
    """Everything reachable from a model and its loss function, as it is now."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._dicts: list[_Held] = []
        self._empty: list[dict] = []  # most hooks' tables are
        self._of_empty: list[_Held] = []
        self._lists: list[_Held] = []
        self._attributes: list[tuple[dict, dict, Callable[[Any], str], str | None]] = []  # whole, where only mentioned ones are held
        self._names: list[tuple[Any, str, Any, str, str | None]] = []  # of modules: globals that code mentions
        self._cells: list[tuple[Any, Any, str]] = []
        self.tensors: dict[str, tuple[Tensor, int, str | None]] = {}  # neither parameters nor buffers, with their versions
        self._seen: dict[int, Any] = {}
        self._read: set[str] = set()  # names that functions of the user's own mention
        self._mentioned: dict[type, frozenset[str] | None] = {}
        self._paths = {id(m): path for path, m in model.named_modules()}
        for path, module in model.named_modules():
            self._module(module, path)
        if loss_fn is not None:
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            self._value(loss_fn, "the loss function" if name == "<lambda>" else name)

    # ---- looking ----

    def moved(self) -> list[Change]:
        """What has changed since; values that are equal in another object count as unchanged."""
        found: list[Change] = []
        for h in self._dicts:
            d = h.holder
            if len(d) != len(h.values) or any(map(is_not, d.values(), h.values)):
                found += self._in_dict(h)
        if any(self._empty):
            for h in self._of_empty:
                found += self._in_dict(h) if h.holder else []
        for h in self._lists:
            moved = len(h.holder) != len(h.values) or any(map(is_not, h.holder, h.values))
            if moved and not same(list(h.values), h.holder):
                found.append(Change(h.where(""), list(h.values), list(h.holder), h.kind, _fill(h.holder), h.owner))
        for space, name, value, where, owner in self._names:
            now = space.get(name, MISSING)
            if now is not value and not same(value, now):
                found.append(Change(where, value, now, "value", _setter(space, name), owner))
        for cell, value, where in self._cells:
            now = cell.cell_contents
            if now is not value and not same(value, now):
                found.append(Change(where, value, now, "value", functools.partial(setattr, cell, "cell_contents")))
        for where, (t, version, owner) in self.tensors.items():
            if t._version != version:
                found.append(Change(where, t, t, "tensor", lambda value: None, owner))
        return found

    def changed(self) -> list[Change]:
        """As moved(), and attributes that no code mentions too."""
        found = self.moved()
        for values, before, where, owner in self._attributes:
            if len(values) != len(before) or any(map(is_not, values.values(), before.values())):
                known = {c.where for c in found}
                for key in dict.fromkeys((*before, *values)):
                    old, new = before.get(key, MISSING), values.get(key, MISSING)
                    if old is not new and where(key) not in known:
                        found.append(Change(where(key), old, new, "value", _setter(values, key), owner))
        return found

    def restore(self) -> list[Change]:
        """Puts everything back; gives what had changed."""
        found = self.changed()
        for change in reversed(found):
            if change.kind != "tensor":
                change.put(change.before)
        return found

    @contextlib.contextmanager
    def as_tensors(self, places: Collection[str], dtype: torch.dtype) -> Iterator[dict[int, str]]:
        """Tensors in place of the numbers at these places, put back at the end; gives the places by the tensors' ids."""
        found = [change for change in self._numbers() if change.where in places]
        tensors = [torch.tensor(float(change.before), dtype=dtype) for change in found]
        for change, t in zip(found, tensors, strict=True):
            change.put(t)
        try:
            yield {id(t): change.where for change, t in zip(found, tensors, strict=True)}
        finally:
            for change in found:
                change.put(change.before)

    def _numbers(self) -> Iterator[Change]:
        """Every place that holds a float."""
        for h in (*self._dicts, *self._lists):
            for key, value in zip(h.keys, h.values, strict=True):
                if type(value) is float:
                    yield Change(h.where(key), value, value, h.kind, _setter(h.holder, key), h.owner)
        for space, name, value, where, owner in self._names:
            if type(value) is float:
                yield Change(where, value, value, "value", _setter(space, name), owner)
        for cell, value, where in self._cells:
            if type(value) is float:
                yield Change(where, value, value, "value", functools.partial(setattr, cell, "cell_contents"))

    def numbers(self) -> dict[str, float]:
        """The floats, by place."""
        return {change.where: change.before for change in self._numbers()}

    def state(self) -> Iterator[tuple[str, str]]:
        """(place, value) of all that is plain, and the identity of the rest: equal states make equal programs."""
        for h in (*self._dicts, *self._lists):
            for key, value in zip(h.keys, h.values, strict=True):
                yield h.where(key), _mark(value)
        for _, _, value, where, _ in self._names:
            yield where, _mark(value)
        for _, value, where in self._cells:
            yield where, _mark(value)

    def _in_dict(self, h: _Held) -> list[Change]:
        before = dict(zip(h.keys, h.values, strict=True))
        found = []
        for key in dict.fromkeys((*h.keys, *h.holder)):
            if key in _OF_SAVING:
                continue
            old, new = before.get(key, MISSING), h.holder.get(key, MISSING)
            if old is MISSING and isinstance(key, str) and h.kind == "value" and not self._counts(h, key):
                continue
            if not same(old, new):
                found.append(Change(h.where(key), old, new, h.kind, _setter(h.holder, key), h.owner))
        return found

    def _counts(self, h: _Held, key: str) -> bool:
        """Whether a new attribute is one that code mentions."""
        mentioned = self._mentioned.get(type(self._seen.get(id(h.holder))), None)
        return mentioned is None or key in mentioned

    # ---- finding ----

    def _module(self, module: nn.Module, path: str) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        owner = f"module '{path}'" if path else "the model"
        values = vars(module)
        mentioned = self._names_of(type(module))
        if mentioned is not None:  # functions of this module alone, a forward that was put in its place
            codes = (getattr(getattr(v, "__func__", v), "__code__", None) for v in values.values())
            mentioned = mentioned.union(*(_mentions(code) for code in codes if code is not None))
        self._seen[id(values)] = module

        def where(key: Any, owner: str = owner) -> str:
            return f"'{key}' of {owner}"

        self._hold_all(values, where, "value", path, mentioned)
        for table, kind in _TABLES.items():
            own = values[table]
            self._seen[id(own)] = own
            self._hold(own, functools.partial(_entry, kind, owner), kind, path)
        for name, value in values.items():
            if name not in _TABLES and (mentioned is None or name in mentioned or name.startswith("_")):
                self._value(value, where(name), path)
        self._class(type(module))

    def _hold(self, d: dict, where: Callable[[Any], str], kind: str, owner: str | None) -> None:
        held = _Held(d, tuple(d), tuple(d.values()), where, kind, owner)
        if d:
            self._dicts.append(held)
        else:
            self._of_empty.append(held)
            self._empty.append(d)

    def _hold_all(self, d: dict, where: Callable[[Any], str], kind: str, owner: str | None, names: frozenset[str] | None) -> None:
        if names is None:
            self._hold(d, where, kind, owner)
            return
        self._attributes.append((d, dict(d), where, owner))
        for key in d:
            if key in names or (owner is not None and key in _OF_MODULES):
                self._names.append((d, key, d[key], where(key), owner))

    def _value(self, x: Any, where: str, owner: str | None = None) -> None:
        if isinstance(x, _PLAIN) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        if isinstance(x, Tensor):
            if not isinstance(x, nn.Parameter) and not x.is_inference():
                self.tensors[where] = (x, x._version, owner)
        elif isinstance(x, nn.Module):
            self._module(x, self._paths.get(id(x), where))
        elif isinstance(x, types.FunctionType):
            self._function(x, where)
        elif isinstance(x, types.MethodType):
            self._value(x.__self__, where, owner)
            self._value(x.__func__, where, owner)
        elif isinstance(x, functools.partial):
            for part in (x.func, x.args, x.keywords):
                self._value(part, where, owner)
        elif isinstance(x, dict):
            if len(x) <= _MANY:
                self._hold(x, lambda k: f"{where}[{k!r}]", "value", owner)
                for key, item in list(x.items()):
                    self._value(item, f"{where}[{key!r}]", owner)
        elif isinstance(x, (list, tuple)):
            if len(x) <= _MANY:
                if isinstance(x, list):
                    items = functools.partial(_item, where)
                    self._lists.append(_Held(x, tuple(range(len(x))), tuple(x), items, "value", owner))
                for i, item in enumerate(x):
                    self._value(item, f"{where}[{i}]", owner)
        elif isinstance(x, (type, types.ModuleType, torch.optim.Optimizer, *_OF_LOGS)) or not hasattr(x, "__dict__"):
            return
        elif not type(x).__module__.startswith(("torch", "numpy", "interlace")):
            self._object(x, where, owner)

    def _object(self, x: Any, where: str, owner: str | None) -> None:
        names = self._names_of(type(x))
        names = None if names is None else names | self._read
        values = vars(x)
        self._seen[id(values)] = x
        self._hold_all(values, lambda key: f"'{key}' of {where}", "value", owner, names)
        for name, item in list(values.items()):
            if names is None or name in names:
                self._value(item, f"'{name}' of {where}", owner)
        self._class(type(x))

    def _class(self, cls: type) -> None:
        """What methods of the user's own mention."""
        for base in cls.__mro__:
            if id(base) in self._seen or _installed(base):
                continue
            self._seen[id(base)] = base
            for name, item in vars(base).items():
                function = item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
                if isinstance(item, property):
                    function = item.fget
                if isinstance(function, types.FunctionType):
                    self._function(function, f"{base.__name__}.{name}")
                elif isinstance(item, (bool, int, float)):
                    self._names.append((_Attributes(base), name, item, f"'{name}' of class {base.__name__}", None))

    def _names_of(self, cls: type) -> frozenset[str] | None:
        """The names that a class's own code mentions; None: any, for classes of libraries."""
        if cls not in self._mentioned:
            names: set[str] = set()
            any_name = False
            for base in cls.__mro__:
                if base in (object, nn.Module):
                    continue
                if _installed(base):
                    any_name = True
                    break
                for method, item in vars(base).items():
                    if method == "__init__":  # it only sets up
                        continue
                    for f in (item, getattr(item, "__func__", None), getattr(item, "fget", None)):
                        if isinstance(f, types.FunctionType):
                            names |= _mentions(f.__code__)
            self._mentioned[cls] = None if any_name or names & _ANY_NAME else frozenset(names)
        return self._mentioned[cls]

    def _function(self, f: types.FunctionType, where: str) -> None:
        if id(f.__code__) in self._seen and not f.__closure__:
            return
        self._seen[id(f.__code__)] = f
        code = f.__code__
        installed = is_installed(code.co_filename)
        if not installed:
            self._read |= _mentions(code)
        for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=False):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, content, f"'{name}' of {where}"))
            self._value(content, f"'{name}' of {where}")
        for default in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self._value(default, f"a default of {where}")
        if installed:
            return
        names = _mentions(code)
        for name in sorted(_loads(code) & f.__globals__.keys()):
            self._global(f.__globals__, name, names, where)

    def _global(self, space: dict, name: str, names: set[str], where: str) -> None:
        x = space[name]
        if isinstance(x, types.ModuleType):
            if not _installed(x):
                for attribute in sorted(names & vars(x).keys()):
                    if not isinstance(vars(x)[attribute], types.ModuleType):
                        self._global(vars(x), attribute, names, where)
            return
        if (id(space), name) in self._seen:  # type: ignore[comparison-overlap]
            return
        self._seen[(id(space), name)] = space  # type: ignore[index]
        if name.startswith("__") or isinstance(x, type):
            return
        self._names.append((space, name, x, f"global '{name}' of {where}", None))
        self._value(x, f"global '{name}' of {where}")


# Attributes that torch.nn.Module's own code reads.
_OF_MODULES = frozenset(name for name in vars(nn.Module()) if name not in _TABLES)


class _Attributes:
    """A class's attributes, as a dict is read and written."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def get(self, name: str, default: Any) -> Any:
        return vars(self.cls).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)

    def pop(self, name: str, default: Any = None) -> None:
        delattr(self.cls, name)


def _item(where: str, i: Any) -> str:
    return where if i == "" else f"{where}[{i}]"


def _entry(kind: str, owner: str, key: Any) -> str:
    return f"{kind} '{key}' of {owner}"


def _setter(space: Any, name: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is MISSING:
            space.pop(name, None)
        else:
            space[name] = value

    return put


def _fill(items: list) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        items[:] = value

    return put


def _mentions(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _mentions(constant)
    return names


@functools.cache
def _loads(code: types.CodeType) -> set[str]:
    """Globals that code reads; `_mentions` has its attributes too, and a script's own `loss` is none of `out.loss`."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _loads(constant)
    return names


def _mark(x: Any) -> str:
    return repr(x) if plain(x) else f"{type(x).__name__} at {id(x)}"


def _installed(x: Any) -> bool:
    """Whether a class or module is part of a package, and so is nobody's to change."""
    module = x if isinstance(x, types.ModuleType) else sys.modules.get(getattr(x, "__module__", ""))
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    return (file is None and name != "__main__") or name.partition(".")[0] in ("torch", "interlace") or is_installed(str(file))
