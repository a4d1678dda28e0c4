"""Fits the 28 interference factors (Mist, Algorithm 1) to public measurements and prints the cross-validated error.

    python bench/fit_interference.py --data ../shared/data            # table of errors
    python bench/fit_interference.py --data ../shared/data --emit     # constants for src/cost/interference_table.inc

Data: GEMM, all-gather, host-to-device and device-to-host copies, alone and together, on L4 and A100-40GB machines
(mist_concurrency_{l4,a100}.csv, from github.com/Dazz993/Mist, Apache-2.0). The times alone are those of the same table;
the factors are fitted to the rows where two or more run together, each row weighing its relative error, and so that no
class gets faster when another joins: else more work could be predicted to take less time. Error: mean of
|predicted / measured - 1| over rows left out of the fit (five folds, shuffled with a fixed seed).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CLASSES = ("compute", "device", "h2d", "d2h")
SETS = [s for n in (4, 3, 2) for s in itertools.combinations(range(4), n)]  # the order of the algorithm
MEMBERS = [(s, i) for s in SETS for i in s]  # one factor each: 4 + 12 + 12 = 28
GPUS = ("l4", "a100")
MOST = 8.0  # a larger factor only says "stands still", and the data do not tell how still


def predict(alone: Array, factors: Array) -> Array:
    """Time of four amounts that start together; `alone` is rows x 4 in ms."""
    left = alone.copy()
    total = np.zeros(len(alone))
    at = 0
    for members in SETS:
        f = factors[at : at + len(members)]
        at += len(members)
        mask = np.zeros(4, bool)
        mask[list(members)] = True
        rows = np.nonzero(((left > 0) == mask).all(axis=1))[0]
        if len(rows) == 0:
            continue
        scaled = left[np.ix_(rows, list(members))] * f
        shortest = scaled.min(axis=1, keepdims=True)
        total[rows] += shortest[:, 0]
        rest = (scaled - shortest) / f
        rest[scaled == shortest] = 0.0
        left[np.ix_(rows, list(members))] = rest
    return total + left.sum(axis=1)


def score(alone: Array, measured: Array, factors: Array) -> float:
    """Mean absolute relative error."""
    return float(np.abs(predict(alone, factors) / measured - 1).mean())


def fit(alone: Array, measured: Array, sweeps: int = 24) -> Array:
    """Damped Gauss-Newton on relative errors, weights 1/|error| towards the mean absolute one, factors kept at 1 or above."""
    best = np.full(len(MEMBERS), 1.1)
    best_score = score(alone, measured, best)
    for start in (1.05, 1.2, 1.5):
        factors = np.full(len(MEMBERS), start)
        current = score(alone, measured, factors)
        for _ in range(sweeps):
            error = predict(alone, factors) / measured - 1
            step = 1e-3
            jacobian = np.empty((len(alone), len(factors)))
            for k in range(len(factors)):
                moved = factors.copy()
                moved[k] += step
                jacobian[:, k] = (predict(alone, moved) / measured - 1 - error) / step
            weight = 1 / np.maximum(np.abs(error), 0.004)
            normal = (jacobian * weight[:, None]).T @ jacobian
            gradient = (jacobian * weight[:, None]).T @ error
            improved = False
            for damping in (1e-3, 1e-1, 1.0, 10.0):
                scale = damping * np.maximum(np.diag(normal), 1e-6 * normal.max())
                trial = np.clip(factors - np.linalg.solve(normal + np.diag(scale), gradient), 1.0, MOST)
                if (value := score(alone, measured, trial)) < current - 1e-7:
                    factors, current, improved = trial, value, True
                    break
            if not improved:
                break
        if current < best_score:
            best, best_score = factors, current
    return ordered(alone, measured, polish(alone, measured, best))


def polish(alone: Array, measured: Array, factors: Array) -> Array:
    """Coordinate steps on the mean absolute error itself, which has kinks that Gauss-Newton does not see."""
    best, step = score(alone, measured, factors), 0.04
    while step > 0.002:
        moved = False
        for k in range(len(factors)):
            for sign in (1, -1):
                trial = factors.copy()
                trial[k] = min(max(trial[k] + sign * step, 1.0), MOST)
                if (value := score(alone, measured, trial)) < best - 1e-7:
                    factors, best, moved = trial, value, True
                    break
        if not moved:
            step /= 2
    return factors


def ordered(alone: Array, measured: Array, factors: Array) -> Array:
    """The best factors found that never fall when a class joins a set: coordinate steps between the bounds that the sets
    below and above give, from the greatest ordered factors that are nowhere above the given ones."""
    place = {member: k for k, member in enumerate(MEMBERS)}
    below = [[place[q, j] for q, j in MEMBERS if j == i and set(q) < set(s)] for s, i in MEMBERS]
    above = [[place[q, j] for q, j in MEMBERS if j == i and set(q) > set(s)] for s, i in MEMBERS]
    factors = np.array([min([factors[k], *factors[above[k]]]) for k in range(len(factors))])
    best = score(alone, measured, factors)
    for _ in range(12):
        start = best
        for k in range(len(factors)):
            low, high = max([1.0, *factors[below[k]]]), min([MOST, *factors[above[k]]])
            near = np.clip(factors[k] * np.array([0.98, 1.02, 0.995, 1.005]), low, high)
            for value in (*np.geomspace(low, high, 7), *near):
                kept, factors[k] = factors[k], value
                if (error := score(alone, measured, factors)) < best - 1e-7:
                    best = error
                else:
                    factors[k] = kept
        # A class in all its sets of so many members at once.
        for i, size, by in itertools.product(range(4), (2, 3, 4), (0.97, 1.03)):
            trial = factors.copy()
            for k, (s, j) in enumerate(MEMBERS):
                if j == i and len(s) >= size:
                    trial[k] = min(max(trial[k] * by, 1.0), MOST)
            fits = all(trial[k] >= max([1.0, *trial[below[k]]]) for k in range(len(trial)))
            if fits and (error := score(alone, measured, trial)) < best - 1e-7:
                factors, best = trial, error
        if start - best < 1e-4:
            break
    return factors


def read(path: Path) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Topology (GPUs per node, nodes) -> times alone (rows x 4) and together, for rows where at least two run."""
    rows: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in itertools.islice(csv.reader(file), 1, None):
            rows[int(row[0]), int(row[1])].append([float(x) for x in row[2:7]])
    out = {}
    for topology, table in sorted(rows.items()):
        alone_ms = {}
        for row in table:
            active = [i for i in range(4) if row[i] > 0]
            if len(active) == 1:
                alone_ms[active[0], row[active[0]]] = row[4]
        together = [row for row in table if sum(x > 0 for x in row[:4]) > 1]
        alone = np.array([[alone_ms[i, row[i]] if row[i] > 0 else 0.0 for i in range(4)] for row in together])
        out[topology] = alone, np.array([row[4] for row in together])
    return out


def cross_validate(alone: Array, measured: Array, folds: int) -> Array:
    """Relative errors of rows predicted by a fit that did not see them."""
    order = np.random.default_rng(0).permutation(len(measured))
    errors = np.empty(len(measured))
    for fold in range(folds):
        out = order[fold::folds]
        keep = np.setdiff1d(order, out)
        errors[out] = predict(alone[out], fit(alone[keep], measured[keep])) / measured[out] - 1
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder with mist_concurrency_*.csv")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--emit", action="store_true", help="print the fitted factors as C++ initializers")
    options = parser.parse_args()
    errors: dict[str, list[Array]] = {gpu: [] for gpu in GPUS}
    for gpu in GPUS:
        path = options.data / f"mist_concurrency_{gpu}.csv"
        if not path.exists():
            print(f"{path} is not there; give the folder with --data", file=sys.stderr)
            return 2
        for (per_node, nodes), (alone, measured) in read(path).items():
            factors = fit(alone, measured)
            if options.emit:
                text = ", ".join(f"{f:.3f}" for f in factors)
                print(f'    {{"{gpu}", {per_node}, {nodes}, {{{text}}}}},')
                continue
            left_out = cross_validate(alone, measured, options.folds)
            errors[gpu].append(left_out)
            print(
                f"{gpu:5} {per_node} x {nodes} nodes: {len(measured)} rows, fit {100 * score(alone, measured, factors):.2f} %,"
                f" cross-validated {100 * np.abs(left_out).mean():.2f} %, worst {100 * np.abs(left_out).max():.1f} %",
                flush=True,
            )
            if nodes == 1 and per_node == 8:
                for s in SETS:
                    parts = [f"{CLASSES[i]} {factors[MEMBERS.index((s, i))]:.3f}" for i in s]
                    print("        together: " + ", ".join(parts))
    if not options.emit:
        for gpu in GPUS:
            joined = np.concatenate(errors[gpu])
            print(
                f"{gpu}: cross-validated mean absolute error {100 * np.abs(joined).mean():.2f} % over {len(joined)} rows"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
