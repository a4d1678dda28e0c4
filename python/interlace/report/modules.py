"""Time by module: a tree of module paths in which numbered siblings (layers.0, layers.1, ...) are one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from interlace.report.timeline import Timeline

PARTS = ("fwd", "bwd", "upd")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def merged(path: str) -> str:
    """ "model.layers.3.mlp" as "model.layers.*.mlp"."""
    return _NUMBER.sub("*", path)


@dataclass
class Row:
    """Times in us. A row of a module holds those of the modules in it."""

    path: str
    level: int = 0
    fwd: float = 0.0
    bwd: float = 0.0
    upd: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    measured: float = 0.0
    children: int = 0
    paths: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The last word of the path; numbered modules keep the word before their number."""
        return ".".join(self.path.split(".")[-2 if self.path.endswith(".*") else -1 :])

    @property
    def compute(self) -> float:
        return self.fwd + self.bwd + self.upd

    def facts(self) -> dict[str, Any]:
        return {"module": self.path, "merges": len(self.paths), "forward_us": self.fwd, "backward_us": self.bwd,
                "update_us": self.upd, "wait_us": self.wait, "transfer_us": self.transfer,
                "measured_compute_us": self.measured}  # fmt: skip


def breakdown(predicted: Timeline, measured: Timeline | None) -> list[Row]:
    """Rows in order of display: each module, then those in it by falling time."""
    rows: dict[str, Row] = {}
    for path, what, us in _times(predicted):
        _add(rows, path, what, us)
    if measured is not None:
        for path, what, us in _times(measured):
            if what in PARTS:
                _add(rows, path, "measured", us)
    children: dict[str, list[Row]] = {}
    for row in rows.values():
        if row.path:
            children.setdefault(_parent(row.path), []).append(row)
    ordered: list[Row] = []

    def visit(row: Row, level: int) -> None:
        below = children.get(row.path, [])
        if len(below) == 1 and below[0].path == f"{row.path}.*" and below[0].compute == row.compute:
            visit(below[0], level)  # "layers" is no more than its "layers.*"
            return
        ordered.append(row)
        row.level, row.children = level, len(below)
        for child in sorted(below, key=lambda r: (-(r.compute + r.measured), -r.transfer, r.path)):
            visit(child, level + 1)

    if "" in rows:
        visit(rows[""], 0)
    return ordered


def _times(timeline: Timeline) -> Iterable[tuple[str, str, float]]:
    for lane, events in timeline.lanes.items():
        if lane == "host":
            continue
        for event in events:
            what = "transfer" if lane != "compute" else "wait" if event.wait else event.part
            yield event.module, what if what in (*PARTS, "wait", "transfer") else "fwd", event.duration_ns / 1e3


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _add(rows: dict[str, Row], path: str, what: str, us: float) -> None:
    own = path
    while True:
        key = merged(own)
        row = rows.get(key)
        if row is None:
            row = rows[key] = Row(key)
        row.paths.add(own)
        setattr(row, what, getattr(row, what) + us)
        if not own:
            return
        own = _parent(own)


def merge_blame(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blame of the critical path with numbered modules together, largest first; times in us."""
    merges = Counter((merged(module), lane) for module, lane in {(entry["module"], entry["lane"]) for entry in entries})
    rows = _summed(entries, ("module", "lane"), ("us", "slowed_us"))
    return [{**row, "merges": merges[row["module"], row["lane"]]} for row in rows]


def merge_holders(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What fills the peak, by kind and merged module, largest first."""
    return _summed(entries, ("kind", "module"), ("bytes", "storages"))


def _summed(entries: list[dict[str, Any]], names: tuple[str, str], numbers: tuple[str, str]) -> list[dict[str, Any]]:
    """The numbers of entries that have the same names when numbered modules are one; by the first number, largest first."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in entries:
        key = tuple(merged(entry[name]) if name == "module" else entry[name] for name in names)
        row = rows.setdefault(key, dict(zip(names, key, strict=True)) | dict.fromkeys(numbers, 0))
        for number in numbers:
            row[number] += entry[number]
    return sorted(rows.values(), key=lambda row: (-row[numbers[0]], *(row[name] for name in names)))


def totals(rows: list[dict[str, Any]], by: str, of: str) -> dict[str, Any]:
    """Sums of a number by a name, largest first."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row[by]] += row[of]
    return dict(found.most_common())
