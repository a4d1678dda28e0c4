"""The optimizer's own step on small parameters, one step ahead of the program: which way it goes, and with which numbers.

    pilot = Pilot.fresh(optimizer, shapes)      one small parameter a group
    step = pilot.step()                         step.forms[i].numbers: what group i's rule is to be run with; step.after: the next pilot

Nothing of the user's optimizer is written: a pilot has copies of its groups, of its counters and of what it keeps for a parameter.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.capture.rules import MAX_STATES, RESERVED, Calls, Form, NotElementwise, Number, Recording, evaluate, form_of
from interlace.capture.several import step_without_hooks
from interlace.errors import CaptureError

Tensor = torch.Tensor
_PLAIN = {"foreach": False, "fused": False, "capturable": False}  # the form of a step that runs op by op
_OWN = {"params", "param_names"}


def _as_written() -> AbstractContextManager[Any]:
    """Functions that torch.compile has made run as they were written: under a mode of ours Dynamo would leave them out for good."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def refused(optimizer: torch.optim.Optimizer, why: str) -> CaptureError:
    return CaptureError(
        f"optimizer {type(optimizer).__name__} cannot run on the parts of parameters that ranks hold: {why}; a step must compute each "
        "element from that element alone, as those of torch.optim.AdamW, SGD, Adagrad and RMSprop do (whole matrices: torch.optim.Muon, "
        "Adafactor)"
    )


@dataclasses.dataclass
class Member:
    """A small parameter and what the optimizer keeps for it."""

    weight: Tensor
    state: dict[str, Any]
    made_of: dict[str, float]  # states that are there before the first step, and the number in all their elements

    @property
    def grad(self) -> Tensor:
        """Of either sign, and another for each element."""
        count = self.weight.numel()
        return (torch.linspace(-1, 1.25, count).to(self.weight.dtype) if count > 1 else torch.ones(1)).view_as(self.weight)


@dataclasses.dataclass
class Step:
    forms: list[Form]  # of the first member of each group
    after: Pilot
    changed: list[dict[str, Any]]  # what the step wrote into each group


class Pilot:
    def __init__(
        self, optimizer: torch.optim.Optimizer, members: list[list[Member]], attributes: dict[str, Any], ways: dict[Any, list[Form]],
    ) -> None:  # fmt: skip
        self.optimizer, self.members, self.attributes = optimizer, members, attributes
        self._ways = ways  # the forms of the steps that were recorded, by the calls that tell a step

    def _like(self, members: list[list[Member]], attributes: dict[str, Any]) -> Pilot:
        return Pilot(self.optimizer, members, attributes, self._ways)

    def _with(self, group: int, members: list[Member]) -> Pilot:
        return self._like([*self.members[:group], members, *self.members[group + 1 :]], self.attributes)

    @staticmethod
    def fresh(optimizer: torch.optim.Optimizer, shapes: list[list[tuple[int, ...]]]) -> Pilot:
        """Before the first step; `shapes`: of the small parameters of each group."""
        members = []
        generator = torch.Generator().manual_seed(0)
        for group, sizes in zip(optimizer.param_groups, shapes, strict=True):
            dtype = group["params"][0].dtype if group["params"] else torch.get_default_dtype()
            weights = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
            members.append([_newborn(optimizer, group, w) for w in weights])
        return Pilot(optimizer, members, {}, {})

    def one_each(self) -> Pilot:
        return self._like([group[:1] for group in self.members], self.attributes)

    def states(self) -> list[list[str]]:
        """Names of the states of each group that have an element for each of the parameter's."""
        return [[name for name, v in group[0].state.items() if _is_vector(v, group[0].weight)] for group in self.members]

    # ---- a step ----

    def step(self, changes: list[dict[str, Any]] | None = None, check: bool = False) -> Step:
        """The next step; `changes`: hyper-parameters that differ from the user's. Error: what is not elementwise.

        With `check`, all members of a group must go the same way with the same numbers, and what the forms give must be what the
        optimizer has computed."""
        groups, parameters, states = self._copied(changes)
        vectors = [
            {"w": p, "g": p.grad, **{name: v for name, v in states[p].items() if _is_vector(v, p)}} for mine in parameters for p in mine
        ]
        calls = Calls([t for named in vectors for t in named.values()])
        before = [{name: t.detach().clone() for name, t in named.items()} for named in vectors] if check else []
        optimizer = self._run(groups, states, calls)
        key = tuple(calls.key), tuple(tuple(named) for named in vectors), tuple(bool(m.made_of) for g in self.members for m in g)
        if key not in self._ways:
            self._ways[key] = self._recorded(changes)
        found = [Form(f.lines, [_now(x, calls) for x in f.numbers], f.ops) for f in self._ways[key]]
        forms, first = [], 0
        for i, mine in enumerate(parameters):
            own = slice(first, first + len(mine))
            first = own.stop
            if check:
                self._check(i, found[own], [(p, b, states[p]) for p, b in zip(mine, before[own], strict=True)])
            forms.append(found[own.start])
        members = [[Member(p.detach(), states[p], {}) for p in mine] for mine in parameters]
        attributes = {k: v for k, v in optimizer.__dict__.items() if self.optimizer.__dict__.get(k) is not v and k not in _MACHINERY}
        changed = [
            {k: v for k, v in group.items() if k not in _OWN and k not in _PLAIN and (k not in was or _differs(v, was[k]))}
            for group, was in zip(groups, self._groups(changes), strict=True)
        ]
        return Step(forms, self._like(members, attributes), changed)

    def _recorded(self, changes: list[dict[str, Any]] | None) -> list[Form]:
        """The form of each member, from a step under the eyes of a recording."""
        groups, parameters, states = self._copied(changes)
        recording = Recording()
        known: list[tuple[Tensor, dict[int, str]]] = []
        for mine, members in zip(parameters, self.members, strict=True):
            for p, member in zip(mine, members, strict=True):
                assert p.grad is not None
                initials = {recording.declare(p): "w", recording.declare(p.grad): "g"}
                for name, v in states[p].items():
                    if _is_vector(v, p):
                        value = recording.declare(v, member.made_of.get(name))
                        if name not in member.made_of:
                            initials[value] = name
                known.append((p, initials))
        self._run(groups, states, recording)
        return [self._form(recording, p, initials, states[p]) for p, initials in known]

    def _groups(self, changes: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        more = changes or [{} for _ in self.members]
        return [{**g, **c} for g, c in zip(self.optimizer.param_groups, more, strict=True)]

    def _copied(
        self, changes: list[dict[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[list[torch.nn.Parameter]], dict[Tensor, dict[str, Any]]]:
        """The groups, small parameters and states of a step, which it may write."""
        groups: list[dict[str, Any]] = []
        parameters = []
        states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for group, members in zip(self._groups(changes), self.members, strict=True):
            mine = [torch.nn.Parameter(m.weight.clone()) for m in members]
            for p, m in zip(mine, members, strict=True):
                p.grad = m.grad.clone()
                states[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in m.state.items()}
            plain = {k: v for k, v in _PLAIN.items() if k in group}
            kept = {k: list(v) if isinstance(v, list) else v for k, v in group.items() if k not in _OWN}
            groups.append({**kept, **plain, "params": mine})
            parameters.append(mine)
        return groups, parameters, states

    def _run(self, groups: list[dict[str, Any]], states: Any, mode: TorchDispatchMode) -> torch.optim.Optimizer:
        """The class's own step, on an object that has the user's attributes and none of their hooks."""
        kind = type(self.optimizer)
        optimizer = object.__new__(kind)
        optimizer.__dict__.update(self.optimizer.__dict__, **self.attributes)
        optimizer.__dict__.pop("step", None)  # what schedulers put round it
        optimizer.param_groups, optimizer.state = groups, states
        step = step_without_hooks(kind)
        try:
            with torch.no_grad(), _as_written(), mode:
                step(optimizer)
        except NotElementwise as e:
            raise refused(self.optimizer, _said(str(e))) from None
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, ValueError, AssertionError) as e:
            raise refused(self.optimizer, f"its step fails on a small parameter ({type(e).__name__}: {e})") from e
        return optimizer

    def _form(self, recording: Recording, p: Tensor, initials: dict[int, str], state: dict[str, Any]) -> Form:
        finals: dict[str, int] = {}
        for name, t in [("w", p), *state.items()]:
            if not isinstance(t, Tensor):
                continue
            value = recording.value_of(t)
            if value is None and name != "w":
                continue
            if value is None or t.dtype != p.dtype or t.shape != p.shape:
                what = "the parameter" if name == "w" else f"its state '{name}'"
                raise refused(self.optimizer, f"{what} becomes {str(t.dtype).removeprefix('torch.')}{list(t.shape)}")
            if name != "w" and (RESERVED.fullmatch(name) or not name.isidentifier() or not name.isascii()):
                raise refused(self.optimizer, f"a state cannot be called '{name}' in a program")
            finals[name] = value
        if len(finals) > 1 + MAX_STATES:
            raise refused(self.optimizer, f"it keeps {len(finals) - 1} states for a parameter, {MAX_STATES} are possible")
        try:
            return form_of(recording.ops, finals, initials)
        except NotElementwise as e:
            raise refused(self.optimizer, _said(str(e))) from None

    def _check(self, group: int, forms: list[Form], members: list[tuple[Tensor, dict[str, Tensor], dict[str, Any]]]) -> None:
        if any(f.lines != forms[0].lines or f.numbers != forms[0].numbers for f in forms):
            raise refused(
                self.optimizer, f"parameters of group {group} that differ in shape alone get other steps (put matrices and vectors into "
                "groups of their own, if it is that they have other numbers of dimensions)"
            )  # fmt: skip
        names = members[0][1].keys()
        flat = {name: torch.cat([before[name].reshape(-1) for _, before, _ in members]) for name in names}
        if not all(before.keys() == names for _, before, _ in members):
            raise refused(self.optimizer, "it keeps other states for parameters of another shape")
        got = evaluate(forms[0], flat)
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(flat["w"].dtype, 5e-2)
        for name in ("w", *self._vectors(members[0])):
            want = torch.cat([(p if name == "w" else state[name]).detach().reshape(-1) for p, _, state in members])
            if name not in got or not torch.allclose(got[name], want, rtol=tolerance, atol=tolerance, equal_nan=True):
                raise refused(self.optimizer, "what it computes is not what its ops on single elements give")

    @staticmethod
    def _vectors(member: tuple[Tensor, dict[str, Tensor], dict[str, Any]]) -> list[str]:
        return [name for name, v in member[2].items() if _is_vector(v, member[0])]

    # ---- what is neither weight nor state of a parameter ----

    def scalars(self, group: int) -> dict[str, list[Any]]:
        """Counters and the like that the optimizer keeps for a parameter of the group, as JSON has them: [number, kind]."""
        member = self.members[group][0]
        return as_scalars({name: v for name, v in member.state.items() if not _is_vector(v, member.weight)})

    def with_group_of(self, other: Pilot, group: int) -> Pilot:
        """With another pilot's parameter for a group."""
        return self._with(group, other.members[group])

    def with_state(self, group: int, p: Tensor, state: dict[str, Any]) -> Pilot:
        """A pilot whose group goes on with what the optimizer has kept for its parameter `p`."""
        old = self.members[group][0]
        mine: dict[str, Any] = {}
        for name, v in state.items():
            vector = isinstance(v, Tensor) and v.shape == p.shape and not (v.dim() == 0 and name == "step")
            mine[name] = torch.ones_like(old.weight) if vector else v.detach().cpu().clone() if isinstance(v, Tensor) else v
        return self._with(group, [Member(old.weight, mine, {})])

    def with_scalars(self, group: int, scalars: dict[str, list[Any]], states: list[str]) -> Pilot:
        """A pilot whose group has made steps: with these numbers and states."""
        old = self.members[group][0]
        state = {**as_state(scalars), **{name: torch.ones_like(old.weight) for name in states}}
        return self._with(group, [Member(old.weight, state, {})])


_MACHINERY = {"param_groups", "state", "step"}


def as_scalars(entry: dict[str, Any]) -> dict[str, list[Any]]:
    """The numbers of a parameter's state, which has no other tensors: name → [number, kind]."""
    found = {}
    for name, v in entry.items():
        if isinstance(v, Tensor):
            found[name] = [v.item(), str(v.dtype).removeprefix("torch.")]
        elif isinstance(v, (bool, int, float)):
            found[name] = [v, type(v).__name__]
    return found


def as_state(scalars: dict[str, list[Any]]) -> dict[str, Any]:
    """What scalars() gave, as the optimizer has it."""
    plain = {"bool": bool, "int": int, "float": float}
    return {
        name: plain[kind](number) if kind in plain else torch.tensor(number, dtype=getattr(torch, kind))
        for name, (number, kind) in scalars.items()
    }


def _newborn(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: Tensor) -> Member:
    """With what an optimizer makes when it is made; only Adagrad does in torch."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return Member(weight, {}, {})
    first = float(group["initial_accumulator_value"])
    step = torch.tensor(0.0, dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)
    return Member(weight, {"step": step, "sum": torch.full_like(weight, first)}, {"sum": first})


def _is_vector(v: Any, weight: Tensor) -> bool:
    return isinstance(v, Tensor) and v.shape == weight.shape


def _now(x: float, calls: Calls) -> float:
    """A number of a recorded step as it is in the one at hand."""
    return x.sign * calls.numbers[x.call, x.argument] if isinstance(x, Number) else x


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return not (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
    return bool(a != b)


def _said(what: str) -> str:
    if what == "aten._local_scalar_dense":
        return "it reads a number out of a parameter, a gradient or a state"
    return f"its step uses {what}"
