"""Captured optimizers against PyTorch, on real ranks: the same losses and weights, whatever the strategy.

`make test` runs each of them once, in turn over models, strategies and ranks; `make soak` runs all combinations.
"""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
import ranks
from parity import Setting

STEPS = 12
STRATEGIES = ("shard", "zero1", "replicate")
CASES = ("llama", "vit")
# Those that look at the sign of a gradient alone: where it is zero but for rounding, as that of an attention's key bias, nobody can say
# which way they go. The loss does not depend on such weights.
SIGNS = {"rprop", "lion"}


def check(kind: str, case: str, size: int, settings: list[Setting], folder: Path) -> None:
    found = ranks.run(parity.compare, size, case, "float64", kind, STEPS, settings, ("one",), cache=str(folder), timeout_s=900)[0]
    for setting, distances in zip(settings, found, strict=True):
        far = distances["one"]
        assert far.loss <= 1e-6, f"{kind} {case} {setting} on {size} ranks: {far}"
        assert far.weights <= 1e-6 or (kind in SIGNS and case == "vit"), f"{kind} {case} {setting} on {size} ranks: {far}"


@pytest.mark.parametrize("number, kind", list(enumerate(parity.RULES)), ids=list(parity.RULES))
def test_each_optimizer(number: int, kind: str, tmp_path: Path) -> None:
    setting = Setting(strategy=STRATEGIES[number % 3], clip=0.3 if number % 2 else None, accumulation=1 + number % 2)
    check(kind, CASES[number % 2], 1 + (number + number // 2) % 2, [setting], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", list(parity.RULES))
def test_every_optimizer(kind: str, case: str, size: int, tmp_path: Path) -> None:
    settings = [Setting(strategy=s, clip=c, accumulation=a) for s in STRATEGIES for c, a in ((None, 1), (0.3, 2))]
    check(kind, case, size, settings, tmp_path)
