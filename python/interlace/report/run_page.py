"""The page of a run that was trained: its curves, what the search changed on the way, a traced step, its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from interlace.report import html
from interlace.report.html import document, header, section, table, tile, tiles_section
from interlace.report.run_log import RunLog, curve_data
from interlace.report.timeline import Timeline, columns
from interlace.report.units import bytes_text, count_text, time_text


@dataclass
class Run:
    name: str
    log: RunLog | None = None
    trace: Timeline | None = None
    settings: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"run": self.name, "settings": self.settings}
        if self.log is not None:
            out |= self.log.summary()
        if self.trace is not None:
            out["traced_step_us"] = self.trace.span_ns / 1e3
        return out


def render_run(run: Run) -> str:
    """The whole file."""
    series = curve_data([("", run.log)]) if run.log is not None else []
    data: dict[str, Any] = {"curves": series, "predicted": columns(run.trace) if run.trace is not None else None,
                            "measured": None, "titles": ["Measured", ""]}  # fmt: skip
    notes = [f"{run.log.steps:,} steps"] if run.log is not None else ["no log of its steps: interlace train --log FILE writes one"]
    if run.log is None and "ranks" in run.settings:
        notes.append(f"its program: interlace report {run.name}/program.il --cluster local-{run.settings['ranks']}")
    sections = [header(run.name, notes, _lost(run)), _tiles(run), curves_section(series), _plans(run)]
    if run.trace is not None:
        sections.append(html.timeline(f"A step that was traced, rank {run.trace.rank}", "lane", "an op to fill the view with it."))
    sections.append(html.words_section("Settings", run.settings) if run.settings else "")
    return document(f"Run: {run.name}", [each for each in sections if each], data)


def curves_section(series: list[dict[str, Any]]) -> str:
    if not series:
        return ""
    return section("Over the steps", "As the log has them; the arrow keys move from step to step.", html.curves(series))


def _lost(run: Run) -> str:
    if run.log is None or not run.log.lost:
        return ""
    step, name = run.log.lost[0]
    more = f" and {len(run.log.lost) - 1} more" if len(run.log.lost) > 1 else ""
    return f'<p class="warning">Not a finite number: {escape(name)} of step {step}{more}</p>'


def _tiles(run: Run) -> str:
    tiles = []
    if run.log is not None:
        found = run.log.summary()
        if found["loss"] is not None:
            first = next(iter(run.log.series["loss"].values()))
            tiles.append(tile("Loss", f"{found['loss']:.4g}", f"{first:.4g} at the first step"))
        if found["eval_loss"] is not None:
            tiles.append(tile("Evaluation loss", f"{found['eval_loss']:.4g}", f"best {min(run.log.series['eval_loss'].values()):.4g}"))
        if found["seconds"] is not None:
            tiles.append(tile("Step time", time_text(found["seconds"] * 1e6), "median after the first steps"))
        if found["tokens_per_second"] is not None:
            tiles.append(tile("Tokens per second", count_text(found["tokens_per_second"]), "median after the first steps"))
        if found["memory_bytes"] is not None:
            tiles.append(tile("Peak memory", bytes_text(found["memory_bytes"]), "of rank 0"))
        if regions := run.log.regions:
            number = {name: regions.get(name, 0) for name in ("compiled", "regions", "calls", "kernels", "from_step")}
            note = "{calls} calls for {kernels} kernels, from step {from_step} on" if number["compiled"] else "their bodies run op by op"
            tiles.append(tile("Regions compiled", "{compiled} of {regions}".format(**number), note.format(**number)))
    return tiles_section(tiles) if tiles else ""


def _plans(run: Run) -> str:
    if run.log is None or not run.log.plans:
        return ""
    rows = [[str(step), escape(said)] for step, said in run.log.plans]
    return section("What the search changed", "", table(["step", "what"], rows, "plans", 2))
