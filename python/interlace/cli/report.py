"""`interlace report`: one HTML page about a predicted step, and a measured one beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli import simulation as sim
from interlace.cli.console import Work, err, print_json
from interlace.cli.program_file import FileError, write_text
from interlace.config import format_bytes

HELP = """Write one HTML page about a predicted step: timeline, memory, modules, critical path, what if.

The page needs nothing else and works offline.

[bold]Examples[/bold]
  interlace report sharded.il --cluster h100-80gb-32 -o report.html
  interlace report captured.il --mesh dp=2,tp=2 --cluster h100-80gb-4 -o report.html
  interlace report sharded.il --cluster local-2 --profile here.profile --measured trace.json -o report.html
  interlace report sharded.il --cluster a100-40gb-8 --slow 3=1.2 --json -o report.html
  interlace report captured.il --mesh pp=4,dp=2 --accumulation 16 --cluster h100-80gb-8 -o pipeline.html
  interlace report --plan gpt.plan -o plan.html
"""
MEASURED_HELP = "A trace of a real step (interlace train --trace), shown below the predicted one."


def report(
    program: Annotated[str | None, typer.Argument(help=sim.PROGRAM_HELP, show_default=False)] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help=sim.CLUSTER_HELP)] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help=sim.MESH_HELP)] = None,
    accumulation: Annotated[int, typer.Option("--accumulation", min=1, help=sim.ACCUMULATION_HELP)] = 1,
    stage_order: Annotated[str, typer.Option("--stage-order", help=sim.ORDER_HELP)] = "auto",
    profile: Annotated[str | None, typer.Option("--profile", help=sim.PROFILE_HELP)] = None,
    machine: Annotated[str, typer.Option("--machine", help=sim.MACHINE_HELP)] = "",
    foreign: Annotated[bool, typer.Option("--foreign", help=sim.FOREIGN_HELP)] = False,
    slow: Annotated[list[str] | None, typer.Option("--slow", help=sim.SLOW_HELP)] = None,
    every_rank: Annotated[bool, typer.Option("--every-rank", help=sim.EVERY_RANK_HELP)] = False,
    measured: Annotated[str | None, typer.Option("--measured", help=MEASURED_HELP)] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="A plan of interlace plan instead of a program: its pipeline over time.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = "report.html",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of the page as JSON.")] = False,
) -> None:
    from interlace.report import build_report, render, render_set

    if plan is not None:
        if program is not None:
            raise FileError("--plan is shown without a program: give one of them")
        report_plan(plan, output, as_json)
        return
    if program is None:
        raise FileError("no program file: name one, or - for stdin (examples: interlace report --help)")
    if cluster is None:
        raise FileError("no cluster: give --cluster, a file or a preset such as h100-80gb-8")
    with Work() as work:
        stages = sim.stages_of(program, mesh, cluster, accumulation, stage_order, work.update)
    if stages is not None:
        for given, option in ((slow, "--slow"), (measured, "--measured")):
            if given:
                raise FileError(f"{option} is for one program, and axis pp makes one for each stage: leave one of them out")
        found, trace = sim.simulated_stages(stages, cluster, profile, every_rank, machine, foreign, ("json", "trace"))
        notes = [f"mesh {mesh}", f"{accumulation} micro-batches", f"order {stage_order}", f"times from {profile or 'estimates'}"]
        _write(output, render_set(json.loads(found), trace, f"{sim.shown(program)} on {cluster}", notes))
        if as_json:
            print_json(json.loads(found))
        return
    step = _read_measured(measured) if measured is not None else None
    loaded = sim.load_program(program, mesh, cluster, accumulation)
    simulate = sim.simulator(loaded, program, cluster, profile, slow, every_rank, machine, foreign)
    facts = {"program": sim.shown(program), "cluster": cluster}
    if profile is not None:
        facts["profile"] = profile
    if measured is not None:
        facts["measured"] = measured
    with Work() as work:
        page = build_report(loaded, simulate, facts, step, work.update)
    _write(output, render(page))
    if as_json:
        print_json(page.summary())


def _write(output: str, text: str) -> None:
    write_text(output, text)
    err().print(f"wrote {output} ({format_bytes(len(text.encode()))})")


def report_plan(file: str, output: str, as_json: bool) -> None:
    """The page of a plan. Error: a plan that breaks its rules, or one without predictions."""
    from interlace import _core
    from interlace.plan.execute import read_plan
    from interlace.report import render_plan

    plan = read_plan(file)
    if plan["step_us"] <= 0:
        raise FileError(f"{file} has no predicted times; make them with\n  interlace plan {file} -o {file}")
    _write(output, render_plan(plan, _core.plan_trace(Path(file).read_text(), file)))
    if as_json:
        print_json(plan)


def _read_measured(file: str) -> Any:
    from interlace.report import read_trace

    path = Path(file)
    if path.is_dir():
        raise FileError(f"{file} is a folder: name a trace file")
    try:
        return read_trace(path.read_bytes(), file)
    except FileNotFoundError:
        raise FileError(f"no such file: {file}") from None
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None
