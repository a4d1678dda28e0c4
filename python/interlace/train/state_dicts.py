"""A Trainer's values as plain PyTorch has them, gathered unit by unit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from interlace.capture.several import members_of, runs_itself
from interlace.capture.whole import GRADIENT
from interlace.compiling.states import WEIGHT
from interlace.train.run import Run

Tensor = torch.Tensor


def state_dict(run: Run, all_ranks: bool = False) -> OrderedDict[str, Tensor]:
    """Trainer.state_dict."""
    run.check_open()
    run.all_here("trainer.state_dict")
    run.flush()
    with run.peers.guard():
        values: dict[str, Tensor] = {}
        for p, t in run.states.whole(WEIGHT, everywhere=all_ranks):
            if t is not None and (all_ranks or run.rank == 0):
                values[p.name] = t.detach().to("cpu", copy=True)
        run.share_buffers()
        for name, t in run.tensors.buffers.items():
            copy = t.detach().clone()
            if all_ranks:
                run.peers.groups.broadcast(copy)
            if all_ranks or run.rank == 0:
                values[name] = copy.cpu()
    if not values:
        return OrderedDict()
    return OrderedDict((entry, values[name]) for entry, name, _ in run.tensors.entries)


def optimizer_state_dict(run: Run, all_ranks: bool = False) -> dict[str, Any]:
    """Trainer.optimizer_state_dict."""
    run.check_open()
    run.all_here("trainer.optimizer_state_dict")
    run.flush()
    index: dict[str, int] = {}
    groups = []
    for i, group in enumerate(run.optimizer.param_groups):
        names = run.names_of_group(i)
        for name in names:
            index[name] = len(index)
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": [index[n] for n in names]})
    state: dict[int, dict[str, Tensor]] = {}
    with run.peers.guard():
        for role in run.roles():
            for p, t in run.states.whole(role, everywhere=all_ranks):
                if t is None or not (all_ranks or run.rank == 0) or not run.has_state(p) or role == GRADIENT:
                    continue
                entry = state.setdefault(index[p.name], {})
                if not entry:
                    entry.update(run.hyper.entry(p.group or 0, run.behind.get(p.name)))
                    if run.left_out.get(p.name) and "step" in entry:
                        entry["step"] = torch.tensor(float(run.own_steps(p.name, p.group or 0)))
                entry[role] = t.detach().to("cpu", copy=True)
        for i in range(len(run.optimizer.param_groups)):
            for name in run.names_of_group(i):
                if (laid := run.laid_by.get(name)) is not None:
                    whole = {role: laid.whole(run, role).to("cpu", copy=True) for role in laid.parts}
                    state[index[name]] = {**run.hyper.entry(i, laid), **whole}
    for member in members_of(run.optimizer):
        if runs_itself(member):
            mine = [i for i, group in enumerate(run.optimizer.param_groups) if any(group is g for g in member.param_groups)]
            first = min(index[name] for i in mine for name in run.names_of_group(i))
            state |= {first + number: copy.deepcopy(kept) for number, kept in member.state_dict()["state"].items()}
    if not (all_ranks or run.rank == 0):
        return {}
    return {"state": dict(sorted(state.items())), "param_groups": groups}
