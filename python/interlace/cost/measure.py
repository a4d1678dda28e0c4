"""Measuring, as every rank does it together: a program's ops and collectives in place, collectives over sizes, copies in memory.

A program is run as it is, op after op, because only so are caches and memory in the state in which a step finds them; but every
collective is completed by the op that starts it, after all ranks have met, so no op runs beside a transfer. An op counts with
its processor time where a rank has one thread: other tenants of the machine, and ranks that share a core, do not add to that.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from interlace.cost.measurements import SLOWDOWN
from interlace.dist.groups import transport
from interlace.dist.mesh import STAGES, Mesh

Rows = dict[tuple[str, str], dict[str, float]]
Exchange = Callable[[Any], list[Any]]  # every rank's value, by rank
MIN_STEPS, MAX_STEPS = 3, 40
POINT_S = 0.35  # spent on one size of a collective or copy
MIN_CALLS, MAX_CALLS = 5, 60
COPY_SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)
IN_PLACE = 1 << 16  # bytes from which a collective's time is more than that of its ranks meeting
SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24))  # bytes: 1 KiB to 16 MiB


class StepTimes:
    """Collects the records of serial steps (`Executor.record`) and says what each op and collective takes.

    A collective takes as long as on the rank that has it last: in a step, what follows it on the others soon waits for that one.
    Of a pipeline those ranks count that run the same `program`.

    An op's time is its median, which one interruption does not move. But times are skewed, so medians add up to less than the steps
    whose ops they are (1 to 6 %): all are raised by one factor to the median of the steps' sums.
    """

    def __init__(self, ranks: int, threads: int, cores: int, on_device: bool = False, program: str = "") -> None:
        self.ranks, self.program = ranks, program
        self.use_cpu_time = threads == 1 and not on_device
        # With several threads the wall clock must do; ranks that share cores then stretch it by so much. Devices have clocks of their own.
        self.crowded = not on_device and ranks * threads > cores
        self.crowd = 1.0 if on_device else max(1.0, ranks * threads / cores)
        self.ops: dict[int, dict[str, Any]] = {}
        self.times: dict[int, list[tuple[float, float]]] = defaultdict(list)  # op → wall, processor seconds
        self.transient: dict[int, int] = defaultdict(int)
        self.collectives: dict[int, list[float]] = defaultdict(list)  # op → seconds until the last rank had it
        self.finishes: dict[int, list[float]] = defaultdict(list)  # op → seconds after this rank's data had come
        self.sums: list[float] = []  # of each step's ops, seconds
        self.moved: list[float] = []  # of each step's collectives, seconds
        self.steps = 0

    def add(self, record: dict[str, Any], exchange: Exchange | None = None) -> None:
        """One step; every rank must call it with an `exchange`."""
        self.steps += 1
        self.ops.update(record["ops"])
        for op, _, seconds, cpu, live, peak in record["samples"]:
            self.times[op].append((seconds, cpu))
            inside = peak - live - self.ops[op]["result_bytes"]
            self.transient[op] = max(self.transient[op], inside)
        self.sums.append(sum(cpu if self.use_cpu_time else seconds for op, _, seconds, cpu, *_ in record["samples"] if self._computes(op)))
        walls = {(op, run): seconds for op, run, seconds, *_ in record["samples"]}
        own = [(op, walls[op, run], seconds) for op, run, _, seconds in record["transfers"]]
        mine = [self.program, [wall for _, wall, _ in own]]
        everyone = [mine] if exchange is None else exchange(mine)
        lasts = list(map(max, zip(*[times for program, times in everyone if program == self.program], strict=True)))
        self.moved.append(sum(lasts))
        for (op, wall, moving), last in zip(own, lasts, strict=True):
            self.collectives[op].append(last)
            self.finishes[op].append(max(0.0, wall - moving))

    def rows(self) -> Rows:
        """Instances of one signature differ in place and caches: the median of each, and the mean of these."""
        ops: dict[str, list[int]] = defaultdict(list)
        collectives: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for op, facts in self.ops.items():
            if facts["bytes"]:
                size = facts["bytes"] // facts["units"]
                collectives[facts["name"].removesuffix(".start"), facts["ranks"], size].append(op)
            elif facts["key"]:
                ops[facts["key"]].append(op)
        found: Rows = {}
        computing = {op: [cpu if self.use_cpu_time else wall for wall, cpu in self.times[op]] for op in self.times if self._computes(op)}
        more, more_moved = self._more(computing, self.sums), self._more(self.collectives, self.moved)
        for key, places in ops.items():
            us = statistics.fmean(self._op_us(op) for op in places) * more
            found["op", key] = {
                "us": us, "bytes": self.ops[places[0]]["result_bytes"],
                "transient": max(self.transient[op] for op in places), "measured": 1, "steps": self.steps,
            }  # fmt: skip
        for (kind, ranks, size), places in collectives.items():
            # Small ones are measured better by themselves: in place, how far apart the ranks are decides.
            moved = [op for op in places if self.collectives[op]]
            if ranks == "1" or size < IN_PLACE or not moved:
                continue
            units = self.ops[places[0]]["units"]
            wall = statistics.fmean(statistics.median(self.collectives[op]) for op in moved) / units * more_moved
            core = statistics.fmean(statistics.median(c for _, c in self.times[op]) for op in moved) / units * more_moved
            finish = statistics.fmean(statistics.median(self.finishes[op]) for op in moved) / units
            if kind not in ("reduce", "all_reduce"):
                finish = 0.0
            if self.crowded:  # who has its data goes on to compute, on the core of another that is still at it: a sweep must say
                if size in SIZES:
                    continue
                wall = 0.0
            found["collective", f"{kind} {ranks} {size}"] = {
                "us": wall * 1e6, "core_us": core * 1e6, "finish_us": finish * 1e6, "steps": self.steps, "in_place": 1,
            }  # fmt: skip
        return found

    def _computes(self, op: int) -> bool:
        return bool(self.ops[op]["key"]) and not self.ops[op]["bytes"]

    def _more(self, times: dict[int, list[float]], sums: list[float]) -> float:
        """The median of the steps' sums over the sum of the medians."""
        medians = sum(statistics.median(each) * len(each) / self.steps for each in times.values() if each)
        return statistics.median(sums) / medians if medians > 0 else 1.0

    def _op_us(self, op: int) -> float:
        if self.use_cpu_time:
            return statistics.median(cpu for _, cpu in self.times[op]) * 1e6
        return statistics.median(wall for wall, _ in self.times[op]) * 1e6 / self.crowd


def fill_states(program: Any, executor: Any) -> None:
    """Small random weights instead of zeros: some kernels are faster on zeros."""
    generator = torch.Generator().manual_seed(0)
    for state in [*program.states(), *program.params(), *program.buffers()]:
        role = state.get("role", "full")
        if role not in ("full", "shard", "weight"):
            continue
        try:
            tensor = executor.tensor(state["value"])
        except RuntimeError:  # a part of a unit
            continue
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)


def plain_inputs(program: Any) -> list[torch.Tensor]:
    """Inputs for a program whose batches are not known: zeros are valid as tokens, classes and places."""
    dtypes = {
        "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
        "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
    }  # fmt: skip
    found = []
    for entry in program.inputs():
        dtype, shape = dtypes[entry["dtype"]], [int(size) for size in entry["shape"]]
        found.append(torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype))
    return found


def hyper_of(program: Any) -> list[list[float]]:
    """A learning rate of zero: measuring changes no weight. A rule's numbers say nothing of what they are: they are all zero."""
    numbers = {"adamw": [0.0, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0], "adam": [0.0, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0]}
    rules = program.rules()
    return [
        numbers.get(group["optimizer"], [0.0, 0.9, 0.0, 0.0, 0.0, 1.0, 0.0])
        if group["rule"] is None
        else [float(rules[group["rule"]]["forms"] - 1), *[0.0] * (rules[group["rule"]]["row"] - 1)]
        for group in program.groups()
    ]


def measure_program(
    executor: Any, program: Any, inputs: list[torch.Tensor], peers: Any, times: StepTimes, steps: int,
    commit: Callable[[], None],
) -> None:  # fmt: skip
    """Serial steps; `commit` after each. Every rank must call it, once for each `steps`."""
    hyper = hyper_of(program)
    executor.set_trace("serial")
    try:
        for step in range(steps):
            count = len(program.inputs()) // program.width  # of one micro-batch
            micro_batches = [list(inputs[:count]) for _ in range(program.accumulation)]
            executor.step(micro_batches, hyper, step)
            if step > 0 or steps == 1:  # the first step allocates what later ones reuse
                times.add(executor.record(), partial(peers.exchange, f"collectives of step {step} of {steps}"))
                commit()
    finally:
        executor.set_trace("off")


def steps_within(budget_s: float, step_s: float) -> int:
    """How many steps to measure, the one that warms up included."""
    return 1 + max(MIN_STEPS, min(MAX_STEPS, int(budget_s / max(step_s, 1e-4))))


class Collectives:
    """Gathers, reduces, all-reduces and point-to-point transfers on our own transport, among all ranks or along some axes of a mesh;
    with replicas: reductions along the axes and then over the replicas."""

    def __init__(self, peers: Any, timeout_s: float, mesh: Mesh | None = None, axes: str = "dp", replicas: str = "") -> None:
        from interlace import _runtime

        mesh = mesh or Mesh({axes: peers.size}, peers.rank)
        both = mesh.joined(axes, replicas)
        ranks = mesh.group(both)
        self.ends = [ranks.index(r) for r in (mesh.leaders() if both == STAGES else ranks)[:2]]  # of a message
        backend = transport(peers.device)
        self.peers, self.size, self.members, self.device = peers, mesh.size(axes), len(ranks), peers.device
        self.index = mesh.index(both)
        self.grid = [[ranks.index(r) for r in mesh.group(along)] for along in (axes, replicas)] if replicas else None
        group = peers.groups.along(mesh, both).group_name
        self.comm = _runtime.Comm(both, self.index, len(ranks), backend, timeout_s, group, mesh.row(both))

    def time(self, kind: str, size: int) -> dict[str, float]:
        """Medians over repeated calls of `size` bytes, as the cost model counts them, each until the last rank has it; ranks meet
        before each."""
        run = self._call(kind, size)
        walls: list[float] = []
        cores: list[float] = []
        meet = torch.zeros(1, dtype=torch.int32, device=self.device)
        calls = MAX_CALLS
        number = -2
        while number < calls:
            self.comm.wait(self.comm.start_all_reduce(meet, "meeting"))
            self._settle()
            core, wall = time.process_time(), time.perf_counter()
            run()
            self._settle()
            wall, core = time.perf_counter() - wall, time.process_time() - core
            if number >= 0:
                walls.append(wall)
                cores.append(core)
            elif number == -1:  # all ranks must agree on how often
                slowest = torch.tensor([int(wall * 1e6)], dtype=torch.int64, device=self.device)
                self.comm.wait(self.comm.start_all_reduce(slowest, "calls"))
                mean_s = slowest.item() / 1e6 / self.members
                calls = max(MIN_CALLS, min(MAX_CALLS, int(POINT_S / max(mean_s, 1e-6))))
            number += 1
        own = torch.tensor(walls, dtype=torch.float64, device=self.device)
        everyone = torch.empty(self.members, len(walls), dtype=torch.float64, device=self.device)
        self.comm.wait(self.comm.start_gather([own], [everyone.view(-1)], "times"))
        last = everyone.amax(0).tolist()
        return {"us": statistics.median(last) * 1e6, "core_us": statistics.median(cores) * 1e6, "finish_us": 0.0}

    def _settle(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def beside_compute(self, cores: int) -> Rows:
        """How much a matrix product is slowed by a gather that is under way, beyond what sharing the cores explains; and what
        starting a transfer takes of a rank's thread, its data not counted (that is part of what the transfer takes of a core)."""
        gathered = 1 << 22
        slowdown, issue = [], []
        a, b = torch.randn(384, 384), torch.randn(384, 384)
        shard = torch.ones(gathered // 4 // self.peers.size)
        whole = torch.ones(shard.numel() * self.peers.size)
        little, few = torch.ones(32), torch.ones(32 * self.peers.size)
        meet = torch.zeros(1, dtype=torch.int32)

        def products() -> float:
            start = time.perf_counter()
            for _ in range(4):
                torch.mm(a, b)
                self.comm.progress()  # as between two ops of a step
            return time.perf_counter() - start

        for number in range(24):
            self.comm.wait(self.comm.start_all_reduce(meet, "meeting"))
            own = time.thread_time()
            ticket = self.comm.start_gather([little], [few], "little")
            issued = time.thread_time() - own
            self.comm.wait(ticket)
            start, core = time.perf_counter(), time.process_time()
            self.comm.wait(self.comm.start_gather([shard], [whole], "gather"))
            share = (time.process_time() - core) / (time.perf_counter() - start)
            alone = products()
            self.comm.wait(self.comm.start_all_reduce(meet, "meeting"))
            ticket = self.comm.start_gather([shard], [whole], "gather")
            beside = products()
            still = time.perf_counter()
            self.comm.wait(ticket)
            waited = time.perf_counter() - still
            if number < 4:
                continue
            issue.append(issued)
            if waited > 0.2 * alone:  # the transfer lasted longer than the products: they were beside it all the time
                shared = max(1.0, self.peers.size * (1 + min(share, 1.0)) / cores)
                slowdown.append(beside / alone / shared)
        rows: Rows = {("issue", "start"): {"us": statistics.median(issue) * 1e6}}
        factor = max(1.0, statistics.median(slowdown)) if len(slowdown) >= 5 else 1.0
        rows[SLOWDOWN] = {"factor": factor, "samples": len(slowdown)}
        return rows

    def _call(self, kind: str, size: int) -> Callable[[], None]:
        ranks, comm = self.size, self.comm
        shard = torch.ones(max(1, size // 4 // ranks), device=self.device)
        whole = torch.ones(shard.numel() * ranks, device=self.device)
        if kind == "gather":
            return lambda: comm.wait(comm.start_gather([shard], [whole], "gather"))
        if self.grid is not None:
            within, across = self.grid
            return lambda: comm.wait(comm.start_grid_reduce([whole], [shard], within, across, "reduce"))
        if kind == "reduce":
            return lambda: comm.wait(comm.start_reduce([whole], [shard], "reduce"))
        if kind == "all_reduce":
            value = torch.ones(max(1, size // 4), device=self.device)
            return lambda: comm.wait(comm.start_all_reduce(value, "all_reduce"))
        message, (first, second) = torch.ones(max(1, size // 4), device=self.device), self.ends

        def send() -> None:
            if self.index == first:
                comm.wait(comm.start_send(message, second, "p2p"))
            elif self.index == second:
                comm.wait(comm.start_recv(message, first, "p2p"))

        return send


def repeated_us(action: Callable[[], object]) -> float:
    """The median of many calls, microseconds."""
    times: list[float] = []
    spent = time.perf_counter()
    action()
    while len(times) < MIN_CALLS or (len(times) < MAX_CALLS and time.perf_counter() - spent < POINT_S):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def memory_copy_us(size: int) -> float:
    """Microseconds of one copy of so many bytes within the host's memory."""
    data = torch.zeros(size, dtype=torch.uint8)
    target = torch.empty_like(data)
    return repeated_us(lambda: target.copy_(data))


def sweep_sizes(largest: int) -> list[int]:
    """The standard sizes up to the first that is at least `largest`."""
    below = [size for size in SIZES if size < largest]
    return [*below, *[size for size in SIZES if size >= largest][:1]]
