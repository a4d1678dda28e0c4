"""Config(fullgraph=False): batches of any form, which no program takes, run in Python, with PyTorch's numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import InterlaceError

Tensor = torch.Tensor
STEPS = 6


@dataclasses.dataclass
class Target:
    """A target of a detector, with what is no tensor."""

    boxes: Tensor
    name: str


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head, self.other = nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.embed(x)).mean(1))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    """Of whatever comes: a list of texts, a pair, a dict with some of its entries."""
    if isinstance(batch, list):
        device = model.embed.weight.device
        batch = {"x": torch.tensor([[ord(c) % 9 for c in text.ljust(5)] for text in batch], device=device)}
    if isinstance(batch, tuple):
        batch = dict(zip(("x", "y"), batch, strict=True))
    x = batch["x"].to_dense().long() if batch["x"].layout != torch.strided else batch["x"].long()
    hidden = model(x)
    loss = hidden.square().mean()
    if batch.get("y") is not None:
        loss = F.cross_entropy(model.head(hidden), batch["y"])
    if "z" in batch:
        loss = loss + model.other(hidden).squeeze(-1).sub(batch["z"]).abs().mean()
    for target in batch.get("targets", ()):
        loss = loss + target.boxes.double().mean() * hidden.mean() * len(target.name)
    for k in range(batch.get("times", 0)):
        loss = loss + hidden[: k + 1].square().mean()
    return {"loss": loss, "hidden": hidden, **({"extra": loss * 2} if "z" in batch else {})}


def base(step: int, rank: int, length: int = 5, rows: int = 4) -> dict[str, Any]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randint(0, 9, (rows, length), generator=g), "y": torch.randint(0, 3, (rows,), generator=g)}


def keys(step: int, rank: int) -> Any:
    """Another task in every second step, whose entries are others."""
    batch = base(step, rank)
    return {"x": batch["x"], "z": batch["y"].double()} if step % 2 else batch


def structures(step: int, rank: int) -> Any:
    batch = base(step, rank)
    return [batch, (batch["x"], batch["y"]), {**batch, "y": None}][step % 3]


def objects(step: int, rank: int) -> Any:
    """Lists of objects, of other lengths on each rank."""
    g = torch.Generator().manual_seed(step)
    return {
        **base(step, rank),
        "targets": [Target(torch.rand(1 + step + i, 4, generator=g), "a" * (i + 1)) for i in range(rank + step % 3)],
    }


def sizes(step: int, rank: int) -> Any:
    """Other sizes on each rank."""
    return base(step, rank, 3 + step + 2 * rank, 4 + rank)


def dtypes(step: int, rank: int) -> Any:
    batch = base(step, rank)
    return {**batch, "x": batch["x"].to(torch.int32 if step % 2 else torch.int64)}


def texts(step: int, rank: int) -> Any:
    """No tensor at all."""
    return [f"{step} {rank} {i}" for i in range(3 + step % 2)]


def sparse(step: int, rank: int) -> Any:
    batch = base(step, rank)
    return {**batch, "x": batch["x"].to_sparse()}


def times(step: int, rank: int) -> Any:
    """A number that counts a loop, another at each step and on each rank."""
    return {**base(step, rank), "times": 1 + step % 3 + rank}


def late(step: int, rank: int) -> Any:
    """A last batch of an epoch, of other rows on each rank."""
    return base(step, rank, rows=4 if step % 3 else 2 + rank)


CASES = [keys, structures, objects, sizes, dtypes, texts, sparse, times, late]
if on_device.DEVICE == "soft":  # which has no sparse tensors
    CASES.remove(sparse)


def train(
    batch: Callable[[int, int], Any], evaluates: bool = True, **config: Any
) -> tuple[list[Any], list[Any], float, list[str]]:
    """Losses of ours and of eager steps, of evaluations too, how far the parameters are from theirs, and what was said."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net().double()
    theirs = copy.deepcopy(model)
    optimizer, expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1), []
    others = [copy.deepcopy(theirs) for _ in range(size)]  # statistics are each rank's own
    for step in range(STEPS):
        for other in others:
            other.zero_grad()
            for p, q in zip(other.parameters(), theirs.parameters(), strict=True):
                p.data.copy_(q)
        losses = [loss_fn(others[r], batch(step, r))["loss"] for r in range(size)]
        for loss in losses:
            loss.backward()
        for params in zip(theirs.parameters(), *(other.parameters() for other in others), strict=True):
            found = [p.grad for p in params[1:] if p.grad is not None]
            params[0].grad = sum(found) / size if found else None  # type: ignore[assignment]
        optimizer.step()
        expected.append(sum(float(x.detach()) for x in losses) / size)
        for p, q in zip(others[rank].parameters(), theirs.parameters(), strict=True):
            p.data.copy_(q)
        others[rank].eval()
        with torch.no_grad():
            expected.append(float(loss_fn(others[rank], batch(step + 1, rank))["loss"]) if evaluates else 0.0)
        others[rank].train()
    settings = interlace.Config(schedule=[], cache="off", timeout_s=600, fullgraph=False, **config)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    found = []
    with ranks.heard() as said, interlace.compile(model, mine, loss_fn, batch(0, rank), settings) as trainer:
        for step in range(STEPS):
            found.append(parity.mean_over_ranks(trainer.step(batch(step, rank))))
            assert trainer.outputs["hidden"][0].shape[1] == 6
            found.append(float(trainer.evaluate(batch(step + 1, rank))["loss"]) if evaluates else 0.0)
        state = trainer.state_dict(all_ranks=True)
    far = max(float((state[n] - t).abs().max()) for n, t in theirs.named_parameters())
    return found, expected, far, said


@pytest.mark.parametrize("batch", CASES, ids=lambda f: f.__name__)
def test_one_rank(batch: Callable[[int, int], Any]) -> None:
    found, expected, far, said = train(batch)
    assert found == pytest.approx(expected, rel=1e-9)
    assert far < 1e-9
    assert sum("runs in Python" in text for text in said) == (batch not in (times, late, sizes, objects)), said


@pytest.mark.parametrize("strategy", ["shard", "zero1", "replicate"])
def test_two_ranks(strategy: str) -> None:
    for batch in CASES:
        for found, expected, far, said in ranks.run(train, 2, batch, strategy=strategy):
            assert found == pytest.approx(expected, rel=1e-9), batch
            assert far < 1e-9, batch
            assert sum("runs in Python" in text for text in said) == (batch is not times), said


def stepwise(
    batches: list[Any],
    loss: Callable[[nn.Module, Any], Any],
    before: Callable[[int, Any], None] = lambda step, model: None,
    **config: Any,
) -> list[str]:
    """Trains on one rank and in PyTorch, with what happens before each step; gives what was said."""
    settings = interlace.Config(**{"schedule": [], "cache": "off", "fullgraph": False, **config})
    found: list[list[float]] = []
    states = []
    with ranks.heard() as said:
        for compiled in (False, True):
            torch.manual_seed(0)
            model = Net().double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            count = settings.accumulation
            trainer = interlace.compile(model, optimizer, loss, batches[0], settings) if compiled else None
            found.append([])
            for step, batch in enumerate(batches):
                before(step, model)
                if trainer is not None:
                    found[-1].append(float(trainer.step(batch)))
                    continue
                losses = [loss(model, part) for part in (batch if count > 1 else [batch])]
                losses = [x["loss"] if isinstance(x, dict) else x for x in losses]
                (sum(losses) / count).backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(sum(float(x.detach()) for x in losses) / count)
            states.append(trainer.state_dict() if trainer is not None else copy.deepcopy(model.state_dict()))
            if trainer is not None:
                said.append(f"runs {[row['runs'] for row in trainer.summary()['opaque']]}")
                trainer.close()
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    for name, t in states[0].items():
        assert torch.allclose(t.double(), states[1][name].double(), rtol=1e-9, atol=1e-9), name
    return said


def test_so_many_forms_are_compiled() -> None:
    """And come back; of the others the first says why."""
    sizes = [*range(4, 20), 5, 6, 4, 19, 5]
    said = stepwise([{**base(0, i, length=n), "z": torch.ones(4).double()} for i, n in enumerate(sizes)], loss_fn)
    assert sum("compiling again" in text for text in said) == 8, said
    assert sum("and 8 other forms are compiled" in text for text in said) == 1, said


def test_what_python_changes_meanwhile_is_followed() -> None:
    scale = {"by": 1.0, "square": False}

    def loss(model: nn.Module, batch: Any) -> Any:
        found = loss_fn(model, batch)["loss"] * scale["by"]
        return found.square() if scale["square"] else found

    def before(step: int, model: nn.Module) -> None:
        scale["by"], scale["square"] = 1.0 + step // 2, step >= 5
        model.norm.running_mean = torch.full((6,), float(step), dtype=torch.float64)
        if step == 6:
            model.head.weight.data.mul_(0.5)

    stepwise([keys(step // 2, 0) for step in range(10)], loss, before)


def test_layers_are_frozen_and_unfrozen_meanwhile() -> None:
    def before(step: int, model: nn.Module) -> None:
        model.embed.requires_grad_(not 3 <= step < 6)

    stepwise([keys(step // 2, 0) for step in range(10)], loss_fn, before)


def test_micro_batches_of_other_forms() -> None:
    batches = [[base(step, 0), base(step, 1)] if step % 2 else [keys(step, 0), keys(step + 1, 1)] for step in range(6)]
    said = stepwise([[base(0, 0), base(0, 1)], *batches], loss_fn, accumulation=2)
    assert any("micro-batches of one step differ" in text for text in said), said


def test_beside_lengths_that_are_filled_up() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        if "z" in batch:
            return loss_fn(model, batch)
        hidden = torch.tanh(model.embed(batch["x"])).sum(1)  # 8 fills up
        return F.cross_entropy(
            model.head(hidden - (batch["x"] == 8).sum(1, keepdim=True) * torch.tanh(model.embed.weight[8])), batch["y"]
        )

    batches = [base(step, 0, length=4 + step) if step % 3 else {**keys(1, step)} for step in range(9)]
    batches = [{**b, "x": b["x"].clamp(max=7)} for b in batches]
    stepwise([batches[1], *batches], loss, pad={"x": 8})


def test_autocast() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        found = model(batch["x"])
        head = model.head(found)
        return {
            "loss": (head.float().square().mean() + (model.other(found).float().mean() if "z" in batch else 0.0)) * 3,
            "head": head,
        }

    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [keys(step // 2, 0) for step in range(8)]
        if compiled:
            config = interlace.Config(schedule=[], cache="off", fullgraph=False, param_dtype="autocast", kernels="torch")
            with interlace.compile(model, optimizer, loss, batches[0], config) as trainer:
                found.append([])
                for batch in batches:
                    found[-1].append(float(trainer.step(batch)))
                    assert trainer.outputs["head"][0].dtype == torch.get_autocast_dtype(on_device.DEVICE)
            continue
        found.append([])
        for batch in batches:
            with torch.autocast("cpu"):
                one = loss(model, batch)["loss"]
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(float(one.detach()))
    assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_a_step_that_is_asked_to_run_in_python() -> None:
    torch.manual_seed(0)
    model = Net().double()
    theirs = copy.deepcopy(model)
    with interlace.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, base(0, 0), interlace.Config(schedule=[], cache="off")
    ) as trainer:
        for step, python in enumerate((False, True, True, False)):
            batch = keys(1, 0) if python else base(step, 0)
            assert float(trainer.step(batch, python=python)) == pytest.approx(float(loss_fn(theirs, batch)["loss"]), rel=1e-9)
        assert trainer.summary()["opaque"][0]["runs"] == 2
        with pytest.raises(InterlaceError, match="batch entry 'y' is missing"):
            trainer.step(keys(1, 0))


def alone(who: int, before: int, fullgraph: bool) -> list[str]:
    """Step `before` runs in Python on one rank alone, and so do those before it on all, if there are any."""
    rank, _ = parity.rank_and_size()
    torch.manual_seed(0)
    model, said = Net(), []
    optimizer, config = torch.optim.SGD(model.parameters(), lr=0.1), interlace.Config(timeout_s=20, cache="off", fullgraph=fullgraph)
    trainer = interlace.compile(model, optimizer, loss_fn, base(0, rank), config)
    for step in range(before + 1):
        try:
            trainer.step(base(step, rank), python=step < before or rank == who)
        except InterlaceError as e:
            said.append(str(e))
    if fullgraph:
        return said
    trainer.step(base(9, rank))  # nobody has begun it
    return [*said, "goes on"]


@pytest.mark.parametrize("who, before, fullgraph", [(0, 0, True), (1, 0, True), (1, 2, True), (0, 2, False), (1, 0, False)])
def test_a_step_that_one_rank_asks_to_run_in_python(who: int, before: int, fullgraph: bool) -> None:
    outcomes = ranks.outcomes(alone, 2, who, before, fullgraph)
    for outcome in outcomes:
        assert outcome is not None and outcome.error is None, outcome
        assert outcome.seconds < 15 and f"rank {who}" in outcome.value[0] and "every rank must say so in the same step" in outcome.value[0]
        assert outcome.value[1:] == ([] if fullgraph else ["goes on"])


def test_autocast_with_all_of_it_in_python() -> None:
    stepwise([texts(step, 0) for step in range(3)], loss_fn, param_dtype="autocast")


def test_parameters_that_python_writes_are_refused() -> None:
    """Not by their norm alone: what is not captured has nobody who sees the write."""
    model = Net()

    def loss(model: nn.Module, batch: Any) -> Any:
        model.head.weight.data.mul_(0.9)
        return loss_fn(model, batch)

    config = interlace.Config(schedule=[], cache="off", fullgraph=False)
    with (
        pytest.raises(Exception, match=r"parameter 'head.weight' is written by .* mode=\"eager\""),
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, base(0, 0), config) as trainer,
    ):
        trainer.step(base(0, 0))
        trainer.step(keys(1, 0))


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.net, self.head = kind(3, 4), nn.Linear(4, 1)

    def forward(self, packed: Any) -> Tensor:
        return self.head(self.net(packed)[1][-1]).square().mean()


# The device in software has the CPU's kernels, and those have no GRU's cell.
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU] if on_device.DEVICE != "soft" else [nn.RNN])
def test_packed_sequences_of_a_batch(kind: type) -> None:
    """No class that checks its tensors can be taken apart; capturing it went on for ever."""

    def packed(step: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(step)
        rows = [torch.randn(5 - i - step % 2, 3, generator=g).double() for i in range(3)]
        return {"p": nn.utils.rnn.pack_sequence(rows)}

    model = Recurrent(kind).double()
    twin = copy.deepcopy(model)
    settings = interlace.Config(schedule=[], cache="off", fullgraph=False)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda m, b: m(b["p"]), packed(0), settings) as trainer:
        for step in range(4):
            assert float(trainer.step(packed(step))) == pytest.approx(float(twin(packed(step)["p"]).detach()), rel=1e-9)
