"""Time by module: a tree of module paths in which numbered siblings (layers.0, layers.1, ...) are one row."""

from __future__ import annotations

import re
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
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    paths: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        key = (merged(entry["module"]), entry["lane"])
        row = sums.setdefault(key, {"module": key[0], "lane": key[1], "us": 0.0, "slowed_us": 0.0})
        row["us"] += entry["us"]
        row["slowed_us"] += entry["slowed_us"]
        paths.setdefault(key, set()).add(entry["module"])
    for key, row in sums.items():
        row["merges"] = len(paths[key])
    return sorted(sums.values(), key=lambda row: (-row["us"], row["module"], row["lane"]))


def merge_holders(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What fills the peak, by kind and merged module, largest first."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        key = (entry["kind"], merged(entry["module"]))
        row = sums.setdefault(key, {"kind": key[0], "module": key[1], "bytes": 0, "storages": 0})
        row["bytes"] += entry["bytes"]
        row["storages"] += entry["storages"]
    return sorted(sums.values(), key=lambda row: (-row["bytes"], row["kind"], row["module"]))
