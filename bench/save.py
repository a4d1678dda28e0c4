"""What a checkpoint costs a run: steps while one is saved beside them, against steps without; paired blocks, in the same processes.

python bench/save.py                      about a minute and a half; a line for each pair
python bench/save.py --ranks 1 --seconds 300 --interval 20 --folder /data/bench --json out.json

A block is as many steps as a save needs until it is durable, and one more. In every other block a save(wait=False) begins with the first
step. The figure is the extra time of such a block in steps: a save costs it once, however long the interval from save to save is.
Blocks differ by more than that on a machine with neighbours, so it is printed three ways: by the clock, by the processor time of all the
process's threads (of the slowest rank), and by the parts that can be told apart: the call itself, the wait before an update, and the
writer's own processor time.

Every step has another batch, as in training. The last line says how many of the optimizer's moments are subnormal numbers, on which an
update takes twice as long: none, unless gradients vanish for hundreds of steps. What makes some steps take longer by
the processor's time as well is something else.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import MATMUL_BOUND, causal_loss, llama, token_batch
from common import machine, quartiles, write_json

import interlace

DIFFERENT_BATCHES = 64
Pair = tuple[float, float]  # seconds by the clock, and of the processor


def blocks_of(trainer: interlace.Trainer, batches: Iterator[Any], folder: str, steps: int, saving: bool) -> Pair:
    """One block: the slowest rank's seconds."""
    if dist.is_initialized():
        dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    if saving:
        trainer.save(f"{folder}/checkpoint", wait=False)
    for _ in range(steps):
        trainer.step(next(batches))
    times = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times[0]), float(times[1])


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if args.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    begin = time.perf_counter()
    batches = itertools.cycle([token_batch(MATMUL_BOUND, args.rows, seed, rank) for seed in range(DIFFERENT_BATCHES)])
    model = llama(MATMUL_BOUND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = interlace.compile(model, optimizer, causal_loss, next(batches), interlace.Config(strategy=args.strategy))
    say = print if rank == 0 else lambda *_, **__: None
    for _ in range(2):
        trainer.step(next(batches))
    # One save alone, to know how long a block must be; the file system has its room after it.
    step = blocks_of(trainer, batches, folder, 1, False)[0]
    trainer.save(f"{folder}/checkpoint", wait=False)
    during = 0
    while not all_saved(trainer):
        trainer.step(next(batches))
        during += 1
    trainer.finish_save()
    steps = max(2, during + 1)
    say(f"compiled and warm after {time.perf_counter() - begin:.0f} s; a step takes {step * 1e3:.0f} ms, a block is {steps} steps",
        flush=True)  # fmt: skip
    blocks: dict[bool, list[Pair]] = {False: [], True: []}
    parts: list[dict[str, float]] = []
    while go_on(args, begin, blocks):
        number = len(blocks[True])
        for saving in (False, True) if number % 2 == 0 else (True, False):
            blocks[saving].append(blocks_of(trainer, batches, folder, steps, saving))
            if saving:
                late = not trainer.saved()
                trainer.finish_save()
                assert trainer.last_save is not None
                parts.append({**trainer.last_save, "late": float(late)})
        plain, saved = blocks[False][-1], blocks[True][-1]
        say(f"  pair {number + 1:3d}: {plain[0]:7.3f} s without, {saved[0]:7.3f} s with a save: "
            f"{100 * (saved[0] - plain[0]) / (plain[0] / steps):6.1f} % of a step, "
            f"by the processor {100 * (saved[1] - plain[1]) / (plain[1] / steps):6.1f} %", flush=True)  # fmt: skip
    small, numbers = subnormal(trainer)
    if rank == 0:
        tell(args, blocks, parts, steps)
        print(f"  subnormal numbers       {small:9,} of {numbers:,} in the optimizer's moments")
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def subnormal(trainer: interlace.Trainer) -> tuple[int, int]:
    """How many of the moments are subnormal, and how many there are; on rank 0."""
    state = trainer.optimizer_state_dict().get("state", {})
    moments = [t for entry in state.values() for role, t in entry.items() if role != "step"]
    tiny = torch.finfo(torch.float32).tiny
    return sum(int(((m != 0) & (m.abs() < tiny)).sum()) for m in moments), sum(m.numel() for m in moments)


def all_saved(trainer: interlace.Trainer) -> bool:
    """Whether the save has ended on every rank."""
    done = torch.tensor([float(trainer.saved())])
    if dist.is_initialized():
        dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done.item())


def go_on(args: argparse.Namespace, begin: float, blocks: dict[bool, list[Pair]]) -> bool:
    """Rank 0 decides for all: three pairs at least, then as long as the next one fits in the time."""
    made = len(blocks[True])
    pair = (blocks[True][-1][0] + blocks[False][-1][0]) if made else 0.0
    more = made < 3 or (made < args.rounds and time.perf_counter() - begin + pair < args.seconds)
    word = torch.tensor([float(more)])
    if dist.is_initialized():
        dist.broadcast(word, 0)
    return bool(word.item())


def tell(args: argparse.Namespace, blocks: dict[bool, list[Pair]], parts: list[dict[str, float]], steps: int) -> None:
    def extra(i: int) -> tuple[tuple[float, float, float], float, float]:
        """Quartiles of the extra steps, how much two neighbouring blocks without a save differ, and a step's seconds."""
        plain, saved = [b[i] for b in blocks[False]], [b[i] for b in blocks[True]]
        step = statistics.median(plain) / steps
        apart = [abs(a - b) / step for a, b in itertools.pairwise(plain)]
        return quartiles([(a - b) / step for a, b in zip(saved, plain, strict=True)]), statistics.median(apart), step

    clock, clock_apart, step = extra(0)
    cpu, cpu_apart, cpu_step = extra(1)
    mean = {k: statistics.median([p[k] for p in parts]) for k in parts[0]}
    known = (mean["begin_cpu_seconds"] + mean["stall_seconds"] + mean["cpu_seconds"]) / cpu_step
    print(f"save beside training: {args.ranks} rank(s), {args.strategy}, {mean['bytes'] / 2**20:.0f} MiB a rank, {len(parts)} pairs of "
          f"blocks of {steps} steps")  # fmt: skip
    print(f"  a step                  {step * 1e3:9.1f} ms by the clock, {cpu_step * 1e3:.1f} ms of the processor")
    for name, found, apart in (("by the clock", clock, clock_apart), ("by the processor", cpu, cpu_apart)):
        print(f"  extra, {name:<16} {100 * found[1]:9.1f} % of a step   [{100 * found[0]:.1f}, {100 * found[2]:.1f}]; "
              f"blocks without a save differ by {100 * apart:.1f} %")  # fmt: skip
    print(f"  extra, by its parts     {100 * known:9.1f} % of a step: call {mean['begin_cpu_seconds'] * 1e3:.1f} ms of the processor "
          f"({mean['begin_seconds'] * 1e3:.1f} by the clock), wait before the update {mean['stall_seconds'] * 1e3:.1f} ms, "
          f"writer {mean['cpu_seconds'] * 1e3:.1f} ms of the processor")  # fmt: skip
    print(f"  durable after           {mean['durable_seconds'] * 1e3:9.1f} ms ({mean['durable_seconds'] / step:.1f} steps; in "
          f"{sum(p['late'] for p in parts):.0f} blocks not by the end), {mean['staged_bytes'] / 2**20:.1f} MiB copied, staging at most "
          f"{mean['staging_peak_bytes'] / 2**20:.1f} MiB")  # fmt: skip
    share = 100 * clock[1] / args.interval
    print(
        f"  of an interval of {args.interval} steps {share:7.2f} % (asked: under {5 / args.interval:g} %, 5 % of one step)"
    )
    if args.json:
        record = {
            "title": "save beside training", "step_ms": step * 1e3, "extra_steps": clock, "extra_processor_steps": cpu,
            "extra_parts_steps": known, "parts": mean, "pairs": len(parts), "block_steps": steps, "ranks": args.ranks,
            "strategy": args.strategy, "interval": args.interval, "machine": machine(),
        }  # fmt: skip
        write_json(args.json, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["shard", "replicate", "zero1"], default="shard")
    parser.add_argument("--interval", type=int, default=20, help="steps from save to save, for the last line")
    parser.add_argument("--rounds", type=int, default=24, help="pairs of blocks, at most")
    parser.add_argument(
        "--seconds", type=float, default=90, help="no pair is begun that would end later; three are made always"
    )
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
