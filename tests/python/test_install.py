"""What an installation without torch says and does, and what `interlace doctor` finds (whole installations: tools/setup/check_install.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).resolve().parents[2]
# An import hook that hides packages, in a process of its own: modules that were imported before would stay.
HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in HIDDEN or name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(hidden: tuple[str, ...], code: str, folder: Path) -> subprocess.CompletedProcess:
    program = f"HIDDEN = {hidden!r}\n{HIDING}\n{code}"
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False, env={**os.environ})


def command(hidden: tuple[str, ...], folder: Path, *words: str | Path) -> subprocess.CompletedProcess:
    arguments = [str(word) for word in words]
    return run(hidden, f"from interlace.cli.app import run\nsys.exit(run({arguments!r}))", folder)


NO_TORCH = ("torch", "transformers", "interlace._runtime")


def test_programs_are_simulated_and_reported_without_torch(tmp_path):
    program = ROOT / "tests" / "golden" / "passes" / "mlp.il"
    words = ("--mesh", "dp=2", "--cluster", "h100-80gb-2")
    done = command(NO_TORCH, tmp_path, "simulate", program, *words, "--snapshot", "memory.pickle", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["step_us"] > 0, done.stderr
    assert (tmp_path / "memory.pickle").stat().st_size > 0
    done = command(NO_TORCH, tmp_path, "report", program, *words, "-o", "page.html")
    assert done.returncode == 0 and (tmp_path / "page.html").stat().st_size > 10_000, done.stderr
    done = command(NO_TORCH, tmp_path, "inspect", program)
    assert done.returncode == 0, done.stderr


def test_plans_are_made_without_torch_from_written_layers(tmp_path):
    layers = ROOT / "tests" / "models" / "llama.model"
    size = ("--cluster", "l4-24gb-2", "--global-batch", "16", "--seq", "64")
    done = command(NO_TORCH, tmp_path, "plan", layers, *size, "--dtype", "float32", "-o", "found.plan")
    assert done.returncode == 0, done.stderr
    again = command(NO_TORCH, tmp_path, "plan", "found.plan", "--layers", layers, "--json")
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["plans"][0]["plan"]["step_us"] == pytest.approx(found["before_us"])
    assert command(NO_TORCH, tmp_path, "report", "--plan", "found.plan", "-o", "plan.html").returncode == 0
    wrong = command(NO_TORCH, tmp_path, "plan", layers, *size)
    assert wrong.returncode == 1
    assert wrong.stderr == (
        f"error: {layers} was written for dtype f32, and the plan is for dtype bf16: "
        "give --dtype and --no-flash as --write-layers had them\n"
    )


def test_written_layers_give_the_plan_of_the_model(tmp_path):
    size = ("--cluster", "l4-24gb-2", "--global-batch", "16", "--seq", "64", "--dtype", "float32", "--json")
    words = ("plan", "llama-tiny", "--seq", "64", "--dtype", "float32", "--write-layers", "tiny.layers")
    done = commands.run(*words, cwd=tmp_path)
    assert done.returncode == 0 and "next: interlace plan tiny.layers" in done.stdout, done.stderr
    written, named = (json.loads(commands.run("plan", model, *size, cwd=tmp_path).stdout) for model in ("tiny.layers", "llama-tiny"))
    assert written["plans"][0]["plan"]["stages"] == named["plans"][0]["plan"]["stages"]
    assert written["plans"][0]["plan"]["step_us"] == named["plans"][0]["plan"]["step_us"]


@pytest.mark.parametrize("name", ["train", "profile", "capture"])
def test_commands_that_need_torch_say_so(tmp_path, name):
    done = command(NO_TORCH, tmp_path, name, *(["-o", "x.il"] if name == "capture" else []))
    assert done.returncode == 1
    assert done.stderr.startswith("error: this needs torch, which is not installed here. Install it, then Interlace"), done.stderr


def test_a_model_by_name_says_that_transformers_is_missing(tmp_path):
    done = command(("transformers",), tmp_path, "capture", "--model", "llama-tiny", "-o", "x.il")
    assert done.returncode == 1
    assert "this needs Hugging Face transformers, which is not installed here:\n  pip install 'transformers>=4.51'" in done.stderr


def test_help_lists_every_command_without_torch(tmp_path):
    done = command(NO_TORCH, tmp_path, "--help")
    assert done.returncode == 0
    for name in ("train", "simulate", "doctor"):
        assert re.search(rf"\b{name}\b", done.stdout), done.stdout


def test_the_front_door_without_torch(tmp_path):
    done = run(NO_TORCH, "import interlace\ninterlace.Config(clip_norm=1.0)\ninterlace.compile", tmp_path)
    assert "InterlaceError: interlace.compile: this needs torch, which is not installed here" in done.stderr
    done = run(("interlace._runtime",), "import interlace\ninterlace.Trainer", tmp_path)
    said = "this Interlace was installed without its runtime|does not load beside the torch that is here. Build it again"
    assert re.search(f"interlace.Trainer: .*({said})", done.stderr), done.stderr


def test_doctor_finds_nothing_wrong_here(tmp_path):
    done = command((), tmp_path, "doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and not any(problem["needed"] for problem in found["problems"])
    assert found["interlace"]["_core"] == found["interlace"]["_runtime"] == "there"
    assert "gloo" in found["torch"]["backends"] and found["machine"]["free_memory"] > 0
    said = command((), tmp_path, "doctor").stdout
    assert "a run would use" in said and found["torch"]["version"] in said
    over_tcp = "import os; os.environ['INTERLACE_SHARED_MEMORY'] = '0'\n"
    for before, between in (("", "which share memory"), (over_tcp, "which talk over TCP")):
        told = run((), before + "from interlace.cli.doctor import look, would_use\nprint(would_use(look()))", tmp_path).stdout
        assert between in told or "GPUs" in told


def test_doctor_names_what_is_missing_and_the_fix(tmp_path):
    done = command(NO_TORCH, tmp_path, "doctor")
    assert done.returncode == 1
    assert "missing: interlace._runtime" in done.stdout and "  pip install torch" in done.stdout, done.stdout
    assert "plan, simulate, report, opt, inspect and explain work" in done.stdout


def test_the_version_stands_in_one_place():
    version = re.search(r'__version__ = "(.*)"', (ROOT / "python" / "interlace" / "version.py").read_text())
    assert version is not None
    told = re.compile(rf"\b{re.escape(version[1])}\b")
    project = re.search(r"\[project\]\n.*?\n\[", (ROOT / "pyproject.toml").read_text(), flags=re.S)
    assert project is not None and not told.search(project[0])
    for file in (ROOT / "python").rglob("*.py"):
        lines = [line for line in file.read_text().splitlines() if told.search(line) and '"""' not in line]
        assert not lines or file.name == "version.py", f"{file}: {lines}"
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_which_torch_it_was_built_against_is_no_file_of_the_sources():
    """An installation without its runtime would say that it had been built against some torch."""
    done = subprocess.run(["git", "ls-files", "python/interlace"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no checkout")
    assert "interlace/errors.py" in done.stdout and "built_with.txt" not in done.stdout
