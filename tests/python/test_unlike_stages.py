"""Stages of other numbers of data ranks on real ranks: the numbers of one process, checkpoints, evaluation, and what cannot be."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import tensor_models
import torch
from safetensors.torch import load_file
from test_trainer_bits import digest

import interlace
from interlace import _core
from interlace.checkpoint.contents import MODEL, OPTIMIZER
from interlace.config import ConfigError
from interlace.dist.peers import PeerError

STEPS = 8
ROWS = 4  # of a micro-batch of all data ranks of a stage


def settings_of(**config: Any) -> interlace.Config:
    return interlace.Config(**{"timeout_s": 60, "cache": ranks.CACHE, "schedule": [], "profile": "off", **config})


def batch_of(name: str, step: int, config: interlace.Config) -> Any:
    return tensor_models.batch_of(step, 0, ROWS * config.accumulation, name)


def dealt(name: str, step: int, config: interlace.Config) -> Any:
    return config.deal(batch_of(name, step, config), *parity.rank_and_size())


def compiled(name: str, dtype: torch.dtype = torch.float64, **config: Any) -> interlace.Trainer:
    settings = settings_of(**config)
    model = tensor_models.build(name, dtype)
    return interlace.compile(model, parity.make_optimizer("adamw", model), tensor_models.loss_of, dealt(name, 0, settings), settings)


def on_stages(name: str, count: int, **config: Any) -> parity.Run:
    with compiled(name, **config) as trainer:
        losses = [trainer.step(dealt(name, step, trainer.config)).item() for step in range(count)]
        return losses, dict(trainer.state_dict(all_ranks=True))


def in_one_process(name: str, count: int, clip: float | None, pieces: int, accumulation: int = 4) -> parity.Run:
    """Plain PyTorch on so many micro-batches: as many as the data ranks that make the loss have in a step."""
    model = tensor_models.build(name)
    optimizer = parity.make_optimizer("adamw", model)
    losses = []
    for step in range(count):
        parts = parity.pieces(tensor_models.batch_of(step, 0, ROWS * accumulation, name), pieces)
        total = 0.0
        for part in parts:
            loss = tensor_models.loss_of(model, part) / pieces
            loss.backward()
            total += loss.item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.state_dict())


def distances(name: str, settings: list[dict[str, Any]]) -> list[parity.Distance]:
    """On rank 0, which alone trains in one process too."""
    found = []
    for config in settings:
        config = {"accumulation": 4, **config}
        last = interlace.Config(mesh=config["mesh"]).stage_meshes[-1]["dp"]
        ours = on_stages(name, STEPS, **config)
        if parity.rank_and_size()[0] == 0:
            found.append(parity.distance(ours, in_one_process(name, STEPS, config.get("clip_norm"), 4 * last)))
    return found


THREE: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": (2, 1)}, "stage_order": "1f1b"},
    {"mesh": {"pp": 2, "dp": (1, 2)}, "stage_order": "auto", "clip_norm": 0.3},
    {"mesh": {"pp": 2, "dp": (2, 1)}, "strategy": "shard+zero1", "clip_norm": 0.3},
]


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mpnet"])
def test_the_numbers_of_one_process(name: str) -> None:
    """Three ranks; of GPT-2 and T5 the embedding is on both stages, whose ranks exchange pieces of its gradient; T5 shifts its labels."""
    for config, distance in zip(THREE, ranks.run(distances, 3, name, THREE, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def test_a_border_where_few_rows_are_less_than_a_weight() -> None:
    """Of many rows the weight is less to send, of few the gradient: what crosses is settled once, for all stages."""
    settings: list[dict[str, Any]] = [{"mesh": {"pp": 2, "dp": (2, 1)}, "stages": "mpnet.encoder.layer.1.attention.attn.o.weight"}]
    for distance in ranks.run(distances, 3, "mpnet", settings, timeout_s=300)[0]:
        assert distance.within(1e-9), distance


def of_other_lengths(name: str) -> list[parity.Distance]:
    """Batches whose tokens are fewer at every second step."""
    whole = tensor_models.batch_of

    def shorter(step: int, *rest: Any) -> Any:
        return {key: x[:, : x.shape[1] - 2 * (step % 2)] for key, x in whole(step, *rest).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_models, "batch_of", shorter)
        return distances(name, THREE[1:2])


def test_batches_of_another_length() -> None:
    for distance in ranks.run(of_other_lengths, 3, "llama", timeout_s=300)[0]:
        assert distance.within(1e-9), distance


FOUR: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": (3, 1)}, "stage_order": "zero_bubble", "clip_norm": 0.3},
    {"mesh": {"pp": 3, "dp": (1, 2, 1)}, "stage_order": "gpipe"},
    {"mesh": {"pp": 2, "dp": (1, 3)}, "strategy": "zero1+replicate", "clip_norm": 0.3},
]


def on_four(name: str) -> list[parity.Distance]:
    found = []
    for config in FOUR:
        rows = 3 if 3 in config["mesh"]["dp"] else 2
        found.append(of_rows(name, {"accumulation": 2, **config}, 2 * rows))
    return found


def of_rows(name: str, config: dict[str, Any], rows: int) -> parity.Distance:
    """Micro-batches of so many rows."""
    global ROWS
    kept, ROWS = ROWS, rows
    try:
        last = config["mesh"]["dp"][-1]
        one = in_one_process(name, STEPS, config.get("clip_norm"), config["accumulation"] * last, config["accumulation"])
        return parity.distance(on_stages(name, STEPS, **config), one)
    finally:
        ROWS = kept


def test_on_four_ranks() -> None:
    """Thirds of a mean are rounded, and Adam makes much of gradients near zero: plain data parallel of three ranks is 6e-9 away, too."""
    for config, distance in zip(FOUR, ranks.run(on_four, 4, "llama", timeout_s=300)[0], strict=True):
        assert distance.within(1e-8 if config["mesh"]["dp"][-1] == 3 else 1e-9), f"{config}: {distance}"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tied", "vit"])
def test_other_models(name: str) -> None:
    for config, distance in zip(THREE, ranks.run(distances, 3, name, THREE, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def test_a_gradient_of_all_rows_is_added_up() -> None:
    """Of the embedding, which is made on the second stage and updated on the first."""
    settings = [{"mesh": {"pp": 2, "dp": dp}, "stages": "transformer.wpe.weight"} for dp in ((1, 2), (2, 1))]
    for config, distance in zip(settings, ranks.run(distances, 3, "gpt2", settings, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def evaluated(mesh: dict[str, Any] | None, name: str = "gpt2") -> list[float]:
    found = []
    with compiled(name, mesh=mesh, accumulation=2) as trainer:
        for step in range(2):
            batch = trainer.config.deal(tensor_models.batch_of(100, 0, ROWS, name), *parity.rank_and_size(), micro_batches=1)
            found.append(parity.mean_over_ranks(trainer.evaluate(batch)["loss"]))
            trainer.step(dealt(name, step, trainer.config))
    return found


def test_evaluate() -> None:
    two = ranks.run(evaluated, 2, None)[0]
    assert ranks.run(evaluated, 3, {"pp": 2, "dp": (2, 1)})[0] == pytest.approx(two, rel=1e-9)


def resumed(folder: str, first: int, last: int, mesh: Any, name: str = "gpt2") -> list[float]:
    with compiled(name, mesh=mesh, accumulation=2) as trainer:
        if first > 0:
            trainer.load(folder)
        losses = [parity.mean_over_ranks(trainer.step(dealt(name, step, trainer.config))) for step in range(first, last)]
        trainer.save(folder)
        return losses


def test_a_checkpoint_loads_on_any_other_mesh(tmp_path: Path) -> None:
    """Saved after three steps by three ranks, loaded and saved again elsewhere: the same tensors; and the other way round."""
    unlike: dict[str, Any] = {"pp": 2, "dp": (2, 1)}
    for size, mesh, others in ((3, unlike, [(2, None), (2, {"pp": 2}), (1, None)]), (2, None, [(3, unlike), (3, {"pp": 2, "dp": (1, 2)})])):
        start = tmp_path / f"start{size}"
        ranks.run(resumed, size, str(start), 0, 3, mesh)
        for other_size, other in others:
            folder = tmp_path / f"{size} {other_size} {other}"
            shutil.copytree(start, folder)
            ranks.run(resumed, other_size, str(folder), 3, 3, other)
            for file in (MODEL, OPTIMIZER):
                assert digest(load_file(folder / file)) == digest(load_file(start / file)), f"{file}, {other}"


# ---- what cannot be ----


def other_rows() -> None:
    with compiled("llama", mesh={"pp": 2, "dp": (2, 1)}, accumulation=2) as trainer:
        batch = dealt("llama", 0, trainer.config)
        if trainer.rank == 2:  # as if micro-batches followed one another in the ranks' batches
            batch = {name: value.roll(1, 0) for name, value in batch.items()}
        trainer.step(batch)


def test_stages_must_have_the_same_rows() -> None:
    for outcome in ranks.outcomes(other_rows, 3):
        assert outcome is not None and isinstance(outcome.error, PeerError)
        assert "ranks 0 (stage 0) and 2 (stage 1) have other rows in micro-batch 0" in str(outcome.error)


def other_rows_evaluated() -> tuple[str, float, float]:
    """The error of a batch that is dealt as a step's is, and losses of an evaluation and a step after it."""
    with compiled("llama", mesh={"pp": 2, "dp": (2, 1)}, accumulation=2) as trainer:
        config = trainer.config
        whole = batch_of("llama", 1, config)
        with pytest.raises(PeerError) as error:
            trainer.evaluate(config.deal(whole, trainer.rank, 3))
        right = config.deal(whole, trainer.rank, 3, micro_batches=1)
        return str(error.value), float(trainer.evaluate(right)["loss"]), float(trainer.step(dealt("llama", 0, config)))


def test_training_goes_on_behind_an_evaluation_of_other_rows() -> None:
    said = ranks.run(other_rows_evaluated, 3)
    assert all("config.deal(batch, rank, ranks, micro_batches=1) of the whole batch that is evaluated" in text for text, *_ in said)
    assert len({tuple(losses) for _, *losses in said}) == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mesh": {"pp": 2, "dp": (2, 1, 1)}}, "dp=2+1+1 of the mesh has sizes for 3 stages, but axis pp has 2"),
        ({"mesh": "dp=2+1"}, "dp=2+1 of the mesh has sizes for 2 stages, but axis pp has 1"),
        ({"mesh": {"dp": (2, 1), "pp": 2}}, "have the axes pp, dp and tp, in this order, not dp, pp"),
        ({"mesh": {"pp": 2, "dp": (2, 1)}, "shapes": {"x": [(1, 2)]}, "pad": {"x": 0}}, "shapes and pad need stages with as many ranks each"),
    ],
)
def test_settings_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        interlace.Config(**config)


def test_a_mesh_for_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("mesh pp=2 x dp=2+1 is for 3 ranks, but the run has 4")):
        interlace.Config(mesh="pp=2,dp=2+1").pipeline(4)


def killed(mesh: dict[str, Any], victim: int) -> None:
    with compiled("llama", mesh=mesh, accumulation=2) as trainer:
        trainer.step(dealt("llama", 0, trainer.config))
        if trainer.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step(dealt("llama", 1, trainer.config))


@pytest.mark.parametrize(
    ("mesh", "size", "victim", "place"),
    [({"pp": 2, "dp": (2, 1)}, 3, 2, "stage 1 of pp, dp 0"), ({"pp": 2, "dp": 2}, 4, 1, "stage 0 of pp, dp 1")],
)
def test_a_lost_rank_is_named_with_its_stage(mesh: dict[str, Any], size: int, victim: int, place: str) -> None:
    for rank, outcome in enumerate(ranks.outcomes(killed, size, mesh, victim)):
        if rank == victim:
            continue
        assert outcome is not None and isinstance(outcome.error, PeerError), outcome
        assert outcome.error.rank == victim and f"(rank {victim} is {place})" in str(outcome.error), outcome.error


TEXT = """interlace 1 scheduled
mesh pp 3
mesh dp 2
stage pp 0 ranks 2,1
step 1 reduce_each
input %0: f32[4] "x"
phase forward takes () gives () {
  %1: b8[0] = send.start(%0) {fwd axis=pp peer=(rank_pp+4)//2}
  send.wait(%1) {fwd}
}
"""


def test_the_text_of_a_stage_with_other_ranks() -> None:
    program = _core.Program.parse(TEXT, "stage")
    program.verify()
    assert program.print() == TEXT and program.stage == ("pp", 0) and program.stage_ranks == [2, 1]
    for old, new, words in [
        ("ranks 2,1", "ranks 2,2", "its stages have 4 ranks, and axis pp has 3; write 'mesh pp 4'"),
        ("mesh dp 2", "mesh dp 1", "stage 0 has 2 ranks, and its other axes have 1"),
        ("(rank_pp+4)//2", "rank_pp+2", "peer= is 3 on rank 1, but the axis has ranks 0 to 2"),
        ("ranks 2,1", "ranks 2,0", "the ranks of a stage"),
    ]:
        with pytest.raises(_core.Error, match=re.escape(words)):
            _core.Program.parse(TEXT.replace(old, new), "stage").verify()
