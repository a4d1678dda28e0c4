"""Safetensors files, laid out before they are written and read with every byte checked.

Several ranks write one file, each its own ranges at their places, so the layout comes first. Reading takes nothing for granted: the
header's sizes and offsets are checked against the file, the bytes against the checksums of checksums.json.

    file      | length | header, JSON | tensor | tensor | ...      no gaps, no overlaps
    checksums |      head             |  chunk |  chunk  | ...     XXH64 of ranges of at most 1 MiB that cover the file
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlace.errors import UNREADABLE, InterlaceError

Tensor = torch.Tensor
BLOCK = 4096  # bytes; what direct writes are made of
CHUNK = 1 << 20  # bytes of a range that has a checksum of its own, at most
MAX_CHUNK = 64 << 20  # what a reader takes
MAX_HEADER = 100 << 20  # as the safetensors library has it
MAX_DIMS = 64  # as torch has it

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
Declared = tuple[str, torch.dtype, tuple[int, ...]]


class CheckpointError(InterlaceError):
    """A checkpoint cannot be written or read."""


class DamageError(CheckpointError):
    """A file of a checkpoint is not what was written: cut off, torn, or with flipped bits."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: `offset` counts from the file's first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Range:
    """The checksum of bytes [offset, offset + bytes) of a file."""

    offset: int
    bytes: int
    sum: int


class Layout:
    """Where every tensor of a file will lie. `head` is what comes before the first, `bytes` the size of it all.

    The head fills whole blocks, and tensors of whole blocks come before the others (a layer norm's weight), so nearly all that a rank
    writes begins and ends with a block and goes past the page cache.
    """

    def __init__(self, tensors: Iterable[Declared], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        places: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []
        end = 0
        sizes: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
        for name, dtype, shape in tensors:
            if dtype not in NAMES:
                raise CheckpointError(f"'{name}' has dtype {dtype}, which safetensors files cannot hold")
            sizes.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
        for name, dtype, shape, size in sorted(sizes, key=lambda t: t[3] % BLOCK != 0):
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            places.append((name, dtype, shape, end, size))
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % BLOCK)
        self.head = struct.pack("<Q", len(text)) + text
        self.entries = {n: Entry(d, tuple(s), len(self.head) + at, size) for n, d, s, at, size in places}
        self.bytes = len(self.head) + end


def read_header(data: bytes, size: int, what: str) -> dict[str, Entry]:
    """The entries of a header (`data`, with its length word) of a file of `size` bytes. Error: anything that cannot be."""

    def wrong(why: str) -> DamageError:
        return DamageError(f"{what} cannot be read as a safetensors file (cut off or edited?): {why}")

    try:
        header = json.loads(data[8:])
    except (ValueError, RecursionError) as e:
        raise wrong(f"its header is no JSON ({e})") from None
    if not isinstance(header, dict):
        raise wrong("its header is no JSON object")
    begin, end = len(data), len(data)
    entries: dict[str, Entry] = {}
    places: list[tuple[int, int, str]] = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype = DTYPES[value["dtype"]]
            if len(value["shape"]) > MAX_DIMS:
                raise ValueError(f"{len(value['shape'])} dimensions")
            shape = tuple(_count(n) for n in value["shape"])
            first, last = (_count(n) for n in value["data_offsets"])
        except UNREADABLE as e:
            raise wrong(f"entry '{name}' is no tensor ({type(e).__name__}: {e})") from None
        if last - first != math.prod(shape) * dtype.itemsize:
            raise wrong(f"'{name}' of shape {list(shape)} does not fill bytes {first} to {last}")
        entries[name] = Entry(dtype, shape, begin + first, last - first)
        places.append((begin + first, begin + last, name))
    for first, last, name in sorted(places):
        if first != end:
            raise wrong(f"'{name}' does not begin where the tensor before it ends (byte {end})")
        end = last
    if end != size:
        raise wrong(f"its tensors end at byte {end}, the file has {size}")
    return entries


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]} is no size")
    return value


def ranges_of(value: Any, size: int, what: str) -> list[Range]:
    """Checksums as checksums.json has them, [[offset, bytes, "hex"], ...]. Error: they do not cover `size` bytes exactly."""
    try:
        found = [Range(_count(offset), _count(count), int(text, 16)) for offset, count, text in value]
    except UNREADABLE as e:
        raise DamageError(f"the checksums of {what} cannot be read ({e})") from None
    end = 0
    for r in found:
        if r.offset != end or not 0 < r.bytes <= MAX_CHUNK:
            raise DamageError(f"the checksums of {what} do not cover it: byte {end} and following")
        end += r.bytes
    if end != size:
        raise DamageError(f"{what} has {size} bytes, its checksums are of {end}: it was cut off or edited")
    return found


def checksum_text(data: Any) -> str:
    from interlace import _core

    return f"{_core.checksum(data):016x}"


def sums_of(data: bytes) -> list[list[Any]]:
    """The ranges of a file that lies in memory, as checksums.json has them."""
    view = memoryview(data)
    return [[i, len(view[i : i + CHUNK]), checksum_text(view[i : i + CHUNK])] for i in range(0, len(data), CHUNK)]


class CheckedFile(contextlib.AbstractContextManager):
    """A file whose bytes are compared with their checksums whenever they are read. Close it, or use it in a with statement."""

    def __init__(self, path: Path, ranges: Any, file: int | None = None) -> None:
        """`file`: a descriptor of it that somebody else has open, and closes."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if file is None else os.dup(file)
        except FileNotFoundError:
            raise DamageError(f"no such file: {path}") from None
        except OSError as e:
            raise CheckpointError(f"cannot read {path}: {e.strerror}") from None
        try:
            self.bytes = os.fstat(self._file).st_size
            self.ranges: Sequence[Range] = ranges_of(ranges, self.bytes, str(path))
        except BaseException:
            os.close(self._file)
            raise
        self._begins = [r.offset for r in self.ranges]
        self._last: tuple[int, bytes] = (-1, b"")

    def _range(self, i: int) -> bytes:
        """The bytes of range i, checked. The last one is remembered: neighbours often lie in the same."""
        from interlace import _core

        if self._last[0] == i:
            return self._last[1]
        r = self.ranges[i]
        try:
            parts, at = [], r.offset
            while at < r.offset + r.bytes:
                part = os.pread(self._file, r.offset + r.bytes - at, at)
                if not part:
                    raise DamageError(f"{self.path} ends at byte {at}: it was cut off")
                parts.append(part)
                at += len(part)
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path} at byte {at}: {e.strerror}") from None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        found = _core.checksum(data)
        if found != r.sum:
            raise DamageError(
                f"{self.path} is damaged{self._names(r)}: bytes {r.offset} to {r.offset + r.bytes} have the checksum "
                f"{found:016x}, {r.sum:016x} was written; use an older checkpoint or another copy"
            )
        self._last = (i, data)
        return data

    def _names(self, r: Range) -> str:
        """ " in 'layer.weight'": what of the file lies in a range."""
        return ""

    def read_bytes(self, begin: int, end: int) -> bytearray:
        out = bytearray(end - begin)
        i = bisect.bisect_right(self._begins, begin) - 1
        at = begin
        while at < end:
            r = self.ranges[i]
            piece = memoryview(self._range(i))[at - r.offset : end - r.offset]
            out[at - begin : at - begin + len(piece)] = piece
            at += len(piece)
            i += 1
        return out

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Reads and checks every `parts`-th range."""
        for i in range(part, len(self.ranges), parts):
            self._range(i)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._last = (-1, b"")

    def __exit__(self, *_: object) -> None:
        self.close()


class CheckedTensors(CheckedFile):
    """The tensors of a checked safetensors file, by the interface of materialize.Weights."""

    def __init__(self, path: Path, ranges: Any, file: int | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        super().__init__(path, ranges, file)
        try:
            length = struct.unpack("<Q", self.read_bytes(0, 8))[0] if self.bytes >= 8 else -1
            if not 0 <= length <= min(MAX_HEADER, self.bytes - 8):
                raise DamageError(f"{path} cannot be read as a safetensors file (cut off or edited?): no header")
            self.entries = read_header(bytes(self.read_bytes(0, 8 + length)), self.bytes, str(path))
        except BaseException:
            self.close()
            raise

    @property
    def source(self) -> Path:
        return self.path

    def _names(self, r: Range) -> str:
        touched = [n for n, e in self.entries.items() if e.offset < r.offset + r.bytes and r.offset < e.offset + e.bytes]
        more = f" and {len(touched) - 1} more" if len(touched) > 1 else ""
        return f" in '{touched[0]}'{more}" if touched else " in its header"

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> list[int]:
        return list(self.entries[name].shape)

    def read_range(self, name: str, start: int, end: int) -> Tensor:
        """Elements [start, end) of the tensor in row-major order."""
        e = self.entries[name]
        if start >= end:
            return torch.empty(0, dtype=e.dtype)
        size = e.dtype.itemsize
        return torch.frombuffer(self.read_bytes(e.offset + start * size, e.offset + end * size), dtype=e.dtype)

    def read(self, name: str) -> Tensor:
        e = self.entries[name]
        return self.read_range(name, 0, e.bytes // e.dtype.itemsize).reshape(e.shape)
