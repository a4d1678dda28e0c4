"""Trainer: what interlace.compile gives back. One call of step() is one optimizer step on this rank's batch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlace.capture.inputs import InputSpec
from interlace.capture.model_tensors import collect
from interlace.checkpoint.saver import Locks
from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, Source
from interlace.config import Config
from interlace.dist.peers import PeerError, Peers
from interlace.errors import InterlaceError
from interlace.observe.step_trace import TraceError, TraceFiles, write_trace
from interlace.train import batch as batches
from interlace.train.diagnosis import TrainerDiagnosis
from interlace.train.evaluation import Evaluation
from interlace.train.hyper import Hyper, uses_momentum
from interlace.train.loading import TrainerLoad
from interlace.train.loop import Loop
from interlace.train.loss_scale import LossScale
from interlace.train.materialize import release
from interlace.train.refreeze import Frozen
from interlace.train.run import NonFiniteError, Runner, Tensors
from interlace.train.shapes import Shapes

Tensor = torch.Tensor


class Trainer(TrainerLoad, TrainerDiagnosis):
    """A compiled model in training. Make one with interlace.compile; close it, or use it in a with statement, to free everything.

    Attributes: `config`; `rank`, `world_size`; `steps` made so far; `norm` of the last step's gradient (None when not computed);
    `outputs` of the last step by name, one tensor per micro-batch; `skipped`: whether the last update was left out.
    """

    def __init__(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, peers: Peers, planner: Planner, built: Built,
        spec: InputSpec, runner: Runner, tensors: Tensors, hyper: Hyper, captures: Captures, shapes: Shapes | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.rank, self.world_size = peers.rank, peers.size
        self.steps = 0
        self.norm: float | None = None
        self.outputs: dict[str, list[Tensor]] = {}
        self.skipped = False
        self.swaps = 0
        self.last_save: dict[str, Any] | None = None
        self._save, self._saves, self._save_begin, self._locks, self._hf_texts = None, 0, {}, Locks(), None
        self.compile_seconds = planner.programs.seconds
        self._model, self._optimizer, self._peers, self._spec = model, optimizer, peers, spec
        self._programs, self._runner, self._tensors, self._hyper = planner.programs, runner, tensors, hyper
        self._shapes = shapes
        self._loss_scale = LossScale(config.loss_scale)
        self._use(built)
        self._frozen = Frozen(captures, planner) if config.mode == "compiled" else None
        self._loop, self._traced = Loop(self, planner), False
        plain = dataclasses.replace(config, accumulation=1).pipeline(peers.size, uses_momentum(optimizer))
        self._evaluation = Evaluation(captures, plain)
        self._closed: str | None = None
        peers.on_close(self._drop)
        peers.places.start(self._where)

    # ---- training ----

    def step(self, batch: Any) -> Tensor:
        """One optimizer step; gives the mean loss of this rank's micro-batches (0-dim, on the device).

        `batch` is this rank's part: a structure of tensors that is cut along dimension 0 into Config.accumulation micro-batches, or
        a list of that many. Errors: a batch of another shape or dtype than compiled for, a value that is not finite (the parameters
        then stay as they were when clipping or skip_nonfinite computes the norm), a rank that failed or was lost.
        """
        self._check_open()
        with self._peers.guard():
            inputs = self._inputs(batch)
            if self._frozen is not None:
                self._frozen.follow(self, lambda: self._example(batch))
        self._loop.before_step(self._traced)
        if self._traced:
            self._executor.set_trace("on")  # of the program that this step runs
        if self._save is not None:
            self._save.before_step(self._runner)
        with self._peers.guard(), self._determinism():
            self._hyper.before_step()
            hyper = self._hyper.values()
            result = self._runner.step(inputs, hyper, self.steps)
            self._loop.after_step()
        self.norm, self.outputs = result["norm"], result["outputs"]
        losses = self.outputs["loss"]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        self.skipped = self.norm is not None and not math.isfinite(self.norm)
        self._loss_scale.after_step(not self.skipped)
        if self.skipped and (
            self._loss_scale.exhausted or not (self.config.skip_nonfinite or self._loss_scale.dynamic)
        ):
            raise NonFiniteError(self._nonfinite_norm(inputs, result))
        if not self.skipped:
            if not result["finite"] and self.norm is None and not self.config.skip_nonfinite:
                with self._peers.guard():
                    raise NonFiniteError(self._nonfinite_loss(inputs, loss, result))
            self._hyper.advance()
        self._hyper.after_step()
        if self._shapes is not None:
            self._shapes.note_step()
        self.steps += 1
        return loss

    def evaluate(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Any] | None = None) -> dict[str, Tensor]:
        """The loss of this rank's batch with the model in eval mode (no dropout, this rank's statistics); nothing changes, no step counts.

        Gives what `loss_fn` gives, by name, "loss" first; by default the loss function of training. The batch is one part, not cut into
        micro-batches, of any shape: each is compiled when first met. Parameters are gathered as in training: no rank holds the whole
        model. States that an offload keeps out of memory stay there. Every rank must call it with the same shape. Error, after which
        training can go on: the batch needs more than memory_limit.

            losses = [trainer.evaluate(b)["loss"].item() for b in validation]
        """
        self.flush()
        with self._peers.guard(), self._determinism():
            found = self._evaluation.run(self, batch, loss_fn)
        if isinstance(found, str):
            raise InterlaceError(found)
        return found

    def trace(
        self,
        batch: Any,
        file: str | Path | None = None,
        *,
        chakra: str | Path | None = None,
        snapshot: str | Path | None = None,
    ) -> Tensor:
        """A step like step(), recorded: rank 0 writes a Chrome trace with every rank's ops, transfers and memory to `file`, Chakra
        execution traces into the folder `chakra`, the memory history of torch.cuda._memory_viz to `snapshot` (docs/cost_model.md).

        They open beside the predicted ones of `interlace simulate`. Every rank must call it. Error: a file cannot be written; `steps`
        says whether the step was made (a disk that got full), and training can go on.
        """
        self._check_open()
        if self.config.mode == "eager":
            raise InterlaceError('a trace shows the compiled program; mode="eager" has none: use torch.profiler')
        files = TraceFiles(file, chakra, snapshot)
        with self._peers.guard():
            problem = self._peers.exchange("trace file", files.check() if self.rank == 0 else None)[0]
        if problem is not None:
            raise TraceError(problem)
        self._traced = True
        try:
            loss = self.step(batch)
            with self._peers.guard():
                problem = write_trace(self._executor, self._peers, self.program, files)
        finally:
            self._traced = False
            if self._executor is not None:  # gone when a rank has failed
                self._executor.set_trace("off")
        if problem is not None:
            raise TraceError(problem)
        return loss

    def _inputs(self, batch: Any) -> Any:
        if self.config.mode == "eager":
            return batches.micro_batches(self._spec, batch, self.config.accumulation)
        if self._shapes is not None:
            parts = self._shapes.switch(self, batch)
            return batches.flatten_parts(self._spec, parts, self._peers.device)
        return batches.flatten(self._spec, batch, self.config.accumulation, self._peers.device)

    def _example(self, batch: Any) -> Any:
        """A micro-batch of a step, as the program takes it."""
        parts = batches.micro_batches(self._spec if self._shapes is None else None, batch, self.config.accumulation)
        return parts[0] if self._shapes is None else self._shapes.filled(parts, self._shapes.current)[0]

    @contextlib.contextmanager
    def _determinism(self) -> Iterator[None]:
        if not self.config.deterministic or torch.are_deterministic_algorithms_enabled():
            yield
            return
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    # ---- another program ----

    def swap(self, text: str = "") -> None:
        """Goes on with another program between two steps: rank 0's text counts. Every rank must call it.

        The program must have the same units and states: the same captured graph and strategy, whatever passes ran besides. Parameters,
        optimizer states, buffers and step counts stay where they are, and are not copied. Errors, with nothing changed: the text is no
        program, it has other units or states, it needs more than memory_limit.
        """
        self._check_open()
        if self.config.mode == "eager":
            raise InterlaceError('a swap changes the compiled program; mode="eager" has none')
        with self._peers.guard():
            source = self._programs.share(
                f"program of a swap at step {self.steps}", lambda: Source(text, [], {}, self._source.captured)
            )
        self._swap(source)

    def _swap(self, source: Source) -> None:
        with self._peers.guard():
            self._programs.compare_digests(source)
        self._flush()
        found: list[Built] = []

        def check() -> Callable[[], None]:
            found.append(self._programs.build(source, donor=self._executor))
            return lambda: self._use(found[0])

        self._settle_save()
        self._agree(f"swap {self.swaps} at step {self.steps}", check, InterlaceError)()
        self._runner = self._executor
        self.swaps += 1

    def _use(self, built: Built) -> None:
        built.source.constants = {}  # they are in the executor's buffers by now
        self.program, self.passes = built.source.text, built.source.reports
        self._source, self._ir, self._executor, self._states = built.source, built.ir, built.executor, built.states
        self._loss_scale.attach(built.ir, built.executor)
        if any(s["moves"] for s in built.ir.states()):  # the model's parameters cannot be views of what leaves memory
            for t in collect(self._model):
                if t.kind == "param" and built.states.resident(t.name) is None:
                    release(t.real)
        if self._shapes is not None:
            self._shapes.current.built = built

    def shape_stage(self, new: int | None = None) -> int:
        """The entry of the schedule that the current shape's program was made for; or that it is made for now."""
        if self._shapes is None:
            return self._loop.stage
        if new is not None:
            self._shapes.current.stage = new
        return self._shapes.current.stage

    # ---- what there is ----

    def summary(self) -> dict[str, Any]:
        """What the program holds and costs (docs: `interlace inspect`), with `largest_unit` as name and bytes."""
        summary = self._ir.summary()
        names = summary["largest_unit_params"]
        summary["largest_unit"] = {
            "unit": summary["largest_unit"],
            "name": ", ".join(names),
            "bytes": summary["largest_unit_bytes"],
        }
        summary["passes"] = self.passes
        return summary

    def stats(self) -> dict[str, Any]:
        """What the executor has measured so far: ops, bytes sent, live and peak bytes, the op at the peak.

        After a swap the counts of steps and ops, and the peak, are those of the new program; bytes sent go on."""
        self._check_open()
        return {
            **self._executor.stats(),
            "arena": self._executor.arena_stats(),
            "trainer_steps": self.steps,
            "swaps": self.swaps,
            **(self._shapes.stats() if self._shapes else {}),
        }

    def compile_table(self) -> str:
        """Where the time of compiling went, on this rank: "capture 0.02 s (cached), passes 0.31 s (shard 0.01 s, search 0.29 s), ..."."""
        cached = self._programs.cached
        parts = {name: 0.0 for name in cached} | self.compile_seconds
        words = {name: f"{name} {seconds:.2f} s" for name, seconds in parts.items()}
        each = [f"{r['name'].partition('(')[0]} {r['seconds']:.2f} s" for r in self.passes if r["seconds"] >= 0.005]
        for name in words:
            if name in cached:
                words[name] += " (cached)"
            elif name == "passes" and each:
                words[name] += f" ({', '.join(each)})"
        return ", ".join(words[name] for name in sorted(words, key=lambda name: name == "total"))

    @property
    def plans(self) -> list[dict[str, Any]]:
        """What the schedule did so far, plan by plan: step, reason, passes, seconds, whether it came from the cache, predicted and
        measured time and peak."""
        return self._loop.plans

    @property
    def settled(self) -> bool:
        """Whether the steps to come run as they are, until the schedule's next entry: none is recorded for a plan, compared with its
        prediction or followed by another plan. A benchmark waits for it; recorded steps take longer."""
        return self._loop.settled()

    # ---- the end ----

    def close(self) -> None:
        """Frees the program, its states and its process groups. The model's own parameters are not written back: save first.

        A save under way is finished first. Error: it could not be written (all is freed then, too).
        """
        try:
            if self._closed is None:
                self.finish_save()
                self._flush()  # the model's parameters may be those of the program
        finally:
            self._end()

    def _where(self) -> dict[str, Any]:
        """For the other ranks, from another thread."""
        if self._runner is not None and hasattr(self._runner, "where"):
            return self._runner.where()  # type: ignore[no-any-return]
        return {"step": self.steps, "op": "the step in Python", "units": "", "module": ""}

    def _end(self) -> None:
        if self._closed is None:
            self._closed = "it was closed"
            self._peers.close()

    def _drop(self) -> None:
        self._closed = self._closed or "a rank failed"
        self._drop_save()
        if hasattr(self._executor, "leave"):
            self._executor.leave()
        self._evaluation.forget()
        if self._shapes is not None:
            self._shapes.forget()  # their executors hold the connections too
        self._executor = self._runner = self._states = None  # type: ignore[assignment]

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._end()


__all__ = ["NonFiniteError", "PeerError", "Tensors", "Trainer"]
