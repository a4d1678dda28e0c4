"""`interlace train` on files of other people: a model folder with its weights and tokenizer, .jsonl and .parquet, a file of options; logs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from test_cli_train import TINY, environment, folder, train  # noqa: F401 (folder is a fixture)

from interlace.cli.run_config import as_toml, options, read_config
from interlace.cli.settings import SettingError, TrainSettings
from interlace.data import DataError, Tokenizer, find_text, prepare_tokens
from interlace.data.text import read_documents

DOCUMENTS = ["One line.", "Two\nlines, and ünïcode.", "A third, longer document about nothing much. " * 40]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a BPE of somebody else's, as save_pretrained writes them."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("pretrained")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>", "</done>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=special)
    inner.train_from_iterator(["a few words of text " * 20, "0123456789 words"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</done>", unk_token="<unk>").save_pretrained(path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=128, max_position_embeddings=64,
        use_cache=False,
    ))  # fmt: skip
    model.save_pretrained(path)
    return path


def test_documents_of_json_lines_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": i, "text": d}) + "\n" for i, d in enumerate(DOCUMENTS)) + "\n")
    assert list(read_documents(tmp_path / "a.jsonl")) == [(d, True) for d in DOCUMENTS]
    found = prepare_tokens(find_text(tmp_path / "a.jsonl"), tmp_path / "cache")
    tokens = list(found.open())
    assert tokens == [t for d in DOCUMENTS for t in (*d.encode(), 256)]
    pytest.importorskip("datasets", reason="pip install 'interlace[data]'")
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "folder").mkdir()
    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "content": DOCUMENTS}), tmp_path / "folder" / "b.parquet", row_group_size=2)
    assert list(prepare_tokens(find_text(tmp_path / "folder"), tmp_path / "cache").open()) == tokens
    parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="has the columns 'n': it needs the document as \"text\" or \"content\", or --text-column NAME"):
        list(read_documents(tmp_path / "c.parquet"))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        list(read_documents(tmp_path / "d.parquet"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"body": "x"}', "line 2 has 'body': it needs the document as \"text\" or \"content\", or --text-column NAME"),
        ("[1]", "line 2 is a list: each line must be an object"),
        ('{"text": ', "line 2: not JSON"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=re.escape(said)):
        list(read_documents(tmp_path / "a.jsonl"))


def test_a_tokenizer_of_somebody_else(pretrained: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.pretrained(pretrained)
    assert tokenizer.kind == "file" and tokenizer.end == "</done>" and tokenizer.end_id == tokenizer.inner.token_to_id("</done>")
    tokenizer.save(tmp_path / "x.tokenizer.json")
    again = Tokenizer.load(tmp_path / "x.tokenizer.json")
    assert again.end == "</done>" and again.digest == tokenizer.digest
    (tmp_path / "tokenizer.json").write_bytes((pretrained / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="nothing says which token ends a text"):
        Tokenizer.pretrained(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no tokenizer.json; make one with"):
        Tokenizer.pretrained(tmp_path / "empty")
    with pytest.raises(DataError, match="nor a name in the local cache"):
        Tokenizer.pretrained("nobody/nothing")


def test_fine_tuning_a_folder_and_going_on(folder: Path, pretrained: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder / "data.jsonl").write_text("".join(json.dumps({"text": "a few words of text " * 30}) + "\n" for _ in range(20)))
    common = ["--model", str(pretrained), "--text", "data.jsonl", "--ranks", "1", "--dtype", "float64", "--log", "tuned.jsonl"]
    facts, _ = train(folder, *common, "--save", "tuned", "--stop-at", "3")
    # The first loss is that of the folder's own weights.
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float64)
    tokens = prepare_tokens(find_text(folder / "data.jsonl"), folder / "cache", tokenizer=Tokenizer.pretrained(pretrained))
    from interlace.data import TokenDataset

    inputs, labels = TokenDataset(tokens.open(), 32, 8).batch_at(0)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    assert facts["losses"][0] == pytest.approx(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), rel=1e-9)
    assert AutoTokenizer.from_pretrained(folder / "tuned").eos_token == "</done>"
    more, _ = train_with(folder, "--resume", "tuned")
    whole, _ = train(folder, *common, "--save", "at-once", "--log", "whole.jsonl")
    assert facts["losses"] + more["losses"] == whole["losses"]
    entry = [json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()][-1]
    assert entry["step"] == 6 and entry["loss"] == whole["losses"][-1]
    assert entry["norm"] > 0 and entry["lr"] > 0 and entry["tokens_per_second"] > 0 and entry["memory_bytes"] > 0
    # What the run left as its options starts the same run.
    same, _ = train_with(folder, "--config", str(folder / "at-once" / "run.toml"), "--save", "third")
    assert same["losses"] == whole["losses"]


def train_with(where: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    done = commands.run("train", *arguments, "--json", cwd=where, env=environment(where))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_file_of_options_holds_all_of_them(tmp_path: Path) -> None:
    settings = TrainSettings(steps=7, lr=2e-5, clip=None, text=str(tmp_path), stages="a+b", as_json=True, sequence_parallel=False)
    file = tmp_path / "run.toml"
    file.write_text(as_toml(settings))
    found = TrainSettings(**read_config(str(file)))
    assert found == settings
    for name in options():
        if name not in ("config", "resume"):
            assert re.search(rf"^(# )?{name} =", file.read_text(), re.MULTILINE), name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz = 3", "line 2: 'stepz' is no option of train that a file can have; did you mean 'steps'?"),
        ("steps = 'many'", "line 2: 'steps' must be a whole number, not \"many\""),
        ("steps = true", "line 2: 'steps' must be a whole number, not true"),
        ("json = 1", "line 2: 'json' must be true or false, not 1"),
        ("resume = 'x'", "line 2: 'resume' is no option of train that a file can have"),
        ("steps = ", "is no TOML: "),
    ],
)
def test_a_wrong_option_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("# mine\n" + text + "\n")
    with pytest.raises(SettingError, match=re.escape(said)):
        read_config(str(file))
    with pytest.raises(SettingError, match=r"absent.toml: No such file"):
        read_config("absent.toml")


def test_dtypes_have_one_spelling_and_all_are_understood() -> None:
    import interlace

    for given in ("bf16", "bfloat16", torch.bfloat16):
        assert interlace.Config(param_dtype=given).param_dtype == "bfloat16"
    settings = TrainSettings(dtype="fp64")
    settings.check()
    assert settings.dtype == "float64"


def test_tensorboard_and_wandb(folder: Path) -> None:  # noqa: F811
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    pytest.importorskip("wandb", reason="needs wandb")
    facts, err = train(folder, "--ranks", "1", "--tensorboard", "events", "--wandb", "project", "--eval-text", "text.py")
    assert "warning" not in err
    events = accumulator.EventAccumulator(str(folder / "events"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(facts["losses"], rel=1e-6)
    assert {"lr", "norm", "tokens_per_second", "memory_bytes", "eval_loss"} <= set(events.Tags()["scalars"])
    runs = list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1 and runs[0].stat().st_size > 1000


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from interlace.cli import train_log

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="--wandb needs the package wandb: pip install wandb"):
        train_log.check(TrainSettings(wandb="x"))


def test_the_shell_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, expected in (("interlace tr", "train"), ("interlace train --tokeni", "--tokenizer")):
        found = subprocess.run(
            [sys.executable, "-m", "interlace.cli"], capture_output=True, text=True, check=False,
            env={**os.environ, "_INTERLACE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
        )  # fmt: skip
        assert expected in found.stdout.split(), found.stdout + found.stderr


def test_an_error_of_all_ranks_is_said_once(folder: Path) -> None:  # noqa: F811
    words = ["train", "--text", "text.py", *TINY, "--ranks", "2", "--weights", "text.py"]
    done = commands.run(*words, cwd=folder, env=environment(folder))
    assert done.returncode == 1 and done.stderr.count("text.py cannot be read as a safetensors file") == 1, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
