"""Modules that cannot be captured run in Python, each as one opaque op: `call.python(...) {module="path"
part="forward"}`.

What such a module gives is learnt from one real run of the model on the example batch. In the program its parameters
and buffers are operands, so they may be sharded and gathered like all others, and the Python module itself holds no
state: forward runs it with the tensors it is given, backward runs it again under autograd.

    forward:   (inputs, parameters, buffers) -> (outputs, buffers that it changes, seed if it draws random numbers)
    backward:  (gradients of the outputs, inputs, parameters, buffers, seed) -> gradients of inputs and parameters

Random numbers: forward draws a seed from the default generator and runs under it; backward runs under the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from interlace.capture.inputs import Path, leaves, rebuild
from interlace.capture.recorder import Recorder
from interlace.errors import CaptureError

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Meta:
    """Geometry of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @staticmethod
    def of(t: Tensor) -> Meta:
        return Meta(t.dtype, tuple(t.shape))


@dataclasses.dataclass
class OpaqueCall:
    """One call of an opaque module in a micro-batch. Plain data, so that rank 0 can send it to the others."""

    key: str  # the module's path; "path@1" for its second call
    path: str
    training: bool
    call: tuple[tuple, dict]  # arguments, None in place of tensors
    inputs: list[tuple[Path, Meta]]
    params: list[str]  # names within the module
    buffers: list[str]
    changed: list[str]  # buffers that forward writes
    result: Any  # structure of the result, None in place of tensors
    outputs: list[tuple[Path, Meta]]
    random: bool
    wanted: list[int] = dataclasses.field(default_factory=list)  # inputs, then parameters, whose gradients backward gives


def _tensor_leaves(x: Any) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in leaves(x) if isinstance(leaf, Tensor)]


def _blank(x: Any) -> Any:
    """The structure without its tensors."""
    return rebuild(x, {path: None for path, _ in _tensor_leaves(x)})


# ---- learning what the modules give ----


def learn_calls(
    model: nn.Module, paths: Sequence[str], loss_fn: Callable[[nn.Module, Any], Any], batch: Any
) -> dict[str, list[OpaqueCall]]:
    """Runs the model for real, once, and notes each call of the named modules. Leaves buffers and generators as they
    were.

    Errors: a model on meta, a model that fails.
    """
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"module '{paths[0]}' cannot be captured, and what it gives cannot be learnt from a model on "
            "meta; build the model "
            "in memory, or change the module"
        )
    calls: dict[str, list[OpaqueCall]] = {path: [] for path in paths}
    saved = [(b, b.clone()) for b in model.buffers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng())
        for path in paths:
            stack.enter_context(_noting(model.get_submodule(path), path, calls[path]))
        try:
            loss_fn(model, batch)
        except Exception as e:
            raise CaptureError(f"the model fails on the example batch: {type(e).__name__}: {e}") from e
        finally:
            for b, old in saved:
                b.copy_(old)
    return calls


@contextlib.contextmanager
def _noting(module: nn.Module, path: str, calls: list[OpaqueCall]) -> Iterator[None]:
    forward = module.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        before = {n: b.clone() for n, b in module.named_buffers()}
        state = torch.random.get_rng_state()
        result = forward(*args, **kwargs)
        calls.append(
            OpaqueCall(
                key=f"{path}@{len(calls)}" if calls else path, path=path, training=module.training,
                call=_blank((args, kwargs)), inputs=[(p, Meta.of(t)) for p, t in _tensor_leaves((args, kwargs))],
                params=[n for n, _ in module.named_parameters()], buffers=list(before),
                changed=[n for n, b in module.named_buffers() if not torch.equal(b, before[n])],
                result=_blank(result), outputs=[(p, Meta.of(t)) for p, t in _tensor_leaves(result)],
                random=not torch.equal(state, torch.random.get_rng_state()),
            )
        )  # fmt: skip
        return result

    module.forward = noting  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del module.forward  # type: ignore[attr-defined]


# ---- while tracing ----


class OpaqueTrace:
    """Stands in for the opaque modules while the model is traced: records calls instead of running them."""

    def __init__(self, model: nn.Module, calls: dict[str, list[OpaqueCall]], recorder: Recorder) -> None:
        self._path = {id(model.get_submodule(path)): path for path in calls}
        self._calls = {path: iter(c) for path, c in calls.items()}
        self._recorder = recorder

    def replaces(self, module: nn.Module) -> bool:
        return id(module) in self._path

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        path = self._path[id(module)]
        call = next(self._calls[path], None)
        inputs = _tensor_leaves((args, kwargs))
        if call is None or [(p, Meta.of(t)) for p, t in inputs] != call.inputs:
            raise CaptureError(
                f"module '{path}' is called otherwise while traced than in the real run on the example batch; an "
                "opaque module "
                "must be called the same way each time"
            )
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        operands = [t for _, t in inputs] + [params[n] for n in call.params] + [buffers[n] for n in call.buffers]
        results = _Opaque.apply(self._recorder, call, buffers, *operands)
        return rebuild(call.result, {p: r for (p, _), r in zip(call.outputs, results, strict=True)})


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, call: OpaqueCall, buffers: dict[str, Tensor], *operands: Tensor) -> Any:
        metas = [m for _, m in call.outputs] + [Meta.of(buffers[n]) for n in call.changed]
        if call.random:
            metas.append(Meta(torch.int64, ()))
        before = [recorder.snapshot(buffers[n]) for n in call.buffers]
        results = recorder.call_python(call.key, "forward", operands, [(m.dtype, m.size) for m in metas], call.random)
        outputs = results[: len(call.outputs)]
        ctx.recorder, ctx.call = recorder, call
        ctx.num_inputs = len(call.inputs) + len(call.params)
        # Backward wants the buffers as they are now, before they are written here or by what follows.
        kept = [*operands[: len(operands) - len(before)], *before]
        ctx.save_for_backward(*kept, *([results[-1]] if call.random else []))
        for name, new in zip(call.changed, results[len(outputs) :], strict=False):
            recorder.replace(buffers[name], new)
        ctx.mark_non_differentiable(*(r for r in outputs if not r.dtype.is_floating_point))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: OpaqueCall = ctx.call
        saved = ctx.saved_tensors
        used = [g for g, (_, m) in zip(grads, call.outputs, strict=True) if m.dtype.is_floating_point]
        needs = ctx.needs_input_grad[3 : 3 + ctx.num_inputs]
        call.wanted = [i for i, n in enumerate(needs) if n]
        metas = [(saved[i].dtype, tuple(saved[i].shape)) for i in call.wanted]
        results = ctx.recorder.call_python(call.key, "backward", [*used, *saved], metas, False)
        given = dict(zip(call.wanted, results, strict=True))
        return None, None, None, *(given.get(i) for i in range(len(saved) - call.random))


# ---- at run time ----


class OpaqueTable:
    """What the runtime calls for `call.python`; made on every rank from its own model and rank 0's calls."""

    def __init__(self, model: nn.Module, calls: Sequence[OpaqueCall]) -> None:
        self._calls = {c.key: c for c in calls}
        self._modules = {c.key: model.get_submodule(c.path) for c in calls}

    def run_opaque(self, key: str, part: str, tensors: list[Tensor]) -> list[Tensor]:
        """Runs one part of a call on the operands that the program lists. The results own their storage."""
        call, module = self._calls[key], self._modules[key]
        run = self._forward if part == "forward" else self._backward
        results = run(call, module, tensors)
        used = {t.untyped_storage()._cdata for t in tensors}
        return [r.clone() if r.untyped_storage()._cdata in used else r for r in results]

    @staticmethod
    def _run(call: OpaqueCall, module: nn.Module, operands: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs and new values of the buffers; runs on copies of the buffers."""
        n, m = len(call.inputs), len(call.inputs) + len(call.params)
        given = {path: t for (path, _), t in zip(call.inputs, operands[:n], strict=True)}
        args, kwargs = rebuild(call.call, given)
        buffers = {name: b.clone() for name, b in zip(call.buffers, operands[m:], strict=True)}
        state = {**dict(zip(call.params, operands[n:m], strict=True)), **buffers}
        trained = module.training
        module.train(call.training)
        try:
            result = torch.func.functional_call(module, state, args, kwargs)
        finally:
            module.train(trained)
        outputs = [t for _, t in _tensor_leaves(result)]
        got = [Meta.of(t) for t in outputs]
        if got != [meta for _, meta in call.outputs]:
            raise CaptureError(
                f"opaque module '{call.path}' gave {[(str(g.dtype), g.size) for g in got]}, but on the example "
                "batch it gave "
                f"{[(str(g.dtype), g.size) for _, g in call.outputs]}; its results must not change their sizes "
                "with the data"
            )
        return outputs, buffers

    def _forward(self, call: OpaqueCall, module: nn.Module, operands: list[Tensor]) -> list[Tensor]:
        with torch.no_grad(), _seeded(torch.randint(1 << 62, ()) if call.random else None) as seed:
            outputs, buffers = self._run(call, module, operands)
        last = [seed.to(operands[0].device)] if seed is not None else []
        return [*(o.detach() for o in outputs), *(buffers[n] for n in call.changed), *last]

    def _backward(self, call: OpaqueCall, module: nn.Module, operands: list[Tensor]) -> list[Tensor]:
        count = sum(meta.dtype.is_floating_point for _, meta in call.outputs)
        grads, operands = operands[:count], operands[count:]
        seed = operands.pop() if call.random else None
        with torch.enable_grad(), _seeded(seed):
            operands = [t.detach().requires_grad_(i in call.wanted) for i, t in enumerate(operands)]
            outputs, _ = self._run(call, module, operands)
            outputs = [t for t in outputs if t.dtype.is_floating_point]
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
            wanted = [operands[i] for i in call.wanted]
            if not pairs:
                return [torch.zeros_like(t) for t in wanted]
            found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(t) if f is None else f for t, f in zip(wanted, found, strict=True)]


@contextlib.contextmanager
def _seeded(seed: Tensor | None) -> Iterator[Tensor | None]:
    """Runs under a seed and puts the generators back; does nothing without one."""
    if seed is None:
        yield None
        return
    with torch.random.fork_rng():
        torch.manual_seed(int(seed))
        yield seed
