"""How long the planner's choice between pipeline stages takes, on random frontiers of the sizes that real models have.

python bench/plan_solver.py            # a table: wall and processor time of the solver, median of the seeds
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from interlace import _core

Point = tuple[float, float, int, int]


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    stages: int
    devices: int
    per_node: int
    counts: tuple[int, ...]  # empty: any that fits a node, or whole nodes
    layouts: bool  # stages may differ in (dp, tp), and boundaries cost time
    limit_s: float  # promised; 0: none


CASES = (
    Case("L 48, S 8, equal devices", 48, 8, 8, 8, (1,), False, 0.05),
    Case("L 48, S 16, equal devices", 48, 16, 16, 8, (1,), False, 1.0),
    Case("L 48, S 8, free devices of 32", 48, 8, 32, 8, (), False, 1.0),
    Case("L 96, S 32, equal devices", 96, 32, 32, 8, (1,), False, 10.0),
    Case("L 48, S 8, 4 devices each, layouts and boundaries", 48, 8, 32, 8, (4,), True, 0),
    Case("L 48, S 8, free devices of 32, layouts and boundaries", 48, 8, 32, 8, (), True, 0),
)


def frontiers(seed: int, points: int, layouts: bool) -> Callable[[int, bool, bool, int, int], list[Point]]:
    """Time in proportion to layers over devices; less of it costs more at the first and last micro-batch."""

    def of(layers: int, embedding: bool, head: bool, devices: int, in_flight: int) -> list[Point]:
        rng = random.Random(f"{seed} {layers} {embedding} {head} {devices} {in_flight}")
        degrees = [2**k for k in range(devices.bit_length()) if devices % 2**k == 0 and (k == 0 or layouts)]
        out = []
        for tp in degrees:
            base = (
                (1000.0 * layers + 300 * embedding + 900 * head) / devices**0.9 * rng.uniform(1, 1.05) * (1 + 0.05 * tp)
            )
            base *= 1 + 0.02 * in_flight
            share = points // len(degrees) or 1
            for k in range(share):
                slower = 0.35 * k / share + rng.uniform(0, 0.01)
                extra = base * 3 * (1 - k / share) ** 2 + rng.uniform(0, 0.01) * base
                out.append((base * (1 + slower), extra, devices // tp, tp))
        return out

    return of


def boundary(a: tuple[int, int], b: tuple[int, int], inside: bool) -> float:
    return (40.0 if inside else 120.0) * (1 if a == b else 1.5)


def run(case: Case, seed: int, micro_batches: int, points: int = 30) -> dict[str, float]:
    result = _core.testing.solve_stages(
        case.stages,
        case.layers,
        micro_batches,
        frontiers(seed, points, case.layouts),
        case.devices,
        case.per_node,
        list(case.counts),
        boundary if case.layouts else None,
    )
    return {
        "wall": result["wall_s"],
        "cpu": result["cpu_s"],
        "checks": result["checks"],
        "cost": result["plans"][0]["cost_us"],
    }


def main() -> None:
    print(f"{'case (30 points a frontier)':55} {'G':>4} {'wall ms':>9} {'cpu ms':>9} {'checks':>7}  promised ms")
    for case in CASES:
        for micro_batches in (8, 64, 512):
            rows = [run(case, seed, micro_batches) for seed in range(3)]
            wall, cpu = (statistics.median(row[key] for row in rows) * 1e3 for key in ("wall", "cpu"))
            checks = statistics.median(row["checks"] for row in rows)
            promised = f"{case.limit_s * 1e3:.0f}" if case.limit_s else "-"
            print(f"{case.name:55} {micro_batches:4} {wall:9.1f} {cpu:9.1f} {checks:7.0f}  {promised}", flush=True)


if __name__ == "__main__":
    main()
