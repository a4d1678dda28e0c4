"""The fingerprint of what is measured: times taken under another one do not count here."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MEMORY, LOOPBACK = "memory", "loopback"  # what ranks of one host send goes through the former, unless they are told not to
KERNELS = 3  # of ours for processors: counts up where their times change (attention, products), so that they are measured again
# Of an accelerator's memory, what programs take beside what is planned: cuBLAS's workspace of a stream on an H100, and the allocator's
# rounding, which makes 5.56 GB 0.7 % more there and 3.60 GB 1.15 %. What is free of a device also serves what is no program's.
WORKSPACE, ROUNDING = 32 << 20, 0.0125
FREE_BESIDE, ROOM_STEP = 256 << 20, 256 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of processor, so many cores, and how ranks use them. `network` is a name that whoever measures gives it."""

    cpu: str
    cores: int
    torch: str
    threads: int  # of a rank
    ranks: int  # on a host
    network: str = MEMORY
    accelerator: str = ""  # the ranks' devices, where they compute on other ones than the processor

    @classmethod
    def here(cls, ranks: int, threads: int, network: str | None = None, device: Any = None) -> Machine:
        found = cls(processor_name(), cores(), torch_version(), threads, ranks, network or network_name())
        on_cpu = device is None or device.type == "cpu"
        return found if on_cpu else dataclasses.replace(found, accelerator=accelerator_name(device))

    @property
    def host(self) -> str:
        """The part of the fingerprint that no option changes: "AMD EPYC 7B13, 2 cores, torch 2.13.0, kernels 3"."""
        text = f"{self.cpu}, {self.cores} core{'' if self.cores == 1 else 's'}, torch {self.torch}"
        return f"{self.accelerator}, {text}" if self.accelerator else f"{text}, kernels {KERNELS}"

    @property
    def fingerprint(self) -> str:
        """ "AMD EPYC 7B13, 2 cores, torch 2.13.0, kernels 3, 1 thread, 2 ranks, memory"."""
        threads, ranks = (f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((self.threads, "thread"), (self.ranks, "rank")))
        text = f"{self.host}, {threads}, {ranks}"
        return text if self.ranks == 1 else f"{text}, {self.network}"


def torch_version() -> str:
    """ "2.13.0+cpu", or "none": predictions need no torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return "none"
    return torch.__version__


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "cpu model"):
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


def accelerator_name(device: Any) -> str:
    """ "NVIDIA H100 80GB HBM3", or what torch calls the kind of device where its module tells no name."""
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else str(device.type)


def device_bytes(device: Any) -> tuple[int, int]:
    """Bytes of a device's memory that nobody has, and of all of it."""
    import torch

    free, whole = torch.accelerator.get_memory_info(device)
    return int(free), int(whole)


def room_of(device: Any) -> int:
    """Bytes that a run may have of an accelerator: what is free and what this process's allocator has, less a little. In whole steps, so
    that runs on the same device have the same."""
    import torch

    return max(0, device_bytes(device)[0] + int(torch.accelerator.memory_reserved(device)) - FREE_BESIDE) // ROOM_STEP * ROOM_STEP


def allocator_bytes(device: Any, storages: Iterable[int]) -> int:
    """What CUDA's libraries and allocator take beside storages of these sizes: a workspace, and of each what is not split off its block.
    Blocks of 10 MiB and more are of whole 2 MiB, of which 1 MiB and less stays (torch's CUDACachingAllocator)."""
    if device.type != "cuda":  # unknown there
        return 0
    large = (size for size in storages if size >= 10 << 20)
    return WORKSPACE + sum(left for left in (-size % (2 << 20) for size in large) if left <= 1 << 20)


def beside_bytes(device: Any, limit: int) -> int:
    """Of so many bytes of a device, those that no program's plan has."""
    return min(WORKSPACE + int(limit * ROUNDING), limit // 2) if device.type == "cuda" else 0


def network_name() -> str:
    """The interface that gloo was told to use, or what ranks of one host have."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name != "lo":
        return name
    return LOOPBACK if os.environ.get("INTERLACE_SHARED_MEMORY") == "0" or os.environ.get("INTERLACE_ENCRYPT") == "1" else MEMORY


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Memory that programs may still take, as the kernel counts it."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return physical_bytes() // 2
