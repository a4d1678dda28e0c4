"""Two ranks (or more) on loopback, unshaped: our step against FSDP2 eager, alternating step by step in the same processes.

python bench/two_ranks.py
python bench/two_ranks.py --ranks 4 --strategy zero1 --rounds 20 --json out.json
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import MATMUL_BOUND, causal_loss, llama, token_batch
from common import paired, report

import interlace


def fsdp2_step(batch: dict[str, torch.Tensor]):
    from torch.distributed.fsdp import fully_shard

    model = llama(MATMUL_BOUND)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        causal_loss(model, batch).backward()
        optimizer.step()

    return step


def worker(rank: int, ranks: int, args: argparse.Namespace, rendezvous: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    batch = token_batch(MATMUL_BOUND, rank=rank)
    ours = llama(MATMUL_BOUND)
    trainer = interlace.compile(
        ours,
        torch.optim.AdamW(ours.parameters(), lr=1e-4),
        causal_loss,
        batch,
        interlace.Config(strategy=args.strategy, schedule=[]),
    )
    peer = fsdp2_step(batch)
    times = paired(
        {"fsdp2": peer, "interlace": lambda: trainer.step(batch)}, rounds=args.rounds, before_each=dist.barrier
    )
    if rank == 0:
        report(
            f"{ranks} ranks unshaped, {args.strategy}, matmul-bound Llama", times, baseline="fsdp2", json_path=args.json
        )
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["shard", "replicate", "zero1"], default="shard")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args.ranks, args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
