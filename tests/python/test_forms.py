"""Batches whose form changes from step to step: other sizes, None, lists of other lengths, numbers beside the tensors."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import failing
import parity
import pytest
import random_settings
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import InterlaceError

Tensor = torch.Tensor
STEPS = 4


def tokens(step: int, rank: int) -> dict[str, Any]:
    """Rows of 5, 6, 7 and again 5 tokens."""
    g = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randint(0, 9, (4, 5 + step % 3), generator=g), "y": torch.randint(0, 3, (4,), generator=g)}


def masked(step: int, rank: int) -> dict[str, Any]:
    batch = tokens(0, 10 * step + rank)
    return {**batch, "mask": None if step % 2 else batch["x"] > 3}


def several(step: int, rank: int) -> dict[str, Any]:
    batch = tokens(0, 10 * step + rank)
    return {**batch, "more": [tokens(0, 20 * step + rank + i)["x"] for i in range(step % 3)]}


def weighed(step: int, rank: int) -> dict[str, Any]:
    return {**tokens(0, 10 * step + rank), "weight": 1.0 + 0.1 * step, "epoch": step // 2}


def branching(step: int, rank: int) -> dict[str, Any]:
    """A float that is read, and decides."""
    return {**tokens(0, 10 * step + rank), "weight": 1.0 + 0.1 * step, "power": float(step)}


def warmed(step: int, rank: int) -> dict[str, Any]:
    """A whole number that Python computes with, as with integers; it is another on each rank."""
    return {**tokens(0, 10 * step + rank), "warm": 2 * step + rank}


def named(step: int, rank: int) -> dict[str, Any]:
    """Names that nobody reads, more from step to step, beside other sizes; each rank has its own."""
    names = [f"{rank} {step} {i}" for i in range(1 + step)]
    return {**tokens(step, rank), "names": names, "id": 10 * step + rank, "power": 0.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.embed(x)
        return self.head((y if mask is None else y * mask[..., None]).mean(1))


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    y = model(batch["x"], batch.get("mask"))
    for x in batch.get("more", []):
        y = y + model(x)
    power = batch.get("power", 0.0)
    if (warm := batch.get("warm")) is not None:
        y = y * min(1.0, (warm + 1) / 6) * 0.9**warm + 0.3 * (warm // 2 - warm % 2) * math.cos(math.pi * warm / 7)
        y = y * torch.full((len(y), 1), warm, dtype=y.dtype).add(1)
    return F.cross_entropy(y, batch["y"]) * batch.get("weight", 1.0) * (1.0 if power == int(power) == 0 else 2.0)


def train(batch: Callable[[int, int], Any], **config: Any) -> tuple[list[float], list[float], float, list[str]]:
    """Losses of ours and of eager steps, how far the parameters are from theirs, and what was said."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net().double()
    theirs = copy.deepcopy(model)
    optimizer, expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2), []
    for step in range(STEPS):
        losses = [loss_fn(theirs, batch(step, r)) / size for r in range(size)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(float(x.detach()) for x in losses))
    settings = interlace.Config(schedule=[], cache="off", timeout_s=600, **config)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ranks.heard() as said, interlace.compile(model, mine, loss_fn, batch(0, rank), settings) as trainer:
        found = [parity.mean_over_ranks(trainer.step(batch(step, rank))) for step in range(STEPS)]
        state = trainer.state_dict(all_ranks=True)
    far = max(float((state[n] - t).abs().max()) for n, t in theirs.state_dict().items())
    return found, expected, far, [text for text in said if "compiling again" in text]


# The forms are captured so often; 5 tokens come again.
TIMES = {tokens: 2, masked: 1, several: 2, weighed: 1, branching: 1, named: 2, warmed: 1}


@pytest.mark.parametrize("batch", list(TIMES), ids=lambda f: f.__name__)
def test_one_rank(batch: Callable[[int, int], Any]) -> None:
    losses, expected, far, said = train(batch)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert far < 1e-12
    assert len(said) == TIMES[batch], said


def test_two_ranks() -> None:
    for batch in (tokens, weighed, named, warmed):
        for losses, expected, far, said in ranks.run(train, 2, batch, strategy="shard"):
            assert losses == pytest.approx(expected, rel=1e-12)
            assert far < 1e-12
            assert len(said) == (0 if batch is warmed else TIMES[batch]), said  # it differs from the first batch on


def test_micro_batches() -> None:
    losses, expected, far, _ = train(weighed, accumulation=2)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert far < 1e-12


def of_one(batch: Callable[[int, int], Any], **config: Any) -> tuple[list[float], list[float], float, list[str]]:
    """Every rank has rank 0's batch, as on axes that do not cut it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "rank_and_size", lambda: (0, 1))
        patch.setattr(parity, "mean_over_ranks", float)
        return train(batch, **config)


@pytest.mark.parametrize(
    "settings", [{"mesh": {"pp": 2}, "accumulation": 2}, {"mesh": {"tp": 2}}, {"passes": "canonicalize,shard(ranks={ranks}),update"}],
    ids=["stages", "products", "passes"],
)  # fmt: skip
def test_other_ways_to_run(settings: dict[str, Any]) -> None:
    for losses, expected, far, said in ranks.run(of_one if "mesh" in settings else train, 2, several, **settings):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert far < 1e-12
        assert len(said) == TIMES[several], said


def test_the_users_own_python_takes_any_form() -> None:
    for batch in (tokens, several, branching):
        losses, expected, far, said = train(batch, mode="eager")
        assert losses == pytest.approx(expected, rel=1e-12)
        assert far < 1e-12 and said == []


@pytest.mark.parametrize("read", [{"task": ["a", "b"]}, {"words": [["a b"], ["c d"]]}], ids=["branch", "tokens"])
def test_texts_that_are_read_are_few(read: dict[str, list[Any]]) -> None:
    """Each is captured when first met, up to a number that no tasks are of but texts soon have."""
    (name, values) = next(iter(read.items()))

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        if name == "task":
            return loss_fn(model, batch) * (1.0 if batch["task"] == "a" else 2.0)
        return loss_fn(model, {**batch, "x": torch.tensor([[ord(c) % 9 for c in text.ljust(99)] for text in batch["words"]] * 4)})

    model = Net()
    expected = copy.deepcopy(model)
    batch = {**tokens(0, 0), "file": "0"}
    with interlace.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss, {**batch, name: values[0]}, interlace.Config(schedule=[], cache="off")
    ) as trainer:
        for i in range(1, 7):  # one of them is here the second time
            given = {**batch, "file": str(i), name: values[i % 2]}
            assert float(trainer.step(given)) == pytest.approx(float(loss(expected, given)), rel=1e-6)
        with pytest.raises(InterlaceError, match=rf"batch entry '{name}[.0]*' was the constant '.*' when compiled and is '.*' now"):
            for i in range(9):
                trainer.step({**batch, "file": "2", name: [f"a {i}"] if name == "words" else f"a {i}"})
        assert trainer.evaluate({**batch, "file": "3", name: values[0]})["loss"] > 0


def test_each_rank_has_its_own_number() -> None:
    """As mixup draws it; from the first batch on, and in evaluations."""
    for losses, expected in ranks.run(own_numbers, 2):
        assert losses == pytest.approx(expected, rel=1e-12)
    for said in ranks.run(own_text, 2):
        assert "batch entry 'task', beside the tensors, is 'b' on rank 1 and 'a' on rank 0" in said


def own_numbers() -> tuple[list[float], list[float]]:
    rank, _ = parity.rank_and_size()
    model = Net().double()
    first = copy.deepcopy(model)
    batches = [{**tokens(0, i), "weight": 0.5 + rank} for i in range(3)]
    settings = interlace.Config(schedule=[], cache="off", timeout_s=60)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, batches[0], settings) as trainer:
        first.load_state_dict(trainer.state_dict(all_ranks=True))
        found = [float(trainer.step(b)) for b in batches] + [float(trainer.evaluate({**batches[0], "weight": 2.0 - rank})["loss"])]
    return found, [float(loss_fn(first, b)) for b in (*batches, {**batches[0], "weight": 2.0 - rank})]


def own_value(read: bool) -> str:
    """A closure that differs between ranks, which the loss reads, or only says on rank 0."""
    rank, kept = parity.rank_and_size()[0], []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = loss_fn(model, batch)
        if rank == 0:
            kept.append(found.item())
        return found * (1 + rank) if read else found

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = interlace.Config(timeout_s=60, cache="off")
    found = failing.observed(lambda: interlace.compile(model, optimizer, loss, tokens(0, 0), settings).step(tokens(0, 0)))
    assert len(kept) == int(rank == 0 and not read)
    return found


def test_what_python_reads_is_the_same_on_all_ranks() -> None:
    for said in ranks.run(own_value, 2, True):
        assert "'rank' of loss is 1 on rank 1 and 0 on rank 0, and what is computed depends on it" in said
    assert ranks.run(own_value, 2, False) == ["", ""]


def collective() -> str:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = loss_fn(model, batch)
        dist.all_reduce(found.detach().clone())
        return found

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return failing.observed(lambda: interlace.compile(model, optimizer, loss, tokens(0, 0), interlace.Config(timeout_s=60, fullgraph=False)))


def test_a_collective_in_the_loss_is_refused() -> None:
    """Learning what an opaque loss gives would have one rank wait for the other."""
    for said in ranks.run(collective, 2):
        assert "test_forms.py:" in said and 'a collective of torch.distributed is called' in said and 'mode="eager"' in said


def own_text() -> str:
    rank, _ = parity.rank_and_size()
    model = Net()
    loss = lambda m, b: loss_fn(m, b) * (1.0 if b["task"] == "a" else 2.0)  # noqa: E731
    batch = {**tokens(0, 0), "task": "ab"[rank]}
    settings = interlace.Config(timeout_s=60)
    return failing.observed(lambda: interlace.compile(model, torch.optim.SGD(model.parameters()), loss, batch, settings))


def apart(step: int, rank: int) -> dict[str, Any]:
    """Each rank has other sizes, from the first step on: boxes of images, say."""
    return several(step + rank, rank)


def test_the_users_own_python_takes_other_forms_on_each_rank() -> None:
    for losses, expected, far, said in ranks.run(train, 2, apart, mode="eager"):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert far < 1e-12 and said == []
    for text in ranks.run(refused, 2, apart):
        assert text.endswith('every rank must compile the same (fullgraph=False or mode="eager" takes other batches on each rank)'), text


def test_a_parameter_is_frozen_when_another_form_comes() -> None:
    """On stages, of which one has other states then."""
    config = {"mesh": {"pp": 2}, "accumulation": 2, "clip_norm": None, "stage_order": "1f1b"}
    setting = {"model": "deep", "kind": "sgd", "config": config, "between": {"freeze": 2}, "form": "rows"}
    for run in ranks.run(random_settings.ours, 2, setting, 2, ""):
        assert parity.distance(run, random_settings.expected(setting, 2)).within(1e-9)


def alone(step: int, rank: int) -> dict[str, Any]:
    """Another form on rank 1, at its step 1."""
    return tokens(step * rank, rank)


def back_to_a_checkpoint(folder: str) -> list[float]:
    """The last step has another form than the one that is made again, and rank 1 comes later."""
    rank, _ = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net().double()
    settings = interlace.Config(schedule=[], cache="off", timeout_s=60)
    losses = []
    with interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, tokens(0, rank), settings) as trainer:
        for form in (0, 0, 1):
            if len(losses) == 1:
                trainer.save(folder)
            if form:
                trainer.load(folder)
                time.sleep(2.5 * rank)
            losses.append(parity.mean_over_ranks(trainer.step(tokens(form, rank))))
    return losses


def test_places_of_before_a_checkpoint_was_loaded_say_nothing(tmp_path: Path) -> None:
    for losses in ranks.run(back_to_a_checkpoint, 2, str(tmp_path / "saved")):
        assert len(losses) == 3


def unlike(step: int, rank: int) -> dict[str, Any]:
    return tokens(step + rank * (step > 0), rank)


def refused(batch: Callable[[int, int], Any]) -> str:
    with pytest.raises(InterlaceError) as e:
        train(batch)
    return str(e.value)


def test_a_rank_that_alone_has_another_form_is_named() -> None:
    """At once: the timeout of these runs is longer than that of this test."""
    for text in ranks.run(refused, 2, alone):
        assert "rank 0 makes step 1 as it is; rank 1 asked because batch entry 'x' is int64[4, 6], but the program was compiled for" in text
        assert "; give all ranks the same sizes, or say with Config(pad={...})" in text


def test_ranks_with_other_sizes_are_told_what_to_do() -> None:
    for text in ranks.run(refused, 2, unlike):
        assert text.endswith(
            "batch entry x is int64[4, 7] on rank 1 and int64[4, 6] on rank 0 before step 1; give all ranks the same sizes, or say with "
            "Config(pad={...}) what fills each entry up that differs"
        ), text
