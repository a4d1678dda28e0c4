"""Runs left out of the fit in groups, and the interval that their errors give.

    for run, us, error in cross_validated(runs, Predictor(), FOLDS["model"]):
        abs(math.log(run.step_us / us)) <= ONE_IN_TEN * error      # so for 80 of 100 runs

What fitted runs are off by understates what others will be: runs of one model and length are off together, and the constants have
bent to them. An interval is therefore the quantile of the errors of whole groups that were left out (split conformal, with the
finite-sample correction), wider where there are few groups, and never below what the constants of one model were off on others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from interlace.calibrate.fit import Fit, fit, interval_error
from interlace.calibrate.predict import Predictor
from interlace.calibrate.runs import Run

ONE_IN_TEN = 1.2816  # standard deviations beyond which one of ten lies, on either side
# The same of Student's distribution with 1, 2, ... degrees of freedom: groups beyond the first.
STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383)
# Constants from MPT-7B alone were 4.2 % off on average on 55 runs of other sizes on H100: a standard deviation of 5 %.
ONE_MODEL = 0.05
MANY = 12  # groups from which on leaving out one more beside each changes nothing that is worth its time

Residuals = Mapping[object, Sequence[float]]  # ln(measured / predicted) of runs left out, by group
FOLDS: dict[str, Callable[[Run], object]] = {
    "model": lambda run: (run.size, run.seq), "size": lambda run: run.gpus, "run": lambda run: run.line
}  # fmt: skip


def quantile(residuals: Sequence[float], share: float = 0.8) -> float:
    """Of the absolute residuals: one more run is within it with at least this probability; the largest where they are too few."""
    ordered = sorted(abs(r) for r in residuals)
    return ordered[min(math.ceil((len(ordered) + 1) * share), len(ordered)) - 1]


def error_of(residuals: Residuals, one_model: bool) -> float:
    """Standard deviation of ln(measured / predicted) whose 80 % interval is the one that the left out runs give."""
    groups = len(residuals)
    within = quantile([r for group in residuals.values() for r in group]) / ONE_IN_TEN
    wider = STUDENT[groups - 2] / ONE_IN_TEN if 2 <= groups < len(STUDENT) + 2 else STUDENT[0] / ONE_IN_TEN if groups < 2 else 1.0
    return max(within, ONE_MODEL if one_model else 0.0) * wider


def one_model(runs: Sequence[Run]) -> bool:
    return len({run.size for run in runs}) == 1


def off(run: Run, found: Fit, predictor: Predictor) -> float:
    return math.log(run.step_us / predictor.predict(run, found.constants)[0])


def left_out(runs: Sequence[Run], predictor: Predictor, say: Callable[[str], None] | None = None) -> tuple[float, str]:
    """The error that a cluster file keeps of its stack, and where it is from. (0, ""): all runs are of one group."""
    ways = {"model and length": FOLDS["model"], "GPUs": FOLDS["size"]}
    for name, fold_of in ways.items():
        folds = _folds(runs, fold_of)
        if len(folds) < 2:
            continue
        residuals = {}
        for fold, group in folds.items():
            if say:
                say(f"without {fold}")
            found = fit([run for run in runs if fold_of(run) != fold], predictor)
            residuals[fold] = [off(run, found, predictor) for run in group]
        alone = one_model(runs)
        floor = ", at least what one model's constants are off on others" if alone else ""
        return error_of(residuals, alone), f"runs left out in turn by {name}, {len(folds)} groups{floor}"
    return 0.0, ""


def cross_validated(
    runs: Sequence[Run], predictor: Predictor, fold_of: Callable[[Run], object], say: Callable[[str], None] | None = None
) -> list[tuple[Run, float, float]]:
    """(run, predicted us, standard deviation of the logarithm) of every run, by constants fitted without its group. Its interval is
    from groups that were left out beside it, so nothing of a group is known to what is said of it."""
    folds = _folds(runs, fold_of)
    names = list(folds)

    def without(*out: object) -> Fit:
        if say:
            say("without " + " and ".join(str(fold) for fold in out))
        return fit([run for run in runs if fold_of(run) not in out], predictor)

    single = {fold: without(fold) for fold in names} if len(names) > 1 else {}
    beside: dict[object, dict[object, list[float]]] = {fold: {} for fold in names}
    if 2 < len(names) <= MANY:
        for one, other in itertools.combinations(names, 2):
            found = without(one, other)
            beside[one][other] = [off(run, found, predictor) for run in folds[other]]
            beside[other][one] = [off(run, found, predictor) for run in folds[one]]
    elif len(names) > MANY:
        alone = {fold: [off(run, single[fold], predictor) for run in folds[fold]] for fold in names}
        beside = {fold: {other: group for other, group in alone.items() if other != fold} for fold in names}
    out = []
    for fold, found in single.items():
        rest = [run for run in runs if fold_of(run) != fold]
        # Of two groups none is left to be left out beside one: what the other scatters, and no degree of freedom.
        known: Residuals = beside[fold] or {None: [ONE_IN_TEN * found.noise]}
        error = error_of(known, one_model(rest))
        for run in folds[fold]:
            out.append((run, predictor.predict(run, found.constants)[0], interval_error(run, found, predictor, error)))
    return out


def _folds(runs: Sequence[Run], fold_of: Callable[[Run], object]) -> dict[object, list[Run]]:
    folds: dict[object, list[Run]] = {}
    for run in runs:
        folds.setdefault(fold_of(run), []).append(run)
    return folds
