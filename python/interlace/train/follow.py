"""What Python changes between two steps, followed: nothing that a trace has read stays as it was at the trace.

    a tensor attribute, a buffer              its new values go into the program's buffer
    a number                                  captured once more, with a buffer in its place; from then on it is only written
    a flag, a hook, anything else             captured again; programs of states that were there before are kept
    a parameter in another's place            refused, by name; so is a module that has any

So are the ways that the model takes with a batch (capture/ways.py): a batch that takes another one has its program, captured when it is
first met. What differs too often, or between ranks or micro-batches, is no way any more: what reads it cannot be captured then.

So is the form of a batch: other sizes, None where there was a tensor, another number or text beside the tensors. A number that changes
becomes an input of the program, where the model lets a tensor stand for it. What nobody reads may be any (capture/unread.py).

Requires_grad is followed beside it (refreeze.py), learning rates and the like by reading them at each step (hyper.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from interlace.capture.effects import begins
from interlace.capture.in_python import takes_any
from interlace.capture.inputs import InputSpec, Path, differing, no_input, numbers_in, path_name, wider, with_numbers
from interlace.capture.opaque import LOSS, TAIL, TOLD
from interlace.capture.reach import MISSING
from interlace.capture.unread import moved, unread
from interlace.capture.watch import Change, Watch, buffer_name, describe
from interlace.capture.ways import Way, buffer_of, buffers_in, other_way, ways_of
from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, ProgramError, Source, idle_of
from interlace.dist.peers import PeerError, first_difference, ranks_text
from interlace.errors import CaptureError, InterlaceError
from interlace.train import batch as batches
from interlace.train.agreement import content
from interlace.train.changes import Form, alike, may_be_input, pairs, said, whole_inputs, within, within_place
from interlace.train.evaluation import Evaluation
from interlace.train.refreeze import Frozen
from interlace.train.run import Run, gathered, shared_capture
from interlace.train.values import Values

log = logging.getLogger("interlace")
Tensor = torch.Tensor
KEPT = 8  # programs of other states of the model
MANY_FORMS = 4  # of a batch, when another way is said
SIZES = "give all ranks the same sizes, or say with Config(pad={...}) what fills each entry up that differs"
NUMBERS = 2  # times that a number or size of another value is worth a capture


class Follow:
    """Of one trainer. `captures.numbers`: the places whose numbers the programs read from buffers."""

    def __init__(self, run: Run, captures: Captures, planner: Planner, evaluation: Evaluation, frozen: Frozen) -> None:
        self.run, self.captures, self.planner, self.evaluation, self.frozen = run, captures, planner, evaluation, frozen
        self._fixed: set[str] = set()  # numbers that cannot be read from buffers: the model branches on them, say
        # By the state of what is watched, and the ways; with the schedule's stage.
        self._programs: dict[tuple[str, str], tuple[Built, int]] = {}
        self._turns: Counter[str] = Counter()  # programs captured for other ways, by the place that tells them apart
        self._known: tuple[Any, list[Way]] = (None, [])  # a program, and its ways
        self._opaque: tuple[str, set[str]] = "", set()  # a program, and what is opaque in it
        self._read: set[str] = set()  # families of texts and numbers beside the tensors that the program depends on
        self._told: set[str] = set()  # places that a loss function's Python changes in steps: no states of the model
        self._forms = 0  # that were captured
        self._texts: set[str] = set()  # beside the tensors, that programs were captured for
        self.tried: Form | None = None  # that other_form() has captured, or not
        self._evaluated = ""  # the state of the model in evaluations, where the next step will follow it
        self.watch = Watch(captures.model, captures.loss_fn)
        self.values = Values(run, captures.model, self.watch)
        self.values.begin()
        self._look()
        self.values.take()
        evaluation.settle = self._settle

    def _look(self, lend: bool = True) -> None:
        """`lend`: the program has what Python has put somewhere, and its own tensors may take their places."""
        self.watch = Watch(self.captures.model, self.captures.loss_fn, known=self.values.shown)
        if lend and self.watch.replace(self.values.views()):
            self.watch = Watch(self.captures.model, self.captures.loss_fn, known=self.values.shown)
        self.values.look(self.watch)

    def forget(self) -> None:
        """The programs that are kept hold the connections of the ranks, and the states."""
        self._programs.clear()

    def follow(self, batch: Any, form: Form | None = None) -> None:
        """Between steps; all ranks must have changed the same. `form`: that of the batch, where the program is of another one. Error: what
        cannot be followed."""
        if self.frozen.recompiled:
            self.frozen.recompiled = False
            self._programs.clear()
        self.values.take()
        changes = self.watch.moved()
        if not changes and form is None:
            return
        self._refuse(changes)
        rest = [c for c in changes if not self._write(c)]
        if self.captures.any_batch:
            return  # the model's own Python reads them; the program that comes back will find them
        self.values.written = {id(c.after) for c in rest if c.kind == "tensor"}
        if rest:
            self._agree(rest)
        if rest or form is not None:
            numbers = {c.where for c in rest if all(type(x) in (int, float) for x in (c.before, c.after)) and may_be_input(c.where)}
            before, spec = self._key(self.watch), self.run.spec
            self._look(lend=False)
            try:
                if form is not None:
                    self.run.spec = form.spec
                why = said(rest) if form is None else f"{said(rest)}, and {form.why}" if rest else form.why
                self._again(why, before, batch, numbers, form=form)
            except BaseException:
                self.run.spec = spec
                raise
        self._look()
        self.values.take()
        self.values.written = set()

    def before_evaluation(self) -> None:
        """Values that have changed since the last step go into buffers. Evaluating programs are made anew where something else has changed
        that the next step will follow."""
        self.values.take()
        changes = self.watch.moved()
        rest = [c for c in changes if not self._write(c)]
        if changes and not rest:
            self._look()
            self.values.take()
        rest = [c for c in rest if not c.where.startswith("'training' of")]
        if (state := self._key(Watch(self.captures.model, self.captures.loss_fn)) if rest else "") != self._evaluated:
            self._evaluated = state
            self.evaluation.forget()

    # ---- batches of other forms ----

    def numbered(self, batch: Any) -> Any:
        """A step's batch with tensors in the places of the numbers that are inputs."""
        inputs = self.run.spec.numbers()
        if not inputs:
            return batch
        count = self.run.config.accumulation
        parts = [with_numbers(part, inputs) for part in batches.micro_batches(self.run.spec, batch, count)]
        return parts if count > 1 else parts[0]

    def other_form(self, batch: Any, error: CaptureError) -> Any:
        """The step's batch as the program takes it that runs from now on; the one that ran does not take it. Every rank must call it.
        Error: that of the program, where sizes are declared, micro-batches differ from one another, or more than sizes and numbers does."""
        run, self.tried = self.run, None
        if run.shapes is not None:
            raise error
        parts = batches.micro_batches(None, batch, run.config.accumulation)
        try:
            spec, *others = (InputSpec.of(part) for part in parts)
        except CaptureError:
            raise error from None
        self._free(spec, parts[0], error)
        fits = True
        try:
            run.inputs(batch)
        except CaptureError as e:
            fits, error = False, e
        if not self._anywhere(not fits):
            return batch
        spec, *others = (dataclasses.replace(s, free=run.spec.free) for s in (spec, *others))
        unlike = any((other.tensors, other.fixed()) != (spec.tensors, spec.fixed()) for other in others)
        if self._anywhere(unlike or not alike(run.spec, spec)):
            raise error
        before, after = dict(run.spec.fixed()) | whole_inputs(run.spec), numbers_in(spec)
        changed = {p: wider(x, before[p]) for p, x in after.items() if type(before.get(p)) in (int, float) and repr(x) != repr(before[p])}
        differ = self._agree_on_form(spec, error)
        if any(type(x) is str and before[path] != x for path, x in spec.fixed() if type(before.get(path)) is str):
            self._texts.add(repr([x for _, x in spec.fixed() if type(x) is str]))
            if len(self._texts) > KEPT:
                raise error
        self._forms += 1
        why = str(error).partition(";")[0]
        if " the constant " in why:
            why += ", which is best left out of the batch where nothing reads it"
        elif self._forms == MANY_FORMS:
            why += "; with Config(pad={...}), which says what fills each such entry up, few programs are enough"
        self.tried = Form(spec, why, {**changed, **differ}, bool(differ))
        self.follow(batch, self.tried)
        return self.numbered(batch)

    def _free(self, spec: InputSpec, micro_batch: Any, error: CaptureError) -> None:
        """Texts and numbers beside the tensors that have changed on some rank and that nobody reads count no more."""
        run = self.run
        some = set().union(*self._exchange("what stands beside the tensors", sorted(moved(run.spec, spec) - self._read), error))
        if not some:
            return
        with gathered(run, self.captures):
            free = unread(micro_batch, some, self.captures.traced) if run.rank == 0 else set()
        free = set(run.peers.exchange(f"what is read of it before step {run.steps}", sorted(free))[0])
        self._read |= some - free
        run.spec = dataclasses.replace(run.spec, free=run.spec.free | free)

    def _anywhere(self, found: bool) -> bool:
        """Whether it is so on any rank, where all of them ask; else here."""
        return bool(self.run.peers.groups.largest([int(found)])[0]) if self.captures.may_run_whole else found

    def _exchange(self, what: str, mine: Any, error: CaptureError) -> list[Any]:
        peers = self.run.peers
        try:
            return peers.exchange(f"{what} before step {self.run.steps}", mine, self.run.steps)
        except PeerError as e:
            raise PeerError(f"{e}; rank {peers.rank} asked because {str(error).partition(';')[0]}; {SIZES}", e.rank) from e

    def _agree_on_form(self, spec: InputSpec, error: CaptureError) -> dict[Path, torch.dtype]:
        """Gives the numbers beside the tensors that differ between ranks."""
        run, numbers = self.run, numbers_in(spec)
        beside = {f"{path_name(path)}, beside the tensors,": repr(value) for path, value in spec.fixed() if path not in numbers}
        mine = {**batches.describe(spec, run.row_ranks), **beside}, {path_name(path): x for path, x in numbers.items()}
        everyone = self._exchange("form of the batch", mine, error)
        found = first_difference([form for form, _ in everyone]) or first_difference([dict.fromkeys(names, "") for _, names in everyone])
        if found is not None:
            other, name, theirs, ours = found
            raise CaptureError(
                f"batch entry {name} is {theirs} on {ranks_text(other)} and {ours} on rank 0 before step {run.steps}; {SIZES}"
            )
        return differing([names for _, names in everyone], numbers)

    def after_step(self) -> None:
        """What opaque modules have changed of themselves in the step is no change between two steps; a loss function's Python may change
        anything."""
        table, program = self.planner.programs.opaque, self.run.program
        if table is None or not table.calls:
            return
        if self._opaque[0] is not program:
            self._opaque = program, {call.path for call in table.calls_in(program)}
        paths = self._opaque[1]
        changes = self.watch.moved() if paths else []
        if changes and paths == {TOLD}:
            self._settle()
        elif changes and (paths & {"", LOSS, TAIL} or all(within(c.owner, paths) for c in changes)):
            self._look()

    def _settle(self) -> None:
        """What a loss function's Python does with what it reads is no change, but for states that begin: the next step goes on with them."""
        if not any(map(begins, changes := self.watch.moved())):
            self._told |= {c.where for c in changes}
            self.watch.settle()

    def take(self, batch: Any, inputs: list[list[Tensor]]) -> None:
        """The program for the ways that a step's batch takes runs; `inputs`: its micro-batches. Every rank must call it. Error: the model's,
        where it raises on that way."""
        run = self.run
        while ways := self._ways():
            other = other_way(ways, inputs, self._buffer)
            if run.peers.groups.largest([int(other is not None)]) == [0]:
                return
            mine = [None, "", []] if other is None else [other[0], ways[other[0]]["at"], other[1]]
            everyone = run.peers.exchange(f"ways of the batch before step {run.steps}", mine)
            places = sorted({at for _, at, _ in everyone if at})
            one = all(theirs == everyone[0] for theirs in everyone) and len({repr(v) for v in everyone[0][2]}) == 1
            if one and self._turns[places[0]] < (KEPT if type(everyone[0][2][0]) is bool else NUMBERS):
                at, value = everyone[0][0], everyone[0][2][0]
                of = "now" if buffers_in([ways[at]]) else "of the batch"
                why = f"{places[0]} reads {value} {of}, and read {ways[at]['is']} when compiled"
                self._again(why, self._key(self.watch), batch, set(), [*ways[:at], {**ways[at], "is": value}], places[0])
                continue
            if self.captures.undecided.issuperset(places):
                raise InterlaceError(f"{places[0]} reads other values of one batch from time to time; keep them tensors")
            self.captures.undecided.update(places)
            why = f"what {', '.join(places)} reads of a batch differs {'too often' if one else 'between ranks or micro-batches'}"
            self._again(why, self._key(self.watch), batch, set(), ways)

    def _buffer(self, name: str) -> Tensor:
        """The model's, or one that stands for a number."""
        if name not in self.captures.numbers:
            return buffer_of(self.captures.model, name)
        return self.run.executor.tensor(next(b["value"] for b in self.run.ir.buffers() if b["name"] == name))

    def _ways(self) -> list[Way]:
        if self._known[0] is not self.run.ir:
            self._known = self.run.ir, ways_of(self.run.ir)
        return self._known[1]

    def _refuse(self, changes: list[Change]) -> None:
        own = {id(p) for p in self.captures.model.parameters()} if changes else ()
        for c in changes:
            if c.kind == "module" and all(isinstance(x, nn.Module) and not [*x.parameters(), *x.buffers()] for x in (c.before, c.after)):
                continue  # an activation, say
            if (c.owner is not None and c.kind in ("parameter", "module")) or id(c.before) in own:
                other = "copy new ones with trainer.load_weights, or compile again"
                if MISSING in (c.before, c.after):  # torch.nn.utils.prune and parametrize do so
                    other = "to go on with others (prune, parametrize), take its state_dict(), close it, change the model and compile again"
                raise InterlaceError(
                    f"{c.where} is {describe(c.after)} now and was {describe(c.before)} when compiled; the trainer has the values of "
                    f"the parameters it was given: {other}"
                )

    def _write(self, c: Change) -> bool:
        """Whether the change is a value that goes into a buffer of the program, which is done then."""
        buffers = {b["name"]: b["value"] for b in self.run.ir.buffers()}
        if type(c.after) in (int, float) and c.where in buffers and c.where in self.captures.numbers:
            storage = self.run.executor.tensor(buffers[c.where])
            if type(c.after) is float and not storage.is_floating_point():
                return False
            storage.fill_(c.after)
            return True
        found = pairs(c.before, c.after)
        same = all(isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) for _, a, b in found)
        names = [buffer_name(c.where if key is None else f"{c.where}[{key}]", c.owner) for key, _, _ in found]
        if not found or not same or not buffers.keys() >= set(names):
            return False
        for name, (_, _, after) in zip(names, found, strict=True):
            if name not in self.watch.outside:  # else values.take does
                self.run.executor.tensor(buffers[name]).copy_(after.detach())
        if c.kind == "buffer" and c.owner is not None:
            c.put(c.before)  # which is the program's
        return True

    def _agree(self, changes: list[Change]) -> None:
        run, peers = self.run, self.run.peers
        mine: dict[str, str] = {}
        hooks: dict[str, int] = {}
        for c in changes:
            table = re.fullmatch(r"(.*_hooks\w*' .*)\[\d+\](.*)", c.where)
            where = c.where
            if table is not None:  # each process numbers its hooks on its own: their order counts
                number = hooks[table[1]] = hooks.get(table[1], -1) + 1
                where = f"{table[1]}[{number}]{table[2]}"
            mine[where] = f"{describe(c.after)} {content(c.after, self.watch.names_of)}"
        try:
            everyone = peers.exchange(f"changes before step {run.steps}", mine, run.steps)
        except PeerError as e:
            raise PeerError(f"{e}; rank {peers.rank} asked because {said(changes)}; every rank must change the same", e.rank) from e
        found = first_difference(everyone)
        if found is not None:
            other, wrong, _, _ = found
            raise InterlaceError(
                f"{ranks_text(other)} changed {wrong} otherwise than rank 0 before step {run.steps}; every rank must change the same"
            )

    def _again(
        self, why: str, state: str, batch: Any, numbers: set[str], ways: list[Way] | None = None, place: str | None = None,
        form: Form | None = None,
    ) -> None:  # fmt: skip
        """Captures again; the program of this state of the model then runs, or the one that runs where it is the same. `state`: that of the
        program that runs. `ways`: that another must begin with, which the reads at `place` tell from it. `form`: of the batch."""
        run, programs = self.run, self.planner.programs
        key, before = self._key(self.watch), (state, json.dumps(self._ways()))
        run.flush()
        same = not numbers - self._fixed and run.shapes is None and not run.config.stage_meshes
        for (other, taken), (found, stage) in self._programs.items():
            known = json.loads(taken)
            fits = ways is None or (place is not None and known[: len(ways)] == ways)
            stale = programs.regions.stale(found.source.waits) or any(way["at"] in self.captures.undecided for way in known)
            if same and fits and other == key and stage == run.stage and not stale:
                found = programs.again_beside(found, run.executor, run.ir)
                self._keep(before, self._running())
                self.frozen.take(found)
                return self._fill()
        if place is not None:
            self._turns[place] += 1
        log.warning("step %d: compiling again, because %s", run.steps, why)
        inputs = run.spec.numbers()
        micro_batch = with_numbers(run.example(batch), inputs)
        trained = self.trained()
        self.captures.trained |= trained

        def make() -> Source:
            text, constants = self._text(micro_batch, numbers - self._fixed, form)
            if text == run.source.captured:
                return Source("")
            return self.planner.source(text, run.planned_passes, constants, run.limit)

        source = shared_capture(run, self.captures, f"program of another state of the model at step {run.steps}", make)
        if source.text:
            running = self._running()
            try:
                built = programs.build_beside(source, run.executor, run.ir)
            except ProgramError:  # other parameters have gradients now
                self.rebuild(source, trained)
            else:
                self._keep(before, running)
                self.frozen.take(built)
        if form is not None:  # which of them have become inputs
            named = {i["name"] for i in run.ir.inputs()}
            inputs |= {path: dtype for path, dtype in form.numbers.items() if path_name(path) in named}
        if form is not None or inputs:
            run.spec = dataclasses.replace(InputSpec.of(with_numbers(micro_batch, inputs)), free=run.spec.free)
        known = {b["name"] for b in run.ir.buffers()}
        self._fixed |= numbers - known
        self.captures.numbers |= numbers & known
        self._fill()

    def _fill(self) -> None:
        """The program's buffers have what is there now, which others may have had no use for when it changed."""
        self.values.fill()
        values = self.watch.numbers()
        for b in self.run.ir.buffers():
            if b["name"] in values and b["name"] in self.captures.numbers:
                self.run.executor.tensor(b["value"]).fill_(values[b["name"]])

    def _text(self, micro_batch: Any, numbers: set[str], form: Form | None = None) -> tuple[str, dict[str, Tensor]]:
        """With buffers in place of these numbers too, and inputs in place of those of the batch, where the model lets tensors stand for
        them. Rank 0 only."""
        if form is not None and form.numbers:
            try:
                return self._text(with_numbers(micro_batch, form.numbers), numbers)
            except CaptureError as e:
                if form.differ and not self.captures.may_run_whole:
                    raise InterlaceError(no_input(next(iter(form.numbers)), e)) from e
        if numbers:
            known = set(self.captures.numbers)
            self.captures.numbers |= numbers
            with contextlib.suppress(CaptureError):
                return self.captures.text(micro_batch)
            self.captures.numbers = known
        if form is not None and form.differ:  # no number is that of all ranks
            self.captures.any_batch = "numbers beside the tensors differ between ranks"
        return self.captures.training_text(micro_batch)

    def rebuild(self, source: Source, trained: set[str]) -> None:
        """Frozen.rebuild, with a program in which other parameters than these have gradients: as in torch.optim they begin now, or where a
        checkpoint has them."""
        laid = dict(self.run.laid_by)
        self.frozen.rebuild(source)
        self._programs.clear()
        for name in self.trained() - trained:
            made = self.run.hyper.steps[self.run.states.parameters[name].group or 0]
            if (fewer := made - (laid[name].made if name in laid else 0)) > 0:
                self.run.left_out[name] = fewer

    def _keep(self, key: tuple[str, str], built: Built) -> None:
        """A program that runs no more, for states that come back."""
        if takes_any(built.source.text):
            return
        if len(self._programs) >= KEPT:
            self._programs.pop(next(iter(self._programs)))
        self._programs[key] = built, self.run.stage

    def capture(self, why: str, batch: Any) -> None:
        """The program of the model as it is, for a batch of the form that run.spec has."""
        self._look(lend=False)
        self._again(why, self._key(self.watch), batch, set())
        self._look()
        self.values.take()

    def trained(self) -> set[str]:
        """The parameters that the running program gives gradients to."""
        idle = idle_of(self.run.ir)
        return {name for name, p in self.run.states.parameters.items() if p.group is not None and p.unit is not None}.difference(idle)

    def _running(self) -> Built:
        run = self.run
        return Built(run.source, run.ir, run.executor, run.states)

    def _key(self, watch: Watch) -> str:
        """Of all that is watched but what programs read from buffers."""
        numbers, kinds = self.captures.numbers, {where: type(x).__name__ for where, x in watch.numbers().items()}
        kept = [(where, value) for where, value in watch.state() if not within_place(where, self._told)]
        state = "\n".join(f"{where}={kinds.get(where) if where in numbers else value}" for where, value in kept)
        state += repr((self.run.spec.tensors, self.run.spec.fixed()))
        return hashlib.sha256(state.encode()).hexdigest()
