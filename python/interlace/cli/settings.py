"""The settings of a training run: the options of the command, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.checkpoint.folder import kept_checkpoints
from interlace.config import STRATEGIES, Config, did_you_mean, dtype_name, mesh_form, parse_bytes
from interlace.config.forms import mesh_ranks
from interlace.config.schedule import check_passes
from interlace.cost.machine import cores
from interlace.data.dataset import nearest
from interlace.errors import InterlaceError
from interlace.observe.step_trace import TraceFiles

if TYPE_CHECKING:
    from interlace.plan.execute import Execution

DTYPES = ("float32", "bfloat16", "float64")
AUTO = "auto"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


class SettingError(InterlaceError):
    """A setting of the run that cannot be."""


def _option(default: Any, help: str, shown: str | None = None) -> Any:
    """A setting that is an option of the command. `shown`: what the help says instead of the default."""
    return dataclasses.field(default=default, metadata={"help": help, "shown": shown})


@dataclasses.dataclass
class TrainSettings:
    """What `interlace train` was asked to do. Each setting with a help is an option of that name."""

    config: str | None = _option(None, "A TOML file of options (NAME = VALUE), as each run leaves one as run.toml.")
    model: str = _option("llama-10m", "A preset, a Hugging Face config.json, or a folder with its weights and tokenizer, too.")
    text: str | None = _option(None, "A text, .jsonl or .parquet file, or a folder of them.", shown="standard library")
    text_column: str | None = _option(None, "What a document is called in .jsonl and .parquet files.", shown="text, else content")
    stream: bool = _option(False, "Tokenize the text while it is trained on, never all of it beforehand.")
    shuffle_buffer: int = _option(1024, "With --stream, rows that are shuffled together; 1 keeps the text's order.")
    pack: bool = _option(True, "With --stream, documents joined into full rows, or else a document a row, padding without weight.")
    tokenizer: str = _option("byte", "byte, bpe (trained on the text), or a Hugging Face tokenizer: a path, or a name in the local cache.")
    vocab: int = _option(4096, "Entries of the BPE.")
    ranks: int = _option(2, "Processes on this machine.")
    steps: int = _option(120, "Optimizer steps in all, resumed ones included.")
    batch: int = _option(8, "Sequences a step, over all ranks.")
    seq: int = _option(256, "Tokens in a sequence.")
    lr: float = _option(0.001, "Peak learning rate; a cosine ends at a tenth of it.")
    warmup: int = _option(10, "Steps of linear warm-up.")
    weight_decay: float = _option(0.1, "Of AdamW.")
    accumulation: int = _option(1, "Micro-batches that a step is cut into on each rank.")
    strategy: str = _option(
        "auto", "shard (ZeRO-3), zero1, or replicate (DDP); with axis pp also one a stage: zero1+shard.", shown="shard; zero1 with pp"
    )
    mesh: str | None = _option(
        None, "Ranks by axis: replica=2,dp=2 shards within dp, the same on each replica; dp=2,tp=2 cuts products over tp; pp=2,dp=2 "
        "runs the layers on two stages, pp=2,dp=2+1 on stages of two ranks and of one.",
        shown="dp=RANKS",
    )  # fmt: skip
    tensor: str = _option("auto", "With axis tp, how parameters are cut: auto, model (Hugging Face's plan), or a file.")
    sequence_parallel: bool = _option(True, "With axis tp, cut what lies between the products along the sequence.")
    stages: str = _option("auto", "With axis pp, where stages begin: auto, or parameters or modules joined by +.")
    stage_order: str = _option("auto", "With axis pp, what a stage runs when: auto, 1f1b, gpipe, interleaved, zero_bubble or v.")
    stage_chunks: int = _option(1, "With axis pp, stages of each rank (interleaved).")
    clip: float | None = _option(1.0, "Largest global gradient norm, or none.")
    save: str | None = _option(None, "A folder for the trained model.")
    save_every: int | None = _option(None, "Save also after every so many steps.", shown="at the end")
    keep: int = _option(1, "Checkpoints to keep: the newest in the folder, older ones as FOLDER.step-N.")
    stop_at: int | None = _option(None, "Save and stop after this step; --resume goes on.")
    resume: str | None = _option(None, "Go on with a saved run; auto: with the newest in --save, if there is one.")
    timeout: float = _option(300.0, "Seconds that ranks wait for one another; a rank that is dead or cut off is named sooner.")
    encrypt: bool = _option(False, "Encrypt what ranks send one another (docs/security.md).")
    trust_program: bool = _option(False, "With --resume, run the checkpoint's program though it was made elsewhere.")
    regions: str = _option(
        "auto", "Norms, activations and the like as one kernel each: on, exact (the bits of their ops; CPUs), off, or auto: on for CUDA."
    )
    regions_wait: bool = _option(False, "Wait for regions that have to be compiled; else they are swapped in while it trains.")
    verify_steps: int = _option(0, "Make one of so many steps twice and compare: finds hardware that computes wrong.", shown="never")
    max_restarts: int = _option(0, "Start the ranks again when one fails, from the last checkpoint.")
    eval_text: str | None = _option(None, "A text or folder that is not trained on: its loss is shown, too.")
    eval_share: float | None = _option(None, "Likewise this share of --text, for example 0.01: its end, with --stream some documents.")
    eval_every: int = _option(50, "Steps between losses of --eval-text or --eval-share; also after the last.")
    eval_sequences: int = _option(64, "Sequences of them at most, the same each time.")
    seed: int = _option(0, "Of weights, data order and dropout.")
    dtype: str = _option("float32", "Of the parameters: float32, bfloat16 or float64.")
    threads: int | None = _option(None, "CPU threads of each rank.", shown="cores / ranks")
    weights: str | None = _option(None, "Start from safetensors: a file or a folder.")
    log_every: int = _option(10, "Steps between lines when stderr is no terminal.")
    log: str | None = _option(
        None, "Append loss, lr, norm, speed and memory of every step as lines of JSON (interlace report shows them).", shown="SAVE.jsonl",
    )  # fmt: skip
    tensorboard: str | None = _option(None, "The same for TensorBoard, into this folder.")
    wandb: str | None = _option(None, "The same for Weights & Biases, as this project; offline unless WANDB_MODE says otherwise.")
    trace: str | None = _option(None, "Write the last step of all ranks as a Chrome trace.")
    trace_chakra: str | None = _option(None, "Likewise a folder for Chakra execution traces, one a rank.")
    trace_snapshot: str | None = _option(None, "Likewise the memory history: pickled for .pickle and .pkl, else JSON.")
    memory_limit: str | None = _option(None, "What a rank may use, for example 2GiB; the schedule is chosen to fit.")
    tier: str | None = _option(None, "Where --memory-limit sends what does not fit: a folder on a local disk, or host.")
    tier_bandwidth: str | None = _option(None, "Bytes per second to and from --tier at most, for example 500MB.")
    passes: str | None = _option(
        None,
        "The whole pipeline, instead of --strategy, --clip and --param-dtype: "
        '"canonicalize,shard(ranks={ranks}),update(clip=1.0),reorder" (interlace opt --list).',
    )
    schedule: str = _option(
        "auto",
        'auto: search once times are measured; none; or "STEP: PASS,PASS; STEP: ..." (docs/loop.md; interlace opt --list).',
    )
    cluster: str | None = _option(None, "Machines to decide for: a preset or a file.", shown="this host")
    param_dtype: str | None = _option(None, "bfloat16 or float16 for forward and backward.")
    program: str | None = _option(None, "Write the program of the last step (of a pipeline also last-1.il, ...); interlace explain reads it.")
    plan: str | None = _option(None, "Train as a plan of interlace plan says: model, ranks, batch, ZeRO, recomputation.")
    as_json: bool = _option(False, "Print the summary as one JSON object.")
    accumulate_mode: str = "auto"
    own_log: bool = False  # nobody named one: it is the saved run's own, begun anew with the run
    auto: bool = False  # --resume auto: from the newest checkpoint in the --save folder, where there is one

    def check(self) -> None:
        """Everything that can be said without reading text or model. Errors name the option and what would do."""
        counts = "ranks steps batch seq accumulation log_every vocab keep eval_every eval_sequences threads save_every stop_at"
        for name in [*counts.split(), "shuffle_buffer"]:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("warmup", "seed", "weight_decay", "max_restarts", "verify_steps"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        for name in ("lr", "clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise SettingError(f"--{name} must be a positive number, not {value}")
        if self.eval_share is not None and not 0 < self.eval_share < 1:
            raise SettingError(f"--eval-share must be between 0 and 1, not {self.eval_share}")
        if self.eval_share is not None and self.eval_text is not None:
            raise SettingError("--eval-share contradicts --eval-text, which is evaluated on instead: leave one of them out")
        if not self.pack and not self.stream:
            raise SettingError("--no-pack needs --stream")
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
        if self.passes is not None or self.schedule != "auto":
            from interlace import _core

            entries = self.schedule_entries()
            check_passes(Config(passes=self.passes, schedule=[] if entries == "auto" else entries), _core.pass_table())
        if self.weights is not None and self.resume is None and not os.path.exists(self.weights):
            raise SettingError(f"--weights {self.weights}: there is no such file or folder")
        if self.tokenizer not in ("byte", "bpe") and not os.path.exists(self.tokenizer) and did_you_mean(self.tokenizer, ("byte", "bpe")):
            _one_of("tokenizer", self.tokenizer, ("byte", "bpe"))
        self.dtype = dtype_name(self.dtype)
        for strategy in self.strategy.split("+"):
            _one_of("strategy", strategy, ("auto", *STRATEGIES))
        mesh = mesh_form(self.mesh)
        if mesh is not None and mesh_ranks(mesh) != self.ranks:
            raise SettingError(f"--mesh {self.mesh} is for {mesh_ranks(mesh)} ranks, but --ranks is {self.ranks}")
        if self.accumulate_mode == "auto" and "pp" not in dict(mesh or ()):
            self.accumulate_mode = "reduce_each"  # a search that decides it would give a resumed run other bits
        _one_of("dtype", self.dtype, DTYPES)
        if self.tensor != "auto" and self.data_ranks == self.ranks:
            raise SettingError(f"--tensor {self.tensor} needs an axis tp, as in --mesh dp=1,tp={self.ranks}")
        if self.tensor not in ("auto", "model") and not os.path.isfile(self.tensor):
            hint = did_you_mean(self.tensor, ("auto", "model"))
            raise SettingError(f"--tensor '{self.tensor}' is neither auto, model nor a file{hint}")
        parts = self.data_ranks * self.accumulation
        if self.batch % parts:
            why = f"{self.data_ranks} ranks" + ("" if self.data_ranks == self.ranks else " with batches of their own")
            why += f" x {self.accumulation} micro-batches" if self.accumulation > 1 else ""
            raise SettingError(f"--batch {self.batch} is not a multiple of {why}: use {nearest(self.batch, parts)}")

    def take_folder(self, explicit: set[str]) -> None:
        """Of a --model that is a folder (or a name in the local cache): its weights, and its tokenizer unless one is named."""
        from interlace.models import PRESETS

        if self.model not in PRESETS and not os.path.exists(self.model) and "/" in self.model:
            from interlace.data.tokens import cached_snapshot

            self.model = str(cached_snapshot(self.model) or self.model)
        folder = Path(self.model)
        if not folder.is_dir():
            return
        if self.weights is None and any((folder / name).is_file() for name in WEIGHT_FILES):
            self.weights = self.model
        if "tokenizer" not in explicit and (folder / "tokenizer.json").is_file():
            self.tokenizer = self.model

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

    def take_log(self) -> None:
        """A run that is saved has its log beside it, where nobody said otherwise."""
        if self.log is None and self.save is not None:
            self.own_log, self.log = True, os.path.normpath(self.save) + ".jsonl"

    @property
    def evaluates(self) -> bool:
        return self.eval_text is not None or self.eval_share is not None

    @property
    def end(self) -> int:
        """The step after the last one of this process."""
        return min(self.steps, self.stop_at or self.steps)

    @property
    def data_ranks(self) -> int:
        """Ranks with batches of their own: those along axis tp have the same."""
        config = Config(mesh=self.mesh, passes=self.passes)
        if config.stage_meshes:  # of stages that differ, what the rows of a micro-batch are dealt to
            return math.lcm(*(axes["dp"] for axes in config.stage_meshes))
        return config.data_place(0, self.ranks)[1]

    @property
    def micro_batch(self) -> int:
        return self.batch // (self.data_ranks * self.accumulation)

    def threads_per_rank(self) -> int:
        return self.threads or max(1, cores() // self.ranks)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth of the peak at the last step; a function of the step alone."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress))))


def check_explicit(settings: TrainSettings, explicit: set[str]) -> None:
    """Options of the command line that --passes decides too. Error: one of them."""
    for name in ("strategy", "mesh", "tensor", "sequence_parallel", "stages", "clip", "param_dtype", "plan"):
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
               "param_dtype": how.param_dtype, "mesh": how.mesh}  # fmt: skip
    if "stage_order" not in explicit:
        settings.stage_order = how.stage_order
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


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingError(f"--{name} '{value}' is not one of {', '.join(choices)}{did_you_mean(value, choices)}")


def ranks_of_launcher(asked: int | None) -> int:
    """The number of ranks that are really there. Error: another one was asked for."""
    world = int(os.environ["WORLD_SIZE"])
    if asked is not None and asked != world:
        raise SettingError(f"--ranks {asked}, but the launcher started {world}: leave --ranks out under torchrun")
    return world


def parse_clip(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"--clip '{text}' is neither a number nor none") from None
