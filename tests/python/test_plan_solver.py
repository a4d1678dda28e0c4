"""The planner's choice between stages against a MILP solver (SciPy's HiGHS) on random problems."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest

from interlace import _core

scipy_optimize = pytest.importorskip("scipy.optimize")


class Problem(NamedTuple):
    stages: int
    layers: int
    micro_batches: int
    devices: int
    counts: list[int]
    options: list[list[tuple[int, int, float, float]]]  # by stage: layers, devices, t, d


def random_problem(seed: int) -> Problem:
    rng = random.Random(seed)
    stages = rng.randint(1, 8)
    layers = stages + rng.randint(0, 6)
    free = rng.random() < 0.3 and stages > 1
    devices = 8 if free else stages
    counts = [c for c in (1, 2, 4) if c < devices] if free else [1]
    options = []
    for stage in range(stages):
        mine = []
        for count in counts:
            for size in range(1, layers - stages + 2):
                if rng.random() < 0.1:
                    continue  # does not fit
                work = (10 * size + 4 * (stage == 0) + 9 * (stage == stages - 1)) / count**0.8
                for _ in range(rng.randint(1, 3)):
                    mine.append((size, count, work * rng.uniform(1, 1.5), rng.uniform(0, 80)))
        options.append(mine)
    return Problem(stages, layers, 2 ** rng.randint(0, 7), devices, counts, options)


def milp(p: Problem) -> float:
    """The least objective, or infinity. One binary a stage and option, and the two maxima T and E."""
    import numpy as np

    columns = [(stage, option) for stage in range(p.stages) for option in p.options[stage]]
    n = len(columns)
    rows: list[tuple[list[float], float, float]] = []
    for stage in range(p.stages):
        rows.append(([float(s == stage) for s, _ in columns] + [0, 0], 1, 1))
        # T is at least t of the stage; E at least its d and all t from it on.
        rows.append(([o[2] * (s == stage) for s, o in columns] + [-1, 0], -math.inf, 0))
        rows.append(([o[2] * (s >= stage) + o[3] * (s == stage) for s, o in columns] + [0, -1], -math.inf, 0))
    rows.append(([o[2] for _, o in columns] + [0, -1], -math.inf, 0))
    rows.append(([float(o[0]) for _, o in columns] + [0, 0], p.layers, p.layers))
    rows.append(([float(o[1]) for _, o in columns] + [0, 0], p.devices, p.devices))
    result = scipy_optimize.milp(
        c=[0.0] * n + [p.micro_batches - 1, 1.0],
        constraints=scipy_optimize.LinearConstraint(
            np.array([row[0] for row in rows]), [row[1] for row in rows], [row[2] for row in rows]
        ),
        integrality=[1] * n + [0, 0],
        bounds=scipy_optimize.Bounds([0] * (n + 2), [1] * n + [math.inf, math.inf]),
        options={"mip_rel_gap": 1e-9},
    )
    return float(result.fun) if result.status == 0 else math.inf


def ours(p: Problem) -> float:
    def frontier(
        layers: int, embedding: bool, head: bool, devices: int, in_flight: int
    ) -> list[tuple[float, float, int, int]]:
        # G is large enough in the calls below that in-flight tells the stages apart.
        stage = p.stages - in_flight
        return [(t, d, devices, 1) for size, count, t, d in p.options[stage] if (size, count) == (layers, devices)]

    assert p.micro_batches >= p.stages
    found = _core.testing.solve_stages(p.stages, p.layers, p.micro_batches, frontier, p.devices, p.devices, p.counts)
    return found["plans"][0]["cost_us"] if found["plans"] else math.inf


def test_equals_milp_on_300_problems() -> None:
    solved, sizes = 0, set()
    for seed in range(10_000):
        p = random_problem(seed)
        if p.micro_batches < p.stages:
            continue
        expected = milp(p)
        assert ours(p) == pytest.approx(expected, rel=1e-6), f"seed {seed}"
        solved += math.isfinite(expected)
        sizes.add((p.stages, len(p.counts) > 1))
        if solved == 300:
            break
    assert solved == 300
    assert {s for s, _ in sizes} == set(range(1, 9)) and any(free for _, free in sizes)
