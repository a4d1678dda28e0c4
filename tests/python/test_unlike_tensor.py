"""Stages that cut products over other numbers of ranks, on real ranks: the numbers of one process, checkpoints, what cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
from safetensors.torch import load_file
from test_trainer_bits import digest
from test_unlike_stages import distances, evaluated, resumed

from interlace.checkpoint.contents import MODEL, OPTIMIZER

THREE: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": 1, "tp": (2, 1)}, "stage_order": "1f1b"},
    {"mesh": {"pp": 2, "dp": 1, "tp": (1, 2)}, "stage_order": "auto", "clip_norm": 0.3},
    {"mesh": {"pp": 2, "dp": 1, "tp": (2, 1)}, "strategy": "shard+zero1", "sequence_parallel": False, "clip_norm": 0.3},
]


@pytest.mark.parametrize("name", ["llama", "vit", "tied"])
def test_the_numbers_of_one_process(name: str) -> None:
    for config, distance in zip(THREE, ranks.run(distances, 3, name, THREE, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


FOUR: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": (1, 2), "tp": (2, 1)}, "clip_norm": 0.3},
    {"mesh": {"pp": 2, "dp": (2, 1), "tp": (1, 2)}, "stage_order": "zero_bubble", "strategy": "zero1+shard"},
    {"mesh": {"pp": 3, "dp": 1, "tp": (1, 2, 1)}, "stage_order": "gpipe"},
]


def test_rows_and_products_cut_unlike() -> None:
    for config, distance in zip(FOUR, ranks.run(distances, 4, "llama", FOUR, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def test_evaluate() -> None:
    one = ranks.run(evaluated, 1, None, "llama")[0]
    for tp in ((2, 1), (1, 2)):
        assert ranks.run(evaluated, 3, {"pp": 2, "dp": 1, "tp": tp}, "llama")[0] == pytest.approx(one, rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_other_models(name: str) -> None:
    for size, settings in ((3, THREE), (4, FOUR)):
        for config, distance in zip(settings, ranks.run(distances, size, name, settings, timeout_s=300)[0], strict=True):
            assert distance.within(1e-9), f"{config}: {distance}"


def test_a_checkpoint_loads_on_any_other_mesh(tmp_path: Path) -> None:
    """Saved after three steps, loaded and saved again elsewhere: the same tensors."""
    unlike: dict[str, Any] = {"pp": 2, "dp": 1, "tp": (2, 1)}
    start = tmp_path / "start"
    ranks.run(resumed, 3, str(start), 0, 3, unlike, "llama")
    for size, mesh in ((1, None), (2, {"dp": 1, "tp": 2}), (3, {"pp": 2, "dp": 1, "tp": (1, 2)})):
        folder = tmp_path / f"{size} {mesh}"
        shutil.copytree(start, folder)
        ranks.run(resumed, size, str(folder), 3, 3, mesh, "llama")
        for file in (MODEL, OPTIMIZER):
            assert digest(load_file(folder / file)) == digest(load_file(start / file)), f"{file}, {mesh}"


TIED: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": (1, 2), "tp": (2, 1)}, "clip_norm": 0.3, "strategy": "zero1"},
    {"mesh": {"pp": 2, "dp": (2, 1), "tp": (1, 2)}, "stage_order": "zero_bubble", "strategy": "zero1+shard"},
    {"mesh": {"pp": 3, "dp": 1, "tp": (1, 2, 1)}, "stage_order": "gpipe"},
]


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_tied_weights_stay_whole(name: str) -> None:
    """Their stages put the parts of the gradient together; of GPT-2 the first has nothing but the embedding."""
    for config, distance in zip(TIED, ranks.run(distances, 4, name, TIED, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"
