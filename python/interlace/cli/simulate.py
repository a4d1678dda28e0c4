"""`interlace simulate`: the time and memory of a step, predicted."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli import simulation as sim
from interlace.cli.console import Work, err, fitted, print_json
from interlace.cli.program_file import FileError, read_program, writable_folder, write_text
from interlace.config import format_bytes, parse_bytes

HELP = """Predict the time and memory of one step, without running it.

PROGRAM is sharded or scheduled (interlace opt), or captured for one device; its sizes are numbers.

[bold]Examples[/bold]
  interlace simulate sharded.il --cluster h100-80gb-32
  interlace simulate captured.il --mesh dp=4,tp=8 --cluster h100-80gb-32
  interlace simulate captured.il --mesh pp=4,dp=2 --accumulation 16 --cluster h100-80gb-8
  interlace simulate sharded.il --cluster local-2 --profile here.profile --json
  interlace simulate sharded.il --cluster a100-40gb-8 --slow 3=1.2 --trace step.json
  interlace simulate --show-cluster l4-24gb-8 > mine.toml
  interlace simulate --collective all_reduce --bytes 1GiB --ranks 256 --cluster h100-80gb-256
  interlace simulate sharded.il --cluster mine.toml --snapshot memory.json --chakra traces/
"""
SNAPSHOT_HELP = "Write the memory history as torch.cuda.memory._snapshot() gives it: pickled for .pickle and .pkl, else JSON."


def simulate(
    program: sim.Program = None, cluster: sim.Cluster = None, mesh: sim.MeshText = None, accumulation: sim.Accumulation = 1,
    stage_order: sim.StageOrder = "auto", profile: sim.ProfileFile = None, machine: sim.MachineName = "", foreign: sim.Foreign = False,
    slow: sim.Slow = None, every_rank: sim.EveryRank = False,
    trace: Annotated[str | None, typer.Option("--trace", help="Write a trace for Perfetto and chrome://tracing.")] = None,
    snapshot: Annotated[str | None, typer.Option("--snapshot", help=SNAPSHOT_HELP)] = None,
    chakra: Annotated[str | None, typer.Option("--chakra", help="A folder for Chakra traces, one a rank.")] = None,
    show_cluster: Annotated[str | None, typer.Option("--show-cluster", help="Print a preset, to save and edit.")] = None,
    collective: Annotated[
        str | None, typer.Option("--collective", help="No program: one all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, p2p.")
    ] = None,
    size: Annotated[str, typer.Option("--bytes", help="The whole buffer of --collective, for example 1GiB.")] = "",
    ranks: Annotated[int, typer.Option("--ranks", help="Of --collective; they fill nodes.", show_default="all devices")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:  # fmt: skip
    from interlace import _core

    if show_cluster is not None:
        sys.stdout.write(_core.preset_cluster(show_cluster))
        return
    if collective is not None:
        return one_collective(collective, size, ranks, cluster, program, as_json)
    if program is None:
        raise FileError("no program file: name one, or - for stdin (examples: interlace simulate --help)")
    if cluster is None:
        read_program(program)  # what is wrong with it is said first
        presets = ", ".join(f"{name}-8" for name in _core.preset_names())
        raise FileError(f"no cluster: give --cluster, a file or one of the presets {presets} (any count)")
    given = sim.Given(cluster, mesh, accumulation, stage_order, profile, machine, foreign, slow, every_rank)
    with Work() as work:
        stages = given.stages(program, work.update)
    if stages is not None:
        for value, option in ((slow, "--slow"), (snapshot, "--snapshot"), (chakra, "--chakra")):
            if value:
                raise FileError(f"{option} is for one program, and axis pp makes one for each stage: leave one of them out")
        outputs = ("json" if as_json else "summary", *(("trace",) if trace is not None else ()))
        texts = given.simulated_stages(stages, outputs)
        if trace is not None:
            write_text(trace, texts[1])
            err().print(f"wrote {trace}")
        sys.stdout.write(texts[0] if as_json else fitted(texts[0]))
        return
    folder = writable_folder(chakra) if chakra is not None else None
    result = given.simulator(given.program(program), program)()
    if trace is not None:
        write_text(trace, result.trace())
        err().print(f"wrote {trace}")
    if snapshot is not None:
        write_snapshot(snapshot, result.snapshot())
        err().print(f"wrote {snapshot}")
    if folder is not None:
        write_chakra(folder, result)
        err().print(f"wrote {result.ranks} Chakra traces in {folder}")
    sys.stdout.write(result.json() if as_json else fitted(result.summary()))


def one_collective(kind: str, size: str, ranks: int, cluster: str | None, program: str | None, as_json: bool) -> None:
    """The time of one collective on its own."""
    from interlace import _core

    if program is not None or cluster is None or not size:
        raise FileError("a collective needs --cluster and --bytes, and no program: simulate --collective all_reduce --bytes 1GiB ...")
    text, file = sim.read_cluster(cluster)
    bytes_, ranks = parse_bytes(size), ranks or _core.cluster_devices(text, file)
    us, latency, moved, nodes, algorithm, error = _core.predict_collective(text, kind, bytes_, ranks, file)
    spread = math.exp(1.2816 * error)
    found = {
        "collective": kind, "bytes": bytes_, "ranks": ranks, "nodes": nodes, "algorithm": algorithm, "us": us, "latency_us": latency,
        "algorithm_gb_per_s": bytes_ / us / 1e3, "bus_gb_per_s": moved / us / 1e3, "low_us": us / spread, "high_us": us * spread,
    }  # fmt: skip
    if as_json:
        return print_json(found)
    between = f", between {us / spread:,.1f} and {us * spread:,.1f} us in 80 of 100 cases" if error > 0 else ""
    print(f"{kind} of {format_bytes(bytes_)} over {ranks} ranks on {nodes} node{'s' * (nodes > 1)} of {cluster}: {us:,.1f} us{between}")
    print(f"{algorithm}; {found['algorithm_gb_per_s']:.1f} GB/s of the buffer, {found['bus_gb_per_s']:.1f} GB/s of each rank's links")
    return None


def write_snapshot(file: str, text: str) -> None:
    from interlace.observe.snapshot import snapshot_bytes

    write_text(file, snapshot_bytes(file, text))


def write_chakra(folder: Path, result: Any) -> None:
    """step.RANK.et for every rank; ranks that are alike share the one that was simulated."""
    data = b""
    for rank in range(result.ranks):
        if rank < result.simulated_ranks:
            data = result.chakra(rank)
        file = folder / f"step.{rank}.et"
        try:
            file.write_bytes(data)
        except OSError as error:
            raise FileError(f"cannot write {file}: {error.strerror}") from None
