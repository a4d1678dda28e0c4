"""The tensors of a model, their fakes, and the swap that puts the fakes in their place while the model is traced."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from interlace.capture.released import Released
from interlace.errors import CaptureError

Tensor = torch.Tensor
OWN_HOOK = "_interlace_hook"  # an attribute of the hooks on parameters that a trainer sets itself
_written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class ModelTensor:
    name: str
    real: Tensor
    kind: str  # "param" | "buffer" | "plain" (an attribute that is neither)
    persistent: bool = True
    aliases: list[str] = dataclasses.field(default_factory=list)
    fake: Tensor | None = None
    owner: str | None = None  # of an attribute: the parameter whose memory it shows, so that nothing may read it


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def count_as_buffers(model: nn.Module, names: Collection[str]) -> None:
    """From now on these frozen parameters of a model are buffers: its forward writes them, as that of a model with a teacher does."""
    _written.setdefault(model, set()).update(names)


def tensors_of(module: nn.Module, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of a part of the model by their names in it; what counts as a buffer is one."""
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    names = _written.get(model, ())
    own = {id(p) for n, p in model.named_parameters() if n in names} if names else ()
    return {n: p for n, p in params.items() if id(p) not in own}, buffers | {n: p for n, p in params.items() if id(p) in own}


def collect(model: nn.Module) -> list[ModelTensor]:
    """Parameters, then buffers, then plain tensor attributes, each once, in module order. Errors: see
    check_parameters."""
    found: dict[int, ModelTensor] = {}
    modules = list(model.named_modules(remove_duplicate=False))

    def add(name: str, t: Tensor | None, kind: str, persistent: bool = True) -> None:
        if t is None:
            return
        known = found.get(id(t))
        if known is None:
            found[id(t)] = ModelTensor(name, t, kind, persistent)
        elif name != known.name and name not in known.aliases and known.kind == kind == "param":
            known.aliases.append(name)

    written = _written.get(model, ())
    for path, module in modules:
        for name, p in module._parameters.items():
            full = _join(path, name)
            add(full, p, "buffer" if full in written else "param")
    for path, module in modules:
        for name, b in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            add(_join(path, name), b, "buffer", persistent)
    for path, module in modules:
        for name, value in vars(module).items():
            for key, t in _plain_tensors(name, value):
                if isinstance(t, nn.Parameter) and id(t) not in found:
                    raise CaptureError(
                        f"'{_join(path, key)}' is a parameter kept in a plain list or dict; use nn.ParameterList or nn.ParameterDict"
                    )
                add(_join(path, key), t, "plain", False)
    return list(found.values())


_MODULE_STATE = frozenset(vars(nn.Module()))


def _plain_tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if name in _MODULE_STATE:
        return []
    if isinstance(value, Tensor):
        return [(name, value)]
    return [(f"{name}.{key}", v) for key, v in items_of(value) if isinstance(v, Tensor)]


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """(index or key, value) of the containers whose tensors are the model's; none of anything else."""
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []


def alike(before: Any, now: Any) -> bool:
    """Whether a container has tensors where it had some, and else what it had."""
    one, other = items_of(before), items_of(now)
    if not one or type(before) is not type(now) or [key for key, _ in one] != [key for key, _ in other]:
        return False
    return all(v is w or (isinstance(v, Tensor) and isinstance(w, Tensor)) for (_, v), (_, w) in zip(one, other, strict=True))


def device_type(tensors: Iterable[Tensor]) -> str:
    """Of a model's tensors; of those that have no memory yet, or no longer: where they will be."""
    there = next((t.device.type for t in tensors if not t.is_meta), None)
    if there is None and torch.accelerator.is_available():
        there = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    return there or "cpu"


def check_parameters(tensors: list[ModelTensor]) -> None:
    """Every parameter must own dense, contiguous memory that no other tensor of the model shares, all on one device."""
    params = [t for t in tensors if t.kind == "param"]
    if not params:
        raise CaptureError("the model has no parameters")
    if not any(p.real.requires_grad for p in params):
        raise CaptureError("the model has no trainable parameter: every one has requires_grad=False")
    first = next((p for p in params if not isinstance(p.real, Released)), params[0])
    owners: dict[int, ModelTensor] = {}
    for p in params:
        t = p.real
        if isinstance(t, nn.parameter.UninitializedParameter):
            raise CaptureError(f"parameter '{p.name}' is not initialized yet; run the lazy module once before capture")
        if isinstance(t, FakeTensor) or type(t) not in (nn.Parameter, Tensor, Released):
            raise CaptureError(f"parameter '{p.name}' is a {type(t).__name__}; pass the model with plain parameters")
        if t.layout != torch.strided:
            raise CaptureError(f"parameter '{p.name}' is a {t.layout} tensor; only dense parameters can be trained")
        if t.is_complex() and t.requires_grad:
            raise CaptureError(
                f"parameter '{p.name}' is complex; keep it as a real one with a last dimension of two (torch.view_as_real), and make it "
                "complex in forward (torch.view_as_complex)"
            )
        here = not isinstance(t, Released)  # which has an element of memory at most
        if here and t.device != first.real.device:
            raise CaptureError(
                f"parameters are on several devices: '{first.name}' on {first.real.device}, '{p.name}' on {t.device}; "
                "move the model to one device"
            )
        if here and not _is_dense(t):
            raise CaptureError(f"parameter '{p.name}' is not dense (strides {tuple(t.stride())}); set it to a .contiguous() copy")
        if not all(hasattr(h, OWN_HOOK) for h in (getattr(t, "_post_accumulate_grad_hooks", None) or {}).values()):
            raise CaptureError(
                f"parameter '{p.name}' has a hook that runs when its gradient is there (register_post_accumulate_grad_hook), which a program "
                "cannot run; register_hook changes gradients, trainer.step makes the optimizer's step"
            )
        if t.is_meta or t.numel() == 0 or not here:
            continue
        key = t.untyped_storage()._cdata
        if key in owners:
            raise CaptureError(
                f"parameters '{owners[key].name}' and '{p.name}' share storage without being the same parameter; "
                "tie them by assigning the same nn.Parameter, or clone one"
            )
        owners[key] = p
    for b in tensors:
        if b.real.layout != torch.strided:
            raise CaptureError(
                f"'{b.name}' is a {b.real.layout} tensor; keep it dense (.to_dense()), or its indices and values as two tensors"
            )
        if b.kind != "param" and not b.real.is_meta and b.real.numel():
            owner = owners.get(b.real.untyped_storage()._cdata)
            b.owner = owner.name if owner is not None else None
            if b.owner is not None and b.kind == "buffer":
                raise CaptureError(shares(b))


def shares(t: ModelTensor) -> str:
    return f"'{t.name}' shares storage with parameter '{t.owner}'; clone it"


def _is_dense(t: Tensor) -> bool:
    """Whether each element of its memory is one of its own, in whatever order of the dimensions."""
    elements = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != elements and t.numel() > 0:
            return False
        elements *= size
    return True


def make_fake(t: ModelTensor) -> Tensor:
    """A fake CPU tensor of the same geometry; call under the fake mode."""
    real = t.real
    if t.kind == "param":  # a program keeps them contiguous, see in_memory_order
        return nn.Parameter(torch.empty(tuple(real.shape), dtype=real.dtype, device="cpu"), requires_grad=real.requires_grad)
    return torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device="cpu")


def in_memory_order(real: Tensor, fake: Tensor) -> Tensor:
    """The fake of a parameter in the layout that the model has it in (channels_last), made of the contiguous one."""
    if real.is_contiguous() or not any(real.stride()):  # one element of memory stands for what was released
        return fake
    strides = real.stride()
    order = sorted(range(real.dim()), key=lambda d: (-strides[d], d))
    return fake.permute(order).contiguous().permute([order.index(d) for d in range(real.dim())])


class Replaced(CaptureError):
    """The model puts parameters of its own into the places of those that it had."""


@contextlib.contextmanager
def swapped(model: nn.Module, fakes: dict[int, Tensor]) -> Iterator[None]:
    """The model with its tensors replaced (by id of the real one), put back at the end; so are tensors that it has put into their places.
    Lists and dicts stay the objects that they are, which others may hold, too. What else the model has put into a place stays there."""
    undo: list[tuple[dict[str, Any], str, Any, Any]] = []
    inside: dict[int, tuple[Any, Any, Any]] = {}  # lists and dicts by their ids, with what was in them and is in them now

    def swap(where: dict[str, Any], name: str, new: Any) -> None:
        undo.append((where, name, where[name], new))
        where[name] = new

    def of(v: Any) -> Any:
        return fakes.get(id(v), v) if isinstance(v, Tensor) else v

    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, t in table.items():
                    if t is not None:
                        if id(t) not in fakes:
                            raise Replaced(
                                f"'{name}' of a {type(module).__name__} is another tensor than before the model ran, which puts new ones in "
                                'the places of its parameters; compute with a copy (torch.func.functional_call), or pass mode="eager"'
                            )
                        swap(table, name, fakes[id(t)])
            attributes = vars(module)
            for name in [n for n in attributes if n not in _MODULE_STATE]:
                value = attributes[name]
                if not _plain_tensors(name, value):
                    continue
                if isinstance(value, Tensor):
                    swap(attributes, name, of(value))
                    continue
                if isinstance(value, tuple):
                    items = [of(v) for v in value]
                    swap(attributes, name, type(value)(*items) if hasattr(value, "_fields") else type(value)(items))
                    continue
                undo.append((attributes, name, value, value))
                if id(value) not in inside:
                    before = copy.copy(value)
                    _refill(value, [(key, of(v)) for key, v in items_of(value)])
                    inside[id(value)] = value, before, copy.copy(value)
        yield
    finally:
        for where, name, old, new in reversed(undo):
            now = where.get(name)
            if now is new or (isinstance(now, Tensor) and isinstance(new, Tensor)) or alike(new, now):
                where[name] = old
        real = {id(fake): v for _, before, new in inside.values() for (_, v), (_, fake) in zip(items_of(before), items_of(new), strict=True)}
        for value, before, new in inside.values():
            if alike(new, value):
                _refill(value, items_of(before))
            else:
                _refill(value, [(key, real.get(id(v), v)) for key, v in items_of(value)])


def _refill(container: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(container, dict):
        container.update(items)
    else:
        container[:] = [v for _, v in items]


@contextlib.contextmanager
def flat_weights_kept(model: nn.Module) -> Iterator[None]:
    """Recurrent layers keep their weights in lists too, which would go on to hold what was in the weights' places meanwhile."""
    lists = [(vars(m), key, vars(m)[key]) for m in model.modules() for key in ("_flat_weights", "_flat_weight_refs") if key in vars(m)]
    try:
        yield
    finally:
        for values, key, before in lists:
            values[key] = before
