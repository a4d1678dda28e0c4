"""What pages are made of: the file around them, tiles, tables, the timeline's frame."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

from interlace.report.glossary import explained
from interlace.report.units import percent_text

SAME = 0.0005  # a change that is not worth a colour
SCRIPTS = ("page.js", "memory.js", "timeline.js", "curves.js", "trace.js")


def document(title: str, sections: list[str], data: dict[str, Any]) -> str:
    """The whole file; its one address is that of Perfetto, for whoever follows the link. `data` is for the scripts."""
    assets = resources.files("interlace.report") / "assets"
    style, *scripts = ((assets / name).read_text(encoding="utf-8") for name in ("report.css", *SCRIPTS))
    body, glossary = explained("\n".join(sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}"
        + '\n</main>\n<div id="tip" role="status" hidden></div>\n'
        + f'<script type="application/json" id="data">{script_json(data | {"glossary": glossary})}</script>\n'
        + f"<script>\n{''.join(scripts)}</script>\n</body>\n</html>\n"
    )


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever its strings are."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def header(title: str, notes: list[str], warning: str = "") -> str:
    """`warning` is HTML."""
    return (
        f"<header><div><h1>{escape(title)}</h1><p>{escape(' · '.join(notes))}</p>{warning}</div>"
        '<button id="theme" type="button" title="Light or dark">◐</button></header>'
    )


def hint_to_measure(commands: list[str]) -> str:
    """Below the title of a page whose times are estimates: what to type for measured ones."""
    listed = "<br>".join(f"<code>{escape(command)}</code>" for command in commands)
    return f'<p class="estimated">The times are estimates. Measured on the machine that they are for:<br>{listed}</p>'


def tile(label: str, value: str, note: str = "", tone: str = "") -> str:
    return f'<div class="tile {tone}"><h2>{escape(label)}</h2><p class="value">{escape(value)}</p><p>{escape(note)}</p></div>'


def section(title: str, note: str, body: str) -> str:
    """`note` and `body` are HTML."""
    said = f'<p class="quiet">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{said}{body}</section>"


def words_section(title: str, words: dict[str, str]) -> str:
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in words.items())
    return section(title, "", f"<dl>{listed}</dl>")


def tiles_section(tiles: list[str]) -> str:
    return f'<section class="tiles" aria-label="Forecast">{"".join(tiles)}</section>'


def timeline(what: str, lanes: str, hint: str, presets: tuple[str, ...] = ()) -> str:
    """The frame that the script draws in. `hint`: what a double click does. `presets`: names in the data's "presets"."""
    more = "".join(f'<button type="button" data-zoom="{escape(name)}" title="Show only this">{escape(name)}</button>' for name in presets)
    return (
        f'<section><div class="bar"><h2>Timeline</h2><p class="quiet">{what}</p><span class="grow"></span>'
        f'<div class="buttons">{more}<button type="button" data-zoom="in" title="Zoom in (+)">+</button>'
        '<button type="button" data-zoom="out" title="Zoom out (-)">&minus;</button>'
        '<button type="button" data-zoom="all" title="All (0)">All</button></div></div>'
        f'<canvas id="timeline" tabindex="0" role="application" aria-label="Timeline by {lanes}"></canvas><p class="legend" id="lanes"></p>'
        f'<p class="quiet hint">Drag to move, pinch or Ctrl + wheel to zoom, double-click {hint} With the keys: arrows move, + and - zoom, '
        "up and down choose a lane, Shift + arrows an event of it, Enter fills the view.</p>"
        '<p class="buttons"><button type="button" id="perfetto">Open in Perfetto</button>'
        '<button type="button" id="save-trace">Save as a Chrome trace</button><span class="quiet" id="said-trace" role="status"></span></p>'
        "</section>"
    )


def table(head: list[str], rows: list[list[str]], name: str, left: int = 1, of_rows: list[str] | None = None) -> str:
    """Cells are HTML; the first `left` columns are text, the others numbers; `of_rows`: attributes. Where it is wider than the page it
    scrolls."""

    def line(tag: str, cells: list[str], attributes: str = "") -> str:
        marked = (f'<{tag} class="n">{cell}</{tag}>' if i >= left else f"<{tag}>{cell}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr{attributes}>{''.join(marked)}</tr>"

    body = "".join(line("td", row, attributes) for row, attributes in zip(rows, of_rows or [""] * len(rows), strict=True))
    return scrolled(f'<table id="{name}"><thead>{line("th", head)}</thead><tbody>{body}</tbody></table>')


def scrolled(inner: str) -> str:
    """What may be wider than the page: the edge shows that there is more, and the arrow keys reach it."""
    return f'<div class="wide"><div class="scroll">{inner}</div></div>'


def curves(series: list[dict[str, Any]]) -> str:
    """A canvas for each of the data's "curves", {name, title, runs}."""
    drawn = []
    for number, each in enumerate(series):
        of = "; ".join(
            f"{run['label'] + ': ' if run['label'] else ''}{run['values'][0]:.4g} at step {run['steps'][0]}, "
            f"{run['values'][-1]:.4g} at step {run['steps'][-1]}"
            for run in each["runs"]
        )
        label = escape(f"{each['title']} by step: {of}")
        drawn.append(
            f'<div><h3>{escape(each["title"])}</h3>'
            f'<canvas class="curve" data-curve="{number}" tabindex="0" role="img" aria-label="{label}"></canvas></div>'
        )
    return f'<div class="curves">{"".join(drawn)}</div>'


def meter(share: float, tone: str) -> str:
    return f'<span class="meter"><span class="{tone}" style="width:{100 * min(max(share, 0), 1):.2f}%"></span></span>'


def tone(by: float, more_is_better: bool = False) -> str:
    """The class of a relative change."""
    return "same" if abs(by) < SAME else "better" if (by > 0) == more_is_better else "worse"


def toned(by: float, more_is_better: bool = False) -> str:
    return f'<span class="{tone(by, more_is_better)}">{percent_text(by, signed=True)}</span>'


def dot(color: str, text: str) -> str:
    return f'<span class="name"><i class="dot {escape(color)}"></i>{escape(text)}</span>'
