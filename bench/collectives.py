"""Our collectives on the CPU (between each two ranks, summed in rank order) against gloo's, in the same ranks.

    python bench/collectives.py
    INTERLACE_SHARED_MEMORY=0 python bench/collectives.py    # over sockets, as between hosts
    python bench/collectives.py --ranks 4 --shard-mb 0.25 2.5 5 --rounds 30 --json out.json

The figures are bound by memory copies; over sockets on a shaped interface (`tc qdisc add dev lo root tbf ...`) they show how near each
comes to wire speed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import paired, quartiles, report

from interlace import _runtime


def worker(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    ranks: int = args.ranks
    timeout = timedelta(seconds=60)
    store = dist.FileStore(rendezvous, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    own = dist.new_group(backend="gloo", timeout=timeout)
    comm = _runtime.Comm("dp", rank, ranks, "tcp", 60.0, own.group_name)
    for megabytes in args.shard_mb:
        numel = max(1, int(megabytes * 1e6 / 4))
        shard, full = torch.randn(numel), torch.zeros(numel * ranks)
        flat, result = torch.randn(numel * ranks), torch.zeros(numel)
        posting: list[float] = []

        def ours_gather(shard: torch.Tensor = shard, full: torch.Tensor = full, posting: list[float] = posting) -> None:
            begin = time.perf_counter()
            ticket = comm.start_gather([shard], [full], "gather")
            posting.append(time.perf_counter() - begin)
            comm.wait(ticket)

        def ours_reduce(flat: torch.Tensor = flat, result: torch.Tensor = result) -> None:
            comm.wait(comm.start_reduce([flat], [result], "reduce"))

        def gloo_gather(shard: torch.Tensor = shard, full: torch.Tensor = full) -> None:
            dist.all_gather_into_tensor(full, shard, group=own)

        def gloo_reduce(flat: torch.Tensor = flat, result: torch.Tensor = result) -> None:
            dist.reduce_scatter_tensor(result, flat, group=own)

        for name, sides in (
            ("all-gather", {"gloo": gloo_gather, "interlace": ours_gather}),
            ("reduce-scatter", {"gloo": gloo_reduce, "interlace": ours_reduce}),
        ):
            times = paired(sides, rounds=args.rounds, before_each=dist.barrier)
            if rank == 0:
                title = f"{name}, {ranks} ranks, {megabytes:g} MB shards"
                report(title, times, baseline="gloo", json_path=args.json, ranks=ranks, shard_mb=megabytes)
        if rank == 0:
            print(f"  starting a gather holds the calling thread {quartiles(posting)[1] * 1e6:.0f} us", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default 2)")
    parser.add_argument(
        "--shard-mb", type=float, nargs="+", default=[0.05, 2.5, 5.0], help="a rank's shard, MB of float32"
    )
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds a figure (default 20)")
    parser.add_argument("--json", help="add the records to this file")
    args = parser.parse_args()
    if args.ranks < 2 or args.rounds < 1 or min(args.shard_mb) <= 0:
        parser.error("needs at least 2 ranks, 1 round and positive sizes")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
