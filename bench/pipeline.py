"""Pipelines against PyTorch's: torch.distributed.pipelining's schedules and ours on the same ranks.

python bench/pipeline.py --mbit 500                    # root: network namespaces shaped with tc
python bench/pipeline.py                               # loopback, unshaped
python bench/pipeline.py --ranks 4 --rounds 3 --only 1f1b,ours-1f1b --json out.json

All ranks work on one batch of eight micro-batches, methods take turns (bench/turns.py). A step can be no shorter than the compute of a
stage, which is its part of that of one rank that does all, and the time until the last stage has its first micro-batch.
"""

from __future__ import annotations

import turns
from stage_methods import MICRO_BATCHES, STAGES

CASE = {"hidden": 512, "layers": 8, "heads": 8, "inter": 1376, "vocab": 512, "tokens": 128, "rows": 16}
TINY = {"hidden": 64, "layers": 4, "heads": 4, "inter": 172, "vocab": 64, "tokens": 32, "rows": 8}


def wire_bytes(case: dict[str, int], ranks: int) -> float:
    """An inner stage's activations go up, their gradients down; of two stages each sends one of them."""
    return (2 if ranks > 2 else 1) * 4 * case["rows"] * case["tokens"] * case["hidden"]


def part(whole: float, ranks: int) -> float:
    """With filling and draining: a stage waits for the others' parts of one micro-batch."""
    return whole / ranks * (1 + (ranks - 1) / MICRO_BATCHES)


if __name__ == "__main__":
    peers = ("gpipe", "1f1b", "interleaved", "zbv")
    turns.run(turns.Contest("pipeline", STAGES, peers, CASE, TINY, wire_bytes, part, warm_up=6), __doc__)
