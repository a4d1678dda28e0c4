"""Fits what whole training steps reach of their kernels' rates, GPU by GPU and stack by stack, and prints the tables [step.STACK] of
the presets (src/cost/presets.cc), with the errors on runs that were left out of the fit.

    python bench/fit_presets.py --data ../shared/data
    python bench/fit_presets.py --data FOLDER --only h100-80gb
    python bench/fit_presets.py --data FOLDER --two                  # what two runs tell of the others
    python bench/fit_presets.py --data FOLDER --cells                # vTrain's layers one by one, without a model of kernels

Tables: mosaicml_7b.csv (llm-foundry scripts/train/benchmarking, Apache-2.0: MPT-7B, FSDP, eager) and vtrain_single_fit.csv
(github.com/VIA-Research/vTrain: Megatron on one node of A100-80GB). Model: `interlace plan`'s prediction of each run's layout.
Constants are those of interlace.calibrate.fit; runs are left out in turn by sequence length (MPT-7B is one model) or by model, and by
number of GPUs. What the presets say are these figures, rounded. "inside": how many of the runs that were left out lie in the 80 %
interval that the other groups give, by hardware and in all; "error" is what the preset keeps. "--two": a preset that knows nothing of
whole steps (shares of 1, as an unknown machine has), calibrated on two runs, against the others of that machine, for many pairs.
"--cells": least squares for what a layer and the head take in every cell (hidden size, tp, micro-batch), with the pipeline's formula, an
update per parameter and an all-reduce per parameter: what is left says how right these are, and the cells what a model of kernels can know.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from interlace import _core
from interlace.calibrate.crossed import left_out
from interlace.calibrate.fit import CONSTANTS, fit
from interlace.calibrate.predict import Predictor, errors, with_constants
from interlace.calibrate.runs import Run, read_runs
from interlace.cli.calibrate import crossed, summary

TABLES = ("mosaicml_7b.csv", "vtrain_single_fit.csv")


def groups(data: Path, only: str) -> dict[tuple[str, str], list[Run]]:
    out: dict[tuple[str, str], list[Run]] = {}
    for table in TABLES:
        for run in read_runs(data / table):
            if not only or only in (run.gpu, run.stack):
                out.setdefault((run.gpu, run.stack), []).append(run)
    return out


def two(gpu: str, stack: str, runs: list[Run], pairs: int = 30, others: int = 60) -> str:
    text = with_constants(_core.preset_cluster(f"{gpu}-8"), stack, dict.fromkeys(("products", "attention", "memory"), 1.0))
    predictor, choice = Predictor(text), random.Random(0)
    every = list(itertools.combinations(range(len(runs)), 2))
    ratios, before, after = [], [], []
    for pair in choice.sample(every, min(pairs, len(every))):
        found = fit([runs[i] for i in pair], predictor)
        rest = [run for i, run in enumerate(runs) if i not in pair]
        rest = choice.sample(rest, min(others, len(rest)))
        was, now = (errors((predictor.predict(run, c)[0], run.step_us) for run in rest)[0] for c in (None, found.constants))
        ratios.append(now / was), before.append(was), after.append(now)
    was, now = (100 * statistics.median(each) for each in (before, after))
    return (
        f"{len(ratios)} pairs: mean error of the others {was:.1f} % before, {now:.1f} % after; "
        f"{statistics.median(ratios):.2f} x in the middle, {max(ratios):.2f} x at worst; halved by {sum(r <= 0.5 for r in ratios)}"
    )


def cells(data: Path) -> None:
    runs = read_runs(data / TABLES[1])
    known = sorted({(run.hidden, run.tp, run.micro_batch) for run in runs})
    count = len(known)
    rows = np.zeros((len(runs), 2 * count + 4))
    for row, run in zip(rows, runs, strict=True):
        at, micro_batches, blocks = known.index((run.hidden, run.tp, run.micro_batch)), run.accumulation, run.layers / run.pp
        row[at] = run.layers + (micro_batches - 1) * blocks  # of the busiest stage, once and again, and the others once
        row[count + at] = micro_batches
        parameters = (12 * run.hidden**2 * blocks + run.vocab * run.hidden) / run.tp / 1e6
        fill = (run.pp - 1) * (micro_batches + run.pp - 1) / run.pp
        row[2 * count :] = parameters, 2 * parameters * (run.dp - 1) / run.dp, fill, 1
    measured = np.array([run.step_us / 1e3 for run in runs])
    found = np.linalg.lstsq(rows / measured[:, None], np.ones(len(runs)), rcond=None)[0]
    off = np.abs(rows @ found / measured - 1)
    print(f"{len(runs)} runs in {count} cells: {100 * off.mean():.2f} % mean, {100 * off.max():.1f} % worst")
    update, reduce, boundary, once = found[2 * count :]
    print(f"update {1e3 * update:.1f} ps a parameter, all-reduce {2 / reduce:.0f} GB/s, a boundary {boundary:.2f} ms, once {once:.2f} ms")
    for at, (hidden, tp, b) in enumerate(known):
        print(f"  hidden {hidden}, tp {tp}, micro-batch {b}: layer {found[at]:6.2f} ms, head and embedding {found[count + at]:6.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder with the two tables")
    parser.add_argument("--only", default="", help="a GPU or a stack")
    parser.add_argument("--two", action="store_true", help="calibrate on two runs, many times")
    parser.add_argument("--cells", action="store_true", help="vTrain's cells, by least squares")
    parser.add_argument("--quick", action="store_true", help="without cross-validation")
    options = parser.parse_args()
    missing = [table for table in TABLES if not (options.data / table).exists()]
    if missing:
        print(f"{options.data}/{missing[0]} is not there; give the folder with --data", file=sys.stderr)
        return 2
    if options.cells:
        cells(options.data)
        return 0
    predictor = Predictor()
    inside: dict[str, list[bool]] = {}
    for (gpu, stack), runs in groups(options.data, options.only).items():
        begin = time.monotonic()
        if options.two:
            print(f"{gpu}, {stack}, {len(runs)} runs, {two(gpu, stack, runs)}", flush=True)
            continue
        found = fit(runs, predictor)
        print(f"\n{gpu}, [step.{stack}], {len(runs)} runs")
        for name in CONSTANTS:
            note = "  not determined" if name in found.undetermined else ""
            print(f"  {name:<10} {found.constants[name]:8.3f}  +- {100 * found.spread[name]:.0f} %{note}")
        rows = [predicted(run, predictor.predict(run, found.constants)) for run in runs]
        print("  fitted: " + "; ".join(summary(rows)["said"]))
        for by in () if options.quick else ("model", "size"):
            if len({run.gpus if by == "size" else (run.size, run.seq) for run in runs}) > 1:
                left = crossed(runs, predictor, by, lambda _: None)
                inside.setdefault(gpu, []).extend(row["inside"] for row in left["rows"])
                print(f"  left out by {by}: " + "; ".join(left["said"][1:]))
        if not options.quick:
            error, source = left_out(runs, predictor)
            print(f"  error      {error:8.3f}  {source}")
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)
    if inside:
        print("\nruns left out that lie in their 80 % interval:")
        inside["in all"] = [row for rows in inside.values() for row in rows]
        for name, known in inside.items():
            print(f"  {name:<12} {100 * sum(known) / len(known):3.0f} % of {len(known)}")
    return 0


def predicted(run: Run, found: tuple[float, int, float]) -> dict[str, object]:
    us, _, _ = found
    return {"task": run.task, "off": us / run.step_us - 1, "inside": None, "peak_bytes": 0, "predicted_peak_bytes": 0, "predicted_us": us,
            "step_us": run.step_us, "run": dataclasses.asdict(run)}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
