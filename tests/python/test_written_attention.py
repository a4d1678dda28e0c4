"""Attention that models write out: which forms become one operator, that it computes the same, and what stays as it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import interlace
from interlace.capture import capture, written
from interlace.capture.attention import OneAttention

Tensor = torch.Tensor
ROWS, HEADS, WIDTH = 8, 2, 4
OPERATOR, SHARES = "aten._scaled_dot_product_flash_attention_for_cpu(", "aten._softmax("


class Net(nn.Module):
    """One layer whose attention is what a form makes of queries, keys and values [2, HEADS, ROWS, WIDTH]."""

    def __init__(self, form: Callable[..., Tensor], drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out, self.form = nn.Linear(8, 24), nn.Linear(8, 8), form
        self.drop, self.kept, self.scale = nn.Dropout(drop), None, torch.tensor([2.0], dtype=torch.float64)
        self.register_buffer("later", torch.tril(torch.ones(ROWS, ROWS)).view(1, 1, ROWS, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(2, ROWS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return self.out(self.form(self, q, k, v).transpose(1, 2).reshape(2, ROWS, 8))


def plain(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # GPT from scratch
    a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    a = a.masked_fill(net.later[:, :, :ROWS, :ROWS] == 0, float("-inf"))
    return net.drop(F.softmax(a, dim=-1)) @ v


def divided(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # by a tensor; a mask of padding, whose rows may see nothing
    a = torch.matmul(q, k.permute(0, 1, 3, 2)) / net.scale
    seen = torch.ones(2, 1, 1, ROWS, dtype=torch.bool)
    seen[0, ..., 5:] = False
    seen[1] = False
    return torch.matmul(torch.softmax(a.masked_fill(~seen, -1e10), dim=-1), v)


def added(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # transformers' eager attention
    a = torch.matmul(q, k.transpose(2, 3)) * 0.3
    bias = torch.linspace(-1, 1, ROWS * ROWS, dtype=q.dtype).view(1, 1, ROWS, ROWS)
    a = a + bias[:, :, :, : k.shape[-2]]
    a = F.softmax(a, dim=-1, dtype=torch.float64).to(q.dtype)
    return torch.matmul(F.dropout(a, p=0.0, training=net.training), v).view(2, HEADS, ROWS, WIDTH)


def flat(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # heads and batch in one dimension, two for the mask
    q, k, v = (x.reshape(2 * HEADS, ROWS, WIDTH) for x in (q * 0.5, k, v))
    a = torch.bmm(q, k.transpose(1, 2)).view(2, HEADS, ROWS, ROWS)
    a = a + torch.zeros(2, 1, ROWS, ROWS, dtype=q.dtype).masked_fill(net.later == 0, torch.finfo(q.dtype).min)
    a = nn.functional.softmax(a.view(2 * HEADS, ROWS, ROWS), dim=-1)
    return torch.bmm(F.dropout(a, 0.0), v).view(2, HEADS, ROWS, WIDTH)


def flat_mask(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(2 * HEADS, ROWS, WIDTH) for x in (q, k, v))
    mask = torch.linspace(0, 1, 2 * HEADS * ROWS * ROWS, dtype=q.dtype).view(-1, ROWS, ROWS)
    a = mask.baddbmm(batch1=q, batch2=k.transpose(1, 2), alpha=0.25)
    return (a.softmax(-1) @ v).view(2, HEADS, ROWS, WIDTH)


def letters(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5
    a = torch.where(net.later == 0, -torch.finfo(a.dtype).max, a)
    return torch.einsum("b h i j, b h j d -> b h i d", a.softmax(dim=-1), v)


def rows_first(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    a = torch.einsum("bqhd,bkhd->bhqk", [q, k]) if net.drop.p > 1 else torch.einsum("bqhd,bkhd->bhqk", q, k)
    a = a.masked_fill_(net.later == 0, float("-1e20"))
    return torch.einsum("nhql,nlhd->nqhd", torch.softmax(a / 2, dim=3), v).transpose(1, 2)


def in_place(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = q @ k.mT
    a *= 0.5
    a += torch.zeros(1, 1, ROWS, ROWS, dtype=q.dtype).masked_fill_(net.later == 0, float("-inf"))
    return torch.softmax(a, -1).matmul(v)


def two_masks(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = q @ k.transpose(-1, -2) * 0.5 + torch.linspace(-1, 1, ROWS, dtype=q.dtype)
    a = a.masked_fill(net.later == 0, torch.finfo(a.dtype).min)
    ends = (torch.arange(ROWS) > 5).expand(2, 1, 1, ROWS)
    return a.masked_fill(ends, torch.finfo(a.dtype).min).softmax(dim=-1) @ v


def grouped(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(2, HEADS, ROWS, WIDTH).reshape(2, HEADS, ROWS, WIDTH) for x in (k, v))
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


ONE = [plain, divided, added, flat, flat_mask, letters, in_place, two_masks, grouped]


def rescaled(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # masks are scaled as well
    a = (q @ k.transpose(-2, -1)).masked_fill(net.later == 0, -1e5) * 0.001
    return a.softmax(-1) @ v


def filled_with_little(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).masked_fill(net.later == 0, -2.0).softmax(-1) @ v


def rows_of_queries(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def changed_shares(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = (q @ k.transpose(-2, -1)).softmax(-1)
    return a.masked_fill(net.later == 0, 0.0) @ v


def clamped(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = q @ k.transpose(-2, -1)
    a.clamp_(max=0.1)
    return a.softmax(-1) @ v


def changed_query(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.detach().clone() * 1.0
    a = (q @ k.transpose(-2, -1)).softmax(-1)
    q.mul_(3.0)
    return a @ v + q


def trained_bias(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) + net.out.weight).softmax(-1) @ v


def changed_result(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    y += q
    return y


def penalized(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # shares are read elsewhere
    a = (q @ k.transpose(-2, -1)).softmax(-1)
    return a @ v + (a * a).sum()


AS_WRITTEN = [rescaled, rows_first, filled_with_little, rows_of_queries, changed_shares, clamped, changed_query, trained_bias, penalized,
              changed_result]  # fmt: skip


def text_of(net: nn.Module, drops: bool = False, **options: Any) -> str:
    x = torch.randn(2, ROWS, 8, dtype=next(net.parameters()).dtype)
    return capture(net, lambda m, b: m(b).square().mean(), x, one_attention=OneAttention(drops, True), **options).text


def agree(net: nn.Module, steps: int = 3) -> None:
    """Trained by both, in float64."""
    torch.manual_seed(1)
    other, x = copy.deepcopy(net), torch.randn(2, ROWS, 8, dtype=torch.float64)

    def loss_of(m: nn.Module, b: Tensor) -> Tensor:
        return (m(b) - 1).square().mean()

    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (net, other))
    with interlace.compile(net, optimizer, loss_of, x, interlace.Config(regions="off")) as trainer:
        for _ in range(steps):
            loss = loss_of(other, x)
            theirs.zero_grad()
            loss.backward()
            theirs.step()
            assert float(trainer.step(x)) == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, value in trainer.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "MASKED", 1)
    monkeypatch.setattr(written, "WHOLE", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("form", ONE)
def test_is_one_operator(form: Callable[..., Tensor]) -> None:
    text = text_of(Net(form).double())
    assert OPERATOR in text and SHARES not in text and "aten.bmm" not in text
    agree(Net(form).double())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("form", AS_WRITTEN)
def test_stays_as_it_is_written(form: Callable[..., Tensor]) -> None:
    text = text_of(Net(form).double())
    assert OPERATOR not in text and SHARES in text
    agree(Net(form).double())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("need_weights", [True, False])
def test_shares_that_multihead_attention_gives_and_nobody_reads(need_weights: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.register_buffer("later", torch.full((ROWS, ROWS), float("-inf")).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, attn_mask=self.later, need_weights=need_weights)[0]

    text = text_of(Block().double())
    assert OPERATOR in text and SHARES not in text
    agree(Block().double())


def test_with_dropout_where_the_kernel_has_it() -> None:
    text = text_of(Net(plain, drop=0.25), drops=True)
    assert OPERATOR in text and SHARES not in text and "0.25, attn_mask" in text and "aten.bernoulli" not in text
    text = text_of(Net(plain, drop=0.25), drops=False)
    assert OPERATOR not in text and SHARES in text
    text = text_of(Net(plain, drop=0.25).eval(), drops=False)
    assert OPERATOR in text


def test_dropout_follows_its_number(small: None) -> None:
    net = Net(plain, drop=0.5)
    x = torch.randn(2, ROWS, 8)
    expected = float(copy.deepcopy(net).eval()(x).square().mean().detach())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with interlace.compile(net, optimizer, lambda m, b: m(b).square().mean(), x, interlace.Config(regions="off")) as trainer:
        drawn = {float(trainer.step(x)) for _ in range(4)}
        assert len(drawn) == 4
        net.drop.p = 0.0
        (still,) = {float(trainer.step(x)) for _ in range(3)}
        assert still == pytest.approx(expected, rel=1e-5)


def test_of_a_teacher_in_inference_mode(small: None) -> None:
    teacher, net = Net(plain).double(), Net(added).double()

    def loss_of(m: nn.Module, b: Tensor) -> Tensor:
        with torch.inference_mode():
            target = teacher(b)
        return (m(b) - target.clone()).square().mean()

    x = torch.randn(2, ROWS, 8, dtype=torch.float64)
    expected = float(loss_of(net, x).detach())
    with interlace.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_of, x, interlace.Config(regions="off")) as trainer:
        assert float(trainer.step(x)) == pytest.approx(expected, rel=1e-12)


def test_a_gradient_of_a_gradient(small: None) -> None:
    """The operator has none, and is left out."""

    def loss_of(m: nn.Module, b: Tensor) -> Tensor:
        b = b.clone().requires_grad_()
        y = m(b).square().mean()
        return y + torch.autograd.grad(y, b, create_graph=True)[0].square().sum()

    net, x = Net(plain).double(), torch.randn(2, ROWS, 8, dtype=torch.float64)
    expected = float(loss_of(net, x).detach())
    with interlace.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_of, x, interlace.Config(regions="off")) as trainer:
        assert float(trainer.step(x)) == pytest.approx(expected, rel=1e-12)


def test_shares_that_are_an_output_are_computed(small: None) -> None:
    def loss_of(m: Net, b: Tensor) -> Any:
        m.kept = None
        loss = m(b).square().mean()
        return loss, {"shares": m.kept}

    def keeping(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        net.kept = (q @ k.transpose(-2, -1)).softmax(-1)
        return net.kept @ v

    net = Net(keeping)
    x = torch.randn(2, ROWS, 8)
    text = capture(net, loss_of, x, one_attention=OneAttention(True, True)).text
    assert OPERATOR not in text and SHARES in text


def test_small_ones_and_those_of_torchs_kernels_stay(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OneAttention.of("torch", True) is None
    net, x = Net(plain), torch.randn(2, ROWS, 8)

    def form() -> bool:
        return OPERATOR in capture(net, lambda m, b: m(b).mean(), x, one_attention=OneAttention(True, False)).text

    assert form()
    monkeypatch.setattr(written, "MASKED", ROWS + 1)
    assert not form()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_a_row_that_sees_nothing_has_equal_shares(dtype: torch.dtype, small: None) -> None:
    def form(net: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = q @ k.transpose(-2, -1)
        a = a + torch.full((ROWS, ROWS), torch.finfo(torch.float32).min).masked_fill(net.later[0, 0].cumsum(0) > 4, 0.0)
        return a.softmax(-1) @ v

    def loss_of(m: Net, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return m(b).float().square().mean()

    net, x = Net(form), torch.randn(2, ROWS, 8)
    assert OPERATOR in capture(net, loss_of, x, one_attention=OneAttention(True, True)).text
    expected = float(loss_of(net, x).detach())
    with interlace.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_of, x, interlace.Config(regions="off")) as trainer:
        assert float(trainer.step(x)) == pytest.approx(expected, rel=2e-2)
