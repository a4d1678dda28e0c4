"""Plans carried out: what the planner says of time and memory of every rank, against `interlace train --plan` on this machine.

python bench/plans.py                               # 8 plans over 2 and 4 ranks
python bench/plans.py --plans 40 --ranks 2 4 8 --json out.json
python bench/plans.py --plans 40 --ranks 2 4 8 --slice 0:10 --store /tmp/profile.sqlite --json out.json    # in pieces: rows are added
python bench/plans.py --model llama-wide               # steps ten times as long, which say more of a machine
python bench/plans.py --plans 2 --ranks 2 --steps 4    # shortest

The plans are drawn by a seed: stages of unlike depth, data ranks, micro-batches, ZeRO levels and recomputed blocks; every fourth cuts
products over two ranks on all stages, every fourth has its optimizer states on the host, and most have several stages. Each is a plan file,
predicted as `interlace plan --local` does on what was measured here first (`--sketch`: on the preset `local-N`), with a memory limit that it
just fits (and 1 %, as exact as the formula is), so that stages run in the order that memory is planned for; and then by its programs,
simulated. What a stage that cuts products computes is measured as its ranks cut it. Time: the median of a run's steps; where there are more
ranks than cores they share them, and such plans are told apart (the formula counts as if all computed all the time). "others" is the share
of the processors that other programs took meanwhile. Memory: the counting allocator's peak of each rank against that of its stage.
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
import time
from pathlib import Path
from typing import Any

from planned import LLAMA, write_models

from interlace.cli.plan_here import Here, keys_of
from interlace.cli.plan_programs import programs_of, simulated

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


def processor_s() -> tuple[float, float]:
    """Of all programs since the machine started, and of this one's children that have ended."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft = (int(word) for word in file.readline().split()[1:8])
    children = os.times()
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK"), children.children_user + children.children_system


def carried_out(
    model: Model, stages: list[dict[str, Any]], file: Path, layers: str, host: Here, steps: int
) -> dict[str, Any] | None:  # fmt: skip
    """What was measured beside what was predicted; None: it failed, as said on stderr."""
    from interlace import _core

    ranks = sum(stage["dp"] * stage["tp"] for stage in stages)
    file.write_text(with_predictions(model, stages, layers, host.text))
    planned = json.loads(_core.read_plan(file.read_text()))
    words = ["train", "--plan", str(file), "--steps", str(steps), "--json", "--threads", "1"]
    words += ["--tier", "host"] if any(stage["states"] for stage in stages) else []
    begin, (all_s, own_s) = time.monotonic(), processor_s()
    done = subprocess.run([sys.executable, "-m", "interlace.cli", *words], capture_output=True, text=True)
    passed_s, (all_end_s, own_end_s) = time.monotonic() - begin, processor_s()
    if done.returncode:
        print(f"{name_of(stages)} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    facts = json.loads(done.stdout)
    predicted = [
        one["peak_bytes"] for one, stage in zip(planned["stages"], stages, strict=True) for _ in range(stage["dp"] * stage["tp"])
    ]
    said = simulated(planned, host.text, host.profile) if host.profile else None
    if said is not None:  # the programs themselves: times and peaks of a rank of each stage
        predicted = [peak for peak, stage in zip(said["peak_bytes"], stages, strict=True) for _ in range(stage["dp"] * stage["tp"])]
    step_ms = (said or planned)["step_us"] / 1e3
    return {
        "plan": name_of(stages), "by": "programs" if said is not None else "formula",
        "ranks": ranks, "stages": len(stages), "tp": stages[0]["tp"], "offload": stages[0]["states"] > 0,
        "measured_ms": facts["step_ms"],
        "others": max(0.0, (all_end_s - all_s) - (own_end_s - own_s)) / passed_s / len(os.sched_getaffinity(0)),
        "formula_ms": planned["step_us"] / 1e3, "planned_ms": step_ms, "error": step_ms / facts["step_ms"] - 1,
        "peak_bytes": facts["peak_bytes_of_ranks"], "planned_bytes": predicted,
        "memory_errors": [p / m - 1 for p, m in zip(predicted, facts["peak_bytes_of_ranks"], strict=True)],
    }  # fmt: skip


def measured_host(model: Model, ranks: int, micro_batches: list[int], store: Path) -> Here:
    """So many ranks of this machine, measured for these micro-batches of the model, each once in a store."""
    here = Here(f"local-{ranks}", None, str(store))
    for b in micro_batches:
        done = store.with_name(f"{store.name}.{ranks}x{b}")
        if not done.exists():
            here.measure(model.name, b, model.seq)
            done.touch()
    return here


def measure_cuts(host: Here, model: Model, stages: list[dict[str, Any]], layers: str) -> None:
    """The ops of a model whose products are cut as on these stages, where half of them or more have not been measured yet: of all its
    layers on one stage, which sends nothing to another."""
    from interlace import _core

    ranks, tp = sum(stage["dp"] * stage["tp"] for stage in stages), stages[0]["tp"]
    one = {"layers": BLOCKS, "dp": ranks // tp, "tp": tp, "zero": 0, "full": 0, "selective": 0, "states": 0}
    plan = json.loads(_core.read_plan(with_predictions(model, [one], layers, host.text)))
    for program in programs_of(plan) or []:
        keys = keys_of(text := str(program.print()))
        if host.measured is not None and 2 * len(keys & host.measured.keys) < len(keys):
            host.measure(model.name, plan["stages"][0]["micro_batch"], model.seq, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=8, help="how many, dealt to the numbers of ranks in turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20, help="of each plan")
    parser.add_argument("--model", choices=MODELS, default="llama-tiny", help="steps of some 30 ms, or of some 300")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sketch", action="store_true", help="measure nothing first: times of the preset local-N")
    parser.add_argument("--slice", default="", help="run only the plans numbered A to B - 1: A:B")
    parser.add_argument("--store", help="keep what was measured first in this file (default: for this run)")
    parser.add_argument("--json", help="write the rows to this file; those of other plans stay in it")
    args = parser.parse_args()
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
            sizes = sorted({max(s["dp"] for s in plans[number]) // stage["dp"] for number in several for stage in plans[number]})
            host = measured_host(model, ranks, [] if args.sketch else sizes, Path(args.store or Path(folder) / "profile.sqlite"))
            for number in several:
                if plans[number][0]["tp"] > 1 and not args.sketch:
                    measure_cuts(host, model, plans[number], layers)
                row = carried_out(model, plans[number], Path(folder) / f"{number}.plan", layers, host, args.steps)
                if row is not None:
                    found.append({"number": number} | row)
                    show(row)
    if not found:
        raise SystemExit("no plan was carried out")
    failed = len(wanted) - len(found)
    if args.json:
        file = Path(args.json)
        before = json.loads(file.read_text()) if args.slice and file.exists() else []
        found = [row for row in before if row["number"] not in wanted] + found
        file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(found) | {"failed": failed, "wanted": WANTED}))


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
