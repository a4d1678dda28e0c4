"""What files take: copies over sizes, and how much the tier's copies and what runs beside them slow one another.

Both by the code that a training step uses (src/tier/tier.h): direct I/O, checksums, a thread for each direction. For a pair, every
rank of the host does the same at the same time, in turn alone and together, so that what else the machine does falls on all alike:

    compute     |== == == ==|             |=== === === ===|
    file_read                |=========|  |=============================|   its queue must not run dry before the other has ended
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from typing import Any

import torch

from interlace.cost.measure import repeated_us

Factors = dict[str, float]
FILES = ("file_read", "file_write")
CHUNK = 1 << 20  # bytes of one transfer: a block of the tier's
REGIONS = 16  # of one direction
SPAN_S = 0.04  # that a lane is watched for, at least
MOST_SPAN_S = 0.25
PAIR_S = 1.5  # spent on one pair
MIN_ROUNDS, MAX_ROUNDS = 4, 12
GATHERED = 1 << 22  # bytes of the collective


def tier_pairs(ranks: int) -> list[tuple[str, str]]:
    """The pairs of lanes that a step with a file tier keeps busy together, as a profile names them."""
    lanes = ("compute",) if ranks == 1 else ("compute", "collective")
    return [*[(lane, file) for lane in lanes for file in FILES], FILES]


def disk_of(folder: str) -> int:
    """A number for the disk that a folder is on."""
    return os.stat(folder).st_dev


def aligned(size: int) -> torch.Tensor:
    """Bytes that direct I/O takes in place, as the runtime's own storages that leave memory are."""
    data = torch.empty(size + 4096, dtype=torch.uint8)
    begin = -data.data_ptr() % 4096
    return data[begin : begin + size].random_(0, 256)


class Files:
    """One rank's tier file, with transfers of both directions under way."""

    def __init__(self, folder: str, rank: int, ranks: int) -> None:
        from interlace import _runtime

        self.tier = _runtime.FileTier(folder, rank, ranks)
        self.disk = disk_of(folder)
        self._regions: dict[str, list[int]] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._tickets: dict[str, deque[int]] = {kind: deque() for kind in FILES}
        self._turn = 0

    def facts(self) -> Factors:
        """What tells these times from those of another disk."""
        return {"disk": self.disk, "direct": int(self.tier.direct)}

    def copy_us(self, kind: str, size: int) -> float:
        """Microseconds of one copy of so many bytes, alone."""
        region, memory = self.tier.reserve(f"copy of {size}", size), aligned(size)
        start = self.tier.start_read if kind == "file_read" else self.tier.start_write
        self.tier.wait(self.tier.start_write(region, memory))
        return repeated_us(lambda: self.tier.wait(start(region, memory)))

    def prepare(self) -> None:
        """Regions with something in them, so that reads and writes never meet in one."""
        for kind in FILES:
            self._memory[kind] = aligned(REGIONS * CHUNK)
            self._regions[kind] = [self.tier.reserve(f"{kind} {i}", CHUNK) for i in range(REGIONS)]
            for i in range(REGIONS):
                self.tier.wait(self.tier.start_write(self._regions[kind][i], self._part(kind, i)))

    def _part(self, kind: str, i: int) -> torch.Tensor:
        return self._memory[kind][i * CHUNK : (i + 1) * CHUNK]

    def fill(self, kind: str, count: int) -> None:
        start = self.tier.start_read if kind == "file_read" else self.tier.start_write
        for _ in range(count):
            self._turn += 1
            i = self._turn % REGIONS
            self._tickets[kind].append(start(self._regions[kind][i], self._part(kind, i)))

    def drain(self, kind: str) -> None:
        while self._tickets[kind]:
            self.tier.wait(self._tickets[kind].popleft())

    def moved(self, kind: str) -> int:
        """Chunks so far."""
        return int(self.tier.bytes_in if kind == "file_read" else self.tier.bytes_out) // CHUNK


class Pairs:
    """Measures pairs of lanes; every rank calls the same with the same arguments. `collectives`: with several ranks."""

    def __init__(self, files: Files, collectives: Any = None) -> None:
        self.files, self.collectives = files, collectives
        self.ranks = 1 if collectives is None else collectives.peers.size
        self._a, self._b = torch.randn(384, 384), torch.randn(384, 384)
        self._x = torch.ones(1 << 20)
        if collectives is not None:
            self._shard = torch.ones(GATHERED // 4 // self.ranks)
            self._whole = torch.ones(self._shard.numel() * self.ranks)
        files.prepare()
        self._rates = {kind: self._chunk_rate(kind) for kind in FILES}

    def measure(self, first: str, second: str) -> Factors:
        """The factors of both: medians over rounds in which each was busy alone, then both were."""
        span = self._agree(max(SPAN_S, *[min(16 / self._rates[k], MOST_SPAN_S) for k in (first, second) if k in FILES]))
        steps = 0 if first in FILES else max(1, round(span / self._agree(self._step_s(first))))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, round(PAIR_S / (3 * span))))
        slower: tuple[list[float], list[float]] = ([], [])
        room = 2.0  # how much more than is expected to move is given to the tier
        for _ in range(rounds):
            alone = [self._watch((lane,), steps, span, room)[0] for lane in (first, second)]
            beside = self._watch((first, second), steps, span, room)
            if min(*alone, *beside) > 0:
                for factors, a, b in zip(slower, alone, beside, strict=True):
                    factors.append(a / b)
            else:  # a queue ran dry
                room = min(2 * room, 16.0)
        enough = len(slower[0]) >= MIN_ROUNDS // 2
        one, two = (max(1.0, statistics.median(factors)) if enough else 1.0 for factors in slower)
        return {"first": one, "second": two, "samples": len(slower[0]), **self.files.facts()}

    def _watch(self, lanes: tuple[str, ...], steps: int, span: float, room: float) -> list[float]:
        """Steps, or chunks, a second of each lane while all of them are busy; 0 of one that was not busy to the end."""
        self._meet()
        files = [lane for lane in lanes if lane in FILES]
        lead = next((lane for lane in lanes if lane not in FILES), None)
        given = {}
        for kind in files:
            given[kind] = self.files.moved(kind) + math.ceil(self._rates[kind] * span * room) + 2
            self.files.fill(kind, given[kind] - self.files.moved(kind))
        before = {kind: self.files.moved(kind) for kind in files}
        begin = time.perf_counter()
        if lead is None:
            time.sleep(span)
        else:
            for _ in range(steps):
                self._step(lead)
        seconds = time.perf_counter() - begin
        after = {kind: self.files.moved(kind) for kind in files}
        for kind in files:
            self.files.drain(kind)
        done = {kind: after[kind] - before[kind] if after[kind] < given[kind] else 0 for kind in files}
        return [(steps if lane == lead else done[lane]) / seconds for lane in lanes]

    def _step(self, lane: str) -> None:
        """A matrix product and an element-wise op, of about the same time; or a gather."""
        if lane == "compute":
            torch.mm(self._a, self._b)
            torch.add(self._x, 1.0)
        else:
            self.collectives.comm.wait(self.collectives.comm.start_gather([self._shard], [self._whole], "gather"))

    def _step_s(self, lane: str) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            self._step(lane)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def _chunk_rate(self, kind: str) -> float:
        """Chunks a second, back to back."""
        count = 8
        begin = time.perf_counter()
        self.files.fill(kind, count)
        self.files.drain(kind)
        return count / max(time.perf_counter() - begin, 1e-6)

    def _agree(self, seconds: float) -> float:
        """The mean over the ranks: all must do the same."""
        if self.collectives is None:
            return seconds
        value = torch.tensor([int(seconds * 1e9)], dtype=torch.int64)
        self.collectives.comm.wait(self.collectives.comm.start_all_reduce(value, "agree"))
        return float(value.item()) / 1e9 / self.ranks

    def _meet(self) -> None:
        if self.collectives is not None:
            meet = torch.zeros(1, dtype=torch.int32)
            self.collectives.comm.wait(self.collectives.comm.start_all_reduce(meet, "meeting"))
