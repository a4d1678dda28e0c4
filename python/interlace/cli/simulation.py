"""What `simulate` and `report` share: the program, cluster and profile of the command line, and the simulation of them."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli.program_file import FileError, read_program, stage_file
from interlace.config import Config
from interlace.config.forms import mesh_ranks
from interlace.config.schedule import for_stage, items, pass_name
from interlace.files import read_text

LOCAL = "local-"  # presets of the machine that this runs on

# The options that both have.
Program = Annotated[str | None, typer.Argument(help="A program file; - reads stdin.", show_default=False)]
Cluster = Annotated[
    str | None, typer.Option("--cluster", help="A cluster file (TOML), or a preset with a number of devices: h100-80gb-32, local-2.")
]
MeshText = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Lay a captured program out on this mesh first, with the standard passes: dp=2,tp=2 (tp cuts products), pp=4,dp=2 (pp: a stage "
        "each).",
    ),
]
Accumulation = Annotated[int, typer.Option("--accumulation", min=1, help="With --mesh, micro-batches of a step.")]
StageOrder = Annotated[
    str,
    typer.Option(
        "--stage-order", help="With axis pp in --mesh, what a stage runs when: auto, 1f1b, gpipe, interleaved, zero_bubble or v."
    ),
]
ProfileFile = Annotated[
    str | None, typer.Option("--profile", help="Times measured on the real machine; what is not in it is estimated.")
]
MachineName = Annotated[
    str, typer.Option("--machine", help="The fingerprint that the profile must have; by default local-N takes profiles of this machine.")
]
Foreign = Annotated[bool, typer.Option("--foreign", help="Use a profile of another machine, and say so in the result.")]
Slow = Annotated[
    list[str] | None, typer.Option("--slow", help="RANK=FACTOR: this rank computes FACTOR times slower; may be given several times.")
]
EveryRank = Annotated[bool, typer.Option("--every-rank", help="Simulate every rank although they are alike.")]


@dataclasses.dataclass
class Given:
    """What these options say of how a program is simulated."""

    cluster: str
    mesh: str | None
    accumulation: int
    stage_order: str
    profile: str | None
    machine: str
    foreign: bool
    slow: list[str] | None
    every_rank: bool

    def program(self, file: str) -> Any:
        """A program whose sizes are numbers, laid out on the mesh where there is one; else an error with the command that makes one."""
        program = _sized(file)
        if self.mesh is not None:
            program.run_passes(",".join(self._passes(program, file, self._config("auto"))))
        elif self.accumulation > 1:
            raise FileError("--accumulation is of a captured program that --mesh lays out: give --mesh as well, or leave it out")
        return program

    def _config(self, order: str) -> Config:
        return Config(mesh=self.mesh, clip_norm=1.0, accumulation=self.accumulation, stage_order=order)

    def _passes(self, program: Any, file: str, config: Config) -> list[str]:
        """Those that make of a captured program what the ranks of a mesh run: sharded over dp, its products cut over tp as is fastest
        there."""
        if program.level != "captured" or program.mesh:
            raise FileError(f"--mesh lays a captured program out, and {shown(file)} is laid out already: leave --mesh out")
        assert config.mesh is not None
        if len({axes["dp"] for axes in config.stage_meshes}) > 1:
            raise FileError(
                f"{shown(file)} is one micro-batch, and stages of unlike dp have micro-batches of other rows: write one size of axis dp for "
                "all"
            )
        passes = with_costs(config.pipeline(mesh_ranks(config.mesh)), self.cluster)
        return items(passes.replace(",at=auto", f",at=auto,cluster={self.cluster}"))

    def stages(self, file: str, update: Callable[[str], None]) -> Any | None:
        """The program set of a captured program on a mesh with an axis pp, or of a pipeline's first stage and the others beside it; None:
        there is none. Error: what the passes refuse."""
        from interlace import _core

        if self.mesh is None:
            return _read_stages(file)
        if self._config("auto").stage_ranks == 1:
            return None
        config, whole = self._config(self.stage_order), _sized(file)
        passes = self._passes(whole, file, config)
        before = first_of_stage(passes, config)
        whole.run_passes(",".join(passes[:before]))
        text, rest, programs = whole.print(), ",".join(passes[before:]), []
        for stage in range(config.stage_ranks):
            update(f"stage {stage + 1} of {config.stage_ranks}")
            programs.append(_core.Program.parse(text, shown(file)))
            programs[-1].run_passes(for_stage(rest, stage, config))
        made = _core.ProgramSet("pp", programs)
        made.check()
        return made

    def simulated_stages(self, made: Any, outputs: tuple[str, ...]) -> list[str]:
        """What `_core.simulate_set` gives in each of these forms."""
        from interlace import _core

        text, _ = read_cluster(self.cluster)
        times, machine = self._times(text)
        how = {"profile": times, "every_rank": self.every_rank, "machine": machine, "foreign": self.foreign}
        return [_core.simulate_set(made, text, output=form, **how) for form in outputs]

    def simulator(self, program: Any, file: str) -> Callable[..., Any]:
        """A function that simulates: (what-if factors, further slow ranks), both optional, to a `_core.Simulation`."""
        from interlace import _core

        text, cluster_file = read_cluster(self.cluster)
        _one_rank_of_many(program, file, self.cluster, text, cluster_file)
        times, machine = self._times(text)
        prepared = _core.Simulator(program)

        def run(what_if: dict[str, float] | None = None, slow_too: list[str] | None = None) -> Any:
            return prepared.run(
                text, profile=times, slow=[parse_slow(each) for each in [*(self.slow or []), *(slow_too or [])]],
                every_rank=self.every_rank, machine=machine, foreign=self.foreign, what_if=list((what_if or {}).items()),
                cluster_file=cluster_file, profile_file=self.profile or "profile",
            )  # fmt: skip

        return run

    def _times(self, cluster: str) -> tuple[str, str]:
        """The profile's text, and the machine that it must be of."""
        times = read_profile(self.profile) if self.profile else ""
        here = bool(self.profile) and not self.machine and cluster.startswith(LOCAL)
        return times, machine_here_unless_of(times) if here else self.machine


def with_costs(pipeline: str, cluster: str) -> str:
    """A standard pipeline whose passes decide by this cluster's costs."""
    return pipeline.replace("plan=auto", f"plan=auto,cluster={cluster}").replace(",overlap,", f",overlap(cluster={cluster}),")


def first_of_stage(passes: list[str], config: Config) -> int:
    """Where the passes begin that depend on the stage."""
    first = "mesh" if config.stage_meshes else "pipeline"
    return next((i for i, text in enumerate(passes) if pass_name(text) == first), len(passes))


def _sized(file: str) -> Any:
    program = read_program(file)
    program.verify()
    symbols = [symbol["name"] for symbol in program.symbols()]
    if symbols:
        sizes = ",".join(f"{name}=NUMBER" for name in symbols)
        raise FileError(
            f"{shown(file)}: the sizes {', '.join(symbols)} are not yet numbers: the time of a step depends on them. Give them with\n"
            f"  {opt_command(file, f'--bind {sizes}')}"
        )
    return program


def is_stage(file: str) -> bool:
    return file != "-" and Path(file).is_file() and re.search(rb"(?m)^stage ", Path(file).read_bytes()) is not None


def _read_stages(file: str) -> Any | None:
    """What `interlace train --program` wrote of a pipeline; None: a program of no stage, or stdin."""
    from interlace import _core

    if not is_stage(file):
        return None
    first = read_program(file)
    axis, index = first.stage
    files = [stage_file(file, stage) for stage in range(first.mesh[axis])]
    if index != 0:
        raise FileError(f"{file} is stage {index} of a pipeline of {len(files)}: name the program of its first stage")
    if missing := [each for each in files if not Path(each).is_file()]:
        raise FileError(
            f"{file} is the first of {len(files)} stages, and a step is predicted of all of them: there is no {missing[0]} "
            "(interlace train --program writes one for each stage)"
        )
    made = _core.ProgramSet(axis, [first, *(read_program(each) for each in files[1:])])
    made.check()
    return made


def opt_command(file: str, options: str) -> str:
    """An `interlace opt` command that makes another program of this one."""
    path = Path("program.il" if file == "-" else file)
    return f"interlace opt {options} {shlex.quote(str(path))} -o {shlex.quote(str(path.with_suffix('')) + '-sized.il')}"


def shown(file: str) -> str:
    return "stdin" if file == "-" else file


def machine_here_unless_of(profile_text: str) -> str:
    """This machine, for a profile of another one; "" when the profile was measured here, whatever its ranks and threads."""
    from interlace.cost.machine import Machine

    here = Machine.here(1, 1).host
    found = re.search(r"(?m)^fingerprint (\".*\")\s*$", profile_text)
    try:
        measured_on = str(json.loads(found[1])) if found else ""
    except ValueError:  # not one that a profile of ours has
        measured_on = ""
    return "" if measured_on.startswith(f"{here}, ") else here


def _one_rank_of_many(program: Any, file: str, cluster: str, text: str, cluster_file: str) -> None:
    """A program without a mesh runs on one device; on a cluster of several that is hardly what is meant."""
    from interlace import _core

    devices = _core.cluster_devices(text, cluster_file)
    if program.mesh or devices == 1:
        return
    passes = _core.standard_pipeline(mesh=[("dp", devices)], clip=1.0)
    if program.level != "captured":
        raise FileError(f"{shown(file)} has no mesh: it runs on one device, and the cluster {cluster} has {devices}")
    raise FileError(
        f"{shown(file)} is a captured program for one device, and the cluster {cluster} has {devices}. Shard it with\n"
        f"  {opt_command(file, f'--passes={shlex.quote(passes)}').replace('-sized.il', '-sharded.il')}"
    )


def read_cluster(cluster: str) -> tuple[str, str]:
    """(text or preset name, file name for messages)."""
    path, stack = Path(cluster), ""
    if not path.exists() and ":" in path.name:  # FILE:STACK, as of presets
        name, _, stack = cluster.rpartition(":")
        path = Path(name)
    if path.is_dir():
        raise FileError(f"{cluster} is a folder: name a cluster file or a preset such as h100-80gb-8")
    if not path.is_file():
        if path.suffix == ".toml" or "/" in cluster:
            raise FileError(f"no such cluster file: {cluster}")
        return cluster, cluster
    # One line without '=' would be taken for a preset.
    text = read_text(path, "a cluster file", FileError) + "\n"
    if stack:
        text, said = re.subn(r"(?m)^stack *=.*$", f'stack = "{stack}"', text, count=1)
        text = text if said else f'stack = "{stack}"\n{text}'
    return text, cluster


def read_profile(profile: str) -> str:
    path = Path(profile)
    if path.is_dir():
        raise FileError(f"{profile} is a folder: name a profile file")
    if not path.is_file():
        raise FileError(f"no such profile: {profile}")
    text = read_text(path, "a profile", FileError)
    if not text.strip():
        raise FileError(f"{profile} is empty: a profile begins with the line 'interlace-profile 2'")
    return text


def parse_slow(text: str) -> tuple[int, float]:
    """ "3=1.2"."""
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise FileError(f"--slow '{text}' is not RANK=FACTOR, for example 3=1.2") from None
