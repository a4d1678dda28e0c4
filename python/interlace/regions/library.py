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
import multiprocessing
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

PARTS = 2  # of a library, made at once
FEW = 40  # ops of regions that are one part: their headers are read once
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
    what = "the regions"
    at_once = 1  # parts that are made at the same time: beside a training they have one core

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
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool

        from torch._inductor.cpp_builder import get_cpp_compiler

        # torch asks the compiler so before anything else, without a limit.
        kept.run_within([get_cpp_compiler(), "-v"], "the C++ compiler", limit_s)
        import torch._inductor.compile_fx  # noqa: F401  here, and not in every part

        _choose_instructions()
        with tempfile.TemporaryDirectory(prefix="interlace-regions-") as scratch:
            parts = _shared_out(self.funcs)
            work = functools.partial(_make_part, threads=self.threads, limit_s=limit_s)
            try:
                with ProcessPoolExecutor(min(self.at_once, len(parts)), multiprocessing.get_context("fork")) as pool:
                    made = list(pool.map(work, parts, [Path(scratch) / f"part{i}" for i in range(len(parts))]))
            except BrokenProcessPool:
                raise RegionsError("a process that makes or compares them has ended: a region crashes, or there is no memory left") from None
            library = made[0][2] if len(made) == 1 else _compile([object for _, object, _ in made], Path(scratch), self.threads, limit_s)
            return {key: entry for noted, _, _ in made for key, entry in noted.items()}, library.read_bytes()


def _choose_instructions() -> None:
    """For the rest of this process code generation takes the widest vectors that the processor has, without compiling and running a program
    for each of its sets of instructions: regions need none of those for products, and -march=native says the rest."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.supported_vec_isa_list = [isa for isa in cpu_vec_isa.supported_vec_isa_list if len(str(isa).split()) == 1]
    cpu_vec_isa.VecISA.check_build = lambda self, code: True  # type: ignore[method-assign]


def _shared_out(funcs: list[Func]) -> list[list[Func]]:
    """The parts, of about as many ops each: the same on every machine."""
    few = sum(len(func["ops"]) for func in funcs) <= FEW
    parts: list[list[Func]] = [[] for _ in range(1 if few else min(PARTS, len(funcs)))]
    for func in sorted(funcs, key=lambda func: (-len(func["ops"]), func["key"])):
        min(parts, key=lambda part: sum(len(f["ops"]) for f in part)).append(func)
    return parts


def _make_part(funcs: list[Func], folder: Path, threads: int, limit_s: float) -> tuple[dict[str, Any], Path, Path]:
    """What is noted of these regions, their object file and the library of it."""
    folder.mkdir()
    texts, noted = ["#include <torch/csrc/inductor/cpp_prefix.h>"], {}
    for func in funcs:
        entry = noted[func["key"][:16]] = {"exact": False, "why": ""}
        try:
            texts.append(source_of(func, threads))
        except LoweringError as e:
            entry["why"] = str(e)[:300]
    (source := folder / "regions.cpp").write_text("\n".join(texts))
    object = _compile([source], folder, threads, limit_s)
    alone = _compile([object], folder, threads, limit_s)
    library = ctypes.CDLL(str(alone))
    for func in funcs:
        if not (entry := noted[func["key"][:16]])["why"]:
            entry["exact"], entry["why"] = compare(library, func)
    return noted, object, alone


def _compile(sources: list[Path], folder: Path, threads: int, limit_s: float) -> Path:
    """The object file of a text, or the library of object files."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    only = sources[0].suffix == ".cpp"
    with config.patch(settings(threads)):
        options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False, compile_only=only)
        builder = CppBuilder("regions", list(map(str, sources)), BuildOption=options, output_dir=str(folder))
    # In the session of the process that compiles, which ends it whole.
    made = Path(builder.get_target_file_path())
    code, errors = kept.run_within([*shlex.split(builder.get_command_line()), "-w"], "the C++ compiler", limit_s, cwd=folder)
    if code != 0 or not made.is_file():
        raise failed(code, errors)
    return made


def failed(code: int, errors: str) -> RegionsError:
    line = next((text for text in errors.splitlines() if "error" in text), errors.strip()[-200:])
    return RegionsError(f"the C++ compiler failed ({code}): {line[:300]}")


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
