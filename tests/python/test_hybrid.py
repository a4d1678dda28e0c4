"""Hybrid sharding on a mesh of two axes, on four real ranks: the numbers of one process, of `replicate` and of FSDP2's HSDP; the same
bits twice and under every schedule; checkpoints that load on any other mesh; meshes that cannot be.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import test_checkpoint
import torch
import zoo
from safetensors.torch import load_file
from test_trainer_bits import digest

import interlace
from interlace.config import ConfigError
from interlace.config.schedule import default_schedule
from interlace.dist.mesh import Mesh
from interlace.dist.peers import PeerError

MESH = {"replica": 2, "dp": 2}
STEPS = 5


def by_hsdp(case: str, model: torch.nn.Module, clip: float | None, accumulation: int) -> parity.Run:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    losses, model = parity.by_torch(case, model, "adamw", STEPS, clip, accumulation)
    return losses, {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def distances(case: str, accumulation: int, mode: str) -> dict[str, parity.Distance]:
    """On rank 0, which alone trains in one process too."""
    clip, first = 0.3, zoo.build(case, torch.float64)

    def ours(**config: Any) -> parity.Run:
        config = {"accumulation": accumulation, "accumulate_mode": mode, **config}
        return parity.by_interlace(case, copy.deepcopy(first), "adamw", STEPS, clip, **config)

    hybrid = ours(mesh=MESH)
    others = {
        "replicate": ours(strategy="replicate"),
        "FSDP2's HSDP": by_hsdp(case, copy.deepcopy(first), clip, accumulation),
        "zero1 on the mesh": ours(strategy="zero1", mesh=MESH),
        "replicate on the mesh": ours(strategy="replicate", mesh=MESH),
        "one shard, four replicas": ours(mesh={"replica": 4, "dp": 1}),
        "the axes the other way round": ours(mesh={"dp": 2, "replica": 2}),
    }
    if parity.rank_and_size()[0] != 0:
        return {}
    others["one process"] = parity.by_one_process(case, copy.deepcopy(first), "adamw", STEPS, clip, accumulation)
    return {name: parity.distance(hybrid, other) for name, other in others.items()}


@pytest.mark.parametrize("case", ["llama", "gpt2"])
@pytest.mark.parametrize(("accumulation", "mode"), [(1, "reduce_each"), (2, "reduce_each"), (2, "reduce_last")])
def test_the_numbers_of_all_others(case: str, accumulation: int, mode: str) -> None:
    for name, distance in ranks.run(distances, 4, case, accumulation, mode, timeout_s=300)[0].items():
        assert distance.within(1e-9), f"{name}: {distance}"


SCHEDULES = [
    [],
    ["bucket(modules=model.layers.*)", "reorder"],
    ["prefetch(prefetch=20KB,alpha=1)", "overlap_update"],
    ["unshard(units=all)", "reposition_update"],
    ["search(evaluations=60,reposition=auto)"],
]


def without_gradients(param_dtype: str | None) -> list[float]:
    """A loss of training, and the same by an evaluation whose program has no gradients."""
    rank, _ = parity.rank_and_size()
    model, loss, batch = zoo.build("llama", torch.float32), zoo.CASES["llama"].loss, parity.batch_of("llama", 0, rank, 1)

    def metric(model: torch.nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            return loss(model, batch)

    settings = interlace.Config(mesh=MESH, param_dtype=param_dtype, schedule=[], cache="off")
    with interlace.compile(model, parity.make_optimizer("adamw", model), loss, batch, settings) as trainer:
        evaluated = trainer.evaluate(batch, loss_fn=metric)["loss"].item()
        return [trainer.step(batch).item(), evaluated]


@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])
def test_evaluations_without_gradients_have_the_same_units(param_dtype: str | None) -> None:
    for trained, evaluated in ranks.run(without_gradients, 4, param_dtype):
        assert abs(trained - evaluated) < 1e-6



def with_schedules(strategy: str, accumulation: int) -> list[str]:
    found = []
    for passes in [*SCHEDULES, SCHEDULES[0]]:
        config = {"mesh": MESH, "strategy": strategy, "accumulation": accumulation, "schedule": [(0, passes)]}
        _, weights = parity.by_interlace("llama", zoo.build("llama", torch.float32), "adamw", STEPS, None, **config)
        found.append(digest(weights))
    return found


@pytest.mark.parametrize(("strategy", "accumulation"), [("shard", 1), ("shard", 2), ("zero1", 1)])
def test_the_same_bits_twice_and_under_every_schedule(strategy: str, accumulation: int) -> None:
    for found in ranks.run(with_schedules, 4, strategy, accumulation, timeout_s=600):
        assert len(set(found)) == 1, found


def _memory(strategy: str) -> dict[str, Any]:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    settings = interlace.Config(strategy=strategy, mesh=MESH, schedule=[], profile="off", timeout_s=60, cache="off")
    optimizer = parity.make_optimizer("adamw", model)
    with interlace.compile(model, optimizer, zoo.CASES["llama"].loss, parity.batch_of("llama", 0, rank, 1), settings) as trainer:
        for step in range(4):
            trainer.step(parity.batch_of("llama", step, rank, 1))
        return trainer.stats()["arena"]


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_memory_is_what_was_planned_to_the_byte(strategy: str) -> None:
    for arena in ranks.run(_memory, 4, strategy):
        assert arena["on"] and arena["settled"] and arena["unforeseen"] == [], arena
        assert arena["top_bytes"] == arena["planned_bytes"]


def _states(strategy: str) -> tuple[int, int]:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    settings = interlace.Config(strategy=strategy, mesh=MESH, schedule=[], cache="off")
    with interlace.compile(
        model, parity.make_optimizer("adamw", model), zoo.CASES["llama"].loss, parity.batch_of("llama", 0, rank, 1), settings
    ) as trainer:
        program = interlace._core.Program.parse(trainer.program)
        moments = [s["shape"] for s in program.states() if s["role"] == "exp_avg"]
        return sum(shape[0] for shape in moments), sum(u["numel"] for u in program.units())


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_optimizer_states_lie_over_all_ranks_of_the_mesh(strategy: str) -> None:
    for mine, whole in ranks.run(_states, 4, strategy):
        assert mine * 4 == whole


def test_the_default_search_may_gather_parts_in_the_next_step() -> None:
    said = {mesh is not None: str(default_schedule(interlace.Config(mesh=mesh), 4)) for mesh in (MESH, None)}
    assert "reposition=auto" in said[True] and "reposition" not in said[False]
    assert "reposition" not in str(default_schedule(interlace.Config(mesh=MESH, strategy="zero1"), 4))


# ---- checkpoints ----


def resumed(folder: str, start: int, stop: int, mesh: Any) -> parity.Run:
    """Steps [start, stop) of the same global batches, from the checkpoint and into it; losses and weights."""
    test_checkpoint.TOTAL = 8  # sequences of a step: a part for each of four ranks
    return test_checkpoint.run("llama", "adamw", folder, start, stop, mesh=mesh)


def test_a_checkpoint_loads_on_any_other_mesh(tmp_path: Path) -> None:
    """Saved on 2 x 2 after three steps: the next two, on the same mesh and on others."""
    expected, whole = ranks.run(resumed, 4, str(tmp_path / "long"), 0, 5, MESH)[0]
    first, saved = ranks.run(resumed, 4, str(tmp_path / "start"), 0, 3, MESH)[0]
    assert first == expected[:3]
    for size, mesh in ((4, MESH), (4, None), (2, None), (1, None), (4, {"replica": 4, "dp": 1}), (2, {"replica": 2, "dp": 1})):
        folder = tmp_path / f"{size} {mesh}"
        _copy(tmp_path / "start", folder)
        kept = ranks.run(resumed, size, str(folder), 3, 3, mesh)[0][1]
        for name, value in saved.items():
            assert torch.equal(kept[name], value), f"{name} on {size} ranks, mesh {mesh}"
        for name, value in load_file(tmp_path / "start" / "optimizer.safetensors").items():
            assert torch.equal(load_file(folder / "optimizer.safetensors")[name], value), f"{name} on {size} ranks, mesh {mesh}"
        losses, weights = ranks.run(resumed, size, str(folder), 3, 5, mesh)[0]
        assert losses == pytest.approx(expected[3:], rel=1e-5), f"{size} ranks, mesh {mesh}"
        if mesh == MESH:
            assert losses == expected[3:]
            assert digest(weights) == digest(whole)


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"replica": 2}, "axis dp is missing"),
        ({"replicas": 2, "dp": 2}, "unknown axis 'replicas' of the mesh; did you mean 'replica'?"),
        ({"replica": 0, "dp": 2}, "axis replica of the mesh must have a whole number of ranks, not 0"),
        ("replica:2,dp:2", "another form than 'replica=2,dp=4'"),
        ([("dp", 2), ("dp", 2)], "an axis is named twice"),
        (4, "must name axes and their ranks"),
    ],
)
def test_a_mesh_that_cannot_be(mesh: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        interlace.Config(mesh=mesh)


def test_forms_of_a_mesh() -> None:
    assert interlace.Config(mesh="replica=2, dp=4").mesh == interlace.Config(mesh={"replica": 2, "dp": 4}).mesh
    with pytest.raises(ConfigError, match=r"mesh replica=2 x dp=4 is for 8 ranks, but the run has 2"):
        interlace.Config(mesh="replica=2,dp=4").pipeline(2)
    with pytest.raises(ConfigError, match="passes replaces the mesh too"):
        interlace.Config(mesh="replica=2,dp=4", passes="canonicalize,shard(ranks=8),update")


def test_the_ranks_along_axes() -> None:
    mesh = Mesh({"replica": 2, "dp": 3}, 4)
    assert mesh.groups("dp") == [[0, 1, 2], [3, 4, 5]] and mesh.groups("replica") == [[0, 3], [1, 4], [2, 5]]
    assert (mesh.group("replica"), mesh.index("replica"), mesh.index("dp"), mesh.index("replica,dp")) == ([1, 4], 1, 1, 4)
    assert mesh.group("") == [4] and mesh.size("") == 1


def _compile_on(meshes: list[Any]) -> None:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    optimizer = parity.make_optimizer("adamw", model)
    settings = interlace.Config(mesh=meshes[rank], timeout_s=20, cache="off")
    interlace.compile(model, optimizer, zoo.CASES["llama"].loss, parity.batch_of("llama", 0, rank, 1), settings).close()


def test_ranks_with_different_meshes_are_told() -> None:
    for outcome in ranks.outcomes(_compile_on, 2, [{"replica": 2, "dp": 1}, {"replica": 1, "dp": 2}]):
        assert isinstance(outcome.error, PeerError)
        assert "rank 1 differs from rank 0: setting 'mesh'" in str(outcome.error)


def test_a_mesh_of_other_ranks_is_refused_before_anything_runs() -> None:
    for outcome in ranks.outcomes(_compile_on, 2, [{"replica": 2, "dp": 2}] * 2):
        assert "mesh replica=2 x dp=2 is for 4 ranks, but the run has 2" in str(outcome.error)
