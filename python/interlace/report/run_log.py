"""The log of a run (`interlace train --log`), lines of JSON: what was measured at each step, and what the search changed.

    {"step": 1, "loss": 9.1, "seconds": 0.2, "lr": 0.0003, "norm": 1.4, "tokens_per_second": 5120, "memory_bytes": 73400320}
    {"step": 100, "eval_loss": 6.2}
    {"step": 12, "regions": {"regions": 12, "compiled": 12, "calls": 65, "kernels": 410, "from_step": 12}}
    {"step": 40, "plan": "planned again (schedule) in 2.1 s: another program, 12 % faster ...", ...}

A run that was resumed appends: the last line of a step counts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from interlace.errors import UNREADABLE, InterlaceError

SERIES = {
    "loss": "Loss", "eval_loss": "Evaluation loss", "lr": "Learning rate", "seconds": "Step time", "norm": "Norm of the gradient",
    "tokens_per_second": "Tokens per second", "memory_bytes": "Memory",
}  # fmt: skip
MOST_POINTS = 1200  # of a curve on the page
WARM_UP = 3  # steps at the start that are not counted in the median: the first ones compile and fill caches


class LogError(InterlaceError):
    """A file that is no log of a run."""


@dataclass
class RunLog:
    """`series`: by name the value at each step; those that are not finite are in `lost`, (step, name)."""

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    plans: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    regions: dict[str, int] = field(default_factory=dict)  # as the last steps ran them

    @property
    def steps(self) -> int:
        return max((step for values in self.series.values() for step in values), default=0)

    def last(self, name: str) -> float | None:
        values = self.series.get(name, {})
        return values[max(values)] if values else None

    def settled(self, name: str) -> float | None:
        """The median over the steps after the first few."""
        values = [value for _, value in sorted(self.series.get(name, {}).items())]
        return median(values[WARM_UP:] or values) if values else None

    def summary(self) -> dict[str, Any]:
        return {"steps": self.steps, "loss": self.last("loss"), "eval_loss": self.last("eval_loss"),
                "seconds": self.settled("seconds"), "tokens_per_second": self.settled("tokens_per_second"),
                "memory_bytes": max(self.series["memory_bytes"].values(), default=None) if "memory_bytes" in self.series else None,
                "plans": [{"step": step, "said": said} for step, said in self.plans], "regions": self.regions}  # fmt: skip


def read_log(text: str, file: str) -> RunLog:
    """Error: a line that is no JSON object with a step; the last one may be cut off, as a run that goes on leaves it."""
    found = RunLog()
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, line in lines:
        try:
            facts = json.loads(line)
            step = facts["step"]
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise TypeError(f"step is {step!r}"[:60])
            figures = {n: float(v) for n in SERIES if isinstance(v := facts.get(n), (int, float)) and not isinstance(v, bool)}
        except UNREADABLE as error:
            if number == lines[-1][0] and number > 1 and not text.endswith("\n"):
                break
            raise LogError(f"{file}:{number} is no line of a run's log ({type(error).__name__}: {error})") from None
        for name, value in figures.items():
            if math.isfinite(value):
                found.series.setdefault(name, {})[step] = value
            else:
                found.lost.append((step, name))
        if isinstance(facts.get("regions"), dict):
            found.regions = {name: number for name, number in facts["regions"].items() if isinstance(number, int)}
        if "plan" in facts:
            found.plans.append((step, str(facts["plan"])))
    if not found.series:
        raise LogError(f"{file} has no figures of a step: is it what interlace train --log wrote?")
    return found


def curve_data(logs: list[tuple[str, RunLog]]) -> list[dict[str, Any]]:
    """For the page: each series that a run has, with the runs that have it."""
    out = []
    for name, title in SERIES.items():
        runs = [
            {"label": label, "steps": steps, "values": values}
            for label, log in logs
            for steps, values in [thinned(log.series.get(name, {}))]
            if steps
        ]
        if runs:
            out.append({"name": name, "title": title, "runs": runs})
    return out


def thinned(values: dict[int, float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """By falling detail: of each stretch of steps the lowest and the highest, in their order, so that no spike is lost."""
    points = sorted(values.items())
    if len(points) > most:
        stretch = -(-2 * len(points) // most)
        kept = set()
        for i in range(0, len(points), stretch):
            part = points[i : i + stretch]
            kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        points = sorted(kept | {points[0], points[-1]})
    return [step for step, _ in points], [value for _, value in points]
