"""`interlace train`: checks everything, prepares the text, starts the ranks; each rank runs this command again."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from typing import Annotated, Any, get_type_hints

import torch
import typer

from interlace.cli import end_at_once, main
from interlace.cli.console import Work, err
from interlace.cli.program_file import FileError, check_output, writable_folder
from interlace.cli.run_record import RunRecord, with_resumed
from interlace.cli.settings import AUTO, TrainSettings, check_explicit, parse_clip, ranks_of_launcher, with_plan
from interlace.cli.train_log import check as check_log
from interlace.cli.train_text import dataset, prepare_text
from interlace.cli.validation import Validation
from interlace.dist.fork_server import ForkServer
from interlace.dist.launch import is_rank, run_ranks
from interlace.dist.secret import ENCRYPT, encrypts
from interlace.errors import InterlaceError

HELP = """Train a language model on text, on one or more ranks.

Starts the ranks itself; under torchrun it is one of them. Without --text it reads the standard library's sources.

[bold]Examples[/bold]
  interlace train --model llama-10m --ranks 2 --save runs/first
  interlace train --text book.txt --tokenizer bpe --vocab 2048 --steps 500 --save runs/book
  interlace train --resume runs/book --steps 1000
  interlace train --save runs/long --save-every 50 --keep 3 --resume auto --max-restarts 5
  interlace train --text book.txt --eval-text other-book.txt --eval-every 20
  interlace train --text corpus/ --stream --tokenizer path/to/hf-folder --eval-share 0.01 --save runs/corpus --save-every 100
  interlace train --text chats.parquet --text-column body --stream --no-pack
  interlace train --memory-limit 150MiB --program last.il && interlace explain last.il
  interlace train --schedule "0: bucket(modules=model.layers.*),reorder; 20: search(cluster={cluster},profile={profile})"
  interlace train --model path/to/config.json --strategy zero1 --ranks 4 --accumulation 4 --batch 64 --json
  interlace train --model path/to/hf-folder --text data.jsonl --dtype float32 --lr 2e-5 --save runs/tuned
  interlace train --config runs/book/run.toml --steps 2000 --save runs/longer
  interlace train --plan llama.plan --steps 50
  torchrun --nproc-per-node 2 --max-restarts 3 -m -- interlace.cli train --save runs/x --save-every 50 --resume auto
"""


class RankError(InterlaceError):
    """A rank failed."""


def _signature() -> inspect.Signature:
    """The context and an option for each setting that has a help."""
    kind, types = inspect.Parameter.KEYWORD_ONLY, get_type_hints(TrainSettings)
    found = [inspect.Parameter("context", kind, annotation=typer.Context)]
    for field in dataclasses.fields(TrainSettings):
        if not field.metadata:
            continue
        default, of = field.default, types[field.name]
        if field.name == "clip":  # a number, or none
            default, of = str(default), str
        name = "--json" if field.name == "as_json" else "--" + field.name.replace("_", "-")
        if of is bool and default:  # what can only be turned off
            name = f"{name}/--no-{field.name.replace('_', '-')}"
        shown = field.metadata["shown"] or True
        option = typer.Option(name, help=field.metadata["help"], show_default=shown)
        found.append(inspect.Parameter(field.name, kind, default=default, annotation=Annotated[of, option]))
    return inspect.Signature(found)


def train(context: typer.Context, **given: Any) -> None:
    given["clip"] = parse_clip(given["clip"])
    explicit = {name for name in given if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    settings, record = with_resumed(given, explicit)
    if record is None:
        settings.take_folder(explicit)
    check_explicit(settings, explicit)
    planned = with_plan(settings, explicit)
    if is_rank():
        settings.ranks = ranks_of_launcher(settings.ranks if "ranks" in explicit or planned else None)
    settings.check()
    settings.take_log()
    if settings.encrypt:
        os.environ[ENCRYPT] = "1"
        encrypts()  # or this machine cannot, which is said before anything is prepared
    if record is not None and record.step >= settings.end:  # only --resume auto comes here
        if not is_rank() or os.environ["RANK"] == "0":
            err().print(f"the run in {settings.resume} has made all of its {settings.end} steps: nothing to do", markup=False, soft_wrap=True)
        return
    if is_rank():
        from interlace.cli.train_rank import train_rank

        train_rank(settings, record, "text" in explicit, planned)
        return
    end_at_once()
    with contextlib.ExitStack() as stack:
        fork_server = None
        if ForkServer.can_be() and not torch.backends.cuda.is_built():  # a process that has seen a GPU must not be forked
            fork_server = stack.enter_context(contextlib.closing(ForkServer(lambda: _imports(settings.model), main)))
        _check_and_prepare(settings, record, "text" in explicit)
        _run(settings, fork_server)


def _imports(model: str) -> None:
    """What a rank would import, wherever it does."""
    from interlace import compile, models  # noqa: F401

    with contextlib.suppress(Exception):  # the launcher says what is wrong with it
        models.import_class(model)


def _check_and_prepare(settings: TrainSettings, record: RunRecord | None, other_text: bool) -> None:
    check_model(settings)
    if settings.save:
        writable_folder(settings.save)
    if (traces := settings.trace_files()) is not None and (problem := traces.check()) is not None:
        raise FileError(problem)
    check_log(settings)
    for file in (settings.log, settings.program):
        if file:
            check_output(file)
    with Work() as work:
        tokens = prepare_text(settings, record, other_text, work)
    dataset(tokens, settings, record)
    if settings.evaluates:
        Validation(settings, tokens)


def _run(settings: TrainSettings, fork_server: ForkServer | None) -> None:
    """Runs the ranks, again after a failure as often as is allowed."""
    command = [sys.executable, "-m", "interlace.cli", *sys.argv[1:]]
    for left in range(settings.max_restarts, -1, -1):
        failure = run_ranks(command, settings.ranks, settings.threads_per_rank(), fork_server)
        if failure is None:
            return
        if left == 0:
            raise RankError(failure.describe())
        err().print(f"{failure.describe()}\nstarting again, {left - 1} more restart(s) allowed", markup=False, soft_wrap=True)
        if settings.resume is None and not settings.auto:
            command += ["--resume", AUTO]


def check_model(settings: TrainSettings) -> None:
    """Says now, and once, what every rank would find wrong with --model."""
    from interlace.cli import language_model

    language_model.check(settings.model)


train.__signature__ = _signature()  # type: ignore[attr-defined]
