"""What a checkpoint costs a run: one long run with a save every so many steps; each save's steps against their neighbours.

python bench/save.py                                   two and a half minutes
python bench/save.py --ranks 1 --seconds 480 --interval 20 --folder /data/bench --json out.json

    step      0    1    2    3    4    5    6    7    8    9   10   11 ...
    save      S─durable                                        S─durable
    measured  ████ ████ ·    ·    ·    control ·    ·    ·    ████ ████          ·: neighbours

A save's extra time is that of the call and of all steps until it is durable on every rank, less as many times the median of its eight
nearest steps that have to do with no save: a machine whose speed drifts within minutes does not move it. It is counted by the clock, by
the processor time of all the process's threads, and by that of the training thread alone (what is not overlapped). The median over the
saves comes with its 95 % interval (by ranks of the sorted values, so it assumes nothing about the noise). "control" is the same figure
for steps half-way between two saves: it must have zero within its interval, and that interval says how small a cost could be seen.
A save costs it once, however long the interval is. "By its parts" adds what can be told apart on rank 0, which has the most to do: the
call, the wait before an update, the writer, and what puts the folder in place; but for the wait all by the processor's time, as a step's.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import MATMUL_BOUND, causal_loss, llama, token_batch
from common import machine, write_json

import interlace

DIFFERENT_BATCHES = 64
NEIGHBOURS = 8
CLOCKS = {"clock": time.perf_counter, "processor": time.process_time, "training thread": time.thread_time}


@dataclass
class Run:
    """One rank's run. Step i lies between stamps i and i + 1; a save's call belongs to the step that follows it."""

    stamps: list[tuple[float, ...]] = field(default_factory=list)  # seconds by each of CLOCKS
    begun: list[int] = field(default_factory=list)  # steps before which a save was called
    ended: list[int] = field(default_factory=list)  # the first step begun after it was durable here
    parts: list[dict[str, float]] = field(default_factory=list)

    def stamp(self) -> None:
        self.stamps.append(tuple(clock() for clock in CLOCKS.values()))


def run(trainer: interlace.Trainer, batches: Any, folder: str, saves: int, interval: int) -> Run:
    """Nothing between two stamps but steps and saves: ranks that met elsewhere would leave their waiting out."""
    record = Run()
    for step in range(saves * interval):
        record.stamp()
        if len(record.ended) < len(record.begun) and trainer.saved():
            trainer.finish_save()
            assert trainer.last_save is not None
            record.parts.append(trainer.last_save)
            record.ended.append(step)
        if step % interval == 0:
            record.begun.append(step)
            trainer.save(f"{folder}/checkpoint", wait=False)
        trainer.step(next(batches))
    record.stamp()
    if not trainer.saved() or len(record.parts) < saves:
        raise SystemExit("a save was not durable when the next was due: give a longer --interval")
    return record


def number_of_saves(args: argparse.Namespace, step_seconds: float) -> int:
    """As many as fit, as rank 0 has it; six at least, fewer have no interval."""
    word = torch.tensor([max(6, min(args.saves, int(args.seconds / step_seconds / args.interval)))])
    if dist.is_initialized():
        dist.broadcast(word, 0)
    return int(word.item())


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if args.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    begin = time.perf_counter()
    # Every step has another batch, as in training: one that is learned by heart makes moments subnormal, and updates slow.
    batches = itertools.cycle([token_batch(MATMUL_BOUND, args.rows, seed, rank) for seed in range(DIFFERENT_BATCHES)])
    model = llama(MATMUL_BOUND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # profile="off": steps that measure the machine for the next schedule take several times as long.
    config = interlace.Config(strategy=args.strategy, profile="off")
    trainer = interlace.compile(model, optimizer, causal_loss, next(batches), config)
    for _ in range(2):
        trainer.step(next(batches))
    trainer.save(f"{folder}/checkpoint")  # the file system has its room after it
    warm = time.perf_counter()
    for _ in range(4):
        trainer.step(next(batches))
    saves = number_of_saves(args, (time.perf_counter() - warm) / 4)
    if rank == 0:
        print(f"compiled and warm after {time.perf_counter() - begin:.0f} s; {saves} saves", flush=True)
    mine = run(trainer, batches, folder, saves, args.interval)
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * args.ranks
        dist.all_gather_object(everyone, mine)
    if rank == 0:
        tell(args, everyone)
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def windows_of(runs: list[Run]) -> list[tuple[int, int]]:
    """The steps of each save: from its call to the first that began when it was durable on every rank."""
    return [(begin, max(ends)) for begin, *ends in zip(runs[0].begun, *(r.ended for r in runs), strict=True)]


def extras(runs: list[Run], clock: int, middle: bool) -> tuple[list[float], list[float]]:
    """For each save (or for the middles between two): its extra time in steps; and the seconds of a step that has to do with none."""
    steps = len(runs[0].stamps) - 1
    seconds = [statistics.fmean(r.stamps[i + 1][clock] - r.stamps[i][clock] for r in runs) for i in range(steps)]
    windows = windows_of(runs)
    busy = {i for begin, end in windows for i in range(begin, end)}
    free = [i for i in range(steps) if i not in busy]
    found: list[float] = []
    for number, (begin, end) in enumerate(windows):
        first, length = begin, end - begin
        if middle:
            after = windows[number + 1][0] if number + 1 < len(windows) else steps
            first = (end + after - length) // 2
        own = range(first, first + length)
        near = sorted((i for i in free if i not in own), key=lambda i: abs(2 * i + 1 - 2 * first - length))[:NEIGHBOURS]
        step = statistics.median(seconds[i] for i in near)
        found.append((sum(seconds[i] for i in own) - length * step) / step)
    return found, [seconds[i] for i in free]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and its 95 % interval: the k-th smallest and largest value, so that a coin thrown n times shows less than k heads with a
    probability of at most 2.5 %."""
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.5**n
    while below <= 0.025:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return statistics.median(ordered), ordered[k - 1], ordered[n - k]


def tell(args: argparse.Namespace, runs: list[Run]) -> None:
    parts = [{k: float(v) for k, v in p.items()} for p in runs[0].parts]
    part = {k: statistics.median(p[k] for p in parts) for k in parts[0]}
    lengths = [end - begin for begin, end in windows_of(runs)]
    print(f"save beside training: {args.ranks} rank(s), {args.strategy}, {part['bytes'] / 2**20:.0f} MiB a rank, {len(parts)} saves, "
          f"one every {args.interval} steps")  # fmt: skip
    record: dict[str, Any] = {"title": "save beside training", "ranks": args.ranks, "strategy": args.strategy, "saves": len(parts),
                              "interval": args.interval, "parts": part, "machine": machine()}  # fmt: skip
    step = {}
    for i, name in enumerate(CLOCKS):
        found, plain = extras(runs, i, False)
        none, _ = extras(runs, i, True)
        step[name] = statistics.median(plain)
        middle, low, high = (100 * x for x in interval(found))
        zero, zero_low, zero_high = (100 * x for x in interval(none))
        print(f"  extra, by the {name:<16} {middle:6.1f} % of a step of {step[name] * 1e3:.0f} ms   [{low:.1f}, {high:.1f}]; control "
              f"{zero:.1f} % [{zero_low:.1f}, {zero_high:.1f}]")  # fmt: skip
        record[name] = {
            "step_ms": step[name] * 1e3,
            "extra": [middle, low, high],
            "control": [zero, zero_low, zero_high],
        }
    known = [
        ("call", part["begin_cpu_seconds"]),
        ("wait before the update", part["stall_seconds"]),
        ("writer", part["cpu_seconds"]),
        ("in place", part["finish_cpu_seconds"]),
    ]
    record["known"] = 100 * sum(s for _, s in known) / step["processor"]
    print(
        f"  extra, by its parts {record['known']:16.1f} % of a step: "
        + ", ".join(f"{n} {s * 1e3:.1f} ms" for n, s in known)
    )
    print(f"  durable after {part['durable_seconds'] * 1e3:22.0f} ms, {statistics.fmean(lengths):.1f} steps measured for a save; "
          f"{part['staged_bytes'] / 2**20:.1f} MiB copied before the update, "
          f"staging at most {part['staging_peak_bytes'] / 2**20:.1f} MiB")  # fmt: skip
    print("  (asked: under 5 % of one step for a save every 20 steps)")
    if args.json:
        write_json(args.json, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["shard", "replicate", "zero1"], default="shard")
    parser.add_argument("--interval", type=int, default=8, help="steps from save to save; fewer: more saves a minute")
    parser.add_argument("--saves", type=int, default=200, help="at most")
    parser.add_argument("--seconds", type=float, default=120, help="no save is begun that would end later; six are")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a rank's batch")
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        mp.spawn(worker, args=(args, folder), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
