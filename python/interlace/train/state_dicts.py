"""A Trainer's state dicts: values gathered unit by unit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from interlace.checkpoint.optimizer import STATE_NAMES, kind_of
from interlace.compiling.states import WEIGHT, Parameter
from interlace.train.run import TrainerBase

Tensor = torch.Tensor


class TrainerState(TrainerBase):
    """What of a Trainer plain PyTorch calls its state, and the names that checkpoints have for it."""

    def state_dict(self, all_ranks: bool = False) -> OrderedDict[str, Tensor]:
        """Copies of all parameters and buffers under the names and in the order of model.state_dict(), tied ones under each name.

        On rank 0 (empty elsewhere), or on all ranks. Every rank must call it. Buffers are rank 0's: statistics such as BatchNorm's
        are each rank's own while training, as with local statistics in DDP.
        """
        self.flush()
        with self._peers.guard():
            values: dict[str, Tensor] = {}
            for p, t in self._states.whole(WEIGHT, everywhere=all_ranks):
                if t is not None and (all_ranks or self.rank == 0):
                    values[p.name] = t.detach().to("cpu", copy=True)
            for name, t in self._tensors.buffers.items():
                copy = t.detach().clone()
                if all_ranks:
                    self._peers.groups.broadcast(copy)
                if all_ranks or self.rank == 0:
                    values[name] = copy.cpu()
        if not values:
            return OrderedDict()
        return OrderedDict((entry, values[name]) for entry, name, _ in self._tensors.entries)

    def optimizer_state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state as torch.optim has it, loadable with optimizer.load_state_dict. On rank 0, or on all ranks."""
        self.flush()
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
