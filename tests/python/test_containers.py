"""Tensors that models keep in lists, dicts and tuples, tables that they make when they first run, layers whose input is the batch itself: as
eager PyTorch, in double precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from test_odd_models import STEPS, batch_of, loss_of, plain_losses
from torch import nn

import interlace
from interlace.errors import CaptureError

Tensor = torch.Tensor


def as_eager(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor] = loss_of, batch: Callable[[int], Any] = batch_of, **config: Any
) -> None:  # fmt: skip
    """Five steps with the losses of PyTorch's own, and its tensors at the end."""
    theirs = copy.deepcopy(model)
    expected = plain_losses(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), map(batch, range(STEPS)), loss_fn)
    settings = interlace.Config(schedule=[], cache="off", **config)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch(0), settings) as trainer:
        assert [trainer.step(batch(step)).item() for step in range(STEPS)] == pytest.approx(expected, rel=1e-12)
        for name, t in trainer.state_dict().items():
            torch.testing.assert_close(t, theirs.state_dict()[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_the_batch_itself(training: bool) -> None:
    """Nobody asks for the gradient of its input."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    model[0].train(training)
    as_eager(model)


class Recurrent(nn.Module):
    """What it goes on with from step to step lies in a container."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8), nn.Linear(8, 3)
        state = [torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)]
        self.state: Any = dict(enumerate(state)) if kind is dict else kind(state)
        self.double()
        self.state = dict(enumerate(t.double() for t in state)) if kind is dict else kind(t.double() for t in state)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x[None], (self.state[0], self.state[1]))
        if isinstance(self.state, tuple):
            self.state = tuple(t.detach() for t in state)
        else:
            self.state[0], self.state[1] = (t.detach() for t in state)
        return self.head(y[0])


@pytest.mark.parametrize("kind", [list, dict, tuple])
def test_states_in_containers(kind: type) -> None:
    as_eager(Recurrent(kind))


class Growing(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.state.append(self.head(x).detach())
        self.state = self.state[-3:]
        return self.head(x + self.state[0].mean() + self.state[-2].mean())


def test_a_container_of_another_length_is_no_state_of_a_program() -> None:
    model = Growing(list)
    with pytest.raises(CaptureError, match="'state' of the model is changed by the model while it runs"):
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0))
    assert len(model.state) == 2
    as_eager(Growing(list), fullgraph=False)


class Sharing(nn.Module):
    """Two modules hold one list: what one puts there, the other reads."""

    def __init__(self, seen: list[Tensor] | None = None) -> None:
        super().__init__()
        self.seen = [torch.rand(1)] if seen is None else seen
        self.layer = nn.Linear(8, 3).double()
        self.inner = Sharing(self.seen) if seen is None else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.inner is None:
            self.seen[0] = y
            return y
        return self.inner(x) * y + self.seen[0]


def test_a_list_that_two_modules_hold() -> None:
    model = Sharing()
    first = model.seen[0]
    as_eager(model)
    assert model.seen is model.inner.seen and model.seen[0] is first


class Positions(nn.Module):
    """Makes its table when it first sees how long a batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.seen = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None].cos()
        self.seen += 1
        return self.head(x * self.table[: len(x)]) * self.seen.to(x.device)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_table_that_the_first_run_makes(fullgraph: bool) -> None:
    model = Positions().double()
    as_eager(model, fullgraph=fullgraph)
    assert model.table.shape == (4, 1)


def losses(folder: str) -> list[float]:
    """Of the same batches on every rank."""
    torch.manual_seed(0)
    model = Positions().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(schedule=[], cache=folder)) as trainer:
        assert model.table.shape == (4, 1)
        return [trainer.step(batch_of(step)).item() for step in range(STEPS)]


def test_a_table_on_every_rank(tmp_path: Path) -> None:
    expected = losses(str(tmp_path / "alone"))
    for _ in range(2):  # the second time its text is found in the cache
        for found in ranks.run(losses, 2, str(tmp_path / "two")):
            assert found == pytest.approx(expected, rel=1e-12)


def test_a_table_that_grows_later_is_named() -> None:
    model = Positions().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(cache="off")) as trainer:
        longer = {name: torch.cat([t, t]) for name, t in batch_of(1).items()}
        with pytest.raises(interlace.InterlaceError, match=r"'table' is a tensor of shape \(4, 1\) and the model puts one of shape \(8, 1\)"):
            trainer.step(longer)
        assert trainer.step(batch_of(1)) > 0
