"""Numbers that Python reads of a step and computes with: tensors of the program stand for them."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable
from typing import Any

import parity
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import CaptureError, InterlaceError

Tensor = torch.Tensor


def batch(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=g), "y": torch.randint(4, (8,), generator=g)}


def weighed(kept: list[Any]) -> Any:
    """Numbers that are computed with are tensors of the program, beside others that are handed on."""

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        some = b["y"] > 1
        loss = (F.cross_entropy(out, b["y"], reduction="none") * some).sum() / max(1, int(some.sum()))
        size = out.square().mean()
        kept.append(size.item())
        share = loss.item() / (float(size) + 1e-8)
        return loss + 0.1 * share * size * (1 + math.exp(-share)) * torch.tensor(1 + share)  # of the default dtype

    return loss_fn


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_computed_with_them_is_computed(size: int) -> None:
    for losses, expected, kept in ranks.run(weights, size):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert len(kept) == 5 and all(type(x) is float for x in kept)


def weights() -> tuple[list[float], list[float], list[Any]]:
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model, kept = nn.Linear(8, 4).double(), list[Any]()
    other = copy.deepcopy(model)
    wide = lambda i: {n: x.double() if n == "x" else x for n, x in batch(i).items()}  # noqa: E731
    optimizer, expected, loss_fn = torch.optim.SGD(other.parameters(), lr=0.1), [], weighed([])
    for step in range(5):
        losses = [loss_fn(other, wide(size * step + r)) / size for r in range(size)]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        expected.append(sum(float(x.detach()) for x in losses))
    settings = interlace.Config(schedule=[], cache="off", timeout_s=60)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), weighed(kept), wide(rank), settings) as trainer:
        return [parity.mean_over_ranks(trainer.step(wide(size * step + rank))) for step in range(5)], expected, kept


def test_a_number_that_is_computed_with_and_kept() -> None:
    model, kept = nn.Linear(8, 4), list[Any]()

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        kept.append(share := loss.item())
        return loss * share

    with pytest.raises(CaptureError, match=r"test_numbers\.py:\d+: the model reads a tensor's value"):
        interlace.compile(model, torch.optim.SGD(model.parameters()), loss_fn, batch(0), interlace.Config(cache="off"))


def test_a_size_that_only_one_branch_has() -> None:
    """What cannot be traced with another truth value is not taken for the user's own error."""

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(b["x"]), b["y"], reduction="none")
        hard = losses > 1.2
        return losses[hard].mean() if hard.any() else losses.mean()

    model = nn.Linear(8, 4)
    with pytest.raises(CaptureError, match=r"test_numbers\.py:\d+: .*fullgraph=False"):
        interlace.compile(model, torch.optim.SGD(model.parameters()), loss_fn, batch(0), interlace.Config(cache="off"))


def test_what_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """A step counter in a closure, read by an `if`: one program logs and one does not, and both are kept."""
    state: dict[str, Any] = {"step": 0, "log": []}

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        if state["step"] % 3 == 0:
            state["log"].append(loss.item())
        return loss

    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off")) as trainer:
        for step in range(10):
            state["step"] = step
            losses.append(float(trainer.step(batch(step))))
    assert state["log"] == pytest.approx(losses[::3])
    assert sum("compiling again" in r.getMessage() for r in caplog.records) == 2


def asking(decides: bool) -> str:
    torch.manual_seed(0)
    model, printed = nn.Linear(8, 4), list[int]()

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        if dist.get_rank() == 0:
            printed.append(1)
        return loss * (1 + dist.get_rank()) if decides else loss

    settings = interlace.Config(schedule=[], cache="off", timeout_s=60)
    try:
        with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch(0), settings) as trainer:
            trainer.step(batch(0))
    except InterlaceError as e:
        return str(e)
    return ""


def test_a_loss_that_asks_for_its_rank() -> None:
    """Where it decides what is computed, rank 0's program would be everybody's."""
    assert ranks.run(asking, 2, False) == ["", ""]
    for said in ranks.run(asking, 2, True):
        assert "depends on the rank" in said and "test_numbers.py" in said


def by_class(n: int) -> float:
    match n:
        case int():
            return 2.0 + n
        case _:
            return 9.0


KINDS = {
    "of a dict": lambda n: FACTORS.get(n, 1.0),
    "in a set": lambda n: 2.0 if n in {2, 3} else 1.0,
    "hash": lambda n: 1.0 + hash(n) % 3,
    "isinstance": lambda n: (2.0 if isinstance(n, int) else 3.0) + n,
    "of a tensor": lambda n: (2.0 if isinstance(n, torch.Tensor) or torch.is_tensor(n) or hasattr(n, "dtype") else 3.0) + n,
    "type": lambda n: (2.0 if type(n) is int else 3.0) + n,
    "match": by_class,
}  # fmt: skip
FACTORS = {2: 5.0, 3: 6.0}


@pytest.mark.parametrize("beside", [False, True], ids=["attribute", "in the batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_changes_is_one_to_whatever_asks(kind: str, beside: bool) -> None:
    """Tensors that stand for numbers had the class and the hash of tensors, which decided without a word."""
    factor, now = KINDS[kind], {"epoch": 0}
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    other = copy.deepcopy(model)

    def loss_fn(model: nn.Module, b: dict[str, Any]) -> Tensor:
        return model(b["x"].double()).square().mean() * factor(b["epoch"] if beside else now["epoch"])

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, other)]
    with interlace.compile(model, optimizers[0], loss_fn, batch(0) | {"epoch": 0}, interlace.Config(cache="off")) as trainer:
        for step in range(5):
            now["epoch"] = step
            b = batch(step) | {"epoch": step}
            optimizers[1].zero_grad()
            expected = loss_fn(other, b)
            expected.backward()
            optimizers[1].step()
            assert trainer.step(b).item() == pytest.approx(expected.item(), rel=1e-9)
    assert hash(torch.zeros(())) != 0 and isinstance(1, int) and "type" not in globals()


@pytest.mark.parametrize("kind", ["of a dict", "hash"])
def test_a_number_of_a_step_that_is_looked_up(kind: str) -> None:
    """Refused by its line; nothing was found."""
    loss_fn = lambda model, b: model(b["x"]).mean() * KINDS[kind](int((model(b["x"]) > 0).sum()))  # noqa: E731
    model = nn.Linear(8, 4)
    with pytest.raises(CaptureError, match=r"test_numbers.py:\d+: the model reads a tensor's value"):
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, batch(0), interlace.Config(cache="off"))


def test_a_list_of_sizes_names_the_way() -> None:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        y = model(b["x"])
        sizes = F.one_hot(y.argmax(-1), 4).sum(0).tolist()
        return torch.stack([part.sum() for part in y.split(sizes)]).square().mean()

    model = nn.Linear(8, 4)
    make = lambda **config: interlace.compile(  # noqa: E731
        model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, batch(0), interlace.Config(cache="off", **config)
    )
    with pytest.raises(CaptureError, match=r"split_sizes.* \(numbers that are read at \S*test_numbers.py:\d+ .*fullgraph=False runs that"):
        make()
    with make(fullgraph=False) as trainer:
        assert trainer.step(batch(1)).item() >= 0


TRUTHS: dict[str, Callable[[Any], float]] = {
    "if": lambda n: 2.0 if n else 3.0,
    "not": lambda n: 2.0 if not n else 5.0,
    "bool": lambda n: 1.0 + bool(n),
    "and": lambda n: (n and 7.0) or 2.0,
    "or": lambda n: n or 4.0,
    "any": lambda n: 2.0 if any([0, n]) else 3.0,
    "remainder": lambda n: 2.0 if n % 2 else 3.0,
    "product": lambda n: 2.0 if n * 1.5 else 3.0,
    "greater": lambda n: 2.0 if max(n, 0) else 3.0,
    "loop": lambda n: float(len([k for k in range(4) if n and k < n])),
}  # fmt: skip


@pytest.mark.parametrize("where", ["attribute", "batch"])
@pytest.mark.parametrize("truth", list(TRUTHS))
def test_the_truth_of_a_number_that_changes(truth: str, where: str) -> None:
    """Is a way: never what it was when compiled."""
    settings = types.SimpleNamespace(n=0)
    values = [0, 1, 2, 0, 3, 0.0, 1.5, 0.0, 2.5] if truth != "loop" else [0, 1, 2, 0, 3]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean() * TRUTHS[truth](batch["n"] if where == "batch" else settings.n)

    model = nn.Linear(4, 3).double()
    twin = copy.deepcopy(model)
    x = torch.ones(2, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with interlace.compile(model, optimizer, loss_fn, {"x": x, "n": 0}, interlace.Config(schedule=[], cache="off")) as trainer:
        for value in values:
            settings.n = value
            batch = {"x": x, "n": value}
            assert float(trainer.step(batch)) == pytest.approx(float(loss_fn(twin, batch).detach()), rel=1e-12), value
