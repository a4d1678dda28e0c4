"""Saving beside training: each rank's thread writes its part while steps go on; rank 0 puts the folder in place when all have.

    rank 0   begin ─ steps ...      thread: write, sync ──► collect ─► checksums.json, rename ─► verdict
    rank 1   begin ─ steps ...      thread: write, sync ──┘                                        └─► learns it
              │        └ the first update waits until the states are copied (src/io/snapshot_writer.h)
              └ files made by rank 0, small things copied

Nothing here is a collective, so a slow disk holds up nobody; the threads meet in the key-value store.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint.folder import FolderLock, Staging, saving
from interlace.checkpoint.tensor_file import CHUNK, CheckpointError
from interlace.dist.peers import Peers
from interlace.errors import InterlaceError

Tensor = torch.Tensor
Piece = tuple[Tensor, int, int, int, int]  # tensor, first element, end, index of the file, byte of the file


class Save:
    """One checkpoint under way. Every rank makes one and gives it what it writes; then before_step() before each step, and finish()."""

    def __init__(
        self, peers: Peers, name: str, final: Path, files: list[Path], staging_bytes: int, staging: Staging | None, keep: int
    ) -> None:  # fmt: skip
        from interlace import _runtime

        self._peers, self._name, self.final, self._staging, self._keep = peers, name, final, staging, keep
        self._tensors: list[Tensor] = []  # until the writer has copied them
        self.bytes = 0
        self._begin = time.monotonic()
        self.seconds = self.finish_cpu_seconds = 0.0
        self._writer = _runtime.SnapshotWriter([str(f) for f in files], CHUNK, max(0, staging_bytes))
        self._problem: str | None = None
        self._cancelled = False
        self._held: Any = None
        self._thread = threading.Thread(target=self._run, name="interlace-save", daemon=True)
        self._thread.start()

    # ---- in the training thread ----

    def add(self, pieces: list[Piece]) -> None:
        """Pieces that this rank writes. Their tensors may change once they are staged."""
        self._tensors += [p[0] for p in pieces]
        self.bytes += sum((b - a) * t.element_size() for t, a, b, _, _ in pieces)
        self._writer.add(pieces)

    def close(self) -> None:
        """All pieces have been given."""
        self._writer.close()

    def before_step(self, executor: Any) -> None:
        """Has the executor's update wait for the copies, as long as there are any to be made."""
        if self._writer.staged():
            self.release()
        elif hasattr(executor, "set_snapshot"):
            if self._held is not None and self._held is not executor:  # another shape's program
                self._held.set_snapshot(None)
            executor.set_snapshot(self._writer)
            self._held = executor
        else:  # steps in Python
            self._writer.wait_staged()

    def wait_staged(self) -> None:
        """After this the states may change."""
        self._writer.wait_staged()
        self.release()

    def release(self) -> None:
        if self._held is not None:
            self._held.set_snapshot(None)
            self._held = None
        self._tensors = []

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> str | None:
        """Waits until the checkpoint is in place; None, or why it is not, in the same words on every rank."""
        self.wait_staged()
        self._thread.join()
        return self._problem

    def cancel(self) -> None:
        """Stops writing and waits for the thread; the folder is left as it was."""
        self._cancelled = True
        self._writer.cancel()
        self._thread.join()
        self.release()

    def stats(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "durable_seconds": self.seconds, "finish_cpu_seconds": self.finish_cpu_seconds, **self._writer.stats()}

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            self._problem = self._finish_all(self._write())
        except BaseException as e:
            self._problem = str(e) or type(e).__name__
        finally:
            if self._staging is not None:
                self._staging.discard()
            self.seconds, self.finish_cpu_seconds = time.monotonic() - self._begin, time.thread_time()

    def _write(self) -> dict[str, Any]:
        """This rank's part: the checksums of its ranges, or its problem."""
        try:
            with saving(self.final):
                found = self._writer.wait_durable()
        except CheckpointError as e:
            where = "" if self._peers.rank == 0 else f"on rank {self._peers.rank}: "
            return {"problem": where + str(e)}
        return {"sums": [[file, offset, count, f"{value:016x}"] for file, offset, count, value in found]}

    def _finish_all(self, mine: dict[str, Any]) -> str | None:
        if self._peers.rank != 0:
            self._peers.post(f"{self._name}/part/{self._peers.rank}", mine)
            return self._peers.collect_one(f"{self._name}/verdict", 0, self._alive)
        problem: str | None = "rank 0 gave up"
        try:
            parts = self._peers.collect(f"{self._name}/part", mine, self._alive)
            problem = next((p["problem"] for p in parts if "problem" in p), None)
            if problem is None:
                assert self._staging is not None
                self._staging.cover(s for p in parts for s in p["sums"])
                self._staging.commit(self._keep)
        except InterlaceError as e:  # files, or a rank that is lost
            problem = str(e)
        self._peers.post(f"{self._name}/verdict/0", problem)
        return problem

    def _alive(self) -> bool:
        return not self._cancelled


class Locks:
    """The folders that a trainer saves to, which no other may."""

    def __init__(self) -> None:
        self._held: dict[Path, FolderLock] = {}

    def take(self, final: Path) -> None:
        if final not in self._held:
            self._held[final] = FolderLock(final)

    def release(self) -> None:
        for lock in self._held.values():
            lock.release()
        self._held.clear()
