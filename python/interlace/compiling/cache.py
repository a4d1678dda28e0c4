"""Compiled programs on disk: what a later start with the same model need not do again. Rank 0 reads and writes it.

    FOLDER/programs/capture-<key>.bin     captured text, tensors of the trace, dropout probabilities
    FOLDER/programs/plan-<key>.bin        text after the passes, their reports
    file = one line of JSON (format, versions, digest and size of what follows, packed and not) + zlib(JSON line + tensors)

Files are this user's alone (private.py), and no larger than they say, packed and unpacked. Keys leave the versions out, so a file of
another version is found, said to be so and replaced. Files are written whole: beside, then renamed; two runs may do so at once, the later
one stays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from interlace import private
from interlace.version import __version__

log = logging.getLogger("interlace")
FORMAT = 2
MAX_FILES = 400  # the oldest go
MAX_PACKED, MAX_BYTES = 256 << 20, 1 << 30  # of a file, and of what it holds


class Cache:
    """Records under keys. Never raises for the sake of the disk: what cannot be read or written is made again and said once."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder / "programs" if folder is not None else None
        self.notes: list[str] = []

    def get(self, kind: str, key: str | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        if self.folder is None or key is None:
            return None
        path = self._path(kind, key)
        try:
            data = private.read(path, MAX_PACKED)
        except FileNotFoundError:
            return None
        except OSError as e:
            self._say(f"cannot read {path}: {e.strerror}; it is compiled again")
            return None
        try:
            first, _, packed = data.partition(b"\n")
            head = json.loads(first)
            if head["format"] != FORMAT or head["versions"] != versions():
                self._say(f"programs in {self.folder} are of another version ({head['versions']}; here {versions()}) and compiled again")
                return None
            if head["bytes"] != len(packed) or head["digest"] != hashlib.sha256(packed).hexdigest():
                raise ValueError("its digest is not that of its contents")
            line, _, tensors = private.unpack(packed, int(head["unpacked"]), MAX_BYTES).partition(b"\n")
            with contextlib.suppress(OSError):
                os.utime(path)
            return json.loads(line), load_tensors(tensors) if tensors else {}
        except Exception as e:  # any byte may be wrong
            self._say(f"{path} is damaged ({str(e) or type(e).__name__}); it is compiled again and replaced")
            return None

    def put(self, kind: str, key: str | None, record: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
        if self.folder is None or key is None:
            return
        whole = json.dumps(record).encode() + b"\n" + (save_tensors(tensors) if tensors else b"")
        packed = zlib.compress(whole, 1)
        if len(packed) > MAX_PACKED or len(whole) > MAX_BYTES:
            return
        digest = hashlib.sha256(packed).hexdigest()
        head = {"format": FORMAT, "versions": versions(), "bytes": len(packed), "unpacked": len(whole), "digest": digest}
        path = self._path(kind, key)
        try:
            private.make_folder(path.parent.parent)
            private.make_folder(path.parent)
            private.write(path, json.dumps(head).encode() + b"\n" + packed)
            self._drop_oldest()
        except OSError as e:
            self._say(f"cannot keep the compiled program in {path}: {e.strerror}")

    def _path(self, kind: str, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{kind}-{key[:40]}.bin"

    def _drop_oldest(self) -> None:
        assert self.folder is not None
        files = list(self.folder.glob("*.bin"))
        if len(files) > MAX_FILES:
            with contextlib.suppress(OSError):
                for old in sorted(files, key=lambda f: f.stat().st_mtime)[: len(files) - MAX_FILES]:
                    old.unlink(missing_ok=True)

    def _say(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            log.warning("%s", text)


_COMPLEX = " complex"  # ends the names of tensors that safetensors has no type for; they go as pairs of numbers


def save_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    pairs = {n + _COMPLEX if t.is_complex() else n: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for n, t in tensors.items()}
    return bytes(save({n: t.contiguous() for n, t in pairs.items()}))


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    found = load(data).items()
    return {n.removesuffix(_COMPLEX): torch.view_as_complex(t) if n.endswith(_COMPLEX) else t for n, t in found}


@functools.cache
def versions() -> str:
    """Of everything that makes programs: "interlace 0.1.0 1a2b3c, torch 2.13.0". The digest is that of interlace's own files."""
    from interlace import _core, _runtime

    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    binaries = [Path(_core.__file__), Path(_runtime.__file__)]
    for file in sorted([*root.rglob("*.py"), *binaries]):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return f"interlace {__version__} {digest.hexdigest()[:12]}, torch {torch.__version__}"


def key_of(*parts: str) -> str:
    """One key of several texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()
