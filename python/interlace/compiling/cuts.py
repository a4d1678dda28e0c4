"""Parameters that a mesh axis cuts: which elements of the whole a rank's part holds, and parts put together again.

A cut along dimension d takes a parameter, in row-major order, as [rows, ranks, run]: a rank holds its run of every row, and its part lists
them row by row. With blocks (fused weights) every block is a row of its own.

    w [4, 6], cut tp 1, two ranks     rows 4, run 3       w [6, 2], cut tp 0 blocks 3    rows 3, run 2
    0 0 0 1 1 1                                           0 0
    0 0 0 1 1 1     part of rank 1: [4, 3]                1 1      part of rank 1: [3, 2]
    ...                                                   0 0 ...

Several cuts are made one after the other, so an element's place in the whole is found by going through them backwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from interlace.dist.mesh import Mesh

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Step:
    """One cut: this rank's place `index` among `ranks` along `axis`, and the elements that follow on each other in part and whole."""

    axis: str
    ranks: int
    index: int
    run: int


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The cuts of one parameter as one rank sees them. `whole` and `part` are shapes."""

    whole: tuple[int, ...]
    part: tuple[int, ...]
    axes: tuple[str, ...]  # in the mesh's order
    steps: tuple[_Step, ...]

    @staticmethod
    def of(cuts: Iterable[tuple[str, int, int]], part: tuple[int, ...], mesh: Mesh) -> Cuts:
        """`cuts`: axis, dimension and blocks, as they are made one after the other."""
        steps, shape = [], list(part)
        cuts = [cut for cut in cuts if mesh.size(cut[0]) > 1]
        for axis, dim, blocks in reversed(cuts):
            run = shape[dim] // blocks * math.prod(shape[dim + 1 :])
            steps.append(_Step(axis, mesh.size(axis), mesh.index(axis), max(run, 1)))
            shape[dim] *= mesh.size(axis)
        named = {axis for axis, _, _ in cuts}
        return Cuts(tuple(shape), part, tuple(name for name in mesh.sizes if name in named), tuple(reversed(steps)))

    @property
    def word(self) -> str:
        """The axes as one word, "" for a parameter that is whole."""
        return ",".join(self.axes)

    @property
    def run(self) -> int:
        """Elements that follow on each other in part and whole; all of a parameter that is whole."""
        return min((step.run for step in self.steps), default=math.prod(self.part))

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Elements [start, end) of the part as (start, end, first element in the whole), in order."""
        while start < end:
            place, count = start, end - start
            for step in reversed(self.steps):
                row, at = divmod(place, step.run)
                count = min(count, step.run - at)
                place = (row * step.ranks + step.index) * step.run + at
            yield start, start + count, place
            start += count

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, of the flat parts of the ranks along the axes."""
        held = dict(zip(itertools.product(*(range(self._ranks(axis)) for axis in self.axes)), parts, strict=True))
        for step in reversed(self.steps):
            at = self.axes.index(step.axis)
            groups: dict[tuple[int, ...], list[Tensor]] = {}
            for place, t in sorted(held.items(), key=lambda item: item[0]):
                groups.setdefault((*place[:at], 0, *place[at + 1 :]), []).append(t.reshape(-1, step.run))
            held = {place: torch.stack(found, 1).reshape(-1) for place, found in groups.items()}
        (whole,) = held.values()
        return whole.view(self.whole)

    def _ranks(self, axis: str) -> int:
        return next(step.ranks for step in self.steps if step.axis == axis)
