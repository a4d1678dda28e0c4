"""`interlace plan`: what it finds, checks, refuses and hands on."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest

from interlace import _core
from interlace.cli.app import run
from interlace.errors import InterlaceError
from interlace.models import config_of
from interlace.plan import layers as plan_layers
from interlace.plan.execute import PlanError, execution_of, read_plan, spread
from interlace.plan.export import deepspeed, megatron, torchtitan

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SMALL = ["llama-tiny", "--seq", "64", "--dtype", "float32"]


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """A model is traced once for all commands here (seconds each); test_plan_layers has the tests of the tracing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_layers, "model_text", functools.cache(plan_layers.model_text))
        yield


@pytest.fixture
def cli(capsys):
    """The exit code and what was written, of a command in this process."""

    def call(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A plan that the runtime can carry out."""
    file = tmp_path_factory.mktemp("plan") / "here.plan"
    words = ["plan", *SMALL, "--cluster", "local-2", "--global-batch", "8", "--runnable", "--no-why", "-o", str(file)]
    assert run(words) == 0
    return file


def edited(file: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    text = file.read_text()
    for old, new in changes:
        assert re.search(old, text), old
        text = re.sub(old, new, text)
    out = folder / "edited.plan"
    out.write_text(text)
    return out


# ---- models ----


def test_models_to_plan_for_have_their_published_sizes():
    assert (config_of("gpt-22b").n_embd, config_of("gpt-22b").n_layer, config_of("gpt-22b").n_head) == (6144, 48, 64)
    assert config_of("llama-6.7b").intermediate_size == 11008
    assert config_of("falcon-13b").num_kv_heads == 40
    assert config_of("llama-3-405b").hidden_size == 16384
    assert config_of("mixtral").num_local_experts == 8
    assert config_of("gpt-1.3b", seq=16384).n_positions == 16384


def test_unknown_models_and_keys_are_named(tmp_path, cli):
    with pytest.raises(InterlaceError, match=r"unknown model 'gpt-22': .* did you mean gpt-22b"):
        config_of("gpt-22")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"num_hidden_layer": 40, "frobnicate": 1}))
    with pytest.raises(
        InterlaceError, match=r"no 'num_hidden_layer' \(did you mean 'num_hidden_layers'\?\), 'frobnicate'"
    ):
        config_of(str(file))
    code, _, said = cli("plan", str(file), "--cluster", "local-2", "--global-batch", "8", "--seq", "64")
    assert code == 1 and "--ignore-key num_hidden_layer --ignore-key frobnicate" in said
    assert config_of(str(file), ignore=("num_hidden_layer", "frobnicate")).num_hidden_layers == 4
    for change, words in (
        ({"hidden_size": "big"}, "expected int, got str"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
    ):
        file.write_text(json.dumps(LLAMA | change))
        with pytest.raises(InterlaceError, match=f"transformers refuses this llama config: .*{words}"):
            config_of(str(file))
    for words in ("{", "[1]", '{"model_type": "lama"}', '{"model_type": "vit"}'):
        file.write_text(words)
        with pytest.raises(InterlaceError, match=r"config|model type"):
            config_of(str(file))


# ---- finding ----


def test_a_plan_has_its_reasons(cli):
    words = ["plan", *SMALL, "--cluster", "l4-24gb-4", "--global-batch", "16"]
    code, text, _ = cli(*words)
    assert code == 0
    for part in ("samples/s", "Stages", "MiB of a device at its peak", "Why not", "like megatron", "like deepspeed"):
        assert part in text
    code, text, _ = cli(*words, "--json", "--top-k", "2")
    found = json.loads(text)
    assert code == 0 and len(found["plans"]) == 2 and found["complete"]
    best = found["plans"][0]["plan"]
    assert all(row["step_us"] >= best["step_us"] * (1 - 1e-9) for row in found["why_not"] if "step_us" in row)
    for each in found["plans"]:
        stages, explained = each["plan"]["stages"], each["explained"]
        for stage, why in zip(stages, explained, strict=True):
            assert sum(entry["device"] for entry in why["bytes"]) == stage["peak_bytes"] <= each["plan"]["memory_limit"]
            assert sum(entry["host"] for entry in why["bytes"]) == stage["host_bytes"]
            phases = {phase["name"]: phase["total_us"] for phase in why["phases"]}
            assert phases["forward"] + phases["backward"] == pytest.approx(stage["t_us"])


def test_a_plan_file_is_predicted_anew(cli, tmp_path):
    file = tmp_path / "four.plan"
    code, _, _ = cli("plan", *SMALL, "--cluster", "l4-24gb-4", "--global-batch", "16", "--no-why", "-o", str(file))
    assert code == 0
    again = tmp_path / "again.plan"
    code, text, _ = cli("plan", str(file), "-o", str(again))
    assert code == 0 and "keeps its rules" in text and "MiB of a device at its peak" in text
    first, second = read_plan(str(file)), read_plan(str(again))
    assert second["stages"] == first["stages"]
    assert second["step_us"] == pytest.approx(first["step_us"])
    explained = json.loads(cli("plan", str(file), "--json")[1])["plans"][0]["explained"]
    for stage, why in zip(second["stages"], explained, strict=True):
        assert sum(entry["device"] for entry in why["bytes"]) == stage["peak_bytes"]


def test_a_plan_of_before_begins_the_search(cli, tmp_path):
    file = tmp_path / "before.plan"
    words = ["plan", *SMALL, "--cluster", "l4-24gb-4", "--no-why", "--global-batch"]
    assert cli(*words, "16", "-o", str(file))[0] == 0
    cold = json.loads(cli(*words, "8", "--json")[1])
    warm = json.loads(cli(*words, "8", "--json", "--from", str(file))[1])
    best = cold["plans"][0]["plan"]["step_us"]
    assert warm["plans"][0]["plan"]["step_us"] == pytest.approx(best, rel=1e-8)
    assert warm["from_us"] >= best * (1 - 1e-8) and "from_us" not in cold
    assert f"begun with {file}: the best on its stages takes" in cli(*words, "8", "--from", str(file))[1]
    bad = edited(file, tmp_path, ("global_batch 16", "global_batch 17"))
    code, _, said = cli(*words, "8", "--from", str(bad))
    assert code == 1 and "stage 0 (line 17), rule batch: " in said
    code, _, said = cli("plan", str(file), "--from", str(file))
    assert code == 1 and "is a plan: leave --from out, or name the model" in said


def test_a_config_json_is_planned(cli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"frobnicate": 1}))
    words = ["--cluster", "local-2", "--global-batch", "8", "--seq", "64", "--dtype", "float32", "--no-why", "--json"]
    code, text, _ = cli("plan", str(tmp_path), *words, "--ignore-key", "frobnicate")
    named = json.loads(cli("plan", *SMALL, *words[:4], "--no-why", "--json")[1])["plans"][0]["plan"]
    plan = json.loads(text)["plans"][0]["plan"]
    assert code == 0 and (plan["blocks"], plan["model"]) == (4, str(tmp_path))
    assert plan["stages"] == named["stages"]  # the preset has the same sizes


# ---- bad input ----


def test_a_batch_that_nothing_divides(cli):
    code, _, said = cli("plan", *SMALL, "--cluster", "local-32", "--global-batch", "7", "--runnable")
    assert code == 1 and "divide a batch of 7 on 32 devices; take a batch of 8" in said


def test_uneven_nodes_are_refused_by_name(cli, tmp_path):
    text = _core.preset_cluster("l4-24gb-16")
    file = tmp_path / "uneven.toml"
    file.write_text(re.sub(r"devices = \d+", "devices = 12", text, count=1))
    code, _, said = cli("plan", *SMALL, "--cluster", str(file), "--global-batch", "8")
    assert code == 1 and re.search(
        r"uneven\.toml:\d+:\d+: devices must fill whole nodes: not a multiple of per_node = 8", said
    )
    code, _, said = cli("plan", *SMALL, "--cluster", "l4-24gb-12", "--global-batch", "8")
    assert code == 1 and "'l4-24gb-12' does not fill nodes of 8 devices; take a multiple of 8" in said


def test_what_does_not_fit_says_by_how_much_and_what_would(cli):
    words = ["plan", *SMALL, "--cluster", "l4-24gb-2", "--global-batch", "64", "--memory-limit", "1MiB"]
    code, text, said = cli(*words, "--json")
    assert code == 1 and re.search(r"needs least takes [\d.]+ MiB of a device, [\d.]+ .iB more than the 1.00 MiB", said)
    why = json.loads(text)["nothing_fits"]
    assert why["over_bytes"] == why["least_bytes"] - 2**20 > 0
    assert "what would fit:" in said
    # What is named does fit.
    words[words.index("1MiB")] = str(why["least_bytes"])
    assert cli(*words, "--no-why")[0] == 0
    words[words.index(str(why["least_bytes"]))] = str(why["least_bytes"] - 4096)
    assert cli(*words, "--no-why")[0] == 1


def test_more_devices_that_are_named_do_fit(cli):
    words = ["plan", *SMALL, "--cluster", "l4-24gb-2", "--global-batch", "64", "--no-why", "--space", "megatron"]
    limit = ["--memory-limit", "4MiB"]
    code, text, said = cli(*words, *limit, "--json")
    assert code == 1
    why = json.loads(text)["nothing_fits"]
    assert f"{why['devices']} devices of the same kind" in said
    words[words.index("l4-24gb-2")] = f"l4-24gb-{why['devices']}"
    assert cli(*words, *limit)[0] == 0


def test_host_memory_that_is_named_does_fit(cli):
    words = ["plan", *SMALL, "--cluster", "l4-24gb-2", "--global-batch", "64", "--no-why", "--memory-limit", "4MiB"]
    code, text, said = cli(*words, "--host-memory", "1MiB", "--json")
    needed = json.loads(text)["nothing_fits"]["host_memory"]
    assert code == 1 and "of host memory a node (--host-memory)" in said and needed > 2**20
    assert cli(*words, "--host-memory", str(needed))[0] == 0


def test_a_short_time_limit_gives_the_best_so_far_and_its_gap(cli):
    words = ["gpt-22b", "--cluster", "l4-24gb-32", "--global-batch", "512", "--seq", "2048", "--no-why"]
    code, text, _ = cli("plan", *words, "--time-limit", "0.001", "--json")
    found = json.loads(text)
    plan = found["plans"][0]["plan"]
    assert code == 0 and not found["complete"]
    assert 0 < plan["gap"] < 1 and plan["bound_us"] < plan["step_us"]
    assert max(stage["peak_bytes"] for stage in plan["stages"]) <= plan["memory_limit"]


def test_an_edited_plan_names_the_stage_and_the_rule(cli, planned, tmp_path):
    cases = [
        (("micro_batch (\\d+)", "micro_batch 7"), "stage 0 (line 17), rule batch: "),
        (("layers 4", "layers 5"), "rule layers: the stages hold 5 blocks, the model has 4"),
        (("states 0", "states 2"), "stage 0 (line 17), rule offload: states 2 is not a share"),
        (("devices 0..1", "devices 0..2"), "stage 0 (line 17), rule devices: "),
        (("blocks 4", "blocks 4\nnonsense 1"), "unknown line 'nonsense'"),
        (('cluster "local-2"', 'cluster "local-2"\ncluster "x"'), "'cluster' is given twice"),
        (
            ('cluster "local-2"', 'cluster "local-4"'),
            "rule cluster: the plan is for 2 devices, 2 a node; local-4 has 4",
        ),
        (('model ".*"', 'model "llama-tini"'), "did you mean llama-tiny"),
        (("sequence \\d+", "sequence 1099511627776"), "the model takes sequences of 2 to "),
        (("(?s)blocks 4(.*)layers 4", "blocks 40\\1layers 40"), "the plan is for 40 blocks, the model has 4"),
        (
            ('(?s)cluster "local-2"(.*)memory_limit \\d+', f'cluster "l4-24gb-2"\\1memory_limit {1 << 50}'),
            "rule memory: memory_limit 1125899906842624 is above the ",
        ),
        (("interlace-plan 1", "interlace-plam 1"), "not a plan: the first line must be 'interlace-plan 1'"),
    ]
    for change, expected in cases:
        code, _, said = cli("plan", str(edited(planned, tmp_path, change)))
        assert code == 1 and expected in said, said
    # Memory that the file itself does not know of: counted anew on the model.
    small = edited(
        planned, tmp_path, ("memory_limit \\d+", "memory_limit 9000000"), ("peak_(for|back)ward \\d+", "peak_\\1ward 1")
    )
    code, _, said = cli("plan", str(small))
    assert code == 1 and re.search(r"stage 0 \(line 17\), rule memory: its predicted peak of \d+ bytes", said), said
    for words in ("", "interlace-plan 9\n", "\0" * 99):
        (tmp_path / "bad.plan").write_text(words)
        with pytest.raises((_core.Error, PlanError)):
            read_plan(str(tmp_path / "bad.plan"))
    with pytest.raises(PlanError, match="no such plan"):
        read_plan(str(tmp_path / "none.plan"))

    code, said, _ = cli("plan", str(small), "--over-memory")
    assert code == 0 and "DOES NOT FIT" in said and "of a device more than its" in said
    assert cli("plan", *SMALL, "--cluster", "local-2", "--global-batch", "8", "--over-memory")[0] == 1


def test_a_plan_has_an_interval_of_its_stack(planned: Path, cli) -> None:
    words = ["plan", *SMALL, "--cluster", "l4-24gb-2:megatron", "--global-batch", "16", "--no-why"]
    code, said, _ = cli(*words)
    assert code == 0 and "80 of 100 such steps take" in said
    code, said, _ = cli(*words, "--json")
    whole = json.loads(said)["plans"][0]
    assert whole["error"] >= 0.15
    words[words.index("l4-24gb-2:megatron")] = "l4-24gb-2"
    code, said, _ = cli(*words, "--json")
    alone = json.loads(said)["plans"][0]
    assert alone["error"] == 0
    assert whole["plan"]["step_us"] > 2 * alone["plan"]["step_us"], "a small model is bound by its launches"


# ---- handing on ----


def test_what_the_runtime_lacks_is_named(planned, tmp_path, cli):
    file = edited(planned, tmp_path, ("flash_attention yes", "flash_attention no"), ("template runtime", "template overlap"))
    code, _, said = cli("train", "--plan", str(file))
    assert code == 1 and "without the flash kernel" in said and "--runnable" in said
    code, _, said = cli("train", "--plan", str(planned), "--batch", "6")
    assert code == 1 and "--batch 6 contradicts" in said


@pytest.mark.parametrize(("zero", "expected"), [
    (0, ("replicate", "reduce_last")), (1, ("zero1", "reduce_last")), (2, ("zero1", "reduce_each")), (3, ("shard", "reduce_each")),
])  # fmt: skip
def test_a_zero_level_is_a_strategy(planned, tmp_path, zero, expected):
    how = execution_of(read_plan(str(edited(planned, tmp_path, ("zero \\d", f"zero {zero}")))))
    assert (how.strategy, how.accumulate_mode) == expected and how.ranks == 2


def test_recomputed_blocks_are_spread(planned, tmp_path):
    from interlace import models

    assert spread(2, 6) == [2, 5] and spread(0, 4) == [] and spread(4, 4) == [0, 1, 2, 3]
    model = models.build("llama-tiny", meta=True).model
    change = ("recompute full \\d selective \\d", "recompute full 1 selective 1")
    how = execution_of(read_plan(str(edited(planned, tmp_path, change))))
    expected = "recompute(mode=selective,blocks=model.layers.1+model.layers.3,whole=model.layers.3)"
    assert how.passes(model) == [expected]


def test_a_plan_trains_within_its_memory(planned, tmp_path, cli):
    file = edited(planned, tmp_path, ("zero \\d", "zero 3"), ("recompute full \\d selective \\d", "recompute full 2 selective 1"),
                  ("micro_batch \\d+", "micro_batch 2"), ("accumulation \\d+", "accumulation 2"))  # fmt: skip
    words = ["train", "--plan", str(file), "--steps", "2", "--json", "--program", str(tmp_path / "p.il")]
    # A process of its own: the ranks run the same command again.
    done = commands.run(*words)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["ranks"], facts["strategy"], facts["steps"], facts["tokens_per_step"]) == (2, "shard", 2, 8 * 64)
    assert facts["planned"]["file"] == str(file)
    _, predicted, _ = cli("plan", str(file), "--json")
    stage = json.loads(predicted)["plans"][0]["plan"]["stages"][0]
    assert facts["peak_bytes"] == pytest.approx(stage["peak_bytes"], rel=0.01)
    program = _core.Program.parse((tmp_path / "p.il").read_text(), "p.il")
    assert (
        program.accumulation == 2 and program.mesh == {"dp": 2} and program.meta()["recompute"].startswith("selective")
    )


def test_a_plan_with_offload_trains_within_its_limit(planned, tmp_path, cli):
    alone = (("local-2", "local-1"), ("devices 2 per_node 2", "devices 1 per_node 1"), ("devices 0..1", "devices 0..0"),
             ("micro_batch \\d+ dp 2", "micro_batch 2 dp 1"), ("accumulation \\d+", "accumulation 4"), ("zero \\d", "zero 0"),
             ("recompute full \\d selective \\d", "recompute full 4 selective 0"), ("(?m)^ *predicted .*\n", ""))  # fmt: skip
    file = edited(planned, tmp_path, *alone)
    _, predicted, _ = cli("plan", str(file), "--json")
    peak = json.loads(predicted)["plans"][0]["plan"]["stages"][0]["peak_bytes"]
    limit = int(0.8 * peak)
    file = edited(file, tmp_path, ("memory_limit \\d+", f"memory_limit {limit}"), ("states 0 ", "states 0.75 "))
    assert execution_of(read_plan(str(file)))._offload()[-1].endswith(f"limit={limit},kinds=states)")
    words = ["train", "--plan", str(file), "--steps", "2", "--json", "--tier", str(tmp_path)]
    done = commands.run(*words)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    rooms = facts["threads"] * 65536  # tiles of attention, which no plan counts
    assert facts["peak_bytes"] <= limit + rooms < peak, facts


def two_stages(planned: Path, folder: Path) -> Path:
    """A plan whose stages differ in everything that they may differ in."""
    text = (
        planned.read_text()
        .replace("devices 2 per_node 2", "devices 6 per_node 6")
        .replace('"local-2"', '"l4-24gb-6"')
        .replace("template runtime", "template overlap")
    )
    text = re.sub(r"accumulation \d+", "accumulation 4", text)[: text.index("stage 0")]
    text = re.sub(r"(?m)^ *predicted .*\n", "", text)
    for i, (held, layers, b, dp, tp, zero) in enumerate([("embedding", 3, 1, 2, 2, 2), ("head", 1, 2, 1, 2, 0)]):
        text += (f"\nstage {i}\n  layers {layers} {held}\n  devices {4 * i}..{3 + 2 * i}\n  micro_batch {b} dp {dp} tp {tp}\n"
                 f"  zero {zero}\n  recompute full {1 - i} selective 0\n"
                 f"  offload weights 0 gradients 0 states 0.25 activations 0\n")  # fmt: skip
    file = folder / "two.plan"
    file.write_text(text)
    return file


def test_a_plan_for_this_host(tmp_path, cli):
    file = tmp_path / "host.plan"
    words = ["plan", "llama-tiny", "--seq", "64", "--local", "--global-batch", "8", "--no-why"]
    code, said, _ = cli(*words, "-o", str(file))
    assert code == 0 and f"next: interlace train --plan {file}" in said
    plan = read_plan(str(file))
    assert (plan["cluster"], plan["dtype"], plan["template"], execution_of(plan).ranks) == ("local-2", "float32", "runtime", 2)
    code, said, _ = cli(*words, "--ranks", "4", "--json")
    assert code == 0 and json.loads(said)["plans"][0]["plan"]["cluster"] == "local-4"
    code, _, said = cli(*words, "--cluster", "local-2")
    assert code == 1 and "--local plans for this host, and --cluster local-2 for others: leave one of them out" in said
    code, _, said = cli(*words[:4], "--cluster", "local-2", "--ranks", "2", "--global-batch", "8")
    assert code == 1 and "--ranks is for --local" in said


def test_stages_of_other_zero_levels(planned, tmp_path):
    how = execution_of(read_plan(str(two_stages(planned, tmp_path))))
    assert how._offload() == ["overlap_update", "offload_sync(cluster={cluster},kinds=states)"]
    with pytest.raises(PlanError, match="it moves activations out of memory on several stages"):
        execution_of(read_plan(str(edited(two_stages(planned, tmp_path), tmp_path, ("activations 0", "activations 0.5")))))
    how = execution_of(read_plan(str(edited(two_stages(planned, tmp_path), tmp_path, ("states 0.25", "states 0")))))
    assert (how.mesh, how.ranks, how.micro_batch) == ("pp=2,dp=2+1,tp=2", 6, 1)
    unlike = (("states 0.25", "states 0"), ("dp 1 tp 2", "dp 2 tp 1"), ("micro_batch 2", "micro_batch 1"))
    how = execution_of(read_plan(str(edited(two_stages(planned, tmp_path), tmp_path, *unlike))))
    assert (how.mesh, how.ranks) == ("pp=2,dp=2,tp=2+1", 6)
    alike = (("devices 4..5", "devices 4..7"), ("micro_batch 2 dp 1", "micro_batch 1 dp 2"), ("states 0.25", "states 0"),
             ("devices 6 per_node 6", "devices 8 per_node 8"), ("l4-24gb-6", "l4-24gb-8"))  # fmt: skip
    how = execution_of(read_plan(str(edited(two_stages(planned, tmp_path), tmp_path, *alike))))
    assert (how.strategy, how.accumulate_mode) == ("zero1+replicate", "reduce_each+reduce_last")
    assert how.mesh == "pp=2,dp=2,tp=2"


def test_settings_of_other_systems(planned, tmp_path, cli):
    tomllib = pytest.importorskip("tomllib")
    plan = read_plan(str(planned))
    text, left = torchtitan(plan)
    settings = tomllib.loads(text)
    assert settings["training"]["global_batch_size"] == 8 and settings["training"]["seq_len"] == 64
    degrees = settings["parallelism"]
    assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == 2
    settings = json.loads(deepspeed(plan)[0])
    assert settings["train_batch_size"] == (
        settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * 2
    )
    assert settings["zero_optimization"]["stage"] == plan["stages"][0]["zero"]

    two = read_plan(str(two_stages(planned, tmp_path)))
    text, left = torchtitan(two)
    parts = tomllib.loads(text)["parallelism"]
    assert parts["module_fqns_per_model_part"][1] == ["layers.3", "norm", "output"]
    for words in (
        "dp by stage [2, 1]",
        "micro-batch by stage [1, 2]",
        "states on the host",
        "recomputation of some blocks only",
    ):
        assert any(words in line for line in left), (words, left)
    text, left = megatron(two)
    assert "--decoder-first-pipeline-num-layers 3" in text and "--optimizer-offload-fraction 0.25" in text
    assert any("recomputed blocks by stage [1, 0]" in line for line in left)
    assert any("pipeline stages" in line for line in deepspeed(two)[1])

    code, _, said = cli("plan", str(planned), "--export", "megatron", str(tmp_path / "out"))
    assert code == 0 and (tmp_path / "out" / "arguments.txt").exists() and "wrote" in said
    code, _, said = cli("plan", str(planned), "--export", "megatrn", str(tmp_path))
    assert code == 1 and "did you mean 'megatron'" in said


def test_the_page_of_a_plan_has_a_lane_a_stage(planned, tmp_path, cli):
    from interlace.report.plan_page import render_plan
    from interlace.report.set_page import runs

    file, two = tmp_path / "predicted.plan", two_stages(planned, tmp_path)
    assert cli("report", "--plan", str(two), "-o", str(tmp_path / "no.html"))[0] == 1  # no times yet
    assert cli("plan", str(two), "-o", str(file))[0] == 0
    timeline = runs(json.loads(_core.plan_trace(file.read_text()))["traceEvents"])
    assert {"stage 0", "stage 1", "sends 0"} <= set(timeline.lanes)
    for lane in ("stage 0", "stage 1"):
        parts = [event.part for event in timeline.lanes[lane] if not event.wait]
        assert parts.count("fwd") == parts.count("bwd") == 4
    plan = read_plan(str(file))
    assert timeline.span_ns / 1e3 == pytest.approx(plan["pipeline_us"], rel=1e-4)
    assert "stage 1" in render_plan(plan, _core.plan_trace(file.read_text()))
    assert cli("report", "--plan", str(file), "-o", str(tmp_path / "plan.html"))[0] == 0
