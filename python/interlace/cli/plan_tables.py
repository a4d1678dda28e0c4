"""What `interlace plan` found, as tables: the stages, where their bytes and times go, and why not the simpler plans."""

from __future__ import annotations

import math
from typing import Any

from interlace.cli.console import fitted, out, rows_table
from interlace.cli.console import seconds as time_of
from interlace.config import format_bytes
from interlace.report.plan_page import recomputed
from interlace.report.units import counted


def seconds(value: float) -> str:
    """A time, steps of tiny models in milliseconds."""
    return time_of(value) if value >= 0.1 else f"{1e3 * value:.3g} ms"


def show(found: dict[str, Any]) -> None:
    console = out()
    for number, each in enumerate(found["plans"], 1):
        if len(found["plans"]) > 1:
            console.print(f"\n[bold]Plan {number}[/bold]")
        for line in [*headline(each["plan"], found), *certainty(each, found)]:
            console.print(fitted(line), markup=False, soft_wrap=True)
        plan, explained = each["plan"], each["explained"]
        for table in (stage_table(plan), byte_table(plan, explained), time_table(plan, explained)):
            console.print()
            console.print(table)
    for table in _others(found):
        console.print()
        console.print(table)


def _others(found: dict[str, Any]) -> list[Any]:
    """What else was looked at: programs that were simulated, or simpler plans by the planner's formula."""
    if found.get("judged"):
        return [judged_table(found["judged"])]
    return [why_table(found["why_not"])] if found.get("why_not") else []


def told(found: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Of the first plan what its page has beside its stages: every line and table that `show` prints."""
    first = found["plans"][0]
    tables = [byte_table(first["plan"], first["explained"]), time_table(first["plan"], first["explained"])]
    tables += _others(found)
    return [*headline(first["plan"], found), *certainty(first, found)], tables


def headline(plan: dict[str, Any], found: dict[str, Any]) -> list[str]:
    us = next((row["step_us"] for row in found.get("judged", []) if row["plan"] == plan), plan["step_us"])
    per_s = 1e6 * plan["global_batch"] / us
    flash = "flash attention" if plan["flash_attention"] else "attention scores in memory"
    lines = [
        f"{plan['model']} on {plan['cluster']}: {plan['global_batch']} samples of {plan['sequence']} tokens, {plan['dtype']}, {flash}",
        f"{seconds(us / 1e6)} a step, {per_s:.2f} samples/s, {per_s * plan['sequence']:,.0f} tokens/s; "
        f"{counted(plan['accumulation'], 'micro-batch')} in {counted(len(plan['stages']), 'stage')}",
    ]
    if "checked" in found:
        before = f", it said {seconds(found['before_us'] / 1e6)}" if found["before_us"] > 0 else ""
        lines.append(f"{found['checked']} keeps its rules; predicted anew{before}")
    elif found["complete"]:
        gap = f"at most {100 * plan['gap']:.2f} % above the best" if plan["gap"] > 1e-6 else "no plan is faster"
        if found.get("judged"):
            gap = f"the programs of {len(found['judged'])} plans, the best by the planner's formula, were simulated"
        looked = f"{found['points']:,} points of {found['frontiers']:,} stages"
        lines.append(f"space {plan['space']}: {gap}; searched in {seconds(found['seconds'])} ({looked})")
    else:
        lines.append(
            f"stopped after {seconds(found['seconds'])}: a plan up to {100 * plan['gap']:.1f} % faster may exist; give --time-limit more"
        )
    lines += found.get("here", {}).get("said", [])
    if "from" in found:
        now = f"the best on its stages takes {seconds(found['from_us'] / 1e6)} a step"
        lines.append(f"begun with {found['from']}: {now if found['from_us'] > 0 else 'no plan on its stages fits here'}")
    return lines


ONE_IN_TEN = 1.2816  # standard deviations beyond which one of ten lies, on either side


def certainty(each: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The interval of a plan's step, what does not fit, and whether its lead over other shapes is more than predictions are off."""
    plan, error = each["plan"], each.get("error", 0.0)
    lines = []
    if "simulated" in each:
        said = each["simulated"]
        peaks = ", ".join(format_bytes(peak) for peak in said["peak_bytes"])
        lines.append(
            f"its programs, simulated with the times measured here: {seconds(said['step_us'] / 1e6)} a step, {peaks} of a rank; "
            f"the planner's formula says {seconds(plan['step_us'] / 1e6)}"
        )
    if error > 0:
        step, spread = plan["step_us"] / 1e6, math.exp(ONE_IN_TEN * error)
        lines.append(f"80 of 100 such steps take {seconds(step / spread)} to {seconds(step * spread)}")
        # Two layouts on one machine are off by much the same: what differs is about as large as one's own scatter.
        rivals = [row for row in found.get("why_not", ()) if 0 < row.get("slower", 0) < spread - 1]
        if rivals and each is found["plans"][0]:
            near = min(rivals, key=lambda row: row["slower"])
            lines.append(
                f"its lead over '{near['name']}' ({_percent(near['slower'])}) is within the error: a step of each, measured "
                "(interlace calibrate), would decide"
            )
    over = max(stage["peak_bytes"] for stage in plan["stages"]) - plan["memory_limit"]
    if over > 0:
        lines.append(f"DOES NOT FIT: {format_bytes(over)} of a device more than its {format_bytes(plan['memory_limit'])}")
    return lines


def _alike(plan: dict[str, Any]) -> list[tuple[int, int]]:
    """Runs of stages that differ in nothing but their place: (first, last)."""
    keys = ("layers", "embedding", "head", "micro_batch", "dp", "tp", "zero", "full", "selective", "offload", "t_us",
            "d_us", "peak_forward", "peak_backward")  # fmt: skip
    runs: list[tuple[int, int]] = []
    stages = plan["stages"]
    for i, stage in enumerate(stages):
        if runs and all(stages[runs[-1][0]][key] == stage[key] for key in keys):
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs


def _named(run: tuple[int, int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"


def offload_text(offload: dict[str, float]) -> str:
    """ "states 25 %, activations 100 %"; "" when nothing is."""
    return ", ".join(f"{name} {100 * share:.3g} %" for name, share in offload.items() if share > 0)


def stage_table(plan: dict[str, Any]) -> Any:
    rows = []
    for run in _alike(plan):
        first, last = plan["stages"][run[0]], plan["stages"][run[1]]
        held = "".join(" +emb" * stage["embedding"] + " +head" * stage["head"] for stage in (first,))
        devices = f"{first['first_device']}-{last['first_device'] + last['devices'] - 1}"
        rows.append(
            [_named(run), f"{first['layers']}{held}", devices, str(first["micro_batch"]), str(first["dp"]), str(first["tp"]),
             str(first["zero"]), recomputed(first), offload_text(first["offload"]) or "-", _ms(first["t_us"]), _ms(first["d_us"]),
             format_bytes(first["peak_bytes"]), format_bytes(first["host_bytes"]) if first["host_bytes"] else "-"]
        )  # fmt: skip
    head = ["stage", "layers", "devices", "b", "dp", "tp", "ZeRO", "recomputed", "offload", "t ms", "d ms", "peak", "host"]
    return rows_table("Stages", head, rows, (0, 1, 2, 7, 8))


def byte_table(plan: dict[str, Any], explained: list[dict[str, Any]]) -> Any:
    """A row a stage, a column for each kind of bytes that there is, in GiB; what the host holds is beside."""
    runs = _alike(plan)
    names = [entry["name"] for entry in explained[0]["bytes"]]
    power, unit = (30, "GiB") if max(stage["peak_bytes"] for stage in plan["stages"]) >= 2**30 else (20, "MiB")

    def sized(count: int) -> str:
        return f"{count / 2**power:.2f}" if count >= 2**power / 200 else "-" if count == 0 else "<0.01"

    shown = [i for i in range(len(names)) if any(explained[run[0]]["bytes"][i]["device"] for run in runs)]
    hosted = [i for i in range(len(names)) if any(explained[run[0]]["bytes"][i]["host"] for run in runs)]
    rows = []
    for run in runs:
        entries = explained[run[0]]["bytes"]
        cells = [sized(entries[i]["device"]) for i in shown] + [sized(plan["stages"][run[0]]["peak_bytes"])]
        cells += [sized(entries[i]["host"]) for i in hosted]
        rows.append([_named(run), "forward" if explained[run[0]]["peak_in_forward"] else "backward", *cells])
    head = ["stage", "peak in", *(names[i] for i in shown), "peak", *(f"{names[i]} on the host" for i in hosted)]
    title = f"{unit} of a device at its peak (limit {sized(plan['memory_limit'])})"
    return rows_table(title, head, rows, (0, 1))


def time_table(plan: dict[str, Any], explained: list[dict[str, Any]]) -> Any:
    """What the phases of a micro-batch would take alone, and together; of the slowest stage where there are many."""
    runs = _alike(plan)
    if len(runs) > 2:
        runs = [max(runs, key=lambda run: plan["stages"][run[0]]["t_us"])]
    keys = ("compute_us", "device_us", "to_device_us", "to_host_us", "tensor_parallel_us", "exposed_us", "total_us")
    rows = []
    for run in runs:
        for phase in explained[run[0]]["phases"]:
            rows.append([_named(run), phase["name"].replace(" ", "\u00a0")] + [_ms(phase[key]) if phase[key] else "-" for key in keys])
    head = ["stage", "phase", "compute", "gather, reduce", "from host", "to host", "tensor parallel", "exposed at ends", "together"]
    which = "" if len(runs) == len(_alike(plan)) else ", the slowest stage"
    return rows_table(f"Milliseconds of a micro-batch, each alone and together{which}", head, rows, (0, 1))


def judged_table(judged: list[dict[str, Any]]) -> Any:
    """Each plan whose programs were simulated, the fastest first; `judged`: of plan_programs.judge."""
    rows = []
    for row in judged:
        plan, peak = row["plan"], max(row["peak_bytes"])
        stages = plan["stages"]
        again = sum(stage["full"] + stage["selective"] for stage in stages)
        rows.append([
            layout(plan), str(max(stage["micro_batch"] for stage in stages)), "/".join(sorted({str(stage["zero"]) for stage in stages})),
            f"{again} of {sum(stage['layers'] for stage in stages)}", f"{seconds(plan['step_us'] / 1e6)}", f"{seconds(row['step_us'] / 1e6)}",
            _percent(row["step_us"] / judged[0]["step_us"] - 1) if row is not judged[0] else "",
            format_bytes(peak) + " too much" * (not row["fits"]),
        ])  # fmt: skip
    head = ["layout", "b", "ZeRO", "recomputed", "formula", "simulated", "", "peak of a rank"]
    return rows_table("Plans whose programs were simulated, a step of each", head, rows, (0, 7))


def layout(plan: dict[str, Any]) -> str:
    """In words: "dp 2", "2 stages of tp 2"."""
    stages = plan["stages"]
    ways = {(stage["dp"], stage["tp"]) for stage in stages}
    dp, tp = max(stages[0]["dp"], 1), stages[0]["tp"]
    words = " ".join([f"dp {dp}"] * (dp > 1) + [f"tp {tp}"] * (tp > 1)) if len(ways) == 1 else "unlike ranks"
    count = f"{len(stages)} stages" if len(stages) > 1 else ""
    return " of ".join(filter(None, [count, words])) or "one rank"


def why_table(why_not: list[dict[str, Any]]) -> Any:
    rows = []
    for row in why_not:
        if "step_us" in row:
            said = f"{seconds(row['step_us'] / 1e6)} a step"
            more = _slower(row)
        elif "skipped" in row:
            said, more = "not looked at", "the time was up: give --time-limit more"
        elif "impossible" in row:
            said, more = "cannot be", row["impossible"]
        elif row.get("over_bytes", 0) > 0:
            said = "does not fit"
            more = f"needs {format_bytes(row['least_bytes'])} of a device at least, {format_bytes(row['over_bytes'])} too much"
        else:
            said = "not found"
            more = f"in its time; at least {_percent(row['at_least'])}" if "at_least" in row else "in its time"
        rows.append([row["name"], row["what"], said, more])
    return rows_table("Why not", ["", "", "predicted", ""], rows, (0, 1, 2, 3))


def _slower(row: dict[str, Any]) -> str:
    """By how much; a search that was stopped knows it between two figures."""
    if row.get("complete", True):
        return _percent(row["slower"])
    if "at_least" in row:
        return f"{_percent(row['at_least'])} to {_percent(row['slower'])}"
    return f"{_percent(row['slower'])}, or less (--time-limit)"


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # no "-0.0"


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 100 else f"{us / 1e3:.3f}"
