"""Regions for CUDA: Inductor's Triton text of each as cubins, made with or without a device, all of a program in one file of the cache.

    FOLDER/regions/<key>.cubins    a manifest, then the cubins one after another; beside it its note and lock (kept.py)

    interlace cubins 1 sm_90 10240                                  the manifest's own bytes
    region 85ead28bdaddcf17 operands 3 results 5 workspace 0
    kernel triton_red_fused_0 grid 2048 1 1 warps 16 shared 64 registers 32 spills 0 cubin 0 10344 takes p1+0 p0+0 ... i32:4096 null
    end

Kernels of a region run in their order. `takes` is what the kernel's parameters are: `p3+256` an address 256 bytes after the fourth pointer of
operands, results, workspace; `i32:4096` a number; `null` scratch memory that it does not use. A cubin is read at its offset after the
manifest. Kernels rely on every pointer being a multiple of 16 (ALIGNED).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from interlace.regions.body import Func
from interlace.regions.kept import FORMAT, MAX_BYTES, RegionsError, kept, log, place, run_within
from interlace.regions.library import COMPILE_LIMIT_S
from interlace.regions.lower import TESTED
from interlace.version import __version__

TARGETS = {"sm_80": 80, "sm_90": 90}
TRITON = {"2.13": "3.7.1"}  # torch → the version of Triton that its code generation is made for
ALIGNED = 16  # bytes
PROCESS_BYTES = 2 << 30  # of the machine's memory, for each process that compiles


@dataclasses.dataclass
class Kernel:
    """One launch of a region."""

    name: str
    grid: list[int]  # blocks along x, y, z
    warps: int  # of 32 threads, of one block
    shared: int  # bytes of dynamic shared memory
    registers: int  # of one thread
    spills: int  # bytes that one thread stores for want of registers
    takes: list[str]  # parameters, as in the manifest
    cubin: bytes


@dataclasses.dataclass
class Region:
    """What is launched for one region; why not, if it has no kernels."""

    key: str  # 16 digits
    operands: int
    results: int
    workspace: int = 0  # bytes
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    why: str = ""
    seconds: float = 0.0  # that its kernels took


@dataclasses.dataclass
class Cubins:
    """The file, and what is in it."""

    path: Path
    regions: list[Region]  # that have kernels
    left: dict[str, str]  # name of a func → why its body runs
    seconds: float = 0.0  # that making it took; 0: it was there


def cubins(
    funcs: list[Func], target: str, folder: Path | None, say: Callable[[str], None] = log.warning, limit_s: float = COMPILE_LIMIT_S
) -> Cubins:
    """The cubins of these regions for a target of TARGETS, from `folder` or made now. Error: RegionsError, OSError."""
    if target not in TARGETS:
        raise RegionsError(f"there is no target {target!r}: choose one of {', '.join(TARGETS)}")
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TRITON:
        raise RegionsError(f"the code generation of torch {version} was not tested, only that of {', '.join(TESTED)}")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    wanted = TRITON[version]
    if triton != wanted:
        found = f"this is triton {triton}" if triton else "there is no triton here"
        raise RegionsError(f"torch {version} makes CUDA kernels with triton {wanted}, and {found}: pip install triton=={wanted}")
    parts = [sorted(func["key"] for func in funcs), target, FORMAT, __version__, torch.__version__, triton]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    path = place(folder) / f"{key[:40]}.cubins"
    noted, seconds = kept(path, key, lambda: _make(funcs, target, say, limit_s), say, limit_s)
    regions = parse(path.read_bytes())
    for region in regions:
        region.seconds = noted[region.key]["seconds"]
    left = {func["name"]: noted[func["key"][:16]]["why"] for func in funcs if noted[func["key"][:16]]["why"]}
    return Cubins(path, regions, left, seconds)


def written(regions: list[Region], target: str) -> bytes:
    """The file of these regions."""
    text, data = "", b""
    for region in regions:
        text += f"region {region.key} operands {region.operands} results {region.results} workspace {region.workspace}\n"
        for k in region.kernels:
            text += f"kernel {k.name} grid {k.grid[0]} {k.grid[1]} {k.grid[2]} warps {k.warps} shared {k.shared} registers {k.registers} "
            text += f"spills {k.spills} cubin {len(data)} {len(k.cubin)} takes {' '.join(k.takes)}\n"
            data += k.cubin + b"\0" * (-len(k.cubin) % ALIGNED)
    head = f"interlace cubins {FORMAT} {target} "
    return f"{head}{len(head) + 13 + len(text):08d}\n{text}end\n".encode() + data


def parse(file: bytes) -> list[Region]:
    """What `written` wrote. Error: ValueError, IndexError."""
    begin = int(file.partition(b"\n")[0].split()[4])
    regions: list[Region] = []
    for line in file[:begin].decode().splitlines()[1:-1]:
        what, name, *words = line.split()
        if what == "region":
            operands, results, workspace = map(int, words[1::2])
            regions.append(Region(name, operands, results, workspace))
        else:
            warps, shared, registers, spills, offset = map(int, words[5:14:2])
            cubin = file[begin + offset : begin + offset + int(words[14])]
            grid = [int(word) for word in words[1:4]]
            regions[-1].kernels.append(Kernel(name, grid, warps, shared, registers, spills, words[16:], cubin))
    return regions


def _make(funcs: list[Func], target: str, say: Callable[[str], None], limit_s: float) -> tuple[dict[str, Any], bytes]:
    """In processes of their own: code generation is told of a device that is not there."""
    say(f"compiling {len(funcs)} regions for {target}; this is kept for later runs")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = max(1, min(len(os.sched_getaffinity(0)), len(funcs), memory // PROCESS_BYTES))
    with tempfile.TemporaryDirectory(prefix="interlace-cubins-") as scratch:
        made = Path(scratch) / "made"
        # Triton's and Inductor's own caches are not looked at: what they hold, others may have written.
        places = {"TRITON_CACHE_DIR": f"{scratch}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"}
        environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "interlace.regions.cubins", target, str(workers), str(made)]
        code, errors = run_within(command, "code generation", limit_s, pickle.dumps(funcs), session=True, env=environment, cwd=scratch)
        if code != 0 or not made.is_file():
            raise RegionsError(f"code generation failed ({code}): {(errors.strip().splitlines() or ['it said nothing'])[-1][:300]}")
        regions: list[Region] = pickle.loads(made.read_bytes())
    data = written([region for region in regions if not region.why], target)
    if len(data) > MAX_BYTES:
        raise RegionsError(f"{len(data)} bytes of kernels, {MAX_BYTES} at most")
    return {region.key: {"exact": False, "why": region.why, "seconds": region.seconds} for region in regions}, data
