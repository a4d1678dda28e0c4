"""Operators that do not do what they say are found when a program is captured."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from capture_support import check
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from interlace.capture import capture, check_ops
from interlace.capture.check_ops import verdicts
from interlace.errors import CaptureError
from interlace.models import build

LIBRARY = torch.library.Library("interlace_test", "DEF")


def define(name, real, fake):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, real, "CPU")
    LIBRARY.impl(name, fake, "Meta")
    return getattr(torch.ops.interlace_test, name)


def writes_operand(x):
    x.add_(1)
    return x * 2


HONEST = define("honest", lambda x: x * 2, torch.empty_like)
WRITES = define("writes", writes_operand, torch.empty_like)
ALIASES = define("aliases", lambda x: x.view(-1), lambda x: x.new_empty(x.numel()))
COPIES = define("copies", lambda x: x.clone(), lambda x: x.view_as(x))
STRIDES = define("strides", lambda x: torch.empty(x.shape[::-1]).t().copy_(x), torch.empty_like)
STRIDED_VIEW = define("strided_view", lambda x: x.t(), lambda x: x.view(x.shape[::-1]))
DTYPE = define("dtype", lambda x: x.double(), torch.empty_like)


class Net(nn.Module):
    def __init__(self, function, width=4):
        super().__init__()
        self.fc = nn.Linear(4, width)
        self.function = function

    def forward(self, x):
        return self.fc(x).mean() + self.function(x).detach().sum()


def run(function, rows=3, symbolic=False):
    return capture(Net(function), lambda m, b: m(b), torch.zeros(rows, 4), symbolic=symbolic)


def test_honest_operator():
    assert "interlace_test.honest(" in run(HONEST).text
    assert verdicts()["interlace_test.honest"] == "right"


def test_another_layout_of_a_fresh_result_is_copied():
    """The runtime puts it into the text's layout; a view of other strides than the text's would be wrong."""
    run(STRIDES)
    assert verdicts()["interlace_test.strides"] == "right"
    with pytest.raises(CaptureError, match=r"interlace_test\.strided_view gives a result 0 of another dtype, size or stride"):
        run(STRIDED_VIEW)


class Half(nn.Module):
    """BatchNorm, group and layer normalization under autocast and not."""

    def __init__(self, kind):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = {"batch": nn.BatchNorm2d(4), "group": nn.GroupNorm(2, 4), "layer": nn.LayerNorm([4, 4, 4])}[kind]

    def forward(self, x):
        return self.norm(self.conv(x)).square().mean()


def cast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


@pytest.mark.parametrize("kind", ["batch", "group", "layer"])
@pytest.mark.parametrize("order", list(itertools.permutations(["plain", "cast", "half"])), ids="-".join)
def test_verdicts_do_not_depend_on_what_was_captured_before(kind, order, monkeypatch):
    monkeypatch.setattr(check_ops, "_verdicts", {})
    monkeypatch.setattr(check_ops, "_dtypes", {})
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    for how in order:
        model = Half(kind)
        if how == "half":
            check(model.bfloat16(), lambda m, x: m(x), x.bfloat16())
        else:
            check(model, cast if how == "cast" else lambda m, x: m(x), x)
    assert set(verdicts().values()) == {"right"}


def test_dtypes_of_results_are_known_for_a_dtype_and_for_numbers_apart(monkeypatch):
    """A sum in bfloat16 counted as one in float32 after one with dtype=float32, and a quotient by a number as that by a vector."""
    monkeypatch.setattr(check_ops, "_dtypes", {})

    def loss_fn(model, x):
        y = model(x)
        wide = y.sum(0, dtype=torch.float32)
        return (y / wide).square().mean() + (y / wide.sum()).sum(0).square().mean()

    torch.manual_seed(0)
    text = check(nn.Linear(4, 3).bfloat16(), loss_fn, torch.randn(5, 4).bfloat16()).text
    forward = [line.split(" = ") for line in text.splitlines() if "{fwd" in line and " = " in line]
    found = [(left.split(": ")[1], op.split("(")[0]) for left, op in forward if "aten.sum" in op or "aten.div.Tensor" in op]
    sums, quotients = ([t for t, op in found if op.startswith(name)] for name in ("aten.sum.dim", "aten.div"))
    assert sums == ["f32[3]", "bf16[3]"] and quotients == ["f32[5,3]", "bf16[5,3]"]


def test_what_symbols_left_unchecked_is_checked_with_numbers(monkeypatch):
    monkeypatch.setattr(check_ops, "_verdicts", {})
    for function in (HONEST, WRITES):
        run(function, symbolic={"b"})
    assert verdicts()["interlace_test.honest"] == verdicts()["interlace_test.writes"] == "unchecked"
    run(HONEST)
    assert verdicts()["interlace_test.honest"] == "right"
    with pytest.raises(CaptureError, match=r"interlace_test\.writes writes to its tensor operand 0"):
        run(WRITES)


@pytest.mark.parametrize(
    ("function", "name", "wrong"),
    [
        (WRITES, "writes", "writes to its tensor operand 0"),
        (ALIASES, "aliases", "gives a result 0 that shares storage with its tensor operand 0"),
        (COPIES, "copies", "gives a result 0 that does not share storage with its tensor operand 0"),
        (
            DTYPE,
            "dtype",
            "gives a result 0 of another dtype, size or stride (float64[3, 4] with strides [4, 1] in place of "
            "float32[3, 4] with strides [4, 1])",
        ),
    ],
)
@pytest.mark.parametrize("times", [1, 2], ids=["first", "again"])
def test_operator_that_lies(function, name, wrong, times):
    with pytest.raises(CaptureError) as e:
        run(function)
    line = f"test_capture_check_ops.py:{Net.forward.__code__.co_firstlineno + 1}"
    assert str(e.value) == (
        f"{line}: operator interlace_test.{name} {wrong}, which its schema and its fake implementation do not "
        "say; a program that uses it "
        "would be wrong. Use another operator, or fix its registration (torch.library)"
    )


@pytest.mark.parametrize("name", ["llama-tiny", "llama-3-8b", "mixtral-8x7b", "convnet-tiny", "transformer-tiny"])
def test_operators_of_models_are_checked(name, monkeypatch):
    """Large models too: their operators are run at small sizes, so hardly one stays unchecked."""
    monkeypatch.setattr(check_ops, "_verdicts", {})
    options = {"num_hidden_layers": 2} if name in ("llama-3-8b", "mixtral-8x7b") else {}
    built = build(name, micro_batch=2, **options)
    c = capture(built.model, built.loss_fn, built.example_batch)
    used = {line.partition(" = ")[2].partition("(")[0] for line in c.text.splitlines() if " = aten." in line}
    found = verdicts()
    assert len(used) > 15 and not {n for n in used if found.get(n) != "right"}


def test_rows_padded_where_sizes_are_not_aligned_are_no_fault(monkeypatch):
    """Products of groups have padded rows in the fake implementation alone, for sizes that are not a multiple of 16 bytes."""
    monkeypatch.setattr(check_ops, "_verdicts", {})
    with FakeTensorMode():
        rows, weights = (torch.empty(*size, dtype=torch.bfloat16) for size in ((1024, 4096), (8, 28672, 4096)))
        ends = torch.empty(8, dtype=torch.int32)
    check_ops.check_op_kinds([(torch.ops.aten._grouped_mm.default, (rows, weights.transpose(1, 2), ends), {})])
    assert verdicts()["aten._grouped_mm"] == "right"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", [nn.functional.binary_cross_entropy, nn.functional.soft_margin_loss])
def test_losses_whose_kernels_give_their_result_another_size_meanwhile(function, reduction):
    """They warn where the result has a place."""
    x = {"x": torch.rand(6, 4), "y": torch.rand(6, 4), "w": torch.rand(6, 4)}
    weight = {"weight": x["w"]} if function is nn.functional.binary_cross_entropy else {}
    loss = lambda m, b: function(m(b["x"]).sigmoid(), b["y"], reduction=reduction, **weight).mean()  # noqa: E731
    assert re.search(rf"f32\[6,4\] = aten\.{function.__name__}\(", capture(nn.Linear(4, 4), loss, x).text)
    check(nn.Linear(4, 4), loss, x)
