"""Optimizers whose evaluations have other parameters than their steps (schedule-free): train() and eval() reach what the trainer has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

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


class Free(torch.optim.Optimizer):
    """Schedule-free SGD. `whole`: its step reads norms, so that its own Python makes it; `attribute`: where its mode is."""

    def __init__(self, params: Any, lr: float = 0.3, beta: float = 0.9, whole: bool = False, attribute: bool = False) -> None:
        self.whole, self.attribute, self.training = whole, attribute, False
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _turn(self, on: bool) -> None:
        for group in self.param_groups:
            if (self.training if self.attribute else group["train_mode"]) != on:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"] if on else 1 - 1 / group["beta"])
                group["train_mode"] = on
        self.training = on

    @torch.no_grad()
    def train(self) -> None:
        self._turn(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not (self.training if self.attribute else self.param_groups[0]["train_mode"]):
            raise Exception("not in train mode")
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                if "z" not in state:
                    state["z"] = p.clone()
                if self.whole:
                    grad = grad / (1 + grad.norm())
                p.lerp_(state["z"], weight)
                p.add_(grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                state["z"].sub_(grad, alpha=group["lr"])
            group["k"] += 1


def batch(step: int, rank: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randn(4, 6, generator=g).double(), "y": torch.randint(0, 3, (4,), generator=g)}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def made(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if kind in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        return model, getattr(pytest.importorskip("schedulefree"), kind)(model.parameters(), lr=0.05, weight_decay=0.1)
    return model, Free(model.parameters(), whole=kind == "whole", attribute=kind == "attribute")


def theirs(kind: str, size: int) -> list[float]:
    """Losses of steps, and of evaluations in eval mode after every second one."""
    model, optimizer = made(kind)
    found = []
    for step in range(STEPS):
        optimizer.train()
        losses = [loss_fn(model, batch(step, r)) for r in range(size)]
        (sum(losses) / size).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(sum(x.detach() for x in losses)) / size)
        if step % 2:
            optimizer.eval()
            found.append(float(loss_fn(model, batch(99, 0)).detach()))
    return found


def ours(kind: str, strategy: str, folder: str = "", turns: str = "") -> list[float]:
    """The same. With a folder, each third step is made by another trainer, which loads what the one before has saved in one of the modes; its
    own optimizer is in the other one."""
    rank, _ = parity.rank_and_size()
    settings = interlace.Config(strategy=strategy, schedule=[], cache="off", timeout_s=60)
    model, optimizer = made(kind)
    trainer = interlace.compile(model, optimizer, loss_fn, batch(0, rank), settings)
    found = []
    for step in range(STEPS):
        optimizer.train()
        found.append(parity.mean_over_ranks(trainer.step(batch(step, rank))))
        if step % 2:
            optimizer.eval()
            found.append(float(trainer.evaluate(batch(99, 0))["loss"]))
        if folder and step % 3 == 2:
            getattr(optimizer, turns)()
            trainer.save(folder)
            trainer.close()
            model, optimizer = made(kind)
            trainer = interlace.compile(model, optimizer, loss_fn, batch(0, rank), settings)
            if turns == "eval":
                optimizer.train()
                trainer.step(batch(50, rank))
            trainer.load(folder)
            assert optimizer.param_groups[0]["train_mode"] == (turns == "train")
    trainer.close()
    return found


KINDS = ["group", "attribute", "whole", "AdamWScheduleFree", "SGDScheduleFree"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str, tmp_path: Path) -> None:
    expected = theirs(kind, 1)
    assert ours(kind, "shard") == pytest.approx(expected, rel=1e-12)
    for turns in ("train", "eval") if kind not in ("attribute",) else ():
        assert ours(kind, "shard", str(tmp_path / turns), turns) == pytest.approx(expected, rel=1e-12), turns


@pytest.mark.parametrize("strategy", ["shard", "zero1", "replicate"])
def test_two_ranks(strategy: str, tmp_path: Path) -> None:
    for kind in ("group", "whole"):
        expected = theirs(kind, 2)
        for found in ranks.run(ours, 2, kind, strategy, str(tmp_path / kind), "eval"):
            assert found == pytest.approx(expected, rel=1e-12), kind


def test_frozen_layers_turn_too() -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = made("group")
        twin = copy.deepcopy(model)
        trainer = interlace.compile(model, optimizer, loss_fn, batch(0, 0), interlace.Config(schedule=[], cache="off")) if compiled else None
        losses = []
        for step in range(STEPS):
            model[0].requires_grad_(step not in (2, 3))
            optimizer.train()
            if trainer is not None:
                losses.append(float(trainer.step(batch(step, 0))))
            else:
                loss = loss_fn(model, batch(step, 0))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            optimizer.eval()
            twin.load_state_dict(trainer.state_dict() if trainer is not None else model.state_dict())
            losses.append(float(loss_fn(twin, batch(99, 0)).detach()))
        found.append(losses)
        if trainer is not None:
            trainer.close()
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_a_step_in_the_wrong_mode_says_so() -> None:
    model, optimizer = made("group")
    with (
        pytest.raises(InterlaceError, match=r"step\(\) of Free fails: not in train mode"),
        interlace.compile(model, optimizer, loss_fn, batch(0, 0), interlace.Config(schedule=[], cache="off")) as trainer,
    ):
        trainer.step(batch(0, 0))
