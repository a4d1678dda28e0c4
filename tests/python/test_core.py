"""`_core`: programs, passes and errors as Python sees them; the passes themselves are tested in C++."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from interlace import _core

GOLDEN = Path(__file__).parents[1] / "golden" / "passes"
MLP = (GOLDEN / "mlp.il").read_text()


def test_text_survives_a_round() -> None:
    program = _core.Program.parse(MLP, "mlp.il")
    program.verify()
    assert program.print() == str(program) == MLP
    assert program.level == "captured"
    assert program.meta() == {"model": "mlp"}


def test_passes_change_the_program_in_place_and_a_clone_stays() -> None:
    program = _core.Program.parse(MLP)
    clone = program.clone()
    reports = program.run_passes("canonicalize,shard(ranks=2),update(clip=1.0)")
    assert [r["name"] for r in reports] == ["canonicalize", "shard(ranks=2)", "update(clip=1.0)"]
    assert all(r["changed"] and r["seconds"] >= 0 for r in reports)
    assert program.print() == (GOLDEN / "mlp.shard2.il").read_text()
    assert program.level == "scheduled" and program.mesh == {"dp": 2}
    assert clone.print() == MLP
    assert reports[-1]["ops"] == program.summary()["ops"]


def test_lists_name_what_the_program_declares() -> None:
    program = _core.Program.parse(MLP)
    program.run_passes("shard(ranks=2),accumulate(steps=3),update")
    up = program.params()[0]
    assert (up["name"], up["dtype"], up["shape"], up["strides"]) == ("up.weight", "f32", [8, 5], [5, 1])
    assert (up["trainable"], up["group"], up["unit"], up["unit_offset"], up["aliases"]) == (True, 0, 0, 0, [])
    assert program.params()[4]["group"] is None and not program.params()[4]["trainable"]
    assert program.units()[0] == {"id": 0, "axis": "dp", "replicas": "", "dtype": "f32", "numel": 64, "shard": 32, "part": 32}
    roles = {(s["unit"], s["role"]): s["persistent"] for s in program.states()}
    assert roles[0, "shard"] and roles[0, "exp_avg_sq"] and roles[1, "momentum"] and not roles[0, "grad"]
    assert (3, "grad") not in roles  # an unused parameter has no gradient
    assert [i["name"] for i in program.inputs()] == ["x"]
    assert program.groups() == [
        {"id": 0, "optimizer": "adamw", "rule": None, "factored": False}, {"id": 1, "optimizer": "sgd", "rule": None, "factored": False}
    ]  # fmt: skip
    assert program.accumulation == 3 and program.accumulate_mode == "reduce_each"


def test_consts_buffers_and_symbols() -> None:
    text = (
        'interlace 1 captured\nsymbol b 2 8\nstep 1 reduce_each\nbuffer %0: i64[] "count" persistent\n'
        'input %1: f32[b,3] "x"\n'
        'const %2: f32[2] "c" = [1.0, -0.5]\nphase micro_batch takes () gives () {\n}\n'
    )
    program = _core.Program.parse(text)
    assert program.consts()[0]["data"] == [1.0, -0.5]
    assert program.buffers()[0]["name"] == "count" and program.buffers()[0]["persistent"]
    assert program.inputs()[0]["shape"] == ["b", 3]
    assert program.symbols() == [{"name": "b", "min": 2, "max": 8}]
    bound = program.bind({"b": 4})
    assert bound.inputs()[0]["shape"] == [4, 3] and bound.symbols() == []
    assert program.inputs()[0]["shape"] == ["b", 3]
    with pytest.raises(_core.Error, match="'b' = 9 is out of its range 2 to 8"):
        program.bind({"b": 9})


def test_errors_are_value_errors_that_say_where() -> None:
    assert issubclass(_core.Error, ValueError)
    with pytest.raises(_core.Error, match=r"^mlp.il:\d+:\d+: "):
        _core.Program.parse(MLP.replace("aten.mm(%7", "aten.mm(%7 %7"), "mlp.il")
    program = _core.Program.parse(MLP)
    with pytest.raises(_core.Error, match="unknown pass 'shrad', did you mean 'shard'"):
        program.run_passes("shrad(ranks=2)")
    with pytest.raises(_core.Error, match="the program has no units"):
        program.run_passes("canonicalize,update")
    assert program.print() == MLP


def test_a_failing_pass_leaves_a_repro_file(tmp_path: Path) -> None:
    program = _core.Program.parse(MLP)
    with pytest.raises(_core.Error, match="run again with: interlace-opt"):
        program.run_passes("canonicalize,update", dump_dir=str(tmp_path / "dump"), repro=str(tmp_path / "repro.il"))
    first, rest = (tmp_path / "repro.il").read_text().split("\n", 1)
    assert first.startswith("# interlace-opt --verify '--passes=update' ")
    assert rest == (tmp_path / "dump" / "01-canonicalize.il").read_text()


def test_summary_counts_a_step() -> None:
    program = _core.Program.parse(MLP)
    program.run_passes("canonicalize,shard(ranks=2),update")
    summary = program.summary()
    assert summary["largest_unit"] == "u0" and summary["largest_unit_params"] == ["up.weight"]
    assert summary["placed_gradient_bytes"] == (40 + 40 + 8) * 4 and summary["copied_gradient_bytes"] == 0
    assert {p["name"] for p in summary["phases"]} == {"micro_batch", "update"}
    assert summary["activation_peak_bytes"] > 0
    assert "largest u0" in summary["text"]


def test_pass_table_and_digest() -> None:
    table = {p["name"]: p for p in _core.pass_table()}
    options = {o["name"]: o for o in table["shard"]["options"]}
    assert (
        options["axis"]["default"] == "dp"
        and options["wait"]["choices"] == ["next", "now"]
    )
    assert _core.digest(MLP) == hashlib.sha256(MLP.encode()).hexdigest()


def test_programs_of_several_threads_are_independent() -> None:
    results: list[str] = []

    def work() -> None:
        program = _core.Program.parse(MLP)
        program.run_passes("canonicalize,shard(ranks=2),update(clip=1.0)")
        results.append(program.print())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(GOLDEN / "mlp.shard2.il").read_text()] * 8
