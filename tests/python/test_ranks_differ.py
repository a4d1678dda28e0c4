"""What the model and the loss function find and ranks have of their own when a run begins: tensors are followed, as in eager steps; whatever
else decides what is computed is refused by its line, never rank 0's on all ranks."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import failing
import numpy as np
import parity
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank
from torch.nn import functional as F

import interlace

Tensor = torch.Tensor
LossFn = Callable[[nn.Module, dict[str, Tensor]], Tensor]
STEPS = 3


def batch(rank: int, step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randn(4, 4, generator=g, dtype=torch.float64), "y": torch.randint(0, 3, (4,), generator=g)}


class Net(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 3, dtype=torch.float64)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.scale


def plain(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def one() -> Tensor:
    return torch.ones((), dtype=torch.float64)


def own_tensor(kind: str, rank: int) -> tuple[nn.Module, LossFn]:
    """A model and a loss function that find a tensor of this rank's."""
    w = one() * (rank + 1)
    if kind == "attribute":
        return Net(w), plain
    model = Net(one())
    if kind == "closure":
        return model, lambda m, b: plain(m, b) * w
    if kind == "default":
        return model, lambda m, b, w=w: plain(m, b) * w
    if kind == "tuple":
        pair = (1, w)
        return model, lambda m, b: plain(m, b) * pair[1]
    if kind == "criterion":
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0 + rank], dtype=torch.float64))
        return model, lambda m, b: criterion(m(b["x"]), b["y"])
    state = {"mean": w}

    def follows(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = plain(m, b)
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.detach()
        return loss * state["mean"]

    return model, follows


def followed(kind: str, strategy: str) -> tuple[list[float], list[float]]:
    """The losses of eager steps, and ours; the last one of each is that of an evaluation."""
    rank = dist.get_rank()
    model, loss_fn = own_tensor(kind, rank)
    optimizer, eager = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, batch(rank, step))
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        eager.append(loss.item())
    heavy = one() * (3 + rank)
    eager.append((plain(model, batch(rank, 0)) * heavy).item())
    model, loss_fn = own_tensor(kind, rank)
    settings = interlace.Config(strategy=strategy, schedule=[], timeout_s=60, cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch(rank, 0), settings) as trainer:
        ours = [trainer.step(batch(rank, step)).item() for step in range(STEPS)]
        ours.append(trainer.evaluate(batch(rank, 0), lambda m, b: plain(m, b) * heavy)["loss"].item())
    return eager, ours


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("attribute", "shard"), ("closure", "zero1"), ("default", "shard"), ("tuple", "shard"), ("criterion", "shard"), ("state", "shard")],
)
def test_tensors_are_each_ranks_own(kind: str, strategy: str) -> None:
    for eager, ours in ranks.run(followed, 2, kind, strategy):
        assert ours == pytest.approx(eager, rel=1e-9)


def own_value(kind: str, rank: int) -> LossFn:
    if kind == "variable":
        return lambda m, b: plain(m, b) * torch.tensor(1.0 + int(os.environ["RANK"]))
    if kind == "variable of torch's":
        return lambda m, b: plain(m, b) * (1 + dist.get_node_local_rank())
    if kind == "name":
        return lambda m, b: plain(m, b) * (1 + get_rank())
    if kind == "group":
        return lambda m, b: plain(m, b) * (1 + dist.group.WORLD.rank())
    if kind == "array":
        w = np.array([1.0, 2.0, 1.0 + rank])
        return lambda m, b: F.cross_entropy(m(b["x"]), b["y"], torch.from_numpy(w))
    if kind == "default":
        return lambda m, b, rank=rank: plain(m, b) * (1 + rank)
    if kind == "dtype":
        dtype = (torch.float64, torch.float32)[rank]
        return lambda m, b: F.cross_entropy(m(b["x"]).to(dtype), b["y"]).double()
    scale = (lambda x: x * 1.0) if rank == 0 else (lambda x: x * 2.0)
    return lambda m, b: scale(plain(m, b))


def refused(kind: str, **config: Any) -> str:
    rank = parity.rank_and_size()[0]
    os.environ.update(LOCAL_WORLD_SIZE="2")
    model = Net(one())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = interlace.Config(schedule=[], timeout_s=60, cache="off", **config)
    loss_fn = own_value(kind, rank)
    try:
        return failing.observed(lambda: interlace.compile(model, optimizer, loss_fn, batch(rank, 0), settings).step(batch(rank, 0)))
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize("kind", ["variable", "variable of torch's", "name", "group", "array", "default", "dtype", "function"])
def test_what_else_decides_is_refused_by_its_line(kind: str) -> None:
    for said in ranks.run(refused, 2, kind):
        assert "what is computed here" in said and "test_ranks_differ.py:" in said


def test_other_ways_work() -> None:
    assert ranks.run(refused, 2, "name", fullgraph=False) == ["", ""]
    assert ranks.run(refused, 2, "function", mode="eager") == ["", ""]


def what_only_prints() -> str:
    rank = parity.rank_and_size()[0]
    args, said = types.SimpleNamespace(main=rank == 0, device=f"cuda:{rank}"), list[str]()

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = plain(model, b)
        if args.main and os.environ["RANK"] == "0":
            said.append(f"loss on {args.device}")
        return loss

    model = Net(one())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = interlace.Config(schedule=[], timeout_s=60, cache="off")
    return failing.observed(lambda: interlace.compile(model, optimizer, loss_fn, batch(rank, 0), settings).step(batch(rank, 0)))


def test_what_decides_nothing_may_differ() -> None:
    assert ranks.run(what_only_prints, 2) == ["", ""]


def on_one_batch() -> str:
    rank = parity.rank_and_size()[0]
    model, loss_fn = own_tensor("closure", rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = interlace.Config(mesh={"tp": 2}, schedule=[], timeout_s=60, cache="off")
    return failing.observed(lambda: interlace.compile(model, optimizer, loss_fn, batch(0, 0), settings))


def test_ranks_that_work_on_one_batch_have_the_same() -> None:
    for said in ranks.run(on_one_batch, 2):
        assert "'w' of the loss function holds something else on rank 1 than on rank 0" in said


def evaluated(kind: str) -> str:
    rank = parity.rank_and_size()[0]
    model = Net(one())
    settings = interlace.Config(schedule=[], timeout_s=60, cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), plain, batch(rank, 0), settings) as trainer:
        if kind == "number":
            return failing.observed(lambda: trainer.evaluate(batch(rank, 0), lambda m, b: plain(m, b) * (1 + rank)))
        if kind == "function":
            loss_fn = own_value("function", rank)
            return failing.observed(lambda: trainer.evaluate(batch(rank, 0), loss_fn))
        trainer.evaluate(batch(rank, 0))
        model.scale = one() * rank  # which is followed
        if rank == 1:
            model.lin.register_forward_hook(lambda m, x, y: 2 * y)
        return failing.observed(lambda: trainer.evaluate(batch(rank, 0)))


@pytest.mark.parametrize("kind", ["number", "function", "change"])
def test_evaluations(kind: str) -> None:
    for said in ranks.run(evaluated, 2, kind):
        assert ("has changed otherwise on rank 1" if kind == "change" else "is something else on rank 1 than on rank 0") in said


# What is there at first, what a rank puts there, what the loss function makes of it.
LATER: dict[str, tuple[Any, Callable[[int], Any], Callable[[Any], Any]]] = {
    "array": (np.ones(2), lambda rank: np.array([2.0, 3.0 + rank]), lambda x: float(x[1])),
    "function": (lambda: 1.0, lambda rank: (lambda: 2.0) if rank == 0 else (lambda: 3.0), lambda x: x()),
    "list": ([1.0], lambda rank: [2.0 + rank], lambda x: x[0]),
    "text": ("1" * 99, lambda rank: "1" * 99 + str(rank), lambda x: float(x[-1])),
    "object": (types.SimpleNamespace(by=1.0), lambda rank: types.SimpleNamespace(by=2.0 + rank), lambda x: x.by),
}


def changed_later(kind: str) -> str:
    rank = parity.rank_and_size()[0]
    first, after, of = LATER[kind]
    kept, model = {"x": first}, Net(one())
    settings = interlace.Config(schedule=[], timeout_s=60, cache="off")
    loss_fn: LossFn = lambda m, b: plain(m, b) * of(kept["x"])  # noqa: E731
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch(rank, 0), settings) as trainer:
        trainer.step(batch(rank, 0))
        kept["x"] = after(rank)
        return failing.observed(lambda: trainer.step(batch(rank, 1)))


@pytest.mark.parametrize("kind", LATER)
def test_what_is_put_anew_is_the_same_on_all_ranks(kind: str) -> None:
    for said in ranks.run(changed_later, 2, kind):
        assert "otherwise than rank 0" in said and "every rank must change the same" in said
