"""Checkpoints: a folder that plain PyTorch and Hugging Face read. Its files, and reading them.

    model.safetensors      every name of model.state_dict(), tied ones twice, so load_state_dict and from_pretrained take it as it is
    optimizer.safetensors  "exp_avg.<parameter>", "exp_avg_sq.<parameter>" or "momentum_buffer.<parameter>", and "rng.<rank>"
    trainer.json           step, steps and hyper-parameters of each group, where the schedule stands, format version
    program.il             the program that ran, for going on with the same one; of a pipeline the first stage's,
    program-1.il           and so on, those of the others
    own_optimizers.safetensors   state dicts of optimizers that make their own steps (LAMB, SAM)
    scheduler.json         of a learning-rate scheduler, where the save was given one
    config.json            of Hugging Face models
    checksums.json         of every byte of the files above

Nothing here depends on the number of ranks or the strategy. Every rank writes its part of the two large files, so the folder must be
one that all of them see. Rank 0 makes the folder aside, and renames it when all have written (folder.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.checkpoint.tensor_file import CheckedFile, CheckedTensors, CheckpointError, DamageError, checksum_text
from interlace.checkpoint.weights import HeldWeights, Weights
from interlace.config import format_bytes
from interlace.errors import UNREADABLE

FORMAT = 2
MODEL, OPTIMIZER, TRAINER, PROGRAM = "model.safetensors", "optimizer.safetensors", "trainer.json", "program.il"
CHECKSUMS = "checksums.json"
OWN_FILES = (MODEL, OPTIMIZER, TRAINER, PROGRAM, CHECKSUMS)
MOST_STEPS = 1 << 53  # and other whole numbers: beyond, a float64 has gaps
_STAGE = re.compile(r"program-\d+\.il")
MAX_TEXT = 256 << 20  # bytes of trainer.json, program.il and checksums.json, at most
REPLACED = 50  # times that a folder may be replaced while it is being opened


def program_of(stage: int) -> str:
    """The file of a stage's program; of a run without stages, and of the first, PROGRAM."""
    return f"program-{stage}.il" if stage > 0 else PROGRAM


def is_own(name: str) -> bool:
    """Whether a file is a checkpoint's own, and not one that a save was given."""
    return name in OWN_FILES or _STAGE.fullmatch(name) is not None


class Checkpoint(contextlib.AbstractContextManager):
    """A checkpoint's files, read with their checksums. Close it, or use it in a with statement.

    Error: no checkpoint, cut off, edited, of another version; DamageError where bytes are not what was written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, CheckedFile] = {}
        self._files: dict[str, int] = {}  # descriptors: what is read is of one checkpoint, whoever replaces it
        for left in range(REPLACED, -1, -1):
            try:
                self._open_all()
                return
            except _ReplacedError:
                if left == 0:
                    raise CheckpointError(f"{folder} was replaced again and again while it was being opened; try again") from None

    def _open_all(self) -> None:
        """All files of the folder that has the name now. _ReplacedError: another one has it since."""
        try:
            handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointError(f"no such checkpoint folder: {self.folder}") from None
            raise CheckpointError(f"cannot read {self.folder}: {e.strerror}") from None
        try:
            names = os.listdir(handle)
            if TRAINER not in names:
                hint = "; it holds weights only: read them with Config(weights=...) or trainer.load_weights, or make it a checkpoint with "
                hint = hint + "interlace checkpoint import" if MODEL in names else ""
                raise CheckpointError(f"{self.folder} is no checkpoint: {TRAINER} is missing{hint}")
            self.files = self._index(handle)
            for name in self.files:
                with contextlib.suppress(OSError):  # whoever reads it says that it is missing
                    self._files[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=handle)
            if any(name not in self._files for name in self.files):
                self._check_replaced(handle)
            self.record = self._record()
        except (CheckpointError, OSError):
            self.close()
            self._check_replaced(handle)
            raise
        except BaseException:
            self.close()
            raise
        finally:
            os.close(handle)

    def _check_replaced(self, handle: int) -> None:
        """_ReplacedError: the name is now that of another folder than this one."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.folder), os.fstat(handle)):
                return
        raise _ReplacedError

    def _index(self, handle: int) -> dict[str, Any]:
        path = self.folder / CHECKSUMS
        try:
            data = _read_small(handle, CHECKSUMS)
            body = json.loads(data)
            self._check_format(body["format"])
            text, quote, rest = data.decode().rpartition(',"self":"')
            if not quote or rest.strip() != body["self"] + '"}' or checksum_text((text + "}").encode()) != body["self"]:
                raise ValueError("its own checksum is another")
            files = body["files"]
            for name, value in files.items():
                if Path(name).name != name or name.startswith("."):
                    raise ValueError(f"it names a file '{name[:80]}' outside the folder")
                value["ranges"], value["bytes"]  # must be there
        except OSError as e:
            raise DamageError(f"cannot read {path}: {e.strerror}") from None
        except UNREADABLE as e:
            raise DamageError(f"{path} is cut off or was edited ({type(e).__name__}: {e})") from None
        return files

    def _record(self) -> dict[str, Any]:
        path = self.folder / TRAINER
        try:
            data = json.loads(self.read(TRAINER))
            self._check_format(int(data["format"]))
            counts = data["step"], *(g["steps"] for g in data["groups"]), *data.get("left_out", {}).values()
            counts = *counts, *(made for made, _ in data.get("laid_by", {}).values())
            if not all(0 <= int(n) < MOST_STEPS for n in counts):
                raise ValueError("a negative number of steps, or one that no run makes")
            for group in data["groups"]:
                list(group["parameters"])
                for key, value in group["hyper"].items():
                    if key in ("params", "param_names") or not _is_plain(value):
                        raise ValueError(f"the hyper-parameter '{key[:40]}' is no number")
            list(data["kind"])
            scale = data.get("loss_scale")
            if scale is not None and not (_is_plain(scale) and len(scale) == 2 and 0 < scale[0] < math.inf and int(scale[1]) >= 0):
                raise ValueError("the loss scale is none")
            if "loop" in data and not (isinstance(data["loop"]["count"], int) and data["loop"]["count"] >= 0):
                raise ValueError("the schedule stands nowhere")
        except UNREADABLE as e:
            raise DamageError(f"{path} is cut off or was edited ({type(e).__name__}: {e})") from e
        return data

    def _check_format(self, number: int) -> None:
        if number > FORMAT:
            newer = f"format {number}, this one reads {FORMAT}"
            raise CheckpointError(f"{self.folder} was written by a newer version ({newer}); update interlace")

    def _ranges(self, name: str) -> Any:
        if name not in self.files:
            raise DamageError(f"{self.folder / CHECKSUMS} has no checksums of {name}: it was cut off or edited")
        return self.files[name]["ranges"]

    def read(self, name: str) -> bytes:
        """A small file of it. Error: it is not there, or damaged."""
        file = self._checked(CheckedFile, name)
        with file:
            if file.bytes > MAX_TEXT:
                raise DamageError(f"{file.path} has {format_bytes(file.bytes)}: too much for a text")
            return bytes(file.read_bytes(0, file.bytes))

    def tensors(self, name: str) -> CheckedTensors:
        if name not in self._open:
            self._open[name] = self._checked(CheckedTensors, name)
        return self._open[name]  # type: ignore[return-value]

    def _checked(self, kind: type[CheckedFile], name: str) -> Any:
        ranges = self._ranges(name)
        if name not in self._files:
            raise DamageError(f"no such file: {self.folder / name}")
        return kind(self.folder / name, ranges, self._files[name])

    def verify(self, part: int = 0, parts: int = 1) -> int:
        """Reads every `parts`-th range of all files and compares; gives the bytes of it all."""
        total = 0
        for name in self.files:
            kind = CheckedTensors if name.endswith(".safetensors") else CheckedFile
            with self._checked(kind, name) as file:
                file.verify(part, parts)
                total += file.bytes
        return total

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_plain(value: Any) -> bool:
    """A number, a word, or a few numbers: what torch.optim keeps in a group."""
    if isinstance(value, list):
        return len(value) <= 16 and all(v is None or (isinstance(v, (int, float)) and _is_plain(v)) for v in value)
    return value is None or isinstance(value, (float, str)) or (isinstance(value, int) and abs(value) < MOST_STEPS)


class _ReplacedError(Exception):
    """Another folder has got the name."""


def _read_small(folder: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder), "rb") as f:
        if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            raise ValueError("it is no file")
        data = f.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise ValueError(f"it has more than {format_bytes(MAX_TEXT)}")
    return data


def check_shapes(weights: Weights | HeldWeights | CheckedTensors, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Every wanted tensor (what it is for → name in the file, shape) must be there in its shape."""
    for label, (name, shape) in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{weights.source} has no '{name}' for {label}; was it saved from another model?")
        got = tuple(weights.shape(name))
        if got != shape:
            raise CheckpointError(f"{weights.source}: '{name}' has shape {got}, {label} needs {shape}; was it saved from another model?")


def check_hyper(where: object, group: int, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Error: a hyper-parameter that this group cannot have."""

    def wrong(key: str, why: str) -> DamageError:
        return DamageError(f"{where}: '{key[:40]}' of group {group} is {str(saved[key])[:60]}, {why}; was the file edited?")

    for key, value in saved.items():
        if key not in ours:
            continue
        here = ours[key]
        numbers = [n for n in value if n is not None] if isinstance(value, list) else [value]
        if isinstance(here, bool) or here is None:
            if isinstance(value, list | str) and here is not None:
                raise wrong(key, "and must be true or false")
            continue
        if isinstance(here, str):
            if not isinstance(value, str):
                raise wrong(key, "and must be a word")
            continue
        if isinstance(value, list) != isinstance(here, tuple | list) or (isinstance(value, list) and len(value) != len(here)):
            raise wrong(key, "and must be " + (f"{len(here)} numbers" if isinstance(here, tuple | list) else "a number"))
        if not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
            raise wrong(key, "and must be finite")
        if key in NOT_NEGATIVE and min(numbers, default=0) < 0:
            raise wrong(key, "and must not be negative")
        if key == "betas" and max(numbers) >= 1:
            raise wrong(key, "and must be below 1")


NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "betas", "alpha", "rho", "lr_decay")

Groups = list[tuple[str, list[str]]]


def group_difference(theirs: Groups, ours: Groups) -> str | None:
    """The first thing in which two optimizers' groups differ; None: nothing."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} parameter groups there, {len(ours)} here"
    for i, ((kind, names), (our_kind, our_names)) in enumerate(zip(theirs, ours, strict=True)):
        if kind != our_kind:
            return f"group {i} is {str(kind)[:40]} there, {our_kind} here"
        for j, (name, our_name) in enumerate(zip(names, our_names, strict=False)):
            if name != our_name:
                return f"parameter {j} of group {i} is '{str(name)[:200]}' there, '{our_name}' here"
        if len(names) != len(our_names):
            return f"group {i} has {len(names)} parameters there, {len(our_names)} here"
    return None
