"""verify_steps: a step made twice changes nothing, and a flipped bit is found, said, and undone."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest, runs

import interlace
from interlace.config import ConfigError
from interlace.train.verify import SilentCorruptionError

STRATEGIES = ("shard", "zero1", "replicate")
SETTINGS: list[dict[str, Any]] = [
    *({"strategy": s} for s in STRATEGIES),
    {"accumulation": 4, "accumulate_mode": "reduce_last"},
    {"param_dtype": "float16", "loss_scale": "dynamic"},
    {"schedule": [(0, ["reposition_update"])]},  # the update of a step is made in the next one
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", ["gpt2_dropout", "batchnorm"])
def test_a_step_made_twice_changes_no_bit(case: str, size: int) -> None:
    for setting in SETTINGS:
        if case == "batchnorm" and "param_dtype" in setting:
            continue  # CPUs have no such kernel in float16
        for per_rank in ranks.run(runs, size, case, [{**setting, "verify_steps": n} for n in (0, 2)]):
            assert per_rank[0] == per_rank[1], setting


def on_mesh(verify: int, **setting: Any) -> tuple[list[float], str]:
    rank, size = parity.rank_and_size()
    config = interlace.Config(verify_steps=verify, **setting)
    place, _ = config.data_place(rank, size)
    model = zoo.build("llama", torch.float32)
    batches = [zoo.tokens(4, 10 * i + place) for i in range(5)]
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batches[0], config) as trainer:
        losses = [float(trainer.step(batch)) for batch in batches]
        return losses, digest(trainer.state_dict(all_ranks=True))


@pytest.mark.parametrize(
    "setting",
    [
        {"mesh": {"pp": 2, "dp": 1}, "accumulation": 4},
        {"mesh": {"dp": 1, "tp": 2}},
        {"mesh": {"replica": 2, "dp": 1}},
        {"tier": "host", "schedule": [(0, ["offload(limit=1MiB,kinds=states)"])]},
    ],
    ids=["stages", "tensor", "replicas", "tier"],
)
def test_so_it_is_on_every_mesh_and_with_states_out_of_memory(setting: dict[str, Any]) -> None:
    assert ranks.run(on_mesh, 2, 2, **setting) == ranks.run(on_mesh, 2, 0, **setting)


def in_compat_mode(verify: int) -> list[float]:
    model = zoo.build("gpt2_dropout", torch.float32)
    config = interlace.Config(rng="compat", verify_steps=verify)
    torch.manual_seed(5)
    with interlace.compile(model, parity.make_optimizer("sgd", model), zoo.causal_loss, zoo.tokens(4, 0), config) as trainer:
        return [float(trainer.step(zoo.tokens(4, i))) for i in range(4)]


def test_one_generator_draws_the_same_twice() -> None:
    assert in_compat_mode(2) == in_compat_mode(0)


def flipped(where: str, strategy: str, bad_rank: int, tier: str | None = None) -> dict[str, Any]:
    """Trains, with one bit flipped on one rank in the second of both runs of step 4: of a weight before it, of a state after it."""
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    config = interlace.Config(strategy=strategy, verify_steps=5, schedule=[], tier=tier, memory_limit=None)
    out: dict[str, Any] = {"said": None}
    batches = [zoo.tokens(4, 10 * i + rank) for i in range(8)]
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batches[0], config) as trainer:
        run = trainer._run
        for batch in batches[:4]:
            trainer.step(batch)
        before, plain, calls = digest(trainer.state_dict(all_ranks=True)), run.runner, []

        class Faulty:
            def step(self, *words: Any) -> Any:
                calls.append(words)
                bad = len(calls) == 2 and rank == bad_rank
                weights = ("exp_avg",) if where == "state" else ("full", "shard")
                unit, role = next((u, r) for u, r in run.states.kept() if r in weights and u.parameters[0].name == "model.norm.weight")
                storage = run.states.local(unit, role)[0]
                if bad and where == "weight":
                    storage.view(torch.int32)[0] ^= 1 << 20
                result = plain.step(*words)
                if bad and where == "state":
                    storage.view(torch.int32)[0] ^= 1
                return result

        run.runner = Faulty()
        try:
            trainer.step(batches[4])
        except SilentCorruptionError as e:
            out["said"] = str(e)
        run.runner = plain
        out |= {"calls": len(calls), "undone": digest(trainer.state_dict(all_ranks=True)) == before, "steps": trainer.steps}
        out["after"] = [float(trainer.step(batch)) for batch in batches[4:]]
    return out


def unhurt(strategy: str) -> list[float]:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    batches = [zoo.tokens(4, 10 * i + rank) for i in range(8)]
    config = interlace.Config(strategy=strategy, schedule=[])
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batches[0], config) as trainer:
        return [float(trainer.step(batch)) for batch in batches][4:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["weight", "state"])
def test_a_flipped_bit_is_found_said_and_undone(where: str, strategy: str) -> None:
    expected = ranks.run(unhurt, 2, strategy)
    for found, losses in zip(ranks.run(flipped, 2, where, strategy, 1), expected, strict=True):
        assert found["said"] is not None and found["said"].startswith("step 4, made twice from the same state, gave two results: ")
        assert found["calls"] == 2 and found["undone"] and found["steps"] == 4
        assert found["after"] == losses, "training goes on as if nothing had been"
        if where == "state":
            assert re.search(r"results: on rank 1 exp_avg of '[\w.]+'", found["said"]) and "on rank 0" not in found["said"]
        elif strategy == "replicate":  # the other rank's forward did not see the weight
            assert "test the memory and the processor of rank 1 (host " in found["said"]


def test_a_flipped_bit_on_one_rank_names_its_host() -> None:
    found = ranks.run(flipped, 1, "weight", "shard", 0)[0]
    assert "output 'loss', weight of " in found["said"]
    assert "Test the memory and the processor of host " in found["said"] and "on rank" not in found["said"]


def test_a_full_disk_is_said_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 2)
    batch = {"x": torch.randn(8, 4)}
    config = interlace.Config(verify_steps=1)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b["x"]).square().mean(), batch, config) as t:

        def full(**words: Any) -> Any:
            return open("/dev/full", "r+b", buffering=0)

        monkeypatch.setattr(tempfile, "TemporaryFile", full)
        with pytest.raises(interlace.InterlaceError, match=r"No space left on device; make room there, set TMPDIR"):
            t.step(batch)
        monkeypatch.undo()
        assert t.steps == 0
        t.step(batch)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1.0 if float(x.sum()) > -1e9 else 2.0)


def test_what_runs_in_python_is_refused_by_name() -> None:
    model = torch.nn.Sequential(Counting(), torch.nn.Linear(4, 2))
    batch = {"x": torch.randn(8, 4)}
    config = interlace.Config(verify_steps=3, fullgraph=False)
    with pytest.raises(interlace.InterlaceError, match=r"verify_steps makes a step twice, but .*0.* runs in Python"):
        interlace.compile(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b["x"]).square().mean(), batch, config)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="verify_steps must be a whole number of at least 0, not -1"):
        interlace.Config(verify_steps=-1)
    with pytest.raises(ConfigError, match="needs mode='compiled'"):
        interlace.Config(verify_steps=2, mode="eager")
