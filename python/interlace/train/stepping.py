"""One optimizer step, and a recorded one."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from interlace.compiling.captures import in_python
from interlace.errors import CaptureError, InterlaceError
from interlace.observe.step_trace import TraceError, TraceFiles, write_trace
from interlace.train.any_form import AnyForm
from interlace.train.diagnosis import Diagnosis, NonFiniteError
from interlace.train.follow import Follow
from interlace.train.loop import Loop
from interlace.train.own_steps import OwnSteps
from interlace.train.refreeze import Frozen
from interlace.train.rewriting import Rewriting
from interlace.train.run import Run
from interlace.train.unused import Unused
from interlace.train.verify import Verify

Tensor = torch.Tensor
log = logging.getLogger("interlace")


class Stepping:
    """The steps of one trainer. `frozen`, `follow` and `any_form`: None in the eager mode, which looks at the model itself."""

    def __init__(
        self, run: Run, loop: Loop, diagnosis: Diagnosis, frozen: Frozen | None, follow: Follow | None, any_form: AnyForm | None
    ) -> None:  # fmt: skip
        self._run, self._loop, self._diagnosis, self._frozen = run, loop, diagnosis, frozen
        self._follow, self._any_form = follow, any_form
        self._traced = self._compared = False
        self._unused = Unused(run)
        self._verify = Verify(run)
        self._rewriting = Rewriting(run)
        self._own = OwnSteps(run)

    def inputs(self, batch: Any, python: bool = False) -> Any:
        """A batch as the runner takes it. The program is that of its form, and of what Python has changed, from now on. `python`: one that
        runs in Python."""
        run, any_form = self._run, self._any_form
        run.check_open()
        with run.peers.guard():
            if any_form is not None and any_form.choose(batch, python):
                return self._beside(batch)
            if self._follow is not None:
                batch = self._follow.numbered(batch)
            try:
                inputs = run.inputs(batch)
            except CaptureError as e:  # of another form than the program's
                if self._follow is None or self._frozen is None:
                    raise
                try:
                    with self._frozen.as_running():  # what was frozen meanwhile is followed then
                        batch = self._follow.other_form(batch, e)
                except CaptureError as why:
                    form = self._follow.tried
                    if form is None or form.differ or not self._frozen.changed:
                        if any_form is None or not any_form.may:
                            raise
                        any_form.enter(in_python(why))
                        return self._beside(batch)
                    self._frozen.follow(batch, form.spec)  # it trains other parameters
                inputs = run.inputs(batch)
            if self._frozen is not None and self._follow is not None:
                self._frozen.follow(batch)
                self._follow.follow(batch)
                self._follow.take(batch, inputs)
                self._rewriting.before(run.ir, inputs)
        return inputs

    def _beside(self, batch: Any) -> Any:
        """Of a program that takes any batch."""
        assert self._frozen is not None and self._follow is not None
        self._frozen.follow(batch)
        self._follow.follow(batch)
        return self._run.inputs(batch)

    def step(self, batch: Any, python: bool = False) -> Tensor:
        run, inputs = self._run, self.inputs(batch, python)
        if not self._compared:
            run.check_same_batch("the first batch", inputs)
            self._compared = True
        self._loop.before_step(self._traced)
        rows = self._prepared()
        verified = self._verify.due(not (self._traced or self._loop.recording))
        if verified:
            self._verify.first(inputs, rows)
        if self._traced:
            run.executor.set_trace("on")  # of the program that this step runs
        if run.save is not None:
            run.save.before_step(run.runner)
        with run.peers.guard(), run.determinism():
            self._unused.before_step()
            try:
                result = run.runner.step(inputs, rows, run.steps)
            except RuntimeError as e:
                if run.config.accumulation == 1 or "out of bounds" not in str(e):
                    raise
                raise InterlaceError(
                    f"{e}\nA batch is cut along dimension 0 into {run.config.accumulation} micro-batches, with all entries of that length: "
                    "what numbers rows of the whole batch (a permutation) is to number those of a micro-batch; pass a list of micro-batches"
                ) from e
        if result.get("note"):
            log.warning("steps are given to the device op by op from here on: %s", result["note"])
        if verified:
            self._verify.second(result)
        with run.peers.guard():
            run.share_outputs(run.states, result, run.config.accumulation)
            self._loop.after_step(timed=not verified)
        run.norm, run.outputs = result["norm"], result["outputs"]
        losses = run.outputs["loss"]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        run.skipped = run.norm is not None and not math.isfinite(run.norm)
        with run.peers.guard():
            self._unused.after_step(rows)
            if self._own.members and not run.skipped and (result["finite"] or run.norm is not None):
                self._own.step(loss, lambda: run.runner.step(inputs, rows, run.steps), self._unused.now)
        if self._follow is not None and not run.takes_any:
            self._follow.after_step()
        run.loss_scale.after_step(not run.skipped)
        skips = run.config.skip_nonfinite
        if run.skipped and (run.loss_scale.exhausted or not (skips or run.loss_scale.dynamic)):
            raise NonFiniteError(self._diagnosis.nonfinite_norm(inputs))
        if not run.skipped:
            if not result["finite"] and run.norm is None and not skips and not all(math.isfinite(one.item()) for one in losses):
                with run.peers.guard():
                    raise NonFiniteError(self._diagnosis.nonfinite_loss(inputs, loss, result))
            run.hyper.advance(self._unused.idle)
        run.hyper.after_step()
        if run.shapes is not None and not run.takes_any:
            run.shapes.note_step()
        run.steps += 1
        return loss

    def _prepared(self) -> list[list[float]]:
        """The hyper-parameters of the step about to run."""
        with self._run.peers.guard():
            self._run.hyper.before_step()
            return self._run.hyper.values()

    def trace(self, batch: Any, files: TraceFiles) -> Tensor:
        run = self._run
        with run.peers.guard():
            problem = run.peers.exchange("trace file", files.check() if run.rank == 0 else None)[0]
        if problem is not None:
            raise TraceError(problem)
        self._traced = True
        try:
            loss = self.step(batch)
            with run.peers.guard():
                problem = write_trace(run.executor, run.peers, run.program, files)
        finally:
            self._traced = False
            if run.executor is not None:  # gone when a rank has failed
                run.executor.set_trace("off")
        if problem is not None:
            raise TraceError(problem)
        return loss
