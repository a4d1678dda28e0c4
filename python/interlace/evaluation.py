"""Trainer.evaluate: the loss of a batch in eval mode, without a step, on the parameters where they lie.

    capture(model.eval()) → canonicalize, shard, update → forward_only ─ the program of forward alone, on the trainer's own shards

A program is made for each shape of batch and loss function when it is first met, and shares parameters and buffers with the one that
trains (programs.py: donor); one of the two has memory for activations at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interlace import batch as batches
from interlace.batch import describe
from interlace.capture.inputs import InputSpec
from interlace.captures import Captures
from interlace.distributed import PeerError, ranks_text
from interlace.eager import EagerRunner, default_loss, named_outputs
from interlace.programs import Built, Programs, Source
from interlace.schedule import items, pass_name

if TYPE_CHECKING:
    from interlace.trainer import Trainer

Tensor = torch.Tensor
LossFn = Callable[[nn.Module, Any], Any]
# What decides units and states; the others say when things move in a step.
STRUCTURE = ("canonicalize", "precision", "shard", "replicate", "zero1", "update")


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """model.eval(), and every module as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


class Evaluation:
    """The evaluating programs of one trainer."""

    def __init__(self, captures: Captures, standard: str) -> None:
        self.captures = captures
        kept = [text for text in items(standard) if pass_name(text) in STRUCTURE]
        self.pipeline = ",".join([*kept, "forward_only", "reorder"])
        self._built: dict[Any, tuple[Built, InputSpec, LossFn | None]] = {}
        self._calls = 0

    def run(self, trainer: Trainer, batch: Any, loss_fn: LossFn | None) -> dict[str, Tensor]:
        """The outputs of the loss function by name, the loss first. Every rank must call it with a batch of the same shape."""
        loss_fn = loss_fn or self.captures.loss_fn
        if isinstance(trainer._runner, EagerRunner):
            return self._run_eager(trainer, trainer._runner, batch, loss_fn)
        spec = InputSpec.of(batch)
        self._agree(trainer, spec)
        trainable = tuple(p.requires_grad for p in trainer._model.parameters())
        key = (id(loss_fn), trainable, *((t.name, t.dtype, t.shape) for t in spec.tensors), repr(dict(spec.constants)))
        if key not in self._built:
            self._built[key] = (
                self._build(trainer, batch, loss_fn),
                spec,
                loss_fn,
            )  # with it, so that its id stays its own
        built, spec, _ = self._built[key]
        inputs = batches.flatten_parts(spec, [batch], trainer._peers.device)
        result = built.executor.step(inputs, trainer._hyper.values(), trainer.steps)
        return {name: values[0] for name, values in result["outputs"].items()}

    def forget(self) -> None:
        """The executors hold the connections of the ranks."""
        self._built.clear()

    def _agree(self, trainer: Trainer, spec: InputSpec) -> None:
        self._calls += 1
        everyone = trainer._peers.exchange(f"evaluation {self._calls}", describe(spec))
        wrong = [r for r, other in enumerate(everyone) if other != everyone[0]]
        if wrong:
            here, there = everyone[0], everyone[wrong[0]]
            name = next(n for n in (*here, *there) if here.get(n) != there.get(n))
            raise PeerError(
                f"evaluate: {ranks_text(wrong)} gave another batch than rank 0: '{name}' is {there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} on rank 0; fill up the last batch, or leave it out on every rank",
                wrong[0],
            )

    def _build(self, trainer: Trainer, batch: Any, loss_fn: LossFn | None) -> Built:
        programs: Programs = trainer._programs
        captures = self.captures
        if loss_fn is not captures.loss_fn:
            captures = Captures(captures.model, loss_fn, captures.optimizer, programs)

        def make() -> Source:
            with in_eval_mode(trainer._model):
                text, constants = captures.text(batch)
            program, reports = programs.run_passes(text, self.pipeline, micro_batches=1)
            return Source(program.print(), reports, constants, text)

        source = programs.share(f"program of evaluation {self._calls}", make)
        return programs.build_beside(source, trainer._executor, trainer._ir)

    def _run_eager(
        self, trainer: Trainer, runner: EagerRunner, batch: Any, loss_fn: LossFn | None
    ) -> dict[str, Tensor]:
        with runner.installed(), in_eval_mode(trainer._model), torch.no_grad():
            result = (loss_fn or default_loss)(trainer._model, batches.to_device(batch, trainer._peers.device))
            return {name: value.detach().clone() for name, value in named_outputs(result).items()}
