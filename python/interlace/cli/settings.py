"""The settings of a training run: checked before anything starts, saved with the checkpoint, taken up by --resume."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.folder import kept_checkpoints
from interlace.checkpoint.tensor_file import CheckpointError
from interlace.config import STRATEGIES, did_you_mean, parse_bytes
from interlace.data.dataset import nearest
from interlace.errors import InterlaceError
from interlace.observe.step_trace import TraceFiles

if TYPE_CHECKING:
    from interlace.plan.execute import Execution

RUN_FILE = "run.json"  # in the folder of a saved run, beside the trainer's own files
TOKENIZER_FILE = "tokenizer.json"
DTYPES = ("fp32", "bf16", "fp64")
FORMAT = 2
AUTO = "auto"


class SettingError(InterlaceError):
    """A setting of the run that cannot be."""


@dataclasses.dataclass
class TrainSettings:
    """What `interlace train` was asked to do; the help of the command says what each means."""

    model: str = "llama-10m"
    text: str | None = None
    tokenizer: str = "byte"
    vocab: int = 4096
    ranks: int = 2
    steps: int = 120
    batch: int = 8
    seq: int = 256
    lr: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.1
    accumulation: int = 1
    strategy: str = "shard"
    accumulate_mode: str = "reduce_each"
    clip: float | None = 1.0
    save: str | None = None
    resume: str | None = None
    seed: int = 0
    dtype: str = "fp32"
    threads: int | None = None
    weights: str | None = None
    log_every: int = 10
    log: str | None = None
    save_every: int | None = None
    keep: int = 1
    max_restarts: int = 0
    eval_text: str | None = None
    eval_every: int = 50
    eval_sequences: int = 64
    stop_at: int | None = None
    trace: str | None = None
    trace_chakra: str | None = None
    trace_snapshot: str | None = None
    memory_limit: str | None = None
    tier: str | None = None
    tier_bandwidth: str | None = None
    passes: str | None = None
    schedule: str = "auto"
    cluster: str | None = None
    param_dtype: str | None = None
    program: str | None = None
    plan: str | None = None
    as_json: bool = False
    auto: bool = False  # --resume auto: from the newest checkpoint in the --save folder, where there is one

    def check(self) -> None:
        """Everything that can be said without reading text or model. Errors name the option and what would do."""
        for name in (
            "ranks",
            "steps",
            "batch",
            "seq",
            "accumulation",
            "log_every",
            "vocab",
            "keep",
            "eval_every",
            "eval_sequences",
        ):
            if getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("warmup", "seed", "weight_decay", "max_restarts"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise SettingError(f"--{name} must be a positive number, not {value}")
        for name in ("threads", "save_every", "stop_at"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        needs_folder = {"save_every": self.save_every, "stop_at": self.stop_at, "max_restarts": self.max_restarts}
        for name, value in needs_folder.items():
            if self.save is None and value:
                raise SettingError(f"--{name.replace('_', '-')} needs --save FOLDER")
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if self.tier_bandwidth is not None:
            parse_bytes(self.tier_bandwidth)
            if self.tier in (None, "host"):
                raise SettingError("--tier-bandwidth needs --tier FOLDER")
        if self.tier not in (None, "host") and not os.path.isdir(self.tier):
            raise SettingError(f"--tier {self.tier} is not a folder; make it first, on a fast local disk, or give host")
        self.schedule_entries()
        _one_of("tokenizer", self.tokenizer, ("byte", "bpe"))
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("dtype", self.dtype, DTYPES)
        parts = self.ranks * self.accumulation
        if self.batch % parts:
            why = f"{self.ranks} ranks" + (f" x {self.accumulation} micro-batches" if self.accumulation > 1 else "")
            raise SettingError(f"--batch {self.batch} is not a multiple of {why}: use {nearest(self.batch, parts)}")

    def trace_files(self) -> TraceFiles | None:
        """Where the last step is recorded, if it is."""
        files = TraceFiles(self.trace, self.trace_chakra, self.trace_snapshot)
        return None if files == TraceFiles() else files

    def schedule_entries(self) -> Any:
        """--schedule as Config takes it: "auto", or entries of "STEP: PASS,PASS; STEP: ..."."""
        if self.schedule == "auto":
            return "auto"
        if self.schedule == "none":
            return []
        entries = []
        for part in self.schedule.split(";"):
            step, colon, passes = part.partition(":")
            if not colon or not step.strip().isdigit():
                raise SettingError(
                    f"--schedule '{part.strip()}': write STEP: PASSES, for example \"0: unshard(); 10: "
                    'search(cluster={cluster},profile={profile})", or auto, or none'
                )
            entries.append((int(step), [p for p in re.split(r",(?![^()]*\))", passes) if p.strip()]))
        return entries

    def candidates(self) -> list[Path]:
        """The checkpoints that --resume may go on from: the folder, and with auto the older ones beside it."""
        assert self.resume is not None
        folder = Path(os.path.abspath(self.resume))
        return [Path(self.resume), *(kept_checkpoints(folder) if self.auto else [])]

    @property
    def end(self) -> int:
        """The step after the last one of this process."""
        return min(self.steps, self.stop_at or self.steps)

    @property
    def micro_batch(self) -> int:
        return self.batch // (self.ranks * self.accumulation)

    def threads_per_rank(self) -> int:
        return self.threads or max(1, cores() // self.ranks)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth of the peak at the last step; a function of the step alone."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress))))


# Of a resumed run: what describes the run is taken over; where and how this process works is not.
KEPT_ON_RESUME = (
    *("model", "text", "tokenizer", "vocab", "steps", "batch", "seq", "lr", "warmup", "weight_decay"),
    *("accumulation", "accumulate_mode", "strategy", "clip", "passes", "seed", "dtype", "ranks"),
    *("eval_text", "eval_every", "eval_sequences"),
)


@dataclasses.dataclass
class RunRecord:
    """What is saved with a checkpoint so that the run can go on: `step` steps are done, the next is number `step`."""

    step: int
    data_digest: str
    settings: dict[str, Any]
    rows: int = 0  # sequences read so far: where the run stands in its text
    tokens: int = 0  # of the text

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
            if min(step, rows, tokens) < 0:
                raise ValueError("a negative number")
            record = cls(step, str(data["data_digest"]), dict(data["settings"]), rows, tokens)
            for name, value in record.settings.items():
                if name in KEPT_ON_RESUME and not fits(name, value):
                    raise TypeError(f"the setting {name} is {str(value)[:40]!r}")
        except FileNotFoundError:
            raise SettingError(f"--resume {folder}: no saved run there (no {RUN_FILE})") from None
        except OSError as error:
            raise SettingError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"{file} is cut off or was edited ({type(error).__name__}: {error})") from None
        return record


def with_resumed(given: dict[str, Any], explicit: set[str]) -> tuple[TrainSettings, RunRecord | None]:
    """The settings of the command line, on top of those of the resumed run where there is one."""
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
        if name in record.settings and name in types and name not in explicit:
            setattr(settings, name, record.settings[name])
    if settings.save is None:
        settings.save = settings.resume
    if record.step >= settings.end and not settings.auto:
        option = "--stop-at" if settings.end < settings.steps else "--steps"
        done = f"{record.step} of {settings.end} steps"
        raise SettingError(f"the run in {settings.resume} has made {done}: give more with {option}")
    return settings, record


def check_explicit(settings: TrainSettings, explicit: set[str]) -> None:
    """Options of the command line that --passes decides too. Error: one of them."""
    for name in ("strategy", "clip", "param_dtype", "plan"):
        if settings.passes is not None and name in explicit:
            option = "--" + name.replace("_", "-")
            raise SettingError(f"{option} contradicts --passes, which names every pass: leave one of them out")


def with_plan(settings: TrainSettings, explicit: set[str]) -> Execution | None:
    """Takes what the plan decides into the settings. Error: a plan that cannot be trained, an option that contradicts it."""
    if settings.plan is None:
        return None
    from interlace.plan.execute import execution_of, read_plan

    how = execution_of(read_plan(settings.plan))
    decided = {"model": how.model, "ranks": how.ranks, "batch": how.batch, "seq": how.seq, "strategy": how.strategy,
               "accumulation": how.accumulation, "accumulate_mode": how.accumulate_mode,
               "param_dtype": how.param_dtype}  # fmt: skip
    for name, value in decided.items():
        if name in explicit and getattr(settings, name) != value:
            option = "--" + name.replace("_", "-")
            raise SettingError(
                f"{option} {getattr(settings, name)} contradicts {settings.plan}, which says {value}: leave {option} out, or plan again"
            )
        setattr(settings, name, value)
    if "schedule" in explicit:
        raise SettingError(f"--schedule contradicts {settings.plan}, which decides the passes: leave one of them out")
    return how


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
    kinds = (
        str(TrainSettings.__dataclass_fields__[name].type).split(" | ")
        if name in TrainSettings.__dataclass_fields__
        else []
    )
    kind = "None" if value is None else type(value).__name__
    return not kinds or kind in kinds or (kind == "int" and "float" in kinds)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingError(f"--{name} '{value}' is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
