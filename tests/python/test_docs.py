"""What the documents say works: runnable blocks run, commands exist with their options, links lead somewhere."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
import typer

from interlace.cli import app

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "bench/README.md", "examples/README.md", "CHANGELOG.md", "CONTRIBUTING.md")
DOCUMENTS = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of the fenced blocks that begin with ```language."""
    found = []
    for match in re.finditer(rf"^```{re.escape(language)}\n(.*?)^```", document.read_text(), flags=re.M | re.S):
        found.append((document.read_text()[: match.start()].count("\n") + 1, match.group(1)))
    return found


RUNNABLE = [
    pytest.param(text, id=f"{document.name}:{line}")
    for document in DOCUMENTS
    for line, text in blocks(document, "python runnable")
]
COMMANDS = [
    pytest.param(line, id=f"{document.name}: {line[:50]}")
    for document in DOCUMENTS
    for language in ("sh", "")
    for _, text in blocks(document, language)
    for line in text.splitlines()
    if line.startswith("interlace ") and len(line.split()) > 1 and line.split()[1].isalpha()
]


@pytest.mark.parametrize("text", RUNNABLE)
def test_runnable_block(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})


@functools.cache
def commands():
    app._load_commands()
    return typer.main.get_command(app.app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_and_options_exist(line):
    words = shlex.split(line, comments=True)
    command = commands()[words[1]]
    known = {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}
    for word in words[2:]:
        if word.startswith("-") and word != "-":
            assert word.split("=")[0] in known, f"{line}: no option {word}"


def test_examples_in_help_exist():
    """The same for the examples that --help shows."""
    from interlace.cli import capture, inspect, opt, profile, report, simulate, train

    lines = [
        line.strip()
        for module in (train, capture, opt, inspect, profile, simulate, report)
        for line in module.HELP.splitlines()
    ]
    lines = [line for line in lines if line.startswith("interlace ")]
    assert len(lines) > 10
    for line in lines:
        for command in line.split(" && "):
            test_command_and_options_exist(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", document.read_text(), flags=re.M):
            assert re.search(rf"^{target[0] or target[1]}:", makefile, flags=re.M), target


WALK = (ROOT / "docs" / "architecture.md").read_text().split("## A walk from a model to a step")[1].split("\n## ")[0]
STATIONS = re.findall(r"^\| (\d) \| `([^`]+)` \| ([^|]+) \|", WALK, flags=re.M)


def test_the_walk_has_at_most_eight_files():
    assert [int(number) for number, _, _ in STATIONS] == list(range(1, len(STATIONS) + 1)) and 0 < len(STATIONS) <= 8


@pytest.mark.parametrize(("file", "words"), [(file, words) for _, file, words in STATIONS])
def test_what_the_walk_looks_for_is_there(file, words):
    text = (ROOT / file).read_text()
    for word in re.findall(r"`([^`]+)`", words):
        assert re.search(rf"\b{re.escape(word)}\b", text), f"{file} has no {word}"


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`((?:src|python|docs|tools)/[\w/.]+\.\w+)`", WALK))))
def test_files_of_the_walk_exist(file):
    assert (ROOT / file).is_file()
