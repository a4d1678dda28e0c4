"""The model as plain PyTorch has it, for a moment between two steps: whole parameters in its modules, and changes taken back.

    with trainer.whole_parameters():     every rank gathers, unit by unit; the model's parameters are real tensors
        ema.update_parameters(model)
        model.lm_head.weight.clamp_(-1, 1)
                                         every rank compares with the others, then keeps its own part of what there is now
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlace.capture.model_tensors import collect
from interlace.compiling.states import WEIGHT
from interlace.dist.peers import ranks_text
from interlace.errors import InterlaceError
from interlace.train.materialize import adopt, checksum, point_at, slots_of
from interlace.train.run import Run

Tensor = torch.Tensor
_OF_SAVING = ("dtype", "architectures")  # of a Hugging Face config: save_pretrained sets them, on whatever rank saves


@contextlib.contextmanager
def whole_parameters(run: Run, changes: bool, all_ranks: bool, call: str = "") -> Iterator[nn.Module]:
    """Trainer.whole_parameters. `call`: of the user, which a rank may have left out."""
    run.check_open()
    if call:
        run.all_here(call)
    run.flush()
    run.settle_save()
    own = {t.name: t.real for t in collect(run.model) if t.kind == "param"}
    copies = run.world_size > 1 and changes  # what a rank changes must not be the program's before all are known to agree
    alone = run.world_size == 1
    with run.peers.guard(), torch.no_grad():
        for entry, t in run.states.whole(WEIGHT, everywhere=all_ranks):
            if t is None or not (all_ranks or run.rank == 0):
                continue
            if copies or run.states.resident(entry.name) is None:
                point_at(own[entry.name], t.detach().clone())
        run.share_buffers()
    config: Any = getattr(run.model, "config", None)
    kept = {name: vars(config)[name] for name in _OF_SAVING if name in vars(config)} if hasattr(config, "to_dict") else {}
    run.lent = "inside `with trainer.whole_parameters():`"
    try:
        yield run.model
        run.lent = None
        if changes:
            with torch.no_grad():
                _take_back(run, own, all_ranks, alone)
    finally:
        run.lent = None
        for name, value in kept.items():
            setattr(config, name, value)
        if run.closed is None:
            _put_back(run, own)


def _put_back(run: Run, own: dict[str, Tensor]) -> None:
    """The model has the parameters that it had, as views of the program's or without values."""
    _restore(run.model, own)
    buffers = {b["name"]: run.executor.tensor(b["value"]) for b in run.ir.buffers()}
    with torch.no_grad():
        adopt(collect(run.model), run.states, buffers)


def _restore(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that were replaced (load_state_dict(assign=True)) make room for the model's own; gives the values by name."""
    values = dict(own)
    for slot in slots_of(model):
        if slot.name in own and slot.tensor is not own[slot.name]:
            values[slot.name] = slot.tensor
            for table, name in slot.places:
                table[name] = own[slot.name]
    return values


def _take_back(run: Run, own: dict[str, Tensor], all_ranks: bool, alone: bool) -> None:
    values = _restore(run.model, own)
    here = all_ranks or run.rank == 0

    def check() -> Callable[[], None]:
        for entry in run.states.everything if here else ():
            t = values[entry.name]
            if tuple(t.shape) != entry.shape or t.dtype != entry.dtype or t.is_meta:
                raise InterlaceError(
                    f"parameter '{entry.name}' was given a tensor of {_form(t.dtype, t.shape)} inside whole_parameters(); it is trained as "
                    f"{_form(entry.dtype, entry.shape)}: compile again for another model"
                )
        return lambda: None

    run.agree(f"whole parameters at step {run.steps}", check, InterlaceError)()
    with run.peers.guard():
        if all_ranks and not alone:
            _check_alike(run, values)
        for entry in run.states.everything:
            t = values[entry.name]
            if not all_ranks and not alone:
                device = run.peers.device
                sent = t.detach().to(device).contiguous() if here else torch.empty(entry.shape, dtype=entry.dtype, device=device)
                run.peers.groups.broadcast(sent)
                t = sent
            if entry.name in run.states.parameters:
                resident = run.states.resident(entry.name)
                if resident is None or resident.data_ptr() != t.data_ptr():
                    run.states.fill_from(entry.name, WEIGHT, t)


def _check_alike(run: Run, values: dict[str, Tensor]) -> None:
    names = [entry.name for entry in run.states.everything]
    everyone = run.peers.exchange(f"changed parameters at step {run.steps}", [checksum(values[n]).hex() for n in names])
    for i, name in enumerate(names):
        other = [r for r, found in enumerate(everyone) if found[i] != everyone[0][i]]
        if other:
            raise InterlaceError(
                f"parameter '{name}' was changed otherwise on {ranks_text(other)} than on rank 0 inside whole_parameters(); make the same "
                "change on every rank, or use whole_parameters(all_ranks=False), where rank 0's counts"
            )


def _form(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def save_pretrained(run: Run, folder: str | Path, arguments: dict[str, Any]) -> None:
    """Trainer.save_pretrained."""
    run.check_open()
    method = getattr(run.model, "save_pretrained", None)
    if not callable(method):
        raise InterlaceError(
            f"{type(run.model).__name__} has no save_pretrained(), which models of Hugging Face and PEFT have; use trainer.save(folder), or "
            "trainer.state_dict() on every rank"
        )
    with whole_parameters(run, changes=False, all_ranks=False, call="trainer.save_pretrained"):
        problem: str | None = None
        if run.rank == 0:
            try:
                method(os.fspath(folder), **arguments)
            except Exception as e:
                problem = f"{type(e).__name__}: {e}"
        with run.peers.guard():
            problem = run.peers.exchange(f"save_pretrained at step {run.steps}", problem)[0]
    if problem is not None:
        raise InterlaceError(f"save_pretrained({os.fspath(folder)!r}) failed on rank 0: {problem}")
