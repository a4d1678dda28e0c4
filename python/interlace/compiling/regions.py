"""The compiled regions of a run's programs: the same on every rank, waited for or swapped in when all ranks have them.

    step    1 ... 11 | 12  13 ...      regions_wait=False, nothing in the cache
            bodies   | compiled
              │      └ look: all ranks ready → each program that waits is built again, the one that runs before step 12
              └ looks, about one a second: [ready | missing | failed, artifact or why] of every rank

Looks are at steps that all ranks know: the next one follows from the slowest rank's seconds. What one rank cannot have, none has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from interlace.config import Config
from interlace.dist.peers import Peers
from interlace.regions import Library, Making, RegionsError, Wanted, has_kernels, ready, reason_of, say_bodies_run, wanted_of

log = logging.getLogger("interlace")
LOOK_S = 1.0  # between two looks of several ranks
MOST_STEPS = 100


def settled(config: Config, peers: Peers) -> Config:
    """With regions="auto" decided, alike on all ranks: on where every rank's device can have kernels and nothing asks for the ops' bits."""
    if config.regions != "auto":
        return config
    wanted = peers.device.type == "cuda" and config.mode == "compiled" and config.passes is None
    on = wanted and not config.debug and not config.deterministic
    if on:
        why = has_kernels(peers.device)
        if why and peers.rank == 0:
            log.info("regions run op by op: %s", why)
        on = not any(peers.exchange("kernels for regions", why))
    return dataclasses.replace(config, regions="on" if on else "off")


class Regions:
    """Of one trainer. Every rank must call the methods, in the same order. `seconds`: from asking for the last library to having it."""

    def __init__(self, config: Config, peers: Peers, folder: Path | None) -> None:
        self.config, self.peers, self.folder = config, peers, folder
        self.stage = config.stage_of(peers.rank, peers.size)
        self.seconds = 0.0
        self._builds = self._step = self._next = self._looked = 0
        self._since = time.monotonic()
        self._numbers: dict[str, int] = {}  # by the regions of all stages: the number of what a program waits for
        self._making: dict[int, Making | list[str]] = {}  # under way, in this order; [state, word] where it has ended here
        self._made: set[int] = set()
        self._given_up: set[int] = set()
        peers.on_close(self.close)

    @property
    def pending(self) -> bool:
        return bool(self._making)

    def stale(self, waits: int | None) -> bool:
        """Whether what a program waits for is there, on all ranks."""
        return waits in self._made

    def waiting(self, waits: int | None) -> bool:
        """Whether it is still under way."""
        return waits in self._making

    def close(self) -> None:
        """Ends what is under way."""
        for making in self._making.values():
            if isinstance(making, Making):
                making.close()
        self._making.clear()

    def of(self, program: Any) -> tuple[Library | None, int | None]:
        """The library that a program is built with, and the number of the one that it waits for. None, None: bodies run for good."""
        if self.config.regions == "off" or self.config.debug:
            return None, None
        funcs = program.funcs()
        wanted, library, state = self._look_up(funcs)
        digest = hashlib.sha256(json.dumps(sorted(func["key"] for func in funcs)).encode()).hexdigest()
        self._builds += 1
        what, mine = f"regions of program {self._builds}", [self.stage, *state, digest]
        self.peers.post(f"{what}/{self.peers.rank}", mine)
        everyone = self.peers.collect(what, mine, lambda: True)  # hosts compile as long as it takes them
        number = self._numbers.setdefault(json.dumps(sorted({(s, d) for s, *_, d in everyone})), len(self._numbers))
        verdict = "failed" if number in self._given_up else self._verdict(everyone)
        if verdict == "failed":
            self._given_up.add(number)
        elif verdict == "missing" and number not in self._making:
            self._making[number] = self._start(wanted) if state[0] == "missing" and wanted is not None else state
            self._next = self._step + 1
            self._made.discard(number)  # it was, and its files are gone
        return (library, None) if verdict == "ready" else (None, number if verdict == "missing" else None)

    def look(self) -> None:
        """Before every step: whether all ranks have what is under way, or some cannot have it."""
        self._step += 1
        if not self._making or self._step < self._next:
            return
        number, making = next(iter(self._making.items()))
        if isinstance(making, Making):
            try:
                library = making.poll()
                state = ["missing", ""] if library is None else ["ready", library.artifact]
            except (RegionsError, OSError) as e:
                state = ["failed", reason_of(e)]
            self.seconds = making.seconds
            if state[0] != "missing":
                making.close()
                self._making[number] = state
        else:
            state = making
        seconds = time.monotonic() - self._since
        everyone = self.peers.exchange(f"regions {number} beside the training", [self.stage, *state, seconds])
        slowest = max(seconds for *_, seconds in everyone) / max(1, self._step - self._looked)
        self._looked, self._since = self._step, time.monotonic()
        self._next = self._step + (1 if self.peers.size == 1 else max(1, min(MOST_STEPS, int(LOOK_S / max(slowest, 1e-9)))))
        verdict = self._verdict(everyone)
        if verdict == "missing":
            return
        del self._making[number]
        if isinstance(making, Making):
            making.close()
        (self._made if verdict == "ready" else self._given_up).add(number)

    def _look_up(self, funcs: list[dict[str, Any]]) -> tuple[Wanted | None, Library | None, list[str]]:
        if not funcs:
            return None, None, ["ready", ""]
        if self.config.regions_wait:
            library = ready(funcs, self.config.regions, self.folder, meanwhile=self.peers.places.sign, device=self.peers.device)
            return None, library, ["failed", "none there"] if library is None else ["ready", library.artifact]
        try:
            wanted = wanted_of(funcs, self.config.regions, self.folder, self.peers.device)
            library = wanted.read()
        except (RegionsError, OSError) as e:
            return None, None, ["failed", reason_of(e)]
        return wanted, library, ["missing", ""] if library is None else ["ready", library.artifact]

    def _start(self, wanted: Wanted) -> Making | list[str]:
        try:
            return Making(wanted, f" beside the training (step {self._step + 1} runs their bodies)")
        except (RegionsError, OSError) as e:
            return ["failed", reason_of(e)]

    def _verdict(self, everyone: list[list[Any]]) -> str:
        """Of [stage, state, word, ...] of every rank; what failed is said here, on each rank."""
        failed = {rank: why for rank, (_, state, why, *_) in enumerate(everyone) if state == "failed"}
        if failed and not (self.config.regions_wait and self.peers.rank in failed):  # said by ready()
            rank = self.peers.rank if self.peers.rank in failed else min(failed)
            say_bodies_run(failed[rank] + ("" if rank == self.peers.rank else f" (rank {rank})"))
        if failed or any(state == "missing" for _, state, *_ in everyone):
            return "failed" if failed else "missing"
        pairs = {(stage, artifact) for stage, _, artifact, *_ in everyone}
        if len(pairs) > len({stage for stage, _ in pairs}):
            names = ", ".join(artifact[:12] for _, artifact in sorted(pairs))
            say_bodies_run(f"ranks have other ones ({names})")
            return "failed"
        return "ready"
