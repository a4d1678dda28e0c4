"""`interlace calibrate`: measured runs of any machine against predictions, and a cluster file that explains them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.cli.console import Work, err, print_json
from interlace.cli.program_file import FileError, write_text

if TYPE_CHECKING:
    from interlace.calibrate.fit import Fit
    from interlace.calibrate.runs import Run

HELP = """Fit a cluster to measured runs, or hold measured runs against its predictions.

--runs is a CSV of a line a run: what was trained (model, or hidden_size, layers, heads), seq, micro_batch, global_batch, tp, pp, dp,
zero, recompute, stack, gpu, gpus, and how long a step took (step_ms, step_s, samples_per_s, tokens_per_s; peak_gib if known). The
columns of llm-foundry's, vTrain's and Megatron-LM's tables are known; of a table of collectives --check alone.

[bold]Examples[/bold]
  interlace calibrate --runs mine.csv --cluster h100-80gb-64 -o mine.toml
  interlace calibrate --runs mine.csv --check
  interlace calibrate --runs mosaicml_7b.csv --only gpu=h100-80gb --by size
  interlace calibrate --runs vtrain_single_fit.csv --check --json
  interlace calibrate --runs nccl_all_reduce.csv --check --cluster h100-80gb-256
"""
MiB = 1 << 20


def calibrate(
    runs: Annotated[str, typer.Option("--runs", help="A table of measured runs, as CSV.", show_default=False)],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A preset or a cluster file to begin with; of the runs' GPUs without it.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Fit nothing: print how far predictions are from the runs.")] = False,
    by: Annotated[str | None, typer.Option("--by", help="Cross-validate, leaving out in turn: model, size (GPUs) or run.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="COLUMN=VALUE: only such runs (gpu, stack, recompute, tp, ...).")] = None,
    says: Annotated[list[str] | None, typer.Option("--set", help="COLUMN=VALUE: what the table does not say.")] = None,
    leave_out: Annotated[list[int] | None, typer.Option("--leave-out", help="A line of the table that is not to be fitted.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the cluster file.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    from interlace.calibrate.predict import Predictor
    from interlace.calibrate.runs import read_runs

    if _is_collectives(runs):
        if not check:
            raise FileError(f"{runs} is a table of collectives: hold it against predictions with --check (bench/fit_collectives.py fits)")
        return check_collectives(runs, cluster or "h100-80gb-1024", as_json)
    chosen = [run for run in read_runs(runs, _pairs("--set", says)) if run.line not in (leave_out or ())]
    for key, value in _pairs("--only", only).items():
        if chosen and not hasattr(chosen[0], key):
            raise FileError(f"--only {key}: runs have no such column")
        chosen = [run for run in chosen if str(getattr(run, key)).lower() == value.lower()]
    if not chosen:
        raise FileError(f"{runs} has no such runs")
    predictor = Predictor(_base(cluster))
    with Work() as work:
        if check:
            found = checked(chosen, predictor, lambda done: work.update("predicting", done, len(chosen)))
        elif by is not None:
            found = crossed(chosen, predictor, by, lambda text: work.update(text))
        else:
            found = calibrated(chosen, predictor, lambda text: work.update(text))
    if output is not None:
        if "cluster_file" not in found:
            raise FileError("nothing was fitted: leave --check and --by out to write a cluster file")
        write_text(output, found["cluster_file"])
        err().print(f"wrote {output}")
    if as_json:
        print_json(found)
        return
    for line in found["rows"] if rows or len(found["rows"]) <= 12 else ():
        print(row_text(line))
    print("\n".join(found["said"]))


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    out = {}
    for each in given or ():
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise FileError(f"{option} '{each}' is not COLUMN=VALUE")
        out[key] = value
    return out


def _base(cluster: str | None) -> str:
    """A cluster file's text; "" for presets, which follow from the runs' GPUs."""
    from interlace import _core
    from interlace.cli.simulation import read_cluster

    if cluster is None:
        return ""
    text, file = read_cluster(cluster)
    _core.cluster_devices(text, file)  # what is wrong with it is said now
    return text if "\n" in text else _core.preset_cluster(text)


# ---- held against predictions ----


def _row(run: Run, us: float, peak: int, error: float) -> dict[str, Any]:
    off = math.log(run.step_us / us)
    return {
        "line": run.line, "run": describe(run), "task": run.task, "step_us": run.step_us, "predicted_us": us, "off": us / run.step_us - 1,
        "inside": abs(off) <= 1.2816 * error if error > 0 else None, "low_us": us * math.exp(-1.2816 * error),
        "high_us": us * math.exp(1.2816 * error), "peak_bytes": run.peak_bytes, "predicted_peak_bytes": peak,
    }  # fmt: skip


def describe(run: Run) -> str:
    layout = " ".join(f"{name} {value}" for name, value in (("dp", run.dp), ("tp", run.tp), ("pp", run.pp)) if value > 1)
    more = {"none": "", "full": ", recomputed", "selective": ", selective"}[run.recompute]
    return (f"{run.size}, seq {run.seq}, b {run.micro_batch} x {run.accumulation}, {run.gpus} {run.gpu} {run.stack}"
            f"{', ' + layout if layout else ''}{more}")  # fmt: skip


def row_text(row: dict[str, Any]) -> str:
    inside = {True: "", False: "  outside the interval", None: ""}[row["inside"]]
    memory = ""
    if row["peak_bytes"]:
        memory = f"  {row['predicted_peak_bytes'] / 2**30:6.1f} of {row['peak_bytes'] / 2**30:6.1f} GiB"
    return (f"line {row['line']:4d}: measured {row['step_us'] / 1e3:10.1f} ms, predicted {row['predicted_us'] / 1e3:10.1f} ms,"
            f" {100 * row['off']:+6.1f} %{memory}  {row['run']}{inside}")  # fmt: skip


def checked(runs: Sequence[Run], predictor: Any, say: Callable[[int], None]) -> dict[str, Any]:
    """Every run predicted as it is, with the cluster's own constants."""
    rows = []
    for number, run in enumerate(runs):
        say(number)
        rows.append(_row(run, *predictor.predict(run)))
    return {"rows": rows, **summary(rows)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    off = [abs(row["off"]) for row in rows]
    bias = statistics.fmean(row["off"] for row in rows)
    said = [f"{len(rows)} runs: step time {100 * statistics.fmean(off):.1f} % mean, {100 * statistics.median(off):.1f} % median, "
            f"{100 * max(off):.1f} % worst, bias {100 * bias:+.1f} %"]  # fmt: skip
    out: dict[str, Any] = {
        "runs": len(rows), "mean": statistics.fmean(off), "median": statistics.median(off), "worst": max(off), "bias": bias
    }  # fmt: skip
    known = [row["inside"] for row in rows if row["inside"] is not None]
    if known:
        out["inside"] = sum(known) / len(known)
        said.append(f"inside the 80 % interval: {100 * out['inside']:.0f} % of {len(known)}")
    memory = [abs(row["predicted_peak_bytes"] / row["peak_bytes"] - 1) for row in rows if row["peak_bytes"]]
    if memory:
        out |= {"memory_mean": statistics.fmean(memory), "memory_worst": max(memory)}
        said.append(f"memory of {len(memory)}: {100 * out['memory_mean']:.1f} % mean, {100 * out['memory_worst']:.1f} % worst")
    regret = choices(rows)
    if regret:
        out |= {"choices": len(regret), "choice_mean": statistics.fmean(regret), "choice_worst": max(regret)}
        said.append(f"choices: in {len(regret)} tasks with several layouts the one predicted fastest takes {100 * out['choice_mean']:.1f} %"
                    f" longer than the fastest on average, {100 * out['choice_worst']:.1f} % at worst")  # fmt: skip
    return {**out, "said": said}


def choices(rows: list[dict[str, Any]]) -> list[float]:
    """By task with several runs: how much longer the one predicted fastest took than the one that was."""
    tasks: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    out = []
    for several in tasks.values():
        if len(several) > 1:
            chosen = min(several, key=lambda row: row["predicted_us"])
            out.append(chosen["step_us"] / min(row["step_us"] for row in several) - 1)
    return out


# ---- fitted ----


def crossed(runs: Sequence[Run], predictor: Any, by: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Every run by constants that were fitted without its fold."""
    from interlace.calibrate.crossed import FOLDS, cross_validated
    from interlace.calibrate.fit import one_machine

    if by not in FOLDS:
        raise FileError(f"--by {by}: model, size or run")
    one_machine(runs)
    if len({FOLDS[by](run) for run in runs}) < 2:
        raise FileError(f"--by {by}: all runs are of one, so none is left to fit when it is left out")
    rows = [_row(run, us, 0, error) | {"peak_bytes": 0} for run, us, error in cross_validated(runs, predictor, FOLDS[by], say)]
    found = summary(rows)
    found["said"].insert(0, f"left out of the fit in turn, by {by}:")
    return {"rows": rows, **found}


def calibrated(runs: Sequence[Run], predictor: Any, say: Callable[[str], None]) -> dict[str, Any]:
    from interlace.calibrate.crossed import left_out
    from interlace.calibrate.fit import contradictions, fit, own_constants

    found = fit(runs, predictor, say)
    error, source = left_out(runs, predictor, say)
    own = own_constants(runs[0], predictor.base)
    before = [abs(predictor.predict(run, own)[0] / run.step_us - 1) for run in runs]
    rows = [_row(run, *predictor.predict(run, found.constants)) for run in runs]
    after = statistics.fmean(abs(row["off"]) for row in rows)
    said = [f"{len(runs)} run{'s' * (len(runs) > 1)} of {runs[0].gpu}, {runs[0].stack}: mean error {100 * statistics.fmean(before):.1f} % "
            f"with the preset, {100 * after:.1f} % with these constants; scatter {100 * found.noise:.1f} %"]  # fmt: skip
    for name, value in found.constants.items():
        within = f"within {100 * math.expm1(1.2816 * found.spread[name]):.0f} %"
        known = "not determined by these runs" if name in found.undetermined else within
        said.append(f"  {name:<10} {value:8.3f}  {known} (was {own[name]:.3f})")
    said += [_what_would(name, runs, found, predictor) for name in found.undetermined]
    for one, other in contradictions(runs):
        took = f"{one.step_us / 1e3:.1f} and {other.step_us / 1e3:.1f} ms"
        said.append(f"lines {one.line} and {other.line} say the same of themselves and took {took}")
    outliers = found.outliers(runs)
    for run, factor in outliers:
        said.append(f"line {run.line} is explained by no constant: it took {factor:.2f} x what is predicted ({describe(run)}); "
                    f"it was fitted all the same, --leave-out {run.line} leaves it out")  # fmt: skip
    if source:
        said.append(f"80 of 100 steps within {100 * math.expm1(1.2816 * error):.0f} %: {source}")
    return {
        "rows": rows, "error": error, "error_source": source, "constants": found.constants,
        "spread": found.spread, "noise": found.noise, "undetermined": found.undetermined,
        "before": statistics.fmean(before), "after": after, "outliers": [run.line for run, _ in outliers], "said": said,
        "cluster_file": cluster_file(runs, found, predictor.base, error, source),
    }  # fmt: skip


def _what_would(name: str, runs: Sequence[Run], found: Fit, predictor: Any) -> str:
    from interlace.calibrate.fit import deciding_run

    best = deciding_run(name, runs, found, predictor)
    if best is None:
        return f"{name}: no run of this model alone would tell it"
    return f"{name}: a run of {describe(best[0])} would tell it within {100 * math.expm1(1.2816 * best[1]):.0f} %"


def cluster_file(runs: Sequence[Run], found: Fit, base: str, error: float = 0.0, source: str = "") -> str:
    """The largest run's cluster with these constants, and where they are from. `error`: of runs left out; 0: not known."""
    from interlace.calibrate.predict import cluster_text, with_constants

    largest = max(runs, key=lambda run: run.gpus)
    constants = {name: min(value, 1.0) if name == "products" else value for name, value in found.constants.items()}
    if not source:  # one group of runs: their scatter, and how little they say of the constants
        error = math.sqrt(found.noise**2 + min(found.spread["products"], 0.3) ** 2)
        source = "the scatter of the fitted runs, and the constants' uncertainty"
    text = with_constants(cluster_text(largest, base), largest.stack, {**constants, "error": error})
    lines = [f"# Fitted to {len(runs)} measured runs by interlace calibrate; standard deviations of the logarithms:"]
    lines += [f"#   {name:<10} {value:.6g}  {found.spread[name]:.3f}{'  not determined' * (name in found.undetermined)}"
              for name, value in constants.items()]  # fmt: skip
    lines.append(f"#   {'error':<10} {error:.6g}  {source}")
    return "\n".join(lines) + "\n" + text


# ---- collectives ----


def _is_collectives(file: str) -> bool:
    path = Path(file)
    if not path.is_file():
        raise FileError(f"no such table: {file}")
    with path.open(errors="replace") as opened:
        return "algbw" in opened.readline().lower()


def check_collectives(file: str, cluster: str, as_json: bool) -> None:
    """A table of nccl-tests: GPUs, size(MB), algbw(GB/s) of out of place and in place. Which collective is said by the file's name."""
    from interlace import _core
    from interlace.cli.simulation import read_cluster

    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    kind = next((name for name in kinds if name in Path(file).name.lower().replace("-", "_").replace("allreduce", "all_reduce")), None)
    if kind is None:
        raise FileError(f"{file}: its name does not say which collective it is of: {', '.join(kinds)}")
    text, cluster_name = read_cluster(cluster)
    rows = []
    with Path(file).open(newline="") as opened:
        for number, row in enumerate(csv.DictReader(opened), 2):
            try:
                ranks, size = int(row["GPUs"]), int(float(row["size(MB)"]) * MiB)
                rates = [float(value) for name, value in row.items() if name and "algbw" in name]
            except (KeyError, ValueError, TypeError) as error:
                raise FileError(f"{file}:{number}: not a row of GPUs, size(MB) and algbw(GB/s): {error}") from None
            measured = size / (statistics.fmean(rates) * 1e3)
            us, _, _, _, algorithm, error_of = _core.predict_collective(text, kind, size, ranks, cluster_name)
            rows.append({"line": number, "ranks": ranks, "bytes": size, "us": measured, "predicted_us": us, "algorithm": algorithm,
                         "off": us / measured - 1, "inside": abs(math.log(measured / us)) <= 1.2816 * error_of})  # fmt: skip
    off = [abs(row["off"]) for row in rows]
    inside = statistics.fmean(row["inside"] for row in rows)
    found = {"collective": kind, "rows": rows, "mean": statistics.fmean(off), "worst": max(off), "inside": inside}
    if as_json:
        return print_json(found)
    for row in rows:
        print(f"{row['ranks']:5d} GPUs {row['bytes'] / MiB:7.0f} MiB: measured {row['us']:10.1f} us, predicted"
              f" {row['predicted_us']:10.1f} us, {100 * row['off']:+6.1f} %  {row['algorithm']}")  # fmt: skip
    print(f"{kind}, {len(rows)} rows: {100 * found['mean']:.1f} % mean, {100 * found['worst']:.1f} % worst;"
          f" inside the 80 % interval: {100 * found['inside']:.0f} %")  # fmt: skip
    return None
