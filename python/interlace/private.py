"""What is kept for this user alone: folders 0700, files 0600, nothing of others believed; and the key that marks what was made here."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import zlib
from pathlib import Path

OFF = "off"
KEY_BYTES = 32


class PrivateError(OSError):
    """A file or folder that others could have written, or that is not what it should be."""


def cache_folder(given: str | None = None) -> Path | None:
    """The one folder of every cache: `given`, $INTERLACE_CACHE or the user's cache; None: "off"."""
    given = given or os.environ.get("INTERLACE_CACHE")
    if given == OFF:
        return None
    return Path(given).expanduser() if given else user_folder()


def user_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "interlace"


def temporary_folder() -> Path:
    """Where a cache lies that cannot lie in the user's."""
    return Path(tempfile.gettempdir()) / f"interlace-{os.getuid()}"


def make_folder(folder: Path) -> Path:
    """Made with its parents, for this user alone. Error: it is another's, or others may write into it."""
    with contextlib.suppress(FileExistsError):
        try:
            folder.mkdir(mode=0o700)
        except FileNotFoundError:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
    check(os.stat(folder), folder)
    if os.lstat(folder).st_uid not in (0, os.getuid()):
        raise PrivateError(0, "it is a link that another user made", str(folder))
    return folder


def check(status: os.stat_result, path: Path) -> None:
    """Error: it belongs to another user (not root), or others may write to it."""
    if status.st_uid not in (0, os.getuid()):
        raise PrivateError(0, f"it belongs to another user (number {status.st_uid})", str(path))
    if stat.S_IMODE(status.st_mode) & 0o002:
        raise PrivateError(0, f"others may write to it: chmod go-w {path}", str(path))


def read(path: Path, most: int) -> bytes:
    """A file's bytes. Error: not a plain file, another's, or more than `most` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PrivateError(0, "it is no file", str(path))
        check(status, path)
        if status.st_size > most:
            raise PrivateError(0, f"it has {status.st_size} bytes, more than the {most} that it may have", str(path))
        return file.read(most)


def write(path: Path, data: bytes) -> None:
    """Whole or not at all, readable by this user alone."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def unpack(data: bytes, bytes_: int, most: int) -> bytes:
    """Decompressed, `bytes_` as was said beforehand. Error: another number, or more than `most`."""
    if not 0 <= bytes_ <= most:
        raise ValueError(f"it says that it holds {bytes_} bytes, of which {most} are allowed")
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, bytes_ + 1)
    if len(found) != bytes_ or not unpacker.eof:
        raise ValueError("it does not hold as many bytes as it says")
    return found


# ---- what was made here ----


def user_key() -> bytes | None:
    """This user's key, made when first asked for; None where it can be neither read nor written."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    path = Path(home) / "interlace" / "key"
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            found = read(path, KEY_BYTES)
            return found if len(found) == KEY_BYTES else None
        beside = path.with_name(f"key.{secrets.token_hex(4)}")
        beside.touch(mode=0o600)
        beside.write_bytes(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # of two that make one at once, the first stays
            os.link(beside, path)
        beside.unlink()
        return read(path, KEY_BYTES)
    return None


def mark(text: str) -> str | None:
    """What shows that this user's interlace wrote a text."""
    key = user_key()
    return None if key is None else hmac.new(key, b"interlace made here 1\n" + text.encode(), hashlib.sha256).hexdigest()


def made_here(text: str, marked: object) -> bool:
    own = mark(text)
    return own is not None and isinstance(marked, str) and hmac.compare_digest(own.encode(), marked.encode())
