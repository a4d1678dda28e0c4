"""The papers' schedule passes on real ranks: the bits of plain `shard`, alone and together, with and without accumulation."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest

import interlace

ROWS = 4
# Where a module list is needed: each element of the model's list of layers.
LAYERS = {"llama": "model.layers.*", "gpt2_dropout": "transformer.h.*", "batchnorm": "body.*"}
SINGLE = [
    "bucket(modules={layers})",
    "bucket(modules={layers},pack=copy)",
    "bucket(mode=greedy,cluster=h100-80gb-8)",
    "bucket(mode=greedy,cluster=h100-80gb-8,pack=copy,time=model)",
    "prefetch(cluster=l4-24gb-8)",
    "prefetch(limit=400kB,alpha=1)",
    "unshard(units=all)",
    "unshard(limit=400kB)",
    "reorder",
    "reorder(forward=before,backward=before)",
    "reorder(forward=after,backward=before)",
    "reorder(forward=after,backward=after)",
]
TOGETHER = [
    "bucket(modules={layers},pack=copy),reorder",
    "prefetch(alpha=1),unshard(units=all)",
    "unshard(units=all),bucket(modules={layers}),reorder",
    "bucket(modules={layers}),prefetch(limit=500kB),unshard(limit=500kB),reorder(forward=after)",
]


def train(case: str, pipelines: list[str], accumulation: int, steps: int) -> list[tuple[list[float], str]]:
    """(losses, digest of all weights) of each pipeline, from the same start."""
    rank, _ = parity.rank_and_size()
    out = []
    for pipeline in pipelines:
        model = zoo.build(case, torch.float32)
        settings = interlace.Config(passes=pipeline, accumulation=accumulation, timeout_s=120)
        batch: Any = zoo.CASES[case].batch
        with interlace.compile(
            model,
            parity.make_optimizer("adamw", model),
            zoo.CASES[case].loss,
            batch(ROWS * accumulation, rank),
            settings,
        ) as trainer:
            losses = [
                parity.mean_over_ranks(trainer.step(batch(ROWS * accumulation, step * 100 + rank)))
                for step in range(steps)
            ]
            out.append((losses, digest(dict(trainer.state_dict(all_ranks=True)))))
    return out


@pytest.mark.parametrize("case", list(LAYERS))
@pytest.mark.parametrize(("world", "accumulation", "steps"), [(2, 1, 30), (2, 3, 6), (4, 2, 4)])
def test_the_same_bits(case: str, world: int, accumulation: int, steps: int) -> None:
    start = f"canonicalize,shard(ranks={world}),accumulate(steps={accumulation}),update(clip=0.3)"
    passes = [p.format(layers=LAYERS[case]) for p in SINGLE + TOGETHER]
    if accumulation == 1:
        passes.append(f"unshard(units=all),bucket(modules={LAYERS[case]},pack=copy)")
    pipelines = [start, *(f"{start},{p}" for p in passes)]
    for plain, *others in ranks.run(train, world, case, pipelines, accumulation, steps, timeout_s=600):
        for name, other in zip(passes, others, strict=True):
            assert other == plain, f"{name}: losses or weights have other bits"
