"""All ranks measure the same thing at the same time, rank 0 keeps it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from interlace.cost.machine import Machine
from interlace.cost.measure import (
    Collectives,
    Rows,
    StepTimes,
    fill_states,
    measure_program,
    memory_copy_us,
    plain_inputs,
    steps_within,
)
from interlace.cost.one_op import measure_one_by_one
from interlace.cost.store import Store
from interlace.cost.tier import FILES, Files, Pairs
from interlace.dist.peers import Peers

TIMEOUT_S = 300.0
Progress = Callable[[str, int, int], None]


def list_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that are named by their numbers, in order."""
    return [tensors[str(i)] for i in range(len(tensors))]


def quiet(stage: str, done: int, total: int) -> None: ...


class Keeper:
    """Rank 0's store, or nothing on the others: what is put is committed at once."""

    def __init__(self, store: Store | None, fingerprint: str) -> None:
        self.store, self.fingerprint = store, fingerprint

    def put(self, rows: Rows) -> None:
        if self.store is not None and rows:
            self.store.put(self.fingerprint, rows)


def measure(job: dict[str, Any], text: str, inputs: bytes, peers: Peers, keeper: Keeper, progress: Progress = quiet) -> None:
    """Everything that `job` says is missing."""
    machine = Machine(**job["machine"])
    peers.groups.open()
    if job["ops"] and text:
        _measure_ops(job, text, inputs, peers, keeper, progress, machine)
    todo = [tuple(point) for point in job["collectives"]]
    collectives = Collectives(peers, TIMEOUT_S) if peers.size > 1 and (todo or job["slowdown"] or job["pairs"]) else None
    if collectives is not None:
        for number, (kind, size) in enumerate(todo):
            progress(f"{kind} of {size} bytes", number, len(todo))
            keeper.put({("collective", f"{kind} {peers.size} {size}"): collectives.time(kind, size)})
        if job["slowdown"]:
            progress("compute beside a transfer", len(todo), len(todo))
            keeper.put(collectives.beside_compute(machine.cores))
    with _tier_folder(job, peers, "copies") as folder:
        files: Files | None = None
        for number, (kind, size) in enumerate(job["copies"]):
            progress(f"{kind} of {size} bytes", number, len(job["copies"]))
            if peers.rank != 0:
                continue
            if kind in FILES:
                files = files or Files(folder, 0, 1)
                keeper.put({("copy", f"{kind} {size}"): {"us": files.copy_us(kind, size), **files.facts()}})
            else:
                keeper.put({("copy", f"{kind} {size}"): {"us": memory_copy_us(size)}})
        del files
        peers.exchange("copies done", True)
        if job["pairs"]:
            pairs = Pairs(Files(folder, peers.rank, peers.size), collectives)
            for number, (first, second) in enumerate(job["pairs"]):
                progress(f"{first} beside {second}", number, len(job["pairs"]))
                keeper.put({("together", f"{first} {second}"): pairs.measure(first, second)})
            del pairs
        peers.exchange("profile done", True)


def _measure_ops(job: dict[str, Any], text: str, inputs: bytes, peers: Peers, keeper: Keeper, progress: Progress, machine: Machine) -> None:
    """The ops of the program: where they stand in it, or each alone when it does not fit."""
    from interlace import _core, _runtime

    program = _core.Program.parse(text, "program")
    batch = list_of(load_tensors(inputs)) if inputs else plain_inputs(program)
    if not job["whole"]:
        measure_one_by_one(text, job["ops"], machine, peers, keeper.put, progress, job["memory_bytes"], job.get("trusted", False))
        keeper.put({("stage", "program " + job["digest"]): {"done": 1}})
        return
    with _tier_folder(job, peers, "ops") as folder:
        axes = peers.groups.axes(program)
        options: dict[str, Any] = {"captured_here": job.get("trusted", False)}
        if job["tier"]:
            options["tier"] = "host" if job["tier"] == "host" else folder
        executor = _runtime.Executor(text, "cpu", axes, TIMEOUT_S, options)
        fill_states(program, executor)
        times = StepTimes(machine.ranks, machine.threads, machine.cores)
        start = time.monotonic()
        measure_program(executor, program, batch, peers, StepTimes(1, 1, 1), 1, lambda: None)
        slowest = max(peers.exchange("a step takes", time.monotonic() - start))
        steps = steps_within(job["budget_s"], slowest)

        def commit() -> None:
            keeper.put(times.rows())
            progress("ops in place", times.steps, steps - 1)

        progress("ops in place", 0, steps - 1)
        measure_program(executor, program, batch, peers, times, steps, commit)
        keeper.put({("stage", "program " + job["digest"]): {"done": 1}})
        del executor
        peers.exchange("ops done", True)


@contextlib.contextmanager
def _tier_folder(job: dict[str, Any], peers: Peers, what: str) -> Iterator[str]:
    """A new folder for the files of all ranks, on the disk that was asked for; gone afterwards."""
    if peers.rank != 0:
        yield peers.broadcast(f"folder for {what}", b"").decode()
        return
    with tempfile.TemporaryDirectory(prefix="interlace-tier-", dir=job["folder"]) as name:
        peers.broadcast(f"folder for {what}", name.encode())
        yield name
