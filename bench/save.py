"""What a checkpoint costs a run: steps while one is saved beside them, against steps without; paired blocks, in the same processes.

python bench/save.py
python bench/save.py --ranks 1 --interval 20 --rounds 8 --folder /data/bench --json out.json

A block is `interval` steps; in every other block a save(wait=False) begins with the first, and is durable before the last ends. The
figure is the extra time of a block in steps. Blocks differ by more than that on a machine with neighbours, so it is printed with the
parts that can be told apart: the call itself, the wait before an update, and the writer's own CPU time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import MATMUL_BOUND, causal_loss, llama, token_batch
from common import machine, quartiles, write_json

import interlace


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if args.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    batch = token_batch(MATMUL_BOUND, rows=args.rows, rank=rank)
    model = llama(MATMUL_BOUND)
    trainer = interlace.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        causal_loss,
        batch,
        interlace.Config(strategy=args.strategy),
    )
    for _ in range(3):
        trainer.step(batch)
    blocks: dict[bool, list[float]] = {False: [], True: []}
    parts: list[dict[str, float]] = []
    for number in range(2 * args.rounds):
        saving = (number + number // 2) % 2 == 1  # plain, save, save, plain, ...
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        if saving:
            trainer.save(f"{folder}/checkpoint", wait=False)
        for _ in range(args.interval):
            trainer.step(batch)
        if dist.is_initialized():
            dist.barrier()
        blocks[saving].append(time.perf_counter() - begin)
        if saving:
            late = not trainer.saved()
            trainer.finish_save()
            assert trainer.last_save is not None
            parts.append({**trainer.last_save, "late": float(late)})
    if rank == 0:
        tell(args, blocks, parts)
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def tell(args: argparse.Namespace, blocks: dict[bool, list[float]], parts: list[dict[str, float]]) -> None:
    step = statistics.median(blocks[False]) / args.interval
    extra = [(a - b) / step for a, b in zip(blocks[True], blocks[False], strict=True)]
    low, middle, high = quartiles(extra)
    spread = quartiles([abs(a - b) / step for a, b in zip(blocks[False], blocks[False][1:], strict=False)] or [0.0])[1]
    mean = {k: statistics.median([p[k] for p in parts]) for k in parts[0]}
    known = mean["begin_seconds"] + mean["stall_seconds"] + mean["cpu_seconds"]
    print(
        f"save beside training: {args.ranks} rank(s), {args.strategy}, {mean['bytes'] / 2**20:.0f} MiB a rank, every {args.interval} steps"
    )
    print(f"  step                    {step * 1e3:9.1f} ms, {args.rounds} blocks of each kind")
    print(
        f"  extra, by the clock     {100 * middle:9.1f} % of a step   [{100 * low:.1f}, {100 * high:.1f}]; "
        f"blocks of one kind differ by {100 * spread:.1f} %"
    )
    print(f"  extra, by its parts     {100 * known / step:9.1f} % of a step: call {mean['begin_seconds'] * 1e3:.1f} ms "
        f"({mean['begin_cpu_seconds'] * 1e3:.1f} ms of CPU), "
          f"wait before the update {mean['stall_seconds'] * 1e3:.1f} ms, CPU of the writer {mean['cpu_seconds'] * 1e3:.1f} ms")  # fmt: skip
    print(f"  durable after           {mean['durable_seconds'] * 1e3:9.1f} ms ({mean['durable_seconds'] / step:.1f} steps), "
          f"{mean['staged_bytes'] / 2**20:.1f} MiB copied, staging at most {mean['staging_peak_bytes'] / 2**20:.1f} MiB")  # fmt: skip
    if args.json:
        record = {
            "title": "save beside training",
            "step_ms": step * 1e3,
            "extra_steps": [low, middle, high],
            "parts": mean,
        }
        write_json(
            args.json,
            {**record, "ranks": args.ranks, "strategy": args.strategy, "interval": args.interval, "machine": machine()},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["shard", "replicate", "zero1"], default="shard")
    parser.add_argument("--interval", type=int, default=20, help="steps from save to save")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind")
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
