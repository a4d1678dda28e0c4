"""Tensor parallelism on real ranks against one process of plain PyTorch: every model, mesh, strategy, accumulation and clipping.

`make test` runs a sample beside that of test_tensor_parallel.py, `make soak` the whole table.
"""

from __future__ import annotations

from typing import Any

import parity
import pytest
import ranks
import tensor_models
import torch
from test_tensor_parallel import EACH, STRATEGIES, distances
from test_trainer_bits import digest

import interlace

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


def bits(name: str, mesh: dict[str, int], settings: list[dict[str, Any]]) -> list[list[str]]:
    """For each setting, what two runs in float32 ended with."""
    found = []
    for config in settings:
        runs = [tensor_models.on_mesh(name, 5, torch.float32, mesh=mesh, cache="off", **config) for _ in range(2)]
        found.append([f"{losses} {digest(weights)}" for losses, weights in runs])
    return found


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_twice(name: str, mesh: dict[str, int]) -> None:
    settings = STRATEGIES[::3] if "dp" in mesh else [EACH[0], EACH[3]]
    of_ranks = ranks.run(bits, mesh.get("dp", 1) * mesh["tp"], name, mesh, settings, timeout_s=600)
    for config, found in zip(settings, zip(*of_ranks, strict=True), strict=True):
        assert len({text for of_rank in found for text in of_rank}) == 1, f"{name}, {mesh}, {config}"


def bias_only(mesh: dict[str, int] | None, plan: str) -> tuple[list[float], int]:
    """A GPT-2 of which only biases and norms learn, and the lines of the program that cut."""
    model = tensor_models.build("gpt2")
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias") or ".ln_" in name)
    settings = interlace.Config(mesh=mesh, tensor=plan if mesh else "auto", timeout_s=60, cache=ranks.CACHE, schedule=[], profile="off")
    batch = tensor_models.batch_of(0, 0)
    with interlace.compile(model, parity.make_optimizer("adamw", model), tensor_models.loss_of, batch, settings) as trainer:
        return tensor_models.steps(trainer, 0, 5), trainer.program.count(" cut tp ")


@pytest.mark.parametrize("plan", ["auto", "model"])
def test_frozen_weights_are_cut_as_others(plan: str) -> None:
    (alone, _), (cut, lines) = ranks.run(bias_only, 1, None, plan)[0], ranks.run(bias_only, 2, {"tp": 2}, plan)[0]
    assert cut == pytest.approx(alone, rel=BOUND)
    assert lines > 0 or plan == "auto"  # which keeps so small a model whole
