"""A compiled optimizer and model in somebody else's hands: what would do nothing, or train beside the trainer, says so.

    optimizer.step()              error: trainer.step(batch) makes the steps
    optimizer.state_dict()        one rank: the trainer's; several: error, trainer.optimizer_state_dict() gathers it on every rank
    optimizer.load_state_dict(s)  goes into the trainer, on every rank alike
    optimizer.state.clear()       begins the states anew, at the next step, on every rank alike; so does another empty dict in its place
    optimizer.train(), .eval()    of schedule-free optimizers, on what the trainer has (modes.py)
    loss.backward()               warning, once: these gradients are not the trainer's
    update_and_allocate(step)     error: AdaLoRA's reads gradients

Everything is taken off when the trainer closes.
"""

from __future__ import annotations

import collections
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from interlace.capture.groups import is_rule
from interlace.capture.model_tensors import OWN_HOOK, collect
from interlace.capture.pilot import as_scalars
from interlace.capture.released import Released, user_line
from interlace.capture.several import member_of, members_of, runs_itself
from interlace.errors import InterlaceError
from interlace.train import state_dicts
from interlace.train.hyper import OWN_COUNTS
from interlace.train.laid_by import LaidBy, states_of
from interlace.train.modes import Modes, has_modes
from interlace.train.own_steps import WholeLoads
from interlace.train.run import Run

Tensor = torch.Tensor


class _State(collections.defaultdict):  # type: ignore[type-arg]
    """An optimizer's `state`, which is empty: the trainer has the states."""

    cleared = False

    def clear(self) -> None:
        self.cleared = True
        super().clear()


class Ownership:
    """The hooks of one trainer. They hold it weakly: a trainer that nobody has any more is no reason to refuse."""

    def __init__(self, run: Run) -> None:
        self._run = weakref.ref(run)
        self._warned = False
        self._handles: list[Any] = []
        for optimizer in members_of(run.optimizer):
            if has_modes(optimizer):
                self._handles.append(Modes(run, optimizer))
            if runs_itself(optimizer):
                self._handles.append(WholeLoads(run, optimizer))
            if runs_itself(optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                continue  # a wrapper that has not made itself an optimizer
            step = optimizer.register_step_pre_hook(self._on_step)
            run.hyper.not_run.add(step.id)
            self._handles.append(step)
            if runs_itself(optimizer):
                continue
            self._handles += [
                optimizer.register_state_dict_post_hook(self._on_state_dict),
                optimizer.register_load_state_dict_pre_hook(self._on_load), optimizer.register_load_state_dict_post_hook(_keep),
            ]  # fmt: skip
            _keep(optimizer)
        self._handles += [AdaLora(run, m) for m in run.model.modules() if hasattr(m, "update_and_allocate")]
        on_gradient = self._on_gradient

        def watch(parameter: Tensor) -> None:
            on_gradient(parameter)

        setattr(watch, OWN_HOOK, True)
        for t in collect(run.model):
            if t.kind == "param" and t.real.requires_grad and t.real.is_leaf and not isinstance(t.real, Released):
                self._handles.append(t.real.register_post_accumulate_grad_hook(watch))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self) -> None:
        """Optimizers whose `state` was emptied begin anew. Every rank must have done it."""
        run = self._run()
        others = [o for o in members_of(run.optimizer) if not runs_itself(o)] if run is not None else []
        anew = [o for o in others if not isinstance(o.state, _State) or o.state.cleared]
        if run is None or not anew:
            return
        if any(o.state for o in anew):
            raise InterlaceError("optimizer.state has entries that the trainer does not know; give them with optimizer.load_state_dict(...)")
        groups = [i for i, group in enumerate(run.optimizer.param_groups) if member_of(run.optimizer, group) in anew]
        run.flush()
        run.settle_save()
        run.agree(f"optimizer.state emptied at step {run.steps}", lambda: lambda: None)
        for i in groups:
            run.hyper.restart(i)
        for role, _, p in run.states.updated(run.roles()):
            if p.group in groups:
                run.states.fill_from(p.name, role, torch.zeros(p.shape, dtype=torch.float32))
        anew_names = {name for i in groups for name in run.names_of_group(i)}
        run.left_out = {name: n for name, n in run.left_out.items() if name not in anew_names}
        for optimizer in anew:
            _keep(optimizer)
        run.laid_by = {name: laid for name, laid in run.laid_by.items() if name not in anew_names}

    def _live(self) -> Run | None:
        run = self._run()
        return run if run is not None and run.closed is None else None

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._live() is not None:
            raise InterlaceError(
                f"{user_line()}: step() of an optimizer that interlace.compile was given; trainer.step(batch) computes the gradients and "
                "makes the step (leave out backward(), step() and zero_grad()); for a loop of your own, call trainer.close() first"
            )

    def _on_gradient(self, parameter: Tensor) -> None:
        run = self._live()
        if run is not None and run.lent is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{user_line()}: backward() through a model that interlace.compile was given, in eager mode; trainer.step(batch) trains it, "
                "and these gradients are not the trainer's (for a loop of your own, call trainer.close() first)", stacklevel=2,
            )  # fmt: skip

    def _on_state_dict(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any] | None:
        run = self._live()
        if run is None:
            return None
        if run.world_size > 1:
            raise InterlaceError(
                f"{user_line()}: state_dict() of an optimizer whose states are in a trainer, a part on each rank; call "
                "trainer.optimizer_state_dict() on every rank (whole on rank 0, or everywhere with all_ranks=True), or trainer.save(folder)"
            )
        return _of_member(optimizer, run, state_dicts.optimizer_state_dict(run))

    def _on_load(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        """The states go into the trainer; torch then sets the hyper-parameters."""
        run = self._live()
        if run is None:
            return None
        if optimizer is not run.optimizer:
            raise InterlaceError(
                f"{user_line()}: load_state_dict() of one of several optimizers that interlace.compile was given; load it before compile, or "
                "trainer.load(folder) takes all of them"
            )
        load_optimizer_state(run, given)
        return {**given, "state": {}}


class AdaLora:
    """Has peft's AdaLoRA say that it needs gradients, where it would fail on None."""

    def __init__(self, run: Run, module: Any) -> None:
        here, allocate = weakref.ref(run), module.update_and_allocate

        def refused(*args: Any, **kwargs: Any) -> Any:
            run = here()
            if run is None or run.closed is not None:
                return allocate(*args, **kwargs)
            raise InterlaceError(
                f"{user_line()}: update_and_allocate() ranks parameters by their gradients, which are in the program (p.grad is None); train "
                "with all ranks that there are (leave the call out), with peft's LoraConfig, or in a loop of your own (trainer.close() first)"
            )

        self._module, module.update_and_allocate = module, refused

    def remove(self) -> None:
        vars(self._module).pop("update_and_allocate", None)


def _keep(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = _State(dict, optimizer.state)


def _of_member(optimizer: torch.optim.Optimizer, run: Run, whole: dict[str, Any]) -> dict[str, Any]:
    """What a state dict of all optimizers has of one of them, numbered as torch does."""
    pairs = zip(whole["param_groups"], run.optimizer.param_groups, strict=True)
    mine = [kept for kept, group in pairs if member_of(run.optimizer, group) is optimizer]
    numbers = {n: i for i, n in enumerate(n for group in mine for n in group["params"])}
    return {
        "state": {numbers[n]: entry for n, entry in whole["state"].items() if n in numbers},
        "param_groups": [{**group, "params": [numbers[n] for n in group["params"]]} for group in mine],
    }


def load_optimizer_state(run: Run, given: dict[str, Any]) -> None:
    """Takes the states of an optimizer's state dict, which every rank gives whole. Error, with nothing changed: of another optimizer."""
    run.check_open()
    run.flush()
    run.settle_save()
    where = user_line()

    def check() -> Callable[[], None]:
        try:
            return _checked(run, given)
        except InterlaceError as e:
            raise InterlaceError(f"{where}: {e}") from e

    run.agree(f"optimizer.load_state_dict at step {run.steps}", check, InterlaceError)()


def _checked(run: Run, given: dict[str, Any]) -> Callable[[], None]:
    groups, state = given["param_groups"], given["state"]
    sizes, ours = [len(g["params"]) for g in groups], [len(g["params"]) for g in run.optimizer.param_groups]
    if sizes != ours:
        raise InterlaceError(f"the state dict is of another optimizer: groups of {sizes} parameters there, {ours} here")
    entries: dict[str, dict[str, Any]] = {}
    steps: list[int] = []
    scalars: list[Any] = []
    left_out: dict[str, int] = {}
    laid_by: dict[str, LaidBy] = {}
    known = len(run.hyper.steps)  # the others were added since the last step
    if any(state.get(index) for group in groups[known:] for index in group["params"]):
        raise InterlaceError(
            f"the state dict has states of optimizer group {known}, which add_param_group has added since the last step: make a step with it "
            "before, or compile with an optimizer that has all groups"
        )
    for i, group in enumerate(groups[:known]):
        names = run.names_of_group(i)
        frozen = {name: p for name, p in run.frozen().items() if name in names}
        counts: dict[int, str] = {}
        kept: dict[str, Any] | None = None
        for name, index in zip(names, group["params"], strict=True):
            entry = entries[name] = state.get(index, {})
            if entry and (name not in frozen or len(frozen) == len(names)):
                counts.setdefault(int(entry.get("step", 1)), name)
                kept = kept or {k: v for k, v in entry.items() if k not in run.state_names(i)}
        most = max(counts, default=0)
        if run.kind_of(i) in OWN_COUNTS:
            made = {n: int(entries[n].get("step", most)) for n in names if entries[n] and n not in frozen}
            left_out |= {n: most - t for n, t in made.items() if t < most}
        elif len(counts) > 1:
            (a, first), (b, second) = list(counts.items())[:2]
            raise InterlaceError(
                f"parameters of optimizer group {i} have made different numbers of steps ('{first}' {a}, '{second}' {b}); put them in "
                "groups of their own"
            )
        steps.append(most)
        for name, parameter in frozen.items():
            states = states_of(entries[name], parameter, run.state_names(i))
            count = int(entries[name].get("step", most or 1)) if states else 0
            if run.config.mode == "eager" and count < most:  # whose program has it in any case
                left_out[name] = most - count
            if count > 0:
                others = as_scalars({k: v for k, v in entries[name].items() if k not in states})
                laid_by[name] = run.hyper.laid_by(i, count, others, list(states))
        scalars.append(as_scalars(kept) if kept is not None and is_rule(run.kind_of(i)) else None)
    for p in run.states.everything:
        for role in p.roles:
            t = entries.get(p.name, {}).get(role)
            if isinstance(t, Tensor) and tuple(t.shape) != p.shape_of(role):
                raise InterlaceError(f"{role} of '{p.name}' has shape {tuple(t.shape)} in the state dict, {p.shape_of(role)} here")
            wanted = p.group is not None and steps[p.group] > 0 and role in run.state_names(p.group) and role != "momentum_buffer"
            if t is None and wanted and p.name not in run.frozen():
                raise InterlaceError(f"the state dict is of another optimizer: it has no {role} of '{p.name}'")

    def fill() -> None:
        for role, _, p in run.states.updated(run.roles()):
            t = entries.get(p.name, {}).get(role)
            run.states.fill_from(p.name, role, t if t is not None else torch.zeros(p.shape, dtype=torch.float32))
        run.hyper.restore(steps, scalars)
        run.left_out = left_out
        if run.config.mode == "eager":
            run.behind = {name: laid for name, laid in laid_by.items() if name in left_out}
            return
        run.laid_by = laid_by
        for name, laid in laid_by.items():
            for role in laid.roles:
                laid.put_whole(run, role, entries[name][role])

    return fill
