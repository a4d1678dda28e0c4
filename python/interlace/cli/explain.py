"""`interlace explain`: what the search decided for a program, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from interlace.cli.console import fitted, print_json
from interlace.cli.program_file import read_program

HELP = """Show what a search decided for a program: what each decision saves and costs, what was rejected and why.

[bold]Examples[/bold]
  interlace opt --passes "canonicalize,shard(ranks=8),update,search(cluster=h100-80gb-8)" model.il -o program.il
  interlace explain program.il
  interlace explain --json program.il
"""


def explain(
    file: Annotated[str, typer.Argument(help="A program file that a search made; - reads stdin.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was decided as one JSON object.")] = False,
) -> None:
    program = read_program(file)
    text = program.explain()
    if as_json:
        decided = {key: value for key, value in program.meta().items() if key.startswith(("search.", "recompute", "tensor"))}
        print_json({"file": file, **decided})
        return
    print(fitted(text), end="")
