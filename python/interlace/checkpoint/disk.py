"""All that a checkpoint does to a disk: files, names and what makes both last. One interface, so that tests can put a disk in its place
that loses, at a power cut, what was not synced (tests/python/simulated_disk.py).

A file's bytes last once the file was synced; a name (of a new file, a rename, a removal) once its folder was.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path


class Disk:
    """The real one."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: bytes) -> None:
        """A file, synced."""
        with open(path, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())

    def create(self, path: Path, head: bytes, size: int) -> None:
        """A large file with its head and its room; the ranks write the rest, and sync it (src/io/output_file.h)."""
        from interlace import _runtime

        _runtime.create_file(str(path), head, size)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def link(self, source: Path, target: Path) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(source, target, follow_symlinks=False)

    def exchange(self, a: Path, b: Path) -> bool:
        """Swaps two names at one blow; false: this system cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            return False
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        raise OSError(code, os.strerror(code), str(b))
