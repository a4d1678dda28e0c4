"""What people see: progress on stderr (bars on a terminal, plain lines elsewhere), results on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from itertools import groupby
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 5.0  # between plain progress lines of long work


FILE_WIDTH = 160  # columns of tables in pipes and files


def out() -> Console:
    """Results: stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def err() -> Console:
    """Progress: stderr."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else FILE_WIDTH)


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=1, default=str))


def rows_table(title: str, columns: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> Table:
    """A table whose columns are aligned to the right, but for those in `left`."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def fitted(text: str) -> str:
    """The text for stdout: on a terminal too small for it columns move together, then lines are folded, what follows indented."""
    if not sys.stdout.isatty():
        return text
    fold, out_lines = TextWrapper(out().width, subsequent_indent="    ", break_on_hyphens=False), []
    for _, block in groupby(text.split("\n"), key=bool):
        lines = list(block)
        rows = [line for line in lines if "  " in line.strip()]
        longest = max(map(len, rows), default=0)
        gaps = [all(not row[i : i + 3].strip() for row in rows) for i in range(longest)]  # three blanks in all rows
        for line in lines:
            if line in rows and longest > fold.width:
                indent = len(line) - len(line.lstrip())
                line = "".join(c for i, c in enumerate(line) if i < indent or not gaps[i])
            out_lines += fold.wrap(line) if len(line) > fold.width else [line]
    return "\n".join(out_lines)


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values in two columns on stdout."""
    console = out()
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        fold = TextWrapper(max(console.width - width - 2, 20), break_on_hyphens=False)
        lines = fold.wrap(value) if sys.stdout.isatty() and value else [value]
        line = Text(f"{name:<{width}}", style="bold") + Text("  " + f"\n{'':{width + 2}}".join(lines), style="")
        console.print(line, soft_wrap=True)


def seconds(value: float) -> str:
    """ "0.42 s", "3.1 s", "2 min 05 s"."""
    if value < 1:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60:02d} s"


def count(value: float) -> str:
    """ "812", "5.24 M"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {unit}"
    return f"{value:,.0f}"


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process now, or its peak so far."""
    if peak:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Work:
    """Progress of a piece of work with named stages: a bar on a terminal, a line now and then elsewhere.

    with Work() as work: work.update("tokenizing", 3, 10); work.update("tracing")
    """

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.console = err()
        self.bar: Progress | None = None
        self.task: Any = None
        self.said_at = time.monotonic()

    def __enter__(self) -> Work:
        if self.console.is_terminal and not self.quiet:
            self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self.console, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, stage: str, done: int = 0, total: int | None = None) -> None:
        if self.quiet:
            return
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task(stage, total=total)
            self.bar.update(self.task, description=stage, completed=done, total=total)
        elif time.monotonic() - self.said_at >= PLAIN_EVERY_S:
            self.said_at = time.monotonic()
            self.console.print(f"{stage} {100 * done // total} %" if total else stage)
