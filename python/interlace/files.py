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
