"""Regions for CUDA: Inductor's Triton text of each as cubins, made with or without a device, all of a program in one file of the cache.

    FOLDER/regions/<key>.cubins    a manifest, then the cubins one after another; beside it its note and lock (kept.py)

    interlace cubins 1 sm_90 10240                                  the manifest's own bytes
    region 85ead28bdaddcf17 operands 3 results 5 workspace 0
    kernel triton_red_fused_0 grid 2048 1 1 warps 16 shared 64 registers 32 spills 0 cubin 0 10344 takes p1+0 p0+0 ... i32:4096 null
    end

Kernels of a region run in their order. `takes` is what the kernel's parameters are: `p3+256` an address 256 bytes after the fourth pointer of
operands, results, workspace; `i32:4096` a number; `null` scratch memory that it does not use. A cubin is read at its offset after the
manifest. Kernels rely on every pointer being a multiple of 16 (ALIGNED). The executor launches them: src/runtime/region_driver.h.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from interlace.regions.body import Func
from interlace.regions.kept import FORMAT, MAX_BYTES, RegionsError, place, run_within
from interlace.regions.library import Wanted
from interlace.regions.lower import TESTED
from interlace.version import __version__

TARGETS = {"sm_80": 80, "sm_90": 90}
# torch → the version of Triton that its code generation is made for
TRITON = {"2.11": "3.6.0", "2.12": "3.7.0", "2.13": "3.7.1", "2.14": "3.8.0"}
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

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def parameters(self) -> list[tuple[int, int]]:
        """Of each: a pointer and bytes from there; or -1 and a number, 0 for null. Error: ValueError."""
        found = [re.fullmatch(r"(?:p(\d+)\+(?=\d)|i\d+:(?=\d)|null(?!\d))(\d*)", take) for take in self.takes]
        if None in found:
            raise ValueError(f"a parameter of another form: {self.takes[found.index(None)]}")
        return [(int(match[1] or -1), int(match[2] or 0)) for match in found if match is not None]


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


def target_of(device: torch.device) -> str:
    """Of TARGETS. Error: RegionsError: no kernels are made for this device."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise RegionsError(f"kernels are made for CPUs and CUDA devices, this is {device.type if torch.version.hip is None else 'ROCm'}")
    major, minor = torch.cuda.get_device_capability(device)
    target = "sm_80" if major == 8 else f"sm_{10 * major + minor}"  # binaries for 8.0 run on all 8.x
    if target not in TARGETS:
        raise RegionsError(f"this device is {target}, and kernels are made for {', '.join(TARGETS)}")
    return target


def has_kernels(device: torch.device) -> str:
    """Why there can be no kernels for this device here; empty: there can."""
    try:
        _triton(target_of(device))
    except RegionsError as e:
        return str(e)
    return ""


@dataclasses.dataclass
class WantedCubins(Wanted):
    """The cubins that a program's regions ask for."""

    target: str = ""
    device: str = ""  # that they are to run on; empty: none
    suffix = ".cubins"

    @classmethod
    def on(cls, funcs: list[Func], mode: str, folder: Path | None, target: str, device: str = "") -> WantedCubins:
        """Error: RegionsError, OSError: there cannot be any."""
        if mode == "exact":
            raise RegionsError("regions='exact' is for kernels that were compared with their bodies, those for CUDA are not: use 'on'")
        parts = [sorted(func["key"] for func in funcs), target, FORMAT, __version__, torch.__version__, _triton(target)]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return cls(funcs, mode, place(folder), torch.get_num_threads(), key, target, device)

    def load(self) -> tuple[Any, dict[str, str]]:
        from interlace import _runtime

        if not self.device:
            return None, {}
        try:
            loaded = _loaded(self.path, self.target, self.device)
        except _runtime.Error as e:
            raise RegionsError(str(e)) from None
        return loaded, loaded.refused()

    def check(self) -> None:
        pass  # `on` has

    def make(self, limit_s: float) -> tuple[dict[str, Any], bytes]:
        return _make(self.funcs, self.target, limit_s)


@functools.cache
def _loaded(path: Path, target: str, device: str) -> Any:
    """Once in a process: modules stay loaded."""
    from interlace import _runtime

    return _runtime.Cubins(target, device, parse(path.read_bytes()))


def _triton(target: str) -> str:
    """The version of Triton that is here. Error: RegionsError: another target, torch or Triton than kernels are made for and with."""
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
    return triton


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


def _make(funcs: list[Func], target: str, limit_s: float) -> tuple[dict[str, Any], bytes]:
    """Note and file, made in processes of their own: code generation is told of a device that is not there. Who calls this ends its session,
    and with it those that are left."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = max(1, min(len(os.sched_getaffinity(0)), len(funcs), memory // PROCESS_BYTES))
    with tempfile.TemporaryDirectory(prefix="interlace-cubins-") as scratch:
        made = Path(scratch) / "made"
        # Triton's and Inductor's own caches are not looked at: what they hold, others may have written.
        places = {"TRITON_CACHE_DIR": f"{scratch}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"}
        # Nor are the devices of this machine, which a run trains on meanwhile.
        places |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "interlace.regions.cubins", target, str(workers), str(made)]
        code, errors = run_within(command, "code generation", limit_s, pickle.dumps(funcs), env=environment, cwd=scratch)
        if code != 0 or not made.is_file():
            raise RegionsError(f"code generation failed ({code}): {(errors.strip().splitlines() or ['it said nothing'])[-1][:300]}")
        regions: list[Region] = pickle.loads(made.read_bytes())
    data = written([region for region in regions if not region.why], target)
    if len(data) > MAX_BYTES:
        raise RegionsError(f"{len(data)} bytes of kernels, {MAX_BYTES} at most")
    return {region.key: {"exact": False, "why": region.why, "seconds": region.seconds} for region in regions}, data
