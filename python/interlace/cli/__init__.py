"""The `interlace` command: train, capture, opt, inspect. `interlace COMMAND --help` shows options and examples."""

from __future__ import annotations


def main() -> None:
    import signal

    from interlace.cli.app import run

    code = run()
    # All is done and said: a Ctrl-C while the interpreter takes itself apart must not make a failure of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(code)


__all__ = ["main"]
