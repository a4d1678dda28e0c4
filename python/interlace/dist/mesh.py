"""The ranks of a run as a mesh of named axes, the last one fastest, and where one rank lies on it.

    mesh replica=2 dp=2, rank 2:      replica  0 1       index along replica 1, its group 0 2
                                      dp 0     0 2       index along dp      0, its group 2 3
                                      dp 1     1 3       along replica,dp    2, its group 0 1 2 3

Several axes are written as one word, "replica,dp", in the mesh's order. Ranks along the axis tp cut the work on one batch, those along pp
its layers; ranks along all others, the data axes, have batches of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any


TENSOR, STAGES = "tp", "pp"


class Mesh:
    """Axes by name with their sizes, as one rank sees them."""

    def __init__(self, sizes: Mapping[str, int], rank: int) -> None:
        self.sizes, self.rank = dict(sizes), rank

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.sizes.items())

    @staticmethod
    def of(program: Any, rank: int) -> Mesh:
        """That of a program, as one rank of the run sees it."""
        ranks = list(program.stage_ranks)
        return UnlikeStages(program.mesh, ranks, rank) if ranks else Mesh(program.mesh, rank)

    @property
    def stage(self) -> int:
        """This rank's place along the axis of the stages."""
        return self.index(STAGES)

    @property
    def stages(self) -> int:
        return self.size(STAGES)

    def leaders(self) -> list[int]:
        """By stage: the first of the ranks that stand for it towards this rank's of other stages."""
        return self.group(STAGES)

    def first_of(self, stage: int) -> int:
        """The first rank of a stage."""
        return min(group[stage] for group in self.groups(STAGES))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def size(self, axes: str) -> int:
        """Ranks along these axes; an axis that the mesh lacks counts as one."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes.split(",") if axis)

    @property
    def data(self) -> str:
        """The axes along which ranks have different batches."""
        return ",".join(name for name in self.sizes if name not in (TENSOR, STAGES))

    @property
    def shared(self) -> str:
        """The axes along which ranks have the same batch."""
        return ",".join(name for name in self.sizes if name in (TENSOR, STAGES))

    def joined(self, *axes: str) -> str:
        """Several words as one, in the mesh's order."""
        named = ",".join(axes).split(",")
        return ",".join(name for name in self.sizes if name in named)

    def row(self, axes: str) -> int:
        """Of ranks that exchange in rows and columns: those along the last axis of several of more than one rank; 0: there is one axis."""
        sizes = [size for axis in axes.split(",") if (size := self.sizes.get(axis, 1)) > 1]
        return sizes[-1] if len(sizes) > 1 else 0

    def index(self, axes: str) -> int:
        """This rank's place among the ranks along these axes."""
        return self.group(axes).index(self.rank)

    def group(self, axes: str) -> list[int]:
        """The ranks along these axes, this one among them."""
        return next(group for group in self.groups(axes) if self.rank in group)

    def groups(self, axes: str) -> list[list[int]]:
        """All ranks, cut into groups along these axes."""
        names = [name for name in axes.split(",") if name]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(itertools.product(*(range(size) for size in self.sizes.values()))):
            elsewhere = tuple(i for name, i in zip(self.sizes, place, strict=True) if name not in names)
            found.setdefault(elsewhere, []).append(rank)
        return list(found.values())


class UnlikeStages(Mesh):
    """The axes of one stage of several that have other numbers of ranks. The axis of the stages has an index for every rank of the run,
    stage after stage; along the others lie the ranks of this stage.

        stages of 2 and 1 ranks, pp=3 dp=2, rank 1:      index along pp 1, its group 0 1 2; along dp 1, its group 0 1
    """

    def __init__(self, sizes: Mapping[str, int], stage_ranks: list[int], rank: int) -> None:
        super().__init__(sizes, rank)
        self.stage_ranks = stage_ranks
        self._stage = next(s for s in range(len(stage_ranks)) if rank < sum(stage_ranks[: s + 1]))
        own = {name: size for name, size in sizes.items() if name != STAGES}
        self._own = Mesh(own, rank - self.first_of(self._stage))

    def __str__(self) -> str:
        return f"stages of {'+'.join(map(str, self.stage_ranks))} ranks"

    @property
    def ranks(self) -> int:
        return sum(self.stage_ranks)

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    def leaders(self) -> list[int]:
        return [self.first_of(stage) for stage in range(self.stages)]

    def first_of(self, stage: int) -> int:
        return sum(self.stage_ranks[:stage])

    def groups(self, axes: str) -> list[list[int]]:
        """Those of this stage."""
        names = axes.split(",")
        if STAGES in names:
            return [list(range(self.ranks))]
        first = self.first_of(self._stage)
        return [[first + rank for rank in group] for group in self._own.groups(axes)]
