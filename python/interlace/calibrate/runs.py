"""Tables of measured runs: a row a run, as CSV with whatever names of columns people have.

    runs = read_runs("mosaicml_7b.csv")                    # columns of published tables are known by several names
    runs = read_runs("mine.csv", {"gpu": "a100-80gb"})     # what the table does not say

A run says what was trained (`model`, or hidden_size, layers, heads), how (micro_batch, global_batch, tp, pp, dp, zero, recompute), on
what (gpu, gpus) and how long a step took (step_ms, iteration time, samples or tokens per second). Units stand in the names.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from interlace import _core
from interlace.config import did_you_mean
from interlace.errors import InterlaceError

# Canonical name → other names of it, in lower case with words joined by one underscore.
ALIASES = {
    "gpus": ("num_gpus", "devices", "number_of_gpus", "n_gpus", "world_size"),
    "gpu": ("gpu_type", "accelerator", "device"),
    "hidden": ("hidden_size", "d_model", "hidden_dim"),
    "heads": ("attention_heads", "num_heads", "n_heads", "number_of_attention_heads"),
    "layers": ("num_layers", "n_layers", "number_of_layers", "blocks"),
    "vocab": ("vocab_size", "vocabulary"),
    "seq": ("sequence_length", "seq_len", "sequence", "seqlen", "seq_length"),
    "micro_batch": ("micro_batch_size", "microbatch", "local_batch_size", "mbs", "batch_per_gpu", "local_batch"),
    "global_batch": ("batch_size", "global_batch_size", "batch", "gbs"),
    "accumulation": ("grad_accum", "gradient_accumulation", "acc_steps", "num_microbatches"),
    "tp": ("tensor_parallelism", "tensor_parallel", "tensor_model_parallel_size", "tensor_parallel_size"),
    "pp": ("pipeline_parallelism", "pipeline_parallel", "pipeline_model_parallel_size", "pipeline_parallel_size"),
    "interleave": ("virtual_pipeline", "vpp", "virtual_stages", "model_chunks"),
    "dp": ("data_parallelism", "data_parallel", "data_parallel_size"),
    "zero": ("sharding", "zero_stage", "zero_level"),
    "recompute": ("activation_checkpointing", "recomputation", "checkpointing", "ac"),
    "flash": ("flash_attention", "attention"),
    "stack": ("software_stack",),
    "step_ms": ("iteration_time_ms", "step_time_ms", "iter_time_ms", "time_ms", "iter_ms"),
    "step_s": ("iteration_time_s", "step_time_s", "step_time", "iteration_time", "iter_time_s", "time_s"),
    "samples_per_s": ("throughput_samples_s", "samples_s", "throughput"),
    "tokens_per_s": ("tokens_s", "wps"),
    "tokens_per_s_per_gpu": ("tps", "tps_gpu", "tokens_s_gpu", "tps_per_gpu"),
    "tflops_per_gpu": ("achieved_teraflop_s_per_gpu", "achieved_tflops_per_gpu", "tflop_s_per_gpu"),
    "peak_gib": ("peak_memory_gib", "memory_gib", "peak_mem_gib", "max_memory_gib"),
    "params": ("num_params", "parameters", "num_parameters"),
    "model": ("model_name", "model_size"),
    "label": ("name", "section", "id"),
}
TIMES = ("step_ms", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu")
STACKS = ("eager", "compiled", "graph", "megatron", "ours", "kernels")
# MPT of llm-foundry: hidden size, layers, heads.
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "1.3b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Known:
    """A published table: the columns that tell it, and what it does not say of itself."""

    name: str
    columns: frozenset[str]
    says: Mapping[str, str]


TABLES = (
    Known("llm-foundry", frozenset({"gpu", "tokens_per_s", "global_batch_tokens", "recompute", "mp_mode"}),
          {"family": "mpt", "vocab": "50368", "stack": "eager"}),
    Known("vTrain", frozenset({"step_ms", "hidden", "heads", "tp", "dp", "pp", "global_batch", "micro_batch"}),
          {"gpu": "a100-80gb", "vocab": "50257", "stack": "megatron", "flash": "no", "zero": "0"}),
    Known("Megatron-LM", frozenset({"tflops_per_gpu", "hidden", "heads", "tp", "pp"}),
          {"gpu": "a100-80gb", "vocab": "51200", "stack": "megatron", "flash": "no", "recompute": "full", "seq": "2048",
           "micro_batch": "1"}),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured run. Times in us, sizes in bytes; `line` is the row's line in its file."""

    line: int
    label: str
    model: str  # a preset's name or a config.json; "" with hidden, heads, layers
    family: str
    hidden: int
    heads: int
    layers: int
    vocab: int
    tied: bool
    seq: int
    micro_batch: int
    accumulation: int
    gpu: str
    gpus: int
    dp: int
    tp: int
    pp: int
    zero: int
    recompute: str  # none, selective, full
    flash: bool
    stack: str
    inter_gb_per_s: float  # of a node, where the table says it; 0: the preset's
    step_us: float
    peak_bytes: int  # 0: not measured
    interleave: int = 1  # parts of the model on a stage, one after another in the pipeline

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.dp

    @property
    def size(self) -> str:
        """The model, for folds by model."""
        return self.model or f"{self.family}-{self.hidden}x{self.layers}"

    @property
    def task(self) -> tuple[object, ...]:
        """What is to be trained on what: runs of one task differ in the layout alone."""
        return (self.size, self.heads, self.seq, self.global_batch, self.gpu, self.gpus)


def word(name: str) -> str:
    """A column's canonical name."""
    plain = re.sub(r"[^a-z0-9.]+", "_", name.strip().lower().replace("#", "")).strip("_")
    return next((known for known, others in ALIASES.items() if plain == known or plain in others), plain)


def read_runs(file: str | Path, says: Mapping[str, str] | None = None) -> list[Run]:
    """The runs of a table. `says`: columns that it does not have, by name. Errors name the file, the line and the column."""
    path = Path(file)
    try:
        with path.open(newline="") as opened:
            rows = list(csv.reader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise InterlaceError(f"{file} cannot be read as a table: {why}; give a CSV of a line a run (interlace calibrate --help)") from None
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if len(rows) < 2:
        raise InterlaceError(f"{file} has no runs: a line of columns, then a line a run")
    columns = [word(name) for name in rows[0]]
    twice = next((name for name in columns if columns.count(name) > 1 and name in ALIASES), None)
    if twice:
        both = " and ".join(f"'{raw.strip()}'" for raw in rows[0] if word(raw) == twice)
        raise InterlaceError(f"{file}: the columns {both} say the same, the run's {twice}: leave one out")
    given = {word(key): value for key, value in (says or {}).items()}
    known = next((table for table in TABLES if table.columns <= set(columns)), None)
    defaults = {**(known.says if known else {}), **given}
    _missing(file, set(columns) | set(defaults), rows[0])
    out = []
    for number, cells in enumerate(rows[1:], 2):
        if len(cells) != len(columns):
            raise InterlaceError(f"{file}:{number}: {len(cells)} cells, the table has {len(columns)} columns")
        fields = {**defaults, **{name: cell.strip() for name, cell in zip(columns, cells, strict=True) if cell.strip()}}
        fields |= given
        out.append(_Reader(f"{file}:{number}", number, fields).run())
    return out


def _missing(file: str | Path, columns: set[str], raw: list[str]) -> None:
    def need(what: str, *names: str) -> None:
        if not any(name in columns for name in names):
            known = [alias for name in names for alias in (name, *ALIASES.get(name, ()))]
            strange = [each.strip().lower() for each in raw if word(each) not in ALIASES]
            near = next((hint for each in strange if (hint := did_you_mean(each, known))), "")
            listed = " or ".join(names)
            given = f"give it with --set {names[0]}=..."
            raise InterlaceError(f"{file} does not say {what}: a column {listed} is missing{near or ';'} or {given}")

    need("how long a step took", *TIMES)
    need("the model", "model", "hidden")
    if "model" not in columns:
        need("the model's layers", "layers")
        need("the model's heads", "heads")
    need("how many GPUs there were", "gpus")
    need("which GPUs", "gpu")
    need("the length of sequences", "seq")
    need("the micro-batch", "micro_batch")


class _Reader:
    """One row."""

    def __init__(self, where: str, line: int, fields: Mapping[str, str]) -> None:
        self.where, self.line, self.fields = where, line, fields

    def fail(self, text: str) -> InterlaceError:
        return InterlaceError(f"{self.where}: {text}")

    def number(self, name: str, make: Callable[[str], float], least: float) -> float:
        text = self.fields[name].replace(",", "")
        try:
            value = make(text)
        except (ValueError, OverflowError):
            raise self.fail(f"{name} is '{self.fields[name]}', not a number") from None
        if not value < 1e18:  # infinite, or no number at all
            raise self.fail(f"{name} is '{self.fields[name]}', not a number that a run can have")
        if value < least:
            raise self.fail(f"{name} is {self.fields[name]}; it must be at least {least:g}")
        return value

    def whole(self, name: str, otherwise: int) -> int:
        value = self.number(name, float, 1) if self.fields.get(name) else otherwise
        if value != int(value):
            raise self.fail(f"{name} is {self.fields[name]}; it must be a whole number")
        return int(value)

    def run(self) -> Run:
        family, model, hidden, heads, layers, seq, vocab = self.shape()
        gpus, tp, pp = self.whole("gpus", 1), self.whole("tp", 1), self.whole("pp", 1)
        vocab = -(-vocab // (128 * tp)) * 128 * tp if tp > 1 else vocab  # what is cut is padded, as Megatron pads it
        if gpus % (tp * pp) != 0:
            raise self.fail(f"tp {tp} and pp {pp} do not divide {gpus} GPUs")
        dp = self.whole("dp", gpus // (tp * pp))
        if dp * tp * pp != gpus:
            raise self.fail(f"dp {dp} * tp {tp} * pp {pp} is {dp * tp * pp}, gpus says {gpus}")
        micro = self.whole("micro_batch", 1)
        accumulation = self.whole("accumulation", 0)
        whole = self.whole("global_batch", 0)
        if not accumulation:
            accumulation = max(1, whole // (micro * dp))
        if whole and micro * accumulation * dp != whole:
            raise self.fail(f"micro_batch {micro} * accumulation {accumulation} * dp {dp} is {micro * accumulation * dp}, "
                            f"global_batch says {whole}")  # fmt: skip
        run = Run(
            line=self.line, label=self.fields.get("label", ""), model=model, family=family, hidden=hidden, heads=heads, layers=layers,
            vocab=vocab, tied=family in ("mpt", "gpt"), seq=seq, micro_batch=micro, accumulation=accumulation, gpu=self.gpu(), gpus=gpus,
            dp=dp, tp=tp, pp=pp, zero=self.zero(dp), recompute=self.recompute(), flash=self.yes("flash", True),
            stack=self.stack(), inter_gb_per_s=self.link(), step_us=1.0,
            peak_bytes=int(self.number("peak_gib", float, 0) * 2**30) if self.fields.get("peak_gib") else 0,
            interleave=self.whole("interleave", 1),
        )  # fmt: skip
        return dataclasses.replace(run, step_us=self.step_us(run))

    def shape(self) -> tuple[str, str, int, int, int, int, int]:
        """family, model, hidden, heads, layers, seq, vocab."""
        seq, vocab = self.whole("seq", 2048), self.whole("vocab", 50304)
        family, model = self.fields.get("family", "gpt"), self.fields.get("model", "")
        if self.fields.get("hidden"):
            hidden, heads, layers = self.whole("hidden", 1), self.whole("heads", 1), self.whole("layers", 1)
            if hidden % heads:
                raise self.fail(f"{heads} heads do not divide a hidden size of {hidden}")
            return family, "", hidden, heads, layers, seq, vocab
        size = model.lower().removeprefix("mpt-")
        if family == "mpt" or model.lower().startswith("mpt-"):
            if size not in MPT:
                raise self.fail(f"there is no MPT of {model}{did_you_mean(size, tuple(MPT)) or ';'} sizes: {', '.join(MPT)}")
            hidden, layers, heads = MPT[size]
            counted = 12 * layers * hidden**2 + (vocab + seq) * hidden
            if self.fields.get("params") and abs(counted / float(self.fields["params"]) - 1) > 0.03:
                raise self.fail(f"MPT {model} has {counted:,} parameters, the row says {self.fields['params']}")
            return "mpt", "", hidden, heads, layers, seq, vocab
        if not model:
            raise self.fail("the row names no model")
        return "", model, 0, 0, 0, seq, vocab

    def gpu(self) -> str:
        plain = self.fields["gpu"].lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
        names = [name for name in _core.preset_names() if name != "local"]
        found = next((name for name in names if plain == name or (plain and name.startswith(plain + "-"))), None)
        if found is None:
            near = did_you_mean(plain, tuple(names)) or ";"
            raise self.fail(f"no preset for '{self.fields['gpu']}'{near} presets: {', '.join(names)}")
        return found

    def zero(self, dp: int) -> int:
        text = self.fields.get("zero", "0").upper()
        level = {"FULL_SHARD": "3", "SHARD_GRAD_OP": "2", "NO_SHARD": "0", "FSDP": "3", "DDP": "0"}.get(text, text)
        if level not in ("0", "1", "2", "3"):
            raise self.fail(f"zero is '{self.fields['zero']}': 0 to 3, FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")
        return int(level) if dp > 1 else 0

    def recompute(self) -> str:
        text = self.fields.get("recompute", "none").lower()
        kind = {"true": "full", "yes": "full", "1": "full", "false": "none", "no": "none", "0": "none"}.get(text, text)
        if kind not in ("none", "selective", "full"):
            raise self.fail(f"recompute is '{text}': none, selective or full")
        return kind

    def yes(self, name: str, otherwise: bool) -> bool:
        text = self.fields.get(name, "").lower()
        return otherwise if not text else text in ("yes", "true", "1", "flash", "flash2", "sdpa", "triton")

    def stack(self) -> str:
        text = self.fields.get("stack", "eager").lower()
        if text not in STACKS:
            raise self.fail(f"stack is '{text}'{did_you_mean(text, STACKS) or ';'} stacks: {', '.join(STACKS)}")
        return text

    def link(self) -> float:
        if self.fields.get("inter_gb_per_s"):
            return self.number("inter_gb_per_s", float, 1e-3)
        said = re.search(r"(\d+) ?Gbps", self.fields.get("label", ""))
        return 0.92 * float(said[1]) / 8 if said else 0.0  # the share of the line that nccl-tests#290 reports

    def step_us(self, run: Run) -> float:
        named = [name for name in TIMES if self.fields.get(name)]
        if not named:
            raise self.fail(f"the row has no time: none of {', '.join(TIMES)}")
        first, *others = ((name, self.time_of(name, run)) for name in named if name != "samples_per_s" or len(named) == 1)
        for name, us in others:  # samples a second are rounded in published tables
            if abs(us / first[1] - 1) > 0.05:
                raise self.fail(f"a step takes {first[1] / 1e3:.1f} ms by {first[0]} and {us / 1e3:.1f} ms by {name}: leave one out")
        return first[1]

    def time_of(self, name: str, run: Run) -> float:
        value = self.number(name, float, 1e-9)
        tokens = run.global_batch * run.seq
        if name == "step_ms":
            return value * 1e3
        if name == "step_s":
            return value * 1e6
        if name == "samples_per_s":
            return run.global_batch / value * 1e6
        if name == "tflops_per_gpu":  # Megatron-LM's formula (Narayanan et al., 2021, equation 3), recomputation included
            flops = 96.0 * tokens * run.layers * run.hidden**2
            flops *= 1 + run.seq / (6 * run.hidden) + run.vocab / (16 * run.layers * run.hidden)
            return flops / (value * 1e6 * run.gpus)
        return tokens / value * 1e6 / (run.gpus if name == "tokens_per_s_per_gpu" else 1)
