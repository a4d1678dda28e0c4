"""The same numbers as PyTorch: interlace against FSDP2, DDP and one process with the same global batch, on real ranks.

`make test` runs a list in which every pair of settings occurs; the whole matrix, 50 steps each, runs with INTERLACE_SOAK=1.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import parity
import pytest
import ranks

SOAK = os.environ.get("INTERLACE_SOAK") == "1"
STEPS = 50
AXES: dict[str, tuple[Any, ...]] = {
    "size": (1, 2, 3, 4),
    "case": ("llama", "gpt2", "vit", "batchnorm"),
    "kind": (("float64", "adamw"), ("float32", "sgd")),
    "accumulation": (1, 4),
    "clip": (None, 0.3),
    "strategy": ("shard", "zero1", "replicate"),
    "mode": ("reduce_each", "reduce_last"),
}
# Largest relative distance of losses and of parameters to each peer.
BOUND = {("float64", "adamw"): 1e-6, ("float32", "sgd"): 1e-5, ("bfloat16", "adamw"): 2e-2}


def combinations(pairwise: bool) -> list[dict[str, Any]]:
    """All combinations of AXES, or few that together have every pair of values; by number of ranks."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    every = [c for c in every if not (c["accumulation"] == 1 and c["mode"] == "reduce_last")]
    if not pairwise:
        return every

    def pairs(c: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, c[a], b, c[b]) for a, b in itertools.combinations(AXES, 2)}

    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda c: len(pairs(c) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return sorted(chosen, key=lambda c: c["size"])


def name_of(c: dict[str, Any]) -> str:
    mode = "" if c["accumulation"] == 1 else f"x{c['accumulation']}-{c['mode']}"
    return f"{c['size']}-{c['case']}-{c['kind'][0]}-{c['kind'][1]}-{c['strategy']}{mode}{'-clip' if c['clip'] else ''}"


def check(c: dict[str, Any], steps: int) -> None:
    dtype, optimizer = c["kind"]
    found = ranks.run(
        parity.compare, c["size"], c["case"], dtype, optimizer, steps, c["clip"], c["accumulation"], c["strategy"], c["mode"],
        timeout_s=900,
    )[0]  # fmt: skip
    assert "one" in found and (c["size"] == 1 or {"fsdp2", "ddp"} <= set(found))
    for peer, distances in found.items():
        if peer != "fsdp2-ddp":
            assert max(distances) <= BOUND[c["kind"]], f"{peer}: loss and weight distances {distances}"


@pytest.mark.parametrize("c", combinations(pairwise=not SOAK), ids=name_of)
def test_matrix(c: dict[str, Any]) -> None:
    check(c, STEPS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mixtral_in_bfloat16(size: int) -> None:
    c = {
        "size": size,
        "case": "mixtral",
        "kind": ("bfloat16", "adamw"),
        "accumulation": 1,
        "clip": 1.0,
        "strategy": "shard",
    }
    check({**c, "mode": "reduce_each"}, STEPS)


def test_adam_of_float32_is_no_farther_from_fsdp2_than_twice_ddp() -> None:
    """AdamW amplifies rounding, so float32 runs of PyTorch differ from each other; ours must be among them."""
    cases = ("llama", "gpt2", "vit", "batchnorm")
    ours = peers = 0.0
    for case in cases:
        found = ranks.run(
            parity.compare, 4, case, "float32", "adamw", STEPS, 0.3, 1, "shard", peers=("fsdp2", "ddp"), timeout_s=900
        )[0]
        ours, peers = ours + found["fsdp2"][1], peers + found["fsdp2-ddp"][1]
    assert peers > 0, "the peers agree in every bit, which says nothing"
    assert ours <= 2 * peers, f"distance to FSDP2 {ours:.2e}, FSDP2 to DDP {peers:.2e}"
