"""Caches that a model fills while it runs: cosines of positions kept as an attribute, masks by length in a dict.

    if self.cos is None:
        self.cos = torch.arange(n).cos()

What such a run leaves behind makes the next one another program, which reads what the first one computes. Where all of it comes of nothing
but constants, both compute the same: their texts are compared with constants in place of the ops that make them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection

import torch
from torch.utils._mode_utils import no_dispatch

from interlace.capture.constants import NotConstant
from interlace.capture.trace import Trace

Tensor = torch.Tensor
_VALUE = re.compile(r"%(\d+)")
_PLACE = re.compile(r" [ms]\d+\b")


def value(trace: Trace, fake: Tensor) -> Tensor | None:
    """What a tensor of the trace holds in every step; None where that is not known."""
    try:
        with no_dispatch():
            return trace.constants.value(fake).clone() if trace.constants.knows(fake) else None
    except NotConstant:
        return None


def same_but_for_constants(first: Trace, second: Trace, kept: Collection[int]) -> bool:
    """Whether two traces compute the same of everything that is no constant. `kept`: ids of real tensors that the second one reads and that
    hold constants of the first."""
    return _body(first, ()) == _body(second, kept)


def _body(trace: Trace, kept: Collection[int]) -> list[str]:
    names: dict[int, str] = {}
    for t in trace.tensors:  # those that the trace has met are numbered as they come
        real = _digest(t.real) if id(t.real) in kept else f"tensor {id(t.real)}"
        names[trace.ids[id(t)]] = real
    known: dict[int, Tensor] = {number: t for number, t in trace.recorder.known_values() if trace.constants.knows(t)}

    results_so_far = itertools.count()

    def name(match: re.Match[str]) -> str:
        number = int(match[1])
        if number not in names:
            real = value(trace, known[number]) if number in known else None
            if real is not None:
                names[number] = _digest(real)
            else:
                names[number] = f"input {number}" if number < trace.first_result else f"result {next(results_so_far)}"
        return f"<{names[number]}>"

    body = []
    for line in trace.recorder.lines:
        results = [int(n) for n in _VALUE.findall(re.sub(r" in %\d+", "", line.partition(" = ")[0]))] if " = " in line else []
        if results and all(n in known for n in results):
            continue
        body.append(_VALUE.sub(name, _PLACE.sub("", line)))
    return body


def _digest(t: Tensor) -> str:
    with no_dispatch():
        flat = t.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"constant {t.dtype} {tuple(t.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
