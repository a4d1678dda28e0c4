"""What Muon's step costs a rank where matrices are dealt to the ranks, against one rank that makes them all orthogonal.

    python bench/muon.py
    python bench/muon.py --ranks 4 --matrices 16 --size 128 --strategy zero1 --json out.json

The model is its matrices, and the loss their sum: a step is the update and its transfers, and little else. A rank's seconds are those of
its thread on a processor, transfers included, of the busiest rank: what a step takes where every rank has a core of its own. The one rank
has a neighbour of its kind on every other core, as each of several ranks has: cores that share caches or units are slower together. The time
by the clock is printed beside it; with fewer cores than ranks it says how many cores there are.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import machine, quartiles, write_json

import interlace


class Matrices(torch.nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.randn(size, size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in self.all]).sum()


def worker(index: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    """Leaves seconds of processor and clock of each step in the folder."""
    group, rank = divmod(index, ranks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{group}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = Matrices(args.matrices, args.size)
    optimizer = torch.optim.Muon(model.parameters())
    batch = {"x": torch.randn(1, args.size)}
    config = interlace.Config(schedule=[], strategy=args.strategy)
    lines = []
    with interlace.compile(model, optimizer, lambda m, b: m(b["x"]), batch, config) as trainer:
        for step in range(args.rounds + 2):
            clock, processor = time.monotonic(), time.thread_time()
            trainer.step(batch)
            if step >= 2:
                lines.append(f"{time.thread_time() - processor} {time.monotonic() - clock}")
    Path(folder, f"rank{index}").write_text("\n".join(lines))


def steps(ranks: int, trainings: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Of each step the busiest rank's seconds of processor, and the longest by the clock; of so many trainings side by side."""
    count = ranks * trainings
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(ranks, args, folder), nprocs=count)
        table = [[tuple(map(float, line.split())) for line in Path(folder, f"rank{i}").read_text().splitlines()] for i in range(count)]
    by_step = list(zip(*table, strict=True))
    return [max(row[0] for row in step) for step in by_step], [max(row[1] for row in step) for step in by_step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--size", type=int, default=768, help="rows and columns (default 768)")
    parser.add_argument("--strategy", choices=["shard", "zero1", "replicate"], default="shard")
    parser.add_argument("--rounds", type=int, default=10, help="steps that are measured (default 10)")
    parser.add_argument("--json", help="add the record to this file")
    args = parser.parse_args()
    alone, dealt = steps(1, min(args.ranks, os.cpu_count() or 1), args), steps(args.ranks, 1, args)
    record = {}
    for what, one, all_ranks in zip(("processor", "clock"), alone, dealt, strict=True):
        a, b = quartiles(one)[1], quartiles(all_ranks)[1]
        record[what] = {"one_rank_s": a, "dealt_s": b, "ratio": b / a}
        print(f"{what:9}: one rank {1e3 * a:8.1f} ms, {args.ranks} ranks {1e3 * b:8.1f} ms: {b / a:.3f} x")
    print(f"{os.cpu_count()} cores")
    if args.json:
        write_json(args.json, {"bench": "muon", "settings": vars(args), **record, "machine": machine()})


if __name__ == "__main__":
    main()
