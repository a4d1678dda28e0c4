"""A software accelerator: with this folder on PYTHONPATH torch has a device "soft", in every process.

It has streams, events, memory and collectives with the semantics of a GPU's, computes with the CPU's kernels, and reports every
wait that a program has left out (tests/accelerator/engine.h). After pace() it computes nothing, and takes the times of a cost model.
The environment says how it runs:

    SOFT_MODE      free, lockstep, starve or nothing, and behind colons seed and chance: starve:7:0.3
    SOFT_CHECK     0: no order checker
    SOFT_HOOK      0: its allocator is called so that nothing can stand in front of it
    SOFT_REPORT    a folder, in which every process leaves its reports when it ends
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

_C: Any = None
default_generators: tuple[Any, ...] = ()
_copies: Any = None


def autoload() -> None:
    """torch calls this at the end of its import."""
    global _C, default_generators, _copies
    if _C is not None:
        return
    torch.utils.rename_privateuse1_backend("soft")
    import torch.distributed.distributed_c10d as c10d  # its types must be known to pybind

    _C = importlib.import_module("soft_device._C")
    _C.init()
    default_generators = (_C.default_generator(),)
    _copies = torch.library.Library("aten", "IMPL")  # a copy makes a conjugate what it says, which torch would do before by such a copy
    for key in ("Conjugate", "Negative"):
        _copies.impl("_copy_from", torch.library.fallthrough_kernel, key)
    torch._register_device_module("soft", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    c10d.Backend.register_backend("soft", _group, devices=["soft"])
    use(os.environ.get("SOFT_MODE", "free"))
    _C.set_checker(os.environ.get("SOFT_CHECK", "1") != "0")
    atexit.register(_end)


def use(mode: str) -> None:
    """ "starve:7:0.3": the mode, its seed, and the chance that an op is carried out when another is issued."""
    name, seed, run = [*mode.split(":"), "", ""][:3]
    _C.set_mode(name, int(seed or 0), float(run or 0.3))


def pace(file: str, rank: int, ranks: int, virtual: bool = False) -> None:
    """The mode "paced" until use(): the ranks' devices share one model, in a file that all of them name (best under /dev/shm, new for
    each run), and its clock is the machine's, or with `virtual` one that stands while any rank's host runs (tests/accelerator/pace.h)."""
    _C.pace(file, rank, ranks, virtual)


def pace_program(pacing: dict[str, Any], times: float, current_op: int) -> None:
    """The costs of the program that runs from now on, as interlace._core.testing.pacing gives them, each so many times as long;
    `current_op` is what interlace._runtime.testing.current_op gives. All ranks, between steps."""
    _C.pace_program(pacing["costs"], pacing["factors"], pacing["shares"], pacing["per_node"], times, current_op)


_told = 0


def take_reports() -> list[str]:
    """Of the order checker since the last call, each text once."""
    global _told
    lines = list(dict.fromkeys(_C.reports()))
    if _C.host_touches() > _told:
        _told = _C.host_touches()
        lines.append("the host touched pinned memory under a copy for which it had not waited")
    return lines


def _end() -> None:
    lines = take_reports()
    folder = os.environ.get("SOFT_REPORT")
    if folder and lines:
        with open(os.path.join(folder, f"{os.getpid()}.txt"), "a") as file:
            file.write("\n".join([f"# {' '.join(sys.argv)[:200]}", *lines]) + "\n")
    _C.stop()


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _C.Group(store, rank, size, timeout.total_seconds())


# ---- what torch and FSDP2 ask of a device's module ----


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


uuid = ""  # where a test gives one, only one rank can use the device


def get_device_properties(device: Any = 0) -> SimpleNamespace:
    return SimpleNamespace(name="soft", uuid=uuid)


def set_device(device: Any) -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def init() -> None:
    pass


def manual_seed(seed: int) -> None:
    default_generators[0].manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = 0) -> torch.Tensor:
    return default_generators[0].get_state()


def set_rng_state(state: torch.Tensor, device: Any = 0) -> None:
    default_generators[0].set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


def Event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event("soft", enable_timing=enable_timing)


def Stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
    return torch.Stream("soft", priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class stream:
    def __init__(self, inner: torch.Stream | None) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        self.outer = torch.accelerator.current_stream()
        if self.inner is not None:
            torch.accelerator.set_stream(self.inner)

    def __exit__(self, *_: Any) -> None:
        torch.accelerator.set_stream(self.outer)


class device:
    def __init__(self, index: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> bool:
        return False
