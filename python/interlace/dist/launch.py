"""Starts the ranks of a run on this machine and watches them.

Each rank is a process with the environment torchrun would give it (RANK, WORLD_SIZE, MASTER_ADDR, ...), so a command
runs the same under torchrun and here. Rank 0 keeps the terminal (its progress bar); what other ranks write to stderr is
passed on line by line with the rank in front. When one rank fails, the others get a short time to stop by themselves,
then are ended, and the rank that failed first is named with its own last words. A rank dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.dist.secret import VALUE, derive, fresh

if TYPE_CHECKING:
    from interlace.dist.fork_server import ForkedRank, ForkServer
    from interlace.dist.store import StoreServer

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0  # for ranks to stop by themselves once another has failed
STOP_S = 30.0  # for ranks to save and stop by themselves after SIGTERM; torchrun gives them as long
KILL_AFTER_S = 3.0  # from asking a rank to end to killing it
POLL_S = 0.05
FAILURE_FILE = "INTERLACE_FAILURE_FILE"  # where a rank that fails leaves its last words
STORE = "INTERLACE_STORE"  # where the store of the run is, host:port
PARENT = "INTERLACE_LAUNCHER"  # the process id of the launcher
LAST_LINES = 20  # of a rank's stderr, told when it left no last words


class Terminated(BaseException):
    """SIGTERM came, and what had to be done before the end is done."""


TERMINATED = 128 + signal.SIGTERM  # the exit code that says so


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended: its exit code (negative: a signal) and what it said."""

    rank: int
    code: int
    message: str
    at: float  # of this host's clock that nobody sets (time.monotonic), when it said so or when its end was seen

    def describe(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"killed by {signal_name(-self.code)}"
        hint = " (out of memory?)" if self.code == -signal.SIGKILL else ""
        said = f": {self.message}" if self.message else hint
        return f"rank {self.rank} failed ({how}){said}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def free_port() -> int:
    """A TCP port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def is_rank() -> bool:
    """Whether this process is a rank: started by run_ranks or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def follow_parent() -> None:
    """Called in a rank: end with the launcher, however that ends (Linux)."""
    parent = os.environ.get(PARENT)
    if parent and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(parent):  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def leave_failure(message: str, code: int) -> bool:
    """Called in a rank that fails: whether there is a launcher that tells this message with the rank's number."""
    file = os.environ.get(FAILURE_FILE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": message, "code": code, "at": time.monotonic()}))
            return True
    return False


def rank_environment(rank: int, ranks: int, port: int, threads: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Warnings of the key-value store's clients tell nothing that our own messages do not.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }  # fmt: skip


def run_ranks(command: Sequence[str], ranks: int, threads: int = 1, fork_server: ForkServer | None = None) -> RankFailure | None:
    """Runs `command` as `ranks` processes; None when all ended well, else the failure that came first.

    With a fork server the ranks are its forks; `command` is python -m MODULE WORDS.

    This process holds the ranks' key-value store, so that it answers whatever becomes of rank 0, also when rank 0 ends well before
    the others have read its last word. On SIGTERM and Ctrl-C the ranks get the signal too and STOP_S to end, then Terminated or
    KeyboardInterrupt is raised; a second Ctrl-C ends them at once. The ranks are in sessions of their own: a terminal's Ctrl-C
    comes from here alone.
    """
    if fork_server is not None and not fork_server.ready():
        fork_server = None
    held, secret, port = _hold_store() if ranks > 1 else (None, "", free_port())
    with tempfile.TemporaryDirectory(prefix="interlace-ranks-") as folder, _noting_signals() as stop:
        workers: list[_Worker] = []
        try:
            for rank in range(ranks):
                file = Path(folder) / f"rank{rank}.json"
                environment = rank_environment(rank, ranks, port, threads)
                if held is not None:
                    environment |= {STORE: f"{LOOPBACK}:{port}", VALUE: secret}
                workers.append(_Worker(rank, command, environment, file, fork_server))
            _wait(workers, stop)
        finally:
            _end(workers)
            if held is not None:
                held.close()
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt
        if stop.number:
            raise Terminated
        return first_failure(workers)


def _hold_store() -> tuple[StoreServer | None, str, int]:
    """The store, its secret and its port, on the loopback alone: all ranks are on this machine."""
    from interlace.dist.store import StoreServer

    secret = fresh()
    server = StoreServer(derive(secret.encode(), "attempt 0"), LOOPBACK)
    return server, secret, server.port


class _Worker:
    """One rank: its process, and the thread that passes its stderr on."""

    process: subprocess.Popen[bytes] | ForkedRank

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str], failure_file: Path, fork_server: ForkServer | None):
        self.rank = rank
        self.failure_file = failure_file
        self.ended_at: float | None = None
        self.told_to_end = False
        self.tail: list[str] = []
        own_terminal = rank == 0 and sys.stderr.isatty()
        environment = {**environment, FAILURE_FILE: str(failure_file)}
        if fork_server is not None:
            self.process = fork_server.start(command, environment, own_terminal)
        else:
            self.process = subprocess.Popen(
                list(command), env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                stderr=None if own_terminal else subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        self.reader = None
        if self.process.stderr is not None:
            self.reader = threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True)
            self.reader.start()

    def _pass_on(self, stream) -> None:
        prefix = "" if self.rank == 0 else f"[rank {self.rank}] "
        clear = "\r\x1b[K" if sys.stderr.isatty() and self.rank else ""
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\r\n")
            self.tail = [*self.tail[1 - LAST_LINES :], line]
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{clear}{prefix}{line}\n")
                sys.stderr.flush()

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return code

    def failure(self) -> RankFailure | None:
        code = self.process.returncode
        if not code or self.told_to_end:
            return None
        message, at = "", self.ended_at or time.monotonic()
        try:
            left = json.loads(self.failure_file.read_text())
            message, at = str(left["message"]), float(left["at"])
        except (OSError, ValueError, KeyError, TypeError):
            said = [line for line in self.tail if line.strip()]
            message = said[-1].strip() if said and code > 0 else ""
        return RankFailure(self.rank, code, message, at)


def first_failure(workers: Sequence[_Worker]) -> RankFailure | None:
    """The cause rather than its consequences: a rank killed by a signal, else the one that said so first."""
    failures = [failure for worker in workers if (failure := worker.failure()) is not None]
    return min(failures, key=lambda f: (f.code >= 0, f.at, f.rank), default=None)


def _wait(workers: list[_Worker], stop: _Stop) -> None:
    """Until all have ended, or one has failed, or a signal has come, and the others' time to stop is over."""
    deadline = None
    told = False
    while True:
        if stop.number and not told:
            told, deadline = True, time.monotonic() + STOP_S
            for worker in workers:
                if worker.poll() is None:
                    worker.process.send_signal(stop.number)
        codes = [worker.poll() for worker in workers]
        if all(code is not None for code in codes):
            return
        own = (None, 0, TERMINATED) if told else (None, 0)  # a rank that ended otherwise (it was only starting) is waited for in vain
        if any(code not in own for code in codes):
            deadline = min(deadline or math.inf, time.monotonic() + GRACE_S)
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def _end(workers: list[_Worker]) -> None:
    """Ends what still runs: asks first, then kills."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.told_to_end = True
        worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + KILL_AFTER_S
    while running := [worker for worker in running if worker.poll() is None]:
        if time.monotonic() > deadline:
            for worker in running:
                worker.process.send_signal(signal.SIGKILL)
        time.sleep(POLL_S / 5)
    for worker in workers:
        if worker.reader is not None:
            worker.reader.join(timeout=1.0)


class _Stop:
    """The signal that came."""

    number = 0

    def note(self, number: int, frame: object) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


@contextlib.contextmanager
def _noting_signals() -> Iterator[_Stop]:
    """A signal to the launcher is for the ranks: none is left behind, and each can save first."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
