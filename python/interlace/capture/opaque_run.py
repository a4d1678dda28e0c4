"""Opaque modules at run time: what the runtime calls for `call.python`, on every rank with its own model and rank 0's calls."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from interlace.capture.any_batch import ANY, AnyBatch
from interlace.capture.effects import kept_draws, states_of
from interlace.capture.inputs import rebuild
from interlace.capture.literals import quote
from interlace.capture.model_tensors import flat_weights_kept
from interlace.capture.opaque import Meta, OpaqueCall, flags_of, full_name, module_at, tensor_leaves
from interlace.capture.patches import patched
from interlace.capture.tracing import with_left
from interlace.errors import CaptureError

Tensor = torch.Tensor


class OpaqueTable:
    """The opaque calls of a model's programs, and what they cost. `loss_fn`: that of training. `compat`: they draw from torch's own
    generators, as they come.

    `used`: the parameters that got a gradient since it was emptied. `sometimes`: those with a gradient in those steps alone in which an
    opaque module uses them."""

    def __init__(self, model: nn.Module, calls: Iterable[OpaqueCall] = (), loss_fn: Any = None, compat: bool = False) -> None:
        self.model, self.loss_fn, self.compat = model, loss_fn, compat
        self.sometimes: set[str] = set()
        self.calls: dict[str, OpaqueCall] = {}
        self.used: set[str] = set()
        self._modules: dict[str, nn.Module] = {}
        self._cost: dict[str, list[float]] = {}  # runs, seconds
        # Of stateful calls, whose forward runs once: operands and outputs with their graph, until backward, by their seeds.
        self._states: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._numbers = itertools.count()
        self._begins: dict[int, list[Tensor]] = {}  # with `compat`: where generators were before a forward part, until backward
        self.given: list[Any] = []  # the micro-batches of a step that takes any batch (any_batch.py)
        self.outputs: dict[int, dict[str, Tensor]] = {}  # and what its loss function gave
        self.add(calls)

    def add(self, calls: Iterable[OpaqueCall], sometimes: Iterable[str] = (), loss_fn: Any = None) -> None:
        self.sometimes.update(sometimes)
        for call in calls:
            self.calls[call.key] = call
            self._modules[call.key] = module = module_at(call.path, self.model, loss_fn or self.loss_fn)
            if isinstance(module, AnyBatch):
                module.given, module.outputs = self.given, self.outputs
            self._cost.setdefault(call.key, [0, 0.0])

    def calls_in(self, program: str) -> list[OpaqueCall]:
        """Those that a program makes."""
        return [call for key, call in self.calls.items() if f" module={quote(key)} " in program]

    def sometimes_in(self, program: str) -> set[str]:
        """Those of `sometimes` whose modules are opaque in a program."""
        return self.sometimes.intersection(full_name(call, name) for call in self.calls_in(program) for name in call.params)

    def summary(self) -> list[dict[str, Any]]:
        """Of each call: what it is, why it is not captured, how often and how long (seconds) it has run."""
        rows = []
        for key, call in self.calls.items():
            runs, seconds = self._cost[key]
            size = sum(p.numel() * p.element_size() for n, p in self._modules[key].named_parameters() if n in call.params)
            rows.append({"module": key, "why": call.why, "parameter_bytes": size, "runs": int(runs), "seconds": seconds})
        return rows

    def run_opaque(self, key: str, part: str, tensors: list[Tensor]) -> list[Tensor]:
        """Runs one part of a call on the operands that the program lists. The results own their storage."""
        call, module = self.calls[key], self._modules[key]
        begin = time.perf_counter()
        run = self._forward if part == "forward" else self._backward
        results = run(call, module, tensors)
        seen = {t.untyped_storage()._cdata for t in tensors}
        own: list[Tensor] = []
        for r in results:
            shared = r.untyped_storage()._cdata in seen
            own.append(r.clone() if shared else r)
            seen.add(own[-1].untyped_storage()._cdata)
        cost = self._cost[key]
        cost[0] += part == "forward"
        cost[1] += time.perf_counter() - begin
        return own

    @staticmethod
    def _run(call: OpaqueCall, module: nn.Module, operands: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs and new values of the buffers; runs on copies of the buffers."""
        n, m = len(call.inputs), len(call.inputs) + len(call.params)
        given = {path: t.cpu() if i in call.hosted else t for i, ((path, _), t) in enumerate(zip(call.inputs, operands[:n], strict=True))}
        args, kwargs = rebuild(call.call, given)
        own = {name: b.clone() for name, b in zip(call.buffers, operands[m:], strict=True)}
        state = {**dict(zip(call.params, operands[n:m], strict=True)), **own}
        with _installed(call, module, operands, state):
            result = module(*args, **kwargs)
        buffers = {name: state[name] for name in own}  # or what the module has put in their places
        for name, before in own.items():
            if Meta.of(buffers[name]) != Meta.of(before):
                raise CaptureError(
                    f"opaque module '{call.path}' puts {Meta.of(buffers[name])} in the place of its buffer '{name}', which is "
                    f"{Meta.of(before)}; a program keeps its size"
                )
        found = dict(tensor_leaves(result))
        got = [(path, Meta.of(t)) for path, t in found.items() if any(path == p for p, _ in call.outputs)]
        if got != call.outputs:
            raise CaptureError(
                f"opaque module '{call.path}' gave {[(str(g.dtype), g.size) for _, g in got]}, but on the example batch it gave "
                f"{[(str(g.dtype), g.size) for _, g in call.outputs]}; its results must not change their sizes with the data; "
                'call trainer.step(batch, python=True) where they do, or take mode="eager"'
            )
        return [found[path].to(operands[0].device) if operands else found[path] for path, _ in call.outputs], buffers

    def _forward(self, call: OpaqueCall, module: nn.Module, operands: list[Tensor]) -> list[Tensor]:
        kept, given = call.stateful and bool(call.wanted), operands
        if kept:  # parameters lie elsewhere, or nowhere, until backward
            operands = [t.detach().clone().requires_grad_(i in call.wanted) for i, t in enumerate(operands)]
        with torch.set_grad_enabled(kept), self._drawing(call, operands) as seed:
            outputs, buffers = self._run(call, module, operands)
        if kept and call.path == ANY:  # nobody has traced it
            _refuse_written(call, given, operands)
        if kept and seed is not None:
            self._states[int(seed)] = operands, outputs
        last = [seed.to(operands[0].device)] if seed is not None else []
        return [*(o.detach() for o in outputs), *(buffers[n].detach() for n in call.changed), *last]

    def _backward(self, call: OpaqueCall, module: nn.Module, operands: list[Tensor]) -> list[Tensor]:
        count = sum(meta.dtype.is_floating_point for _, meta in call.outputs)
        grads, operands = operands[:count], operands[count:]
        seed = operands.pop() if call.random else None
        kept = self._states.pop(int(seed), None) if seed is not None else None
        begin = None if seed is None else self._begins.pop(int(seed), int(seed))
        with torch.enable_grad(), contextlib.nullcontext() if begin is None else kept_draws(_device(operands), begin):
            if kept is None:
                operands = [t.detach().requires_grad_(i in call.wanted) for i, t in enumerate(operands)]
                outputs, _ = self._run(call, module, operands)
            else:
                operands, outputs = kept
            outputs = [t for t in outputs if t.dtype.is_floating_point]
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
            wanted = [operands[i] for i in call.wanted]
            found: Iterable[Tensor | None] = [None] * len(wanted)
            if pairs:  # checkpoints and Functions may call modules again
                tensors = dict(zip([*call.params, *call.buffers], operands[len(call.inputs) :], strict=True))
                tensors |= {name: tensors[name].clone() for name in call.buffers}
                with _installed(call, module, operands, tensors):
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
                found = with_left([None] * len(wanted), wanted)
                found = [f.to_dense() if f is not None and f.layout != torch.strided else f for f in found]
        for i, f in zip(call.wanted, found, strict=True):
            if f is not None and i >= len(call.inputs):
                self.used.add(full_name(call, call.params[i - len(call.inputs)]))
        return [torch.zeros_like(t) if f is None else f for t, f in zip(wanted, found, strict=True)]

    @contextlib.contextmanager
    def _drawing(self, call: OpaqueCall, operands: list[Tensor]) -> Iterator[Tensor | None]:
        """Around a forward part that draws: gives the seed that its backward part gets."""
        if not call.random:
            yield None
            return
        if self.compat:
            number = next(self._numbers)
            if call.wanted:
                self._begins[number] = states_of(_device(operands))
            yield torch.tensor(number)
            return
        seed = torch.randint(1 << 62, ())
        with kept_draws(_device(operands), int(seed)):
            yield seed


def _refuse_written(call: OpaqueCall, before: list[Tensor], after: list[Tensor]) -> None:
    """Error: forward has written parameters, which a program has elsewhere."""
    for i, name in enumerate(call.params, len(call.inputs)):
        if not torch.equal(before[i], after[i]) and not before[i].isnan().any():
            raise CaptureError(
                f"parameter '{name.removeprefix('model.')}' is written by the model's own Python, which runs here as a whole, and "
                'what it writes would be lost; write it between steps (trainer.whole_parameters()), or take mode="eager"'
            )


def _device(operands: list[Tensor]) -> str:
    return operands[0].device.type if operands else "cpu"


@contextlib.contextmanager
def _installed(call: OpaqueCall, module: nn.Module, operands: list[Tensor], state: dict[str, Tensor]) -> Iterator[None]:
    """The module with these tensors in the places of its own, and as it was when the call was learnt; what it puts there itself is in
    `state` afterwards."""
    region = contextlib.nullcontext() if call.autocast is None or not operands else torch.autocast(operands[0].device.type, call.autocast)
    with region, _flags(module, call.training), flat_weights_kept(module), _in_places(module, state):
        yield


@contextlib.contextmanager
def _in_places(module: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """As torch's functional_call, but a place that several paths lead to (a module that others share) is changed and put back once."""
    named = {id(t): name for find in (module.named_buffers, module.named_parameters) for name, t in find() if name in state}
    places: list[tuple[dict[str, Any], str, Any]] = [
        (table, k, t) for m in module.modules() for table in (m._parameters, m._buffers) for k, t in table.items() if id(t) in named
    ]  # fmt: skip
    for table, key, t in places:
        table[key] = state[named[id(t)]]
    try:
        yield
    finally:
        for table, key, t in reversed(places):
            state[named[id(t)]] = table.get(key, state[named[id(t)]])
            table[key] = t


@contextlib.contextmanager
def _flags(module: nn.Module, training: dict[str, bool]) -> Iterator[None]:
    """The training flags that a call was learnt with, of the modules that are there: a forward may put others in their place (BigBird)."""
    with contextlib.ExitStack() as stack:
        for name, m in module.named_modules() if flags_of(module) != training else ():
            if name in training:
                stack.enter_context(patched(m, training=training[name]))
        yield
