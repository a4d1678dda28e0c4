"""Tokenizers, and texts as token files on disk.

Byte tokens: the id is the byte, 256 ends a document. BPE: byte-level, trained on the text itself with `tokenizers`.
Both are saved as a `tokenizer.json` that Hugging Face reads. A tokenized text is a flat little-endian file (two bytes a
token up to 65,536 entries, else four) that every rank maps into memory; it is cached under a key of the files and the
tokenizer, and read again with its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import tokenizers

from interlace import private
from interlace.data.text import DataError, TextSource
from interlace.errors import UNREADABLE
from interlace.files import write_atomically

END = "<|end|>"
MIN_VOCAB = 257  # the bytes and END
TRAINING_BYTES = 32 << 20  # at most so much text trains a BPE; more is sampled file by file
CACHE_VERSION = 4
MAX_VOCAB = 1 << 24
MAX_FACTS, MAX_TOKENIZER = 1 << 16, 256 << 20  # bytes
SHORT = 4096  # characters; documents shorter than this are encoded many at a time
Of = TypeVar("Of")


class Tokenizer:
    """Text to ids and back; `kind` is "byte", "bpe", or "file" for somebody else's; `end` is the token between two documents."""

    def __init__(self, inner: tokenizers.Tokenizer, kind: str, end: str = END):
        self.inner = inner
        self.kind = kind
        self.end = end
        number = inner.token_to_id(end)
        if number is None:
            raise DataError(f"the tokenizer has no token '{end}', which it says ends a text")
        self.end_id: int = number
        self.vocab_size = max(inner.get_vocab().values()) + 1  # a file's ids may have gaps
        if self.vocab_size > MAX_VOCAB:
            raise DataError(f"the tokenizer has an id {self.vocab_size - 1}; more than {MAX_VOCAB} entries are taken for a mistake")

    @property
    def digest(self) -> str:
        more = self.end if self.end != END else ""
        return hashlib.sha256((self.inner.to_str() + more).encode()).hexdigest()[:16]

    @classmethod
    def byte(cls) -> Tokenizer:
        vocab = {_byte_letters()[byte]: byte for byte in range(256)}
        return cls(_byte_level(tokenizers.models.BPE(vocab={**vocab, END: 256}, merges=[])), "byte")

    @classmethod
    def train_bpe(cls, pieces: Iterator[str], vocab: int) -> Tokenizer:
        """A byte-level BPE with at most `vocab` entries."""
        if vocab < MIN_VOCAB:
            raise DataError(f"--vocab {vocab} is too small for a BPE: it needs at least {MIN_VOCAB} (256 bytes and {END})")
        inner = _byte_level(tokenizers.models.BPE())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab, min_frequency=2, special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        )  # fmt: skip
        inner.train_from_iterator(pieces, trainer)
        return cls(inner, "bpe")

    @classmethod
    def load(cls, file: Path) -> Tokenizer:
        """A tokenizer.json, ours or another's; of another's, tokenizer_config.json beside it says which token ends a text."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{file} is not a tokenizer file: {error}") from None
        if inner.token_to_id(END) is not None:
            return cls(inner, "byte" if inner.get_vocab_size() == MIN_VOCAB and inner.token_to_id(END) == 256 else "bpe")
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, "file", _end_token(file, inner))

    @classmethod
    def pretrained(cls, source: str | os.PathLike[str]) -> Tokenizer:
        """A Hugging Face tokenizer: its tokenizer.json, a folder that holds one, or a name in the local cache of huggingface_hub."""
        path = Path(source)
        if not path.exists():
            path = cached_snapshot(str(source)) or path
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            if path.is_dir():
                raise DataError(
                    f"the folder {path} has no tokenizer.json; make one with AutoTokenizer.from_pretrained({str(path)!r})"
                    f".save_pretrained({str(path)!r})"
                )
            raise DataError(
                f"--tokenizer '{source}' is neither byte, bpe, a tokenizer.json, a folder with one, nor a name in the local cache"
            )
        return cls.load(file)

    def save(self, file: Path) -> None:
        write_atomically(file, self.inner.to_str(pretty=True).encode())
        if self.kind == "file":
            write_atomically(_config_beside(file), self.config_text().encode())

    def config_text(self) -> str:
        """tokenizer_config.json: with it transformers reads the tokenizer, and load() knows the end of a text."""
        return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end}, indent=1) + "\n"

    def encode(self, pieces: list[str]) -> list[np.ndarray]:
        if self.kind == "byte":
            return [np.frombuffer(piece.encode(), dtype=np.uint8).astype(np.uint32) for piece in pieces]
        return [np.asarray(e.ids, dtype=np.uint32) for e in self.inner.encode_batch(pieces, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=True)


def _config_beside(file: Path) -> Path:
    """The tokenizer_config.json of a tokenizer.json, whatever stands before the names of both."""
    return file.with_name(file.name.removesuffix("tokenizer.json") + "tokenizer_config.json")


def _end_token(file: Path, inner: tokenizers.Tokenizer) -> str:
    for beside in (_config_beside(file), file.with_name("special_tokens_map.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
            said = json.loads(beside.read_text())["eos_token"]
            found = said if isinstance(said, str) else said["content"]
            if isinstance(found, str) and inner.token_to_id(found) is not None:
                return found
    for usual in ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]"):
        if inner.token_to_id(usual) is not None:
            return usual
    raise DataError(f"{file}: nothing says which token ends a text; put {{\"eos_token\": \"...\"}} into tokenizer_config.json beside it")


def cached_snapshot(name: str) -> Path | None:
    """The folder of a model in the local cache; nothing is fetched."""
    with contextlib.suppress(Exception):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    return None


def _byte_letters() -> list[str]:
    """The letter of each byte in byte-level BPE: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([END])
    return inner


@dataclass(frozen=True)
class TokenFile:
    """A tokenized text: open() maps it; `digest` names its contents."""

    path: Path
    count: int
    dtype: str
    tokenizer: Tokenizer
    digest: str

    def open(self) -> np.ndarray:
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,))


Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


def prepare_tokens(
    text: TextSource, cache: Path, kind: str = "byte", vocab: int = 4096, tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> TokenFile:  # fmt: skip
    """The token file of a text, made once and cached; other processes wait for the one that makes it. A tokenizer replaces kind and vocab."""
    tokenizer = tokenizer or prepare_tokenizer(text, cache, kind, vocab, progress)
    key = _cache_key(text, tokenizer.digest)
    with _locked(cache, key):
        return _load_cached(cache, key, tokenizer) or _build(text, cache, key, tokenizer, progress or (lambda *_: None))


def prepare_tokenizer(text: TextSource, cache: Path, kind: str, vocab: int, progress: Progress | None = None) -> Tokenizer:
    """Byte tokens, or the BPE of a text, trained once and cached."""
    if kind not in ("byte", "bpe"):
        raise DataError(f"unknown tokenizer '{kind}': byte or bpe")
    if kind == "byte":
        return Tokenizer.byte()
    key = _cache_key(text, f"bpe {vocab}")
    with _locked(cache, key):
        file = cache / f"{key}.tokenizer.json"
        with contextlib.suppress(OSError, DataError):
            private.read(file, MAX_TOKENIZER)
            return Tokenizer.load(file)
        made = Tokenizer.train_bpe(_training_pieces(text, progress or (lambda *_: None)), vocab)
        made.save(file)
        return made


def _cache_key(text: TextSource, method: str) -> str:
    hasher = hashlib.sha256(f"{CACHE_VERSION} {method} {text.columns}\n".encode())
    for file in text.files:
        status = file.stat()
        hasher.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return hasher.hexdigest()[:20]


@contextlib.contextmanager
def _locked(cache: Path, key: str) -> Iterator[None]:
    """An exclusive lock that the system drops when its holder dies. Error: what cannot be written in the cache, here or in its block."""
    try:
        private.make_folder(cache)
        with open(cache / f"{key}.lock", "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DataError(f"cannot write the tokens in {cache}: {error.strerror}") from error


def _load_cached(cache: Path, key: str, tokenizer: Tokenizer) -> TokenFile | None:
    """The cached token file, or None when it is absent or damaged (then it is made again)."""
    tokens = cache / f"{key}.tokens"
    try:
        facts = json.loads(private.read(cache / f"{key}.json", MAX_FACTS))
        dtype, count, digest = str(facts["dtype"]), int(facts["count"]), str(facts["digest"])
        if dtype not in ("<u2", "<u4") or tokens.stat().st_size != count * int(dtype[2]):
            return None
        private.check(tokens.stat(), tokens)
        return TokenFile(tokens, count, dtype, tokenizer, digest) if _digest(tokens) == digest else None
    except (OSError, *UNREADABLE):
        return None


def _digest(file: Path) -> str:
    hasher = hashlib.sha256()
    with open(file, "rb") as stream:
        while part := stream.read(1 << 20):
            hasher.update(part)
    return hasher.hexdigest()[:16]


def _build(text: TextSource, cache: Path, key: str, tokenizer: Tokenizer, progress: Progress) -> TokenFile:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    end = np.array([tokenizer.end_id], dtype=dtype).tobytes()
    hasher, count, done = hashlib.sha256(), 0, 0
    partial = cache / f"{key}.tokens.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
            for file in text.files:
                for group in grouped(text.documents(file)):
                    pieces = [piece for piece, _ in group]
                    for ids, (_, ends) in zip(tokenizer.encode(pieces), group, strict=True):
                        data = ids.astype(dtype).tobytes() + (end if ends else b"")
                        out.write(data)
                        hasher.update(data)
                        count += len(ids) + ends
                    done += sum(len(piece) for piece in pieces)
                    progress("tokenizing", min(done, text.bytes), text.bytes)
        os.replace(partial, cache / f"{key}.tokens")
        digest = hasher.hexdigest()[:16]
        facts = {"dtype": dtype, "count": count, "digest": digest, "text": text.name}
        write_atomically(cache / f"{key}.json", json.dumps(facts).encode())
    finally:
        partial.unlink(missing_ok=True)
    return TokenFile(cache / f"{key}.tokens", count, dtype, tokenizer, digest)


def grouped(pieces: Iterable[tuple[str, Of]], size: int = 8, characters: int = 1 << 21) -> Iterator[list[tuple[str, Of]]]:
    """Lists of some pieces (each with something of its own), or of many short ones, so that they can be encoded in parallel."""
    group: list[tuple[str, Of]] = []
    held = 0
    for piece in pieces:
        group.append(piece)
        held += len(piece[0])
        if held >= characters or (len(group) >= size and held >= size * SHORT):
            yield group
            group, held = [], 0
    if group:
        yield group


def _training_pieces(text: TextSource, progress: Progress) -> Iterator[str]:
    """The text, or an even sample of it: the same share of every file, from its start."""
    share = min(1.0, TRAINING_BYTES / max(text.bytes, 1))
    limit, done = min(text.bytes, TRAINING_BYTES), 0
    for file in text.files:
        left = max(1, int(file.stat().st_size * share))
        for piece, _ in text.documents(file):
            yield piece[:left]
            done += min(left, len(piece))
            left -= len(piece)
            progress("training the BPE", min(done, limit), limit)
            if left <= 0:
                break


if sys.byteorder != "little":  # token files and safetensors are little-endian
    raise ImportError("interlace needs a little-endian machine")
