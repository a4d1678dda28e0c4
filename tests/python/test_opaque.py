"""Config(fullgraph=False): what cannot be captured runs in Python within the program, on every strategy and number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import CaptureError

Tensor = torch.Tensor
STEPS = 8


@dataclasses.dataclass
class Result(OrderedDict):
    """As Hugging Face's: a mapping without the fields that are None."""

    loss: Tensor | None = None
    hidden: Tensor | None = None
    states: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Branches(nn.Module):
    """Uses one of two layers, as the data say, and a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


class Records(nn.Module):
    """Takes and gives results with None fields; its BatchNorm keeps statistics; draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, given: Result) -> Result:
        self.calls += 1
        assert given.loss is None and given.hidden is not None
        y = self.norm(self.a(given.hidden)) * (1 + random.random()) * min(1.0, self.calls / 4)
        return Result(hidden=y if float(y.detach().max()) > -1e9 else -y)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.middle = {"branches": Branches, "records": Records}[kind]()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = self.middle(x) if self.kind == "branches" else self.middle(Result(hidden=x)).hidden
        return self.last(y)


def square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def ctc(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Fails where the loss asks for sizes of the data, behind the model."""
    y = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    lengths = [int(n) for n in batch["n"]]
    return F.ctc_loss(y, batch["y"], [6] * len(lengths), lengths)


def early(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Reads a parameter before it calls the model."""
    scale = 2 if next(model.parameters()).sum() > 0 else 1
    return model(batch["x"]).square().mean() * scale


def masked(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A boolean mask, and parameters that the loss function itself reads."""
    y = model(batch["x"])
    kept = y[y.detach() > y.detach().mean()].square().mean()
    return {"loss": kept + 0.1 * sum(p.square().sum() for p in model.parameters()), "kept": kept}


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))


CASES: dict[str, Any] = {
    "branches": (lambda: Net("branches"), square),
    "records": (lambda: Net("records"), square),
    "ctc": (sequence, ctc),
    "early": (sequence, early),
    "masked": (sequence, masked),
}


def batch_of(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(1, 5, (3, 6), generator=g)
    return {"x": torch.randn(3, 6, 4, generator=g).double(), "y": y, "n": torch.tensor([1, 2, 3])}


def flat_batch(case: str, seed: int) -> dict[str, Tensor]:
    batch = batch_of(seed)
    if case == "records":
        batch["x"] = batch["x"].reshape(18, 4)
    if case == "ctc":
        batch["y"] = batch["y"][:, :3]
    return batch


def model_of(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case][0]().double()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    return (torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)(model.parameters(), lr=0.1, weight_decay=0.3)


def loss_of(result: Any) -> Tensor:
    return result["loss"] if isinstance(result, dict) else result


def plain(case: str, kind: str, size: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process with the batches of all ranks."""
    model = model_of(case)
    optimizer = optimizer_of(kind, model)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(size):
            loss = loss_of(CASES[case][1](model, flat_batch(case, 10 * step + rank)))
            (loss / size).backward()
            total += loss.item() / size
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.state_dict())


def train(case: str, kind: str, **config: Any) -> Any:
    rank, size = parity.rank_and_size()
    random.seed(5)
    expected, weights = plain(case, kind, size)
    random.seed(5)
    model = model_of(case)
    settings = interlace.Config(fullgraph=False, timeout_s=60, **config)
    losses = []
    with interlace.compile(model, optimizer_of(kind, model), CASES[case][1], flat_batch(case, rank), settings) as trainer:
        for step in range(STEPS):
            losses.append(parity.mean_over_ranks(trainer.step(flat_batch(case, 10 * step + rank))))
            if step == 3 and case != "records":
                evaluated = trainer.evaluate(flat_batch(case, 99))
        state = trainer.state_dict(all_ranks=True)
        if case != "records":
            assert torch.isfinite(evaluated["loss"])
        return losses, expected, dict(state), weights, trainer.summary()["opaque"]


@pytest.mark.parametrize("case", ["branches", "ctc", "early", "masked"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", ["shard", "zero1", "replicate"])
def test_trains_as_eager_does(case: str, kind: str, size: int, strategy: str) -> None:
    """Unused parameters stay as they are: weight decay of 0.3 at a rate of 0.1 would show."""
    if kind != "adamw" and case != "branches":
        pytest.skip("optimizers differ for parameters that go unused")
    for losses, expected, state, weights, opaque in ranks.run(train, size, case, kind, strategy=strategy):
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-9)
        assert opaque[0]["runs"] >= STEPS and opaque[0]["seconds"] > 0 and "test_opaque.py:" in opaque[0]["why"]
        names = {"branches": "middle", "ctc": "(loss after the model)", "masked": "(loss function)", "early": "(loss function)"}
        assert opaque[0]["module"] == names[case]
    if case == "branches":
        fresh = model_of(case).state_dict()
        assert torch.equal(state["middle.never.weight"], fresh["middle.never.weight"])


def test_results_with_none_fields_statistics_counters_and_other_generators() -> None:
    """One rank, where eager has one statistic and one generator."""
    losses, expected, state, weights, opaque = train("records", "adamw")
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-9)
    assert opaque[0]["module"] == "middle"


def with_accumulation() -> Any:
    model = model_of("branches")
    settings = interlace.Config(fullgraph=False, accumulation=2, accumulate_mode="reduce_last", clip_norm=0.1)
    with interlace.compile(model, optimizer_of("adamw", model), square, {"x": torch.randn(4, 4).double()}, settings) as trainer:
        return [float(trainer.step({"x": torch.randn(4, 4).double()})) for _ in range(3)], trainer.norm


def test_accumulation_and_clipping() -> None:
    for losses, norm in ranks.run(with_accumulation, 2):
        assert len(losses) == 3 and norm > 0


def test_shapes_freezing_and_evaluation_learn_again() -> None:
    model = model_of("branches")
    settings = interlace.Config(fullgraph=False, shapes={"x": [(4, 4), (8, 4)]}, pad={"x": 0.0})
    with interlace.compile(model, optimizer_of("sgd", model), square, {"x": torch.ones(4, 4).double()}, settings) as trainer:
        first = float(trainer.step({"x": torch.ones(4, 4).double()}))
        trainer.step({"x": torch.ones(7, 4).double()})
        model.first.weight.requires_grad_(False)
        trainer.step({"x": torch.ones(7, 4).double()})
        assert float(trainer.evaluate({"x": torch.ones(3, 4).double()})["loss"]) != first
        model.first.weight.requires_grad_(True)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_what_is_frozen_in_an_opaque_module_stays_as_it_is(kind: str) -> None:
    """Weight decay of 0.3 at a rate of 0.1, computed back though it was not made, would show."""
    eager, model = model_of("branches"), model_of("branches")
    own, optimizer = optimizer_of(kind, eager), optimizer_of(kind, model)
    if kind == "sgd":
        own, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.3) for m in (eager, model))
    with interlace.compile(model, optimizer, square, batch_of(0), interlace.Config(fullgraph=False)) as trainer:
        for step in range(9):
            for m in (eager, model):
                m.middle.a.weight.requires_grad_(not 2 <= step < 6)
            own.zero_grad()
            expected = square(eager, batch_of(step))
            expected.backward()
            own.step()
            torch.testing.assert_close(trainer.step(batch_of(step)), expected.detach())
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(trainer.state_dict()[name], value, rtol=1e-8, atol=1e-9)


def test_a_module_that_hands_on_a_cache_is_opaque_with_what_is_around_it() -> None:
    class Cache:
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            y = self.fc(x)
            cache.kept.append(y)
            return y if y.sum() > 0 else -y

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            return self.two(self.one(x, cache), cache) + cache.kept[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Block()).double()
    x = torch.randn(3, 4).double()
    expected = model(x).square().mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, optimizer, lambda m, b: m(b).square().mean(), x, interlace.Config(fullgraph=False)) as trainer:
        assert float(trainer.step(x)) == pytest.approx(expected, rel=1e-12)
        assert [row["module"] for row in trainer.summary()["opaque"]] == ["1"]


def test_a_module_that_gives_numbers_is_opaque_with_what_reads_them() -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> list[int]:
            return (x > 0).sum(1).tolist()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.sizes = nn.Linear(4, 4), Sizes()

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return torch.stack([row * n for row, n in zip(y, self.sizes(y), strict=True)])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Block()).double()
    theirs = copy.deepcopy(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]

    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        return m(b).square().mean()

    with interlace.compile(model, opts[0], loss_fn, xs[0], interlace.Config(fullgraph=False)) as trainer:
        assert [row["module"] for row in trainer.summary()["opaque"]] == ["1"]
        for x in xs:
            loss = loss_fn(theirs, x)
            loss.backward()
            opts[1].step()
            opts[1].zero_grad()
            assert float(trainer.step(x)) == pytest.approx(loss.item(), rel=1e-12)


def test_what_is_around_may_be_a_list_or_used_by_its_methods() -> None:
    """Nobody calls these, so what is around them is opaque, too."""

    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> list[int]:
            return (x > 0).sum(1).tolist()

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = nn.ModuleList([Sizes()])

        def map(self, x: Tensor) -> Tensor:
            return torch.stack([row * n for row, n in zip(x, self.sizes[0](x), strict=True)])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.experts = nn.Linear(4, 4), Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts.map(self.fc(x))

    model = nn.Sequential(nn.Linear(4, 4), Block()).double()
    x = torch.randn(3, 4).double()
    expected = model(x).square().mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, optimizer, lambda m, b: m(b).square().mean(), x, interlace.Config(fullgraph=False)) as trainer:
        assert [row["module"] for row in trainer.summary()["opaque"]] == ["1"]
        assert float(trainer.step(x)) == pytest.approx(expected, rel=1e-12)


def test_a_module_called_in_another_way_while_traced_is_opaque_with_what_calls_it() -> None:
    """As the attention of Hugging Face's models, which gets a mask while it is traced and none in a run."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            y = self.fc(x) * (2 if x.sum() > 0 else 3)
            return y if mask is None else y * mask

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, torch.ones_like(x) if torch.is_grad_enabled() else None)

    model = nn.Sequential(nn.Linear(4, 4), Outer()).double()
    x = torch.randn(3, 4).double()
    expected = model(x).square().mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, optimizer, lambda m, b: m(b).square().mean(), x, interlace.Config(fullgraph=False)) as trainer:
        assert [row["module"] for row in trainer.summary()["opaque"]] == ["1"]
        assert float(trainer.step(x)) == pytest.approx(expected, rel=1e-12)


def test_a_module_in_a_region_of_autocast_runs_in_it() -> None:
    """It had operands in bfloat16 for its weights in float32."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(on_device.DEVICE, torch.bfloat16):
            return model(batch["x"]).float().square().mean()

    model, batch = Net("branches").float(), {"x": batch_of(0)["x"].float()}
    twin, moved = copy.deepcopy(model).to(on_device.DEVICE), {"x": batch["x"].to(on_device.DEVICE)}
    optimizer, twins = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    with interlace.compile(model, optimizer, loss_fn, batch, interlace.Config(fullgraph=False, schedule=[], profile="off")) as trainer:
        assert "call.python" in trainer.program and "bf16" in trainer.program
        for _ in range(3):
            loss = loss_fn(twin, moved)
            loss.backward()
            twins.step()
            twins.zero_grad()
            assert trainer.step(batch).item() == pytest.approx(loss.item(), rel=1e-5)


def test_what_a_module_draws_is_drawn_again_for_its_gradients() -> None:
    """On devices it was not: the masks of backward were others than those of forward."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(512))

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x * self.weight, 0.5)
            return y if float(y.detach().sum()) > -1e9 else -y

    def loss_fn(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        y = model(batch)
        return {"loss": y.sum(), "y": y.detach()}

    model, x = Masked(), torch.ones(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    before = torch.ones(512)
    masks = []
    with interlace.compile(model, optimizer, loss_fn, x, interlace.Config(fullgraph=False, profile="off")) as trainer:
        for _ in range(2):
            trainer.step(x)
            masks.append(trainer.outputs["y"][0].cpu() != 0)
            after = trainer.state_dict()["weight"].cpu().clone()
            assert torch.equal(before - after, 0.5 * masks[-1])
            before = after
    assert not torch.equal(*masks)


def test_what_is_refused_says_how() -> None:
    model = model_of("branches")
    with pytest.raises(CaptureError, match="fullgraph=False"):
        interlace.compile(model, optimizer_of("sgd", model), square, batch_of(0))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_module_that_several_paths_lead_to_keeps_its_parameters(fullgraph: bool) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
            self.block = nn.Sequential(self.first, nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(self.first(x))
            if not fullgraph:
                y = y * float(y.detach().std())
            elif y.isinf().any():
                raise RuntimeError("infinite")
            return self.head(y)

    torch.manual_seed(0)
    model, x = Shares(), torch.randn(6, 4)
    eager, loss_fn = copy.deepcopy(model), lambda model, batch: model(batch).square().mean()
    own, optimizer = torch.optim.Adam(eager.parameters(), lr=0.01), torch.optim.Adam(model.parameters(), lr=0.01)
    with interlace.compile(model, optimizer, loss_fn, x, interlace.Config(schedule=[], cache="off", fullgraph=fullgraph)) as trainer:
        for _ in range(3):
            own.zero_grad()
            expected = loss_fn(eager, x)
            expected.backward()
            own.step()
            torch.testing.assert_close(trainer.step(x), expected.detach())
        assert list(map(id, model.parameters())) == list(map(id, optimizer.param_groups[0]["params"]))
        torch.testing.assert_close(trainer.evaluate(x)["loss"], loss_fn(eager, x).detach())
        torch.testing.assert_close(dict(model.state_dict()), dict(eager.state_dict()))
