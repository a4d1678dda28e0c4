"""Optimizers whose steps are not elementwise make them in their own Python, with PyTorch's numbers: norms of whole parameters, another
optimizer inside, the loss once more."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
from torch import nn

import interlace
from interlace.checkpoint.optimizer import back, plain
from interlace.checkpoint.tensor_file import CheckpointError
from interlace.train import own_steps

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer


class Lamb(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add(1e-6) + group["weight_decay"] * p
                weight, size = p.norm(), update.norm()
                ratio = weight / size if weight > 0 and size > 0 else 1.0
                p.data.add_(update * ratio, alpha=-group["lr"])


class Sam(Optimizer):
    """The gradient at another point, where the loss is computed once more; puts `p.data` back."""

    def __init__(self, params: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / (torch.stack([p.grad.norm() for p in params]).norm() + 1e-12)
        with torch.no_grad():
            for p in params:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in params:
            p.data = self.state[p]["old"]
        self.base.step()


class Lookahead(Optimizer):
    """A wrapper that has not made itself an optimizer, and copies of the parameters."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults, self.count = base, base.param_groups, base.state, base.defaults, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip((p for group in self.param_groups for p in group["params"]), self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def adafactor(params: Any) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=1e-2, scale_parameter=False, relative_step=False)


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "lamb": Lamb,
    "sam": lambda p: Sam(p, 0.1),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=1e-2)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "adafactor": adafactor,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :3]).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def theirs(model: nn.Module, optimizer: Optimizer, steps: int, size: int, clip: float | None) -> list[float]:
    found = []
    for step in range(steps):

        @torch.enable_grad()
        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = sum(loss_fn(model, batch(step * size + r)) / size for r in range(size))
            loss.backward()  # type: ignore[union-attr]
            return loss.detach()  # type: ignore[union-attr]

        found.append(float(closure()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step(closure)
    return found


def train(kind: str, clip: float | None = None, **config: Any) -> tuple[list[float], list[float], float]:
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net().double()
    other = copy.deepcopy(model)
    model.to(on_device.DEVICE)  # before an optimizer copies its parameters
    expected = theirs(other, KINDS[kind](other.parameters()), 5, size, clip)
    optimizer = KINDS[kind](model.parameters())
    settings = interlace.Config(schedule=[], cache="off", timeout_s=60, clip_norm=clip, **config)
    with interlace.compile(model, optimizer, loss_fn, batch(rank), settings) as trainer:
        losses = [parity.mean_over_ranks(trainer.step(batch(step * size + rank))) for step in range(5)]
        state = trainer.state_dict(all_ranks=True)
    return losses, expected, max(float((state[n] - t).abs().max()) for n, t in other.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str) -> None:
    losses, expected, far = train(kind)
    assert losses == pytest.approx(expected, rel=1e-9) and far < 1e-9


def test_a_step_that_torch_compile_has_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.optim.LBFGS([torch.zeros(1)])  # puts torch's hooks round it
    monkeypatch.setattr(torch.optim.LBFGS, "step", torch._dynamo.disable(torch.optim.LBFGS.step))
    test_one_rank("lbfgs")


@pytest.mark.parametrize("strategy", ["shard", "zero1", "replicate"])
def test_two_ranks(strategy: str) -> None:
    for kind in ("lamb", "sam", "lookahead", "lbfgs") if strategy != "zero1" else ("lamb",):
        for losses, expected, far in ranks.run(train, 2, kind, 0.5 if kind == "lamb" else None, strategy=strategy):
            assert losses == pytest.approx(expected, rel=1e-9) and far < 1e-9, kind


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)


def rows() -> tuple[list[float], list[float]]:
    """SparseAdam moves the rows that have a gradient, and no others."""
    rank, size = parity.rank_and_size()
    words = [torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(i)) for i in range(5 * size)]
    loss = lambda m, b: m.head(m.embed(b).mean(1)).square().mean()  # noqa: E731
    torch.manual_seed(0)
    model = Words().double()
    other, expected = copy.deepcopy(model), []
    make = lambda m: [torch.optim.SparseAdam(m.embed.parameters(), lr=0.1), torch.optim.SGD(m.head.parameters(), lr=0.1)]  # noqa: E731
    optimizers = make(other)
    for step in range(5):
        losses = [loss(other, x) / size for x in words[step * size : (step + 1) * size]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        expected.append(sum(float(x.detach()) for x in losses))
    settings = interlace.Config(schedule=[], cache="off", timeout_s=60)
    with interlace.compile(model, make(model), loss, words[rank], settings) as trainer:
        return [parity.mean_over_ranks(trainer.step(words[step * size + rank])) for step in range(5)], expected


@pytest.mark.skipif(on_device.DEVICE == "soft", reason="the software accelerator has no sparse tensors")
@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_an_embedding(size: int) -> None:
    for losses, expected in ranks.run(rows, size):
        assert losses == pytest.approx(expected, rel=1e-9)


def resumed(folder: Path) -> tuple[list[float], list[float]]:
    rank, size = parity.rank_and_size()
    losses: list[list[float]] = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Net().double()
        optimizers = [Lamb(model.first.parameters()), torch.optim.Adam([*model.last.parameters(), *model.unused.parameters()])]
        settings = interlace.Config(schedule=[], cache="off", timeout_s=60)
        with interlace.compile(model, optimizers, loss_fn, batch(rank), settings) as trainer:
            if again:
                trainer.load(folder)
            else:
                for step in range(3):
                    trainer.step(batch(step * size + rank))
                trainer.save(folder)
                entries = trainer.optimizer_state_dict(all_ranks=True)["state"]
                assert {tuple(entry) for i, entry in entries.items() if i < 2} == {("step", "exp_avg", "exp_avg_sq")}
            losses.append([float(trainer.step(batch(step * size + rank))) for step in range(3, 6)])
    return losses[0], losses[1]


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_has_their_states(size: int, tmp_path: Path) -> None:
    for losses, again in ranks.run(resumed, size, tmp_path / "run"):
        assert losses == again


def loaded(strategy: str) -> tuple[list[float], list[float]]:
    """Goes on from states that the script gives back to its optimizer, between two steps."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net().double()
    optimizer, losses = Lamb(model.parameters()), list[float]()
    settings = interlace.Config(strategy=strategy, schedule=[], cache="off", timeout_s=60)
    with interlace.compile(model, optimizer, loss_fn, batch(rank), settings) as trainer:
        for step in (0, 1, 2, 1, 2):
            if step == 1:
                if not losses[1:]:
                    weights, state = trainer.state_dict(all_ranks=True), copy.deepcopy(optimizer.state_dict())
                trainer.load_weights(weights)
                optimizer.load_state_dict(copy.deepcopy(state))
            losses.append(float(trainer.step(batch(step * size + rank))))
    assert "load_state_dict" not in vars(optimizer)
    return losses[1:3], losses[3:]


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_states_that_a_script_loads(strategy: str) -> None:
    for once, again in ranks.run(loaded, 2, strategy):
        assert once == again


def test_what_a_state_dict_may_hold() -> None:
    norm = torch.ones(2, 3, dtype=torch.bfloat16)[:, 1:]
    state: Any = {"state": {0: {"step": 3, "norm": norm}}, "groups": [(1.0, None, True, "x", float("inf"))]}
    tensors: dict[str, torch.Tensor] = {}
    keep = own_steps._kept_in(tensors)
    made = back(json.loads(json.dumps(plain(state, "A", keep))), tensors)
    assert made["groups"] == state["groups"] and type(made["groups"][0]) is tuple and made["state"][0]["step"] == 3
    assert torch.equal(made["state"][0]["norm"], state["state"][0]["norm"])
    with pytest.raises(CheckpointError, match=r"A\.kind is a type, which a checkpoint does not hold"):
        plain({"kind": int}, "A", keep)


class Compiled(torch.optim.Optimizer):
    """What it does with all elements is a function of torch.compile's, as timm's Kron has them."""

    def __init__(self, params: Any, whole: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.whole = whole
        self.change = torch.compile(lambda p, g, lr: p - lr * g, fullgraph=True, backend="eager")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad / p.grad.norm() if self.whole else p.grad
                p.copy_(self.change(p, g, group["lr"]))


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_with_a_compiled_function(whole: bool) -> None:
    """Whether it is captured or makes its own steps; and the function is compiled afterwards, too."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    other = copy.deepcopy(model)
    x = torch.randn(5, 4, dtype=torch.double)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    optimizer, plain = Compiled(model.parameters(), whole), Compiled(other.parameters(), whole)
    with interlace.compile(model, optimizer, loss, x, interlace.Config(cache="off")) as trainer:
        for _ in range(3):
            plain.zero_grad()
            expected = loss(other, x)
            expected.backward()
            plain.step()
            assert trainer.step(x).item() == pytest.approx(expected.item(), rel=1e-9)
    assert optimizer.change(x, x, 1.0).abs().max() == 0
