"""What code can reach and read: the objects behind a model and its loss function, and the names that their code mentions.

Of the user's own code only what runs is looked at: `forward`, the loss function, and functions, methods and properties whose names
such code mentions. Of the attributes of objects of the user's classes only those count that it mentions, so that what a training loop
keeps beside (histories, counters) is not followed; a class whose code reads attributes by computed names may read all of them, and so
may classes of libraries.

Not followed: files, what other processes write, arrays above 4 MiB, tensors above 64 KiB that are written behind PyTorch's back (`t.data`,
NumPy).
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import datetime
import dis
import enum
import functools
import logging
import numbers
import os
import pathlib
import random
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from interlace.capture.model_tensors import OWN_HOOK
from interlace.capture.released import Released
from interlace.capture.sites import is_installed

Tensor = torch.Tensor
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
_SIMPLE = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range, enum.Enum, datetime.date,
    datetime.time, datetime.timedelta, pathlib.PurePath, numbers.Number,
)  # fmt: skip
_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_ANY_NAME = frozenset({"getattr", "setattr", "vars", "__dict__", "hasattr"})
_OF_LOGS = (logging.Filterer, logging.Manager)  # loggers remember which levels they were asked for
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_CLOCKS = frozenset({"time", "datetime", "uuid", "secrets"})
_NOBODYS = ("torch", "numpy", "interlace")
_FEW = 64
_MANY = 4096  # items of a container beyond which only its identity and size count
_SMALL, _LARGE = 1 << 16, 1 << 22  # bytes that are compared at each look; of which a checksum is
# Attributes that torch.nn.Module's own code reads.
_OF_MODULES = frozenset(name for name in vars(nn.Module()) if name not in _TABLES) | {"forward"}


def simple(x: Any) -> bool:
    return isinstance(x, _SIMPLE)


@dataclasses.dataclass
class Held:
    """The values of one container. `names`: of keys that count; None: all."""

    holder: Any
    keys: tuple
    values: tuple
    where: Callable[[Any], str]
    kind: str
    owner: str | None
    names: frozenset | set | None

    def counts(self, key: Any) -> bool:
        return self.names is None or not isinstance(key, (str, bytes)) or key in self.names


@dataclasses.dataclass
class Place:
    """A name, or something that is looked into: `look` gives what is there or in `of`, `put` changes it back (MISSING takes it away)."""

    of: Any
    look: Callable[[], Any]
    value: Any
    where: str
    owner: str | None
    put: Callable[[Any], None] | None


class Attributes:
    """Of a class, a function or a cell, as a dict is read and written."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def get(self, name: str, default: Any) -> Any:
        if isinstance(self.x, type):
            return vars(self.x).get(name, default)
        try:
            return getattr(self.x, name, default)
        except ValueError:  # an empty cell
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.x, name, value)

    def pop(self, name: str, default: Any = None) -> None:
        delattr(self.x, name)


def setter(space: Any, name: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is MISSING:
            space.pop(name, None)
        else:
            space[name] = value

    return put


class Reach:
    """`tables`, `places`: what there is to look at. `outside`: parameters and buffers of modules that are not the model's (teachers, target
    networks), by their places. `read`: the names that the user's own code mentions. `varies`: it may read a clock, an iterator or one of
    `generators`."""

    def __init__(self, model: nn.Module, loss_fn: Any, known: Collection[int] = ()) -> None:
        """`known`: ids of tensors that need no look."""
        self.read: set[str] = set()
        self._any: set[type] = set()  # classes whose code reads attributes by computed names
        self._paths = {id(m): path for path, m in model.named_modules()}
        parameters = dict(model.named_parameters())
        self._own = {*known, *(id(p) for p in parameters.values())}
        before = (-1, -1)
        while before != (len(self.read), len(self._any)):  # each round knows more names
            before = len(self.read), len(self._any)
            self.tables: list[Held] = []
            self.places: list[Place] = []
            self.outside: dict[str, Tensor] = {}
            self.generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []  # how to get and set a state
            self.varies = False
            self.typed: dict[int, dict[str, Any]] = {}  # globals of code that calls type()
            self.matches = False  # code has a `case int():`, which nothing can stand for
            self._seen: dict[Any, Any] = {}
            for path, module in model.named_modules():
                self._value(module, path)
            for path, p in parameters.items():
                self._value(tuple((p._backward_hooks or {}).values()), f"a hook of parameter '{path}'")
            if loss_fn is not None:
                name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
                self._value(loss_fn, "the loss function" if name == "<lambda>" else name)
        self.varies |= bool(self.generators)
        for i, table in enumerate(hooks_of_all()):
            self._hold(table, functools.partial(_item, f"'global_{i}_hooks' of torch.nn"), "value", None)
        self._look(None, _hooks_of(list(parameters.values())), "the hooks of a parameter", None, lambda value: None)

    def _module(self, module: nn.Module, where: str) -> None:
        path = self._paths.get(id(module))
        outside = path is None  # a criterion of the loss function's, say
        owner = where if outside else f"module '{path}'" if path else "the model"
        values = vars(module)
        self._seen[id(values)] = module
        names = self.names_of(type(module))
        names = None if names is None else names | _OF_MODULES
        self._hold(values, functools.partial(_attribute, owner), "value", path, names)
        for table, kind in _TABLES.items():
            kept = getattr(module, table)
            entries = kept if isinstance(kept, dict) else dict(kept.items())  # TorchScript's own
            self._seen[id(kept)] = module
            self._hold(entries, functools.partial(_entry, kind, owner), kind, path)
            for name, x in entries.items() if outside else ():  # those of the model are the program's
                if isinstance(x, Tensor) and id(x) not in self._seen and not (isinstance(x, Released) or x.is_meta or x.is_inference()):
                    self._seen[id(x)] = x
                    self.outside[_entry(kind, owner, name)] = x
                self._value(x, _entry(kind, owner, name))
        for name, value in values.items():
            if name not in _TABLES and name != "_non_persistent_buffers_set" and (names is None or name in names):
                self._value(value, f"'{name}' of {owner}", path)
        self._class(type(module))

    def _hold(self, d: Any, where: Callable[[Any], str], kind: str, owner: str | None, names: Any = None) -> None:
        keys, values = (tuple(d), tuple(d.values())) if isinstance(d, dict) else (tuple(range(len(d))), tuple(d))
        self.tables.append(Held(d, keys, values, where, kind, owner, names))

    def _slot(self, space: Any, name: str, where: str, owner: str | None = None) -> Any:
        return self._look(None, functools.partial(space.get, name, MISSING), where, owner, setter(space, name))

    def _look(self, of: Any, look: Callable[[], Any], where: str, owner: str | None, put: Callable[[Any], None] | None) -> Any:
        self.places.append(Place(of, look, look(), where, owner, put))
        return self.places[-1].value

    def _value(self, x: Any, where: str, owner: str | None = None) -> None:
        if isinstance(x, _SIMPLE) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        own = type(x).__module__
        self.varies |= hasattr(type(x), "__next__")
        if isinstance(x, Tensor):
            if id(x) not in self._own and not (isinstance(x, Released) or x.is_inference()):
                self._look(x, functools.partial(_tensor, x), where, owner, None)
        elif isinstance(x, nn.Module):
            self._module(x, where)
        elif isinstance(x, types.FunctionType):
            self._function(x, where)
        elif isinstance(x, types.MethodType):
            self._value(x.__self__, where, owner)
            self._value(x.__func__, where, owner)
        elif isinstance(x, (staticmethod, classmethod)):
            self._value(x.__func__, where, owner)
        elif isinstance(x, property):
            self._value(x.fget, where, owner)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, functools.partial):
            for part in (x.func, x.args, x.keywords):
                self._value(part, where, owner)
        elif isinstance(x, (weakref.ref, ContextVar)):
            look = x if isinstance(x, weakref.ref) else functools.partial(x.get, None)
            self._look(x, look, where, owner, getattr(x, "set", lambda value: None))
            self._value(look(), where, owner)
        elif isinstance(x, type(os.environ)):
            read = {name.encode() for name in self.read}
            self._hold(x._data, lambda key: f"environment variable {os.fsdecode(key)}", "value", None, read)  # type: ignore[attr-defined]
        elif isinstance(x, dict):
            if len(x) <= _MANY:
                self._hold(x, lambda k: f"{where}[{k!r}]", "value", owner)
                for key, item in list(x.items()):
                    self._value(item, f"{where}[{key!r}]", owner)
        elif isinstance(x, (list, tuple)):
            if len(x) <= _MANY:
                if isinstance(x, list):
                    self._hold(x, functools.partial(_item, where), "value", owner)
                for i, item in enumerate(x):
                    self._value(item, f"{where}[{i}]", owner)
        elif isinstance(x, (set, collections.deque)):
            if len(x) <= _MANY:
                self._look(x, functools.partial(tuple, x), where, owner, functools.partial(_refill, x))
        elif own == "numpy" or isinstance(x, (bytearray, ctypes.Structure, ctypes.Array, ctypes._SimpleCData)) or own == "array":
            if bytes_in(x) is not None:
                self._look(x, functools.partial(bytes_in, x), where, owner, None)
        elif isinstance(x, random.Random):
            self.generators.append((x.getstate, x.setstate))
        elif own.startswith("numpy.random") and hasattr(x, "bit_generator"):
            bits = x.bit_generator
            self.generators.append((functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")))
        elif isinstance(x, torch.Generator):
            self.generators.append((x.get_state, cast("Callable[[Any], None]", x.set_state)))
        elif own.startswith("interlace.integrations"):
            self._others_loop(x, owner)
        elif isinstance(x, (types.ModuleType, torch.optim.Optimizer, *_OF_LOGS)) or own.startswith(("torch", "numpy", "interlace")):
            return
        else:
            self._object(x, where, owner)

    def _others_loop(self, x: Any, owner: str | None) -> None:
        """A loss that a trainer of another library computes: `followed` gives names of its methods that run, functions, and it. Of its
        attributes those count that the user's subclasses mention."""
        methods, functions, loop = x.followed() if hasattr(x, "followed") else (set(), (), None)
        if loop is None:
            return
        self.read |= methods
        for f in functions:
            self._value(f, getattr(f, "__name__", type(f).__name__))
        self._class(type(loop))
        self._mentioned(loop, "the trainer", owner)

    def _mentioned(self, x: Any, where: str, owner: str | None) -> None:
        """Of an object of a library's those attributes that are mentioned."""
        values = vars(x)
        self._seen[id(x)] = self._seen[id(values)] = x
        self._hold(values, functools.partial(_attribute, where), "value", owner, self.read)
        for name in sorted(self.read & values.keys()):
            item, there = values[name], f"'{name}' of {where}"
            own = type(item).__module__
            plain = isinstance(item, (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, *_SIMPLE))
            if plain or not hasattr(item, "__dict__") or not _installed(type(item)) or own.startswith(("torch", "numpy", "interlace")):
                self._value(item, there, owner)
            elif id(item) not in self._seen:
                self._mentioned(item, there, owner)

    def _object(self, x: Any, where: str, owner: str | None) -> None:
        names = self.names_of(type(x))
        if hasattr(x, "__dict__"):
            values = vars(x)
            self._seen[id(values)] = x
            self._hold(values, functools.partial(_attribute, where), "value", owner, names)
            for name, item in list(values.items()):
                if names is None or name in names:
                    self._value(item, f"'{name}' of {where}", owner)
        if not _installed(type(x)):
            for base in type(x).__mro__:
                slots = vars(base).get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    if not name.startswith("__"):
                        self._value(self._slot(Attributes(x), name, f"'{name}' of {where}", owner), f"'{name}' of {where}", owner)
        self._class(type(x))

    def _class(self, cls: type) -> None:
        """Methods of the user's own that run, and the values beside them."""
        if (id(cls), "class") in self._seen or _installed(cls):
            return
        self._seen[(id(cls), "class")] = cls
        bases = [base for base in cls.__mro__ if not _installed(base)]
        for name in dict.fromkeys(name for base in bases for name in list(vars(base))):
            special = name.startswith("__") and name.endswith("__")
            if not (special or name == "forward" or name in self.read or cls in self._any) or name == "__init__":  # it only sets up
                continue
            for base in bases:
                item = vars(base).get(name, MISSING)
                if special and not isinstance(item, types.FunctionType):
                    continue
                self._slot(Attributes(base), name, f"'{name}' of class {base.__name__}")
                self._value(item, f"{base.__name__}.{name}")
                code = getattr(getattr(item, "fget", getattr(item, "__func__", item)), "__code__", None)
                if code is not None and not _ANY_NAME.isdisjoint(code.co_names):
                    self._any.add(base)

    def names_of(self, cls: type) -> set[str] | None:
        """The names of its attributes that count; None: any, for classes of libraries."""
        for base in cls.__mro__:
            if base not in (object, nn.Module) and (base in self._any or _installed(base)):
                return None
        return self.read

    def _function(self, f: types.FunctionType, where: str) -> None:
        installed = is_installed(f.__code__.co_filename)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._value(self._slot(Attributes(cell), "cell_contents", f"'{name}' of {where}"), f"'{name}' of {where}")
        for default in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self._value(default, f"a default of {where}")
        if installed:
            return
        for name in _OF_FUNCTIONS:
            self._slot(Attributes(f), name, f"'{name}' of {where}")
        self._value(vars(f), where)
        names = mentions(f.__code__)
        self.read |= names
        loaded, imports = loads(f.__code__)
        if "type" in loaded:
            self.typed[id(f.__globals__)] = f.__globals__
        self.matches |= _matches(f.__code__)
        for name in sorted(loaded & f.__globals__.keys()):
            self._global(f.__globals__, name, names, where)
        for name in sorted(imports & sys.modules.keys()):
            self._in_module(sys.modules[name], names, where)

    def _global(self, space: dict, name: str, names: frozenset[str], where: str) -> None:
        x = space[name]
        if isinstance(x, types.ModuleType):
            self._in_module(x, names, where)
        elif (id(space), name) not in self._seen and not name.startswith("__"):
            self._seen[(id(space), name)] = space
            self._slot(space, name, f"global '{name}' of {where}")
            self.varies |= getattr(x, "__module__", None) in _CLOCKS
            self._value(x, f"global '{name}' of {where}")

    def _in_module(self, module: types.ModuleType, names: frozenset[str], where: str) -> None:
        self.varies |= module.__name__ in _CLOCKS
        if module is os and not names.isdisjoint({"environ", "getenv"}):
            self._value(os.environ, "os.environ")
        for attribute in sorted(names & vars(module).keys()):
            if isinstance(vars(module)[attribute], types.ModuleType):
                continue
            if not _installed(module):
                self._global(vars(module), attribute, names, where)
            elif (id(module), attribute) not in self._seen:
                self._seen[(id(module), attribute)] = module
                item = self._slot(vars(module), attribute, f"'{attribute}' of {module.__name__}")
                if plain_container(item, module):
                    self._value(item, f"'{attribute}' of {module.__name__}")


def hooks_of_all() -> list[dict]:
    """Those of torch.nn.modules.module.register_module_forward_hook and its like."""
    return [table for name, table in vars(nn_module).items() if name.startswith("_global_") and isinstance(table, dict)]


def _hooks_of(parameters: list[nn.Parameter]) -> Callable[[], tuple]:
    """What register_hook and register_post_accumulate_grad_hook were given, but for the trainer's own."""
    from interlace import _runtime

    last: tuple[list, tuple] = [], ()

    def look() -> tuple:
        nonlocal last
        hooks = _runtime.hooks(parameters)
        if hooks != last[0]:
            last = hooks, tuple(hook for hook in hooks if not getattr(hook, OWN_HOOK, False))
        return last[1]

    return look


def _tensor(x: Tensor) -> tuple:
    """Where it is, how often it was written, and what is in it where PyTorch may not know of that."""
    here = x.layout == torch.strided and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
    small = here and x.nbytes <= _SMALL and x.is_contiguous()
    data = x.data_ptr() if small else 0
    return x._version, tuple(x.shape), ctypes.string_at(data, x.nbytes) if data else b""


def bytes_in(x: Any) -> Any:
    """What is in an array; None where nobody can say, or it takes too long."""
    try:
        view = memoryview(x)
        if view.nbytes > _LARGE:
            return None
        return view.tobytes() if view.nbytes <= _SMALL else zlib.crc32(view if view.c_contiguous else view.tobytes())
    except (TypeError, ValueError, BufferError):
        return None


def plain_container(x: Any, module: types.ModuleType, depth: int = 3) -> bool:
    """Whether it is a small container of numbers, texts and the like that `module` shows and others may change, as sys.argv."""
    if not isinstance(x, (list, tuple, dict, set)) or len(x) > _FEW or depth == 0 or module.__name__.startswith(_NOBODYS):
        return False
    return all(simple(item) or plain_container(item, module, depth - 1) for item in (x.values() if isinstance(x, dict) else x))


def _refill(x: Any, items: tuple) -> None:
    x.clear()
    (x.update if isinstance(x, set) else x.extend)(items)


def _item(where: str, i: Any) -> str:
    return where if i == "" else f"{where}[{i}]"


def _attribute(owner: str, key: Any) -> str:
    return f"'{key}' of {owner}"


def _entry(kind: str, owner: str, key: Any) -> str:
    return f"{kind} '{key}' of {owner}"


@functools.cache
def mentions(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes, and texts that could be some (getattr)."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= mentions(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


@functools.cache
def loads(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Globals that code reads, and modules that it imports. `mentions` has its attributes too, and a script's own `loss` is none of
    `out.loss`."""
    found: tuple[set[str], set[str]] = set(), set()
    for i in dis.get_instructions(code):
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[0].add(i.argval)
        elif i.opname == "IMPORT_NAME":
            found[1].add(i.argval)
    if "globals" in found[0]:
        found[0].update(c for c in code.co_consts if isinstance(c, str))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for mine, inner in zip(found, loads(constant), strict=True):
                mine |= inner
    return found


@functools.cache
def _matches(code: types.CodeType) -> bool:
    inner = any(_matches(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return inner or any(i.opname == "MATCH_CLASS" for i in dis.get_instructions(code))


def _installed(x: Any) -> bool:
    """Whether a class or module is part of a package, and so is nobody's to change."""
    module = x if isinstance(x, types.ModuleType) else sys.modules.get(getattr(x, "__module__", ""))
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    return (file is None and name != "__main__") or name.partition(".")[0] in ("torch", "interlace") or is_installed(str(file))
