"""Times of a program's ops and of transfers, taken on all ranks while it trains, and gathered on rank 0.

Steps are recorded one collective at a time (`set_trace("serial")`): the same ops on the same values, so a recorded step trains as any
other, takes no more memory, and only takes longer. Transfers over sizes are measured between steps, where the room under the limit
allows, and kept for later starts under the machine's fingerprint.

    steps:  0   1 serial  2 serial  3 serial | sweep, gather, merge | next program
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interlace.cost.device_copies import COPIES, NEEDS, DeviceCopies
from interlace.cost.machine import Machine, available_bytes, device_bytes
from interlace.cost.measure import Collectives, Rows, StepTimes, sweep_sizes
from interlace.cost.measurements import SLOWDOWN, Profile, from_rows
from interlace.cost.store import Store, StoreError
from interlace.dist.mesh import STAGES, Mesh
from interlace.dist.peers import Peers

log = logging.getLogger("interlace")
SWEEP_LARGEST = 1 << 24  # bytes: larger transfers are extrapolated
BESIDE_BYTES = 16 << 20  # what measuring compute beside a transfer takes
SWEPT = ("collective", "slowdown", "issue")
STORE_FILE = "profile.sqlite"


class Profiler:
    """One profile of one program; every rank has one and calls the same methods in the same order."""

    def __init__(self, peers: Peers, timeout_s: float, folder: Path | None) -> None:
        self.peers, self.timeout_s, self.folder = peers, timeout_s, folder
        local = int(os.environ.get("LOCAL_WORLD_SIZE", peers.size))
        self.machine = Machine.here(local, torch.get_num_threads(), device=peers.device)
        self._times: dict[str, StepTimes] = {}  # by program
        self._known: Rows = {}  # that the store has had, on rank 0

    @property
    def steps(self) -> int:
        return sum(t.steps for t in self._times.values())

    def add(self, executor: Any, text: str, number: int) -> None:
        """The step of this number, which an executor of this program has just run with the trace "serial"."""
        if text not in self._times:
            on_device = self.peers.device.type != "cpu"
            name = hashlib.sha256(text.encode()).hexdigest()
            self._times[text] = StepTimes(self.peers.size, self.machine.threads, self.machine.cores, on_device, name)
        self._times[text].add(executor.record(), partial(self.peers.exchange, f"collectives of step {number}"))

    def finish(self, text: str, room: int, number: int, copies: bool = False) -> Profile | None:
        """The profile of all ranks on rank 0, None elsewhere. `room`: bytes that this rank may take between steps. `copies`: storages may
        leave a device."""
        room = min(self.peers.exchange(f"room of profile {number}", room))
        rows: Rows = {}
        for times in self._times.values():
            rows |= times.rows()
        rows |= self._sweep(text, room, number)
        if copies and self.peers.device.type != "cpu":
            rows |= self._copies(room, number)
        packed = [[kind, key, row] for (kind, key), row in rows.items()]
        everyone = self.peers.exchange(f"profile {number}", packed)
        if self.peers.rank != 0:
            return None
        merged = merge([{(kind, key): row for kind, key, row in one} for one in everyone])
        self._store({key: row for key, row in merged.items() if key[0] in SWEPT and "in_place" not in row and key not in self._known})
        return from_rows(self.machine.fingerprint, merged)

    def _sweep(self, text: str, room: int, number: int) -> Rows:
        """Transfers over sizes: what the store has, and what is measured now. Those along the stages of a pipeline all ranks measure
        together, others the ranks of the stages that have them, so that all go through them in one order."""
        from interlace import _core, _runtime

        if self.peers.size == 1:
            return {}
        facts = [f for f in _runtime.profile_plan(text).values() if f["bytes"] and f["ranks"] != "1"]
        largest: dict[tuple[str, str, str, str], int] = {}
        for f in facts:
            what = f["name"].removesuffix(".start"), f["ranks"], f["axis"], f["replicas"]
            # Four units may become one call.
            largest[what] = max(largest.get(what, 0), f["bytes"] if what[0] == "all_reduce" else 4 * f["bytes"])
        wanted = [
            (*what, size)
            for what in sorted(largest)
            for size in sweep_sizes(min(largest[what], SWEEP_LARGEST))
            if 3 * size <= room and not (what[3] and self.peers.device.type != "cpu")  # a native group reduces along one, then the other
        ]
        known: Rows = {}
        if self.peers.rank == 0:
            known = self._stored()
        everyone = sorted({tuple(point) for one in self.peers.exchange(f"sizes of profile {number}", wanted) for point in one})
        keys = [("collective", f"{kind} {ranks} {size}") for kind, ranks, _, _, size in everyone]
        todo: dict[str, Any] = {
            "points": [list(p) for p, key in zip(everyone, keys, strict=True) if key not in known],
            "beside": SLOWDOWN not in known and room >= BESIDE_BYTES and self.peers.device.type == "cpu",  # they share cores
        }
        todo = json.loads(self.peers.broadcast(f"points of profile {number}", json.dumps(todo).encode()))
        found: Rows = {}
        if todo["points"] or todo["beside"]:
            mesh = Mesh.of(_core.Program.parse(text, "program"), self.peers.rank)
            along: dict[tuple[str, str], Collectives] = {}
            for kind, ranks, axis, replicas, size in todo["points"]:
                if STAGES not in axis.split(",") and (kind, ranks, axis, replicas, size) not in wanted:
                    continue
                if (axis, replicas) not in along:
                    along[axis, replicas] = Collectives(self.peers, self.timeout_s, mesh, axis, replicas)
                found["collective", f"{kind} {ranks} {size}"] = along[axis, replicas].time(kind, size)
            if todo["beside"]:
                found |= Collectives(self.peers, self.timeout_s).beside_compute(self.machine.cores)
        self._known = known = {key: row for key, row in known.items() if key in keys or key[0] in ("slowdown", "issue")}
        return known | found

    def _copies(self, room: int, number: int) -> Rows:
        """Copies between a device and the host: what the store has, or what is measured now, by all ranks at once, and put there."""
        known: Rows = {}
        if self.peers.rank == 0:
            known = {key: row for key, row in self._stored().items() if any(kind in key[1].split() for kind in COPIES)}
        missing = not known and room >= NEEDS
        if not self.peers.exchange(f"copies of profile {number}", missing)[0]:
            return known
        try:
            rows = DeviceCopies(self.peers.device).rows()
        except torch.OutOfMemoryError:  # what is free goes to others; the preset's times stay
            rows = {}
        everyone = self.peers.exchange(f"copies measured for profile {number}", [[kind, key, row] for (kind, key), row in rows.items()])
        if self.peers.rank == 0:
            self._store(merge([{(kind, key): row for kind, key, row in one} for one in everyone]))
        return rows

    def _stored(self) -> Rows:
        if self.folder is None:
            return {}
        try:
            with Store(self.folder / STORE_FILE) as store:
                for note in store.notes:
                    log.warning("%s", note)
                return store.rows(self.machine.fingerprint)
        except StoreError as e:
            log.warning("times of transfers are measured again: %s", e)
            return {}

    def _store(self, rows: Rows) -> None:
        if self.folder is None or not rows:
            return
        try:
            with Store(self.folder / STORE_FILE) as store:
                store.put(self.machine.fingerprint, rows)
        except StoreError as e:
            log.warning("times of transfers are not kept: %s", e)


def merge(ranks: list[Rows]) -> Rows:
    """One profile from those of all ranks: times median, peaks maximum."""
    values: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for rows in ranks:
        for key, row in rows.items():
            values[key].append(row)
    return {
        key: {
            name: max(r[name] for r in found if name in r)
            if name in ("transient", "bytes", "measured")
            else statistics.median(r[name] for r in found if name in r)
            for name in dict.fromkeys(name for r in found for name in r)
        }
        for key, found in values.items()
    }


def free_bytes(device: torch.device, ranks_here: int) -> int:
    """Memory that this rank may still take of its device, or its part of the host's."""
    return available_bytes() // ranks_here if device.type == "cpu" else device_bytes(device)[0]
