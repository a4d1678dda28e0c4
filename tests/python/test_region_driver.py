"""Cubins launched through the driver (src/runtime/region_driver.cc), with one that writes down what it is called with: no device needed."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soft_cuda
import torch
from test_cubins import SUMMED, needs_triton
from test_regions import ALL, GATED, funcs

from interlace import _runtime
from interlace.regions import cuda
from interlace.regions.beside import cubins

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a real driver")
STREAM = 77


def made_up(text: str = GATED, **changed: Any) -> tuple[cuda.Region, dict[str, Any]]:
    """A region of two kernels, and its func; its cubins are of nobody."""
    func = funcs(text)[0]  # two operands, two results
    first = cuda.Kernel("first", [3, 2, 1], 4, 0, 32, 0, ["p0+0", "p4+64", "i32:48", "i64:5000000000", "i8:7", "null"], b"\x7fELF one")
    image = b"\x7fELF two" + repr(changed).encode()  # another one for another manifest
    second = cuda.Kernel("second", [1, 1, 1], 8, 1024, 32, 0, ["p1+16", "p2+0", "p3+0", "p4+0", "i1:1", "null", "null"], image)
    return cuda.Region(func["key"][:16], 2, 2, 256, [first, dataclasses.replace(second, **changed)]), func


def loaded(regions: list[cuda.Region], known: list[dict[str, Any]], target: str = "sm_90") -> _runtime.Cubins:
    soft_cuda.driver().know(regions, known)
    return _runtime.Cubins(target, "cuda:0", regions)


def expected(region: cuda.Region, pointers: list[int]) -> list[list[str]]:
    lines = []
    for kernel in region.kernels:
        values = [added + (pointers[pointer] if pointer >= 0 else 0) for pointer, added, _ in map(soft_cuda.taken, kernel.takes)]
        numbers = [*kernel.grid, 32 * kernel.warps, 1, 1, kernel.shared, STREAM, *values]
        lines.append([region.key, kernel.name, *map(str, numbers)])
    return lines


def launched(regions: list[cuda.Region], known: list[dict[str, Any]], target: str = "sm_90") -> None:
    """Every region, as its manifest says."""
    driver, cubins = soft_cuda.driver(), loaded(regions, known, target)
    assert cubins.refused() == {}
    driver.launches()
    for region in regions:
        pointers = [4096 * (i + 1) for i in range(region.operands + region.results + 1)]
        cubins.launch(region.key, pointers, STREAM)
        assert [line.split() for line in driver.launches()] == expected(region, pointers)
    assert driver.faults() == ""


def test_launches_follow_the_manifest() -> None:
    region, func = made_up()
    launched([region], [func])


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_launches_of_real_cubins_follow_the_manifest(target: str, tmp_path: Path) -> None:
    known = funcs(*ALL, SUMMED)
    found = cubins(known, target, tmp_path, print)
    soft_cuda.driver().capability(int(target[3:]))
    try:
        launched(found.regions, known, target)
    finally:
        soft_cuda.driver().capability(90)


def test_what_cannot_be_launched_is_told() -> None:
    region, func = made_up()
    cubins, key = loaded([region], [func]), region.key
    with pytest.raises(_runtime.Error, match=r"^an address is no multiple of 16, as its kernels need it$"):
        cubins.launch(key, [4096, 4096, 4096, 4104, 4096], STREAM)
    with pytest.raises(_runtime.Error, match=f"^no region {key} of 4 pointers is loaded$"):
        cubins.launch(key, [4096] * 4, STREAM)
    with pytest.raises(_runtime.Error, match=r"^no region 0123456789abcdef of 5 pointers is loaded$"):
        cubins.launch("0123456789abcdef", [4096] * 5, STREAM)
    soft_cuda.driver().fail("cuLaunchKernel", 701)
    try:
        with pytest.raises(_runtime.Error) as error:
            cubins.launch(key, [4096] * 5, STREAM)
    finally:
        soft_cuda.driver().fail("cuLaunchKernel", 0)
    assert str(error.value) == "kernel first: cuLaunchKernel failed with CUDA error 701 (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"
    cubins.launch(key, [4096 * i for i in range(1, 6)], STREAM)
    assert soft_cuda.driver().faults() == ""


@pytest.mark.parametrize(("call", "code", "why"), [
    ("cuModuleLoadData", 209, "kernel first: cuModuleLoadData failed with CUDA error 209 (CUDA_ERROR_NO_BINARY_FOR_GPU)"),
    ("cuModuleGetFunction", 500, "kernel first: cuModuleGetFunction failed with CUDA error 500 (CUDA_ERROR_NOT_FOUND)"),
    ("cuFuncSetAttribute", 1, "kernel second: cuFuncSetAttribute of its shared memory failed with CUDA error 1 (CUDA_ERROR_INVALID_VALUE)"),
    ("cuFuncSetAttribute", 9999, "kernel second: cuFuncSetAttribute of its shared memory failed with CUDA error 9999 (unknown)"),
])  # fmt: skip
def test_regions_that_the_driver_refuses_are_told(call: str, code: int, why: str) -> None:
    region, func = made_up(shared=100 << 10)
    driver = soft_cuda.driver()
    driver.fail(call, code, region.key)
    try:
        cubins = loaded([region], [func])
    finally:
        driver.fail(call, 0, region.key)
    assert cubins.refused() == {region.key: why}
    with pytest.raises(_runtime.Error, match="no region"):
        cubins.launch(region.key, [4096] * 5, STREAM)


def test_a_kernel_of_no_cubin_that_is_known_is_refused() -> None:
    region, func = made_up(cubin=b"\x7fELF three")
    soft_cuda.driver().know(made_up()[:1], [func])
    cubins = _runtime.Cubins("sm_90", "cuda:0", [region])
    assert cubins.refused() == {
        region.key: "kernel second: cuModuleLoadData failed with CUDA error 209 (CUDA_ERROR_NO_BINARY_FOR_GPU)"
    }


def test_shared_memory_beyond_48_kib_is_asked_for() -> None:
    region, func = made_up(shared=100 << 10)
    launched([region], [func])


def test_parameters_of_another_form_are_errors() -> None:
    region, func = made_up(takes=["p5+0"])
    assert loaded([region], [func]).refused() == {region.key: "kernel second: there is no pointer 5"}
    for take in ("p1", "p1+", "i32", "i32:-1", "null1", "f32:1", "p1-2"):
        region, _ = made_up(takes=["p0+0", take])
        with pytest.raises(ValueError, match=f"^a parameter of another form: {re.escape(take)}$"):
            _runtime.Cubins("sm_90", "cuda:0", [region])


def test_a_device_of_another_kind_is_refused() -> None:
    soft_cuda.driver()
    with pytest.raises(_runtime.Error, match=r"^kernels are for sm_80, and cuda:0 is sm_90$"):
        _runtime.Cubins("sm_80", "cuda:0", [])


def test_a_driver_without_a_device_is_told() -> None:
    soft_cuda.driver().fail("cuInit", 100)
    try:
        with pytest.raises(_runtime.Error, match=r"^cuInit failed with CUDA error 100 \(CUDA_ERROR_NO_DEVICE\)$"):
            _runtime.Cubins("sm_90", "cuda:0", [])
    finally:
        soft_cuda.driver().fail("cuInit", 0)


def test_without_a_driver_it_says_so() -> None:
    """In a process of its own: here it has been opened."""
    code = "from interlace import _runtime as r\ntry:\n    r.Cubins('sm_90', 'cuda:0', [])\nexcept r.Error as e:\n    print(e)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("there is no CUDA driver, install NVIDIA's: libcuda.so.1: ")


# Parameters of the same number, and each of the same size and kind: pointers stay pointers, numbers numbers.
SAME = """
#include <cuda.h>
#include <type_traits>
#include "runtime/cuda_driver.h"
template <typename A, typename B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
template <typename R, typename... A, typename S, typename... B>
constexpr bool Same(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) == sizeof...(B)) return kAlike<R, S> && (kAlike<A, B> && ...);
  return false;
}
using Driver = interlace::CudaDriver;
#define SAME(name) static_assert(Same(decltype(Driver::name){}, static_cast<decltype(&name)>(nullptr)), #name)
SAME(cuInit); SAME(cuDeviceGet); SAME(cuDeviceGetAttribute); SAME(cuDevicePrimaryCtxRetain); SAME(cuCtxGetCurrent);
SAME(cuCtxSetCurrent); SAME(cuModuleLoadData); SAME(cuModuleGetFunction); SAME(cuFuncSetAttribute); SAME(cuLaunchKernel);
SAME(cuGetErrorName);
static_assert(Driver::kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(Driver::kComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(Driver::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
"""


@needs_triton
def test_the_declarations_are_those_of_cuda(tmp_path: Path) -> None:
    """Triton brings the vendor's header."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.submodule_search_locations
    headers = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "include"
    source = Path(__file__).resolve().parents[2] / "src"
    (tmp_path / "same.cc").write_text(SAME)
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{source}", f"-isystem{headers}", str(tmp_path / "same.cc")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
