"""Tensors that steps change and scripts read, change and put back between them (recurrent states, counts), wherever they are kept."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
from torch import nn

import interlace

Tensor = torch.Tensor
Pair = collections.namedtuple("Pair", "a b")
Value = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state, self.seen = nn.Linear(4, 3).double(), None, torch.zeros(3).double()

    def forward(self, x: Tensor, state: Value) -> tuple[Tensor, Value]:
        y = self.layer(x)
        self.seen = y.detach().mean(0)  # for the script alone
        new = 0.5 * state[0] + y.detach().mean(0), state[1] * 0.9 + x.sum()
        return y + new[0] * new[1], new


KEPT: dict[str, tuple[Callable[[Value], Any], Callable[[Any], Value], Callable[[Any, Value], Any]]] = {
    "tuple": (tuple, lambda s: s, lambda s, v: tuple(v)),
    "list": (list, tuple, lambda s, v: list(v)),
    "named tuple": (Pair._make, tuple, lambda s, v: Pair(*v)),
    "items of a list": (list, tuple, lambda s, v: (s.__setitem__(0, v[0]), s.__setitem__(1, v[1]), s)[-1]),
    "dict": (lambda v: {"a": v[0], "b": v[1]}, lambda s: (s["a"], s["b"]), lambda s, v: (s.update(a=v[0], b=v[1]), s)[-1]),
    "list in a dict": (lambda v: {"s": list(v)}, lambda s: tuple(s["s"]), lambda s, v: (s["s"].__setitem__(slice(2), v), s)[-1]),
    "tuple in a dict": (lambda v: {"s": v}, lambda s: s["s"], lambda s, v: (s.update(s=tuple(v)), s)[-1]),
    "object": (lambda v: types.SimpleNamespace(s=v), lambda s: s.s, lambda s, v: (setattr(s, "s", tuple(v)), s)[-1]),
}


def halved(value: Value) -> Value:
    return value[0] * 0.5, value[1] * 0.5


def halved_in_place(value: Value) -> Value:
    return value[0].mul_(0.5), value[1].mul_(0.5)


def begun_with_one_tensor(value: Value) -> Value:
    zeros = torch.zeros(3).double()
    return zeros, zeros


def batch_of(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).double()


def train(kind: str, inside: bool, change: Callable[[Value], Value] | None, compiled: bool) -> tuple[list[float], list[float]]:
    """Losses, and what the script has read of the state after each step. `inside`: the model keeps it, not the loss function."""
    make, get, put = KEPT[kind]
    torch.manual_seed(0)
    model, outside = Net(), make((torch.zeros(3).double(), torch.zeros(3).double()))
    model.state = make((torch.zeros(3).double(), torch.zeros(3).double())) if inside else None

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        nonlocal outside
        y, new = model(batch, get(model.state if inside else outside))
        if inside:
            model.state = put(model.state, new)
        else:
            outside = put(outside, new)
        return y.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = interlace.compile(model, optimizer, loss_fn, batch_of(0), interlace.Config(schedule=[], cache="off")) if compiled else None
    losses, read = [], []
    for step in range(5):
        if step > 1 and change is not None:
            value = change(get(model.state if inside else outside))
            if inside:
                model.state = put(model.state, value)
            else:
                outside = put(outside, value)
        if trainer is not None:
            losses.append(trainer.step(batch_of(step)).item())
        else:
            loss = loss_fn(model, batch_of(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        read += [float(t.sum()) for t in (*get(model.state if inside else outside), model.seen)]
    return losses, read


@pytest.mark.parametrize("change", [None, halved, halved_in_place, begun_with_one_tensor])
@pytest.mark.parametrize("inside", [True, False], ids=["the model's", "the loss function's"])
@pytest.mark.parametrize("kind", KEPT)
def test_scripts_see_and_change_it(kind: str, inside: bool, change: Callable[[Value], Value] | None) -> None:
    losses, read = train(kind, inside, change, True)
    expected = train(kind, inside, change, False)
    assert losses == pytest.approx(expected[0], rel=1e-9)
    assert read == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_what_a_state_began_with_stays_as_it_was(mode: str) -> None:
    """A script puts it back to begin anew."""
    torch.manual_seed(0)
    model, first = Net(), on_device.there((torch.zeros(3).double(), torch.zeros(3).double()))
    model.a, model.b = first

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        y, (model.a, model.b) = model(batch, (model.a, model.b))
        return y.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with interlace.compile(model, optimizer, loss_fn, batch_of(0), interlace.Config(schedule=[], mode=mode)) as trainer:
        begin = trainer.step(batch_of(0)).item()
        assert trainer.step(batch_of(0)).item() != begin
        assert not any(t.any() for t in first)
        model.a, model.b = first
        assert trainer.step(batch_of(0)).item() == begin


def on_ranks(strategy: str) -> tuple[list[float], list[float]]:
    """What this rank's script reads, and what it reads of plain steps on a model for each rank."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net()
    model.state = (torch.zeros(3).double(), torch.zeros(3).double())
    plain = [copy.deepcopy(model) for _ in range(size)]

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        y, model.state = model(batch, model.state)
        return y.square().mean()

    def read(model: Any) -> list[float]:
        model.state = halved(model.state)
        return [float(t.sum()) for t in (*model.state, model.seen)]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found, expected = [], []
    settings = interlace.Config(schedule=[], cache="off", strategy=strategy)
    with interlace.compile(model, optimizer, loss_fn, batch_of(rank), settings) as trainer:
        for step in range(4):
            trainer.step(batch_of(10 * step + rank))
            found += read(model)
    for step in range(4):
        gradients = [torch.autograd.grad(loss_fn(m, batch_of(10 * step + r)), list(m.parameters())) for r, m in enumerate(plain)]
        with torch.no_grad():
            for m in plain:
                for i, p in enumerate(m.parameters()):
                    p -= 0.01 * sum(g[i] for g in gradients) / size
        expected += [read(m) for m in plain][rank]
    return found, expected


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_every_rank_has_its_own(strategy: str) -> None:
    for found, expected in ranks.run(on_ranks, 2, strategy):
        assert found == pytest.approx(expected, rel=1e-9)


class Words(nn.Module):
    """Of truncated backpropagation: the state is None at first, and what the step before has left afterwards."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.out, self.hidden, self.kind = nn.Embedding(9, 4), nn.Linear(6, 9), None, kind
        self.layer = nn.GRUCell(4, 6) if kind == "cell" else (nn.LSTM if kind == "lstm" else nn.GRU)(4, 6, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        e, hidden = self.table(x), self.hidden
        if self.kind == "cell":
            hidden = torch.zeros(len(x), 6).double() if hidden is None else hidden
            for t in range(x.shape[1]):
                hidden = self.layer(e[:, t], hidden)
            y = hidden
        else:
            y, hidden = self.layer(e, hidden)
            y = y[:, -1]
        self.hidden = tuple(h.detach() for h in hidden) if isinstance(hidden, tuple) else hidden.detach()
        return self.out(y)


def words(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return x[:, :-1], x[:, -1]


def of_words(kind: str, train: bool, strategy: str = "shard") -> tuple[list[float], list[Tensor]]:
    """Losses of three epochs, and the state at the ends of their steps."""
    torch.manual_seed(0)
    rank, _ = parity.rank_and_size()
    model, kept = Words(kind), types.SimpleNamespace(hidden=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Words, batch: tuple[Tensor, Tensor]) -> Tensor:
        if kind != "outside":
            return nn.functional.cross_entropy(model(batch[0]), batch[1])
        y, hidden = model.layer(model.table(batch[0]), kept.hidden)
        kept.hidden = hidden.detach()
        return nn.functional.cross_entropy(model.out(y[:, -1]), batch[1])

    config = interlace.Config(strategy=strategy, schedule=[], cache="off")
    trainer = interlace.compile(model, optimizer, loss_fn, words(0, rank), config) if train else None
    losses, states, where = [], [], kept if kind == "outside" else model
    for _ in range(3):
        where.hidden = None
        for step in range(4):
            if trainer is not None:
                losses.append(trainer.step(words(step, rank)).item())
            else:
                optimizer.zero_grad()
                loss = loss_fn(model, words(step, rank))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            states.append((where.hidden[0] if isinstance(where.hidden, tuple) else where.hidden).clone())
    if trainer is not None:
        trainer.close()
    return losses, states


@pytest.mark.parametrize("kind", ["gru", "lstm", "cell", "outside"])
def test_a_state_that_begins_with_none(kind: str) -> None:
    (expected, states), (losses, found) = of_words(kind, False), of_words(kind, True)
    assert losses == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(found, states)


def test_a_state_that_begins_with_none_on_two_ranks() -> None:
    (losses, states), (other, others) = ranks.run(of_words, 2, "lstm", True)
    assert losses != other and not torch.equal(states[-1], others[-1])
    assert losses[1] != pytest.approx(of_words("lstm", False)[0][0], rel=1e-3)


def test_a_state_that_begins_with_none_and_micro_batches() -> None:
    model = Words("lstm")
    loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    with pytest.raises(interlace.InterlaceError, match="'hidden' of the model is None when a step begins and a tensor after it"):
        interlace.compile(model, torch.optim.SGD(model.parameters()), loss_fn, words(0, 0), interlace.Config(accumulation=2, cache="off"))


@pytest.mark.skipif(on_device.DEVICE == "soft", reason="it has no operator that resizes what it is given")
def test_observers_that_begin_without_elements() -> None:
    """Quantization-aware training: what is observed of each row of a weight."""
    quantization = torch.ao.quantization
    losses, found = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = quantization.QuantWrapper(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
        settings = interlace.Config(schedule=[], cache="off")
        trainer = interlace.compile(model, optimizer, loss_fn, batch_of(0).float(), settings) if compiled else None
        for step in range(4):
            x = batch_of(step).float()
            loss = loss_fn(model, x) if trainer is None else trainer.step(x)
            if trainer is None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        found.append({n: t.clone() for n, t in (model if trainer is None else trainer).state_dict().items()})
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-5)
    torch.testing.assert_close(found[1], found[0])
