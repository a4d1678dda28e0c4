"""Nothing that Python changes between two steps is ignored: followed as eager PyTorch would, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn.utils import prune

import interlace
from interlace.capture.sites import is_installed
from interlace.errors import InterlaceError

Tensor = torch.Tensor
SCALE = 1.0


class Holder:
    def __init__(self) -> None:
        self.weight, self.history = 0.5, [1.0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm, self.last = nn.Linear(4, 6), nn.Dropout(0.0), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.beta, self.power, self.steps = 0.5, 2, 0
        self.mask = torch.ones(6, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.tanh(self.first(x))) * self.mask + self.shift
        y = self.norm(y) ** self.power
        if self.steps > 2:
            y = y * 2
        return self.last(y) * self.beta


def parts() -> tuple[Net, Any, Callable[[Any], None], Holder]:
    """A model, a loss function with a closure, a setter of the closure's number, an object that the loss function reads."""
    torch.manual_seed(0)
    model, holder, kl = Net().double(), Holder(), 0.1

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        y = model(batch)
        return y.square().mean() * SCALE + kl * y.abs().mean() + holder.weight * y.mean()

    def set_kl(value: Any) -> None:
        nonlocal kl
        kl = value

    return model, loss_fn, set_kl, holder


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 1.5


CHANGES: dict[str, Callable[[Net, Any, Holder, int], Any]] = {
    "training": lambda m, kl, h, i: m.train(i % 2 == 0),
    "flag of a part": lambda m, kl, h, i: m.norm.train(i < 2),
    "attribute": lambda m, kl, h, i: setattr(m, "beta", 0.5 + i),
    "integer": lambda m, kl, h, i: setattr(m, "power", 2 + i % 2),
    "counter": lambda m, kl, h, i: setattr(m, "steps", i),
    "closure": lambda m, kl, h, i: kl(0.1 * i),
    "whole number": lambda m, kl, h, i: kl(i),
    "global": lambda m, kl, h, i: set_scale(1.0 + i),
    "object": lambda m, kl, h, i: setattr(h, "weight", 0.1 * i),
    "hook": lambda m, kl, h, i: m.first.register_forward_hook(hook) if i == 2 else None,
    "tensor attribute": lambda m, kl, h, i: setattr(m, "mask", torch.full((6,), 1.0 + i, dtype=torch.float64)),
    "tensor in place": lambda m, kl, h, i: m.mask.mul_(1.1),
    "buffer": lambda m, kl, h, i: setattr(m, "shift", torch.full((6,), 0.1 * i, dtype=torch.float64)),
    "buffer in place": lambda m, kl, h, i: m.shift.add_(0.1),
    "function": lambda m, kl, h, i: kl(torch.tensor(0.1 * i, dtype=torch.float64)),
}  # fmt: skip


def batch_of(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).double()


def eager(kind: str, size: int) -> list[float]:
    set_scale(1.0)
    model, loss_fn, kl, holder = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        CHANGES[kind](model, kl, holder, step)
        total = 0.0
        for rank in range(size):
            kept = {n: b.clone() for n, b in model.named_buffers()} if rank else None
            loss = loss_fn(model, batch_of(10 * step + rank)) / size
            loss.backward()
            total += loss.item()
            for n, b in model.named_buffers() if kept else ():
                b.copy_(kept[n])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def ours(kind: str, **config: Any) -> tuple[list[float], list[float], int]:
    rank, size = parity.rank_and_size()
    expected = eager(kind, size)
    set_scale(1.0)
    model, loss_fn, kl, holder = parts()
    if rank:
        torch.nn.Identity().register_forward_hook(lambda *_: None)  # each process numbers its hooks on its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = interlace.Config(timeout_s=60, **config)
    with ranks.heard() as said, interlace.compile(model, optimizer, loss_fn, batch_of(rank), settings) as trainer:
        losses = []
        for step in range(6):
            CHANGES[kind](model, kl, holder, step)
            losses.append(parity.mean_over_ranks(trainer.step(batch_of(10 * step + rank))))
    return losses, expected, sum("compiling again" in text for text in said)


@pytest.mark.parametrize("kind", CHANGES)
def test_followed(kind: str) -> None:
    losses, expected, again = ours(kind)
    assert losses == pytest.approx(expected, rel=1e-9), kind
    without = {"tensor attribute", "tensor in place", "buffer", "buffer in place"}
    once = {"attribute", "closure", "whole number", "global", "object", "training"}  # numbers are inputs then; what was there before is kept
    assert again == 0 if kind in without else again == 1 if kind in once else again >= 1


@pytest.mark.parametrize("kind", ["attribute", "integer", "buffer", "hook"])
@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_followed_on_two_ranks(kind: str, strategy: str) -> None:
    for losses, expected, _ in ranks.run(ours, 2, kind, strategy=strategy):
        assert losses[:2] == pytest.approx(expected[:2], rel=1e-9)
        if kind != "buffer":  # statistics of BatchNorm are each rank's own
            assert losses == pytest.approx(expected, rel=1e-9)


def test_a_probability_of_dropout() -> None:
    model, loss_fn, _, _ = parts()
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, batch_of(0)) as trainer:
        model.norm.eval()
        first = trainer.step(batch_of(0)).item()
        model.drop.p = 0.5
        assert trainer.step(batch_of(0)).item() != first
        model.drop.p = 0.0
        assert trainer.step(batch_of(0)).item() == first


def replaced_parameter(m: Net) -> None:
    m.last.weight = nn.Parameter(torch.zeros(3, 6, dtype=torch.float64))


def replaced_module(m: Net) -> None:
    m.last = nn.Linear(6, 3).double()


def pruned(m: Net) -> None:
    prune.l1_unstructured(m.last, "weight", 0.5)


SAID = [
    (replaced_parameter, "parameter 'weight' of module 'last'"), (replaced_module, "'last' of"),
    (pruned, r"'weight\w*' of module 'last' is .* close it, change the model and compile again"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), SAID)
def test_refused_by_name(change: Callable[[Net], None], said: str) -> None:
    model, loss_fn, _, _ = parts()
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_of(0)) as trainer:
        trainer.step(batch_of(0))
        change(model)
        with pytest.raises(InterlaceError, match=said):
            trainer.step(batch_of(0))


def otherwise() -> str:
    rank, _ = parity.rank_and_size()
    model, loss_fn, _, _ = parts()
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_of(0)) as trainer:
        model.power = 2 + rank + 1
        with pytest.raises(InterlaceError) as e:
            trainer.step(batch_of(0))
        return str(e.value)


def test_ranks_that_change_other_things_are_named() -> None:
    for text in ranks.run(otherwise, 2):
        assert "rank 1 changed 'power' of the model otherwise than rank 0" in text


def test_what_no_code_reads_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model, loss_fn, _, holder = parts()
    theirs = copy.deepcopy(model)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_of(0)) as trainer:
        expected = loss_fn(theirs, batch_of(0)).item()
        model.epoch, holder.history = 3, [2.0]
        with caplog.at_level(logging.WARNING, "interlace"):
            assert trainer.step(batch_of(0)).item() == pytest.approx(expected, rel=1e-12)
        assert "compiling again" not in caplog.text


def test_what_a_logger_remembers_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    model, loss_fn, _, _ = parts()
    log = logging.getLogger("a_model")

    def logs(model: nn.Module, batch: Tensor) -> Tensor:
        log.debug("a step")
        return loss_fn(model, batch)

    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), logs, batch_of(0)) as trainer:
        log.isEnabledFor(logging.WARNING)
        with caplog.at_level(logging.WARNING, "interlace"):
            trainer.step(batch_of(0))
        assert "compiling again" not in caplog.text


@pytest.mark.parametrize(("file", "installed"), [
    (torch.__file__, True), (logging.__file__, True), (interlace.__file__, True), ("<frozen importlib._bootstrap>", True),
    ("/home/me/env/lib/python3.11/site-packages/timm/models/vit.py", True),  # of another environment, by a .pth file or PYTHONPATH
    ("/usr/lib/python3/dist-packages/numpy/core.py", True), ("/home/me/site-packages.py", False), (__file__, False),
])  # fmt: skip
def test_what_counts_as_the_users_own_code(file: str, installed: bool) -> None:
    assert is_installed(file) == installed


def example(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 8, generator=g).double(), "y": torch.randint(0, 3, (4,), generator=g)}


loss = 0.0  # as scripts have it, beside models with an attribute of this name


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return dataclasses.make_dataclass("Result", ["loss"])(nn.functional.cross_entropy(self.body(x), y))


def test_a_global_with_an_attributes_name_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    global loss
    model = Attribute()
    with interlace.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(**b).loss, example(0), interlace.Config(schedule=[])
    ) as trainer:
        with caplog.at_level(logging.WARNING, "interlace"):
            for step in range(3):
                loss = float(trainer.step(example(step)))
        assert "compiling again" not in caplog.text
