"""Batches from a token file, a pure function of (seed, step, rank, world).

The tokens are cut into windows of `seq` tokens (labels are the tokens one further on). An epoch visits every window
once, in an order drawn from the seed and the epoch; the order is computed, not stored, so any step can be asked for at
once and resuming needs nothing but the step number. Step k takes rows k*batch .. (k+1)*batch - 1 of the endless
sequence of epochs; rank r of w takes the r-th of w equal slices of them, so the global batch is the same for any
number of ranks. With an origin (step s, row p), step s begins at row p: where a run stood that goes on with another
batch.
"""

from __future__ import annotations

import numpy as np

from interlace.data.text import DataError

_MIX_1, _MIX_2, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


class TokenDataset:
    """(input_ids, labels) batches of shape [batch / world, seq], int64."""

    def __init__(self, tokens: np.ndarray, seq: int, batch: int, seed: int = 0, origin: tuple[int, int] = (0, 0)):
        if seq < 1 or batch < 1:
            raise DataError(f"--seq {seq} and --batch {batch} must be at least 1")
        if len(tokens) < seq + 1:
            fits = f" or --seq {len(tokens) - 1}" if len(tokens) > 1 else ""
            raise DataError(
                f"the text has {len(tokens)} tokens, too few for one sequence of {seq} (and the token after it): "
                f"give a longer text{fits}"
            )
        self.tokens, self.seq, self.batch, self.seed = tokens, seq, batch, seed
        self.windows = (len(tokens) - 1) // seq
        self.origin = origin

    def row(self, step: int) -> int:
        """The first row of a step's batch; the number of rows read before it."""
        return self.origin[1] + (step - self.origin[0]) * self.batch

    def rows(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """The windows that a rank reads in a step."""
        if self.batch % world:
            raise DataError(f"--batch {self.batch} is not a multiple of {world} ranks: use {nearest(self.batch, world)}")
        share = self.batch // world
        first = self.row(step) + rank * share
        places = np.arange(first, first + share, dtype=np.int64)
        epochs = places // self.windows
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            windows[mask] = permuted(places[mask] % self.windows, self.windows, self.seed, int(epoch))
        return windows

    def batch_at(self, step: int, rank: int = 0, world: int = 1):
        """(input_ids, labels) as torch tensors."""
        import torch

        index = self.rows(step, rank, world)[:, None] * self.seq + np.arange(self.seq + 1)
        both = torch.from_numpy(np.asarray(self.tokens[index], dtype=np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def nearest(batch: int, parts: int) -> str:
    """The multiples of parts round batch, for messages: "6 or 9"."""
    below, above = batch // parts * parts, (batch // parts + 1) * parts
    return f"{below} or {above}" if below else str(above)


def permuted(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a seeded permutation of range(size) sends `places`.

    A Feistel network on the smallest even number of bits that holds `size`, walked until the value falls inside the
    range (at most four tries on average). Own arithmetic, so the order never depends on a library version.
    """
    bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << bits) - 1)
    keys = [mixed(np.uint64((seed * 1000003 + epoch * 8191 + r) & 0xFFFFFFFFFFFFFFFF)) for r in range(_ROUNDS)]
    values = places.astype(np.uint64)
    pending = np.ones(len(values), dtype=bool)
    while pending.any():
        left, right = values[pending] >> np.uint64(bits), values[pending] & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        values[pending] = (left << np.uint64(bits)) | right
        pending = values >= np.uint64(size)
    return values.astype(np.int64)


def mixed(x):
    """splitmix64's finalizer."""
    with np.errstate(over="ignore"):
        x = np.uint64(x) + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        return x ^ (x >> np.uint64(31))
