"""--config run.toml: every option of `interlace train` in a file, and the file that a run leaves in its folder.

    steps = 500                  # Optimizer steps in all, resumed ones included.
    text = "/data/book.jsonl"    # A text file or a folder of them.
    # eval_text = ""             what is not set stands as a comment

Options of the command line count more than the file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from interlace.cli.settings import SettingError, TrainSettings
from interlace.config import did_you_mean

CONFIG_FILE = "run.toml"
_NOT_KEPT = ("config", "resume")  # what belongs to a start, not to a run
_MADE = ("save", "log", "tensorboard", "program")  # paths that may not be there yet
_PATHS = ("text", "eval_text", "weights", "tier", "cluster", "plan", "save", "log", "tensorboard", "program")


def options() -> dict[str, Any]:
    """The settings that are options, by the names that the file has: those of the command line, with _ or -."""
    return {"json" if f.name == "as_json" else f.name: f for f in dataclasses.fields(TrainSettings) if f.metadata}


def read_config(file: str) -> dict[str, Any]:
    """The settings of a file. Error: it cannot be read, an unknown option, a value of another kind; with its line."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise SettingError(f"--config {file}: {getattr(e, 'strerror', None) or 'it is no text'}") from None
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    try:
        found = tomllib.loads(text)
    except ValueError as e:
        raise SettingError(f"--config {file} is no TOML: {e}") from None
    known, settings = options(), {}
    for key, value in found.items():
        name = key.replace("-", "_")
        where = f"--config {file}{_line(text, key)}"
        if name not in known or name in _NOT_KEPT:
            raise SettingError(f"{where}: '{key}' is no option of train that a file can have{did_you_mean(name, list(known))}")
        field = known[name]
        if name == "clip" and isinstance(value, str) and value.lower() == "none":
            value = None
        kinds = str(field.type).split(" | ")
        if isinstance(value, int) and not isinstance(value, bool) and "float" in kinds and "int" not in kinds:
            value = float(value)
        if value is not None and type(value).__name__ not in kinds:
            raise SettingError(f"{where}: '{key}' must be {_word(kinds)}, not {json.dumps(value, default=str)}")
        settings[field.name] = value
    return settings


def _line(text: str, key: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return f", line {number}"
    return ""


def _word(kinds: list[str]) -> str:
    words = {"int": "a whole number", "float": "a number", "str": 'text in "..."', "bool": "true or false"}
    return " or ".join(words[k] for k in kinds if k in words)


def as_toml(settings: TrainSettings) -> str:
    """Every option with its value and what it means; paths as they are found from anywhere."""
    lines = ["# Every option of this run: `interlace train --config run.toml` starts the same one."]
    for name, field in options().items():
        if name in _NOT_KEPT:
            continue
        value = None if name == "log" and settings.own_log else getattr(settings, field.name)
        is_path = name in _PATHS or (name in ("model", "tokenizer") and Path(str(value)).exists())
        if is_path and isinstance(value, str) and (Path(value).exists() or name in _MADE):
            value = str(Path(value).resolve())
        if value is None and name == "clip":
            value = "none"
        shown = f"# {name} =" if value is None else f"{name} = {json.dumps(value)}"
        lines.append(f"{shown:<40}  # {field.metadata['help']}")
    return "\n".join(lines) + "\n"
