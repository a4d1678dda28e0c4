"""Caches that a model fills while it runs: cosines of positions kept as an attribute, masks by length in a dict.

    if self.cos is None:
        self.cos = torch.arange(n).cos()

What such a run leaves behind makes the next one another program, which reads what the first one computes. Where all of it comes of nothing
but constants and of buffers that no run writes (inverse frequencies), both compute the same: their texts are compared with names of what is
the same in every step in place of the ops that make it.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping

import torch
from torch.utils._mode_utils import no_dispatch

from interlace.capture.constants import NotConstant
from interlace.capture.trace import Trace

Tensor = torch.Tensor
_VALUE = re.compile(r"%(\d+)")
_PLACE = re.compile(r" [ms]\d+\b")
_WRITTEN = re.compile(r"^  assign\(%(\d+)")
_RESULT = re.compile(r"%(\d+)(?: in |:)")
_STAYS = re.compile(r" rng=| writes=|^call\.python\b")
_DRAWS = re.compile(r" rng=|^call\.python\b")


def value(trace: Trace, fake: Tensor) -> Tensor | None:
    """What a tensor of the trace holds in every step; None where that is not known."""
    try:
        with no_dispatch():
            return trace.constants.value(fake).clone() if trace.constants.knows(fake) else None
    except NotConstant:
        return None


def names(trace: Trace) -> dict[int, str]:
    """What tells tensors of the trace that are the same in every step from all others, by their ids."""
    always = _read(trace, {})[1]
    return {id(t): always[number] for number, t in trace.recorder.known_values() if number in always}


def same_in_every_step(first: Trace, second: Trace, kept: Mapping[int, str]) -> bool:
    """Whether two traces compute the same of everything that is not the same in every step. `kept`: names in the first trace of real tensors
    that the second one reads, by their ids."""
    return _read(first, {})[0] == _read(second, kept)[0]


def _read(trace: Trace, kept: Mapping[int, str]) -> tuple[list[str], dict[int, str]]:
    """The ops of what may be something else in another step, and the names of what is not, by the values' numbers."""
    lines = _asked(trace.recorder.lines)
    written = {int(n) for line in lines for n in _WRITTEN.findall(line)}
    always: dict[int, str] = {}
    found: dict[int, str] = {}
    for t in trace.tensors:  # those that the trace has met are numbered as they come
        number = trace.ids[id(t)]
        found[number] = kept.get(id(t.real), f"tensor {id(t.real)}")
        if t.kind != "param" and number not in written:
            always[number] = found[number]
    known: dict[int, Tensor] = {number: t for number, t in trace.recorder.known_values() if trace.constants.knows(t)}
    results_so_far = itertools.count()

    def named(number: int) -> str:
        if number not in found:
            real = value(trace, known[number]) if number in known else None
            if real is not None:
                found[number] = always[number] = digest(real)
            else:
                found[number] = f"input {number}" if number < trace.first_result else f"result {next(results_so_far)}"
        return f"<{found[number]}>"

    body = []
    for line in lines:
        made, _, op = line.partition(" = ") if " = " in line else ("", "", line)
        made = re.sub(r" in %\d+\S*", "", made)
        results = [int(n) for n in _VALUE.findall(made)]
        if results and all(n in known for n in results):
            continue
        op = _PLACE.sub("", op)
        read = [int(n) for n in _VALUE.findall(op)]
        asked = _VALUE.sub(lambda match: named(int(match[1])), op)
        if results and not _DRAWS.search(op) and all(n in always for n in read):
            of = hashlib.sha256((_VALUE.sub("", made) + asked).encode()).hexdigest()[:16]
            for i, number in enumerate(results):
                found[number] = always[number] = f"value {i} of {of}"
        else:
            body.append(_VALUE.sub(lambda match: named(int(match[1])), _PLACE.sub("", line)))
    return body, always


def _asked(lines: list[str]) -> list[str]:
    """Those that something comes of: a model may look at the labels of its first batch alone, and warn."""
    kept, asked = list[str](), set[int]()
    for line in reversed(lines):
        made, _, op = line.partition(" = ") if " = " in line else ("", "", line)
        if not made or _STAYS.search(op) or asked.intersection(int(n) for n in _RESULT.findall(made)):
            asked.update(int(n) for n in _VALUE.findall(line))
            kept.append(line)
    return kept[::-1]


def digest(t: Tensor) -> str:
    with no_dispatch():
        flat = t.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"constant {t.dtype} {tuple(t.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
