"""The few constants of a cluster that explain measured runs, with their uncertainty.

    found = fit(runs, Predictor())
    found.constants["products"], found.spread["products"]     # 0.71, 0.03: one standard deviation of its logarithm
    found.undetermined                                        # the runs say no more of these than was known before

Each constant's logarithm has a prior around the cluster's own value, as wide as presets of the same kind differ; what runs add
is linear around the best point (Gauss-Newton), so its covariance says what they determine, and what one more run would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from interlace.calibrate.predict import CONSTANTS, Predictor, cluster_text, value_of
from interlace.calibrate.runs import Run
from interlace.errors import InterlaceError

Array = NDArray[np.float64]
# Standard deviations of logarithms.
PRIOR = {"products": 0.25, "attention": 0.4, "memory": 0.3, "issue_us": 1.0, "issue_backward": 0.7, "inter": 0.4}
LIMITS = {
    "products": (0.05, 1.0), "attention": (0.05, 1.5), "memory": (0.05, 4.0), "issue_us": (0.05, 1000.0), "issue_backward": (0.05, 4.0),
    "inter": (0.05, 1.5),
}  # fmt: skip
STEP = 0.04  # of the differences
HUBER = 1.345  # deviations; of normal errors 95 % of least squares' efficiency (Huber 1964)
LEAST_NOISE = 0.015  # of a measured step: what two runs of the same differ by
KNOWN = 0.7  # a constant whose uncertainty is above this share of the prior's is not determined


@dataclasses.dataclass(frozen=True)
class Fit:
    constants: dict[str, float]
    spread: dict[str, float]  # standard deviation of a constant's logarithm
    noise: float  # of one run's logarithm, with the right constants
    residuals: list[float]  # ln(measured / predicted), run by run
    precision: Array  # inverse covariance of the logarithms, in the order of CONSTANTS

    @property
    def undetermined(self) -> list[str]:
        return [name for name in CONSTANTS if self.spread[name] > KNOWN * PRIOR[name]]

    def outliers(self, runs: Sequence[Run]) -> list[tuple[Run, float]]:
        """Runs that these constants do not explain, and by which factor they are off: far out of the others' scatter."""
        middle = float(np.median(self.residuals)) if len(runs) > 1 else 0.0
        scatter = max(1.4826 * float(np.median(np.abs(np.array(self.residuals) - middle))), 0.03) if len(runs) > 1 else self.noise
        far = max(5 * scatter, 0.25)
        return [(run, math.exp(r)) for run, r in zip(runs, self.residuals, strict=True) if abs(r - middle) > far or abs(r) > 1.1]


def own_constants(run: Run, base: str = "") -> dict[str, float]:
    """Those of the run's cluster and stack."""
    text = cluster_text(run, base)
    out = {name: value_of(text, f"step.{run.stack}", name) for name in CONSTANTS if name != "inter"}
    issue = out["issue_us"] if out["issue_us"] is not None else value_of(text, "device", "issue_us")
    return {**{name: 1.0 if value is None else value for name, value in out.items()}, "issue_us": max(issue or 0.0, 0.05), "inter": 1.0}


def one_machine(runs: Sequence[Run]) -> None:
    """Error: runs of several kinds of GPU or stacks, whose constants differ."""
    for what, kinds in (("GPUs", {run.gpu for run in runs}), ("software stacks", {run.stack for run in runs})):
        if len(kinds) > 1:
            raise InterlaceError(f"the runs are of several {what} ({', '.join(sorted(kinds))}): choose one with --only")


def contradictions(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs that say the same of themselves and take times more than a fifth apart."""
    seen: dict[Run, Run] = {}
    out = []
    for run in runs:
        key = dataclasses.replace(run, line=0, label="", step_us=0.0, peak_bytes=0)
        other = seen.setdefault(key, run)
        if max(other.step_us, run.step_us) > 1.2 * min(other.step_us, run.step_us):
            out.append((other, run))
    return out


def fit(runs: Sequence[Run], predictor: Predictor, say: Callable[[str], None] | None = None) -> Fit:
    """Error: no runs; runs of several machines."""
    if not runs:
        raise InterlaceError("no runs to calibrate with")
    one_machine(runs)
    begin = own_constants(runs[0], predictor.base)
    prior = np.diag([PRIOR[name] ** -2 for name in CONSTANTS])
    low = np.array([math.log(LIMITS[name][0] / begin[name]) for name in CONSTANTS])
    high = np.array([math.log(LIMITS[name][1] / begin[name]) for name in CONSTANTS])

    def constants(point: Array) -> dict[str, float]:
        return {name: begin[name] * math.exp(x) for name, x in zip(CONSTANTS, point, strict=True)}

    def residuals(point: Array) -> Array:
        given = constants(point)
        return np.array([math.log(run.step_us / predictor.predict(run, given)[0]) for run in runs])

    point = np.zeros(len(CONSTANTS))
    left = residuals(point)
    noise = 0.05
    precision = prior
    for round_ in range(12):
        slope = _slope(residuals, point, left)
        # Huber's weights: a run beyond the others' scatter (that of a normal distribution with their median) pulls no harder
        # than one at its edge, as whole kinds of runs may be off which no constant explains. One run alone has no others.
        edge = HUBER * max(LEAST_NOISE, 1.4826 * float(np.median(np.abs(left))))
        weights = 1 / np.maximum(1.0, np.abs(left) / edge) if len(runs) > 1 else np.ones(1)
        precision = prior + (slope.T * weights) @ slope / noise**2
        move = -np.linalg.solve(precision, (slope.T * weights) @ left / noise**2 + prior @ point)
        point = np.clip(point + move, low, high)
        left = residuals(point)
        used = float(np.trace(np.linalg.solve(precision, precision - prior)))
        if len(runs) > 1:
            noise = max(LEAST_NOISE, math.sqrt(float((weights * left**2).sum()) / max(len(runs) - used, 1.0)))
        if say:
            say(f"round {round_ + 1}: mean error {100 * float(np.abs(np.expm1(-left)).mean()):.1f} %")
        if float(np.abs(move).max()) < 0.01:
            break
    slope = _slope(residuals, point, left)
    precision = prior + slope.T @ slope / noise**2
    variance = np.diag(np.linalg.inv(precision))
    spread = {name: math.sqrt(v) for name, v in zip(CONSTANTS, variance, strict=True)}
    return Fit(constants(point), spread, noise, [float(x) for x in left], precision)


def _slope(residuals: Callable[[Array], Array], point: Array, here: Array) -> Array:
    columns = []
    for k in range(len(point)):
        moved = point.copy()
        moved[k] += -STEP  # towards slower, which no limit forbids
        columns.append((residuals(moved) - here) / -STEP)
    return np.array(columns).T


def slope_of(run: Run, predictor: Predictor, constants: Mapping[str, float]) -> Array:
    """d ln(measured / predicted) / d ln(constant), in the order of CONSTANTS."""
    here = math.log(predictor.predict(run, constants)[0])
    moved = [predictor.predict(run, {**constants, name: value * math.exp(-STEP)})[0] for name, value in constants.items()]
    return np.array([(math.log(us) - here) / STEP for us in moved])


def interval_error(run: Run, found: Fit, predictor: Predictor, noise: float) -> float:
    """Standard deviation of ln(measured / predicted) of a run that was not fitted: the `noise` of such runs, and the constants'."""
    slope = slope_of(run, predictor, found.constants)
    return math.sqrt(noise**2 + float(slope @ np.linalg.solve(found.precision, slope)))


def deciding_run(name: str, runs: Sequence[Run], found: Fit, predictor: Predictor) -> tuple[Run, float] | None:
    """The run that would tell most of a constant, and its uncertainty then. None: none of the likely ones tells anything."""
    place = CONSTANTS.index(name)
    best: tuple[Run, float] | None = None
    for run in candidates(runs):
        slope = slope_of(run, predictor, found.constants)
        after = math.sqrt(np.linalg.inv(found.precision + np.outer(slope, slope) / found.noise**2)[place, place])
        if after < 0.9 * found.spread[name] and (best is None or after < best[1]):
            best = run, after
    return best


def candidates(runs: Sequence[Run]) -> list[Run]:
    """Runs unlike those there are: short and long sequences, small and large micro-batches, one node and several."""
    out = []
    for run in runs[:: max(1, len(runs) // 2)][:2]:
        tokens = run.micro_batch * run.seq
        for seq in (512, 2048, 16384):
            out.append(dataclasses.replace(run, seq=seq, micro_batch=max(1, tokens // seq), accumulation=1))
        out.append(dataclasses.replace(run, micro_batch=1, accumulation=1, seq=min(run.seq, 1024)))
        node = max(1, 8 // (run.tp * run.pp)) * run.tp * run.pp
        for gpus in {node, 4 * node}:
            if gpus % 8 == 0 or gpus < 8:
                out.append(dataclasses.replace(run, gpus=gpus, dp=gpus // (run.tp * run.pp), zero=3, accumulation=1, micro_batch=1))
    return out
