"""Parameters that are frozen or unfrozen while training: the model is captured again, and training goes on with the values there are.

The program of other trainable parameters has other units, so that values are copied; for that moment both sets of states exist.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from interlace.capture.model_tensors import collect
from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, Source
from interlace.compiling.states import WEIGHT
from interlace.dist.peers import PeerError, ranks_text
from interlace.errors import InterlaceError
from interlace.train.evaluation import Evaluation
from interlace.train.hyper import OWN_COUNTS
from interlace.train.materialize import adopt
from interlace.train.run import Run, gathered

log = logging.getLogger("interlace")


class Frozen:
    """Which parameters the running program trains, and what to do when the model says otherwise."""

    def __init__(self, run: Run, captures: Captures, planner: Planner, evaluation: Evaluation) -> None:
        self.run, self.captures, self.planner, self.evaluation = run, captures, planner, evaluation
        from interlace import _runtime

        self._parameters = list(captures.model.named_parameters())
        self._tensors = [p for _, p in self._parameters]
        self._flags, self._marks = [p.requires_grad for p in self._tensors], _runtime.marks(self._tensors)
        self._ever = {name for name, p in self._parameters if p.requires_grad}  # trained by some program
        self.recompiled = False  # since somebody asked: programs on the states of before are out of date

    def follow(self, batch: Any) -> None:
        """Between steps: compiles again when a parameter's requires_grad has changed; all ranks must have changed the same."""
        from interlace import _runtime

        marks = _runtime.marks(self._tensors)
        if marks == self._marks:
            return
        flags = [p.requires_grad for p in self._tensors]
        if flags == self._flags:
            self._marks = marks
            return
        changed = {
            name: "trainable" if now else "frozen"
            for (name, _), now, before in zip(self._parameters, flags, self._flags, strict=True)
            if now != before
        }
        run, peers = self.run, self.run.peers
        try:
            everyone = peers.exchange(f"frozen and unfrozen parameters at step {run.steps}", changed, run.steps)
        except PeerError as e:
            why = f"rank {peers.rank} asked because {_listed(changed)}; every rank must freeze and unfreeze the same"
            raise PeerError(f"{e}; {why}", e.rank) from e
        other = [r for r, theirs in enumerate(everyone) if theirs != everyone[0]]
        if other:
            raise InterlaceError(
                f"{ranks_text(other)} changed requires_grad of other parameters than rank 0 before step {run.steps}; every rank must "
                "freeze and unfreeze the same"
            )
        self._restart_groups([name for name, word in changed.items() if word == "trainable"])
        log.warning("step %d: compiling again, because %s", run.steps, _listed(changed))
        self._recompile(run.example(batch))
        self._flags = flags

    def _restart_groups(self, names: list[str]) -> None:
        """New parameters begin at step 1 of the optimizer, as in torch; here a group has one count of steps, and some kinds know what a
        parameter has made fewer."""
        run = self.run
        run.hyper.check_groups()
        trained = {name for (name, _), before in zip(self._parameters, self._flags, strict=True) if before}
        for i in range(len(run.optimizer.param_groups)):
            own = set(run.names_of_group(i))
            fresh = sorted(own.intersection(names))
            if not fresh or run.hyper.steps[i] == 0:
                continue
            counts, group = run.kind_of(i) in OWN_COUNTS, run.optimizer.param_groups[i]
            first_is_as_others = run.kind_of(i) == "sgd" and not group["dampening"]
            if own & trained and (counts or first_is_as_others) and self._ever.isdisjoint(fresh):
                run.left_out |= dict.fromkeys(fresh, run.hyper.steps[i]) if counts else {}
                continue
            if own & trained:
                again = next((name for name in fresh if name in self._ever), None)
                raise InterlaceError(
                    f"parameter '{again or fresh[0]}' becomes trainable {'again ' if again else ''}after its optimizer group {i} has made "
                    f"{run.hyper.steps[i]} steps with others; put parameters that are {'frozen for a while' if again else 'unfrozen later'} "
                    "into a group of their own when making the optimizer"
                )
            run.hyper.restart(i)
            for name in own:
                run.left_out.pop(name, None)
        self._ever.update(names)

    def _recompile(self, micro_batch: Any) -> None:
        run, programs = self.run, self.planner.programs

        def make() -> Source:
            text, constants = self.captures.text(micro_batch)
            return self.planner.source(text, run.planned_passes, constants, run.limit)

        with gathered(run, self.captures):
            source = programs.share(f"program of other trainable parameters at step {run.steps}", make)
        self.rebuild(source)

    def rebuild(self, source: Source) -> None:
        """Goes on with a program of other units, on copies of the values."""
        run, programs = self.run, self.planner.programs
        self.recompiled = True
        programs.compare_digests(source)
        run.flush()
        built = programs.build(source, run.executor, take_states=False)
        self._copy(built)
        if run.shapes is not None:
            run.shapes.forget()
        self.evaluation.forget()  # its programs are on the states of before
        run.use(built)
        run.runner = built.executor
        run.made_for_stage()

    def _copy(self, built: Built) -> None:
        """Weights, moments and buffers of the running program into the new one, whose views the model then gets."""
        run, old, new = self.run, self.run.states, built.states
        for role in (WEIGHT, *run.roles()):
            for p, value in old.whole(role, everywhere=True):
                if p.name not in new.parameters:  # another stage's
                    continue
                if value is not None and (role == WEIGHT or role in new.roles_of(p.name)):
                    new.fill_from(p.name, role, value)
        running = {b["name"]: run.executor.tensor(b["value"]) for b in run.ir.buffers()}
        storages = {b["name"]: built.executor.tensor(b["value"]) for b in built.ir.buffers()}
        for name, storage in storages.items():
            if (value := running.get(name, built.source.constants.get(name))) is not None:  # else values.py has it
                storage.copy_(value)
        run.tensors.buffers = {n: storages.get(n, t) for n, t in run.tensors.buffers.items()}
        with torch.no_grad():
            adopt(collect(self.captures.model), new, storages)


def _listed(changed: dict[str, str]) -> str:
    parts = []
    for word in ("frozen", "trainable"):
        names = [f"'{name}'" for name, to in changed.items() if to == word]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} became {word}")
    return " and ".join(parts)
