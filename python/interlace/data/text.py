"""Finding and reading text, with messages a person can act on.

A text is one file (UTF-8 text, .jsonl with a document a line, tables such as .parquet with one a row, which Hugging Face `datasets` reads),
a folder of files, or (by default) the Python standard library's own sources, which every machine has. Files are read in pieces, so memory
does not grow with the text. A file that was named must be UTF-8 text; in a folder, files that are plainly not text (a NUL byte or invalid
UTF-8 in the first 8 KiB) are skipped and counted.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from interlace.errors import InterlaceError

SNIFF_BYTES = 8192
JSON_LINES = (".jsonl", ".ndjson")
# What `datasets` reads, and its method for it.
TABLES = {".parquet": "from_parquet", ".jsonl.gz": "from_json", ".json.gz": "from_json", ".jsonl.zst": "from_json", ".json.zst": "from_json"}
FIELDS = ("text", "content")  # what a document is called in them, where no column is named
PIECE_BYTES = 1 << 18
ROWS = 1000  # of a table, read at once
# Folders of the standard library that hold no prose or code of its own, or are absent on some machines.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(InterlaceError):
    """The text or the data settings cannot be used; the message says what, where, and what to do."""


@dataclass(frozen=True)
class TextSource:
    """The files of a text in a fixed order; `columns`: what a document may be called in them."""

    name: str
    files: tuple[Path, ...]
    bytes: int
    skipped: tuple[Path, ...] = field(default=())
    columns: tuple[str, ...] = FIELDS

    def documents(self, file: Path, skip: int = 0) -> Iterator[tuple[str, bool]]:
        return read_documents(file, self.columns, skip)


def find_text(path: str | os.PathLike[str] | None = None, column: str | None = None) -> TextSource:
    """The files behind `path`: a file, a folder, or None for the Python standard library's own sources."""
    if path is None:
        return _standard_library()
    root = Path(path)
    try:
        if root.is_dir():
            return _folder(root, column)
        if not root.exists():
            raise DataError(f"no such file or folder: {root}")
        if not root.is_file():
            raise DataError(f"{root} is neither a file nor a folder: give a text file or a folder of text files")
        size = root.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {root}: {error.strerror}") from error
    if size == 0:
        raise DataError(f"{root} is empty: give a file with text in it")
    return TextSource(str(root), (root,), size, columns=(column,) if column else FIELDS)


def _standard_library() -> TextSource:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, lambda name: name.endswith(".py"), STDLIB_EXCLUDED)
    files = [file for file in files if _looks_like_text(file)]
    if not files:
        raise DataError(f"no Python sources in {root}: name a text with --text PATH")
    return TextSource("the Python standard library", tuple(files), sum(f.stat().st_size for f in files))


def _folder(root: Path, column: str | None) -> TextSource:
    seen = _walk(root, lambda name: True, {"__pycache__"})
    files = [file for file in seen if _looks_like_text(file)]
    if not files:
        what = "is empty" if not seen else f"has no text files ({len(seen)} looked at are binary or empty)"
        raise DataError(f"the folder {root} {what}: give a folder with UTF-8 text files in it")
    skipped = tuple(sorted({*seen} - {*files}))
    return TextSource(str(root), tuple(files), sum(f.stat().st_size for f in files), skipped, (column,) if column else FIELDS)


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
    if _reader(file) is not None:
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


def read_documents(file: Path, columns: tuple[str, ...] = FIELDS, skip: int = 0) -> Iterator[tuple[str, bool]]:
    """A file's text in pieces, and of each whether a document ends behind it; without the first `skip` pieces. Of lines of JSON and rows of
    tables, it is what they have in the first of the columns that they have. Error: a line or a table without it."""
    if file.suffix in JSON_LINES:
        yield from ((text, True) for text in _json_lines(file, columns, skip))
    elif _reader(file) is not None:
        yield from ((text, True) for text in _rows(file, columns, skip))
    else:
        yield from islice(chain(((piece, False) for piece in read_text(file)), [("", True)]), skip, None)


def _reader(file: Path) -> str | None:
    return next((reader for ending, reader in TABLES.items() if file.name.endswith(ending)), None)


def _json_lines(file: Path, columns: tuple[str, ...], skip: int) -> Iterator[str]:
    number, held = 0, ""
    for piece in chain(read_text(file), ["\n"]):
        held += piece
        lines = held.split("\n")
        held = lines.pop()
        for line in lines:
            number += 1
            if line.strip() and (skip := skip - 1) < 0:
                yield _document(file, number, line, columns)


def _document(file: Path, number: int, line: str, columns: tuple[str, ...]) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}, line {number}: not JSON ({error}); each line must be an object such as {{\"text\": \"...\"}}") from None
    if not isinstance(found, dict):
        raise DataError(f"{file}, line {number} is a {type(found).__name__}: each line must be an object such as {{\"text\": \"...\"}}")
    names = [name for name in columns if isinstance(found.get(name), str)]
    if not names:
        raise DataError(f"{file}, line {number} has {_missing(found, columns)}")
    text = str(found[names[0]])
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{file}, line {number}: '{names[0]}' holds half of a character (a lone \\ud800 to \\udfff)") from None
    return text


def _missing(names: Iterable[str], columns: tuple[str, ...]) -> str:
    has, needed = ", ".join(map(repr, list(names)[:8])) or "nothing", " or ".join(f'"{column}"' for column in columns)
    return f"{has}: it needs the document as {needed}, or --text-column NAME"


def _rows(file: Path, columns: tuple[str, ...], skip: int) -> Iterator[str]:
    reader = str(_reader(file))
    try:
        import datasets

        opened = getattr(datasets.IterableDataset, reader)
    except (ImportError, AttributeError):
        raise DataError(f"{file} needs Hugging Face datasets, 5.0 or newer: pip install 'interlace[data]', or convert it to .jsonl") from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says is in the message
    try:  # without the batch size, a whole row group would be in memory
        table = opened(str(file), **({"batch_size": ROWS} if reader == "from_parquet" else {}))
        names = table.column_names or list(next(iter(table), {}))
        found = [name for name in columns if name in names]
        if names and not found:
            raise DataError(f"{file} has the columns {_missing(names, columns)}")
        for row in table.select_columns(found[:1]).skip(skip) if found else ():
            value = row[found[0]]
            if value is not None and not isinstance(value, str):
                raise DataError(f"{file}: column '{found[0]}' holds {type(value).__name__}, not text")
            yield value or ""
    except DataError:
        raise
    except Exception as error:  # of datasets, pyarrow, the decompressor
        kind = reader.removeprefix("from_")
        raise DataError(f"{file} cannot be read as {kind}: {' '.join(str(error.__cause__ or error).split())[:200]}") from None


def read_text(file: Path) -> Iterator[str]:
    """The text of one file in pieces that end at line ends where lines are not longer than a piece."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0  # bytes given to the decoder so far
    try:
        with open(file, "rb") as stream:
            while True:
                chunk = stream.read(PIECE_BYTES) + stream.readline(3 * PIECE_BYTES)
                if read == 0 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise DataError(f"{file} is UTF-16 text; convert it first: iconv -f utf-16 -t utf-8 {file}")
                if (nul := chunk.find(0)) >= 0:
                    raise DataError(f"{file} is a binary file (a zero byte at position {read + nul}): give UTF-8 text")
                read -= (pending := len(decoder.getstate()[0]))  # bytes of a character that the last chunk cut
                text = decoder.decode(chunk, final=not chunk).removeprefix("\ufeff" if read == 0 else "")
                yield from [text] if text else []
                if not chunk:
                    return
                read += pending + len(chunk)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {read + error.start}; "
            f"convert it first, for example: iconv -f latin1 -t utf-8 {file}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
