"""Tensor parallelism on real ranks against one process of plain PyTorch: every model, mesh, strategy, accumulation and clipping.

`make test` runs a sample beside that of test_tensor_parallel.py, `make soak` the whole table.
"""

from __future__ import annotations

from typing import Any

import pytest
import ranks
from test_tensor_parallel import EACH, STRATEGIES, distances

MODELS = ("llama", "qwen3", "gpt2", "vit", "t5", "mixtral")
BOUND = 1e-9


def check(name: str, mesh: dict[str, int], settings: list[dict[str, Any]]) -> None:
    size = mesh.get("dp", 1) * mesh["tp"]
    found = ranks.run(distances, size, name, mesh, settings, timeout_s=600)[0]
    for config, distance in zip(settings, found, strict=True):
        assert distance.within(BOUND), f"{name}, {mesh}, {config}: {distance}"


@pytest.mark.parametrize("name", ["vit", "t5", "mixtral"])
def test_a_sample(name: str) -> None:
    check(name, {"tp": 2}, EACH[:1] + EACH[3:])


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_alone(name: str, size: int) -> None:
    check(name, {"tp": size}, EACH)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MODELS)
def test_with_data_parallelism(name: str) -> None:
    check(name, {"dp": 2, "tp": 2}, STRATEGIES)
