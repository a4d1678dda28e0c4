"""Batches that every rank has in one shape, as a program takes them: filled up to the largest of all ranks, with what changes no loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.errors import InterlaceError

Tensor = torch.Tensor
# What a loss does not see: positions behind the text, by the names that transformers gives its inputs.
FILL = {
    "input_ids": 0, "attention_mask": 0, "labels": -100, "token_type_ids": 0, "position_ids": 0, "decoder_input_ids": 0,
    "decoder_attention_mask": 0, "shift_labels": -100, "special_tokens_mask": 1,
}  # fmt: skip

Sizes = dict[str, tuple[int, ...]]


def sizes_of(batches: Sequence[Mapping[str, Any]]) -> Sizes:
    """The largest size of every tensor with dimensions, over these batches of all ranks. Every rank must call it with as many names."""
    found: dict[str, list[int]] = {}
    for batch in batches:
        for name, t in batch.items():
            if isinstance(t, Tensor) and t.dim():
                known = found.setdefault(name, [0] * t.dim())
                found[name] = [max(a, b) for a, b in zip(known, t.shape, strict=True)]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        if any(list(theirs) != list(found) for theirs in everyone):
            raise InterlaceError(f"the batches of the ranks have other entries: {' | '.join(', '.join(theirs) for theirs in everyone)}")
        found = {n: [max(column) for column in zip(*(theirs[n] for theirs in everyone), strict=True)] for n in found}
    return {name: tuple(size) for name, size in found.items()}


def filled(batch: Mapping[str, Any], sizes: Sizes, pad_id: int = 0) -> dict[str, Any]:
    """The batch in these sizes. Error: an entry would have to be filled up, and nothing says with what."""
    out: dict[str, Any] = {}
    for name, t in batch.items():
        if isinstance(t, Tensor) and name in sizes and tuple(t.shape) != sizes[name]:
            if name not in FILL:
                raise InterlaceError(
                    f"batch entry '{name}' has shape {list(t.shape)} here and {list(sizes[name])} elsewhere in this step, and nothing says "
                    "what to fill it with; have the data collator give one shape, or drop the last batch (dataloader_drop_last=True)"
                )
            widths = [w for n, s in zip(reversed(t.shape), reversed(sizes[name]), strict=True) for w in (0, s - n)]
            t = F.pad(t, widths, value=pad_id if name == "input_ids" else FILL[name])
        out[name] = t
    return out
