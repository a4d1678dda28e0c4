"""The `interlace` command, or a script, as a process of its own that is forked from one with torch and transformers imported (ranks.context).

    done = commands.run("train", "--ranks", "2", cwd=folder)                # as subprocess.run with text and both outputs captured
    process = commands.Command("train", ..., stdout=subprocess.DEVNULL)     # as subprocess.Popen

What tests how a process starts, or is started by torchrun, starts a fresh interpreter instead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import on_device
import ranks

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL


def _serve(words: list[str], cwd: str, env: dict[str, str], session: bool, outputs: list[Connection]) -> None:
    from interlace.cli import main

    gc.freeze()  # as ranks do
    if session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), fd)
        output.close()
    if words[0].endswith(".py"):
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = ["interlace", *words]
    main()


class Command:
    """A running command, or a script where the first word is its file; stdout and stderr are PIPE (text), DEVNULL or a file descriptor."""

    def __init__(
        self, *words: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, stdout: int = PIPE, stderr: int = PIPE,
        session: bool = False,
    ) -> None:  # fmt: skip
        if "--ranks" in words:
            on_device.needs(int(words[words.index("--ranks") + 1]))
        self.stdout, self.stderr = None, None
        theirs: list[int] = []
        for name, asked in ("stdout", stdout), ("stderr", stderr):
            if asked == PIPE:
                ours, write = os.pipe()
                setattr(self, name, os.fdopen(ours))
                theirs.append(write)
            else:
                theirs.append(os.open(os.devnull, os.O_WRONLY) if asked == DEVNULL else os.dup(asked))
        ends = [Connection(fd, readable=False) for fd in theirs]
        arguments = ([str(word) for word in words], str(cwd or os.getcwd()), dict(env or os.environ), session, ends)
        self._process = ranks.context().Process(target=_serve, args=arguments)
        self._process.start()
        for end in ends:
            end.close()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("interlace", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """All of its outputs, and waits for its end; a command that does not end in time is killed."""
        said: dict[int, Any] = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        readers = [threading.Thread(target=lambda s=s: said.update({id(s): s.read()}), daemon=True) for s in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
        if any(reader.is_alive() for reader in readers):
            self._process.kill()
            raise subprocess.TimeoutExpired("interlace", timeout)
        self.wait(timeout)
        out, err = (said.get(id(stream), "") for stream in (self.stdout, self.stderr))
        for stream in streams:
            stream.close()
        return out, err

    def send_signal(self, number: int, group: bool = False) -> None:
        """To it, or to its process group (of a session of its own), as a terminal does; to nobody where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)


def run(*words: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300.0) -> Any:
    process = Command(*words, cwd=cwd, env=env)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(["interlace", *map(str, words)], process.returncode or 0, out, err)
