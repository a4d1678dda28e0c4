"""`interlace train` from the command line to the saved model, on real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import chakra_decoder
import commands
import pytest
from commands import Command

from interlace import _core
from interlace.cli.settings import TrainSettings
from interlace.cli.train_log import gained
from interlace.cli.train_view import curve
from interlace.data import find_text

TINY = ["--model", "llama-tiny", "--steps", "6", "--batch", "8", "--seq", "32", "--log-every", "1", "--lr", "0.003"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with some real text."""
    path = tmp_path_factory.mktemp("train")
    (path / "text.py").write_bytes(b"".join(file.read_bytes() for file in find_text().files[:12]))
    return path


@pytest.mark.parametrize(
    ("faster", "less", "said"),
    [(0.124, -0.051, "12 % faster and 5 % more memory than"), (-0.02, 0.004, "2 % slower than"), (0.001, 0.2, "20 % less memory than"),
     (0.0, -0.0049, "as fast and as large as the one before")],
)  # fmt: skip
def test_what_a_plan_gained_names_only_what_changed(faster: float, less: float, said: str) -> None:
    plan = {"reason": "memory", "seconds": 1.0, "changed": True, "faster": faster, "less_memory": less}
    line = gained(plan)
    assert line.startswith("planned again (memory) in 1") and f"another program, {said}" in line
    assert "0 %" not in line.replace("20 %", "")


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}


def start(folder: Path, *arguments: str, command: list[str] | None = None) -> subprocess.Popen | Command:
    words = ["train", "--text", "text.py", *TINY, *arguments]
    if command is None:
        return Command(*words, cwd=folder, env=environment(folder))
    return subprocess.Popen(
        [*command, *words], cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train(folder: Path, *arguments: str, command: list[str] | None = None) -> tuple[dict, str]:
    """The summary and stderr of a run that must succeed."""
    process = start(folder, *arguments, "--json", command=command)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.fixture(scope="module")
def two_ranks(folder) -> tuple[dict, str]:
    traces = ["--trace", "step.json", "--trace-chakra", "traces", "--trace-snapshot", "memory.json"]
    return train(folder, "--ranks", "2", "--dtype", "fp64", "--save", "two", *traces)


def test_lines_summary_and_progress(two_ranks):
    facts, err = two_ranks
    lines = re.findall(r"^step (\d+) loss (\d+\.\d{4})$", err, flags=re.M)
    assert [int(number) for number, _ in lines] == [1, 2, 3, 4, 5, 6]
    assert [float(loss) for _, loss in lines] == pytest.approx(facts["losses"], abs=1e-4)
    assert facts["first_loss"] == pytest.approx(5.77, abs=0.2)  # the logarithm of 320 entries
    assert facts["last_loss"] < facts["first_loss"] - 0.3
    assert facts["ranks"] == 2 and facts["steps"] == 6 and facts["tokens_per_step"] == 256
    assert facts["bytes_per_step"] > 0 and facts["peak_bytes"] > facts["largest_unit"]["bytes"] > 0
    assert facts["resident_bytes"] > facts["peak_bytes"] and facts["tokens_per_second"] > 0


def test_two_ranks_that_cut_one_batch(two_ranks, folder):
    """The same global batches, so the same losses, evaluated as well; and the run goes on without the axis."""
    facts, _ = train(
        folder, "--ranks", "2", "--dtype", "fp64", "--mesh", "tp=2", "--tensor", "model", "--save", "cut", "--eval-text", "text.py"
    )  # fmt: skip
    assert facts["losses"] == pytest.approx(two_ranks[0]["losses"], rel=1e-9)
    assert facts["eval_losses"]["6"] < facts["first_loss"]
    process = start(folder, "--resume", "cut", "--ranks", "1", "--steps", "7", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["first_step"] == 6


def test_the_last_step_in_the_formats_of_a_predicted_one(two_ranks, folder):
    trace = (folder / "step.json").read_text()
    _core.testing.check_chrome_trace(trace)
    _core.testing.check_memory_snapshot((folder / "memory.json").read_text())
    assert json.loads(trace)["distributedInfo"]["world_size"] == 2
    for rank in range(2):
        _, nodes = chakra_decoder.read((folder / "traces" / f"step.{rank}.et").read_bytes())
        assert sum(node["type"] == "COMM_COLL_NODE" for node in nodes) >= 2


def test_a_bar_on_a_terminal(folder):
    """A real terminal (a pseudo one): a bar with the loss, the rate and the time left in place of lines."""
    ours, theirs = pty.openpty()
    environ = {**environment(folder), "TERM": "xterm-256color", "COLUMNS": "150"}
    process = Command("train", "--text", "text.py", *TINY, "--ranks", "2", cwd=folder, env=environ, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the last process that had it open has ended
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    out, _ = process.communicate(timeout=300)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert process.returncode == 0, text
    assert re.search(r"training \S+ 6/6 +loss \d+\.\d{3} [\d,]+ tokens/s 0:00:00 left", text), text
    assert "step 6 loss" not in text and "tokens/s, median step" in out


def test_hugging_face_reads_the_result(two_ranks, folder):
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from interlace.data import TokenDataset, Tokenizer, prepare_tokens

    model = AutoModelForCausalLM.from_pretrained(folder / "two", dtype=torch.float64)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "two" / "tokenizer.json"))
    assert tokenizer.encode("def f():") == list(b"def f():")
    # The loss of the next batch continues the run's.
    saved = Tokenizer.load(folder / "two" / "tokenizer.json")
    tokens = prepare_tokens(find_text(folder / "text.py"), folder / "cache" / "interlace", tokenizer=saved)
    inputs, labels = TokenDataset(tokens.open(), 32, 8).batch_at(6)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
    assert abs(loss.item() - two_ranks[0]["last_loss"]) < 0.5


@pytest.mark.parametrize(
    "arguments, tolerance",
    [
        (["--ranks", "1"], 1e-9),
        (["--ranks", "2", "--strategy", "zero1"], 0.0),
        (["--ranks", "2", "--strategy", "replicate"], 0.0),
        (["--ranks", "2", "--passes", "canonicalize,shard(ranks={ranks}),update(clip=1.0),reorder"], 0.0),
        (["--ranks", "2", "--accumulation", "2"], 1e-9),
    ],
)
def test_same_losses_whatever_the_ranks(two_ranks, folder, arguments, tolerance):
    facts, _ = train(folder, "--dtype", "fp64", *arguments)
    expected = two_ranks[0]["losses"]
    if tolerance == 0.0:
        assert facts["losses"] == expected
    else:
        assert facts["losses"] == pytest.approx(expected, rel=tolerance)


def test_resumed_run_gives_the_same_bits(two_ranks, folder):
    first, _ = train(folder, "--ranks", "2", "--dtype", "fp64", "--save", "part", "--stop-at", "4")
    assert first["losses"] == two_ranks[0]["losses"][:4]
    process = commands.run("train", "--resume", "part", "--json", cwd=folder, env=environment(folder))
    assert process.returncode == 0, process.stderr
    facts = json.loads(process.stdout)
    assert facts["losses"] == two_ranks[0]["losses"][4:]
    assert (facts["first_step"], facts["last_step"], facts["saved"]) == (4, 6, "part")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "part" / name).read_bytes() == (folder / "two" / name).read_bytes()


def test_the_log_of_a_saved_run_lies_beside_it(folder):
    (folder / "kept.jsonl").write_text('{"step": 9, "loss": 1.0}\n')  # of an earlier run, which this one replaces
    facts, _ = train(folder, "--save", "kept", "--stop-at", "2")
    page = ["report", "kept", "-o", "kept.html", "--json"]
    shown = json.loads(commands.run(*page, cwd=folder, env=environment(folder)).stdout)
    assert facts["log"] == "kept.jsonl" and (shown["steps"], shown["loss"]) == (2, facts["last_loss"])
    resumed = commands.run("train", "--resume", "kept", "--stop-at", "3", "--json", cwd=folder, env=environment(folder))
    assert resumed.returncode == 0, resumed.stderr
    lines = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    (folder / "kept").rename(folder / "elsewhere")  # its settings do not name the log
    (folder / "kept").mkdir()  # as before a first checkpoint
    shown = json.loads(commands.run(*page, cwd=folder, env=environment(folder)).stdout)
    assert (shown["steps"], len(shown["plans"])) == (3, 0)
    assert "kept.jsonl" not in (folder / "elsewhere" / "run.toml").read_text()


def test_resume_with_another_text(two_ranks, folder):
    changed = folder / "text.py"
    before = changed.read_bytes()
    changed.write_bytes(before + b"\n# more\n")
    try:
        process = commands.run("train", "--resume", "two", "--steps", "8", cwd=folder, env=environment(folder))
    finally:
        changed.write_bytes(before)
    assert process.returncode == 1
    assert process.stderr == (
        f"error: the text has changed since two was saved ({changed}): put the old text back, or name one with --text\n"
    )


@pytest.mark.soak
def test_bpe_under_torchrun(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "interlace.cli"]
    facts, err = train(folder, "--tokenizer", "bpe", "--vocab", "400", command=command)
    assert facts["ranks"] == 2 and facts["vocab"] == 400 and facts["first_loss"] == pytest.approx(6.1, abs=0.2)
    assert err.count("step 6 loss") == 1


def test_config_json_and_summary_for_people(folder):
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    process = start(folder, "--ranks", "1", "--model", "config.json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    for word in ("model ", "config.json", "loss ", "tokens/s", "peak memory", "by the allocator", "nothing (--save"):
        assert word in out
    config["vocab_size"] = 200
    (folder / "config.json").write_text(json.dumps(config))
    process = start(folder, "--ranks", "1", "--model", "config.json")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in err
    assert "the tokenizer has 257 entries, but config.json has a vocab_size of 200" in err


def test_a_killed_rank_ends_the_run_with_its_number(folder):
    process = start(folder, "--ranks", "2", "--steps", "100000", "--log-every", "5")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 5 "):
            break
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    err = process.stderr.read()
    assert process.wait() == 1
    assert err.rstrip().endswith("error: rank 1 failed (killed by SIGKILL) (out of memory?)"), err
    assert "Traceback" not in err and "rank 1" in err


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes of its ranks, by rank: what is forked is named so, what torchrun has started has it in its environment."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        for said in [name.replace("interlace:", "RANK="), *variables]:
            if said.startswith("RANK="):
                found[int(said.removeprefix("RANK="))] = int(pid)
    return found


# ---- parts ----


def test_learning_rate():
    settings = TrainSettings(lr=1.0, warmup=4, steps=104)
    assert [settings.learning_rate(step) for step in (0, 1, 3, 4)] == [0.25, 0.5, 1.0, 1.0]
    assert settings.learning_rate(54) == pytest.approx(0.55)
    assert settings.learning_rate(104) == pytest.approx(0.1)
    assert TrainSettings(lr=1.0, warmup=0).learning_rate(0) == 1.0


def test_curve_falls_as_the_losses_do():
    assert curve([5.0, 4.0, 3.0, 2.0], width=4) == "█▆▃▁"
    assert curve([1.0, 1.0], width=4) == "▁▁" and curve([1.0]) == ""
    assert len(curve([float(i) for i in range(1000)], width=40)) == 40


def test_loss_of_a_text_that_is_not_trained_on(two_ranks: tuple[dict, str], folder: Path):
    (folder / "other.py").write_bytes(b"".join(file.read_bytes() for file in find_text().files[12:16]))
    options = ["--eval-text", "other.py", "--eval-every", "4", "--eval-sequences", "16", "--log", "eval.log"]
    facts, err = train(folder, "--ranks", "2", "--dtype", "fp64", *options, "--save", "watched")
    assert facts["losses"] == two_ranks[0]["losses"], "evaluation changes nothing"
    assert list(facts["eval_losses"]) == ["4", "6"]
    assert facts["eval_losses"]["6"] < facts["eval_losses"]["4"] < 6
    assert re.search(r"^step 4 eval loss \d+\.\d{4} \(perplexity \d+\.\d\d\)$", err, flags=re.M)
    logged = [json.loads(line) for line in (folder / "eval.log").read_text().splitlines()]
    assert {r["step"]: r["eval_loss"] for r in logged if "eval_loss" in r} == {
        4: facts["eval_losses"]["4"],
        6: facts["eval_losses"]["6"],
    }
    one, _ = train(folder, "--ranks", "1", "--resume", "watched", "--steps", "7", "--eval-every", "7")
    assert one["eval_losses"]["7"] < facts["eval_losses"]["6"], "the same sequences on another number of ranks"


def test_a_short_text_to_evaluate_on_is_refused_before_anything_starts(folder: Path):
    (folder / "short.txt").write_text("too short")
    process = start(folder, "--eval-text", "short.txt")
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0 and "--eval-text short.txt: the text has 10 tokens, too few" in err, err
