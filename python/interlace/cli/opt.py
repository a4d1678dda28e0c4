"""`interlace opt`: program text in, passes, program text out."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from interlace.cli.console import err, out, print_json, rows_table, seconds
from interlace.cli.program_file import FileError, read_program, write_text

HELP = """Run passes on a program: text in, text out.

[bold]Examples[/bold]
  interlace opt --list
  interlace opt --passes=canonicalize model.il -o small.il
  interlace opt --passes='canonicalize,shard(axis=dp,ranks=2),update(clip=1.0)' model.il -o sharded.il
  interlace opt --passes='zero1(axis=dp,ranks=4)' --dump-ir steps/ model.il -o sharded.il --json
"""

LONGEST_SIZE = 18  # digits that surely fit in 64 bits


def opt(
    file: Annotated[str | None, typer.Argument(help="A program file; - reads stdin.", show_default=False)] = None,
    passes: Annotated[str, typer.Option("--passes", help="Passes with options, separated by commas.")] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="Where the result goes; - is stdout.")] = "-",
    bind: Annotated[str, typer.Option("--bind", help="Numbers for symbolic sizes, first of all: b=4,s=128.")] = "",
    dump_ir: Annotated[str | None, typer.Option("--dump-ir", help="A folder for the text after every pass.")] = None,
    repro: Annotated[str | None, typer.Option("--repro", help="Where a failing pass leaves its input.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Verify whenever something changed.")] = True,
    list_passes: Annotated[bool, typer.Option("--list", help="List the passes and their options.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the passes did as JSON (needs -o FILE).")] = False,
) -> None:
    from interlace import _core

    if list_passes:
        print_json({"passes": _core.pass_table()}) if as_json else _print_passes(_core.pass_table())
        return
    if file is None:
        raise FileError("no program file: name one, or - for stdin (examples: interlace opt --help)")
    if as_json and output == "-":
        raise FileError("--json and the program would both go to stdout: give the program a file with -o FILE")
    program = read_program(file)
    if bind:
        program = program.bind(parse_binding(bind))
    records: list[dict[str, Any]] = program.run_passes(passes, verify, dump_ir, repro) if passes else []
    text = program.print()
    if output == "-":
        sys.stdout.write(text)
        return
    write_text(output, text)
    if as_json:
        print_json({"output": output, "bytes": len(text), "level": program.level, "passes": records})
        return
    rows = [[r["name"], seconds(r["seconds"]), "yes" if r["changed"] else "no", f"{r['ops']:,}"] for r in records]
    if rows:
        err().print(rows_table("", ["pass", "time", "changed", "ops after"], rows))
    err().print(f"wrote {output} ({program.level}, {len(text):,} bytes)")


def parse_binding(text: str) -> dict[str, int]:
    """ "b=4,s=128" as a dict."""
    sizes = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        name, number = name.strip(), number.strip()
        if not name or not re.fullmatch("[0-9]+", number):
            raise FileError(f"--bind '{text}': '{part}' is not NAME=NUMBER, for example b=4,s=128")
        if len(number) > LONGEST_SIZE:
            raise FileError(f"--bind '{text}': a size of {len(number)} digits does not fit in 64 bits")
        sizes[name] = int(number)
    return sizes


def _print_passes(table: list[dict[str, Any]]) -> None:
    console = out()
    for entry in table:
        console.print(f"[bold]{entry['name']}[/bold]  {entry['help']}")
        for option in entry["options"]:
            kind = "required" if option["required"] else f"default {option['default']}"
            choices = f" ({' | '.join(option['choices'])})" if option["choices"] else ""
            console.print(f"    {option['name']:<10} {option['help']}{choices}, {kind}", markup=False)
