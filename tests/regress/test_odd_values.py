"""Values that a file should not hold, each of which a reader once took or broke on (found by tests/python/mutated_files.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from interlace.calibrate.runs import read_runs
from interlace.checkpoint.contents import check_hyper
from interlace.cost.store import Store, StoreError, _sum
from interlace.data import text, tokens
from interlace.data.text import DataError
from interlace.errors import InterlaceError
from interlace.regions import kept
from interlace.report.run_log import LogError, read_log

HUGE = "1" + 400 * "0"


def test_half_of_a_character(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(DataError, match="line 2: 'text' holds half of a character"):
        list(text.read_documents(tmp_path / "x.jsonl"))


def test_a_figure_that_no_float_holds() -> None:
    with pytest.raises(LogError, match="log:1 is no line of a run's log"):
        read_log(f'{{"step": 1, "loss": {HUGE}}}\n', "log")


def test_a_count_that_is_infinite(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("model,gpu,gpus,micro_batch,global_batch,seq,step_ms\ngpt2,a100-40gb,8,4,1e999,1024,250\n")
    with pytest.raises(InterlaceError, match="global_batch is '1e999', not a number"):
        read_runs(tmp_path / "runs.csv")


def test_a_count_of_tokens_that_is_infinite(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n")
    found = tokens.prepare_tokens(text.find_text(tmp_path / "text.txt"), tmp_path / "cache")
    note = found.path.with_suffix(".json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "count": float("inf")}))
    again = tokens.prepare_tokens(text.find_text(tmp_path / "text.txt"), tmp_path / "cache")
    assert again.count == found.count


def test_a_measurement_that_no_float_holds(tmp_path: Path) -> None:
    with Store(tmp_path / "p.sqlite") as store:
        store.put("m", {("op", "a"): {"us": 1.0}})
        value = f'{{"us": {HUGE}}}'
        store._db.execute("update measurements set value = ?, sum = ?", (value, _sum("m", "op", "a", value)))
        with pytest.raises(StoreError, match="was damaged or edited: the op 'a' is no measurement"):
            store.rows("m")


def test_ids_with_gaps_are_inside_of_the_vocabulary(tmp_path: Path) -> None:
    inner = json.loads(tokens.Tokenizer.byte().inner.to_str())
    inner["model"]["vocab"]["A"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    found = tokens.Tokenizer.load(tmp_path / "tokenizer.json")
    assert found.vocab_size == 5001 > max(found.encode(["BA"])[0])
    inner["model"]["vocab"]["A"] = 1 << 30
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    with pytest.raises(DataError, match="the tokenizer has an id 1073741824; more than 16777216 entries are taken for a mistake"):
        tokens.Tokenizer.load(tmp_path / "tokenizer.json")


def test_what_is_noted_of_regions_has_the_digest_too(tmp_path: Path) -> None:
    said: list[str] = []
    kept.put(tmp_path / "x.so", "key", {"a": 1}, b"library")
    assert kept.read(tmp_path / "x.so", "key", said.append) == {"a": 1}
    note = tmp_path / "x.json"
    note.write_text(note.read_text().replace('"a": 1', '"a": 2'))
    assert kept.read(tmp_path / "x.so", "key", said.append) is None
    assert len(said) == 1 and "its digest is not the noted one" in said[0]


def test_hyper_parameters_beyond_a_float() -> None:
    with pytest.raises(InterlaceError, match="'lr' of group 0"):
        check_hyper("c", 0, {"lr": float("inf")}, {"lr": 0.1})
