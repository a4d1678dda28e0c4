"""Files of compiled regions on disk, and who makes them: libraries of a CPU (library.py) and cubins of a device (cuda.py).

    FOLDER/regions/<key>.SUFFIX  the file
    FOLDER/regions/<key>.json    its digest, and what was noted of each region
    FOLDER/regions/<key>.lock    held by the process that makes it; the others of the host wait

Files are this user's alone (private.py), written whole, and read when their digest is what was noted when they were made.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace import private

log = logging.getLogger("interlace")
FORMAT = 3
MAX_BYTES = 256 << 20  # of a file


class RegionsError(Exception):
    """Why there is no library."""


def place(folder: Path | None) -> Path:
    """Where the files are. Error: PrivateError, an OSError."""
    return private.make_folder((folder or Path(_scratch().name)) / "regions")


def read(path: Path, key: str, say: Callable[[str], None]) -> dict[str, Any] | None:
    """What was noted of the file's regions, if it is there as it was made. Error: RegionsError where others could have written it."""
    try:
        noted = json.loads(private.read(path.with_suffix(".json"), 1 << 20))
        if noted["format"] != FORMAT or noted["key"] != key:
            raise ValueError("it is of another key")
        regions = dict(noted["regions"])
        if _digest(regions, private.read(path, MAX_BYTES)) != noted["digest"]:
            raise ValueError("its digest is not the noted one")
        return regions
    except FileNotFoundError:
        return None
    except private.PrivateError as e:
        raise RegionsError(f"{e.filename} is not loaded: {e.strerror}") from None
    except Exception as e:  # any byte may be wrong
        say_once(say, f"{path} is damaged ({str(e) or type(e).__name__}); it is made again")
        return None


def put(path: Path, key: str, regions: dict[str, Any], data: bytes) -> None:
    """The file and its note. The note comes last: without it, or with an older one, the file is not read."""
    noted = {"format": FORMAT, "key": key, "digest": _digest(regions, data), "regions": regions}
    private.write(path, data)
    private.write(path.with_suffix(".json"), json.dumps(noted).encode())


def _digest(regions: dict[str, Any], data: bytes) -> str:
    return hashlib.sha256(json.dumps(regions, sort_keys=True).encode() + b"\n" + data).hexdigest()


def run_within(command: list[str], what: str, limit_s: float, given: bytes = b"", **options: Any) -> tuple[int, str]:
    """A command's exit status and what it said of errors. Error: it takes too long; what it has started goes with this process's session."""
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    try:
        _, errors = run.communicate(given, timeout=limit_s)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
        raise RegionsError(f"{what} took longer than {limit_s:g} s") from None
    return run.returncode, errors.decode(errors="replace")


def take_lock(path: Path) -> int | None:
    """The file's lock, as a descriptor that has it until all copies of it are closed; None: another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return None


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Where there is no cache: a folder of this process alone."""
    return tempfile.TemporaryDirectory(prefix="interlace-regions-")


_said: set[str] = set()


def say_once(say: Callable[[str], None], text: str) -> None:
    """Once in a process."""
    if text not in _said:
        _said.add(text)
        say(text)
