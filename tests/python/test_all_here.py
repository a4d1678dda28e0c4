"""Calls of a trainer that one rank makes alone: it is told at once, with what to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import failing
import parity
import pytest
import ranks
import torch
from torch import nn

import interlace

CALLS = {
    "save": lambda trainer, folder: trainer.save(folder),
    "state_dict": lambda trainer, folder: trainer.state_dict(),
    "optimizer_state_dict": lambda trainer, folder: trainer.optimizer_state_dict(),
    "whole_parameters": lambda trainer, folder: trainer.whole_parameters().__enter__(),
}


def alone(call: str, other: str, folder: str) -> tuple[str, float]:
    """Rank 0 alone makes the call; the other makes its next step, or has come to its end."""
    rank, _ = parity.rank_and_size()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"x": torch.ones(2, 4)}
    config = interlace.Config(schedule=[], cache="off", timeout_s=60)
    trainer: Any = interlace.compile(model, optimizer, lambda m, b: m(b["x"]).square().mean(), batch, config)
    trainer.step(batch)
    begin = time.monotonic()
    if rank == 0:
        return failing.observed(lambda: CALLS[call](trainer, folder)), time.monotonic() - begin
    if other == "step":
        return failing.observed(lambda: trainer.step(batch)), 0.0
    trainer.close()
    return "", 0.0


@pytest.mark.parametrize("other", ["step", "end"])
@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_of_one_rank_alone(call: str, other: str, tmp_path: Path) -> None:
    text, seconds = ranks.run(alone, 2, call, other, str(tmp_path / "saved"))[0]
    assert f"every rank must call trainer.{call}" in text
    assert seconds < 20
