"""Optimizers whose step needs whole parameters: Muon and Adafactor of torch.optim, by name; others by their own Python. Each has rules of its
own for what is elementwise in its step, and words in the line of a group for the rest, which the program works out (src/passes/update.cc):

    rule 0 "Muon" (momentum_buffer)     the direction of the step, from gradient and momentum; the second form without nesterov
    rule 1 "Muon.apply" ()              the weights' decay and step; g is the orthogonal matrix (src/passes/update_matrices.h)

    rule 0 "Adafactor" ()               the gradient with its sign; the second form of maximize
    rule 1 "Adafactor.average" ()       of mean squares: w is what is kept, g the new one
    rule 2 "Adafactor.apply" ()         the weights' decay and step; g is the update (src/passes/update_factors.h)

A group has the first rule, the others are of groups behind those of the optimizer. What is in the words is fixed when compiled; the numbers
of the rules are read at each step.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Group = dict[str, Any]
Rule = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]  # name, states, forms
OWN, GRADIENT = "(own)", "gradient"
FACTORS = ("row_var", "col_var")  # states that have an element for each row or column of a parameter


class WholeStep(abc.ABC):
    """One of these optimizers."""

    kind: str  # a class of the user's own of the same name is another
    states: tuple[str, ...]  # that it keeps for parameters
    fixed: str  # the settings in words()
    counts: bool  # whether a step depends on how many there were
    rules: tuple[Rule, ...]

    @abc.abstractmethod
    def words(self, group: Group, behind: int) -> str:
        """Of the group's line; `behind`: the number of its second group."""

    @abc.abstractmethod
    def numbers(self, group: Group, t: int) -> list[list[float]]:
        """Form and numbers of each rule for step t, which counts from 1."""


class _Muon(WholeStep):
    kind, states, fixed, counts = "muon", ("momentum_buffer",), "ns_steps, ns_coefficients, eps or adjust_lr_fn", False
    _momentum = "momentum_buffer = lerp(momentum_buffer, g, n0)"
    rules = (
        ("Muon", states, ((_momentum, "w = lerp(g, momentum_buffer, n1)"), (_momentum, "w = copy(momentum_buffer)"))),
        ("Muon.apply", (), (("w = mul(w, n0)", "w = add(w, g, n1)"),)),
    )

    def words(self, group: Group, behind: int) -> str:
        by = " ".join(repr(float(c)) for c in group["ns_coefficients"])
        ratio = group["adjust_lr_fn"] or "original"
        return f"orthogonal apply {behind} steps {int(group['ns_steps'])} by {by} eps {float(group['eps'])!r} ratio {ratio}"

    def numbers(self, group: Group, t: int) -> list[list[float]]:
        momentum, lr = float(group["momentum"]), float(group["lr"])
        direction = [0.0, 1 - momentum, momentum] if group["nesterov"] else [1.0, 1 - momentum]
        return [direction, [0.0, 1 - lr * float(group["weight_decay"]), -lr]]


class _Adafactor(WholeStep):
    kind, states, fixed, counts = "adafactor", (*FACTORS, "variance"), "eps or d", True
    rules = (
        ("Adafactor", (), (("w = copy(g)",), ("w = neg(g)",))),
        ("Adafactor.average", (), (("w = lerp(w, g, n0)",),)),
        ("Adafactor.apply", (), (("w = mul(w, n0)", "w = add(w, g, n1)"),)),
    )

    def words(self, group: Group, behind: int) -> str:
        eps, least = group["eps"]
        if eps is None:
            eps = torch.finfo(group["params"][0].dtype if group["params"] else torch.get_default_dtype()).eps
        return f"factored average {behind} apply {behind + 1} eps {float(eps)!r} {float(least)!r} clip {float(group['d'])!r}"

    def numbers(self, group: Group, t: int) -> list[list[float]]:
        lr = float(group["lr"])
        apply = [0.0, 1 - lr * float(group["weight_decay"]), -min(lr, 1 / t**0.5)]
        return [[float(group["maximize"])], [0.0, t ** float(group["beta2_decay"])], apply]


class _Own(WholeStep):
    """Of any other class: the program keeps the gradient, and the optimizer's own Python makes the step (train/own_steps.py)."""

    kind, states, fixed, counts = OWN, (GRADIENT,), "settings", False
    rules = ((OWN, states, ((f"{GRADIENT} = copy(g)",),)),)

    def words(self, group: Group, behind: int) -> str:
        return ""

    def numbers(self, group: Group, t: int) -> list[list[float]]:
        return [[0.0]]


WHOLE: dict[str, WholeStep] = {step.kind: step for step in (_Muon(), _Adafactor(), _Own())}
_CLASSES = {getattr(torch.optim, name, None): name.lower() for name in ("Muon", "Adafactor")}


def whole_kind(kind: type) -> str | None:
    return _CLASSES.get(kind)


def whole_groups(kinds: Sequence[str]) -> Iterator[tuple[int, WholeStep]]:
    """Groups with such a step, in the order of the groups behind."""
    return ((i, step) for step in WHOLE.values() for i, kind in enumerate(kinds) if kind == step.kind)
