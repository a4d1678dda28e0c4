"""What stands in for CUDA's driver (tests/accelerator/cuda_driver.cc): from driver() on it is this process's libcuda.so.1.

    with soft_cuda.driven(folder) as driver:   # a run on the software accelerator trains as on an sm_90: real cubins are made and loaded,
        train()                                # launches are compared with their manifest, and compute by Inductor's library for CPUs
    assert driver.faults() == ""
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from interlace.regions import cuda, ready
from interlace.regions.body import DTYPES

LIBRARY = Path(__file__).resolve().parents[1] / "accelerator" / "python" / "soft_device" / "cuda_driver.so"
WIDTHS = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}  # bytes of a parameter


def taken(take: str) -> tuple[int, int, int]:
    """A parameter of the manifest: its pointer or -1, what is added to it or the number, bytes."""
    if take == "null":
        return -1, 0, 8
    if take.startswith("p"):
        pointer, offset = take[1:].split("+")
        return int(pointer), int(offset), 8
    kind, number = take.split(":")
    return -1, int(number), WIDTHS[kind]


def bytes_of(value: dict[str, Any]) -> int:
    if 0 in value["shape"]:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(value["shape"], value["strides"], strict=True))
    return span * DTYPES[value["dtype"]].itemsize


class Driver:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.soft_launches.restype = self.library.soft_faults.restype = ctypes.c_char_p
        self._known: list[Any] = []

    def attach(self) -> None:
        """From now on launches compute, on the software accelerator."""
        import soft_device

        device = ctypes.CDLL(soft_device._C.__file__)
        self.library.soft_attach(ctypes.cast(device.soft_enqueue, ctypes.c_void_p), ctypes.cast(device.soft_real, ctypes.c_void_p))

    def know(self, regions: Iterable[cuda.Region], funcs: list[dict[str, Any]], functions: ctypes.CDLL | None = None) -> None:
        """What a manifest says of kernels; `functions`: a library that computes their regions on CPUs."""
        by_key = {func["key"][:16]: func for func in funcs}
        for region in regions:
            if (region, functions is None) in self._known:
                continue
            self._known.append((region, functions is None))
            func = by_key[region.key]
            sizes = [*map(bytes_of, [*func["operands"], *func["gives"]]), region.workspace]
            run = ctypes.cast(getattr(functions, f"r_{region.key}"), ctypes.c_void_p) if functions else None
            own = ctypes.c_int64.in_dll(functions, f"w_{region.key}").value if functions else 0
            self.library.soft_region(
                region.key.encode(), run, ctypes.c_int64(own), ctypes.c_int64(region.operands), ctypes.c_size_t(len(sizes)),
                (ctypes.c_int64 * len(sizes))(*sizes),
            )  # fmt: skip
            for index, kernel in enumerate(region.kernels):
                launch = [*kernel.grid, 32 * kernel.warps, kernel.shared]
                takes = [number for take in kernel.takes for number in taken(take)]
                self.library.soft_kernel(
                    region.key.encode(), ctypes.c_size_t(index), ctypes.c_size_t(len(region.kernels)), kernel.name.encode(),
                    kernel.cubin, ctypes.c_size_t(len(kernel.cubin)), (ctypes.c_uint * 5)(*launch), (ctypes.c_int64 * len(takes))(*takes),
                    ctypes.c_size_t(len(kernel.takes)),
                )  # fmt: skip

    def fail(self, call: str, code: int, key: str = "") -> None:
        """`call` gives this number from now on, for the kernels of one region or all; 0: it works again."""
        self.library.soft_fail(call.encode(), key.encode(), code)

    def capability(self, number: int) -> None:
        self.library.soft_capability(number)

    def launches(self) -> list[str]:
        """Since the last call: key, kernel, blocks, threads, shared bytes, stream, parameters."""
        return str(self.library.soft_launches().decode()).splitlines()

    def faults(self) -> str:
        return str(self.library.soft_faults().decode())


@functools.cache
def driver() -> Driver:
    return Driver()


@contextlib.contextmanager
def driven(folder: str | Path) -> Iterator[Driver]:
    """`folder`: of the libraries for CPUs."""
    found, plain = driver(), (cuda.target_of, cuda.WantedCubins.load)
    found.attach()

    def load(wanted: cuda.WantedCubins) -> tuple[Any, dict[str, str]]:
        functions = ready(wanted.funcs, "on", Path(folder), print)
        assert functions is not None and functions.left == {}
        found.know(cuda.parse(wanted.path.read_bytes()), wanted.funcs, ctypes.CDLL(str(functions.path)))
        return plain[1](wanted)

    cuda.target_of, cuda.WantedCubins.load = lambda device: "sm_90", load  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        cuda.target_of, cuda.WantedCubins.load = plain  # type: ignore[method-assign]
        found.capability(90)
