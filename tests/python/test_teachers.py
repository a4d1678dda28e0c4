"""Networks and tensors beside the model, which the loss function reads and a script changes between steps: as eager PyTorch has them."""

from __future__ import annotations

import copy
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

Tensor = torch.Tensor
WIDE = 150  # a matrix of as many rows and columns is more than is compared at each look
STEPS = 5


class Agent:
    """A student, what teaches it, and what else is kept of it."""

    def __init__(self, frozen: bool) -> None:
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(4, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(not frozen)
        self.kept = {n: p.detach().clone() for n, p in self.student[3].named_parameters()}

    def there(self) -> Agent:
        self.student, self.teacher = self.student.to(on_device.DEVICE), self.teacher.to(on_device.DEVICE)
        self.kept = on_device.there(self.kept)
        return self

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch) + F.linear(self.teacher[0](batch), self.kept["weight"])
        wanted = wanted + F.linear(batch, self.teacher[0].weight.detach()).mean()
        return F.mse_loss(model(batch), wanted)


@torch.no_grad()
def averaged(agent: Agent, step: int) -> None:
    for t, p in zip(agent.teacher.parameters(), agent.student.parameters(), strict=True):
        t.mul_(0.7).add_(p, alpha=0.3)


def averaged_behind_its_back(agent: Agent, step: int) -> None:
    for t, p in zip(agent.teacher.parameters(), agent.student.parameters(), strict=True):
        t.data.copy_(0.3 * p.data + 0.7 * t.data)


def given_other_memory(agent: Agent, step: int) -> None:
    for t, p in zip(agent.teacher.parameters(), agent.student.parameters(), strict=True):
        t.data = 0.3 * p.data + 0.7 * t.data


def loaded(agent: Agent, step: int) -> None:
    agent.teacher.load_state_dict(agent.student.state_dict())


def copied(agent: Agent, step: int) -> None:
    """The one before goes on as it was."""
    before, agent.teacher = agent.teacher, copy.deepcopy(agent.student)
    agent.__dict__.setdefault("before", []).append((before, before[0].weight.sum().item()))


def replaced(agent: Agent, step: int) -> None:
    agent.teacher[3].weight = nn.Parameter(agent.student[3].weight.detach() * 0.5)


@torch.no_grad()
def a_tensor(agent: Agent, step: int) -> None:
    agent.kept["weight"].lerp_(agent.student[3].weight, 0.3)


CHANGES = [averaged, averaged_behind_its_back, given_other_memory, loaded, copied, replaced, a_tensor]


def batch_of(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).double()


def plain(agent: Agent, change: Callable[[Agent, int], None], size: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(agent.student.parameters(), lr=0.05), []
    for step in range(STEPS):
        if step:
            change(agent, step)
        parts = [agent.loss(agent.student, batch_of(10 * step + rank)) / size for rank in range(size)]
        for loss in parts:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in parts))
    return losses


def ours(change: Callable[[Agent, int], None], frozen: bool, **config: Any) -> tuple[list[float], list[float], int]:
    """Losses, those of plain steps, and how often the step was compiled again."""
    rank, size = parity.rank_and_size()
    expected, agent = plain(Agent(frozen), change, size), Agent(frozen).there()
    optimizer = torch.optim.SGD(agent.student.parameters(), lr=0.05)
    settings = interlace.Config(timeout_s=60, schedule=[], cache="off", **config)
    with ranks.heard() as said, interlace.compile(agent.student, optimizer, agent.loss, batch_of(rank), settings) as trainer:
        losses = []
        for step in range(STEPS):
            if step:
                change(agent, step)
            losses.append(parity.mean_over_ranks(trainer.step(batch_of(10 * step + rank))))
    for teacher, found in agent.__dict__.get("before", []):
        assert teacher[0].weight.sum().item() == found
    return losses, expected, sum("compiling again" in text for text in said)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_followed(change: Callable[[Agent, int], None], frozen: bool) -> None:
    losses, expected, again = ours(change, frozen)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert again == (STEPS - 1 if change is copied else 0)


@pytest.mark.parametrize("change", [averaged_behind_its_back, loaded, a_tensor], ids=lambda f: f.__name__)
def test_followed_on_two_ranks(change: Callable[[Agent, int], None]) -> None:
    for losses, expected, again in ranks.run(ours, 2, change, True, strategy="replicate"):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert again == 0


def test_the_teachers_statistics() -> None:
    """It is in training mode: what it counts is in its own buffers."""
    torch.manual_seed(0)
    model, teacher = nn.Linear(4, 3).double(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    other, teacher = copy.deepcopy(teacher), teacher.to(on_device.DEVICE)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        return F.mse_loss(model(batch), wanted)

    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_of(0)) as trainer:
        for step in range(3):
            trainer.step(batch_of(step))
            other(batch_of(step))
        for t, expected in zip(teacher.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(t, expected)


def test_what_has_changed_since_the_last_step_counts_in_an_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, beside = (nn.Linear(4, 3, dtype=torch.float64, device=on_device.DEVICE) for _ in range(2))
    model.scale, model.shift, model.kind = 1.0, torch.zeros(3).to(beside.weight), "plain"
    factors = {"of": 1.0}

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        return ((model(batch) * model.scale + model.shift) * (2 if model.kind == "double" else 1)).square().mean()

    def other_fn(model: Any, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = beside(batch) * factors["of"]
        return F.mse_loss(model(batch) * model.scale, wanted)

    def replace() -> None:
        nonlocal beside
        beside = nn.Linear(4, 3).to(beside.weight)

    changes: list[Callable[[], Any]] = [
        lambda: None, lambda: setattr(model, "scale", 2.0), lambda: setattr(model, "shift", torch.ones_like(model.shift)),
        lambda: model.shift.add_(1), lambda: setattr(model, "kind", "double"), model.eval, model.train,
        lambda: beside.weight.data.mul_(2), lambda: factors.update(of=3.0), replace, lambda: beside.weight.data.mul_(2),
    ]  # fmt: skip
    batch = on_device.there(batch_of(0))
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch) as trainer:
        trainer.step(batch)
        for change in changes:
            change()
            for function in (loss_fn, other_fn):
                found = trainer.evaluate(batch, function)["loss"].item()
                assert found == pytest.approx(function(model, batch).item(), rel=1e-9)
        trainer.step(batch)
        assert trainer.evaluate(batch)["loss"].item() == pytest.approx(loss_fn(model, batch).item(), rel=1e-9)
        caplog.clear()
        for _ in range(2):  # as loops do it
            model.eval()
            trainer.evaluate(batch)
            model.train()
            trainer.step(batch)
        assert not caplog.records


class Remembers(nn.Module):
    """Tensors that its own steps change: an attribute, one in a list, and two of the loss function's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3).double(), 1.0
        self.mean, self.means = torch.zeros(3).double(), [torch.zeros(3).double()]

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.mean()
        self.means[0] = self.means[0] * 0.9 + x.sum()
        return self.layer(x) * self.scale + self.mean + self.means[0]


def remembered(change: Callable[[Remembers, dict[str, Tensor], int], None] | None, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model, kept = Remembers(), {"mean": torch.ones(3).double()}

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        kept["mean"].mul_(0.9).add_(batch.mean())
        return (model(batch) + kept["mean"]).square().mean()

    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    trainer = interlace.compile(model, optimizer, loss_fn, batch_of(0), interlace.Config(schedule=[], cache="off")) if compiled else None
    for step in range(5):
        batch = batch_of(step)
        if change is None:
            batch = batch[: 5 - step // 3]
        elif step > 1:
            change(model, kept, step)
        if trainer is not None:
            losses.append(trainer.step(batch).item())
            continue
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


STATE: dict[str, Callable[[Remembers, dict[str, Tensor], int], Any] | None] = {
    "the batch's form": None, "a number": lambda m, kept, i: setattr(m, "scale", 1.0 + i % 2),
    "a flag": lambda m, kept, i: m.train(i % 2 == 0),
    "one anew": lambda m, kept, i: kept.update(mean=torch.zeros(3).double()), "written": lambda m, kept, i: m.means[0].zero_(),
    "an attribute anew": lambda m, kept, i: setattr(m, "mean", torch.zeros(3).double()),
    "an item anew": lambda m, kept, i: m.means.__setitem__(0, torch.zeros(3).double()),
}  # fmt: skip


@pytest.mark.parametrize("kind", STATE)
def test_another_capture_keeps_what_steps_have_changed(kind: str) -> None:
    assert remembered(STATE[kind], True) == pytest.approx(remembered(STATE[kind], False), rel=1e-9)


def adversaries(compiled: bool, **config: Any) -> list[float]:
    """Two networks, each trained by its own optimizer on a loss that reads the other."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    judge = nn.Sequential(nn.Linear(8, WIDE), nn.LeakyReLU(0.2), nn.Linear(WIDE, 1)).double()
    if compiled:
        maker, judge = maker.to(on_device.DEVICE), judge.to(on_device.DEVICE)

    def judged(judge: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            fake = maker(batch)
        return F.softplus(judge(fake)).mean() + F.softplus(-judge(batch.repeat(1, 2))).mean()

    def made(maker: nn.Module, batch: Tensor) -> Tensor:
        judge.requires_grad_(False)
        loss = F.softplus(-judge(maker(batch))).mean()
        judge.requires_grad_(True)
        return loss

    sides: list[tuple[nn.Module, Any]] = [(judge, judged), (maker, made)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model, _ in sides]
    settings = interlace.Config(schedule=[], cache="off", **config)
    trainers = [interlace.compile(m, o, f, batch_of(0), settings) for (m, f), o in zip(sides, optimizers, strict=True)] if compiled else []
    losses = []
    for step in range(4):
        for i, (model, function) in enumerate(sides):
            if compiled:
                losses.append(trainers[i].step(batch_of(step)).item())
                continue
            loss = function(model, batch_of(step))
            optimizers[i].zero_grad()
            loss.backward()
            optimizers[i].step()
            losses.append(loss.item())
    return losses


def test_two_trainers_that_read_one_another() -> None:
    assert adversaries(True) == pytest.approx(adversaries(False), rel=1e-9)


def test_two_trainers_on_two_ranks() -> None:
    for losses in ranks.run(adversaries, 2, True, strategy="zero1"):
        assert losses == pytest.approx(adversaries(False), rel=1e-9)
    found = ranks.outcomes(adversaries, 2, True, strategy="shard")[0]
    assert found is not None and "a parameter of another trainer, whose ranks have a part of it each" in str(found.error)


def test_a_discriminator_that_another_trainer_trains() -> None:
    """Its parameters have gradients of their own, which the generator's step does not make."""

    def train(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        makes, judges = nn.Linear(3, 4).double(), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        if compiled:
            makes, judges = makes.to(on_device.DEVICE), judges.to(on_device.DEVICE)
        first, second = torch.optim.SGD(judges.parameters(), lr=0.1), torch.optim.Adam(makes.parameters(), lr=0.1)
        draw = lambda step, n: torch.randn(6, n, dtype=torch.float64, generator=torch.Generator().manual_seed(step))  # noqa: E731
        judged = lambda m, b: (m(b[0]) - 1).square().mean() + m(makes(b[1]).detach()).square().mean()  # noqa: E731
        made = lambda m, z: (judges(m(z)) - 1).square().mean()  # noqa: E731
        settings = interlace.Config(schedule=[], cache="off")
        if compiled:
            one = interlace.compile(judges, first, judged, (draw(0, 4), draw(0, 3)), settings)
            other = interlace.compile(makes, second, made, draw(0, 3), settings)
            return [f(b).item() for i in range(4) for f, b in ((one.step, (draw(i, 4), draw(i, 3))), (other.step, draw(i + 9, 3)))]
        losses = []
        for i in range(4):
            for model, optimizer, loss_fn, b in ((judges, first, judged, (draw(i, 4), draw(i, 3))), (makes, second, made, draw(i + 9, 3))):
                optimizer.zero_grad()
                loss = loss_fn(model, b)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert train(True) == pytest.approx(train(False), rel=1e-9)


class Momentum(nn.Module):
    """Its forward part moves a frozen copy of a layer, as BYOL's and MoCo's do; the optimizer has all parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Linear(4, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    old.lerp_(new, 0.1)
        return (self.online(x) - self.target(x)).square().mean() + self.online(x).cos().mean()


def test_a_momentum_encoder_that_the_optimizer_has_too() -> None:
    """Evaluated, and with a batch of another size, which capture the model once more."""
    found: list[list[float]] = []
    for compiled in (False, True):
        model, losses = Momentum().double(), list[float]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        sizes = (6, 6, 4, 6)
        batches = [torch.randn(n, 4, generator=torch.Generator().manual_seed(i)).double() for i, n in enumerate(sizes)]
        if compiled:
            with interlace.compile(model, optimizer, lambda m, x: m(x), batches[0], interlace.Config(schedule=[])) as trainer:
                for batch in batches:
                    losses += [trainer.step(batch).item(), trainer.evaluate(batch)["loss"].item()]
        else:
            for batch in batches:
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    losses += [loss.item(), model.eval()(batch).item()]
                model.train()
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_teachers_of_torchscript(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(5, 4, dtype=torch.double)
    teacher = torch.jit.script(net) if kind == "scripted" else torch.jit.trace(net, x)
    student = nn.Linear(4, 3).double()
    other = copy.deepcopy(student)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        return F.mse_loss(model(batch), wanted)

    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (student, other))
    with interlace.compile(student, optimizer, loss, x, interlace.Config(cache="off")) as trainer:
        for _ in range(3):
            plain.zero_grad()
            expected = loss(other, x)
            expected.backward()
            plain.step()
            assert trainer.step(x).item() == pytest.approx(expected.item(), rel=1e-9)
            with torch.no_grad():
                for p in teacher.parameters():
                    p.mul_(1.1)
