"""Models that keep, write and count things while they run, and batches and losses of unusual forms: as eager PyTorch, in double precision."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import on_device
import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo_more import Reversed

import interlace
from interlace.errors import CaptureError

Tensor = torch.Tensor
STEPS = 5


class Net(nn.Module):
    """`function(self, x)` is its forward."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)
        self.rnn = nn.LSTM(4, 8, batch_first=True)
        self.words = nn.Embedding(6, 8, max_norm=1.0, sparse=True)
        self.register_buffer("turn", torch.polar(torch.ones(4, dtype=torch.float64), torch.arange(4).double()))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.cos, self.table, self.calls, self.state = None, {}, 0, None
        self.function = function
        self.seen: list[int] = []
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def batch_of(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 8, generator=g).double(), "y": torch.randint(0, 3, (4,), generator=g)}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def turns(self: Any, x: Tensor) -> Tensor:
    """Backward of a complex product takes conjugates."""
    pairs = torch.view_as_complex(self.a(x).view(-1, 4, 2)) * self.turn
    spectrum = torch.fft.rfft(self.b(x)) * torch.exp(0.3j * torch.arange(5, device=x.device))
    return self.head(torch.view_as_real(pairs * pairs.conj().flip(1)).flatten(1) + torch.fft.irfft(spectrum, n=8) + spectrum.abs().sum())


def teaches_in_place(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for mine, its in zip(self.a.parameters(), self.teacher.parameters(), strict=True):
            its.data.mul_(0.9).add_(mine.data, alpha=0.1)
    return self.head(self.a(x) - self.teacher(x))


def teaches_anew(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for mine, its in zip(self.a.parameters(), self.teacher.parameters(), strict=True):
            its.data = 0.9 * its.data + 0.1 * mine.data
    return self.head(self.a(x) - self.teacher(x))


def teaches_another(self: Any, x: Tensor) -> Tensor:
    """Another parameter in each step, as in a well-known VQ-VAE's codebook."""
    with torch.no_grad():
        self.teacher.weight = nn.Parameter(self.teacher.weight * 0.9 + self.a.weight * 0.1, requires_grad=False)
    return self.head(self.a(x) - self.teacher(x))


def teaches_another_by_value(self: Any, x: Tensor) -> Tensor:
    return teaches_another(self, x if float(self.b(x).sum()) < 1e9 else -x)


def another_weight(self: Any, x: Tensor) -> Tensor:
    self.a.weight = nn.Parameter(self.a.weight * 0.9)
    return self.head(self.a(x))


def another_weight_by_value(self: Any, x: Tensor) -> Tensor:
    return another_weight(self, x if float(self.b(x).sum()) < 1e9 else -x)


def teaches_by_a_count(self: Any, x: Tensor) -> Tensor:
    """Reads a buffer in Python, so that it is opaque."""
    y = teaches_in_place(self, x)
    scale = 1.0 if int(self.at) < 2 else 0.5
    self.at += 1
    return y * scale


def teaches_by_another_count(self: Any, x: Tensor) -> Tensor:
    """Puts another buffer in its place each time."""
    y = self.head(self.a(x)) * (1.0 if int(self.at) < 2 else 0.5)
    self.at = self.at + 1
    return y


def caches(self: Any, x: Tensor) -> Tensor:
    if self.cos is None:
        self.cos, self.count = torch.arange(8, dtype=x.dtype).cos(), 8
    if x.shape not in self.table:
        self.table[x.shape] = torch.ones(x.shape[1], dtype=x.dtype).cumsum(0).sqrt()
    return self.head(self.a(x) * self.cos + self.b(x) * self.table[x.shape])


def caches_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    """As rotary embeddings do: by length, from frequencies that are a buffer."""
    if self.calls != len(x):
        self.calls, self.cos = len(x), torch.outer(torch.arange(len(x)).double(), self.turn.angle().repeat(2)).cos()
    return self.head(self.a(x) * self.cos)


def caches_of_a_count(self: Any, x: Tensor) -> Tensor:
    """The buffer that it keeps something of is another one in each step."""
    if self.cos is None:
        self.cos = self.at * 2.0
    self.at += 1
    return self.head(self.a(x) * self.cos)


def caches_of_a_weight(self: Any, x: Tensor) -> Tensor:
    if self.cos is None:
        self.cos = self.b.weight.detach() * 2
    return self.head(self.a(x) @ self.cos)


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.head(self.a(x)) * (1.0 if self.calls < 3 else 0.5)


def goes_on(self: Any, x: Tensor) -> Tensor:
    y, state = self.rnn(x.view(4, 2, 4), self.state)
    self.state = tuple(t.detach() for t in state)
    return self.head(y[:, -1])


def packs(self: Any, x: Tensor) -> Tensor:
    lengths = ((x[:, 0] > 0).long() + 1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(x.view(4, 2, 4), lengths, batch_first=True, enforce_sorted=False)
    return self.head(self.rnn(packed)[1][0][-1])


def looks_up(self: Any, x: Tensor) -> Tensor:
    return self.head(self.words(x.abs().sum(1).long() % 6))


def counts_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.seen.append(1)
    return self.head(self.a(x)) * (1.0 if len(self.seen) < 3 else 0.5)


def draws_from_its_own(self: Any, x: Tensor) -> Tensor:
    return self.head(self.a(x)) * (1 + self.python.random()) * (1 + self.numpy.random())


def draws_the_same(self: Any, x: Tensor) -> Tensor:
    """From a generator that is made anew."""
    own = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=own, dtype=x.dtype) + torch.empty(8, dtype=x.dtype).uniform_(-1, 1, generator=own)
    return self.head(self.a(x + 0.1 * noise)[:, torch.randperm(8, generator=own)])


def curves(self: Any, x: Tensor) -> Tensor:
    """Forward-mode differentiation has tangents of zeros without memory."""
    second = torch.func.hessian(lambda row: self.a(row).tanh().sum())
    return self.head(self.a(x) + torch.func.vmap(lambda row: second(row).diagonal())(x))


def reverses(self: Any, x: Tensor) -> Tensor:
    return self.head(sum(Reversed.apply(self.a(x).tanh(), x, self.a, self.b)))


def reverses_by_a_value(self: Any, x: Tensor) -> Tensor:
    return reverses(self, x) * (1.0 if float(self.a(x).sum()) < 1e9 else 2.0)


def checks_a_variance(self: Any, x: Tensor) -> Tensor:
    return self.a(x) + F.gaussian_nll_loss(self.a(x), x, F.softplus(self.a(x)))


def checkpoints_by_a_value(self: Any, x: Tensor) -> Tensor:
    """What runs again in backward runs with the same parameters."""
    y = checkpoint(lambda z: self.b(self.a(z)).tanh(), x, use_reentrant=False)
    y = checkpoint(lambda z: self.b(z), y, use_reentrant=True)
    return self.head(y * (1.0 if float(y.sum()) < 1e9 else 2.0))


def draws_on(self: Any, x: Tensor) -> Tensor:
    return self.head(self.a(x) + torch.randn(x.shape, generator=self.own, dtype=x.dtype).to(x.device))


def seeds_itself(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        noise = torch.randn_like(x)
    return self.head(self.a(x) + noise)


def powers(self: Any, x: Tensor) -> Tensor:
    """In place, by a number: `aten.pow.Scalar` is a number to the power of a tensor."""
    return self.head(self.a(x).abs().add_(0.1).pow_(-0.5).float_power_(1.5))


def lists(self: Any, x: Tensor) -> Tensor:
    """torch.tensor() copies what it is given, in the widest dtype."""
    y = self.a(x)
    scale = torch.tensor([y.mean(), 2, x.sum()]).abs().mean() + torch.tensor([[y.max(), 1], [0.5, y.min()]], dtype=x.dtype).sum()
    return self.head(y) * scale + torch.tensor([len(x), (x > 0).sum()]).sum()


def replaces_and_looks_up(self: Any, x: Tensor) -> Tensor:
    """What comes next may get the memory that a tensor had before."""
    with torch.no_grad():
        self.teacher.weight.data = self.teacher.weight.lerp(self.a.weight, 0.1)
    more = [self.teacher.weight[self.a(x).argmax(1)] * (i + 1) for i in range(3)]
    return self.head(self.a(x) + sum(more) - self.teacher(x))


def counts_classes(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    chosen = y.argmax(1)
    weighed = torch.bincount(chosen, weights=x[:, 0], minlength=10)[:8]
    return self.head(y * torch.bincount(chosen, minlength=8) + weighed)


WHOLE = [
    turns, powers, lists, checks_a_variance, teaches_in_place, teaches_anew, teaches_another, caches, caches_of_a_buffer,
    draws_the_same, curves, reverses, looks_up, replaces_and_looks_up, counts_classes,
]  # fmt: skip
OPAQUE = [
    teaches_by_a_count, teaches_by_another_count, counts, counts_in_a_list, draws_from_its_own, draws_on, seeds_itself, goes_on, packs,
    reverses_by_a_value, checkpoints_by_a_value, teaches_another_by_value,
]  # fmt: skip


def on_soft(functions: list[Any], lacks: list[Any]) -> list[Any]:
    """But for those that it has no kernels for."""
    lacking = pytest.mark.skipif(on_device.DEVICE == "soft", reason="the software accelerator has no kernel for the cell of an LSTM")
    return [pytest.param(f, marks=lacking) if f in lacks else f for f in functions]


def train(
    function: Callable[[Any, Tensor], Tensor], kind: str = "sgd", draws: int = 0, **config: Any
) -> tuple[list[float], list[float], int, list[float]]:
    """Losses of eager steps and ours, the number of opaque calls, and how far parameters and buffers are from eager's. `draws`: a seed that
    both begin with, and eager steps are made where ours are."""
    rank, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = Net(function).double()
    there = on_device.DEVICE if draws else "cpu"
    theirs = copy.deepcopy(model).to(there)
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2)}[kind]
    optimizer, expected = make(theirs.parameters()), []
    torch.manual_seed(draws)
    for step in range(STEPS):
        before = {n: b.clone() for n, b in theirs.named_buffers()}
        frozen = {n: p.detach().clone() for n, p in theirs.named_parameters() if not p.requires_grad}
        total = 0.0
        for r in range(size):
            if r:  # every rank begins a step with the same
                for n, b in theirs.named_buffers():
                    b.copy_(before[n])
                for n, p in theirs.named_parameters():
                    if n in frozen:
                        p.data.copy_(frozen[n])
            loss = loss_of(theirs, {name: x.to(there) for name, x in batch_of(10 * step + r).items()}) / size
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    settings = interlace.Config(schedule=[], cache="off", timeout_s=60, **config)
    with interlace.compile(model, make(model.parameters()), loss_of, batch_of(rank), settings) as trainer:
        torch.manual_seed(draws)
        losses = [parity.mean_over_ranks(trainer.step(batch_of(10 * step + rank))) for step in range(STEPS)]
        state = trainer.state_dict(all_ranks=True)
        far = [float((state[n].cpu() - t.cpu()).abs().max()) for n, t in theirs.state_dict().items()]
        return losses, expected, len(trainer.summary()["opaque"]), far


@pytest.mark.parametrize("function", WHOLE, ids=lambda f: f.__name__)
def test_captured_whole(function: Callable[[Any, Tensor], Tensor]) -> None:
    losses, expected, opaque, far = train(function)
    assert opaque == 0
    assert losses == pytest.approx(expected, rel=1e-9)
    assert max(far) < 1e-8


@pytest.mark.parametrize("function", [caches_of_a_count, caches_of_a_weight], ids=lambda f: f.__name__)
def test_what_the_first_step_keeps(function: Callable[[Any, Tensor], Tensor]) -> None:
    losses, expected, _, far = train(function)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert max(far) < 1e-8


@pytest.mark.parametrize("function", on_soft(OPAQUE, [goes_on, packs]), ids=lambda f: f.__name__)
def test_opaque(function: Callable[[Any, Tensor], Tensor]) -> None:
    losses, expected, opaque, far = train(function, "adamw", fullgraph=False)
    assert opaque == 1
    assert losses == pytest.approx(expected, rel=1e-9)
    assert max(far) < 1e-8


@pytest.mark.parametrize("function", on_soft([reverses, packs, checkpoints_by_a_value, turns], [packs]), ids=lambda f: f.__name__)
def test_the_users_own_python(function: Callable[[Any, Tensor], Tensor]) -> None:
    losses, expected, _, far = train(function, mode="eager")
    assert losses == pytest.approx(expected, rel=1e-9)
    assert max(far) < 1e-8


def draws(self: Any, x: Tensor) -> Tensor:
    return self.head(F.rrelu(self.a(x), training=True) * torch.bernoulli(x.sigmoid()) + torch.normal(x, x.exp()))


def literals(self: Any, x: Tensor) -> Tensor:
    """On a device by its name."""
    there: Any = {"device": on_device.DEVICE, "dtype": x.dtype}
    with torch.device(on_device.DEVICE):
        y = self.a(x) * torch.tensor(2.0) + torch.tensor(range(8), **there) + torch.as_tensor([0.5] * 8, **there)
    return self.head(y * x.new_tensor([1.5] * 8, **there) * torch.asarray([0.5], **there))


def draws_by_a_value(self: Any, x: Tensor) -> Tensor:
    y = F.dropout(self.a(x), 0.3)
    return self.head(y * torch.rand(8, dtype=x.dtype, device=x.device) if float(y.sum()) < 1e9 else y)


@pytest.mark.parametrize("function", [draws, draws_by_a_value, literals], ids=lambda f: f.__name__)
def test_what_is_made_on_the_device_and_its_draws(function: Callable[[Any, Tensor], Tensor]) -> None:
    losses, expected, opaque, far = train(function, rng="compat", fullgraph=function is not draws_by_a_value, draws=5)
    assert opaque == (function is draws_by_a_value)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert max(far) < 1e-8


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_a_teacher_on_two_ranks(strategy: str) -> None:
    for function in (teaches_in_place, teaches_anew):
        for losses, expected, opaque, far in ranks.run(train, 2, function, strategy=strategy):
            assert opaque == 0
            assert losses == pytest.approx(expected, rel=1e-9)
            assert max(far) < 1e-8


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], loss_fn: Callable[[Any, Any], Tensor] | None = None
) -> list[float]:  # fmt: skip
    """Of PyTorch's own steps, one a batch."""
    losses = []
    for batch in batches:
        loss = (loss_fn or loss_of)(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_what_torch_compile_wraps() -> None:
    torch.manual_seed(0)
    inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")
    model = torch.compile(nn.Sequential(inner, nn.Linear(8, 3)).double(), backend="eager")
    theirs = copy.deepcopy(model)
    expected = plain_losses(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), map(batch_of, range(STEPS)))
    settings = interlace.Config(schedule=[], cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0), settings) as trainer:
        assert [trainer.step(batch_of(step)).item() for step in range(STEPS)] == pytest.approx(expected, rel=1e-12)
        assert trainer.state_dict().keys() == theirs.state_dict().keys()


def refuses_a_norm() -> str:
    model = Net(looks_up).double()
    with pytest.raises(interlace.InterlaceError) as e:
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0), interlace.Config(fullgraph=False))
    return str(e.value)


def test_parameters_that_two_ranks_would_write_are_named() -> None:
    for text in ranks.run(refuses_a_norm, 2):
        assert "parameter 'words.weight' is changed in place while the model runs" in text


@pytest.mark.parametrize("config", [{}, {"fullgraph": False}, {"mode": "eager"}], ids=str)
def test_another_parameter_in_the_place_of_one_that_is_trained(config: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match=r"parameter 'a\.weight' is changed in place while the model runs"):
        train(another_weight_by_value if config == {"fullgraph": False} else another_weight, **config)


def halves(self: Any, x: Tensor) -> Tensor:
    """A frozen parameter is written, and one that is trained."""
    self.a.weight.data.mul_(0.5)
    return self.head(self.a(x)) * (1 if float(x.sum()) > 0 else 2)


def test_what_a_refused_model_has_written_is_put_back() -> None:
    model = Net(halves).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=r"parameter 'a\.weight' is changed in place while the model runs"):
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0), interlace.Config(fullgraph=False))
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


# ---- losses and batches ----


class Average:
    """A loss function that keeps a tensor, and puts another in its place."""

    def __init__(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean)


class Record:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Graph:
    """Its tensors lie in an object that it has."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.store = Record(x, y)

    x, y = property(lambda self: self.store.x), property(lambda self: self.store.y)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    more: dict = dataclasses.field(default_factory=dict, init=False)


def of_attributes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def nested(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    y = model(batch["x"])
    return F.cross_entropy(y, batch["y"]).reshape(1), {"logits": y, "rows": len(y), "name": "ce", "none": None}


@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("kind", [Average, Record, Graph, Frozen, nested])
def test_losses_and_batches(kind: Any, mode: str) -> None:
    def wrapped(seed: int) -> Any:
        return kind(**batch_of(seed)) if kind in (Record, Graph, Frozen) else batch_of(seed)

    def own() -> Any:
        return kind() if kind is Average else of_attributes if kind in (Record, Graph, Frozen) else nested

    torch.manual_seed(0)
    model = nn.Linear(8, 3).double()
    theirs = copy.deepcopy(model)
    optimizer, loss_fn, expected = torch.optim.SGD(theirs.parameters(), lr=0.1), own(), []
    for step in range(STEPS):
        loss = loss_fn(theirs, wrapped(step))
        loss = loss[0] if kind is nested else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    config = interlace.Config(schedule=[], mode=mode)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), own(), wrapped(0), config) as trainer:
        losses = [trainer.step(wrapped(step)).item() for step in range(STEPS)]
        if kind is nested:
            assert trainer.outputs["1.rows"][0].item() == 4 and trainer.outputs["1.logits"][0].shape == (4, 3)
    assert losses == pytest.approx(expected, rel=1e-12)


def test_a_loss_that_makes_its_gradients() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    for fullgraph in (True, False):
        model = nn.Linear(8, 3).double()
        with pytest.raises(CaptureError, match=r"test_odd_models.py:\d+: the loss function calls backward\(\); return the loss alone"):
            interlace.compile(
                model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch_of(0), interlace.Config(fullgraph=fullgraph)
            )


def swaps_its_weight(self: Any, x: Tensor) -> Tensor:
    self.a.weight.data = self.a.weight.data.clamp(-0.2, 0.2)
    with torch.no_grad():
        self.b.weight.mul_(0.9)
    return self.head(self.a(x) + self.b(x))


def another_part_each_time(self: Any, x: Tensor) -> Tensor:
    return self.head(self.a(x) if float(x.sum()) > 0 else self.b(x))


KEEPING = [swaps_its_weight, goes_on, counts, teaches_by_another_count, teaches_another]


@pytest.mark.parametrize("function", on_soft(KEEPING, [goes_on]), ids=lambda f: f.__name__)
def test_what_the_users_own_python_keeps(function: Callable[[Any, Tensor], Tensor]) -> None:
    """The run that says which parameters have gradients leaves nothing; what is put in a parameter's place is kept."""
    losses, expected, _, far = train(function, "adamw", mode="eager")
    assert losses == pytest.approx(expected, rel=1e-9)
    assert max(far) < 1e-8


def test_parts_that_some_steps_leave_out() -> None:
    """As in torch.optim they stay as they are; a part that only a later step uses is named."""
    batches = [{**batch_of(step), "x": batch_of(step)["x"].abs() * (-1) ** step} for step in range(STEPS)]

    def train(function: Callable[[Any, Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        model = Net(function).double()
        theirs = copy.deepcopy(model)
        expected = plain_losses(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), batches)
        config = interlace.Config(schedule=[], mode="eager")
        with interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of, batches[0], config) as trainer:
            assert [trainer.step(batch).item() for batch in batches] == pytest.approx(expected, rel=1e-9)
            for name, t in trainer.state_dict().items():
                torch.testing.assert_close(t, theirs.state_dict()[name], rtol=1e-9, atol=1e-9)

    train(lambda self, x: self.head(self.a(x) if float(x.sum()) > 0 else x))
    with pytest.raises(interlace.InterlaceError, match=r"parameter 'b\.bias' has a gradient at step 1, and had none on the example batch"):
        train(another_part_each_time)


def test_a_complex_parameter_is_refused_by_name() -> None:
    model = nn.Linear(8, 3, dtype=torch.complex128)
    with pytest.raises(CaptureError, match=r"parameter 'weight' is complex; .*torch.view_as_complex"):
        interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch_of(0))
