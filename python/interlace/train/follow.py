"""What Python changes between two steps, followed: nothing that a trace has read stays as it was at the trace.

    a tensor attribute, a buffer              its new values go into the program's buffer
    a number                                  captured once more, with a buffer in its place; from then on it is only written
    a flag, a hook, anything else             captured again; programs of states that were there before are kept
    a parameter or module in another's place  refused, by name

Requires_grad is followed beside it (refreeze.py), learning rates and the like by reading them at each step (hyper.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from typing import Any

import torch

from interlace.capture.model_tensors import collect
from interlace.capture.watch import MISSING, Change, Watch, describe
from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, ProgramError, Source
from interlace.dist.peers import PeerError, ranks_text
from interlace.errors import CaptureError, InterlaceError
from interlace.train.evaluation import Evaluation
from interlace.train.refreeze import Frozen
from interlace.train.run import Run, gathered

log = logging.getLogger("interlace")
Tensor = torch.Tensor
KEPT = 8  # programs of other states of the model


class Follow:
    """Of one trainer. `captures.numbers`: the places whose numbers the programs read from buffers."""

    def __init__(self, run: Run, captures: Captures, planner: Planner, evaluation: Evaluation, frozen: Frozen) -> None:
        self.run, self.captures, self.planner, self.evaluation, self.frozen = run, captures, planner, evaluation, frozen
        self._fixed: set[str] = set()  # numbers that cannot be read from buffers: the model branches on them, say
        self._programs: dict[str, tuple[Built, int]] = {}  # by the state of what is watched; with the schedule's stage
        self._look()

    def _look(self) -> None:
        self.watch = Watch(self.captures.model, self.captures.loss_fn)

    def forget(self) -> None:
        """The programs that are kept hold the connections of the ranks, and the states."""
        self._programs.clear()

    def follow(self, batch: Any) -> None:
        """Between steps; all ranks must have changed the same. Error: what cannot be followed."""
        if self.frozen.recompiled:
            self.frozen.recompiled = False
            self._programs.clear()
        changes = self.watch.moved()
        if not changes:
            return
        self._refuse(changes)
        rest = [c for c in changes if not self._write(c)]
        if rest:
            self._agree(rest)
            self._again(rest, batch)
        self._look()

    @staticmethod
    def _refuse(changes: list[Change]) -> None:
        for c in changes:
            if c.kind in ("parameter", "module") or isinstance(c.before, torch.nn.Parameter):
                raise InterlaceError(
                    f"{c.where} is {describe(c.after)} now and was {describe(c.before)} when compiled; the trainer has the values of "
                    "the parameters it was given: copy new ones with trainer.load_weights, or compile again"
                )

    def _write(self, c: Change) -> bool:
        """Whether the change is a value that goes into a buffer of the program, which is done then."""
        buffers = {b["name"]: b["value"] for b in self.run.ir.buffers()}
        if isinstance(c.after, (int, float)) and c.where in buffers and c.where in self.captures.numbers:
            self.run.executor.tensor(buffers[c.where]).fill_(float(c.after))
            return True
        if not isinstance(c.before, Tensor) or not isinstance(c.after, Tensor) or c.owner is None:
            return False
        alike = (c.before.dtype, c.before.shape) == (c.after.dtype, c.after.shape)
        name = c.where.partition("'")[2].partition("'")[0]
        name = f"{c.owner}.{name}" if c.owner else name
        if not alike or name not in buffers or "]" in c.where:
            return False
        self.run.executor.tensor(buffers[name]).copy_(c.after.detach())
        if c.kind == "buffer":
            c.put(c.before)  # which is the program's
        return True

    def _agree(self, changes: list[Change]) -> None:
        run, peers = self.run, self.run.peers
        mine: dict[str, str] = {}
        hooks: dict[str, int] = {}
        for c in changes:
            table = re.fullmatch(r"(.*_hooks' .*)\[\d+\](.*)", c.where)
            where = c.where
            if table is not None:  # each process numbers its hooks on its own: their order counts
                number = hooks[table[1]] = hooks.get(table[1], -1) + 1
                where = f"{table[1]}[{number}]{table[2]}"
            mine[where] = describe(c.after)
        try:
            everyone = peers.exchange(f"changes before step {run.steps}", mine)
        except PeerError as e:
            raise PeerError(f"{e}; rank {peers.rank} asked because {_said(changes)}; every rank must change the same", e.rank) from e
        other = [r for r, theirs in enumerate(everyone) if theirs != everyone[0]]
        if other:
            wrong = next(n for n in (*everyone[0], *everyone[other[0]]) if everyone[0].get(n) != everyone[other[0]].get(n))
            raise InterlaceError(
                f"{ranks_text(other)} changed {wrong} otherwise than rank 0 before step {run.steps}; every rank must change the same"
            )

    def _again(self, changes: list[Change], batch: Any) -> None:
        """Captures again; the program of this state of the model then runs, or the one that runs where it is the same."""
        run, programs = self.run, self.planner.programs
        numbers = {c.where for c in changes if type(c.before) is float and type(c.after) is float and _may_be_input(c.where)}
        before = self._key(self.watch)
        self._look()
        key = self._key(self.watch)
        run.flush()
        found, stage = self._programs.get(key, (None, -1))
        if not numbers - self._fixed and found is not None and stage == run.stage and run.shapes is None:
            self._programs[before] = (self._running(), run.stage)
            self._use(found)
            return
        log.warning("step %d: compiling again, because %s", run.steps, _said(changes))
        micro_batch = run.example(batch)

        def make() -> Source:
            text, constants = self._text(micro_batch, numbers - self._fixed)
            if text == run.source.captured:
                return Source("")
            return self.planner.source(text, run.planned_passes, constants, run.limit)

        with gathered(run, self.captures):
            source = programs.share(f"program of another state of the model at step {run.steps}", make)
        if source.text:
            running = self._running()
            try:
                built = programs.build_beside(source, run.executor, run.ir)
            except ProgramError:  # other parameters have gradients now
                self._programs.clear()
                self.frozen.rebuild(source)
            else:
                if len(self._programs) >= KEPT:
                    self._programs.pop(next(iter(self._programs)))
                self._programs[before] = (running, run.stage)
                self._use(built)
        buffers = {b["name"]: b["value"] for b in run.ir.buffers()}
        for t in collect(self.captures.model):
            if t.kind == "plain" and t.name in buffers and not t.real.is_meta:
                run.executor.tensor(buffers[t.name]).copy_(t.real.detach())
        values = self.watch.numbers()
        self._fixed |= numbers - buffers.keys()
        self.captures.numbers |= numbers & buffers.keys()
        for where in self.captures.numbers & buffers.keys() & values.keys():
            run.executor.tensor(buffers[where]).fill_(values[where])

    def _text(self, micro_batch: Any, numbers: set[str]) -> tuple[str, dict[str, Tensor]]:
        """With buffers in place of these numbers too, where the model lets tensors stand for them. Rank 0 only."""
        if numbers:
            known = set(self.captures.numbers)
            self.captures.numbers |= numbers
            with contextlib.suppress(CaptureError):
                return self.captures.text(micro_batch)
            self.captures.numbers = known
        return self.captures.text(micro_batch)

    def _use(self, built: Built) -> None:
        run = self.run
        if run.shapes is not None:
            run.shapes.forget()
        self.evaluation.forget()
        run.use(built)
        run.runner = built.executor
        run.made_for_stage()

    def _running(self) -> Built:
        run = self.run
        return Built(run.source, run.ir, run.executor, run.states)

    def _key(self, watch: Watch) -> str:
        """Of all that is watched but what programs read from buffers."""
        state = "\n".join(f"{where}={value}" for where, value in watch.state() if where not in self.captures.numbers)
        return hashlib.sha256(state.encode()).hexdigest()


def _may_be_input(where: str) -> bool:
    """Not a probability of dropout, which is no operand of an op; those have their own way through the cache."""
    return "drop" not in where.lower() and not where.startswith("'p' of")


def _said(changes: list[Change]) -> str:
    parts = []
    for c in changes[:3]:
        now = "is gone" if c.after is MISSING else "was written" if c.kind == "tensor" else f"is {describe(c.after)} now"
        before = "" if c.kind == "tensor" or c.before is MISSING else f" and was {describe(c.before)}"
        parts.append(f"{c.where} {now}{before}")
    more = f" (and {len(changes) - 3} more changes)" if len(changes) > 3 else ""
    return ", ".join(parts) + more
