"""Checkpoints: a folder that plain PyTorch and Hugging Face read, written beside the old one and put in its place whole.

    model.safetensors      every name of model.state_dict(), tied ones twice, so load_state_dict and from_pretrained take it as it is
    optimizer.safetensors  "exp_avg.<parameter>", "exp_avg_sq.<parameter>" or "momentum_buffer.<parameter>", and "rng.<rank>"
    trainer.json           step, steps and hyper-parameters of each group, format version
    config.json            of Hugging Face models

Nothing here depends on the number of ranks or the strategy. Rank 0 writes; it gathers unit by unit and holds one unit at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from interlace.config import format_bytes
from interlace.errors import InterlaceError
from interlace.materialize import Weights

Tensor = torch.Tensor
FORMAT = 1
MODEL, OPTIMIZER, TRAINER = "model.safetensors", "optimizer.safetensors", "trainer.json"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class CheckpointError(InterlaceError):
    """A checkpoint cannot be written or read."""


class SafetensorsWriter:
    """Writes one safetensors file tensor by tensor, in the order in which they were declared."""

    def __init__(
        self, path: Path, tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self._expected = list(tensors)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, dtype, shape in tensors:
            if dtype not in _NAMES:
                raise CheckpointError(f"'{name}' has dtype {dtype}, which safetensors files cannot hold")
            size = torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by finish or abandon)
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._next = 0

    def write(self, name: str, tensor: Tensor) -> None:
        expected, dtype, shape = self._expected[self._next]
        if (name, tensor.dtype, tuple(tensor.shape)) != (expected, dtype, shape):
            raise AssertionError(
                f"expected '{expected}' {dtype} {shape}, got '{name}' {tensor.dtype} {tuple(tensor.shape)}"
            )
        self._next += 1
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)

    def finish(self) -> None:
        if self._next != len(self._expected):
            raise AssertionError(f"'{self._expected[self._next][0]}' was not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Staging:
    """A folder being written beside its final place. commit() swaps it in; until then, and after discard(), the old one stands."""

    def __init__(self, final: str | Path, needed_bytes: int, extra: Mapping[str, str | bytes]) -> None:
        self.final = Path(os.path.abspath(final))
        if self.final.exists() and not self.final.is_dir():
            raise CheckpointError(f"{self.final} is a file; a checkpoint is a folder")
        for place in (Path.cwd(), Path.home()):  # the folder is replaced by a new one, which nobody may be standing in
            if place == self.final or self.final in place.parents:
                raise CheckpointError(
                    f"{self.final} holds {place}; name a folder of the checkpoint's own, for example {final}/checkpoint"
                )
        for name in extra:
            if Path(name).name != name or name in (MODEL, OPTIMIZER, TRAINER):
                raise CheckpointError(f"'{name}' cannot be the name of an extra file of a checkpoint")
        parent = self.final.parent
        self.folder = parent / f".{self.final.name}.{uuid.uuid4().hex[:8]}.part"
        with saving(self.final):
            parent.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(parent)
            if disk.free < needed_bytes and disk.total > 0:
                raise CheckpointError(
                    f"{parent} has {format_bytes(disk.free)} free, the checkpoint needs {format_bytes(needed_bytes)}; make room or save "
                    "elsewhere (nothing was written, an older checkpoint there is untouched)"
                )
            self.folder.mkdir()
        try:
            for name, data in extra.items():
                self.write(name, data)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, data: str | bytes) -> None:
        with saving(self.final), open(self.folder / name, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())

    def commit(self) -> None:
        with saving(self.final):
            if not self.final.exists():
                os.rename(self.folder, self.final)
            else:
                self._carry_over()
                _exchange(self.folder, self.final)
                shutil.rmtree(self.folder, ignore_errors=True)
            _sync_folder(self.final.parent)

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _carry_over(self) -> None:
        """Files that others put into the folder (a tokenizer, the text's tokens) stay in it: as links, so size does not matter."""
        for entry in self.final.iterdir():
            target = self.folder / entry.name
            if target.exists():
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, target, symlinks=True, copy_function=_link)
            else:
                _link(str(entry), str(target))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


@contextlib.contextmanager
def saving(where: Path) -> Iterator[None]:
    """Turns the system's refusals into one clear error."""
    try:
        yield
    except OSError as e:
        reason = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "a file became too big",
            errno.EACCES: "no permission to write there",
            errno.EPERM: "no permission to write there",
            errno.EROFS: "the file system is read-only",
        }.get(e.errno or 0, e.strerror or str(e))
        raise CheckpointError(f"cannot save to {where}: {reason}; an older checkpoint there is untouched") from e


def _exchange(a: Path, b: Path) -> None:
    """Swaps two folders, at one blow where the system can, else by two renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(b))
    aside = b.with_name(f"{b.name}.old")
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_trainer_file(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint. Error: no checkpoint, cut off, of a newer version."""
    if not folder.is_dir():
        raise CheckpointError(f"no such checkpoint folder: {folder}")
    path = folder / TRAINER
    if not path.is_file():
        hint = (
            "; it holds weights only: read them with Config(weights=...) or trainer.load_weights"
            if (folder / MODEL).is_file()
            else ""
        )
        raise CheckpointError(f"{folder} is no checkpoint: {TRAINER} is missing{hint}")
    try:
        data = json.loads(path.read_text())
        version = int(data["format"])
        data["step"], data["groups"], data["kind"]  # must be there
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} is cut off or was edited ({type(e).__name__}: {e})") from e
    if version > FORMAT:
        raise CheckpointError(
            f"{folder} was written by a newer version (format {version}, this one reads {FORMAT}); update interlace"
        )
    return data


def check_shapes(weights: Weights, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Every wanted tensor (what it is for → name in the file, shape) must be there in its shape."""
    for label, (name, shape) in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{weights.source} has no '{name}' for {label}; was it saved from another model?")
        got = tuple(weights.shape(name))
        if got != shape:
            raise CheckpointError(
                f"{weights.source}: '{name}' has shape {got}, {label} needs {shape}; was it saved from another model?"
            )
