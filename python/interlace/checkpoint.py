"""Checkpoints: a folder that plain PyTorch and Hugging Face read, written beside the old one and put in its place whole.

    model.safetensors      every name of model.state_dict(), tied ones twice, so load_state_dict and from_pretrained take it as it is
    optimizer.safetensors  "exp_avg.<parameter>", "exp_avg_sq.<parameter>" or "momentum_buffer.<parameter>", and "rng.<rank>"
    trainer.json           step, steps and hyper-parameters of each group, where the schedule stands, format version
    program.il             the program that ran, for going on with the same one
    config.json            of Hugging Face models
    checksums.json         of every byte of the files above

Nothing here depends on the number of ranks or the strategy. Every rank writes its part of the two large files, so the folder must be
one that all of them see. Rank 0 makes the folder, and renames it when all have written. With keep=N the N - 1 checkpoints before
stay beside it:

    runs/.book.lock               held while a trainer saves to runs/book: a second run is refused
    runs/.book.1f3a9c02.part      being written
    runs/book                     the newest that is whole
    runs/book.step-40             one that it replaced
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from interlace.config import format_bytes
from interlace.materialize import Weights
from interlace.tensor_file import CheckedFile, CheckedTensors, CheckpointError, DamageError, checksum_text, sums_of

FORMAT = 2
MODEL, OPTIMIZER, TRAINER, PROGRAM = "model.safetensors", "optimizer.safetensors", "trainer.json", "program.il"
CHECKSUMS = "checksums.json"
OWN_FILES = (MODEL, OPTIMIZER, TRAINER, PROGRAM, CHECKSUMS)
MAX_TEXT = 256 << 20  # bytes of trainer.json, program.il and checksums.json, at most


class FolderLock:
    """Keeps a second run from writing the same checkpoint folder. Goes with the process, however that ends."""

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f".{final.name}.lock")
        with saving(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            while True:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    who = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "another process"
                    os.close(self._file)
                    raise CheckpointError(
                        f"{final} is being written by another run ({who}); save to another folder, or stop that run"
                    ) from None
                with contextlib.suppress(FileNotFoundError):  # it was removed by who held it: make a new one
                    if os.fstat(self._file).st_ino == os.stat(self.path).st_ino:
                        break
                os.close(self._file)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        for left in final.parent.glob(f".{_glob(final.name)}.*.part"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self._file)
            self._file = -1


def _glob(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


class Staging:
    """A folder being written beside its final place. commit() swaps it in; until then, and after discard(), the old one stands."""

    def __init__(self, final: Path, needed_bytes: int, extra: Mapping[str, str | bytes]) -> None:
        self.final = final
        self.sums: dict[str, dict[str, Any]] = {}
        check_place(final)
        for name in extra:
            if Path(name).name != name or name in OWN_FILES or name.startswith("."):
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
        self._small: dict[str, bytes] = {}
        for name, data in extra.items():
            self.add(name, data)

    def add(self, name: str, data: str | bytes) -> None:
        """A small file; commit() writes it."""
        self._small[name] = data.encode() if isinstance(data, str) else data

    def _write(self, name: str, content: bytes) -> None:
        with saving(self.final), open(self.folder / name, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        self.sums[name] = {"bytes": len(content), "ranges": sums_of(content)}

    def commit(self, keep: int = 1) -> None:
        """Puts it in place. Of the checkpoints that were there, the newest keep - 1 stay beside it."""
        for name, content in self._small.items():
            self._write(name, content)
        body = {"format": FORMAT, "checksum": "xxh64", "files": self.sums}
        text = json.dumps(body, separators=(",", ":"))
        self._write(CHECKSUMS, (text[:-1] + f',"self":"{checksum_text(text.encode())}"}}\n').encode())
        with saving(self.final):
            _sync_folder(self.folder)
            if not self.final.exists():
                os.rename(self.folder, self.final)
            else:
                self._carry_over()
                _exchange(self.folder, self.final)
                if keep > 1:
                    self._keep_old()
                shutil.rmtree(self.folder, ignore_errors=True)
            for old in kept_checkpoints(self.final)[max(0, keep - 1) :] if keep > 1 else []:
                shutil.rmtree(old, ignore_errors=True)
            _sync_folder(self.final.parent)

    def _keep_old(self) -> None:
        """What was replaced gets a name of its own, if it is a checkpoint."""
        try:
            step = int(json.loads((self.folder / TRAINER).read_bytes())["step"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        place = self.final.with_name(f"{self.final.name}.step-{step}")
        if place.exists():
            shutil.rmtree(place, ignore_errors=True)
        os.rename(self.folder, place)

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


def kept_checkpoints(final: Path) -> list[Path]:
    """The older checkpoints beside a folder, the newest first."""
    pattern = re.compile(re.escape(final.name) + r"\.step-(\d{1,18})")
    found = [(int(m.group(1)), p) for p in final.parent.glob("*") if (m := pattern.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found, reverse=True)]


def check_place(final: Path) -> None:
    """Error: a place where no checkpoint folder can be."""
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file; a checkpoint is a folder")
    for place in (Path.cwd(), Path.home()):  # the folder is replaced by a new one, which nobody may be standing in
        if place == final or final in place.parents:
            raise CheckpointError(
                f"{final} holds {place}; name a folder of the checkpoint's own, for example {final}/checkpoint"
            )


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


class Checkpoint:
    """A checkpoint's files, read with their checksums. Close it, or use it in a with statement.

    Error: no checkpoint, cut off, edited, of another version; DamageError where bytes are not what was written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"no such checkpoint folder: {folder}")
        if not (self.folder / TRAINER).is_file():
            hint = (
                "; it holds weights only: read them with Config(weights=...) or trainer.load_weights, or make it a checkpoint with "
                "interlace checkpoint import"
                if (self.folder / MODEL).is_file()
                else ""
            )
            raise CheckpointError(f"{folder} is no checkpoint: {TRAINER} is missing{hint}")
        self.files = self._index()
        self._open: dict[str, CheckedFile] = {}
        try:
            self.record = self._record()
        except BaseException:
            self.close()
            raise

    def _index(self) -> dict[str, Any]:
        path = self.folder / CHECKSUMS
        try:
            data = _read_small(path)
            body = json.loads(data)
            if body["format"] > FORMAT:
                raise CheckpointError(
                    f"{self.folder} was written by a newer version (format {body['format']}, this one reads {FORMAT}); update interlace"
                )
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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise DamageError(f"{path} is cut off or was edited ({type(e).__name__}: {e})") from None
        return files

    def _record(self) -> dict[str, Any]:
        path = self.folder / TRAINER
        try:
            data = json.loads(self.read(TRAINER))
            if int(data["format"]) > FORMAT:
                raise CheckpointError(
                    f"{self.folder} was written by a newer version (format {data['format']}, this one reads {FORMAT}); update interlace"
                )
            if int(data["step"]) < 0 or not all(int(g["steps"]) >= 0 for g in data["groups"]):
                raise ValueError("a negative number of steps")
            for group in data["groups"]:
                list(group["parameters"])
                for key, value in group["hyper"].items():
                    if key in ("params", "param_names") or not _is_plain(value):
                        raise ValueError(f"the hyper-parameter '{key[:40]}' is no number")
            list(data["kind"])
            if "loop" in data and not (isinstance(data["loop"]["count"], int) and data["loop"]["count"] >= 0):
                raise ValueError("the schedule stands nowhere")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise DamageError(f"{path} is cut off or was edited ({type(e).__name__}: {e})") from e
        return data

    def _ranges(self, name: str) -> Any:
        if name not in self.files:
            raise DamageError(f"{self.folder / CHECKSUMS} has no checksums of {name}: it was cut off or edited")
        return self.files[name]["ranges"]

    def read(self, name: str) -> bytes:
        """A small file of it. Error: it is not there, or damaged."""
        file = CheckedFile(self.folder / name, self._ranges(name))
        with file:
            if file.bytes > MAX_TEXT:
                raise DamageError(f"{file.path} has {format_bytes(file.bytes)}: too much for a text")
            return bytes(file.read_bytes(0, file.bytes))

    def tensors(self, name: str) -> CheckedTensors:
        if name not in self._open:
            self._open[name] = CheckedTensors(self.folder / name, self._ranges(name))
        return self._open[name]  # type: ignore[return-value]

    def verify(self, part: int = 0, parts: int = 1) -> int:
        """Reads every `parts`-th range of all files and compares; gives the bytes of it all."""
        total = 0
        for name in self.files:
            with (
                CheckedTensors(self.folder / name, self._ranges(name))
                if name.endswith(".safetensors")
                else CheckedFile(self.folder / name, self._ranges(name)) as file
            ):
                file.verify(part, parts)
                total += file.bytes
        return total

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_plain(value: Any) -> bool:
    """A number, a word, or a few numbers: what torch.optim keeps in a group."""
    if isinstance(value, list):
        return len(value) <= 16 and all(isinstance(v, (int, float)) for v in value)
    return value is None or isinstance(value, (int, float, str))


def _read_small(path: Path) -> bytes:
    with open(path, "rb") as f:
        data = f.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise ValueError(f"it has more than {format_bytes(MAX_TEXT)}")
    return data


def check_shapes(weights: Weights | CheckedTensors, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Every wanted tensor (what it is for → name in the file, shape) must be there in its shape."""
    for label, (name, shape) in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{weights.source} has no '{name}' for {label}; was it saved from another model?")
        got = tuple(weights.shape(name))
        if got != shape:
            raise CheckpointError(
                f"{weights.source}: '{name}' has shape {got}, {label} needs {shape}; was it saved from another model?"
            )
