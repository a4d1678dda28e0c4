"""Reading and writing program files for the commands, with messages instead of exceptions of the system."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from interlace.errors import InterlaceError
from interlace.files import write_atomically


class FileError(InterlaceError):
    """A file that cannot be read or written, or is not what the command needs."""


def read_program_text(file: str) -> str:
    """The text of a program file, or of stdin for "-"."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except FileNotFoundError:
        raise FileError(f"no such file: {file}") from None
    except IsADirectoryError:
        raise FileError(f"{file} is a folder: name a program file") from None
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None
    if not data.strip():
        raise FileError(f"{file} is empty: a program begins with a line such as 'interlace 1 captured'")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise FileError(f"{file} is not a program text: {place} is not UTF-8") from None


def stage_file(file: str, stage: int) -> str:
    """Where the program of a pipeline's stage is, beside that of the first: last.il, last-1.il, last-2.il."""
    path = Path(file)
    return file if stage == 0 else str(path.with_name(f"{path.stem}-{stage}{path.suffix}"))


def read_program(file: str) -> Any:
    """The parsed program. Errors name file, line and column."""
    from interlace import _core

    return _core.Program.parse(read_program_text(file), "stdin" if file == "-" else file)


def _place(file: str) -> Path:
    path = Path(file)
    if path.is_dir():
        raise FileError(f"cannot write {file}: it is a folder")
    if not path.parent.is_dir():
        raise FileError(f"cannot write {file}: there is no folder {path.parent}")
    return path


def write_text(file: str, text: str | bytes) -> None:
    """Writes a whole file or nothing."""
    path, data = _place(file), text.encode() if isinstance(text, str) else text
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_bytes(data)
        else:
            write_atomically(path, data)
    except OSError as error:
        raise FileError(f"cannot write {file}: {error.strerror}") from None


def check_output(file: str) -> None:
    """Finds out that a file cannot be written before the work, not after it."""
    path = _place(file)
    if not path.exists() or path.is_file():
        writable_folder(path.parent)


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes a folder and makes sure that files can be written in it, before hours of work rely on it."""
    path = Path(folder)
    probe = path / f".writable-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except FileExistsError:
        raise FileError(f"cannot write to {path}: it is a file, not a folder") from None
    except OSError as error:
        raise FileError(f"cannot write to {path}: {error.strerror}") from None
    return path
