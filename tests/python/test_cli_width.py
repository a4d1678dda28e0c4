"""Output fits the terminal: on one of 80 columns no line of a result is longer, and not a word is lost by it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
from commands import Command
from simulation_support import captured, sharded

from interlace.cli.console import fitted

COLUMNS = 80
COMMANDS = [
    ["plan llama-tiny --cluster h100-80gb-2 --global-batch 8 --seq 64 --space megatron"], ["simulate step.il --cluster h100-80gb-2"],
    ["simulate captured.il --mesh pp=2,dp=2 --accumulation 4 --cluster h100-80gb-4"], ["inspect step.il"], ["inspect step.il --memory"],
    ["opt --passes=search(cluster=h100-80gb-2) step.il -o searched.il", "explain searched.il"], ["doctor"], ["opt --list"],
    ["train --text book.txt --model llama-tiny --steps 2 --seq 32 --batch 2 --ranks 2 --save run --log log.jsonl", "report run -o run.html",
     "checkpoint show run"],
]  # fmt: skip


def on_a_terminal(*command: str, columns: int = COLUMNS) -> str:
    """What a command prints there, or Python ("-c"), without colours."""
    master, slave = os.openpty()
    said: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(master, 65536):
                said.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    if command[0] == "-c":
        done: Any = subprocess.run([sys.executable, *command], stdout=slave, stderr=subprocess.PIPE, text=True, env=environment)
        error = done.stderr
    else:
        done = Command(*command, env=environment, stdout=slave)
        error = done.communicate()[1]
    os.close(slave)
    reader.join()
    os.close(master)
    assert done.returncode == 0, error
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(said).decode().replace("\r", ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("width")
    (folder / "step.il").write_text(sharded(2))
    (folder / "captured.il").write_text(captured())
    (folder / "book.txt").write_text("A line of a book that is read again and again.\n" * 200)
    return folder


@pytest.mark.parametrize("commands", COMMANDS, ids=lambda commands: " ".join(commands[-1].split()[:3]))
def test_80_columns(folder, monkeypatch, commands):
    monkeypatch.chdir(folder)
    for command in commands:
        found = on_a_terminal(*command.split())
        assert max(map(len, found.splitlines()), default=0) <= COLUMNS, found
    assert found.count("\n") > 2


def test_columns_move_together_before_a_line_is_folded():
    table = "name" + " " * 60 + "value      note\nx" + " " * 63 + "12         it is so\n\nafter" + " " * 30 + "this"
    assert fitted(table) == table, "in a file nothing is folded"
    show = "import sys; from interlace.cli.console import fitted; print(fitted(sys.argv[1]))"
    assert on_a_terminal("-c", show, table, columns=24) == "name  value  note\nx     12     it is so\n\nafter  this\n"
    assert on_a_terminal("-c", show, table, columns=16) == "name  value\n    note\nx     12     it\n    is so\n\nafter  this\n"
