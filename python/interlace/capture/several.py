"""Several optimizers as one, each with parameters of its own: Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from interlace.errors import CaptureError

Optimizer = torch.optim.Optimizer
_own: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def run_itself(optimizer: Optimizer) -> None:
    """From now on its steps are those of its own Python, on whole parameters."""
    _own.add(optimizer)


def runs_itself(optimizer: Optimizer) -> bool:
    return optimizer in _own


def step_without_hooks(kind: type[Optimizer]) -> Any:
    """Its step as written: torch puts hooks round it, and torch.compile round what it will not compile (LBFGS) once more."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


class Several(Optimizer):
    """Has the members' own groups, which stay theirs: schedulers of the members work as they are."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        owner: dict[int, int] = {}
        for i, member in enumerate(members):
            for p in (p for group in member.param_groups for p in group["params"]):
                if owner.setdefault(id(p), i) != i:
                    raise CaptureError(
                        f"a parameter of shape {tuple(p.shape)} is in two optimizers, {type(members[owner[id(p)]]).__name__} (number "
                        f"{owner[id(p)]}) and {type(member).__name__} (number {i}); give each parameter to one of them"
                    )
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {p: state for member in self.members for p, state in member.state.items()}


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def member_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Whose group it is."""
    return next((m for m in members_of(optimizer) if any(g is group for g in m.param_groups)), members_of(optimizer)[0])


def name_of(optimizer: Optimizer) -> str:
    return ", ".join(type(m).__name__ for m in members_of(optimizer))
