"""Writes docs/reference.md: every setting, every public name with its members, every command, from the code itself.

    python tools/docs/reference.py            # writes it
    python tools/docs/reference.py --check    # exit code 1 when it is not what the code says

A setting's type and default are the field's, its meaning is in Config's docstring, its error is what Config says to a wrong value.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import interlace
from interlace.cli import app
from interlace.config import Config

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "reference.md"
# What a value counts, where it counts something.
UNITS = {
    "timeout_s": "seconds", "memory_limit": "bytes", "tier_bandwidth": "bytes per second", "accumulation": "micro-batches",
    "stage_chunks": "stages", "clip_norm": "norm of the gradient", "mesh": "ranks", "schedule": "steps", "verify_steps": "steps",
    "loss_scale": "a factor",
}  # fmt: skip
# Forms of the settings that take more than one.
TYPES = {
    "mesh": "dict of axis to ranks, or text such as `dp=2,tp=4`; None", "schedule": '"auto", or list of (step, list of passes)',
    "shapes": "dict of input to list of shapes; None", "pad": "dict of input to number; None",
}  # fmt: skip
WRONG: tuple[Any, ...] = ("no such thing", -1, 0.5, True, {"dp": 0}, [1])
LATER = "checked when the model is compiled"
INTRODUCTION = """# Reference

Made from the code by `python tools/docs/reference.py`; edit the docstrings, not this page.
"""


def setting_texts() -> dict[str, str]:
    """The meaning of each setting: the two columns of Config's docstring."""
    texts: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(Config.__doc__ or "").splitlines()[1:]:
        match = re.match(r"(\w+) {2,}(\S.*)$", line)
        if match:
            name = match[1]
            texts[name] = match[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return texts


def error_of(name: str) -> str:
    """What Config says to a value of this setting that is wrong."""
    for value in WRONG:
        try:
            Config(**{name: value})
        except interlace.InterlaceError as error:  # others are faults of ours
            if name in str(error):
                return f"`Config({name}={value!r})`: {str(error).splitlines()[0]}"
    return LATER


def settings() -> Iterator[str]:
    texts = setting_texts()
    yield "## Settings"
    yield "\nOf `interlace.Config`, by name. Sizes in bytes are numbers or texts such as `20GiB`, `512MB`."
    for field in dataclasses.fields(Config):
        kind = TYPES.get(field.name) or str(field.type).replace(" | ", " or ")
        yield f"\n### `{field.name}`\n\n{texts[field.name]}\n"
        yield f"- type: {kind}"
        yield f"- unit: {UNITS.get(field.name, 'none')}"
        yield f"- default: `{field.default!r}`"
        yield f"- error: {error_of(field.name)}"


def members(owner: type) -> dict[str, Any]:
    """Public methods and properties that have a docstring or are no plain attribute, in the order of the class."""
    return {n: m for n, m in vars(owner).items() if not n.startswith("_") and (inspect.isfunction(m) or isinstance(m, property))}


def document(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").replace("<", "\\<")


def entry(title: str, thing: Any) -> str:
    target = thing.fget if isinstance(thing, property) else thing.__func__ if isinstance(thing, staticmethod) else thing
    signature = "" if isinstance(thing, property) else str(inspect.signature(target)).replace("self, ", "").replace("self", "")
    code = f"{title}{signature}".replace("'", "")
    return f"\n### `{title}`\n\n```\n{code}\n```\n\n{document(target)}"


def names() -> Iterator[str]:
    yield "\n## Python"
    for name in sorted(interlace.__all__, key=str.lower):
        thing = getattr(interlace, name)
        if name == "__version__":
            yield f"\n### `interlace.{name}`\n\nThe version, a text."
        elif name == "Config":
            yield f"\n### `interlace.{name}`\n\n{document(thing).splitlines()[0]} Its fields are the [settings](#settings) above."
        elif inspect.isfunction(thing):
            yield entry(f"interlace.{name}", thing)
        else:
            yield f"\n### `interlace.{name}`\n\n{document(thing)}"
        if name in ("Trainer", "Config"):
            shown = members(thing) | ({"from_dict": vars(thing)["from_dict"]} if name == "Config" else {})
            for member, value in shown.items():
                if document(getattr(value, "fget", None) or value):
                    yield entry(f"{name}.{member}", value)
    attributes = [n for n, m in members(interlace.Trainer).items() if isinstance(m, property) and not m.fget.__doc__]
    yield "\n### Attributes of a Trainer\n\n" + ", ".join(f"`{name}`" for name in attributes) + ": see `interlace.Trainer` above."


def commands() -> Iterator[str]:
    yield "\n## Commands\n\n`interlace COMMAND --help` shows the same, with examples."
    app._load_commands()
    root: Any = typer.main.get_command(app.app)
    for name, command in root.commands.items():
        purpose = re.split(r"\n\s*\n", command.help or "")[0].replace("\n", " ")
        yield f"\n### `interlace {name}`\n\n{purpose}\n"
        for parameter in command.params:
            if parameter.name == "help":
                continue
            option = parameter.opts[0].startswith("-")
            flags = ", ".join(f"`{flag}`" for flag in parameter.opts) if option else f"`{parameter.name.upper()}`"
            shown = "" if parameter.default in (None, False, ()) or callable(parameter.default) else f" Default: `{parameter.default}`."
            yield f"- {flags}: {' '.join((getattr(parameter, 'help', '') or '').split())}{shown}"


def text() -> str:
    found = "\n".join([INTRODUCTION, *settings(), *names(), *commands()])
    return re.sub(r"\n{3,}", "\n\n", found).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    if parser.parse_args().check:
        sys.exit("docs/reference.md is not what the code says: run python tools/docs/reference.py" if FILE.read_text() != text() else 0)
    FILE.write_text(text())
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
