"""With Config(fullgraph=False): steps whose batch no program takes run in Python, whatever the batch is (capture/any_batch.py).

    a form that is the program's                  the program
    another one, the same on all ranks            captured when it comes, as always, for up to FORMS of them
    more forms than that; other entries, dtypes, layouts or objects; no tensors; ranks or micro-batches that differ;
    what cannot be captured                       one opaque module, for this step

Ranks agree on it by one small all-reduce a step. A form that was captured has its program again when it comes again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from typing import Any

from interlace.capture.in_python import takes_any
from interlace.capture.inputs import InputSpec, with_numbers
from interlace.compiling.captures import Captures, in_python
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, ProgramError, Source
from interlace.dist.peers import PeerError, ranks_text
from interlace.errors import InterlaceError
from interlace.train import batch as batches
from interlace.train.changes import alike
from interlace.train.follow import Follow
from interlace.train.refreeze import Frozen
from interlace.train.run import Run

log = logging.getLogger("interlace")
FORMS = 8  # that are captured
FITS, OTHER, UNFIT = range(3)
ALL_ASK = "every rank must say so in the same step"


@dataclasses.dataclass
class Kept:
    """A program that takes turns with another; `rebuilt`: how often units had changed by then."""

    built: Built
    stage: int
    rebuilt: int


class AnyForm:
    """Of one trainer."""

    def __init__(self, run: Run, captures: Captures, planner: Planner, frozen: Frozen, follow: Follow) -> None:
        self._run, self._captures, self._planner, self._frozen, self._follow = run, captures, planner, frozen, follow
        self._left: Kept | None = None  # the program of the form before, while any batch is taken
        self._any: Kept | None = None
        self._forms: set[str] = set()  # that were captured
        self._entered = False
        self._failed = False  # something could not be captured: nothing else is tried
        self._said: set[str] = set()
        frozen.forgotten = self.forget

    @property
    def may(self) -> bool:
        """Whether nobody has to ask for it."""
        return self._captures.may_run_whole

    def choose(self, batch: Any, asked: bool) -> bool:
        """Whether the step on this batch runs in Python; then the program that runs takes it. `asked`: by the caller, on every rank. Every
        rank must call it."""
        run, captures = self._run, self._captures
        if run.takes_any and not self._entered:  # its capture failed
            self._entered, captures.any_batch = True, captures.any_batch or "what was captured before cannot be captured now"
            self._failed, self._left = True, None
        if not asked and not captures.may_run_whole:
            return self._back(batch, FITS)
        worst, why = self._agreed(batch, asked) if captures.may_run_whole else self._all_ask()
        if worst == UNFIT or (run.takes_any and worst == FITS and not self._may_go_back()):
            self.enter(why)
            return True
        return self._back(batch, worst)

    def _all_ask(self) -> tuple[int, str]:
        """Error: a rank makes this step as it is. Nobody but ranks that ask for Python calls it."""
        run, peers = self._run, self._run.peers
        try:
            peers.exchange(f"step {run.steps} with python=True", None, run.steps)
        except PeerError as e:
            raise PeerError(f"{e}; rank {peers.rank} called trainer.step(batch, python=True), and {ALL_ASK}", e.rank) from e
        return UNFIT, ""

    def _agreed(self, batch: Any, asked: bool) -> tuple[int, str]:
        """What becomes of this step's batches on all ranks, and why. Error: some ranks alone ask for Python."""
        run, peers = self._run, self._run.peers
        mine, spec, why = (UNFIT, None, "") if asked else self._verdict(batch)
        worst, some, others = peers.groups.largest([mine, int(asked), int(not asked)])
        if some and others:
            asking = [r for r, asks in enumerate(peers.exchange(f"who has python=True at step {run.steps}", asked)) if asks]
            said = f"{ranks_text(asking)} alone called trainer.step(batch, python=True) at step {run.steps}; {ALL_ASK}"
            raise PeerError(said, asking[0], agreed=True)
        if asked:
            return UNFIT, ""
        if worst == FITS:
            return FITS, ""
        tensors = repr([(t.name, t.dtype, t.shape) for t in spec.tensors]) if spec is not None else ""
        everyone = peers.exchange(f"any form of batch before step {run.steps}", [mine, tensors, why])
        why = next(theirs for _, _, theirs in everyone if theirs)
        if worst == UNFIT or spec is None:
            return UNFIT, why
        if any(theirs != everyone[0][1] for _, theirs, _ in everyone):
            return UNFIT, f"{why}, which is not so on all ranks"
        key = hashlib.sha256(f"{tensors}{spec.fixed()!r}".encode()).hexdigest()
        keys = peers.exchange(f"key of the form before step {run.steps}", key)
        if self._failed or (len(self._forms) >= FORMS and not self._forms.issuperset(keys)):
            return UNFIT, why if self._failed else f"{why}, and {FORMS} other forms are compiled"
        self._forms.update(keys[:1])
        return OTHER, why

    def _verdict(self, batch: Any) -> tuple[int, InputSpec | None, str]:
        run = self._run
        spec = run.spec
        try:
            parts = batches.micro_batches(spec if run.shapes is None else None, batch, run.config.accumulation)
            specs = [dataclasses.replace(InputSpec.of(part), free=spec.free) for part in parts]
        except InterlaceError as e:
            return UNFIT, None, in_python(e)
        if run.shapes is not None:
            why = run.shapes.unfit(specs, spec)
            return (UNFIT if why else FITS), None, why
        try:
            for part in parts:
                spec.flatten(with_numbers(part, spec.numbers()))
            return FITS, specs[0], ""
        except InterlaceError as e:
            why = in_python(e)
        if any((other.tensors, other.fixed()) != (specs[0].tensors, specs[0].fixed()) for other in specs):
            return UNFIT, None, f"{why}, and micro-batches of one step differ"
        return (OTHER if alike(spec, specs[0]) else UNFIT), specs[0], why

    # ---- programs that take turns ----

    def enter(self, why: str) -> None:
        """From now on the program takes any batch. Every rank must call it."""
        run, captures = self._run, self._captures
        if run.takes_any:
            return
        kind = re.sub(r"[\W\d]+", "", why)
        if why and kind not in self._said and len(self._said) < FORMS:
            self._said.add(kind)
            log.warning(
                "step %d: all of the model and its loss runs in Python for this batch, and for others that no program takes, as "
                "Config(fullgraph=False) has it: %s", run.steps, why,
            )  # fmt: skip
        run.flush()
        self._entered, captures.any_batch = True, why or "it was asked for"
        self._left = self._kept()
        if self._fresh(self._any):
            assert self._any is not None
            self._use(run.programs.again_beside(self._any.built, run.executor, run.ir))
            return
        captures.trained |= {p.name for p in run.states.everything if p.group is not None}  # so that programs have the same units

        def make() -> Source:
            text, constants = captures.training_text(None)
            return self._planner.source(text, run.planned_passes, constants, run.limit)

        with self._frozen.as_running():  # what was frozen since the last step is followed later
            source = run.programs.share(f"program of any batch at step {run.steps}", make)
            try:
                self._use(run.programs.build_beside(source, run.executor, run.ir))
            except ProgramError:  # parameters without a gradient have units now
                self._follow.rebuild(source, self._follow.trained())
        self._any = self._kept()

    def _back(self, batch: Any, worst: int) -> bool:
        """The program of captured forms runs again; False."""
        run, captures, follow = self._run, self._captures, self._follow
        if not run.takes_any:
            return False
        self._any, self._entered, captures.any_batch = self._kept(), False, ""
        run.flush()
        if self._fresh(self._left):
            assert self._left is not None
            self._use(run.programs.again_beside(self._left.built, run.executor, run.ir))
            follow.values.fill()
        elif run.shapes is None and worst == FITS and self._verdict(batch)[0] == FITS:
            run.takes_any = False  # for the batch, which is of the form that comes
            if self._frozen.changed:
                self._frozen.follow(batch)
            else:
                follow.capture("batches of the form before come again", batch)
        else:
            run.takes_any = False
        self._left = None
        return run.takes_any

    def _may_go_back(self) -> bool:
        return self._fresh(self._left) or not self._failed

    def _kept(self) -> Kept:
        run = self._run
        return Kept(Built(run.source, run.ir, run.executor, run.states), run.stage, self._frozen.rebuilt)

    def _fresh(self, kept: Kept | None) -> bool:
        run = self._run
        stale = kept is None or run.programs.regions.stale(kept.built.source.waits)
        return not stale and kept is not None and (kept.stage, kept.rebuilt) == (run.stage, self._frozen.rebuilt)

    def _use(self, built: Built) -> None:
        run = self._run
        run.use(built)
        if not takes_any(built.source.text):
            run.made_for_stage()

    def forget(self) -> None:
        """The programs that are kept hold the connections of the ranks, and the states."""
        self._left = self._any = None
