"""Adafactor, whose step needs sums over whole parameters, against PyTorch's own, on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
from torch import nn

import interlace

Tensor = torch.Tensor
STRATEGIES = ("shard", "zero1", "replicate")


class Shapes(nn.Module):
    """Parameters of all numbers of dimensions: a scalar, vectors, matrices that ranks cut amid rows, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 37), nn.Linear(37, 3, bias=False)
        self.conv = nn.Conv1d(1, 5, 7, padding=3)
        self.cube = nn.Parameter(torch.randn(5, 3, 11) / 4)
        self.deep = nn.Parameter(torch.randn(2, 3, 4, 3) / 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.conv(hidden[:, None]).tanh().mean(1)
        hidden = hidden + torch.einsum("bi,aci->bac", hidden[:, :11], self.cube).sum((1, 2))[:, None] * self.scale
        return self.last(hidden) * torch.tanh(self.deep.sum((0, 2)) @ x[:, :3].T).mean()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - 1).square().mean()


def batch_at(step: int, rank: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))}


def optimizer_of(model: nn.Module, **settings: Any) -> torch.optim.Adafactor:
    """Matrices and vectors in one group, as most people have them, and a second one."""
    groups = [{"params": [p for n, p in model.named_parameters() if n != "cube"]}, {"params": [model.cube], "weight_decay": 0.0}]
    return torch.optim.Adafactor(groups, **{"lr": 0.05, "weight_decay": 0.1, **settings})


def trainer_of(model: nn.Module, settings: dict[str, Any] | None = None, **config: Any) -> interlace.Trainer:
    return interlace.compile(model, optimizer_of(model, **settings or {}), loss_of, batch_at(0), interlace.Config(cache="off", **config))


def compiled(settings: dict[str, Any], config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    rank, _ = parity.rank_and_size()
    with trainer_of(Shapes(), settings, **{"schedule": [], **config}) as trainer:
        losses = [parity.mean_over_ranks(trainer.step(batch_at(step, rank))) for step in range(6)]
        return losses, dict(trainer.state_dict(all_ranks=True))


def in_pytorch(settings: dict[str, Any], config: dict[str, Any], size: int) -> tuple[list[float], dict[str, Tensor]]:
    model = Shapes()
    optimizer = optimizer_of(model, **settings)
    losses = []
    for step in range(6):
        parts = [loss_of(model, batch_at(step, rank)) / size for rank in range(size)]
        for part in parts:
            part.backward()
        if config.get("clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), config["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(part.detach()) for part in parts))
    return losses, dict(model.state_dict())


def check(size: int, settings: dict[str, Any], config: dict[str, Any]) -> None:
    far = parity.distance(ranks.run(compiled, size, settings, config)[0], in_pytorch(settings, config, size))
    assert far.loss <= 1e-9 and far.weights <= 1e-9, f"{settings} {config} on {size} ranks: {far}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_shape_gives_pytorchs_numbers(size: int, strategy: str) -> None:
    check(size, {}, {"strategy": strategy})


@pytest.mark.parametrize(
    "settings, config",
    [
        ({"eps": (1e-4, 0.5), "d": 1.25}, {"strategy": "shard", "clip_norm": 0.3}),
        ({"maximize": True, "beta2_decay": -0.3}, {"strategy": "zero1", "clip_norm": 0.3}),
        ({"lr": 1.0, "weight_decay": 0.0}, {"strategy": "replicate"}),
    ],
)
def test_settings_of_adafactor(settings: dict[str, Any], config: dict[str, Any]) -> None:
    check(2, settings, config)


def test_hybrid_sharding() -> None:
    check(4, {}, {"mesh": {"replica": 2, "dp": 2}})
    check(4, {}, {"mesh": {"replica": 2, "dp": 2}, "strategy": "zero1"})


def test_averages_take_the_memory_of_rows_and_columns() -> None:
    with trainer_of(Shapes(), schedule=[]) as trainer:
        trainer.step(batch_at(0))
        states = trainer.optimizer_state_dict()["state"]
        of_cube = {name: tuple(t.shape) for name, t in states[len(states) - 1].items()}
        assert of_cube == {"step": (), "row_var": (5, 3, 1), "col_var": (5, 1, 11)}
        sizes = re.findall(r"state %\d+: f64\[(\d+)\] u\d+\.(?:row|col)_var_of_u\d+ persistent", trainer.program)
        assert len(sizes) == 10 and max(map(int, sizes)) == 64  # of five matrices, padded to 32


def test_training_goes_on_from_pytorch_and_back() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            loss_of(model, batch_at(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = Shapes()
    steps(plain, optimizer_of(plain), range(9))
    model = Shapes()
    optimizer = optimizer_of(model)
    steps(model, optimizer, range(3))
    with interlace.compile(model, optimizer, loss_of, batch_at(0), interlace.Config(cache="off")) as trainer:
        for step in range(3, 6):
            trainer.step(batch_at(step))
        weights, state = trainer.state_dict(), optimizer.state_dict()
    again = Shapes()
    again.load_state_dict(weights)
    optimizer = optimizer_of(again)
    optimizer.load_state_dict(state)
    steps(again, optimizer, range(6, 9))
    for p, q in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def saved(folder: str, strategy: str) -> list[float]:
    with trainer_of(Shapes(), strategy=strategy) as trainer:
        for step in range(4):
            trainer.step(batch_at(step))
        trainer.save(folder)
        return [float(trainer.step(batch_at(step))) for step in range(4, 8)]


def resumed(folder: str, strategy: str) -> list[float]:
    with trainer_of(Shapes(), strategy=strategy) as trainer:
        trainer.step(batch_at(99))
        trainer.load(folder)
        return [float(trainer.step(batch_at(step))) for step in range(4, 8)]


def test_checkpoints_load_at_another_number_of_ranks(tmp_path: Path) -> None:
    expected = ranks.run(saved, 2, str(tmp_path / "saved"), "shard")[0]
    for size, strategy in ((2, "shard"), (1, "replicate"), (3, "zero1")):
        losses = ranks.run(resumed, size, str(tmp_path / "saved"), strategy)[0]
        assert losses == pytest.approx(expected, rel=1e-9), f"{size} ranks, {strategy}"


def with_passes(schedule: list[str], tier: str | None, strategy: str) -> list[float]:
    rank, _ = parity.rank_and_size()
    with trainer_of(Shapes(), schedule=[(0, schedule)], tier=tier, arena=tier is None, strategy=strategy) as trainer:
        return [float(trainer.step(batch_at(step, rank))) for step in range(5)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_that_move_updates_change_no_bit(strategy: str) -> None:
    plain = ranks.run(with_passes, 2, [], None, strategy)
    ways: list[tuple[list[str], str | None]] = [
        (["overlap_update"], None), (["reposition_update"], None), (["bucket(modules=*)", "reorder"], None),
        (["search(evaluations=60)"], None),
    ]  # fmt: skip
    if strategy == "shard":
        ways += [(["host_update"], "host"), (["offload(limit=1MiB)"], "host")]
    for passes, tier in ways:
        assert ranks.run(with_passes, 2, passes, tier, strategy) == plain, passes


def test_what_is_in_the_program_is_fixed() -> None:
    model = Shapes()
    optimizer = optimizer_of(model)
    with interlace.compile(model, optimizer, loss_of, batch_at(0), interlace.Config(cache="off")) as trainer:
        trainer.step(batch_at(0))
        optimizer.param_groups[1]["d"] = 2.0
        with pytest.raises(interlace.InterlaceError) as e:
            trainer.step(batch_at(1))
    assert str(e.value) == "optimizer group 1 has other eps or d now than when compiled; compile again with them"
