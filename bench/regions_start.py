"""What a run with regions takes until its first step, and until it is as fast as it gets: nothing in the cache, waiting for the compiler
or training beside it; and once the library is in the cache.

python bench/regions_start.py
python bench/regions_start.py --threads 2 --json out/regions_start.json

python bench/regions_start.py --library llama-3-8b --seq 512   # only the library of a model's regions, captured on meta, nothing cached

Each run is a process of its own on one rank, in turn. Imports and building the model are not counted. `swapped` is when the step began that
first ran compiled regions; `ms bodies` are steps while the compiler runs beside them, `ms off` those of a run without regions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, write_json

RUNS = ("off", "wait, cold", "beside, cold", "beside, cached")
LIMIT_S = 300.0
AFTER = 20  # steps that are timed behind the swap


def measure(model_name: str, run: str, cache: str, threads: int) -> dict[str, object]:
    import torch

    import interlace
    from interlace.models import build

    torch.set_num_threads(threads)
    preset = build(model_name, micro_batch=1, seq=128)
    optimizer = torch.optim.AdamW(preset.model.parameters(), lr=1e-3)
    config = interlace.Config(
        regions="off" if run == "off" else "on", regions_wait=run.startswith("wait"), cache=cache, schedule=[]
    )
    begin = time.perf_counter()
    with interlace.compile(preset.model, optimizer, preset.loss_fn, preset.example_batch, config) as trainer:
        compiled = time.perf_counter() - begin
        ends: list[float] = [time.perf_counter() - begin]
        found: dict[str, object] = {"compile": compiled}
        swapped, left = None, AFTER
        while left and ends[-1] < LIMIT_S:
            trainer.step(preset.example_batch)
            ends.append(time.perf_counter() - begin)
            if run == "off" or trainer.stats()["regions"]["compiled"]:
                if swapped is None:
                    swapped = len(ends) - 1
                left -= 1
        seconds = [b - a for a, b in itertools.pairwise(ends)]
        assert swapped is not None, "the kernels did not come"
        since = seconds[swapped + 2 :]  # the first ones fill the arena
        bodies = seconds[2 : swapped - 1]
        return found | {
            "first step": ends[1],
            "swapped": ends[swapped - 1],
            "from step": swapped,
            "ms bodies": 1e3 * statistics.median(bodies) if bodies else None,
            "ms after": 1e3 * statistics.median(since),
            "regions": trainer.stats()["regions"],
        }


def library(model: str, seq: int, rounds: int) -> None:
    """Prints the seconds that a library of all the model's regions takes, from the start of the process that makes it."""
    from cubins import regions_of

    from interlace.regions import ready

    funcs = regions_of(model, seq, 1 << 30)
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            found = ready(funcs, "on", Path(folder), lambda text: print(text, file=sys.stderr))
            seconds.append(time.perf_counter() - begin)
    assert found is not None
    print(f"{model}, {seq} tokens: {len(found.keys)} of {len(funcs)} regions in {statistics.median(seconds):.1f} s (all {rounds}: {seconds})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-10m", help="preset name (default llama-10m)")
    parser.add_argument("--threads", type=int, default=1, help="of the rank and of its kernels (default 1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--library", metavar="MODEL", help="time the library of this model's regions alone")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a row, with --library (default 512)")
    parser.add_argument("--inner", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        model, run, cache = args.inner
        print(json.dumps(measure(model, run, cache, args.threads)))
        return
    if args.library:
        import torch

        torch.set_num_threads(args.threads)
        return library(args.library, args.seq, args.rounds)
    rows: list[dict[str, object]] = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for run in RUNS:
                cache = str(Path(folder) / run.split(",")[0])
                words = [sys.executable, __file__, "--inner", args.model, run, cache, "--threads", str(args.threads)]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                rows.append({"round": number, "run": run} | json.loads(done.stdout.splitlines()[-1]))
    names = ("compile", "first step", "swapped", "from step", "ms bodies", "ms after")
    print(f"{args.model}, one rank, {args.threads} thread(s), seconds, medians of {args.rounds}")
    print(f"{'':<16}" + "".join(f"{name:>12}" for name in names))
    for run in RUNS:
        line = f"{run:<16}"
        for name in names:
            values = [row[name] for row in rows if row["run"] == run and row[name] is not None]
            line += f"{statistics.median(values):12.2f}" if values else f"{'-':>12}"
        print(line)
    if args.json:
        write_json(args.json, {"title": "starts with regions", "rows": rows, "machine": machine()})


if __name__ == "__main__":
    main()
