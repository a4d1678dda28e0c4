"""Functional forms of operators that mutate, and the corrections of schemas that do not tell the truth."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# In-place operators whose functional form is not the name without the underscore.
_FUNCTIONAL: dict[OpOverload, OpOverload] = {
    aten.normal_.default: aten.normal_functional.default, aten.zero_.default: aten.zeros_like.default,
    aten.fill_.Scalar: aten.full_like.default, aten.bernoulli_.float: aten.bernoulli.p,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar, aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
}  # fmt: skip

# Keyword arguments that the text leaves out: the runtime supplies its device, and streams are keyed by `rng`.
_OMITTED = frozenset({"device", "pin_memory", "layout", "generator", "non_blocking"})


@dataclasses.dataclass(frozen=True)
class OpInfo:
    """What the recorder needs to know of an operator, worked out once."""

    name: str  # as in the text
    mutated: tuple[str, ...]  # names of the arguments that the schema says are written
    positions: dict[str, int]  # argument name -> position
    functional: OpOverload | None  # for operators that only mutate their first argument
    identity: bool  # the result is the argument itself: no op is needed
    moves_view: bool  # changes the geometry of its argument in place (unsqueeze_, t_, ...)
    random: bool


def omitted(keyword: str) -> bool:
    return keyword in _OMITTED


def op_name(func: OpOverload) -> str:
    name = func._schema.name.replace("::", ".")
    return name if func._overloadname == "default" else f"{name}.{func._overloadname}"


def _functional_form(func: OpOverload) -> OpOverload | None:
    known = _FUNCTIONAL.get(func)
    if known is not None:
        return known
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.startswith("_foreach") or name.startswith("_fused"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    form = getattr(packet, func._overloadname, None) if packet is not None else None
    if form is None or form._schema.is_mutable or len(form._schema.returns) != 1:
        return None
    mine, theirs = ([(a.name, str(a.type)) for a in f._schema.arguments] for f in (func, form))
    return form if mine == theirs else None


@cache
def op_info(func: OpOverload) -> OpInfo:
    schema = func._schema
    mutated = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    first_only = bool(mutated) and mutated == (schema.arguments[0].name,)
    return OpInfo(
        name=op_name(func), mutated=mutated, positions={a.name: i for i, a in enumerate(schema.arguments)},
        functional=_functional_form(func) if first_only else None,
        identity=func in (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default),
        moves_view=torch.Tag.inplace_view in func.tags, random=torch.Tag.nondeterministic_seeded in func.tags,
    )  # fmt: skip


def functional_arguments(func: OpOverload, form: OpOverload, args: tuple) -> tuple:
    """The arguments for the functional form: defaults that only the in-place form has are written out."""
    out = list(args)
    for mine, theirs in list(zip(func._schema.arguments, form._schema.arguments, strict=False))[len(args) :]:
        if mine.kwarg_only or theirs.has_default_value() or not mine.has_default_value():
            break
        out.append(mine.default_value)
    return tuple(out)


def draws(info: OpInfo, args: tuple, kwargs: dict) -> bool:
    """Whether this call draws random numbers: attention with dropout 0 does not."""
    if not info.random:
        return False
    for name in ("dropout_p", "dropout"):
        at = info.positions.get(name)
        if at is not None:
            p = kwargs.get(name, args[at] if at < len(args) else 0.0)
            return p != 0.0
    if info.name.startswith("aten.rrelu"):
        at = info.positions["training"]
        return bool(kwargs.get("training", args[at] if at < len(args) else False))
    return True


def corrected(func: OpOverload, args: tuple, kwargs: dict) -> tuple[OpOverload, tuple, tuple[int, ...]] | None:
    """The truthful form of an operator whose schema hides a mutation: (functional operator, its arguments, positions
    of the arguments that the results after the original ones replace). None when the call needs no correction."""
    if func is aten.native_batch_norm.default or func is aten._native_batch_norm_legit.default:
        x, weight, bias, mean, var, training, momentum, eps = args
        if training and mean is not None:
            form = aten._native_batch_norm_legit_functional.default
            return form, (x, weight, bias, mean, var, training, momentum, eps), (3, 4)
    if func is aten.rrelu_with_noise.default:
        return aten.rrelu_with_noise_functional.default, (*args, *kwargs.values()), (1,)
    return None


def promised(func: OpOverload, args: tuple, kwargs: dict, device: str = "cpu") -> Any:
    """The results of a call on fake tensors. PyTorch's rule for grouped products refuses all but bfloat16, which its kernels do not;
    their sizes do not depend on the dtype. log_softmax's gradient is contiguous, and its kernel writes nothing else right. What attention
    on CPUs gives beside its result is float64 for float64, which the rule does not say before torch 2.13. The gradient of a batch norm's
    input is made only where it is asked for, which the rule does not know. On CUDA a batch norm that takes the running statistics gives
    some of its own, which nobody reads, and a log_sigmoid keeps nothing."""
    if func is aten._log_softmax_backward_data.default:
        return func(*args, **kwargs).contiguous()
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default and args[0].dtype == torch.float64:
        result, sums = func(*args, **kwargs)
        return result, sums.to(torch.float64)
    if func is aten.log_sigmoid_forward.default and device == "cuda":
        result, _ = func(*args, **kwargs)
        return result, result.new_empty([0])
    if func is aten.native_batch_norm.default and not args[5] and device == "cuda":
        result, x = func(*args, **kwargs)[0], args[0]
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        return result, x.new_empty([x.shape[1]], dtype=wide), x.new_empty([x.shape[1]], dtype=wide)
    if func is aten.native_batch_norm_backward.default:
        return tuple(r if wanted else None for r, wanted in zip(func(*args, **kwargs), args[9], strict=True))
    if func is not aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    floating = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]
    halved = (a.to(torch.bfloat16) if f else a for a, f in zip(args, floating, strict=True))
    return func(*halved, **kwargs).to(args[0].dtype)
