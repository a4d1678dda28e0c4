"""Attention that a model writes out, as one operator: what would be scores and shares of all pairs of tokens in memory.

    a = (q @ k.transpose(-2, -1)) * scale        tracked: the product of q and k, a scale
    a = a.masked_fill(mask == 0, -inf) + bias             masks
    a = dropout(softmax(a, -1))                           shares, dropout
    y = a @ v                                    →  y = attention(q, k, v, mask, scale, dropout), one operator (attention.py)

The ops of scores and shares stay in the text, where nothing reads them: the first pass takes them out. Where something does, an output or
a hook say, the model is captured again as it is written (`settled`). Products are followed through matmul, bmm, baddbmm, einsum and @,
by the places where Python calls them; what is none of the forms here, or was written in place meanwhile, stays as it is. Rows that
see nothing have equal shares, as they are written where masks are finite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensor

from interlace.capture.attention import OneAttention, fits, fused
from interlace.capture.recorder import Recorder
from interlace.capture.written_calls import called

Tensor = torch.Tensor
NEVER = -1e4  # what scores are filled with that are never looked at, at most
MASKED, WHOLE = 96, 512  # columns of scores from which on one operator is faster on CPUs, with masks and without (docs/architecture.md)


@dataclasses.dataclass(frozen=True)
class Mask:
    """What is added to scores; or, with a value, a mask of those that are replaced by it."""

    tensor: Tensor
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """query [*lead, rows, width] times key [*lead, width, columns]."""

    query: Tensor
    key: Tensor
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    shares: Tensor | None = None  # what softmax gave
    dropout: float = 0.0

    def lead(self) -> tuple[int, ...]:
        return tuple(self.query.shape[:-2])

    def tensors(self) -> list[Tensor]:
        return [self.query, self.key, *(m.tensor for m in self.masks)]


class WrittenAttention:
    """What is known of the tensors of one capture."""

    def __init__(self, wanted: OneAttention | None) -> None:
        """None: it stays as it is."""
        self.wanted = wanted
        self._known: dict[int, tuple[Tensor, int, Scores, list[int]]] = {}  # by ids: the tensor, versions of it and of what it is made of
        self._fused: list[Tensor] = []  # shares that need not be computed
        self._results: list[Tensor] = []

    def settled(self, recorder: Recorder) -> bool:
        """Takes scores and shares that nothing reads out of a finished trace. False: something does, and now all stays as it is written."""
        mine = {id(t) for t in self._fused}
        self._known.clear()
        self._fused.clear()
        self._results.clear()
        shares = {value for value, t in recorder.known_values() if id(t) in mine}
        if not shares:
            return True
        kept, found = live(recorder.lines)
        if shares & found:
            self.wanted = None
            return False
        recorder.num_ops -= len(recorder.lines) - len(kept)
        recorder.lines[:] = kept
        return True

    def left_out(self) -> bool:
        """After a trace that failed: whether some attention was one operator in it. From now on it stays as it is written: a result that is
        written in place, say, is what only this operator keeps for its gradient."""
        tried = self.wanted is not None and bool(self._fused)
        self.wanted = None if tried else self.wanted
        return tried

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """What is called within."""
        if self.wanted is None:
            yield
        else:
            with called(self):
                yield

    def scores(self, x: Any) -> Scores | None:
        found = self._known.get(id(x))  # none of inference mode, which counts no versions
        if found is None or found[0] is not x or found[1] != x._version or found[3] != [t._version for t in found[2].tensors()]:
            return None
        return found[2]

    def track(self, x: Any, scores: Scores | None) -> Any:
        if scores is not None and isinstance(x, FakeTensor) and not any(t.is_inference() for t in (x, *scores.tensors())):
            self._known[id(x)] = x, x._version, scores, [t._version for t in scores.tensors()]
        return x

    def forget(self, x: Any) -> None:
        self._known.pop(id(x), None)

    def by_letters(self, f: Any, equation: str, letters: tuple[str, ...], a: Any, b: Any) -> Any:
        """einsum of "bhid,bhjd->bhij", and of shares "bhij,bhjd->bihd", whatever the letters and their order."""
        of_a, of_b, of_result = letters
        summed = (set(of_a) & set(of_b)) - set(of_result)
        rows, columns = ([x for x in one if x not in other] for one, other in ((of_a, of_b), (of_b, of_a)))
        lead = [x for x in of_a if x in of_b and x in of_result]
        plain = len(summed) == len(rows) == len(columns) == 1 and len({*of_a, *of_b}) == len(lead) + 3 and len(lead) in (1, 2)
        if not plain or not isinstance(a, FakeTensor) or not isinstance(b, FakeTensor):
            return f(equation, a, b)
        (d,), (i,), (j,) = summed, rows, columns
        if self.scores(a) is not None and list(of_a) == [*lead, i, d]:
            found = self.attention(a, b.permute([of_b.index(x) for x in [*lead, d, j]]))
            if found is not None:
                return found.permute([[*lead, i, j].index(x) for x in of_result])
        result = f(equation, a, b)
        if list(of_result) == [*lead, i, j]:
            left, right = ([of_a.index(x) for x in [*lead, i, d]], [of_b.index(x) for x in [*lead, d, j]])
            self.track(result, self.product(a.permute(left), b.permute(right)))
        return result

    # ---- what the operators of the forms do to scores ----

    def product(self, a: Any, b: Any) -> Scores | None:
        both = isinstance(a, FakeTensor) and isinstance(b, FakeTensor) and a.dim() == b.dim() in (3, 4)
        return Scores(a, b) if both and a.shape[:-2] == b.shape[:-2] and self.scores(a) is None else None

    def scaled(self, x: Any, by: Any, divided: bool = False) -> Scores | None:
        s = self.scores(x)
        if s is None or s.masks or s.shares is not None:
            return None
        if isinstance(by, FakeTensor) and by.numel() == 1 and by.dim() < 2 and by.dtype == s.query.dtype and not by.requires_grad:
            return dataclasses.replace(s, query=s.query / by if divided else s.query * by)
        if not isinstance(by, (int, float)) or by == 0:
            return None
        return dataclasses.replace(s, scale=s.scale / by if divided else s.scale * by)

    def masked(self, x: Any, mask: Any, value: Any = None) -> Scores | None:
        """`mask` added to scores, or those where it holds replaced by a value."""
        s = self.scores(x)
        if s is None or s.shares is not None or not isinstance(mask, FakeTensor) or mask.requires_grad or mask.dim() > x.dim():
            return None
        filled = mask.dtype == torch.bool and isinstance(value, (int, float)) and value <= NEVER
        if not filled and not (value is None and mask.is_floating_point()):
            return None
        mask = mask[(None,) * (x.dim() - mask.dim())]
        if any(m not in (1, n) for m, n in zip(mask.shape, x.shape, strict=True)) or mask.shape[-1] != x.shape[-1]:
            return None
        return dataclasses.replace(s, masks=(*s.masks, Mask(_led(mask, s.lead()), value)))

    def softmax(self, x: Any, result: Any, dim: Any) -> Scores | None:
        s = self.scores(x)
        return dataclasses.replace(s, shares=result) if s is not None and s.shares is None and dim in (-1, x.dim() - 1) else None

    def dropped(self, x: Any, p: Any, training: Any) -> Scores | None:
        s = self.scores(x)
        if s is None or s.shares is None or self.wanted is None:
            return None
        if not training or p == 0:
            return s
        return dataclasses.replace(s, dropout=p) if self.wanted.drops and isinstance(p, float) and 0 < p < 1 and not s.dropout else None

    def viewed(self, x: Any, result: Any) -> Scores | None:
        """Of other leading dimensions: one where there were two, or two where there was one."""
        s = self.scores(x)
        if s is None or not isinstance(result, FakeTensor) or result.shape[-2:] != x.shape[-2:] or result.dim() not in (3, 4):
            return None
        lead = tuple(result.shape[:-2])
        if len(lead) == 1 or lead == s.lead():
            return s  # two are kept: products are made of four dimensions
        if len(s.lead()) == 2:
            return None
        masks = tuple(Mask(_led(m.tensor, lead), m.value) for m in s.masks)
        query, key = (t.reshape(*lead, *t.shape[-2:]) for t in (s.query, s.key))
        return dataclasses.replace(s, query=query, key=key, masks=masks)

    def cast(self, x: Any, result: Any) -> Scores | None:
        s = self.scores(x)
        return s if s is not None and isinstance(result, FakeTensor) and result.is_floating_point() and result.shape == x.shape else None

    def attention(self, shares: Any, value: Any) -> Tensor | None:
        """Shares times value [*lead, columns, width], by one operator; None: it is no case of this."""
        s = self.scores(shares)
        if s is None or s.shares is None or not isinstance(value, FakeTensor) or value.shape[:-2] != shares.shape[:-2] or self.wanted is None:
            return None
        columns = value.shape[-2]
        if not self.wanted.always and not s.dropout and columns < (MASKED if s.masks else WHOLE):
            return None
        lead = s.lead() if len(s.lead()) == 2 else (*s.lead(), 1)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else value.dtype
        q, k, v = (
            (t if t.dtype == torch.float64 else t.to(dtype)).reshape(*lead, *t.shape[-2:]) for t in (s.query, s.key.transpose(-2, -1), value)
        )
        mask = _sum([Mask(_led(m.tensor, lead), m.value) for m in s.masks], q.dtype)
        if not fits(q, k, v, mask, False, False):
            return None
        if mask is not None:  # gradients of the operators go by the logarithm of a row's sum, which such a row's masks outweigh
            nothing = mask.amax(-1, keepdim=True) <= NEVER
            q, mask = (torch.where(nothing, torch.zeros((), dtype=q.dtype), t) for t in (q, mask))
        result = fused(q, k, v, mask, s.dropout, False, s.scale).reshape(*shares.shape[:-1], value.shape[-1])
        self._fused.append(s.shares)
        self._results.append(result)
        return result

    def is_result(self, x: Any) -> bool:
        """Its memory is in another order than a product's."""
        return any(x is result for result in self._results)


def _led(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A mask of scores whose leading dimensions may have become two: [n or 1, rows, columns] is [*lead or 1, 1, rows, columns]."""
    if mask.dim() == len(lead) + 2:
        return mask
    return mask.unsqueeze(0) if mask.shape[0] == 1 else mask.reshape(*lead, *mask.shape[1:])


def _sum(masks: list[Mask], dtype: torch.dtype) -> Tensor | None:
    """One mask to be added. What scores are filled with is put over what was added before, and is the least number. A narrower dtype gets no
    infinity where there was none."""
    total: Tensor | None = None
    for m in masks:
        if m.value is None:
            least = torch.finfo(dtype).min
            added = (m.tensor.clamp(min=least) if torch.finfo(m.tensor.dtype).min < least else m.tensor).to(dtype)
            total = added if total is None else total + added
        else:
            value = torch.full((), m.value if m.value == float("-inf") else torch.finfo(dtype).min, dtype=dtype)
            total = torch.where(m.tensor, value, torch.zeros((), dtype=dtype) if total is None else total)
    return total


def live(lines: list[str]) -> tuple[list[str], set[int]]:
    """The ops that a program's outputs, gradients and what else is no pure op depend on, themselves included; and their values."""
    kept, found = list[str](), set[int]()
    for line in reversed(lines):
        results, equals, call = line.partition(" = ")
        own = set(map(int, re.findall(r"%(\d+):", results))) if equals else set()
        if not equals or own & found or not call.startswith(("aten.", "view(")):
            found.update(own, map(int, re.findall(r"%(\d+)", call if equals else results)))
            kept.append(line)
    return kept[::-1], found
