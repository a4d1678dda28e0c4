"""From the batch of one optimizer step to the tensors of its micro-batches, checked against what was compiled.

A batch is what the training loop gives to one step on this rank: a structure of tensors, cut along dimension 0 into G
micro-batches, or a list of G such structures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from interlace.capture.inputs import InputSpec
from interlace.errors import InterlaceError


def micro_batches(spec: InputSpec | None, batch: Any, count: int) -> list[Any]:
    """The micro-batches of a step's batch. `spec` is that of one micro-batch, or None before there is one.

    A list of `count` batches is told from one batch that is a list by its elements: it is a list of batches when they are no tensors.
    """
    if type(batch) is list and batch and not any(isinstance(x, torch.Tensor) for x in batch):
        nested = spec is not None and any(isinstance(t.path[0], int) and len(t.path) > 1 for t in spec.tensors if t.path)
        if not nested or len(batch) == count:
            if len(batch) != count:
                raise InterlaceError(
                    f"the batch is a list of {len(batch)} micro-batches, but a step has {count} (Config.accumulation); "
                    f"pass {count} of them, or one batch that can be cut into {count}"
                )
            return batch
    if count == 1:
        return [batch]
    return InputSpec.of(batch).split(batch, count)


def any_micro_batches(spec: InputSpec | None, batch: Any, count: int, listed: bool = False) -> list[Any]:
    """micro_batches() of whatever it is; a list of others is one batch, where a step has one. `listed`: a list of one is, too."""
    if count == 1 and type(batch) is list and (listed or len(batch) != 1):
        return [batch]
    return micro_batches(spec, batch, count)


def flatten(spec: InputSpec, parts: list[Any], device: torch.device) -> list[list[torch.Tensor]]:
    """The tensors of each micro-batch in the order of the program's inputs, contiguous and on the device.

    Errors: a missing or unknown entry, another shape or dtype than compiled for, meta tensors.
    """
    out = []
    for i, part in enumerate(parts):
        try:
            tensors = spec.flatten(part)
        except InterlaceError as e:
            if len(parts) == 1:
                raise
            raise type(e)(f"micro-batch {i} of {len(parts)}: {e}") from e
        for t, x in zip(spec.tensors, tensors, strict=True):
            if x.is_meta:
                raise InterlaceError(f"batch entry '{t.name}' is on the meta device and has no data")
        out.append([x.detach().to(device).contiguous() for x in tensors])
    return out


def describe(spec: InputSpec, data_ranks: int = 1) -> dict[str, str]:
    """Input name → "int64[2, 128]", to compare between ranks; `data_ranks`: where stages differ, those of this rank's stage, whose rows are
    added up."""
    rows = next((t.shape[0] for t in spec.tensors if t.shape), 1)
    whole = {
        t.name: dataclasses.replace(t, shape=(t.shape[0] * data_ranks, *t.shape[1:])) if t.shape and t.shape[0] == rows else t
        for t in spec.tensors
    }
    return {name: t.describe() for name, t in whole.items()}
