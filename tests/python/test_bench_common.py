"""The timing that every benchmark rests on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import common


def test_paired_alternates_and_drops_the_warm_up():
    calls: list[str] = []
    times = common.paired(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=3,
        warmup=2,
        before_each=lambda: calls.append("."),
    )
    assert "".join(calls) == ".a.b.b.a" + ".a.b.b.a.a.b"
    assert [len(times["a"]), len(times["b"])] == [3, 3]


def test_ratio_is_taken_within_rounds(capsys, tmp_path):
    times = {"eager": [1.0, 10.0, 100.0], "ours": [0.5, 6.0, 50.0]}
    for _ in range(2):
        common.report("case", times, baseline="eager", json_path=str(tmp_path / "out.json"), ranks=2)
    records = json.loads((tmp_path / "out.json").read_text())
    assert len(records) == 2 and records[0]["ranks"] == 2
    assert records[0]["sides"]["ours"]["ratio"] == 0.5
    assert records[0]["sides"]["ours"]["ratio_q3"] == pytest.approx(0.55)
    assert "0.500 x eager   [0.500, 0.550]" in capsys.readouterr().out


def test_rounds_are_checked():
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        common.paired({"a": lambda: None}, rounds=0)
