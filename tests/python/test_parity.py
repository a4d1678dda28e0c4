"""The same numbers as PyTorch: interlace against FSDP2, DDP and one process with the same global batch, on real ranks.

`make test` runs combinations in which every pair of settings occurs, `make soak` the whole matrix. Combinations of one number of ranks,
model, dtype and optimizer are one launch, which trains each peer once.
"""

from __future__ import annotations

import itertools
from typing import Any

import parity
import pytest
import ranks
from parity import Setting

STEPS = 50
SAMPLE_STEPS = 20  # of `make test`: all that depends on a step's number has happened, and most of the time is the peers'
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


Group = tuple[int, str, tuple[str, str]]


def groups(found: list[dict[str, Any]]) -> dict[Group, list[Setting]]:
    """The combinations by what one launch has in common."""
    out: dict[Group, list[Setting]] = {}
    for c in found:
        setting = Setting(c["accumulation"], c["clip"], c["strategy"], c["mode"])
        out.setdefault((c["size"], c["case"], c["kind"]), []).append(setting)
    return out


def name_of(group: Group) -> str:
    size, case, kind = group
    return f"{size}-{case}-{'-'.join(kind)}"


def check(group: Group, settings: list[Setting], steps: int = SAMPLE_STEPS) -> None:
    """Every setting is as close to each peer as BOUND says; what is not is listed."""
    size, case, kind = group
    peers = {"one"} if size == 1 else {"one", "fsdp2", "ddp"}
    found = ranks.run(parity.compare, size, case, *kind, steps, settings, cache=ranks.CACHE, timeout_s=3600)[0]
    far = []
    for setting, distances in zip(settings, found, strict=True):
        assert peers <= set(distances)
        far += [
            f"{setting}: to {peer} {distances[peer]}"
            for peer in sorted(peers)
            if not distances[peer].within(BOUND[kind])
        ]
    assert not far, "\n".join([f"{name_of(group)}: beyond {BOUND[kind]:g} in {len(settings)} combinations:", *far])


PAIRWISE = groups(combinations(pairwise=True))
MATRIX = groups(combinations(pairwise=False))


@pytest.mark.parametrize("group", PAIRWISE, ids=name_of)
def test_every_pair_of_settings(group: Group) -> None:
    check(group, PAIRWISE[group])


@pytest.mark.soak
@pytest.mark.parametrize("group", MATRIX, ids=name_of)
def test_whole_matrix(group: Group) -> None:
    check(group, MATRIX[group], STEPS)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_mixtral_in_bfloat16(size: int) -> None:
    check((size, "mixtral", ("bfloat16", "adamw")), [Setting(clip=1.0)], STEPS)


@pytest.mark.parametrize("case", AXES["case"])
def test_adam_of_float32_is_no_farther_from_fsdp2_than_twice_ddp(case: str) -> None:
    """AdamW amplifies rounding, so float32 runs of PyTorch differ from each other; ours must be among them, for every model by itself:
    how far they lie apart differs a thousandfold between models."""
    settings, peers = [Setting(clip=0.3)], ("fsdp2", "ddp")
    [found] = ranks.run(parity.compare, 4, case, "float32", "adamw", STEPS, settings, peers, timeout_s=900)[0]
    ours, reference = found["fsdp2"].weights, found["fsdp2-ddp"].weights
    assert reference > 0, "the peers agree in every bit, which says nothing"
    assert ours <= 2 * reference, f"distance to FSDP2 {ours:.2e}, FSDP2 to DDP {reference:.2e}"
