"""A Trainer's state dicts and checkpoints: values gathered unit by unit, files written by rank 0 and read by all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint import (
    FORMAT,
    MODEL,
    OPTIMIZER,
    PROGRAM,
    TRAINER,
    Checkpoint,
    Staging,
    check_place,
    check_shapes,
)
from interlace.hyper import STATE_NAMES, kind_of
from interlace.materialize import Weights, find_name
from interlace.saver import Piece, Save, make_files
from interlace.states import WEIGHT, Parameter
from interlace.tensor_file import CHUNK, CheckedTensors, CheckpointError, Entry, Layout
from interlace.trainer_base import TrainerBase

log = logging.getLogger("interlace")

Tensor = torch.Tensor


class TrainerFiles(TrainerBase):
    """What of a Trainer goes out of the process and comes in again."""

    # ---- state dicts ----

    def state_dict(self, all_ranks: bool = False) -> OrderedDict[str, Tensor]:
        """Copies of all parameters and buffers under the names and in the order of model.state_dict(), tied ones under each name.

        On rank 0 (empty elsewhere), or on all ranks. Every rank must call it. Buffers are rank 0's: statistics such as BatchNorm's
        are each rank's own while training, as with local statistics in DDP.
        """
        self._check_open()
        with self._peers.guard():
            values: dict[str, Tensor] = {}
            for p, t in self._states.whole(WEIGHT, everywhere=all_ranks):
                if t is not None and (all_ranks or self.rank == 0):
                    values[p.name] = t.detach().to("cpu", copy=True)
            for name, t in self._tensors.buffers.items():
                copy = t.detach().clone()
                if all_ranks:
                    self._peers.broadcast_tensor(copy)
                if all_ranks or self.rank == 0:
                    values[name] = copy.cpu()
        if not values:
            return OrderedDict()
        return OrderedDict((entry, values[name]) for entry, name, _ in self._tensors.entries)

    def optimizer_state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state as torch.optim has it, loadable with optimizer.load_state_dict. On rank 0, or on all ranks."""
        self._check_open()
        index: dict[str, int] = {}
        groups = []
        for i, group in enumerate(self._optimizer.param_groups):
            names = self._names_of_group(i)
            for name in names:
                index[name] = len(index)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": [index[n] for n in names]})
        state: dict[int, dict[str, Tensor]] = {}
        with self._peers.guard():
            for role in self._roles():
                for p, t in self._states.whole(role, everywhere=all_ranks):
                    if t is None or not (all_ranks or self.rank == 0) or not self._has_state(p):
                        continue
                    entry = state.setdefault(index[p.name], {})
                    if role != "momentum_buffer":
                        entry["step"] = torch.tensor(float(self._hyper.steps[p.group or 0]))
                    entry[role] = t.detach().to("cpu", copy=True)
        if not (all_ranks or self.rank == 0):
            return {}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _roles(self) -> list[str]:
        """The optimizer states' names, in torch's order."""
        kind = kind_of(self._optimizer, self._optimizer.param_groups[0])
        present = {role for unit in self._states.units for role in self._states.roles(unit)}
        return [role for role in STATE_NAMES[kind] if role in present]

    def _has_state(self, p: Parameter) -> bool:
        return p.group is not None and self._hyper.steps[p.group] > 0

    def _names_of_group(self, i: int) -> list[str]:
        if not hasattr(self, "_group_names"):
            by_id = {id(t): name for name, t in self._model.named_parameters()}
            self._group_names = [[by_id[id(t)] for t in g["params"]] for g in self._optimizer.param_groups]
        return self._group_names[i]

    # ---- checkpoints ----

    def save(
        self, folder: str | Path, extra: Mapping[str, str | bytes] | None = None, *, wait: bool = True, keep: int = 1
    ) -> None:  # fmt: skip
        """Writes a checkpoint (see checkpoint.py for its files) and puts it in place whole; every rank must call it.

        wait=False: returns at once and writes beside the next steps; the folder changes when all is on the disk. saved() says when,
        finish_save() waits; what goes wrong is raised there or by the next save. Until the next step has begun its update, parameters
        must not be changed from outside. `keep`: how many checkpoints there are in the end, older ones as FOLDER.step-N.
        `extra`: more small files, by name, that belong to it. Other files already in the folder stay. When writing fails (disk full,
        no permission) all ranks raise CheckpointError and the old checkpoint is untouched; training can go on.
        """
        self._check_open()
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(f"keep must be a whole number of at least 1, not {keep!r}")
        self.finish_save()
        begin, cpu = time.monotonic(), time.thread_time()
        with self._peers.guard():
            problem = self._begin_save(Path(os.path.abspath(folder)), extra or {}, keep)
        if problem is not None:
            raise CheckpointError(problem)
        self._save_begin = {"begin_seconds": time.monotonic() - begin, "begin_cpu_seconds": time.thread_time() - cpu}
        if wait or self.config.mode == "eager":
            assert self._save is not None
            self._save.wait_staged()
        if wait:
            self.finish_save()

    def saved(self) -> bool:
        """Whether the last save(wait=False) has ended, well or not."""
        return self._save is None or self._save.done

    def finish_save(self) -> None:
        """Waits until the last save(wait=False) is on the disk and in place. Error, on every rank: it could not be written."""
        if self._save is None:
            return
        save, self._save = self._save, None
        with self._peers.guard():
            problem = save.finish()
            self.last_save = {**self._save_begin, **save.stats()}
        if problem is not None:
            raise CheckpointError(problem)

    def reserve(self, folder: str | Path) -> None:
        """Takes a checkpoint folder for this trainer, as its first save does: another run that saves there is refused from now on.

        Every rank must call it. Error: another run has it, or it cannot be written to.
        """
        self._check_open()
        final = Path(os.path.abspath(folder))

        def check() -> Callable[[], None]:
            if self.rank == 0:
                check_place(final)
                self._locks.take(final)
            return lambda: None

        self._agree(f"folder {self._next_save()}", check)()

    def _next_save(self) -> int:
        self._saves += 1  # a key of the store is written once
        return self._saves

    def _drop_save(self) -> None:
        """The trainer ends: what is being written is given up, the old checkpoint stays."""
        if self._save is not None:
            self._save.cancel()
            self._save = None
        self._locks.release()

    def _begin_save(self, final: Path, extra: Mapping[str, str | bytes], keep: int) -> str | None:
        """Starts it on every rank; or says what is wrong with the place."""
        name = f"save {self._next_save()} at step {self.steps}"
        roles, rng = self._roles(), self._rng_states()
        model_list, optimizer_list = self._file_lists(roles, rng)
        files = {MODEL: Layout(model_list, {"format": "pt"}), OPTIMIZER: Layout(optimizer_list, {"format": "pt"})}
        staging: Staging | None = None
        word: dict[str, Any] = {}
        if self.rank == 0:
            try:
                check_place(final)
                self._locks.take(final)
                size = sum(layout.bytes for layout in files.values())
                staging = Staging(final, size, {**self._hf_files(), **extra})
                make_files(staging, files)
                staging.add(PROGRAM, self.program)
                staging.add(TRAINER, json.dumps(self._record(), indent=1) + "\n")
                word = {"folder": str(staging.folder)}
            except CheckpointError as e:
                word = {"problem": str(e)}
                if staging is not None:
                    staging.discard()
        word = json.loads(self._peers.broadcast(name, json.dumps(word).encode()))
        if "problem" in word:
            return word["problem"]
        self._save = Save(
            self._peers, name, final, Path(word["folder"]), files, self._pieces(files, roles, rng), self._staging_bytes(), staging, keep
        )  # fmt: skip
        return None

    def _staging_bytes(self) -> int:
        """How much a save may hold in copies: what the limit leaves beside a step's peak."""
        limit = self.config.memory_limit_bytes
        if limit is None:
            return 2**62
        return max(limit - self._executor.stats()["peak_bytes"], 2 * CHUNK)

    def _pieces(self, files: dict[str, Layout], roles: list[str], rng: list[Tensor]) -> list[Piece]:
        """What this rank writes: its shards, and of what all ranks have its share; the small rest is rank 0's."""
        model, optimizer = files[MODEL].entries, files[OPTIMIZER].entries
        pieces: list[Piece] = []

        def add(t: Tensor, begin: int, end: int, file: int, entry: Entry, first: int) -> None:
            """Elements [begin, end) of a flat tensor, which are the entry's elements from `first` on."""
            if begin < end:
                pieces.append((t, begin, end, file, entry.offset + first * t.element_size()))

        def share(count: int) -> tuple[int, int]:
            part = -(-count // self.world_size)
            return min(self.rank * part, count), min((self.rank + 1) * part, count)

        for file, names in ((0, [WEIGHT]), (1, roles)):
            for role in names:
                for unit in self._states.units:
                    if not self._states.has(unit, role):
                        continue
                    t, base = self._states.local(unit, role)
                    low, high = (base, base + t.numel()) if t.numel() < unit.numel else share(unit.numel)
                    host = t.detach() if t.device.type == "cpu" else t.detach()[low - base : high - base].cpu()
                    origin = base if t.device.type == "cpu" else low
                    for p in unit.parameters:
                        begin, end = max(low, p.offset), min(high, p.offset + p.numel)
                        if file == 0:
                            for place in self._tensors.places(p.name):
                                add(host, begin - origin, end - origin, 0, model[place], begin - p.offset)
                        elif self._has_state(p):
                            add(host, begin - origin, end - origin, 1, optimizer[f"{role}.{p.name}"], begin - p.offset)
        for p in self._states.loose:
            whole = next(self._states.parts(p, WEIGHT))[0].detach().cpu().contiguous()
            low, high = share(p.numel)
            for place in self._tensors.places(p.name):
                add(whole, low, high, 0, model[place], low)
        if self.rank == 0:
            for entry, canonical, is_parameter in self._tensors.entries:
                if not is_parameter:  # a forward changes buffers, so they are copied now
                    copy = self._tensors.buffers[canonical].detach().to("cpu", copy=True).contiguous().view(-1)
                    add(copy, 0, copy.numel(), 0, model[entry], 0)
            for r, state in enumerate(rng):
                add(state, 0, state.numel(), 1, optimizer[f"rng.{r}"], 0)
        return pieces

    def _file_lists(self, roles: list[str], rng: list[Tensor]) -> tuple[list[Any], list[Any]]:
        """(name, dtype, shape) of both files, in the order in which tensors are gathered."""
        order = [p for unit in self._states.units for p in unit.parameters] + list(self._states.loose)
        model = [(name, p.dtype, p.shape) for p in order for name in self._tensors.places(p.name)]
        buffers = self._tensors.buffers
        model += [
            (e, buffers[n].dtype, tuple(buffers[n].shape))
            for e, n, is_parameter in self._tensors.entries
            if not is_parameter
        ]
        optimizer = []
        for role in roles:
            for unit in self._states.units:
                if role in self._states.roles(unit):
                    dtype = self._states.local(unit, role)[0].dtype
                    optimizer += [(f"{role}.{p.name}", dtype, p.shape) for p in unit.parameters if self._has_state(p)]
        optimizer += [(f"rng.{r}", t.dtype, tuple(t.shape)) for r, t in enumerate(rng)]
        return model, optimizer

    def _rng_states(self) -> list[Tensor]:
        """Every rank's default generator; needed in compat mode only, because keyed streams have no state."""
        if self.config.rng != "compat":
            return []
        texts = self._peers.exchange(f"generators at step {self.steps}", torch.get_rng_state().numpy().tobytes().hex())
        return [torch.frombuffer(bytearray.fromhex(t), dtype=torch.uint8) for t in texts]

    def _hf_files(self) -> dict[str, str | bytes]:
        """config.json (and generation_config.json) of a Hugging Face model."""
        files: dict[str, str | bytes] = {}
        config: Any = getattr(self._model, "config", None)
        if hasattr(config, "to_json_string") and hasattr(config, "architectures"):
            config.architectures = [type(self._model).__name__]
            files["config.json"] = config.to_json_string(use_diff=True)
            generation: Any = getattr(self._model, "generation_config", None)
            if hasattr(generation, "to_json_string"):
                files["generation_config.json"] = generation.to_json_string(use_diff=True)
        return files

    def _record(self) -> dict[str, Any]:
        groups = []
        for i, group in enumerate(self._optimizer.param_groups):
            hyper = {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"steps": self._hyper.steps[i], "hyper": hyper, "parameters": self._names_of_group(i)})
        return {
            "format": FORMAT, "step": self.steps, "kind": [kind_of(self._optimizer, g) for g in self._optimizer.param_groups],
            "groups": groups, "seed": self.config.seed, "rng": self.config.rng, "world_size": self.world_size,
            "loss_scale": self._loss_scale.state(), "loop": self._loop.state(), "run": self._run_digest(),
        }  # fmt: skip

    def load(self, folder: str | Path) -> None:
        """Goes on from a checkpoint, whatever strategy and number of ranks wrote it; every rank must call it.

        Everything is checked before anything changes, every byte against its checksum. Hyper-parameters go back into
        optimizer.param_groups, as load_state_dict does. With as many ranks as saved it, and the same model and settings, the schedule
        goes on where it stood, with the program that ran then. Error: no checkpoint, of another model or optimizer (the first
        difference is named); DamageError where bytes are not those that were written.
        """
        self._check_open()
        self._settle_save()
        with contextlib.ExitStack() as files:
            found: list[Checkpoint] = []

            def check() -> Callable[[], None]:
                checkpoint = files.enter_context(Checkpoint(folder))
                found.append(checkpoint)
                action = self._checked_load(checkpoint)
                checkpoint.verify(self.rank, self.world_size)
                return action

            action = self._agree(f"load {self._next_save()} at step {self.steps}", check)
            with self._peers.guard():
                action()
            self._go_on_with_schedule(found[0])

    def _settle_save(self) -> None:
        """Before states are changed: what is being saved has been copied."""
        if self._save is not None:
            self._save.wait_staged()

    def _go_on_with_schedule(self, checkpoint: Checkpoint) -> None:
        """The schedule where it stood, when the run is the same: same captured program and passes for the same ranks."""
        record = checkpoint.record
        if self.config.mode == "eager" or not self.config.schedule or self._shapes is not None:
            return
        with self._peers.guard():
            same = self._peers.rank == 0 and record.get("run") == self._run_digest()
            same = json.loads(self._peers.broadcast(f"same run {self._next_save()}", json.dumps(same).encode()))
        if same:
            self._loop.go_on(record["loop"], checkpoint.read(PROGRAM).decode())

    def _run_digest(self) -> str:
        """What decides the program: the captured text, the settings of compiling, the number of ranks. Rank 0 knows it."""
        from interlace import _core

        config = self.config
        parts = [
            self._source.captured,
            config.pipeline(self.world_size),
            repr(config.schedule),
            str(config.memory_limit),
        ]
        return _core.digest("\n".join([*parts, str(config.cluster), str(self.world_size)]))

    def _checked_load(self, checkpoint: Checkpoint) -> Callable[[], None]:
        """Checks files against the model and the optimizer; gives the function that then reads them."""
        record, weights, moments = checkpoint.record, checkpoint.tensors(MODEL), checkpoint.tensors(OPTIMIZER)
        groups = self._optimizer.param_groups
        kinds = [kind_of(self._optimizer, g) for g in groups]
        names = self._weight_names(weights)
        ours = [(kind, self._names_of_group(i)) for i, kind in enumerate(kinds)]
        theirs = list(zip(record["kind"], [g["parameters"] for g in record["groups"]], strict=False))
        difference = group_difference(theirs, ours)
        if difference is not None:
            raise CheckpointError(
                f"{checkpoint.folder} was saved with another optimizer: {difference}; make the optimizer as it was when saving, or take "
                "the weights alone with trainer.load_weights"
            )
        steps = [int(g["steps"]) for g in record["groups"]]
        wanted = {}
        roles = self._roles()
        for role in roles:
            for unit in self._states.units:
                for p in unit.parameters if role in self._states.roles(unit) else ():
                    if p.group is not None and steps[p.group] > 0:
                        wanted[f"{role} of '{p.name}'"] = (f"{role}.{p.name}", p.shape)
        check_shapes(moments, wanted)
        if record.get("seed") != self.config.seed and self.rank == 0:
            log.warning(
                "%s was saved with seed %s, this run has %s: its random numbers go on differently",
                checkpoint.folder, record.get("seed"), self.config.seed,
            )  # fmt: skip

        def read() -> None:
            self._read_weights(weights, names)
            for role in roles:
                for unit in self._states.units:
                    for p in unit.parameters if role in self._states.roles(unit) else ():
                        if f"{role} of '{p.name}'" in wanted:
                            key = f"{role}.{p.name}"
                            self._states.fill(p.name, role, partial(moments.read_range, key))
                        else:
                            self._states.fill(p.name, role, lambda a, b: torch.zeros(b - a))
            self.steps = int(record["step"])
            self._hyper.steps = steps
            self._loss_scale.restore(record.get("loss_scale"))
            self._restore_groups([g["hyper"] for g in record["groups"]])
            if self.config.rng == "compat" and f"rng.{self.rank}" in moments:
                torch.set_rng_state(moments.read(f"rng.{self.rank}"))

        return read

    def _restore_groups(self, saved: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def load_weights(self, source: str | Path) -> None:
        """Parameters and buffers from a safetensors file, a sharded index or a Hugging Face folder; the optimizer stays as it is."""
        self._check_open()
        self._settle_save()
        with contextlib.ExitStack() as files:

            def check() -> Callable[[], None]:
                weights = Weights(source)
                files.callback(weights.close)
                names = self._weight_names(weights)
                return lambda: self._read_weights(weights, names)

            self._agree(f"load weights {self._next_save()} at step {self.steps}", check)()

    def _weight_names(self, weights: Weights | CheckedTensors) -> dict[str, str]:
        """The file's name for every parameter and saved buffer, checked."""
        names: dict[str, str] = {}
        shapes = {p.name: p.shape for p in self._states.parameters.values()}
        shapes |= {n: tuple(t.shape) for n, t in self._tensors.buffers.items()}
        for name in dict.fromkeys(canonical for _, canonical, _ in self._tensors.entries):
            found = find_name(weights, [name, *self._tensors.places(name)], self._tensors.hf_prefix)
            names[name] = found or name
        check_shapes(weights, {f"'{n}'": (file, shapes[n]) for n, file in names.items()})
        return names

    def _read_weights(self, weights: Weights | CheckedTensors, names: dict[str, str]) -> None:
        for name, file in names.items():
            if name in self._states.parameters:
                self._states.fill(name, WEIGHT, partial(weights.read_range, file))
            else:
                self._tensors.buffers[name].copy_(weights.read(file))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


Groups = list[tuple[str, list[str]]]


def group_difference(theirs: Groups, ours: Groups) -> str | None:
    """The first thing in which two optimizers' groups differ; None: nothing."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} parameter groups there, {len(ours)} here"
    for i, ((kind, names), (our_kind, our_names)) in enumerate(zip(theirs, ours, strict=True)):
        if kind != our_kind:
            return f"group {i} is {str(kind)[:40]} there, {our_kind} here"
        for j, (name, our_name) in enumerate(zip(names, our_names, strict=False)):
            if name != our_name:
                return f"parameter {j} of group {i} is '{str(name)[:200]}' there, '{our_name}' here"
        if len(names) != len(our_names):
            return f"group {i} has {len(names)} parameters there, {len(our_names)} here"
    return None
