"""What a model does beside computing: attributes it stores, assertions, branches of torch.cond, draws of other generators."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import interlace
from interlace.capture import capture
from interlace.errors import CaptureError


class Net(nn.Module):
    """`function(self, y)` is what its forward does with a product."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.act, self.hooked = nn.Linear(4, 4), nn.Tanh(), False
        self.n, self.first, self.seen = 0, None, []
        self.memory = torch.zeros(3, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4))
        self.function = function
        self.double()

    def forward(self, x):
        return self.function(self, self.fc(x))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double()


def loss_fn(model, x):
    return model(x).square().mean()


def eager(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_fn(model, X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(model, steps, **config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with interlace.compile(model, optimizer, loss_fn, X, interlace.Config(schedule=[], **config)) as trainer:
        losses = [trainer.step(X).item() for _ in range(steps)]
        trainer.evaluate(X)
        return losses


def asserts(self, y):
    torch._check_tensor_all(y > -1e9)
    return y


def branches(self, y):
    return torch.cond(y.sum() > 0, lambda a: a * 2, lambda a: a.sin(), (y,))


def keeps(self, y):
    self.last, self.seen = y, [*self.seen, y]
    return y


def counts_calls(self, y):
    self.n += 1
    return y


def remembers(self, y):
    y = y + self.memory
    self.memory = y.detach()
    return y


def averages(self, y):
    y = y - self.mean
    self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
    return y


def records_by_hooks(self, y):
    """As transformers' models do, which hook their layers when they first run."""
    if not self.hooked:
        self.hooked = True
        self.act.register_forward_hook(lambda module, args, result: result * 2)
    return self.act(y)


TRAINED = [asserts, branches, keeps, counts_calls, remembers, averages, records_by_hooks]


@pytest.mark.parametrize("function", TRAINED, ids=lambda f: f.__name__)
def test_trains_as_eager_does(function):
    model = Net(function)
    expected = eager(copy.deepcopy(model), 4)
    assert compiled(model, 4) == pytest.approx(expected, rel=1e-10)
    assert not any(isinstance(v, FakeTensor) for v in (getattr(model, "last", None), model.memory, *model.seen))
    assert model.n == 0 and len(model.seen) == (5 if function is keeps else 0)  # in the evaluation, too


def weighs_by_calls(self, y):
    self.n += 1
    return y * self.n


@pytest.mark.parametrize(("function", "name"), [(weighs_by_calls, "n")])
def test_what_the_next_run_would_read_is_refused(function, name):
    with pytest.raises(CaptureError, match=rf"'{name}' of the model is changed by the model while it runs, and its next run would"):
        capture(Net(function), loss_fn, X)


def draws_python(self, y):
    return y * random.random()


def draws_numpy(self, y):
    return y * float(np.random.rand())


@pytest.mark.parametrize("function", [draws_python, draws_numpy], ids=lambda f: f.__name__)
def test_draws_of_other_generators_are_refused_by_line(function):
    random.seed(3)
    np.random.seed(3)
    before, other = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CaptureError) as e:
        capture(nn.Sequential(Net(function)), loss_fn, X)
    line = f"{__file__}:{function.__code__.co_firstlineno + 1}"
    assert str(e.value).startswith(f"{line}: random numbers of Python or NumPy are drawn in module '0'")
    assert random.getstate() == before and np.random.get_state()[1].tolist() == other


def images(seed):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 3, 6, 6, generator=g).double(), "y": torch.randint(0, 5, (4,), generator=g)}


def convnet():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)).double()
    return body.to(memory_format=torch.channels_last)


def class_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_channels_last(mode):
    theirs, ours = convnet(), convnet()
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (theirs, ours)]
    with interlace.compile(ours, opts[1], class_loss, images(0), interlace.Config(schedule=[], mode=mode)) as trainer:
        for step in range(4):
            loss = class_loss(theirs, images(step))
            loss.backward()
            opts[0].step()
            opts[0].zero_grad()
            assert trainer.step(images(step)).item() == pytest.approx(loss.item(), rel=1e-10)
        for name, t in trainer.state_dict().items():
            torch.testing.assert_close(t, theirs.state_dict()[name], rtol=1e-8, atol=1e-10)


def plain_loss(model, batch):
    return class_loss(model, {"x": batch["x"].float(), "y": batch["y"]})


def cast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain_loss(model, batch)


@pytest.mark.parametrize("loss", [plain_loss, cast_loss], ids=["ours opens the region", "its own region"])
def test_autocast_with_batch_normalization(loss):
    theirs, ours = convnet().float(), convnet().float()
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (theirs, ours)]
    settings = interlace.Config(schedule=[], param_dtype="autocast")
    with interlace.compile(ours, opts[1], loss, images(0), settings) as trainer:
        for step in range(4):
            expected = cast_loss(theirs, images(step))
            expected.backward()
            opts[0].step()
            opts[0].zero_grad()
            assert trainer.step(images(step)).item() == pytest.approx(expected.item(), rel=2e-3)


# ---- draws of other generators than the program's ----


def draws_on(self, y):
    return y + torch.randn(y.shape, generator=self.own, dtype=y.dtype)


def draws_by_a_tensor(self, y):
    return y * torch.bernoulli(y.sigmoid(), generator=torch.Generator().manual_seed(0))


def seeds(self, y):
    torch.manual_seed(0)
    return y + torch.randn_like(y)


RATHER = "draw without a generator, which gives others at each step, or pass fullgraph=False to run that in Python"
REFUSED = {
    draws_on: (
        ": random numbers are drawn from a generator of its own that goes on from step to step, and a program would draw once and keep "
        f"them; {RATHER}"
    ),
    draws_by_a_tensor: f": aten::bernoulli draws from a generator of its own by what the model computes; {RATHER}",
    seeds: (
        ": random numbers are drawn after torch.manual_seed() while the model runs, and a program draws from streams of its own; leave "
        "that out, or pass fullgraph=False to run that module in Python"
    ),
}


@pytest.mark.parametrize("function", list(REFUSED), ids=lambda f: f.__name__)
def test_draws_that_no_program_would_make_again(function):
    model = Net(function)
    model.own = torch.Generator().manual_seed(3)
    before, default = model.own.get_state(), torch.get_rng_state()
    with pytest.raises(CaptureError) as e:
        capture(model, loss_fn, X)
    place, _, rest = str(e.value).partition(": ")
    assert f": {rest}" == REFUSED[function]
    assert place.endswith(f"test_capture_effects.py:{function.__code__.co_firstlineno + 1 + (function is seeds)}")
    assert torch.equal(model.own.get_state(), before) and torch.equal(torch.get_rng_state(), default)


def draws_beside_a_module(self, y):
    return self.act(y) * random.random()


def test_the_line_that_draws_behind_a_module():
    with pytest.raises(CaptureError) as e:
        capture(Net(draws_beside_a_module), loss_fn, X)
    line = draws_beside_a_module.__code__.co_firstlineno + 1
    assert str(e.value).startswith(f"{__file__}:{line}: random numbers of Python or NumPy are drawn, which")


def test_a_weight_that_an_older_normalization_makes() -> None:
    """Before its first run the attribute shows the parameter's own memory; what reads that is refused (test_capture_errors.py)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(6, 1))).double()
    theirs = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(theirs.parameters(), lr=0.1), []
    batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(4)]
    for x in batches:
        optimizer.zero_grad()
        loss = theirs(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    settings = interlace.Config(schedule=[], cache="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, optimizer, lambda m, x: m(x).square().mean(), batches[0], settings) as trainer:
        assert [trainer.step(x).item() for x in batches] == pytest.approx(losses, rel=1e-9)
