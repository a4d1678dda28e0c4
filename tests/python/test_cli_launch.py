"""The launcher: environment, prefixes, and what happens when a rank fails, hangs or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from interlace.dist import launch


def command(script: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script)]


def test_ranks_see_torchruns_variables(tmp_path):
    failure = launch.run_ranks(
        command(
            f"""
            names = ["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
            open({str(tmp_path)!r} + f"/{{rank}}", "w").write(" ".join(os.environ[n] for n in names))
            int(os.environ["MASTER_PORT"])
            """
        ),
        ranks=3,
        threads=2,
    )
    assert failure is None
    assert [(tmp_path / str(r)).read_text() for r in range(3)] == [f"{r} 3 3 127.0.0.1 2" for r in range(3)]


def test_stderr_carries_the_rank(capfd):
    assert launch.run_ranks(command("print('hello', rank, file=sys.stderr)"), ranks=2) is None
    assert sorted(capfd.readouterr().err.splitlines()) == ["[rank 1] hello 1", "hello 0"]


def test_the_rank_that_failed_first_is_named_not_the_ones_that_followed(capfd, tmp_path):
    failure = launch.run_ranks(
        command(
            f"""
            from pathlib import Path
            from interlace.dist.launch import leave_failure
            said, ended = Path({str(tmp_path)!r}, "said"), Path({str(tmp_path)!r}, "ended")
            if rank == 1:
                leave_failure("the disk is full", 1)
                said.touch()
                while not ended.exists():
                    time.sleep(0.01)
                time.sleep(0.4)  # its end is seen after rank 0's
                sys.exit(1)
            while not said.exists():
                time.sleep(0.01)
            leave_failure("lost rank 1", 1)
            ended.touch()
            sys.exit(1)
            """
        ),
        ranks=2,
    )
    assert failure is not None and failure.describe() == "rank 1 failed (exit code 1): the disk is full"


def test_a_killed_rank_is_the_cause_and_hanging_ranks_are_ended(tmp_path):
    failure = launch.run_ranks(
        command(
            f"""
            import signal
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
            open({str(tmp_path)!r} + "/" + str(rank), "w")
            """
        ),
        ranks=3,
    )
    assert failure is not None and failure.describe() == "rank 1 failed (killed by SIGKILL) (out of memory?)"
    assert not list(tmp_path.iterdir()), "a rank went on to its end"


def test_last_line_of_stderr_when_a_rank_left_no_message(capfd):
    failure = launch.run_ranks(command("if rank == 1: raise ValueError('no such thing')"), ranks=2)
    assert failure is not None and failure.describe() == "rank 1 failed (exit code 1): ValueError: no such thing"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_launcher(tmp_path, number):
    rank = "import os, time; from interlace.dist.launch import follow_parent; follow_parent(); "
    rank += f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"import sys; from interlace.dist.launch import run_ranks; run_ranks([sys.executable, '-c', {rank!r}], 2)"
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    wait_for(lambda: all(f.exists() and f.read_text() for f in files))
    pids = [int(f.read_text()) for f in files]
    process.send_signal(number)
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_ctrl_c_that_one_rank_is_still_starting_for(tmp_path, monkeypatch):
    """It ends at once, the other one, which would save after its step, waits for it: not for as long as a save may take."""
    monkeypatch.setattr(launch, "STOP_S", 3600.0)
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    script = f"""
        import os, signal, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGINT, lambda *_: None)
        open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").close()
        time.sleep(3600)
    """
    files = [tmp_path / "0", tmp_path / "1"]

    def press() -> None:
        wait_for(lambda: all(file.exists() for file in files))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        launch.run_ranks(command(script), 2)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
