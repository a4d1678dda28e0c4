"""`interlace report`: one HTML page about a predicted step, a plan, a run, or two of them side by side."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli import simulation as sim
from interlace.cli.console import Work, err, print_json
from interlace.cli.plan import check_plan, plan_page
from interlace.cli.program_file import FileError, read_program, write_text
from interlace.cli.report_sides import events_of, run_of, trace_of
from interlace.config import format_bytes
from interlace.errors import InterlaceError

HELP = """Write one HTML page: of a predicted step, of a plan, of a run that was trained, or of two of them side by side.

The page needs nothing else and works offline. PROGRAM may also be what --save wrote, a log of train --log, or a trace.

[bold]Examples[/bold]
  interlace report sharded.il --cluster h100-80gb-32 -o report.html
  interlace report captured.il --mesh dp=2,tp=2 --cluster h100-80gb-4 -o report.html
  interlace report sharded.il --cluster local-2 --profile here.profile --measured trace.json -o report.html
  interlace report sharded.il --cluster a100-40gb-8 --slow 3=1.2 --json -o report.html
  interlace report captured.il --mesh pp=4,dp=2 --accumulation 16 --cluster h100-80gb-8 -o pipeline.html
  interlace report --plan gpt.plan -o plan.html
  interlace report runs/book -o run.html
  interlace report before.il --against after.il --cluster h100-80gb-8 -o both.html
  interlace report first.jsonl --against second.jsonl -o both.html
"""
MEASURED_HELP = "A trace of a real step (interlace train --trace), shown below the predicted one."
AGAINST_HELP = "Side by side with this one: another program (same --cluster and options), run, log or trace."


def report(
    program: sim.Program = None, cluster: sim.Cluster = None, mesh: sim.MeshText = None, accumulation: sim.Accumulation = 1,
    stage_order: sim.StageOrder = "auto", profile: sim.ProfileFile = None, machine: sim.MachineName = "", foreign: sim.Foreign = False,
    slow: sim.Slow = None, every_rank: sim.EveryRank = False,
    measured: Annotated[str | None, typer.Option("--measured", help=MEASURED_HELP)] = None,
    against: Annotated[str | None, typer.Option("--against", help=AGAINST_HELP)] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="A plan of interlace plan instead of a program: its pipeline over time.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = "report.html",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of the page as JSON.")] = False,
) -> None:  # fmt: skip
    from interlace.report import compared, render, render_compared, render_run, render_set

    if plan is not None:
        if program is not None or against is not None:
            raise FileError("--plan is shown without a program: give one of them")
        report_plan(plan, output, as_json)
        return
    if program is None:
        raise FileError("no program file: name one, or - for stdin (examples: interlace report --help)")
    given = Given(cluster or "", mesh, accumulation, stage_order, profile, machine, foreign, slow, every_rank, measured)
    if against is not None:
        if measured is not None:
            raise FileError("--measured is for one program: name the trace after --against")
        a, b = given.side(program), given.side(against)
        hint = given.hint(against) if a.estimated or b.estimated else ("", [])
        _write(output, render_compared(a, b, hint[0]), hint[1])
        if as_json:
            print_json(compared(a, b))
        return
    if (run := run_of(program)) is not None:
        _write(output, render_run(run))
        if as_json:
            print_json(run.summary())
        return
    found = given.simulated(program)
    hint = given.hint(program) if profile is None else ("", [])
    if isinstance(found, Pipeline):
        title = f"{sim.shown(program)} on {cluster}"
        _write(output, render_set(found.found, found.trace, title, found.notes, found.mesh, found.axis, hint[0], found.measured), hint[1])
        if as_json:
            print_json(found.found)
        return
    _write(output, render(found, hint[0]), hint[1])
    if as_json:
        print_json(found.summary())


@dataclass
class Pipeline:
    found: dict[str, Any]
    trace: str
    notes: list[str]
    mesh: dict[str, int]
    axis: str
    measured: list[dict[str, Any]] | None


@dataclass
class Given(sim.Given):
    measured: str | None

    def simulated(self, program: str) -> Any:
        """A Pipeline, or the Report of one program."""
        from interlace import _core
        from interlace.report import build_report

        if not self.cluster:
            read_program(program)  # what is wrong with it is said first
            raise FileError("no cluster: give --cluster, a file or a preset such as h100-80gb-8")
        with Work() as work:
            stages = self.stages(program, work.update)
        if stages is not None:
            if self.slow:
                raise FileError("--slow is for one program, and axis pp makes one for each stage: leave one of them out")
            events = events_of(self.measured) if self.measured is not None else None
            text, trace = self.simulated_stages(stages, ("json", "trace"))
            first = _core.Program.parse(stages.texts()[0][1])
            named = f"order {self.stage_order}" if self.mesh is not None else "as it was trained"
            mesh = self.mesh or ",".join(f"{name}={size}" for name, size in first.mesh.items())
            notes = [f"mesh {mesh}", f"{first.accumulation} micro-batch{'es' * (first.accumulation > 1)}", named]
            notes.append(f"times from {self.profile or 'estimates'}")
            notes += ["with a measured step"] if events is not None else []
            return Pipeline(json.loads(text), trace, notes, first.mesh, stages.axis, events)
        step = trace_of(self.measured) if self.measured is not None else None
        loaded = self.program(program)
        simulate = self.simulator(loaded, program)
        facts = {"program": sim.shown(program), "cluster": self.cluster}
        facts |= {"profile": self.profile} if self.profile is not None else {}
        facts |= {"measured": self.measured} if self.measured is not None else {}
        with Work() as work:
            return build_report(loaded, simulate, facts, step, work.update)

    def side(self, name: str) -> Any:
        """One of two: a run, log or trace, else a program."""
        from interlace.report import side_of_report, side_of_run, side_of_set

        if (run := run_of(name)) is not None:
            return side_of_run(run)
        found = self.simulated(name)
        if isinstance(found, Pipeline):
            return side_of_set(sim.shown(name), found.found, found.trace, {"program": sim.shown(name)})
        return side_of_report(sim.shown(name), found)

    def hint(self, program: str) -> tuple[str, list[str]]:
        """What to type for measured times, for the page and for the terminal."""
        from interlace import _core
        from interlace.report import hint_to_measure

        text, file = sim.read_cluster(self.cluster)
        ranks = _core.cluster_devices(text, file)
        laid_out = self.mesh is None and program != "-"
        what = f"--program {shlex.quote(program)} " if laid_out else ""
        first = f"interlace profile {what}--ranks {ranks} --export here.profile"
        if laid_out and sim.is_stage(program):
            first = "interlace profile --program CAPTURED.il --ranks 1 --export here.profile"
        mesh = f"--mesh {self.mesh} " if self.mesh else ""
        mesh += f"--accumulation {self.accumulation} " if self.accumulation > 1 else ""
        commands = [first, f"interlace report {shlex.quote(program)} {mesh}--cluster {shlex.quote(self.cluster)} --profile here.profile"]
        return hint_to_measure(commands), ["times are estimates; for measured ones, on that machine:", *(f"  {c}" for c in commands)]


def _write(output: str, text: str, more: list[str] | None = None) -> None:
    write_text(output, text)
    console = err()
    console.print(f"wrote {output} ({format_bytes(len(text.encode()))})")
    for line in more or []:
        console.print(line, markup=False, soft_wrap=True)


def report_plan(file: str, output: str, as_json: bool) -> None:
    """The page of a plan. Error: a plan that breaks its rules, or one without predictions."""
    from interlace.plan.execute import read_plan

    plan = read_plan(file)
    if plan["step_us"] <= 0:
        raise FileError(f"{file} has no predicted times; make them with\n  interlace plan {file} -o {file}")
    try:
        found = check_plan(file, None)
    except (InterlaceError, ImportError, OSError) as error:  # its model is not here: the page has what the file says
        found = None
        err().print(f"without the tables of bytes and times, which need the model: {str(error).splitlines()[0]}", markup=False)
    _write(output, plan_page(plan, Path(file).read_text(), file, found))
    if as_json:
        print_json(plan)
