"""`train` and `eval` of an optimizer whose evaluations have other parameters than its steps (schedule-free ones):

    optimizer.eval(); trainer.evaluate(batch); optimizer.train()       on every rank

They are the optimizer's own methods, which run on one parameter after the other, whole, with its states; what they make of it goes back into
the trainer. What they write into groups and attributes is the optimizer's, once.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interlace.capture.several import member_of, runs_itself
from interlace.capture.whole import GRADIENT
from interlace.compiling.states import WEIGHT
from interlace.train.run import Run
from interlace.train.whole import whole_parameters

Tensor = torch.Tensor
NAMES = ("train", "eval")


def has_modes(member: Any) -> bool:
    return all(callable(getattr(type(member), name, None)) for name in NAMES)


class Modes:
    """Has them reach what the trainer has. Taken off when it closes."""

    def __init__(self, run: Run, member: Any) -> None:
        self._member, here = member, weakref.ref(run)

        def switched(name: str) -> Callable[[], Any]:
            method = getattr(member, name)

            def switch() -> Any:
                run = here()
                return method() if run is None or run.closed is not None else _switch(run, member, name, method)

            return switch

        for name in NAMES:
            vars(member)[name] = switched(name)

    def remove(self) -> None:
        for name in NAMES:
            vars(self._member).pop(name, None)


def _switch(run: Run, member: Any, name: str, method: Callable[[], Any]) -> Any:
    run.check_open()
    run.flush()
    run.settle_save()
    run.agree(f"optimizer.{name}() at step {run.steps}", lambda: lambda: None)()
    if runs_itself(member):
        with whole_parameters(run, True, True):
            return method()
    with run.peers.guard(), torch.no_grad():
        return _one_by_one(run, member, method)


def _one_by_one(run: Run, member: Any, method: Callable[[], Any]) -> Any:
    groups, before = member.param_groups, dict(vars(member))
    parameters, values = [g["params"] for g in groups], [dict(g) for g in groups]
    number = {n: i for i, g in enumerate(run.optimizer.param_groups) if member_of(run.optimizer, g) is member for n in run.names_of_group(i)}
    states = {role: run.states.whole(role, everywhere=True) for role in run.roles() if role != GRADIENT}

    def alone(own: Any, stand: Tensor | None, state: dict[str, Any]) -> Any:
        """The method, as if there were no other parameter."""
        vars(member).clear()
        vars(member).update(before)
        for group, then in zip(groups, values, strict=True):
            group.clear()
            group.update(then, params=[stand] if group is own else [])
        member.state = collections.defaultdict(dict, {stand: state} if state else {})
        return method()

    try:
        for entry, weight in run.states.whole(WEIGHT, everywhere=True):
            found = {role: next(states[role])[1] for role in states if role in entry.roles}
            if weight is None or entry.name not in number:
                continue
            i, laid = number[entry.name], run.laid_by.get(entry.name)
            has = laid is not None or (entry.group is not None and run.has_state(entry))
            if laid is not None:
                found = {role: laid.whole(run, role) for role in laid.parts}
            stand = nn.Parameter(weight.detach().clone().view(entry.shape), requires_grad=False)
            kept = {role: t.detach().clone().view(entry.shape) for role, t in found.items() if t is not None}
            alone(run.optimizer.param_groups[i], stand, {**run.hyper.entry(i, laid), **kept} if has else {})
            for role, old, new in [(WEIGHT, weight, stand), *((role, found[role], t) for role, t in kept.items() if laid is None)]:
                if old is not None and not torch.equal(old.reshape(-1), new.detach().reshape(-1)):
                    run.states.fill_from(entry.name, role, new)
        return alone(None, None, {})
    finally:
        member.state = before["state"]
        for group, params in zip(groups, parameters, strict=True):
            group["params"] = params
