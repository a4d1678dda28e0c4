"""Steps of optimizers that no program makes: their own Python makes them, on whole parameters and gradients.

    LAMB, SAM, Lookahead, LBFGS, transformers' Adafactor     norms of whole parameters, another optimizer inside, the loss once more
    SparseAdam                                               the rows that have a gradient

The program keeps each gradient, averaged and clipped, as a state. Where every rank holds parameters and gradients whole (one rank, replicate)
they are what the optimizer sees; else they are gathered on every rank, which holds all of them for the time of the step.
"""

from __future__ import annotations

import inspect
import json
import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from interlace.capture.groups import has_pilot, kind_of, rules_of
from interlace.capture.model_tensors import collect
from interlace.capture.several import members_of, run_itself, runs_itself, step_without_hooks
from interlace.capture.whole import GRADIENT
from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.optimizer import back, plain
from interlace.checkpoint.tensor_file import CheckpointError, DamageError
from interlace.compiling.states import WEIGHT
from interlace.config import Config
from interlace.errors import UNREADABLE, CaptureError
from interlace.train.materialize import point_at
from interlace.train.run import Run
from interlace.train.whole import whole_parameters

Tensor = torch.Tensor
log = logging.getLogger("interlace")
FILE = "own_optimizers.safetensors"  # of a checkpoint: the tensors of their state dicts, and in the header all else as JSON


def let_run(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Has those members run themselves whose steps are not elementwise. Error: parameters are cut, or elsewhere."""
    for member in members_of(optimizer):
        if runs_itself(member) or not any(has_pilot(kind_of(member, group)) for group in member.param_groups):
            continue
        try:
            rules_of(member)
        except CaptureError as e:
            if config.tensor_ranks > 1 or config.stage_ranks > 1 or config.mode == "eager" or config.tier is not None:
                raise CaptureError(f'{e}; without a tier, mode="eager" and axes tp and pp it makes its own steps, on whole parameters') from e
            run_itself(member)
            log.info("%s makes its own steps: %s", type(member).__name__, str(e).partition("; ")[0])


def own_states(optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """A file of a checkpoint, where there are such optimizers."""
    states = [(type(m).__name__, m.state_dict()) for m in members_of(optimizer) if runs_itself(m)]
    if not states:
        return {}
    tensors: dict[str, Tensor] = {}
    tree = [[name, plain(state, f"the state_dict of {name}", _kept_in(tensors))] for name, state in states]
    return {FILE: save(tensors, {"states": json.dumps(tree)})}


def _kept_in(tensors: dict[str, Tensor]) -> Callable[[Tensor], dict[str, str]]:
    def keep(t: Tensor) -> dict[str, str]:
        name = str(len(tensors))
        tensors[name] = t.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}

    return keep


def _read(data: bytes) -> list[tuple[str, Any]]:
    size = int.from_bytes(data[:8], "little")
    tree = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["states"])
    tensors = load(data)
    return [(str(name), back(state, tensors)) for name, state in tree]


def load_own_states(run: Run, checkpoint: Checkpoint) -> Callable[[], None]:
    """Checks the file; gives the function that takes what is in it over, which every rank must call."""
    members = [m for m in members_of(run.optimizer) if runs_itself(m)]
    if not members:
        return lambda: None
    if FILE not in checkpoint.files:
        raise CheckpointError(f"{checkpoint.folder} has no {FILE}, with the states of {type(members[0]).__name__}")
    try:
        found = _read(checkpoint.read(FILE))
    except (SafetensorError, *UNREADABLE) as e:
        raise DamageError(f"{checkpoint.folder}: {FILE} cannot be read ({type(e).__name__}: {e})") from e
    names = [type(m).__name__ for m in members]
    if [name for name, _ in found] != names:
        raise CheckpointError(f"{checkpoint.folder} was saved with the optimizers {', '.join(n for n, _ in found)}, not {', '.join(names)}")

    def take() -> None:
        with whole_parameters(run, False, True):  # states go where the parameters are
            for member, (_, state) in zip(members, found, strict=True):
                member.load_state_dict(state)

    return take


class WholeLoads:
    """Has an optimizer that makes its own steps load states where parameters are whole: torch puts each where its parameter is, and of one
    that lies in parts there is nothing."""

    def __init__(self, run: Run, member: Any) -> None:
        here, load = weakref.ref(run), member.load_state_dict

        def whole(*args: Any, **kwargs: Any) -> Any:
            run = here()
            if run is None or run.closed is not None or run.lent is not None or not any(p.is_meta for p in run.model.parameters()):
                return load(*args, **kwargs)
            with whole_parameters(run, False, True):
                return load(*args, **kwargs)

        self._member, member.load_state_dict = member, whole

    def remove(self) -> None:
        vars(self._member).pop("load_state_dict", None)


class OwnSteps:
    """Of one trainer."""

    def __init__(self, run: Run) -> None:
        self.run, self._told = run, False
        self.members = [m for m in members_of(run.optimizer) if runs_itself(m)]

    def step(self, loss: Tensor, again: Callable[[], dict[str, Any]], unused: Collection[str]) -> None:
        """After the program's. `again` computes gradients once more; `unused`: parameters that got none. Every rank must call it."""
        run = self.run
        run.flush()
        ids = {id(p) for member in self.members for group in member.param_groups for p in group["params"]}
        params = {t.name: t.real for t in collect(run.model) if t.kind == "param" and id(t.real) in ids}
        names = [n for n, p in run.states.parameters.items() if n in params and p.unit is not None and n not in unused]
        names = [n for n in names if GRADIENT in run.states.roles_of(n)]
        if all(run.states.resident(n) is not None and self._resident(n) is not None for n in names):
            self._make(params, names, loss, again)
            return
        if not self._told and run.rank == 0:
            log.warning(
                '%s makes its own steps, for which every rank gathers all parameters and gradients; with strategy="replicate" it has them',
                ", ".join(type(m).__name__ for m in self.members),
            )
        self._told = True
        with whole_parameters(run, True, True):
            self._make(params, names, loss, again)

    def _resident(self, name: str) -> Tensor | None:
        """The gradient, where this rank has all of it."""
        p = self.run.states.parameters[name]
        parts = list(self.run.states.parts(p, GRADIENT))
        return parts[0][0].view(p.shape) if len(parts) == 1 and parts[0][0].numel() == p.numel and not p.cuts.axes else None

    def _gradients(self, params: dict[str, Tensor], names: list[str]) -> None:
        if all(self._resident(n) is not None for n in names):
            found = {n: self._resident(n) for n in names}
        else:
            found = {e.name: t.detach().clone() for e, t in self.run.states.whole(GRADIENT, everywhere=True) if t is not None}
        rows = {id(p) for m in self.members if isinstance(m, torch.optim.SparseAdam) for g in m.param_groups for p in g["params"]}
        for name in names:
            grad = found[name]
            params[name].grad = grad.to_sparse(1).coalesce() if grad is not None and id(params[name]) in rows else grad

    @torch.no_grad()
    def _settle(self, params: dict[str, Tensor]) -> None:
        """What the optimizer has made of the parameters is the program's; `p.data = ...` gave them other memory."""
        states = self.run.states
        for name, p in params.items():
            here = states.resident(name)
            if here is None:
                states.fill_from(name, WEIGHT, p)
            elif p.data_ptr() != here.data_ptr():
                here.copy_(p)
                if self.run.lent is None:
                    point_at(p, here)

    def _make(self, params: dict[str, Tensor], names: list[str], loss: Tensor, again: Callable[[], dict[str, Any]]) -> None:
        self._gradients(params, names)
        mark = lambda: [(p.data_ptr(), p._version, id(g), g._version) if (g := p.grad) is not None else 0 for p in params.values()]  # noqa: E731
        known, found = mark(), self._mean(loss)

        def closure() -> Tensor:
            nonlocal known, found
            if mark() != known:
                self._settle(params)
                losses = again()["outputs"]["loss"]
                self.run.flush()
                self._gradients(params, names)
                known, found = mark(), self._mean(torch.stack(list(losses)).mean())
            return found.clone()

        try:
            for member in self.members:
                step = step_without_hooks(type(member))
                step(member, closure) if "closure" in inspect.signature(step).parameters else step(member)
        finally:
            for p in params.values():
                p.grad = None
        self._settle(params)

    def _mean(self, loss: Tensor) -> Tensor:
        """Over the ranks: what decides on a step is the same on all."""
        if self.run.world_size == 1:
            return loss.detach()
        values = self.run.peers.exchange(f"loss of step {self.run.steps}", float(loss))
        return torch.tensor(sum(values) / len(values), dtype=loss.dtype, device=loss.device)
