"""Records the ATen ops of forward and backward as functional program text.

The recorder is a dispatch mode above fake tensors: every op that reaches it runs on fakes (sizes and storages, no
data) and becomes one line. A value of the program is known by the storage it lives in:

- A result in a new storage owns it; a result in a known storage is a view, printed `in %root+offset`.
- An op that mutates is recorded in its functional form; its result becomes the storage's new root ("version"), and a
  view of an older version is taken again, by a `view` op, when it is next read. So the text is in single assignment,
  and what eager PyTorch would read is what the program reads.

    y = (x * 2).detach(); v = y[0]; y.add_(1); x + v        %1 = aten.mul.Tensor(%0, 2)
                                                            %2 in %1+0 = aten.select.int(%1, 0, 0)
                                                            %3 = aten.add.Tensor(%1, 1)
                                                            %4 in %3+0 = view(%3)
                                                            %5 = aten.add.Tensor(%0, %4)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.capture.check_ops import dtypes_of, promise
from interlace.capture.constants import Constants, NotConstant
from interlace.capture.functional import OpInfo, corrected, draws, functional_arguments, omitted, op_info
from interlace.capture.literals import FORMATS, DimPrinter, dtype_name, number, quote
from interlace.capture.loss import unwritable
from interlace.capture.numbers import as_python
from interlace.capture.own_draws import OwnDraws
from interlace.capture.reads import Reads
from interlace.capture.sites import Sites
from interlace.capture.sized import Sized
from interlace.capture.storages import Entry, Storage
from interlace.capture.ways import Ways
from interlace.capture.writes import written_by
from interlace.errors import CaptureError

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
_COMPUTED = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}  # views by a bit of the tensor alone
_COMPUTED[aten._efficientzerotensor.default] = aten.zeros.default  # of forward-mode differentiation: they have no memory
Tensor = torch.Tensor


class Recorder(TorchDispatchMode):
    def __init__(
        self, fakes: FakeTensorMode, sites: Sites, dims: DimPrinter, constants: Constants, ways: Ways, lift: Callable[..., Tensor],
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """`device`: the type of those that the program is for; fakes are of CPUs on any."""
        super().__init__()
        self.fakes, self.sites, self.dims, self.constants, self.ways, self.device = fakes, sites, dims, constants, ways, device
        self._sized, self.own_draws, self.reads = Sized(self), OwnDraws(self), Reads(sites, ways)
        self.lines, self.part, self.num_ops, self.next_value, self._next_stream = list[str](), "fwd", 0, 0, 0
        # The first call of each operator and dtypes, with fakes; and their tags.
        self.calls, self.tags = dict[Any, tuple[OpOverload, tuple, dict]](), dict[Any, str]()
        self._entries, self._storages = dict[int, Entry](), dict[int, Storage]()
        self.lift = lift  # turns a tensor that is not the model's into a fake that it has declared
        self.declared: dict[int, Storage] = {}  # of what exists before the program, by its id

    # ---- values ----

    def declare(self, fake: Tensor) -> str:
        """Gives a fake tensor that exists before the program (parameter, buffer, input, constant) its value; "%3:
        f32[2]"."""
        value = self._own(fake)
        self.declared[id(fake)] = self._entries[id(fake)].storage
        return f"%{value}: {self.dims.type(fake.dtype, tuple(fake.shape), fake.stride())}"

    def declare_as(self, fake: Tensor, value: int) -> None:
        """A fake tensor that has an existing value."""
        storage = Storage(value, fake)
        self._storages[fake.untyped_storage()._cdata] = storage
        self._entries[id(fake)] = Entry(value, storage, fake)

    def value_of(self, t: Tensor) -> int:
        """The value id that a tensor has now. May record a `view` when the storage was written since the tensor was
        made."""
        entry = self._entries.get(id(t))
        if entry is None or (id(t) in self.declared and self._storages.get(t.untyped_storage()._cdata) is not entry.storage):
            entry = self._adopt(t)
        storage = entry.storage
        if entry.version != storage.version:
            entry.value = self._line("view", f"%{storage.root}", [self._view_decl(t, storage)])[0]
            entry.version = storage.version
        return entry.value

    def known_values(self) -> list[tuple[int, Tensor]]:
        """The values so far, and the tensors that have them."""
        return [(entry.value, entry.tensor) for entry in self._entries.values()]

    def moved(self, t: Tensor) -> bool:
        """Whether a declared tensor got another storage (`t.data = ...`)."""
        return self._storages.get(t.untyped_storage()._cdata) is not self.declared.get(id(t), self._entries[id(t)].storage)

    def was_written(self, t: Tensor) -> bool:
        return self.moved(t) or self._entries[id(t)].storage.version > 0

    def next_of(self, t: Tensor) -> int:
        """The value of what was written."""
        return self.value_of(t) if self.moved(t) else self._entries[id(t)].storage.root

    def _own(self, t: Tensor) -> int:
        value = self.next_value
        self.next_value += 1
        storage = Storage(value, t)
        self._storages[t.untyped_storage()._cdata] = storage
        self._entries[id(t)] = Entry(value, storage, t)
        return value

    def _adopt(self, t: Tensor) -> Entry:
        if not isinstance(t, FakeTensor):
            fake = self.lift(t)
            return self._entries[id(fake)]
        storage = self._storages.get(t.untyped_storage()._cdata)
        if id(t) in self._sized.selected:
            raise DynamicOutputShapeException(aten.masked_select.default)
        if storage is None:
            raise CaptureError("a fake tensor made outside the capture reached the model; do not capture inside another trace")
        entry = self._entries[id(t)] = Entry(-1, storage, t)
        entry.version = -1  # take the view now
        return entry

    # ---- text ----

    def literal(self, a: Any) -> str:
        if isinstance(a, Tensor):
            return f"%{self.value_of(a)}"
        t = type(a)
        if t is int:
            return str(a)
        if a is None:
            return "none"
        if t is bool or t is float:
            return number(a)
        if isinstance(a, (list, tuple)):
            return f"[{', '.join([self.literal(x) for x in a])}]"
        if isinstance(a, torch.SymInt):
            return self.dims.dim(a)
        if isinstance(a, torch.dtype):
            return dtype_name(a)
        if isinstance(a, torch.memory_format):
            return FORMATS[a]
        if isinstance(a, str):
            return quote(a)
        if isinstance(a, (torch.SymFloat, torch.SymBool)):
            raise CaptureError(f"the number {a} is computed from a symbolic size; capture with numbers instead (symbolic=False)")
        raise unwritable(t)

    def _view_decl(self, t: Tensor, storage: Storage) -> str:
        text = self.dims.type(t.dtype, tuple(t.shape), t.stride())
        return f"{text} in %{storage.root}+{self.dims.dim(t.storage_offset())}"

    def _line(self, name: str, args: str, decls: list[str], attrs: str = "") -> list[int]:
        """Appends an op; gives the ids of its results ("_" has id -1)."""
        ids, texts = [], []
        for d in decls:
            if d == "_":
                ids.append(-1)
                texts.append(d)
            else:
                ids.append(self.next_value)
                texts.append(f"%{self.next_value}: {d}")
                self.next_value += 1
        tags = self.sites.forward_tags() if self.part == "fwd" else self.sites.backward_tags()
        left = f"{', '.join(texts)} = " if texts else ""
        self.lines.append(f"  {left}{name}({args}) {{{self.part}{tags}{attrs}}}")
        self.num_ops += 1
        return ids

    def mark(self, name: str, *args: str, attrs: str = "") -> None:
        """An op of the program's own: grad, output, assign."""
        self.lines.append(f"  {name}({', '.join(args)}) {{{self.part}{attrs}}}")
        self.num_ops += 1

    def call_python(
        self, module: str, part: str, operands: Sequence[Tensor], results: list[tuple[torch.dtype, tuple[int, ...]]],
        random: bool,
    ) -> list[Tensor]:  # fmt: skip
        """An opaque module: contiguous fake results of the given dtypes and sizes."""
        text = ", ".join([f"%{self.value_of(t)}" for t in operands])
        with _disable_current_modes(), self.fakes:
            fakes = [torch.empty(size, dtype=dtype, device="cpu") for dtype, size in results]
        attrs = f" rng={self._next_stream}" if random else ""
        self._next_stream += random
        attrs += f' module={quote(module)} part="{part}"'
        decls = [self.dims.type(f.dtype, tuple(f.shape), f.stride()) for f in fakes]
        for f, value in zip(fakes, self._line("call.python", text, decls, attrs), strict=True):
            self.declare_as(f, value)
        return fakes

    def snapshot(self, t: Tensor) -> Tensor:
        """A tensor that keeps the value that `t` has now, whatever is written to `t` later. No views are taken of it."""
        return self.at(self.value_of(t), t)

    def at(self, value: int, like: Tensor) -> Tensor:
        with _disable_current_modes(), self.fakes:
            fake = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="cpu")
        self.declare_as(fake, value)
        return fake

    def replace(self, t: Tensor, new: Tensor) -> None:
        """From here on, `t` has the value of `new`."""
        self._write(t, self.value_of(new), new)

    # ---- ops ----

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _DEVICE_OF:  # two thirds of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs, func = kwargs or {}, _COMPUTED.get(func, func)
        if not isinstance(func, OpOverload):
            raise CaptureError(f"the higher-order operator {func} cannot be part of a program; use the plain form of it")
        if (info := op_info(func)).identity:
            return self._identity(func, args, kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            with contextlib.suppress(NotConstant):
                return self.reads.number(args[0], sys._getframe(1))
        if complex in map(type, args):
            func = getattr(func.overloadpacket, "Tensor", func)
            info, args = op_info(func), tuple(self.constants.complex_number(a, dtypes_of(args)) if type(a) is complex else a for a in args)
        args, kwargs = self._fake_args(args), {k: self._fake_args((v,))[0] for k, v in kwargs.items()}
        args, number = as_python(self, func, args)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu") if kwargs["device"] is not None else None
        if kwargs.get("generator") is not None:
            return self.own_draws.draw(func, args, kwargs)
        if (fix := corrected(func, args, kwargs)) is not None:
            return self._corrected(func, args, *fix)
        if info.moves_view:
            return self._move_view(func, args, kwargs)
        if info.mutated:
            return self._mutate(func, info, args, kwargs)
        if func in self._sized.forms and (done := self._sized.forms[func](*args, **kwargs)) is not None:
            return done
        text = self.arguments(args, kwargs)
        results = self._sized.promised(func, args, kwargs)
        self.emit(func, info, args, kwargs, text, results)
        self.constants.numbers |= {id(results): results} if number else {}
        return results

    def _fake_args(self, args: tuple) -> tuple:
        """Real tensors among the arguments become declared fakes."""
        for a in args:
            if isinstance(a, Tensor):
                if not isinstance(a, FakeTensor):
                    break
            elif isinstance(a, (list, tuple)) and any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in a):
                break
        else:
            return args
        return tree_map_only(Tensor, lambda t: t if isinstance(t, FakeTensor) else self.lift(t), args)

    def arguments(self, args: tuple, kwargs: dict) -> str:
        texts = [self.literal(a) for a in args]
        for name, a in kwargs.items():
            if not omitted(name):
                texts.append(f"{name}={self.literal(a)}")
            elif name == "layout" and a not in (None, torch.strided):
                raise CaptureError(
                    f"a tensor of layout {a} is no part of a program; an embedding takes sparse=False, fullgraph=False runs it in Python"
                )
        return ", ".join(texts)

    def emit(self, func: OpOverload, info: OpInfo, args: tuple, kwargs: dict, text: str, results: Any) -> None:
        """Records an op that mutates nothing."""
        flat = results if isinstance(results, (tuple, list)) else (results,)
        if not any(isinstance(r, Tensor) for r in flat):
            return  # a number (such as which attention kernel to use): already a constant of the program
        kind = (func, dtypes_of(args))
        attrs = ""
        tensors: list[Tensor | None] = []
        for r in flat:
            if isinstance(r, (list, tuple)):
                tensors += r
            elif isinstance(r, Tensor) or r is None:
                tensors.append(r)
            else:
                raise CaptureError(f"{info.name} gives a {type(r).__name__} beside tensors, which a program cannot hold")
        decls = []
        fresh: dict[int, Storage] = {}
        owners: list[Storage | None] = []
        value = self.next_value
        for r in tensors:
            if r is None:
                decls.append("_")
                owners.append(None)
                continue
            key = r.untyped_storage()._cdata
            storage = self._storages.get(key) or fresh.get(key)
            if storage is None:
                if r.storage_offset() != 0:
                    raise CaptureError(f"{info.name} gives a tensor that does not start where its storage starts")
                storage = fresh[key] = Storage(value, r)
                decls.append(self.dims.type(r.dtype, tuple(r.shape), r.stride()))
            else:
                decls.append(self._view_decl(r, storage))
            owners.append(storage)
            value += 1
        if info.random and draws(info, args, kwargs):
            attrs = f" rng={self.own_draws.begin(self.next_value, self._next_stream)}"
            self._next_stream += 1
            self.constants.drawn(func, tensors[0])
        elif not (attrs := self.own_draws.again(func, args)):
            self.constants.note(func, args, kwargs, tensors)
        ids = self._line(info.name, text, decls, attrs)
        if kind not in self.calls:
            self.calls[kind] = (func, args, kwargs)
            self.tags[kind] = self.lines[-1].rpartition("{")[2].rstrip("}")
        self._storages.update(fresh)
        made = ((r, o, vid) for r, o, vid in zip(tensors, owners, ids, strict=True) if r is not None and o is not None)
        self._entries.update((id(r), Entry(vid, storage, r)) for r, storage, vid in made)

    def _identity(self, func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
        source = args[0]
        if not isinstance(source, FakeTensor):
            if func is not aten.lift_fresh.default and func is not aten.lift.default:
                with torch.set_grad_enabled(torch.is_grad_enabled() and func is not aten.detach.default):
                    return self.lift(source)
            with _disable_current_modes():  # a literal is made on the device that it names, and a trace's tensors lie on the CPU
                source = source if source.is_meta else source.cpu()
            return self.lift(source, func(source))
        value, result = self.value_of(source), func(source)
        if id(result) not in self._entries:
            self._entries[id(result)] = Entry(value, self._entries[id(source)].storage, result)
            self.constants.note(func, args, kwargs, [result])
        return result

    def _move_view(self, func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
        """x.t_(), x.unsqueeze_(0): the tensor gets another geometry in its storage."""
        t = args[0]
        storage = self._entries[id(t)].storage if self.value_of(t) >= 0 else None
        before = t.untyped_storage()._cdata
        result = func(*args, **kwargs)
        if storage is None or t.untyped_storage()._cdata != before:
            raise CaptureError(f"{func} changes the storage of a tensor; make a new tensor instead")
        self._entries[id(t)].version = -1
        self.value_of(t)
        return result

    def _corrected(self, func: OpOverload, args: tuple, form: OpOverload, form_args: tuple, written: tuple[int, ...]) -> Any:
        """An operator that writes some of its arguments without saying so: its functional form, then new versions."""
        text = self.arguments(form_args, {})
        results = promise(form, form_args, {}, self.device)
        self.emit(form, op_info(form), form_args, {}, text, results)
        keep = len(results) - len(written)
        for at, new in zip(written, results[keep:], strict=True):
            self._write(args[at], self.value_of(new), new)
        return tuple(results[:keep]) if keep > 1 else results[0]

    # ---- mutation ----

    def _mutate(self, func: OpOverload, info: OpInfo, args: tuple, kwargs: dict) -> Any:
        if info.functional is None:
            return self._mutate_copies(func, info, args, kwargs)
        t = args[0]
        if func is aten.copy_.default:
            self.copy_into(t, args[1])
            return func(*args, **kwargs)
        form, form_args = info.functional, functional_arguments(func, info.functional, args)
        if info.random and not t.is_contiguous() and self._draw_in_memory_order(form, form_args, kwargs):
            return func(*args, **kwargs)
        text = self.arguments(form_args, kwargs)
        new = form(*form_args, **kwargs)
        self.emit(form, op_info(form), form_args, kwargs, text, new)
        result = func(*args, **kwargs)
        self._write(t, self.value_of(new), new)
        return result

    def _draw_in_memory_order(self, form: OpOverload, args: tuple, kwargs: dict) -> bool:
        """In place, random numbers fill a transposed tensor in the order of its memory; the functional form would go by
        rows. So it draws for a contiguous view of the same memory. False when the tensor is a part of its storage."""
        t = args[0]
        storage = self._storage(t)
        order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), d))
        sorted_view = torch.Tensor.permute(t, order)
        if not self._is_whole(t, storage) or not sorted_view.is_contiguous():
            return False
        self._entries[id(sorted_view)] = entry = Entry(-1, storage, sorted_view)
        entry.version = -1
        new = self.call(form, sorted_view, *args[1:], **kwargs)
        storage.root, storage.size, storage.stride = self.value_of(new), tuple(new.shape), new.stride()
        storage.version += 1
        self.constants.forget(t)
        return True

    def call(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Runs and records an op of the recorder's own."""
        text = self.arguments(args, kwargs)
        with self.fakes:
            results = func(*args, **kwargs)
        self.emit(func, op_info(func), args, kwargs, text, results)
        return results

    def copy_into(self, t: Tensor, source: Tensor) -> None:
        if source.dtype != t.dtype:
            source = self.call(aten._to_copy.default, source, dtype=t.dtype)
        if source.shape != t.shape:
            source = self.call(aten.expand.default, source, list(t.shape))
        storage = self._storage(t)
        if self._is_whole(t, storage):
            # A fresh tensor of the destination's layout: a plain copy where that is the contiguous one.
            if t.is_contiguous():
                new = self.call(aten.clone.default, source, memory_format=torch.contiguous_format)
            else:
                new = self.call(aten.copy.default, t, source)
            self._write(t, self.value_of(new), new)
        else:
            self._write(t, self.value_of(source), source)

    def _storage(self, t: Tensor) -> Storage:
        self.value_of(t)
        return self._entries[id(t)].storage

    def _is_whole(self, t: Tensor, storage: Storage) -> bool:
        return (t.dtype == storage.dtype and t.storage_offset() == 0 and tuple(t.shape) == storage.size and t.stride() == storage.stride)

    def _write(self, t: Tensor, value: int, new: Tensor) -> None:
        """From here on, `t` and everything in its storage reads `value`, whose sizes are those of the fake `new`."""
        if new.dtype != t.dtype:
            new = self.call(aten._to_copy.default, new, dtype=t.dtype)
            value = self.value_of(new)
        storage, owned = self._storage(t), self._entries[id(new)].storage
        replaces = self._is_whole(t, storage) and new.stride() == storage.stride and owned.root == value
        if not replaces or owned is storage:
            if t.dtype != storage.dtype:
                raise CaptureError("a tensor is written through a view of another dtype; write to the tensor itself")
            root = self._whole_view(t, storage)
            new = self.call(aten.as_strided_scatter.default, root, new, list(t.shape), list(t.stride()), t.storage_offset())
            value = self.value_of(new)
            if new.stride() != storage.stride:
                raise CaptureError("a tensor with gaps in its storage is written in place; make it contiguous first")
        storage.root = value
        storage.version += 1
        self.constants.written(t, new)
        entry = self._entries[id(t)]
        if self._is_whole(t, storage):
            entry.value, entry.version = value, storage.version

    def _whole_view(self, t: Tensor, storage: Storage) -> Tensor:
        """A fake tensor with the root's geometry, known to have the root's value."""
        with self.fakes:
            whole = torch.as_strided(t, storage.size, storage.stride, 0)
        self._entries[id(whole)] = Entry(storage.root, storage, whole)
        self.constants.whole(whole, t)
        return whole

    def _mutate_copies(self, func: OpOverload, info: OpInfo, args: tuple, kwargs: dict) -> Any:
        """An operator without a functional form: it writes copies, which become the new versions."""
        written = list(written_by(func, args, kwargs))
        copies = {id(t): self.call(aten.clone.default, t) for t in written}
        new_args, new_kwargs = tree_map_only(Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
        text = self.arguments(new_args, new_kwargs)
        values = [self.value_of(c) for c in copies.values()]
        results = func(*args, **kwargs)
        tensors: list[Tensor | None] = tree_leaves(results)
        decls = []
        for r in tensors:
            if r is None:
                decls.append("_")
            elif id(r) in copies:
                decls.append(self._view_decl(copy := copies[id(r)], self._entries[id(copy)].storage))  # a copy has no gaps
            else:
                decls.append(self.dims.type(r.dtype, tuple(r.shape), r.stride()))
        decls = [] if results is None else decls
        ids = self._line(info.name, text, decls, f" writes=[{', '.join(f'%{v}' for v in values)}]")
        for r, vid in zip(tensors, ids, strict=False):
            if r is not None and id(r) not in copies:
                storage = self._storages[r.untyped_storage()._cdata] = Storage(vid, r)
                self._entries[id(r)] = Entry(vid, storage, r)
        for t in written:
            self._write(t, self.value_of(copies[id(t)]), copies[id(t)])
        return results
