"""`interlace plan --local`: plans of this host rest on what was measured of it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlace import _core
from interlace.calibrate.here import measured_cluster
from interlace.calibrate.predict import value_of
from interlace.cli import plan_here, plan_tables
from interlace.cli.app import run
from interlace.cli.plan_here import op_keys
from interlace.cli.plan_programs import simulated
from interlace.cli.profile import machine_here
from interlace.cost.measurements import Profile, from_rows
from interlace.cost.store import Store
from interlace.plan import layers as plan_layers
from interlace.plan.execute import execution_of

WORDS = ["plan", "llama-tiny", "--seq", "64", "--local", "--global-batch", "8", "--no-why", "--json"]
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_layers, "model_text", functools.cache(plan_layers.model_text))
        yield


@pytest.fixture(scope="module")
def layers() -> str:
    return plan_layers.model_text("llama-tiny", seq=64, flash=True, dtype="float32", ignore=())


def collectives(ranks: int, us_per_mb: float, latency_us: float = 20) -> dict[tuple[str, str], dict[str, float]]:
    """Of every kind and size, at one rate: a gather of so many ranks moves (ranks - 1) / ranks of its bytes, an all-reduce twice that."""
    share = (ranks - 1) / ranks
    return {
        ("collective", f"{kind} {ranks} {size}"):
            {"us": latency_us + rounds * share * size / 1e6 * us_per_mb, "core_us": 0.05, "finish_us": 0}
        for kind, rounds in (("gather", 1), ("reduce", 1), ("all_reduce", 2)) for size in SIZES
    }  # fmt: skip


def op(us: float) -> dict[str, float]:
    return {"us": us, "bytes": 0, "transient": 0, "measured": 1}


def stored(folder: Path, rows: dict[tuple[str, str], dict[str, float]], ranks: int = 2, network: str | None = None) -> str:
    file = folder / "store.sqlite"
    with Store(file) as store:
        store.put(machine_here(ranks, None, network).fingerprint, rows)
    return str(file)


def found(capsys: Any, *words: str) -> dict[str, Any]:
    assert run([*WORDS, *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_rates_are_those_of_the_measured_ops() -> None:
    rows = {
        ("op", "aten.mm(f32[64,32],f32[32,16])->f32[64,16]"): op(2 * 64 * 32 * 16 / 1e3),  # 1 GFLOP/s
        ("op", "update.adamw(f32[1000],f32[1000],f32[1000],f32[1000],f64[3])->"): op(24),  # 24 bytes each: 1 GB/s
        ("op", "aten.add.Tensor(f32[1000],f32[1000])->f32[1000]"): op(6),  # 2 GB/s
        ("slowdown", "compute beside transfer"): {"factor": 1.5},
        **collectives(2, 1000),  # 1 GB/s
    }
    machine = machine_here(2, None, None)
    cluster = measured_cluster(from_rows("here", rows), machine)
    slower = max(1.0, machine.ranks * machine.threads / machine.cores)
    assert value_of(cluster.text, "device", "tflops_single") == pytest.approx(1e-3 / 0.95 / slower, rel=1e-4)
    assert value_of(cluster.text, "device", "memory_gb_per_s") == pytest.approx(1 / 0.9 / slower, rel=1e-4)
    assert value_of(cluster.text, "device", "cache_gb_per_s") == pytest.approx(2 / slower, rel=1e-4)
    assert value_of(cluster.text, "intra", "gb_per_s") == pytest.approx(1, rel=0.01)
    assert value_of(cluster.text, "intra", "all_reduce_gb_per_s") == pytest.approx(1, rel=0.01)
    assert cluster.text.count("1.5") == 4, "compute in each set of classes that has a transfer too"
    assert _core.cluster_devices(cluster.text) == 2
    us, *_ = _core.predict_collective(cluster.text, "all_gather", 1 << 22, 2, "here")
    assert us == pytest.approx(rows["collective", f"gather 2 {1 << 22}"]["us"], rel=0.01)


def test_ranks_that_share_cores_take_turns() -> None:
    machine = machine_here(2, None, None)
    crowded = type(machine)(machine.cpu, 2, machine.torch, 1, 8)
    key = "aten.mm(f32[64,32],f32[32,16])->f32[64,16]"
    cluster = measured_cluster(from_rows("here", {("op", key): op(10)}), crowded)
    assert f'"{key}" = 40\n' in cluster.text and "8 ranks of 1 on 2 cores: ops take 4 times as long" in cluster.said[-1]


def test_nothing_measured_is_the_preset() -> None:
    cluster = measured_cluster(Profile("here"), machine_here(1, None, None))
    assert cluster.said == [] and "[ops]" not in cluster.text


def test_a_cluster_file_has_times_of_ops(layers: str) -> None:
    """What a layer takes is the sum over its ops, of those with a time that time."""
    keys = op_keys(layers, 2, 64)
    products = sorted(key for key in keys if key.startswith("aten.mm("))
    assert products
    plan = (
        'interlace-plan 1\nmodel "llama-tiny"\ncluster "local-1"\ndevices 1 per_node 1\nblocks 4\nglobal_batch 2\nsequence 64\n'
        'flash_attention yes\ndtype "float32"\nmemory_limit 1073741824\ntemplate runtime\naccumulation 1\nspace "by hand"\n\nstage 0\n'
        "  layers 4 embedding head\n  devices 0..0\n  micro_batch 2 dp 1 tp 1\n  zero 0\n  recompute full 0 selective 0\n"
        "  offload weights 0 gradients 0 states 0 activations 0\n"
    )

    def step_us(ops: dict[str, float]) -> float:
        table = "".join(f"{json.dumps(key)} = {us}\n" for key, us in ops.items())
        text = _core.preset_cluster("local-1") + ("\n[ops]\n" + table if ops else "")
        return json.loads(_core.read_plan(_core.predict_plan(plan, layers, text)))["step_us"]

    shortest = dict.fromkeys(keys, 1e-3)
    one = step_us(shortest | {products[0]: 1000.001}) - step_us(shortest)
    assert step_us({}) > step_us(shortest) > 0
    assert one >= 999 and math.isclose(one / 1000, round(one / 1000), rel_tol=1e-3), "a whole number of such products"
    with pytest.raises(_core.Error, match=r"'aten\.x' must be above zero"):
        _core.cluster_devices(_core.preset_cluster("local-1") + '\n[ops]\n"aten.x" = 0\n')


def test_a_slow_network_decides(tmp_path: Path, capsys: Any) -> None:
    """The same ranks: where collectives are slow no gradients travel, where they are fast both ranks have a batch of their own."""
    slow = found(capsys, "--store", stored(tmp_path, collectives(2, 1e6)))["plans"][0]["plan"]["stages"]
    assert all(stage["dp"] == 1 for stage in slow)
    fast = found(capsys, "--store", stored(tmp_path, collectives(2, 1e-3, 0.1), network="fast"), "--network", "fast")
    assert [stage["dp"] for stage in fast["plans"][0]["plan"]["stages"]] == [2]
    assert "fast" in fast["here"]["fingerprint"]


def test_what_is_measured_is_said(layers: str, tmp_path: Path, capsys: Any) -> None:
    file = str(tmp_path / "none.sqlite")
    facts = found(capsys, "--store", file)["here"]
    assert facts["measured"] == [] and not Path(file).exists()
    assert "nothing has been measured here" in facts["said"][0]
    assert f"interlace profile --model llama-tiny --ranks 2 --seq 64 --store {file}" in facts["said"][0]
    file = stored(tmp_path, collectives(2, 1e6))  # a pipeline: nothing is cut
    result = found(capsys, "--store", file)
    b = result["plans"][0]["plan"]["stages"][0]["micro_batch"]
    said = result["here"]["said"][-1]
    assert f"the others estimated from other shapes; interlace profile --model llama-tiny --ranks 2 --micro-batch {b}" in said
    every = {("op", key): op(5) for size in (1, 2, 4, 8) for key in op_keys(layers, size, 64)}
    facts = found(capsys, "--store", stored(tmp_path, every))["here"]
    row = facts["micro_batches"][0]
    assert row["ops"] == row["measured"] and facts["ops"] == len(every) and facts["said"][-1].endswith("measured")


def test_a_plan_measures_what_it_rests_on(layers: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a plan takes a micro-batch that was measured."""
    asked: list[list[str]] = []

    class Done:
        returncode = 0

    def measure(words: list[str], **_: Any) -> Done:
        asked.append(words)
        b = int(words[words.index("--micro-batch") + 1])
        stored(tmp_path, {("op", key): op(5) for key in op_keys(layers, b, 64)})
        return Done()

    stored(tmp_path, collectives(2, 1e6))
    monkeypatch.setattr(plan_here.subprocess, "run", measure)
    result = found(capsys, "--store", str(tmp_path / "store.sqlite"), "--measure")
    assert 1 <= len(asked) <= plan_here.MEASURE_ROUNDS and asked[0][3:5] == ["profile", "--model"]
    assert all(row["measured"] == row["ops"] for row in result["here"]["micro_batches"])


def test_programs_of_a_plan_are_simulated(layers: str, tmp_path: Path, capsys: Any) -> None:
    """Of the plans that the formula finds best the programs are made: what they take, and the fastest of them first."""
    every = {("op", key): op(5) for size in (1, 2, 4, 8) for key in op_keys(layers, size, 64)}
    result = found(capsys, "--store", stored(tmp_path, {**every, **collectives(2, 1000)}), "--top-k", "4")
    plans = result["plans"]
    steps = [each["simulated"]["step_us"] for each in plans if "simulated" in each]
    assert len(steps) >= 3 and steps == sorted(steps)
    assert [row["step_us"] for row in result["judged"] if row["fits"]][: len(steps)] == steps
    for each in plans:
        peaks = each.get("simulated", {"peak_bytes": []})["peak_bytes"]
        assert len(peaks) in (0, len(each["plan"]["stages"]))
        for stage, peak in zip(each["plan"]["stages"], peaks, strict=False):
            if stage["tp"] == 1 and len(peaks) == 1:
                assert peak == pytest.approx(stage["peak_bytes"], rel=0.01), "what one stage takes is planned op by op"
    plan_tables.show(result)
    shown = capsys.readouterr().out
    assert f"{plan_tables.seconds(steps[0] / 1e6)} a step" in shown
    assert "Plans whose programs were simulated" in shown and "Why not" not in shown
    assert {plan_tables.layout(row["plan"]) for row in result["judged"]} <= {"dp 2", "tp 2", "2 stages"}
    sketch = found(capsys, "--store", str(tmp_path / "none.sqlite"))
    assert "simulated" not in sketch["plans"][0], "nothing was measured that a simulation could rest on"


def test_programs_of_stages_with_unlike_ranks(layers: str) -> None:
    """One data rank with two rows of a micro-batch, then two with one each: their programs fit, and take what is planned for 1F1B."""
    stages = "".join(
        f"\nstage {i}\n  layers {count} {held}\n  devices {devices}\n  micro_batch {rows} dp {dp} tp 1\n  zero {zero}\n"
        "  recompute full 1 selective 0\n  offload weights 0 gradients 0 states 0 activations 0\n"
        for i, (count, held, devices, rows, dp, zero) in enumerate([(1, "embedding", "0..0", 2, 1, 0), (3, "head", "1..2", 1, 2, 2)])
    )
    text = (
        'interlace-plan 1\nmodel "llama-tiny"\ncluster "local-3"\ndevices 3 per_node 3\nblocks 4\nglobal_batch 8\nsequence 64\n'
        f'flash_attention yes\ndtype "float32"\nmemory_limit 9000000\ntemplate runtime\naccumulation 4\nspace "by hand"\n{stages}'
    )
    plan = json.loads(_core.read_plan(_core.predict_plan(text, layers, "local-3")))
    said = simulated(plan, "local-3", "")
    assert said is not None and said["step_us"] > 0
    assert said["peak_bytes"] == pytest.approx([stage["peak_bytes"] for stage in plan["stages"]], rel=0.03)


def test_dropout_takes_the_memory_that_it_takes_on_cpus() -> None:
    """A mask of the values' dtype, but for attention's, which has none."""
    layers = plan_layers.model_text("gpt2-tiny", seq=64, flash=True, dtype="float32", cpu=True)
    text = (
        'interlace-plan 1\nmodel "gpt2-tiny"\ncluster "local-1"\ndevices 1 per_node 1\nblocks 3\nglobal_batch 4\nsequence 64\n'
        'flash_attention yes\ndtype "float32"\nmemory_limit 1073741824\ntemplate runtime\naccumulation 2\nspace "by hand"\n\nstage 0\n'
        "  layers 3 embedding head\n  devices 0..0\n  micro_batch 2 dp 1 tp 1\n  zero 0\n  recompute full 0 selective 0\n"
        "  offload weights 0 gradients 0 states 0 activations 0\n"
    )
    plan = json.loads(_core.read_plan(_core.predict_plan(text, layers, "local-1")))
    said = simulated(plan, "local-1", "")
    assert said is not None and said["peak_bytes"] == pytest.approx([plan["stages"][0]["peak_bytes"]], rel=0.01)


def test_stages_keep_the_memory_that_is_planned(tmp_path: Path, capsys: Any) -> None:
    """Orders that are faster than 1F1B hold more micro-batches on all stages but the first: not where the limit is near."""
    words = ["--store", stored(tmp_path, collectives(2, 1e6))]
    plan = found(capsys, *words)["plans"][0]["plan"]
    assert len(plan["stages"]) == 2
    first, last = (stage["peak_bytes"] for stage in plan["stages"])
    assert execution_of(plan).stage_order == "auto"
    assert execution_of(plan | {"memory_limit": max(first, 2 * last)}).stage_order == "auto"
    assert execution_of(plan | {"memory_limit": max(first, 2 * last) - 1}).stage_order == "1f1b"
    one = plan | {"stages": plan["stages"][:1], "memory_limit": 1}
    assert execution_of(one).stage_order == "auto"


def test_options_of_a_host(tmp_path: Path, capsys: Any) -> None:
    assert run(["plan", "llama-tiny", "--cluster", "local-2", "--network", "lan", "--measure", "--global-batch", "8", "--seq", "64"]) == 1
    assert "--network and --measure: for --local, whose times were measured here" in capsys.readouterr().err
    file = tmp_path / "host.plan"
    assert run([*WORDS, "--store", stored(tmp_path, collectives(2, 1)), "-o", str(file)]) == 0
    assert run(["plan", str(file), "--local", "--measure"]) == 1
    capsys.readouterr()
    assert run(["plan", str(file), "--local", "--store", str(tmp_path / "store.sqlite"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plans"][0]["plan"]["step_us"] == pytest.approx(again["before_us"]) and again["here"]["measured"]
