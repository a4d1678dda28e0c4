"""Muon for the matrices and AdamW for the rest, against PyTorch's own, on real ranks: whole matrices, dealt to the ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from torch import nn

import interlace

Tensor = torch.Tensor
STRATEGIES = ("shard", "zero1", "replicate")


def optimizers(model: nn.Module, **muon: Any) -> list[torch.optim.Optimizer]:
    """As people have them: embeddings, heads and vectors by AdamW."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "head" not in n]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    half = len(matrices) // 2
    groups = [{"params": matrices[:half], "weight_decay": 0.0}, {"params": matrices[half:]}]
    return [torch.optim.Muon(groups, lr=0.02, **muon), torch.optim.AdamW(rest, lr=1e-3)]


def schedulers(members: list[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in members]


def compiled(case: str, steps: int, muon: dict[str, Any], config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = zoo.build(case, torch.float64)
    members = optimizers(model, **muon)
    accumulation = config.get("accumulation", 1)
    settings = interlace.Config(**{"schedule": [], "cache": "off", **config})
    rank, _ = settings.data_place(*parity.rank_and_size())
    example = parity.batch_of(case, 0, rank, accumulation)
    with interlace.compile(model, members, zoo.CASES[case].loss, example, settings) as trainer:
        following = schedulers(members)
        losses = []
        for step in range(steps):
            losses.append(parity.mean_over_ranks(trainer.step(parity.batch_of(case, step, rank, accumulation))))
            for s in following:
                s.step()
        return losses, dict(trainer.state_dict(all_ranks=True))


def in_pytorch(case: str, steps: int, muon: dict[str, Any], config: dict[str, Any], size: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process, with the batches of all ranks."""
    model = zoo.build(case, torch.float64)
    members = optimizers(model, **muon)
    following = schedulers(members)
    accumulation = config.get("accumulation", 1)
    losses = []
    for step in range(steps):
        total = 0.0
        for r in range(size):
            for part in parity.pieces(parity.batch_of(case, step, r, accumulation), accumulation):
                loss = zoo.CASES[case].loss(model, part)
                (loss / (accumulation * size)).backward()
                total += float(loss.detach()) / (accumulation * size)
        if config.get("clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), config["clip_norm"])
        for optimizer, scheduler in zip(members, following, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses.append(total)
    return losses, dict(model.state_dict())


def check(case: str, size: int, muon: dict[str, Any], config: dict[str, Any]) -> None:
    ours = ranks.run(compiled, size, case, 6, muon, config)[0]
    far = parity.distance(ours, in_pytorch(case, 6, muon, config, size))
    assert far.loss <= 1e-6 and far.weights <= 1e-6, f"{case} {config} on {size} ranks: {far}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_muon_gives_pytorchs_numbers(size: int, strategy: str) -> None:
    check("llama", size, {}, {"strategy": strategy})


@pytest.mark.parametrize(
    "case, muon, config",
    [
        ("vit", {"nesterov": False}, {"strategy": "shard", "clip_norm": 0.3, "accumulation": 2}),
        ("vit", {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, {"strategy": "zero1", "clip_norm": 0.3}),
        ("gpt2", {"momentum": 0.5, "ns_coefficients": (2.0, -1.5, 0.5)}, {"strategy": "replicate", "accumulation": 2}),
    ],
)
def test_settings_of_muon(case: str, muon: dict[str, Any], config: dict[str, Any]) -> None:
    check(case, 2, muon, config)


def test_hybrid_sharding_deals_within_the_shards_ranks() -> None:
    check("llama", 4, {}, {"mesh": {"replica": 2, "dp": 2}})
    check("llama", 4, {}, {"mesh": {"replica": 2, "dp": 2}, "strategy": "zero1"})


def test_stages_have_their_own_matrices() -> None:
    config = {"mesh": {"pp": 2, "dp": 1}, "accumulation": 2}
    ours = ranks.run(compiled, 2, "llama", 6, {}, config)[0]
    far = parity.distance(ours, in_pytorch("llama", 6, {}, config, 1))
    assert far.loss <= 1e-6 and far.weights <= 1e-6, str(far)


def test_a_mesh_that_cuts_matrices_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"the mesh cuts parameter .* along tp, and Muon needs whole matrices"):
        ranks.run(compiled, 2, "llama", 1, {}, {"mesh": {"dp": 1, "tp": 2}})


# ---- a small net, on one rank or several ----


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)]
    return nn.Sequential(*layers).double()


def net_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def net_batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))}


def trainer_of(model: nn.Module, **config: Any) -> interlace.Trainer:
    return interlace.compile(model, optimizers(model), net_loss, net_batch(0), interlace.Config(cache="off", **config))


def test_members_are_taken_over_and_given_back() -> None:
    """Optimizers that have made steps, and state dicts of each that PyTorch goes on with."""

    def steps(model: nn.Module, members: list[torch.optim.Optimizer], numbers: range) -> None:
        for step in numbers:
            net_loss(model, net_batch(step)).backward()
            for o in members:
                o.step()
                o.zero_grad()

    plain = net()
    steps(plain, optimizers(plain), range(9))
    model = net()
    members = optimizers(model)
    steps(model, members, range(3))
    with interlace.compile(model, members, net_loss, net_batch(0), interlace.Config(cache="off")) as trainer:
        for step in range(3, 6):
            trainer.step(net_batch(step))
        weights, states = trainer.state_dict(), [o.state_dict() for o in members]
        with pytest.raises(interlace.InterlaceError, match=r"step\(\) of an optimizer that interlace\.compile was given"):
            members[0].step()
    again = net()
    again.load_state_dict(weights)
    members = optimizers(again)
    for o, state in zip(members, states, strict=True):
        o.load_state_dict(state)
    steps(again, members, range(6, 9))
    for p, q in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def saved(folder: str, strategy: str) -> list[float]:
    with trainer_of(net(), strategy=strategy) as trainer:
        for step in range(4):
            trainer.step(net_batch(step))
        trainer.save(folder)
        return [float(trainer.step(net_batch(step))) for step in range(4, 8)]


def resumed(folder: str, strategy: str) -> list[float]:
    with trainer_of(net(), strategy=strategy) as trainer:
        trainer.step(net_batch(99))
        trainer.load(folder)
        return [float(trainer.step(net_batch(step))) for step in range(4, 8)]


def test_checkpoints_load_at_another_number_of_ranks(tmp_path: Path) -> None:
    expected = ranks.run(saved, 2, str(tmp_path / "saved"), "shard")[0]
    for size, strategy in ((2, "shard"), (1, "replicate"), (4, "shard"), (3, "zero1")):
        losses = ranks.run(resumed, size, str(tmp_path / "saved"), strategy)[0]
        assert losses == pytest.approx(expected, rel=1e-6), f"{size} ranks, {strategy}"


def dealt(strategy: str) -> tuple[int, str]:
    with trainer_of(net(), strategy=strategy, schedule=[]) as trainer:
        trainer.step(net_batch(0))
        arena = trainer.stats()["arena"]
        return len(re.findall(r"= aten.linalg_vector_norm\(", trainer.program)), str(arena)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_does_all(strategy: str) -> None:
    """Of four matrices two are alike: one rank makes them all orthogonal, each of two ranks one of these and the others."""
    alone, _ = ranks.run(dealt, 1, strategy)[0]
    two, arena = ranks.run(dealt, 2, strategy)[0]
    assert (alone, two) == (4, 3), arena


def with_passes(schedule: list[str], tier: str | None, strategy: str) -> list[float]:
    config = {"schedule": [(0, schedule)], "tier": tier, "arena": tier is None, "strategy": strategy}
    rank, _ = parity.rank_and_size()
    with trainer_of(net(), **config) as trainer:
        return [float(trainer.step(net_batch(10 * step + rank))) for step in range(5)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_that_move_updates_change_no_bit(strategy: str) -> None:
    plain = ranks.run(with_passes, 2, [], None, strategy)
    ways: list[tuple[list[str], str | None]] = [
        (["overlap_update"], None), (["reposition_update"], None), (["bucket(modules=*)", "reorder"], None),
        (["search(evaluations=60)"], None),
    ]  # fmt: skip
    if strategy == "shard":
        ways += [(["host_update"], "host"), (["offload(limit=1MiB)"], "host")]
    for passes, tier in ways:
        assert ranks.run(with_passes, 2, passes, tier, strategy) == plain, passes


def test_what_cannot_be_done_is_said() -> None:
    model = net()
    with pytest.raises(interlace.InterlaceError, match=r"give interlace\.compile a list of optimizers"):
        interlace.compile(model, optimizers(model)[0], net_loss, net_batch(0), interlace.Config(cache="off"))
    twice = [*optimizers(model), torch.optim.SGD(list(model.parameters())[:1], lr=0.1)]
    with pytest.raises(interlace.InterlaceError, match=r"is in two optimizers, Muon .number 0. and SGD .number 2."):
        interlace.compile(model, twice, net_loss, net_batch(0), interlace.Config(cache="off"))
    with trainer_of(model) as trainer:
        trainer.step(net_batch(0))
    members = optimizers(model)
    with interlace.compile(model, members, net_loss, net_batch(0), interlace.Config(cache="off")) as trainer:
        members[0].param_groups[0]["ns_steps"] = 4
        with pytest.raises(interlace.InterlaceError, match="group 0 has other ns_steps"):
            trainer.step(net_batch(0))
