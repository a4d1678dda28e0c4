"""One real step of all ranks in the formats of a predicted one: each rank records its own, rank 0 puts them on one clock and
writes the files."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.dist.peers import Peers
from interlace.errors import InterlaceError
from interlace.files import write_atomically
from interlace.observe.snapshot import snapshot_bytes

ROUNDS = 20  # of the clock handshake; the shortest counts


class TraceError(InterlaceError):
    """A trace that cannot be made or written."""


def check_writable(file: str | Path) -> str | None:
    """What is wrong with writing there, before a step is spent on it."""
    path = Path(file)
    if path.is_dir():
        return f"cannot write the trace {file}: it is a folder"
    if path.exists() and not path.is_file():  # a device would be replaced
        return f"cannot write the trace {file}: it is no file"
    if not path.parent.is_dir():
        return f"cannot write the trace {file}: there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"cannot write the trace {file}: permission denied"
    return None


def check_folder(folder: str | Path) -> str | None:
    """Makes the folder; what is wrong with writing there, before a step is spent on it."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        return f"cannot write traces to {folder}: it is a file, not a folder"
    except OSError as error:
        return f"cannot write traces to {folder}: {error.strerror}"
    if not os.access(path, os.W_OK):
        return f"cannot write traces to {folder}: permission denied"
    return None


@dataclasses.dataclass(frozen=True)
class TraceFiles:
    """Where a recorded step goes, by format; the same formats as those of `interlace simulate`."""

    chrome: str | Path | None = None
    chakra: str | Path | None = None  # a folder, one file a rank
    snapshot: str | Path | None = None

    def check(self) -> str | None:
        """The first that cannot be written."""
        files = [check_writable(file) for file in (self.chrome, self.snapshot) if file is not None]
        folders = [check_folder(self.chakra)] if self.chakra is not None else []
        return next((problem for problem in files + folders if problem is not None), None)

    def write(self, records: list[dict[str, Any]], text: str) -> str | None:
        """Writes what every rank has recorded of the program `text`; gives what the system refused first."""
        from interlace import _core, _runtime

        wanted: list[tuple[Path, Callable[[], bytes]]] = []
        if self.chrome is not None:
            wanted.append((Path(self.chrome), lambda: _runtime.merge_traces([r["timeline"] for r in records]).encode()))

        @functools.cache
        def measured() -> Any:
            return _core.Measured(_core.Program.parse(text, "program"), [r["times"] for r in records])

        def chakra(rank: int) -> bytes:
            return bytes(measured().chakra(rank))

        for rank in range(len(records) if self.chakra is not None else 0):
            wanted.append((Path(str(self.chakra)) / f"step.{rank}.et", functools.partial(chakra, rank)))
        if self.snapshot is not None:
            snapshot = Path(self.snapshot)
            wanted.append((snapshot, lambda: snapshot_bytes(snapshot, measured().snapshot())))
        for file, content in wanted:
            try:
                write_atomically(file, content())
            except OSError as error:
                return f"cannot write the trace {file}: {error.strerror}"
            except _core.Error as error:  # a step that the format cannot hold
                return f"cannot write the trace {file}: {error}"
        return None


def write_trace(executor: Any, peers: Peers, text: str, files: TraceFiles) -> str | None:
    """Gathers the step that every executor has recorded and writes it on rank 0; gives what the system refused, on every rank.
    Every rank must call it."""
    offset = clock_offset(peers)
    begins = peers.exchange("trace begins", executor.record()["begin_ns"] + offset)
    origin = min(begins) - offset  # the earliest begin, read on this rank's own clock, is zero
    record: dict[str, Any] = {}
    if files.chrome is not None:
        record["timeline"] = executor.timeline(peers.rank, peers.size, origin)
    if files.chakra is not None or files.snapshot is not None:
        record["times"] = executor.times(origin)
    records = peers.groups.gather_objects(record)
    problem = None if records is None else files.write(records, text)
    return peers.exchange("trace written", problem)[0]


def clock_offset(peers: Peers) -> int:
    """Nanoseconds to add to this rank's clock to have rank 0's. Ranks on one machine share a clock; others shake hands."""
    from interlace import _runtime

    machines = peers.exchange("trace clock", machine_id())
    offset = 0
    for rank in range(1, peers.size):
        if machines[rank] == machines[0] or peers.rank not in (0, rank):
            continue
        shortest, other = None, rank if peers.rank == 0 else 0
        group = peers.groups.native
        stamp = torch.zeros(1, dtype=torch.int64)
        for _ in range(ROUNDS):
            if peers.rank == 0:
                dist.recv(stamp, group=group, group_src=other)
                stamp[0] = _runtime.clock_ns()
                dist.send(stamp, group=group, group_dst=other)
                continue
            sent = _runtime.clock_ns()
            dist.send(stamp, group=group, group_dst=other)
            dist.recv(stamp, group=group, group_src=other)
            came = _runtime.clock_ns()
            if shortest is None or came - sent < shortest:
                shortest = came - sent
                offset = int(stamp.item()) - (sent + came) // 2
    return offset


def machine_id() -> str:
    """The same for all processes that read the same clock: the boot of a kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
