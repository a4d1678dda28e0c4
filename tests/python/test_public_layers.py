"""What layers of public libraries do, each as a model of a few lines beside eager PyTorch."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import on_device
import pytest
import torch
from test_containers import as_eager
from test_odd_models import batch_of, loss_of, plain_losses
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.capture import lru_caches
from interlace.errors import CaptureError

Tensor = torch.Tensor


class Draws(nn.Module):
    """As layers of peft (LoHa, LoKr): dropped whole by a draw, never with a chance of 0."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.a, self.b, self.chance = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3), chance

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)[:, :3]
        if torch.rand(1) > self.chance and not torch.rand([]) < self.chance:
            y = y + self.b(x)
        return y


def test_what_a_draw_decides_in_any_case() -> None:
    torch.manual_seed(0)
    as_eager(Draws(0.0).double())
    model = Draws(0.5).double()
    with pytest.raises(CaptureError, match=r"or a value that is read at .*test_public_layers.py:\d+ decides it, which fullgraph=False"):
        interlace.compile(model, torch.optim.SGD(model.b.parameters(), lr=0.1), loss_of, batch_of(0), interlace.Config(cache="off"))


def test_parameters_that_a_model_puts_anew_are_refused_with_a_way() -> None:
    peft = pytest.importorskip("peft")

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.a(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    model = peft.get_peft_model(Attends(), peft.LoraConfig(r=2, target_modules=["a"], modules_to_save=["head"])).double()
    eager = copy.deepcopy(model)
    own, optimizer = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (eager, model))
    for whole in (True, False):
        with pytest.raises(CaptureError, match=r'of a MultiheadAttention is another tensor.*mode="eager"'):
            interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(cache="off", fullgraph=whole))
    expected = plain_losses(eager, own, map(batch_of, range(3)))
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(cache="off", mode="eager")) as trainer:
        assert [trainer.step(batch_of(i)).item() for i in range(3)] == pytest.approx(expected, rel=1e-12)


class Allocates(nn.Module):
    """As peft's AdaLoraModel, which masks singular values by the gradients of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)

    def update_and_allocate(self, step: int) -> None:
        with torch.no_grad():
            self.a.weight.masked_fill_((self.a.weight * self.a.weight.grad).abs() < 1e-3, 0.0)


def test_ranks_that_gradients_decide_are_refused_with_a_way(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Allocates()).double()
    settings = interlace.Config(cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0), settings) as trainer:
        for step in range(2):
            trainer.step(batch_of(step))
            with pytest.raises(interlace.InterlaceError, match=r"layers.py:\d+: update_and_allocate\(\) .* \(leave the call out\)"):
                model[0].update_and_allocate(step)
    assert "compiling again" not in caplog.text
    loss_of(model, on_device.there(batch_of(0))).backward()
    model[0].update_and_allocate(2)


class Remembers(nn.Module):
    """As timm's AsymmetricLossSingleLabel: a criterion that keeps its targets, and has some of a batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: Tensor = torch.zeros(4, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.targets = torch.zeros_like(x).scatter_(1, y.unsqueeze(1), 1)
        return -(x.log_softmax(-1) * self.targets).sum(-1).mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.scaled_dot_product_attention(x[None], x[None], x[None])[0])


def test_attention_beside_a_criterion_that_keeps_something() -> None:
    torch.manual_seed(0)
    model, remembers = Attends().double(), Remembers()
    eager, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.optim.SGD(eager.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return remembers(model(batch["x"]), batch["y"])

    expected = plain_losses(eager, own, map(batch_of, range(3)))
    with interlace.compile(model, optimizer, loss_fn, batch_of(0), interlace.Config(schedule=[], cache="off")) as trainer:
        assert [trainer.step(batch_of(i)).item() for i in range(3)] == pytest.approx(expected, rel=1e-12)


class Angles:
    """As rotary embeddings keep them: cosines of positions, in float32."""

    def __init__(self) -> None:
        self.last: tuple[int, Tensor] | None = None

    @staticmethod
    def made(n: int) -> Tensor:
        return torch.outer(torch.arange(n).float(), 0.5 ** torch.arange(8)).cos()

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def by_size(self, n: int) -> Tensor:
        return self.made(n)

    def last_one(self, n: int) -> Tensor:
        if self.last is None or self.last[0] != n:
            self.last = (n, self.made(n))
        return self.last[1]

    def turned(self, n: int) -> Tensor:
        return torch.polar(torch.ones(n, 8), self.last_one(n).acos()).conj().real


@functools.cache
def angles(n: int) -> list[Angles]:
    kept = Angles()
    kept.last_one(n)
    return [kept]


CACHES: dict[str, Callable[[Angles, int], Tensor]] = {
    "function": lambda kept, n: angles(n)[0].last_one(n),
    "method": lambda kept, n: kept.by_size(n),
    "attribute": lambda kept, n: kept.last_one(n),
    "complex": lambda kept, n: kept.turned(n),
}


class Turns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kept, self.function = nn.Linear(8, 8), nn.Linear(8, 3), Angles(), CACHES[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.function(self.kept, len(x)).to(x.dtype))


@pytest.mark.parametrize("kind", CACHES)
def test_caches_of_what_depends_on_sizes(kind: str) -> None:
    """What a capture leaves in functools.lru_cache is found by the next one, and by eager steps."""
    torch.manual_seed(0)
    model = Turns(kind).double()
    eager = copy.deepcopy(model)
    own, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model))
    batches = [{name: t[: 3 if 2 <= i < 4 else 4] for name, t in batch_of(i).items()} for i in range(6)]
    with interlace.compile(model, optimizer, loss_of, batch_of(0), interlace.Config(schedule=[], cache="off")) as trainer:
        for batch in batches:  # in turns: eager steps meet what captures left
            (expected,) = plain_losses(eager, own, [batch])
            assert trainer.step(batch).item() == pytest.approx(expected, rel=1e-12)
        model.eval()
        torch.testing.assert_close(trainer.step(batch_of(7)), loss_of(eager, batch_of(7)).detach())


@pytest.mark.parametrize("generation", [None, 0, 1, 2])
def test_caches_that_are_made_later_are_found(generation: int | None) -> None:
    caches = lru_caches.Caches()
    caches.look()
    late = functools.lru_cache(len)
    if generation is not None:
        gc.collect(generation)  # what lives is among the older objects now
    assert late in caches.look()


class Replaces(nn.Module):
    """As OmniGen's rotary embedding, a buffer that each run makes anew, in float32 whatever it was; and as DynamicSoftMarginLoss, a histogram
    that becomes float64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("rates", torch.ones(8), persistent=False)
        self.seen = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.rates = 0.5 ** torch.arange(8, device=x.device).float()
        self.seen = 0.5 * self.seen.to(x) + x.mean(0)
        return self.head(x * self.rates + self.seen)


def test_a_buffer_that_the_model_makes_anew_in_another_precision() -> None:
    torch.manual_seed(0)
    model = Replaces().double()
    as_eager(model)
    assert model.rates.dtype == torch.float32


class Checks(nn.Module):
    """As sentence_transformers' ContrastiveLoss: looks at its first labels, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.checked = nn.Linear(8, 3), False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.checked:
            self.checked = True
            if y.lt(0).logical_or(y.gt(2)).any().item():
                raise ValueError("labels must be in [0, 3)")
        return F.cross_entropy(self.head(x), y)


def test_a_look_at_the_first_labels() -> None:
    torch.manual_seed(0)
    as_eager(Checks().double(), lambda m, b: m(**b))


class Centre(nn.Module):
    """As losses of self-distillation keep one: an average that begins in a size that its first batch decides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.centre = 0.9 * self.centre + 0.1 * mean if len(self.centre) else mean
        return self.head(x - self.centre)


@pytest.mark.parametrize("size", [0, 1])
def test_an_average_does_not_count_its_first_batch_twice(size: int) -> None:
    torch.manual_seed(0)
    model = Centre(size).double()
    with pytest.raises(CaptureError, match="let it run once before"):
        as_eager(model)
    assert model.centre.shape == (size,)
    model.cpu()(batch_of(9)["x"])
    as_eager(model)


ORDERS = [np.argsort, lambda x: np.unique(x, return_index=True)[1], lambda x: sorted(range(len(x)), key=x.__getitem__)]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_numpy_makes_are_refused_by_line(order: Callable[..., Any]) -> None:
    """As an assignment of predictions to targets: an array of equal numbers has the same order whatever they are."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"])
        chosen = order(y.detach().sum(-1).numpy())
        return (y[list(chosen)].square().sum(-1) * torch.arange(len(chosen))).mean()

    model, batch = nn.Sequential(nn.Linear(4, 3)).double(), {"x": torch.randn(5, 4).double()}
    with pytest.raises(CaptureError, match=r"test_public_layers\.py:\d+: the model reads a tensor's value"):
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch, interlace.Config(cache="off"))
