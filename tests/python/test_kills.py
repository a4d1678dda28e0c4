"""kill -9 of a rank at random moments, in steps, saves and offloads: after restarts the losses are those of an undisturbed run, bit for bit.

INTERLACE_KILLS and INTERLACE_SEED set the long form's number of kills (100 on two ranks, 100 on four) and its moments (2).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo

import interlace

SAVE_EVERY = 3
KINDS = ("step", "save", "offload")  # what a kill meets
TWO_BY_TWO = {"pp": 2, "dp": 2}
OFFLOAD = ["overlap_update", "offload_sync(cluster={cluster},kinds=states)"]  # every state out and back in every step


def train(folder: str, cache: str, steps: int, mesh: dict[str, int], offload: bool = False) -> None:
    """One start of a run: from the checkpoint that is there, to `steps`; every loss goes into a log that no restart clears."""
    model = zoo.build("gpt2_dropout", torch.float32)
    optimizer = parity.make_optimizer("adamw", model)
    case = zoo.CASES["gpt2_dropout"]
    tier = Path(folder) / "tier"
    tier.mkdir(exist_ok=True)
    more: dict[str, Any] = {"tier": str(tier), "schedule": [(0, OFFLOAD)]} if offload else {}
    config = interlace.Config(timeout_s=30, clip_norm=1.0, cache=cache, mesh=mesh, accumulation=2 * mesh.get("pp", 1) - 1, **more)
    rank = parity.rank_and_size()[0]
    place, places = config.data_place(rank, math.prod(mesh.values()))

    def batch(step: int) -> dict[str, torch.Tensor]:
        return {k: v.chunk(places)[place] for k, v in case.batch(2 * places * config.accumulation, step).items()}

    checkpoint = Path(folder) / "checkpoint"
    with interlace.compile(model, optimizer, case.loss, batch(0), config) as trainer:
        trainer.reserve(checkpoint)
        if checkpoint.exists():
            trainer.load(checkpoint)
        while trainer.steps < steps:
            step = trainer.steps
            loss = parity.mean_over_ranks(trainer.step(batch(step)))
            if rank == 0:
                with open(Path(folder) / "losses", "a") as log:
                    log.write(f"{step} {loss.hex()}\n")
            if trainer.steps % SAVE_EVERY == 0:
                trainer.save(checkpoint, wait=False, keep=2)


def lines(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "losses").read_text().splitlines()
    return []


class Killer(threading.Thread):
    """Kills a rank once, in the middle of a step some steps on, or while a checkpoint is being written."""

    def __init__(self, folder: Path, choice: random.Random, kind: str, size: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.victim = folder, choice.randrange(size)
        self.in_save = kind == "save"
        self.after_lines = len(lines(folder)) + choice.randint(1, 2 * SAVE_EVERY)
        self.delay = choice.random() * (0.01 if self.in_save else 0.05)
        self.stop, self.killed = threading.Event(), False

    def run(self) -> None:
        while not self.stop.is_set():
            if len(lines(self.folder)) >= self.after_lines and (not self.in_save or any(self.folder.glob(".*.part"))):
                time.sleep(self.delay)
                assert ranks._pool is not None
                os.kill(ranks._pool._workers[self.victim][0].pid, signal.SIGKILL)
                self.killed = True
                return
            time.sleep(0.0005)


def run_with_kills(folder: Path, kills: int, seed: int, mesh: dict[str, int]) -> dict[str, str]:
    """step → loss of a run that was killed so often; a step made twice must have given the same."""
    choice, size = random.Random(seed), math.prod(mesh.values())
    kinds = [kind for kind in KINDS if kind != "offload" or "pp" not in mesh]
    cache, run = folder / "cache", folder / "killed"
    run.mkdir()
    for count in range(kills):
        kind = kinds[count % len(kinds)]
        killer = Killer(run, choice, kind, size)
        killer.start()
        outcomes = ranks.outcomes(train, size, str(run), str(cache), 10**6, mesh, kind == "offload")
        killer.stop.set()
        killer.join()
        where = f"kill {count + 1} of {kills}, seed {seed}: rank {killer.victim} in a {kind}"
        print(f"{where}, after {len(lines(run))} steps", flush=True)
        assert killer.killed, [where, *(o and o.traceback for o in outcomes)]
        # The survivors name the one that is gone; not where this test asks for the mean.
        for rank, outcome in enumerate(outcomes):
            if rank != killer.victim and outcome is not None and "mean_over_ranks" not in outcome.traceback:
                assert f"rank {killer.victim}" in str(outcome.error), (where, outcome)
                if "pp" in mesh:
                    assert f"stage {killer.victim // 2} of pp" in str(outcome.error), (where, outcome)
    last = 1 + max(int(line.split()[0]) for line in lines(run))
    ranks.run(train, size, str(run), str(cache), last + 1, mesh)
    found: dict[str, str] = {}
    for line in lines(run):
        step, loss = line.split()
        assert found.setdefault(step, loss) == loss, f"step {step} gave another loss after a restart (seed {seed})"
    assert len(found) == last + 1
    return found


def compare(tmp_path: Path, kills: int, seed: int, mesh: dict[str, int]) -> None:
    found = run_with_kills(tmp_path, kills, seed, mesh)
    whole = tmp_path / "whole"
    whole.mkdir()
    ranks.run(train, math.prod(mesh.values()), str(whole), str(tmp_path / "cache"), len(found), mesh)
    assert found == dict(line.split() for line in lines(whole)), f"seed {seed}"
    assert not list((tmp_path / "killed").glob(".*.part")), "what a killed run left half-written stays behind"


@pytest.mark.parametrize("mesh, kills", [({"dp": 2}, 3), pytest.param(TWO_BY_TWO, 1, marks=pytest.mark.soak)])
def test_kills_change_no_bit(tmp_path: Path, mesh: dict[str, int], kills: int) -> None:
    compare(tmp_path, kills, 1, mesh)


@pytest.mark.soak
@pytest.mark.parametrize("mesh, kills", [({"dp": 2}, 100), (TWO_BY_TWO, 100)])
def test_many_kills_change_no_bit(tmp_path: Path, mesh: dict[str, int], kills: int) -> None:
    compare(tmp_path, int(os.environ.get("INTERLACE_KILLS", kills)), int(os.environ.get("INTERLACE_SEED", "2")), mesh)
