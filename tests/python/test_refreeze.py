"""Parameters frozen and unfrozen while training: compiled again, said once, as torch.optim would go on."""

from __future__ import annotations

import collections
import copy
import logging
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest
from torch import nn

import interlace
from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.convert import export_torch, import_torch

Tensor = torch.Tensor
FREEZE, UNFREEZE = 2, 5  # before these steps


def optimizer_of(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """The head in a group of its own: it begins frozen and is unfrozen later."""
    head = [p for n, p in model.named_parameters() if n.startswith("lm_head")]
    body = [p for n, p in model.named_parameters() if not n.startswith("lm_head")]
    groups = [{"params": body}, {"params": head, "lr": 1e-2}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def change(model: nn.Module, step: int) -> None:
    for name, p in model.named_parameters():
        if name.startswith("lm_head"):
            p.requires_grad_(step >= UNFREEZE)
        elif "layers.0" in name and step >= FREEZE:
            p.requires_grad_(False)


def train(kind: str = "adamw", steps: int = 8, **config: Any) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    change(model, 0)
    opt = optimizer_of(model, kind)
    losses = []
    with interlace.compile(
        model, opt, zoo.causal_loss, zoo.tokens(2, rank), interlace.Config(timeout_s=60, **config)
    ) as trainer:
        for step in range(steps):
            change(model, step)
            losses.append(float(trainer.step(zoo.tokens(2, 10 * step + rank))))
        return losses, dict(trainer.state_dict(all_ranks=True)), model


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_it_goes_on_as_torch_does(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = zoo.build("llama", torch.float32)
    change(theirs, 0)
    opt = optimizer_of(theirs, kind)
    expected = []
    for step in range(8):
        change(theirs, step)
        loss = zoo.causal_loss(theirs, zoo.tokens(2, 10 * step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(float(loss.detach()))
    with caplog.at_level(logging.WARNING, "interlace"):
        losses, weights, model = train(kind)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, t in theirs.state_dict().items():
        torch.testing.assert_close(weights[name], t, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(dict(model.state_dict())[name], t, rtol=1e-4, atol=1e-6)
    said = [r.getMessage() for r in caplog.records if "compiling again" in r.getMessage()]
    assert len(said) == 2 and "step 2:" in said[0] and "became frozen" in said[0] and "and 6 more" in said[0]
    assert "step 5:" in said[1] and "'lm_head.weight' became trainable" in said[1]


def bits(**config: Any) -> list[Any]:
    found = []
    for strategy in ("shard", "zero1"):
        losses, weights, _ = train(strategy=strategy, **config)
        found.append((losses, digest(weights)))
    return found


def test_strategies_agree_on_two_ranks() -> None:
    for first, second in ranks.run(bits, 2):
        assert first == second


@pytest.mark.parametrize(
    "schedule", [[], [(0, ["offload_sync(cluster={cluster},kinds=states)"])]], ids=["memory", "tier"]
)
def test_evaluation_follows_a_parameter_that_is_frozen_and_unfrozen(schedule: Any, tmp_path: Path) -> None:
    model, theirs = zoo.build("llama", torch.float32), zoo.build("llama", torch.float32)
    settings = interlace.Config(schedule=schedule, tier=str(tmp_path))
    with interlace.compile(model, optimizer_of(model), zoo.causal_loss, zoo.tokens(2, 0), settings) as trainer:
        for number in range(6):
            model.lm_head.weight.requires_grad_(number not in (2, 3))
            trainer.step(zoo.tokens(2, 10 * number))
            ours = float(trainer.evaluate(zoo.tokens(2, 7))["loss"])
            theirs.load_state_dict(trainer.state_dict())
            with torch.no_grad():
                assert ours == pytest.approx(float(zoo.causal_loss(theirs.eval(), zoo.tokens(2, 7))), rel=1e-6)
    assert not list(tmp_path.glob("*.data"))


def unequal() -> str:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    with interlace.compile(
        model, parity.make_optimizer("sgd", model), zoo.causal_loss, zoo.tokens(2, 0), interlace.Config(timeout_s=20)
    ) as trainer:
        trainer.step(zoo.tokens(2, 1))
        names = dict(model.named_parameters())
        names["model.norm.weight" if rank == 0 else "lm_head.weight"].requires_grad_(False)
        with pytest.raises(interlace.InterlaceError) as error:
            trainer.step(zoo.tokens(2, 2))
        return str(error.value)


def test_ranks_that_freeze_other_parameters_are_named() -> None:
    for said in ranks.run(unequal, 2):
        assert "rank 1 changed requires_grad of other parameters than rank 0 before step 1" in said


def alone() -> str:
    """Rank 1 freezes a parameter, rank 0 does not and makes its step."""
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    with interlace.compile(
        model, parity.make_optimizer("sgd", model), zoo.causal_loss, zoo.tokens(2, 0), interlace.Config(timeout_s=6)
    ) as trainer:
        trainer.step(zoo.tokens(2, 1))
        if rank == 1:
            model.lm_head.weight.requires_grad_(False)
        with pytest.raises(interlace.InterlaceError) as error:
            for step in range(2):
                trainer.step(zoo.tokens(2, 2 + step))
        return str(error.value)


def test_a_rank_that_freezes_alone_is_named() -> None:
    first, second = ranks.run(alone, 2)
    why = "'lm_head.weight' became frozen; every rank must freeze and unfreeze the same"
    assert f"rank 0 makes step 1 as it is; rank 1 asked because {why}" in second
    assert "rank 1" in first


def unfreezing(model: nn.Module, step: int) -> None:
    """Layer by layer, the last first."""
    for number, layer in enumerate(model):
        layer.requires_grad_(number >= 2 - step // 2)


def late_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def unfrozen_late(kind: str, strategy: str, folder: str) -> tuple[list[float], dict[str, Tensor], list[float], dict[int, float]]:
    """Losses and weights of nine steps; losses of the last three of a run that goes on from the checkpoint behind six; steps by parameter."""
    torch.manual_seed(0)
    fresh = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()

    def trainer_of(model: nn.Module) -> interlace.Trainer:
        settings = interlace.Config(strategy=strategy, schedule=[], cache="off")
        return interlace.compile(model, late_optimizer(kind, model), square, squares(0), settings)

    losses, model = [], copy.deepcopy(fresh)
    unfreezing(model, 0)
    with trainer_of(model) as trainer:
        for step in range(9):
            unfreezing(model, step)
            losses.append(parity.mean_over_ranks(trainer.step(squares(step))))
            if step == 5:
                trainer.save(folder)
        weights, state = trainer.state_dict(all_ranks=True), trainer.optimizer_state_dict(all_ranks=True)["state"]
    model = copy.deepcopy(fresh)
    with trainer_of(model) as trainer:
        trainer.load(folder)
        again = [parity.mean_over_ranks(trainer.step(squares(step))) for step in range(6, 9)]
    return losses, weights, again, {number: float(entry.get("step", 0)) for number, entry in state.items()}


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def squares(step: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    "kind, size, strategy", [("sgd", 1, "shard"), *(("adamw", *one) for one in [(1, "shard"), (2, "shard"), (2, "zero1"), (2, "replicate")])]
)
def test_a_parameter_that_joins_a_group_late_begins_at_its_own_first_step(kind: str, size: int, strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    opt = late_optimizer(kind, theirs)
    expected = []
    for step in range(9):
        unfreezing(theirs, step)
        opt.zero_grad()
        loss = square(theirs, squares(step))
        loss.backward()
        opt.step()
        expected.append(loss.item())
    steps = {number: float(entry.get("step", 0)) for number, entry in opt.state_dict()["state"].items()}
    for losses, weights, again, counts in ranks.run(unfrozen_late, size, kind, strategy, str(tmp_path / "kept")):
        assert losses == pytest.approx(expected, rel=1e-9) and again == pytest.approx(expected[6:], rel=1e-9)
        assert counts == steps
        for name, t in theirs.state_dict().items():
            torch.testing.assert_close(weights[name], t, rtol=1e-8, atol=1e-10)


TURNS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05), "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02), "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}  # fmt: skip


def in_turns(kind: str, groups: int, compiled: bool, **config: Any) -> tuple[list[float], Any]:
    """Layers that are frozen and unfrozen time and again, all in one group of the optimizer or each in its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    layers = [{"params": list(layer.parameters())} for layer in model] if groups == 3 else model.parameters()
    optimizer, losses = TURNS[kind](layers), []

    def turn(step: int) -> None:
        for i, layer in enumerate(model):
            layer.requires_grad_(step % 3 != i or step == 0)

    def plain(step: int) -> float:
        loss = square(model, squares(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    if not compiled:
        for step in range(8):
            turn(step)
            losses.append(plain(step))
        return losses, model.state_dict()
    settings = interlace.Config(schedule=[], cache="off", **config)
    with interlace.compile(model, optimizer, square, squares(0), settings) as trainer:
        for step in range(8):
            turn(step)
            losses.append(parity.mean_over_ranks(trainer.step(squares(step))))
        return losses, trainer.state_dict(all_ranks=True)


@pytest.mark.parametrize("strategy", [None, "shard", "replicate"])
@pytest.mark.parametrize("kind, groups", [*((kind, 3) for kind in TURNS), ("adamw", 1), ("sgd", 1)])
def test_what_is_unfrozen_again_goes_on_with_its_own_states(kind: str, groups: int, strategy: str | None) -> None:
    expected, weights = in_turns(kind, groups, False)
    found = ranks.run(in_turns, 2, kind, groups, True, strategy=strategy) if strategy else [in_turns(kind, groups, True)]
    for losses, ours in found:
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, t in weights.items():
            torch.testing.assert_close(ours[name], t, rtol=1e-8, atol=1e-10)


def test_what_is_unfrozen_again_and_used_later() -> None:
    """A guide that only some losses train: frozen and unfrozen while no gradient comes to it, it begins when one does."""

    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.guide, self.guided = nn.Linear(6, 4), nn.Linear(6, 4), False

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.guide(x) if self.guided else self.a(x)

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = Guided().double()
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1), list[float]()
        step = interlace.compile(model, optimizer, square, squares(0), interlace.Config(cache="off")).step if compiled else None
        for i in range(9):
            model.guide.weight.requires_grad_(not 2 <= i < 4)
            model.guided = i > 5
            if step is not None:
                found.append(float(step(squares(i))))
                continue
            loss = square(model, squares(i))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-9)


def test_what_must_not_be_unfrozen_again_is_named() -> None:
    with pytest.raises(interlace.InterlaceError, match="becomes trainable again after its optimizer group 0 has made 2 steps with others"):
        in_turns("nadam", 1, True)


def test_a_state_dict_whose_parameters_have_made_other_numbers_of_steps(tmp_path: Path) -> None:
    """In the optimizer before and after compiling, in a file of PyTorch's that becomes a checkpoint, and in what is made of that."""
    torch.manual_seed(0)
    theirs = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    opt = torch.optim.AdamW(theirs.parameters(), lr=0.05)

    def step(number: int) -> float:
        opt.zero_grad()
        loss = square(theirs, squares(number))
        loss.backward()
        opt.step()
        return loss.item()

    theirs[0].requires_grad_(False)
    step(0), step(1)
    theirs[0].requires_grad_(True)
    step(2)
    ours, start = copy.deepcopy(theirs), copy.deepcopy(opt.state_dict())
    torch.save({"model": ours.state_dict(), "optimizer": start}, tmp_path / "theirs.pt")
    assert import_torch(tmp_path / "theirs.pt", tmp_path / "ours") == 3
    with Checkpoint(tmp_path / "ours") as checkpoint:
        counts = {i: float(entry["step"]) for i, entry in export_torch(checkpoint)["optimizer"]["state"].items()}
    assert counts == {i: float(entry["step"]) for i, entry in start["state"].items()}
    expected = [step(number) for number in range(3, 6)]
    for way in ("before", "after", "checkpoint"):
        model = copy.deepcopy(ours)
        own = torch.optim.AdamW(model.parameters(), lr=0.05)
        if way == "before":
            own.load_state_dict(copy.deepcopy(start))
        with interlace.compile(model, own, square, squares(0), interlace.Config(schedule=[], cache="off")) as trainer:
            if way == "after":
                own.load_state_dict(copy.deepcopy(start))
            elif way == "checkpoint":
                trainer.load(tmp_path / "ours")
            assert [trainer.step(squares(number)).item() for number in range(3, 6)] == pytest.approx(expected, rel=1e-9), way


def test_a_parameter_that_joins_a_group_of_others_late_is_refused() -> None:
    model = zoo.build("llama", torch.float32)
    model.lm_head.weight.requires_grad_(False)
    opt = torch.optim.NAdam(copy.copy(list(model.parameters())), lr=1e-3)
    trainer = interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(2, 0))
    trainer.step(zoo.tokens(2, 0))
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(
        interlace.InterlaceError,
        match=r"'lm_head\.weight' becomes trainable after its optimizer group 0 has made 1 steps",
    ):
        trainer.step(zoo.tokens(2, 0))


ADDING = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05), "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05), "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "list": lambda p: [torch.optim.SGD([p[0]], lr=0.1), torch.optim.RMSprop(p[1:], lr=0.05)],
}  # fmt: skip


def added(kind: str, compiled: bool, strategy: str) -> list[float]:
    """The losses of a loop that unfreezes a layer, in a group that it adds then, and at last another one."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    model[:4].requires_grad_(False)
    made = ADDING[kind](list(model[4].parameters()))
    last = made[-1] if kind == "list" else made
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64) for step in range(6)]
    config = interlace.Config(strategy=strategy, schedule=[], timeout_s=60, cache="off")
    trainer = interlace.compile(model, made, lambda m, b: m(b).square().mean(), batches[0], config) if compiled else None
    losses = []
    for step, batch in enumerate(batches):
        if step in (2, 4):
            layer = model[2 if step == 2 else 0]
            layer.requires_grad_(True)
            last.add_param_group({"params": layer.parameters(), "lr": 0.02})
            if kind in ("adamw", "sgd", "adafactor"):  # the new group has no states yet
                last.load_state_dict(last.state_dict() if trainer is None else trainer.optimizer_state_dict(all_ranks=True))
        if trainer is not None:
            losses.append(parity.mean_over_ranks(trainer.step(batch)))
            continue
        parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r), dtype=torch.float64) for r in range(size)]
        loss = torch.stack([model(part).square().mean() for part in parts]).mean()
        loss.backward()
        for one in made if kind == "list" else [made]:
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    if trainer is not None:
        trainer.close()
    return losses


@pytest.mark.parametrize("kind", ADDING)
def test_groups_that_are_added_while_training(kind: str) -> None:
    assert added(kind, True, "shard") == pytest.approx(added(kind, False, "shard"), rel=1e-9)


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_groups_that_are_added_on_two_ranks(strategy: str) -> None:
    for ours, plain in zip(ranks.run(added, 2, "adamw", True, strategy), ranks.run(added, 2, "adamw", False, strategy), strict=True):
        assert ours == pytest.approx(plain, rel=1e-9)


def test_a_group_that_is_added_in_eager_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    opt = torch.optim.AdamW(model[1].parameters())
    settings = interlace.Config(mode="eager")
    with interlace.compile(model, opt, lambda m, b: m(b).mean(), torch.ones(2, 4), settings) as trainer:
        model[0].requires_grad_(True)
        opt.add_param_group({"params": model[0].parameters()})
        with pytest.raises(interlace.InterlaceError, match="had 1 parameter groups when compiled and has 2 now; compile again"):
            trainer.step(torch.ones(2, 4))


def test_a_checkpoint_with_a_frozen_parameter(tmp_path: Path) -> None:
    """Loaded into a trainer whose model freezes it now, though its program still trains it; and refused where it is to train."""

    def trainer_of(model: nn.Module) -> interlace.Trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return interlace.compile(model, optimizer, zoo.causal_loss, zoo.tokens(2, 0), interlace.Config(timeout_s=60))

    model = zoo.build("llama", torch.float64)
    with trainer_of(model) as trainer:
        trainer.step(zoo.tokens(2, 0))
        model.lm_head.requires_grad_(False)
        trainer.step(zoo.tokens(2, 1))
        trainer.save(tmp_path / "kept")
        expected = [trainer.step(zoo.tokens(2, step)).item() for step in range(2, 5)]
    other = zoo.build("llama", torch.float64, seed=1)
    with trainer_of(other) as trainer:
        with pytest.raises(interlace.InterlaceError, match="was frozen when it was saved"):
            trainer.load(tmp_path / "kept")
        other.lm_head.requires_grad_(False)
        trainer.load(tmp_path / "kept")
        assert [trainer.step(zoo.tokens(2, step)).item() for step in range(2, 5)] == expected


def recurrent(step: int) -> tuple[Tensor, Tensor]:
    """Of other sizes at each step."""
    x = torch.randn(4, 3 + step % 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x.sum((1, 2))


def last_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model[1](model[0](batch[0])[0][:, -1]).squeeze(1) - batch[1]).square().mean()


def of_layers(strategy: str = "", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 1)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if strategy:
        settings = interlace.Config(strategy=strategy, schedule=[], cache="off")
        with interlace.compile(model, optimizer, last_of, recurrent(0), settings) as trainer:
            return [trainer.step(recurrent(step)).item() for step in range(steps)]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = last_of(model, recurrent(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_recurrent_layers_on_two_ranks_are_captured_again(strategy: str) -> None:
    for losses in ranks.run(of_layers, 2, strategy):
        assert losses == pytest.approx(of_layers(), rel=1e-9)


def restarted(strategy: str = "") -> list[float]:
    """The optimizer's state is emptied after three steps, and another one put in its place after six."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    settings = interlace.Config(strategy=strategy or "shard", schedule=[], cache="off")
    trainer = interlace.compile(model, optimizer, square, squares(0), settings) if strategy else None
    for step in range(9):
        if step == 3:
            optimizer.state.clear()
        elif step == 6:
            optimizer.state = collections.defaultdict(dict)
        if trainer is None:
            optimizer.zero_grad()
            loss = square(model, squares(step))
            loss.backward()
            optimizer.step()
        losses.append(loss.item() if trainer is None else trainer.step(squares(step)).item())
    if trainer is not None:
        trainer.close()
    return losses


@pytest.mark.parametrize("size, strategy", [(1, "shard"), (2, "shard"), (2, "replicate")])
def test_an_optimizer_whose_state_is_emptied_begins_anew(size: int, strategy: str) -> None:
    for losses in ranks.run(restarted, size, strategy):
        assert losses == pytest.approx(restarted(), rel=1e-9)


def evaluated(strategy: str = "") -> list[float]:
    """Layers are unfrozen by a group of its own, frozen, and unfrozen, each time with an evaluation before the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model[0].requires_grad_(False)
    optimizer, losses = torch.optim.AdamW([{"params": model[2].parameters()}, {"params": model[4].parameters()}], lr=0.05), []
    settings = interlace.Config(strategy=strategy or "shard", schedule=[], cache="off")
    trainer = interlace.compile(model, optimizer, square, squares(0), settings) if strategy else None
    for step in range(6):
        if step == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        elif step in (2, 4):
            model[2].requires_grad_(step == 4)
        if trainer is None:
            losses.append(square(model, squares(step + 20)).item())
            optimizer.zero_grad()
            loss = square(model, squares(step))
            loss.backward()
            optimizer.step()
        else:
            losses.append(trainer.evaluate(squares(step + 20))["loss"].item())
        losses.append(loss.item() if trainer is None else trainer.step(squares(step)).item())
    if trainer is not None:
        trainer.close()
    return losses


@pytest.mark.parametrize("size, strategy", [(1, "shard"), (2, "shard"), (2, "replicate")])
def test_evaluations_between_a_change_and_the_next_step(size: int, strategy: str) -> None:
    for losses in ranks.run(evaluated, size, strategy):
        assert losses == pytest.approx(evaluated(), rel=1e-9)
