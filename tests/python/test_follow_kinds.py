"""Every kind of place that a model or loss function may read and a script may change between two steps: followed, or refused by name."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import fractions
import functools
import itertools
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import followed_values
import numpy as np
import parity
import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.errors import InterlaceError

Tensor = torch.Tensor
STEPS = 4
Made = tuple[nn.Module, Any, Callable[[int, Any], Any]]  # a model, a loss function, a change before step i, given the optimizer
FOLLOWED: dict[str, Callable[[], Made]] = {}
REFUSED: dict[str, tuple[Callable[[], Made], str]] = {}


def followed(f: Callable[[], Made]) -> Callable[[], Made]:
    FOLLOWED[f.__name__] = f
    return f


def refused(text: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def note(f: Callable[[], Made]) -> Callable[[], Made]:
        REFUSED[f.__name__] = f, text
        return f

    return note


class Net(nn.Module):
    mode, table, factor = "plain", {"k": 1.0}, 1.0

    def __init__(self, more: Callable[[Any, Tensor], Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.first, self.last, self.more = nn.Linear(4, 6), nn.Linear(6, 3), more
        for name, value in attributes.items():
            setattr(self, name, value)

    @property
    def heat(self) -> float:
        return self.factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x))) * self.table["k"] * self.heat * (2 if self.mode == "double" else 1)
        return y if self.more is None else y * self.more(self, x)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def scaled(value: Callable[[], Any]) -> Any:
    return lambda m, b: square(m, b) * value()


def batch_of(i: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).double()


# ---- classes, modules, functions ----


class Options:
    scale, table, switch = 1.0, [1.0], "off"


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    inner: Any = None


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def new_class() -> Any:
    return type("Fresh", (Net,), {})


@followed
def attribute_of_a_class() -> Made:
    def change(i: int, optimizer: Any) -> None:
        Options.scale = 1.0 + i
        Options.table[0] = 2.0 + i

    return Net(), scaled(lambda: Options.scale * Options.table[0]), change


@followed
def text_of_a_class() -> Made:
    return Net(), scaled(lambda: 2 if Options.switch == "on" else 1), lambda i, o: setattr(Options, "switch", "on" if i % 2 else "off")


@followed
def attributes_of_the_models_class() -> Made:
    cls = new_class()
    cls.mode, cls.table = "plain", {"k": 1.0}
    return cls(), square, lambda i, o: (setattr(cls, "mode", "double" if i % 2 else "plain"), cls.table.update(k=1.0 + i))


@followed
def property_that_is_replaced() -> Made:
    cls = new_class()
    return cls(), square, lambda i, o: setattr(cls, "heat", property(lambda self: 1.0 + i))


@followed
def method_that_is_replaced() -> Made:
    cls = new_class()
    return cls(), square, lambda i, o: setattr(cls, "forward", lambda self, x: Net.forward(self, x) * (1 + i))


@followed
def class_method() -> Made:
    return Net(), scaled(followed_values.Settings.get), lambda i, o: setattr(followed_values.Settings, "value", 1.0 + i)


@followed
def another_modules_global() -> Made:
    return Net(), lambda m, b: followed_values.scaled(square(m, b)), lambda i, o: setattr(followed_values, "SCALE", 1.0 + i)


@followed
def imported_inside() -> Made:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        from followed_values import SCALE

        return square(model, batch) * SCALE

    return Net(), loss_fn, lambda i, o: setattr(followed_values, "SCALE", 1.0 + i)


@followed
def object_of_another_module() -> Made:
    one = followed_values.single
    return Net(), scaled(lambda: followed_values.single.get()), lambda i, o: (setattr(one, "value", 1.0 + i), one.deep.update(x=[2.0 + i]))


@followed
def function_of_torch() -> Made:
    gelu = F.gelu
    return Net(), lambda m, b: F.gelu(m(b)).square().mean(), lambda i, o: setattr(F, "gelu", gelu if i != 2 else lambda x: 2 * gelu(x))


@followed
def attribute_of_a_function() -> Made:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return square(model, batch) * loss_fn.scale  # type: ignore[attr-defined]

    loss_fn.scale = 1.0  # type: ignore[attr-defined]
    return Net(), loss_fn, lambda i, o: setattr(loss_fn, "scale", 1.0 + i)


@followed
def defaults_and_code() -> Made:
    def loss_fn(model: nn.Module, batch: Tensor, scale: float = 1.0) -> Tensor:
        return square(model, batch) * scale

    def other(model: nn.Module, batch: Tensor, scale: float = 1.0) -> Tensor:
        return square(model, batch) * scale * 3

    def change(i: int, optimizer: Any) -> None:
        loss_fn.__defaults__ = (1.0 + i,)
        loss_fn.__code__ = (other if i == 2 else loss_fn).__code__

    return Net(), loss_fn, change


@followed
def globals_by_name() -> Made:
    globals()["BY_NAME"] = 1.0
    return Net(), scaled(lambda: globals()["BY_NAME"]), lambda i, o: globals().update(BY_NAME=1.0 + i)


@followed
def forward_of_a_model_or_module() -> Made:
    model = Net()

    def change(i: int, optimizer: Any) -> None:
        model.forward = types.MethodType(lambda self, x: Net.forward(self, x) * (1 + i), model)  # type: ignore[method-assign]
        model.last.forward = lambda x: F.linear(x, model.last.weight) * (2 + i)  # type: ignore[method-assign]

    return model, square, change


@followed
def names_that_come_later() -> Made:
    model = Net(lambda self, x: (2 if getattr(self, "half_way", False) else 1) * (3 if hasattr(self, "late") else 1))
    loss_fn = scaled(lambda: 2 if getattr(model, "of_loss", None) else 1)
    return model, loss_fn, lambda i, o: setattr(model, ("half_way", "late", "of_loss")[i % 3], True)


# ---- objects ----


@followed
def config_that_only_the_loss_reads() -> Made:
    model = Net(config=Config(inner=Config()))
    loss_fn = lambda m, b: square(m, b) * m.config.scale * m.config.inner.scale  # noqa: E731
    return model, loss_fn, lambda i, o: (setattr(model.config, "scale", 1.0 + i), setattr(model.config.inner, "scale", 2.0 + i))


@followed
def criterion_that_is_a_module() -> Made:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3).double())
    labels = torch.tensor([0, 1, 2, 1, 0])

    def change(i: int, optimizer: Any) -> None:
        criterion.label_smoothing = 0.1 * i
        criterion.weight.mul_(torch.tensor([1.1, 1.0, 0.9]).double())  # type: ignore[union-attr]

    return Net(), lambda m, b: criterion(m(b), labels), change


@followed
def loss_that_is_a_module() -> Made:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = 1.0
            self.register_buffer("factor", torch.ones((), dtype=torch.float64))

        def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
            return square(model, batch) * self.weight * self.factor

    loss_fn = Loss()
    return Net(), loss_fn, lambda i, o: (setattr(loss_fn, "weight", 1.0 + i), loss_fn.factor.mul_(1.1))


@followed
def slots() -> Made:
    one = followed_values.Slots()
    one.value = 1.0
    return Net(), scaled(lambda: one.value), lambda i, o: setattr(one, "value", 1.0 + i)


@followed
def weak_reference() -> Made:
    one = Config()
    there = weakref.ref(one)
    return Net(kept=one), scaled(lambda: there().scale), lambda i, o: setattr(one, "scale", 1.0 + i)  # type: ignore[union-attr]


@followed
def values_that_are_kept_by_one_place_only() -> Made:
    """The address of an object that is gone is another's: which object it is counts."""
    kept: dict[str, Any] = {"half": fractions.Fraction(1, 2), "number": np.float32(1.0), "tensor": [torch.ones(3).double()]}

    def change(i: int, optimizer: Any) -> None:
        kept["half"], kept["number"] = fractions.Fraction(i + 1, 2), np.float32(1 + i)
        kept["tensor"][0] = torch.full((3,), 1.0 + i, dtype=torch.float64)

    loss_fn = lambda m, b: (m(b) * kept["tensor"][0]).square().mean() * float(kept["half"]) * float(kept["number"])  # noqa: E731
    return Net(), loss_fn, change


@followed
def flag_of_an_enumeration() -> Made:
    kept = [Color.RED]
    return Net(), scaled(lambda: 2 if kept[0] is Color.BLUE else 1), lambda i, o: kept.__setitem__(0, (Color.RED, Color.BLUE)[i % 2])


@followed
def result_of_a_cache() -> Made:
    kept = {"scale": 1.0}
    cached = functools.lru_cache(lambda: kept["scale"])
    return Net(), scaled(cached), lambda i, o: (kept.update(scale=1.0 + i), cached.cache_clear())


@followed
def thread_local_and_context() -> Made:
    local, variable = threading.local(), contextvars.ContextVar("variable", default=1.0)
    local.scale = 1.0
    return Net(), scaled(lambda: local.scale * variable.get()), lambda i, o: (setattr(local, "scale", 1.0 + i), variable.set(2.0 + i))


@followed
def environment() -> Made:
    os.environ["TEST_SCALE"], os.environ["TEST_MODE"] = "1", "a"
    loss_fn = lambda m, b: square(m, b) * float(os.environ["TEST_SCALE"]) * (2 if os.getenv("TEST_MODE") == "b" else 1)  # noqa: E731
    return Net(), loss_fn, lambda i, o: os.environ.update(TEST_SCALE=str(1 + i), TEST_MODE="ab"[i % 2])


@followed
def arguments() -> Made:
    """A list that an installed module shows."""
    sys.argv.append("1")
    return Net(), lambda m, b: square(m, b) * float(sys.argv[-1]), lambda i, o: sys.argv.__setitem__(-1, str(1 + i))


# ---- what is written in place ----


@followed
def arrays() -> Made:
    ones, other, raw, number = np.ones(3), array.array("d", [1.0]), bytearray(b"\x01"), ctypes.c_double(1.0)

    def change(i: int, optimizer: Any) -> None:
        ones[1:] *= 1.5
        other[0], raw[0], number.value = 1.0 + i, 1 + i, 2.0 + i

    return Net(), lambda m, b: (m(b) * torch.tensor(ones)).square().mean() * other[0] * raw[0] * number.value, change


@followed
def large_array() -> Made:
    large = np.ones(100_000)
    return Net(), scaled(lambda: float(large[50_000])), lambda i, o: large.__setitem__(50_000, 1.0 + i)


@followed
def queue_and_set() -> Made:
    queue: Any = collections.deque([1.0, 1.0], maxlen=2)
    kept: set[str] = set()
    change = lambda i, o: (queue.append(1.0 + i), kept.add("on") if i == 2 else None)  # noqa: E731
    return Net(), scaled(lambda: queue[0] * (2 if "on" in kept else 1)), change


@followed
def tensors_behind_pytorchs_back() -> Made:
    one, two, three = (torch.ones(3).double() for _ in range(3))
    base = torch.ones(6).double()
    view = base[:3]

    def change(i: int, optimizer: Any) -> None:
        one.data.mul_(1.2)
        two.numpy()[...] *= 1.1
        three.data = torch.full((3,), 1.0 + i, dtype=torch.float64)
        base.mul_(1.3)

    return Net(), lambda m, b: (m(b) * one * two * three * view).square().mean(), change


@followed
def memory_of_parameters_and_buffers() -> Made:
    model = Net(lambda self, x: self.shift)
    model.register_buffer("shift", torch.ones(3))

    def change(i: int, optimizer: Any) -> None:
        model.shift.data = torch.full_like(model.shift, 1.0 + i)
        if i == 2:
            model.first.weight.data = torch.ones_like(model.first.weight)

    return model, square, change


# ---- hooks ----


@followed
def hook_of_all_modules() -> Made:
    def change(i: int, optimizer: Any) -> None:
        if i == 2:
            hook = nn.modules.module.register_module_forward_hook(lambda module, args, y: y * 2 if isinstance(module, nn.Linear) else None)
            removed.append(hook.remove)

    return Net(), square, change


@followed
def hooks_of_parameters() -> Made:
    model, mask = Net(), torch.tensor([1.0, 0.0, 1.0]).double()
    model.last.weight.register_hook(lambda g: g * mask[:, None])
    return model, square, lambda i, o: model.first.weight.register_hook(lambda g: -0.3 * g) if i == 1 else None


@followed
def another_activation() -> Made:
    model = Net(lambda net, x: net.act(x).sum(), act=nn.ReLU())
    return model, square, lambda i, o: setattr(model, "act", nn.GELU() if i == 1 else nn.Softplus() if i == 3 else model.act)


@followed
def what_a_parameters_hook_reads() -> Made:
    model, scale = Net(), {"by": 1.0}
    model.last.weight.register_hook(lambda g: g * scale["by"])
    return model, square, lambda i, o: scale.update(by=1.0 + i)


@refused("parameter 'first.weight' has a hook that runs when its gradient is there")
def hook_when_a_gradient_is_there() -> Made:
    model = Net()
    return model, square, lambda i, o: model.first.weight.register_post_accumulate_grad_hook(lambda p: None) if i == 2 else None


@refused(r"test_follow_kinds.py:\d+: this hook before the optimizer's step reads gradients")
def hook_before_the_optimizers_step() -> Made:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)

    return Net(), square, lambda i, o: o.register_step_pre_hook(hook) if i == 2 else None


# ---- what is another value at each run ----

VARIES = r"test_follow_kinds.py:\d+: what is computed here is something else at each run"


@refused(VARIES)
def generator_of_pythons() -> Made:
    drawn = random.Random(0)
    return Net(), scaled(lambda: 1 + drawn.random()), lambda i, o: None


@refused(VARIES)
def generator_of_numpys() -> Made:
    drawn = np.random.default_rng(0)
    return Net(), scaled(lambda: 1 + drawn.random()), lambda i, o: None


@refused(VARIES)
def clock() -> Made:
    return Net(), scaled(lambda: 1 + time.perf_counter()), lambda i, o: None


@refused(VARIES)
def iterator() -> Made:
    turns = itertools.count(1)
    return Net(), scaled(lambda: next(turns)), lambda i, o: None


@followed
def clock_that_only_measures() -> Made:
    def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        begin = time.perf_counter()
        loss = square(model, batch)
        assert time.perf_counter() >= begin
        return loss, {}

    return Net(), loss_fn, lambda i, o: None


removed: list[Callable[[], None]] = []


def take_off() -> None:
    while removed:
        removed.pop()()


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    places = (Options, followed_values, followed_values.Settings, Net)
    values = {x: {k: v for k, v in vars(x).items() if not k.startswith("__")} for x in places}
    gelu, number = F.gelu, followed_values.single
    Options.table, number.value, number.deep = [1.0], 1.0, {"x": [1.0]}
    yield
    F.gelu = gelu
    take_off()
    for x, before in values.items():
        for name, value in before.items():
            setattr(x, name, value)


def eager(make: Callable[[], Made], size: int) -> list[float]:
    torch.manual_seed(0)
    model, loss_fn, change = make()
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i in range(STEPS):
        change(i, optimizer)
        total = 0.0
        for rank in range(size):
            loss = loss_fn(model, batch_of(10 * i + rank))
            loss = (loss[0] if isinstance(loss, tuple) else loss) / size
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def ours(make: Callable[[], Made], **config: Any) -> list[float]:
    rank = parity.rank_and_size()[0]
    torch.manual_seed(0)
    model, loss_fn, change = make()
    optimizer = torch.optim.AdamW(model.double().parameters(), lr=1e-2)
    settings = interlace.Config(schedule=[], timeout_s=60, **{"cache": "off", **config})
    with interlace.compile(model, optimizer, loss_fn, batch_of(rank), settings) as trainer:
        losses = []
        for i in range(STEPS):
            change(i, optimizer)
            losses.append(parity.mean_over_ranks(trainer.step(batch_of(10 * i + rank))))
    return losses


def compare(kind: str, **config: Any) -> None:
    expected = eager(FOLLOWED[kind], parity.rank_and_size()[1])
    take_off()
    losses = ours(FOLLOWED[kind], **config)
    take_off()
    assert losses == pytest.approx(expected, rel=1e-9)
    assert "clock" in kind or len(set(expected)) == STEPS


@pytest.mark.parametrize("kind", FOLLOWED)
def test_followed(kind: str, tmp_path: Path) -> None:
    """Without a cache of captures and with one, which must not take what was captured before for this."""
    for cache in ("off", str(tmp_path)):
        compare(kind, cache=cache)


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
@pytest.mark.parametrize("kind", ["hooks_of_parameters", "criterion_that_is_a_module", "attributes_of_the_models_class", "environment"])
def test_followed_on_two_ranks(kind: str, strategy: str) -> None:
    ranks.run(compare, 2, kind, strategy=strategy)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    make, text = REFUSED[kind]
    with pytest.raises(InterlaceError, match=text):
        ours(make)
