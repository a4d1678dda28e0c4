"""Parameters that are frozen or unfrozen while training: the model is captured again, and training goes on with the values there are.

The program of other trainable parameters has other units, so that values are copied; for that moment both sets of states exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from interlace.capture.model_tensors import collect
from interlace.compiling.programs import Built, Source
from interlace.compiling.states import WEIGHT
from interlace.dist.peers import PeerError, ranks_text
from interlace.errors import InterlaceError
from interlace.train.materialize import point_at, release

if TYPE_CHECKING:
    from interlace.compiling.captures import Captures
    from interlace.compiling.planner import Planner
    from interlace.train.trainer import Trainer

log = logging.getLogger("interlace")


class Frozen:
    """Which parameters the running program trains, and what to do when the model says otherwise."""

    def __init__(self, captures: Captures, planner: Planner) -> None:
        self.captures, self.planner = captures, planner
        self._parameters = list(captures.model.named_parameters())
        self._flags = [p.requires_grad for _, p in self._parameters]

    def follow(self, trainer: Trainer, micro_batch: Callable[[], Any]) -> None:
        """Between steps: compiles again when a parameter's requires_grad has changed; all ranks must have changed the same."""
        flags = [p.requires_grad for _, p in self._parameters]
        if flags == self._flags:
            return
        changed = {
            name: "trainable" if now else "frozen"
            for (name, _), now, before in zip(self._parameters, flags, self._flags, strict=True)
            if now != before
        }
        peers = trainer._peers
        try:
            everyone = peers.exchange(f"frozen and unfrozen parameters at step {trainer.steps}", changed)
        except PeerError as e:
            why = f"rank {peers.rank} asked because {_listed(changed)}; every rank must freeze and unfreeze the same"
            raise PeerError(f"{e}; {why}", e.rank) from e
        other = [r for r, theirs in enumerate(everyone) if theirs != everyone[0]]
        if other:
            raise InterlaceError(
                f"{ranks_text(other)} changed requires_grad of other parameters than rank 0 before step {trainer.steps}; every rank must "
                "freeze and unfreeze the same"
            )
        self._restart_groups(trainer, [name for name, word in changed.items() if word == "trainable"])
        log.warning("step %d: compiling again, because %s", trainer.steps, _listed(changed))
        self._recompile(trainer, micro_batch())
        self._flags = flags

    def _restart_groups(self, trainer: Trainer, names: list[str]) -> None:
        """New parameters begin at step 1 of the optimizer, as in torch; here a group has one count of steps."""
        trained = {name for (name, _), before in zip(self._parameters, self._flags, strict=True) if before}
        for i in range(len(trainer._optimizer.param_groups)):
            own = set(trainer._names_of_group(i))
            fresh = sorted(own.intersection(names))
            if not fresh or trainer._hyper.steps[i] == 0:
                continue
            if own & trained:
                raise InterlaceError(
                    f"parameter '{fresh[0]}' becomes trainable after its optimizer group {i} has made {trainer._hyper.steps[i]} steps with "
                    "others; put parameters that are unfrozen later into a group of their own when making the optimizer"
                )
            trainer._hyper.steps[i] = 0

    def _recompile(self, trainer: Trainer, micro_batch: Any) -> None:
        programs, loop = self.planner.programs, trainer._loop

        def make() -> Source:
            text, constants = self.captures.text(micro_batch)
            return self.planner.source(text, loop.passes(), constants, loop.limit)

        source = programs.share(f"program of other trainable parameters at step {trainer.steps}", make)
        programs.compare_digests(source)
        trainer._flush()
        built = programs.build(source, trainer._executor, take_states=False)
        self._copy(trainer, built)
        if trainer._shapes is not None:
            trainer._shapes.forget()
        trainer._evaluation.forget()  # its programs are on the states of before
        trainer._use(built)
        trainer._runner = built.executor
        trainer.shape_stage(loop.stage)

    def _copy(self, trainer: Trainer, built: Built) -> None:
        """Weights, moments and buffers of the running program into the new one, whose views the model then gets."""
        old, new = trainer._states, built.states
        for role in (WEIGHT, *trainer._roles()):
            for p, value in old.whole(role, everywhere=True):
                unit = new.parameters[p.name].unit
                if value is not None and (role == WEIGHT or (unit is not None and role in new.roles(new.units[unit]))):
                    new.fill_from(p.name, role, value)
        running = {b["name"]: trainer._executor.tensor(b["value"]) for b in trainer._ir.buffers()}
        storages = {b["name"]: built.executor.tensor(b["value"]) for b in built.ir.buffers()}
        for name, storage in storages.items():
            storage.copy_(running[name] if name in running else built.source.constants[name])
        trainer._tensors.buffers = {n: storages.get(n, t) for n, t in trainer._tensors.buffers.items()}
        with torch.no_grad():
            for t in collect(self.captures.model):
                if t.kind == "param":
                    whole = new.resident(t.name)
                    if whole is not None:
                        point_at(t.real, whole)
                    else:
                        release(t.real)
                elif t.kind == "buffer" and t.name in storages:
                    point_at(t.real, storages[t.name])


def _listed(changed: dict[str, str]) -> str:
    parts = []
    for word in ("frozen", "trainable"):
        names = [f"'{name}'" for name, to in changed.items() if to == word]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} became {word}")
    return " and ".join(parts)
