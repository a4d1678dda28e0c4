"""What `interlace report` may be given instead of a program: a run's folder or checkpoint, its log, a trace of a step."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from interlace.cli.program_file import FileError
from interlace.files import read_text
from interlace.report import Run, Timeline, read_log, read_trace


def run_of(name: str) -> Run | None:
    """None: it is a program. Error: what is there but cannot be read."""
    path = Path(name)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        begin = file.read(4096).lstrip()
    if not begin.startswith((b"{", b"[")):
        return None
    if begin.startswith(b"[") or b'"traceEvents"' in begin or b'"step"' not in begin.split(b"\n")[0]:
        return Run(name, trace=trace_of(name))
    return Run(name, log=read_log(read_text(path, "a log", FileError), name))


def trace_of(file: str) -> Timeline:
    path = Path(file)
    if path.is_dir():
        raise FileError(f"{file} is a folder: name a trace file")
    try:
        return read_trace(path.read_bytes(), file)
    except FileNotFoundError:
        raise FileError(f"no such file: {file}") from None
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None


def events_of(file: str) -> list[dict[str, Any]]:
    """The events of a trace, of all its ranks."""
    trace_of(file)  # with its errors
    root = json.loads(Path(file).read_bytes())
    return list(root["traceEvents"] if isinstance(root, dict) else root)


def _folder(folder: Path) -> Run:
    """A run's folder or one checkpoint of it: its settings, and what its log and its trace hold, where they still are."""
    from interlace.cli.run_record import RUN_FILE, RunRecord  # needs torch

    newest = sorted((f for f in folder.glob("*") if (f / RUN_FILE).is_file()), key=lambda f: f.stat().st_mtime)
    place = folder if (folder / RUN_FILE).is_file() or not newest else newest[-1]
    own_log = Path(re.sub(r"\.step-\d+$", "", os.path.normpath(folder)) + ".jsonl")
    if not (place / RUN_FILE).is_file():
        if own_log.is_file():  # it trains, and has saved nothing yet
            return Run(str(folder), log=read_log(read_text(own_log, "a log", FileError), str(own_log)))
        raise FileError(
            f"{folder} is a folder without a run (no {RUN_FILE}): name a program, a log of interlace train --log, a trace, "
            "or what --save wrote"
        )
    record = RunRecord.load(place)
    run = Run(str(folder), settings={"steps done": str(record.step)})
    run.settings |= {name: str(value) for name, value in record.settings.items() if value is not None}
    options = _options(place)
    if (log := _there(options.get("log") or own_log, place)) is not None:
        run.log = read_log(read_text(log, "a log", FileError), str(log))
    if (trace := _there(options.get("trace"), place)) is not None:
        run.trace = trace_of(str(trace))
    return run


def _options(folder: Path) -> dict[str, Any]:
    """Of run.toml; none where it is missing or from elsewhere."""
    from interlace.cli.run_config import CONFIG_FILE, read_config
    from interlace.cli.settings import SettingError

    try:
        return read_config(str(folder / CONFIG_FILE))
    except SettingError:
        return {}


def _there(file: Any, folder: Path) -> Path | None:
    """A file that the run's options name, where it was written or beside the run."""
    if not file:
        return None
    found = (each for each in (Path(file), folder / Path(file).name, folder.parent / Path(file).name) if each.is_file())
    return next(found, None)
