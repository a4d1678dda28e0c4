"""Optimizer steps made on the host: the same bits, and no memory for what lies there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload import batch, compiled, same, train

from interlace.errors import InterlaceError

HOST = Path("host")
ORDERS = {"after": [], "overlapped": ["overlap_update"], "repositioned": ["reposition_update"]}


def numel(weights: dict[str, torch.Tensor]) -> int:
    return sum({id(t.untyped_storage()): t.numel() for t in weights.values()}.values())


@pytest.fixture(scope="module", params=[None, 0.05], ids=["unclipped", "clipped"])
def plain(request: Any) -> tuple[float | None, Any]:
    trainer = compiled([], clip_norm=request.param, arena=False)
    found = train(trainer)
    trainer.close()
    return request.param, found


@pytest.mark.parametrize("order", ORDERS)
def test_steps_on_the_host_change_no_bit(plain: Any, order: str) -> None:
    clip, (losses, weights, peak) = plain
    trainer = compiled([*ORDERS[order], "host_update"], HOST, clip_norm=clip, arena=False)
    ours = train(trainer)
    stats = trainer.stats()
    trainer.close()
    assert ours[0] == losses
    assert same(ours[1], weights)
    # What AdamW keeps for a parameter is 8 bytes; weights and gradients are in memory as long as they are used.
    assert ours[2] <= peak - 8 * numel(weights)
    assert stats["tier_bytes_in"] > 0


def test_some_units_step_on_the_host_and_others_stream(plain: Any) -> None:
    clip, (losses, weights, peak) = plain
    limit = peak * 60 // 100
    passes = ["reposition_update", "host_update(share=0.5)"]
    for host in ("always", "auto"):
        trainer = compiled(
            ["reposition_update", f"offload(cluster={{cluster}},limit={limit - 65536},host={host})"], HOST, clip_norm=clip, arena=False
        )  # fmt: skip
        ours = train(trainer)
        trainer.close()
        assert ours[0] == losses and same(ours[1], weights), host
        assert ours[2] <= limit, host
    trainer = compiled(passes, HOST, clip_norm=clip)
    ours = train(trainer)
    trainer.close()
    assert ours[0] == losses and same(ours[1], weights)


def test_a_swap_and_a_checkpoint(plain: Any, tmp_path: Path) -> None:
    clip, (losses, weights, _) = plain
    host = ["reposition_update", "host_update"]
    trainer = compiled([], HOST, schedule=[(0, []), (1, host), (3, ["overlap_update"])], profile="off", clip_norm=clip)
    swapped = train(trainer)
    trainer.close()
    assert swapped[0] == losses and same(swapped[1], weights)
    trainer = compiled(host, HOST, clip_norm=clip)
    for _ in range(2):
        trainer.step(batch())
    trainer.save(tmp_path / "saved")
    trainer.close()
    again = compiled(host, HOST, clip_norm=clip)
    again.load(tmp_path / "saved")
    rest = [float(again.step(batch())) for _ in range(3)]
    assert rest == losses[2:] and same(dict(again.state_dict()), weights)
    again.close()


def test_a_folder_is_no_place_to_step(tmp_path: Path) -> None:
    with pytest.raises(
        InterlaceError, match=r"(?s)needs its states in host memory, and the tier is a folder; give tier=host"
    ):
        compiled(["host_update"], tmp_path)
