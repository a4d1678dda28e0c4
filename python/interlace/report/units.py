"""Numbers as people read them, never broken between number and unit; the page's script has the same for time and bytes."""

from __future__ import annotations

SPACE = "\N{NO-BREAK SPACE}"


def time_text(us: float) -> str:
    """ "12.3 ms", three digits."""
    if us == 0:
        return "0"
    for limit, size, unit in ((1e6, 1e6, "s"), (1e3, 1e3, "ms"), (0.0, 1.0, "µs")):
        if abs(us) >= limit:
            return f"{_digits(us / size)}{SPACE}{unit}"
    return f"{us}{SPACE}µs"


def bytes_text(count: float) -> str:
    """ "1.50 GiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(count) >= 1 << power:
            return f"{_digits(count / (1 << power))}{SPACE}{unit}"
    return f"{count:.0f}{SPACE}B"


def count_text(value: float) -> str:
    """ "12,300", "1.23 M"."""
    if abs(value) >= 1e6:
        return f"{_digits(value / 1e6)}{SPACE}M"
    return f"{value:,.0f}" if abs(value) >= 100 else _digits(value)


def percent_text(share: float, signed: bool = False) -> str:
    value = 100 * share
    digits = 1 if abs(value) < 100 else 0
    return f"{value:{'+' if signed else ''}.{digits}f}{SPACE}%".replace("-", "\N{MINUS SIGN}")


def counted(count: int, what: str) -> str:
    """ "1 stage", "2 stages"."""
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"
