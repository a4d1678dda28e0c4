"""The page of a pipeline's predicted step: all stages over time, where the time of each goes, its memory, what the step waits for."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from interlace.report import html
from interlace.report.html import document, header, section, table, tile, tiles_section
from interlace.report.timeline import Event, Timeline, columns
from interlace.report.units import bytes_text, percent_text, time_text

TURNS = {"fwd": "forward", "bwd": "backward", "upd": "update"}
CAUSES = {
    "before": "for a stage before it", "behind": "for a stage behind it", "fill": "filling", "drain": "draining",
    "transfers": "transfers under way", "launch": "the host",
}  # fmt: skip


def render_set(
    found: dict[str, Any], trace: str, title: str, notes: list[str], mesh: dict[str, int] | None = None, axis: str = "pp",
    hint: str = "", measured: list[dict[str, Any]] | None = None,
) -> str:  # fmt: skip
    """The whole file. `found` and `trace` as `_core.simulate_set` gives them with output "json" and "trace"; `mesh` with the sizes of
    all axes, the last one fastest, tells which ranks are of a stage. `hint`: HTML below the title. `measured`: events of a trace of all
    ranks."""
    events = json.loads(trace)["traceEvents"]
    timeline, ranks = runs(events), ranks_by_stage(events)
    of_stages = ranks or [ranks_of(mesh or {}, axis, i) for i in range(len(found["stages"]))]
    below = runs(measured, of_stages, bool(ranks)) if measured else None
    data = stages_data(timeline, below, found["limit_bytes"])
    double = "a run to fill the view with it."
    what = f"{len(found['stages'])} stages, what each{' rank (r)' if ranks else ''} runs when{', predicted over measured' if below else ''}"
    sections = [
        header(title, notes, hint), _tiles(found, below), html.timeline(what, "stage", double, tuple(data["presets"])), _stages(found),
        _memory(found, of_stages), _path(found), _modules(found),
    ]  # fmt: skip
    return document(f"Pipeline: {title}", sections, data)


def stages_data(predicted: Timeline, measured: Timeline | None, limit: int) -> dict[str, Any]:
    """What the script draws of stages."""
    return {
        "predicted": columns(predicted), "measured": columns(measured) if measured is not None else None, "phases": [], "path": [],
        "memory": {"kinds": [], "time_us": [], "bytes": []}, "limit_bytes": limit, "presets": presets(predicted),
    }  # fmt: skip


def ranks_by_stage(events: list[dict[str, Any]]) -> list[list[int]]:
    """The ranks of each stage where all of them were simulated, as the processes of a trace are called: "stage 0, rank 1"."""
    found: dict[int, list[int]] = {}
    for entry in events:
        if entry["name"] == "process_name" and (match := re.fullmatch(r"stage (\d+), rank (\d+)", entry["args"]["name"])):
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return [found[stage] for stage in sorted(found)]


def runs(events: list[dict[str, Any]], of_stages: list[list[int]] | None = None, every: bool = False) -> Timeline:
    """A lane for what each stage computes, ops of one micro-batch and part that follow one another as one event, and one for its messages;
    of a trace of all ranks the same for each rank. `of_stages`: the ranks of each stage where the trace is a measured one, which knows
    none; of it `every` rank, or the first of each stage."""
    places = {rank: stage for stage, own in enumerate(ranks_by_stage(events)) for rank in own}
    if of_stages is not None:
        stage_of = {rank: stage for stage, own in enumerate(of_stages) for rank in (own if every else own[:1])}
        events = [e if every else {**e, "pid": stage_of[e["pid"]]} for e in events if e.get("pid") in stage_of]
        places = stage_of if every else {}
    ranks: dict[int, dict[str, list[dict[str, Any]]]] = {}
    lanes: dict[tuple[int, int], str] = {}
    for entry in events:
        if entry["ph"] == "M" and entry["name"] == "thread_name":
            lanes[entry["pid"], entry["tid"]] = entry["args"]["name"].split(" ", 2)[2]
        elif entry["ph"] == "X":
            lane = lanes.get((entry["pid"], entry["tid"]), "")
            ranks.setdefault(entry["pid"], {}).setdefault(lane, []).append(entry)
    start = min((e["ts"] for own in ranks.values() for es in own.values() for e in es), default=0) if of_stages is not None else 0
    for entry in (e for own in ranks.values() for es in own.values() for e in es if start):
        entry["ts"] -= start
    span = max((round((e["ts"] + e["dur"]) * 1e3) for own in ranks.values() for es in own.values() for e in es), default=0)
    named: dict[str, list[Event]] = {}
    for place, own in sorted(ranks.items()):
        of = f"r{place}" if places else str(place)
        named[f"stage {places[place]} {of}" if places else f"stage {of}"] = _merged(own.get("compute", []), span // 1000)
        messages = [_event(e, "message") for lane, es in own.items() if lane.startswith("p2p") for e in es]
        if messages:
            named[f"sends {of}"] = sorted(messages, key=lambda event: event.start_ns)
    return Timeline("simulated stages", 0, span, named)


def _event(entry: dict[str, Any], op: str) -> Event:
    args = entry.get("args", {})
    return Event(
        start_ns=round(entry["ts"] * 1e3), duration_ns=round(entry["dur"] * 1e3), op=op, part=args.get("part", ""),
        detail=args.get("detail", ""), wait=entry.get("cat") == "cuda_sync",
    )  # fmt: skip


def _merged(entries: list[dict[str, Any]], gap_ns: int) -> list[Event]:
    """Runs: gaps below `gap_ns` are part of one."""
    out: list[Event] = []
    for entry in sorted(entries, key=lambda e: float(e["ts"])):
        event = _event(entry, "")
        if event.wait:
            continue
        turn = TURNS.get(event.part, event.part)
        batch = event.detail.rpartition("micro-batch ")[2] if "micro-batch" in event.detail else ""
        event.op, event.detail = f"{turn} {batch}".strip(), ""
        last = out[-1] if out else None
        if last is not None and last.op == event.op and event.start_ns - last.end_ns <= gap_ns:
            last.duration_ns = event.end_ns - last.start_ns
        else:
            out.append(event)
    return out


def presets(timeline: Timeline) -> dict[str, list[int]]:
    """Stretches of a pipeline, in ns: its start, until the last stage has work; its end, from the last backward pass of the stage that
    is first to have none left; and what lies between."""
    lanes = [[e for e in es if not e.wait] for name, es in timeline.lanes.items() if name.startswith("stage ")]
    lanes = [events for events in lanes if events]
    if len(lanes) < 2:
        return {}
    span = timeline.span_ns
    filled = max(events[0].end_ns for events in lanes)
    backward = [[e for e in events if e.part == "bwd"] or events for events in lanes]
    drains = min(events[-1].start_ns for events in backward)
    out = {"Start": [0, min(span, filled + filled // 2)], "End": [max(0, drains - (span - drains) // 2), span]}
    if drains > filled:
        out = {"Start": out["Start"], "Between": [filled, drains], "End": out["End"]}
    return out


def ranks_of(mesh: dict[str, int], axis: str, index: int) -> list[int]:
    """The ranks whose place along `axis` is `index`; the last axis is the fastest."""
    found = [0] if index < mesh.get(axis, 0) else []
    for name, size in mesh.items():
        found = [rank * size + at for rank in found for at in ([index] if name == axis else range(size))]
    return found


def _ranks_text(ranks: list[int]) -> str:
    """ "0-3", "0, 2", "0, 4, ... 28"."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}&ndash;{ranks[-1]}"
    return ", ".join(map(str, ranks)) or "&ndash;" if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, &hellip; {ranks[-1]}"


def _memory(found: dict[str, Any], ranks: list[list[int]]) -> str:
    stages, limit = found["stages"], found["limit_bytes"]
    most = max(stage["taken_bytes"] for stage in stages) or 1
    rows = []
    for i, stage in enumerate(stages):
        peak, lasting = stage["taken_bytes"], stage["persistent_bytes"]
        bars = "".join(f'<span class="k-{kind}" style="width:{100 * size / most:.2f}%"></span>'
                       for kind, size in (("parameters", lasting), ("activations", peak - lasting)))  # fmt: skip
        over = "" if stage["fits"] else "<small>does not fit</small>"
        rows.append([
            str(i), _ranks_text(ranks[i]), f'{bytes_text(peak)}<span class="meter">{bars}</span>{over}',
            percent_text(peak / limit) if limit else "", bytes_text(lasting), bytes_text(peak - lasting),
            bytes_text(stage["input_bytes"]),
        ])  # fmt: skip
    head = ["stage", "each of the ranks", "peak", "of the limit", "lasting", "of a step", "inputs"]
    note = f"Of each rank, all ranks of a stage alike; the limit is {bytes_text(limit)}. Inputs belong to the caller."
    return section("Memory by stage and rank", note, table(head, rows, "memory-by-stage", 2))


def _bubble(stage: dict[str, Any]) -> float:
    return float(sum(stage["bubble_us"].values()))


def _tiles(found: dict[str, Any], measured: Timeline | None) -> str:
    stages, step = found["stages"], found["step_us"]
    whole = sum(map(_bubble, stages)) / (step * len(stages))
    worst = max(stages, key=_bubble)
    peak, limit = max(stage["taken_bytes"] for stage in stages), found["limit_bytes"]
    over = peak > limit
    took = measured.span_ns / 1e3 if measured is not None else 0
    real = [tile("Measured step", time_text(took), f"predicted {100 * (step / took - 1):+.1f} %", "measured")] if took else []
    return tiles_section([
        tile("Step time", time_text(step), f"on {found['ranks']} ranks of {found['cluster']}"), *real,
        tile("Bubbles", percent_text(whole), f"most on stage {stages.index(worst)}: {percent_text(worst['bubble'])}"),
        tile("Peak memory", bytes_text(peak), f"{percent_text(peak / limit)} of {bytes_text(limit)}" if limit else "", "bad" if over else ""),
    ])  # fmt: skip


def _stages(found: dict[str, Any]) -> str:
    step, causes = found["step_us"], [c for c in CAUSES if any(s["bubble_us"].get(c) for s in found["stages"])]
    rows = [
        [str(i), percent_text(stage["compute_us"] / step), percent_text(stage["optimizer_us"] / step),
         *(percent_text(stage["bubble_us"][cause] / step) for cause in causes), bytes_text(stage["taken_bytes"])]
        for i, stage in enumerate(found["stages"])
    ]  # fmt: skip
    head = ["stage", "compute", "optimizer", *(CAUSES[cause] for cause in causes), "peak"]
    note = "Of the step: what a stage computes, what runs once a step, and what it waits for."
    return section("Stages", note, table(head, rows, "stages"))


def _path(found: dict[str, Any]) -> str:
    whole = found["step_us"]
    rows = [[str(p["stage"]), escape(p["lane"]), time_text(p["us"]), percent_text(p["us"] / whole)] for p in found["critical_path"]]
    note = "What the step's end depends on, back to its start: less of it makes the step shorter."
    return section("Critical path", note, table(["stage", "of", "time", "of the step"], rows, "path", 2))


def _modules(found: dict[str, Any], most: int = 20) -> str:
    rows = [[escape(m["module"] or "(model)"), escape(m["lane"]), time_text(m["us"])] for m in found["modules"][:most]]
    return section("Modules", "", table(["module", "of", "time"], rows, "modules", 2))
