"""The search on stages of a pipeline: what it measures, how it keeps to a memory_limit, and that no number changes."""

from __future__ import annotations

import re
from typing import Any

import on_device
import parity
import pytest
import ranks
import tensor_models

from interlace.config.schedule import joined_recompute, recomputed_already
from interlace.errors import InterlaceError

STEPS = 16  # six beyond the search of measured times


def searched(mesh: dict[str, Any], config: dict[str, Any], name: str) -> tuple[parity.Distance | None, list[dict[str, Any]], int]:
    """The distance from one process on rank 0, the plans that were made, and this rank's peak in bytes."""
    with tensor_models.compiled(name, mesh=mesh, **{"schedule": "auto", "profile": "auto", **config}) as trainer:
        run = tensor_models.steps(trainer, 0, STEPS), dict(trainer.state_dict(all_ranks=True))
        plans, peak = trainer.plans, int(trainer.stats()["peak_bytes"])
    key = name, STEPS, mesh.get("dp", 1), config.get("clip_norm"), config.get("accumulation", 1)
    found = parity.distance(run, tensor_models.in_one_process(*key)) if parity.rank_and_size()[0] == 0 else None
    return found, plans, peak


@pytest.mark.parametrize(
    ("size", "mesh", "config"),
    [
        (2, {"pp": 2}, {"accumulation": 4, "clip_norm": 0.3}),
        (4, {"pp": 2, "dp": 2}, {"accumulation": 2, "strategy": "shard", "stages": "model.layers.1"}),  # of one and of four blocks
        pytest.param(4, {"pp": 2, "dp": 2}, {"accumulation": 4, "strategy": "shard+zero1", "stage_order": "v"}, marks=pytest.mark.soak),
    ],
)
def test_stages_are_measured_and_searched(size: int, mesh: dict[str, Any], config: dict[str, Any]) -> None:
    distance, plans, _ = ranks.run(searched, size, mesh, config, "deep", timeout_s=300)[0]
    assert distance.within(1e-9), distance
    assert plans[0]["step"] == 10 and "failure" not in plans[0]
    assert plans[0]["predicted_us"] > 0 and plans[0]["measured_us"] > 0, "all stages together are predicted, and compared with the step"
    # A device's counter has the test's own tensors as well, which so small a model does not hide.
    assert plans[0]["memory_error"] == pytest.approx(0, abs=0.01) or on_device.DEVICE != "cpu"


ROOM: dict[str, Any] = {"accumulation": 4, "stage_order": "1f1b", "stages": "model.layers.2"}


def test_stages_recompute_what_does_not_fit() -> None:
    """Each stage what it needs to; and `auto` falls back to the order that holds the least."""
    free = [peak for _, _, peak in ranks.run(searched, 2, {"pp": 2}, ROOM, "deep")]
    limit = int(0.92 * max(free))  # most of it is parameters and their states
    for order in ("1f1b", "auto"):
        found = ranks.run(searched, 2, {"pp": 2}, ROOM | {"stage_order": order, "memory_limit": limit}, "deep")
        assert found[0][0].within(1e-9), f"{order}: {found[0][0]}"
        assert max(peak for *_, peak in found) <= limit or on_device.DEVICE != "cpu", order
    with pytest.raises(AssertionError, match=r"stage \d: .*nothing fits .*; raise it to \d+MiB, use more ranks, or take a smaller"):
        ranks.run(searched, 2, {"pp": 2}, ROOM | {"memory_limit": 40_000}, "deep")


def limited(limit: int | None) -> int | str:
    """What this rank's stage needs, or what is said where that is too much."""
    try:
        with tensor_models.compiled("deep", mesh={"pp": 2}, memory_limit=limit, timeout_s=20, **ROOM) as trainer:
            return int(trainer._run.programs.needed_bytes(trainer._run.ir))
    except InterlaceError as e:
        return str(e)


def test_a_limit_that_one_stage_alone_exceeds() -> None:
    """Without a search. Ranks of the other stage, which has room, do not wait for connections with it."""
    least, most = sorted(ranks.run(limited, 2, None))
    assert least < most
    for said in ranks.run(limited, 2, (least + most) // 2):
        assert re.search(r"^(on rank \d: )?a rank needs [\d.]+ MiB .*, memory_limit is .*; raise it to \d+MiB, use more ranks", said), said


def test_passes_of_stages_are_one_pass_for_all() -> None:
    full, some = "recompute(mode=full,blocks=a+b)", "recompute(mode=selective,blocks=c)"
    assert joined_recompute(["", ""]) is None
    assert joined_recompute([full, ""]) == full
    assert joined_recompute([some, "recompute(mode=selective,blocks=d)"]) == "recompute(mode=selective,blocks=c+d)"
    assert joined_recompute([full, some]) == "recompute(mode=selective,blocks=a+b+c,whole=a+b)"
    assert recomputed_already(["bucket", "search", "search(recompute=auto,limit=1)"]) == [
        "bucket", "search(recompute=none)", "search(limit=1,recompute=none)",
    ]  # fmt: skip
