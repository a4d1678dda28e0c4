"""Branches on the batch: captured as the example takes them, looked at before each step, and never trained with the wrong program."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.capture import capture
from interlace.errors import CaptureError, InterlaceError

Tensor = torch.Tensor


class Net(nn.Module):
    """Two ways for a batch, and one that only raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= 5:
            raise ValueError("labels must be less than 5")
        h = self.first(x) + 0.1 * self.second(x)
        if (x > 0).all():
            h = torch.tanh(h) + self.second(x)
        return F.cross_entropy(self.last(h), y)


class Chosen(Net):
    """A size that the batch decides."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.first(x)[y >= 0] + self.second(x)[y >= 0]), y[y >= 0])


class Picked(Net):
    """Gives as many rows as the batch says."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.first(x) + self.second(x))[y >= 0]


class Frames(nn.Module):
    """As speech models do: targets of every length, those that are padded left out."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor, y: Tensor, rows: bool) -> Tensor:
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        kept = y > 0
        targets = y.clamp(min=0) if rows else y.masked_select(kept)
        steps = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(log_probs, targets, steps, kept.sum(-1), zero_infinity=True)


def of(seed: int, positive: bool = False, largest: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 4, generator=g) if positive else torch.randn(3, 4, generator=g)
    return {"x": x.double(), "y": torch.randint(0, largest, (3,), generator=g)}


def call(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch)


def train(kind: Callable[[], nn.Module], batches: list[Any], **config: Any) -> tuple[list[float], list[float], list[str]]:
    """Losses of eager steps on the batches of all ranks, of compiled ones, and what was said."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = kind().double()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for i in range(0, len(batches), size):
        losses = [call(other, b) / size for b in batches[i : i + size]]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        expected.append(sum(loss.item() for loss in losses))
    with ranks.heard() as said:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = interlace.Config(**{"schedule": [], "cache": "off", "timeout_s": 60, **config})
        with interlace.compile(model, optimizer, call, batches[rank], settings) as trainer:
            losses = [parity.mean_over_ranks(trainer.step(b)) for b in batches[rank::size]]
    return losses, expected, [text for text in said if "compiling again" in text]


def test_the_text_says_what_was_read() -> None:
    model = Net().double()
    text = capture(model, call, of(0)).text
    line = next(line for line in text.splitlines() if line.startswith("meta ways "))
    ways = json.loads(json.loads(line.removeprefix("meta ways ")))
    assert [way["is"] for way in ways] == [False, False]
    assert ways[0]["ops"] == [["input", 1], ["aten.max", [{"v": 0}], {}, 0], ["aten.ge.Scalar", [{"v": 1}, 5], {}, 0]]
    assert "tanh" not in text and "tanh" in capture(model, call, of(0, True)).text
    assert "meta ways" not in capture(nn.Linear(4, 4).double(), lambda m, b: m(b["x"]).mean(), of(0)).text


@pytest.mark.parametrize("size", [1, 2])
def test_each_batch_takes_its_way(size: int) -> None:
    batches = [of(i, i // size % 3 == 1) for i in range(8 * size)]
    for losses, expected, said in ranks.run(train, size, Net, batches):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert len(said) == 1 and "reads True of the batch, and read False when compiled" in said[0]  # the other program is kept


class Started(nn.Module):
    """Takes its scale from the first batch that it sees, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)
        self.register_buffer("started", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if self.started == 0:
            self.mean.copy_(h.detach().mean(0))
            self.started.fill_(1)
        return F.cross_entropy(self.last(h - self.mean), y)


class Standardizes(Started):
    """Its parameters are what the first batch says; the flag is a number to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if not self.started.item():
            with torch.no_grad():
                self.bias.data.copy_(-h.mean(0))
                self.scale.data.copy_(h.std(0).log().neg())
                self.started.fill_(1)
        return F.cross_entropy(self.last((h + self.bias) * self.scale.exp()), y)


def test_a_number_in_a_buffer_that_says_whether_it_has_begun() -> None:
    losses, expected, said = ranks.run(train, 1, Standardizes, [of(i) for i in range(4)])[0]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len(said) == 1 and "reads 1 now, and read 0 when compiled" in said[0]


class Counts(Started):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.started += 1
        return F.cross_entropy(self.last(self.first(x)), y) / int(self.started)


def test_a_number_that_is_another_one_in_each_step_is_no_way() -> None:
    """A tensor of the program stands for it."""
    losses, expected, said = train(Counts, [of(i) for i in range(5)])
    assert losses == pytest.approx(expected, rel=1e-9) and not said


class Written(Net):
    """Reads what it has computed of the batch, written in place, and what it was before."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = y.clone()
        none, twice = y == 0, y > 2
        y[none] = -100
        y.add_(1).sub_(1)
        loss = F.cross_entropy(self.last(self.first(x)), y)
        if none.any():
            loss = 2 * loss
        return loss + self.second(x).mean() if (y > 2).sum() == twice.sum() > 0 and (y == -100).any() else loss


def test_what_is_written_in_place_is_read() -> None:
    losses, expected, said = train(Written, [of(i) for i in range(8)])
    assert losses == pytest.approx(expected, rel=1e-9)
    assert 1 <= len(said) <= 4


def trainer_of(model: nn.Module, **config: Any) -> interlace.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return interlace.compile(model, optimizer, call, of(0), interlace.Config(schedule=[], cache="off", **config))


def test_a_flag_in_a_buffer() -> None:
    batches = [of(i) for i in range(6)]
    (losses, expected, said) = ranks.run(train, 1, Started, batches)[0]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len(said) == 1 and "reads False now, and read True when compiled" in said[0]
    # Evaluation, a script that begins anew, and a step that was captured before are other ways as well.
    model, seen = Started().double(), Started().double()
    seen.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(seen.parameters(), lr=0.1)
    with trainer_of(model) as trainer:
        for i in range(4):
            if i == 2:
                model.started.zero_()
                seen.started.zero_()
            trainer.step(batches[i])
            call(seen, batches[i]).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.started == seen.started == 1
            assert torch.allclose(model.mean.cpu(), seen.mean, rtol=1e-12)
            assert trainer.evaluate(batches[5])["loss"].item() == pytest.approx(call(seen, batches[5]).item(), rel=1e-9)
    with pytest.raises(CaptureError, match=r"test_ways.py:\d+: the model branches on 'started', which it changes"):
        trainer_of(Started().double(), accumulation=3)
    with trainer_of(model, accumulation=3) as trainer:  # it has been started
        assert trainer.step(of(0)).isfinite()


class Deep(nn.Module):
    """Two ways, in both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h)) * (2 if (x > 0).all() else 1)
        return F.cross_entropy(self.last(h), y)


class Parted(nn.Module):
    """Each way has parameters of its own, which the other way's steps leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.first(x) if (x > 0).all() else self.second(x), y)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop", "NAdam"])
def test_parameters_of_one_way(kind: str) -> None:
    settings = {"lr": 0.05, "weight_decay": 0.1, **({"momentum": 0.9} if kind in ("SGD", "RMSprop") else {})}
    torch.manual_seed(0)
    model = Parted().double()
    theirs = copy.deepcopy(model)
    mine, its = (getattr(torch.optim, kind)(m.parameters(), **settings) for m in (model, theirs))
    batches = [of(i, positive) for i, positive in enumerate((False, True, False, False, True, True, False))]
    with interlace.compile(model, mine, call, batches[0], interlace.Config(schedule=[], cache="off")) as trainer:
        for number, batch in enumerate(batches):
            its.zero_grad()
            call(theirs, batch).backward()
            its.step()
            if kind == "NAdam" and number == 1:  # counts of steps are known to it alone
                with pytest.raises(InterlaceError, match=r"'first\.\w+' has a gradient again after 1 steps without one"):
                    trainer.step(batch)
                return
            trainer.step(batch)
        for name, t in trainer.state_dict().items():
            torch.testing.assert_close(t, theirs.state_dict()[name], rtol=1e-8, atol=1e-10)


def test_stages() -> None:
    batches = [b for i in range(4) for b in [of(i, i % 2 == 1)] * 2]  # both stages have one batch
    for losses, expected, said in ranks.run(train, 2, Deep, batches, mesh="pp=2", accumulation=1):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert len(said) == 1


def test_a_batch_on_which_the_model_raises() -> None:
    with pytest.raises(InterlaceError, match=r"test_ways.py:\d+: ValueError .*labels must be less than 5") as e:
        bad = {**of(1), "y": torch.tensor([0, 7, 1])}
        torch.manual_seed(0)
        model = Net().double()
        settings = interlace.Config(schedule=[], cache="off")
        with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), call, of(0), settings) as trainer:
            before = {n: p.clone() for n, p in model.named_parameters()}
            try:
                trainer.step(bad)
            finally:
                assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert isinstance(e.value.__cause__, ValueError)


def test_ranks_that_take_different_ways() -> None:
    batches = [of(i, i % 2 == 1) for i in range(4)]  # rank 1's are positive
    for fullgraph in (True, False):
        for losses, expected, said in ranks.run(train, 2, Net, batches, fullgraph=fullgraph):
            assert losses == pytest.approx(expected, rel=1e-9)
            assert "differs between ranks or micro-batches" in said[0]


def test_micro_batches_that_take_different_ways() -> None:
    two = {n: torch.cat([of(0)[n], of(1, True)[n]]) for n in "xy"}
    parts = [{n: two[n][i : i + 2] for n in "xy"} for i in (0, 2, 4)]
    torch.manual_seed(0)
    model = Net().double()
    losses, _, said = train(Net, [two], accumulation=3)
    assert losses == pytest.approx([sum(call(model, part).item() for part in parts) / 3], rel=1e-9)
    assert "differs between ranks or micro-batches" in said[0]


def test_sizes_that_the_batch_decides() -> None:
    batches = [{**of(i), "y": torch.tensor([1, -1 if i % 2 else 2, 3])} for i in range(5)]
    losses, expected, said = train(Chosen, batches)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len(said) == 1 and "reads [[2, 1]] of the batch, and read [[3, 1]]" in said[0]


def test_sizes_that_differ_too_often() -> None:
    batches = []
    for i in range(5):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).double()
        batches.append({"x": x, "y": torch.tensor([2] + [1] * i + [-1] * (5 - i))})
    for fullgraph in (True, False):
        losses, expected, said = train(Chosen, batches, fullgraph=fullgraph)
        assert losses == pytest.approx(expected, rel=1e-9)
        assert len(said) == 3 and "differs too often" in said[-1]


@pytest.mark.parametrize("kind", [Chosen, Picked])
@pytest.mark.parametrize("size", [1, 2])
def test_a_training_does_not_stop_for_sizes(size: int, kind: Callable[[], nn.Module]) -> None:
    """What chooses by the batch runs in Python once batches differ too often, in evaluations, too, and that is said."""
    for said, learnt in ranks.run(too_many_sizes, size, kind):
        assert sum("runs in Python from now on" in text and "test_ways.py" in text for text in said) == 1
        assert learnt


def too_many_sizes(kind: Callable[[], nn.Module]) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model = kind().double()
    call = lambda model, batch: model(**batch).square().mean()  # noqa: E731
    other, batches = copy.deepcopy(model), [{**of(i), "y": torch.tensor([1, *[2 if i > j else -1 for j in range(2)]])} for i in range(3)]
    first = {n: torch.cat([b[n] for b in batches]) for n in "xy"}
    many = [first, *({"x": first["x"], "y": first["y"].roll(i).where(torch.arange(9) > i, -1)} for i in range(1, 6))]
    optimizer, settings = torch.optim.SGD(model.parameters(), lr=0.1), interlace.Config(schedule=[], cache="off", timeout_s=60)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    with ranks.heard() as said, interlace.compile(model, optimizer, call, many[0], settings) as trainer:
        for i, batch in enumerate(many):
            with torch.no_grad():
                assert trainer.evaluate(many[-i])["loss"].item() == pytest.approx(call(other, many[-i]).item(), rel=1e-9)
            loss = call(other, batch)
            plain.zero_grad()
            loss.backward()
            plain.step()
            assert trainer.step(batch).item() == pytest.approx(loss.item(), rel=1e-9)
        return said, bool(trainer.summary()["opaque"])


@pytest.mark.parametrize("kind", ["scatter", "index", "diagonal"])
def test_what_is_made_of_the_batch_by_writes(kind: str) -> None:
    """Masks of targets and pairs, as metric learning makes them: their sizes are those of any batch with as many of each label."""

    def mask(y: Tensor) -> Tensor:
        if kind == "diagonal":
            same = (y.unsqueeze(1) == y).byte()
            same.fill_diagonal_(0)
            return same == 1
        found = torch.zeros(len(y), 5, dtype=torch.double)
        if kind == "scatter":
            found.scatter_(1, y.unsqueeze(1), 1)
        else:
            found[torch.arange(len(y)), y] = 1
        return found == 1

    class Chooses(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.last(self.first(x) + self.second(x))
            chosen = scores @ scores.T if kind == "diagonal" else scores
            rows, columns = torch.where(mask(y))
            return chosen[rows, columns].square().mean()

    g = torch.Generator().manual_seed(0)
    batches = [{"x": of(i)["x"][[0, 1, 2, 0]], "y": torch.tensor([1, 1, 0, 0])[torch.randperm(4, generator=g)]} for i in range(4)]
    losses, expected, said = train(Chooses, batches)
    assert losses == pytest.approx(expected, rel=1e-9) and not said


@pytest.mark.parametrize("form", ["tolist", "numpy"])
def test_lists_of_numbers_that_the_batch_decides(form: str) -> None:
    """As Lumina 2 asks for the lengths of texts, and Wan Animate for sizes that are the same in every step."""

    class Parts(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            sizes, count = torch.tensor([[len(x), 4]]), (y > 0).long().expand(2, -1).sum(1)
            for rows, columns in sizes.tolist() if form == "tolist" else sizes.numpy():
                x = x.reshape(rows, columns)
            first, second = count.tolist() if form == "tolist" else count.numpy()
            return torch.stack([self.first(x)[:first].square().mean(), self.second(x)[:second].square().mean()]).mean()

    batches = [{**of(i), "y": torch.tensor([1, 0 if i % 2 else 2, 3])} for i in range(5)]
    losses, expected, said = train(Parts, batches)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len(said) == 1 and "reads [2, 2] of the batch, and read [3, 3]" in said[0]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_sizes_that_differ_too_often_beside_a_state_of_the_model_that_comes_back(fullgraph: bool) -> None:
    """What was compiled for one of them, before they were too many, is not the program of that state any more."""

    class Sums(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if fullgraph:
                return self.first(x).square().mean() / max(1, int((y > 0).sum()))
            return self.first(x)[: int((y > 0).sum())].square().mean()

    torch.manual_seed(0)
    model = Sums().double()
    eager = copy.deepcopy(model)
    batches = [{**of(i), "y": torch.tensor([1] * (1 + n) + [0] * (2 - n))} for i, n in enumerate([0, 1, 1, 0, 1, 2, 0, 1, 0])]
    own, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model))
    settings = interlace.Config(schedule=[], cache="off", fullgraph=fullgraph)
    with interlace.compile(model, optimizer, call, batches[0], settings) as trainer:
        for i, batch in enumerate(batches):
            for m in (eager, model):
                m.train(i < 2 or i > 6)
            own.zero_grad()
            expected = call(eager, batch)
            expected.backward()
            own.step()
            assert float(trainer.step(batch)) == pytest.approx(expected.item(), rel=1e-9)


def test_reads_of_parameters_stay_what_they_were() -> None:
    class Own(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.first(x) + self.second(x)
            return self.last(h if h.sum() > 0 else -h).mean()

    with pytest.raises(InterlaceError, match="a program cannot branch on data"):
        train(Own, [of(0)])
    losses, expected, _ = train(Own, [of(i) for i in range(4)], fullgraph=False)
    assert losses == pytest.approx(expected, rel=1e-9)


def test_written_tensors_are_no_longer_the_batch() -> None:
    class Writes(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y = y.clone()
            y[0] = self.first(x).argmax()
            return self.second(x).mean() * (2 if y.max() > 3 else 1) + self.last(self.first(x)).mean()

    with pytest.raises(InterlaceError, match="a program cannot branch on data"):
        train(Writes, [of(0)])


def test_evaluate_takes_the_batchs_way() -> None:
    torch.manual_seed(0)
    model = Net().double()
    other = copy.deepcopy(model)
    settings = interlace.Config(schedule=[], cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), call, of(0), settings) as trainer:
        for i in range(4):
            batch = of(i, i % 2 == 1)
            assert trainer.evaluate(batch)["loss"].item() == pytest.approx(call(other, batch).item(), rel=1e-9)


def test_the_cache_has_the_program_of_each_way(tmp_path: Any) -> None:
    for start in range(2):
        for first in (False, True):
            torch.manual_seed(0)
            model = Net().double()
            other = copy.deepcopy(model)
            settings = interlace.Config(schedule=[], cache=str(tmp_path))
            with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), call, of(0, first), settings) as trainer:
                assert ("(cached)" in trainer.compile_table().partition(",")[0]) == (start == 1)
                assert trainer.step(of(0, first)).item() == pytest.approx(call(other, of(0, first)).item(), rel=1e-9)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_ctc_of_targets_of_any_length(rows: bool, size: int) -> None:
    batches = []
    for i in range(6 * size):
        g = torch.Generator().manual_seed(i)
        y = torch.randint(1, 8, (3, 5), generator=g)
        y[0, 1 + i % 4 :] = -100
        y[1, : 0 if rows else i % 3] = -100  # not behind the others
        y[2, 3:] = 0
        batches.append({"x": torch.randn(3, 9, 4, generator=g).double(), "y": y, "rows": rows})
    for losses, expected, said in ranks.run(train, size, Frames, batches):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert not said


def test_ctc_of_other_lengths_than_the_targets() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["y"].masked_select(batch["y"] > 0), torch.full((3,), 9), (batch["y"] > 1).sum(-1))

    y = torch.tensor([[2, 3, 1], [4, 0, 0], [5, 6, 7]])
    with pytest.raises(CaptureError, match="depends on data"):
        capture(nn.Linear(4, 8).double(), loss, {"x": torch.randn(3, 9, 4).double(), "y": y})


def test_a_size_nobody_knows_is_not_read() -> None:
    class Reads(Frames):
        def forward(self, x: Tensor, y: Tensor, rows: bool) -> Tensor:
            return self.head(x).mean() / y.masked_select(y > 0).shape[0]

    batch = {"x": torch.randn(3, 9, 4).double(), "y": torch.ones(3, 5, dtype=torch.long), "rows": False}
    with pytest.raises(InterlaceError):
        train(Reads, [batch])
    losses, expected, _ = train(Reads, [batch] * 2, fullgraph=False)
    assert losses == pytest.approx(expected, rel=1e-9)


def test_distributions_are_not_checked_but_for_what_the_batch_says() -> None:
    class Normal(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scale = F.softplus(self.last(self.first(x) + self.second(x)))
            return -torch.distributions.Normal(x.mean(), scale).log_prob(y[:, None]).mean()

    losses, expected, said = train(Normal, [of(i) for i in range(4)])
    assert losses == pytest.approx(expected, rel=1e-9) and not said


def test_gradient_of_a_transposed_log_softmax() -> None:
    class Transposed(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.stack([self.last(self.first(x)), self.last(self.second(x))]).log_softmax(-1)
            return (h.transpose(0, 1) * x[:, :2, None]).square().mean()

    losses, expected, _ = train(Transposed, [of(i) for i in range(4)])
    assert losses == pytest.approx(expected, rel=1e-9)
