"""The torch.optim object as the source of hyper-parameters: read anew each step, so torch's schedulers work as they are.

The program's update takes one list of doubles per parameter group (docs/architecture.md); the step count t is kept here, per
group, because a group may be new or be imported from an optimizer that already made steps. A group whose optimizer is a rule of the
program gets its numbers from the optimizer's own Python (capture/pilot.py), which goes one step ahead and is followed when the
update was made.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.capture.groups import is_rule, kind_of, small_shapes
from interlace.capture.pilot import Pilot, Step, as_state
from interlace.errors import InterlaceError

Scalars = dict[str, list[Any]]  # name → [number, kind]


def uses_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of an SGD needs a momentum buffer; true for the others."""
    return type(optimizer) is not torch.optim.SGD or any(g["momentum"] != 0 for g in optimizer.param_groups)


class Hyper:
    """Step counts and hyper-parameters of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, program: Any) -> None:
        self.optimizer = optimizer
        self.steps = [0] * len(optimizer.param_groups)
        self._momentum = uses_momentum(optimizer)
        self._groups = len(optimizer.param_groups)
        self._kinds = [kind_of(optimizer, group) for group in optimizer.param_groups]
        self._fresh = Pilot.fresh(optimizer, small_shapes(optimizer)).one_each() if any(map(is_rule, self._kinds)) else None
        self._pilot = self._fresh
        self._step: Step | None = None  # that values() found
        self.not_run: set[int] = set()  # step hooks that are not the user's
        self.attach(program)

    def attach(self, program: Any) -> None:
        """From now on the rules of this program are run."""
        rules = program.rules()
        self._rules: list[Any] = [None if g["rule"] is None else rules[g["rule"]] for g in program.groups()]
        self._forms = [{} if r is None else {lines: i for i, lines in enumerate(_forms_in(r["text"]))} for r in self._rules]

    def values(self) -> list[list[float]]:
        """One list per group for the step about to run; t counts from 1. Error: groups were added, or a value cannot be run."""
        if len(self.optimizer.param_groups) != self._groups:
            raise InterlaceError(
                f"the optimizer had {self._groups} parameter groups when compiled and has {len(self.optimizer.param_groups)} now; "
                "compile again after add_param_group"
            )
        if self._pilot is not None:
            self._step = self._pilot.step()
        return [self._row(i, group, kind) for i, (group, kind) in enumerate(zip(self.optimizer.param_groups, self._kinds, strict=True))]

    def _row(self, i: int, group: dict[str, Any], kind: str) -> list[float]:
        t = float(self.steps[i] + 1)
        if is_rule(kind):
            return self._row_of_rule(i)
        if kind == "sgd":
            momentum = float(group["momentum"])
            if momentum != 0 and not self._momentum:
                raise InterlaceError(
                    f"optimizer group {i} has momentum {momentum} now, but 0 when compiled; compile again with a momentum"
                )
            row = [float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay")]
            return [*row, float(group["nesterov"]), t, float(group["maximize"])]
        if group.get("amsgrad"):
            raise InterlaceError(f"optimizer group {i} has amsgrad=True now, but not when compiled; compile again with it")
        beta1, beta2 = group["betas"]
        return [float(x) for x in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], t, group["maximize"])]

    def _row_of_rule(self, i: int) -> list[float]:
        assert self._step is not None
        form, rule = self._step.forms[i], self._rules[i]
        number = self._forms[i].get(form.lines)
        if number is None:
            raise InterlaceError(
                f"the step of {type(self.optimizer).__name__} goes another way for group {i} than any it had when compiled: a setting "
                "of the group was changed that decides what is computed; compile again with this setting"
            )
        return [float(number), *form.numbers, *[0.0] * (rule["row"] - 1 - len(form.numbers))]

    def advance(self) -> None:
        """An update was made."""
        self.steps = [t + 1 for t in self.steps]
        if self._step is not None:
            self._pilot = self._step.after
            for group, changed in zip(self.optimizer.param_groups, self._step.changed, strict=True):
                group.update(changed)
            self._step = None

    def restart(self, i: int) -> None:
        """Group i has made no step."""
        self.steps[i] = 0
        if self._pilot is not None and self._fresh is not None:
            self._pilot = self._pilot.with_group_of(self._fresh, i)

    def rule_states(self, i: int) -> tuple[str, ...]:
        return tuple(self._rules[i]["states"])

    def scalars(self, i: int) -> Scalars:
        """What a rule's optimizer keeps for group i beside its states, after the steps made: counters, products of betas."""
        return self._pilot.scalars(i) if self._pilot is not None and is_rule(self._kinds[i]) else {}

    def entry(self, i: int) -> dict[str, Any]:
        """What a torch.optim state dict has for a parameter of group i beside its states."""
        if is_rule(self._kinds[i]):
            return as_state(self.scalars(i))
        return {} if self._kinds[i] == "sgd" else {"step": torch.tensor(float(self.steps[i]))}

    def restore(self, steps: list[int], scalars: list[Scalars | None]) -> None:
        """Goes on after so many steps of each group, with what scalars() gave then."""
        for i, (count, mine) in enumerate(zip(steps, scalars, strict=True)):
            self.restart(i)
            self.steps[i] = count
            if self._pilot is not None and count > 0 and is_rule(self._kinds[i]):
                self._pilot = self._pilot.with_scalars(i, mine or {}, self._rules[i]["states"])

    def before_step(self) -> None:
        """What torch does on entry of optimizer.step()."""
        for number, hook in list(getattr(self.optimizer, "_optimizer_step_pre_hooks", {}).items()):
            if number not in self.not_run:
                hook(self.optimizer, (), {})

    def after_step(self) -> None:
        """What torch does on leaving optimizer.step(), and the mark that keeps schedulers from warning about their order."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for hook in list(getattr(self.optimizer, "_optimizer_step_post_hooks", {}).values()):
            hook(self.optimizer, (), {})

    def import_steps(self) -> bool:
        """Takes over the step counts of an optimizer that has already trained; whether there were any.

        Error: parameters of one group that have made different numbers of steps.
        """
        found = False
        for i, group in enumerate(self.optimizer.param_groups):
            counts: dict[int, int] = {}
            for j, p in enumerate(group["params"]):
                state = self.optimizer.state.get(p)
                if not state:
                    continue
                if "step" in state:
                    counts.setdefault(int(state["step"]), j)
                elif is_rule(self._kinds[i]) or state.get("momentum_buffer") is not None:
                    counts.setdefault(1, j)  # no count is kept; all that matters is that the first step is past
            if len(counts) > 1:
                listing = ", ".join(f"number {j} made {t}" for t, j in counts.items())
                raise InterlaceError(
                    f"parameters of optimizer group {i} have made different numbers of steps ({listing}); put them in groups of "
                    "their own, or start with a fresh optimizer"
                )
            if not counts:
                continue
            count, j = next(iter(counts.items()))
            found = True
            self.steps[i] = count
            if self._pilot is not None and count > 0 and is_rule(self._kinds[i]):
                p = group["params"][j]
                self._pilot = self._pilot.with_state(i, p, self.optimizer.state[p])
        return found


def _forms_in(text: str) -> list[tuple[str, ...]]:
    """The forms of a rule as the program prints it."""
    forms: list[list[str]] = []
    for line in text.splitlines():
        word = line.strip()
        if word == "form {":
            forms.append([])
        elif " = " in word:
            forms[-1].append(word)
    return [tuple(form) for form in forms]
