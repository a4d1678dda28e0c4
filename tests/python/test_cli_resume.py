"""`interlace train` that goes on by itself: SIGTERM saves first, a killed rank is followed by a restart, damage by the checkpoint before."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from commands import Command
from test_cli_train import TINY, environment, folder, ranks_of  # noqa: F401 (folder is a fixture)

from interlace.cli import app

ARGUMENTS = ["train", "--text", "text.py", *TINY, "--ranks", "2", "--save", "run", "--save-every", "2", "--keep", "2"]


def begin(where: Path, *arguments: str, program: list[str] | None = None) -> subprocess.Popen | Command:
    if program is None:
        return Command(*ARGUMENTS, *arguments, cwd=where, env=environment(where))
    return subprocess.Popen(
        [*program, *ARGUMENTS, *arguments], cwd=where, env=environment(where), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def until(process: subprocess.Popen | Command, step: int) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(f"step {step} "):
            return
    raise AssertionError("".join(lines))


def logged(file: Path) -> dict[int, float]:
    """Losses by step; a step that was made twice must have the same bits."""
    found: dict[int, float] = {}
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        if "loss" not in entry:  # of a plan
            continue
        assert found.setdefault(entry["step"], entry["loss"]) == entry["loss"], entry
    return found


def saved_step(checkpoint: Path) -> int:
    return json.loads((checkpoint / "trainer.json").read_text())["step"]


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, float]:  # noqa: F811
    """An undisturbed run of 24 steps. The learning rate depends on the number of steps, so the others have as many."""
    process = commands.run(
        "train", "--text", "text.py", *TINY, "--ranks", "2", "--steps", "24", "--log", "whole.jsonl", "--save", "whole",
        cwd=folder, env=environment(folder),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return logged(folder / "whole.jsonl")


def test_stopped_killed_and_damaged(folder: Path, whole: dict[int, float]) -> None:  # noqa: F811
    run = ["--steps", "24", "--log", "run.jsonl", "--resume", "auto"]
    process = begin(folder, *run)
    until(process, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    stop = re.search(
        r"^stopped by SIGTERM after step (\d+), saved: interlace train --resume run goes on$", err, flags=re.M
    )
    assert process.returncode == 143 and stop is not None, err
    assert saved_step(folder / "run") == int(stop.group(1)) and "Traceback" not in err
    # Damage is named, and the run goes on from the checkpoint before; then a rank is killed and the launcher starts again.
    file = folder / "run" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    older = sorted(folder.glob("run.step-*"))
    assert len(older) == 1
    process = begin(folder, *run, "--max-restarts", "1")
    assert process.stderr is not None
    head = process.stderr.readline()
    while not head.startswith("warning"):
        head = process.stderr.readline()
        assert head, "no warning"
    assert "run/optimizer.safetensors is damaged in 'exp_avg_sq." in head, head
    assert process.stderr.readline() == f"going on from {older[0]}\n"
    until(process, saved_step(older[0]) + 5)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "rank 1 failed (killed by SIGKILL)" in err and "starting again, 0 more restart(s) allowed" in err
    assert logged(folder / "run.jsonl") == whole
    assert saved_step(folder / "run") == 24


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:  # noqa: F811
    """The launcher's part of the command in this process: for what ends before there are ranks."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", environment(folder)["XDG_CACHE_HOME"])
    return app.run(list(arguments))


def test_a_run_that_has_made_its_steps(
    folder: Path,  # noqa: F811
    whole: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(folder, monkeypatch, *ARGUMENTS, "--save", "whole", "--steps", "24", "--resume", "auto") == 0
    assert capfd.readouterr().err == "the run in whole has made all of its 24 steps: nothing to do\n"


@pytest.mark.soak
def test_torchrun_restarts_and_the_run_goes_on(folder: Path, whole: dict[int, float]) -> None:  # noqa: F811
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    program += ["-m", "--", "interlace.cli"]  # without "--", torchrun takes --log for a short form of its own options
    file = folder / "torchrun.jsonl"
    arguments = ["--steps", "24", "--log", file.name, "--resume", "auto", "--save", "torchrun"]
    process = begin(folder, *arguments, program=program)
    until(process, 5)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    until(process, 12)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert logged(file) == whole
    assert len(file.read_text().splitlines()) > 24, "no step was made twice: it did not go on from a checkpoint"


def test_a_text_that_ends_before_the_place(
    folder: Path,  # noqa: F811
    whole: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (folder / "short.py").write_text("x = 1\n" * 30)
    assert command(folder, monkeypatch, "train", "--resume", "whole", "--steps", "30", "--text", "short.py") == 1
    assert capfd.readouterr().err == (
        "error: the run in whole stands at token 6,144 of its text, but the text given has only 181 tokens: "
        "give a longer text, or begin a new run with --weights\n"
    )
