"""All regions of a program in one shared library, made once a machine and kept on disk.

    FOLDER/regions/<key>.so      the library
    FOLDER/regions/<key>.json    its digest, and of each region whether it has the bits of its body or why it is not used
    FOLDER/regions/<key>.lock    held by the process that makes them; the others of the host wait

The key is that of the bodies, of what makes code of them and of what runs it. Files are this user's alone (private.py), written whole, and
a library is loaded when its digest is what was noted when it was made. Nothing here fails a run: where there is no library the bodies run,
and why is said once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from interlace import private
from interlace.regions.body import Func
from interlace.regions.check import compare
from interlace.regions.lower import TESTED, LoweringError, settings, source_of
from interlace.version import __version__

log = logging.getLogger("interlace")
FORMAT = 1
MAX_BYTES = 256 << 20  # of a library
COMPILE_LIMIT_S = 300.0  # of the C++ compiler, and of waiting for another process
MODES = ("off", "on", "exact")


class RegionsError(Exception):
    """Why there is no library."""


@dataclasses.dataclass
class Library:
    """A library that was checked, and what of it a run uses."""

    path: Path
    artifact: str  # digest of what the regions are and were made by: the same on all ranks, or they differ
    keys: list[str]  # of regions, 16 digits each, that may be used
    left: dict[str, str]  # name of a func → why its body runs
    exact: list[str]  # keys of regions with the bits of their bodies
    seconds: float = 0.0  # that making it took; 0: it was there


def ready(
    funcs: list[Func], mode: str, folder: Path | None, say: Callable[[str], None] = log.warning, limit_s: float = COMPILE_LIMIT_S
) -> Library | None:
    """The library of these regions, from `folder` or made now. `mode`: "on", or "exact" for those with the bits of their bodies alone.
    None where it cannot be had, which is said."""
    if mode == "off" or not funcs:
        return None
    try:
        return _ready(funcs, mode, folder, say, limit_s)
    except (RegionsError, OSError) as e:
        reason = e.strerror or str(e) if isinstance(e, OSError) else str(e)
        _say_once(say, f"regions are not compiled, their bodies run op by op: {reason}")
        return None


def key_of(funcs: list[Func], threads: int) -> str:
    """Of everything that decides what the library holds."""
    parts = [sorted(func["key"] for func in funcs), sorted(settings(threads).items()), FORMAT, __version__, torch.__version__]
    parts += [torch.__config__.show(), threads, _cpu(), _compiler()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _ready(funcs: list[Func], mode: str, folder: Path | None, say: Callable[[str], None], limit_s: float) -> Library:
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TESTED:
        raise RegionsError(f"the code generation of torch {version} was not tested, only that of {', '.join(TESTED)}")
    threads = torch.get_num_threads()
    key = key_of(funcs, threads)
    path, found, seconds = kept(folder, key, ".so", lambda: _make(funcs, threads, say, limit_s), say, limit_s)
    names = {func["key"][:16]: func["name"] for func in funcs}
    left = {names[k]: entry["why"] for k, entry in found.items() if entry["why"]}
    exact = [k for k, entry in found.items() if entry["exact"]]
    if mode == "exact":
        left |= {names[k]: "other bits than its body" for k, entry in found.items() if not entry["why"] and not entry["exact"]}
    keys = sorted(k for k in found if names[k] not in left)
    if left:
        _say_once(say, "regions whose bodies run op by op: " + "; ".join(f"{name}: {why}" for name, why in sorted(left.items())))
    artifact = hashlib.sha256(json.dumps([key, keys]).encode()).hexdigest()
    return Library(path, artifact, keys, left, exact, seconds)


def kept(
    folder: Path | None, key: str, suffix: str, make: Callable[[], tuple[dict[str, Any], bytes]], say: Callable[[str], None], limit_s: float
) -> tuple[Path, dict[str, Any], float]:
    """A file of this key, what was noted of its regions, and the seconds that making it took (0: it was there). `make`: both, where there is
    none or a damaged one; one process of the host at a time. Error: RegionsError, OSError."""
    place = private.make_folder((folder or _scratch()) / "regions")
    path, seconds = place / f"{key[:40]}{suffix}", 0.0
    found = _read(path, key, say)
    if found is None:
        with _alone(path.with_suffix(".lock"), say, limit_s):
            found = _read(path, key, say)  # another process may have made it meanwhile
            if found is None:
                begin = time.monotonic()
                found, data = make()
                noted = {"format": FORMAT, "key": key, "digest": hashlib.sha256(data).hexdigest(), "regions": found}
                # The note comes last: without it, or with an older one, the file is not loaded.
                private.write(path, data)
                private.write(path.with_suffix(".json"), json.dumps(noted).encode())
                seconds = time.monotonic() - begin
    return path, found, seconds


def _read(path: Path, key: str, say: Callable[[str], None]) -> dict[str, Any] | None:
    """What was noted of the file, if it is there as it was made."""
    try:
        noted = json.loads(private.read(path.with_suffix(".json"), 1 << 20))
        if noted["format"] != FORMAT or noted["key"] != key:
            raise ValueError("it is of another key")
        if hashlib.sha256(private.read(path, MAX_BYTES)).hexdigest() != noted["digest"]:
            raise ValueError("its digest is not the noted one")
        return dict(noted["regions"])
    except FileNotFoundError:
        return None
    except private.PrivateError as e:
        raise RegionsError(f"{e.filename} is not loaded: {e.strerror}") from None
    except Exception as e:  # any byte may be wrong
        _say_once(say, f"{path} is damaged ({str(e) or type(e).__name__}); it is made again")
        return None


def _make(funcs: list[Func], threads: int, say: Callable[[str], None], limit_s: float) -> tuple[dict[str, Any], bytes]:
    if _compiler() == "":
        raise RegionsError("there is no C++ compiler (g++)")
    say(f"compiling {len(funcs)} regions; this is kept for later runs")
    found: dict[str, Any] = {}
    texts = []
    for func in funcs:
        short = func["key"][:16]
        try:
            texts.append(source_of(func, threads))
            found[short] = {"exact": False, "why": ""}
        except LoweringError as e:
            found[short] = {"exact": False, "why": str(e)[:300]}
    with tempfile.TemporaryDirectory(prefix="interlace-regions-") as scratch:
        source, made = Path(scratch) / "regions.cpp", Path(scratch) / "regions.so"
        source.write_text("#include <torch/csrc/inductor/cpp_prefix.h>\n" + "\n".join(texts))
        _compile(source, made, threads, limit_s)
        library = ctypes.CDLL(str(made))
        for func in funcs:
            entry = found[func["key"][:16]]
            if not entry["why"]:
                entry["exact"], entry["why"] = compare(library, func)
        return found, made.read_bytes()


def _compile(source: Path, made: Path, threads: int, limit_s: float) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch(settings(threads)):
        options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False)
        command = CppBuilder("regions", [str(source)], BuildOption=options, output_dir=str(made.parent)).get_command_line()
    code, errors = run_within([*shlex.split(command), "-w"], "the C++ compiler", limit_s, cwd=made.parent)
    if code != 0 or not made.is_file():
        line = next((text for text in errors.splitlines() if "error" in text), errors.strip()[-200:])
        raise RegionsError(f"the C++ compiler failed ({code}): {line[:300]}")


def run_within(command: list[str], what: str, limit_s: float, given: bytes = b"", **options: Any) -> tuple[int, str]:
    """A command's exit status and what it said of errors. Error: it takes longer than the limit, and is ended with all that it started."""
    run = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, **options
    )
    try:
        _, errors = run.communicate(given, timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        raise RegionsError(f"{what} took longer than {limit_s:g} s") from None
    return run.returncode, errors.decode(errors="replace")


@contextlib.contextmanager
def _alone(path: Path, say: Callable[[str], None], limit_s: float) -> Iterator[None]:
    """One process of the host at a time. Error: the one before takes too long."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        begin, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say("another process of this host compiles the regions; waiting for it")
                    told = True
                if time.monotonic() - begin > limit_s:
                    raise RegionsError(f"another process holds {path} for longer than {limit_s:g} s") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(fd)


@functools.cache
def _scratch() -> Path:
    """Where there is no cache: a folder of this process alone."""
    folder = tempfile.TemporaryDirectory(prefix="interlace-regions-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "; ".join(" ".join(line.split()) for line in lines if line.startswith(("model name", "flags", "cpu family", "stepping")))


@functools.cache
def _compiler() -> str:
    """The compiler's version; empty: there is none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        compiler = get_cpp_compiler()
        found = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
        return f"{compiler} {found.stdout.splitlines()[0]}"
    except Exception:  # torch's own errors for a missing compiler, and the compiler's
        return ""


_said: set[str] = set()


def _say_once(say: Callable[[str], None], text: str) -> None:
    if text not in _said:
        _said.add(text)
        say(text)
