"""`interlace train`: checks everything, prepares the text, starts the ranks; each rank runs this command again."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from interlace.cli.console import Work, err
from interlace.cli.program_file import FileError, check_output, writable_folder
from interlace.cli.settings import (
    AUTO,
    TOKENIZER_FILE,
    RunRecord,
    SettingError,
    TrainSettings,
    check_explicit,
    with_plan,
    with_resumed,
)
from interlace.cli.validation import Validation
from interlace.data import TokenDataset, TokenFile, Tokenizer, find_text, prepare_tokens
from interlace.dist.launch import is_rank, run_ranks
from interlace.errors import InterlaceError

HELP = """Train a language model on text, on one or more ranks.

Starts the ranks itself; under torchrun it is one of them. Without --text it reads the standard library's sources.

[bold]Examples[/bold]

  interlace train --model llama-10m --ranks 2 --save runs/first

  interlace train --text book.txt --tokenizer bpe --vocab 2048 --steps 500 --save runs/book

  interlace train --resume runs/book --steps 1000

  interlace train --save runs/long --save-every 50 --keep 3 --resume auto --max-restarts 5

  interlace train --text book.txt --eval-text other-book.txt --eval-every 20

  interlace train --memory-limit 150MiB --program last.il && interlace explain last.il

  interlace train --schedule "0: bucket(modules=model.layers.*),reorder; 20: search(cluster={cluster},profile={profile})"

  interlace train --model path/to/config.json --strategy zero1 --ranks 4 --accumulation 4 --batch 64 --json

  interlace train --plan llama.plan --steps 50

  torchrun --nproc-per-node 2 --max-restarts 3 -m -- interlace.cli train --save runs/x --save-every 50 --resume auto
"""
D = TrainSettings()


class RankError(InterlaceError):
    """A rank failed."""


def register(app: typer.Typer) -> None:
    app.command("train", help=HELP)(train)


def train(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="A preset, or a Hugging Face config.json.")] = D.model,
    text: Annotated[
        str | None, typer.Option("--text", help="A text file or a folder of them.", show_default="standard library")
    ] = D.text,
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="byte, or bpe (trained on the text).")] = D.tokenizer,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the BPE.")] = D.vocab,
    ranks: Annotated[int, typer.Option("--ranks", help="Processes on this machine.")] = D.ranks,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps in all, resumed ones included.")] = D.steps,
    batch: Annotated[int, typer.Option("--batch", help="Sequences a step, over all ranks.")] = D.batch,
    seq: Annotated[int, typer.Option("--seq", help="Tokens in a sequence.")] = D.seq,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate; a cosine ends at a tenth of it.")] = D.lr,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps of linear warm-up.")] = D.warmup,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of AdamW.")] = D.weight_decay,
    accumulation: Annotated[
        int, typer.Option("--accumulation", help="Micro-batches that a step is cut into on each rank.")
    ] = D.accumulation,
    strategy: Annotated[
        str, typer.Option("--strategy", help="shard (ZeRO-3), zero1, or replicate (DDP).")
    ] = D.strategy,
    clip: Annotated[str, typer.Option("--clip", help="Largest global gradient norm, or none.")] = str(D.clip),
    save: Annotated[str | None, typer.Option("--save", help="A folder for the trained model.")] = D.save,
    save_every: Annotated[
        int | None, typer.Option("--save-every", help="Save also after every so many steps.", show_default="at the end")
    ] = D.save_every,
    keep: Annotated[
        int, typer.Option("--keep", help="Checkpoints to keep: the newest in the folder, older ones as FOLDER.step-N.")
    ] = D.keep,
    stop_at: Annotated[
        int | None, typer.Option("--stop-at", help="Save and stop after this step; --resume goes on.")
    ] = D.stop_at,
    resume: Annotated[
        str | None,
        typer.Option("--resume", help="Go on with a saved run; auto: with the newest in --save, if there is one."),
    ] = D.resume,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", help="Start the ranks again when one fails, from the last checkpoint.")
    ] = D.max_restarts,
    eval_text: Annotated[
        str | None, typer.Option("--eval-text", help="A text or folder that is not trained on: its loss is shown, too.")
    ] = D.eval_text,
    eval_every: Annotated[
        int, typer.Option("--eval-every", help="Steps between losses of --eval-text; also after the last.")
    ] = D.eval_every,
    eval_sequences: Annotated[
        int, typer.Option("--eval-sequences", help="Sequences of --eval-text at most, the same each time.")
    ] = D.eval_sequences,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, data order and dropout.")] = D.seed,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the parameters: fp32, bf16 or fp64.")] = D.dtype,
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads of each rank.", show_default="cores / ranks")
    ] = D.threads,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Start from safetensors: a file or a folder.")
    ] = D.weights,
    log_every: Annotated[
        int, typer.Option("--log-every", help="Steps between lines when stderr is no terminal.")
    ] = D.log_every,
    log: Annotated[
        str | None, typer.Option("--log", help="Append step, loss and seconds of every step as lines of JSON.")
    ] = D.log,
    trace: Annotated[
        str | None, typer.Option("--trace", help="Write the last step of all ranks as a Chrome trace.")
    ] = D.trace,
    trace_chakra: Annotated[
        str | None, typer.Option("--trace-chakra", help="Likewise a folder for Chakra execution traces, one a rank.")
    ] = D.trace_chakra,
    trace_snapshot: Annotated[
        str | None,
        typer.Option("--trace-snapshot", help="Likewise the memory history: pickled for .pickle and .pkl, else JSON."),
    ] = D.trace_snapshot,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="What a rank may use, for example 2GiB; the schedule is chosen to fit."),
    ] = D.memory_limit,
    tier: Annotated[
        str | None,
        typer.Option("--tier", help="Where --memory-limit sends what does not fit: a folder on a local disk, or host."),
    ] = D.tier,
    tier_bandwidth: Annotated[
        str | None,
        typer.Option("--tier-bandwidth", help="Bytes per second to and from --tier at most, for example 500MB."),
    ] = D.tier_bandwidth,
    passes: Annotated[
        str | None,
        typer.Option(
            "--passes",
            help="The whole pipeline, instead of --strategy, --clip and --param-dtype: "
            '"canonicalize,shard(ranks={ranks}),update(clip=1.0),reorder" (interlace opt --list).',
        ),
    ] = D.passes,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help='auto: search once times are measured; none; or "STEP: PASS,PASS; STEP: ..." (docs/loop.md; interlace opt --list).',
        ),
    ] = D.schedule,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="Machines to decide for: a preset or a file.", show_default="this host"),
    ] = D.cluster,
    param_dtype: Annotated[
        str | None, typer.Option("--param-dtype", help="bfloat16 or float16 for forward and backward.")
    ] = D.param_dtype,
    program: Annotated[
        str | None, typer.Option("--program", help="Write the program of the last step; interlace explain reads it.")
    ] = D.program,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan", help="Train as a plan of interlace plan says: model, ranks, batch, ZeRO, recomputation."
        ),
    ] = D.plan,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = D.as_json,
) -> None:
    names = TrainSettings.__dataclass_fields__
    given = {name: value for name, value in context.params.items() if name in names}
    given["clip"] = parse_clip(clip)
    explicit = {name for name in given if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    settings, record = with_resumed(given, explicit)
    check_explicit(settings, explicit)
    planned = with_plan(settings, explicit)
    if is_rank():
        settings.ranks = ranks_of_launcher(settings.ranks if "ranks" in explicit or planned else None)
    settings.check()
    if record is not None and record.step >= settings.end:  # only --resume auto comes here
        if not is_rank() or os.environ["RANK"] == "0":
            err().print(
                f"the run in {settings.resume} has made all of its {settings.end} steps: nothing to do",
                markup=False,
                soft_wrap=True,
            )
        return
    if is_rank():
        from interlace.cli.train_rank import train_rank

        train_rank(settings, record, "text" in explicit, planned)
        return
    check_model(settings)
    if settings.save:
        writable_folder(settings.save)
    if (traces := settings.trace_files()) is not None and (problem := traces.check()) is not None:
        raise FileError(problem)
    for file in (settings.log, settings.program):
        if file:
            check_output(file)
    with Work() as work:
        tokens = prepare_text(settings, record, "text" in explicit, work)
    dataset(tokens, settings, record)
    if settings.eval_text is not None:
        Validation(settings, tokens)
    command = [sys.executable, "-m", "interlace.cli", *sys.argv[1:]]
    for left in range(settings.max_restarts, -1, -1):
        failure = run_ranks(command, settings.ranks, settings.threads_per_rank())
        if failure is None:
            return
        if left == 0:
            raise RankError(failure.describe())
        err().print(
            f"{failure.describe()}\nstarting again, {left - 1} more restart(s) allowed", markup=False, soft_wrap=True
        )
        if settings.resume is None and not settings.auto:
            command += ["--resume", AUTO]


def dataset(tokens: TokenFile, settings: TrainSettings, record: RunRecord | None) -> TokenDataset:
    """The run's batches, from where it stood. Error: a text that ends before that place."""
    origin = (0, 0) if record is None else (record.step, record.rows)
    data = TokenDataset(tokens.open(), settings.seq, settings.batch, settings.seed, origin)
    if record is not None and record.tokens > settings.seq:
        position = record.rows % ((record.tokens - 1) // settings.seq) * settings.seq
        if tokens.count < position:
            raise SettingError(
                f"the run in {settings.resume} stands at token {position:,} of its text, but the text given has only {tokens.count:,} "
                "tokens: give a longer text, or begin a new run with --weights"
            )
    return data


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


def check_model(settings: TrainSettings) -> None:
    """Says now, and once, what every rank would find wrong with --model."""
    from interlace.cli import language_model

    language_model.check(settings.model)


def prepare_text(
    settings: TrainSettings, record: RunRecord | None, other_text: bool = False, work: Work | None = None
) -> TokenFile:
    """The token file of the run; made by whoever comes first. A resumed run keeps its tokenizer and its text."""
    progress = work.update if work is not None else None
    tokenizer = None
    if settings.resume:
        tokenizer = Tokenizer.load(Path(settings.resume) / TOKENIZER_FILE)
    tokens = prepare_tokens(
        find_text(settings.text), cache_folder(), settings.tokenizer, settings.vocab, tokenizer, progress
    )
    if record is not None and not other_text and tokens.digest != record.data_digest:
        where = settings.text or "the standard library"
        raise SettingError(
            f"the text has changed since {settings.resume} was saved ({where}): "
            "put the old text back, or name one with --text"
        )
    return tokens


def cache_folder() -> Path:
    """Where token files are kept from run to run: the user's cache, or the temporary folder where that is closed."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "interlace"
    try:
        return writable_folder(folder)
    except FileError:
        return Path(tempfile.gettempdir()) / f"interlace-{os.getuid()}"
