"""Convolutional nets with batch normalization under bfloat16 autocast: losses as plain PyTorch's, one rank and two, whatever came before."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
import transformers
import zoo_models
from torch import nn
from torch.nn import functional as F

import interlace

Tensor = torch.Tensor
SIZE = 32


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.lower, self.bottom = twice(3, 8), twice(8, 16), twice(16, 32)
        self.rise, self.upper = nn.ConvTranspose2d(32, 16, 2, 2), twice(32, 16)
        self.last_rise, self.up = nn.ConvTranspose2d(16, 8, 2, 2), twice(16, 8)
        self.head, self.pool = nn.Conv2d(8, 5, 1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.lower(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.upper(torch.cat([self.rise(c), b], 1))
        return self.head(self.up(torch.cat([self.last_rise(b), a], 1)))


def twice(into: int, out: int) -> nn.Module:
    convolved = [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*convolved, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5)
    return transformers.ResNetForImageClassification(config)


def efficientnet() -> nn.Module:
    config = transformers.EfficientNetConfig(
        image_size=SIZE, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, num_labels=5, dropout_rate=0.0, drop_connect_rate=0.0
    )
    return transformers.EfficientNetForImageClassification(config)


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "efficientnet": efficientnet, "unet": UNet}


def pictures(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2 * rows, 3, SIZE, SIZE, generator=g), "y": torch.randint(0, 5, (2 * rows,), generator=g)}


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Any = model(batch["x"])
    logits, labels = getattr(out, "logits", out), batch["y"]
    return F.cross_entropy(logits, labels if logits.dim() == 2 else labels[:, None, None].expand(-1, *logits.shape[2:]))


def cast_loss(model: nn.Module, batch: dict[str, Tensor], device: str = "cpu") -> Tensor:
    with torch.autocast(device, dtype=torch.bfloat16):
        return plain_loss(model, batch)


def losses_of(net: str, casts: tuple[bool, ...]) -> list[tuple[list[float], list[float]]]:
    """On this rank: the losses of training with and without autocast in turn, and plain PyTorch's, of the mean over the ranks."""
    rank, size = parity.rank_and_size()
    found = []
    for cast in casts:
        loss = cast_loss if cast else plain_loss
        case = zoo_models.Model(net, NETS[net], pictures, loss)
        torch.manual_seed(0)
        model = case.build().train()
        expected = zoo_models.eager(copy.deepcopy(model), case, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        ours = functools.partial(cast_loss, device=on_device.DEVICE) if cast else plain_loss
        with interlace.compile(model, optimizer, ours, pictures(2, rank), interlace.Config(schedule=[], cache="off")) as trainer:
            steps = range(zoo_models.STEPS)
            found.append(([parity.mean_over_ranks(trainer.step(pictures(2, 10 * i + rank))) for i in steps], expected))
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("net", list(NETS))
def test_losses_are_eagers(net: str, size: int) -> None:
    for casts in ((True, False, True),):
        for cast, (ours, expected) in zip(casts, ranks.run(losses_of, size, net, casts)[0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-6 if cast else 1e-5)


@pytest.mark.parametrize("net", list(NETS))
def test_what_was_compiled_before_does_not_matter(net: str) -> None:
    first, second = ranks.run(losses_of, 1, net, (False, True))[0], ranks.run(losses_of, 1, net, (True, False))[0]
    assert first == second[::-1]
