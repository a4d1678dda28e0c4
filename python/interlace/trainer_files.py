"""A Trainer's state dicts and checkpoints: values gathered unit by unit, files written by rank 0 and read by all."""

from __future__ import annotations

import contextlib
import json
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
    TRAINER,
    CheckpointError,
    SafetensorsWriter,
    Staging,
    check_shapes,
    read_trainer_file,
    saving,
)  # fmt: skip
from interlace.hyper import STATE_NAMES, kind_of
from interlace.materialize import Weights, find_name
from interlace.states import WEIGHT, Parameter
from interlace.trainer_base import TrainerBase

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

    def save(self, folder: str | Path, extra: Mapping[str, str | bytes] | None = None) -> None:
        """Writes a checkpoint (see checkpoint.py for its files) and puts it in place whole; every rank must call it.

        `extra`: more small files, by name, that belong to it. Other files already in the folder stay. When writing fails (disk full,
        no permission) all ranks raise CheckpointError and the old checkpoint is untouched; training can go on.
        """
        self._check_open()
        with self._peers.guard():
            problem = self._save(folder, extra or {})
            problem = self._peers.exchange(f"save at step {self.steps}", problem)[0]
        if problem is not None:
            raise CheckpointError(problem)

    def _save(self, folder: str | Path, extra: Mapping[str, str | bytes]) -> str | None:
        """Returns what went wrong with the files. Rank 0 takes part in every gather even after that, so that nobody waits."""
        roles = self._roles()
        rng = self._rng_states()
        staging: Staging | None = None
        problem: str | None = None
        writer: SafetensorsWriter | None = None

        def attempt(action: Callable[[], Any]) -> Any:
            nonlocal problem
            if problem is None and self.rank == 0:
                try:
                    with saving(Path(folder)):
                        return action()
                except CheckpointError as e:
                    problem = str(e)
            return None

        model_list, optimizer_list = self._file_lists(roles, rng)
        size = sum(torch.Size(s).numel() * d.itemsize for _, d, s in (*model_list, *optimizer_list))
        staging = attempt(lambda: Staging(folder, size, {**self._hf_files(), **extra}))
        try:
            # The first file: parameters in the order of the units, each under all of its names; then buffers.
            writer = attempt(lambda: SafetensorsWriter(staging.folder / MODEL, model_list, {"format": "pt"}))  # type: ignore
            for p, t in self._states.whole(WEIGHT):
                for name in self._tensors.places(p.name):
                    attempt(lambda name=name, t=t: writer.write(name, t))  # type: ignore
            for entry, name, is_parameter in self._tensors.entries:
                if not is_parameter:
                    attempt(lambda entry=entry, name=name: writer.write(entry, self._tensors.buffers[name]))  # type: ignore
            attempt(lambda: writer.finish())  # type: ignore
            writer = attempt(lambda: SafetensorsWriter(staging.folder / OPTIMIZER, optimizer_list, {"format": "pt"}))  # type: ignore
            for role in roles:
                for p, t in self._states.whole(role):
                    if self._has_state(p):
                        attempt(lambda role=role, p=p, t=t: writer.write(f"{role}.{p.name}", t))  # type: ignore
            for r, state in enumerate(rng):
                attempt(lambda r=r, state=state: writer.write(f"rng.{r}", state))  # type: ignore
            attempt(lambda: writer.finish())  # type: ignore
            attempt(lambda: staging.write(TRAINER, json.dumps(self._record(), indent=1) + "\n"))  # type: ignore
            attempt(lambda: staging.commit())  # type: ignore
        finally:
            if writer is not None:
                writer.abandon()
            if staging is not None:
                staging.discard()
        return problem

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
            "loss_scale": self._loss_scale.state(),
        }  # fmt: skip

    def load(self, folder: str | Path) -> None:
        """Goes on from a checkpoint, whatever strategy and number of ranks wrote it; every rank must call it.

        Everything is checked before anything changes. Hyper-parameters go back into optimizer.param_groups, as load_state_dict does.
        """
        self._check_open()
        folder = Path(folder)
        with contextlib.ExitStack() as files:

            def check() -> Callable[[], None]:
                record = read_trainer_file(folder)
                weights, moments = Weights(folder / MODEL), Weights(folder / OPTIMIZER)
                files.callback(weights.close)
                files.callback(moments.close)
                return self._checked_load(record, weights, moments)

            self._agree(f"load at step {self.steps}", check)()

    def _checked_load(self, record: dict[str, Any], weights: Weights, moments: Weights) -> Callable[[], None]:
        """Checks files against the model and the optimizer; gives the function that then reads them."""
        groups = self._optimizer.param_groups
        kinds = [kind_of(self._optimizer, g) for g in groups]
        saved_groups = [g["parameters"] for g in record["groups"]]
        if record["kind"] != kinds or saved_groups != [self._names_of_group(i) for i in range(len(groups))]:
            raise CheckpointError(
                f"{weights.source.parent} was saved with another optimizer: groups {_group_text(record['kind'], saved_groups)} there, "
                f"{_group_text(kinds, [g['params'] for g in groups])} here; make the optimizer as it was when saving"
            )
        names = self._weight_names(weights)
        steps = [int(g["steps"]) for g in record["groups"]]
        wanted = {}
        roles = self._roles()
        for role in roles:
            for unit in self._states.units:
                for p in unit.parameters if role in self._states.roles(unit) else ():
                    if p.group is not None and steps[p.group] > 0:
                        wanted[f"{role} of '{p.name}'"] = (f"{role}.{p.name}", p.shape)
        check_shapes(moments, wanted)

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
        with contextlib.ExitStack() as files:

            def check() -> Callable[[], None]:
                weights = Weights(source)
                files.callback(weights.close)
                names = self._weight_names(weights)
                return lambda: self._read_weights(weights, names)

            self._agree(f"load weights at step {self.steps}", check)()

    def _weight_names(self, weights: Weights) -> dict[str, str]:
        """The file's name for every parameter and saved buffer, checked."""
        names: dict[str, str] = {}
        shapes = {p.name: p.shape for p in self._states.parameters.values()}
        shapes |= {n: tuple(t.shape) for n, t in self._tensors.buffers.items()}
        for name in dict.fromkeys(canonical for _, canonical, _ in self._tensors.entries):
            found = find_name(weights, [name, *self._tensors.places(name)], self._tensors.hf_prefix)
            names[name] = found or name
        check_shapes(weights, {f"'{n}'": (file, shapes[n]) for n, file in names.items()})
        return names

    def _read_weights(self, weights: Weights, names: dict[str, str]) -> None:
        for name, file in names.items():
            if name in self._states.parameters:
                self._states.fill(name, WEIGHT, partial(weights.read_range, file))
            else:
                self._tensors.buffers[name].copy_(weights.read(file))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _group_text(kinds: list[str], groups: list[Any]) -> str:
    return ", ".join(f"{k} with {len(g)} parameters" for k, g in zip(kinds, groups, strict=False)) or "none"
