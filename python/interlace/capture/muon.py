"""torch.optim.Muon in a program: one rule before its matrices are made orthogonal, one after it (src/passes/update_matrices.h).

    rule 0 "Muon" (momentum_buffer)     the direction of the step, from gradient and momentum; the second form without nesterov
    rule 1 "Muon.apply" ()              the weights' decay and step; g is the orthogonal matrix

What decides the iterations is in the line of the group; learning rate, decay and momentum are read at each step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MUON = "muon"  # the kind; a class of the user's own that is called Muon is another
_MOMENTUM = "momentum_buffer = lerp(momentum_buffer, g, n0)"
_FORMS = ((_MOMENTUM, "w = lerp(g, momentum_buffer, n1)"), (_MOMENTUM, "w = copy(momentum_buffer)"))


@dataclasses.dataclass(frozen=True)
class MuonWords:
    """The settings of a group that are in the program."""

    steps: int
    by: tuple[float, ...]
    eps: float
    ratio: str

    @staticmethod
    def of(group: dict[str, Any]) -> MuonWords:
        by = tuple(float(c) for c in group["ns_coefficients"])
        return MuonWords(int(group["ns_steps"]), by, float(group["eps"]), group["adjust_lr_fn"] or "original")

    def text(self) -> str:
        return f"steps {self.steps} by {' '.join(map(repr, self.by))} eps {self.eps!r} ratio {self.ratio}"


def muon_rules() -> tuple[Any, ...]:
    return ("Muon", ("momentum_buffer",), _FORMS), ("Muon.apply", (), (("w = mul(w, n0)", "w = add(w, g, n1)"),))


def muon_numbers(group: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Form and numbers of both rules for a step."""
    momentum, lr = float(group["momentum"]), float(group["lr"])
    return (
        [0.0, 1 - momentum, momentum] if group["nesterov"] else [1.0, 1 - momentum],
        [0.0, 1 - lr * float(group["weight_decay"]), -lr],
    )
