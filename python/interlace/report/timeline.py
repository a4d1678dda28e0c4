"""Timelines from traces in Chrome's JSON: those of `interlace simulate --trace` and of a measured step alike.

A lane is a thread of one process (rank). Times are nanoseconds from the first event. Lanes of our own traces are named
"stream 16 gather", along an axis of its own "stream 80 gather tp", and "host thread"; other traces keep the names of their threads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from interlace.errors import InterlaceError

ORDER = ("compute", "gather", "reduce", "p2p", "h2d", "d2h", "file", "host")
_OUR_LANE = re.compile(r"^stream \d+ (\w+(?: \w+)?)$")
MEMORY_COUNTER = "memory: live bytes"


class TraceError(InterlaceError):
    """A file that is no trace, or holds nothing to show."""


@dataclass(slots=True)
class Event:
    start_ns: int
    duration_ns: int
    op: str
    module: str = ""
    part: str = ""
    source: str = ""
    detail: str = ""
    wait: bool = False
    bytes: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass
class Timeline:
    producer: str
    rank: int
    span_ns: int
    lanes: dict[str, list[Event]]
    memory: list[tuple[int, float]] = field(default_factory=list)

    def events(self) -> int:
        return sum(len(events) for events in self.lanes.values())

    def compute(self) -> list[Event]:
        return [event for event in self.lanes.get("compute", []) if not event.wait]

    def lane_use(self) -> list[dict[str, Any]]:
        """For every lane of transfers: busy and exposed time, bytes."""
        busy = union((event.start_ns, event.end_ns) for event in self.compute())
        rows = []
        for lane, events in self.lanes.items():
            if lane in ("compute", "host"):
                continue
            spans = union((event.start_ns, event.end_ns) for event in events)
            total = sum(end - start for start, end in spans)
            exposed = total - _overlap(spans, busy)
            moved = sum(event.bytes for event in events)
            rows.append({"lane": lane, "transfers": len(events), "bytes": moved, "busy_us": total / 1e3,
                         "exposed_us": exposed / 1e3})  # fmt: skip
        return rows


def read_trace(text: str | bytes, file: str, rank: int | None = None) -> Timeline:
    """The timeline of one rank: the given one, else the first in the file."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is not a trace: {error}") from None
    listed = root.get("traceEvents") if isinstance(root, dict) else root
    if not isinstance(listed, list):
        raise TraceError(f"{file} is not a trace: no list 'traceEvents'")
    producer = str(root.get("producer", "")) if isinstance(root, dict) else ""
    try:
        return _timeline(listed, producer, file, rank)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{file}: an event is not as in Chrome's format ({type(error).__name__}: {error})") from None


def _timeline(listed: list[dict[str, Any]], producer: str, file: str, rank: int | None) -> Timeline:
    slices = [event for event in listed if event.get("ph") == "X"]
    ranks = sorted({int(event["pid"]) for event in slices if str(event.get("pid", "")).lstrip("-").isdigit()})
    if not ranks:
        raise TraceError(f"{file} holds no events of a rank")
    if rank is not None and rank not in ranks:
        raise TraceError(f"{file} holds no events of rank {rank}; it has rank {', '.join(map(str, ranks[:8]))}")
    chosen = ranks[0] if rank is None else rank
    names = {
        event.get("tid"): str(event["args"]["name"])
        for event in listed
        if event.get("ph") == "M" and event.get("name") == "thread_name" and event.get("pid") == chosen
    }
    lanes: dict[str, list[Event]] = {}
    for entry in slices:
        if entry.get("pid") == chosen:
            thread = names.get(entry.get("tid"), str(entry.get("tid")))
            lanes.setdefault(_lane_name(thread), []).append(_event(entry))
    first = min(event.start_ns for events in lanes.values() for event in events)
    memory = [
        (round(float(event["ts"]) * 1e3) - first, float(event["args"]["value"]))
        for event in listed
        if event.get("ph") == "C" and event.get("name") == MEMORY_COUNTER and event.get("pid") == chosen
    ]
    last = first
    for events in lanes.values():
        events.sort(key=lambda event: (event.start_ns, -event.duration_ns))
        for event in events:
            event.start_ns -= first
        last = max(last, max(event.end_ns for event in events) + first)
    place = {name: number for number, name in enumerate(ORDER)}
    ordered = {lane: lanes[lane] for lane in sorted(lanes, key=lambda lane: (place.get(lane_kind(lane), len(place)), lane))}
    return Timeline(producer, chosen, last - first, ordered, sorted(memory))


def _event(entry: dict[str, Any]) -> Event:
    args = entry.get("args") or {}
    return Event(
        start_ns=round(float(entry["ts"]) * 1e3), duration_ns=round(float(entry.get("dur", 0)) * 1e3),
        op=str(args.get("op") or entry["name"]), module=str(args.get("module", "")), part=str(args.get("part", "")),
        source=str(args.get("source", "")), detail=str(args.get("detail", "")), wait=entry.get("cat") == "cuda_sync",
        bytes=int(args.get("bytes", 0)),
    )  # fmt: skip


def _lane_name(thread: str) -> str:
    ours = _OUR_LANE.match(thread)
    return ours.group(1) if ours else "host" if thread == "host thread" else thread


def lane_kind(lane: str) -> str:
    """ "gather" of "gather tp": what gives a lane its colour."""
    first = lane.split(" ")[0]
    return first if first in ORDER else lane


def union(spans: Any) -> list[tuple[int, int]]:
    """Disjoint sorted intervals that cover the same time."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _overlap(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    """Time that two lists of disjoint sorted intervals share."""
    total = i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def columns(timeline: Timeline) -> dict[str, Any]:
    """The same for the page, small: by lane one flat list of integers, five an event.

    They are: nanoseconds since the start of the event before it, duration, number of what it is, bytes, and 1 for a wait. What it
    is, is a row of `what`: numbers in the list `text` of op, module, part, source, detail.
    """
    text: dict[str, int] = {}
    what: dict[tuple[int, ...], int] = {}
    lanes = []
    for name, events in timeline.lanes.items():
        flat: list[int] = []
        before = 0
        for event in events:
            words = (event.op, event.module, event.part, event.source, event.detail)
            row = tuple(text.setdefault(word, len(text)) for word in words)
            number = what.setdefault(row, len(what))
            flat += (event.start_ns - before, event.duration_ns, number, event.bytes, int(event.wait))
            before = event.start_ns
        lanes.append({"name": name, "events": flat})
    return {
        "producer": timeline.producer, "rank": timeline.rank, "span_ns": timeline.span_ns, "text": list(text),
        "what": [list(row) for row in what], "lanes": lanes,
        "memory": [list(sample) for sample in thin(timeline.memory)],
    }  # fmt: skip


def thin(samples: list[tuple[int, float]], most: int = 3000) -> list[tuple[int, float]]:
    """At most `most` samples, each the highest of its stretch."""
    if len(samples) <= most:
        return samples
    stretch = -(-len(samples) // most)
    return [max(samples[i : i + stretch], key=lambda sample: sample[1]) for i in range(0, len(samples), stretch)]
