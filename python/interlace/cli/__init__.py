"""The `interlace` command: train, capture, opt, inspect. `interlace COMMAND --help` shows options and examples."""

from __future__ import annotations


def main() -> None:
    from interlace.cli.app import run

    raise SystemExit(run())


__all__ = ["main"]
