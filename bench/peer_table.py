"""The arithmetic of the peers' table: bytes each kind of method must move, the bound of a step, and how the rows are printed.

With n ranks, P bytes of parameters (gradients are as many) and `a` micro-batches a step, every rank must send

    sharded     parameters only while used    ((2a gathers) + (a or 1 reduces)) * P (n-1)/n    each micro-batch gathers twice
    gathered    parameters whole for a step   (1 gather + 1 reduce) * P (n-1)/n
    replicated  parameters whole always       2 * P (n-1)/n                                    an all-reduce is a reduce and a gather
    hybrid      shards within a host          2 * P (n-1)/n   of n hosts, all ranks of a host together; within it nothing counts

A gather and a reduce send P (n-1)/n each (ring or direct, the least there is), so with one micro-batch sharded training moves three
times that and the others twice. Wire time is these bytes over the measured duplex goodput; the bound of a step is the larger of
wire time and the same round's compute alone. No step can be shorter; a perfect overlap of both would reach it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from common import Times, quartiles, ratios

KINDS = ("sharded", "gathered", "replicated", "hybrid")
ACCUMULATE_MODES = ("reduce_last", "reduce_each")
LOSS_TOLERANCE = (
    1e-4  # relative; equal within 1e-6 after 16 steps here, while without averaging the second step is 1e-3 off
)


def wire_bytes(kind: str, parameter_bytes: int, ranks: int, accumulation: int = 1, mode: str = "reduce_last") -> float:
    """Bytes that a rank (hybrid: a host) must send in a step. Errors: an unknown kind or mode, less than one rank or micro-batch."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if mode not in ACCUMULATE_MODES:
        raise ValueError(f"mode must be one of {', '.join(ACCUMULATE_MODES)}, not {mode!r}")
    if ranks < 1 or accumulation < 1:
        raise ValueError(f"ranks and accumulation must be at least 1, not {ranks} and {accumulation}")
    once = parameter_bytes * (ranks - 1) / ranks
    if kind == "sharded":
        return (2 * accumulation + (accumulation if mode == "reduce_each" else 1)) * once
    return 2 * once


@dataclasses.dataclass
class Row:
    """What was measured of one method; `problem` says why there is nothing."""

    name: str
    kind: str
    title: str
    ours: bool = False
    seconds: list[float] = dataclasses.field(default_factory=list)  # of a step, one per round, the slowest rank's
    losses: list[float] = dataclasses.field(
        default_factory=list
    )  # of every step so far, mean over ranks and micro-batches
    sent_bytes: list[float] = dataclasses.field(default_factory=list)  # by a rank in a step, with protocol headers
    problem: str | None = None


def loss_distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the steps that both made; infinite when one is not a number or none was made."""
    pairs = list(zip(losses, reference, strict=False))
    if not pairs:
        return float("inf")
    far = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max(x if x == x else float("inf") for x in far)


def disagreeing(rows: Sequence[Row], tolerance: float = LOSS_TOLERANCE) -> dict[str, float]:
    """The methods whose losses are further than the tolerance from the median method's at some step, with their distance."""
    measured = [row for row in rows if row.losses]
    if not measured:
        return {}
    steps = min(len(row.losses) for row in measured)
    middle = []
    for step in range(steps):
        values = sorted(row.losses[step] for row in measured)
        middle.append(values[(len(values) - 1) // 2])
    distances = {row.name: loss_distance(row.losses, middle) for row in measured}
    return {name: distance for name, distance in distances.items() if not distance <= tolerance}


def best_of_kind(rows: Sequence[Row], row: Row) -> Row | None:
    """The fastest peer that holds as much of the model in a rank; None when none was measured."""
    peers = [r for r in rows if r.kind == row.kind and not r.ours and r.seconds]
    return min(peers, key=lambda r: quartiles(r.seconds)[1], default=None)


def verdicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For every method of ours: the fastest peer of its kind and the ratio to it, paired within rounds."""
    out: list[dict[str, Any]] = []
    for row in rows:
        if not row.ours or not row.seconds:
            continue
        best = best_of_kind(rows, row)
        if best is None:
            continue
        times: Times = {"ours": row.seconds, "peer": best.seconds}
        low, middle, high = quartiles(ratios(times, "ours", "peer"))
        out.append({"ours": row.name, "peer": best.name, "ratio": middle, "ratio_q1": low, "ratio_q3": high})
    return out


def figures(row: Row, facts: Mapping[str, Any], baseline: Row | None) -> dict[str, Any]:
    """One row as plain data. `facts`: compute_s (of every round), goodput (bytes/s), parameter_bytes, ranks, accumulation, mode."""
    if not row.seconds:
        return {"name": row.name, "kind": row.kind, "problem": row.problem}
    low, middle, high = quartiles(row.seconds)
    must = wire_bytes(row.kind, facts["parameter_bytes"], facts["ranks"], facts["accumulation"], facts["mode"])
    if row.sent_bytes and quartiles(row.sent_bytes)[1] < 0.97 * must:
        must = quartiles(row.sent_bytes)[
            1
        ]  # it keeps some parameters gathered, so its kind's traffic is no bound for it
    wire_s = must / facts["goodput"]
    bounds = [max(wire_s, compute_s) for compute_s in facts["compute_s"]]
    over = [seconds / bound for seconds, bound in zip(row.seconds, bounds, strict=True)]
    out: dict[str, Any] = {
        "name": row.name, "kind": row.kind, "median_ms": middle * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3,
        "must_send_bytes": must, "sent_bytes": quartiles(row.sent_bytes)[1] if row.sent_bytes else None, "wire_ms": wire_s * 1e3,
        "bound_ms": quartiles(bounds)[1] * 1e3, "over_bound": quartiles(over)[1], "seconds": row.seconds,
        "last_loss": row.losses[-1], "steps": len(row.losses), "problem": row.problem,
    }  # fmt: skip
    if baseline is not None and baseline.seconds and len(baseline.seconds) == len(row.seconds):
        r_low, ratio, r_high = quartiles(ratios({"row": row.seconds, "base": baseline.seconds}, "row", "base"))
        out |= {"ratio": ratio, "ratio_q1": r_low, "ratio_q3": r_high}
    return out


def lines(rows: Sequence[Row], facts: Mapping[str, Any], baseline_name: str, markdown: bool = False) -> list[str]:
    """The table, aligned for a terminal or as Markdown."""
    baseline = next((r for r in rows if r.name == baseline_name and r.seconds), None)
    header = [
        "method", "step ms", "quartiles", f"x {baseline_name}", "quartiles", "wire ms", "must / sent MB", "x bound", "last loss",
    ]  # fmt: skip
    table = [header]
    notes = []
    early = []
    for row in rows:
        f = figures(row, facts, baseline)
        if f.get("over_bound", 1.0) < 1:
            early.append(row.title)
        if row.problem:
            notes.append(f"{row.title}: {row.problem}")
        if not row.seconds:
            table.append([row.title, "-", "", "", "", "", "", "", ""])
            continue
        sent = "-" if f["sent_bytes"] is None else f"{f['sent_bytes'] / 1e6:.1f}"
        table.append(
            [
                row.title,
                f"{f['median_ms']:.0f}",
                f"[{f['q1_ms']:.0f}, {f['q3_ms']:.0f}]",
                f"{f['ratio']:.3f}" if "ratio" in f else "-",
                f"[{f['ratio_q1']:.3f}, {f['ratio_q3']:.3f}]" if "ratio" in f else "",
                f"{f['wire_ms']:.0f}",
                f"{f['must_send_bytes'] / 1e6:.1f} / {sent}",
                f"{f['over_bound']:.2f}",
                f"{f['last_loss']:.4f}",
            ]
        )
    if early:
        notes.append(
            f"NOISE: {', '.join(early)} came under the bound, which cannot be: something else used the cores while compute alone "
            "was measured. Measure again on an idle machine, with more rounds"
        )
    return _markdown(table) + notes if markdown else _aligned(table) + notes


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _markdown(table: list[list[str]]) -> list[str]:
    text = ["| " + " | ".join(row) + " |" for row in table]
    return [text[0], "|" + "---|" * len(table[0]), *text[1:], ""]
