"""Steps that are recorded: every op once a run of its phase, transfers on their lanes with their sizes, one clock, one file."""

from __future__ import annotations

import json
import pickle
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import chakra_decoder
import on_device
import pytest
import ranks
import torch

import interlace
from interlace import models
from interlace.errors import InterlaceError
from interlace.observe.step_trace import check_writable

_core = pytest.importorskip("interlace._core")
STREAMS = {"compute": 7, "gather": 16, "reduce": 17}  # src/trace/chrome_trace.h


def compiled(strategy: str, accumulation: int, rows: int = 1) -> tuple[Any, Any]:
    built = models.build("llama-tiny", micro_batch=rows * accumulation, seq=16)
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-4)
    config = interlace.Config(strategy=strategy, accumulation=accumulation, clip_norm=1.0)
    return interlace.compile(built.model, optimizer, built.loss_fn, built.example_batch, config), built.example_batch


def runs_of(program: Any) -> Counter[str]:
    """How often a step runs each kind of op, by the program's summary."""
    count: Counter[str] = Counter()
    for phase in program.summary()["phases"]:
        for kind, ops in phase["kinds"].items():
            count[kind] += ops * phase["repeats"]
    return count


def two_ranks(file: str, strategy: str) -> dict[str, Any]:
    trainer, batch = compiled(strategy, 2)
    with trainer:
        before = trainer.step(batch).item()
        traced = trainer.trace(batch, file, chakra=f"{file}.et", snapshot=f"{file}.pickle").item()
        after = trainer.step(batch).item()
        stats = trainer.stats()
        return {
            "file": file, "losses": [before, traced, after], "program": trainer.program, "steps": stats["steps"],
            "received": stats["bytes_received"], "peak": stats["peak_bytes"], "transfers": len(trainer._run.executor.record()["transfers"]),
        }  # fmt: skip


@pytest.fixture(scope="module", params=["shard", "replicate"])
def traced(request, tmp_path_factory) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    file = tmp_path_factory.mktemp("trace") / "step.json"
    found = ranks.run(two_ranks, 2, str(file), request.param)
    return found, json.loads(file.read_text()), file.read_text()


def events(trace: dict[str, Any], rank: int, stream: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank and e["tid"] == STREAMS[stream]]


def test_one_rank_every_op_once_a_run() -> None:
    trainer, batch = compiled("shard", 3)
    with trainer:
        executor = trainer._run.executor
        executor.set_trace("on")
        trainer.step(batch)
        record = executor.record()
        program = _core.Program.parse(trainer.program, "program")
        repeats = {phase["name"]: phase["repeats"] for phase in program.summary()["phases"]}
        assert repeats == {"micro_batch.first": 1, "micro_batch.middle": 1, "micro_batch.last": 1, "update": 1}
        assert len({(op, run) for op, run, *_ in record["samples"]}) == len(record["samples"])
        assert {run for _, run, *_ in record["samples"]} == {0, 1, 2, 3}
        assert len(record["samples"]) == executor.stats()["instructions"]
        inside = sum(seconds for _, _, seconds, *_ in record["samples"])
        assert 0 < inside <= record["seconds"]
        _core.testing.check_chrome_trace(executor.trace())
        executor.set_trace("off")
        trainer.step(batch)
        with pytest.raises(ValueError, match='call set_trace\\("on"\\)'):
            executor.trace()
        with pytest.raises(ValueError, match="did you mean"):
            executor.set_trace("seriel")


def test_file_is_a_trace_of_both_ranks(traced) -> None:
    _, trace, text = traced
    _core.testing.check_chrome_trace(text)
    assert trace["producer"] == "measured" and trace["distributedInfo"]["world_size"] == 2
    assert trace["distributedInfo"]["backend"] == ("tcp" if on_device.DEVICE == "cpu" else "native")
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1}
    for rank in (0, 1):
        assert events(trace, rank, "compute")
    begins = [min(e["ts"] for e in events(trace, rank, "compute")) for rank in (0, 1)]
    assert min(begins) >= 0 and abs(begins[0] - begins[1]) < 1e6, "the ranks' clocks are not one"


def test_collectives_are_on_their_lanes_with_their_sizes(traced) -> None:
    found, trace, _ = traced
    program = _core.Program.parse(found[0]["program"], "program")
    expected = runs_of(program)
    for rank in (0, 1):
        gathers, reduces = events(trace, rank, "gather"), events(trace, rank, "reduce")
        assert len([e for e in gathers if e["args"]["op"] == "gather.start"]) == expected["gather"] // 2
        assert len([e for e in reduces if e["args"]["op"] == "reduce.start"]) == expected["reduce"] // 2
        for event in gathers + reduces:
            arguments = event["args"]
            if arguments["op"] == "gather.start":
                assert arguments["Out msg nelems"] == 2 * arguments["In msg nelems"]
                assert arguments["bytes"] == 4 * arguments["In msg nelems"]
            elif arguments["op"] == "reduce.start":
                assert arguments["In msg nelems"] == 2 * arguments["Out msg nelems"]
                assert arguments["bytes"] == 4 * arguments["Out msg nelems"]
            assert arguments["Group size"] == 2 and arguments["dtype"] in ("Float", "Long")
        moved = sum(e["args"].get("bytes", 0) for e in gathers + reduces)
        assert moved * found[rank]["steps"] == found[rank]["received"]


def test_chakra_traces_have_the_measured_times(traced) -> None:
    found, trace, _ = traced
    for rank in (0, 1):
        metadata, nodes = chakra_decoder.read(Path(f"{found[0]['file']}.et/step.{rank}.et").read_bytes())
        assert metadata["attr"]["producer"] == ("string_val", "interlace, measured")
        assert metadata["attr"]["world_size"] == ("int64_val", 2)
        assert metadata["attr"]["ranks_are_alike"] == ("bool_val", False)
        seen = Counter((n["name"].split()[0], n["attr"]["duration_ns"][1]) for n in nodes)
        for lane in ("compute", "gather", "reduce"):
            for event in events(trace, rank, lane):
                op = event["args"]["op"]
                if op.startswith(("aten.mm", "gather.start", "reduce.start", "update.")):
                    seen[op, round(event["dur"] * 1e3)] -= 1
        left = {
            name
            for (name, _), count in seen.items()
            if count and name.startswith(("aten.mm", "gather.", "reduce.", "update."))
        }
        assert not left, "not in both traces"
        ids = {n["id"]: n for n in nodes}
        for node in nodes:
            assert all(before in ids and before < node["id"] for before in [*node["data_deps"], *node["ctrl_deps"]])


def test_the_memory_snapshot_is_read_by_torch(traced) -> None:
    from torch.cuda import _memory_viz as viz

    found, _, _ = traced
    snapshot = pickle.loads(Path(f"{found[0]['file']}.pickle").read_bytes())
    _core.testing.check_memory_snapshot(json.dumps(snapshot))
    assert "<html>" in viz.trace_plot(snapshot) and "total_reserved" in viz.segsum(snapshot)
    for rank in (0, 1):
        live = peak = 0
        times = []
        for entry in snapshot["device_traces"][rank]:
            live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
            peak = max(peak, live)
            times.append(entry["time_us"])
        assert times == sorted(times) and times[-1] > 0
        assert 0.9 * found[rank]["peak"] <= peak <= 1.1 * found[rank]["peak"]


def test_waits_follow_their_transfers(traced) -> None:
    _, trace, _ = traced
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    waits = [e for e in slices if e["cat"] == "cuda_sync"]
    assert waits and all(e["args"]["op"].endswith(".wait") for e in waits)
    for number, start in starts.items():
        assert start["pid"] == ends[number]["pid"] and start["tid"] in (16, 17) and ends[number]["tid"] == 7
        assert start["ts"] <= ends[number]["ts"]


def test_memory_counter_reaches_the_peak_of_the_step(traced) -> None:
    found, trace, _ = traced
    for rank in (0, 1):
        values = [e["args"]["value"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == rank]
        assert 0.9 * found[rank]["peak"] <= max(values) <= found[rank]["peak"]


def test_tracing_changes_nothing(traced) -> None:
    found, _, _ = traced
    assert all(f["losses"][0] > f["losses"][1] > f["losses"][2] for f in found)
    plain = ranks.run(untraced, 2, "shard" if "gather.start" in found[0]["program"].split("update")[0] else "replicate")
    assert [f["losses"] for f in found] == plain


def untraced(strategy: str) -> list[float]:
    trainer, batch = compiled(strategy, 2)
    with trainer:
        return [trainer.step(batch).item() for _ in range(3)]


def on_a_full_disk(file: str) -> tuple[str, int, list[float]]:
    """A file-size limit on rank 0 alone stands for its full disk."""
    trainer, batch = compiled("shard", 1)
    with trainer:
        if trainer.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        text = ""
        try:
            trainer.trace(batch, file)
        except InterlaceError as e:
            text = str(e)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        steps = trainer.steps
        trainer.step(batch)
        trainer.trace(batch, file)
        return text, steps, [t.item() for t in trainer.outputs["loss"]]


def test_a_trace_on_a_full_disk_costs_the_trace_alone(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    for text, steps, losses in ranks.run(on_a_full_disk, 2, str(file)):
        assert text == f"cannot write the trace {file}: File too large" and steps == 1 and losses[0] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    _core.testing.check_chrome_trace(file.read_text())


def test_a_file_that_cannot_be_written_is_named_before_the_step(tmp_path: Path) -> None:
    trainer, batch = compiled("shard", 1)
    with trainer:
        with pytest.raises(InterlaceError, match="there is no folder"):
            trainer.trace(batch, tmp_path / "none" / "step.json")
        with pytest.raises(InterlaceError, match="it is a folder"):
            trainer.trace(batch, tmp_path)
        assert trainer.steps == 0
        trainer.trace(batch, tmp_path / "step.json")
        assert trainer.steps == 1 and (tmp_path / "step.json").exists()
    assert check_writable(tmp_path / "step.json") is None
