"""The model of `interlace train`: a causal language model by name or Hugging Face config, fitted to the tokenizer."""

from __future__ import annotations

import torch
from torch import nn

from interlace import models
from interlace.errors import InterlaceError

VOCAB_MULTIPLE = 64  # a preset's vocabulary is rounded up to it, so that the head's rows stay aligned


def check(name: str) -> models.Preset:
    """The preset or config behind a name. Error: unknown (did you mean), or not a language model."""
    preset = models.resolve(name)
    if preset.kind != "causal-lm":
        known = ", ".join(p.name for p in models.PRESETS.values() if p.kind == "causal-lm" and not p.meta)
        raise InterlaceError(f"'{name}' is no language model and cannot be trained on text: use one of {known}")
    return preset


def build(name: str, vocab: int, seq: int, dtype: torch.dtype, keep_vocab: bool = False) -> nn.Module:
    """The model on the meta device: its parameters take no memory yet.

    A preset takes the tokenizer's vocabulary; a config.json (or `keep_vocab`) keeps its own, which must hold the tokenizer's.
    """
    preset = check(name)
    if name in models.PRESETS and not keep_vocab:
        vocab_size = (vocab + VOCAB_MULTIPLE - 1) // VOCAB_MULTIPLE * VOCAB_MULTIPLE
    else:
        vocab_size = int(preset.options.get("vocab_size") or vocab)
        if vocab_size < vocab:
            raise InterlaceError(
                f"the tokenizer has {vocab} entries, but {preset.name} has a vocab_size of {vocab_size}: "
                + ("use a smaller --vocab, or --tokenizer byte (257 entries)" if vocab > 257 else "use a smaller tokenizer, or another model")
            )
    text_dtype = str(dtype).removeprefix("torch.")
    return models.build(name, seq=seq, vocab_size=vocab_size, dtype=text_dtype, meta=True).model
