"""The page itself: tables and figures as HTML, timelines as data for the script, all in one text without any address."""

from __future__ import annotations

from html import escape

from interlace.report import html
from interlace.report.build import Report
from interlace.report.decisions import render_decisions
from interlace.report.html import document, dot, header, meter, section, table, tile, tiles_section
from interlace.report.modules import Row, totals
from interlace.report.timeline import columns, lane_kind
from interlace.report.units import bytes_text, count_text, percent_text, time_text

MOST_BLAME = 14  # rows of the critical path that are shown at once
MOST_HOLDERS = 16
OPEN_MODULES = 12  # rows of the module table that are open at first


def render(report: Report, hint: str = "") -> str:
    """The whole file. `hint`: HTML below the title."""
    title = report.facts.get("model") or report.facts.get("program", "program")
    sections = [
        _header(report, title, hint), _tiles(report), html.timeline(
            f"{'Predicted over measured' if report.measured is not None else 'Predicted'}, rank {report.predicted.rank}", "lane",
            "an op to fill the view with it; the red line marks the critical path.",
        ), '<div class="columns"><div>', _exposed(report),
        _bounds(report), "</div><div>", _what_if(report), "</div></div>",
        render_decisions(report.decisions) if report.decisions is not None else "", _memory(report), _path(report),
        _modules(report), html.words_section("About", report.facts),
    ]  # fmt: skip
    data = {
        "predicted": columns(report.predicted),
        "measured": columns(report.measured) if report.measured is not None else None,
        "phases": report.details["phases"], "path": report.details["path"], "memory": report.details["memory"],
        "arena": report.details["arena"], "limit_bytes": report.forecast["memory"]["limit_bytes"],
    }  # fmt: skip
    return document(f"{title} on {report.forecast['cluster']}", sections, data)


def _header(report: Report, title: str, hint: str) -> str:
    forecast = report.forecast
    ranks = forecast["ranks"]
    notes = [f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {forecast['cluster']}"]
    profile = forecast["profile"]
    if profile["fingerprint"]:
        notes.append(f"{profile['measured_op_kinds']} of {profile['op_kinds']} kinds of op measured")
    else:
        notes.append("times estimated, no profile")
    if report.measured is not None:
        notes.append("with a measured step")
    warning = ""
    if profile["foreign"]:
        warning = f'<p class="warning">The profile is of another machine: {escape(profile["fingerprint"])}</p>'
    return header(title, notes, warning + hint)


def _tiles(report: Report) -> str:
    forecast, summary = report.forecast, report.summary()
    last = max(forecast["per_rank"], key=lambda rank: rank["end_us"])
    tiles = [tile("Step time", time_text(forecast["step_us"]), f"compute {time_text(last['compute_us'])}")]
    if summary["tokens_per_s"] is not None:
        note = f"{summary['tokens_per_step']:,} tokens a step, all ranks"
        tiles.append(tile("Tokens per second", count_text(summary["tokens_per_s"]), note))
    memory = forecast["memory"]
    share = memory["taken_bytes"] / memory["limit_bytes"] if memory["limit_bytes"] > 0 else 0
    fits = f"{percent_text(share)} of {bytes_text(memory['limit_bytes'])}" if share <= 1 else "does not fit"
    note = fits if share <= 1 else f"does not fit: the device has {bytes_text(memory['limit_bytes'])}"
    tiles.append(tile("Peak memory", bytes_text(memory["taken_bytes"]), note, "bad" if share > 1 else ""))
    bound = forecast["bounds"][0]
    note = f"{bound['name']}; the step is {percent_text(forecast['gap'])} above it"
    tiles.append(tile("Lower bound", time_text(bound["us"]), note))
    exposed = sum(lane["exposed_us"] for lane in last["lanes"])
    busy = sum(lane["busy_us"] for lane in last["lanes"])
    note = f"of {time_text(busy)} on all lanes" if busy else "nothing is transferred"
    tiles.append(tile("Exposed communication", time_text(exposed), note))
    if report.measured is not None:
        measured = summary["measured"]
        error = measured["error"]
        side = "above" if error is not None and error > 0 else "below"
        note = "" if error is None else f"the forecast is {percent_text(abs(error))} {side} it"
        tiles.append(tile("Measured step", time_text(measured["step_us"]), note, "measured"))
    return tiles_section(tiles)


def _exposed(report: Report) -> str:
    step = report.forecast["step_us"] or 1
    last = max(report.forecast["per_rank"], key=lambda rank: rank["end_us"])
    measured = {lane["lane"]: lane for lane in report.measured.lane_use()} if report.measured is not None else {}
    rows = []
    for lane in last["lanes"]:
        name = lane["lane"]
        other = measured.get(name)
        row = [dot(f"c-{lane_kind(name)}", name), f"{lane['transfers']:,}", bytes_text(lane["bytes"])]
        for key in ("busy_us", "exposed_us"):
            row.append(time_text(lane[key]) + (f"<small>measured {time_text(other[key])}</small>" if other else ""))
        row.append(percent_text(lane["exposed_us"] / step))
        rows.append(row)
    head = ["lane", "transfers", "bytes", "busy", "exposed", "of the step"]
    alone = '<p class="quiet">One rank alone: nothing is transferred.</p>'
    body = table(head, rows, "exposed") if rows else alone
    return section("Exposed communication", "A lane is busy and nothing is computed.", body)


def _what_if(report: Report) -> str:
    largest = max(row["step_us"] for row in report.what_if) or 1
    rows = []
    for row in report.what_if:
        base = row is report.what_if[0]
        by = html.tone(row["change"])
        change = "" if base else '<span class="same">none</span>' if by == "same" else html.toned(row["change"])
        bar = meter(row["step_us"] / largest, "base" if base else by)
        label, bound = escape(row["label"]), escape(row["bound"])
        rows.append([label, time_text(row["step_us"]) + bar, change, time_text(row["exposed_us"]), bound])
    body = table(["change", "step", "", "exposed", "bound by"], rows, "what-if")
    return section("What if", "Each row is the same program, simulated again.", body)


def _module_name(path: str, merges: int = 1) -> str:
    if not path:
        return '<span class="quiet">(no module)</span>'
    many = f' <span class="quiet name">&times; {merges}</span>' if merges > 1 else ""
    return f"<code>{escape(path).replace('.', '.<wbr>')}</code>{many}"


def _memory(report: Report) -> str:
    memory = report.forecast["memory"]
    peak = memory["peak_bytes"] or 1
    kinds = totals(report.holders, "kind", "bytes")
    legend = "".join(f'<li><i class="dot k-{kind}"></i>{kind}<b>{bytes_text(size)}</b></li>' for kind, size in kinds.items())
    if report.measured is not None and report.measured.memory:
        most = max(size for _, size in report.measured.memory)
        legend += f'<li><i class="line"></i>measured, at most<b>{bytes_text(most)}</b></li>'
    rows = []
    for holder in report.holders[:MOST_HOLDERS]:
        bar = meter(holder["bytes"] / peak, f"k-{holder['kind']}")
        rows.append([dot(f"k-{holder['kind']}", holder["kind"]), _module_name(holder["module"]),
                     f"{holder['storages']:,}", bytes_text(holder["bytes"]) + bar, percent_text(holder["bytes"] / peak)])  # fmt: skip
    rest = sum(holder["bytes"] for holder in report.holders[MOST_HOLDERS:])
    if rest:
        rows.append(['<span class="quiet">others</span>', "", "", bytes_text(rest), percent_text(rest / peak)])
    top = memory["top_ops"][0] if memory["top_ops"] else None
    where = ""
    if top is not None:
        module = f" in <code>{escape(top['module'])}</code>" if top["module"] else ""
        where = f"The peak is at <code>{escape(top['op'])}</code>{module}, {escape(top['phase'])}. "
    inputs = f"Inputs of {bytes_text(memory['input_bytes'])} belong to the caller."
    canvas = f'<canvas id="memory" tabindex="0" aria-label="Memory over time"></canvas><ul class="kinds">{legend}</ul>'
    peak_table = f"<h3>What fills the peak</h3>{table(['kind', 'module', 'storages', 'bytes', ''], rows, 'peak', 2)}"
    return section("Memory", where + inputs, canvas + _arena(report) + peak_table)


def _arena(report: Report) -> str:
    """The picture of planned addresses; nothing where there is no arena."""
    arena = report.details["arena"]
    if arena is None:
        return ""
    top, live = bytes_text(arena["top_bytes"]), bytes_text(arena["live_bytes"])
    lost = percent_text(arena["fragmentation"])
    words = f"All that comes and goes in a step has a planned place in one arena of {top}: at most {live} live at once"
    words += f", {lost} is lost between."
    if arena["left_out"]:
        words += f" {arena['left_out']:,} small storages are not drawn."
    return (
        f'<h3>Arena</h3><p class="quiet">{words}</p>'
        '<canvas id="arena" tabindex="0" aria-label="Planned addresses over time"></canvas>'
    )


def _path(report: Report) -> str:
    step = report.forecast["step_us"] or 1
    lanes = totals(report.blame, "lane", "us")
    stripe = "".join(
        f'<span class="c-{escape(lane.replace(" ", "-"))}" style="width:{100 * us / step:.3f}%" '
        f'title="{escape(lane)}: {time_text(us)}"></span>'
        for lane, us in lanes.items()
    )
    named = "".join(
        f'<li><i class="dot c-{escape(lane.replace(" ", "-"))}"></i>{escape(lane)}<b>{percent_text(us / step)}</b></li>'
        for lane, us in lanes.items()
    )
    rows = []
    for row in report.blame[:MOST_BLAME]:
        slowed = time_text(row["slowed_us"]) if row["slowed_us"] > 0 else ""
        lane = dot("c-" + row["lane"].replace(" ", "-"), row["lane"])
        name, share = _module_name(row["module"], row["merges"]), percent_text(row["us"] / step)
        rows.append([name, lane, time_text(row["us"]), share, slowed])
    rest = sum(row["us"] for row in report.blame[MOST_BLAME:])
    if rest:
        others = f'<span class="quiet">{len(report.blame) - MOST_BLAME} others</span>'
        rows.append([others, "", time_text(rest), percent_text(rest / step), ""])
    body = table(["module", "lane", "time", "of the step", "by sharing"], rows, "path", 2)
    note = "The chain of ops and transfers that makes the step as long as it is."
    return section("Critical path", note, f'<div class="stripe">{stripe}</div><ul class="kinds">{named}</ul>{body}')


def _bounds(report: Report) -> str:
    step = report.forecast["step_us"] or 1
    rows = []
    for bound in report.forecast["bounds"]:
        share, us = bound["us"] / step, time_text(bound["us"])
        if bound["us"] > 0:
            rows.append([escape(bound["name"]), us + meter(share, "base"), percent_text(share)])
    note = "No order of these ops on these machines is faster than the largest."
    return section("Lower bounds", note, table(["bound", "time", "of the step"], rows, "bounds"))


def _modules(report: Report) -> str:
    if not report.modules:
        return ""
    with_measured = report.measured is not None
    whole = report.modules[0].compute or 1
    head = ["module", "compute", "", "forward", "backward", "update", "waits", "transfers"]
    head += ["measured"] if with_measured else []
    open_level = _open_level(report.modules)
    rows, of_rows = [], []
    for row in report.modules:
        share = percent_text(row.compute / whole)
        rows.append([_module_cell(row), time_text(row.compute) + _split_meter(row, whole), share])
        rows[-1] += [time_text(value) if value else "" for value in (row.fwd, row.bwd, row.upd, row.wait, row.transfer)]
        rows[-1] += [time_text(row.measured) if row.measured else ""] if with_measured else []
        state = "" if not row.children else f' data-open="{int(row.level < open_level)}"'
        of_rows.append(f' data-level="{row.level}"{state}{" hidden" if row.level > open_level else ""}')
    note = "Time of all ops of a module and of those in it; numbered ones are one row."
    return section("Modules", note, table(head, rows, "modules", of_rows=of_rows))


def _open_level(rows: list[Row]) -> int:
    """The deepest level at which the open rows are still few."""
    level = 1
    while sum(row.level <= level + 1 for row in rows) <= OPEN_MODULES and level < max(row.level for row in rows):
        level += 1
    return level


def _module_cell(row: Row) -> str:
    name = escape(row.name) or "all"
    many = f' <span class="quiet">&times; {len(row.paths)}</span>' if len(row.paths) > 1 else ""
    button = '<button type="button" class="twist" aria-label="open or shut"></button>'
    twist = button if row.children else '<span class="twist"></span>'
    return f'<span class="tree" style="--level:{row.level}" title="{escape(row.path)}">{twist}<code>{name}</code>{many}</span>'


def _split_meter(row: Row, whole: float) -> str:
    parts = (("compute-fwd", row.fwd), ("compute-bwd", row.bwd), ("compute-upd", row.upd))
    return '<span class="meter">' + "".join(
        f'<span class="c-{name}" style="width:{100 * us / whole:.2f}%"></span>' for name, us in parts if us
    ) + "</span>"  # fmt: skip
