"""What a capture depends on, as one digest: the model's structure and code, the loss function, the batch's form, torch's settings.

Equal digests mean equal captured programs, so that a later start can leave the capture out. Values of parameters and buffers are not
part of it (the trace never sees them), nor are learning rates. A dropout probability counts only as 0, 1 or between: `drops` lists the
values met, and the cache puts the new ones into the old text (dropout.py). What cannot be described, for example an object with hidden
state that the loss function uses, raises Unsure, and the model is captured.

Code of the user's own counts by its byte code, constants, closures and the globals it names, recursively. Code of installed packages
counts by the content of the files that the model's classes come from, and by what their modules' names refer to, so that a replaced
function is noticed.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlace.capture.model_tensors import device_type
from interlace.capture.reach import hooks_of_all, loads, mentions, plain_container
from interlace.capture.sites import TORCH, is_installed

_TENSOR_BYTES = 64 << 20  # larger constants of the code are not read
_OF_THE_PROCESS = frozenset({"_original_object_hash"})  # attributes of library objects that no two processes share
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


class Unsure(Exception):
    """Something the program may depend on cannot be described; the words say what."""


class Fingerprint:
    """Feeds a SHA-256 with values. Objects met twice are named by their first place, so cycles end."""

    def __init__(self) -> None:
        self.drops: list[tuple[str, float]] = []  # place, dropout probability
        self.holders: dict[str, tuple[Any, str]] = {}  # place → object and attribute, of those in objects such as configurations
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # ids stay those of living objects
        self._modules: dict[int, str] = {}  # of the model: id → path
        self._libraries: set[str] = set()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def word(self, *parts: object) -> None:
        for part in parts:
            data = str(part).encode()
            self._hash.update(f"{len(data)}:".encode() + data)

    # ---- values ----

    def value(self, x: Any, where: str) -> None:
        if isinstance(x, enum.Enum):
            self.word("enum", type(x).__qualname__, x.name)
        elif type(x) in _PLAIN:
            self.word(type(x).__name__, repr(x))
        elif isinstance(x, _TORCH_VALUES):
            self.word("torch", repr(x))
        elif id(x) in self._modules:
            self.word("module", self._modules[id(x)])
        elif id(x) in self._seen:
            self.word("again", self._seen[id(x)])
        else:
            self._seen[id(x)] = len(self._seen)
            self._kept.append(x)
            self._object(x, where)

    def _object(self, x: Any, where: str) -> None:
        if isinstance(x, torch.Tensor):
            self._tensor(x, where)
        elif isinstance(x, type):
            self.type(x, where)
        elif isinstance(x, (types.FunctionType, types.MethodType)):
            self.function(x, where)
        elif isinstance(x, (types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType, torch._ops.OpOverload)):
            self.word("builtin", getattr(x, "__module__", ""), getattr(x, "__qualname__", repr(x)))
        elif isinstance(x, types.ModuleType):
            self.word("package", x.__name__)
        elif isinstance(x, functools.partial):
            self.word("partial")
            self.value(x.func, where)
            self.value(x.args, where)
            self.value(x.keywords, where)
        elif isinstance(x, Mapping):
            self.word("map", type(x).__qualname__, len(x))
            for key, item in x.items():
                self.value(key, where)
                self.named(str(key), item, f"{where}[{key!r}]")
        elif isinstance(x, (list, tuple)):
            self.word("list", type(x).__qualname__, len(x))
            for i, item in enumerate(x):
                self.value(item, f"{where}[{i}]")
        elif isinstance(x, (set, frozenset)):
            if not all(type(item) in _PLAIN for item in x):
                raise Unsure(f"{where} is a set of objects")
            self.word("set", sorted(map(repr, x)))
        elif isinstance(x, Path):
            self.word("path", x)
        elif isinstance(x, nn.Module):
            raise Unsure(f"{where} is a module outside the model")
        elif hasattr(x, "__dict__") and all(base.__flags__ & (1 << 9) or base in (object, types.SimpleNamespace) for base in type(x).__mro__):
            self.type(type(x), where)  # an instance of Python classes: its attributes are all there is
            for key, item in sorted(vars(x).items()):
                if key not in _OF_THE_PROCESS:
                    self.word(key)
                    self.named(key, item, f"{where}.{key}", x)
        else:
            raise Unsure(f"{where} is a {type(x).__qualname__}, which cannot be compared between starts")

    def named(self, name: str, x: Any, where: str, holder: Any = None) -> None:
        """A value under a name that says whether it is a dropout probability."""
        if isinstance(x, float) and ("drop" in name.lower() or name.endswith("_pdrop")):
            self.drops.append((where, x))
            if holder is not None:
                self.holders[where] = (holder, name)
            self.word("probability", 0 if x == 0 else 1 if x == 1 else "p")
        else:
            self.value(x, where)

    def _tensor(self, x: torch.Tensor, where: str) -> None:
        if x.is_meta or x.layout != torch.strided or x.numel() * x.element_size() > _TENSOR_BYTES:
            raise Unsure(f"{where} is a tensor that is not compared")
        flat = x.detach().cpu().contiguous().reshape(-1)
        self.word("tensor", x.dtype, tuple(x.shape), x.stride(), x.requires_grad)
        self._hash.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")

    # ---- code ----

    def function(self, f: Any, where: str) -> None:
        if isinstance(f, types.MethodType):
            self.word("method")
            self.value(f.__self__, where)
            f = f.__func__
        code = f.__code__
        self.word("function", f.__module__, f.__qualname__)
        for i, cell in enumerate(f.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                self.word("empty")
                continue
            self.named(code.co_freevars[i], content, f"{where}: '{code.co_freevars[i]}'")
        self.value(f.__defaults__, where)
        self.value(f.__kwdefaults__, where)
        if vars(f):
            self.value(vars(f), where)
        if is_installed(code.co_filename):
            self.library(f.__module__)
            self.word(code.co_filename, code.co_firstlineno)
            return
        self._code(code, where)
        names, (loaded, imported) = mentions(code), loads(code)
        for name in sorted(loaded & f.__globals__.keys()):
            self.word("global", name)
            self._global(name, f.__globals__[name], names, f"{where}: '{name}'")
        for name in sorted(imported & sys.modules.keys()):
            self._global(name, sys.modules[name], names, f"{where}: '{name}'")
        if not names.isdisjoint(("environ", "getenv")):
            self.word("environment", sorted((name, os.environ.get(name)) for name in names))

    def _code(self, code: types.CodeType, where: str) -> None:
        self.word("code", code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, where)
            else:
                self.value(constant, where)

    def _global(self, name: str, x: Any, names: frozenset[str], where: str) -> None:
        if not isinstance(x, types.ModuleType):
            self.named(name, x, where)
            return
        self.word("package", x.__name__)
        for attribute in sorted(names & vars(x).keys()):
            item = vars(x)[attribute]
            code = getattr(item, "__code__", None)  # torch.ops has any attribute
            there = isinstance(code, types.CodeType) and not is_installed(code.co_filename)
            own = not _of_a_package(x) or there  # config.SCALE, or put there
            if own or plain_container(item, x):
                self.named(attribute, item, f"{where}.{attribute}")
            elif type(item) in _PLAIN or isinstance(item, (types.FunctionType, type)):
                self.word(attribute, repr(item) if type(item) in _PLAIN else (item.__module__, item.__qualname__))

    def type(self, cls: type, where: str) -> None:
        """A class by its code and that of its bases."""
        for base in cls.__mro__:
            self.word("class", base.__module__, base.__qualname__)
            if id(base) in self._seen and base is not cls:
                continue
            self._seen.setdefault(id(base), len(self._seen))
            self._kept.append(base)
            if base is object or not base.__flags__ & (1 << 9):
                continue
            if _of_a_package(sys.modules.get(base.__module__)):
                self.library(base.__module__)
                self._names_of(vars(base))
                continue
            for name, item in vars(base).items():
                if name in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl"):
                    continue
                self.word(name)
                if isinstance(item, (staticmethod, classmethod)):
                    item = item.__func__
                if isinstance(item, property):
                    for part in (item.fget, item.fset):
                        self.value(part, f"{where}.{name}")
                elif inspect.isdatadescriptor(item) and not isinstance(item, types.FunctionType):
                    self.word("slot")
                else:
                    self.named(name, item, f"{where}.{name}")

    def library(self, module: str) -> None:
        """An installed module: the content of its file, and what its names refer to. torch counts by its version."""
        if module in self._libraries:
            return
        self._libraries.add(module)
        loaded = sys.modules.get(module)
        file = getattr(loaded, "__file__", None)
        if loaded is None or file is None or file.startswith(TORCH) or module.partition(".")[0] in sys.stdlib_module_names:
            self.word("installed", module)
            return
        self.word("installed", module, _file_digest(file))
        self._names_of(vars(loaded))

    def _names_of(self, names: Mapping[str, Any]) -> None:
        for name, item in sorted(names.items()):
            if isinstance(item, (types.FunctionType, type)):
                code = getattr(item, "__code__", None)
                place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
                self.word(name, item.__module__, item.__qualname__, place)
            elif type(item) in (bool, int, float) and not name.startswith("__"):  # texts may name the process
                self.word(name, repr(item))

    # ---- models ----

    def model(self, model: nn.Module) -> None:
        self.word(device_type([*model.parameters(), *model.buffers()]))  # regions of torch.autocast for it count
        for path, module in model.named_modules():
            self._modules[id(module)] = path
        for path, module in model.named_modules(remove_duplicate=False):
            self.word("at", path, self._modules[id(module)])
        for path, module in model.named_modules():
            where = f"module '{path}'"
            self.word(where)
            self.value(type(module), where)
            for kind in ("_parameters", "_buffers"):
                for name, t in getattr(module, kind).items():
                    self._model_tensor(kind, name, t)
            self.word(sorted(module._non_persistent_buffers_set))
            for key, item in sorted(vars(module).items()):
                if key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                    continue
                self.word(key)
                if "hooks" in key and isinstance(item, Mapping):  # their keys are counts of this process
                    self.value(list(item.values()), f"{where}: {key}")
                elif key == "p" and isinstance(module, nn.modules.dropout._DropoutNd):
                    self.named("dropout", item, f"{where}.p")
                else:
                    self.named(key, item, f"{where}.{key}")

    def _model_tensor(self, kind: str, name: str, t: torch.Tensor | None) -> None:
        if t is None:
            self.word(kind, name, "none")
            return
        tied = id(t) in self._seen
        number = self._seen.setdefault(id(t), len(self._seen))
        self._kept.append(t)
        strides = t.stride() if t.layout == torch.strided else ()
        self.word(kind, name, t.dtype, tuple(t.shape), strides, t.requires_grad, number if tied else "own", type(t).__name__)
        self.value(list((t._backward_hooks or {}).values()), name)

    def settings(self) -> None:
        """Switches of torch that change what is traced."""
        cuda = torch.backends.cuda
        there = torch.accelerator.current_accelerator()
        cast = [d for d in ("cpu", "cuda" if there is None else there.type) if torch.amp.is_autocast_available(d)]
        self.word(
            torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in cast],
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), torch.backends.mkldnn.enabled,
            sys.version_info[:3],
        )  # fmt: skip
        self.value([list(hooks.values()) for hooks in hooks_of_all()], "hooks of all modules")


def _of_a_package(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or is_installed(file)


@functools.cache
def _file_digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as e:
        raise Unsure(f"{file} cannot be read ({e.strerror})") from None
