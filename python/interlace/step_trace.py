"""One real step of all ranks as a Chrome trace: each rank records its own, rank 0 puts them on one clock and writes the file."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.data.tokens import write_atomically
from interlace.distributed import Peers
from interlace.errors import InterlaceError

ROUNDS = 20  # of the clock handshake; the shortest counts


class TraceError(InterlaceError):
    """A trace that cannot be made or written."""


def check_writable(file: str | Path) -> str | None:
    """What is wrong with writing there, before a step is spent on it."""
    path = Path(file)
    if path.is_dir():
        return f"cannot write the trace {file}: it is a folder"
    if not path.parent.is_dir():
        return f"cannot write the trace {file}: there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"cannot write the trace {file}: permission denied"
    return None


def write_trace(executor: Any, peers: Peers, file: str | Path) -> str | None:
    """Gathers the step that every executor has recorded and writes it on rank 0; gives what the system refused, on every rank.
    Every rank must call it."""
    from interlace import _runtime

    offset = clock_offset(peers)
    begins = peers.exchange("trace begins", executor.record()["begin_ns"] + offset)
    # The earliest begin, read on this rank's own clock, is zero.
    text = executor.trace("json", peers.rank, peers.size, min(begins) - offset)
    parts: list[str] | None = [text]
    if peers.size > 1:
        parts = [""] * peers.size if peers.rank == 0 else None
        dist.gather_object(text, parts, group=peers._groups["native"], group_dst=0)
    problem = None
    if peers.rank == 0 and parts is not None:
        try:
            write_atomically(Path(file), _runtime.merge_traces(parts).encode())
        except OSError as error:
            problem = f"cannot write the trace {file}: {error.strerror}"
    problem = peers.exchange("trace written", problem)[0]
    return problem


def clock_offset(peers: Peers) -> int:
    """Nanoseconds to add to this rank's clock to have rank 0's. Ranks on one machine share a clock; others shake hands."""
    from interlace import _runtime

    machines = peers.exchange("trace clock", machine_id())
    offset = 0
    for rank in range(1, peers.size):
        if machines[rank] == machines[0] or peers.rank not in (0, rank):
            continue
        shortest, other = None, rank if peers.rank == 0 else 0
        group = peers._groups["native"]
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
