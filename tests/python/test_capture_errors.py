"""What cannot be captured is said with the name or the source line, and with what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import interlace
from interlace.capture import InputSpec, capture
from interlace.errors import CaptureError, InterlaceError
from interlace.models import build, resolve

X = {"x": torch.randn(3, 4)}


class Net(nn.Module):
    def __init__(self, function=lambda y: y):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.fc(x))


FORWARD_LINE = Net.forward.__code__.co_firstlineno + 1


def mean(model, b):
    return model(b["x"]).mean()


def line_of(function, offset):
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def fails(message, model=None, loss_fn=mean, batch=X, **options):
    with pytest.raises(CaptureError) as e:
        capture(model if model is not None else Net(), loss_fn, batch, **options)
    assert str(e.value) == message


# ---- data in control flow ----


def branches(y):
    if y.sum() > 0:
        return y
    return -y


def reads_list(y):
    return y * y.max(-1).values.tolist()[0]


def loops(y):
    for i in range(int(y.argmax())):
        y = y + i
    return y


@pytest.mark.parametrize(("function", "offset"), [(branches, 1), (reads_list, 1), (loops, 1)])
def test_reading_a_value(function, offset):
    model = nn.Sequential(nn.Linear(4, 4), Net(function))
    fails(
        f"{line_of(function, offset)}: the model reads a tensor's value while it runs (.item(), bool(), "
        "int(), an `if` or a "
        "loop on a tensor) in module '1'; a program cannot branch on data. Keep the value a tensor "
        "(torch.where, masks), or "
        "pass fullgraph=False to run that module in Python",
        model,
    )


def picks(y):
    return y[y > 0]


def test_size_that_depends_on_data():
    fails(
        f"{line_of(picks, 1)}: the size of aten.nonzero.default depends on data; use a form with fixed sizes "
        "(torch.where, masks), or pass fullgraph=False to run that module in Python",
        Net(picks),
    )


def wrong_shapes(y):
    return y @ torch.ones(5, 5)


def test_the_model_itself_fails():
    with pytest.raises(CaptureError, match="RuntimeError while tracing forward") as e:
        capture(Net(wrong_shapes), mean, X)
    assert str(e.value).startswith(line_of(wrong_shapes, 1))


def to_numpy(y):
    return torch.from_numpy(y.detach().numpy()) + y


def test_numpy():
    with pytest.raises(CaptureError) as e:
        capture(Net(to_numpy), mean, X)
    assert str(e.value).startswith(line_of(to_numpy, 1))


def tuples_of_tensors(y):
    rows, columns = zip(*(y.detach().argsort(1)[:, :2] % 2), strict=True)
    return y[rows, columns]


def test_an_error_of_the_trace_alone_has_a_way():
    with pytest.raises(CaptureError, match=r"TypeError while tracing .*fullgraph=False runs that module") as e:
        capture(Net(tuples_of_tensors), mean, X)
    assert str(e.value).startswith(line_of(tuples_of_tensors, 2))
    assert capture(Net(tuples_of_tensors), mean, X, fullgraph=False).opaque


def test_parameter_written_in_forward():
    model = Net()

    def loss_fn(model, b):
        found = mean(model, b)
        with torch.no_grad():
            model.fc.weight.clamp_(-1, 1)
        return found

    fails(
        "parameter 'fc.weight' is changed in place while the model runs; compute from a copy instead (`self.weight * self.mask`), or change "
        "it between two steps "
        "(where only its first run does so, let it run once before interlace.compile), or take mode=\"eager\"",
        model,
        loss_fn,
    )


class Grows(nn.Module):
    """Makes a table for the lengths that it meets, as image models do with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(x.shape[0], dtype=x.dtype)
        return self.fc(x) * self.table[:, None]


def test_a_buffer_that_takes_another_size():
    model = Grows()
    fails(
        "'table' is a tensor of shape (1,) and the model puts one of shape (2,) in its place while it runs; a program keeps both "
        "(where only its first run does so, let it run once before interlace.compile)",
        model,
        mean,
        batch={"x": torch.ones(2, 4)},
    )
    model(torch.ones(2, 4))  # as the message says
    capture(model, mean, {"x": torch.ones(2, 4)})


# ---- the loss ----


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: m(b["x"]), "the loss has shape (3, 4); return a scalar, for example loss.mean()"),
        (lambda m, b: m(b["x"]).argmax(), "the loss is of dtype torch.int64; return a floating-point scalar"),
        (lambda m, b: 3.0, "the loss is a float; return a scalar tensor"),
        (
            lambda m, b: m(b["x"]).mean().detach(),
            "the loss does not depend on any trainable parameter, or was computed under no_grad or detached",
        ),
        (lambda m, b: {"total": mean(m, b)}, "the loss function gave a dict without 'loss' (keys: total)"),
        (
            lambda m, b: (mean(m, b), {"what": object()}),
            "output '1.what' of the loss function is a object; return tensors and numbers beside the loss",
        ),
    ],
)
def test_loss(loss_fn, message):
    with pytest.raises(CaptureError) as e:
        capture(Net(), loss_fn, X)
    assert str(e.value).endswith(message)


def test_model_without_a_loss():
    built = build("llama-tiny", seq=8)
    with pytest.raises(CaptureError, match="the model gave no loss; put 'labels' into the batch or pass a loss_fn"):
        capture(built.model, None, {"input_ids": built.example_batch["input_ids"]})


# ---- parameters ----


def test_no_parameters():
    fails("the model has no parameters", nn.ReLU())


def test_nothing_to_train():
    fails("the model has no trainable parameter: every one has requires_grad=False", Net().requires_grad_(False))


def test_several_devices():
    model = Net()
    model.fc.bias = nn.Parameter(torch.empty(4, device="meta"))
    fails(
        "parameters are on several devices: 'fc.weight' on cpu, 'fc.bias' on meta; move the model to one device", model
    )


def test_not_dense():
    model = Net()
    model.fc.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    fails("parameter 'fc.weight' is not dense (strides (8, 2)); set it to a .contiguous() copy", model)


def test_shared_storage():
    model = nn.Sequential(Net(), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].fc.weight.detach())
    fails(
        "parameters '0.fc.weight' and '1.weight' share storage without being the same parameter; "
        "tie them by assigning the same nn.Parameter, or clone one",
        model,
    )
    model = Net()
    model.register_buffer("part", model.fc.weight.detach()[:2])
    fails("'part' shares storage with parameter 'fc.weight'; clone it", model)


def test_parameter_in_a_list():
    model = Net()
    model.extra = [nn.Parameter(torch.ones(4))]
    fails("'extra.0' is a parameter kept in a plain list or dict; use nn.ParameterList or nn.ParameterDict", model)


def test_parameter_outside_the_model():
    scale = nn.Parameter(torch.ones(4))
    with pytest.raises(CaptureError) as e:
        capture(Net(lambda y: y * scale), mean, X)
    assert str(e.value).endswith(
        "a tensor of shape (4,) that requires gradients is not part of the model; make it an nn.Parameter of the model "
        "(a loss with parameters must be a module of the model), use it under torch.no_grad() where it is not trained, or compile first the "
        "network that it belongs to (a GAN's discriminator, say)"
    )


def test_lazy_parameter_and_hook():
    fails(
        "parameter '1.weight' is not initialized yet; run the lazy module once before capture",
        nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)),
        lambda m, b: m(b["x"]).mean(),
    )
    model = Net()
    model.fc.bias.register_post_accumulate_grad_hook(lambda p: None)
    fails(
        "parameter 'fc.bias' has a hook that runs when its gradient is there (register_post_accumulate_grad_hook), which a program cannot "
        "run; register_hook changes gradients, trainer.step makes the optimizer's step", model,
    )  # fmt: skip


# ---- optimizer ----


def test_optimizer_that_does_not_own_a_parameter():
    model = Net()
    optimizer = torch.optim.AdamW([model.fc.weight])
    fails(
        "the optimizer does not own parameter 'fc.bias'; add it to a group, give interlace.compile a list of optimizers that together own "
        "all parameters, or freeze it (requires_grad=False)",
        model,
        optimizer=optimizer,
    )
    model.fc.bias.requires_grad_(False)
    assert 'param %1: f32[4] "fc.bias" frozen' in capture(model, mean, X, optimizer=optimizer).text


def test_optimizer_of_another_model():
    fails(
        "optimizer group 0 has a parameter (number 0 of shape (4, 4)) that is not the model's; "
        "make the optimizer from model.parameters() after the model is built, and what a loss learns a part of the model "
        "(model.criterion = criterion)",
        optimizer=torch.optim.SGD(Net().parameters(), lr=0.1),
    )
    fails(
        "optimizer group 0 has a parameter (fc.weight) that is not the model's; "
        "make the optimizer from model.parameters() after the model is built, and what a loss learns a part of the model "
        "(model.criterion = criterion)",
        optimizer=torch.optim.SGD(Net().named_parameters(), lr=0.1),
    )


def test_a_criterion_with_parameters_is_a_part_of_the_model():
    model, criterion = Net(), nn.Linear(4, 4)
    model.criterion = criterion
    text = capture(model, lambda m, b: criterion(m(**b)).mean(), X, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).text
    assert '"criterion.weight" trainable group 0' in text


def test_unsupported_optimizers():
    model = Net()
    fails(
        "optimizer LBFGS cannot run on the parts of parameters that ranks hold: it takes products of whole gradients, and evaluates the "
        "loss again within a step; a step must compute each element from that element alone, as those of torch.optim.AdamW, SGD, Adagrad "
        "and RMSprop do (whole matrices: torch.optim.Muon, Adafactor)",
        model,
        optimizer=torch.optim.LBFGS(model.parameters()),
    )
    fails(
        "optimizer group 0 has differentiable=True, which is not supported; set it to False",
        model,
        optimizer=torch.optim.Adam(model.parameters(), differentiable=True),
    )


def test_groups():
    model = Net()

    def groups():
        return [{"params": [model.fc.bias]}, {"params": [model.fc.weight], "weight_decay": 0.1}]

    for optimizer, kind in (
        (torch.optim.AdamW(groups()), "adamw"),
        (torch.optim.Adam(groups()), "adam"),
        (torch.optim.SGD(groups(), lr=0.1, momentum=0.9), "sgd"),
        (torch.optim.Adam(groups(), decoupled_weight_decay=True), "adamw"),
    ):
        text = capture(model, mean, X, optimizer=optimizer).text
        assert f"group 0 {kind}\ngroup 1 {kind}\n" in text
        assert "rule" not in text
        assert '"fc.weight" trainable group 1' in text and '"fc.bias" trainable group 0' in text


# ---- the model as a whole ----


def test_wrapped_models():
    fails("the model is wrapped in DataParallel; pass the module inside (model.module)", nn.DataParallel(Net()))
    fails("the model is a function; pass a torch.nn.Module", lambda x: x)
    with pytest.raises(
        CaptureError, match="module '0' is a TorchScript module; pass the Python module it was made from, or take mode=\"eager\""
    ):
        scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
        interlace.compile(scripted, torch.optim.SGD(scripted.parameters()), lambda m, b: m(b["x"]).mean(), X, interlace.Config(cache="off"))


def test_model_is_usable_after_an_error():
    model = Net(branches)
    with pytest.raises(CaptureError):
        capture(model, mean, X)
    model.function = torch.relu
    capture(model, mean, X)
    assert type(model.fc.weight.data) is torch.Tensor
    mean(model, X).backward()
    assert model.fc.weight.grad is not None


def test_symbols():
    fails("unknown symbolic size 'q'; the sizes are 'b' (dimension 0) and 's' (dimension 1)", symbolic={"q"})
    with pytest.raises(CaptureError) as e:
        capture(Net(), mean, X, symbolic={"s"})
    assert str(e.value) == (
        f"{__file__}:{FORWARD_LINE}: RuntimeError while tracing forward in module 'fc': a and b must have same "
        "reduction dim, but got "
        "[3, s] X [4, 4]. (The size s is symbolic; symbolic=False captures with numbers.)"
    )
    fails(
        "the model fixes the symbolic size b to 6; capture with numbers instead (symbolic=False)",
        loss_fn=lambda m, b: mean(m, b) if b["x"].shape[0] == 6 else -mean(m, b),
        symbolic={"b"},
    )


# ---- batches ----


def spec(**batch):
    return InputSpec.of(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "batch entry 'x' is missing; the program was compiled for 'x'"),
        (
            {"x": torch.zeros(2, 3), "n": 2},
            "batch entry 'x' is float32[2, 3], but the program was compiled for float32[2, 4]; leave a smaller "
            "last batch out (DataLoader(drop_last=True)), or say with Config(pad={...}) what fills each entry up "
            "that varies",
        ),
        (
            {"x": torch.zeros(2, 4, dtype=torch.int32), "n": 2},
            "batch entry 'x' is int32[2, 4], but the program was compiled for float32[2, 4]; pass batches "
            "like the example "
            "batch, or compile again",
        ),
        ({"x": 3, "n": 2}, "batch entry 'x' is a int; compiled for a tensor float32[2, 4]"),
        ({"x": torch.zeros(2, 4)}, "batch entry 'n' is missing; it was 2 when compiled"),
        (
            {"x": torch.zeros(2, 4), "n": 3},
            (
                "batch entry 'n' was the constant 2 when compiled and is 3 now; make it a tensor if it changes, "
                "or compile again"
            ),
        ),
        ({"x": torch.zeros(2, 4), "n": 2, "z": 1}, "batch entry 'z' is new; the program was compiled for 'x'"),
    ],
)
def test_batch_of_another_kind(batch, message):
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        spec(x=torch.zeros(2, 4), n=2).flatten(batch)


def test_batches_that_cannot_be_inputs():
    numpy = pytest.importorskip("numpy")
    fails("batch entry 'x' is a NumPy array; pass a tensor (torch.from_numpy)", batch={"x": numpy.zeros(3)})
    fails(
        "the example batch, a dict, holds no tensor in dicts, lists, tuples, dataclasses or attributes; pass a batch as the training loop "
        "would",
        batch={"x": 3},
    )
    fails(
        "batch entry 'x' is a torch.sparse_coo tensor; pass a dense one (.to_dense()), or fullgraph=False to run such steps in "
        "Python",
        batch={"x": torch.eye(3).to_sparse()},
    )
    fails("a batch of 3 cannot be cut into 2 equal micro-batches; use a batch size divisible by 2", micro_batches=2)


# ---- presets ----


def test_unknown_model():
    with pytest.raises(
        InterlaceError, match=r"^unknown model 'lama-10m': neither a preset nor .*; did you mean llama-10m"
    ):
        resolve("lama-10m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a Hugging Face config: it is no JSON ("),
        ("[]", "has no 'model_type'; pass the config.json of a Hugging Face model"),
        ('{"model_type": "lama"}', "transformers knows no model type 'lama'"),
        ('{"model_type": "clip"}', "model type 'clip' is not a causal language model"),
        ('{"model_type": "llama", "num_hidden_layers": 2147483647}', "num_hidden_layers is 2147483647; a model of more than 10000 layers"),
        ('{"model_type": "llama", "dtype": "float33"}', "unknown dtype 'float33'"),
    ],
)
def test_config_files(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InterlaceError, match=re.escape(message)):
        build(str(tmp_path))


def test_config_file_of_a_preset(tmp_path):
    built = build("llama-tiny", seq=16)
    built.config.save_pretrained(tmp_path)
    again = build(str(tmp_path / "config.json"), seq=16)
    text, other = (capture(b.model, b.loss_fn, b.example_batch).text for b in (built, again))
    assert text == other


def test_packed_sequences_name_the_way():
    """And not what torch says to those who write kernels."""

    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]

    with pytest.raises(CaptureError, match=r"test_capture_errors.py:\d+: .*fullgraph=False runs that module in Python") as e:
        capture(Packs(), lambda m, b: m(b["x"], b["n"]).mean(), {"x": torch.ones(2, 3, 4), "n": torch.tensor([3, 2])})
    assert "torch.compile" not in str(e.value)
