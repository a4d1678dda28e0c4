"""Tables of measured runs, and the constants that explain them: `interlace calibrate`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from interlace import _core
from interlace.calibrate.crossed import error_of, quantile
from interlace.calibrate.fit import fit, interval_error
from interlace.calibrate.predict import Predictor, cluster_text, value_of, with_constants
from interlace.calibrate.runs import Run, read_runs
from interlace.cli.app import run as command
from interlace.errors import InterlaceError

COLUMNS = "hidden_size,attention_heads,num_layers,seq_len,micro_batch,global_batch,gpus,gpu,tp,pp,zero,stack,step_ms\n"
ROW = "512,4,4,{seq},{b},{batch},{gpus},h100-80gb,1,1,3,eager,{ms}\n"


def table(folder: Path, *rows: str, columns: str = COLUMNS) -> Path:
    file = folder / "runs.csv"
    file.write_text(columns + "".join(rows))
    return file


def row(seq: int = 1024, b: int = 8, batch: int = 64, gpus: int = 8, ms: float = 10.0) -> str:
    return ROW.format(seq=seq, b=b, batch=batch, gpus=gpus, ms=ms)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Runs whose times are then made up from constants."""
    sizes = [(1024, 8, 64, 8), (1024, 64, 512, 8), (4096, 16, 128, 8), (16384, 8, 64, 8), (512, 1, 8, 8), (2048, 32, 512, 16),
             (2048, 1, 32, 32), (8192, 8, 256, 32)]  # fmt: skip
    file = table(tmp_path_factory.mktemp("runs"), *(row(seq, b, batch, gpus) for seq, b, batch, gpus in sizes))
    return read_runs(file)


TRUTH = {"products": 0.61, "attention": 0.44, "memory": 0.9, "issue_us": 14.0, "issue_backward": 0.6, "inter": 0.8}


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor()


@pytest.fixture(scope="module")
def made(shapes: list[Run], predictor: Predictor) -> list[Run]:
    return [dataclasses.replace(run, step_us=predictor.predict(run, TRUTH)[0]) for run in shapes]


def test_columns_of_published_tables(tmp_path: Path) -> None:
    header = (
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,data parallelism,"
        "pipeline parallelism,iteration time (ms)\n"
    )
    run = read_runs(table(tmp_path, "8,16,4,1024,16,24,1024,2,2,2,374.5\n", columns=header))[0]
    assert (run.gpu, run.gpus, run.stack, run.flash) == ("a100-80gb", 8, "megatron", False)
    assert (run.tp, run.dp, run.pp, run.micro_batch, run.accumulation, run.step_us) == (2, 2, 2, 4, 2, 374500.0)

    header = (
        "section,model,seq_len,gpus,gpu_type,micro_batch,grad_accum,global_batch,tokens_per_s,global_batch_tokens,mp_mode,sharding,"
        "activation_checkpointing,num_params\n"
    )
    cells = '"A100 with 1600 Gbps",7b,2048,16,a100_40gb,16,1,256,58322,524288,PURE,FULL_SHARD,True,6658859008\n'
    run = read_runs(table(tmp_path, cells, columns=header))[0]
    assert (run.hidden, run.layers, run.zero, run.recompute, run.gpu) == (4096, 32, 3, "full", "a100-40gb")
    assert run.step_us == pytest.approx(524288 / 58322 * 1e6)
    assert run.inter_gb_per_s == pytest.approx(0.92 * 200)


@pytest.mark.parametrize(
    ("columns", "cells", "said"),
    [
        (COLUMNS.replace("step_ms", "step"), row(), "does not say how long a step took: a column step_ms or"),
        (COLUMNS.replace("gpu,", "card,"), row(), "does not say which GPUs: a column gpu is missing"),
        (COLUMNS.replace("tp", "dp"), row().replace(",1,1,3", ",4,1,3"), "dp 4 * tp 1 * pp 1 is 4, gpus says 8"),
        (COLUMNS.replace("zero", "seq"), row(), "the columns 'seq_len' and 'seq' say the same"),
        (COLUMNS, row(batch=60), "micro_batch 8 * accumulation 1 * dp 8 is 64, global_batch says 60"),
        (COLUMNS, row().replace(",10.0", ",fast"), "step_ms is 'fast', not a number"),
        (COLUMNS, row().replace("h100-80gb", "h10-80gb"), "no preset for 'h10-80gb'; did you mean 'h100-80gb'?"),
        (COLUMNS, row().replace(",4,4,", ",5,4,"), "5 heads do not divide a hidden size of 512"),
        (COLUMNS, row().replace(",8,64,", ",8.5,64,"), "micro_batch is 8.5; it must be a whole number"),
        (COLUMNS.replace("step_ms", "step_ms,step_s"), row().replace("10.0", "10.0,0.02"), "10.0 ms by step_ms and 20.0 ms by step_s"),
        (COLUMNS, "1,2\n", "2 cells, the table has 13 columns"),
        (COLUMNS, "", "has no runs"),
    ],
)  # fmt: skip
def test_a_bad_table_is_refused(tmp_path: Path, columns: str, cells: str, said: str) -> None:
    with pytest.raises(InterlaceError) as refused:
        read_runs(table(tmp_path, cells, columns=columns))
    assert said in str(refused.value)


def test_constants_in_a_cluster_file() -> None:
    text = with_constants(_core.preset_cluster("h100-80gb-16:eager"), "eager", {"products": 0.5, "inter": 0.5})
    assert value_of(text, "step.eager", "products") == 0.5
    assert value_of(text, "step.compiled", "products") != 0.5
    assert value_of(text, "inter", "gb_per_s") == pytest.approx(319 / 2)
    assert _core.cluster_devices(text) == 16
    with pytest.raises(_core.Error, match="'products' is outside of what is possible"):
        _core.cluster_devices(with_constants(text, "eager", {"products": 1.5}))


def test_constants_are_found_again(made: list[Run], predictor: Predictor) -> None:
    found = fit(made, predictor)
    assert found.constants["issue_us"] == pytest.approx(TRUTH["issue_us"], rel=0.15)
    for name, value in TRUTH.items():  # products and memory go together in steps of large products
        assert abs(math.log(found.constants[name] / value)) < 2.5 * found.spread[name], name
    assert max(abs(r) for r in found.residuals) < 0.05
    assert not found.outliers(made)


def test_two_runs_halve_the_error_of_the_others(made: list[Run], predictor: Predictor) -> None:
    def error(runs: list[Run], constants: dict[str, float]) -> float:
        return sum(abs(math.log(predictor.predict(run, constants)[0] / run.step_us)) for run in runs) / len(runs)

    found = fit([made[1], made[4]], predictor)
    others = [run for i, run in enumerate(made) if i not in (1, 4)]
    assert error(others, found.constants) < 0.5 * error(others, {})
    inside = [abs(math.log(run.step_us / predictor.predict(run, found.constants)[0])) < 2 * interval_error(run, found, predictor, found.noise)
              for run in others]  # fmt: skip
    assert all(inside)


def test_one_run_says_what_it_determines(made: list[Run], predictor: Predictor) -> None:
    found = fit([made[4]], predictor)  # one sample of 512 tokens: launches
    assert "issue_us" not in found.undetermined
    assert {"products", "attention"} <= set(found.undetermined)
    assert found.constants["attention"] == pytest.approx(
        value_of(cluster_text(made[4]), "step.eager", "attention") or 0, rel=0.05
    )


def said_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[Run], *options: str) -> str:
    cells = [row(r.seq, r.micro_batch, r.global_batch, r.gpus, r.step_us / 1e3) for r in runs]
    assert command(["calibrate", "--runs", str(table(tmp_path, *cells)), *options]) == 0
    return capsys.readouterr().out


def test_an_outlier_is_named_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: list[Run]) -> None:
    wrong = [*made[:6], dataclasses.replace(made[6], step_us=5 * made[6].step_us), made[7]]
    said = said_of(tmp_path, capsys, wrong)
    assert "line 8 is explained by no constant" in said
    assert "--leave-out 8 leaves it out" in said
    assert "explained by no constant" not in said_of(tmp_path, capsys, wrong, "--leave-out", "8")


def test_the_cluster_file_predicts_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: list[Run]) -> None:
    file = tmp_path / "mine.toml"
    said = said_of(tmp_path, capsys, made[:2], "-o", str(file))
    assert "not determined by these runs" in said
    assert "would tell it within" in said
    checked = json.loads(said_of(tmp_path, capsys, made[:2], "--check", "--cluster", str(file), "--json"))
    assert checked["worst"] < 0.05
    before = json.loads(said_of(tmp_path, capsys, made[:2], "--check", "--json"))
    assert before["worst"] > 2 * checked["worst"]


def test_what_contradicts_itself_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: list[Run]) -> None:
    said = said_of(tmp_path, capsys, [made[0], dataclasses.replace(made[0], step_us=2 * made[0].step_us)])
    assert "lines 2 and 3 say the same of themselves and took" in said


def test_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_all_reduce.csv"
    file.write_text("Nodes,GPUs,size(MB),out algbw(GB/s),in algbw(GB/s)\n8,64,8192,180.5,179.6\n16,128,8192,179.5,178.4\n")
    assert command(["calibrate", "--runs", str(file), "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean"] < 0.1
    one = ["simulate", "--collective", "all_reduce", "--bytes", "1GiB", "--ranks", "256", "--cluster", "h100-80gb-256"]
    assert command([*one, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["algorithm"] == "tree"
    assert found["low_us"] < found["us"] < found["high_us"]
    assert command(one) == 0
    assert "over 256 ranks on 32 nodes" in capsys.readouterr().out


def test_megatron_fuses_softmax_of_score_matrices_in_fours(tmp_path: Path, predictor: Predictor) -> None:
    columns = (
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,data parallelism"
    )
    table = tmp_path / "runs.csv"
    table.write_text(
        f"{columns},pipeline parallelism,iteration time (ms)\n8,4,1,1024,16,12,1024,8,1,1,100\n8,8,2,1024,16,12,1024,8,1,1,100\n"
    )
    two, four = read_runs(table)  # of two heads a rank: two matrices, which go op by op, and four
    assert predictor.predict(two)[0] > 1.03 * predictor.predict(four)[0]


def test_megatron_runs_the_whole_forward_again(predictor: Predictor, shapes: list[Run]) -> None:
    run = dataclasses.replace(shapes[0], gpu="a100-80gb", hidden=4096, heads=32, layers=32, zero=0, flash=False, micro_batch=4)
    us = {(stack, kind): predictor.predict(dataclasses.replace(run, stack=stack, recompute=kind))[0]
          for stack in ("megatron", "eager") for kind in ("none", "selective", "full")}  # fmt: skip
    assert 1.25 < us["megatron", "full"] / us["megatron", "none"] < 1.37  # a third of forward and backward, less head and update
    assert us["eager", "full"] / us["eager", "none"] < us["megatron", "full"] / us["megatron", "none"]
    assert us["eager", "selective"] / us["eager", "none"] > us["megatron", "selective"] / us["megatron", "none"]  # half of the products


def test_parts_of_stages_fill_a_pipeline_sooner(predictor: Predictor, shapes: list[Run]) -> None:
    run = dataclasses.replace(shapes[0], pp=2, dp=1, gpus=2, accumulation=3)
    once, parts = (predictor.predict(dataclasses.replace(run, interleave=v))[0] for v in (1, 2))
    assert parts / once == pytest.approx(3.5 / 4)


def test_a_run_that_cannot_be_predicted_is_named(predictor: Predictor, shapes: list[Run]) -> None:
    with pytest.raises(InterlaceError, match=r"line 2 is no run that can be predicted: .*multiple of 8"):
        predictor.predict(dataclasses.replace(shapes[0], gpus=12, dp=12))


def test_interval_of_runs_left_out() -> None:
    assert quantile([0.1] * 9 + [0.3]) == 0.1  # the ninth of ten
    assert quantile([0.1, -0.2]) == 0.2  # too few: the largest
    few, many = {1: [0.1], 2: [0.1]}, {group: [0.1] for group in range(20)}
    assert error_of(few, False) > error_of(many, False) == pytest.approx(0.1 / 1.2816)
    assert (
        error_of({group: [0.001] for group in range(20)}, True) == 0.05
    )  # never below what one model's constants are off on others
