"""What is no tensor and differs between ranks when a run begins: the program is rank 0's, and would have rank 0's value on every rank.

    a number of the batch (mixup's weight)                   an input of the program
    another thing of the batch, an attribute, a closure      whatever it is, where nobody reads it; else refused by name
    functions, arrays, environment variables                 a rank that has other ones traces the step as well; refused by line

Tensors are each rank's own (values.py).
"""

from __future__ import annotations

import hashlib
import itertools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.capture.in_python import takes_any
from interlace.capture.inputs import InputSpec, Path, differing, family, path_name
from interlace.capture.opaque import TOLD
from interlace.capture.reach import bytes_in
from interlace.capture.unread import unread
from interlace.capture.watch import Change, Watch, plain
from interlace.compiling.captures import Captures
from interlace.compiling.programs import Source
from interlace.dist.peers import PeerError, Peers, ranks_text
from interlace.errors import CaptureError

_PLAIN = (type(None), bool, int, float, str)
_EACH = 8  # places that are tried one by one


def agree_on_batch(
    spec: InputSpec, micro_batch: Any, peers: Peers, captures: Captures
) -> tuple[dict[Path, torch.dtype], frozenset[str]]:  # fmt: skip
    """The numbers beside the tensors that are to be inputs, and the families of what nobody reads. Every rank must call it."""
    mine = {path_name(p): x for p, x in spec.constants if type(x) in _PLAIN}
    everyone = peers.exchange("batch beside the tensors", mine)
    names = _differing(everyone)
    if not names:
        return {}, spec.free
    paths = {path_name(p): p for p, _ in spec.constants}
    some = {family(paths[name]) for name in names if name in paths}
    free = unread(micro_batch, some, captures.traced) if peers.rank == 0 else set()
    free = set(peers.exchange("batch beside the tensors that is read", sorted(free))[0])
    names = [name for name in names if name not in paths or family(paths[name]) not in free]
    for name in names:
        if not {type(theirs.get(name)) for theirs in everyone} <= {int, float}:
            _refuse(f"batch entry '{name}', beside the tensors,", name, everyone, 'make it a tensor, or take mode="eager"')
    return differing(everyone, [paths[name] for name in names]), frozenset(free)


def agree_on_values(micro_batch: Any, peers: Peers, captures: Captures) -> None:
    """Of the model and the loss function: what Python would read. Every rank must call it."""
    places = {c.where: c for c in Watch(captures.model, captures.loss_fn).values() if type(c.before) in _PLAIN}
    mine = {where: c.before for where, c in places.items()}
    digest = hashlib.sha256(repr(sorted(mine.items(), key=lambda item: item[0])).encode()).hexdigest()
    if len(set(peers.exchange("values beside the tensors", digest))) == 1:
        return
    everyone = [{where: x for where, x in theirs.items() if where in mine} for theirs in peers.exchange("values that differ", mine)]
    names = [name for name in _differing(everyone) if all(name in theirs for theirs in everyone)]
    read = _read(micro_batch, {name: (places[name], everyone) for name in names}, captures) if peers.rank == 0 else []
    for name in peers.exchange("values that are read", read)[0]:
        _refuse(name, name, everyone, "or make it a tensor or a part of the batch, which may differ")


def _differing(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for theirs in everyone for name in theirs})
    return [name for name in names if any(repr(theirs.get(name)) != repr(everyone[0].get(name)) for theirs in everyone)]


def _refuse(what: str, name: str, everyone: Sequence[Mapping[str, Any]], other: str) -> None:
    said = [repr(theirs[name]) if name in theirs else "missing" for theirs in everyone]
    ranks = [rank for rank, x in enumerate(said) if x != said[0]]
    ranks = [rank for rank in ranks if said[rank] == said[ranks[0]]]
    raise PeerError(
        f"{what} is {said[ranks[0]]} on {ranks_text(ranks)} and {said[0]} on rank 0, and what is computed depends on it; give all ranks the "
        f"same, {other}", ranks[0],
    )  # fmt: skip


def _read(micro_batch: Any, places: dict[str, tuple[Change, list[dict[str, Any]]]], captures: Captures) -> list[str]:
    """Those of the places that the program depends on: with the values of other ranks there it is another one. Rank 0 only."""

    def text(names: Sequence[str]) -> str | None:
        for name in names:
            place, everyone = places[name]
            place.put(next(theirs[name] for theirs in everyone if repr(theirs[name]) != repr(place.before)))
        try:
            return _bare(captures.traced(micro_batch)[0])
        except Exception:
            return None
        finally:
            for name in names:
                places[name][0].put(places[name][0].before)

    expected = text([])
    if expected is None or text(list(places)) == expected:  # what cannot be captured is said where it is captured
        return []
    found = [name for name in places if text([name]) != expected] if len(places) <= _EACH else []
    return found or list(places)


def captured_alike(share: Callable[[], Source], micro_batch: Any, peers: Peers, captures: Captures) -> Source:
    """Rank 0's program, of which every rank's own trace would be the same. Error: one's is another."""
    config = captures.config
    if peers.size == 1 or config.mode == "eager" or config.stage_meshes:
        return share()
    mine = _OwnTrace(micro_batch, peers, captures)
    source = share()
    if source.text and not takes_any(source.text):  # it could not be captured
        mine.compare(source.captured)
    return source


class _OwnTrace:
    """This rank's trace, where it may find something else than rank 0's. Every rank must make one, and ask it when rank 0's text is there."""

    def __init__(self, micro_batch: Any, peers: Peers, captures: Captures) -> None:
        self._peers, self._captures, self._text, self._error = peers, captures, "", ""
        marks = peers.exchange("what the step is captured from", captures.mark(micro_batch))
        self.asked = any(mark is None or mark != marks[0] for mark in marks)
        if self.asked and peers.rank > 0 and (marks[peers.rank] is None or marks[peers.rank] != marks[0]):
            try:
                self._text = captures.traced(micro_batch)[0]
            except CaptureError as e:  # which is said unless rank 0 has one too
                self._error = str(e)

    def compare(self, text: str) -> None:
        """`text`: the captured one, on rank 0. Error: a rank has found another one. One whose batch takes other ways may."""
        if not self.asked:
            return
        peers, mine = self._peers, text if self._peers.rank == 0 else self._text
        found = hashlib.sha256(_bare(mine).encode()).hexdigest() if mine else ""
        everyone = peers.exchange("what was captured", [found, _ways(mine), self._error])
        for rank, (_, _, error) in enumerate(everyone):
            if error:
                raise PeerError(f"rank {rank} cannot capture what rank 0 can: {error}", rank)
        ranks = [rank for rank, (other, ways, _) in enumerate(everyone) if other not in ("", everyone[0][0]) and ways == everyone[0][1]]
        if not ranks:
            return
        first = peers.broadcast("what rank 0 has captured", _bare(text).encode()).decode()
        place = peers.exchange("where it differs", _place(mine, first) if mine else "")[ranks[0]]
        watch = Watch(self._captures.model, self._captures.loss_fn)
        values = peers.exchange("all values that differ", {c.where: repr(c.before) for c in watch.values() if plain(c.before)})
        names = [name for name in _differing(values) if all(name in theirs for theirs in values)]
        said = f" (ranks have different ones: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        raise PeerError(
            f"{place}: what is computed here is something else on {ranks_text(ranks)} than on rank 0{said}, and a program is one of all "
            'ranks; make it a part of the batch or a tensor, which each rank has of its own, or take mode="eager"', ranks[0],
        )  # fmt: skip


def content(x: Any, names_of: Callable[[type], set[str] | None], depth: int = 4) -> str:
    """What another rank must have there as well, as a digest; of tensors no values. `names_of`: the attributes of a class that count."""

    def words(x: Any, depth: int) -> Any:
        if plain(x) or depth == 0:
            return repr(x) if plain(x) else type(x).__name__
        if isinstance(x, torch.Tensor):
            return f"{x.dtype} {tuple(x.shape)}"
        if isinstance(x, (list, tuple)):
            return type(x).__name__, [words(item, depth - 1) for item in x]
        if isinstance(x, dict):
            return {repr(key): words(item, depth - 1) for key, item in x.items() if plain(key)}
        if isinstance(x, (set, frozenset)):
            return sorted(map(repr, filter(plain, x)))
        if isinstance(x, types.FunctionType):
            constants = [c for c in x.__code__.co_consts if plain(c)]
            return x.__qualname__, x.__code__.co_code, repr(constants), x.__code__.co_names, words(x.__defaults__, depth - 1)
        if (data := bytes_in(x)) is not None:
            return data
        own = vars(x) if hasattr(x, "__dict__") and not isinstance(x, (type, torch.nn.Module)) else {}
        names = names_of(type(x)) if own else None
        return type(x).__name__, {name: words(own[name], depth - 1) for name in sorted(own.keys() & (own if names is None else names))}

    return hashlib.sha256(repr(words(x, depth)).encode()).hexdigest()[:16]


def _ways(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("meta ways ")), "")


def _place(text: str, other: str) -> str:
    """The user's line where a program computes something else than another, which is bare."""
    sources = dict(re.findall(r'^source (\d+) "(.*)"$', text, re.M))
    place = ""
    for line, (bare, its) in zip(_lines(text), itertools.zip_longest(_bare(text).split("\n"), other.split("\n"))):  # noqa: B905
        tag = re.search(r" \{.*\bs(\d+)[^{}]*\}$", line)
        place = sources[tag[1]] if tag is not None else place
        if bare != its:
            break
    return place


def _lines(text: str) -> list[str]:
    """What a program computes, without what it hands to Python."""
    body = re.sub(r'(module="[^"#]*)#\d+"', r'\1"', text.partition("\nphase ")[2]).splitlines()  # names that no other call of the run has
    return [line for line in body if f'"{TOLD}"' not in line and not line.startswith("  output(")]


def _bare(text: str) -> str:
    """What a program computes, without lines of code and numbers of values; what the trace itself has made counts by what it holds."""
    known = {number: f"{kind} {value}" for number, kind, value in re.findall(r'^const (%\d+): (.*) "[^"]*" = (.*)$', text, re.M)}
    known |= dict(re.findall(r'^buffer (%\d+): \S+ "(captured\.[^"]*)"', text, re.M))
    bare = (re.sub(r" \{[^{}]*\}$", "", line) for line in _lines(text))
    return "\n".join(re.sub(r"%\d+", lambda m: known.setdefault(m[0], f"%{len(known)}"), line) for line in bare)
