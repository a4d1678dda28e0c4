"""Predicted against measured step time and memory, in the real executor, on real networks.

python bench/prediction.py                               # all rows, about 10 minutes
python bench/prediction.py --only 'llama.*shard'         # rows whose name matches
python bench/prediction.py --only tp                     # those whose ranks cut products, alone and with dp
python bench/prediction.py --json out.json               # keeps every row as it is done; a second start goes on from there

For every model, number of ranks and network, the ranks run each program as `interlace profile` does (op after op, transfers
alone), then as it is; both in turn, because machines drift. The prediction is the simulator's on that profile and the program's
text, with no other constant and no correction. A row counts as wrong by |predicted - measured| / measured. "others" is the share
of the machine's processors that other programs took meanwhile: the prediction is that of a machine without them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

MODELS: dict[str, dict[str, Any]] = {
    # name in interlace.models, options of its config, rows of a micro-batch, tokens
    "llama": {"name": "llama-10m", "micro_batch": 1, "seq": 128},
    "gpt2": {"name": "gpt2-10m", "micro_batch": 1, "seq": 128},
    "vit": {
        "name": "vit-tiny", "micro_batch": 8, "seq": None, "hidden_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 6, "intermediate_size": 1536,
    },
}  # fmt: skip
PLACES: list[tuple[int, float | None]] = [(1, None), (2, None), (2, 1000), (2, 500), (2, 250), (4, 250)]
STRATEGIES = ("replicate", "zero1", "shard")
# model, mesh, network, what else
TENSOR: list[tuple[str, dict[str, int], float | None, dict[str, Any]]] = [
    *(("llama", {"dp": 1, "tp": 2}, mbit, {}) for mbit in (None, 1000, 500, 250)),
    *(("gpt2", {"dp": 1, "tp": 2}, mbit, {}) for mbit in (None, 500)),
    *(("llama", {"dp": 1, "tp": 2}, mbit, {"accumulation": 4}) for mbit in (None, 500)),
    ("llama", {"dp": 1, "tp": 2}, 500, {"sequence": False}),
    ("llama", {"dp": 1, "tp": 2}, 500, {"passes": ["split(parts=2)"], "rows": 2}),
    *(("llama", {"dp": 2, "tp": 2}, None, {"strategy": strategy}) for strategy in ("shard", "replicate")),
    *(("llama", {"dp": 2, "tp": 2}, 500, {"strategy": strategy}) for strategy in ("shard", "zero1")),
    *(("llama", {"dp": 1, "tp": 4}, mbit, {}) for mbit in (None, 500)),
]


def rows() -> list[dict[str, Any]]:
    """Every configuration: a model, ranks, a network, a strategy and an accumulation."""
    found = []
    for ranks, mbit in PLACES:
        for model in MODELS:
            for strategy in STRATEGIES:
                if ranks == 1 and strategy != "shard":
                    continue
                if ranks == 4 and model != "llama":
                    continue
                # Accumulation on every network, not with every model: each row takes seconds.
                steps = (1, 4) if (model == "llama" or ranks == 1) and ranks < 4 and strategy != "zero1" else (1,)
                for accumulation in steps:
                    place = f"{ranks}@{'loopback' if mbit is None else f'{mbit:g}'}"
                    name = f"{model} {place} {strategy} x{accumulation}"
                    found.append({"row": name, "model": model, "ranks": ranks, "mbit": mbit, "strategy": strategy,
                                  "accumulation": accumulation})  # fmt: skip
    # Two hosts of two ranks: shards within a host, the same on both.
    for strategy in ("shard", "zero1"):
        found.append({"row": f"llama 2x2@100 {strategy} x1", "model": "llama", "ranks": 4, "mbit": 100, "strategy": strategy,
                      "accumulation": 1, "per_host": 2})  # fmt: skip
    return found + [tensor_row(*row) for row in TENSOR]


def tensor_row(model: str, mesh: dict[str, int], mbit: float | None, more: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "ranks": mesh["dp"] * mesh["tp"], "mbit": mbit, "strategy": "shard", "accumulation": 1,
                           "mesh": mesh} | more  # fmt: skip
    shape = "".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1)
    variant = " whole rows" if more.get("sequence") is False else " split" if "passes" in more else ""
    row["row"] = (
        f"{model} {shape}@{'loopback' if mbit is None else f'{mbit:g}'} {row['strategy']} x{row['accumulation']}{variant}"
    )
    return row


# ---- in a rank ----


def run_rank(job_file: str) -> None:
    """Measures the rows of one group; rank 0 prints a JSON line for each."""
    import torch

    import interlace
    from interlace import models

    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    for row in job["rows"]:
        spec = dict(MODELS[row["model"]])
        rows_of = spec.pop("micro_batch") * row.get("rows", 1)
        name, micro_batch, seq = spec.pop("name"), rows_of * row["accumulation"], spec.pop("seq")
        if name.startswith("gpt2"):
            spec |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        built = models.build(name, micro_batch=micro_batch, seq=seq, **spec)
        optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-5)
        hosts = {"replica": row["ranks"] // row["per_host"], "dp": row["per_host"]} if "per_host" in row else None
        config = interlace.Config(
            mesh=row.get("mesh", hosts), sequence_parallel=row.get("sequence", True), strategy=row["strategy"],
            accumulation=row["accumulation"], clip_norm=1.0, timeout_s=120, schedule=[(0, row["passes"])] if "passes" in row else [],
        )  # fmt: skip
        with interlace.compile(built.model, optimizer, built.loss_fn, built.example_batch, config) as trainer:
            found = measured_steps(trainer, built.example_batch, job["seconds"], job["folder"])
            if trainer.rank == 0:
                more = {"profile": found["profile"].text(), "program": trainer.program, "peak_bytes": max(found["peaks"])}
                print("ROW " + json.dumps(row | {key: found[key] for key in ("seconds", "others")} | more), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measured_steps(trainer: Any, batch: Any, seconds: float, folder: str) -> dict[str, Any]:
    """Steps as the trainer profiles them and as they are, in turn; `folder` keeps times of transfers from one program to the next.
    "profile": on rank 0."""
    from interlace.observe.profiler import Profiler

    run = trainer._run
    peers, profiler = run.peers, Profiler(run.peers, 120.0, Path(folder))
    for _ in range(4):
        trainer.step(batch)
    peaks = peers.exchange("peaks", run.executor.stats()["peak_bytes"])  # profiled steps keep transfers outside of the arena
    busy, ours, spent = busy_seconds(), time.process_time(), time.monotonic()
    taken: list[float] = []
    for number in range(15):
        run.executor.set_trace("serial")
        trainer.step(batch)
        profiler.add(run.executor, trainer.program, number)
        run.executor.set_trace("off")
        for _ in range(3):
            start = time.perf_counter()
            trainer.step(batch)
            taken.append(time.perf_counter() - start)
        if peers.exchange(f"rounds {number}", time.monotonic() - spent)[0] > seconds and number >= 2:
            break
    used = sum(peers.exchange("processor time", time.process_time() - ours))
    others = max(0.0, busy_seconds() - busy - used) / (profiler.machine.cores * (time.monotonic() - spent))
    profile = profiler.finish(trainer.program, 1 << 30, 0)
    return {"seconds": taken, "peaks": peaks, "others": others, "profile": profile, "machine": profiler.machine}


def busy_seconds() -> float:
    """Processor time that this machine has spent on anything so far, all cores together."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft = ticks[:7]
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


# ---- the whole ----


def cluster(ranks: int, cores: int) -> str:
    """The simulator's cluster: the preset of a CPU host with this machine's cores. Everything it costs is in the profile."""
    from interlace import _core

    return re.sub(r"\ncores = \d+", f"\ncores = {cores}", _core.preset_cluster(f"local-{ranks}")) + "\n"


def predict(record: dict[str, Any]) -> dict[str, Any]:
    """The row with what the simulator says of it."""
    from interlace import _core

    program = _core.Program.parse(record["program"], record["row"])
    cores = len(os.sched_getaffinity(0))
    simulation = _core.Simulation(program, cluster(record["ranks"], cores), profile=record["profile"])
    measured = statistics.median(record["seconds"])
    predicted = simulation.step_us / 1e6
    low, _, high = statistics.quantiles(record["seconds"], n=4)
    return {
        **{key: record[key] for key in ("row", "model", "ranks", "mbit", "strategy", "accumulation")},
        "measured_ms": measured * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3, "predicted_ms": predicted * 1e3,
        "error": predicted / measured - 1, "peak_bytes": record["peak_bytes"], "predicted_peak_bytes": simulation.taken_bytes,
        "others": record["others"], "memory_error": simulation.taken_bytes / record["peak_bytes"] - 1, "tensor": "mesh" in record,
    }  # fmt: skip


def measure_group(group: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Runs rows of one network on its ranks."""
    from network import Network

    ranks, mbit = group[0]["ranks"], group[0]["mbit"]
    with tempfile.TemporaryDirectory() as folder, Network(ranks, mbit, group[0].get("per_host", 1)) as net:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"rows": group, "seconds": seconds, "folder": folder}))
        out = Path(folder) / "out"
        with out.open("w") as stdout:
            words = [sys.executable, str(Path(__file__).resolve()), "--rank", str(job)]
            children = [net.spawn(rank, words, stdout=stdout if rank == 0 else None) for rank in range(ranks)]
            codes = [child.wait() for child in children]
        lines = [line[4:] for line in out.read_text().splitlines() if line.startswith("ROW ")]
    if any(codes):
        print(f"a rank failed (exit codes {codes})", file=sys.stderr)
    return [json.loads(line) for line in lines]


def show(row: dict[str, Any]) -> None:
    spread = f"[{row['q1_ms']:.1f}, {row['q3_ms']:.1f}]"
    memory = f"{row['peak_bytes'] / 1e6:8.2f} MB {100 * row['memory_error']:+6.2f} %"
    print(
        f"{row['row']:<34} {row['measured_ms']:9.2f} {spread:<18} {row['predicted_ms']:9.2f} {100 * row['error']:+7.1f} %   "
        f"{memory}   others {100 * row['others']:3.0f} %",
        flush=True,
    )


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and worst errors in percent: of up to two ranks, of four, and of those that cut products."""
    if not found:
        return {"rows": 0.0}
    memory = [100 * abs(row["memory_error"]) for row in found]
    result = {"rows": float(len(found)), "memory_worst": max(memory)}
    kinds = {
        "": [row for row in found if not row.get("tensor") and row["ranks"] < 4],
        "_4": [row for row in found if not row.get("tensor") and row["ranks"] >= 4],
        "_tensor": [row for row in found if row.get("tensor")],
    }
    for name, rows_of in kinds.items():
        if rows_of:
            errors = [100 * abs(row["error"]) for row in rows_of]
            result |= {f"mean{name}": statistics.fmean(errors), f"worst{name}": max(errors)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a row's name must match")
    parser.add_argument("--seconds", type=float, default=5.0, help="for one row: profile and measured steps together")
    parser.add_argument("--json", help="keep the rows in this file; those in it are not run again")
    parser.add_argument("--keep", help="a folder that gets the profile and the program of every row")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return
    wanted = [row for row in rows() if re.search(args.only, row["row"])]
    if args.list or not wanted:
        print("\n".join(row["row"] for row in wanted) or f"no row matches {args.only}")
        return
    kept = Path(args.json) if args.json else None
    found: list[dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else []
    done = {row["row"] for row in found}
    groups: dict[tuple[int, int, float | None, str], list[dict[str, Any]]] = {}
    for row in wanted:
        if row["row"] not in done:
            groups.setdefault((row["ranks"], row.get("per_host", 1), row["mbit"], row["model"]), []).append(row)
    heads = (
        f"{'row':<34} {'measured ms':>11} {'quartiles':<16} {'predicted':>9} {'error':>9}   {'peak':>11} {'error':>8}"
    )
    print(heads)
    for row in found:
        show(row)
    for group in groups.values():
        for record in measure_group(group, args.seconds):
            if args.keep:
                folder = Path(args.keep)
                folder.mkdir(parents=True, exist_ok=True)
                stem = record["row"].replace(" ", "_")
                (folder / f"{stem}.profile").write_text(record["profile"])
                (folder / f"{stem}.il").write_text(record["program"])
            row = predict(record)
            show(row)
            found.append(row)
            if kept:
                kept.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: round(value, 2) for key, value in summary(found).items()}))


if __name__ == "__main__":
    main()
