"""What models do besides calling layers: mutation, views, frozen and tied parameters, plain tensors, checkpointing,
symbols."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.utils.checkpoint
from capture_support import check, eager
from evaluator import Evaluator, same
from torch import nn

import interlace
from interlace.capture import capture
from interlace.models import build


def batch(*shape, seed=5):
    return {"x": torch.randn(*shape, generator=torch.Generator().manual_seed(seed))}


class Net(nn.Module):
    """A linear layer, then whatever function a test gives."""

    def __init__(self, function, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, width)
        self.function = function

    def forward(self, x):
        return self.function(self.fc(x))


def total(model, b):
    return model(b["x"]).sum()


def square(model, b):
    return model(b["x"]).square().mean()


def in_place_on_views(y):
    y = y * 2
    y[0].add_(1.5)
    y[:, 1:3].mul_(y[:, 3:5].detach().clone())
    y[:, 2] = 0.25
    z = y.view(-1)
    z[3:5] += 1
    return y.exp() + z.view_as(y)


def in_place_whole(y):
    z = torch.zeros_like(y)
    v = z[1]
    z.add_(y)
    z.mul_(3)
    z.clamp_(min=-1)
    return z * v.sum()


def copies(y):
    a = torch.empty(y.shape[1], y.shape[0]).t()
    a.copy_(y)
    b = torch.empty_like(y, dtype=torch.float64)
    b.copy_(y)
    c = torch.empty(2, *y.shape)
    c[0].copy_(y[0])
    c[1] = 2 * y
    return a + b.float() + c.sum(0)


def transposed_in_place(y):
    y = y.clone()
    y.t_()
    y.unsqueeze_(0)
    return y.squeeze_(0).softmax(0)


def wider_in_place(y):
    z = y.half().clone()
    z += y  # float16 += float32 keeps float16
    z.fill_diagonal_(0.5)
    return z.float()


def fills(y):
    m = torch.zeros(y.shape[0], y.shape[1], dtype=torch.bool)
    m[1:, ::2] = True
    m.logical_not_()
    y = y.masked_fill(m, 0.0)
    y = y.index_put((torch.tensor([0, 1]),), torch.tensor(2.0))
    return y + torch.full_like(y, 3).fill_(4).zero_().add_(1)


def several_results(y):
    a, b, c = y.chunk(3, dim=1)
    values, _ = torch.stack([a, b, c]).max(dim=0)
    q, r = torch.linalg.qr(y.t() @ y + torch.eye(y.shape[1]))
    return values.sum() + q.abs().sum() + torch.unbind(r)[0].sum()


def foreach(y):
    z = [y[0].clone(), y[1].clone()]
    torch._foreach_mul_(z, 2.0)
    torch._foreach_add_(z, [y[2], y[3]])
    return z[0] + z[1]


def given_places(y):
    tile = torch.empty(8, 64)[:4, :6]
    with torch.no_grad():
        torch.mm(y[:4], torch.ones(6, 6), out=tile)
        torch.add(y[:4], 1, out=tile[:, :6])
    return y[:4] * tile


def complex_views(y):
    return torch.view_as_real(torch.fft.rfft(y)).square()


def lifted_number(y):
    return y * torch.tensor([1.0, -2.0, 0.5, 3.0, 4.0, 5.0]) + torch.tensor(float("-inf")).exp()


@pytest.mark.parametrize(
    "function",
    [in_place_on_views, in_place_whole, copies, transposed_in_place, wider_in_place, fills, several_results, foreach,
     given_places, complex_views, lifted_number],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_functions(function):
    check(Net(function), square, batch(5, 4))


def test_text_in_single_assignment():
    """The example in recorder.py: a write makes a new root, and views of it are taken again."""

    def function(x):
        y = (x * 2).detach()
        v = y[0]
        y.add_(1)
        return x + v

    lines = [line.partition(" {")[0].strip() for line in capture(Net(function), total, batch(5, 4)).text.splitlines()]
    at = next(i for i, line in enumerate(lines) if "aten.mul.Tensor" in line)
    assert lines[at : at + 5] == [
        "%5: f32[5,6] = aten.mul.Tensor(%4, 2)",
        "%6: f32[6] in %5+0 = aten.select.int(%5, 0, 0)",
        "%7: f32[5,6] = aten.add.Tensor(%5, 1)",
        "%8: f32[6] in %7+0 = view(%7)",
        "%9: f32[5,6] = aten.add.Tensor(%4, %8)",
    ]


class Parts(nn.Module):
    """Frozen, unused and tied parameters, buffers that change, plain tensors in attributes and lists."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.tables = [torch.arange(4.0), torch.ones(4)]

    def forward(self, ids):
        x = self.embed(ids)
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        x = self.frozen(x) * self.scale + self.tables[0]
        return self.head(x + self.mean * self.tables[1])


IDS = {"ids": torch.tensor([[1, 2, 3], [4, 5, 1]])}


def parts_loss(model, b):
    return nn.functional.cross_entropy(model(b["ids"]).flatten(0, 1), b["ids"].flatten())


def test_parameters_and_buffers():
    model = Parts()
    c = check(model, parts_loss, IDS)
    assert c.aliases == {"head.weight": "embed.weight"}
    decl = {line.split('"')[1]: line for line in c.text.splitlines() if line.startswith(("param ", "buffer "))}
    assert decl["embed.weight"].endswith('trainable group 0 alias "head.weight"')
    assert decl["frozen.weight"].endswith(" frozen")
    assert decl["unused.weight"].endswith(" trainable group 0")
    assert decl["calls"].endswith(" persistent")
    assert decl["mean"].endswith(" plain")
    assert decl["scale"].endswith(" plain") and decl["tables.0"].endswith(" plain")
    value = c.params["unused.weight"]
    assert f"grad(%{value}," not in c.text  # the optimizer skips it, as PyTorch's does
    assert c.tensors["tables.1"] is model.tables[1]
    assert list(c.tensors) == [*c.params, *c.buffers]


def test_model_is_left_as_it_was():
    model = Parts()
    before = {k: id(v) for k, v in vars(model).items()}
    tensors = [(n, id(t), t.clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]]
    capture(model, parts_loss, IDS)
    assert {k: id(v) for k, v in vars(model).items()} == before
    for (n, i, old), (m, t) in zip(tensors, [*model.named_parameters(), *model.named_buffers()], strict=True):
        assert n == m and i == id(t) and torch.equal(old, t)


def test_tensors_of_the_loss_function():
    """A tensor that the loss function holds may change between steps, so it becomes a plain buffer, not numbers."""
    weights = torch.tensor([1.0, 2.0])
    c = check(Net(lambda y: y), lambda m, b: (m(b["x"]).sum(0)[:2] * weights).sum(), batch(3, 4))
    assert c.tensors["'weights' of the loss function"] is weights
    assert not c.consts


def test_named_outputs():
    def loss_fn(model, b):
        y = model(b["x"])
        return {"loss": y.square().mean(), "largest": y.max(), "logits": y}

    c = capture(Net(lambda y: y), loss_fn, batch(3, 4))
    assert c.outputs == ["loss", "largest", "logits"]
    got = Evaluator(c.text, c.tensors).run(c.input_spec.flatten(batch(3, 4)))["outputs"]
    want = loss_fn(Net(lambda y: y), batch(3, 4))
    assert all(same(got[n], want[n].detach()) for n in c.outputs)
    pair = capture(Net(lambda y: y), lambda m, b: (m(b["x"]).sum(), m(b["x"])), batch(3, 4))
    assert pair.outputs == ["loss", "1"]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 + 0 * x


def test_custom_autograd_function():
    c = check(Net(Twice.apply), square, batch(3, 4))
    lines = c.text.splitlines()
    sources = {line.split()[1]: line.split('"')[1] for line in lines if line.startswith("source ")}
    backward = [line for line in lines if "{bwd" in line and "aten.mul.Tensor(" in line and ", 2)" in line]
    assert any("test_capture_features.py" in sources[line.rpartition(" s")[2].rstrip("}")] for line in backward)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__)
def test_recurrent_layers(layer):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = layer(4, 6, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    capture(Recurrent(), square, batch(2, 3, 4))
    assert torch._C._get_mkldnn_enabled(), "tracing leaves the user's setting"
    torch._C._set_mkldnn_enabled(False)  # for eager: its fused kernel adds in another order
    try:
        check(Recurrent(), square, batch(2, 3, 4))
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__)
def test_gradients_over_the_steps_of_a_sequence_are_one_product(layer):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = layer(4, 24, num_layers=2, batch_first=True).double()

        def forward(self, x):
            return self.layer(x)[0]

    model, data = Recurrent(), {"x": torch.randn(2, 9, 4, dtype=torch.float64)}
    text, rows = capture(model, square, data).text, model.layer.weight_hh_l0.shape[0]
    assert text.count(f": f64[{rows},24] = aten.mm(") == 3, text  # two of weight_hh, and weight_ih of the second layer
    assert "as_strided_scatter" not in text
    plain = copy.deepcopy(model)
    theirs, ours = torch.optim.AdamW(plain.parameters(), lr=0.01), torch.optim.AdamW(model.parameters(), lr=0.01)
    with interlace.compile(model, ours, square, data) as trainer:
        for _ in range(4):
            loss = square(plain, data)
            loss.backward()
            theirs.step()
            theirs.zero_grad()
            assert trainer.step(data).item() == pytest.approx(loss.item(), rel=1e-10)


def test_gradient_penalty():
    """torch.autograd.grad inside the loss: backward ops in forward, then backward of those."""

    def loss_fn(model, b):
        x = b["x"].clone().requires_grad_()
        y = model(x).square().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y + g.square().sum()

    check(Net(torch.tanh), loss_fn, batch(3, 4))


def test_autocast():
    def loss_fn(model, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(b["x"]).float().square().mean()

    assert "aten.addmm(" in check(Net(torch.relu), loss_fn, batch(3, 4)).text


@pytest.mark.parametrize("reentrant", [True, False])
def test_own_checkpointing_is_taken_out(reentrant):
    """Recording checkpointed code would draw its dropout masks twice: the gradients would be wrong, silently."""
    call = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)

    def dropped(y):
        return nn.functional.dropout(torch.tanh(y), 0.5)

    saved = torch.utils.checkpoint.CheckpointFunction.apply
    plain = capture(Net(dropped), square, batch(8, 4))
    stripped = capture(Net(lambda y: call(dropped, y)), square, batch(8, 4))
    assert stripped.text.count("rng=") == 1
    assert stripped.num_ops == plain.num_ops
    assert torch.utils.checkpoint.CheckpointFunction.apply == saved
    check(Net(dropped), square, batch(8, 4), seed=11)


def test_hugging_face_checkpointing_is_taken_out():
    built = build("gpt2-tiny", micro_batch=2, seq=16)
    plain = capture(built.model, built.loss_fn, built.example_batch)
    built.model.gradient_checkpointing_enable()
    assert capture(built.model, built.loss_fn, built.example_batch).num_ops == plain.num_ops
    assert built.model.is_gradient_checkpointing


def test_modules_and_sources_of_backward_ops():
    c = capture(build("llama-tiny", seq=16).model, None, build("llama-tiny", seq=16).example_batch)
    modules = {line.split()[1]: line.split('"')[1] for line in c.text.splitlines() if line.startswith("module ")}
    backward = [line for line in c.text.splitlines() if "{bwd" in line and " = aten." in line]
    tagged = [line for line in backward if " m" in line.rpartition("{")[2]]
    assert len(tagged) >= len(backward) - 1  # all but the gradient of the loss itself
    attention = next(line for line in backward if "_flash_attention_for_cpu_backward" in line)
    assert modules[attention.rpartition(" m")[2].split()[0]] == "model.layers.3.self_attn"


def test_random_ops_are_numbered():
    c = capture(Net(lambda y: y + torch.rand(5, 6) + torch.randn_like(y)), total, batch(5, 4))
    drawn = [line for line in c.text.splitlines() if "rng=" in line]
    assert [line.rpartition("rng=")[2] for line in drawn] == ["0}", "1}"]
    check(Net(lambda y: y + torch.rand(5, 6) + torch.randn_like(y)), square, batch(5, 4), seed=2, rng_mode="compat")


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("symbolic", [True, {"b"}, {"s"}])
def test_symbolic_sizes(name, symbolic):
    """One text for many sizes: bound to others than it was captured with, it still gives eager's bits."""
    built = build(name, micro_batch=2, seq=16)
    model = built.model.eval()  # no dropout
    c = capture(model, built.loss_fn, built.example_batch, symbolic=symbolic)
    names = ["b", "s"] if symbolic is True else sorted(symbolic)
    assert [line.split()[1] for line in c.text.splitlines() if line.startswith("symbol ")] == names
    for rows, seq in ((2, 16), (3, 24)):
        if ("b" not in names and rows != 2) or ("s" not in names and seq != 16):
            rows, seq = (rows if "b" in names else 2), (seq if "s" in names else 16)
        other = build(name, micro_batch=rows, seq=seq, seed=rows).example_batch
        loss, grads, _ = eager(model, built.loss_fn, other)
        got = Evaluator(c.text, c.tensors, {"b": rows, "s": seq}).run(c.input_spec.flatten(other))
        assert same(got["outputs"]["loss"], loss)
        assert all(same(got["grads"][n], g) for n, g in grads.items())


def test_symbolic_text_parses_and_binds():
    from interlace import _core

    built = build("llama-tiny", micro_batch=2, seq=16)
    c = capture(built.model, built.loss_fn, built.example_batch, symbolic=True)
    program = _core.Program.parse(c.text, "captured")
    program.verify()
    bound = program.bind({"b": 2, "s": 16})
    bound.verify()
    assert "symbol " not in bound.print()
    assert 'i64[2,16] "input_ids"' in bound.print()


def test_micro_batches():
    model = Net(torch.relu)
    c = capture(model, square, batch(6, 4), micro_batches=3)
    assert c.input_spec.tensors[0].shape == (2, 4)
    assert [tuple(p["x"].shape) for p in c.input_spec.split(batch(6, 4), 3)] == [(2, 4)] * 3


def test_same_tensor_twice_in_the_batch():
    x = torch.randn(3, 4)
    c = capture(Net(torch.relu), lambda m, b: (m(b[0]) - m(b[1]["y"])).square().sum() + m(b[0]).sum(), (x, {"y": x}))
    assert [t.name for t in c.input_spec.tensors] == ["0", "1.y"]


def test_deep_copies_are_independent():
    model = Parts()
    other = copy.deepcopy(model)
    assert capture(model, parts_loss, IDS).text == capture(other, parts_loss, IDS).text
