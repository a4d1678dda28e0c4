"""Plans carried out: what the planner says of time and memory of every rank, against `interlace train --plan` on this machine.

python bench/plans.py                               # 8 plans over 2 and 4 ranks
python bench/plans.py --plans 40 --ranks 2 4 8 --json out.json
python bench/plans.py --plans 40 --ranks 2 4 8 --slice 0:10 --json out.json    # in pieces: rows are added
python bench/plans.py --model llama-wide               # steps ten times as long, which say more of a machine
python bench/plans.py --plans 2 --ranks 2 --seconds 2  # shortest

The plans are drawn by a seed: stages of unlike depth, data ranks, micro-batches, ZeRO levels and recomputed blocks; every fourth cuts
products over two ranks on all stages, every fourth has its optimizer states on the host, and most have several stages. Each is a plan file
with a memory limit that it just fits (and 1 %, as exact as the formula is), so that stages run in the order that memory is planned for.

Its ranks train it as `interlace train --plan` does. Steps that are profiled (op after op, transfers alone) and steps as they are take turns,
because machines drift; the prediction is `interlace plan --local`'s on that profile: the plan's programs, simulated, and beside it the
formula. Time: the median of the steps as they are; where there are more ranks than cores they share them, and such plans are told apart (the
formula counts as if all computed all the time). "others" is the share of the processors that other programs took meanwhile. Memory: the
counting allocator's peak of each rank against that of its stage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from network import Network
from planned import LLAMA, trainer_of, write_models
from prediction import measured_steps

from interlace.cli.plan_programs import simulated

BLOCKS, ACCUMULATION = 4, 4
# A preset, or a config.json that is written beside the plans; tokens of a sequence.
MODELS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "llama-tiny": (None, 64),
    "llama-wide": (LLAMA | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": BLOCKS, "num_attention_heads": 12,
                            "num_key_value_heads": 12, "vocab_size": 2048}, 128),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    name: str  # a preset's, or a folder's with a config.json
    seq: int


WANTED = {"mean": 6.0, "worst": 15.0, "memory_worst": 1.0}


def drawn(rng: random.Random, ranks: int, number: int) -> list[dict[str, Any]]:
    """The stages of a random plan that so many ranks can carry out, of what its number asks for."""
    tp = 2 if number % 4 == 0 else 1
    offload = number % 4 == 1
    most = min(ranks // tp, BLOCKS)
    count = rng.choice([n for n in (2, 2, 3, 4) if n <= most] or [1]) if number % 6 != 5 else 1
    if tp == 2:
        count = max(n for n in (1, 2, 4) if n <= count)
    if tp == 2 or (ranks % count == 0 and rng.random() < 0.5):
        data = [ranks // count // tp] * count
    else:  # powers of two, so that a micro-batch's rows divide
        data = rng.choice([d for d in _splits(ranks, count) if all(n in (1, 2, 4, 8) for n in d)] or [[1] * count])
    at = sorted(rng.sample(range(1, BLOCKS), count - 1))
    found = []
    for begin, end, dp in zip([0, *at], [*at, BLOCKS], data, strict=True):
        full = rng.randint(0, end - begin)
        found.append({
            "layers": end - begin, "dp": dp, "tp": tp, "zero": rng.randint(0, 3) if dp > 1 else 0, "full": full,
            "selective": rng.randint(0, end - begin - full), "states": int(offload),
        })  # fmt: skip
    return found


def _splits(total: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[total]] if total > 0 else []
    return [[first, *rest] for first in range(1, total) for rest in _splits(total - first, parts - 1)]


def plan_text(model: Model, stages: list[dict[str, Any]], limit: int = 1 << 30) -> str:
    """The file of a plan, without predictions."""
    ranks = sum(stage["dp"] * stage["tp"] for stage in stages)
    rows = max(stage["dp"] for stage in stages)  # of a micro-batch of all data ranks
    text = (
        f'interlace-plan 1\nmodel "{model.name}"\ncluster "local-{ranks}"\ndevices {ranks} per_node {ranks}\nblocks {BLOCKS}\n'
        f'global_batch {rows * ACCUMULATION}\nsequence {model.seq}\nflash_attention yes\ndtype "float32"\nmemory_limit {limit}\n'
        f'template runtime\naccumulation {ACCUMULATION}\nspace "by hand"\n'
    )
    block = device = 0
    for i, stage in enumerate(stages):
        last = device + stage["dp"] * stage["tp"] - 1
        held = " embedding" * (block == 0) + " head" * (i + 1 == len(stages))
        text += (
            f"\nstage {i}\n  layers {stage['layers']}{held}\n  devices {device}..{last}\n"
            f"  micro_batch {rows // stage['dp']} dp {stage['dp']} tp {stage['tp']}\n  zero {stage['zero']}\n"
            f"  recompute full {stage['full']} selective {stage['selective']}\n"
            f"  offload weights 0 gradients 0 states {stage['states']} activations 0\n"
        )
        block, device = block + stage["layers"], last + 1
    return text


def name_of(stages: list[dict[str, Any]]) -> str:
    """ "3b dp2 z1 | 1b dp1"."""
    parts = []
    for s in stages:
        words = [f"{s['layers']}b", f"dp{s['dp']}", f"tp{s['tp']}" * (s["tp"] > 1), f"z{s['zero']}" * (s["zero"] > 0)]
        words += [f"f{s['full']}" * (s["full"] > 0), f"s{s['selective']}" * (s["selective"] > 0), "out" * (s["states"] > 0)]
        parts.append(" ".join(word for word in words if word))
    return " | ".join(parts)


def with_predictions(model: Model, stages: list[dict[str, Any]], layers: str, cluster: str) -> str:
    """The plan's file, with the limit that it just fits."""
    from interlace import _core

    text = _core.predict_plan(plan_text(model, stages), layers, cluster)
    peak = max(stage["peak_bytes"] for stage in json.loads(_core.read_plan(text))["stages"])
    return str(_core.predict_plan(plan_text(model, stages, peak + peak // 100), layers, cluster))


# ---- in a rank ----


def run_rank(job_file: str) -> None:
    """Trains plans one after the other; rank 0 prints a JSON line for each."""
    import torch

    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    for file in job["plans"]:
        text = Path(file).read_text()
        plan = json.loads(_core().read_plan(text))
        away = {"tier": "host"} if any(stage["offload"]["states"] for stage in plan["stages"]) else {}
        trainer, batch = trainer_of(file, **away)
        with trainer:
            found = measured_steps(trainer, batch, job["seconds"], job["folder"])
        if found["profile"] is not None:
            print("ROW " + json.dumps(predicted(text, plan, job["layers"], found) | {"file": file}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def predicted(text: str, plan: dict[str, Any], layers: str, found: dict[str, Any]) -> dict[str, Any]:
    """What was measured beside what the planner says with these times: by the plan's programs, or where none can be made by its formula."""
    from interlace.calibrate.here import measured_cluster

    profile, measured_ms, core = found["profile"], statistics.median(found["seconds"]) * 1e3, _core()
    cluster = measured_cluster(profile, found["machine"]).text.replace('\ntier = "file"', '\ntier = "memory"')  # --tier host
    by_formula = json.loads(core.read_plan(core.predict_plan(text, layers, cluster)))
    said = simulated(plan, cluster, profile.text())
    peaks = said["peak_bytes"] if said is not None else [stage["peak_bytes"] for stage in by_formula["stages"]]
    of_ranks = [peak for peak, stage in zip(peaks, plan["stages"], strict=True) for _ in range(stage["devices"])]
    step_ms = (said or by_formula)["step_us"] / 1e3
    return {
        "by": "programs" if said is not None else "formula", "measured_ms": measured_ms, "others": found["others"],
        "formula_ms": by_formula["step_us"] / 1e3, "planned_ms": step_ms, "error": step_ms / measured_ms - 1,
        "peak_bytes": found["peaks"], "planned_bytes": of_ranks,
        "memory_errors": [p / m - 1 for p, m in zip(of_ranks, found["peaks"], strict=True)],
    }  # fmt: skip


def _core() -> Any:
    from interlace import _core

    return _core


# ---- the whole ----


def carried_out(files: list[Path], ranks: int, seconds: float, layers: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of these plans, as they come."""
    job = folder / "job.json"
    job.write_text(json.dumps({"plans": [str(file) for file in files], "seconds": seconds, "layers": layers, "folder": str(folder)}))
    with Network(ranks, None) as net:
        words = [sys.executable, str(Path(__file__).resolve()), "--rank", str(job)]
        first, *others = [net.spawn(rank, words, stdout=subprocess.PIPE if rank == 0 else None, text=True) for rank in range(ranks)]
        for line in first.stdout or ():
            if line.startswith("ROW "):
                yield json.loads(line[4:])
        codes = [child.wait() for child in (first, *others)]
    if any(codes):
        print(f"a rank failed (exit codes {codes})", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=8, help="how many, dealt to the numbers of ranks in turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=8.0, help="for one plan: profile and measured steps together")
    parser.add_argument("--model", choices=MODELS, default="llama-tiny", help="steps of some 30 ms, or of some 300")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", default="", help="run only the plans numbered A to B - 1: A:B")
    parser.add_argument("--json", help="write the rows to this file; those of other plans stay in it")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return
    from transformers.utils import logging

    from interlace.plan.layers import model_text

    logging.set_verbosity_error()
    rng, found = random.Random(args.seed), []
    plans = [drawn(rng, args.ranks[i % len(args.ranks)], i) for i in range(args.plans)]
    first, _, end = args.slice.partition(":")
    wanted = range(len(plans))[int(first or 0) : int(end or len(plans))]
    by_ranks: dict[int, list[int]] = {}
    for number in wanted:
        by_ranks.setdefault(sum(stage["dp"] * stage["tp"] for stage in plans[number]), []).append(number)
    print(f"{'plan':<52} {'measured':>9} {'planned':>9} {'':>8}  {'by':<8}  {'others':>6}  memory of each rank, measured MB and planned")
    with tempfile.TemporaryDirectory() as folder:
        config, seq = MODELS[args.model]
        model = Model(args.model if config is None else str(Path(folder) / args.model), seq)
        write_models({} if config is None else {args.model: config}, Path(folder))
        layers = model_text(model.name, seq=seq, dtype="float32")
        for ranks, several in sorted(by_ranks.items()):
            files = {str(Path(folder) / f"{number}.plan"): number for number in several}
            for file, number in files.items():
                Path(file).write_text(with_predictions(model, plans[number], layers, f"local-{ranks}"))
            for row in carried_out([Path(file) for file in files], ranks, args.seconds, layers, Path(folder)):
                number = files[row.pop("file")]
                found.append({"number": number} | about(plans[number]) | row)
                show(found[-1])
    if not found:
        raise SystemExit("no plan was carried out")
    failed = len(wanted) - len(found)
    if args.json:
        file = Path(args.json)
        before = json.loads(file.read_text()) if args.slice and file.exists() else []
        found = [row for row in before if row["number"] not in wanted] + found
        file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(found) | {"failed": failed, "wanted": WANTED}))


def about(stages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "plan": name_of(stages), "ranks": sum(stage["dp"] * stage["tp"] for stage in stages), "stages": len(stages),
        "tp": stages[0]["tp"], "offload": stages[0]["states"] > 0,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    memory = ", ".join(f"{m / 1e6:.2f} {100 * e:+.1f} %" for m, e in zip(row["peak_bytes"], row["memory_errors"], strict=True))
    times = f"{row['measured_ms']:6.1f} ms {row['planned_ms']:6.1f} ms {100 * row['error']:+6.1f} %"
    print(f"{row['plan']:<52} {times}  {row['by']:<8}  {100 * row['others']:4.1f} %  {memory}", flush=True)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    out: dict[str, Any] = {
        "plans": len(found), "several_stages": sum(row["stages"] > 1 for row in found), "tp": sum(row["tp"] > 1 for row in found),
        "offload": sum(row["offload"] for row in found),
    }  # fmt: skip
    for name, rows in (("", [row for row in found if row["ranks"] <= cores]), ("crowded_", [row for row in found if row["ranks"] > cores])):
        errors = [100 * abs(row["error"]) for row in rows]
        if errors:
            out |= {f"{name}mean": round(statistics.fmean(errors), 2), f"{name}worst": round(max(errors), 2)}
    memory = [100 * abs(e) for row in found for e in row["memory_errors"]]
    return out | {"memory_worst": round(max(memory), 2), "memory_within_1": f"{sum(e <= 1 for e in memory)} of {len(memory)} ranks"}


if __name__ == "__main__":
    main()
