"""Saving beside training: the snapshot is of its moment, retention, other world sizes, the schedule goes on, and foreign readers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo

import interlace
from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.tensor_file import CHUNK, CheckpointError
from interlace.compiling.programs import predicted_peak_bytes

GLOBAL_BATCH = 12


def batch(case: str, step: int) -> dict[str, torch.Tensor]:
    rank, size = parity.rank_and_size()
    return {k: v.chunk(size)[rank] for k, v in zoo.CASES[case].batch(GLOBAL_BATCH, step).items()}


def make(case: str = "gpt2", **config: Any) -> interlace.Trainer:
    model = zoo.build(case, torch.float64)
    settings = interlace.Config(**{"timeout_s": 60, "clip_norm": 1.0, **config})
    return interlace.compile(
        model, parity.make_optimizer("adamw", model), zoo.CASES[case].loss, batch(case, 0), settings
    )


def run(folder: str, start: int, stop: int, **config: Any) -> list[float]:
    with make(**config) as trainer:
        if start:
            trainer.load(folder)
        losses = [parity.mean_over_ranks(trainer.step(batch("gpt2", i))) for i in range(start, stop)]
        trainer.save(folder)
        return losses


def test_2_to_1_to_4_to_3_ranks(tmp_path: Path) -> None:
    """A global batch of 12 in float64 without dropout: losses within 1e-6 of the undisturbed run."""
    expected = ranks.run(run, 2, str(tmp_path / "whole"), 0, 8)[0]
    found: list[float] = []
    for i, size in enumerate((2, 1, 4, 3)):
        found += ranks.run(run, size, str(tmp_path / "part"), 2 * i, 2 * i + 2)[0]
    assert found == pytest.approx(expected, abs=1e-6, rel=0)


def sync_and_async(folder: str, strategy: str, mode: str, limit: str | None) -> dict[str, Any]:
    """The same moment saved both ways, with steps while the second is written."""
    least = None
    if limit == "tight":
        with make(strategy=strategy) as trainer:
            least = predicted_peak_bytes(trainer.summary())
    more: dict[str, Any] = {}
    if limit == "tier":  # all states and weights lie in files between steps
        os.makedirs(f"{folder}/tier", exist_ok=True)
        more = {"tier": f"{folder}/tier", "schedule": [(0, ["overlap_update", "offload_sync(cluster={cluster})"])]}
    with make(strategy=strategy, mode=mode, memory_limit=least, **more) as trainer:
        for step in range(2):
            trainer.step(batch("gpt2", step))
        trainer.save(f"{folder}/sync")
        trainer.save(f"{folder}/async", wait=False)
        for step in range(2, 5):
            trainer.step(batch("gpt2", step))
        trainer.finish_save()
        assert trainer.saved() and trainer.last_save is not None
        return trainer.last_save


@pytest.mark.parametrize(
    ("size", "strategy", "mode", "limit"),
    [
        (2, "shard", "compiled", None),
        (2, "zero1", "compiled", "tight"),
        (3, "replicate", "compiled", None),
        (1, "shard", "compiled", "tight"),
        (2, "shard", "eager", None),
        (2, "shard", "compiled", "tier"),
    ],
)
def test_what_is_saved_is_of_the_moment_of_saving(
    size: int, strategy: str, mode: str, limit: str | None, tmp_path: Path
) -> None:
    for stats in ranks.run(sync_and_async, size, str(tmp_path), strategy, mode, limit):
        assert stats["bytes"] > 0 and stats["durable_seconds"] > 0
        if limit == "tight":
            assert stats["staging_peak_bytes"] <= 3 * CHUNK
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("sync", "async"))
    assert a.keys() == b.keys() and len(a) == 7
    assert [name for name in a if a[name] != b[name]] == [], "files differ"


def test_the_newest_stay_and_the_oldest_go(tmp_path: Path) -> None:
    folder = tmp_path / "runs [x]"
    with make("vit") as trainer:
        for step in range(5):
            trainer.step(batch("vit", step))
            trainer.save(folder, keep=3, wait=False)
        trainer.finish_save()
        steps = {p.name: json.loads((p / "trainer.json").read_text())["step"] for p in tmp_path.glob("runs*")}
        assert steps == {"runs [x]": 5, "runs [x].step-4": 4, "runs [x].step-3": 3}
        trainer.load(f"{folder}.step-3")
        assert trainer.steps == 3
        with pytest.raises(CheckpointError, match="keep must be a whole number of at least 1, not 0"):
            trainer.save(folder, keep=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(steps)


SCHEDULE = [(0, []), (2, ["reorder(forward=after)"]), (6, [])]


def with_schedule(folder: str, start: int, stop: int) -> tuple[list[str], list[str]]:
    """Losses, and the program of every step."""
    from interlace import _core

    with make(schedule=SCHEDULE) as trainer:
        if start:
            trainer.load(folder)
        losses, programs = [], []
        for step in range(start, stop):
            losses.append(parity.mean_over_ranks(trainer.step(batch("gpt2", step))).hex())
            programs.append(_core.digest(trainer.program))
        trainer.save(folder)
        return losses, programs


def test_the_schedule_goes_on_where_it_stood(tmp_path: Path) -> None:
    losses, programs = ranks.run(with_schedule, 2, str(tmp_path / "whole"), 0, 8)[0]
    assert len(set(programs)) == 2
    parts = [ranks.run(with_schedule, 2, str(tmp_path / "part"), a, b)[0] for a, b in ((0, 4), (4, 8))]
    assert parts[0][0] + parts[1][0] == losses
    assert parts[0][1] + parts[1][1] == programs


def test_distributed_checkpoint_reads_it(tmp_path: Path) -> None:
    """torch.distributed.checkpoint loads both files through its safetensors reader, no pickle in between."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with make("vit") as trainer:
        trainer.step(batch("vit", 0))
        trainer.save(tmp_path / "c")
        expected, moments = trainer.state_dict(), trainer.optimizer_state_dict()
    plain = zoo.build("vit", torch.float64, seed=5)
    state: dict[str, Any] = dict(plain.state_dict())
    state["exp_avg.head.weight"] = torch.zeros_like(plain.head.weight)  # type: ignore[union-attr, arg-type]
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "c")), no_dist=True)
    assert all(torch.equal(state[k], v) for k, v in expected.items())
    assert any(torch.equal(state["exp_avg.head.weight"], s["exp_avg"]) for s in moments["state"].values())
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix not in (".json", ".il", ".safetensors")]
    with Checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.verify() == sum(
            p.stat().st_size for p in (tmp_path / "c").iterdir() if p.name != "checksums.json"
        )
