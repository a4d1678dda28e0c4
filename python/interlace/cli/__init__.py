"""The `interlace` command: train, capture, opt, inspect. `interlace COMMAND --help` shows options and examples."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> None:
    sys.unraisablehook = _keep_interrupts
    end_at_once()
    from interlace.cli.app import run

    code = run()
    # All is done and said: a Ctrl-C while the interpreter takes itself apart must not make a failure of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(code)


def end_at_once() -> None:
    """A Ctrl-C ends the process, without a KeyboardInterrupt: for as long as modules are imported, which some libraries go on after, with
    half of a module; and nothing is to be tidied up."""
    signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    if "RANK" not in os.environ:  # of a rank its launcher tells
        bar = b"\r\x1b[2K\x1b[?25h" if os.isatty(2) else b""  # a progress bar's line goes, the cursor that it hid comes back
        os.write(2, bar + b"error: interrupted\n")
    os._exit(128 + number)


def _keep_interrupts(ignored: Any) -> None:
    """What Python does about an exception that nobody can catch; but a Ctrl-C that came while an object was taken apart, a module's lock
    let go or a process forked would be lost: it comes again, a moment later."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(ignored)


__all__ = ["end_at_once", "main"]
