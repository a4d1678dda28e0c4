"""Regions for CUDA: cubins of the right architecture, a manifest that is that of the kernels, the cache, and where there is no Triton."""

from __future__ import annotations

import importlib.metadata
import re
import struct
import subprocess
import time
from pathlib import Path

import pytest
import torch
from test_regions import ALL, GATED, funcs

from interlace.cli.app import run
from interlace.regions import Making, cuda
from interlace.regions.beside import cubins
from interlace.regions.kept import RegionsError


def has_triton() -> bool:
    version = ".".join(torch.__version__.split(".")[:2])
    try:
        return importlib.metadata.version("triton") == cuda.TRITON.get(version)
    except importlib.metadata.PackageNotFoundError:
        return False


needs_triton = pytest.mark.skipif(not has_triton(), reason="needs the triton of this torch (the extra test)")
SUMMED = """func f3(%0: bf16[4096,1024]) gives (%3) {
  %2: bf16[4096,1024] = aten.mul.Tensor(%0, %0)
  %3: bf16[1024] = aten.sum.dim_IntList(%2, [0])
}
"""
# A norm's gradients: sums of the same numbers along both dimensions.
BOTH_WAYS = """func f0(%0: f32[8192,4096], %1: f32[8192,4096]) gives (%3, %4) {
  %2: f32[8192,4096] = aten.mul.Tensor(%0, %1)
  %3: f32[8192] = aten.sum.dim_IntList(%2, [1])
  %4: f32[4096] = aten.sum.dim_IntList(%2, [0])
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(folder: Path) -> cuda.Cubins:
    return cubins(funcs(*ALL, SUMMED), "sm_90", folder, print)


def sections(cubin: bytes) -> dict[str, bytes]:
    """Of an ELF file of 64 bits, by name."""
    offset, size, count, names = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    text = cubin[heads[names][4] :]
    return {text[head[0] : text.index(b"\0", head[0])].decode(): cubin[head[4] : head[4] + head[5]] for head in heads}


def parameters(info: bytes) -> list[int]:
    """Bytes of each parameter, from .nv.info of a kernel: an attribute is format, code, size; 0x17 says ordinal and bytes of one."""
    found, at = {}, 0
    while at + 4 <= len(info):
        form, code, size = struct.unpack_from("<BBH", info, at)
        if code == 0x17:
            ordinal, _, _, packed = struct.unpack_from("<HHHH", info, at + 8)[0], 0, 0, struct.unpack_from("<I", info, at + 12)[0]
            found[ordinal] = packed >> 18
        at += 4 + (size if form == 4 else 0)
    return [found[i] for i in sorted(found)]


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_cubins_are_elf_files_of_the_architecture(target: str, folder: Path) -> None:
    found = cubins(funcs(*ALL, SUMMED), target, folder, print)
    assert found.left == {} and len(found.regions) == 4
    for region in found.regions:
        for kernel in region.kernels:
            assert kernel.cubin[:5] == b"\x7fELF\x02" and struct.unpack_from("<H", kernel.cubin, 18)[0] == 190  # EM_CUDA
            flags = struct.unpack_from("<I", kernel.cubin, 48)[0]
            assert int(target[3:]) in (flags & 0xFF, flags >> 8 & 0xFF)  # of either layout of the flags
            assert kernel.registers > 0 and kernel.spills == 0


@needs_triton
def test_the_manifest_is_that_of_the_kernels(made: cuda.Cubins) -> None:
    by_key = {func["key"][:16]: func for func in funcs(*ALL, SUMMED)}
    for region in made.regions:
        func = by_key[region.key]
        assert (region.operands, region.results) == (len(func["operands"]), len(func["gives"]))
        used = set()
        for kernel in region.kernels:
            found = sections(kernel.cubin)
            assert f".text.{kernel.name}" in found
            sizes = [4 if take.startswith("i32") else 8 for take in kernel.takes]
            assert parameters(found[f".nv.info.{kernel.name}"]) == sizes
            for take in kernel.takes:
                if match := re.fullmatch(r"p(\d+)\+(\d+)", take):
                    used.add(int(match[1]))
                    assert int(match[1]) < region.operands + region.results or int(match[2]) < region.workspace
        assert used >= set(range(region.operands + region.results))
    blocks = {region.key: [kernel.grid for kernel in region.kernels] for region in made.regions}
    gated = next(func for func in funcs(GATED))
    assert blocks[gated["key"][:16]] == [[1, 1, 1]]  # 48 elements
    assert max(len(region.kernels) for region in made.regions) == 2  # a long sum has partial sums,
    assert any(region.workspace for region in made.regions)  # which lie in the workspace


@needs_triton
def test_sums_along_both_dimensions_have_kernels(folder: Path) -> None:
    """Inductor would make parts of one with the other, and add them up with an operator."""
    found = cubins(funcs(BOTH_WAYS), "sm_90", folder, print)
    assert found.left == {} and len(found.regions[0].kernels) > 1


@needs_triton
def test_the_file_says_what_is_in_it(made: cuda.Cubins) -> None:
    data = made.path.read_bytes()
    assert data.startswith(b"interlace cubins 3 sm_90 ")
    assert cuda.written(cuda.parse(data), "sm_90") == data
    assert data[: int(data.split(maxsplit=5)[4])].endswith(b"\nend\n")


@needs_triton
def test_a_damaged_file_is_made_again_with_the_same_bytes(made: cuda.Cubins, folder: Path) -> None:
    said: list[str] = []
    again = cubins(funcs(*ALL, SUMMED), "sm_90", folder, said.append)
    assert again.path == made.path and again.seconds == 0.0 and said == []
    data = made.path.read_bytes()
    made.path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    again = cubins(funcs(*ALL, SUMMED), "sm_90", folder, said.append)
    assert "is damaged (its digest is not the noted one); it is made again" in said[0]
    assert again.seconds > 0 and made.path.read_bytes() == data
    made.path.chmod(0o666)
    with pytest.raises(RegionsError, match="is not loaded: others may write to it"):
        cubins(funcs(*ALL, SUMMED), "sm_90", folder, said.append)
    made.path.chmod(0o600)


@needs_triton
def test_inspect_shows_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("INTERLACE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "small.il"
    # A sort of rows this long has no kernel.
    long = "func f1(%0: f32[6,8192]) gives (%1) {\n  %1: f32[6,8192], _ = aten.sort(%0)\n}\n"
    file.write_text(f"interlace 1 captured\nstep 1 reduce_each\n{GATED}{long}phase micro_batch takes () gives () {{\n}}\n")
    assert run(["inspect", "--target", "sm_80", str(file)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"f0 +triton_poi_fused_0 +1 x 1 x 1 +\d+ +\d+ +0 +0 +\d+", shown)
    assert re.search(r"f1 +its body runs: ", shown)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with pytest.raises(RegionsError) as error:
        cubins(funcs(GATED), "sm_90", tmp_path)
    torchs = ".".join(torch.__version__.split(".")[:2])
    wanted = cuda.TRITON[torchs]
    said = f"torch {torchs} makes CUDA kernels with triton {wanted}"
    assert str(error.value) == f"{said}, and there is no triton here: pip install triton=={wanted}"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.5.0")
    with pytest.raises(RegionsError, match=rf"and this is triton 3\.5\.0: pip install triton=={re.escape(wanted)}"):
        cubins(funcs(GATED), "sm_90", tmp_path)
    with pytest.raises(RegionsError, match="there is no target 'sm_70': choose one of sm_80, sm_90"):
        cubins(funcs(GATED), "sm_70", tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_triton
def test_code_generation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RegionsError, match=r"code generation took longer than 0\.5 s"):
        cubins(funcs(GATED), "sm_90", tmp_path, print, limit_s=0.5)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


@needs_triton
def test_what_is_made_beside_ends_with_its_rank(tmp_path: Path) -> None:
    """With all of its processes, and nothing half done is left."""
    making = Making(cuda.WantedCubins.on(funcs(*ALL), "on", tmp_path, "sm_90", "cuda:0"), "", print)
    assert making._child is not None
    session, end = str(making._child.pid), time.monotonic() + 300

    def there() -> list[str]:
        lines = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
        return [line for line in lines if line.split()[0] == session and not line.split()[1].startswith("Z")]

    while not any("interlace.regions.cubins" in line for line in there()):
        assert making.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    making.close()
    while there():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [path.suffix for path in (tmp_path / "regions").iterdir()] == [".lock"]
