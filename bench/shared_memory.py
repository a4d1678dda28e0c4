"""What two ranks of one host send through memory, against the same over loopback sockets: two trainers in the same processes, in turns.

python bench/shared_memory.py
python bench/shared_memory.py --strategy replicate --rounds 40 --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from cases import MATMUL_BOUND, causal_loss, llama, token_batch
from common import paired, report
from network import Network

WARM_UP = 3
SIDES = {"sockets": "0", "memory": "1"}


def worker(args: argparse.Namespace) -> None:
    import interlace

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    batch = token_batch(MATMUL_BOUND, rank=rank)
    with contextlib.ExitStack() as stack:
        trainers = {}
        for side, shares in SIDES.items():
            os.environ["INTERLACE_SHARED_MEMORY"] = shares  # of the connections that this trainer makes
            model = llama(MATMUL_BOUND)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            config = interlace.Config(strategy=args.strategy, schedule=[])
            trainers[side] = stack.enter_context(interlace.compile(model, optimizer, causal_loss, batch, config))
            for _ in range(WARM_UP):
                trainers[side].step(batch)
        steps = {side: lambda trainer=trainer: float(trainer.step(batch)) for side, trainer in trainers.items()}
        times = paired(steps, rounds=args.rounds, before_each=dist.barrier)
        dist.barrier()
        if rank == 0:
            print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["shard", "replicate", "zero1"], default="shard")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    command = [sys.executable, __file__, "--worker", "--strategy", args.strategy, "--rounds", str(args.rounds)]
    with Network(ranks=2) as net:
        jobs = [net.spawn(r, command, stdout=subprocess.PIPE, text=True) for r in range(2)]
        said = [job.communicate()[0] for job in jobs]
        if any(job.returncode for job in jobs):
            raise SystemExit("a rank failed, see above")
    times = json.loads(said[0].splitlines()[-1])
    report(f"two ranks of one host, {args.strategy}", times, baseline="sockets", json_path=args.json)


if __name__ == "__main__":
    main()
