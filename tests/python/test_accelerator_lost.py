"""Devices that cannot train, or stop: each is told, with what to do, and what was saved goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import failing
import pytest
import ranks
import torch

import interlace
from interlace.dist.peers import PeerError

pytestmark = pytest.mark.software
WHAT = "an uncorrectable error of memory"


def trainer_of(**config: Any) -> interlace.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to("soft")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = interlace.Config(**{"profile": "off", "device_graphs": False, **config})
    return interlace.compile(model, optimizer, lambda m, b: m(b["x"]).square().mean(), batches(1)[0], settings)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": part} for part in x.unbind()]


def lost(after: int, clip: float | None, folder: Path) -> str:
    """What a step says whose device is gone after so many ops; "" where it was over before."""
    import soft_device

    whole = [batch["x"] for batch in batches(5)]
    with trainer_of(clip_norm=clip) as trainer:
        expected = [trainer.step({"x": x}).item() for x in whole]
    trainer = trainer_of(clip_norm=clip)
    for x in whole[:3]:
        trainer.step({"x": x})
    trainer.save(folder)
    batch = {"x": whole[3].to("soft")}
    torch.accelerator.synchronize()
    soft_device._C.lose(WHAT, after)
    said = ""
    try:
        trainer.step(batch).item()
    except interlace.InterlaceError as e:
        said = str(e)
    except RuntimeError:  # the loss is read after the step
        said = ""
    finally:
        trainer.close()
        soft_device._C.lose("", 0)
    with trainer_of(clip_norm=clip) as trainer:
        trainer.load(folder)
        assert [trainer.step({"x": x}).item() for x in whole[3:]] == expected[3:]
    return said


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_device_that_is_lost_in_a_step_is_told_with_op_and_lane(clip: float | None, tmp_path: Path) -> None:
    said = [lost(after, clip, tmp_path / str(after)) for after in (0, 1, 4, 9, 14, 20, 26)]
    told = [text for text in said if text]
    assert len(told) >= 5
    for text in told:
        assert WHAT in text and re.search(r"\n  lane:   \w+.*; .* may be of an(y op of the step| op before it)", text), text
    assert sum("\n  op:     %" in text for text in told) >= 3


def test_a_device_without_streams_is_refused() -> None:
    import soft_device

    soft_device._C.set_streams(False)
    try:
        with pytest.raises(interlace.InterlaceError, match=r"^soft:0 gives no streams and events \(Backend doesn't support") as error:
            trainer_of()
    finally:
        soft_device._C.set_streams(True)
    assert str(error.value).endswith("train on the CPU: model.cpu()")


def with_names(names: list[str]) -> str:
    import soft_device

    soft_device.uuid = names[int(os.environ["RANK"])]
    try:
        trainer_of().close()
    except PeerError as e:
        return str(e)
    finally:
        soft_device.uuid = ""
    return ""


def test_more_ranks_than_devices_are_refused() -> None:
    for text in ranks.run(with_names, 2, ["GPU-1", "GPU-1"]):
        assert text.startswith("ranks 0 and 1 have one device, soft GPU-1; start no more ranks on a host than it has devices (rank ")
    assert ranks.run(with_names, 2, ["GPU-1", "GPU-2"]) == ["", ""]


def test_a_rank_that_dies_or_does_not_come_is_named() -> None:
    """Between devices no transfer breaks: the others waited for as long as the timeout, and then named nobody."""
    died, _ = ranks.outcomes(failing.killed_in_step, 2, "shard", 1)
    assert died is not None and died.value.startswith("PeerError: rank 1 was lost: process ended or host cut off\n  rank 0: step "), died
    stuck, _ = ranks.run(failing.stuck_in_step, 2, 1)
    assert stuck.startswith("PeerError: rank 1 did not answer for 3 s: ") and "timed out" in stuck, stuck
    assert "\n  rank 1: step 0, at " in stuck or "\n  rank 1: no step yet" in stuck, stuck
