"""Attention of other devices against the CPU's own, which a captured program names."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from interlace._runtime import testing
from runtime_support import language_loss, llama, tokens
from torch import nn
from torch.nn import functional as F

import interlace

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2, 1])  # of keys and values, for four of queries
@pytest.mark.parametrize("causal, masked, scale", [(False, False, None), (True, False, None), (False, True, 0.3)])
def test_results_and_gradients_are_those_of_the_cpu(
    dtype: torch.dtype, causal: bool, masked: bool, scale: float | None, heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, n, 24, 16, generator=generator, dtype=torch.float64).to(dtype) for n in (4, heads, heads, 4))
    mask = torch.randn(2, 1, 24, 24, generator=generator).to(dtype) if masked else None
    if mask is not None:
        mask[0, 0, :, 3] = -math.inf
    out, logsumexp = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    ours, sums = testing.attention(q, k, v, 0.0, causal, mask, scale)
    assert (ours.shape, ours.dtype, sums.shape, sums.dtype) == (out.shape, out.dtype, logsumexp.shape, logsumexp.dtype)
    close = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, out, rtol=close, atol=close)
    torch.testing.assert_close(sums, logsumexp, rtol=close, atol=close)
    theirs = BACKWARD(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale)
    for a, b in zip(testing.attention_backward(grad, q, k, v, out, logsumexp, 0.0, causal, mask, scale), theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=10 * close, atol=10 * close)


@pytest.mark.accelerator
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("rows", [24, 32])  # the second are as the memory-efficient kernel has its sums
def test_each_kernel_of_a_device_takes_the_sums_as_a_program_has_them(kernel: str, heads: int, rows: int) -> None:
    """With heads inside, as the CPU's operator gives them; kernels that go by their address would read those of other rows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = torch.accelerator.current_accelerator(check_available=True)
    dtype = torch.bfloat16 if kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION") else torch.float32
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, n, rows, 64, generator=generator).to(dtype) for n in (4, heads, heads, 4)]
    q, k, v, grad = (x.double() for x in given)
    out, logsumexp = FORWARD(q, k, v, 0.0, True)
    theirs = BACKWARD(grad, q, k, v, out, logsumexp, 0.0, True)
    there = [x.to(device) for x in given]
    with sdpa_kernel([getattr(SDPBackend, kernel)]):
        ours, sums = testing.attention(*there[:3], 0.0, True, None, None)
        inside = torch.empty(2, rows, 4, dtype=sums.dtype, device=device).transpose(1, 2).copy_(sums)
        gradients = testing.attention_backward(there[3], *there[:3], ours, inside, 0.0, True, None, None)
    close = 4e-2 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip((ours, sums, *gradients), (out, logsumexp, *theirs), strict=True):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=close, atol=close)


def tiles(kind: str, b: int, h: int, rows: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor | None:
    """Masks by what they hide: nothing, what comes later, the ends of rows, the beginnings, whole rows."""
    later, least = torch.ones(rows, rows).triu(1).bool(), torch.finfo(dtype).min
    if kind == "bias":
        return torch.randn(b, h, rows, rows, generator=generator).to(dtype)
    if kind == "padded":  # at the ends, the same for all rows
        mask = torch.zeros(b, 1, 1, rows, dtype=dtype)
        mask[..., 2 * rows // 3 :] = least
        return mask.expand(b, 1, rows, rows)
    if kind == "padded before":  # whose first rows see nothing
        mask = torch.zeros(b, 1, rows, rows, dtype=dtype).masked_fill(later, least)
        mask[0, :, :, : rows // 3] = least
        return mask
    if kind == "window":
        return torch.zeros(rows, rows, dtype=dtype).masked_fill(later | later.T.tril(-rows // 4), -math.inf)
    if kind == "a row of nothing":
        mask = torch.zeros(rows, rows, dtype=dtype).masked_fill(later, -math.inf)
        mask[rows // 2] = -math.inf
        return mask
    return None


@pytest.mark.parametrize("kind", ["whole", "causal", "bias", "padded", "padded before", "window", "a row of nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "b, heads, shared, rows, width", [(2, 4, 1, 24, 16), (1, 4, 2, 130, 33), (1, 2, 2, 1100, 8), (3, 2, 1, 1, 8)]
)
def test_the_kernel_of_cpus_is_the_one_of_torch(
    dtype: torch.dtype, kind: str, b: int, heads: int, shared: int, rows: int, width: int
) -> None:
    """Blocks that nobody looks at are left out; sizes that blocks, chunks and vectors do not divide, and several chunks."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v, grad = (
        torch.randn(b, rows, n, width, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n in (heads, heads // shared, heads // shared, heads)
    )
    mask, causal = tiles(kind, b, heads, rows, dtype, generator), kind == "causal"
    out, sums = FORWARD(q, k, v, 0.0, causal, attn_mask=mask)
    ours = torch.ops.interlace.attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    close = {torch.float32: 3e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    theirs = BACKWARD(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask)
    gradients = torch.ops.interlace.attention_for_cpu_backward(grad, q, k, v, *ours, 0.0, causal, attn_mask=mask)
    within = (close, close, *[10 * close] * 3)
    for a, wanted, close in zip((*ours, *gradients), (out, sums, *theirs), within, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        torch.testing.assert_close(a, wanted, rtol=close, atol=close * max(1.0, wanted.abs().max().item()))


def test_the_kernel_of_cpus_keeps_what_is_not_a_number_and_the_bits_of_any_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 700, 4, 32, generator=generator).transpose(1, 2) for _ in range(4))
    forward, backward = torch.ops.interlace.attention_for_cpu, torch.ops.interlace.attention_for_cpu_backward
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, sums = forward(q, k, v, 0.0, True)
            found.append([out, sums, *backward(grad, q, k, v, out, sums, 0.0, True)])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    q[0, 0, 3, 2], k[1, 1, 5] = math.nan, math.nan
    out, _ = forward(q, k, v, 0.0, True)
    assert torch.equal(out.isnan(), FORWARD(q, k, v, 0.0, True)[0].isnan())
    assert out[0, 0, 3].isnan().all() and not out[0, 0, 2].isnan().any()


def dropped(*given: Any, p: float, causal: bool = False, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and sums with what seed 5 drops."""
    torch.manual_seed(5)
    return torch.ops.interlace.attention_for_cpu(*given, p, causal, attn_mask=mask)


@pytest.mark.parametrize("kind", ["whole", "causal", "padded", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads, shared, rows, width", [(2, 1, 24, 16), (4, 2, 300, 33)])
def test_dropout_drops_the_same_in_the_gradient(dtype: torch.dtype, kind: str, heads: int, shared: int, rows: int, width: int) -> None:
    generator, p = torch.Generator().manual_seed(rows), 0.25
    q, k, v, grad = (
        torch.randn(2, rows, n, width, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n in (heads, heads // shared, heads // shared, heads)
    )
    mask, causal = tiles(kind, 2, heads, rows, dtype, generator), kind == "causal"
    if kind == "window":
        mask = mask.T.contiguous().T  # whose rows have gaps
    # What is kept: values that are 1 for one column each show the shares.
    kept = torch.zeros(2, heads, rows, rows, dtype=torch.bool)
    for begin in range(0, rows, width):
        ones = torch.zeros(2, heads // shared, rows, width, dtype=dtype)
        n = min(width, rows - begin)
        ones[:, :, begin : begin + n, :n] = torch.eye(n, dtype=dtype)
        kept[..., begin : begin + n] = dropped(q, k, ones, p=p, causal=causal, mask=mask)[0][..., :n] != 0
    x, y, z = (t.double().detach().requires_grad_() for t in (q, k, v))
    scores = x @ y.repeat_interleave(shared, 1).transpose(2, 3) / math.sqrt(width)
    scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -math.inf) if causal else scores
    scores = scores if mask is None else scores + mask.double()
    shares = scores.softmax(-1)
    out = (shares * kept / (1 - p)) @ z.repeat_interleave(shared, 1)
    gradients = torch.autograd.grad(out, (x, y, z), grad.double())
    seen = shares > 1e-6  # of bfloat16 some shares of a row are none
    assert abs(kept[seen].double().mean().item() - (1 - p)) < (0.03 if rows > 100 else 0.1)
    assert rows < 100 or not (torch.equal(kept[0, 0], kept[0, 1]) or torch.equal(kept[0, 0], kept[1, 0]))
    ours, sums = dropped(q, k, v, p=p, causal=causal, mask=mask)
    torch.manual_seed(5)
    found = torch.ops.interlace.attention_for_cpu_backward(grad, q, k, v, ours, sums, p, causal, attn_mask=mask)
    close = {torch.float32: 3e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    for a, wanted in zip((ours, *found), (out, *gradients), strict=True):
        torch.testing.assert_close(a.double(), wanted, rtol=close, atol=close * max(1.0, wanted.abs().max().item()))


def encoder_run(**settings: Any) -> tuple[list[float], str, int]:
    """Losses of a torch.nn layer whose attention has dropout, the captured operators' names, bytes of activations."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
    batch, optimizer = torch.randn(4, 64, 64), torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = interlace.Config(schedule=[], cache="off", **settings)
    trainer = interlace.compile(model, optimizer, lambda m, x: m(x).square().mean(), batch, config)
    losses = [trainer.step(batch).item() for _ in range(4)]
    return losses, trainer.program, int(trainer.summary()["activation_peak_bytes"])


@pytest.mark.host("attention with dropout as one operator is a kernel of the runtime's for CPUs")
def test_a_layer_of_torch_with_dropout_keeps_no_scores() -> None:
    losses, text, peak = encoder_run()
    assert text.count("flash_attention_for_cpu(") == 1 and len(re.findall(r"flash_attention_for_cpu\w*\(.*rng=0\b", text)) == 2
    assert encoder_run()[0] == losses and encoder_run(seed=1)[0] != losses
    assert encoder_run(passes="canonicalize,recompute(blocks=self_attn),shard(ranks=1),update")[0] == losses  # drawn again, the same
    theirs, other, more = encoder_run(kernels="torch")
    assert "flash_attention" not in other and peak < 0.8 * more
    assert losses == pytest.approx(theirs, rel=0.05) and losses != theirs
    assert "flash_attention" not in encoder_run(rng="compat")[1]


@pytest.mark.host("the runtime's own kernel of attention is one for CPUs")
def test_a_training_uses_it_unless_torch_is_asked_for() -> None:
    model, batch = llama(), tokens()

    def trained(**settings: str) -> torch.Tensor:
        own = copy.deepcopy(model)
        config = interlace.Config(schedule=[], cache="off", **settings)
        trainer = interlace.compile(own, torch.optim.SGD(own.parameters(), lr=0.1), language_loss, batch, config)
        for _ in range(3):
            trainer.step(batch)
        return own.get_input_embeddings().weight.detach().clone()

    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(3):
        language_loss(eager, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torchs, ours = trained(kernels="torch"), trained()
    assert not torch.equal(ours, torchs)  # that torch's kernel has eager's bits: tests/python/test_runtime_models.py
    for found in (torchs, ours):
        torch.testing.assert_close(found, eager.get_input_embeddings().weight)


class Read(nn.Module):
    """Attention with dropout, torch's function or written out, and a number that Python reads of it."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.first, self.last, self.written, self.kept = nn.Linear(8, 8), nn.Linear(8, 3), written, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)[:, None]
        if self.written:
            y = F.dropout((y @ y.transpose(-2, -1) * 0.5).softmax(-1), 0.3) @ y
        else:
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)
        self.kept.append(y.sum().item())
        return self.last(y).sum((1, 2))


@pytest.mark.parametrize("written", [False, True])
def test_with_dropout_beside_what_python_reads(written: bool) -> None:
    """The Python that runs again for the number has the program's draws: its loss is compared with the program's in each step."""
    torch.manual_seed(0)
    model, x = Read(written), torch.randn(4, 6, 8)
    with interlace.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(), x, interlace.Config(schedule=[], cache="off")
    ) as trainer:
        losses = [trainer.step(x).item() for _ in range(3)]
    assert len(set(losses)) == 3 and len(set(model.kept[-3:])) == 3, "each step draws others"


def test_kernels_are_one_of_two() -> None:
    with pytest.raises(interlace.InterlaceError, match="kernels must be one of 'auto', 'torch', not 'flash'"):
        interlace.Config(kernels="flash")
