"""How parameters get their first values without any rank ever holding the whole model.

Parameters that are real are cut into the units' shards one by one. Parameters on the meta device are initialized by the model's own
code, one small group of modules at a time, under a seed derived from (seed, module path): the values depend on neither the world
size nor the order. What belongs together is found by running all initializers once on the meta device, where they cost
nothing, and watching which tensors each of them writes:

    GPT-2: attn's initializer writes attn.c_proj.weight, and so does that of attn.c_proj → one group, the child's call first

Largest memory at any time: the largest group (for Llama one matrix; for torch.nn.Transformer, which re-initializes all of its
children at once, the whole module).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.capture.model_tensors import ModelTensor
from interlace.capture.released import Released
from interlace.capture.writes import written_by
from interlace.compiling.states import States
from interlace.errors import InterlaceError

Tensor = torch.Tensor
Place = Callable[[str, Tensor], None]


def module_seed(seed: int, path: str) -> int:
    """The seed of one module's initializer."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


# ---- the model's own initializers ----


@dataclasses.dataclass
class _Call:
    path: str
    run: Callable[[], Any]
    writes: set[int] = dataclasses.field(default_factory=set)  # ids of slots


@dataclasses.dataclass
class Slot:
    """A tensor of the model and every place that holds it (tied ones have several)."""

    name: str
    tensor: Tensor
    places: list[tuple[dict[str, Any], str]]


def slots_of(model: nn.Module) -> list[Slot]:
    found: dict[int, Slot] = {}
    for table_name in ("_parameters", "_buffers"):
        for path, module in model.named_modules():
            table = getattr(module, table_name)
            for name, t in table.items():
                if t is None:
                    continue
                slot = found.setdefault(id(t), Slot(f"{path}.{name}" if path else name, t, []))
                slot.places.append((table, name))
    return list(found.values())


def _calls(model: nn.Module) -> list[_Call]:
    """Initializer calls in the order children, then parents, as nn.Module.apply and Hugging Face have it."""
    calls: list[_Call] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, by_owner: Callable[[nn.Module], Any] | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        own = getattr(module, "_init_weights", None)  # Hugging Face, and many others by the same convention
        by_owner = own if callable(own) else by_owner
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, by_owner)
        if by_owner is not None:
            calls.append(_Call(path, lambda: by_owner(module)))
        else:
            for method in ("reset_parameters", "_reset_parameters"):
                if callable(getattr(module, method, None)):
                    calls.append(_Call(path, getattr(module, method)))
                    break

    visit(model, "", None)
    return calls


class _WatchWrites(TorchDispatchMode):
    """Notes the storages that ops write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written.update(t.untyped_storage()._cdata for t in written_by(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def replaced(slots: list[Slot], make: Callable[[Slot], Tensor]) -> Iterator[list[Tensor]]:
    """Other tensors in the slots' places, put back at the end."""
    new = [make(slot) for slot in slots]
    try:
        for slot, t in zip(slots, new, strict=True):
            for table, name in slot.places:
                table[name] = t
        yield new
    finally:
        for slot in slots:
            for table, name in slot.places:
                table[name] = slot.tensor


def _scratch(device: str) -> Callable[[Slot], Tensor]:
    def make(slot: Slot) -> Tensor:
        t = torch.zeros(slot.tensor.shape, dtype=slot.tensor.dtype, device=device)
        return nn.Parameter(t, slot.tensor.requires_grad) if isinstance(slot.tensor, nn.Parameter) else t

    return make


def _own_flag(model: nn.Module) -> dict[int, Any]:
    return {id(m): m.__dict__.pop("_is_hf_initialized", None) for m in model.modules()}


def _watch(calls: list[_Call], slots: list[Slot]) -> None:
    """Fills in what each call writes, by running all of them on the meta device."""
    with replaced(slots, _scratch("meta")) as tensors, torch.no_grad(), torch.random.fork_rng(devices=[]):
        by_storage = {t.untyped_storage()._cdata: i for i, t in enumerate(tensors)}
        owner_of: dict[int, list[Any]] = {id(table): [] for slot in slots for table, _ in slot.places}
        for i, slot in enumerate(slots):
            for table, name in slot.places:
                owner_of[id(table)].append((table, name, i))
        for call in calls:
            # A failure here is one of the meta device (an .item(), say): then what it wrote so far counts.
            with _WatchWrites() as watch, contextlib.suppress(Exception):
                call.run()
            call.writes = {by_storage[s] for s in watch.written if s in by_storage}
            for entries in owner_of.values():  # tensors that were assigned anew
                for table, name, i in entries:
                    if table[name] is not tensors[i]:
                        call.writes.add(i)
                        table[name] = tensors[i]


def _groups(calls: list[_Call]) -> list[tuple[list[_Call], list[int]]]:
    """Calls that share a written tensor, with the tensors, in the order of the first call."""
    parent = list(range(len(calls)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    last: dict[int, int] = {}
    for i, call in enumerate(calls):
        for s in call.writes:
            if s in last:
                parent[root(i)] = root(last[s])
            last[s] = i
    members: dict[int, tuple[list[_Call], set[int]]] = {}
    for i, call in enumerate(calls):
        if call.writes:
            group = members.setdefault(root(i), ([], set()))
            group[0].append(call)
            group[1].update(call.writes)
    return [(group_calls, sorted(written)) for group_calls, written in members.values()]


def initialize(model: nn.Module, wanted: set[str], seed: int, place: Place) -> None:
    """Runs the model's initializers for the tensors in `wanted` and hands each value to place(name, value), which must copy it.

    Error: a tensor that no initializer writes.
    """
    if not wanted:
        return
    slots = slots_of(model)
    calls = _calls(model)
    flags = _own_flag(model)
    try:
        _watch(calls, slots)
        written: set[str] = set()
        for group_calls, members in _groups(calls):
            if not any(slots[i].name in wanted for i in members):
                continue
            # Zeros, so that an initializer that writes only a part (a padding row) still gives the same bits everywhere.
            with replaced([slots[i] for i in members], _scratch("cpu")), torch.no_grad(), torch.random.fork_rng(devices=[]):
                for call in group_calls:
                    torch.manual_seed(module_seed(seed, call.path))
                    call.run()
                for i in members:
                    table, name = slots[i].places[0]
                    if slots[i].name in wanted:
                        place(slots[i].name, table[name].detach())
                        written.add(slots[i].name)
    finally:
        for m in model.modules():
            m.__dict__.pop("_is_hf_initialized", None)
            if flags.get(id(m)) is not None:
                m._is_hf_initialized = flags[id(m)]  # type: ignore[assignment]
    missing = [s for s in slots if s.name in wanted - written]
    if missing:
        path = missing[0].name.rpartition(".")[0]
        cls = type(model.get_submodule(path)).__name__
        kind = "parameter" if isinstance(missing[0].tensor, nn.Parameter) else "buffer"
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise InterlaceError(
            f"{kind} '{missing[0].name}'{others} is on the meta device and nothing initializes it: give {cls} a reset_parameters() "
            "or the model an _init_weights(module), read the values from a file (Config.weights), or build the model on the CPU"
        )


# ---- the model's own tensors afterwards ----


def release(parameter: Tensor) -> None:
    """Frees a parameter's memory; every reference to it sees a tensor of the same shape without values."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks = parameter._backward_hooks  # which another capture traces
        if not parameter.is_meta:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            try:
                _swap(parameter, empty)
            except RuntimeError:  # somebody holds a C++ reference (an autograd graph)
                parameter.data = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        parameter._backward_hooks = hooks
        parameter.__class__ = Released


def point_at(tensor: Tensor, storage: Tensor) -> None:
    """Makes a parameter or buffer of the model a view of `storage`, for every holder of the reference."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(tensor, Released):
            tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        if tensor.device == storage.device and not tensor.is_meta:
            tensor.data = storage
            return
        new: Tensor = storage.detach()
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        with contextlib.suppress(RuntimeError):
            _swap(tensor, new)


def _swap(tensor: Tensor, new: Tensor) -> None:
    """torch.utils.swap_tensors, also where there are weak references (to the object, which stays: an EMA's, torch.compile's, our own)."""
    if weakref.getweakrefs(tensor) and tensor._use_count() == 1:  # type: ignore[attr-defined]
        tensor.__class__, new.__class__ = new.__class__, tensor.__class__  # type: ignore[assignment]
        tensor.__dict__, new.__dict__ = new.__dict__, tensor.__dict__
        torch._C._swap_tensor_impl(tensor, new)  # type: ignore[attr-defined]
    else:
        torch.utils.swap_tensors(tensor, new)


def adopt(tensors: Iterable[ModelTensor], states: States, buffers: Mapping[str, Tensor]) -> None:
    """The model's own tensors become views of what the program works on, or are freed."""
    for t in tensors:
        if t.kind == "param":
            whole = states.resident(t.name)
            if whole is not None:
                point_at(t.real, whole)
            else:
                release(t.real)
        elif t.kind == "buffer" and t.name in buffers:
            point_at(t.real, buffers[t.name])


def checksum(t: Tensor) -> bytes:
    """Of a tensor's values."""
    flat = t.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data if flat.numel() else b"", digest_size=16).digest()
