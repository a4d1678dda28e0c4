"""mode="eager": the user's own Python forward and backward on the program's units, optimizer and checkpoints.

The program then has no model in it, only the gradients as inputs:

    param %0: f32[32,32] "fc.weight" trainable group 0      input %1: f32[32,32] "grad of fc.weight"
    phase micro_batch takes () gives () { grad(%0, %1) {bwd} }

Sharding, accumulation, clipping and update are the same passes and kernels as in compiled mode, so print and pdb work in the model and
the loss still agrees. It gathers the whole model for the step; this mode is for looking, not for speed or memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from interlace.capture.effects import kept_generators, kept_values
from interlace.capture.groups import optimizer_groups
from interlace.capture.inputs import on_device
from interlace.capture.literals import DimPrinter, contiguous_strides, quote
from interlace.capture.loss import outputs_of
from interlace.capture.model_tensors import ModelTensor, collect, flat_weights_kept
from interlace.capture.program import default_loss
from interlace.capture.tracing import with_left
from interlace.capture.watch import Watch
from interlace.capture.writes import Writes, refuse_writes
from interlace.compiling.states import WEIGHT, States
from interlace.dist.peers import Peers
from interlace.errors import InterlaceError
from interlace.train import generators
from interlace.train.materialize import Slot, module_seed, replaced, slots_of

Tensor = torch.Tensor
LossFn = Callable[[nn.Module, Any], Any]


def eager_text(model: nn.Module, tensors: list[ModelTensor], optimizer: torch.optim.Optimizer, used: Collection[str] | None) -> str:
    """The program of a step whose gradients are inputs. `used`: the parameters that get one; None means all trainable ones."""
    groups, printer = optimizer_groups(optimizer, tensors), DimPrinter()
    lines = ["interlace 1 captured", f"meta model {quote(type(model).__name__)}", f"meta mode {quote('eager')}"]
    lines += groups.lines()
    inputs: list[str] = []
    ops: list[str] = []
    for i, t in enumerate(tensors):
        shape = tuple(t.real.shape)  # parameters are contiguous in a program
        kind = printer.type(t.real.dtype, shape, contiguous_strides(shape) if t.kind == "param" else t.real.stride())
        decl = f"%{i}: {kind} {quote(t.name)}"
        if t.kind != "param":
            lines.append(f"buffer {decl} {'persistent' if t.persistent else 'plain'}")
            continue
        trainable = t.real.requires_grad
        line = f"param {decl} " + (f"trainable group {groups.of[id(t.real)]}" if trainable else "frozen")
        lines.append(line + "".join(f" alias {quote(a)}" for a in t.aliases))
        if trainable and (used is None or t.name in used):
            value = len(tensors) + len(inputs)
            inputs.append(f"input %{value}: {kind} {quote('grad of ' + t.name)}")
            ops.append(f"  grad(%{i}, %{value}) {{bwd}}")
    return "\n".join([*lines, *inputs, "phase micro_batch takes () gives () {", *ops, "}"]) + "\n"


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By backward(), as users have it: what runs in it, reentrant checkpoints say, may not know torch.autograd.grad."""
    loss.backward()
    found = zip(leaves, with_left([None] * len(leaves), list(leaves.values())), strict=True)
    return {name: g if g.layout == torch.strided else g.to_dense() for name, g in found if g is not None}


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """What a model puts in the place of a buffer goes into the buffer, which is a state of the trainer. Tensor attributes are the model's."""
    places = [(module._buffers, name, t) for module in model.modules() for name, t in module._buffers.items() if t is not None]
    try:
        yield
    finally:
        for table, name, t in places:
            now = table.get(name)
            if isinstance(now, Tensor) and now is not t and (now.shape, now.dtype) == (t.shape, t.dtype):
                with torch.no_grad():
                    t.copy_(now)
                table[name] = t


class EagerRunner:
    """Stands where the executor stands: step() takes micro-batches as the user made them.

    `used`: the parameters that had a gradient in the last step; any of `gradients` may have none in some step (unused.py)."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, executor: Any, states: States, peers: Peers,
        inputs: list[str], seed: int, rng: str,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn = model, loss_fn or default_loss
        self.executor, self.states, self.peers = executor, states, peers
        self.gradients = [name.removeprefix("grad of ") for name in inputs]
        self.seed, self.rng = seed, rng
        self.used: set[str] = set()
        self._writes: set[str] = set()  # parameters that the model writes while it runs

    def sometimes_in(self, program: str) -> set[str]:
        return set(self.gradients)

    @contextmanager
    def installed(self) -> Iterator[dict[str, Tensor]]:
        """The whole parameters in the model's places, as leaves of autograd."""
        values = {p.name: t for p, t in self.states.whole(WEIGHT, everywhere=True) if t is not None}
        slots = [s for s in slots_of(self.model) if s.name in values]

        def leaf(slot: Slot) -> Tensor:
            made = nn.Parameter(values[slot.name].detach(), slot.tensor.requires_grad)
            for hook in (slot.tensor._backward_hooks or {}).values():
                made.register_hook(hook)
            return made

        with flat_weights_kept(self.model), replaced(slots, leaf) as tensors, torch.enable_grad():
            yield {slot.name: t for slot, t in zip(slots, tensors, strict=True)}

    @contextmanager
    def _generator(self, step: int, index: int) -> Iterator[None]:
        """Keyed mode: random numbers depend on (seed, step, micro-batch, rank) alone; compat mode: the user's generator."""
        if self.rng == "compat":
            yield
            return
        with generators.forked(self.peers.device):
            torch.manual_seed(module_seed(self.seed, f"step {step} micro-batch {index} rank {self.peers.rank}"))
            yield

    def step(self, micro_batches: list[Any], hyper: list[list[float]], step: int) -> dict[str, Any]:
        outputs: dict[str, list[Tensor]] = {}
        gradients: list[list[Tensor]] = []
        with self.installed() as leaves, _buffers_kept(self.model):
            begin = {name: t.data_ptr() for name, t in leaves.items()}
            for i, part in enumerate(micro_batches):
                with self._generator(step, i):
                    named = outputs_of(self.loss_fn(self.model, on_device(part, self.peers.device)))
                    found = _gradients(named["loss"], leaves)
                for name, value in named.items():
                    outputs.setdefault(name, []).append(value.detach())
                gradients.append([found[name] if name in found else torch.zeros_like(leaves[name]) for name in self.gradients])
                self.used.update(found)
            now = dict(self.model.named_parameters())
            for name, t in ((name, now.get(name, t)) for name, t in leaves.items()):
                if name in self._writes or t.data_ptr() != begin[name]:  # p.data = ..., say
                    self.states.fill_from(name, WEIGHT, t.detach())
        if late := self.used.difference(self.gradients):
            name = min(late)
            if not self.states.parameters[name].trainable:
                raise InterlaceError(
                    f"parameter '{name}' is trained at step {step}, and was frozen when compiled; mode=\"eager\" takes what begins later "
                    "where it is frozen (requires_grad_(False)) after interlace.compile and not before it"
                )
            raise InterlaceError(
                f"parameter '{name}' has a gradient at step {step}, and had none on the example batch that was compiled for; give "
                'interlace.compile a batch that uses it, or take fullgraph=False in place of mode="eager"'
            )
        result = self.executor.step(gradients, hyper, step)
        finite = result["finite"] and all(math.isfinite(v.item()) for v in outputs["loss"])
        return {**result, "outputs": outputs, "finite": finite}

    def used_parameters(self, micro_batch: Any) -> list[str]:
        """The parameters that get a gradient, found by one run whose effects are taken back. Error: on several ranks, a model that writes
        its parameters."""
        watch = Watch(self.model, self.loss_fn)
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept_values(t.real for t in collect(self.model) if t.kind != "param"))
            stack.callback(watch.restore)
            with self.installed() as leaves, generators.forked(self.peers.device), kept_generators(), self._generator(0, 0):
                writes = Writes(leaves)
                try:
                    with writes:
                        loss = outputs_of(self.loss_fn(self.model, on_device(micro_batch, self.peers.device)))["loss"]
                        found = _gradients(loss, leaves)
                    writes.note_others(leaves, self.model)
                finally:
                    writes.restore()
        self._writes = set(writes.by)
        if several := {n: by for n, by in writes.by.items() if self.peers.size > 1 or ("assigned" in by and leaves[n].requires_grad)}:
            refuse_writes({name: leaves[name].requires_grad for name in several}, several)
        return [name for name in self.gradients if name in found]

    def find_nonfinite(self, micro_batches: list[Any], step: int) -> str | None:
        """The innermost module whose output is first not finite, or the parameter whose gradient is."""
        culprit: list[str] = []

        def look(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                for t in output if isinstance(output, (tuple, list)) else [output]:
                    if isinstance(t, Tensor) and t.is_floating_point() and not culprit and not torch.isfinite(t).all():
                        culprit.append(f"the first such value is the output of module '{path}' ({type(module).__name__})")

            return hook

        hooks = [m.register_forward_hook(look(path)) for path, m in self.model.named_modules() if path]
        try:
            with kept_values(self.model.buffers()), self.installed() as leaves:
                for i, part in enumerate(micro_batches):
                    with self._generator(step, i):
                        loss = outputs_of(self.loss_fn(self.model, on_device(part, self.peers.device)))["loss"]
                        found = _gradients(loss, leaves)
                    if not culprit and not torch.isfinite(loss):
                        culprit.append("every module's output is finite: the loss function makes the first such value")
                    bad = [n for n, g in found.items() if not torch.isfinite(g).all()]
                    if not culprit and bad:
                        culprit.append(f"the loss is finite, the gradient of '{bad[-1]}' is not")
        finally:
            for hook in hooks:
                hook.remove()
        return culprit[0] if culprit else None
