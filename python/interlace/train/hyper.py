"""The torch.optim object as the source of hyper-parameters: read anew each step, so torch's schedulers work as they are.

The program's update takes one list of doubles per parameter group (docs/architecture.md); the step count t is kept here, per
group, because a group may be new or be imported from an optimizer that already made steps. A group whose optimizer is a rule of the
program gets its numbers from the optimizer's own Python (capture/pilot.py), which goes one step ahead and is followed when the
update was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from interlace.capture.groups import counts_steps, has_pilot, is_rule, kind_of, small_shapes
from interlace.capture.pilot import Pilot, Step, as_state
from interlace.capture.reach import mentions
from interlace.capture.several import members_of
from interlace.capture.whole import OWN, WHOLE, whole_groups
from interlace.errors import InterlaceError
from interlace.train.laid_by import LaidBy

Scalars = dict[str, list[Any]]  # name → [number, kind]


def uses_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of an SGD needs a momentum buffer; true for the others."""
    return any(type(m) is not torch.optim.SGD or any(g["momentum"] != 0 for g in m.param_groups) for m in members_of(optimizer))


# Names that have "grad" in them and read none.
_OF_GRAD_MODE = {"no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad", "requires_grad_", "zero_grad"}


OWN_COUNTS = ("adam", "adamw")  # of which a parameter may have made fewer steps than its group (unused.py)


@dataclasses.dataclass
class _Piloted:
    """An optimizer whose own Python gives the numbers of its groups."""

    first: int  # its first group
    count: int
    fresh: Pilot
    pilot: Pilot  # after the steps made
    step: Step | None = None  # that values() found


class Hyper:
    """Step counts and hyper-parameters of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, program: Any) -> None:
        self.optimizer = optimizer
        self.steps = [0] * len(optimizer.param_groups)
        self._momentum = uses_momentum(optimizer)
        self._groups = _members(optimizer)
        self._kinds = [kind_of(optimizer, group) for group in optimizer.param_groups]
        self._piloted: list[_Piloted] = []
        first = 0
        for member in members_of(optimizer):
            count = len(member.param_groups)
            if any(map(has_pilot, self._kinds[first : first + count])):
                fresh = Pilot.fresh(member, small_shapes(member)).one_each()
                self._piloted.append(_Piloted(first, count, fresh, fresh))
            first += count
        self._words = {i: step.words(optimizer.param_groups[i], 0) for i, step in whole_groups(self._kinds)}
        self.not_run: set[int] = set()  # step hooks that are not the user's
        self.attach(program)

    def attach(self, program: Any) -> None:
        """From now on the rules of this program are run."""
        self._program, rules = program, program.rules()
        self._rules: list[Any] = [None if g["rule"] is None else rules[g["rule"]] for g in program.groups()]
        self._forms = [{} if r is None else {lines: i for i, lines in enumerate(_forms_in(r["text"]))} for r in self._rules]

    @property
    def added(self) -> int:
        """Groups that the program does not know (add_param_group)."""
        return len(self.optimizer.param_groups) - len(self._groups)

    def take_groups(self) -> None:
        """The groups that were added have made no step; the next program has them. Error: they are not behind the others, or of a kind that
        makes other programs of the rest."""
        now = Hyper(self.optimizer, self._program)
        if now._groups[: len(self._groups)] != self._groups or now._momentum != self._momentum or OWN in now._kinds:
            self._refuse_groups()
        for i, steps in enumerate(self.steps):
            now.resume(i, steps, self.pilot_of(i))
        vars(self).update(vars(now) | {"not_run": self.not_run})

    def _refuse_groups(self) -> None:
        raise InterlaceError(
            f"the optimizer had {len(self._groups)} parameter groups when compiled and has {len(self.optimizer.param_groups)} now; compile "
            "again after add_param_group, or give it all groups before, those that begin later with requires_grad=False"
        )

    def values(self) -> list[list[float]]:
        """One list per group for the step about to run; t counts from 1. Error: groups were added, or a value cannot be run."""
        if self.added:  # in mode="eager", or for an evaluation before the next step
            self._refuse_groups()
        for piloted in self._piloted:
            try:
                piloted.step = piloted.pilot.step()
            except InterlaceError:
                raise
            except Exception as e:  # its own: in the mode of evaluations, say
                raise InterlaceError(f"step() of {type(piloted.pilot.optimizer).__name__} fails: {e}") from e
        rows = [self._row(i, group, kind) for i, (group, kind) in enumerate(zip(self.optimizer.param_groups, self._kinds, strict=True))]
        behind = [row for i in self._words for row in self._of_whole(i)[1:]]
        return rows + [self._padded(len(rows) + i, row) for i, row in enumerate(behind)]

    def idle(self, program: Any) -> list[list[float]]:
        """Those of a program that makes no step, in which an optimizer's own Python may have none (optimizer.eval())."""
        if self.added:
            self._refuse_groups()
        rules = program.rules()
        return [[1.0] * 7 if g["rule"] is None else [0.0] * rules[g["rule"]]["row"] for g in program.groups()]

    def _of_whole(self, i: int) -> list[list[float]]:
        return WHOLE[self._kinds[i]].numbers(self.optimizer.param_groups[i], self.steps[i] + 1)

    def _padded(self, i: int, row: list[float]) -> list[float]:
        """As long as the longest form of the group's rule."""
        return [*row, *[0.0] * (self._rules[i]["row"] - len(row))]

    def _piloted_of(self, i: int) -> _Piloted | None:
        """Of group i, if it has a pilot."""
        if not has_pilot(self._kinds[i]):
            return None
        return next(p for p in self._piloted if p.first <= i < p.first + p.count)

    def _row(self, i: int, group: dict[str, Any], kind: str) -> list[float]:
        t = float(self.steps[i] + 1)
        if kind in WHOLE:
            if WHOLE[kind].words(group, 0) != self._words[i]:
                raise InterlaceError(f"optimizer group {i} has other {WHOLE[kind].fixed} now than when compiled; compile again with them")
            return self._padded(i, self._of_whole(i)[0])
        if is_rule(kind):
            return self._row_of_rule(i)
        if kind == "sgd":
            momentum = float(group["momentum"])
            if momentum != 0 and not self._momentum:
                raise InterlaceError(f"optimizer group {i} has momentum {momentum} now, but 0 when compiled; compile again with a momentum")
            row = [float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay")]
            return [*row, float(group["nesterov"]), t, float(group["maximize"])]
        if group.get("amsgrad"):
            raise InterlaceError(f"optimizer group {i} has amsgrad=True now, but not when compiled; compile again with it")
        beta1, beta2 = group["betas"]
        return [float(x) for x in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], t, group["maximize"])]

    def _row_of_rule(self, i: int) -> list[float]:
        piloted = self._piloted_of(i)
        assert piloted is not None and piloted.step is not None
        form = piloted.step.forms[i - piloted.first]
        number = self._forms[i].get(form.lines)
        if number is None:
            raise InterlaceError(
                f"the step of {self._kinds[i]} goes another way for group {i} than any it had when compiled: a setting "
                "of the group was changed that decides what is computed; compile again with this setting"
            )
        return self._padded(i, [float(number), *form.numbers])

    def advance(self, idle: Collection[int] = ()) -> None:
        """An update was made, but for groups of which no parameter has a gradient."""
        self.steps = [t + (i not in idle) for i, t in enumerate(self.steps)]
        groups = self.optimizer.param_groups
        for piloted in self._piloted:
            if piloted.step is not None:
                before, piloted.pilot = piloted.pilot, piloted.step.after
                for i in range(piloted.count):
                    if piloted.first + i in idle:
                        piloted.pilot = piloted.pilot.with_group_of(before, i)
                for i, changed in enumerate(piloted.step.changed):
                    groups[piloted.first + i].update(changed)
                piloted.step = None

    def restart(self, i: int) -> None:
        """Group i has made no step."""
        self.steps[i] = 0
        if (piloted := self._piloted_of(i)) is not None:
            piloted.pilot = piloted.pilot.with_group_of(piloted.fresh, i - piloted.first)

    def pilot_of(self, i: int) -> Pilot | None:
        piloted = self._piloted_of(i)
        return None if piloted is None else piloted.pilot

    def resume(self, i: int, steps: int, pilot: Pilot | None) -> None:
        """Group i goes on after so many steps, and as this pilot knows it."""
        self.steps[i] = steps
        if pilot is not None and (piloted := self._piloted_of(i)) is not None:
            piloted.pilot = piloted.pilot.with_group_of(pilot, i - piloted.first)

    def counts_steps(self, i: int) -> bool:
        """Whether group i's step depends on how many there were, in a way that the optimizer alone knows."""
        piloted = self._piloted_of(i)
        if piloted is None:
            return counts_steps(self._kinds[i])
        now = piloted.pilot.step()
        next_one = now.after.step().forms[i - piloted.first]
        return (next_one.lines, next_one.numbers) != (now.forms[i - piloted.first].lines, now.forms[i - piloted.first].numbers)

    def rule_states(self, i: int) -> tuple[str, ...]:
        kind = self._kinds[i]
        if kind in WHOLE:
            return WHOLE[kind].states
        return tuple(self._rules[i]["states"]) if i < len(self._rules) else ()  # which has just been added

    def scalars(self, i: int, laid: LaidBy | None = None) -> Scalars:
        """What a rule's optimizer keeps for group i (or what is laid by of it) beside its states, after the steps made: counters, products
        of betas."""
        if self._kinds[i] in WHOLE:
            made = self.steps[i] if laid is None else laid.made
            return {"step": [float(made), "float32"]} if WHOLE[self._kinds[i]].counts else {}
        piloted = self._piloted_of(i)
        return (piloted.pilot if laid is None else laid.pilot).scalars(i - piloted.first) if piloted is not None else {}

    def entry(self, i: int, laid: LaidBy | None = None) -> dict[str, Any]:
        """What a torch.optim state dict has for a parameter of group i (or what is laid by of it) beside its states."""
        if is_rule(self._kinds[i]):
            return as_state(self.scalars(i, laid))
        made = self.steps[i] if laid is None else laid.made
        return {} if self._kinds[i] == "sgd" else {"step": torch.tensor(float(made))}

    def laid_by(self, i: int, made: int, scalars: Scalars, states: list[str]) -> LaidBy:
        """Of a parameter of group i after so many steps, with what scalars() gave then."""
        piloted = self._piloted_of(i)
        return LaidBy(made, None if piloted is None else piloted.fresh.with_scalars(i - piloted.first, scalars, states), states)

    def check(self, steps: list[int], scalars: list[Scalars | None]) -> None:
        """What restore() would raise, before it changes anything."""
        for i, (count, mine) in enumerate(zip(steps, scalars, strict=True)):
            if (piloted := self._piloted_of(i)) is not None and count > 0:
                piloted.fresh.with_scalars(i - piloted.first, mine or {}, self._rules[i]["states"])

    def restore(self, steps: list[int], scalars: list[Scalars | None]) -> None:
        """Goes on after so many steps of each group, with what scalars() gave then."""
        for i, (count, mine) in enumerate(zip(steps, scalars, strict=True)):
            self.restart(i)
            self.steps[i] = count
            if (piloted := self._piloted_of(i)) is not None and count > 0:
                piloted.pilot = piloted.pilot.with_scalars(i - piloted.first, mine or {}, self._rules[i]["states"])

    def before_step(self) -> None:
        """What torch does on entry of optimizer.step()."""
        for member in members_of(self.optimizer):
            for number, hook in list(getattr(member, "_optimizer_step_pre_hooks", {}).items()):
                if number in self.not_run:
                    continue
                code = getattr(hook, "__code__", getattr(getattr(hook, "__func__", None), "__code__", None))
                if code is not None and any("grad" in name for name in mentions(code) - _OF_GRAD_MODE):
                    raise InterlaceError(
                        f"{code.co_filename}:{code.co_firstlineno}: this hook before the optimizer's step reads gradients, which are in the "
                        "program (p.grad is None); Config(clip_norm=...) clips them, and a hook on the loss's inputs can change them"
                    )
                hook(member, (), {})

    def after_step(self) -> None:
        """What torch does on leaving optimizer.step(), and the mark that keeps schedulers from warning about their order."""
        for member in members_of(self.optimizer):
            member._opt_called = True  # type: ignore[attr-defined]
            for hook in list(getattr(member, "_optimizer_step_post_hooks", {}).values()):
                hook(member, (), {})

    def import_steps(self) -> dict[int, int] | None:
        """Takes over the step counts of an optimizer that has already trained. None: there were none; else what parameters, by their ids,
        have made fewer than their group.

        Error: such parameters of an optimizer that is none of OWN_COUNTS.
        """
        behind: dict[int, int] = {}
        found = False
        states = self.optimizer.state
        for i, group in enumerate(self.optimizer.param_groups):
            counts: dict[int, int] = {}
            for j, p in enumerate(group["params"] if self._kinds[i] != OWN else ()):
                state = states.get(p)
                if not state or (not p.requires_grad and any(q.requires_grad for q in group["params"])):
                    continue
                if "step" in state:
                    counts.setdefault(int(state["step"]), j)
                elif is_rule(self._kinds[i]) or state.get("momentum_buffer") is not None:
                    counts.setdefault(1, j)  # no count is kept; all that matters is that the first step is past
            if self._kinds[i] in OWN_COUNTS and counts:
                most = max(counts)
                counts = {most: counts[most]}
                made = {id(p): int(states[p]["step"]) if states.get(p) else 0 for p in group["params"] if p.requires_grad}
                behind |= {p: most - n for p, n in made.items() if n < most}
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
            if (piloted := self._piloted_of(i)) is not None and count > 0:
                p = group["params"][j]
                piloted.pilot = piloted.pilot.with_state(i - piloted.first, p, states[p])
        return behind if found else None


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The parameters of each group, by their ids."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


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
