"""Random settings of whole trainings (random_settings.py): a few here, many in `make soak`."""

from __future__ import annotations

import pytest
import random_settings

SAMPLE = {2: (18,), 3: (14,), 4: (50,)}  # a profile of one shard; values that skip a stage; a search of stages
SOAK = 40


@pytest.mark.parametrize(("size", "seed"), [(size, seed) for size, seeds in SAMPLE.items() for seed in seeds])
def test_the_numbers_of_one_process(size: int, seed: int) -> None:
    said = random_settings.outcome(seed, size)
    assert not said, f"{random_settings.drawn(seed, size)}: {said}"


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_many(size: int) -> None:
    """Trained with the numbers of one process, or refused when compiled; most are trained, for stages that are alike."""
    outcomes = {seed: random_settings.outcome(seed, size) for seed in range(100, 100 + SOAK)}
    wrong = {seed: said for seed, said in outcomes.items() if said and not said.startswith("refused: ")}
    assert not wrong, "\n".join(f"seed {seed}: {random_settings.drawn(seed, size)}: {said}" for seed, said in wrong.items())
    assert size == 3 or sum(not said for said in outcomes.values()) > SOAK / 2
