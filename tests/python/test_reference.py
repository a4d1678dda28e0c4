"""docs/reference.md is what the code says and leaves nothing out; troubleshooting names messages
that exist; the site's links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import interlace

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference.md"


def sections() -> dict[str, str]:
    """The text under each heading of the third order, by heading without its backticks."""
    parts = re.split(r"(?m)^### (.*)$", REFERENCE.read_text())[1:]
    return {title.strip("`"): text for title, text in zip(parts[::2], parts[1::2], strict=True)}


def test_the_reference_is_what_the_code_says():
    command = [sys.executable, "tools/docs/reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_setting_has_meaning_type_unit_default_and_error():
    found = sections()
    for field in dataclasses.fields(interlace.Config):
        text = found[field.name]
        assert len(text.strip().splitlines()[0]) > 10, field.name
        for fact in ("type", "unit", "default", "error"):
            assert re.search(rf"(?m)^- {fact}: \S", text), f"{field.name} has no {fact}"
        assert f"- default: `{field.default!r}`" in text


def test_every_public_name_and_member_has_an_entry():
    found = sections()
    for name in interlace.__all__:
        assert f"interlace.{name}" in found
    attributes = found["Attributes of a Trainer"]
    for name, member in vars(interlace.Trainer).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        text = found.get(f"Trainer.{name}", "")
        assert text.strip() or f"`{name}`" in attributes, name
        if f"`{name}`" in attributes:  # said in the docstring of the class
            assert re.search(rf"`{name}`|\b{name}\b", inspect.getdoc(interlace.Trainer) or "") or name == "world_size", name


def test_every_command_and_option_has_an_entry():
    import typer

    from interlace.cli import app

    app._load_commands()
    found = sections()
    for name, command in typer.main.get_command(app.app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.name != "help" and parameter.opts[0].startswith("-"):
                assert re.search(rf"(?m)^- .*`{re.escape(parameter.opts[0])}`.*: \S", found[f"interlace {name}"]), (name, parameter.opts)


# ---- troubleshooting ----


def said_by_the_code() -> str:
    """All texts that the sources hold, one a line; what is filled in later is "..."."""
    texts = [(ROOT / name).read_text() for name in ("cmake/find_torch.cmake", "tools/setup/system.sh")]
    for file in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for file in sorted((ROOT / "src").rglob("*.cc")):
        texts += re.findall(r'"((?:[^"\\]|\\.)*)"', file.read_text())
    return "\n".join(texts)


def test_messages_of_troubleshooting_exist():
    document = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"(?m)^\| `([^`]+)` \|", document)
    said = said_by_the_code()
    assert len(messages) > 10
    for message in messages:
        for part in message.split("..."):
            part = part.strip(" '?;")
            assert part in said, f"nothing says '{part}'"


# ---- the site ----


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(v for v in (values.get("id"), values.get("name")) if v)
        target = values.get("href" if tag in ("a", "link") else "src")
        if target:
            self.targets.append(target)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs")
def test_links_of_the_site_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages: dict[Path, Links] = {}
    for file in tmp_path.rglob("*.html"):
        pages[file] = Links()
        pages[file].feed(file.read_text())
    assert len(pages) > 15
    checked = 0
    for file, page in pages.items():
        if file.name == "404.html":  # its links begin at the root of a host
            continue
        for target in page.targets:
            path, _, anchor = target.partition("#")
            if "://" in path or path.startswith(("mailto:", "data:", "javascript:")):
                continue
            there = (file.parent / path).resolve() if path else file
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{file.name}: {target}"
            if anchor and there in pages:
                assert anchor in pages[there].anchors, f"{file.name}: {target}"
            checked += 1
    assert checked > 100
