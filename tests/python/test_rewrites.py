"""Trained parameters that the model's own forward writes: masked, made of norm one, clamped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import CaptureError

Tensor = torch.Tensor
STEPS = 5


class Net(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.words = write, nn.Embedding(7, 4, max_norm=0.5 if write is renormed else None)
        self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([[1.0, 0.0, 1.0, 1.0]]).repeat(6, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x).mean(1)
        if self.write in (renormed, too_late):
            y = F.linear(y, self.fc.weight)
            self.write(self, x)
        else:
            self.write(self, x)
            y = self.fc(y)
        return self.head(y)


def renormed(net: Net, x: Tensor) -> None:
    """By the embedding itself."""


def masked(net: Net, x: Tensor) -> None:
    net.fc.weight.data *= net.mask


def of_norm_one(net: Net, x: Tensor) -> None:
    net.fc.weight.data = F.normalize(net.fc.weight.data)


def copied(net: Net, x: Tensor) -> None:
    net.fc.weight.data.copy_(F.normalize(net.fc.weight.data))


@torch.no_grad()
def clamped(net: Net, x: Tensor) -> None:
    net.fc.weight.clamp_(-0.2, 0.2)
    net.head.bias.clamp_(min=0)


def a_row(net: Net, x: Tensor) -> None:
    net.fc.weight.data[0] = 0


def decayed(net: Net, x: Tensor) -> None:
    net.fc.weight.data.mul_(0.9).add_(net.fc.bias.data[:, None], alpha=0.1)


@torch.no_grad()
def built(net: Net, x: Tensor) -> None:
    """Of a tensor that is written by parts, as PEFT's constrained OFT does."""
    made = torch.zeros(6, 6, dtype=torch.double)
    made[:, torch.arange(4)] = net.fc.weight
    made = made + made.T
    net.fc.weight.copy_(F.normalize(made)[:, :4])


def too_late(net: Net, x: Tensor) -> None:
    masked(net, x)


def drawn(net: Net, x: Tensor) -> None:
    net.fc.weight.data += torch.randn_like(net.fc.weight)


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(0, 7, (4, 3), generator=generator), "y": torch.randn(4, 3, generator=generator).double()}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs_of(model: nn.Module, batch: Any) -> Tensor:
    """Writes twice."""
    return F.mse_loss(model(batch["x"]), batch["y"]) + model(batch["x"] // 2).square().mean()


def plain(model: nn.Module, size: int, loss_of: Any) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        parts = [loss_of(model, batch_of(10 * step + rank)) / size for rank in range(size)]
        optimizer.zero_grad()
        for loss in parts:
            loss.backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in parts))
    with torch.no_grad():
        return [*losses, loss_of(model, batch_of(0)).item()]


def ours(write: Callable[[Net, Tensor], Any], loss_of: Any = loss_of, **config: Any) -> tuple[float, float]:
    """How far losses, an evaluation's too, and parameters are from those of plain steps."""
    rank, size = parity.rank_and_size()
    model = Net(write)
    other = copy.deepcopy(model)
    expected = plain(other, size, loss_of)
    settings = interlace.Config(timeout_s=60, schedule=[], cache="off", **config)
    with interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=0.05), loss_of, batch_of(rank), settings) as trainer:
        losses = [parity.mean_over_ranks(trainer.step(batch_of(10 * step + rank))) for step in range(STEPS)]
        losses.append(trainer.evaluate(batch_of(0))["loss"].item())
        found = trainer.state_dict()
    apart = [(t - found[name]).abs().max().item() for name, t in other.state_dict().items() if name in found]
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), max(apart, default=0.0)


@pytest.mark.parametrize("write", [renormed, masked, of_norm_one, copied, clamped, a_row, decayed, built], ids=lambda f: f.__name__)
def test_what_forward_writes(write: Callable[[Net, Tensor], Any]) -> None:
    assert max(ours(write)) < 1e-12


@pytest.mark.parametrize("write", [renormed, masked, of_norm_one, copied], ids=lambda f: f.__name__)
def test_a_model_that_is_called_twice(write: Callable[[Net, Tensor], Any]) -> None:
    assert max(ours(write, pairs_of)) < 1e-12
    with pytest.raises(interlace.InterlaceError, match=r"parameter 'fc\.weight' is changed by each run of the model"):
        ours(decayed, pairs_of)


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_on_two_ranks(strategy: str) -> None:
    assert all(max(apart) < 1e-12 for apart in ranks.run(ours, 2, copied, strategy=strategy))


def test_micro_batches_of_one_step() -> None:
    assert max(ours(masked, accumulation=2)) < 1e-12
    with pytest.raises(interlace.InterlaceError, match=r"parameter 'fc\.weight' is changed by each run of the model"):
        ours(decayed, accumulation=2)


@pytest.mark.parametrize("write", [too_late, drawn], ids=lambda f: f.__name__)
def test_what_is_refused(write: Callable[[Net, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"parameter 'fc\.weight' is changed in place while the model runs"):
        ours(write)
