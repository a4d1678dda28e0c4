"""Optimizer parameter groups: which update each parameter gets. Learning rates and the like are read by the trainer,
each step.

AdamW, Adam and SGD have updates of their own. Every other optimizer is run on small parameters (pilot.py) for the ways that its step
goes: the first, those after it, a late one, and those of other settings (a weight decay that a scheduler turns on). They are the
forms of its rule. Muon and Adafactor, whose steps need whole parameters, are known by name (whole.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from interlace.capture.model_tensors import ModelTensor
from interlace.capture.pilot import Pilot, Step, refused
from interlace.capture.rules import rule_text
from interlace.capture.several import member_of, members_of, runs_itself
from interlace.capture.whole import OWN, WHOLE, Rule, whole_groups, whole_kind
from interlace.errors import CaptureError

_KINDS: dict[type, str] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
_FIRST_STEPS = 8  # that may go other ways than later ones
_LATE = (1e3, 1e5, 1e8)  # step numbers that are tried
_SIZES = ((2, 3, 2, 3, 2, 2), (5, 4, 3, 2, 3, 3), (3, 3, 3, 3, 3, 3))  # of small parameters, which are alike to what is elementwise

_WHOLE = {  # of torch.optim
    "LBFGS": "it takes products of whole gradients, and evaluates the loss again within a step",
    "SparseAdam": "it takes sparse gradients",
}

Forms = list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of an optimizer, and the one of each group."""

    rules: tuple[Rule, ...]
    of_group: tuple[int, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(_lines(self.rules))


@dataclasses.dataclass(frozen=True)
class Groups:
    kinds: list[str]  # the update of each group: "adamw", "rule 0"; behind those of the optimizer's groups the other rules of WHOLE's
    of: dict[int, int]  # the group of each trainable parameter, by id of the real tensor
    rules: tuple[str, ...] = ()  # lines of the program

    def lines(self) -> list[str]:
        return [*self.rules, *(f"group {i} {kind}" for i, kind in enumerate(self.kinds))]


def kind_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """The update of a group: "adamw", "adam" or "sgd"; the name of the class where it is a rule."""
    owner = member_of(optimizer, group)
    kind = _KINDS.get(type(owner))
    if kind is None or group.get("amsgrad"):
        return OWN if runs_itself(owner) else whole_kind(type(owner)) or type(owner).__name__
    return "adamw" if kind == "adam" and group.get("decoupled_weight_decay") else kind


def is_rule(kind: str) -> bool:
    return kind not in _KINDS.values()


def has_pilot(kind: str) -> bool:
    """Whether the numbers of the group's steps are those of the optimizer's own Python."""
    return is_rule(kind) and kind not in WHOLE


def counts_steps(kind: str) -> bool:
    """Whether a group's step depends on how many there were, in a way that the optimizer alone knows."""
    return WHOLE[kind].counts if kind in WHOLE else is_rule(kind)


def optimizer_groups(optimizer: torch.optim.Optimizer | None, tensors: list[ModelTensor]) -> Groups:
    """The update of each group, and the group of each trainable parameter. `tensors`: the model's, among them frozen parameters that it
    changes itself."""
    params = [t for t in tensors if t.kind == "param" or isinstance(t.real, torch.nn.Parameter)]
    trainable = [p for p in params if p.kind == "param" and p.real.requires_grad]
    if optimizer is None:
        return Groups(["adamw"], {id(p.real): 0 for p in trainable})
    known = {id(p.real): p for p in params}
    group_of: dict[int, int] = {}
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise CaptureError(f"optimizer group {i} has differentiable=True, which is not supported; set it to False")
        for j, p in enumerate(group["params"]):
            if id(p) not in known:
                name = group["param_names"][j] if "param_names" in group else f"number {j} of shape {tuple(p.shape)}"
                raise CaptureError(
                    f"optimizer group {i} has a parameter ({name}) that is not the model's; "
                    "make the optimizer from model.parameters() after the model is built, and what a loss learns a part of the model "
                    "(model.criterion = criterion)"
                )
            group_of[id(p)] = i
    for p in trainable:
        if id(p.real) not in group_of:
            raise CaptureError(
                f"the optimizer does not own parameter '{p.name}'; add it to a group, give interlace.compile a list of optimizers that "
                "together own all parameters, or freeze it (requires_grad=False)"
            )
    kinds = [kind_of(optimizer, group) for group in optimizer.param_groups]
    if not any(is_rule(kind) for kind in kinds):
        return Groups(kinds, group_of)
    rules: list[Rule] = []
    first = 0
    for member in members_of(optimizer):
        own = slice(first, first + len(member.param_groups))
        first = own.stop
        if any(map(has_pilot, kinds[own])):
            found = rules_of(member)
            for i, rule in zip(range(len(kinds))[own], found.of_group, strict=True):
                if is_rule(kinds[i]):
                    kinds[i] = f"rule {len(rules) + rule}"
            rules += found.rules
    first_rule: dict[str, int] = {}
    for i, step in list(whole_groups(kinds)):
        if step.kind not in first_rule:
            first_rule[step.kind] = len(rules)
            rules += step.rules
        own_rules = range(first_rule[step.kind], first_rule[step.kind] + len(step.rules))
        kinds[i] = f"rule {own_rules[0]} {step.words(optimizer.param_groups[i], len(kinds))}".rstrip()
        kinds += [f"rule {number}" for number in own_rules[1:]]
    return Groups(kinds, group_of, tuple(_lines(rules)))


# ---- rules ----

def _lines(rules: Iterable[Rule]) -> list[str]:
    return [line for i, (name, states, forms) in enumerate(rules) for line in rule_text(i, name, states, forms)]


_found: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[str, Rules]] = weakref.WeakKeyDictionary()


def small_shapes(optimizer: torch.optim.Optimizer) -> list[list[tuple[int, ...]]]:
    """A few for each number of dimensions that a group's parameters have."""
    shapes = []
    for group in optimizer.param_groups:
        dims = sorted({min(max(p.dim(), 1), len(_SIZES[0])) for p in group["params"]} or {1})
        shapes.append([sizes[:d] for d in dims for sizes in _SIZES])
    return shapes


def rules_of(optimizer: torch.optim.Optimizer) -> Rules:
    """Error: an optimizer whose step is not elementwise, or fails."""
    settings = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
    mark = repr((settings, small_shapes(optimizer), [str(p.dtype) for g in optimizer.param_groups for p in g["params"][:1]]))
    known = _found.get(optimizer)
    if known is None or known[0] != mark:
        known = _found[optimizer] = mark, _probe(optimizer)
    return known[1]


def _in_train_mode(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What `train` of an optimizer that has it, and `eval` (schedule-free ones), write into its groups and attributes now."""
    kind = type(optimizer)
    unchanged: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    if not all(callable(getattr(kind, name, None)) for name in ("train", "eval")):
        return unchanged, {}
    alone = object.__new__(kind)
    alone.__dict__.update(optimizer.__dict__, param_groups=[{**g, "params": []} for g in optimizer.param_groups], state={})
    try:
        kind.train(alone)  # type: ignore[attr-defined]
    except Exception:
        return unchanged, {}
    pairs = zip(alone.param_groups, optimizer.param_groups, strict=True)
    groups = [{k: v for k, v in new.items() if k != "params" and v is not old.get(k)} for new, old in pairs]
    others = {k: v for k, v in vars(alone).items() if k not in ("param_groups", "state") and vars(optimizer).get(k) is not v}
    return groups, others


def _probe(optimizer: torch.optim.Optimizer) -> Rules:
    inner = next((name for name, x in vars(optimizer).items() if isinstance(x, torch.optim.Optimizer)), None)
    if inner is not None:
        raise CaptureError(
            f"optimizer {type(optimizer).__name__} makes the steps of another one, its '{inner}', on parameters that that one holds; give "
            "that one to interlace.compile, and do the rest between the steps (trainer.whole_parameters)"
        )
    whole = _WHOLE.get(type(optimizer).__name__)
    if whole is not None and type(optimizer).__module__.startswith("torch.optim"):
        raise refused(optimizer, whole)
    counted, attributes = _in_train_mode(optimizer)  # what steps write into groups (Adan's count)
    first = pilot = Pilot.fresh(optimizer, small_shapes(optimizer))
    pilot.attributes.update(attributes)
    forms: list[Forms] = [[] for _ in optimizer.param_groups]

    def note(step: Step) -> Pilot:
        for known, form in zip(forms, step.forms, strict=True):
            if form.lines not in known:
                known.append(form.lines)
        return step.after

    for _ in range(_FIRST_STEPS):
        step = pilot.step(counted, check=True)
        pilot, counted = note(step), [was | now for was, now in zip(counted, step.changed, strict=True)]
    states = pilot.states()
    for start, changes in _others(optimizer, first.one_each(), pilot.one_each(), counted):
        with contextlib.suppress(Exception):  # settings that the optimizer does not take
            steps = [start.step(changes)]
            steps.append(steps[0].after.step(changes))
            if steps[1].after.states() == states:
                for step in steps:
                    note(step)
    sets = sorted({tuple(names) for names in states})
    rules: list[Rule] = []
    for one in sets:
        own: Forms = []
        for names, group_forms in zip(states, forms, strict=True):
            own += [f for f in group_forms if tuple(names) == one and f not in own]
        rules.append((type(optimizer).__name__, one, tuple(own)))
    return Rules(tuple(rules), tuple(sets.index(tuple(names)) for names in states))


def _others(
    optimizer: torch.optim.Optimizer, first: Pilot, later: Pilot, counted: list[dict[str, Any]]
) -> Iterator[tuple[Pilot, list[dict[str, Any]]]]:  # fmt: skip
    """Late steps, and steps with other settings: a number that is zero is not, or the other way round; a flag is turned."""
    for number in _LATE:
        late = later
        for i in range(len(counted)):
            scalars = {k: [number if k == "step" else v, kind] for k, (v, kind) in late.scalars(i).items()}
            late = late.with_scalars(i, scalars, later.states()[i])
        yield late, [{k: number if k == "step" else v for k, v in group.items()} for group in counted]
    for key in {k: None for g in optimizer.param_groups for k in g if k not in ("params", "param_names", "differentiable")}:
        changes = []
        for group in optimizer.param_groups:
            value = group.get(key)
            other: Any = None
            if isinstance(value, bool):
                other = not value
            elif isinstance(value, (int, float)):
                other = 0.5 if value == 0 else 0.0
            changes.append({} if other is None else {key: other})
        if any(changes):
            yield first, changes
            yield later, [was | now for was, now in zip(counted, changes, strict=True)]
