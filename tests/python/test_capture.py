"""Capture against eager PyTorch: the text, evaluated line by line, gives eager's bits."""

from __future__ import annotations

import pytest
import torch
from capture_support import check
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from interlace.capture import capture


def tokens(vocab, batch=2, seq=16):
    ids = torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def llama(**kw):
    config = dict(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**config, **kw}))


def gpt2(**kw):
    config = dict(
        n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=64, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(**{**config, **kw}))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def mse(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


XY = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(2)), "y": torch.zeros(6, 4)}


def test_mlp_text():
    """The text of a small model, less the lines that name versions and source lines."""
    c = check(Mlp(), mse, XY)
    lines = c.text.splitlines()
    assert lines[0] == "interlace 1 captured"
    meta = dict(line.split(" ", 2)[1:] for line in lines if line.startswith("meta "))
    assert meta["model"] == '"Mlp"' and meta["micro_batch"] == '"6"' and meta["rng"] == '"keyed"'
    sources = [line for line in lines if line.startswith("source ")]
    assert [s.partition(":")[0] for s in sources] == ['source 0 "test_capture.py', 'source 1 "test_capture.py']
    rest = [line for line in lines if line not in sources and not line.startswith(("meta ", "interlace "))]
    assert rest == GOLDEN.splitlines()


def test_llama():
    c = check(llama(), None, tokens(128))
    assert "aten._scaled_dot_product_flash_attention_for_cpu(" in c.text
    assert list(c.outputs) == ["loss"]


def test_llama_bf16():
    check(llama().to(torch.bfloat16), None, tokens(128))


def test_gpt2_tied_with_dropout():
    c = check(gpt2().train(), None, tokens(128), seed=3)
    assert 'param %0: f32[128,32] "transformer.wte.weight" trainable group 0 alias "lm_head.weight"' in c.text
    assert c.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert c.text.count(" rng=") == 1 + 2 * 3  # embedding, and attention, projection and MLP of each layer


def test_same_text_twice():
    assert capture(llama(), None, tokens(128)).text == capture(llama(), None, tokens(128)).text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_real_memory_is_not_touched(device):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama().config)
    before = {n: p for n, p in model.named_parameters()}
    text = capture(model, None, tokens(128)).text
    assert text == capture(llama(), None, tokens(128)).text
    assert all(p is before[n] and p.grad is None for n, p in model.named_parameters())


GOLDEN = """\
step 1 reduce_each
group 0 adamw
module 0 "" "Mlp"
module 1 "fc1" "Linear"
module 2 "fc2" "Linear"
param %0: f32[16,8] "fc1.weight" trainable group 0
param %1: f32[16] "fc1.bias" trainable group 0
param %2: f32[4,16] "fc2.weight" trainable group 0
param %3: f32[4] "fc2.bias" trainable group 0
input %4: f32[6,8] "x"
input %5: f32[6,4] "y"
phase micro_batch takes () gives () {
  %6: f32[8,16]{1,8} in %0+0 = aten.t(%0) {fwd m1 s0}
  %7: f32[6,16] = aten.addmm(%1, %4, %6) {fwd m1 s0}
  %8: f32[6,16] = aten.relu(%7) {fwd m0 s0}
  %9: f32[16,4]{1,16} in %2+0 = aten.t(%2) {fwd m2 s0}
  %10: f32[6,4] = aten.addmm(%3, %8, %9) {fwd m2 s0}
  %11: f32[] = aten.mse_loss(%10, %5) {fwd s1}
  output(%11) {fwd name="loss"}
  %12: f32[] = aten.ones_like(%11, memory_format=preserve) {bwd}
  %13: f32[6,4] = aten.mse_loss_backward(%12, %10, %5, 1) {bwd s1}
  %14: f32[4,16] in %2+0 = aten.t(%9) {bwd m2 s0}
  %15: f32[6,16] = aten.mm(%13, %14) {bwd m2 s0}
  %16: f32[4,6]{1,4} in %13+0 = aten.t(%13) {bwd m2 s0}
  %17: f32[4,16] = aten.mm(%16, %8) {bwd m2 s0}
  %18: f32[16,4]{1,16} in %17+0 = aten.t(%17) {bwd m2 s0}
  %19: f32[1,4] = aten.sum.dim_IntList(%13, [0], true) {bwd m2 s0}
  %20: f32[4] in %19+0 = aten.view(%19, [4]) {bwd m2 s0}
  %21: f32[4,16] in %17+0 = aten.t(%18) {bwd m2 s0}
  %22: f32[6,16] = aten.threshold_backward(%15, %8, 0) {bwd m0 s0}
  %23: f32[16,6]{1,16} in %22+0 = aten.t(%22) {bwd m1 s0}
  %24: f32[16,8] = aten.mm(%23, %4) {bwd m1 s0}
  %25: f32[8,16]{1,8} in %24+0 = aten.t(%24) {bwd m1 s0}
  %26: f32[1,16] = aten.sum.dim_IntList(%22, [0], true) {bwd m1 s0}
  %27: f32[16] in %26+0 = aten.view(%26, [16]) {bwd m1 s0}
  %28: f32[16,8] in %24+0 = aten.t(%25) {bwd m1 s0}
  grad(%0, %28) {bwd}
  grad(%1, %27) {bwd}
  grad(%2, %21) {bwd}
  grad(%3, %20) {bwd}
}
"""
