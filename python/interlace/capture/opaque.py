"""Modules that cannot be captured run in Python, each as one opaque op: `call.python(...) {module="path"
part="forward"}`.

What such a module gives is learnt from one real run of the model on the example batch. In the program its parameters
and buffers are operands, so they may be sharded and gathered like all others, and the Python module itself holds no
state: forward runs it with the tensors it is given, backward runs it again under autograd (opaque_run.py).

    forward:   (inputs, parameters, buffers) -> (outputs, buffers that it changes, seed if it draws random numbers)
    backward:  (gradients of the outputs, inputs, parameters, buffers, seed) -> gradients of inputs and parameters

A loss function that cannot be captured is opaque as well: what it does with the results of the model's calls, or all of it with the
model in it where it uses more of the model than that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.capture.any_batch import ANY, NUMBER, AnyBatch
from interlace.capture.effects import draws, generators
from interlace.capture.inputs import Path, leaves, rebuild
from interlace.capture.model_tensors import device_type, tensors_of
from interlace.capture.patches import patched
from interlace.capture.reads import Told
from interlace.capture.real_run import Resized, another, resized, run_for_real
from interlace.capture.recorder import Recorder
from interlace.capture.watch import Watch, plain
from interlace.capture.writes import Writes
from interlace.errors import CaptureError

Tensor = torch.Tensor
LOSS, TAIL, TOLD = "(loss function)", "(loss after the model)", "(told)"  # paths of what is no module


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
    why: str  # it is not captured
    training: dict[str, bool]  # flags of the module and those in it
    call: tuple[tuple, dict]  # arguments, None in place of tensors
    inputs: list[tuple[Path, Meta]]
    params: list[str]  # names within the module
    buffers: list[str]
    changed: list[str]  # buffers that forward writes
    result: Any  # structure of the result, None in place of tensors
    outputs: list[tuple[Path, Meta]]
    random: bool  # it draws random numbers, of torch's default generator at least
    stateful: bool  # it draws others, reads clocks or iterators, or changes what it reads: runs once a step
    autocast: torch.dtype | None  # of the region of torch.autocast that the call is in
    hosted: list[int]  # inputs that lie in the host's memory though the model does not
    wanted: list[int] = dataclasses.field(default_factory=list)  # inputs, then parameters, whose gradients backward gives


class Unfit(CaptureError):
    """A module takes or gives more than tensors, so that what has it in it must be opaque."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def tensor_leaves(x: Any) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in leaves(x) if isinstance(leaf, Tensor)]


def _blank(x: Any) -> Any:
    """The structure without its tensors."""
    return rebuild(x, {path: None for path, _ in tensor_leaves(x)})


def _arguments(path: str, x: Any) -> Any:
    """_blank(); Unfit where a class will not have its tensors replaced (a packed sequence)."""
    try:
        return _blank(x)
    except Exception as e:
        raise Unfit(path, f"module '{path}' takes tensors in a class that checks them ({type(e).__name__}: {e})") from e


def _holds_tensors(x: Any, depth: int = 3) -> bool:
    """Whether an object that is no container hides tensors, as a cache of keys and values does."""
    if plain(x) or isinstance(x, (nn.Module, type)) or not hasattr(x, "__dict__"):
        return False
    inside = [leaf for _, leaf in leaves(vars(x))]
    return any(isinstance(v, Tensor) or (depth > 0 and _holds_tensors(v, depth - 1)) for v in inside)


def _hiding(x: Any) -> Iterator[tuple[Path, Any]]:
    return ((path, leaf) for path, leaf in leaves(x, objects=False) if not isinstance(leaf, Tensor) and _holds_tensors(leaf))


class Sizes(TorchDispatchMode):
    """Around a real run. `found`: whether data decide sizes in it, those of nonzero() and the like, or whole numbers that Python reads."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= type(result) is int or torch.Tag.dynamic_output_shape in func.tags
        return result


# ---- the loss function as a module ----


class Whole(nn.Module):
    """A loss function with the model in it."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)


class StandIn:
    """In the model's place in its loss function: calls give what `call` gives, which is kept, and what else is used of the model is noted."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model, self._call, self.results, self.touched = model, call, list[Any](), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.results.append(self._call(*args, **kwargs))
        return self.results[-1]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if isinstance(value, (Tensor, nn.Module)) or callable(value):
            self.touched = True
        return value


class Tail(nn.Module):
    """What a loss function does with the results of the model's calls."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._outside = (model, loss_fn)  # in a tuple, where it is no part of this module

    def forward(self, results: list[Any], batch: Any) -> Any:
        model, loss_fn = self._outside
        left = iter(results)
        return loss_fn(StandIn(model, lambda *args, **kwargs: next(left)), batch)


def module_at(path: str, model: nn.Module, loss_fn: Any) -> nn.Module:
    if path in (LOSS, TAIL, TOLD, ANY):
        return {LOSS: Whole, TAIL: Tail, TOLD: Told, ANY: AnyBatch}[path](model, loss_fn)
    return model.get_submodule(path)


class CalledOtherwise(CaptureError):
    """A trace calls an opaque module in another way than the real run did: what calls it decides on data, too."""


def flags_of(module: nn.Module) -> dict[str, bool]:
    return {name: m.training for name, m in module.named_modules()}


# ---- learning what the modules give ----


def learn_calls(
    model: nn.Module, paths: Mapping[str, str], loss_fn: Callable[[nn.Module, Any], Any], batch: Any,
    values: Mapping[int, Tensor] | None = None,
) -> dict[str, list[OpaqueCall]]:  # fmt: skip
    """Runs the model for real and notes each call of the modules at these paths (with why they are opaque). Leaves buffers, attributes and
    generators as they were. `values`: of parameters on meta, by their ids.

    Errors: a model on meta, a model that fails; Unfit, also where another batch gives results of other sizes.
    """
    if values is None and any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"module '{next(iter(paths))}' cannot be captured, and what it gives cannot be learnt from a model on meta; build the model "
            "in memory, or change the module"
        )
    sizes = Sizes()
    calls = _calls(model, paths, loss_fn, batch, values, sizes)
    again: dict[str, list[OpaqueCall]] = {}
    if sizes.found and not paths.keys() <= {LOSS, TAIL}:
        with contextlib.suppress(CaptureError):  # the model need not take such a batch
            again = _calls(model, paths, loss_fn, another(batch), values, sizes)
    for path in again.keys() - {LOSS, TAIL}:
        for one, other in zip(calls[path], again[path], strict=False):
            if one.inputs == other.inputs and one.outputs != other.outputs:
                raise Unfit(path, f"module '{path}' gives results whose sizes depend on the data")
    return calls


def _calls(
    model: nn.Module, paths: Mapping[str, str], loss_fn: Callable[[nn.Module, Any], Any], batch: Any,
    values: Mapping[int, Tensor] | None, sizes: Sizes,
) -> dict[str, list[OpaqueCall]]:  # fmt: skip
    calls: dict[str, list[OpaqueCall]] = {path: [] for path in paths}

    def prepare(stack: contextlib.ExitStack) -> Callable[[nn.Module, Any], Any]:
        run = loss_fn
        stack.enter_context(sizes)
        for path, why in paths.items():
            if path == LOSS:
                whole = Whole(model, loss_fn)
                stack.enter_context(_noting(whole, path, why, calls[path], model))
                run = lambda _, batch: whole(batch)  # noqa: E731, B023
            elif path == TAIL:
                run = _running_tail(loss_fn, why, calls[path])
            else:
                stack.enter_context(_noting(model.get_submodule(path), path, why, calls[path], model))
        return run

    run_for_real(model, loss_fn, batch, values, prepare)
    return calls


def _running_tail(loss_fn: Callable[[Any, Any], Any], why: str, calls: list[OpaqueCall]) -> Callable[[nn.Module, Any], None]:
    def run(model: nn.Module, batch: Any) -> None:
        stand_in = StandIn(model, model)
        loss_fn(stand_in, batch)
        if stand_in.touched or not stand_in.results:
            raise Unfit(TAIL, "the loss function uses parts of the model")
        tail = Tail(model, loss_fn)
        with _noting(tail, TAIL, why, calls, model):
            tail(stand_in.results, batch)

    return run


@contextlib.contextmanager
def _noting(module: nn.Module, path: str, why: str, calls: list[OpaqueCall], model: nn.Module) -> Iterator[None]:
    forward = module.forward
    root = path in ("", LOSS, TAIL)

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not root and next(_hiding((args, kwargs)), None) is not None:
            raise Unfit(path, f"module '{path}' takes an object with tensors in it")
        params, buffers = tensors_of(module, model)
        before = {n: b.clone() for n, b in buffers.items()}
        device = device_type(model.parameters())
        region = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        state, others, watch, writes = draws(device), generators(), Watch(module), Writes(buffers)
        with writes:
            result = forward(*args, **kwargs)
        after = tensors_of(module, model)[1]
        for n, b in after.items():
            if n in buffers and Meta.of(b) != Meta.of(buffers[n]):
                raise Resized(resized(n, buffers[n], b))
        hidden = [p for p, _ in _hiding(result)]
        if hidden and not root:
            raise Unfit(path, f"module '{path}' gives an object with tensors in it")
        if not root and any(type(leaf) in (int, float) for _, leaf in leaves(result)):
            raise Unfit(path, f"module '{path}' gives numbers, which may depend on the data")
        result = rebuild(result, dict.fromkeys(hidden))
        stateful = watch.varies or generators() != others or any(c.kind == "value" for c in watch.changed())
        calls.append(
            OpaqueCall(
                key=f"{path}@{len(calls)}" if calls else path, path=path, why=why, training=flags_of(module),
                call=_arguments(path, (args, kwargs)), inputs=[(p, Meta.of(t)) for p, t in tensor_leaves((args, kwargs))],
                params=list(params), buffers=list(before),
                changed=[n for n, b in after.items() if b is not buffers[n] or n in writes.written() or not torch.equal(b, before[n])],
                result=_blank(result), outputs=[(p, Meta.of(t)) for p, t in tensor_leaves(result)],
                random=stateful or draws(device) != state, stateful=stateful, autocast=region,
                hosted=[i for i, (_, t) in enumerate(tensor_leaves((args, kwargs))) if t.device.type == "cpu" != device],
            )
        )  # fmt: skip
        return result

    with patched(module, forward=noting):
        yield


# ---- while tracing ----


def told_call(
    told: Told, given: tuple, params: list[str], buffers: list[str], numbers: list[str], region: torch.dtype | None, places: str
) -> OpaqueCall:  # fmt: skip
    """The call of a loss function's Python that only hands on what it reads (reads.py)."""
    inputs, outputs = [(p, Meta.of(t)) for p, t in tensor_leaves((given, {}))], [((name,), Meta(torch.float64, ())) for name in numbers]
    why = f"numbers are read at {places}" if places else "tensors are kept for the script"
    call = _arguments(TOLD, (given, {}))
    return OpaqueCall(TOLD, TOLD, why, flags_of(told), call, inputs, params, buffers, [], None, outputs, False, False, region, [])


def any_call(module: AnyBatch, model: nn.Module, why: str, region: torch.dtype | None) -> OpaqueCall:
    """The call of a whole training step on batches of any form; flags count as they are then."""
    params, buffers = tensors_of(module, model)
    given: tuple[Any, ...] = ({NUMBER: torch.tensor(0)},), {}
    return OpaqueCall(
        ANY, ANY, why, {}, _blank(given), [(p, Meta.of(t)) for p, t in tensor_leaves(given)], list(params), list(buffers), list(buffers),
        None, [((), Meta(module.dtype, ()))], random=True, stateful=True, autocast=region, hosted=[0],
    )  # fmt: skip


class OpaqueTrace:
    """Stands in for the opaque modules while the model is traced: records calls instead of running them."""

    def __init__(self, model: nn.Module, calls: dict[str, list[OpaqueCall]], recorder: Recorder, loss_fn: Any = None) -> None:
        self.modules = {path: module_at(path, model, loss_fn) for path in calls}
        self._path = {id(module): path for path, module in self.modules.items()}
        self._calls = {path: iter(c) for path, c in calls.items()}
        self._recorder, self._model = recorder, model

    @property
    def whole(self) -> nn.Module | None:
        """The loss function with the model in it, where it is opaque."""
        return self.modules.get(ANY, self.modules.get(LOSS))

    def replaces(self, module: nn.Module) -> bool:
        return id(module) in self._path

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        path = self._path[id(module)]
        call = next(self._calls[path], None)
        inputs = tensor_leaves((args, kwargs))
        if call is None or [(p, Meta.of(t)) for p, t in inputs] != call.inputs:
            raise CalledOtherwise(
                f"module '{path}' is called otherwise while traced than in the real run on the example batch; an opaque module must be "
                "called the same way each time"
            )
        params, buffers = tensors_of(module, self._model)
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
        ctx.recorder, ctx.call, ctx.num_inputs = weakref.ref(recorder), call, len(call.inputs) + len(call.params)  # no cycle through C++
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
        results = ctx.recorder().call_python(call.key, "backward", [*used, *saved], metas, False)
        given = dict(zip(call.wanted, results, strict=True))
        return None, None, None, *(given.get(i) for i in range(len(saved) - call.random))


def full_name(call: OpaqueCall, name: str) -> str:
    """A parameter's name in the model."""
    if call.path in (LOSS, TOLD, ANY):
        return name.removeprefix("model.")
    return name if call.path in ("", TAIL) else f"{call.path}.{name}"


def only_in(calls: Sequence[OpaqueCall], names: Mapping[str, int], lines: Sequence[str]) -> list[str]:
    """Of the parameters (name -> value id) that opaque calls give gradients to, those that nothing else uses: in a step in which their
    module does not use them they have no gradient at all."""
    asked: set[str] = set()
    for call in calls:
        asked |= {full_name(call, call.params[i - len(call.inputs)]) for i in call.wanted if i >= len(call.inputs)}
    elsewhere: set[str] = set()
    for line in lines:
        right = line.partition(" = ")[2] if " = " in line else line
        if not right.startswith("call.python(") and not right.lstrip().startswith(("grad(", "output(")):
            elsewhere.update(word.strip("[]()") for word in right.replace("(", " ").replace(",", " ").split() if word.startswith("%"))
    return [n for n in names if n in asked and f"%{names[n]}" not in elsewhere]
