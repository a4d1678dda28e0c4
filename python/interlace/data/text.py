"""Finding and reading text, with messages a person can act on.

A text is one file (UTF-8 text, .jsonl with a document a line, .parquet with one a row), a folder of files, or (by default) the Python
standard library's own sources, which every machine has. Files are read in pieces, so memory does not grow with the text. A file that was
named must be UTF-8 text; in a folder, files that are plainly not text (a NUL byte or invalid UTF-8 in the first 8 KiB) are skipped and
counted.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from interlace.errors import InterlaceError

SNIFF_BYTES = 8192
JSON_LINES, PARQUET = (".jsonl", ".ndjson"), ".parquet"
FIELDS = ("text", "content")  # what a document is called in them
PIECE_BYTES = 1 << 18
# Folders of the standard library that hold no prose or code of its own, or are absent on some machines.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(InterlaceError):
    """The text or the data settings cannot be used; the message says what, where, and what to do."""


@dataclass(frozen=True)
class TextSource:
    """The files of a text in a fixed order."""

    name: str
    files: tuple[Path, ...]
    bytes: int
    skipped: tuple[Path, ...] = field(default=())


def find_text(path: str | os.PathLike[str] | None = None) -> TextSource:
    """The files behind `path`: a file, a folder, or None for the Python standard library's own sources."""
    if path is None:
        return _standard_library()
    root = Path(path)
    try:
        if root.is_dir():
            return _folder(root)
        if not root.exists():
            raise DataError(f"no such file or folder: {root}")
        if not root.is_file():
            raise DataError(f"{root} is neither a file nor a folder: give a text file or a folder of text files")
        size = root.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {root}: {error.strerror}") from error
    if size == 0:
        raise DataError(f"{root} is empty: give a file with text in it")
    return TextSource(str(root), (root,), size)


def _standard_library() -> TextSource:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, lambda name: name.endswith(".py"), STDLIB_EXCLUDED)
    files = [file for file in files if _looks_like_text(file)]
    if not files:
        raise DataError(f"no Python sources in {root}: name a text with --text PATH")
    return TextSource("the Python standard library", tuple(files), sum(f.stat().st_size for f in files))


def _folder(root: Path) -> TextSource:
    seen = _walk(root, lambda name: True, {"__pycache__"})
    files = [file for file in seen if _looks_like_text(file)]
    if not files:
        what = "is empty" if not seen else f"has no text files ({len(seen)} looked at are binary or empty)"
        raise DataError(f"the folder {root} {what}: give a folder with UTF-8 text files in it")
    kept = set(files)
    skipped = tuple(file for file in seen if file not in kept)
    return TextSource(str(root), tuple(files), sum(f.stat().st_size for f in files), skipped)


def _walk(root: Path, wanted, excluded: set[str]) -> list[Path]:
    """Files below root in a fixed order; hidden names and links to folders are left out."""

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        for name in sorted(names):
            if wanted(name) and not name.startswith(".") and os.path.isfile(os.path.join(folder, name)):
                found.append(Path(folder, name))
    return found


def _looks_like_text(file: Path) -> bool:
    if file.suffix == PARQUET:
        return True
    try:
        with open(file, "rb") as stream:
            head = stream.read(SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    if not head or b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def read_documents(file: Path) -> Iterator[tuple[str, bool]]:
    """A file's text in pieces, and of each whether a document ends behind it. Of .jsonl lines and .parquet rows, it is what they
    have as "text" or "content". Error: a line or a table without either."""
    if file.suffix in JSON_LINES:
        yield from ((text, True) for text in _json_lines(file))
    elif file.suffix == PARQUET:
        yield from ((text, True) for text in _parquet_rows(file))
    else:
        yield from ((piece, False) for piece in read_text(file))
        yield "", True


def _json_lines(file: Path) -> Iterator[str]:
    number, held = 0, ""
    for piece in read_text(file):
        held += piece
        lines = held.split("\n")
        held = lines.pop()
        for line in lines:
            number += 1
            if line.strip():
                yield _document(file, number, line)
    if held.strip():
        yield _document(file, number + 1, held)


def _document(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}, line {number}: not JSON ({error}); each line must be an object such as {{\"text\": \"...\"}}") from None
    for field_name in FIELDS if isinstance(found, dict) else ():
        if isinstance(found.get(field_name), str):
            return found[field_name]
    has = f"has {', '.join(map(repr, list(found)[:8]))}" if isinstance(found, dict) else f"is a {type(found).__name__}"
    raise DataError(f"{file}, line {number} {has}: it needs the document as \"{FIELDS[0]}\" or \"{FIELDS[1]}\"")


def _parquet_rows(file: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{file} is a parquet file, which pyarrow reads: pip install pyarrow, or convert it to .jsonl") from None
    try:
        with parquet.ParquetFile(file) as table:
            columns = [name for name in FIELDS if name in table.schema_arrow.names]
            if not columns:
                has = ", ".join(map(repr, table.schema_arrow.names[:8]))
                raise DataError(f"{file} has the columns {has}: it needs the documents as \"{FIELDS[0]}\" or \"{FIELDS[1]}\"")
            for batch in table.iter_batches(columns=columns[:1]):
                for value in batch.column(0).to_pylist():
                    if value is None or isinstance(value, str):
                        yield value or ""
                    else:
                        raise DataError(f"{file}: column '{columns[0]}' holds {type(value).__name__}, not text")
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as parquet: {' '.join(str(error).split())[:200]}") from None


def read_text(file: Path) -> Iterator[str]:
    """The text of one file in pieces that end at line ends where lines are not longer than a piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0  # bytes given to the decoder so far
    held, started = "", False
    try:
        stream = open(file, "rb")  # noqa: SIM115 - closed below; the open itself needs its own message
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    with stream:
        while True:
            try:
                chunk = stream.read(PIECE_BYTES)
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from error
            _check_chunk(file, chunk, read)
            pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = read - pending + error.start
                raise DataError(
                    f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {position}; "
                    f"convert it first, for example: iconv -f latin1 -t utf-8 {file}"
                ) from None
            if not started and text:
                started, text = True, text.removeprefix("\ufeff")
            read += len(chunk)
            held += text
            if not chunk:
                break
            cut = held.rfind("\n") + 1
            if cut == 0 and len(held) >= 4 * PIECE_BYTES:
                cut = len(held)
            if cut:
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held


def _check_chunk(file: Path, chunk: bytes, read: int) -> None:
    if read == 0 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{file} is UTF-16 text; convert it first: iconv -f utf-16 -t utf-8 {file}")
    nul = chunk.find(0)
    if nul >= 0:
        raise DataError(f"{file} is a binary file (a zero byte at position {read + nul}): give UTF-8 text")
