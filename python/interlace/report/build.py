"""Everything that the page shows, computed: the forecast, timelines, modules, and the what-if table by simulating again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interlace.report.decisions import Decisions, decisions_of
from interlace.report.modules import Row, breakdown, merge_blame, merge_holders
from interlace.report.timeline import Timeline, lane_kind, read_trace

MOST_RANKS_ONE_BY_ONE = 64  # above, the row with one slower rank would take longer than all others together


@dataclass(frozen=True)
class Scenario:
    """What if times were multiplied by these factors (sim/what_if.h), or ranks were slower."""

    label: str
    factors: tuple[tuple[str, float], ...] = ()
    slow: tuple[str, ...] = ()


NETWORK = (
    Scenario("link bandwidth x 2", (("links", 0.5),)), Scenario("link bandwidth / 2", (("links", 2.0),)),
    Scenario("link bandwidth / 4", (("links", 4.0),)), Scenario("no latency of collectives", (("latency", 0.0),)),
    Scenario("infinitely fast network", (("links", 0.0), ("latency", 0.0))),
)  # fmt: skip
COMPUTE = (Scenario("compute x 2", (("compute", 0.5),)), Scenario("compute / 2", (("compute", 2.0),)))
COPIES = (Scenario("host copies x 2", (("copies", 0.5),)), Scenario("no host copies", (("copies", 0.0),)))
LAUNCHES = (Scenario("launches cost nothing", (("launches", 0.0),)),)
INTERFERENCE = (Scenario("no interference between lanes", (("interference", 0.0),)),)
SLOW_RANK = (Scenario("one rank computes 10 % slower", slow=("0=1.1",)),)


@dataclass
class Report:
    """All that is on the page. `facts` of the program and machines, `forecast` as `interlace simulate --json` prints."""

    facts: dict[str, str]
    forecast: dict[str, Any]
    details: dict[str, Any]
    predicted: Timeline
    measured: Timeline | None
    modules: list[Row]
    blame: list[dict[str, Any]]
    holders: list[dict[str, Any]]
    what_if: list[dict[str, Any]]
    tokens_per_step: int | None
    decisions: Decisions | None

    def summary(self) -> dict[str, Any]:
        """The numbers of the page without its timelines."""
        step_s = self.forecast["step_us"] / 1e6
        out: dict[str, Any] = {"facts": self.facts, "forecast": self.forecast}
        out["tokens_per_step"] = self.tokens_per_step
        out["tokens_per_s"] = self.tokens_per_step / step_s if self.tokens_per_step and step_s > 0 else None
        out["modules"] = [row.facts() for row in self.modules]
        out["critical_path"] = self.blame
        out["peak"] = self.holders
        out["what_if"] = self.what_if
        if self.decisions is not None:
            out["decisions"] = self.decisions.summary()
        if self.measured is not None:
            us = self.measured.span_ns / 1e3
            out["measured"] = {"step_us": us, "error": self.forecast["step_us"] / us - 1 if us else None,
                               "lanes": self.measured.lane_use()}  # fmt: skip
        return out


def build_report(
    program: Any, simulate: Callable[..., Any], facts: dict[str, str], measured: Timeline | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:  # fmt: skip
    """`simulate(factors, slow)`, both optional, gives a `_core.Simulation` of the program."""
    progress("simulating", 0, 1)
    base = simulate()
    forecast = json.loads(base.json())
    details = json.loads(base.report_data())
    predicted = read_trace(base.trace(details["rank"]), "the simulation", details["rank"])
    rows = _what_if(simulate, forecast, progress)
    return Report(
        facts=facts | _program_facts(program), forecast=forecast, details=details, predicted=predicted,
        measured=measured, modules=breakdown(predicted, measured), blame=merge_blame(forecast["critical_path"]),
        holders=merge_holders(details["memory"]["at_peak"]), what_if=rows, tokens_per_step=tokens_per_step(program),
        decisions=decisions_of(program),
    )  # fmt: skip


def scenarios(forecast: dict[str, Any]) -> list[Scenario]:
    """Those that say something about this step: no network for one rank, no copies where nothing is copied."""
    lanes = {lane_kind(lane["lane"]) for rank in forecast["per_rank"] for lane in rank["lanes"]}
    launches = next((bound["us"] for bound in forecast["bounds"] if bound["name"] == "launches"), 0)
    out = list(NETWORK if lanes & {"gather", "reduce", "p2p"} else ()) + list(COMPUTE)
    out += COPIES if lanes & {"h2d", "d2h", "file"} else ()
    out += LAUNCHES if launches > 0 else ()
    out += INTERFERENCE if lanes else ()
    out += SLOW_RANK if 1 < forecast["ranks"] <= MOST_RANKS_ONE_BY_ONE else ()
    return out


def _what_if(simulate: Callable[..., Any], forecast: dict[str, Any], progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    chosen = scenarios(forecast)
    rows = [what_if_row("as it is", forecast, forecast["step_us"])]
    for number, scenario in enumerate(chosen):
        progress(f"what if: {scenario.label}", number, len(chosen))
        changed = json.loads(simulate(dict(scenario.factors), list(scenario.slow)).json())
        rows.append(what_if_row(scenario.label, changed, forecast["step_us"]))
    return rows


def what_if_row(label: str, forecast: dict[str, Any], base_us: float) -> dict[str, Any]:
    last = max(forecast["per_rank"], key=lambda rank: rank["end_us"])
    return {
        "label": label, "step_us": forecast["step_us"], "change": forecast["step_us"] / base_us - 1 if base_us else 0.0,
        "exposed_us": sum(lane["exposed_us"] for lane in last["lanes"]), "lower_bound_us": forecast["lower_bound_us"],
        "bound": forecast["bounds"][0]["name"],
    }  # fmt: skip


def tokens_per_step(program: Any) -> int | None:
    """Of all ranks, when the program reads `input_ids` of batch x sequence."""
    for entry in program.inputs():
        shape = entry["shape"]
        if entry["name"].rpartition(".")[2] == "input_ids" and len(shape) == 2 and all(isinstance(n, int) for n in shape):
            return math.prod([*shape, program.accumulation, *program.mesh.values()])
    return None


def _program_facts(program: Any) -> dict[str, str]:
    summary, meta = program.summary(), program.meta()
    mesh = " x ".join(f"{axis}={size}" for axis, size in program.mesh.items())
    own = program.inputs()[: len(program.inputs()) // program.width]
    inputs = [f"{i['name']} {i['dtype']}[{', '.join(str(d) for d in i['shape'])}]" for i in own]
    out = {}
    if "model" in meta:
        out["model"] = meta["model"]
    out["parameters"] = f"{summary['params']:,} tensors, {summary['param_elements']:,} elements"
    out["mesh"] = mesh or "one device"
    if program.accumulation > 1:
        side = f", {program.width} side by side" if program.width > 1 else ""
        out["accumulation"] = f"{program.accumulation} micro-batches a step{side} ({program.accumulate_mode})"
    out["inputs of a micro-batch"] = ", ".join(inputs) or "none"
    out["ops"] = f"{summary['ops']:,}"
    if funcs := program.funcs():
        ops = sum(func["calls"] * sum(op["name"] != "view" for op in func["ops"]) for func in funcs)
        out["regions"] = f"{len(funcs)}, in {sum(func['calls'] for func in funcs):,} calls for {ops:,} kernels"
    return out
