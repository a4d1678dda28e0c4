"""Parameters that are frozen or unfrozen while training, or come to the optimizer in groups of their own (add_param_group): the model is
captured again, and training goes on with the values there are.

The program of other trainable parameters has other units, so that values are copied; for that moment both sets of states exist. Of what is
frozen the optimizer's states and count of steps are laid by, a part on each rank, and are there again when it is unfrozen.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from interlace.capture.inputs import InputSpec
from interlace.capture.model_tensors import collect
from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, ProgramError, Source, idle_of
from interlace.compiling.states import WEIGHT
from interlace.dist.peers import PeerError, ranks_text
from interlace.errors import InterlaceError
from interlace.train.evaluation import Evaluation
from interlace.train.hyper import OWN_COUNTS
from interlace.train.laid_by import LaidBy
from interlace.train.materialize import adopt
from interlace.train.run import Run, shared_capture

log = logging.getLogger("interlace")
Tensor = torch.Tensor


class Frozen:
    """Which parameters the running program trains, and what to do when the model says otherwise."""

    def __init__(self, run: Run, captures: Captures, planner: Planner, evaluation: Evaluation) -> None:
        self.run, self.captures, self.planner, self.evaluation = run, captures, planner, evaluation
        from interlace import _runtime

        self._parameters = list(captures.model.named_parameters())
        self._tensors = [p for _, p in self._parameters]
        self._flags, self._marks = [p.requires_grad for p in self._tensors], _runtime.marks(self._tensors)
        if run.shapes is not None:
            run.shapes.as_running = self.as_running
        self.rebuilt = 0  # how often units have changed
        self.forgotten: Callable[[], None] = lambda: None  # others' programs on the states of before
        self.recompiled = False  # since somebody asked: programs on the states of before are out of date

    @property
    def changed(self) -> bool:
        """Whether follow() would compile again."""
        return bool(self.run.hyper.added) or [p.requires_grad for p in self._tensors] != self._flags

    def follow(self, batch: Any, spec: InputSpec | None = None) -> None:
        """Between steps: compiles again when a parameter's requires_grad has changed; all ranks must have changed the same. `spec`: of the
        batch, where the program that runs is of another form."""
        from interlace import _runtime

        marks, added = _runtime.marks(self._tensors), self.run.hyper.added
        if marks == self._marks and not added:
            return
        flags = [p.requires_grad for p in self._tensors]
        if flags == self._flags and not added:
            self._marks = marks
            return
        changed = {
            name: "trainable" if now else "frozen"
            for (name, _), now, before in zip(self._parameters, flags, self._flags, strict=True)
            if now != before
        }
        run, peers = self.run, self.run.peers
        try:
            everyone = peers.exchange(f"frozen and unfrozen parameters at step {run.steps}", [changed, added], run.steps)
        except PeerError as e:
            why = f"rank {peers.rank} asked because {_listed(changed, added)}; every rank must freeze and unfreeze the same"
            raise PeerError(f"{e}; {why}", e.rank) from e
        other = [r for r, theirs in enumerate(everyone) if theirs != everyone[0]]
        if other:
            raise InterlaceError(
                f"{ranks_text(other)} changed requires_grad of other parameters than rank 0 before step {run.steps}, or added other groups; "
                "every rank must freeze and unfreeze the same"
            )
        if added:
            run.hyper.take_groups()
            run.forget_names()
        self._lay_by([name for name, word in changed.items() if word == "frozen"])
        self._restart_groups([name for name, word in changed.items() if word == "trainable"])
        log.warning("step %d: compiling again, because %s", run.steps, _listed(changed, added))
        run.spec = spec or run.spec
        self._recompile(run.example(batch))
        self._flags, self._marks = flags, _runtime.marks(self._tensors)

    @contextlib.contextmanager
    def as_running(self) -> Iterator[None]:
        """Before such a change is followed, for an evaluation or a batch of another form: parameters are trained, and groups are there, as
        in the program that runs."""
        groups, added = self.run.optimizer.param_groups, self.run.hyper.added
        changed = [p for p, before in zip(self._tensors, self._flags, strict=True) if p.requires_grad != before]
        later = groups[len(groups) - added :] if added > 0 and type(groups) is list else []
        del groups[len(groups) - len(later) :]
        for p in changed:
            p.requires_grad_(not p.requires_grad)
        try:
            yield
        finally:
            groups.extend(later)
            for p in changed:
                p.requires_grad_(not p.requires_grad)

    def _lay_by(self, names: list[str]) -> None:
        run = self.run
        never = {*idle_of(run.ir), *run.laid_by}
        for i in range(len(run.optimizer.param_groups)):
            for name in run.names_of_group(i):
                if name in names and name not in never and (made := run.own_steps(name, i)) > 0:
                    run.laid_by[name] = LaidBy(made, run.hyper.pilot_of(i))
                if name in names:
                    run.left_out.pop(name, None)

    def _restart_groups(self, names: list[str]) -> None:
        """New parameters begin at step 1 of the optimizer, and others go on where they were frozen, as in torch; here a group has one count
        of steps, and some kinds know what a parameter has made fewer."""
        run = self.run
        trained = {name for (name, _), before in zip(self._parameters, self._flags, strict=True) if before}
        for i in range(len(run.optimizer.param_groups)):
            own = set(run.names_of_group(i))
            fresh = sorted(own.intersection(names))
            if not fresh or run.hyper.steps[i] == 0:
                continue
            made = {name: run.laid_by[name].made if name in run.laid_by else 0 for name in fresh}
            counts, dampened = run.kind_of(i) in OWN_COUNTS, bool(run.optimizer.param_groups[i].get("dampening"))
            if not own & trained:  # the group goes on where it was
                for name in own:
                    run.left_out.pop(name, None)
                if not any(made.values()):
                    run.hyper.restart(i)
                    continue
                last = max((laid for name, laid in run.laid_by.items() if name in own), key=lambda laid: laid.made)
                run.hyper.resume(i, last.made, last.pilot)
            now = run.hyper.steps[i]
            same = all(n == now for n in made.values())
            as_others = run.kind_of(i) == "sgd" and not (dampened and 0 in made.values())
            if not (counts or same or as_others or (all(made.values()) and not run.hyper.counts_steps(i))):
                again = next((name for name in fresh if made[name]), None)
                raise InterlaceError(
                    f"parameter '{again or fresh[0]}' becomes trainable {'again ' if again else ''}after its optimizer group {i} has made "
                    f"{now} steps with others; put parameters that are {'frozen for a while' if again else 'unfrozen later'} "
                    "into a group of their own when making the optimizer"
                )
            run.left_out |= {name: now - n for name, n in made.items() if counts and n < now}

    def _recompile(self, micro_batch: Any) -> None:
        run = self.run

        def make() -> Source:
            text, constants = self.captures.training_text(micro_batch)
            try:
                return self.planner.source(text, run.planned_passes, constants, run.limit)
            except ProgramError:
                if not self.planner.settle_again(text):
                    raise
                return self.planner.source(text, run.planned_passes, constants, run.limit)

        self.rebuild(shared_capture(run, self.captures, f"program of other trainable parameters at step {run.steps}", make))

    def rebuild(self, source: Source) -> None:
        """Goes on with a program of other units, on copies of the values."""
        run, programs = self.run, self.planner.programs
        self.recompiled, self.rebuilt = True, self.rebuilt + 1
        programs.compare_digests(source)
        run.flush()
        built = programs.build(source, run.executor, run.ir, take_states=False)
        self._copy(built)
        self.forgotten()
        self.take(built)

    def take(self, built: Built) -> None:
        """From now on this program runs; others are on the states of before."""
        run = self.run
        if run.shapes is not None:
            run.shapes.forget()
        self.evaluation.forget()
        run.use(built)
        run.made_for_stage()

    def _copy(self, built: Built) -> None:
        """Weights, moments and buffers of the running program into the new one, whose views the model then gets."""
        run, old, new = self.run, self.run.states, built.states
        run.share_buffers()  # which another stage may change from now on
        trained = {name for name, p in self._parameters if p.requires_grad}
        for role in (WEIGHT, *run.roles()):
            for p, value in old.whole(role, everywhere=True):
                if p.name in run.laid_by and p.name not in trained and role != WEIGHT and value is not None:
                    run.laid_by[p.name].put_whole(run, role, value)
                if p.name not in new.parameters:  # another stage's
                    continue
                if value is not None and (role == WEIGHT or role in new.roles_of(p.name)):
                    new.fill_from(p.name, role, value)
        idle = idle_of(built.ir)  # which have no gradient yet, and states when they do
        for name in sorted(trained.intersection(run.laid_by).difference(idle)):
            laid = run.laid_by.pop(name)
            for role in laid.parts:
                value = laid.whole(run, role)
                if name in new.parameters and role in new.roles_of(name):
                    new.fill_from(name, role, value)
        running = {b["name"]: run.executor.tensor(b["value"]) for b in run.ir.buffers()}
        storages = {b["name"]: built.executor.tensor(b["value"]) for b in built.ir.buffers()}
        for name, storage in storages.items():
            if (value := running.get(name, built.source.constants.get(name))) is not None:  # else values.py has it
                storage.copy_(value)
        run.tensors.buffers = {n: storages.get(n, t) for n, t in run.tensors.buffers.items()}
        with torch.no_grad():
            adopt(collect(self.captures.model), new, storages)


def _listed(changed: dict[str, str], added: int) -> str:
    parts = [f"{added} parameter group{'s' if added > 1 else ''} more came to the optimizer"] if added else []
    for word in ("frozen", "trainable"):
        names = [f"'{name}'" for name, to in changed.items() if to == word]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} became {word}")
    return " and ".join(parts)
