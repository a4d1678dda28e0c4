"""Writing a checkpoint's folder: whose it is, the files written aside, and the rename that puts them in place whole.

runs/.book.lock               held while a trainer saves to runs/book: a second run is refused
runs/.book.1f3a9c02.part      being written
runs/book                     the newest that is whole
runs/book.step-40             one that it replaced, with keep=N above 1
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from interlace.checkpoint.contents import CHECKSUMS, FORMAT, TRAINER, is_own
from interlace.checkpoint.disk import Disk
from interlace.checkpoint.tensor_file import CheckpointError, Layout, checksum_text, sums_of
from interlace.config import format_bytes
from interlace.errors import UNREADABLE

log = logging.getLogger("interlace")
_told: set[str] = set()


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
            # Through a descriptor of its own, soon closed: one that stays open for writing would keep the file system from being
            # made read-only.
            words = os.open(self.path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(words, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            finally:
                os.close(words)
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
    """A folder being written beside its final place. commit() swaps it in; until then, and after discard(), the old one stands.

    `large` are the files that the ranks fill range by range: they are made here with their heads and their room. Of them, cover()
    takes the checksums; the small ones, `extra` and those of add(), are written by commit().
    """

    def __init__(self, final: Path, large: Mapping[str, Layout], extra: Mapping[str, str | bytes], disk: Disk | None = None) -> None:
        self.final, self._disk = final, disk or Disk()
        self._large = dict(large)
        self._sums: dict[str, dict[str, Any]] = {}
        check_place(final)
        for name in extra:
            if Path(name).name != name or is_own(name) or name.startswith("."):
                raise CheckpointError(f"'{name}' cannot be the name of an extra file of a checkpoint")
        parent = final.parent
        self.folder = parent / f".{final.name}.{uuid.uuid4().hex[:8]}.part"
        needed_bytes = sum(layout.bytes for layout in large.values())
        with saving(final):
            parent.mkdir(parents=True, exist_ok=True)
            room = shutil.disk_usage(parent)
            if room.free < needed_bytes and room.total > 0:
                raise CheckpointError(
                    f"{parent} has {format_bytes(room.free)} free, the checkpoint needs {format_bytes(needed_bytes)}; make room or save "
                    "elsewhere (nothing was written, an older checkpoint there is untouched)"
                )
            self._disk.make_folder(self.folder)
            try:
                for name, layout in large.items():
                    self._disk.create(self.folder / name, layout.head, layout.bytes)
            except BaseException:
                self.discard()
                raise
        self._small = {name: _bytes(data) for name, data in extra.items()}

    def add(self, name: str, data: str | bytes) -> None:
        """A small file; commit() writes it."""
        self._small[name] = _bytes(data)

    def cover(self, sums: Iterable[tuple[int, int, int, str]]) -> None:
        """The checksums of what was written to the large files: (index of the file, offset, bytes, checksum). They must cover them."""
        found = list(sums)
        for i, (name, layout) in enumerate(self._large.items()):
            ranges = sums_of(layout.head) + sorted([o, c, s] for f, o, c, s in found if f == i)
            end = 0
            for offset, count, _ in [*ranges, (layout.bytes, 0, "")]:
                if offset != end:
                    raise AssertionError(f"no rank wrote byte {end} of {name}")
                end += count
            self._sums[name] = {"bytes": layout.bytes, "ranges": ranges}

    def _write(self, name: str, content: bytes) -> None:
        with saving(self.final):
            self._disk.write(self.folder / name, content)
        self._sums[name] = {"bytes": len(content), "ranges": sums_of(content)}

    def commit(self, keep: int = 1) -> None:
        """Puts it in place. Of the checkpoints that were there, the newest keep - 1 stay beside it."""
        for name, content in self._small.items():
            self._write(name, content)
        body = {"format": FORMAT, "checksum": "xxh64", "files": self._sums}
        text = json.dumps(body, separators=(",", ":"))
        self._write(CHECKSUMS, (text[:-1] + f',"self":"{checksum_text(text.encode())}"}}\n').encode())
        with saving(self.final):
            replaces = self.final.exists()
            if replaces:
                self._carry_over()
            self._disk.sync_folder(self.folder)
            if not replaces:
                self._disk.rename(self.folder, self.final)
            else:
                self._exchange()
            # The names last before anything goes: a disk that lost power may have done the later and not the earlier.
            self._disk.sync_folder(self.final.parent)
            if replaces:
                place = _own_name(self.folder, self.final)  # what was replaced, if it is a checkpoint
                if keep > 1 and place is not None:
                    self._remove(place)
                    self._disk.rename(self.folder, place)
                    self._disk.sync_folder(self.final.parent)
                else:
                    self._disk.remove_tree(self.folder)
            for old in kept_checkpoints(self.final)[max(0, keep - 1) :] if keep > 1 else []:
                self._remove(old)

    def _exchange(self) -> None:
        """Swaps the new folder with the one that is there, at one blow where the system can. Else (NFS) by renames: a run that is killed
        between them leaves the old checkpoint under the name of an older one, where --resume auto finds it."""
        if self._disk.exchange(self.folder, self.final):
            return
        aside = _own_name(self.final, self.final) or self.final.with_name(f"{self.final.name}.old")
        self._remove(aside)
        self._disk.rename(self.final, aside)
        self._disk.rename(self.folder, self.final)
        self._disk.rename(aside, self.folder)

    def _remove(self, folder: Path) -> None:
        """A whole checkpoint or none has its name at any time; what is left of one under way goes with the next lock."""
        if folder.exists():
            aside = self.final.with_name(f".{self.final.name}.{uuid.uuid4().hex[:8]}.part")
            self._disk.rename(folder, aside)
            self._disk.sync_folder(self.final.parent)
            self._disk.remove_tree(aside)

    def discard(self) -> None:
        self._disk.remove_tree(self.folder)

    def _carry_over(self) -> None:
        """Files that others put into the folder (a tokenizer, the text's tokens) stay in it: as links, so size does not matter."""
        for entry in self.final.iterdir():
            target = self.folder / entry.name
            if target.exists():
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, target, symlinks=True, copy_function=lambda a, b: self._disk.link(Path(a), Path(b)))
            else:
                self._disk.link(entry, target)


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


def kept_checkpoints(final: Path) -> list[Path]:
    """The older checkpoints beside a folder, the newest first: those of this user, of root, and of whom the folder around them belongs to.
    In one where all may write (/tmp), others could lay theirs."""
    pattern = re.compile(re.escape(final.name) + r"\.step-(\d{1,18})")
    found = [(int(m.group(1)), p) for p in final.parent.glob("*") if (m := pattern.fullmatch(p.name)) and p.is_dir()]
    owners = {0, os.getuid(), final.parent.stat().st_uid} if found else set()
    return [p for _, p in sorted(found, reverse=True) if p.lstat().st_uid in owners]


def place_of(folder: str | Path) -> Path:
    """The folder itself, absolute. A link is followed: what it points to is replaced, and not the link."""
    final = Path(os.path.abspath(folder))
    if not final.is_symlink():
        return final
    target = Path(os.path.realpath(final))
    if str(final) not in _told:
        _told.add(str(final))
        log.warning("%s is a link: the checkpoint is saved where it points, %s", final, target)
    return target


def check_place(final: Path) -> None:
    """Error: a place where no checkpoint folder can be."""
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file; a checkpoint is a folder")
    for place in (Path.cwd(), Path.home()):  # the folder is replaced by a new one, which nobody may be standing in
        if place == final or final in place.parents:
            raise CheckpointError(f"{final} holds {place}; name a folder of the checkpoint's own, for example {final}/checkpoint")


@contextlib.contextmanager
def saving(where: Path) -> Iterator[None]:
    """Turns the system's refusals into one clear error."""
    try:
        yield
    except OSError as e:
        reason = {
            errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "a file became too big", errno.EACCES: "no permission to write there",
            errno.EPERM: "no permission to write there", errno.EROFS: "the file system is read-only",
        }.get(e.errno or 0, e.strerror or str(e))  # fmt: skip
        raise CheckpointError(f"cannot save to {where}: {reason}; an older checkpoint there is untouched") from e


def _own_name(folder: Path, final: Path) -> Path | None:
    """The name beside `final` that an older checkpoint gets; None: the folder holds none."""
    try:
        step = int(json.loads((folder / TRAINER).read_bytes())["step"])
    except (OSError, *UNREADABLE):
        return None
    return final.with_name(f"{final.name}.step-{step}")
