"""What one rank does: builds the model on the meta device, compiles, trains, saves; rank 0 shows it all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.checkpoint.tensor_file import CheckpointError, DamageError
from interlace.cli import language_model
from interlace.cli.console import err, print_json, resident_bytes
from interlace.cli.program_file import FileError, stage_file, write_text
from interlace.cli.run_config import CONFIG_FILE, as_toml
from interlace.cli.run_record import KEPT_ON_RESUME, RUN_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE, RunRecord
from interlace.cli.settings import TrainSettings
from interlace.cli.train_log import Log
from interlace.cli.train_text import Text, dataset, prepare_text
from interlace.cli.train_view import TrainView, print_summary
from interlace.cli.validation import Validation
from interlace.data import TokenDataset, TokenStream
from interlace.dist import sealed
from interlace.dist.launch import Terminated
from interlace.models import PRESETS
from interlace.observe.step_trace import TraceError, TraceFiles
from interlace.plan.execute import Execution

BETAS = (0.9, 0.95)


def next_token_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next token; labels are already one token further on, and weigh as much as the batch says."""
    logits = model(input_ids=batch["input_ids"]).logits
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    if "weights" not in batch:
        return F.cross_entropy(wide, batch["labels"].flatten())
    return (F.cross_entropy(wide, batch["labels"].flatten(), reduction="none") * batch["weights"].flatten().to(wide.dtype)).mean()


@dataclasses.dataclass
class Result:
    """What the steps gave on this rank."""

    losses: list[float]  # means over the ranks, one a step
    step_seconds: list[float]
    train_seconds: float
    stopped: int = 0  # by this signal
    eval_losses: dict[int, float] = dataclasses.field(default_factory=dict)  # by steps done


class Stop:
    """SIGTERM and Ctrl-C ask for a stop after the step that runs; a second one of a kind ends the process as usual."""

    def __init__(self) -> None:
        self.asked = 0  # the signal
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = self.asked or number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _traced(trainer: Any, batch: dict[str, torch.Tensor], to: TraceFiles, view: TrainView | None) -> torch.Tensor:
    """A step that is recorded. A trace that cannot be written costs the trace, not the run."""
    before = trainer.steps
    try:
        loss: torch.Tensor = trainer.trace(batch, to.chrome, chakra=to.chakra, snapshot=to.snapshot)
    except TraceError as e:
        if view is not None:
            view.say(f"warning: {e}; training goes on without it")
        loss = trainer.step(batch) if trainer.steps == before else torch.stack(trainer.outputs["loss"]).mean()
    return loss


class Saver:
    """When to save, and what to do when that fails: before the end, to say so and train on."""

    def __init__(self, trainer: Any, settings: TrainSettings, files: Callable[[int], Any], view: TrainView | None) -> None:
        self.trainer, self.settings, self.files, self.view = trainer, settings, files, view

    def __call__(self, done: int, last: bool) -> None:
        """After `done` steps. Error: the last save failed."""
        settings, trainer = self.settings, self.trainer
        every = settings.save_every
        if settings.save is None or not (last or (every and done % every == 0)):
            return
        self._try(trainer.finish_save)
        if last:
            trainer.save(settings.save, self.files(done), keep=settings.keep)
        else:
            self._try(lambda: trainer.save(settings.save, self.files(done), wait=False, keep=settings.keep))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as e:
            if self.view is not None:
                self.view.say(f"warning: {e}; training goes on")


def _resume(trainer: Any, settings: TrainSettings) -> Path:
    """Goes on from the newest checkpoint that is sound; gives it."""
    candidates = settings.candidates()
    for i, folder in enumerate(candidates):
        try:
            trainer.load(folder)
            return folder
        except DamageError as e:
            if i + 1 == len(candidates):
                raise
            if trainer.rank == 0:
                err().print(f"warning: {e}\ngoing on from {candidates[i + 1]}", markup=False, soft_wrap=True)
    raise CheckpointError(f"no checkpoint in {settings.resume}")


def _stopped(settings: TrainSettings, done: int, rank: int, by: int) -> None:
    if rank == 0:
        saved = f", saved: interlace train --resume {settings.save} goes on" if settings.save else ", nothing saved (--save FOLDER would)"
        word = "Ctrl-C" if by == signal.SIGINT else "SIGTERM"
        err().print(f"stopped by {word} after step {done}{saved}", markup=False, soft_wrap=True)
    raise Terminated


def train_rank(settings: TrainSettings, record: RunRecord | None, other_text: bool, planned: Execution | None = None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop = Stop()
    torch.set_num_threads(settings.threads_per_rank())
    start = time.monotonic()
    tokens = prepare_text(settings, record, other_text)
    data = dataset(tokens, settings, record)
    validation = Validation(settings, tokens) if settings.evaluates else None
    text_seconds = time.monotonic() - start

    start = time.monotonic()
    first_step = record.step if record is not None else 0
    vocab, dtype = tokens.tokenizer.vocab_size, getattr(torch, settings.dtype)
    model = language_model.build(settings.model, vocab, settings.seq, dtype, keep_vocab=planned is not None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=settings.weight_decay)
    config = _config(settings, planned, model)
    settings.strategy = config.strategy
    example = _batch(data, first_step, config, rank, world)
    with interlace.compile(model, optimizer, next_token_loss, example, config) as trainer:
        if settings.save:
            trainer.reserve(settings.save)
        if settings.resume:
            folder = _resume(trainer, settings)
            first_step = trainer.steps
            if record is not None and first_step != record.step:  # an older one, which stood elsewhere in the text
                data = dataset(tokens, settings, RunRecord.load(folder))
        compile_seconds = time.monotonic() - start
        tokens_per_step = settings.batch * settings.seq
        view = TrainView(first_step, settings.end, tokens_per_step, settings.log_every) if rank == 0 else None

        if view is not None:
            view.say(f"compiled: {trainer.compile_table()}")

        saver = Saver(trainer, settings, lambda done: _run_files(settings, tokens, data, done), view)
        result = _steps(trainer, optimizer, settings, data, first_step, view, saver, stop, validation)
        if result.stopped:
            _stopped(settings, first_step + len(result.losses), rank, result.stopped)
        stats = {**trainer.stats(), "resident_bytes": resident_bytes(peak=True)}
        everyone: list[Any] = [stats]
        if world > 1:
            everyone = sealed.objects(stats, dist.group.WORLD) or []
        summary = trainer.summary()
        plans = [{k: v for k, v in plan.items() if k != "program_reports"} for plan in trainer.plans]
        if view is not None and settings.program:
            try:
                for stage, text in enumerate(trainer.stage_programs):
                    write_text(stage_file(settings.program, stage), text)
            except FileError as e:
                view.say(f"warning: {e}")
    if rank == 0:
        facts = _facts(settings, result, everyone, summary, first_step)
        facts |= {"parameters": parameters, "text_seconds": text_seconds, "compile_seconds": compile_seconds}
        facts |= {"ranks": world, "text_tokens": getattr(tokens, "count", None), "vocab": tokens.tokenizer.vocab_size, "plans": plans}
        if isinstance(data, TokenStream):
            facts["text_read"] = data.where()
        if planned is not None:
            facts["planned"] = {"file": settings.plan, "step_us": planned.step_us, "peak_bytes": planned.peak_bytes}
        print_json(facts) if settings.as_json else print_summary(facts)
    if dist.is_initialized():
        dist.destroy_process_group()


def _config(settings: TrainSettings, planned: Execution | None, model: torch.nn.Module) -> interlace.Config:
    return interlace.Config(
        strategy=settings.strategy, mesh=settings.mesh, tensor=settings.tensor, sequence_parallel=settings.sequence_parallel,
        stages=settings.stages if planned is None else planned.borders(model), stage_order=settings.stage_order,
        stage_chunks=settings.stage_chunks, accumulation=settings.accumulation, accumulate_mode=settings.accumulate_mode,
        clip_norm=settings.clip, seed=settings.seed, timeout_s=settings.timeout, trust_program=settings.trust_program,
        verify_steps=settings.verify_steps, regions=settings.regions, regions_wait=settings.regions_wait,
        weights=settings.weights, memory_limit=settings.memory_limit, tier=settings.tier,
        tier_bandwidth=settings.tier_bandwidth, passes=settings.passes,
        schedule=settings.schedule_entries() if planned is None else [(0, planned.passes(model))], cluster=settings.cluster,
        param_dtype=settings.param_dtype,
    )  # fmt: skip


def _batch(data: TokenDataset | TokenStream, step: int, config: interlace.Config, rank: int, world: int) -> dict[str, torch.Tensor]:
    names = ("input_ids", "labels", "weights")  # the last one of padded rows only
    if config.stage_meshes:  # stages that differ have the same rows in each micro-batch
        return config.deal(dict(zip(names, data.batch_at(step), strict=False)), rank, world)  # type: ignore[no-any-return]
    return dict(zip(names, data.batch_at(step, *config.data_place(rank, world)), strict=False))


def _steps(
    trainer: Any, optimizer: torch.optim.Optimizer, settings: TrainSettings, data: TokenDataset | TokenStream, first_step: int,
    view: TrainView | None, save: Saver, stop: Stop, validation: Validation | None,
) -> Result:  # fmt: skip
    rank, world = trainer.rank, trainer.world_size
    traces = settings.trace_files()
    losses, times, evals = [], [], {}
    epoch = data.place.epoch if isinstance(data, TokenStream) else 0
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        if view is not None:
            stack.enter_context(view)
        log = None
        if view is not None:
            log = stack.enter_context(contextlib.closing(Log(settings, first_step, view.say)))
        for step in range(first_step, settings.end):
            start = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate(step)
            batch = _batch(data, step, trainer.config, rank, world)
            if isinstance(data, TokenStream) and view is not None and data.place.epoch != epoch:
                epoch = data.place.epoch
                view.say(f"step {step + 1}: the text begins again ({data.where()})")
            last = step == settings.end - 1
            loss = _traced(trainer, batch, traces, view) if last and traces is not None else trainer.step(batch)
            # The ranks stop at the same step, whichever of them was asked. As many of them have each batch, so the mean is that of batches.
            asked = [float(stop.asked == signal.SIGTERM), float(stop.asked == signal.SIGINT)]
            both = torch.tensor([loss.item(), *asked], dtype=torch.float64)
            if trainer.world_size > 1:
                dist.all_reduce(both)
            losses.append(both[0].item() / trainer.world_size)
            times.append(time.monotonic() - start)
            stopping = 0 if step + 1 == settings.end else signal.SIGINT if both[2] > 0 else signal.SIGTERM if both[1] > 0 else 0
            if view is not None:
                view.plans(trainer.plans)
                view.step(step, losses[-1], times[-1])
            if log:
                log.plans(trainer.plans)
                log.regions(step + 1, trainer.stats()["regions"])
                log.write(
                    step + 1, loss=losses[-1], seconds=round(times[-1], 6), lr=settings.learning_rate(step), norm=trainer.norm,
                    tokens_per_second=settings.batch * settings.seq / times[-1], memory_bytes=trainer.stats()["peak_bytes"],
                )  # fmt: skip
            save(step + 1, bool(stopping) or step + 1 == settings.end)
            if stopping:
                return Result(losses, times, time.monotonic() - begin, stopped=stopping)
            if validation is not None and validation.due(step + 1, step + 1 == settings.end):
                evals[step + 1] = validation.loss(trainer)
                if view is not None:
                    view.evaluated(step, evals[step + 1])
                if log:
                    log.write(step + 1, eval_loss=evals[step + 1])
    return Result(losses, times, time.monotonic() - begin, eval_losses=evals)


def _run_files(settings: TrainSettings, tokens: Text, data: TokenDataset | TokenStream, done: int) -> dict[str, str | bytes]:
    """What goes into the checkpoint beside the trainer's own files."""
    kept = dataclasses.asdict(settings)
    kept = {name: value for name, value in kept.items() if name in KEPT_ON_RESUME}
    if settings.text is not None:
        kept["text"] = str(Path(settings.text).resolve())
    if settings.eval_text is not None:
        kept["eval_text"] = str(Path(settings.eval_text).resolve())
    if settings.model not in PRESETS:
        kept["model"] = str(Path(settings.model).resolve())
    if os.path.exists(settings.tokenizer):
        kept["tokenizer"] = str(Path(settings.tokenizer).resolve())
    if isinstance(data, TokenStream):
        record = RunRecord(done, tokens.digest, kept, stream=list(data.place))
    else:
        record = RunRecord(done, tokens.digest, kept, data.row(done), len(data.tokens))
    files: dict[str, str | bytes] = {RUN_FILE: record.to_json(), CONFIG_FILE: as_toml(settings)}
    files[TOKENIZER_FILE] = tokens.tokenizer.inner.to_str(pretty=True)
    if tokens.tokenizer.kind == "file":
        files[TOKENIZER_CONFIG] = tokens.tokenizer.config_text()
    return files


def _facts(
    settings: TrainSettings, result: Result, everyone: list[dict[str, Any]], summary: dict[str, Any], first_step: int
) -> dict[str, Any]:
    """The run in figures; times without the first step, which also warms up."""
    times = result.step_seconds[1:] or result.step_seconds
    tokens_per_step = settings.batch * settings.seq
    steps = len(result.losses)
    unit = summary["largest_unit"]
    return {
        "model": settings.model, "dtype": settings.dtype, "strategy": settings.strategy,
        "threads": settings.threads_per_rank(), "first_step": first_step, "last_step": first_step + steps,
        "steps": steps, "tokens_per_step": tokens_per_step, "first_loss": result.losses[0],
        "last_loss": result.losses[-1], "losses": result.losses, "eval_losses": result.eval_losses,
        "tokens_per_second": tokens_per_step * len(times) / sum(times), "step_ms": statistics.median(times) * 1e3,
        "train_seconds": result.train_seconds, "peak_bytes": max(stats["peak_bytes"] for stats in everyone),
        "peak_bytes_of_ranks": [stats["peak_bytes"] for stats in everyone],
        "resident_bytes": max(stats["resident_bytes"] for stats in everyone),
        "bytes_per_step": max(stats["bytes_received"] for stats in everyone) // steps, "largest_unit": unit,
        "not_cut": summary["not_cut"], "saved": settings.save, "log": settings.log,
    }  # fmt: skip
