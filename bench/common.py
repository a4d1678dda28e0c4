"""Timing that two sides share: paired, alternating runs, medians with their spread, and JSON.

Machines drift (other tenants, frequency), so the sides of a comparison run in turn, round by round, in one process, and
the ratio is taken within each round; the median of those ratios is the figure, their quartiles its spread.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Times = dict[str, list[float]]  # side -> seconds, one per round


def paired(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    before_each: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds of every side in every round; the side that goes first changes with the round. On a machine that others use, too,
    `clock=time.process_time` counts the processor's time alone."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    order = list(sides)
    times: Times = {name: [] for name in order}
    for number in range(-warmup, rounds):
        for name in order if number % 2 == 0 else reversed(order):
            if before_each is not None:
                before_each()
            start = clock()
            sides[name]()
            seconds = clock() - start
            if number >= 0:
                times[name].append(seconds)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(times: Times, side: str, baseline: str) -> list[float]:
    """side / baseline, round by round."""
    return [ours / base for ours, base in zip(times[side], times[baseline], strict=True)]


def summarize(times: Times, baseline: str) -> dict[str, dict[str, float]]:
    """For every side: median, quartiles (ms), and its ratio to the baseline."""
    out = {}
    for name, seconds in times.items():
        low, middle, high = quartiles(seconds)
        ratio_low, ratio, ratio_high = quartiles(ratios(times, name, baseline))
        out[name] = {
            "median_ms": middle * 1e3,
            "q1_ms": low * 1e3,
            "q3_ms": high * 1e3,
            "ratio": ratio,
            "ratio_q1": ratio_low,
            "ratio_q3": ratio_high,
            "rounds": len(seconds),
        }
    return out


def report(title: str, times: Times, baseline: str, json_path: str | None = None, **facts: object) -> dict[str, object]:
    """Prints one line a side and, if asked, adds the record to a JSON file (a list of records)."""
    sides = summarize(times, baseline)
    rounds = len(times[baseline])
    print(f"{title} ({rounds} paired rounds)")
    for name, row in sides.items():
        unit, scale = ("us", 1e3) if row["median_ms"] < 0.1 else ("ms", 1.0)
        middle, low, high = (row[key] * scale for key in ("median_ms", "q1_ms", "q3_ms"))
        line = f"  {name:<14} {middle:10.3f} {unit}   [{low:.3f}, {high:.3f}]"
        if name != baseline:
            line += f"   {row['ratio']:.3f} x {baseline}   [{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}]"
        print(line, flush=True)
    record: dict[str, object] = {"title": title, "baseline": baseline, "sides": sides, "machine": machine(), **facts}
    if json_path:
        write_json(json_path, record)
    return record


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    facts: dict[str, object] = {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}
    try:
        import torch

        facts["torch"] = torch.__version__
        facts["threads"] = torch.get_num_threads()
    except ImportError:
        pass
    return facts


def write_json(path: str, record: dict[str, object]) -> None:
    """Adds a record to the list in a JSON file."""
    file = Path(path)
    records = json.loads(file.read_text()) if file.exists() else []
    records.append(record)
    file.write_text(json.dumps(records, indent=1) + "\n")
