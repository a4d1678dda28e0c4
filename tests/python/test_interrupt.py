"""Ctrl-C at any moment of `interlace train`: a checkpoint that goes on with the same bits, and the line that says how."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import DEVNULL, Command
from test_cli_resume import logged
from test_cli_train import TINY, environment, folder  # noqa: F401 (folder is a fixture)

COMMAND = ["train", "--text", "text.py", *TINY, "--ranks", "2", "--steps", "16"]
MOMENTS = 3


def begin(where: Path, name: str) -> Command:
    arguments = ["--save", name, "--save-every", "3", "--log", f"{name}.jsonl", "--resume", "auto"]
    return Command(*COMMAND, *arguments, cwd=where, env=environment(where), stdout=DEVNULL, session=True)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[dict[int, float], float]:  # noqa: F811
    """An undisturbed run, and how long it took."""
    start = time.monotonic()
    process = begin(folder, "whole")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return logged(folder / "whole.jsonl"), time.monotonic() - start


def interrupted(where: Path, name: str, moments: list[float]) -> int:
    """Presses Ctrl-C after each of these seconds of a start, then lets the run end; how many starts were stopped in training."""
    stopped = 0
    for moment in moments:
        process = begin(where, name)
        time.sleep(moment)
        process.send_signal(signal.SIGINT, group=True)  # as a terminal does
        _, err = process.communicate(timeout=300)
        found = re.search(rf"^stopped by Ctrl-C after step (\d+), saved: interlace train --resume {name} goes on$", err, flags=re.MULTILINE)
        assert process.returncode in (130, 0), err
        assert "Traceback" not in err and "rank 1 failed" not in err, err
        if found is not None:
            assert process.returncode == 130
            assert json.loads((where / name / "trainer.json").read_text())["step"] == int(found.group(1))
            stopped += 1
    process = begin(where, name)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return stopped


def check(where: Path, whole: tuple[dict[int, float], float], count: int, seed: int) -> None:
    losses, seconds = whole
    generator = random.Random(seed)
    moments = [generator.uniform(0.3, 1.1) * seconds for _ in range(count)]
    interrupted(where, f"run{seed}", moments)
    assert logged(where / f"run{seed}.jsonl") == losses


def test_a_few_random_moments(folder: Path, whole: tuple[dict[int, float], float]) -> None:  # noqa: F811
    check(folder, whole, MOMENTS, 1)


@pytest.mark.parametrize("how", ["while an object is taken apart", "while the command is imported"])
def test_nothing_swallows_it(how: str) -> None:
    """Python prints a KeyboardInterrupt of a finalizer, or of a callback of a module's lock, and goes on as if it had not come."""
    run = """
import signal, sys, time, types
class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def run():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Gone()
        time.sleep(20)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0
def _():
    time.sleep(20)
    return 0
class App(types.ModuleType):
    def __getattr__(self, name):
        if name != "run":
            raise AttributeError(name)
        if {imported}:
            signal.raise_signal(signal.SIGINT)
        return run
from interlace import cli
sys.modules["interlace.cli.app"] = App("app")
cli.main()
""".replace("{imported}", str("imported" in how))
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_it_leaves_a_terminal_as_it_was() -> None:
    ours, theirs = pty.openpty()
    run = """
import signal
from interlace import cli
from interlace.cli.console import Work
with Work() as work:
    work.update("tokenizing", 3, 10)
    cli.end_at_once()
    signal.raise_signal(signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", run], stderr=theirs, timeout=60, check=False, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    said = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 130 and b"\x1b[?25l" in said  # hidden by the bar
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l") and said.endswith(b"error: interrupted\r\n")


def test_in_the_middle_of_training(folder: Path) -> None:  # noqa: F811
    process = begin(folder, "middle")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2 "):
            break
    process.send_signal(signal.SIGINT, group=True)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "stopped by Ctrl-C after step" in err, err


@pytest.mark.soak
def test_twenty_random_moments(folder: Path, whole: tuple[dict[int, float], float]) -> None:  # noqa: F811
    for seed in range(2, 6):
        check(folder, whole, 5, seed)
