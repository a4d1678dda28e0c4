"""What layers of public libraries do, each as a model of a few lines beside eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from test_odd_models import batch_of, loss_of
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import CaptureError

Tensor = torch.Tensor


class Draws(nn.Module):
    """As layers of peft (LoHa, LoKr): dropped whole by a draw, never with a chance of 0."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.a, self.b, self.chance = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3), chance

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)[:, :3]
        if torch.rand(1) > self.chance and not torch.rand([]) < self.chance:
            y = y + self.b(x)
        return y


def test_what_a_draw_decides_in_any_case() -> None:
    torch.manual_seed(0)
    model = Draws(0.0).double()
    eager = copy.deepcopy(model)
    own, optimizer = (torch.optim.SGD(m.b.parameters(), lr=0.1) for m in (eager, model))
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(schedule=[], cache="off")) as trainer:
        for i in range(3):
            own.zero_grad()
            expected = loss_of(eager, batch_of(i))
            expected.backward()
            own.step()
            torch.testing.assert_close(trainer.step(batch_of(i)), expected.detach())
    model = Draws(0.5).double()
    with pytest.raises(CaptureError, match=r"or a value that is read at .*test_public_layers.py:\d+ decides it, which fullgraph=False"):
        interlace.compile(model, torch.optim.SGD(model.b.parameters(), lr=0.1), loss_of, batch_of(0), interlace.Config(cache="off"))


def test_parameters_that_a_model_puts_anew_are_refused_with_a_way() -> None:
    peft = pytest.importorskip("peft")

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.a(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    model = peft.get_peft_model(Attends(), peft.LoraConfig(r=2, target_modules=["a"], modules_to_save=["head"])).double()
    eager = copy.deepcopy(model)
    own, optimizer = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (eager, model))
    for whole in (True, False):
        with pytest.raises(CaptureError, match=r'of a MultiheadAttention is another tensor.*mode="eager"'):
            interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(cache="off", fullgraph=whole))
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(cache="off", mode="eager")) as trainer:
        for i in range(3):
            own.zero_grad()
            expected = loss_of(eager, batch_of(i))
            expected.backward()
            own.step()
            torch.testing.assert_close(trainer.step(batch_of(i)), expected.detach())


class Remembers(nn.Module):
    """As timm's AsymmetricLossSingleLabel: a criterion that keeps its targets, and has some of a batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: Tensor = torch.zeros(4, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.targets = torch.zeros_like(x).scatter_(1, y.unsqueeze(1), 1)
        return -(x.log_softmax(-1) * self.targets).sum(-1).mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.scaled_dot_product_attention(x[None], x[None], x[None])[0])


def test_attention_beside_a_criterion_that_keeps_something() -> None:
    torch.manual_seed(0)
    model, remembers = Attends().double(), Remembers()
    eager, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.optim.SGD(eager.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return remembers(model(batch["x"]), batch["y"])

    with interlace.compile(model, optimizer, loss_fn, batch_of(0), interlace.Config(schedule=[], cache="off")) as trainer:
        for i in range(3):
            own.zero_grad()
            expected = loss_of(eager, batch_of(i))
            expected.backward()
            own.step()
            torch.testing.assert_close(trainer.step(batch_of(i)), expected.detach())
