"""Cubins launched through CUDA's driver, as their manifest says, and compared with the bodies of their regions on the same device.

It needs no more than libcuda.so.1 and a torch that sees the device; the context is torch's own, the stream its current one. Interlace's
executor does not launch them yet (docs/regions.md): this shows whether files made without a device hold on one.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from interlace.regions.body import empty_of, function_of, operands_of, widened
from interlace.regions.check import ULPS, added, difference, same
from interlace.regions.cuda import ALIGNED, TARGETS, Cubins, Kernel, Region

MOST_BYTES = 8 << 30  # of a region's operands; larger ones are left out
NUMBERS = {"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


def target_here() -> str:
    major, minor = torch.cuda.get_device_capability()
    name = f"sm_{10 * major + minor}"
    if name not in TARGETS:
        raise SystemExit(f"this device is {name}; cubins are made for {', '.join(TARGETS)}")
    return name


class Driver:
    """What is called of libcuda. Error: OSError where there is none, RuntimeError with CUDA's number where a call fails."""

    def __init__(self, library: str = "libcuda.so.1"):
        self.library = ctypes.CDLL(library)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def function(self, kernel: Kernel) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(kernel.cubin))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.name.encode())
        if kernel.shared > 48 << 10:
            self.call("cuFuncSetAttribute", function, 8, kernel.shared)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        return function

    def launch(self, region: Region, pointers: list[int], stream: int) -> None:
        """Its kernels in their order; `pointers`: operands, results, workspace. Error: a pointer that is not aligned."""
        for pointer in pointers:
            if pointer % ALIGNED:
                raise RuntimeError(f"an address that is no multiple of {ALIGNED}: its body must run")
        for kernel in region.kernels:
            values = [value_of(take, pointers) for take in kernel.takes]
            addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            sizes = [*kernel.grid, 32 * kernel.warps, 1, 1, kernel.shared]
            self.call("cuLaunchKernel", self.function(kernel), *map(ctypes.c_uint, sizes), ctypes.c_void_p(stream), addresses, None)


def value_of(take: str, pointers: list[int]) -> Any:
    """A parameter as the driver reads it."""
    if take == "null":
        return ctypes.c_void_p(0)
    if take.startswith("p"):
        index, offset = take[1:].split("+")
        return ctypes.c_void_p(pointers[int(index)] + int(offset))
    kind, number = take.split(":")
    return NUMBERS[kind](int(number))


def compare_on_device(funcs: list[dict[str, Any]], found: Cubins, device: torch.device) -> dict[str, str]:
    """Name of a func → what is wrong with its kernels; "" where each result is as near to the value in float64 as the body's own."""
    driver = Driver()
    regions = {region.key: region for region in found.regions}
    wrong = {}
    for func in funcs:
        region = regions.get(func["key"][:16])
        operands = [x.to(device) for x in operands_of(func)] if region is not None else []
        if region is None or sum(x.nbytes for x in operands) > MOST_BYTES:
            continue
        given = [empty_of(value, str(device)).fill_(0) for value in func["gives"]]
        workspace = torch.empty(max(region.workspace, 1), dtype=torch.uint8, device=device)
        driver.launch(region, [x.data_ptr() for x in [*operands, *given, workspace]], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        with torch.no_grad():
            bodies = function_of(func)(*operands)
            exact = function_of(func, wide=True)(*[widened(x) for x in operands])
        said = [
            difference(made, body, wide, ULPS * max(1.0, math.log2(added(func))))
            for made, body, wide in zip(given, bodies, exact, strict=True)
            if not same(made, body)
        ]
        wrong[func["name"]] = "; ".join(text for text in said if text)
    return wrong
