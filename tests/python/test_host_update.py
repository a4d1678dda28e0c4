"""Optimizer steps made on the host: the same bits, and no memory for what lies there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
from test_offload import batch, compiled, same, train

from interlace.errors import InterlaceError

HOST = Path("host")
BESIDE = 65536  # bytes: more than what transfers receive into, and other small things that a program does not have
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
            ["reposition_update", f"offload(cluster={{cluster}},limit={limit - BESIDE},host={host})"], HOST, clip_norm=clip, arena=False
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


@pytest.mark.host("what leaves an accelerator goes to its host's memory, whatever the folder")
def test_a_folder_is_no_place_to_step(tmp_path: Path) -> None:
    with pytest.raises(
        InterlaceError, match=r"(?s)needs its states in host memory, and the tier is a folder; give tier=host"
    ):
        compiled(["host_update"], tmp_path)


def rank_run(
    passes: list[str], folder: str, **config: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor], int, list[float]]:
    """Losses, norms, weights and peak of a rank's five steps; then the losses of two more from its checkpoint."""
    rank, _ = parity.rank_and_size()
    rows = 2 * config.get("accumulation", 1)

    def tokens(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 128, (rows, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        return {"input_ids": ids, "labels": ids.clone()}

    def made() -> Any:
        return compiled(passes, HOST if passes else None, example=tokens(0), arena=False, timeout_s=60, **config)

    with made() as trainer:
        losses, norms = [], []
        for step in range(5):
            losses.append(float(trainer.step(tokens(step))))
            norms.append(0.0 if trainer.norm is None else float(trainer.norm))
            if step == 2:
                trainer.save(folder, wait=False)
        trainer.finish_save()
        found = losses, norms, dict(trainer.state_dict()), int(trainer.stats()["peak_bytes"])
    with made() as again:
        again.load(folder)
        return *found, [float(again.step(tokens(step))) for step in (3, 4)]


@pytest.mark.parametrize(("accumulation", "mode", "clip"), [
    (1, "reduce_each", 0.05), (3, "reduce_each", None), (2, "reduce_last", 0.05),
    *(pytest.param(*one, marks=pytest.mark.soak)
      for one in [(1, "reduce_each", None), (3, "reduce_each", 0.05), (2, "reduce_last", None)]),
])  # fmt: skip
def test_steps_on_the_host_of_two_ranks_change_no_bit(
    accumulation: int, mode: str, clip: float | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"accumulation": accumulation, "accumulate_mode": mode, "clip_norm": clip}
    plain = ranks.run(rank_run, 2, [], str(tmp_path / "plain"), **settings)
    assert plain[0][0] != plain[1][0], "the ranks have different batches"
    limit = plain[0][3] * 70 // 100
    share = f"offload(cluster={{cluster}},limit={limit - BESIDE},host=auto)"
    for number, passes in enumerate(
        (["host_update"], ["reposition_update", "host_update"], ["reposition_update", share])
    ):
        ours = ranks.run(rank_run, 2, passes, str(tmp_path / str(number)), **settings)
        for mine, expected in zip(ours, plain, strict=True):
            assert mine[:2] == expected[:2], passes
            assert same(mine[2], expected[2]), passes
            assert mine[4] == expected[0][3:], passes
            # Half of AdamW's 8 bytes a parameter is a rank's; each rank's lie on the host.
            most = expected[3] - 4 * numel(mine[2]) + BESIDE if passes[-1] == "host_update" else limit
            assert mine[3] <= most, passes
