"""What a search decided for the program, from its meta lines: the chosen schedule among all that were tried, memory against time.

The words are those of `interlace explain`, which reads the same lines. A row is (name, microseconds, bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from interlace.report.html import scrolled, section, table, toned
from interlace.report.units import bytes_text, percent_text, time_text

WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 640, 240, 70, 34, 14  # of the picture, pixels

Row = tuple[str, float, float]


@dataclass
class Decisions:
    chosen: Row
    front: list[Row]
    heuristics: list[Row]
    without: list[Row]
    limit: float | None
    words: str  # the part of `explain` that lists what was decided

    def summary(self) -> dict[str, Any]:
        def rows(listed: list[Row]) -> list[dict[str, Any]]:
            return [{"name": name, "step_us": us, "bytes": size} for name, us, size in listed]

        return {"chosen": rows([self.chosen])[0], "front": rows(self.front), "heuristics": rows(self.heuristics),
                "without": rows(self.without), "limit_bytes": self.limit}  # fmt: skip


def decisions_of(program: Any) -> Decisions | None:
    """None where no search made the program, or its lines cannot be read."""
    meta = program.meta()
    try:
        chosen = _rows(meta["search.chosen"])[0]
        front, heuristics, without = (_rows(meta.get(f"search.{name}", "")) for name in ("front", "heuristics", "without"))
        limit = float(meta["search.limit"]) if "search.limit" in meta else None
    except (KeyError, ValueError, IndexError):
        return None
    _, begin, rest = program.explain().partition("decided (")
    words = (begin + rest).partition("\n\n")[0] if begin else ""
    return Decisions(chosen, front, heuristics, without, limit, words)


def _rows(text: str) -> list[Row]:
    rows = []
    for line in text.replace("\\n", "\n").splitlines():
        name, us, size, *_ = line.split("|")
        rows.append((name, float(us), float(size)))
    return rows


def render_decisions(found: Decisions) -> str:
    words = "".join(f"<li>{escape(line.strip())}</li>" for line in found.words.splitlines()[1:])
    note = f"{escape(found.chosen[0])}: {time_text(found.chosen[1])}, {bytes_text(found.chosen[2])}, as the search simulated it."
    picture = f'<div>{scrolled(_picture(found))}<ul class="quiet">{words}</ul></div>'
    body = f'<div class="columns">{picture}<div>{_worth(found)}{_tried(found)}</div></div>'
    return section("What was decided, and what else was tried", note, body)


def _compared(row: Row, base: Row) -> list[str]:
    return [escape(row[0]), time_text(row[1]), toned(row[1] / base[1] - 1 if base[1] else 0.0), bytes_text(row[2])]


def _worth(found: Decisions) -> str:
    rows = [_compared(row, found.chosen) for row in found.without]
    return table(["Without this decision", "step", "change", "memory"], rows, "worth")


def _tried(found: Decisions) -> str:
    rows = []
    for row in sorted(found.heuristics, key=lambda row: row[1]):
        cells = _compared(row, found.chosen)
        if found.limit is not None and row[2] > found.limit:
            cells[0] += f"<small>does not fit: {percent_text(row[2] / found.limit - 1)} above the limit</small>"
        rows.append(cells)
    return table(["Other schedules", "step", "change", "memory"], rows, "tried")


def _picture(found: Decisions) -> str:
    """Memory (across) against step time (up): the front as a line, what else was tried as rings, the limit as a dashed line."""
    points = [found.chosen, *found.front, *found.heuristics]
    sizes = [size for _, _, size in points]
    limit = found.limit if found.limit is not None and found.limit < 2 * max(sizes) else None  # far away it would squeeze the points
    sizes += [limit] if limit is not None else []
    times = [us for _, us, _ in points]
    least, most = min(sizes), max(max(sizes), min(sizes) * 1.001)
    fast, slow = min(times), max(max(times), min(times) * 1.001)

    def x(size: float) -> float:
        return LEFT + EDGE + (WIDTH - LEFT - 2 * EDGE) * (size - least) / (most - least)

    def y(us: float) -> float:
        return HEIGHT - BOTTOM - EDGE - (HEIGHT - BOTTOM - 2 * EDGE) * (us - fast) / (slow - fast)

    def ring(row: Row, style: str, radius: float) -> str:
        title = f"{row[0]}: {time_text(row[1])}, {bytes_text(row[2])}"
        return f'<circle cx="{x(row[2]):.1f}" cy="{y(row[1]):.1f}" r="{radius}" {style} tabindex="0" data-tip="{escape(title)}"/>'

    line = " ".join(f"{x(size):.1f},{y(us):.1f}" for _, us, size in sorted(found.front, key=lambda row: row[2]))
    base = HEIGHT - BOTTOM
    parts = [
        f'<svg id="front" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Memory against step time of the schedules">',
        f'<path d="M{LEFT} {EDGE}V{base}H{WIDTH}" fill="none" stroke="var(--line)"/>',
        f'<polyline points="{line}" fill="none" stroke="var(--accent)" stroke-width="1.5"/>',
    ]
    if limit is not None:
        at = x(limit)
        parts.append(f'<path d="M{at:.1f} {EDGE}V{base}" stroke="var(--bad)" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{at - 4:.1f}" y="{EDGE + 10}" text-anchor="end" fill="var(--bad)">limit</text>')
    parts += [ring(row, 'fill="none" stroke="var(--quiet)"', 4) for row in found.heuristics]
    parts += [ring(row, 'fill="var(--accent)"', 2.5) for row in found.front]
    parts.append(ring(found.chosen, 'fill="var(--good)" stroke="var(--card)"', 6))
    parts += [
        f'<text x="{LEFT - 8}" y="{y(slow) + 4:.1f}" text-anchor="end">{escape(time_text(slow))}</text>',
        f'<text x="{LEFT - 8}" y="{y(fast) + 4:.1f}" text-anchor="end">{escape(time_text(fast))}</text>',
        f'<text x="{x(least):.1f}" y="{HEIGHT - 12}">{escape(bytes_text(least))}</text>',
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 12}" text-anchor="end">{escape(bytes_text(most))}</text>',
        "</svg>",
        '<p class="legend"><span><i class="dot c-better"></i>chosen</span><span><i class="dot c-front"></i>nothing is faster and smaller'
        '</span><span><i class="ring"></i>other schedules</span></p>',
    ]
    return "".join(parts)
