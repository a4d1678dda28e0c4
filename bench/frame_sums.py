"""What the checksums of the frames between ranks cost, or their encryption: the same steps with and without, in turn, in the same processes.

python bench/frame_sums.py                            # two ranks on loopback
python bench/frame_sums.py --mbit 1000 --secret       # each on a host of its own, with the keyed tags that hosts use
python bench/frame_sums.py --encrypt                  # AES-256-GCM instead; with --mbit too
python bench/frame_sums.py --strategy replicate --rounds 40 --json out.json

Needs the build for tests (make test makes it), in which both ranks can leave their sums out for a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from cases import MATMUL_BOUND, causal_loss, llama, token_batch
from common import paired, quartiles, ratios, report
from network import Network

SECRET = "a secret of the ranks of this run"


def worker(args: argparse.Namespace) -> None:
    import interlace
    from interlace import _runtime

    torch.set_num_threads(1)
    os.environ["INTERLACE_SHARED_MEMORY"] = "0"  # what goes through memory has none
    rank = int(os.environ["RANK"])  # the process group is the trainer's: with the secret of the run
    batch, model = token_batch(MATMUL_BOUND, rank=rank), llama(MATMUL_BOUND)
    config = interlace.Config(strategy=args.strategy, schedule=[])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with interlace.compile(model, optimizer, causal_loss, batch, config) as trainer:

        def step(without: bool) -> None:
            _runtime.testing.leave_out_frame_sums(without)
            trainer.step(batch)

        sides = {"without": lambda: step(True), "with": lambda: step(False)}
        clock = time.process_time if args.processor else time.perf_counter
        times = paired(sides, rounds=args.rounds, before_each=dist.barrier, clock=clock)
        _runtime.testing.leave_out_frame_sums(False)
        dist.barrier()
        if rank == 0:
            print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, help="sending rate of each rank in Mbit/s (default: unshaped loopback)")
    parser.add_argument("--secret", action="store_true", help="ranks with a secret: keyed tags where they are on several hosts")
    parser.add_argument("--encrypt", action="store_true", help="ranks that encrypt (INTERLACE_ENCRYPT=1)")
    parser.add_argument("--strategy", choices=["shard", "replicate", "zero1"], default="shard")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processor", action="store_true", help="count the processor's time alone, which other programs disturb less")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        with contextlib.suppress(KeyboardInterrupt):
            worker(args)
        return
    command = [sys.executable, __file__, "--worker", "--strategy", args.strategy, "--rounds", str(args.rounds)]
    command += ["--processor"] if args.processor else []
    with Network(ranks=2, mbit=args.mbit) as net:
        environment = {"LOCAL_WORLD_SIZE": "1"} if args.mbit else {}
        environment |= {"INTERLACE_SECRET": SECRET} if args.secret or args.encrypt else {}
        environment |= {"INTERLACE_ENCRYPT": "1"} if args.encrypt else {}
        jobs = [net.spawn(r, command, environment, stdout=subprocess.PIPE, text=True) for r in range(2)]
        said = [job.communicate()[0] for job in jobs]
        if any(job.returncode for job in jobs):
            raise SystemExit("a rank failed, see above")
    times = json.loads(said[0].splitlines()[-1])
    where = "loopback" if args.mbit is None else f"{args.mbit:g} Mbit/s"
    what = "AES-256-GCM" if args.encrypt else "keyed tags" if args.secret and args.mbit else "CRC-32C"
    what += ", processor time" if args.processor else ""
    report(f"two ranks, {where}, {args.strategy}, {what}", times, baseline="without", json_path=args.json)
    low, middle, high = (100 * (r - 1) for r in quartiles(ratios(times, "with", "without")))
    name, asked = ("encryption costs", "") if args.encrypt else ("the sums cost", " (asked: 0.5)")
    print(f"{name} {middle:.2f} % of a step [{low:.2f}, {high:.2f}]{asked}")


if __name__ == "__main__":
    main()
