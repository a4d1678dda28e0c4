"""Captured optimizers against PyTorch, on real ranks: the same losses and weights, whatever the strategy.

`make test` runs each of them once, in turn over models, strategies and ranks; `make soak` runs all combinations.
"""

from __future__ import annotations

from pathlib import Path

import on_device
import parity
import pytest
import ranks
import torch
from parity import Setting
from torch import nn

import interlace

Tensor = torch.Tensor
STEPS = 12
STRATEGIES = ("shard", "zero1", "replicate")
CASES = ("llama", "vit")
# Those that look at the sign of a gradient alone: where it is zero but for rounding, as that of an attention's key bias, nobody can say
# which way they go. The loss does not depend on such weights.
SIGNS = {"rprop", "lion"}


def check(kind: str, case: str, size: int, settings: list[Setting], folder: Path) -> None:
    found = ranks.run(parity.compare, size, case, "float64", kind, STEPS, settings, ("one",), cache=str(folder), timeout_s=900)[0]
    for setting, distances in zip(settings, found, strict=True):
        far = distances["one"]
        assert far.loss <= 1e-6, f"{kind} {case} {setting} on {size} ranks: {far}"
        assert far.weights <= 1e-6 or (kind in SIGNS and case == "vit"), f"{kind} {case} {setting} on {size} ranks: {far}"


@pytest.mark.parametrize("number, kind", list(enumerate(parity.CAPTURED)), ids=list(parity.CAPTURED))
def test_each_optimizer(number: int, kind: str, tmp_path: Path) -> None:
    setting = Setting(strategy=STRATEGIES[number % 3], clip=0.3 if number % 2 else None, accumulation=1 + number % 2)
    check(kind, CASES[number % 2], 1 + (number + number // 2) % 2, [setting], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", list(parity.CAPTURED))
def test_every_optimizer(kind: str, case: str, size: int, tmp_path: Path) -> None:
    settings = [Setting(strategy=s, clip=c, accumulation=a) for s in STRATEGIES for c, a in ((None, 1), (0.3, 2))]
    check(kind, case, size, settings, tmp_path)


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def small_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def batch_at(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))}


def in_pytorch(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_net()
    optimizer = parity.CAPTURED[kind](list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        small_loss(model, batch_at(step)).backward()
        optimizer.step()
    return model, optimizer


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["nadam", "adagrad", "asgd", "rmsprop-centered", "lion", "amsgrad", "adafactor"])
def test_training_goes_on_from_pytorch_and_back(kind: str) -> None:
    """An optimizer that has made steps is taken over, and the state dict is one that PyTorch goes on with."""
    model, optimizer = in_pytorch(kind, 3)
    with interlace.compile(model, optimizer, small_loss, batch_at(0), interlace.Config(cache="off")) as trainer:
        for step in range(3, 8):
            trainer.step(batch_at(step))
        assert_close(model, in_pytorch(kind, 8)[0])
        state, weights = trainer.optimizer_state_dict(), trainer.state_dict()
    again = small_net()
    again.load_state_dict(weights)
    optimizer = parity.CAPTURED[kind](list(again.parameters()))
    optimizer.load_state_dict(state)
    for step in range(8, 11):
        optimizer.zero_grad()
        small_loss(again, batch_at(step)).backward()
        optimizer.step()
    assert_close(again, in_pytorch(kind, 11)[0])


class Differences(torch.optim.Optimizer):
    """Counts its steps in the group, as Adan does, keeps the gradient of the step before, and takes a cube root, as MADGRAD does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "step": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                assert p.grad is not None
                state = self.state[p]
                if group["step"] == 1:
                    state["before"], state["sum"] = p.grad.clone(), torch.zeros_like(p)
                state["sum"].addcmul_(p.grad, p.grad)
                p.addcdiv_(2 * p.grad - state["before"], state["sum"].pow(1 / 3).add_(0.1), value=-group["lr"])
                state["before"] = p.grad.clone()


def test_an_optimizer_that_counts_in_its_group() -> None:
    models = small_net(), small_net()
    optimizer = Differences(list(models[0].parameters()))
    for step in range(6):
        optimizer.zero_grad()
        small_loss(models[0], batch_at(step)).backward()
        optimizer.step()
    with interlace.compile(
        models[1], Differences(list(models[1].parameters())), small_loss, batch_at(0), interlace.Config(cache="off")
    ) as trainer:
        for step in range(6):
            trainer.step(batch_at(step))
        assert_close(models[1], models[0])


def test_an_optimizer_that_makes_its_own_steps_needs_whole_parameters() -> None:
    class Slow(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:  # as Lookahead's, which calls no other
            self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state

    model = small_net()
    with pytest.raises(interlace.InterlaceError, match=r"optimizer Slow makes the steps of another one, its 'base'.*without a tier"):
        config = interlace.Config(memory_limit="1GiB", tier="/tmp")
        interlace.compile(model, Slow(torch.optim.AdamW(model.parameters())), small_loss, batch_at(0), config)


@pytest.mark.parametrize("kind", list(parity.CAPTURED))
def test_a_checkpoint_has_all_that_the_step_depends_on(kind: str, tmp_path: Path) -> None:
    def compiled() -> interlace.Trainer:
        model = small_net()
        return interlace.compile(
            model, parity.CAPTURED[kind](list(model.parameters())), small_loss, batch_at(0), interlace.Config(cache="off")
        )

    with compiled() as trainer:
        for step in range(5):
            trainer.step(batch_at(step))
        trainer.save(tmp_path / "saved")
        losses = [float(trainer.step(batch_at(step))) for step in range(5, 9)]
    with compiled() as trainer:
        trainer.step(batch_at(99))
        trainer.load(tmp_path / "saved")
        assert [float(trainer.step(batch_at(step))) for step in range(5, 9)] == losses


def with_passes(schedule: list[str], tier: str | None) -> list[float]:
    model = small_net()
    optimizer = parity.RULES["rmsprop-centered"](list(model.parameters()))
    config = interlace.Config(schedule=[(0, schedule)], tier=tier, cache="off", arena=tier is None)
    rank, _ = parity.rank_and_size()
    with interlace.compile(model, optimizer, small_loss, batch_at(rank), config) as trainer:
        return [float(trainer.step(batch_at(10 * step + rank))) for step in range(6)]


def test_what_moves_updates_moves_these_too() -> None:
    """In the backward part, in the next step, on the host: never another bit."""
    plain = ranks.run(with_passes, 2, [], None)
    for passes, tier in ((["overlap_update"], None), (["reposition_update"], None), (["host_update"], "host")):
        found = ranks.run(with_passes, 2, passes, tier)
        if on_device.DEVICE != "cpu" and passes == ["host_update"]:  # a host's kernels round otherwise than a device's
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
        else:
            assert found == plain, passes
