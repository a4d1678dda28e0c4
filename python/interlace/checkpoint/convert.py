"""Checkpoints from and to what plain PyTorch saves, file by file, without a model at hand.

    run.pt = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}   ⇄   a checkpoint folder

A .pt file is unpickled with weights_only=True, which admits tensors and plain containers and no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint.contents import FORMAT, MODEL, OPTIMIZER, PROGRAM, TRAINER, Checkpoint, is_own
from interlace.checkpoint.folder import FolderLock, Staging, check_place
from interlace.checkpoint.optimizer import STATE_NAMES, plain_hyper
from interlace.checkpoint.saver import Piece
from interlace.checkpoint.tensor_file import CheckpointError, Layout
from interlace.errors import UNREADABLE

Tensor = torch.Tensor


def export_torch(checkpoint: Checkpoint) -> dict[str, Any]:
    """{"model", "optimizer", "step"} as torch.save and load_state_dict have them."""
    weights, moments, record = checkpoint.tensors(MODEL), checkpoint.tensors(OPTIMIZER), checkpoint.record
    index: dict[str, int] = {}
    groups, state = [], {}
    for kind, group in zip(record["kind"], record["groups"], strict=True):
        hyper = {k: tuple(v) if k == "betas" else v for k, v in group["hyper"].items()}
        names = [str(n) for n in group["parameters"]]
        groups.append({**hyper, "params": [index.setdefault(n, len(index)) for n in names]})
        for name in names:
            roles = [role for role in group.get("states", STATE_NAMES.get(kind, ())) if f"{role}.{name}" in moments]
            entry = {role: moments.read(f"{role}.{name}") for role in roles}
            usual = [group["steps"] - record.get("left_out", {}).get(name, 0), group.get("scalars")]
            made, scalars = record.get("laid_by", {}).get(name, usual)
            if entry and "scalars" in group:
                entry = {**{k: torch.tensor(number) for k, (number, _) in scalars.items()}, **entry}
            elif entry and kind != "sgd":
                entry = {"step": torch.tensor(float(made)), **entry}
            if entry:
                state[index[name]] = entry
    model = {name: weights.read(name) for name in weights.names()}
    small = {name: checkpoint.read(name).decode() for name in checkpoint.files if not is_own(name)}
    optimizer = {"state": state, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "step": record["step"], "interlace": {"record": json.dumps(record), "files": small}}


def read_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """The state dicts of model and optimizer in a .pt file, and what an export left beside them. Error: it is none, or holds more than
    tensors and numbers."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError) as e:
        raise CheckpointError(f"cannot read {path}: {getattr(e, 'strerror', None) or 'it is cut off'}") from None
    except Exception as e:  # the unpickler's own, or what a torn file makes of it
        with path.open("rb") as file:
            begin = file.read(2)
        if begin != b"PK" and begin[:1] != b"\x80":  # a zip, or a pickle of older versions
            raise CheckpointError(f"{path} is no file of torch.save; give one with {{'model': ..., 'optimizer': ..., 'step': ...}}") from None
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(f"{path} is refused: not a file of tensors and numbers alone ({first[:160]})") from None
    model, optimizer = (data.get("model"), data.get("optimizer")) if isinstance(data, Mapping) else (None, None)
    if not isinstance(model, Mapping) or not isinstance(optimizer, Mapping):
        raise CheckpointError(
            f'{path} must hold {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}; weights alone need no import: '
            "interlace train --weights FILE takes safetensors"
        )
    if not all(isinstance(t, Tensor) for t in model.values()):
        raise CheckpointError(f"{path}: the model's state dict holds more than tensors")
    return dict(model), dict(optimizer), data.get("interlace")


def _names(model: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> list[list[str]]:
    """The parameters of every group by name: as the optimizer has them, else in the model's order by their shapes."""
    groups, state = optimizer["param_groups"], optimizer["state"]
    if all("param_names" in g for g in groups):
        return [[str(n) for n in g["param_names"]] for g in groups]
    first: dict[tuple[int, int], str] = {}
    for name, t in model.items():  # a tied parameter counts once, under its first name
        first.setdefault((t.untyped_storage().data_ptr(), int(t.storage_offset())), name)
    order = list(first.values()) if all(t.numel() for t in model.values()) else list(model)

    def embedded(shapes: list[Any], names: list[str]) -> list[str] | None:
        """The first names of these shapes, in order."""
        rest = iter(names)
        found = [next((n for n in rest if shape is None or model[n].shape == shape), None) for shape in shapes]
        return None if None in found else [str(n) for n in found]

    named = []
    for number, group in enumerate(groups):
        shapes = [next((s.shape for s in state.get(i, {}).values() if isinstance(s, Tensor) and s.dim()), None) for i in group["params"]]
        # Taken from the front and from the back: when both agree there is no other way to place the shapes.
        front, back = embedded(shapes, order), embedded(shapes[::-1], order[::-1])
        if front is None or back is None or front != back[::-1]:
            raise CheckpointError(
                f"cannot tell which parameters are those of the optimizer's group {number}: make it from model.named_parameters(), so "
                "that its state dict has param_names, and save again"
            )
        named.append(front)
    return named


def _kind(group: Mapping[str, Any]) -> str:
    if "momentum" in group:
        return "sgd"
    if "betas" not in group:
        raise CheckpointError("the optimizer is neither SGD, Adam nor AdamW")
    return "adamw" if group.get("decoupled_weight_decay", True) else "adam"


def import_torch(source: Path, folder: Path) -> int:
    """Makes a checkpoint of a .pt file; gives its step. Error: what cannot be read, or belongs to no optimizer that runs here."""
    model, optimizer, exported = read_torch(source)
    if exported is not None:
        return _import_exported(source, folder, model, optimizer, exported)
    left_out: dict[str, int] = {}
    try:
        names, state = _names(model, optimizer), optimizer["state"]
        moments: dict[str, Tensor] = {}
        groups: list[dict[str, Any]] = []
        kinds = []
        for group, members in zip(optimizer["param_groups"], names, strict=True):
            kind = _kind(group)
            steps: dict[str, int] = {}
            for i, name in zip(group["params"], members, strict=True):
                entry = state.get(i, {})
                steps[name] = int(entry["step"]) if "step" in entry else int(bool(entry))
                for role in STATE_NAMES[kind]:
                    if isinstance(entry.get(role), Tensor):
                        if entry[role].shape != model[name].shape:
                            raise CheckpointError(f"{role} of '{name}' has shape {tuple(entry[role].shape)}, the parameter another")
                        moments[f"{role}.{name}"] = entry[role]
            most = max(steps.values(), default=0)
            left_out |= {name: most - n for name, n in steps.items() if n < most and kind != "sgd"}
            groups.append({"steps": most, "hyper": plain_hyper(group), "parameters": members})
            kinds.append(kind)
    except UNREADABLE as e:
        raise CheckpointError(f"{source}: its optimizer is no state dict of torch.optim ({type(e).__name__}: {e})") from None
    step = max((int(g["steps"]) for g in groups), default=0)
    record = {
        "format": FORMAT, "step": step, "kind": kinds, "groups": groups, "seed": 0, "rng": "keyed", "world_size": 1, "left_out": left_out,
        "loss_scale": None,
    }  # fmt: skip
    write_checkpoint(folder, {MODEL: model, OPTIMIZER: moments}, record)
    return step


def _import_exported(source: Path, folder: Path, model: dict[str, Tensor], optimizer: dict[str, Any], exported: Any) -> int:
    """What export_torch gave, as it was: any optimizer, its counters, the other small files."""
    try:
        record, small = json.loads(exported["record"]), dict(exported["files"])
        if not all(Path(n).name == n and not n.startswith(".") and not is_own(n) and isinstance(t, str) for n, t in small.items()):
            raise ValueError("it names a file outside the folder")
        moments: dict[str, Tensor] = {}
        for kind, group, saved in zip(record["kind"], record["groups"], optimizer["param_groups"], strict=True):
            for name, index in zip(group["parameters"], saved["params"], strict=True):
                for role in group.get("states", STATE_NAMES.get(kind, ())):
                    if isinstance(t := optimizer["state"].get(index, {}).get(role), Tensor):
                        moments[f"{role}.{name}"] = t
        step = int(record["step"])
    except UNREADABLE as e:
        raise CheckpointError(f"{source} was exported from a checkpoint and edited since ({type(e).__name__}: {e})") from None
    record.pop("run", None)  # the program is not exported: it is made again
    write_checkpoint(folder, {MODEL: model, OPTIMIZER: moments}, record, small)
    return step


def write_checkpoint(
    folder: Path, files: Mapping[str, Mapping[str, Tensor]], record: Mapping[str, Any], small: Mapping[str, str] | None = None
) -> None:
    """A checkpoint of tensors that lie in memory, with `small` texts by name; written aside and renamed like any other."""
    from interlace import _runtime

    final = Path(os.path.abspath(folder))
    check_place(final)
    lock = FolderLock(final)
    staging: Staging | None = None
    try:
        layouts = {n: Layout([(k, t.dtype, tuple(t.shape)) for k, t in tensors.items()], {"format": "pt"}) for n, tensors in files.items()}
        staging = Staging(final, layouts, dict(small or {}))
        pieces: list[Piece] = []
        for number, (name, tensors) in enumerate(files.items()):
            for key, t in tensors.items():
                pieces.append((t.detach().contiguous(), 0, t.numel(), number, layouts[name].entries[key].offset))
        writer = _runtime.SnapshotWriter([str(staging.folder / n) for n in files])
        writer.add(pieces)
        writer.close()
        staging.cover((f, o, c, f"{s:016x}") for f, o, c, s in writer.wait_durable())
        staging.add(PROGRAM, "")
        staging.add(TRAINER, json.dumps(record, indent=1) + "\n")
        staging.commit()
    finally:
        if staging is not None:
            staging.discard()
        lock.release()
