"""Runs a function on N gloo ranks: a persistent pool of single-threaded processes, one process group used for many programs.

    results = ranks.run(train, 2, "llama", steps=5)     # [result of rank 0, result of rank 1]; a failure raises its traceback
    outcomes = ranks.outcomes(train, 2)                  # Outcome(value, error, traceback, seconds) of each rank; None: it died

The function must be importable (top level of a test module); arguments and results are pickled. The pool has as many processes as the
largest N so far; ranks beyond N idle. The process group is made anew only when N changes or after a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import logging
import multiprocessing as mp
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import on_device

TIMEOUT_S = 180.0
_HERE = str(Path(__file__).parent)


def _cache() -> str:
    """A folder of this run of the tests, for Config.cache: a model is captured and its cuts are settled once for all its settings."""
    if (folder := os.environ.get("INTERLACE_TEST_CACHE")) is None:
        folder = os.environ["INTERLACE_TEST_CACHE"] = tempfile.mkdtemp(prefix="interlace-tests-")
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What Interlace says meanwhile in this process."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("interlace").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("interlace").removeHandler(handler)


CACHE = _cache()  # the pool's processes have it from their environment


@dataclasses.dataclass
class Outcome:
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported before the fork lives as long: a collection looks at it for a fifth of a second
    on_device.install()
    torch.set_num_threads(1)
    group: int | None = None
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        module, name, args, kwargs, rank, size, rendezvous = job
        begin = time.monotonic()
        try:
            if rendezvous != group:
                if dist.is_initialized():
                    dist.destroy_process_group()
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
                if size > 1:
                    dist.init_process_group(
                        "gloo", init_method=f"tcp://127.0.0.1:{rendezvous}", rank=rank, world_size=size
                    )
                group = rendezvous
            torch.manual_seed(0)
            on_device.left_out()
            value = on_device.home(getattr(importlib.import_module(module), name)(*args, **kwargs))
            if waits := on_device.left_out():
                raise AssertionError("waits that were left out: " + "; ".join(waits))
            outcome = Outcome(value, None, "", time.monotonic() - begin)
        except BaseException as e:
            outcome = Outcome(None, e, traceback.format_exc(), time.monotonic() - begin)
            if dist.is_initialized():  # who waits for this rank in an operation of gloo's is told
                dist.destroy_process_group()
            group = None
        try:
            pipe.send(outcome)
        except Exception as e:  # a value or an error that cannot be pickled
            text = outcome.traceback or repr(e)
            pipe.send(
                Outcome(None, RuntimeError(f"{outcome.error or 'the result'} cannot be pickled"), text, outcome.seconds)
            )
        outcome = None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def context() -> Any:
    """Processes of this context are forked from one that has imported torch, and what an optimizer, a capture, a command and the
    models of most tests would import: a second of each process that builds a model, half of each command. None is a module of ours
    that looks at the terminal or the environment when it is imported."""
    server = mp.get_context("forkserver")
    server.set_forkserver_preload(
        [
            "torch", "torch.distributed", "torch._dynamo", "transformers", "safetensors.torch", "interlace.train.compile", "typer",
            "typer._adapters", "pydantic.fields", "rich.console", "rich.progress", "rich.table", "tokenizers.implementations",
            "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
        ]
    )  # fmt: skip
    return server


class Pool:
    def __init__(self) -> None:
        self._context = context()
        self._workers: list[tuple[Any, Connection]] = []
        self._port = 0  # of the group's store; another port is another group
        self._size = 0

    def outcomes(
        self, function: Callable[..., Any], size: int, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
    ) -> list[Outcome | None]:
        while len(self._workers) < size:
            self._start()
        if size != self._size:
            self._size, self._port = size, free_port()
        used = self._workers[:size]
        for rank, (_, pipe) in enumerate(used):
            pipe.send((function.__module__, function.__name__, args, kwargs, rank, size, self._port))
        found: list[Outcome | None] = [None] * size
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(used)}
        deadline = time.monotonic() + timeout_s
        failed = False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(waiting.values())
                self.stop()
                raise TimeoutError(
                    f"ranks {missing} of {size} did not end within {timeout_s:g} s\n{_tracebacks(found)}"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                    failed |= found[rank].error is not None  # type: ignore[union-attr]
                except EOFError:
                    failed = True
            if failed:  # the others may wait for it
                deadline = min(deadline, time.monotonic() + TIMEOUT_S)
        if failed:
            self.stop()  # whatever a failure left behind must not reach the next program
        return found

    def _start(self) -> None:
        here, there = self._context.Pipe()
        path = [_HERE, *[p for p in sys.path if p != _HERE]]
        process = self._context.Process(target=_serve, args=(there, path), daemon=True)
        process.start()
        there.close()
        self._workers.append((process, here))

    def stop(self) -> None:
        """Ends the pool's own processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        self._size = 0


_pool: Pool | None = None


def _stop() -> None:
    if _pool is not None:
        _pool.stop()


def outcomes(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
) -> list[Outcome | None]:
    """What became of each rank; None for a rank whose process died."""
    global _pool
    on_device.needs(size)
    if _pool is None:
        _pool = Pool()
        atexit.register(_stop)
    return _pool.outcomes(function, size, *args, timeout_s=timeout_s, **kwargs)


def run(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any) -> list[Any]:
    """The function's result on each rank. A failure on any is raised with all tracebacks."""
    found = outcomes(function, size, *args, timeout_s=timeout_s, **kwargs)
    if any(o is None or o.error is not None for o in found):
        raise AssertionError(_tracebacks(found))
    return [o.value for o in found if o is not None]


def _tracebacks(found: list[Outcome | None]) -> str:
    parts = []
    for rank, outcome in enumerate(found):
        if outcome is None:
            parts.append(f"--- rank {rank}: its process died or gave no answer")
        elif outcome.error is not None:
            parts.append(f"--- rank {rank}:\n{outcome.traceback}")
    return "\n".join(parts)
