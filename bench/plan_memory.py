"""The planner's memory of a model in one stage against what the runtime's counting allocator shows, on CPU ranks.

    python bench/plan_memory.py --json out/memory.json  # every row; a second start goes on from the rows that the file has
    python bench/plan_memory.py --only 'gpt2.*ranks 2 zero 3'  # rows whose name matches

A row trains a small model for two steps (the default pipelines, no search) and takes the largest peak of a rank. With one
rank a row is about layers alone; with two, transfers in flight have buffers too. The prediction is the stage model's, from
layers captured one by one (interlace.plan.layers) and cut by the trainer's passes: no run, no profile, no correction. ZeRO 0
replicates, 1 adds up whole gradients of two micro-batches and reduces them once, 2 reduces each, 3 also shards the weights.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEQ = 128
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {"llama-10m": {}, "gpt2-10m": NO_DROPOUT}
RANKS = 2
WANTED = 1.0  # percent
# strategy of the trainer, micro-batches of a step, how their gradients are reduced
ZERO: dict[int, tuple[str, int, str]] = {
    0: ("replicate", 1, "reduce_each"),
    1: ("zero1", 2, "reduce_last"),
    2: ("zero1", 2, "reduce_each"),
    3: ("shard", 2, "reduce_each"),
}


def rows() -> list[dict[str, Any]]:
    found = []
    for ranks, zero in [(1, 0), *((RANKS, zero) for zero in ZERO)]:
        for model in MODELS:
            for batch in (1, 2, 4, 8):
                for mode in ("none", "selective", "full"):
                    name = f"{model} ranks {ranks} zero {zero} b {batch} {mode}"
                    found.append(
                        {"row": name, "model": model, "ranks": ranks, "zero": zero, "batch": batch, "mode": mode}
                    )
    return found


def run_rank(job_file: str) -> None:
    """Trains the rows; rank 0 prints a JSON line for each."""
    import torch

    import interlace
    from interlace import models

    torch.set_num_threads(1)
    for row in json.loads(Path(job_file).read_text()):
        strategy, steps, reduce = ZERO[row["zero"]]
        built = models.build(row["model"], micro_batch=row["batch"] * steps, seq=SEQ, **MODELS[row["model"]])
        passes = [] if row["mode"] == "none" else [f"recompute(mode={row['mode']})"]
        config = interlace.Config(
            strategy=strategy,
            accumulation=steps,
            accumulate_mode=reduce,
            schedule=[(0, passes)] if passes else [],
            timeout_s=900,
        )
        optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-5)
        with interlace.compile(built.model, optimizer, built.loss_fn, built.example_batch, config) as trainer:
            for _ in range(2):
                trainer.step(built.example_batch)
            stats = trainer.stats()
            peaks = trainer._run.peers.exchange("peaks", int(stats["peak_bytes"]))
            if trainer.rank == 0:
                print("ROW " + json.dumps(row | {"peak_bytes": max(peaks), "program": trainer.program}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def predict(row: dict[str, Any], texts: dict[str, str]) -> int:
    from interlace import _core
    from interlace.plan.layers import model_text

    if row["model"] not in texts:
        texts[row["model"]] = model_text(row["model"], seq=SEQ, dtype="float32", **MODELS[row["model"]])
    text = texts[row["model"]]
    blocks = int(re.search(r"(?m)^blocks (\d+)$", text)[1])  # type: ignore[index]
    memory = _core.testing.stage_memory(
        text, f"local-{row['ranks']}", SEQ, micro_batch=row["batch"], micro_batches=ZERO[row["zero"]][1], dp=row["ranks"], zero=row["zero"],
        full=blocks if row["mode"] == "full" else 0, selective=blocks if row["mode"] == "selective" else 0,
    )  # fmt: skip
    row["parts"] = memory["bytes"]
    return max(memory["peak_forward"], memory["peak_backward"])


def measure(wanted: list[dict[str, Any]], ranks: int) -> Iterator[dict[str, Any]]:
    """The rows as they are done."""
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        # Rows that differ in passes alone share a capture.
        cache = {"INTERLACE_CACHE": str(Path(folder) / "cache")}
        job = Path(folder) / "job.json"
        job.write_text(json.dumps(wanted))
        children = []
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000), **cache,
            }  # fmt: skip
            words = [sys.executable, str(Path(__file__).resolve()), "--rank", str(job)]
            children.append(
                subprocess.Popen(
                    words, env=environment, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True
                )
            )
        assert children[0].stdout is not None
        for line in children[0].stdout:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
        if any([child.wait() for child in children]):
            print("a rank failed; with --json a second start goes on from here", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name matches this expression")
    parser.add_argument("--json", type=Path, help="the rows, written as they are done; those in it are not run again")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return 0
    begin = time.monotonic()
    wanted = [row for row in rows() if re.search(args.only, row["row"])]
    kept: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        kept = {row["row"]: row for row in json.loads(args.json.read_text())}
    left = [row for row in wanted if row["row"] not in kept]
    texts: dict[str, str] = {}
    for row in itertools.chain(*(measure([r for r in left if r["ranks"] == ranks], ranks) for ranks in (1, RANKS))):
        row["predicted_bytes"] = predict(row, texts)
        row["error"] = row["predicted_bytes"] / row["peak_bytes"] - 1
        kept[row["row"]] = row
        sizes = f"measured {row['peak_bytes'] / 1e6:8.2f} MB  planned {row['predicted_bytes'] / 1e6:8.2f} MB"
        print(f"{row['row']:<42} {sizes}  {100 * row['error']:+6.2f} %", flush=True)
        if args.json:
            write(args.json, list(kept.values()))
    found = [kept[row["row"]] for row in wanted if row["row"] in kept]
    summary(found)
    within = sum(100 * abs(row["error"]) <= WANTED for row in found)
    run = len(found) + len(left) - len(wanted)
    print(f"{len(found)} of {len(wanted)} rows, {run} of them run now, in {time.monotonic() - begin:.0f} s")
    return 0 if found and within == len(found) == len(wanted) else 1


def summary(found: list[dict[str, Any]]) -> None:
    """A line for each model, number of ranks and level of ZeRO."""
    groups: dict[tuple[str, int, int], list[float]] = collections.defaultdict(list)
    for row in found:
        groups[row["model"], row["ranks"], row["zero"]].append(100 * abs(row["error"]))
    print(f"\n{'model':12}{'ranks':>6}{'ZeRO':>6}{'rows':>6}{'within 1 %':>12}{'worst':>10}")
    for (model, ranks, zero), errors in sorted(groups.items()):
        within = sum(error <= WANTED for error in errors)
        print(f"{model:12}{ranks:6}{zero:6}{len(errors):6}{within:12}{max(errors):8.3f} %")


def write(file: Path, found: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".tmp")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(file)


if __name__ == "__main__":
    sys.exit(main())
