"""What is saved beside a checkpoint so that `interlace train` can go on, and --resume."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.tensor_file import CheckpointError
from interlace.cli.run_config import read_config
from interlace.cli.settings import AUTO, SettingError, TrainSettings
from interlace.data import Place
from interlace.errors import UNREADABLE, InterlaceError

RUN_FILE = "run.json"  # in the folder of a saved run, beside the trainer's own files
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FORMAT = 3
# Of a resumed run: what describes the run is taken over; where and how this process works is not.
KEPT_ON_RESUME = (
    *("model", "text", "tokenizer", "vocab", "steps", "batch", "seq", "lr", "warmup", "weight_decay"),
    *("accumulation", "accumulate_mode", "strategy", "clip", "passes", "regions", "seed", "dtype", "ranks", "mesh"),
    *("tensor", "sequence_parallel", "stages", "stage_order", "stage_chunks"),
    *("eval_text", "eval_share", "eval_every", "eval_sequences", "text_column", "stream", "shuffle_buffer", "pack"),
)


@dataclasses.dataclass
class RunRecord:
    """What is saved with a checkpoint so that the run can go on: `step` steps are done, the next is number `step`."""

    step: int
    data_digest: str
    settings: dict[str, Any]
    rows: int = 0  # sequences read so far: where the run stands in its text
    tokens: int = 0  # of the text
    stream: list[int] | None = None  # with --stream, the Place in its text

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RunRecord:
        file = Path(folder) / RUN_FILE
        try:
            if not file.is_file():
                raise FileNotFoundError
            with Checkpoint(Path(folder)) as checkpoint:
                data = json.loads(checkpoint.read(RUN_FILE))
            if data["format"] > FORMAT:
                newer = f"format {data['format']}, this one reads {FORMAT}"
                raise SettingError(f"{file} was written by a newer version ({newer}); update interlace")
            step, rows, tokens = (int(data[name]) for name in ("step", "rows", "tokens"))
            stream = None if data.get("stream") is None else list(Place(*map(int, data["stream"])))
            if min(step, rows, tokens, *(stream or ())) < 0:
                raise ValueError("a negative number")
            record = cls(step, str(data["data_digest"]), dict(data["settings"]), rows, tokens, stream)
            for name, value in record.settings.items():
                if name in KEPT_ON_RESUME and not fits(name, value):
                    raise TypeError(f"the setting {name} is {str(value)[:40]!r}")
        except FileNotFoundError:
            raise SettingError(f"--resume {folder}: no saved run there (no {RUN_FILE})") from None
        except OSError as error:
            raise SettingError(f"cannot read {file}: {error.strerror}") from None
        except UNREADABLE as error:
            raise SettingError(f"{file} is cut off or was edited ({type(error).__name__}: {error})") from None
        return record


def with_resumed(given: dict[str, Any], explicit: set[str]) -> tuple[TrainSettings, RunRecord | None]:
    """The settings of the command line, on top of those of the resumed run where there is one."""
    if given.get("config") is not None:
        for name, value in read_config(given["config"]).items():
            if name not in explicit:
                given[name] = value
                explicit.add(name)
    settings = TrainSettings(**given)
    if settings.resume == AUTO:
        settings.auto, settings.resume = True, settings.save
        if settings.save is None:
            raise SettingError("--resume auto needs --save FOLDER: it goes on from the newest checkpoint there")
        if not any((folder / RUN_FILE).exists() for folder in settings.candidates()):
            settings.resume = None
    if settings.resume is None:
        return settings, None
    record = _newest_record(settings)
    types = {field.name for field in dataclasses.fields(TrainSettings)}
    for name in KEPT_ON_RESUME:
        elsewhere = name in ("mesh", "tensor") and "ranks" in explicit  # a mesh is for its ranks; others begin with dp alone
        if name in record.settings and name in types and name not in explicit and not elsewhere:
            setattr(settings, name, record.settings[name])
    if settings.save is None:
        settings.save = settings.resume
    if record.step >= settings.end and not settings.auto:
        option = "--stop-at" if settings.end < settings.steps else "--steps"
        done = f"{record.step} of {settings.end} steps"
        raise SettingError(f"the run in {settings.resume} has made {done}: give more with {option}")
    return settings, record


def _newest_record(settings: TrainSettings) -> RunRecord:
    """What the newest sound checkpoint says of its run. Error: of the newest, when none is sound."""
    first: InterlaceError | None = None
    for folder in settings.candidates():
        try:
            return RunRecord.load(folder)
        except (SettingError, CheckpointError) as e:
            first = first or e
    assert first is not None
    raise first


def fits(name: str, value: Any) -> bool:
    """Whether a value is of the setting's type; a file may hold anything."""
    kinds = str(TrainSettings.__dataclass_fields__[name].type).split(" | ") if name in TrainSettings.__dataclass_fields__ else []
    kind = "None" if value is None else type(value).__name__
    return not kinds or kind in kinds or (kind == "int" and "float" in kinds)
