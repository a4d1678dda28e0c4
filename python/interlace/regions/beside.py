"""A library, or cubins, made by a process of its own: beside the training, whose steps run the bodies meanwhile, or waited for.

    the rank                                            its child (niced, a session of its own with the compiler in it)
    takes the lock, starts the child with it  ────────► lowers, compiles, compares, writes into the cache
    poll() between steps: pending, ready or why not ◄── one line: "", or why there is none; then the child ends its session

Who does not get the lock waits for the one that has it, and takes its place when that one ends without a library. The child ends with
the rank, however that ends, and leaves nothing half done: it works in a folder of the rank's, and its files are put in place whole.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from interlace.regions import cuda, kept, library
from interlace.regions.body import Func
from interlace.regions.kept import RegionsError, log, take_lock
from interlace.regions.library import Library, Wanted, reason_of

NICE = 10
MORE_S = 120.0  # for all but the compiler: starting, lowering, comparing
WATCH_S = 0.2  # between the child's looks at whether its rank is there
CPU = torch.device("cpu")


def wanted_of(funcs: list[Func], mode: str, folder: Path | None, device: torch.device = CPU) -> Wanted:
    """What these regions ask for on a device. Error: RegionsError, OSError: they cannot have it."""
    if device.type == "cpu":
        return Wanted.of(funcs, mode, folder)
    return cuda.WantedCubins.on(funcs, mode, folder, cuda.target_of(device), str(device))


def ready(
    funcs: list[Func], mode: str, folder: Path | None, say: Callable[[str], None] = log.warning, limit_s: float | None = None,
    meanwhile: Callable[[], None] = lambda: None, device: torch.device = CPU,
) -> Library | None:  # fmt: skip
    """The library of these regions, from `folder` or made now. `mode`: "on", or "exact" for those with the bits of their bodies alone.
    `meanwhile`: called many times a second. None where it cannot be had, which is said."""
    try:
        return _made(wanted_of(funcs, mode, folder, device), say, limit_s, meanwhile)
    except (RegionsError, OSError) as e:
        library.say_bodies_run(reason_of(e), say)
        return None


def _made(wanted: Wanted, say: Callable[[str], None], limit_s: float | None, meanwhile: Callable[[], None] = lambda: None) -> Library:
    if (found := wanted.read(say)) is None:
        wanted.at_once = len(os.sched_getaffinity(0))
        making = Making(wanted, "; this is kept for later runs", say, limit_s)
        try:
            while (found := making.poll()) is None:
                meanwhile()
                time.sleep(0.05)
        finally:
            making.close()
        found.seconds = making.seconds
    return found


def cubins(
    funcs: list[Func], target: str, folder: Path | None, say: Callable[[str], None] = log.warning, limit_s: float | None = None
) -> cuda.Cubins:
    """The cubins of these regions for a target of cuda.TARGETS, from `folder` or made now. Error: RegionsError, OSError."""
    wanted = cuda.WantedCubins.on(funcs, "on", folder, target)
    found = _made(wanted, say, limit_s)
    noted, regions = kept.read(wanted.path, wanted.key, say) or {}, cuda.parse(wanted.path.read_bytes())
    for region in regions:
        region.seconds = noted[region.key]["seconds"]
    return cuda.Cubins(wanted.path, regions, found.left, found.seconds)


class Making:
    """One library under way. Error: RegionsError, OSError, already when made."""

    def __init__(self, wanted: Wanted, meanwhile: str, say: Callable[[str], None] = log.warning, limit_s: float | None = None) -> None:
        """`meanwhile`: said behind what is done. `limit_s`: of the compiler."""
        self.wanted, self.seconds = wanted, 0.0
        self._begin, self._meanwhile, self._say, self._waits = time.monotonic(), meanwhile, say, False
        self._limit_s = limit_s or library.COMPILE_LIMIT_S
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._start()

    def poll(self) -> Library | None:
        """The library, or None while it is not there. Error: RegionsError, OSError: it never will be."""
        self.seconds = time.monotonic() - self._begin
        if self._child is None:
            self._start()
            found = None if self._child is not None else self.wanted.read(self._say)
        elif self._child.poll() is None:
            found = None
        else:
            self._end()
            assert self._child.stdout is not None
            said = self._child.stdout.read().decode(errors="replace")
            if not said.endswith("\n"):  # a compiled region that crashes when it is compared, no memory
                raise RegionsError(f"the process that compiles them has ended ({self._child.returncode})")
            if said != "\n":
                raise RegionsError(said.strip())
            found = self.wanted.read(self._say)
            if found is None:
                raise RegionsError("the library is not there, though it was made")
        if found is None and self.seconds > 2 * self._limit_s + MORE_S:  # another process's turn, and this one's
            raise RegionsError(f"they are not there after {self.seconds:.0f} s")
        return found

    def close(self) -> None:
        self._end()

    def _start(self) -> None:
        """The child, if nobody of this host has the lock."""
        if (fd := take_lock(self.wanted.lock)) is None:
            if not self._waits:
                self._say(f"another process of this host compiles {self.wanted.what}{self._meanwhile}")
            self._waits = True
            return
        try:
            if self.wanted.read(self._say) is not None:  # made meanwhile: the next poll has it
                return
            self.wanted.check()
            scratch = tempfile.mkdtemp(prefix="interlace-regions-")
            job = Path(scratch) / "job"
            try:
                from torch._inductor import config

                with job.open("wb") as file:
                    pickle.dump((self.wanted, self._limit_s, config.cpp.cxx, os.getpid()), file)
                environment = {"TMPDIR": scratch, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
                command = [sys.executable, "-c", "from interlace.regions.beside import main; main()", str(job)]
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    start_new_session=True, pass_fds=(fd,),
                    env={**os.environ, **environment, "OMP_NUM_THREADS": str(self.wanted.threads)},
                )  # fmt: skip
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            # Also when this is forgotten, and when the process ends without closing it.
            self._end = weakref.finalize(self, _end, self._child, self.wanted, scratch, os.getpid())
            count = len(self.wanted.funcs)
            self._say(f"compiling {f'{count} regions' if count else self.wanted.what}{self._meanwhile}")
        finally:
            os.close(fd)  # the child has the lock


def _end(child: subprocess.Popen[bytes], wanted: Wanted, scratch: str, owner: int) -> None:
    """The child with its compiler, and what they have not finished."""
    if os.getpid() != owner:  # a copy of the rank: a worker of a DataLoader
        return
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    _sweep(wanted, scratch, child.pid)


def _sweep(wanted: Wanted, scratch: str, pid: int) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    for part in wanted.place.glob(f"{wanted.key[:40]}.*.{pid}.*.new"):
        part.unlink(missing_ok=True)


def _watch(wanted: Wanted, scratch: str, parent: int) -> None:
    """Ends the child's session when the rank is gone."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    _sweep(wanted, scratch, os.getpid())
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    job = sys.argv[1]
    answer, said = os.dup(1), "it was interrupted"
    os.dup2(2, 1)  # whatever torch prints
    try:
        with open(job, "rb") as file:  # the rank's own
            wanted, limit_s, compiler, parent = pickle.load(file)
        threading.Thread(target=_watch, args=(wanted, os.path.dirname(job), parent), daemon=True).start()
        os.nice(NICE)
        torch.set_num_threads(wanted.threads)
        from torch._inductor import config

        with config.patch({"cpp.cxx": compiler}):
            kept.put(wanted.path, wanted.key, *wanted.make(limit_s))
        said = ""
    except Exception as e:
        said = reason_of(e) if isinstance(e, (RegionsError, OSError)) else f"{type(e).__name__}: {e}"
    finally:
        os.write(answer, (" ".join(said.split())[:1000] + "\n").encode())
        os.killpg(0, signal.SIGKILL)  # the compiler, if it took too long, and this process

