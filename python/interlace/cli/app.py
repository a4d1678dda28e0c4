"""The command table and the one place where exceptions become messages and exit codes.

Exit codes: 0 done, 1 the work failed or the input cannot be used, 2 the command line is wrong, 130 interrupted, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from interlace.config import did_you_mean
from interlace.dist.launch import TERMINATED, Terminated, follow_parent, is_rank, leave_failure
from interlace.errors import InterlaceError, what_to_install
from interlace.version import __version__

INTERRUPTED = 130
# Each a module with its HELP and a function of its own name, in the order of the help.
COMMANDS = (
    "train", "checkpoint", "capture", "opt", "inspect", "explain", "simulate", "report", "profile", "plan", "calibrate", "doctor",
)  # fmt: skip

app = typer.Typer(
    name="interlace",
    help="Compiles the training step of a PyTorch model into one scheduled program, and trains it.",
    epilog="Every command has examples: interlace train --help", no_args_is_help=False, add_completion=True,
    rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip


def _version(value: bool) -> None:
    if value:
        print(f"interlace {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _load_commands(first: str = "") -> None:
    """The command that `first` names, else all of them: `interlace opt` must not wait for torch, which train imports."""
    app.registered_commands.clear()
    app.registered_groups.clear()
    for name in (first,) if first in COMMANDS else COMMANDS:
        try:
            module = importlib.import_module(f"interlace.cli.{name}")
        except ImportError as error:
            if name == first or what_to_install(error) is None:
                raise
            app.command(name, help="Not here: interlace doctor says what is missing.")(lambda: None)
            continue
        if hasattr(module, "register"):  # a command with commands of its own
            module.register(app)
        else:
            app.command(name, help=spaced(module.HELP))(getattr(module, name))


def spaced(text: str) -> str:
    """A help text in which each example is a paragraph, or they would be shown in one line."""
    return text.replace("\n  ", "\n\n  ")


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # --debug may stand anywhere, as people add it at the end of a command that failed.
    debug = "--debug" in arguments or os.environ.get("INTERLACE_DEBUG") == "1"
    arguments = [argument for argument in arguments if argument != "--debug"]
    follow_parent()
    try:
        _load_commands(arguments[0] if arguments else "")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = typer.main.get_command(app).main(args=arguments, prog_name="interlace", standalone_mode=False)
        if code == INTERRUPTED:  # typer makes this of a KeyboardInterrupt, and says nothing
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED, debug)
    except Terminated:
        return _fail("stopped by SIGTERM", TERMINATED, debug) if not is_rank() else TERMINATED
    except BrokenPipeError:  # the reader of our output has gone: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message, code = explain(error)
        return _fail(message, code, debug)


def explain(error: BaseException) -> tuple[str, int]:
    """One message and the exit code for an exception."""
    if hasattr(error, "format_message"):  # the command line parser's own errors
        context: Any = getattr(error, "ctx", None)
        near = _near(error, context)
        message = _sentence(error.format_message()) + near
        hint = f"\n  see: {context.command_path} --help" if context is not None else ""
        return message + hint, getattr(error, "exit_code", 2)
    if isinstance(error, InterlaceError) or type(error).__module__.startswith("interlace"):
        return str(error), 1
    if isinstance(error, ImportError) and (missing := what_to_install(error)) is not None:
        return missing, 1
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror, 1
    if isinstance(error, MemoryError):
        return "out of memory", 1
    last = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({last.filename}:{last.lineno})" if last else ""
    said = str(error).strip() or "no message"
    return f"{type(error).__name__}: {said}{where}; --debug shows the traceback", 1


def _near(error: Any, context: Any) -> str:
    """ "; did you mean '--seq'?" for an unknown option or command."""
    option = getattr(error, "option_name", "")
    if type(error).__name__ == "NoSuchOption" and context is not None:
        error.possibilities = None
        return did_you_mean(option, [name for parameter in context.command.params for name in parameter.opts])
    return ""


def _sentence(message: str) -> str:
    message = " ".join(message.split()).rstrip(".")  # typer lists the choices of an argument in lines
    message = message.replace(". Did you mean", "; did you mean")
    return message[:1].lower() + message[1:]


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if is_rank() and leave_failure(message, code):
        return code  # the launcher tells it, once for all ranks
    try:
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass
    return code
