"""Tensor parallelism on real ranks: the numbers of one process, the same bits twice, checkpoints between meshes, and what cannot be."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import ranks
import tensor_models
from test_trainer_bits import digest

STEPS = 20


def distances(name: str, mesh: dict[str, int], settings: list[dict[str, Any]]) -> list[parity.Distance]:
    places = mesh.get("dp", 1)
    known: dict[Any, parity.Run] = {}
    found = []
    for config in settings:
        key = config.get("clip_norm"), config.get("accumulation", 1)
        if key not in known:
            known[key] = tensor_models.in_one_process(name, STEPS, places, *key)
        found.append(parity.distance(tensor_models.on_mesh(name, STEPS, mesh=mesh, **config), known[key]))
    return found


EACH: list[dict[str, Any]] = [{"accumulation": a, "clip_norm": c} for a in (1, 4) for c in (None, 0.3)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_numbers_of_one_process(name: str, size: int) -> None:
    for config, distance in zip(EACH, ranks.run(distances, size, name, {"tp": size}, EACH, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"
