"""The secret of a run: what its ranks have and strangers have not, and the keys that are made of it.

`interlace train` makes one and hands it to its ranks. Ranks that torchrun or Slurm start take it from the environment:

    INTERLACE_SECRET        the secret itself, 16 characters at least
    INTERLACE_SECRET_FILE   a file that holds it, which nobody but its owner may read

With INTERLACE_ENCRYPT=1 on every rank, what ranks send one another is encrypted with keys made of it (docs/security.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat

from interlace.errors import InterlaceError

VALUE, FILE = "INTERLACE_SECRET", "INTERLACE_SECRET_FILE"
MESH_KEY = "INTERLACE_MESH_KEY"  # 64 hexadecimal digits; the connections between ranks (src/transport) read it
ENCRYPT = "INTERLACE_ENCRYPT"  # 1 or 0; the connections between ranks read it, too
LEAST, MOST = 16, 4096  # bytes of a secret


class SecretError(InterlaceError):
    """The secret of a run cannot be used."""


def fresh() -> str:
    return secrets.token_hex(32)


def given() -> bytes | None:
    """The secret that the environment names. Error: too short, or a file that others may read."""
    value = os.environ.get(VALUE, "").encode()
    where = VALUE
    if not value:
        where = os.environ.get(FILE, "")
        if not where:
            return None
        value = _read(where)
    if not LEAST <= len(value) <= MOST:
        raise SecretError(f"the secret of {where} has {len(value)} bytes; it needs {LEAST} to {MOST}, for example of: openssl rand -hex 32")
    return value


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.getuid()) or stat.S_IMODE(status.st_mode) & 0o077:
                raise SecretError(f"{path} can be read by others or is theirs; make it your own: chmod 600 {path}")
            return file.read(MOST + 2).strip()
    except OSError as e:
        raise SecretError(f"{FILE} names {path}, which cannot be read: {e.strerror}") from None


def encrypts() -> bool:
    """Whether ranks encrypt. Error: neither 0 nor 1, or this machine cannot."""
    value = os.environ.get(ENCRYPT, "")
    if value not in ("", "0", "1"):
        raise SecretError(f"{ENCRYPT} is '{value}'; it must be 1 or 0")
    if value != "1":
        return False
    from interlace import _runtime

    try:
        _runtime.find_crypto()
    except _runtime.Error as e:
        raise SecretError(str(e)) from None
    return True


def derive(secret: bytes, use: str) -> bytes:
    """A key of 32 bytes for one use."""
    return hmac.new(secret, b"interlace 1 " + use.encode(), hashlib.sha256).digest()
