"""Dropout probabilities in program texts: taken out for comparing and keeping texts, put back with other values.

    %8: f32[4,8] = aten.bernoulli.p(%7, 0.9) {fwd m2 rng=3}         →  aten.bernoulli.p(%7, <keep 3>)
    %9: f32[4,8] = aten.div.Scalar(%8, 0.9) {fwd m2}                →  aten.div.Scalar(%8, <keep 3>)
    ... = aten._scaled_dot_product_flash_attention_for_cpu(%1, %2, %3, 0.1) {fwd rng=4}   →  ...(%1, %2, %3, <drop 4>)

Only these forms are taken: that in which torch traces dropout, a mask of which nothing is made but its division by the same number, and
attention's own dropout. Every other random op keeps its numbers, and then texts with other numbers are other texts.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_DRAW = re.compile(r"^(\s*(%\d+): .* = aten\.bernoulli\.p\(%\d+, )([0-9.e+-]+)(\) \{.*\brng=(\d+)\b.*)$")
_SCALE = re.compile(r"^(\s*%\d+: .* = aten\.div\.Scalar\((%\d+), )([0-9.e+-]+)(\).*)$")
_ATTENTION = re.compile(
    r"^(.* = aten\._scaled_dot_product_flash_attention_for_cpu(?:_backward)?\((?:%\d+, )+)([0-9.e+-]+)([,)].* rng=(\d+)\b.*)$"
)
_VALUE = re.compile(r"%\d+")
_FLOAT = re.compile(r"(?<![\w.%])-?\d+\.\d*(?:e[+-]?\d+)?(?![\w.])")
_MARK = re.compile(r"<(?:keep|drop) (\d+)>")


def take_out(text: str) -> tuple[str, dict[int, str]]:
    """The text with marks in place of what dropouts keep, or drop, and those numbers by the key of their stream."""
    lines = text.split("\n")
    numbers: dict[int, str] = {}
    draws: dict[str, tuple[int, int, str]] = {}  # result → line, key, number
    scales: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        if "aten.bernoulli.p(" in line and (found := _DRAW.match(line)):
            draws[found[2]] = (i, int(found[5]), found[3])
        elif "aten.div.Scalar(" in line and (found := _SCALE.match(line)):
            scales.setdefault(found[2], []).append(i)
        elif "flash_attention_for_cpu" in line and (found := _ATTENTION.match(line)):
            numbers[int(found[4])] = found[2]
            lines[i] = f"{found[1]}<drop {found[4]}>{found[3]}"
    uses: Counter[str] = Counter()
    for line in lines:
        # Liveness marks and places are no uses of the number.
        if draws and not line.lstrip().startswith("release("):
            left, equals, right = line.partition(" = ")
            uses.update(name for name in _VALUE.findall(right if equals else left) if name in draws)
    marks: list[tuple[int, int]] = []
    spoiled: set[int] = set()
    for result, (at, key, number) in draws.items():
        own = scales.get(result, [])
        fits = all((m := _SCALE.match(lines[i])) is not None and m[3] == number for i in own)
        if not own or uses[result] != len(own) or not fits or numbers.setdefault(key, number) != number:
            spoiled.add(key)
        marks += [(i, key) for i in (at, *own)]
    for i, key in marks:
        if key not in spoiled:
            pattern = _DRAW if "aten.bernoulli.p(" in lines[i] else _SCALE
            found = pattern.match(lines[i])
            assert found is not None
            lines[i] = f"{found[1]}<keep {key}>{found[4]}"
    return "\n".join(lines), {k: n for k, n in numbers.items() if k not in spoiled}


def put_back(text: str, numbers: dict[int, str]) -> str | None:
    """The text with these numbers; None when a mark has none."""
    if any(int(key) not in numbers for key in _MARK.findall(text)):
        return None
    return _MARK.sub(lambda m: numbers[int(m[1])], text)


@contextlib.contextmanager
def reads_of(holders: Mapping[str, tuple[Any, str]]) -> Iterator[set[str]]:
    """The places whose attribute is read within: a configuration has more probabilities than a model uses."""
    seen: set[str] = set()
    objects = {id(holder): holder for holder, _ in holders.values()}
    changed: list[tuple[Any, type]] = []
    for holder in objects.values():
        names = {name: place for place, (other, name) in holders.items() if other is holder}
        own = type(holder)

        def read(self: Any, name: str, names: dict[str, str] = names, own: Any = own) -> Any:
            if name in names:
                seen.add(names[name])
            elif name == "__dict__":  # whoever takes all may use any
                seen.update(names.values())
            return own.__getattribute__(self, name)

        with contextlib.suppress(TypeError):
            watched = type(own.__name__, (own,), {"__getattribute__": read, "__module__": own.__module__})
            holder.__class__ = watched
            changed.append((holder, own))
            continue
        seen.update(names.values())
    try:
        yield seen
    finally:
        for holder, own in changed:
            holder.__class__ = own


def changed(text: str, old: Iterable[tuple[str, float]], new: Iterable[tuple[str, float]]) -> str | None:
    """A captured text with other probabilities: `old` and `new` are (place, probability). None when it cannot be told from the text
    what becomes of them; then the model is captured again."""
    old, new = list(old), list(new)
    if old == new:
        return text
    if [place for place, _ in old] != [place for place, _ in new]:
        return None
    becomes: dict[float, float] = {}
    for (_, before), (_, after) in zip(old, new, strict=True):
        if becomes.setdefault(before, after) != after:
            return None
    rest, numbers = take_out(text)
    if any(" rng=" in line and not _MARK.search(line) for line in rest.split("\n")):
        return None  # another random op may have it in another form
    moved = [p for p, q in becomes.items() if p != q]
    telling = {x for p in moved for x in (p, 1 - p, 1 / (1 - p) if p != 1 else p)}
    if any(abs(float(word)) in telling for word in _FLOAT.findall(_MARK.sub("", rest))):
        return None
    keeps = {1 - p: 1 - q for p, q in becomes.items()}
    fresh: dict[int, str] = {}
    for key, number in numbers.items():
        known = becomes if f"<drop {key}>" in rest else keeps
        if float(number) not in known:
            return None
        fresh[key] = repr(known[float(number)])
    return put_back(rest, fresh)
