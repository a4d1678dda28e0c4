"""The words that pages explain on hover and by keyboard: those of docs/glossary.md, which lies beside the page's style as glossary.md."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib import resources

_ROW = re.compile(r"^\| (?!word \|)([^|]+) \| ([^|]+) \| ([^|]+) \|$", flags=re.M)
_HEADING = re.compile(r"(<(h2|h3|th)\b[^>]*>)([^<>&]+)(</\2>)")


@cache
def words() -> dict[str, tuple[str, str]]:
    """By word: what the field calls it, and what it means here. Words of code and those with an addition in () stay out."""
    text = (resources.files("interlace.report") / "assets" / "glossary.md").read_text(encoding="utf-8")
    found: dict[str, tuple[str, str]] = {}
    for names, field, here in _ROW.findall(text):
        for name in names.split(", "):
            if "`" not in name and "(" not in name:
                found.setdefault(name.strip(), (field.replace("`", "").strip(), here.replace("`", "").strip()))
    return found


@cache
def _pattern() -> re.Pattern[str]:
    long = sorted((word for word in words() if len(word) > 2), key=lambda word: -len(word))
    return re.compile(rf"\b({'|'.join(map(re.escape, long))})(?:s|d|ed)?\b", flags=re.I)


def explained(page: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """The page with the first word of each heading and column that the glossary has marked, each word once, and those words."""
    used: dict[str, tuple[str, str]] = {}
    lower = {word.lower(): word for word in words()}

    def mark(match: re.Match[str]) -> str:
        before, _, text, after = match.groups()
        whole = words().get(text)
        found = None if whole else _pattern().search(text)
        word = text if whole else lower[found[1].lower()] if found else ""
        if not word or word in used:
            return match[0]
        used[word] = words()[word]
        at, end = found.span() if found else (0, len(text))
        marked = f'<dfn tabindex="0" data-term="{escape(word)}" aria-describedby="tip">{text[at:end]}</dfn>'
        return f"{before}{text[:at]}{marked}{text[end:]}{after}"

    return _HEADING.sub(mark, page), used
