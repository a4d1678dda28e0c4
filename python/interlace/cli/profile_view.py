"""What `interlace profile` shows of a profile."""

from __future__ import annotations

import shlex
from typing import Any

from interlace.cli.console import out as console_out
from interlace.cli.console import print_facts, rows_table, seconds
from interlace.config import format_bytes
from interlace.cost.measurements import Profile


def facts_of(found: Profile, text: str | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {"fingerprint": found.fingerprint, "ops": len(found.ops)}
    facts["estimated_ops"] = sum(not op.measured for op in found.ops.values())
    if text is not None:
        from interlace import _runtime

        plan = _runtime.profile_plan(text)
        keys = {f["key"] for f in plan.values() if f["key"]}
        facts["program_ops"], facts["program_ops_known"] = len(keys), len(keys & found.ops.keys())
    facts["collectives"] = {f"{k} {r} ranks {b} bytes": t.us for (k, r, b), t in sorted(found.collectives.items())}
    facts["copies"] = {f"{k} {b} bytes": us for (k, b), us in sorted(found.copies.items())}
    facts["compute_slowdown_beside_transfer"] = found.slowdown
    facts["together"] = {f"{a} {b}": [p.first, p.second, p.samples] for (a, b), p in sorted(found.together.items())}
    facts["issue_us"] = found.issue_us
    return facts


def print_summary(facts: dict[str, Any], export: str | None) -> None:
    rows = {"machine": facts["fingerprint"]}
    rows["measured now"] = f"{facts['measured_now']} entries in {seconds(facts['seconds'])}"
    rows["program"] = f"{facts['program_ops_known']} of {facts['program_ops']} kinds of op known"
    if facts["estimated_ops"]:
        rows["estimated"] = f"{facts['estimated_ops']} ops were too large to run"
    rows["kept in"] = facts["store"]
    if export:
        rows["written to"] = export
    print_facts(rows)
    if export:
        cluster = "local-N"
        console_out().print(f"next: interlace simulate PROGRAM --cluster {cluster} --profile {shlex.quote(export)}")


def print_profile(found: Profile, top: int) -> None:
    print_facts({"machine": found.fingerprint})
    console = console_out()
    longest = sorted(found.ops.items(), key=lambda item: -item[1].us)[:top]
    rows = [[key, f"{op.us:,.1f}", format_bytes(op.bytes), format_bytes(op.transient)] for key, op in longest]
    console.print()
    console.print(rows_table("", ["op", "us", "results", "inside"], rows))
    if len(found.ops) > len(longest):
        console.print(f"and {len(found.ops) - len(longest)} shorter ops (--top)")
    if found.collectives:
        rows = []
        for (kind, ranks, size), taken in sorted(found.collectives.items()):
            rate = f"{size / taken.us / 1e3:.3f}" if taken.us > 0 else ""
            rows.append([kind, str(ranks), format_bytes(size), f"{taken.us:,.0f}", rate, f"{taken.core_us:,.0f}"])
        console.print()
        console.print(rows_table("", ["collective", "ranks", "bytes", "us", "GB/s", "core us"], rows))
    if found.copies:
        rows = [[k, format_bytes(b), f"{us:,.0f}", f"{b / us / 1e3:.2f}"] for (k, b), us in sorted(found.copies.items())]
        console.print()
        console.print(rows_table("", ["copy", "bytes", "us", "GB/s"], rows))
    rows = []
    if found.slowdown is not None:
        rows.append(["compute", f"{found.slowdown:.2f}", "collective", "", "sharing of cores not counted"])
    for (first, second), pair in sorted(found.together.items()):
        note = "" if pair.samples else "not measured: the disk was too slow"
        rows.append([first, f"{pair.first:.2f}", second, f"{pair.second:.2f}", note])
    if rows:
        console.print()
        console.print(rows_table("", ["together", "times longer", "with", "times longer", ""], rows, left=(0, 2, 4)))
