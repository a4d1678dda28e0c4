"""A Trainer's checkpoints and weights on their way in: all is checked on every rank before anything changes."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interlace.capture.whole import WHOLE
from interlace.checkpoint.contents import MODEL, OPTIMIZER, Checkpoint, check_hyper, check_shapes, group_difference, program_of
from interlace.checkpoint.optimizer import STATE_NAMES
from interlace.checkpoint.scheduler import SCHEDULER, scheduler_state
from interlace.checkpoint.tensor_file import CheckedTensors, CheckpointError, DamageError
from interlace.checkpoint.weights import HeldWeights, Weights, find_name
from interlace.compiling.states import WEIGHT
from interlace.errors import UNREADABLE
from interlace.private import made_here
from interlace.train import generators
from interlace.train.laid_by import LaidBy
from interlace.train.loop import Loop
from interlace.train.own_steps import load_own_states
from interlace.train.run import Run
from interlace.train.saving import Saving

log = logging.getLogger("interlace")

Tensor = torch.Tensor


class Loading:
    """What one trainer reads."""

    def __init__(self, run: Run, saving: Saving, loop: Loop) -> None:
        self._run, self._saving, self._loop = run, saving, loop

    def load(self, folder: str | Path, scheduler: Any) -> None:
        self._run.check_open()
        if self._run.hyper.added:
            raise CheckpointError(
                "parameter groups came to the optimizer since it was compiled (add_param_group): add them before interlace.compile, or "
                "load behind the next step"
            )
        self._run.flush()
        self._run.settle_save()
        with contextlib.ExitStack() as files:
            found: list[Checkpoint] = []

            def check() -> Callable[[], None]:
                checkpoint = files.enter_context(Checkpoint(folder))
                found.append(checkpoint)
                action = self._checked_load(checkpoint, scheduler)
                checkpoint.verify(self._run.rank, self._run.world_size)
                return action

            action = self._run.agree(f"load {self._saving.next()} at step {self._run.steps}", check)
            with self._run.peers.guard():
                action()
            self._go_on_with_schedule(found[0])

    def _go_on_with_schedule(self, checkpoint: Checkpoint) -> None:
        """The schedule where it stood, when the run is the same: same captured program and passes for the same ranks."""
        record = checkpoint.record
        if self._run.config.mode == "eager" or not self._run.config.schedule or self._run.shapes is not None:
            return
        programs = self._programs(checkpoint)
        with self._run.peers.guard():
            same = self._run.peers.rank == 0 and record.get("run") == self._saving.digest()
            same = same and len(programs) == len(self._run.source.texts) and self._trusted(programs, checkpoint)
            same = json.loads(self._run.peers.broadcast(f"same run {self._saving.next()}", json.dumps(same).encode()))
        if same:
            self._loop.go_on(record["loop"], programs)

    def _scheduler_state(self, checkpoint: Checkpoint, scheduler: Any) -> dict[str, Any] | None:
        if scheduler is not None:
            if SCHEDULER not in checkpoint.files:
                raise CheckpointError(f"{checkpoint.folder} has no scheduler's state: it was saved without trainer.save(..., scheduler=)")
            return scheduler_state(checkpoint.read(SCHEDULER), scheduler)
        if SCHEDULER in checkpoint.files and self._run.rank == 0:
            log.warning("%s has a scheduler's state, which is not read: pass trainer.load(..., scheduler=)", checkpoint.folder)
        return None

    def _programs(self, checkpoint: Checkpoint) -> list[str]:
        """Of each stage, as far as it has them."""
        names = [program_of(stage) for stage in range(len(self._run.source.texts))]
        return [checkpoint.read(name).decode() for name in names if name in checkpoint.files]

    def _trusted(self, programs: list[str], checkpoint: Checkpoint) -> bool:
        """Whether the programs of a checkpoint may run: it is the one that was made from the capture just now, this user's interlace wrote
        it, or the run says so. What modules run in Python no file decides."""
        text = "".join(programs)
        if programs == self._run.source.texts or made_here(text, checkpoint.record.get("made_here")):
            return True
        trusted = self._run.config.trust_program and "call.python(" not in text
        if not trusted:
            log.warning(
                "%s holds a program that was made elsewhere: it is not run, and the schedule begins anew%s", checkpoint.folder,
                "" if self._run.config.trust_program else " (trust_program=True, --trust-program: run it)",
            )  # fmt: skip
        return trusted

    def _checked_load(self, checkpoint: Checkpoint, scheduler: Any) -> Callable[[], None]:
        """Checks files against the model and the optimizer; gives the function that then reads them."""
        record, weights, moments = checkpoint.record, checkpoint.tensors(MODEL), checkpoint.tensors(OPTIMIZER)
        groups = self._run.optimizer.param_groups
        kinds = [self._run.kind_of(i) for i in range(len(groups))]
        names = self._weight_names(weights)
        ours = [(kind, self._run.names_of_group(i)) for i, kind in enumerate(kinds)]
        theirs = list(zip(record["kind"], [g["parameters"] for g in record["groups"]], strict=False))
        difference = group_difference(theirs, ours)
        if difference is not None:
            raise CheckpointError(
                f"{checkpoint.folder} was saved with another optimizer: {difference}; make the optimizer as it was when saving, or take "
                "the weights alone with trainer.load_weights"
            )
        scheduler_values = self._scheduler_state(checkpoint, scheduler)
        take_own = load_own_states(self._run, checkpoint)
        for i, (saved, group) in enumerate(zip(record["groups"], groups, strict=True)):
            check_hyper(checkpoint.folder, i, saved["hyper"], group)
        steps = [int(g["steps"]) for g in record["groups"]]
        scalars = [g.get("scalars") for g in record["groups"]]
        try:
            self._run.hyper.check(steps, scalars)
        except (RuntimeError, *UNREADABLE) as e:
            raise DamageError(f"{checkpoint.folder}: the optimizer's numbers cannot be read ({type(e).__name__}: {e}); was it edited?") from e
        wanted = {}
        roles = self._run.roles()
        frozen, laid_by = self._run.frozen(), record.get("laid_by", {})
        for role, p in ((role, p) for role in roles for p in self._run.states.everything if role in p.roles):
            known = f"{role}.{p.name}" in moments
            if p.group is None or steps[p.group] == 0 or (p.name in frozen and not known):
                continue
            if (not known or p.name in laid_by) and p.name in weights and p.name not in frozen:
                raise CheckpointError(
                    f"{checkpoint.folder} has no '{role}.{p.name}': '{p.name}' was frozen when it was saved, and trains now; freeze it "
                    "before loading, or take the weights alone with trainer.load_weights"
                )
            wanted[f"{role} of '{p.name}'"] = (f"{role}.{p.name}", p.shape_of(role))
        check_shapes(moments, wanted)
        laid = self._laid(checkpoint)
        if record.get("seed") != self._run.config.seed and self._run.rank == 0:
            log.warning(
                "%s was saved with seed %s, this run has %s: its random numbers go on differently",
                checkpoint.folder, record.get("seed"), self._run.config.seed,
            )  # fmt: skip

        def read() -> None:
            self._read_weights(weights, names)
            for role, _, p in self._run.states.updated(roles):
                if f"{role} of '{p.name}'" in wanted:
                    self._run.states.fill(p.name, role, partial(moments.read_range, f"{role}.{p.name}"))
                else:
                    self._run.states.fill(p.name, role, lambda a, b: torch.zeros(b - a))
            self._run.steps = int(record["step"])
            self._run.loss_scale.restore(record.get("loss_scale"))
            if scheduler_values is not None:
                scheduler.load_state_dict(scheduler_values)
            take_own()
            self._restore_groups([g["hyper"] for g in record["groups"]])
            self._run.hyper.restore(steps, scalars)
            self._run.laid_by = laid
            for name, one in laid.items():
                for role in one.roles:
                    entry = f"{role}.{name}"
                    one.put(self._run, role, tuple(moments.shape(entry)), partial(moments.read_range, entry))
            known_names = {p.name for p in self._run.states.everything}  # of all stages
            self._run.left_out = {n: int(t) for n, t in record.get("left_out", {}).items() if n in known_names}
            if self._run.config.rng == "compat" and f"rng.{self._run.rank}" in moments:
                generators.restore(self._run.peers.device, moments.read(f"rng.{self._run.rank}"))

            self._run.loaded = str(checkpoint.folder), record.get("regions", "")
            self._run.compare_kernels(str(checkpoint.folder), record.get("kernels"))
            self._run.compare_regions()

        return read

    def _laid(self, checkpoint: Checkpoint) -> dict[str, LaidBy]:
        """Of what is frozen now, whether or not they were when saved: the steps that they had made, and the states that there are.
        Error: they are not of the parameter."""
        run, record, moments = self._run, checkpoint.record, checkpoint.tensors(OPTIMIZER)
        frozen, shapes, found = run.frozen(), {p.name: p.shape for p in run.states.everything}, dict[str, LaidBy]()
        for i, group in enumerate(record["groups"] if run.config.mode != "eager" else ()):
            for name in filter(frozen.__contains__, run.names_of_group(i)):
                roles = group.get("states", STATE_NAMES.get(run.kind_of(i), ()))
                there = [role for role in roles if f"{role}.{name}" in moments]
                usual = [int(group["steps"]) - int(record.get("left_out", {}).get(name, 0)), group.get("scalars")]
                try:
                    made, scalars = record.get("laid_by", {}).get(name, usual)
                    one = run.hyper.laid_by(i, int(made), scalars or {}, there)
                except (RuntimeError, *UNREADABLE) as e:
                    raise DamageError(f"{checkpoint.folder}: what is laid by of '{name}' cannot be read ({type(e).__name__}: {e})") from e
                if there and one.made > 0:
                    found[name] = one
                    if run.kind_of(i) not in WHOLE and name in shapes:
                        check_shapes(moments, {f"{role} of '{name}'": (f"{role}.{name}", shapes[name]) for role in there})
        return found

    def _restore_groups(self, saved: list[dict[str, Any]]) -> None:
        for group, values in zip(self._run.optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def load_weights(self, source: str | Path | Mapping[str, Tensor]) -> None:
        self._run.check_open()
        self._run.flush()
        self._run.settle_save()
        with contextlib.ExitStack() as files:

            def check() -> Callable[[], None]:
                weights = HeldWeights(source) if isinstance(source, Mapping) else Weights(source)
                files.callback(weights.close)
                names = self._weight_names(weights)
                return lambda: self._read_weights(weights, names)

            self._run.agree(f"load weights {self._saving.next()} at step {self._run.steps}", check)()

    def _weight_names(self, weights: Weights | HeldWeights | CheckedTensors) -> dict[str, str]:
        """The file's name for every parameter and saved buffer, checked."""
        names: dict[str, str] = {}
        shapes = {p.name: p.shape for p in self._run.states.everything}
        shapes |= {n: tuple(t.shape) for n, t in self._run.tensors.buffers.items()}
        for name in dict.fromkeys(canonical for _, canonical, _ in self._run.tensors.entries):
            found = find_name(weights, [name, *self._run.tensors.places(name)], self._run.tensors.hf_prefix)
            names[name] = found or name
        check_shapes(weights, {f"'{n}'": (file, shapes[n]) for n, file in names.items()})
        return names

    def _read_weights(self, weights: Weights | HeldWeights | CheckedTensors, names: dict[str, str]) -> None:
        for name, file in names.items():
            if name in self._run.states.parameters:
                self._run.states.fill(name, WEIGHT, partial(weights.read_range, file))
            elif name in self._run.tensors.buffers:
                self._run.tensors.buffers[name].copy_(weights.read(file))
