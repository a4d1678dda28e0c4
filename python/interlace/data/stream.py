"""Batches from a text as it is read: for texts larger than memory, or than one cares to tokenize before the first step.

    documents, file after file  ->  tokens  ->  rows of seq tokens  ->  blocks of `shuffle` rows, each in an order of its own  ->  batches

Packed rows are windows of the documents joined by the end-of-text token, so nothing is padded or lost; unpacked, a document begins a row
of its own (a longer one takes several), and targets that are padding weigh nothing. A block ends with its epoch, and in each epoch the files
come in another order. All of it depends on the text and the seed alone: every rank reads the same stream and takes its rows of each batch,
and a run goes on from a `Place`, the beginning of a block and the rows of it that are used. The next block is made beside the steps; that
block and the one at hand are all that is in memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from interlace.data.dataset import mixed, nearest, permuted
from interlace.data.text import DataError, TextSource
from interlace.data.tokens import Tokenizer, grouped


class Place(NamedTuple):
    """Where a block begins (epoch, file in the epoch's order, document in the file, token in the document), which block of the run it is, and
    how many of its rows are used."""

    epoch: int = 0
    file: int = 0
    document: int = 0
    token: int = 0
    block: int = 0
    row: int = 0


@dataclass
class _Document:
    """A document's tokens, of which the first `used` are in rows already."""

    epoch: int
    file: int
    number: int
    ids: np.ndarray
    used: int = 0


START = Place()
_Row = tuple[np.ndarray, int]  # seq + 1 tokens, and how many targets count
_Block = tuple[Place, list[_Row]]


def _beside(make: Callable[[], _Block]) -> Callable[[], _Block]:
    """Begins to make a block in a thread; what comes back waits for it. It owns nothing that must be closed: a stream may be dropped by the
    garbage collector, in any thread at any moment, also while a thread that starts holds the lock that the end of another one asks for."""
    made: SimpleQueue[tuple[_Block | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            made.put((make(), None))
        except BaseException as e:
            made.put((None, e))

    def wait() -> _Block:
        block, error = made.get()
        if block is None:
            raise error or AssertionError
        return block

    threading.Thread(target=run).start()
    return wait


@dataclass
class TokenStream:
    """(input_ids, labels) batches of shape [batch / world, seq], int64, of consecutive steps; unpacked, with the weights of the targets
    (float32), whose mean over the whole batch is 1. `share` of the documents is left out; `held_out`: only they are read. `place` is that of
    the next row."""

    text: TextSource
    tokenizer: Tokenizer
    seq: int
    batch: int
    seed: int = 0
    shuffle: int = 1024  # rows of a block
    pack: bool = True
    share: float = 0.0
    held_out: bool = False
    place: Place = START

    def __post_init__(self) -> None:
        self._step: int | None = None  # whose batch is at hand
        self._batch: list[_Row] = []
        self._rows = self._endless()

    @property
    def digest(self) -> str:
        """Names the files and the tokenizer: where a run stood is a place in just these."""
        files = [f"{file.name} {file.stat().st_size}" for file in self.text.files]
        return hashlib.sha256("\n".join([self.tokenizer.digest, *self.text.columns, *files]).encode()).hexdigest()[:16]

    def where(self) -> str:
        """ "epoch 1, file 3 of 12"."""
        return f"epoch {self.place.epoch + 1}, file {self.place.file + 1} of {len(self.text.files)}"

    def check(self, files: int = 64) -> None:
        """Reads a document of each of the first files, so that what is wrong with them is known before anything starts."""
        _ = [next(self.text.documents(file), None) for file in self.text.files[:files]]

    def head(self, tokens: int) -> np.ndarray:
        """The first so many tokens, or all where an epoch has fewer."""
        found, have = [np.empty(0, np.uint32)], 0
        for document in self._documents(Place()):
            if document.epoch or have >= tokens:
                break
            found.append(document.ids)
            have += len(document.ids)
        return np.concatenate(found)[:tokens]

    def batch_at(self, step: int, rank: int = 0, world: int = 1) -> tuple[Any, ...]:
        """As torch tensors. Steps are asked for in order; the last one may be asked for again."""
        import torch

        if self.batch % world:
            raise DataError(f"--batch {self.batch} is not a multiple of {world} ranks: use {nearest(self.batch, world)}")
        if step != self._step:
            assert self._step in (None, step - 1), "a stream is read in order"
            self._batch, self._step = list(islice(self._rows, self.batch)), step
        share = self.batch // world
        mine = self._batch[rank * share : (rank + 1) * share]
        both = torch.from_numpy(np.stack([row for row, _ in mine]).astype(np.int64))
        pair = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        if self.pack:
            return pair
        counts = torch.tensor([count for _, count in mine])
        scale = self.batch * self.seq / sum(count for _, count in self._batch)
        return (*pair, (torch.arange(self.seq) < counts[:, None]).float() * scale)

    def _endless(self) -> Iterator[_Row]:
        blocks = self._blocks(self.place._replace(row=0))
        made = _beside(lambda: next(blocks))  # one block ahead; its encoding releases Python's lock
        used = self.place.row
        while True:
            start, rows = made()
            made = _beside(lambda: next(blocks))
            order = permuted(np.arange(len(rows)), len(rows), self.seed, start.block)
            for i in range(min(used, len(rows)), len(rows)):
                self.place = start._replace(row=i + 1)
                yield rows[order[i]]
            used = 0

    def _blocks(self, at: Place) -> Iterator[_Block]:
        documents = self._documents(at)
        held = deque([next(documents)])
        held[0].used = min(at.token, len(held[0].ids) - 1)
        number = at.block
        while True:
            rows: list[_Row] = []
            start = Place(held[0].epoch, held[0].file, held[0].number, held[0].used, number)
            while len(rows) < self.shuffle and held[0].epoch == start.epoch:
                row = self._packed(held, documents) if self.pack else self._alone(held)
                rows += [] if row is None else [row]
                if not held:
                    held.append(next(documents))
            if rows:
                yield start, rows
                number += 1

    def _packed(self, held: deque[_Document], documents: Iterator[_Document]) -> _Row:
        """The next seq tokens and the one behind them, with which the next row begins."""
        need, parts, i = self.seq + 1, [], 0
        while need:
            if i == len(held):
                held.append(next(documents))
            parts.append(held[i].ids[held[i].used :][:need])
            need -= len(parts[-1])
            i += 1
        held[i - 1].used += len(parts[-1]) - 1
        for document in islice(held, i - 1):
            document.used = len(document.ids)
        while held[0].used == len(held[0].ids):
            held.popleft()
        return np.concatenate(parts), self.seq

    def _alone(self, held: deque[_Document]) -> _Row | None:
        """A row of one document; None where it has no target left."""
        document = held[0]
        found = document.ids[document.used :][: self.seq + 1]
        document.used += self.seq
        if document.used + 1 >= len(document.ids):
            held.popleft()
        if len(found) < 2:
            return None
        return np.pad(found, (0, self.seq + 1 - len(found)), constant_values=self.tokenizer.end_id), len(found) - 1

    def _documents(self, at: Place) -> Iterator[_Document]:
        """From a place on, epoch after epoch."""
        end, epoch = np.array([self.tokenizer.end_id], dtype=np.uint32), at.epoch
        while True:
            tokens = 0  # that can stand in a row with another behind them
            for group in grouped(self._texts(epoch, at.file, at.document)):
                encoded = self.tokenizer.encode([piece for piece, _ in group])
                for ids, (_, (file, number, ends)) in zip(encoded, group, strict=True):
                    tokens += len(ids) + ends - (not self.pack)
                    if len(ids) + ends:
                        yield _Document(epoch, file, number, np.concatenate([ids, end]) if ends else ids)
            if (at.file, at.document) == (0, 0) and tokens < (self.seq + 1 if self.pack else 1):
                what, more = ("documents that are held out have", "larger share") if self.held_out else ("text has", "longer text")
                raise DataError(f"the {what} {tokens} tokens, too few for one sequence of {self.seq}: give a {more} or a smaller --seq")
            epoch, at = epoch + 1, Place()

    def _texts(self, epoch: int, first: int, skip: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """An epoch's pieces of text from a file on, each with its file, its number in it, and whether a document ends behind it."""
        files = np.arange(len(self.text.files))
        order = permuted(files, len(files), self.seed, ~epoch) if self.shuffle > 1 else files
        for place in range(first, len(order)):
            file = int(order[place])
            for number, (piece, ends) in enumerate(self.text.documents(self.text.files[file], skip), skip):
                held_out = self.share > 0 and float(mixed((file << 40) + number)) < self.share * 2.0**64
                if held_out == self.held_out:
                    yield piece, (place, number, ends)
            skip = 0
