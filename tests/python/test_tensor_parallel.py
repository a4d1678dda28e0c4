"""Tensor parallelism on real ranks: the numbers of one process, the same bits twice, checkpoints between meshes, and what cannot be."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import tensor_models
import torch
from safetensors.torch import load_file, save_file
from test_trainer_bits import digest

import interlace
from interlace.checkpoint.contents import MODEL, OPTIMIZER
from interlace.dist.peers import PeerError
from interlace.train import saving

STEPS = 8  # moments, clipping and a settled arena have all been there


def distances(name: str, mesh: dict[str, int], settings: list[dict[str, Any]]) -> list[parity.Distance]:
    """On rank 0, which alone trains in one process too."""
    ours = [tensor_models.on_mesh(name, STEPS, mesh=mesh, **config) for config in settings]
    if parity.rank_and_size()[0] != 0:
        return []
    keys = [(config.get("clip_norm"), config.get("accumulation", 1)) for config in settings]
    return [
        parity.distance(run, tensor_models.in_one_process(name, STEPS, mesh.get("dp", 1), *key)) for run, key in zip(ours, keys, strict=True)
    ]


EACH: list[dict[str, Any]] = [{"accumulation": a, "clip_norm": c} for a in (1, 4) for c in (None, 0.3)]


@pytest.mark.parametrize(("size", "name"), [(2, "llama"), (4, "gpt2"), (2, "qwen3"), (4, "tied")])  # `make soak`: every pair
def test_the_numbers_of_one_process(name: str, size: int) -> None:
    for config, distance in zip(EACH, ranks.run(distances, size, name, {"tp": size}, EACH, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


STRATEGIES: list[dict[str, Any]] = [{"strategy": s, **config} for s in ("shard", "zero1", "replicate") for config in EACH]


@pytest.mark.parametrize(
    ("name", "mesh"), [pytest.param("llama", {"dp": 2, "tp": 2}, marks=pytest.mark.soak), ("gpt2", {"tp": 2, "dp": 2})]
)
def test_with_every_strategy_of_data_parallelism(name: str, mesh: dict[str, int]) -> None:
    settings = STRATEGIES if mesh == {"dp": 2, "tp": 2} and name == "llama" else STRATEGIES[::3]
    for config, distance in zip(settings, ranks.run(distances, 4, name, mesh, settings, timeout_s=600)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


VARIANTS: list[dict[str, Any]] = [
    {"sequence_parallel": False},
    {"accumulation": 2, "accumulate_mode": "reduce_last"},
    {"schedule": [(0, ["bucket(modules=model.layers.*)", "reorder"])]},
    {"schedule": [(0, ["prefetch(prefetch=20KB,alpha=1)", "overlap_update"])]},
    {"schedule": [(0, ["unshard(units=all)", "reposition_update"])]},
    {"schedule": [(0, ["recompute(mode=full)"])]},
    {"schedule": [(0, ["split(parts=2)"])]},
    {"schedule": [(0, ["search(evaluations=60)"])]},
    {"arena": False},
]


def test_with_other_settings() -> None:
    found = ranks.run(distances, 4, "llama", {"dp": 2, "tp": 2}, VARIANTS, timeout_s=600)[0]
    for config, distance in zip(VARIANTS, found, strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def twice(mesh: dict[str, int], config: dict[str, Any]) -> list[str]:
    runs = [tensor_models.on_mesh("gpt2_dropout", 5, torch.float32, mesh=mesh, cache="off", **config) for _ in range(2)]
    return [f"{losses} {digest(weights)}" for losses, weights in runs]


@pytest.mark.parametrize("config", [{}, {"accumulation": 2, "clip_norm": 0.3, "strategy": "zero1"}])
def test_the_same_bits_twice_and_on_every_rank(config: dict[str, Any]) -> None:
    found = ranks.run(twice, 4, {"dp": 2, "tp": 2}, config, timeout_s=300)
    assert len({text for texts in found for text in texts}) == 1


# ---- dropout, evaluation, first values ----


def dropped(mesh: dict[str, int] | None) -> parity.Run:
    return tensor_models.on_mesh("gpt2_dropout", STEPS, mesh=mesh, kernels="torch")  # attention's own is one operator where nobody cuts


def test_dropout_does_not_depend_on_the_ranks_that_cut() -> None:
    """Masks are those of the data rank: with tp 2 and 4 as alone, with dp 2 x tp 2 as with dp 2."""
    alone, two = ranks.run(dropped, 1, None)[0], ranks.run(dropped, 2, None)[0]
    for size, mesh, other in ((2, {"tp": 2}, alone), (4, {"tp": 4}, alone), (4, {"dp": 2, "tp": 2}, two), (4, {"tp": 2, "dp": 2}, two)):
        distance = parity.distance(ranks.run(dropped, size, mesh)[0], other)
        assert distance.within(1e-9), f"{mesh}: {distance}"
    assert not parity.distance(alone, two).within(1e-9)


def evaluated(mesh: dict[str, int] | None) -> list[float]:
    found = []
    with tensor_models.compiled("gpt2_dropout", mesh=mesh, kernels="torch") as trainer:
        for step in range(2):
            batch = tensor_models.batch_of(100, trainer.data_rank)
            found.append(parity.mean_over_ranks(trainer.evaluate(batch)["loss"]))
            wide = tensor_models.batch_of(101, trainer.data_rank, 4)
            found.append(parity.mean_over_ranks(trainer.evaluate(wide, tensor_models.loss_of)["loss"]))
            tensor_models.steps(trainer, step, step + 1)
    return found


def test_evaluate() -> None:
    two = ranks.run(evaluated, 2, None)[0]
    for mesh in ({"dp": 2, "tp": 2}, {"replica": 2, "dp": 1, "tp": 2}):
        assert ranks.run(evaluated, 4, mesh)[0] == pytest.approx(two, rel=1e-9), mesh


def first_values(mesh: dict[str, int] | None, weights: str | None) -> dict[str, torch.Tensor]:
    """Of a model built on meta: initialized, or read from a file."""
    with torch.device("meta"):
        model = tensor_models.MODELS["gpt2"]().train()
    plan = "model" if mesh else "auto"
    settings = interlace.Config(mesh=mesh, tensor=plan, weights=weights, timeout_s=60, cache=ranks.CACHE, schedule=[], profile="off")
    batch = tensor_models.batch_of(0, 0)
    with interlace.compile(model, parity.make_optimizer("adamw", model), tensor_models.loss_of, batch, settings) as trainer:
        trainer.evaluate(batch)  # which captures a model of which some parameters are here and some are parts
        return dict(trainer.state_dict())


def test_first_values_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    alone = ranks.run(first_values, 1, None, None)[0]
    save_file({n: t.clone() for n, t in alone.items()}, tmp_path / "model.safetensors")
    for size, mesh in ((2, {"tp": 2}), (4, {"dp": 2, "tp": 2})):
        for weights in (None, str(tmp_path / "model.safetensors")):
            found = ranks.run(first_values, size, mesh, weights)[0]
            assert digest(found) == digest(alone), f"{mesh}, {weights}"


# ---- checkpoints ----

MESHES: list[tuple[int, Any]] = [
    (1, None),
    (2, None),
    (2, {"tp": 2}),
    (4, {"tp": 4}),
    (4, {"dp": 2, "tp": 2}),
    (4, {"tp": 2, "dp": 2}),
    (4, {"replica": 2, "dp": 1, "tp": 2}),
]
FROM = [(4, {"dp": 2, "tp": 2}, "shard"), (2, {"tp": 2}, "shard"), (4, {"dp": 2, "tp": 2}, "replicate"), (2, None, "shard")]


def resumed(name: str, folder: str, start: int, stop: int, mesh: Any, strategy: str) -> parity.Run:
    with tensor_models.compiled(name, mesh=mesh, strategy=strategy) as trainer:
        if start:
            trainer.load(folder)
            assert trainer.steps == start
        losses = tensor_models.steps(trainer, start, stop)
        trainer.save(folder)
        return losses, dict(trainer.state_dict(all_ranks=True))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("size", "mesh", "strategy"), FROM)
@pytest.mark.parametrize("short", [0, pytest.param(1 << 30, marks=pytest.mark.soak)])
def test_a_checkpoint_loads_on_any_other_mesh(
    name: str, size: int, mesh: Any, strategy: str, short: int, tmp_path: Path
) -> None:  # fmt: skip
    """Saved after three steps, loaded and saved again elsewhere: the same bytes; and the next two steps have the same losses."""
    ranks.run(short_runs, size, short)
    _, saved = ranks.run(resumed, size, name, str(tmp_path / "start"), 0, 3, mesh, strategy)[0]
    for file, values in ((MODEL, saved), (OPTIMIZER, None)):
        kept = load_file(tmp_path / "start" / file)
        assert values is None or digest(kept) == digest({n: values[n] for n in kept})
    for other_size, other in MESHES:
        folder = tmp_path / f"{other_size} {other}"
        shutil.copytree(tmp_path / "start", folder)
        ranks.run(short_runs, other_size, short)
        assert digest(ranks.run(resumed, other_size, name, str(folder), 3, 3, other, "shard")[0][1]) == digest(saved), other
        for file in (MODEL, OPTIMIZER):
            assert digest(load_file(folder / file)) == digest(load_file(tmp_path / "start" / file)), f"{file}, {other}"


def short_runs(count: int) -> None:
    """From how few bytes on ranks write what they have themselves."""
    saving.SHORT_RUN = count or 64 << 10


def recorded(mesh: dict[str, int], mode: str) -> list[float]:
    with tensor_models.compiled("llama", mesh=mesh) as trainer:
        found = tensor_models.steps(trainer, 0, 1)
        trainer._run.executor.set_trace(mode)
        return found + tensor_models.steps(trainer, 1, 4)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_a_recorded_step_trains_as_any_other(mesh: dict[str, int]) -> None:
    """Also one whose transfers are completed one by one, as for profiles."""
    size = 2 * mesh.get("dp", 1)
    found = [ranks.run(recorded, size, mesh, mode)[0] for mode in ("off", "on", "serial")]
    assert found[0] == found[1] == found[2]


def in_turn(serial: bool) -> list[float]:
    """Of one sample, whose rows are cut along the sequence: transfers that are no flat runs."""
    model = tensor_models.build("llama")
    settings = interlace.Config(mesh={"tp": 2}, tensor="model", timeout_s=60, cache=ranks.CACHE, schedule=[], profile="off")
    optimizer = parity.make_optimizer("adamw", model)
    with interlace.compile(model, optimizer, tensor_models.loss_of, tensor_models.batch_of(0, 0, 1), settings) as trainer:
        found = []
        for step in range(9):
            trainer._run.executor.set_trace("serial" if serial and step in (2, 3, 6) else "off")
            found.append(trainer.step(tensor_models.batch_of(step, 0, 1)).item())
        return found


def test_recorded_steps_and_others_in_turn() -> None:
    """What a transfer holds until it has ended is no part of the arena, which would learn it from one kind of step."""
    assert ranks.run(in_turn, 2, True)[0] == ranks.run(in_turn, 2, False)[0]


# ---- what cannot be ----


def other_batches() -> None:
    with tensor_models.compiled("llama", mesh={"dp": 2, "tp": 2}) as trainer:
        trainer.step(tensor_models.batch_of(0, trainer.rank))


def test_ranks_that_cut_one_batch_must_have_the_same() -> None:
    for outcome in ranks.outcomes(other_batches, 4):
        assert outcome is not None and isinstance(outcome.error, PeerError)
        assert "ranks 0 and 1 work on one batch along tp of the mesh, but were given different ones" in str(outcome.error)


def of_plan(config: dict[str, Any]) -> None:
    tensor_models.compiled("llama", **config).close()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("model.layers.*.mlp.up_proj.weigh 0\n", "plan.txt:1: the model has no parameter 'model.layers.*.mlp.up_proj.weigh'; did you mean"),
        ("model.layers.*.mlp.up_proj.weight 0 blocks 16\n", "in 16 blocks, cannot be cut into 2 equal parts"),
    ],
)
def test_a_plan_that_cannot_be_is_told_before_anything_runs(lines: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text(lines)
    for outcome in ranks.outcomes(of_plan, 2, {"mesh": {"tp": 2}, "tensor": str(tmp_path / "plan.txt")}):
        assert outcome is not None and words in str(outcome.error)


def by_plan(file: str) -> tuple[parity.Run, str]:
    with tensor_models.compiled("llama", mesh={"tp": 2}, tensor=file) as trainer:
        return (tensor_models.steps(trainer, 0, 3), dict(trainer.state_dict(all_ranks=True))), trainer.program


def test_a_plan_file_decides(tmp_path: Path) -> None:
    plan = [f"model.layers.*.self_attn.{one}_proj.weight 0" for one in "qkv"]  # of key and value a head each
    plan += ["model.layers.*.mlp.up_proj.weight 0", "model.layers.*.mlp.down_proj.weight 1  # by rows"]
    (tmp_path / "plan.txt").write_text("\n".join(plan))
    found, program = ranks.run(by_plan, 2, str(tmp_path / "plan.txt"))[0]
    cut = [line for line in program.splitlines() if " cut tp " in line]
    assert len(cut) == 10 and all(re.search("(up|down|[qkv])_proj", line) for line in cut)
    assert parity.distance(found, tensor_models.in_one_process("llama", 3, 1, None, 1)).within(1e-9)


# ---- with what else there is ----


def narrow(mesh: dict[str, int] | None, config: dict[str, Any]) -> list[float]:
    return tensor_models.on_mesh("llama", 6, torch.float32, mesh=mesh, **config)[0]


@pytest.mark.parametrize(
    "config",
    [
        {"param_dtype": "bfloat16"},
        {"param_dtype": "bfloat16", "reduce_dtype": "float32", "strategy": "zero1", "clip_norm": 0.3},
        {"loss_scale": 1024.0, "clip_norm": 0.3},
    ],
)
def test_with_other_precisions(config: dict[str, Any]) -> None:
    found, expected = ranks.run(narrow, 4, {"dp": 2, "tp": 2}, config)[0], ranks.run(narrow, 2, None, config)[0]
    assert found == pytest.approx(expected, rel=2**-7 if "param_dtype" in config else 1e-5)  # a bfloat16 loss: its last bit


def of_lengths(mesh: dict[str, int] | None) -> list[float]:
    """Batches of two lengths, a parameter frozen on the way."""
    shapes = {"input_ids": [(2, 8), (2, 12)]}
    found = []
    with tensor_models.compiled("llama", mesh=mesh, shapes=shapes, pad={"input_ids": 0}) as trainer:
        for step in range(6):
            if step == 4:
                trainer._run.model.lm_head.weight.requires_grad_(False)
            batch = tensor_models.batch_of(step, trainer.data_rank)["input_ids"][:, : 8 if step % 2 else 12].contiguous()
            found.append(parity.mean_over_ranks(trainer.step({"input_ids": batch})))
            if step == 3:
                head = trainer.state_dict(all_ranks=True)["lm_head.weight"]
        assert torch.equal(trainer.state_dict(all_ranks=True)["lm_head.weight"], head)
    return found


def test_lengths_that_vary_and_parameters_that_freeze() -> None:
    two = ranks.run(of_lengths, 2, None)[0]
    assert ranks.run(of_lengths, 4, {"dp": 2, "tp": 2})[0] == pytest.approx(two, rel=1e-9)
    assert ranks.run(of_lengths, 4, {"tp": 2, "dp": 2})[0] == pytest.approx(two, rel=1e-9)


def within(mesh: dict[str, int], limit: int | None, tier: str | None) -> tuple[Any, int]:
    """Losses and parameters, and the peak."""
    more: dict[str, Any] = {"arena": False}
    if limit is not None:
        more |= {"tier": tier, "schedule": [(0, [f"offload(cluster={{cluster}},limit={limit - 65536})"])]}
    with tensor_models.compiled("llama", mesh=mesh, **more) as trainer:
        losses = tensor_models.steps(trainer, 0, 4)
        return (losses, digest(dict(trainer.state_dict(all_ranks=True)))), int(trainer.stats()["peak_bytes"])


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_states_out_of_memory(mesh: dict[str, int], tmp_path: Path) -> None:
    """In 80 % of the memory that it takes, with states in files: the same bits."""
    size = 2 * mesh.get("dp", 1)
    plain = ranks.run(within, size, mesh, None, None)
    limit = int(0.8 * max(peak for _, peak in plain))
    for (moved, peak), (kept, _) in zip(ranks.run(within, size, mesh, limit, str(tmp_path)), plain, strict=True):
        assert moved == kept and peak <= limit
