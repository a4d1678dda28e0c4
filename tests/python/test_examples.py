"""Every example runs, on tiny data, on one rank or two, and says what its head promises."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command

from interlace.dist.launch import free_port, rank_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NANOGPT_LINES = 6  # at most so many lines of the loop differ from the plain script
WORDS = "the quick brown fox jumps over the lazy dog and runs through a deep green forest to the far blue river"


ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def forked(words: list[str | Path], folder: Path, ranks: int = 1) -> str:
    """The output of a script that must succeed, on ranks with the environment that torchrun gives."""
    port = free_port()
    places = [rank_environment(rank, ranks, port, 1) if ranks > 1 else {} for rank in range(ranks)]
    processes = [Command(*words, cwd=folder, env={**os.environ, **ENVIRONMENT, **place}) for place in places]
    said = [process.communicate() for process in processes]
    assert all(process.returncode == 0 for process in processes), "".join(err[-3000:] + out[-1000:] for out, err in said)
    return "".join(out for out, _ in said)


def run(words: list[str | Path], folder: Path, ranks: int = 1) -> str:
    """The same in fresh interpreters, under torchrun where there are several ranks."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return command([*start, *words], folder)


def command(words: list[str | Path], folder: Path) -> str:
    environment = {**os.environ, **ENVIRONMENT}
    result = subprocess.run([str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
                            check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-1000:]
    return result.stdout


def numbers(name: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"\b{name} ([-0-9.e]+)", text)]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Sentences with an order that can be learned."""
    file = tmp_path_factory.mktemp("text") / "train.txt"
    file.write_text("".join(" ".join(WORDS.split()[i % 7 : i % 7 + 9]) + ".\n" for i in range(400)))
    return file


@pytest.fixture(scope="module")
def language_model(tmp_path_factory, text) -> Path:
    """A tiny Llama with random weights and a tokenizer trained on the text, as a folder that from_pretrained reads."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text.read_text()], vocab_size=300)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=bpe.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_finetune_keeps_the_best_checkpoint_and_stops_early(tmp_path, language_model, text, ranks):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "best"
    options = ["--model", language_model, "--train", text, "--valid", text, "--out", out, "--seq", "16", "--batch", "4"]
    said = forked([EXAMPLES / "finetune.py", *options, "--steps", "40", "--eval-every", "10", "--lr", "3e-3"], tmp_path, ranks)
    losses = numbers("valid", said)
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0], said
    assert numbers("best", said) == [min(losses)]
    # What was kept is the model of the best evaluation, and a Hugging Face folder with its tokenizer.
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])
    rows = torch.stack([part for part in ids.split(16) if len(part) == 16])
    with torch.no_grad():
        whole = model(input_ids=rows, labels=rows).loss.item()
    assert abs(whole - min(losses)) < 0.05 * losses[0]
    # A learning rate that destroys the model: no evaluation is better than the first ones, so it ends long before --steps.
    options += ["--steps", "400", "--eval-every", "2", "--lr", "30", "--patience", "2"]
    said = forked([EXAMPLES / "finetune.py", *options], tmp_path, ranks)
    assert "stopped early at step" in said and len(numbers("valid", said)) < 20, said


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_images_are_learned(tmp_path, ranks):
    said = run([EXAMPLES / "images.py", "--steps", "40", "--save", tmp_path / "run"], tmp_path, ranks)
    assert float(re.findall(r"evaluation: .* right ([0-9.]+)", said)[0]) > 0.9, said
    assert (tmp_path / "run" / "model.safetensors").exists()


def code_lines(file: Path) -> list[str]:
    """Without the head, comments and blank lines."""
    body = file.read_text().partition('"""\n')[2]
    return [line for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_the_nanogpt_loop_differs_in_six_lines(tmp_path, text):
    plain, ours = (EXAMPLES / "nanogpt" / name for name in ("plain.py", "train.py"))
    new = [line for line in difflib.ndiff(code_lines(plain), code_lines(ours)) if line.startswith("+ ")]
    assert 0 < len(new) <= NANOGPT_LINES, new
    expected, found = forked([plain, text, "100"], tmp_path), forked([ours, text, "100"], tmp_path)
    assert numbers("step", expected) == numbers("step", found) == [50, 100]
    for name in ("train", "valid"):
        assert numbers(name, found) == pytest.approx(numbers(name, expected), abs=2e-4)
    assert len(numbers("valid", run([ours, text, "100"], tmp_path, ranks=2))) == 4  # two ranks, two lines each


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("ranks", [1, 2])
def test_lora_trains_and_saves_an_adapter(tmp_path, language_model, text, ranks):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "adapter"
    options = ["--model", language_model, "--text", text, "--out", out, "--seq", "16", "--steps", "40"]
    losses = numbers("loss", forked([EXAMPLES / "lora.py", *options], tmp_path, ranks))
    assert losses[-1] < losses[0]
    base = AutoModelForCausalLM.from_pretrained(language_model)
    adapted = PeftModel.from_pretrained(base, out)
    second = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert second and all(p.abs().max() > 0 for p in second)  # zeros before training


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_two_machines(tmp_path):
    probe = subprocess.run(["ip", "netns", "add", f"interlace-probe-{os.getpid()}"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no network namespaces here")
    subprocess.run(["ip", "netns", "delete", f"interlace-probe-{os.getpid()}"], check=True)
    said = command(["sh", EXAMPLES / "two_machines.sh", EXAMPLES / "images.py", "--steps", "20"], tmp_path)
    assert "evaluation: loss" in said
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "interlace-first" not in left and "interlace-second" not in left


def test_a_new_pass_changes_the_prediction_and_no_bit(tmp_path):
    said = forked([EXAMPLES / "new_pass.py"], tmp_path, ranks=2)
    before, after = (float(ms) for ms in re.findall(r"([0-9.]+) ms", said))
    assert after < before, said
    assert "1 swap" in said
    plain = forked([EXAMPLES / "new_pass.py", "--without"], tmp_path, ranks=2)
    assert numbers("loss", plain) == numbers("loss", said) and "0 swaps" in plain


def test_every_example_is_run_here():
    listed = {"finetune.py", "images.py", "nanogpt", "lora.py", "two_machines.sh", "new_pass.py"}
    assert {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")} == listed
