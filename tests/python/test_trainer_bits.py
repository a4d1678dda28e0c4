"""Equal bits: between strategies, between runs, with dropout; the rank functions are here too."""

from __future__ import annotations

import hashlib
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo


def digest(weights: dict[str, torch.Tensor]) -> str:
    h = hashlib.sha256()
    for name, t in sorted(weights.items()):  # a file's order is that of the stages
        h.update(name.encode() + t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def runs(
    case: str, settings: list[dict[str, Any]], steps: int = 6, clip: float | None = 0.3, optimizer: str = "adamw"
) -> list[Any]:
    """(losses, digest of all weights) of each setting, from the same start."""
    out = []
    for config in settings:
        losses, weights = parity.by_interlace(case, zoo.build(case, torch.float32), optimizer, steps, clip, **config)
        out.append((losses, digest(weights)))
    return out


STRATEGIES = ("shard", "zero1", "replicate")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "setting",
    [{}, {"accumulation": 4}, {"accumulation": 4, "accumulate_mode": "reduce_last"}],
    ids=["plain", "each", "last"],
)
@pytest.mark.parametrize("case", ["llama", "gpt2_dropout", "batchnorm"])
def test_strategies_give_the_same_bits(case: str, setting: dict[str, Any], size: int) -> None:
    found = ranks.run(runs, size, case, [{**setting, "strategy": s} for s in STRATEGIES])
    for per_rank in found:
        assert per_rank[0] == per_rank[1] == per_rank[2]
        assert per_rank == found[0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_repeated_run_gives_the_same_bits_with_dropout(size: int) -> None:
    found = ranks.run(runs, size, "gpt2_dropout", [{"seed": 3}, {"seed": 3}, {"seed": 4}], clip=None)
    for first, second, other in found:
        assert first == second
        assert other != first, "another seed must drop other elements"


def test_reduce_each_and_reduce_last_differ_only_by_rounding() -> None:
    modes = [{"accumulation": 4, "accumulate_mode": m} for m in ("reduce_each", "reduce_last")]
    (each, _), (last, _) = ranks.run(runs, 2, "llama", modes, optimizer="sgd")[0]
    assert each == pytest.approx(last, rel=1e-5)


def dropout_in_compat_mode(steps: int) -> tuple[list[float], list[float]]:
    """(ours, eager's) losses with the same generator state at the start."""
    import copy

    import interlace

    first = zoo.build("gpt2_dropout", torch.float32)
    theirs = copy.deepcopy(first)
    opt, their_opt = parity.make_optimizer("sgd", first), parity.make_optimizer("sgd", theirs)
    trainer = interlace.compile(first, opt, zoo.causal_loss, zoo.tokens(4, 0), interlace.Config(rng="compat"))
    torch.manual_seed(5)
    ours = [float(trainer.step(zoo.tokens(4, i))) for i in range(steps)]
    torch.manual_seed(5)
    eager = []
    for i in range(steps):
        loss = zoo.causal_loss(theirs, zoo.tokens(4, i))
        loss.backward()
        their_opt.step()
        their_opt.zero_grad()
        eager.append(loss.item())
    return ours, eager


@pytest.mark.host("the CPU's generator; that of a device: tests/regress")
def test_dropout_in_compat_mode_draws_what_eager_draws() -> None:
    ours, eager = ranks.run(dropout_in_compat_mode, 1, 5)[0]
    assert ours == pytest.approx(eager, rel=1e-6)
    assert len(set(ours)) == 5
