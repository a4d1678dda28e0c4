"""Two runs side by side, A and B: what differs in step time, lanes, memory and decisions, and their timelines on one scale.

A side is a program that was simulated, a pipeline of programs, a trace, or a run with its log: what one of them does not have is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from interlace.report import html
from interlace.report.build import Report
from interlace.report.html import document, dot, header, section, table, tile, tiles_section, toned
from interlace.report.modules import totals
from interlace.report.run_log import RunLog, curve_data
from interlace.report.run_page import Run, curves_section
from interlace.report.set_page import CAUSES, runs
from interlace.report.timeline import Timeline, columns, lane_kind
from interlace.report.units import bytes_text, count_text, percent_text, time_text


@dataclass
class Side:
    """`figures`: name to (value, "us", "bytes", "count" or "number"), in order of display; `lanes`: busy and exposed microseconds;
    `memory`: bytes by kind or stage; `words`: settings and decisions by name."""

    name: str
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)
    lanes: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None
    log: RunLog | None = None
    estimated: bool = False


def side_of_report(name: str, report: Report) -> Side:
    found, summary = report.forecast, report.summary()
    last = max(found["per_rank"], key=lambda rank: rank["end_us"])
    figures = {
        "Step time": (found["step_us"], "us"), "Compute": (last["compute_us"], "us"), "Waits of compute": (last["blocked_us"], "us"),
        "Exposed communication": (sum(lane["exposed_us"] for lane in last["lanes"]), "us"),
        "Lower bound": (found["lower_bound_us"], "us"), "Peak memory": (found["memory"]["taken_bytes"], "bytes"),
        "Lasting memory": (found["memory"]["persistent_bytes"], "bytes"),
    }  # fmt: skip
    if summary["tokens_per_s"] is not None:
        figures["Tokens per second"] = (summary["tokens_per_s"], "count")
    memory = totals(report.holders, "kind", "bytes")
    words = dict(report.facts)
    if report.decisions is not None:
        words["chosen"] = report.decisions.chosen[0]
        words |= {f"decision {i}": line.strip() for i, line in enumerate(report.decisions.words.splitlines()[1:], 1)}
    lanes = {lane["lane"]: (lane["busy_us"], lane["exposed_us"]) for lane in last["lanes"]}
    return Side(name, figures, lanes, memory, words, report.predicted, estimated=not found["profile"]["fingerprint"])


def side_of_set(name: str, found: dict[str, Any], trace: str, words: dict[str, str]) -> Side:
    stages = found["stages"]
    figures = {
        "Step time": (found["step_us"], "us"), "Bubbles, all stages": (sum(sum(s["bubble_us"].values()) for s in stages), "us"),
        "Peak memory": (max(s["taken_bytes"] for s in stages), "bytes"),
    }  # fmt: skip
    for cause, said in CAUSES.items():
        figures[f"Bubbles: {said}"] = (sum(s["bubble_us"].get(cause, 0) for s in stages), "us")
    memory = {f"stage {i}": float(s["taken_bytes"]) for i, s in enumerate(stages)}
    return Side(name, figures, {}, memory, words, runs(json.loads(trace)["traceEvents"]), estimated=not found["profile"]["fingerprint"])


def side_of_run(run: Run) -> Side:
    side = Side(run.name, words=dict(run.settings), timeline=run.trace, log=run.log)
    if run.log is not None:
        found = run.log.summary()
        for label, key, kind, scale in (
            ("Step time", "seconds", "us", 1e6), ("Tokens per second", "tokens_per_second", "count", 1),
            ("Peak memory", "memory_bytes", "bytes", 1), ("Loss, last", "loss", "number", 1),
            ("Evaluation loss, last", "eval_loss", "number", 1), ("Steps", "steps", "number", 1),
        ):  # fmt: skip
            if found[key] is not None:
                side.figures[label] = (found[key] * scale, kind)
        side.words |= {f"planned at step {step}": said for step, said in run.log.plans}
    if run.trace is not None:
        side.figures.setdefault("Step time", (run.trace.span_ns / 1e3, "us"))
        side.figures["Traced step"] = (run.trace.span_ns / 1e3, "us")
        side.lanes = {lane["lane"]: (lane["busy_us"], lane["exposed_us"]) for lane in run.trace.lane_use()}
    return side


def compared(a: Side, b: Side) -> dict[str, Any]:
    """What differs, as data: figures, lanes and memory with both values, and the words that are not the same."""

    def pairs(of_a: dict[str, Any], of_b: dict[str, Any]) -> dict[str, Any]:
        return {name: {"a": of_a.get(name), "b": of_b.get(name)} for name in {**of_a, **of_b}}

    figures = pairs({k: v for k, (v, _) in a.figures.items()}, {k: v for k, (v, _) in b.figures.items()})
    for each in figures.values():
        each["change"] = each["b"] / each["a"] - 1 if each["a"] and each["b"] is not None else None
    return {
        "a": a.name, "b": b.name, "figures": figures, "lanes": pairs(a.lanes, b.lanes), "memory": pairs(a.memory, b.memory),
        "differs": {name: pair for name, pair in pairs(a.words, b.words).items() if pair["a"] != pair["b"]},
    }  # fmt: skip


def render_compared(a: Side, b: Side, hint: str = "") -> str:
    """The whole file. `hint`: HTML below the title."""
    logs = [(label, side.log) for label, side in (("A", a), ("B", b)) if side.log is not None]
    series = curve_data(logs)
    drawn = [side for side in (a, b) if side.timeline is not None]
    data: dict[str, Any] = {"curves": series, "predicted": None, "measured": None, "titles": []}
    for place, side in zip(("predicted", "measured"), drawn, strict=False):
        assert side.timeline is not None
        data[place] = columns(side.timeline)
        data["titles"].append(f"{'A' if side is a else 'B'}  {side.name}")
    names = f'<p><span class="pair a">A</span> {escape(a.name)}<br><span class="pair b">B</span> {escape(b.name)}</p>'
    sections = [header("Side by side", [], names + hint), _tiles(a, b)]
    if drawn:
        sections.append(html.timeline("One above the other, on one scale", "lane", "an op to fill the view with it."))
    sections += [_figures(a, b), _lanes(a, b), _memory(a, b), _words(a, b), curves_section(series)]
    return document(f"{a.name} and {b.name}", [each for each in sections if each], data)


def shown(value: float | None, kind: str) -> str:
    if value is None:
        return "&ndash;"
    forms: dict[str, Callable[[Any], str]] = {"us": time_text, "bytes": bytes_text, "count": count_text}
    return forms[kind](value) if kind in forms else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def change(a: float | None, b: float | None, more_is_better: bool = False) -> str:
    """ "-12.0 %" of B against A, green where B is better."""
    if a is None or b is None:
        return ""
    if a == b:
        return '<span class="same">same</span>'
    if a == 0:
        return '<span class="worse">new</span>'
    return toned(b / a - 1, more_is_better)


def _tiles(a: Side, b: Side) -> str:
    tiles = []
    for name in ("Step time", "Tokens per second", "Peak memory", "Exposed communication", "Bubbles, all stages", "Loss, last"):
        if name in a.figures and name in b.figures:
            (left, kind), (right, _) = a.figures[name], b.figures[name]
            by = "the same" if left == right else f"{percent_text(right / left - 1, signed=True)} against A" if left else "A has none"
            tiles.append(tile(name, f"{shown(left, kind)} \N{RIGHTWARDS ARROW} {shown(right, kind)}", by))
    return tiles_section(tiles) if tiles else ""


def _row(name: str, kind: str, of_a: float | None, of_b: float | None, more_is_better: bool = False) -> list[str]:
    return [name, shown(of_a, kind), shown(of_b, kind), change(of_a, of_b, more_is_better)]


def _figures(a: Side, b: Side) -> str:
    rows = []
    for name in {**a.figures, **b.figures}:
        none = (None, (a.figures.get(name) or b.figures[name])[1])
        (left, kind), (right, _) = a.figures.get(name, none), b.figures.get(name, none)
        rows.append(_row(escape(name), kind, left, right, name.startswith("Tokens")))
    return section("Figures", "", table(["", "A", "B", "change"], rows, "figures"))


def _lanes(a: Side, b: Side) -> str:
    rows = []
    for name in {**a.lanes, **b.lanes}:
        (busy_a, exposed_a), (busy_b, exposed_b) = (side.lanes.get(name, (None, None)) for side in (a, b))
        rows.append(_row(dot(f"c-{lane_kind(name)}", name), "us", busy_a, busy_b) + _row("", "us", exposed_a, exposed_b)[1:])
    head = ["lane", "busy A", "busy B", "", "exposed A", "exposed B", ""]
    return section("Lanes", "", table(head, rows, "lanes-of-both")) if rows else ""


def _memory(a: Side, b: Side) -> str:
    rows = []
    for name in sorted({**a.memory, **b.memory}, key=lambda n: (-max(a.memory.get(n, 0), b.memory.get(n, 0)), n)):
        left, right = (side.memory.get(name, 0.0 if side.memory else None) for side in (a, b))
        rows.append(_row(dot(f"k-{name.replace(' ', '-')}", name), "bytes", left, right))
    return section("Memory at the peak", "", table(["", "A", "B", "change"], rows, "memory-of-both")) if rows else ""


def _words(a: Side, b: Side) -> str:
    if not a.words or not b.words:
        return ""
    found = compared(a, b)["differs"]
    rows = [[escape(name), *(escape(pair[s]) if pair[s] is not None else "&ndash;" for s in "ab")] for name, pair in found.items()]
    note = f"Settings and decisions that are not the same; {len({**a.words, **b.words}) - len(rows)} are."
    body = table(["", "A", "B"], rows, "differs", 3) if rows else '<p class="quiet">Nothing.</p>'
    return section("What differs", note, body)
