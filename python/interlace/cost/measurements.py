"""What a profile holds, and its text form (the grammar is in src/cost/profile_table.h)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

COPIES = ("h2d", "d2h", "file_read", "file_write")
SLOWDOWN = ("slowdown", "compute beside transfer")  # where the factor of compute beside a collective is stored


@dataclasses.dataclass(frozen=True)
class OpTime:
    """One op: microseconds alone on its cores, bytes of its results, peak inside it beyond operands and results."""

    us: float
    bytes: int
    transient: int
    measured: bool = True


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """One size of a collective: microseconds in all, or 0 where other sizes must say; processor time of one rank for it; of both,
    what the rank's own thread does after the data has come (the sum of a reduction)."""

    us: float
    core_us: float = 0.0
    finish_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Together:
    """Two lanes that are busy at the same time: how many times longer each takes, and the rounds that say so."""

    first: float
    second: float
    samples: int


@dataclasses.dataclass
class Profile:
    """All measurements under one fingerprint."""

    fingerprint: str
    ops: dict[str, OpTime] = dataclasses.field(default_factory=dict)
    collectives: dict[tuple[str, str, int], CollectiveTime] = dataclasses.field(default_factory=dict)  # kind, ranks, bytes
    copies: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)  # kind, bytes
    slowdown: float | None = None  # of compute beside a collective, beyond what sharing cores explains
    together: dict[tuple[str, str], Together] = dataclasses.field(default_factory=dict)  # with the tier's copies
    issue_us: float | None = None  # of a rank's thread to start one transfer

    def add(self, kind: str, key: str, values: Mapping[str, float]) -> None:
        """Takes a stored measurement in. Error (KeyError, ValueError): values or parts of the key are missing."""
        if kind == "op":
            measured = bool(values.get("measured", 1))
            self.ops[key] = OpTime(values["us"], int(values["bytes"]), int(values["transient"]), measured)
        elif kind == "collective":
            name, ranks, size = key.split()
            self.collectives[name, ranks, int(size)] = CollectiveTime(values["us"], values["core_us"], values["finish_us"])
        elif kind == "copy":
            name, size = key.split()
            self.copies[name, int(size)] = values["us"]
        elif kind == "slowdown":
            self.slowdown = values["factor"]
        elif kind == "together":
            first, second = key.split()
            self.together[first, second] = Together(values["first"], values["second"], int(values["samples"]))
        elif kind == "issue":
            self.issue_us = values["us"]

    def text(self) -> str:
        """The file that the cost model reads."""
        lines = ["interlace-profile 2", f"fingerprint {quoted(self.fingerprint)}"]
        for key, op in sorted(self.ops.items(), key=lambda item: item[0].encode()):
            how = "measured" if op.measured else "estimated"
            lines.append(f"op {quoted(key)} us {number(op.us)} bytes {op.bytes} transient {op.transient} {how}")
        for (kind, ranks, size), time in sorted(self.collectives.items()):
            place = f"{kind} ranks {ranks} bytes {size}"
            if time.us > 0:
                lines.append(f"collective {place} us {number(time.us)}")
            if time.core_us > 0:
                lines.append(f"core {place} us {number(time.core_us)}")
            if time.finish_us > 0:
                lines.append(f"finish {place} us {number(time.finish_us)}")
        for (kind, size), us in sorted(self.copies.items()):
            lines.append(f"copy {kind} bytes {size} us {number(us)}")
        if self.issue_us is not None:
            lines.append(f"issue us {number(self.issue_us)}")
        if self.slowdown is not None:
            lines.append(f"together compute {factor(self.slowdown)} collective 1")
        for (first, second), pair in sorted(self.together.items()):
            lines.append(f"together {first} {factor(pair.first)} {second} {factor(pair.second)}")
        return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Six digits: more than any clock gives."""
    return f"{max(value, 1e-3):.6g}"


def factor(value: float) -> str:
    return f"{max(value, 1.0):.4g}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def from_rows(fingerprint: str, rows: Mapping[tuple[str, str], Mapping[str, float]]) -> Profile:
    """A profile from stored rows: (kind, key) → values."""
    profile = Profile(fingerprint)
    for (kind, key), values in rows.items():
        profile.add(kind, key, values)
    return profile
