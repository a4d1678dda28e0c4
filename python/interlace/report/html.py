"""What pages are made of: the file around them, tiles, tables, the timeline's frame."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any


def document(title: str, sections: list[str], data: dict[str, Any]) -> str:
    """The whole file, without any address. `data` is for the script."""
    assets = resources.files("interlace.report") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + '\n</main>\n<div id="tip" role="status" hidden></div>\n'
        + f'<script type="application/json" id="data">{script_json(data)}</script>\n'
        + f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever its strings are."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def header(title: str, notes: list[str], warning: str = "") -> str:
    return (
        f"<header><div><h1>{escape(title)}</h1><p>{escape(' · '.join(notes))}</p>{warning}</div>"
        '<button id="theme" type="button" title="Light or dark">◐</button></header>'
    )


def tile(label: str, value: str, note: str = "", tone: str = "") -> str:
    return f'<div class="tile {tone}"><h2>{escape(label)}</h2><p class="value">{escape(value)}</p><p>{escape(note)}</p></div>'


def tiles_section(tiles: list[str]) -> str:
    return f'<section class="tiles" aria-label="Forecast">{"".join(tiles)}</section>'


def timeline(what: str, lanes: str, hint: str) -> str:
    """The frame that the script draws in. `hint`: what a double click does."""
    return (
        f'<section><div class="bar"><h2>Timeline</h2><p class="quiet">{what}</p><span class="grow"></span>'
        '<div class="buttons"><button type="button" data-zoom="in" title="Zoom in (+)">+</button>'
        '<button type="button" data-zoom="out" title="Zoom out (-)">&minus;</button>'
        '<button type="button" data-zoom="all" title="All (0)">All</button></div></div>'
        f'<canvas id="timeline" tabindex="0" aria-label="Timeline by {lanes}"></canvas><p class="legend" id="lanes"></p>'
        f'<p class="quiet hint">Drag to move, pinch or Ctrl + wheel to zoom, double-click {hint}</p></section>'
    )


def table(head: list[str], rows: list[list[str]], name: str, left: int = 1, spare: tuple[int, ...] = ()) -> str:
    """Cells are HTML; the first `left` columns are text, the others numbers; narrow pages go without the `spare` ones."""
    kinds = [" ".join(["n"] * (i >= left) + ["spare"] * (i in spare)) for i in range(len(head))]

    def line(tag: str, cells: list[str]) -> str:
        marked = (f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table id="{name}"><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'


def meter(share: float, tone: str) -> str:
    return f'<span class="meter"><span class="{tone}" style="width:{100 * min(max(share, 0), 1):.2f}%"></span></span>'


def dot(color: str, text: str) -> str:
    return f'<span class="name"><i class="dot {escape(color)}"></i>{escape(text)}</span>'
