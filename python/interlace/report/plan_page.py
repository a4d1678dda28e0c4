"""The page of a plan: its stages, and the pipeline that they make over time, a lane a stage."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from interlace.report import html
from interlace.report.html import document, header, section, table, tile, tiles_section
from interlace.report.set_page import runs, stages_data
from interlace.report.timeline import Timeline
from interlace.report.units import bytes_text, count_text, counted, percent_text, time_text


def render_plan(plan: dict[str, Any], trace: str, told: tuple[list[str], list[Any]] = ([], [])) -> str:
    """The whole file. `plan` as `_core.read_plan` gives it, `trace` as `_core.plan_trace` does; `told`: lines and rich tables."""
    timeline = runs(json.loads(trace)["traceEvents"])
    data = stages_data(timeline, None, plan["memory_limit"])
    title = f"{plan['model']} on {plan['cluster']}"
    what, double = f"{counted(len(plan['stages']), 'stage')}, 1F1B", "a pass to fill the view with it."
    frame = html.timeline(what, "stage", double, tuple(data["presets"]))
    sections = [header(title, _notes(plan)), _tiles(plan, timeline), frame, _stages(plan)]
    if told[0]:
        items = "".join(f"<li>{escape(line)}</li>" for line in told[0])
        sections.append(section("What was found", "", f'<ul class="told">{items}</ul>'))
    sections += [_told(number, each) for number, each in enumerate(told[1])]
    return document(f"Plan: {title}", sections, data)


def _notes(plan: dict[str, Any]) -> list[str]:
    return [
        f"{plan['global_batch']} samples of {plan['sequence']} tokens", plan["dtype"], f"space {plan['space']}",
        counted(plan["accumulation"], "micro-batch"), "synthetic: an op is a whole pass of a stage",
    ]  # fmt: skip


def _tiles(plan: dict[str, Any], timeline: Timeline) -> str:
    tiles = [tile("Step time", time_text(plan["step_us"]), f"as the schedule runs: {time_text(timeline.span_ns / 1e3)}")]
    rate = plan["samples_per_s"] * plan["sequence"]
    tiles.append(tile("Tokens per second", count_text(rate), f"{plan['samples_per_s']:.2f} samples a second"))
    peak = max(stage["peak_bytes"] for stage in plan["stages"])
    limit = plan["memory_limit"]
    note = f"{percent_text(peak / limit)} of {bytes_text(limit)}" if limit else ""
    tiles.append(tile("Peak memory", bytes_text(peak), note, "bad" if peak > limit else ""))
    note = "no plan of the space is faster" if plan["gap"] <= 1e-6 else "a plan this much faster may exist"
    tiles.append(tile("Gap", percent_text(plan["gap"]), note))
    busy = sum(e.duration_ns for name, lane in timeline.lanes.items() if name.startswith("stage") for e in lane if not e.wait)
    idle = 1 - busy / max(1, timeline.span_ns * len(plan["stages"]))
    tiles.append(tile("Idle", percent_text(max(0.0, idle)), "of the stages' time: the pipeline's bubble and waits"))
    return tiles_section(tiles)


def _told(number: int, shown: Any) -> str:
    """A table of the terminal; columns of text come first here."""
    order = sorted(shown.columns, key=lambda column: column.justify != "left")
    rows = [[escape(cell) for cell in row] for row in zip(*(column.cells for column in order), strict=True)]
    left = sum(column.justify == "left" for column in order)
    return section(escape(str(shown.title)), "", table([escape(c.header) for c in order], rows, f"told-{number}", left))


def recomputed(stage: dict[str, Any]) -> str:
    """ "2 full, 6 kept"."""
    kept = stage["layers"] - stage["full"] - stage["selective"]
    counts = ((stage["full"], "full"), (stage["selective"], "selective"), (kept, "kept"))
    return ", ".join(f"{count} {word}" for count, word in counts if count)


def _stages(plan: dict[str, Any]) -> str:
    rows = []
    for stage in plan["stages"]:
        last = stage["first_block"] + stage["layers"] - 1
        held = f"{stage['first_block']}&ndash;{last}" + " +embedding" * stage["embedding"] + " +head" * stage["head"]
        moved = ", ".join(f"{name} {percent_text(share)}" for name, share in stage["offload"].items() if share > 0)
        rows.append([
            str(stage["stage"]), held, recomputed(stage), moved or "&ndash;",
            f"{stage['first_device']}&ndash;{stage['first_device'] + stage['devices'] - 1}", str(stage["micro_batch"]),
            str(stage["dp"]), str(stage["tp"]), str(stage["zero"]), time_text(stage["t_us"]), time_text(stage["d_us"]),
            bytes_text(stage["peak_bytes"]), bytes_text(stage["host_bytes"]) if stage["host_bytes"] else "&ndash;",
        ])  # fmt: skip
    head = ["stage", "blocks", "recomputed", "offload", "devices", "b", "dp", "tp", "ZeRO", "t", "d", "peak", "host"]
    note = "t: a micro-batch in the steady state; d: what the first and the last take beyond it."
    return section("Stages", note, table(head, rows, "stages", 4))
