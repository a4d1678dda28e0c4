"""Batches that every rank has in one shape, as a program takes them: texts are filled up to the longest, with what changes no loss.

    rank 0 has [2, 90], [2, 70]; rank 1 has [2, 85], [1, 60]   →  all are [2, 90], and [1, 90] in the step's last micro-batch on rank 1

Rows are never filled up: a step with fewer rows in some micro-batches has a program that computes both numbers of rows (`Sizes.short`).
"""

from __future__ import annotations

import dataclasses
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
    "decoder_attention_mask": 0, "shift_labels": -100, "special_tokens_mask": 1, "completion_mask": 0,
}  # fmt: skip
ROUND = 64  # tokens
_WAY = "have the data collator pad to one length (padding='max_length')"


@dataclasses.dataclass
class Sizes:
    """Of the tensors of a step's batches on all ranks. `largest`; `short`: rows of entries in the batches that have fewer (all as few);
    `uneven`: entries that have several lengths; `texts`: those of integers with a length, as here."""

    largest: dict[str, tuple[int, ...]]
    short: dict[str, int] = dataclasses.field(default_factory=dict)
    uneven: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()

    def lengths(self) -> dict[str, int]:
        return {n: s[-1] for n, s in self.largest.items() if n in self.texts}

    def with_lengths(self, lengths: Mapping[str, int]) -> Sizes:
        return dataclasses.replace(self, largest={n: (*s[:-1], lengths.get(n, s[-1])) for n, s in self.largest.items()})

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Texts that have one length."""
        lengths = self.lengths()
        return tuple(tuple(n for n in lengths if lengths[n] == length) for length in dict.fromkeys(lengths.values()))


def _is_text(name: str, t: Tensor) -> bool:
    return name in FILL and t.dim() >= 2 and not t.is_complex() and (not t.is_floating_point() or ("mask" in name and t.dim() == 2))


def of_all_ranks(mine: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [mine]
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def sizes_of(batches: Sequence[Mapping[str, Any]], wrong: str = "") -> Sizes:
    """The sizes of these batches over all ranks. Every rank must call it. Error: no program takes them all, or `wrong`."""
    mine = [{n: tuple(t.shape) for n, t in b.items() if isinstance(t, Tensor) and t.dim()} for b in batches]
    everyone = of_all_ranks((mine, wrong))
    if wrong := next((theirs for _, theirs in everyone if theirs), ""):
        raise InterlaceError(f"{wrong}; a program takes padded texts (packing=False and padding_free=False, or a data collator that pads)")
    found = [batch for theirs, _ in everyone for batch in theirs]
    names = list(found[0])
    if other := next((b for b in found if set(b) != set(names) or any(len(b[n]) != len(found[0][n]) for n in names)), None):
        raise InterlaceError(f"the batches of a step have other entries than one another: {_words(found[0])} | {_words(other)}")
    largest = {n: tuple(map(max, zip(*(b[n] for b in found), strict=True))) for n in names}
    rows = [n for n in names if any(b[n][0] != largest[n][0] for b in found)]
    kinds = {tuple(b[n][0] for n in rows) for b in found} - {tuple(largest[n][0] for n in rows)}
    if len(kinds) > 1:
        raise InterlaceError(
            f"the batches of a step have {', '.join(sorted({str(b[rows[0]][0]) for b in found}))} rows ('{rows[0]}'); two numbers are what a "
            "step can have, one of them in the last batch of a data set"
        )
    uneven = frozenset(n for n in names if any(b[n][1:] != largest[n][1:] for b in found))
    texts = frozenset(n for n, t in batches[0].items() if isinstance(t, Tensor) and _is_text(n, t))
    for n in uneven:
        if n not in texts or any(b[n][1:-1] != largest[n][1:-1] for b in found):
            shapes = " and ".join(dict.fromkeys(str(list(b[n])) for b in found))
            raise InterlaceError(
                f"batch entry '{n}' has the shapes {shapes} in one step, and nothing says what to fill it up with; {_WAY}, or take "
                "gradient_accumulation_steps=1 on one rank"
            )
    return Sizes(largest, dict(zip(rows, kinds.pop(), strict=True)) if kinds else {}, uneven, texts)


def _words(batch: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{n} {list(s)}" for n, s in batch.items())


def filled(batch: Mapping[str, Any], sizes: Sizes, pad_id: int = 0) -> dict[str, Any]:
    """The batch in these sizes; rows that it lacks are its last one."""
    out: dict[str, Any] = {}
    for name, t in batch.items():
        if isinstance(t, Tensor) and name in sizes.largest:
            size = sizes.largest[name]
            if t.shape[0] != size[0]:
                t = t[torch.arange(size[0], device=t.device).clamp(max=t.shape[0] - 1)]
            if t.shape != size:
                t = F.pad(t, (0, size[-1] - t.shape[-1]), value=pad_id if name == "input_ids" else FILL[name])
        out[name] = t
    return out


def rounded(sizes: Sizes, first: Mapping[str, int], most: int) -> Sizes:
    """Lengths up to a multiple of ROUND, but for those of the first batch: a collator that pads to one length has that."""
    lengths = {n: length for n, length in sizes.lengths().items() if length != first.get(n)}
    return sizes.with_lengths({n: max(length, min(-(-length // ROUND) * ROUND, most)) for n, length in lengths.items()})


def two_lengths(sizes: Sizes, most: int) -> tuple[Sizes, Sizes, dict[int, tuple[str, ...]]]:
    """Two sizes of texts; each group of them differs by a number of its own, by which it is told."""
    told: dict[int, tuple[str, ...]] = {}
    lengths = sizes.lengths()
    few, many = dict(lengths), dict(lengths)
    for names in sizes.groups():
        length = lengths[names[0]]
        by = next(n for n in range(length // 4 + 3, length + 9) if n not in told)
        told[by] = names
        few |= dict.fromkeys(names, length if length + by <= most else max(1, length - by))
        many |= dict.fromkeys(names, few[names[0]] + by)
    return sizes.with_lengths(few), sizes.with_lengths(many), told


def positions_of(config: Any) -> int:
    """The longest text that a model of transformers takes."""
    found = [2**30]
    for part in (config, *(vars(config).values() if hasattr(config, "to_dict") else ())):
        if hasattr(part, "to_dict"):
            for name in ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len"):
                limit = getattr(part, name, None)
                found += [limit] if isinstance(limit, int) and limit > 0 else []
    return min(found)
