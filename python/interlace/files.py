"""Files read and written whole, with errors that name them."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """Writes through a temporary file beside it, so that a reader or a full disk never leaves half a file."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def read_text(file: str | Path, what: str, error: type[Exception]) -> str:
    """A text file. `what` it is to be ("a plan"). Error: no such file, none that can be read, no text."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"no such {what.partition(' ')[2]}: {file}") from None
    except UnicodeDecodeError:
        raise error(f"{file} is not {what}: it is not UTF-8 text") from None
    except OSError as e:
        raise error(f"cannot read {file}: {e.strerror}") from None
