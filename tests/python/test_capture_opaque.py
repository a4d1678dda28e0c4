"""fullgraph=False: modules that cannot be captured run in Python, and the rest of the program stays as it is."""

from __future__ import annotations

import pickle

import pytest
import torch
from capture_support import eager
from evaluator import Evaluator, same
from torch import nn

from interlace import _core
from interlace.capture import OpaqueTable, capture
from interlace.errors import CaptureError


class Branch(nn.Module):
    """Branches on data; changes a buffer; returns more than one tensor."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, *, scale=1.0, extra=None):
        self.count += 1
        y = self.a(x) if x.sum() > 0 else self.b(x)
        y = y * self.count.clone() * scale
        return {"y": y, "rank": y.argmax(), "same": x if extra is None else extra, "note": "text"}


class Masked(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5) * (1.0 if float(x.detach().max()) > -100 else 0.0)


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.middle = middle
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        y = self.middle(x)
        if isinstance(y, dict):
            z = self.middle(y["y"], scale=2.0, extra=x)
            y = z["y"] + y["same"] + z["same"]
        return self.last(y)


def loss_fn(model, b):
    return model(b["x"]).square().mean()


def batch(seed):
    return {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))}


class OpaqueEvaluator(Evaluator):
    """Evaluates call.python through the table, as the runtime does."""

    def __init__(self, c, model):
        super().__init__(c.text, c.tensors)
        self.table = OpaqueTable(model, pickle.loads(pickle.dumps(c.opaque_calls)))
        self.parts = []

    def python(self, module, part, tensors):
        self.parts.append((module, part))
        return self.table.run_opaque(module, part, tensors)


@pytest.mark.parametrize("seed", range(4))
def test_both_branches_equal_eager(seed):
    torch.manual_seed(1)
    model = Net(Branch())
    c = capture(model, loss_fn, batch(0), fullgraph=False)
    program = _core.Program.parse(c.text, "captured")
    program.verify()
    assert program.print() == c.text
    assert c.opaque == ["middle"]
    assert model.middle.count == 0  # the real run that learnt the shapes left no trace
    loss, grads, buffers = eager(model, loss_fn, batch(seed))
    run = OpaqueEvaluator(c, model)
    got = run.run(c.input_spec.flatten(batch(seed)))
    assert run.parts == [
        ("middle", "forward"), ("middle@1", "forward"), ("middle@1", "backward"), ("middle", "backward"),
    ]  # fmt: skip
    assert same(got["outputs"]["loss"], loss)
    for name, g in got["grads"].items():  # the branch not taken has zeros, where eager has none
        want = grads.get(name, torch.zeros_like(g))
        torch.testing.assert_close(g, want, rtol=1e-6, atol=1e-8)  # x's gradients are added up in another order
    assert set(grads) <= set(got["grads"]) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert same(got["assigned"]["middle.count"], buffers["middle.count"]) and buffers["middle.count"] == 2
    assert model.middle.count == 0


def test_branches_do_differ():
    """The seeds above take both branches: otherwise the test above would show little."""
    taken = {bool(torch.tanh(Net(Branch()).first(batch(seed)["x"])).sum() > 0) for seed in range(4)}
    assert taken == {True, False}


def test_random_numbers_are_the_same_in_backward():
    model = Net(Masked())
    c = capture(model, loss_fn, batch(0), fullgraph=False)
    line = next(x for x in c.text.splitlines() if 'part="forward"' in x)
    assert "rng=0" in line and ": i64[] = call.python(" in line
    run = OpaqueEvaluator(c, model)
    torch.manual_seed(4)
    got = run.run(c.input_spec.flatten(batch(0)))
    torch.manual_seed(4)
    seed = torch.randint(1 << 62, ())
    x = batch(0)["x"]
    torch.manual_seed(int(seed))
    model(x).square().mean().backward()
    assert all(same(got["grads"][n], p.grad) for n, p in model.named_parameters())


def test_whole_model():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) if self.fc.weight.mean() > 5 else -self.fc(x)

    model = Root()
    c = capture(model, loss_fn, batch(0), fullgraph=False)
    assert c.opaque == [""]
    got = OpaqueEvaluator(c, model).run(c.input_spec.flatten(batch(1)))
    loss, grads, _ = eager(model, loss_fn, batch(1))
    assert same(got["outputs"]["loss"], loss)
    assert all(same(got["grads"][n], g) for n, g in grads.items())


def test_everything_else_is_captured_as_before():
    class Plain(nn.Module):
        def forward(self, x):
            return x

    plain = capture(Net(Plain()), loss_fn, batch(0), fullgraph=False)
    assert plain.opaque == [] and plain.text == capture(Net(Plain()), loss_fn, batch(0)).text


@pytest.mark.parametrize("kind", ["after", "parts", "criterion"])
def test_loss_functions(kind):
    def after(model, b):
        loss = loss_fn(model, b)
        return loss if loss > 0 else -loss

    def parts(model, b):
        return after(model, b) + model.last.weight.square().sum()

    class Criterion(nn.Module):
        def forward(self, y):
            return y[y > 0].square().mean()

    criterion = Criterion()
    chosen = {"after": after, "parts": parts, "criterion": lambda m, b: criterion(m(b["x"]))}[kind]
    model = Net(nn.ReLU())
    c = capture(model, chosen, batch(0), fullgraph=False)
    assert c.opaque == ["(loss function)" if kind == "parts" else "(loss after the model)"]
    run = OpaqueEvaluator(c, model)
    run.table = OpaqueTable(model, c.opaque_calls, chosen)
    got = run.run(c.input_spec.flatten(batch(1)))
    loss, grads, _ = eager(model, chosen, batch(1))
    assert same(got["outputs"]["loss"], loss)
    assert all(same(got["grads"][n], g) for n, g in grads.items())


def test_errors():
    with torch.device("meta"):
        model = Net(Branch())
    with pytest.raises(CaptureError) as e:
        capture(model, loss_fn, batch(0), fullgraph=False)
    assert str(e.value) == (
        "module 'middle' cannot be captured, and what it gives cannot be learnt from a model on meta; "
        "build the model in "
        "memory, or change the module"
    )



class Picks(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0]


class Reads(nn.Module):
    def forward(self, x):
        return x[: 1 + int((x[:, 0] > 0).sum())]


class Sums(Net):
    def forward(self, x):
        return self.last(self.middle(self.first(x)).sum(0))


@pytest.mark.parametrize("middle", [Picks, Reads])
@pytest.mark.parametrize("net, around", [(Sums, ""), (Net, "(loss function)")])
def test_results_whose_sizes_depend_on_the_data(net, around, middle):
    """What has them in it is opaque, where its own have one size."""
    model = net(middle())
    c = capture(model, loss_fn, batch(3), fullgraph=False)
    assert c.opaque == [around]
    run = OpaqueEvaluator(c, model)
    run.table = OpaqueTable(model, c.opaque_calls, loss_fn)
    for seed in range(6):
        got = run.run(c.input_spec.flatten(batch(seed)))
        loss, grads, _ = eager(model, loss_fn, batch(seed))
        assert same(got["outputs"]["loss"], loss)
        assert all(same(got["grads"][n], g) for n, g in grads.items())


def test_sizes_that_look_fixed_on_the_example_batch():
    model = Sums(Picks())
    everything = {"x": torch.full((5, 4), 100.0)}
    c = capture(model, loss_fn, everything, fullgraph=False)
    with pytest.raises(AssertionError, match=r"opaque module 'middle' gave .* call trainer\.step\(batch, python=True\) where they do"):
        OpaqueEvaluator(c, model).run(c.input_spec.flatten(batch(3)))
