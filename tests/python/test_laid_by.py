"""States of what is frozen, and changes that meet between two steps, over checkpoints and meshes: as plain PyTorch goes on."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import ranks
import torch
from torch import nn

import interlace

Tensor = torch.Tensor
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02), "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True), "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}  # fmt: skip


class Net(nn.Module):
    """Four layers; `average`: of the last one's weight, which evaluation reads in front."""

    def __init__(self, average: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if average:
            self.register_buffer("average", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        average = getattr(self, "average", None)
        if average is not None and not self.training:
            x = x + x @ average
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if average is not None and self.training:
            with torch.no_grad():
                average.mul_(0.5).add_(self.layers[3].weight, alpha=0.5)
        return x


def net(average: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(average).double()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """As PyTorch makes it."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def batch_of(step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def turned(model: Net, step: int, first: int = 2, last: int = 6) -> None:
    """Layer 1 is frozen before step `first`, layer 2 a step later, and both are unfrozen before `last`."""
    model.layers[1].requires_grad_(not first <= step < last)
    model.layers[2].requires_grad_(not first < step < last)


def groups_of(model: Net) -> list[dict[str, Any]]:
    return [{"params": list(layer.parameters())} for layer in model.layers]


def plain(kind: str, steps: int = 9) -> list[float]:
    model, losses = net(), list[float]()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    for step in range(steps):
        turned(model, step)
        losses.append(plain_step(model, optimizer, batch_of(step)))
    return losses


def part(kind: str, first: int, last: int, folder: str, way: str, config: dict[str, Any]) -> list[float]:
    """Steps of a run that goes on from the checkpoint (or the state dict) in the folder, and leaves one there."""
    model, losses, settings = net(), list[float](), interlace.Config(schedule=[], cache="off", timeout_s=60, **config)
    rank, size = parity.rank_and_size()
    if way != "later":  # frozen in the program, too
        turned(model, first)
    optimizer = OPTIMIZERS[kind](groups_of(model))
    with interlace.compile(model, optimizer, loss_of, settings.deal(batch_of(0), rank, size), settings) as trainer:
        turned(model, first)
        if first:
            trainer.load(folder)
        if first and way == "state_dict":
            optimizer.load_state_dict(trainer.optimizer_state_dict(all_ranks=True))
        for step in range(first, last):
            turned(model, step)
            losses.append(parity.mean_over_ranks(trainer.step(settings.deal(batch_of(step), rank, size))))
        trainer.save(folder)
    return losses


@pytest.mark.parametrize("way", ["checkpoint", "later", "state_dict"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_of_what_is_frozen_are_in_a_checkpoint(kind: str, way: str, tmp_path: Path) -> None:
    """Saved while it is frozen, loaded by other ranks, twice, and unfrozen there."""
    places: tuple[Any, ...] = (2, {"strategy": "shard"}), (2, {"mesh": {"pp": 2}, "accumulation": 2}), (1, {})
    losses: list[float] = []
    for (size, config), first, last in zip(places, (0, 4, 5), (4, 5, 9), strict=True):
        losses += ranks.run(part, size, kind, first, last, str(tmp_path / "kept"), way, config)[0]
    assert losses == pytest.approx(plain(kind), rel=1e-9)


def together(kind: str, config: dict[str, Any] | None) -> list[float]:
    """Batches have another form from the very steps on before which layers are frozen and unfrozen."""
    rank, size = parity.rank_and_size()
    model, losses, settings = net(), list[float](), interlace.Config(schedule=[], cache="off", timeout_s=60, **(config or {}))
    optimizer = OPTIMIZERS[kind](groups_of(model))
    trainer = None
    if config is not None:
        trainer = interlace.compile(model, optimizer, loss_of, settings.deal(batch_of(0), rank, size), settings)
    for step in range(9):
        turned(model, step)
        batch = batch_of(step, 8 if 2 <= step < 6 else 4)
        if trainer is not None:
            losses.append(parity.mean_over_ranks(trainer.step(settings.deal(batch, rank, size))))
            continue
        losses.append(plain_step(model, optimizer, batch))
    if trainer is not None:
        trainer.close()
    return losses


def by_turns(config: dict[str, Any] | None) -> list[float]:
    """Batches with a target train three layers, and batches without one the layer between them, whose loss is another."""
    rank, size = parity.rank_and_size()
    model, losses, settings = net(), list[float](), interlace.Config(schedule=[], cache="off", timeout_s=60, **(config or {}))
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.02)

    def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
        if batch["y"] is None:
            return model.layers[1](batch["x"]).square().mean()
        return (model(batch["x"]) - batch["y"]).square().mean()

    def batch_at(step: int) -> dict[str, Any]:
        own, x = step in (2, 3, 5), batch_of(step, 8)
        for i, layer in enumerate(model.layers):
            layer.requires_grad_((i == 1) == own)
        x = x if config is None else settings.deal(x, rank, size)
        return {"x": x, "y": None if own else x.sin()}

    def plain(batch: dict[str, Any]) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step_on: Any = plain if config is None else interlace.compile(model, optimizer, loss_of, batch_at(0), settings).step
    for step in range(8):
        loss = step_on(batch_at(step))
        losses.append(parity.mean_over_ranks(loss) if config is not None else loss.item())
    return losses


@pytest.mark.parametrize("size, config", [(1, {}), (1, {"fullgraph": False}), (2, {"strategy": "shard"}), (2, {"fullgraph": False})], ids=str)
def test_a_batch_of_another_form_whose_loss_only_unfrozen_layers_have(size: int, config: dict[str, Any]) -> None:
    """It cannot be captured with the layers that were trained before; what is frozen has its states when it comes back."""
    for losses in ranks.run(by_turns, size, config):
        assert losses == pytest.approx(by_turns(None), rel=1e-9)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "adagrad"])
@pytest.mark.parametrize("last, groups", [(6, True), (99, True), (99, False)], ids=["unfrozen", "frozen", "in one group"])
def test_layers_that_are_frozen_in_eager_mode(kind: str, last: int, groups: bool) -> None:
    """A group makes no step meanwhile, as in torch.optim, and a state dict has the numbers that were there."""

    def run(compiled: bool) -> tuple[list[float], dict[int, dict[str, float]]]:
        model, losses = net(), list[float]()
        made = OPTIMIZERS | {"adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1)}
        optimizer = made[kind](groups_of(model) if groups else model.parameters())
        config = interlace.Config(mode="eager", schedule=[], cache="off")
        trainer = interlace.compile(model, optimizer, loss_of, batch_of(0), config) if compiled else None
        for step in range(9):
            turned(model, step, last=last)
            if trainer is not None:
                losses.append(trainer.step(batch_of(step)).item())
                continue
            losses.append(plain_step(model, optimizer, batch_of(step)))
        found = (optimizer.state_dict() if trainer is None else trainer.optimizer_state_dict())["state"]
        return losses, {i: {k: float(v.sum()) for k, v in entry.items() if isinstance(v, Tensor)} for i, entry in found.items()}

    expected, kept = run(False)
    losses, state = run(True)
    assert losses == pytest.approx(expected, rel=1e-9) and state.keys() == kept.keys()
    for number, entry in kept.items():
        assert state[number] == pytest.approx(entry, rel=1e-6), number


def test_what_eager_mode_cannot_unfreeze_is_said() -> None:
    model = net()
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    for late, said in ((True, "was frozen when compiled; .* after interlace.compile and not before it"), (False, "an optimizer group of")):
        model.layers[0].requires_grad_(not late)
        trainer = interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(mode="eager", schedule=[], cache="off"))
        with pytest.raises(interlace.InterlaceError, match=said):
            for step in range(4):
                model.layers[0].requires_grad_(step not in (1, 2) and not (late and step == 0))
                trainer.step(batch_of(step))
        trainer.close()


@pytest.mark.parametrize("kind", ["adamw", "nadam"])
@pytest.mark.parametrize("config", [{"strategy": "shard"}, {"mesh": {"pp": 2}, "accumulation": 2}], ids=["shard", "pp"])
def test_a_batch_of_another_form_and_a_frozen_layer_at_once(kind: str, config: dict[str, Any]) -> None:
    expected = together(kind, None)
    for losses in ranks.run(together, 2, kind, config):
        assert losses == pytest.approx(expected, rel=1e-9)


def alternating(config: dict[str, Any] | None) -> list[float]:
    """Two halves of a model that are trained in turns, a step each."""
    rank, size = parity.rank_and_size()
    model, losses, settings = net(), list[float](), interlace.Config(schedule=[], cache="off", timeout_s=60, **(config or {}))
    optimizer = OPTIMIZERS["adamw"](groups_of(model))
    trainer = None
    if config is not None:
        trainer = interlace.compile(model, optimizer, loss_of, settings.deal(batch_of(0), rank, size), settings)
    for step in range(6):
        for i, layer in enumerate(model.layers):
            layer.requires_grad_(step == 0 or i % 2 == step % 2)
        if trainer is not None:
            losses.append(parity.mean_over_ranks(trainer.step(settings.deal(batch_of(step), rank, size))))
            continue
        losses.append(plain_step(model, optimizer, batch_of(step)))
    if trainer is not None:
        trainer.close()
    return losses


@pytest.mark.parametrize(
    "config", [{"strategy": "shard"}, {"strategy": "replicate"}, {"mesh": {"pp": 2}, "accumulation": 2}], ids=["shard", "replicate", "pp"]
)
def test_halves_that_are_trained_in_turns(config: dict[str, Any]) -> None:
    """What is unfrozen after a single step is trained again. A stage that has nothing to train any more gets other layers."""
    expected = alternating(None)
    for losses in ranks.run(alternating, 2, config):
        assert losses == pytest.approx(expected, rel=1e-9)


def between(config: dict[str, Any] | None) -> tuple[list[float], list[float]]:
    """Losses, and those of evaluations, of a run that changes its weights and whose batches have other forms."""
    rank, size = parity.rank_and_size()
    model, losses, settings = net(True), list[float](), interlace.Config(schedule=[], cache="off", timeout_s=60, **(config or {}))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), list[float]()
    trainer = None
    if config is not None:
        trainer = interlace.compile(model, optimizer, loss_of, settings.deal(batch_of(0), rank, size), settings)
    for step in range(6):
        batch = batch_of(step, 8 if 1 <= step < 3 else 4)
        if trainer is None:
            losses.append(plain_step(model, optimizer, batch))
            with torch.no_grad():
                found.append(loss_of(model.eval(), batch_of(100)).item())
                model.train().layers[0].weight.mul_(0.9)
            continue
        losses.append(parity.mean_over_ranks(trainer.step(settings.deal(batch, rank, size))))
        found.append(parity.mean_over_ranks(trainer.evaluate(settings.deal(batch_of(100), rank, size, 1))["loss"]))
        with trainer.whole_parameters():
            assert not any(t.is_meta for t in copy.deepcopy(model).parameters())
            model.layers[0].weight.data.mul_(0.9)
    if trainer is not None:
        trainer.close()
    return losses, found


@pytest.mark.parametrize("config", [{"strategy": "shard"}, {"mesh": {"pp": 2}}], ids=["shard", "pp"])
def test_evaluations_and_changes_between_batches_of_other_forms(config: dict[str, Any]) -> None:
    """Whole parameters where a capture holds weak references to the released ones; a buffer that another stage changes."""
    expected = between(None)
    for found in ranks.run(between, 2, config):
        assert found[0] == pytest.approx(expected[0], rel=1e-9) and found[1] == pytest.approx(expected[1], rel=1e-9)


def imported(kind: str, compiled: bool) -> list[float]:
    """A layer is frozen when its optimizer has made steps (Adagrad has states from the start), and is unfrozen in the compiled model."""
    model, losses = net(), list[float]()
    optimizer = OPTIMIZERS[kind](groups_of(model)) if kind in OPTIMIZERS else torch.optim.Adagrad(groups_of(model), lr=0.05)
    trainer = None
    for step in range(8):
        turned(model, step, 0 if kind == "adagrad" else 3, 6)
        if step == 3 and compiled:
            settings = interlace.Config(strategy="shard", schedule=[], cache="off", timeout_s=60)
            trainer = interlace.compile(model, optimizer, loss_of, batch_of(0), settings)
        if trainer is not None:
            losses.append(parity.mean_over_ranks(trainer.step(batch_of(step))))
            continue
        losses.append(plain_step(model, optimizer, batch_of(step)))
    if trainer is not None:
        trainer.close()
    return losses


@pytest.mark.parametrize("kind", ["adagrad", "adamw", "nadam"])
def test_an_optimizer_that_has_made_steps_before_a_layer_is_frozen(kind: str) -> None:
    expected = imported(kind, False)
    for losses in ranks.run(imported, 2, kind, True):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_what_is_asked_between_a_new_group_and_the_next_step(tmp_path: Path) -> None:
    model = net()
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.NAdam([{"params": list(layer.parameters())} for layer in model.layers[1:]], lr=0.02)
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(schedule=[], cache="off")) as trainer:
        trainer.step(batch_of(0))
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters())})
        assert sorted(trainer.optimizer_state_dict()["state"]) == [0, 1, 2, 3, 4, 5]
        trainer.save(tmp_path / "kept")
        with pytest.raises(interlace.InterlaceError, match=r"add them before interlace\.compile, or load behind the next step"):
            trainer.load(tmp_path / "kept")
        expected = [trainer.step(batch_of(step)).item() for step in (1, 2)]
        trainer.load(tmp_path / "kept")
        assert [trainer.step(batch_of(step)).item() for step in (1, 2)] == pytest.approx(expected, rel=1e-9)


def test_states_of_before_and_after_a_change_are_counted() -> None:
    """Both are there while values are copied: a limit that holds each of them alone says so, and what to do."""
    model = net()
    optimizer, known = torch.optim.AdamW(groups_of(model), lr=0.02), dict[str, int]()
    for limit in (None, "fits one", "fits both"):
        settings = interlace.Config(schedule=[], cache="off", memory_limit=known[limit] if limit else None)
        trainer = interlace.compile(model, optimizer, loss_of, batch_of(0), settings)
        trainer.step(batch_of(0))
        model.layers[0].requires_grad_(False)
        if limit == "fits one":
            with pytest.raises(interlace.InterlaceError, match=r"a rank needs .* for those of before and after, .*; raise it to \d+MiB"):
                trainer.step(batch_of(1))
        else:
            before = trainer.summary()
            trainer.step(batch_of(1))
            after = trainer.summary()
            both = before["persistent_bytes"] + after["persistent_bytes"]
            known |= {"fits one": both - 1, "fits both": both}
        trainer.close()
        model.layers[0].requires_grad_(True)


def test_tensors_of_programs_that_are_kept_are_counted() -> None:
    """Each form of a batch has a table of its own, and three of them are within the limit."""

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        table = torch.from_numpy(np.random.RandomState(len(batch)).randn(len(batch), 8 * 64)).view(-1, 8)
        return model(batch).square().mean() + table.mean() * 0.0

    model = net()
    settings = interlace.Config(cache="off", schedule=[])
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0, 20), settings) as trainer:
        limit = int(trainer._run.programs.needed_bytes(trainer._run.ir)) + 2 * 20 * 8 * 64 * 8
    settings = interlace.Config(cache="off", schedule=[], memory_limit=limit)
    trainer = interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0, 20), settings)
    for rows in (20, 19, 20, 18, 19):
        trainer.step(batch_of(0, rows))
    with pytest.raises(interlace.InterlaceError, match="memory_limit is"):
        trainer.step(batch_of(0, 17))


def test_nothing_is_kept_on_the_states_of_before() -> None:
    model = net()
    optimizer, settings = torch.optim.AdamW(groups_of(model), lr=0.02), interlace.Config(schedule=[], cache="off")
    with interlace.compile(model, optimizer, loss_of, batch_of(0), settings) as trainer:
        for step in range(4):
            trainer.step(batch_of(step, 4 + step % 2), python=step == 2)
        trainer.evaluate(batch_of(0))
        kept = [weakref.ref(executor) for executor in trainer._run.programs._alive]
        assert len(kept) == 4
        model.layers[0].requires_grad_(False)
        trainer.step(batch_of(4))
        assert not any(executor() is not None for executor in kept)


def test_a_number_that_changes_while_a_form_runs_that_does_not_read_it() -> None:
    """A program that is kept has it when it comes again."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(8, 8), 1.0

    def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
        y = model.a(batch["x"])
        return y.square().mean() if batch["y"] is None else (y * model.scale - batch["y"]).square().mean()

    losses: list[list[float]] = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = Scaled().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        example = {"x": batch_of(0), "y": batch_of(1)}
        trainer = interlace.compile(model, optimizer, loss_of, example, interlace.Config(schedule=[], cache="off")) if compiled else None
        losses.append([])
        for step, (scale, own) in enumerate([(1.0, True), (0.5, True), (0.5, False), (2.0, False), (2.0, True), (3.0, False), (0.5, True)]):
            model.scale, batch = scale, {"x": batch_of(step), "y": batch_of(step + 1) if own else None}
            if trainer is not None:
                losses[-1].append(trainer.step(batch).item())
                continue
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("kind", ["adamw", "nadam"])
def test_what_is_unfrozen_where_no_loss_has_it_and_trained_later(kind: str) -> None:
    """It has the states that it was frozen with, and a group that is frozen makes no step."""
    losses: list[list[float]] = []
    for compiled in (True, False):
        model, found = net(), list[float]()
        optimizer = OPTIMIZERS[kind](groups_of(model))

        def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
            return model(batch["x"]).square().mean() if batch["y"] is None else model.layers[0](batch["x"]).sub(batch["y"]).abs().mean()

        settings = interlace.Config(schedule=[], cache="off")
        trainer = interlace.compile(model, optimizer, loss_of, {"x": batch_of(0), "y": None}, settings) if compiled else None
        for step in range(10):
            model.layers[3].requires_grad_(not 2 <= step < 5)
            batch = {"x": batch_of(step), "y": batch_of(step + 1) if 3 <= step < 7 else None}
            if trainer is not None:
                found.append(trainer.step(batch).item())
                continue
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
