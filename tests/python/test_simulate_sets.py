"""Pipelines simulated: every moment of every stage has a cause, ranks that are alike are one, whatever the check accepts runs to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
import stage_texts
from stage_texts import Net
from test_runtime_stages import CASES, checked, random_set, set_of

from interlace import _core


def simulated(texts: list[str], cluster: str, **options: Any) -> dict[str, Any]:
    found = json.loads(_core.simulate_set(set_of(texts), cluster, **options))
    for stage in found["stages"]:
        total = stage["compute_us"] + stage["optimizer_us"] + sum(stage["bubble_us"].values())
        assert total == pytest.approx(found["step_us"], rel=1e-9)
        assert stage["bubble"] == pytest.approx(sum(stage["bubble_us"].values()) / found["step_us"], rel=1e-6)
    assert sum(piece["us"] for piece in found["critical_path"]) == pytest.approx(found["step_us"], rel=1e-9)
    return found


@pytest.mark.parametrize("cluster", ["h100-80gb-{}", "local-{}"])
@pytest.mark.parametrize("seed", range(12))
def test_what_the_check_accepts_ends(seed: int, cluster: str) -> None:
    stages, net, order = random_set(seed)
    texts = stage_texts.texts(net, stages, order)
    found = simulated(texts, cluster.format(stages))
    assert found["simulated_ranks"] == stages
    _core.testing.check_chrome_trace(_core.simulate_set(set_of(texts), cluster.format(stages), output="trace"))


@pytest.mark.parametrize("cluster", ["h100-80gb-{}", "local-{}"])
@pytest.mark.parametrize("case", CASES)
def test_one_rank_of_a_stage_stands_for_all(case: str, cluster: str) -> None:
    stages, net, order = CASES[case]
    texts = checked(net, stages, order(net, stages), dp=2)
    one, all_ = (simulated(texts, cluster.format(2 * stages), every_rank=every) for every in (False, True))
    assert (one["simulated_ranks"], all_["simulated_ranks"]) == (stages, 2 * stages)
    assert one["step_us"] == all_["step_us"]
    assert one["stages"] == all_["stages"]


def test_orders_differ_as_they_should() -> None:
    """1F1B holds less than GPipe, interleaving fills sooner, and gradients of weights fill what is idle."""
    split = Net(4, 8, split=True, hold=4)
    found = {
        name: simulated(checked(net, 4, order(net, 4)), "local-4")
        for name, net, order in (
            ("gpipe", Net(4, 8), stage_texts.gpipe),
            ("1f1b", Net(4, 8), stage_texts.one_f_one_b),
            ("split", split, stage_texts.one_f_one_b),
        )
    }
    for a, b in zip(found["1f1b"]["stages"], found["gpipe"]["stages"], strict=True):
        assert a["peak_bytes"] < b["peak_bytes"]
    idle = {name: sum(sum(s["bubble_us"].values()) for s in f["stages"]) for name, f in found.items()}
    assert idle["split"] < idle["1f1b"]


def test_errors() -> None:
    net = Net(2, 2)
    texts = stage_texts.texts(net, 2, stage_texts.gpipe(net, 2))
    with pytest.raises(_core.Error, match=r"stage0\.il: the program's mesh has 2 ranks, the cluster 'local-1' has 1 device"):
        _core.simulate_set(set_of(texts), "local-1")
    with pytest.raises(_core.Error, match="axis pp has 2 ranks, but the set has 1 stage"):
        _core.simulate_set(set_of(texts[:1]), "local-2")
    with pytest.raises(_core.Error, match="unknown output 'sumary', did you mean 'summary'"):
        _core.simulate_set(set_of(texts), "local-2", output="sumary")


def test_stages_of_other_ranks_from_the_command_line(tmp_path: Path) -> None:
    text = str(tmp_path / "l.il")
    assert commands.run("capture", "--model", "llama-tiny", "-o", text).returncode == 0
    common = ["simulate", text, "--accumulation", "4", "--cluster", "h100-80gb-3", "--json"]
    done = commands.run(*common, "--mesh", "pp=2,dp=1,tp=2+1")
    assert done.returncode == 0 and len(json.loads(done.stdout)["stages"]) == 2, done.stderr
    done = commands.run(*common, "--mesh", "pp=2,dp=1+2")
    assert done.returncode != 0 and "stages of unlike dp have micro-batches of other rows" in done.stderr


def test_a_pipeline_that_was_trained(tmp_path: Path) -> None:
    """Its programs and its trace: predicted over measured, the memory that its ranks took, and what to do with a part of them."""
    words = ["--model", "llama-tiny", "--mesh", "pp=2", "--ranks", "2", "--accumulation", "2", "--batch", "4", "--seq", "32", "--steps", "3"]
    program, trace, page = (str(tmp_path / name) for name in ("last.il", "step.json", "page.html"))
    done = commands.run("train", *words, "--program", program, "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)["peak_bytes"]
    done = commands.run("simulate", program, "--cluster", "local-2", "--json")
    assert done.returncode == 0, done.stderr
    assert max(stage["taken_bytes"] for stage in json.loads(done.stdout)["stages"]) == pytest.approx(took, rel=0.01)
    done = commands.run("report", program, "--cluster", "local-2", "--measured", trace, "-o", page)
    assert done.returncode == 0, done.stderr
    text = Path(page).read_text()
    assert "predicted over measured" in text and "Measured step" in text
    second = str(tmp_path / "last-1.il")
    assert "name the program of its first stage" in commands.run("simulate", second, "--cluster", "local-2").stderr
    assert "the captured program has the same ops" in commands.run("profile", "--program", program, "--ranks", "2").stderr
    Path(second).unlink()
    assert "there is no " in commands.run("simulate", program, "--cluster", "local-2").stderr
