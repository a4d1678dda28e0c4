"""Numbers that a loss function or a model reads of what a step computes, and only hands on: those of each step, as in eager mode."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import on_device
import parity
import pytest
import ranks
import torch
from torch import nn

import interlace
from interlace.errors import CaptureError

Tensor = torch.Tensor
F = nn.functional


class Meter:
    def __init__(self) -> None:
        self.sum = self.count = self.average = 0.0

    def update(self, value: float, n: int) -> None:
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.norms, self.last = nn.Linear(16, 4), nn.Parameter(torch.ones(())), [], None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale
        if type(self).reads:
            self.norms.append(y.norm().item())
            self.last = float(self.scale)
        return y

    reads = False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.drop = nn.Linear(8, 16), Head(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.first(x))))


def batch(step: int, rank: int = 0, rows: int = 8) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randn(rows, 8, generator=g), "y": torch.randint(4, (rows,), generator=g)}


def appended(kept: list[Any]) -> Any:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        kept.append(loss.item())
        return loss

    return loss_fn


def metered(kept: list[Any]) -> Any:
    meter, criterion = Meter(), nn.CrossEntropyLoss()
    kept.append(meter)

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        meter.update((out.argmax(1) == b["y"]).float().mean().item(), len(b["y"]))
        return criterion(out, b["y"])

    return loss_fn


def printed(kept: list[Any]) -> Any:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        print(f"{loss:.4f} {loss.item():.3f} {math.exp(loss):.2f}")
        logging.getLogger("test_reads").warning("loss %.3f", loss)
        return loss

    return loss_fn


def returned(kept: list[Any]) -> Any:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Any:
        out = model(b["x"])
        loss = F.cross_entropy(out, b["y"])
        return loss, {"ce": loss.item(), "percent": 100 * float((out.argmax(1) == b["y"]).float().mean()), "name": "some"}

    return loss_fn


def arrays(kept: list[Any]) -> Any:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        kept.append(round(float(out.detach().cpu().numpy().mean()), 5))
        kept.append(out.argmax(1).tolist())
        return F.cross_entropy(out, b["y"])

    return loss_fn


def best(kept: list[Any]) -> Any:
    """What Python decides by numbers concerns Python alone."""

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        if torch.isnan(loss):
            raise FloatingPointError
        if not kept or loss.item() < kept[-1]:
            kept.append(loss.item())
        return loss

    return loss_fn


def of_a_weight(kept: list[Any]) -> Any:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        kept.append(round(model.first.weight.detach().norm().item(), 4))
        return F.cross_entropy(model(b["x"]), b["y"])

    return loss_fn


def tensors(kept: list[Any]) -> Any:
    """A list that the script joins at the end of an epoch."""

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        kept.append(out.detach().cpu())
        return F.cross_entropy(out, b["y"])

    return loss_fn


def counted(kept: list[Any]) -> Any:
    """In an array of NumPy's, which traces leave as it was."""
    matrix = np.zeros((4, 4), dtype=int)
    kept.append(matrix)

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        for y, found in zip(b["y"].tolist(), out.argmax(1).tolist(), strict=True):
            matrix[y, found] += 1
        return F.cross_entropy(out, b["y"])

    return loss_fn


def within(kept: list[Any]) -> Any:
    """In a module of the model."""
    return lambda model, b: F.cross_entropy(model(b["x"]), b["y"])


KINDS = [appended, metered, printed, returned, arrays, best, of_a_weight, tensors, counted, within]


def values(kept: list[Any], model: Net) -> Any:
    flat = [vars(k) if isinstance(k, Meter) else k for k in kept]
    return flat, model.head.norms, model.head.last


def made(kind: Callable[[list[Any]], Any]) -> tuple[Net, torch.optim.Optimizer, list[Any], Any]:
    Head.reads = kind is within
    torch.manual_seed(0)
    model, kept = Net(), list[Any]()
    model.drop.p = 0.0
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), kept, kind(kept)


def theirs(kind: Callable[[list[Any]], Any], accumulation: int) -> tuple[list[float], Any]:
    model, optimizer, kept, loss_fn = made(kind)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        total = 0.0
        for i in range(accumulation):
            rows = 8 // accumulation
            found = loss_fn(model, {k: v[i * rows : (i + 1) * rows] for k, v in batch(step).items()})
            loss = found[0] if isinstance(found, tuple) else found
            (loss / accumulation).backward()
            total += loss.item() / accumulation
            if isinstance(found, tuple):
                kept.append([found[1]["ce"], found[1]["percent"]])
        optimizer.step()
        losses.append(total)
    with torch.no_grad():
        loss_fn(model.eval(), batch(9))
    return losses, values(kept, model)


def ours(kind: Callable[[list[Any]], Any], **config: Any) -> tuple[list[float], Any]:
    rank, _ = parity.rank_and_size()
    model, optimizer, kept, loss_fn = made(kind)
    config = {"schedule": [], "cache": "off"} | config
    losses = []
    with interlace.compile(model, optimizer, loss_fn, batch(0, rank), interlace.Config(**config)) as trainer:
        for step in range(5):
            losses.append(trainer.step(batch(step, rank)).item())
            if kind is returned:
                kept += [[ce.item(), p.item()] for ce, p in zip(trainer.outputs["1.ce"], trainer.outputs["1.percent"], strict=True)]
        assert set(trainer.evaluate(batch(9, rank))) == {"loss", *(["1.ce", "1.percent"] if kind is returned else [])}
        (row,) = [r for r in trainer.summary()["opaque"] if r["runs"] >= 5]
        assert ("tensors are kept" if kind is tensors else "numbers are read at") in row["why"]
    return losses, values(kept, model)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_the_numbers_are_those_of_each_step(kind: Any, accumulation: int, capsys: Any, caplog: Any) -> None:
    losses, kept = theirs(kind, accumulation)
    said, logged = capsys.readouterr().out, [r.getMessage() for r in caplog.records]
    caplog.clear()
    found, mine = ours(kind, accumulation=accumulation)
    assert found == pytest.approx(losses, rel=1e-5)
    assert capsys.readouterr().out == said
    assert [r.getMessage() for r in caplog.records if r.name == "test_reads"] == logged
    torch.testing.assert_close(mine, kept, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_each_ranks_are_its_own(strategy: str) -> None:
    for kind in (appended, of_a_weight, within):
        for rank, (losses, kept) in enumerate(ranks.run(ours, 2, kind, strategy=strategy)):
            if kind is appended:
                assert kept[0][:-1] == pytest.approx(losses, rel=1e-5), rank
            else:
                assert len(kept[0] or kept[1]) == 6


def test_a_captured_text_of_another_start(tmp_path: Any) -> None:
    for _ in range(2):
        losses, kept = ours(appended, cache=str(tmp_path))
        assert kept[0][:-1] == pytest.approx(losses, rel=1e-6)


class Codes(nn.Module):
    """Counts in buffers, and keeps how evenly codes are used for whoever looks."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.layer, self.evenness, self.anew = nn.Linear(8, 4), None, anew
        self.register_buffer("used", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            used = self.used + F.one_hot(y.argmax(1), 4).float().sum(0)
            if self.anew:  # another tensor in the buffer's place
                self.used = used
            else:
                self.used.copy_(used)
            self.evenness = (self.used / self.used.sum()).var()
            self.first = y.detach()[0]
        return y


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_what_a_model_keeps_for_a_script(reads: bool, anew: bool) -> None:
    """Attributes that are None, or missing, before the first step; `reads`: beside a number that the loss function logs."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, seen, logged = Codes(anew), [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def loss_fn(model: nn.Module, b: dict[str, Tensor], logged: list[float] = logged) -> Tensor:
            loss = F.cross_entropy(model(b["x"]), b["y"])
            if reads:
                logged.append(loss.item())
            return loss

        trainer = interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off")) if compiled else None
        for step in range(4):
            if trainer is None:
                optimizer.zero_grad()
                loss_fn(model, batch(step)).backward()
                optimizer.step()
            else:
                trainer.step(batch(step))
            seen += [model.evenness.clone(), model.first.clone()]
        found.append([*seen, model.used.clone(), torch.tensor(logged[-4 * reads :])])
        if trainer is not None and not reads:
            assert [row["why"] for row in trainer.summary()["opaque"]] == ["tensors are kept for the script"]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_what_hooks_keep(inside: bool, detached: bool) -> None:
    """For a loss, and for a script that looks between the steps."""
    found = []
    for compiled in (False, True):
        model, optimizer, _, _ = made(appended)
        holder, seen = model if inside else types.SimpleNamespace(), []
        holder.features = kept = {}

        def hook(module: nn.Module, args: Any, y: Tensor, holder: Any = holder) -> None:
            holder.features["y"] = y.detach() if detached else y

        def loss_fn(model: nn.Module, b: dict[str, Tensor], holder: Any = holder) -> Tensor:
            return F.cross_entropy(model(b["x"]), b["y"]) + holder.features["y"].square().mean()

        model.first.register_forward_hook(hook)

        trainer = interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off")) if compiled else None
        for step in range(4):
            loss = loss_fn(model, batch(step)) if trainer is None else trainer.step(batch(step))
            seen += [loss.detach().clone(), kept["y"].detach().clone()]
            if trainer is None:
                stepped(optimizer, loss)
        found.append(seen)
    torch.testing.assert_close(found[0], found[1])


def indices(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    """As those who write loops over a batch do."""
    y, found = model(b["x"]).log_softmax(-1), torch.zeros(8, 2)
    for i in range(8):
        found[i, b["y"][i] % 2] = 1.0
        found[b["y"][i] - 1] = y[i, b["y"][i]] * y[i][-b["y"][i] - 1] + y[:, b["y"][i], None][i].sum() + y[..., b["y"][i]].sum()
    return found.sum() - (torch.stack([y[n - 1] for n in b["y"]]) * 0.1).sum()


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_indices_are_not_read(caplog: Any) -> None:
    losses = []
    for compiled in (False, True):
        model, optimizer, _, _ = made(appended)
        trainer = interlace.compile(model, optimizer, indices, batch(0), interlace.Config(schedule=[], cache="off")) if compiled else None
        for step in range(4):
            loss = indices(model, batch(step)) if trainer is None else trainer.step(batch(step))
            losses.append(loss.item())
            if trainer is None:
                stepped(optimizer, loss)
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-5)
    assert "compiling again" not in caplog.text


def test_what_an_index_chooses_is_not_written_behind_its_back() -> None:
    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        y = model(b["x"]).clone()
        y[b["y"][0]].mul_(2)
        return F.cross_entropy(y, b["y"])

    model, optimizer, _, _ = made(appended)
    with pytest.raises(CaptureError, match=r"test_reads\.py:\d+: what x\[i\] gives is written in place"):
        interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(cache="off"))


def halved(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(b["x"]), b["y"])
    return loss * 0.5 if loss.item() > 1.0 else loss


def made_again(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    out = model(b["x"])
    return F.cross_entropy(out, b["y"]) + torch.from_numpy(out.detach().numpy()).sum()


@pytest.mark.parametrize("loss_fn", [halved, made_again], ids=lambda f: f.__name__)
def test_what_is_computed_with_them_is_refused_by_line(loss_fn: Any) -> None:
    model, optimizer, _, _ = made(appended)
    line = loss_fn.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError, match=rf"test_reads\.py:{line}: the model reads a tensor's value"):
        interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(cache="off"))


def test_a_number_that_decides_later_stops_the_step() -> None:
    """What the numbers that the trace was made with did not show."""
    model, optimizer, _, _ = made(appended)

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        return loss * 2 if 1.0 < loss.item() < 2.0 else loss

    trainer = interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off"))
    with pytest.raises(Exception, match=r"a number that the loss function reads .* had it compute .*fullgraph=False"):
        trainer.step(batch(0))


class Begun(nn.Linear):
    """Does something else in its first step, and the loss does not show it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("begun", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.begun.item() else 0.5)


def test_a_number_that_decides_what_a_module_gives_stops_the_step() -> None:
    model = nn.Sequential(Begun(), nn.Linear(4, 3))
    loss_fn = lambda model, b: model(b).square().mean()  # noqa: E731
    x = torch.randn(5, 4)
    trainer = interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, x, interlace.Config(schedule=[], cache="off"))
    with pytest.raises(Exception, match=r"a number that module '0' reads .* had it compute something else.*fullgraph=False"):
        trainer.step(x)


@pytest.mark.parametrize("config", [{"param_dtype": "bfloat16"}, {"param_dtype": "float16", "loss_scale": 8.0}, {}], ids=str)
def test_of_another_precision(config: dict[str, Any]) -> None:
    model, optimizer, kept, _ = made(appended)
    model = model if config else model.bfloat16()

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"].to(next(model.parameters()).dtype)), b["y"])
        kept.append(loss.item())
        return loss

    with interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off", **config)) as trainer:
        assert [trainer.step(batch(step)).item() for step in range(3)] == pytest.approx(kept, rel=0.01)


def test_random_numbers_beside_what_is_read() -> None:
    """The Python that reads gets those of the program."""
    found = []
    for compiled in (False, True):
        model, optimizer, kept, _ = made(appended)

        def loss_fn(model: nn.Module, b: dict[str, Tensor], kept: Any = kept) -> Tensor:
            x = F.dropout(b["x"] + torch.empty_like(b["x"]).normal_(0, 0.1), 0.2)
            y = model(x + torch.randn_like(x)) * torch.rand(())
            loss = F.cross_entropy(y, torch.where(torch.randint(2, (8,)) > 0, b["y"], 0))
            kept.append((loss.item(), x.sum().item()))
            return loss

        settings = interlace.Config(schedule=[], cache="off", rng="compat")
        trainer = interlace.compile(model, optimizer, loss_fn, batch(0), settings) if compiled else None
        for step in range(4):
            torch.manual_seed(step)
            loss = loss_fn(model, batch(step)) if trainer is None else trainer.step(batch(step))
            kept.append(loss.item())
            if trainer is None:
                stepped(optimizer, loss)
        found.append([n for row in kept for n in (row if isinstance(row, tuple) else (row,))])
    assert found[1][::3] == pytest.approx(found[1][2::3], rel=1e-4)
    assert found[1] == pytest.approx(found[0], rel=1e-4) or on_device.DEVICE != "cpu"  # whose generator gives others


def test_assertions_are_made_in_each_step() -> None:
    model, optimizer, _, _ = made(appended)

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        y = model(b["x"])
        assert torch.isfinite(y).all(), f"not finite: {y.max()}"
        if (y > 100).any() or not (y > -100).all():
            raise ValueError("large")
        return F.cross_entropy(y, b["y"])

    trainer = interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off"))
    assert trainer.step(batch(0)).isfinite()
    with pytest.raises(Exception, match="not finite"):
        trainer.step({**batch(1), "x": batch(1)["x"] * math.nan})


def test_an_error_of_what_reads_has_its_line_and_a_way() -> None:
    (model, optimizer, _, _), kept = made(appended), list[str]()

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        kept.append("ab"[2 if 0.9 < loss.item() < 4 else 0])
        return loss

    trainer = interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off"))
    with pytest.raises(interlace.InterlaceError, match=r"test_reads.py:\d+: IndexError: string index out of range .* pass fullgraph=False"):
        trainer.step(batch(0))


def test_a_metric_that_is_no_number_stops_nothing() -> None:
    model, optimizer, _, _ = made(appended)

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Any:
        loss = F.cross_entropy(model(b["x"]), b["y"])
        return {"loss": loss, "none": loss.detach() / 0 - loss.detach() / 0}

    with interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off")) as trainer:
        assert trainer.step(batch(0)).isfinite()


def test_an_evaluation_between_steps_is_no_change(caplog: Any) -> None:
    model, optimizer, kept, loss_fn = made(appended)
    with interlace.compile(model, optimizer, loss_fn, batch(0), interlace.Config(schedule=[], cache="off")) as trainer:
        for step in range(3):
            trainer.step(batch(step))
            trainer.evaluate(batch(9))
    assert len(kept) == 6 and not [r for r in caplog.records if "compiling again" in r.getMessage()]


def staged() -> tuple[list[float], str]:
    """What a model keeps is nothing that a pipeline could not be made of; numbers are read by no stage."""
    torch.manual_seed(0)
    model = nn.Sequential(Codes(False), nn.Tanh(), nn.Linear(4, 4))
    settings = interlace.Config(mesh={"pp": 2}, accumulation=2, cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).square().mean(), batch(0)["x"], settings) as trainer:
        losses = [trainer.step(batch(0)["x"]).item()]
    with pytest.raises(interlace.InterlaceError, match="the model reads a tensor's value") as error:
        interlace.compile(*made(appended)[:2], appended([]), batch(0), settings)
    return losses, str(error.value)


def test_stages_of_a_pipeline() -> None:
    for losses, said in ranks.run(staged, 2):
        assert math.isfinite(losses[0]) and "test_reads.py" in said


class Cache:
    """No plain data: nothing that one rank could send to another."""

    def __init__(self, t: Tensor) -> None:
        self.t, self.lock = t, lambda: None


class Cached(Net):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "cache": Cache(x)}


@pytest.mark.parametrize("looks", [False, True], ids=["left alone", "read"])
def test_a_model_that_gives_objects(looks: bool) -> None:
    Head.reads = False
    torch.manual_seed(0)
    model, kept = Cached(), []

    def loss_fn(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = model(b["x"])
        loss = F.cross_entropy(out["logits"] + (out["cache"].t.mean() if looks else 0), b["y"])
        kept.append(loss.item())
        return loss

    model.drop.p = 0.0
    optimizer, settings = torch.optim.SGD(model.parameters(), lr=0.1), interlace.Config(schedule=[], cache="off")
    with interlace.compile(model, optimizer, loss_fn, batch(0), settings) as trainer:
        losses = [trainer.step(batch(step)).item() for step in range(3)]
    assert kept == pytest.approx(losses, rel=1e-6)
