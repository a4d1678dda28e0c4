"""Training on an accelerator with compiled regions, in software: real cubins are made beside it, loaded and launched through the driver that
soft_cuda.py has, which compares launches with the manifest and computes by Inductor's library for CPUs. So losses are those of a CPU with
that library, bit for bit, whatever the order of streams.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import soft_cuda
import torch
import zoo
from runtime_support import language_loss
from runtime_support import llama as even_llama
from test_cubins import needs_triton
from test_region_driver import made_up
from test_regions import ALL, GATED, funcs

import interlace
from interlace import _runtime
from interlace.regions import cuda, kept, ready
from interlace.regions.beside import cubins

pytestmark = [pytest.mark.software, needs_triton]
PATIENCE_S = 300.0  # for compilers on a loaded machine; nothing is asserted about it
STEPS = 5


def even_batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(128, (rows, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


# Halves of the zoo's heads, 6 numbers, lie where no kernel takes them, and are moved; those of "even" are 4 numbers.
CASES = {**zoo.CASES, "even": zoo.Case(even_llama, even_batch, language_loss)}


@pytest.fixture(autouse=True)
def unsaid() -> None:
    kept._said.clear()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def trainer_of(case: str, device: str, cache: str, **settings: Any) -> tuple[interlace.Trainer, Any]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(0)
    model = CASES[case].build().to(torch.float32)
    batch = torch.utils._pytree.tree_map(lambda t: t.to(device), CASES[case].batch(2, 1 + rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    default = {"schedule": [], "regions": "on", "regions_wait": True, "profile": "off", "device_graphs": False}
    config = interlace.Config(cache=cache, **{**default, **settings})
    # on_device.py moves a model, with its ties, which `to` would undo.
    compile = interlace.compile if device == "soft" else interlace.compile.__wrapped__
    return compile(model, optimizer, CASES[case].loss, batch, config), batch


def facts(trainer: interlace.Trainer, losses: list[float]) -> dict[str, Any]:
    library = trainer._run.source.regions
    return {
        "losses": losses, "regions": trainer.stats()["regions"], "arena": trainer.stats()["arena"], "artifact": trainer._run.regions,
        "left": library.left if library else {}, "keys": library.keys if library else [], "swaps": trainer.swaps,
        "file": library.path.suffix if library else "", "graphs": trainer.stats()["graphs"],
    }  # fmt: skip


def train(case: str, device: str, cache: str, mode: str = "free", plant: Callable[[Any, Any], None] | None = None, **settings: Any) -> Any:
    """Five steps, of which `plant` spoils something before the third; with what was launched in the last one."""
    if device == "cpu":
        trainer, batch = trainer_of(case, device, os.path.join(cache, "cpu"), **settings)
        losses = [trainer.step(batch).item() for _ in range(STEPS)]
        found = facts(trainer, losses)
        trainer.close()
        return found
    import soft_device

    soft_device.use(mode)
    with soft_cuda.driven(os.path.join(cache, "cpu")) as driver:
        trainer, batch = trainer_of(case, device, cache, **settings)
        losses = []
        for step in range(STEPS):
            if step == 2 and plant is not None:
                plant(driver, trainer)
            driver.launches()
            losses.append(trainer.step(batch).item())
        found = {**facts(trainer, losses), "launches": driver.launches(), "faults": driver.faults()}
        trainer.close()
    soft_device.use("free")
    return found


@pytest.mark.parametrize("case", ["even", "vit", *(pytest.param(case, marks=pytest.mark.soak) for case in ("llama", "gpt2"))])
def test_training_has_the_losses_of_the_kernels(case: str, cache: str, caplog: pytest.LogCaptureFixture) -> None:
    bodies = train(case, "soft", cache, regions="off")
    cpu = train(case, "cpu", cache, kernels="torch")
    for mode in ("free", "starve:1", "lockstep:0:0"):
        run = train(case, "soft", cache, mode)
        assert run["faults"] == "" and run["left"] == {} and run["file"] == ".cubins"
        assert [line for line in caplog.messages if "op by op" in line] == []
        assert run["losses"] == cpu["losses"], mode
        assert parity.loss_distance(run["losses"], bodies["losses"]) < 1e-5
        regions = run["regions"]
        assert regions["compiled"] == regions["regions"] > 4 and regions["from_step"] == 1
        launched = [line.split()[0] for line in run["launches"]]
        assert set(launched) == set(run["keys"]) and len(launched) >= regions["calls"]
        arena = run["arena"]
        assert arena["settled"] and arena["unforeseen"] == [] and arena["kept"] == [], arena
        assert arena["planned_bytes"] == arena["top_bytes"]


def test_graphs_of_the_device_have_them_too(cache: str) -> None:
    """What is launched while a phase is captured runs in each replay, and the driver hears no more of it."""
    plain, captured = train("even", "soft", cache), train("even", "soft", cache, device_graphs=True)
    assert captured["graphs"]["replays"] > 0 and captured["launches"] == [] and captured["faults"] == ""
    assert captured["losses"] == plain["losses"] and plain["graphs"]["replays"] == 0 and plain["launches"]


def beside(case: str, cache: str, functions: str) -> dict[str, Any]:
    """Steps until the kernels are there, and three more."""
    with soft_cuda.driven(functions) as driver:
        trainer, batch = trainer_of(case, "soft", cache, regions_wait=False)
        losses, end = [], time.monotonic() + PATIENCE_S
        while trainer.swaps == 0 and time.monotonic() < end:
            losses.append(trainer.step(batch).item())
            assert trainer.swaps or driver.launches() == []
            time.sleep(0.5)
        losses += [trainer.step(batch).item() for _ in range(3)]
        found = {**facts(trainer, losses), "launches": driver.launches(), "faults": driver.faults()}
        trainer.close()
    return found


def of_bodies(case: str, count: int) -> list[float]:
    trainer, batch = trainer_of(case, "soft", "off", regions="off")
    losses = [trainer.step(batch).item() for _ in range(count)]
    trainer.close()
    return losses


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_bodies_run_until_all_ranks_have_the_cubins(world: int, cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    what = ("even", str(tmp_path), os.path.join(cache, "cpu"))
    runs = [beside(*what)] if world == 1 else ranks.run(beside, 2, *what, timeout_s=2 * PATIENCE_S)
    count = len(runs[0]["losses"])
    plain = [of_bodies("even", count)] if world == 1 else ranks.run(of_bodies, 2, "even", count)
    for run, without in zip(runs, plain, strict=True):
        swapped = run["regions"]["from_step"]
        assert swapped > 1 and run["swaps"] == 1 and run["faults"] == "" and run["launches"]
        assert run["losses"][: swapped - 1] == without[: swapped - 1]
        assert parity.loss_distance(run["losses"], without) < 1e-4
    assert len({run["artifact"] for run in runs}) == len({run["regions"]["from_step"] for run in runs}) == 1
    assert len(list((tmp_path / "regions").glob("*.cubins"))) == 1  # one rank has compiled
    if world == 1:
        assert f"swapped in at step {runs[0]['regions']['from_step']}" in caplog.text


def test_the_same_bits_for_every_strategy(cache: str) -> None:
    runs = {
        name: ranks.run(train, 2, "even", "soft", cache, timeout_s=2 * PATIENCE_S, **settings)
        for name, settings in {"shard": {}, "replicate": {"strategy": "replicate"}}.items()
    }
    assert all(run["faults"] == "" and run["regions"]["compiled"] > 4 for both in runs.values() for run in both)
    assert [run["losses"] for run in runs["shard"]] == [run["losses"] for run in runs["replicate"]]
    assert len({run["artifact"] for both in runs.values() for run in both}) == 1


def refusing(case: str, cache: str) -> Any:
    """Rank 1's driver takes no module."""
    cuda._loaded.cache_clear()  # it is loaded again
    with soft_cuda.driven(os.path.join(cache, "cpu")) as driver:
        if torch.distributed.get_rank() == 1:
            driver.fail("cuModuleLoadData", 209)
        try:
            return train(case, "soft", cache)
        finally:
            driver.fail("cuModuleLoadData", 0)


def test_what_one_driver_refuses_no_rank_launches(cache: str) -> None:
    runs = ranks.run(refusing, 2, "vit", cache, timeout_s=2 * PATIENCE_S)
    assert all(run["regions"]["compiled"] == 0 and run["launches"] == [] for run in runs)


def test_a_region_that_the_driver_refuses_runs_its_body(cache: str, caplog: pytest.LogCaptureFixture) -> None:
    first = train("vit", "soft", cache)
    key, driver = first["keys"][0], soft_cuda.driver()
    cuda._loaded.cache_clear()
    driver.fail("cuModuleLoadData", 209, key)
    try:
        run = train("vit", "soft", cache)
    finally:
        driver.fail("cuModuleLoadData", 0, key)
        cuda._loaded.cache_clear()
    (name, why), = run["left"].items()
    assert why.endswith("cuModuleLoadData failed with CUDA error 209 (CUDA_ERROR_NO_BINARY_FOR_GPU)")
    assert run["keys"] == first["keys"][1:] and run["artifact"] != first["artifact"] and run["faults"] == ""
    assert f"regions whose bodies run op by op: {name}: " in caplog.text
    assert parity.loss_distance(run["losses"], first["losses"]) < 1e-5
    assert key not in {line.split()[0] for line in run["launches"]}


def test_a_launch_that_is_refused_runs_the_body(cache: str, caplog: pytest.LogCaptureFixture) -> None:
    """From that step on, and it is said once."""
    first, key = train("vit", "soft", cache), ""

    def plant(driver: soft_cuda.Driver, trainer: interlace.Trainer) -> None:
        driver.fail("cuLaunchKernel", 701, first["keys"][0])

    try:
        run = train("vit", "soft", cache, plant=plant)
    finally:
        soft_cuda.driver().fail("cuLaunchKernel", 0, first["keys"][0])
    key = first["keys"][0]
    said = [record.getMessage() for record in caplog.records if "runs op by op: kernel" in record.getMessage()]
    assert len(said) == 1 and f"({key}) runs op by op: kernel " in said[0]
    assert said[0].endswith("cuLaunchKernel failed with CUDA error 701 (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)")
    assert run["losses"][:2] == first["losses"][:2] and parity.loss_distance(run["losses"], first["losses"]) < 1e-5
    assert {line.split()[0] for line in run["launches"]} == set(first["keys"][1:])


def bodies_with(caplog: pytest.LogCaptureFixture, cache: str, reason: str, **settings: Any) -> None:
    run = train("vit", "soft", cache, **settings)
    assert run["regions"]["compiled"] == 0 and run["launches"] == []
    assert caplog.text.count(f"regions are not compiled, their bodies run op by op: {reason}") == 1
    assert run["losses"] == train("vit", "soft", cache, regions="off")["losses"]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of ALL for CPUs."""
    made = ready(funcs(*ALL), "on", tmp_path_factory.mktemp("functions"), print)
    assert made is not None
    return made.path


def test_devices_of_8_x_run_what_is_made_for_8_0(functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, target in ((86, "sm_80"), (89, "sm_80"), (90, "sm_90")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: divmod(c, 10))
        assert cuda.target_of(torch.device("cuda")) == target
    known = funcs(*ALL)
    with soft_cuda.driven(tmp_path) as driver:
        regions = cubins(known, "sm_80", tmp_path, print).regions
        driver.know(regions, known, ctypes.CDLL(str(functions)))
        driver.capability(89)
        assert _runtime.Cubins("sm_80", "soft:0", regions).refused() == {}
        with pytest.raises(_runtime.Error, match="kernels are for sm_90, and soft:0 is sm_80"):
            _runtime.Cubins("sm_90", "soft:0", regions)


def test_another_device_than_the_files_runs_bodies(cache: str, caplog: pytest.LogCaptureFixture) -> None:
    cuda._loaded.cache_clear()
    soft_cuda.driver().capability(80)  # driven() makes it an sm_90 again
    bodies_with(caplog, cache, "kernels are for sm_90, and soft:0 is sm_80")


def test_exact_runs_bodies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bodies_with(caplog, str(tmp_path), "regions='exact' is for kernels that were compared with their bodies", regions="exact")


def test_without_triton_bodies_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def none(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    there = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", none)
    bodies_with(caplog, str(tmp_path), "torch 2.13 makes CUDA kernels with triton 3.7.1, and there is no triton here: pip install")


def test_devices_without_kernels_run_bodies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, batch = trainer_of("vit", "soft", str(tmp_path))
    trainer.step(batch)
    assert trainer.stats()["regions"]["compiled"] == 0
    assert "their bodies run op by op: kernels are made for CPUs and CUDA devices, this is soft" in caplog.text
    trainer.close()


def test_the_comparison_on_a_device_finds_a_wrong_kernel(functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/cubins_run.py, which has no device elsewhere."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    import cubins_run

    known = funcs(*ALL)
    with soft_cuda.driven(tmp_path) as driver:
        found = cubins(known, "sm_90", tmp_path, print)
        driver.know(found.regions, known, ctypes.CDLL(str(functions)))
        assert cubins_run.compare_on_device(known, found, torch.device("soft:0")) == {"f0": "", "f1": "", "f2": ""}
        kernel = next(region for region in found.regions if region.key == known[0]["key"][:16]).kernels[0]
        kernel.takes[:2] = kernel.takes[1::-1]  # operands in another order
        wrong = cubins_run.compare_on_device(known, found, torch.device("soft:0"))
        assert "from the exact value" in wrong["f0"] and wrong["f1"] == wrong["f2"] == ""
        driver.faults()


UNALIGNED = """interlace 1 captured
step 1 reduce_each
input %0: f32[WHOLE] "x"
FUNCphase micro_batch takes () gives () {
  %1: f32[ROWS,8] in %0+OFFSET = view(%0) {fwd}
  %2: f32[ROWS,8], %3: f32[ROWS,8] = call f0(%1, %1) {fwd}
  output(%3) {fwd name="y"}
}
"""


def unaligned(rows: int, offset: int, said: list[str]) -> tuple[str, Any, Any]:
    """Key of a region of `rows`, an executor whose operand lies `offset` numbers behind the input, and that step's input."""
    text = GATED.replace("[6,8]", f"[{rows},8]")
    region, func = made_up(text)
    soft_cuda.driver().know([region], [func])  # without a function: a launch that computes nothing is a fault
    options = {"cubins": _runtime.Cubins("sm_90", "soft:0", [region]), "region_keys": [region.key], "say": said.append, "arena": False}
    numbers = {"ROWS": rows, "WHOLE": 8 * rows + 16, "OFFSET": offset, "FUNC": text}
    program = UNALIGNED
    for name, value in numbers.items():
        program = program.replace(name, str(value))
    x = torch.randn(8 * rows + 16, generator=torch.Generator().manual_seed(0))
    return region.key, _runtime.Executor(program, "soft", [], 10.0, options), x


def test_small_operands_that_do_not_fit_are_moved_and_large_ones_run_the_body() -> None:
    driver, said = soft_cuda.driver(), []
    driver.attach()
    large = 1 << 15  # rows of 32 bytes: 1 MiB is still moved
    key, executor, x = unaligned(large + 1, 1, said)
    driver.launches()
    for _ in range(2):
        y = executor.step([[x.to("soft")]], [], 0)["outputs"]["y"][0].cpu()
        part = x[1 : 1 + 8 * (large + 1)].view(-1, 8)
        assert torch.equal(y, torch.nn.functional.silu(part) * part)
    assert said == [f"region f0 ({key}) runs op by op: an address is no multiple of 16, as its kernels need it"]
    assert driver.launches() == [] and driver.faults() == ""
    for rows, offset in ((large + 1, 4), (large, 1), (6, 1)):
        key, executor, x = unaligned(rows, offset, said)
        executor.step([[x.to("soft")]], [], 0)
        assert [line.split()[1] for line in driver.launches()] == ["first", "second"]
        assert driver.faults() == f"{key} second: no function computes its region\n"
    assert len(said) == 4  # the driver has refused them
