"""Ranks that are forked from a process which has imported what they import.

A fresh interpreter takes seconds of processor time and 200 MiB for torch and a model's classes, each rank anew. The fork server is a
fork of the launcher that imports them beside what the launcher does meanwhile; each rank is forked from it in milliseconds and
shares its pages. The rank's parent is the launcher: the process between them ends at once, and the launcher adopts.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

from interlace.dist.launch import PARENT, follow_parent
from interlace.errors import InterlaceError

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


class ForkServer:
    """Of one launcher; `main` is what a rank does, with sys.argv and os.environ its own. To be closed."""

    def __init__(self, imports: Callable[[], object], main: Callable[[], object]) -> None:
        self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready: bool | None = None
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the fork is in a session of its own
        self._pid = os.fork()
        if self._pid == 0:
            self._pipe.close()
            _do_and_end(lambda: _serve(theirs, launcher, before, imports, main))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    @staticmethod
    def can_be() -> bool:
        """A process with threads is not forked: what they hold locked would stay so."""
        return sys.platform == "linux" and threading.active_count() == 1

    def ready(self) -> bool:
        """Waits for the imports. False: the fork server has died."""
        if self._ready is None:
            self._ready = bool(self._pipe.recv(1))
        return self._ready

    def start(self, command: Sequence[str], environment: dict[str, str], own_stderr: bool) -> ForkedRank:
        """The rank that python -m MODULE WORDS would be; its stderr is a pipe, or this process's own."""
        read, write = (-1, -1) if own_stderr else os.pipe()
        socket.send_fds(self._pipe, [json.dumps([command[2:], environment]).encode()], [] if own_stderr else [write])
        if not own_stderr:
            os.close(write)
        if not (pid := self._pipe.recv(32)):
            raise InterlaceError("no rank could be forked, for the reason above: are there too many processes?")
        return ForkedRank(int(pid), None if own_stderr else open(read, "rb"))

    def close(self) -> None:
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class ForkedRank:
    """What the launcher uses of a subprocess.Popen."""

    def __init__(self, pid: int, stderr: Any) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(
    pipe: socket.socket, launcher: int, signals: Collection[int], imports: Callable[[], object], main: Callable[[], object]
) -> None:
    os.setsid()  # a terminal's Ctrl-C is for the launcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that has come already is forgotten
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.environ[PARENT] = str(launcher)
    follow_parent()
    imports()
    try:
        pipe.send(b".")
    except OSError:  # the launcher has found a fault in what it was asked, and ended
        return
    while True:
        try:
            words, fds, _, _ = socket.recv_fds(pipe, 1 << 20, 1)
        except ConnectionResetError:  # it has ended before it read that
            return
        if not words:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() == 0:
                _do_and_end(lambda: _be_rank(pipe, between, words, fds, main))
            os._exit(0)
        if os.waitpid(between, 0)[1] != 0:
            return
        for fd in fds:
            os.close(fd)


def _be_rank(pipe: socket.socket, between: int, words: bytes, fds: list[int], main: Callable[[], object]) -> None:
    while os.getppid() == between:  # until the launcher has adopted it
        time.sleep(0.001)
    pipe.send(str(os.getpid()).encode())
    pipe.close()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in fds:
        os.dup2(fd, 2)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):  # a line is written whole and at once: ranks share a pipe, and unbuffered, print writes two parts
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv[:], environment = json.loads(words)
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"interlace:{environment['RANK']}".encode())
    main()


def _do_and_end(work: Callable[[], object]) -> None:
    """The whole life of a fork: what the stack below it holds is not its own."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:  # before there was anything to stop
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
