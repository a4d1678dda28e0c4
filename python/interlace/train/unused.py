"""Parameters that got no gradient in a step, because the opaque module that has them did not use them, or the model went another way
(`meta unused`, mode="eager"): as in torch.optim they stay as they are, with their moments, and their own count of steps does not go on.

The program gives them zeros and updates them like all others. So what this rank holds of those that may go unused is kept over a step
and put back; what went unused for the first time is computed back, from a step whose gradient is known to be zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch

from interlace.capture.groups import is_rule
from interlace.compiling.states import WEIGHT
from interlace.errors import InterlaceError
from interlace.train.laid_by import LaidBy
from interlace.train.run import Run

Tensor = torch.Tensor
Kept = dict[str, list[Tensor]]  # role → the parts on this rank


class Unused:
    """Of one trainer; every rank must call both methods in every step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.table: Any = run.runner if run.config.mode == "eager" else run.programs.opaque
        self._doubtful: set[str] | None = None  # kept over each step; in the first one, all
        self._kept: dict[str, Kept] = {}
        self._of, self._some = "", list[str]()  # a program, and the names of what may go unused in it or went unused before
        self._before = set[str]()  # the latter
        self._other_way: set[str] = set()  # of this program, what goes unused in every step
        self.now: set[str] = set()  # unused in the last step
        self.idle: set[int] = set()  # groups of which it left out all, which make no step themselves
        self._groups: dict[str, int] = {}  # of the parameters with a gradient in this program
        self._never: set[int] = set()  # groups that have none of them
        self._sometimes: set[str] = set()  # what opaque modules of it decide, or the user's own Python

    def _names(self) -> list[str]:
        if self._of is not self.run.program or self._before != self.run.left_out.keys():
            known = self.run.states.parameters
            self._of, self._before = self.run.program, set(self.run.left_out)
            self._sometimes = self.table.sometimes_in(self.run.program) if self.table is not None else set()
            unused, idle = (json.loads(self.run.ir.meta().get(word, "[]")) for word in ("unused", "idle"))
            self._other_way = {*unused, *(self.run.left_out.keys() & idle)}
            names = self._sometimes | self._other_way | self.run.left_out.keys()
            if self.run.states.stages == 1:
                own = {n: p.group for n, p in known.items() if p.trainable and p.unit is not None and n not in idle}
                self._groups = {n: group for n, group in own.items() if group is not None}
                self._never = set(range(len(self.run.hyper.steps))).difference(self._groups.values())
            self._some = sorted(n for n in names if n in known and known[n].unit is not None and known[n].trainable)
        return self._some

    def _kind(self, name: str) -> str:
        return self.run.kind_of(self.run.states.parameters[name].group or 0)

    def before_step(self) -> None:
        names = self._names()
        if not names:
            return
        if any(is_rule(self._kind(n)) for n in names):
            self._doubtful = set(names)  # a rule's step cannot be computed back
        if self.table is not None:
            self.table.used.clear()
        sure = self._other_way | self.run.left_out.keys()
        doubtful = names if self._doubtful is None else [n for n in names if n in self._doubtful or n in sure]
        if doubtful:
            self.run.settle_save()
        self._kept = {name: {role: [t.clone() for t, _, _ in parts] for role, parts in self._parts(name)} for name in doubtful}

    @torch.no_grad()
    def after_step(self, rows: list[list[float]]) -> None:
        """`rows`: the hyper-parameters that the step was made with."""
        names = self._names()
        self.now, self.idle = set(), self._never
        if not names:
            return
        used = self.table.used if self.table is not None else ()
        flags = self.run.peers.groups.largest([int(n in used if n in self._sometimes else n not in self._other_way) for n in names])
        unused = [n for n, used in zip(names, flags, strict=True) if not used]
        self.now = set(unused)
        if unused and self._groups:
            self.idle = self._never | set(self._groups.values()) - {group for n, group in self._groups.items() if n not in self.now}
        if self._doubtful is None:
            self._doubtful = set()
        kept, self._kept = self._kept, {}
        if self.run.skipped or not (unused or self.run.left_out):
            return
        self.run.flush()
        for name in unused:
            kind = self._kind(name)
            row = rows[self.run.states.parameters[name].group or 0]
            if name in kept:
                self._put_back(name, kept[name])
            else:
                self._undo(name, kind, row)
            group = self.run.states.parameters[name].group or 0
            if group not in self.idle:
                self.run.behind.setdefault(name, LaidBy(self.run.own_steps(name, group), self.run.hyper.pilot_of(group)))
                self.run.left_out[name] = self.run.left_out.get(name, 0) + 1
            self._doubtful.add(name)
        for name in self.run.left_out:
            kind = self._kind(name)
            if name not in unused:
                self.run.behind.pop(name, None)
            if name not in unused and name in kept and self.run.hyper.counts_steps(self.run.states.parameters[name].group or 0):
                raise InterlaceError(
                    f"parameter '{name}' has a gradient again after {self.run.left_out[name]} steps without one, and {kind} would go on with "
                    "another count of steps for it than for the rest of its group; put what has no gradient for a while into an optimizer "
                    "group of its own, or train with AdamW, Adam or SGD"
                )
            if name not in unused and name in kept and kind in ("adam", "adamw"):
                self._as_own_step(name, kind, rows[self.run.states.parameters[name].group or 0], kept[name])

    def _parts(self, name: str) -> Iterator[tuple[str, list[tuple[Tensor, int, int]]]]:
        """What this rank holds of a parameter, by role: a tensor and the elements that it is of."""
        states = self.run.states
        p = states.parameters[name]
        assert p.unit is not None
        for role in (WEIGHT, *states.roles_of(name)):
            yield role, list(states.parts(p, role))

    def _at(self, name: str, role: str, start: int, end: int) -> Tensor:
        """Elements of a state, wherever they are: with zero1 every rank has all weights and a part of the states."""
        states = self.run.states
        p = states.parameters[name]
        assert p.unit is not None
        unit = states.units[p.unit]
        if states.local(unit, WEIGHT)[0].numel() == states.local(unit, role)[0].numel():
            return next(part[start - low : end - low] for part, low, high in states.parts(p, role) if low <= start and end <= high)
        whole = states.gather(unit, role, everywhere=True)
        assert whole is not None
        return whole[p.offset + start : p.offset + end]

    def _settle(self, name: str) -> None:
        for role, _ in self._parts(name):
            self.run.states.settle(self.run.states.place_of(name, role).unit, role)

    def _put_back(self, name: str, kept: Kept) -> None:
        for role, parts in self._parts(name):
            for (part, _, _), old in zip(parts, kept[role], strict=True):
                part.copy_(old)
        self._settle(name)

    def _undo(self, name: str, kind: str, row: list[float]) -> None:
        """The step of a zero gradient, backwards: first the weights, then the states, which depend on them."""
        roles = dict(self._parts(name))
        whole: dict[tuple[int, int], Tensor] = {}
        if kind == "sgd":
            lr, momentum, dampening, decay, nesterov, t, _ = row
            moves = momentum != 0 and "momentum_buffer" in roles
            for w, start, end in roles[WEIGHT]:
                if moves:
                    w.add_(self._at(name, "momentum_buffer", start, end), alpha=lr * momentum if nesterov else lr)
                if nesterov or not moves:
                    w.div_(1 - lr * decay)
                whole[start, end] = w
            for buffer, start, end in roles.get("momentum_buffer", ()) if moves else ():
                if t == 1:
                    buffer.zero_()
                else:
                    buffer.sub_(_within(whole, start, end), alpha=(1 - dampening) * decay).div_(momentum)
        else:
            lr, beta1, beta2, _, decay, t, _ = row
            for w, start, end in roles[WEIGHT]:
                w.add_(self._move(self._at(name, "exp_avg", start, end), self._at(name, "exp_avg_sq", start, end), row, t))
                if kind == "adamw":
                    w.div_(1 - lr * decay)
                whole[start, end] = w
            decay = 0.0 if kind == "adamw" else decay
            for (m, start, end), (v, _, _) in zip(roles["exp_avg"], roles["exp_avg_sq"], strict=True):
                w = _within(whole, start, end)
                m.sub_(w, alpha=(1 - beta1) * decay).div_(beta1)
                v.addcmul_(w, w, value=-(1 - beta2) * decay**2).clamp_(min=0).div_(beta2)
        self._settle(name)

    def _as_own_step(self, name: str, kind: str, row: list[float], kept: Kept) -> None:
        """The weights as of a step with the parameter's own count."""
        lr, decay, t = row[0], row[4], row[5] - self.run.left_out[name]
        for (w, start, end), before in zip(dict(self._parts(name))[WEIGHT], kept[WEIGHT], strict=True):
            m, v = self._at(name, "exp_avg", start, end), self._at(name, "exp_avg_sq", start, end)
            w.copy_((before * (1 - lr * decay) if kind == "adamw" else before) - self._move(m, v, row, t))
        self._settle(name)

    @staticmethod
    def _move(m: Tensor, v: Tensor, row: list[float], t: float) -> Tensor:
        """What step t of Adam takes from the weights."""
        lr, beta1, beta2, eps = row[:4]
        return (lr / (1 - beta1**t)) * m / (v.sqrt() / math.sqrt(1 - beta2**t) + eps)


def _within(parts: dict[tuple[int, int], Tensor], start: int, end: int) -> Tensor:
    return next(t[start - low : end - low] for (low, high), t in parts.items() if low <= start and end <= high)
