"""What copies between an accelerator and the host take, and how much they and computing slow one another: pinned memory, a stream for each
direction and one that computes, times by events. What slows a lane is given so much that it is busy until the lane has ended:

    compute   |== == == == ==|
    h2d    |===============================|
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from interlace.cost.measure import Rows

LANES = ("compute", "h2d", "d2h")  # as a profile names them
COPIES = LANES[1:]
SIZES = tuple(1 << power for power in (16, 20, 22, 24, 26))  # bytes: 64 KiB to 64 MiB
CHUNK = 1 << 24  # bytes of a copy beside another lane
NEEDS = 1 << 28  # bytes of the device that measuring takes, at most
SPAN_S = 0.004  # that a lane is watched for
ROUNDS = 7
MOST = 1024  # ops given at once, and at most so many times what is expected to last long enough
TIMES = 8


class DeviceCopies:
    """Of one rank's device. Between steps; the device's streams are empty before and afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {lane: torch.Stream(device=device) for lane in LANES}
        size = max(SIZES)
        self._host = {kind: torch.zeros(size, dtype=torch.uint8, pin_memory=True) for kind in COPIES}
        self._there = {kind: torch.zeros(size, dtype=torch.uint8, device=device) for kind in COPIES}
        self._x = torch.zeros(1 << 18, device=device)
        self._a = torch.full((256, 256), 1e-3, device=device, dtype=torch.bfloat16)
        while self._alone("compute", 1) < 3e-5 and self._a.shape[0] < 2048:  # a product and an elementwise op, long enough to be typical
            side = 2 * self._a.shape[0]
            self._a = torch.full((side, side), 1e-3, device=device, dtype=torch.bfloat16)
            self._x = torch.zeros(4 * self._x.numel(), device=device) if self._x.numel() < 1 << 23 else self._x

    def rows(self) -> Rows:
        """Copies over sizes, and each two lanes."""
        found: Rows = {("copy", f"{kind} {size}"): {"us": self._copy_s(kind, size) * 1e6} for kind in COPIES for size in SIZES}
        for first, second in itertools.combinations(LANES, 2):
            one, two = self._slower(first, second), self._slower(second, first)
            found["together", f"{first} {second}"] = {"first": one, "second": two, "samples": ROUNDS}
        return found

    def _copy_s(self, kind: str, size: int) -> float:
        return statistics.median(self._timed(kind, max(2, min(64, CHUNK // size)), size)[0] for _ in range(ROUNDS))

    def _alone(self, lane: str, count: int) -> float:
        self._timed(lane, count)
        return statistics.median(self._timed(lane, count)[0] for _ in range(3))

    def _slower(self, lane: str, by: str) -> float:
        """How many times longer an op of `lane` takes while `by` is busy."""
        count = self._count(lane, SPAN_S)
        alone = statistics.median(self._timed(lane, count)[0] for _ in range(ROUNDS))
        first = others = self._count(by, 3 * SPAN_S)
        factors: list[float] = []
        for _ in range(2 * ROUNDS):
            seconds, busy = self._timed(lane, count, beside=(by, others))
            if busy:
                factors.append(seconds / alone)
            else:  # it ended first
                others = min(2 * others, TIMES * first)
        return max(1.0, statistics.median(factors)) if len(factors) >= ROUNDS // 2 else 1.0

    def _count(self, lane: str, seconds: float) -> int:
        return max(1, min(MOST, round(seconds / max(self._alone(lane, 4), 1e-7))))

    def _op(self, lane: str, size: int) -> Callable[[], Any]:
        if lane == "compute":
            return lambda: (torch.mm(self._a, self._a), self._x.add_(1.0))
        host, there = self._host[lane][:size], self._there[lane][:size]
        return lambda: there.copy_(host, non_blocking=True) if lane == "h2d" else host.copy_(there, non_blocking=True)

    def _give(self, lane: str, count: int, size: int) -> tuple[Any, Any]:
        """Events before and after so many ops on their stream."""
        begin, end = (torch.Event(device=self.device, enable_timing=True) for _ in range(2))
        op = self._op(lane, size)
        with self._streams[lane]:
            begin.record(self._streams[lane])
            for _ in range(count):
                op()
            end.record(self._streams[lane])
        return begin, end

    def _timed(self, lane: str, count: int, size: int = CHUNK, beside: tuple[str, int] | None = None) -> tuple[float, bool]:
        """Seconds of one op, and whether the lane beside it was busy to the end."""
        torch.accelerator.synchronize(self.device)
        other = self._give(*beside, CHUNK)[1] if beside else None
        begin, end = self._give(lane, count, size)
        while not end.query():
            time.sleep(1e-5)
        busy = other is None or not other.query()
        torch.accelerator.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3 / count, busy
