"""Ranks forked from a fork server: what they are given, how their ends are seen, and that they end with their launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import json, os, signal, sys, time
from interlace.dist.launch import run_ranks
from interlace.dist.fork_server import ForkServer

def imports():
    sys.imported = os.getpid()

def main():
    rank = int(os.environ["RANK"])
    {main}

fork_server = ForkServer(imports, main)
assert ForkServer.can_be()
failures = [run_ranks(["python", "-m", "module", "word"], 2, 3, fork_server) for _ in range({times})]
fork_server.close()
print(json.dumps([failure and failure.describe() for failure in failures]))
"""


def launch(main: str, times: int = 1) -> subprocess.Popen:
    program = PROGRAM.format(main=main, times=times)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def launched(main: str, times: int = 1) -> tuple[list, list[str]]:
    process = launch(main, times)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    *lines, failures = out.splitlines()
    return json.loads(failures), [*lines, *err.splitlines()]


def test_a_rank_has_its_words_its_environment_and_what_was_imported() -> None:
    """Twice, as after a restart: both times it is forked from the same imports."""
    failures, lines = launched(
        'print(json.dumps([rank, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], sys.argv, sys.imported, '
        'os.getsid(0) == os.getpid(), open("/proc/self/comm").read()]))', times=2)  # fmt: skip
    assert failures == [None, None]
    told = sorted(json.loads(line) for line in lines)
    assert [t[:4] for t in told] == [[rank, "2", "3", ["module", "word"]] for rank in (0, 0, 1, 1)]
    assert len({t[4] for t in told}) == 1 and all(t[5] for t in told)
    assert [t[6] for t in told] == ["interlace:0\n"] * 2 + ["interlace:1\n"] * 2


def test_lines_of_ranks_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    _, lines = launched("time.sleep(1 - time.time() % 1); [print(rank, rank) for _ in range(2000)]")
    assert sorted(lines) == ["0 0"] * 2000 + ["1 1"] * 2000


def test_its_stderr_carries_the_rank_and_its_exit_code_is_seen() -> None:
    failures, lines = launched("print('hello', file=sys.stderr); sys.exit(7 * rank)")
    assert failures == ["rank 1 failed (exit code 7): hello"]
    assert sorted(lines) == ["[rank 1] hello", "hello"]


def test_a_traceback_is_told_and_nothing_of_the_launcher_runs_in_a_rank() -> None:
    failures, lines = launched("if rank == 1: raise ValueError('no such thing')")
    assert failures == ["rank 1 failed (exit code 1): ValueError: no such thing"]
    assert "[rank 1] ValueError: no such thing" in lines


def test_a_killed_rank_is_named_and_the_other_is_ended() -> None:
    failures, _ = launched("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(600)")
    assert failures == ["rank 0 failed (killed by SIGKILL) (out of memory?)"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_end_with_the_launcher(number: int, tmp_path: Path) -> None:
    said = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').close()"
    process = launch(f"from interlace.dist.launch import follow_parent; follow_parent(); {said}; time.sleep(600)")
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3, "the fork server and two ranks"
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text() for pid in children):
        assert time.monotonic() < deadline, "one outlives its launcher"
        time.sleep(0.05)


def test_a_launcher_that_ends_before_it_reads_leaves_no_traceback() -> None:
    """It found a fault in what it was asked after the fork server had said that it is ready."""
    code = (
        "import select, time\n"
        "from interlace.dist.fork_server import ForkServer\n"
        "server = ForkServer(lambda: None, lambda: None)\n"
        "select.select([server._pipe], [], [])\n"
        "server._pipe.close()\n"
        "time.sleep(0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
