"""All regions of a program in one shared library, made once a machine and kept on disk.

The key is that of the bodies, of what makes code of them and of what runs it; noted is of each region whether it has the bits of its body or
why it is not used (kept.py has the files, beside.py the process that makes them). Nothing here fails a run: where there is no library the
bodies run, and why is said once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from interlace.regions import kept
from interlace.regions.body import Func
from interlace.regions.check import compare
from interlace.regions.kept import FORMAT, RegionsError, log, say_once
from interlace.regions.lower import TESTED, LoweringError, settings, source_of
from interlace.version import __version__

COMPILE_LIMIT_S = 300.0  # of the C++ compiler, and of waiting for another process
MODES = ("off", "on", "exact")


@dataclasses.dataclass
class Library:
    """A library that was checked, and what of it a run uses."""

    path: Path
    artifact: str  # digest of what the regions are and were made by: the same on all ranks, or they differ
    keys: list[str]  # of regions, 16 digits each, that may be used
    left: dict[str, str]  # name of a func → why its body runs
    exact: list[str]  # keys of regions with the bits of their bodies
    seconds: float = 0.0  # that making it took; 0: it was there
    cubins: Any = None  # of a device, loaded


def reason_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def say_bodies_run(reason: str, say: Callable[[str], None] = log.warning) -> None:
    """Once for a reason."""
    say_once(say, f"regions are not compiled, their bodies run op by op: {reason}")


def key_of(funcs: list[Func], threads: int) -> str:
    """Of everything that decides what the library holds."""
    parts = [sorted(func["key"] for func in funcs), sorted(settings(threads).items()), FORMAT, __version__, torch.__version__]
    parts += [torch.__config__.show(), threads, _cpu(), _compiler()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclasses.dataclass
class Wanted:
    """What a program's regions ask for, and where the library of them lies or will lie. Of a device: cuda.WantedCubins."""

    funcs: list[Func]
    mode: str
    place: Path
    threads: int
    key: str
    suffix = ".so"

    @classmethod
    def of(cls, funcs: list[Func], mode: str, folder: Path | None) -> Wanted:
        """Error: RegionsError, OSError: there cannot be one."""
        version = ".".join(torch.__version__.split(".")[:2])
        if version not in TESTED:
            raise RegionsError(f"the code generation of torch {version} was not tested, only that of {', '.join(TESTED)}")
        threads = torch.get_num_threads()
        return cls(funcs, mode, kept.place(folder), threads, key_of(funcs, threads))

    @property
    def path(self) -> Path:
        return self.place / f"{self.key[:40]}{self.suffix}"

    @property
    def lock(self) -> Path:
        return self.place / f"{self.key[:40]}.lock"

    def read(self, say: Callable[[str], None] = log.warning, seconds: float = 0.0) -> Library | None:
        """The library, if it is there as it was made. Error: RegionsError where others could have written it."""
        found = kept.read(self.path, self.key, say)
        if found is None:
            return None
        names = {func["key"][:16]: func["name"] for func in self.funcs}
        loaded, refused = self.load()
        left = {names[k]: entry["why"] for k, entry in found.items() if entry["why"]} | {names[k]: why for k, why in refused.items()}
        exact = [k for k, entry in found.items() if entry["exact"]]
        if self.mode == "exact":
            left |= {names[k]: "other bits than its body" for k, entry in found.items() if not entry["why"] and not entry["exact"]}
        keys = sorted(k for k in found if names[k] not in left)
        if left:
            say_once(say, "regions whose bodies run op by op: " + "; ".join(f"{name}: {why}" for name, why in sorted(left.items())))
        artifact = hashlib.sha256(json.dumps([self.key, keys]).encode()).hexdigest()
        return Library(self.path, artifact, keys, left, exact, seconds, loaded)

    def load(self) -> tuple[Any, dict[str, str]]:
        """What is there, as the executor takes it where a path is not enough; and by key why regions of it cannot run on this machine.
        Error: RegionsError: none can."""
        return None, {}

    def check(self) -> None:
        """Error: RegionsError: nothing here could make it."""
        if _compiler() == "":
            raise RegionsError("there is no C++ compiler (g++)")

    def make(self, limit_s: float) -> tuple[dict[str, Any], bytes]:
        """Its note and bytes. Error: RegionsError, OSError; a compiler that took too long may have left processes."""
        from torch._inductor.cpp_builder import get_cpp_compiler

        # torch asks the compiler so before anything else, without a limit.
        kept.run_within([get_cpp_compiler(), "-v"], "the C++ compiler", limit_s)
        found: dict[str, Any] = {}
        texts = []
        for func in self.funcs:
            short = func["key"][:16]
            try:
                texts.append(source_of(func, self.threads))
                found[short] = {"exact": False, "why": ""}
            except LoweringError as e:
                found[short] = {"exact": False, "why": str(e)[:300]}
        with tempfile.TemporaryDirectory(prefix="interlace-regions-") as scratch:
            source, made = Path(scratch) / "regions.cpp", Path(scratch) / "regions.so"
            source.write_text("#include <torch/csrc/inductor/cpp_prefix.h>\n" + "\n".join(texts))
            _compile(source, made, self.threads, limit_s)
            library = ctypes.CDLL(str(made))
            for func in self.funcs:
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
    # In the session of the process that compiles, which ends it whole.
    code, errors = kept.run_within([*shlex.split(command), "-w"], "the C++ compiler", limit_s, cwd=made.parent)
    if code != 0 or not made.is_file():
        line = next((text for text in errors.splitlines() if "error" in text), errors.strip()[-200:])
        raise RegionsError(f"the C++ compiler failed ({code}): {line[:300]}")


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
