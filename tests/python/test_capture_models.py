"""Every preset, captured and evaluated line by line, gives eager's bits: loss, gradients, changed buffers."""

from __future__ import annotations

import pytest
from capture_support import check

from interlace.models import PRESETS, build


@pytest.mark.parametrize("name", [n for n in PRESETS if n.endswith("-tiny")])
def test_preset(name):
    built = build(name, micro_batch=2, seq=24)
    c = check(built.model, built.loss_fn, built.example_batch, seed=7)
    if name == "mixtral-tiny":
        assert "aten._grouped_mm(" in c.text
    if name == "convnet-tiny":
        assert c.text.count("  assign(") == 6  # mean, variance and number of batches of two norms


def test_experts_in_float32():
    """PyTorch's sizes of a grouped product are for bfloat16 alone; its kernel takes float32 too, and so does capture."""
    built = build("mixtral-tiny", micro_batch=2, seq=24)
    text = check(built.model.float(), built.loss_fn, built.example_batch, seed=7).text
    assert ": f32[" in next(line for line in text.splitlines() if "aten._grouped_mm(" in line)


def test_preset_in_evaluation_mode():
    built = build("convnet-tiny", micro_batch=2)
    text = check(built.model.eval(), built.loss_fn, built.example_batch).text
    assert "assign(" not in text


def test_padding_mask_that_is_data():
    """A mask among the inputs is data: the model must take the path that reads no values, and still agree."""
    built = build("llama-tiny", micro_batch=2, seq=24)
    batch = dict(built.example_batch)
    batch["attention_mask"] = batch["input_ids"].new_ones(2, 24)
    batch["attention_mask"][1, 20:] = 0
    assert "attn_mask=%" in check(built.model, built.loss_fn, batch).text
