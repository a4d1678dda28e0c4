"""How long until every other rank has an error that names a rank that was killed, and one that was stopped.

python bench/lost_rank.py
python bench/lost_rank.py --ranks 4 --timeout 5 --rounds 5 --json out.json
python bench/lost_rank.py --mesh pp=2,dp=2          # the error must name the stage and an axis, too

The rank is killed (SIGKILL) or stopped (SIGSTOP) between two steps; the clock runs from there to the error of each other rank. A killed
rank is noticed by its connections, at once; a stopped one keeps them and is noticed after the timeout.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import OVERHEAD_BOUND, causal_loss, llama, token_batch
from common import machine, quartiles, write_json

import interlace
from interlace.config.forms import mesh_ranks

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
LIMIT_S = 120.0


def worker(rank: int, args: argparse.Namespace, victim: int, what: str, folder: str) -> None:
    """Leaves the pid of the victim, the moment it was lost, and the others' moments and messages in the folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    # The victim may be any rank: none of them holds the key-value store.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    config = interlace.Config(mesh=args.mesh)
    rows = 4 if config.stage_ranks > 1 else 1  # micro-batches
    batch = token_batch(OVERHEAD_BOUND, rows, rank=config.data_place(rank, args.ranks)[0])
    model = llama(OVERHEAD_BOUND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def compiled(timeout_s: float) -> interlace.Trainer:
        config = interlace.Config(schedule=[], timeout_s=timeout_s, mesh=args.mesh, accumulation=rows)
        return interlace.compile(model, optimizer, causal_loss, batch, config)

    compiled(LIMIT_S).close()  # the first time takes as long as it takes
    dist.barrier()
    trainer = compiled(args.timeout if what == "stopped" else LIMIT_S)
    for _ in range(3):
        trainer.step(batch)
    dist.barrier()
    if rank == victim:
        Path(folder, "lost").write_text(str(time.monotonic()))
        os.kill(os.getpid(), SIGNALS[what])
    try:
        while True:
            trainer.step(batch)
    except interlace.InterlaceError as e:
        seen = time.monotonic()
        Path(folder, f"rank{rank}").write_text(f"{seen} {e}")
    os._exit(0)


def named(args: argparse.Namespace, victim: int) -> list[str]:
    """What an error must say."""
    config = interlace.Config(mesh=args.mesh)
    more = ["axis", f"stage {config.stage_of(victim, args.ranks)}"] if config.stage_ranks > 1 else []
    return [f"rank {victim}", *more]


def seconds_of(args: argparse.Namespace, victim: int, what: str) -> list[float]:
    """One run: for each other rank, the seconds until its error. Error: a rank without one, or one that names another."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=worker, args=(r, args, victim, what, folder)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        for rank, process in enumerate(ranks):
            if rank != victim:
                process.join(LIMIT_S)
        for process in ranks:
            process.kill()
            process.join()
        lost, found = float(Path(folder, "lost").read_text()), []
        for rank in set(range(args.ranks)) - {victim}:
            seen, _, text = Path(folder, f"rank{rank}").read_text().partition(" ")
            missing = [word for word in named(args, victim) if word not in text]
            if missing:
                raise SystemExit(f"rank {rank} did not name {', '.join(missing)}: {text}")
            found.append(float(seen) - lost)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mesh", help='axes of all ranks, as "pp=2,dp=2"')
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds that a stopped rank may be silent")
    parser.add_argument("--rounds", type=int, default=3, help="runs a row, each with another rank")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    if args.mesh:
        args.ranks = mesh_ranks(interlace.Config(mesh=args.mesh).axes or ())
    rows = []
    for what in SIGNALS:
        found = [s for number in range(args.rounds) for s in seconds_of(args, number % args.ranks, what)]
        _, middle, _ = quartiles(found)
        rows.append({"what": what, "seconds": found})
        after = f", timeout {args.timeout:g} s" if what == "stopped" else ""
        print(
            f"a rank of {args.mesh or args.ranks} is {what}{after}: named after {middle:.2f} s, at most {max(found):.2f} s",
            flush=True,
        )
    if args.json:
        write_json(args.json, {"title": "lost ranks", "ranks": args.ranks, "mesh": args.mesh, "rows": rows, "machine": machine()})


if __name__ == "__main__":
    main()
