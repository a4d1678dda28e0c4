"""What surrounds the model while it is traced: module calls are followed, activation checkpointing is taken out."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch._higher_order_ops.cond import cond
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from interlace.capture.constants import Constants
from interlace.capture.loss import LossForm
from interlace.capture.lru_caches import without_caches
from interlace.capture.numbers import math_of_numbers
from interlace.capture.patches import patched
from interlace.capture.sites import Sites
from interlace.errors import CaptureError

_RECURRENT = [kind + of for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu") for of in ("", "_cell")]


@contextlib.contextmanager
def tensors_in_lists(constants: Constants) -> Iterator[None]:
    """torch.tensor() of lists with tensors in them, torch.full() of a number, indices that are tensors, and Python's math of numbers, which
    C++ would read; gradients of embeddings are dense."""
    make, full = torch.tensor, torch.full

    def stacked(x: Any, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(x, (list, tuple)):
            return torch.stack([stacked(item, dtype) for item in x])
        return x.detach().to(dtype) if torch.is_tensor(x) else make(x, dtype=dtype)

    def made(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **more: Any) -> torch.Tensor:
        if isinstance(data, FakeTensor) and id(data) in constants.numbers:  # a tensor that stands for a number
            return data.to(dtype or (torch.get_default_dtype() if data.is_floating_point() else data.dtype)).requires_grad_(requires_grad)
        items = tree_leaves(data) if isinstance(data, (list, tuple)) else []
        if not any(isinstance(x, FakeTensor) for x in items):
            return make(data, dtype=dtype, requires_grad=requires_grad, **more)
        dtypes = (x.dtype if torch.is_tensor(x) else make(x).dtype for x in items)
        return stacked(data, dtype or functools.reduce(torch.promote_types, dtypes)).requires_grad_(requires_grad)

    def filled(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **more: Any) -> torch.Tensor:
        if id(fill_value) not in constants.numbers:
            return full(size, fill_value, dtype=dtype, requires_grad=requires_grad, **more)
        dtype = dtype or (torch.get_default_dtype() if fill_value.is_floating_point() else torch.int64)
        return fill_value.to(dtype).expand(size).clone().requires_grad_(requires_grad)

    def traced(function: Any) -> Any:  # compares devices before there is an operator: also what a loss function keeps on one, as a value
        return lambda *args: function(*tree_map_only(torch.Tensor, lambda t: t if t.device.type == "cpu" else t.detach(), args))

    with patched(torch, tensor=made, full=filled), _tensors_as_indices(constants), math_of_numbers(constants), _dense_gradients(), \
            patched(torch._VF, **{name: traced(getattr(torch._VF, name)) for name in _RECURRENT}):  # fmt: skip
        yield


@contextlib.contextmanager
def _dense_gradients() -> Iterator[None]:
    """Embeddings with sparse=True: with the rows of zeros there, SGD and Adagrad compute the same. For SparseAdam see train/own_steps.py."""
    embedding, bag = torch.embedding, torch.embedding_bag

    def dense(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> torch.Tensor:
        return embedding(weight, indices, padding_idx, scale_grad_by_freq, False)

    def dense_bag(weight: Any, indices: Any, offsets: Any, by_freq: bool = False, mode: int = 0, sparse: bool = False, *more: Any) -> Any:
        return bag(weight, indices, offsets, by_freq, mode, False, *more)

    with patched(torch, embedding=dense, embedding_bag=dense_bag):
        yield


@contextlib.contextmanager
def _tensors_as_indices(constants: Constants) -> Iterator[None]:
    """`x[i]`, `x[:, i] = y` with integers that a step computes, which C++ would read: what they choose is gathered, as by longer indices."""
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def read(x: Any) -> bool:
        whole = isinstance(x, FakeTensor) and not x.dim() and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        return whole and not constants.knows(x)

    def split(t: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[Any]] | None:
        """A view of all that is chosen from, and an index of it by tensors; None: it is no case of this."""
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(x is None or x is Ellipsis or type(x) is int or isinstance(x, slice) or read(x) for x in parts)
        if not (plain and any(map(read, parts))):
            return None
        rest = t.dim() - sum(x is not None and x is not Ellipsis for x in parts)
        places: list[Any] = []
        for x in parts:
            places += [None] * rest if x is Ellipsis else [] if type(x) is int else [x if read(x) else None]
        return get(t, tuple(slice(None) if read(x) else x for x in parts)), places

    def chosen(t: torch.Tensor, index: Any) -> Any:
        if (found := split(t, index)) is None:
            return get(t, index)
        result = torch.ops.aten.index.Tensor(*found)
        constants.copies.add(result.untyped_storage()._cdata)
        return result

    def write(t: torch.Tensor, index: Any, value: Any) -> None:
        if (found := split(t, index)) is None:
            return put(t, index, value)
        value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=t.dtype)
        torch.ops.aten.index_put_.default(*found, value.to(t.dtype))

    with patched(FakeTensor, __getitem__=chosen, __setitem__=write):
        yield


class OpaqueModules(Protocol):
    """Modules that are not traced into."""

    def replaces(self, module: nn.Module) -> bool: ...
    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any: ...


@contextlib.contextmanager
def followed_modules(sites: Sites, opaque: OpaqueModules | None = None) -> Iterator[None]:
    """Tells `sites` which module runs, and hands the calls of opaque modules over."""
    call: Callable[..., Any] = nn.Module.__call__

    def follow(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sites.enter(module)
        try:
            if opaque is not None and opaque.replaces(module):
                return opaque.call(module, args, kwargs)
            return call(module, *args, **kwargs)
        except BaseException:
            if sites.failed is None:
                sites.failed = sites.stack_paths[-1]
            raise
        finally:
            sites.leave()

    with patched(nn.Module, __call__=follow):
        yield


def _plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def without_fused_recurrence() -> Iterator[None]:
    """Recurrent layers as plain ops: oneDNN's fused kernels have fake forms whose workspace is of another shape than the real one."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """The model's own activation checkpointing switched off: captured as it is, it would draw dropout masks twice and
    give wrong gradients. Recomputation is the compiler's work."""
    module = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")  # before torch 2.14, and since
    with contextlib.ExitStack() as stack:
        # Users hold references to checkpoint() itself, so what it calls is replaced.
        stack.enter_context(patched(module.CheckpointFunction, apply=lambda function, preserve, *args: function(*args)))
        stack.enter_context(patched(module, **{name: _plain_generator for name in names if hasattr(module, name)}))
        for m in model.modules():
            if getattr(m, "gradient_checkpointing", False) is True:
                stack.enter_context(patched(m, gradient_checkpointing=False))
        yield


@contextlib.contextmanager
def without_assertions() -> Iterator[None]:
    """Assertions on values that only a step will know are left out, those of torch._check_tensor_all, of the arguments of
    torch.distributions and of the variance of gaussian_nll_loss; those that are known are made."""
    check, all_true, any_of = torch._check_tensor_all_with, torch._is_all_true, torch.any

    def known(error_type: type[Exception], cond: Any, message: Any = None) -> None:
        with contextlib.suppress(DataDependentOutputException):
            check(error_type, cond, message)

    def valid(values: torch.Tensor) -> Any:
        with contextlib.suppress(DataDependentOutputException):
            found = all_true(values)
            return bool(found) if sys._getframe(1).f_globals["__name__"].startswith("torch.distributions") else found
        return True

    def negative(*args: Any, **kwargs: Any) -> Any:
        found = any_of(*args, **kwargs)
        if sys._getframe(1).f_code is not torch.nn.functional.gaussian_nll_loss.__code__:
            return found
        with contextlib.suppress(DataDependentOutputException):
            return bool(found)
        return False

    with patched(torch, _check_tensor_all_with=known, _is_all_true=valid, any=negative):
        yield


def _both(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """torch.cond in a program: both branches run, and each result is that of the branch that holds."""
    if not isinstance(pred, torch.Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    pred = pred.reshape(()).bool()
    return tree_map(lambda a, b: torch.where(pred, a, b), true_fn(*operands), false_fn(*operands))


@contextlib.contextmanager
def without_branches() -> Iterator[None]:
    """torch.cond has pure branches, so that both may be computed. Users hold references to it, so its code is replaced."""
    code = cond.__code__
    cond.__globals__["_interlace_both"] = _both
    cond.__code__ = _cond.__code__
    try:
        yield
    finally:
        cond.__code__ = code


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return _interlace_both(pred, true_fn, false_fn, operands)  # type: ignore[name-defined]  # noqa: F821


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """The garbage collector paused: tracing makes many objects that live until its end, and none that it could free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Fake tensors log the traceback of every operator that fails; our message says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def known_values_are_no_trace(constants: Constants) -> Iterator[None]:
    """Hugging Face models take slower paths (masks in place of is_causal) when a tensor is fake, because its values
    cannot be read. Those that do not depend on data can be read here, so the model takes the path that it takes in
    eager mode."""
    utils = sys.modules.get("transformers.utils.import_utils")
    ask = getattr(utils, "is_fake_tensor", None)
    if utils is None or ask is None:
        yield
        return
    with patched(utils, is_fake_tensor=lambda t: ask(t) and not constants.knows(t)):
        yield


@contextlib.contextmanager
def without_backward(under_way: Callable[[], bool]) -> Iterator[None]:
    """A loss function that makes the gradients itself is told so. `under_way`: whether they are being made; then it is a Function's, a
    reversible layer's say, which leaves those of parameters in their `grad`."""
    backward = torch.autograd.backward

    def refused(*args: Any, **kwargs: Any) -> None:
        if under_way():
            return backward(*args, **kwargs)
        raise LossForm(
            "the loss function calls backward(); return the loss alone, a step makes the gradients of what it returns (those of something "
            "else in between are torch.autograd.grad's)"
        )

    with patched(torch.autograd, backward=refused):
        yield


@contextlib.contextmanager
def known_seeds(reseeded: Callable[[str], str]) -> Iterator[None]:
    """Tells of seeds and states that the model gives torch's own generator while it runs; they do nothing. `reseeded` takes the last
    function that did and gives the one before."""
    def telling(name: str) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> torch.Generator:
            reseeded(f"torch.{name}")
            return torch.default_generator

        return tell

    @contextlib.contextmanager
    def forked(*args: Any, **kwargs: Any) -> Iterator[None]:
        outside = reseeded("")
        reseeded(outside)
        try:
            yield
        finally:
            reseeded(outside)

    tells = {name: telling(name) for name in ("manual_seed", "set_rng_state")}
    with patched(torch, **tells), patched(torch.random, **tells, fork_rng=forked):
        yield


@contextlib.contextmanager
def without_inference_mode() -> Iterator[None]:
    """torch.inference_mode is no_grad: fakes need versions, which it makes none of. Users decorate with it, so its methods are replaced."""
    entered: list[tuple[Any, Any]] = []

    def enter(self: Any) -> None:
        entered.append((self, torch.set_grad_enabled(not self.mode)))

    def leave(self: Any, *error: Any) -> None:
        at = next(i for i in reversed(range(len(entered))) if entered[i][0] is self)
        entered.pop(at)[1].__exit__(*error)

    with patched(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Without what fakes cannot follow, and with gradients."""
    with without_caches(), without_log(), without_assertions(), without_branches(), without_inference_mode(), torch.enable_grad(), \
            without_fused_recurrence():  # fmt: skip
        yield


@contextlib.contextmanager
def rank_asked(shift: int = 0) -> Iterator[list[int]]:
    """What groups of torch.distributed and the variables of torchrun have given as this process' rank, which is the rank so many further. All
    functions ask them."""
    asked: list[int] = []
    environ: Any = type(os.environ)
    group: Any = dist.ProcessGroup if dist.is_available() else type("None", (), {"rank": None})
    read, get = environ.__getitem__, group.rank

    def tell(rank: int, size: int) -> int:
        asked.append(rank)
        return (rank + shift) % size

    def variable(environ: Any, name: str) -> str:
        said, sizes = read(environ, name), {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
        count = read(environ, sizes[name]) if name in sizes and sizes[name] in environ else ""
        return str(tell(int(said), int(count))) if said.isdigit() and count.isdigit() and count != "0" else str(said)

    with patched(environ, __getitem__=variable), patched(group, rank=lambda group: tell(get(group), group.size())):
        yield asked


def with_left(gradients: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients together with what backward() has left in `grad`, which is emptied: Functions may call it inside of their own backward."""
    found: list[torch.Tensor | None] = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        left, leaf.grad = leaf.grad, None
        found.append(gradient if left is None else left if gradient is None else gradient + left)
    return found


_REFUSED = {
    "DistributedDataParallel": "DistributedDataParallel; pass the module inside (model.module)",
    "FullyShardedDataParallel": "FullyShardedDataParallel; pass the plain module, Interlace does the sharding",
    "DataParallel": "DataParallel; pass the module inside (model.module)",
}


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}; pass a torch.nn.Module")
    for path, m in model.named_modules():
        name = type(m).__name__
        if name in _REFUSED or name.startswith("FSDP"):
            where = f"module '{path}'" if path else "the model"
            raise CaptureError(f"{where} is wrapped in {_REFUSED.get(name, _REFUSED['FullyShardedDataParallel'])}")
        if isinstance(m, torch.jit.ScriptModule):
            raise CaptureError(f"module '{path}' is a TorchScript module; pass the Python module it was made from, or take mode=\"eager\"")
