"""`interlace profile`: measures this machine, or this group of ranks, for the cost model."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save as save_tensors

from interlace.cli.app import spaced
from interlace.cli.console import Work, err, print_json
from interlace.cli.console import out as console_out
from interlace.cli.profile_rank import Task, measures, run_as_rank, run_job
from interlace.cli.profile_view import facts_of, print_profile, print_summary
from interlace.cli.program_file import FileError, read_program_text, write_text
from interlace.cli.settings import parse_clip, ranks_of_launcher
from interlace.cli.train_text import cache_folder
from interlace.config import Config
from interlace.cost.machine import Machine, available_bytes, cores
from interlace.cost.measure import COPY_SIZES, sweep_sizes
from interlace.cost.measurements import COPIES, SLOWDOWN, Profile
from interlace.cost.store import Store, StoreError
from interlace.cost.tier import FILES, disk_of, tier_pairs
from interlace.dist.launch import Terminated, is_rank
from interlace.errors import InterlaceError

HELP = """Measure what ops, collectives and copies take here.

Runs the program of a model (or a program file) op by op on all ranks together, then transfers over sizes, and keeps every
measurement under a fingerprint of the machine: a second start measures only what is new.

[bold]Examples[/bold]
  interlace profile --model llama-10m --ranks 2
  interlace profile --program sharded.il --export here.profile
  interlace profile --program offloaded.il --tier /mnt/nvme
  torchrun --nproc-per-node 2 -m interlace.cli profile --model llama-10m
  interlace profile show
  interlace profile show --export here.profile && interlace simulate sharded.il --cluster local-2 --profile here.profile
"""
STORE_FILE = "profile.sqlite"
DEFAULT_RANKS = 2
LARGEST_SWEEP = 1 << 22  # bytes, when there is no program to say how large collectives are

Ranks = Annotated[int | None, typer.Option("--ranks", help="Processes on this machine.", show_default="2, or the launcher's")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads of each rank.", show_default="cores / ranks")]
Network = Annotated[str | None, typer.Option("--network", help="A name for the network, part of the fingerprint.", show_default="interface")]
StorePath = Annotated[str | None, typer.Option("--store", help="The file that keeps measurements.", show_default="the user's cache")]
Export = Annotated[str | None, typer.Option("--export", help="Write the profile as a file for simulate and report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", no_args_is_help=False)
    group.callback(help=spaced(HELP))(profile)
    group.command("show", help="Show what has been measured here.")(show)
    app.add_typer(group, name="profile")


def profile(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="A preset, or a Hugging Face config.json.")] = "llama-10m",
    program: Annotated[str | None, typer.Option("--program", help="A sharded program file instead of a model.")] = None,
    ranks: Ranks = None,
    strategy: Annotated[str, typer.Option("--strategy", help="shard (ZeRO-3), zero1, or replicate (DDP).")] = "shard",
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences (or images) of a micro-batch.")] = 4,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens in a sequence.", show_default="the model's")] = None,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")] = 1,
    clip: Annotated[str, typer.Option("--clip", help="Largest global gradient norm, or none.")] = "1.0",
    threads: Threads = None,
    network: Network = None,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            help="A folder on the disk that is to hold what leaves memory. Then, and for a program that offloads, also what runs "
            "beside its copies is measured.",
            show_default="the temporary folder",
        ),
    ] = None,
    budget: Annotated[float, typer.Option("--budget", help="Seconds to run the program's ops for.")] = 15.0,
    trust_program: Annotated[
        bool, typer.Option("--trust-program", help="Run the program file though its operators are not on the list for files.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure also what is there already.")] = False,
    store: StorePath = None,
    export: Export = None,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    for name, value in (
        ("ranks", 1 if ranks is None else ranks), ("micro-batch", micro_batch), ("accumulation", accumulation), ("threads", threads or 1),
    ):  # fmt: skip
        if value < 1:
            raise InterlaceError(f"--{name} must be at least 1, not {value}")
    if not budget > 0:
        raise InterlaceError(f"--budget must be a positive number of seconds, not {budget:g}")
    check_tier(tier)
    begin = time.monotonic()
    group = group_size(ranks)
    machine = machine_here(group, threads, network)
    path = store_path(store)

    def prepare() -> Task:
        with Work(as_json) as work:
            work.update("capturing the program")
            if program is not None:
                text, inputs = read_program_text(program), b""
                check_mesh(text, program, group)
            else:
                config = Config(strategy=strategy, accumulation=accumulation, clip_norm=parse_clip(clip))
                text, inputs = program_of_model(model, config, group, micro_batch, seq)
        with Store(path) as kept:
            for note in kept.notes:
                err().print(f"warning: {note}")
            job = missing(kept, machine, text, again, tier)
        return {**job, "budget_s": budget, "quiet": as_json, "store": str(path), "trusted": trust_program or program is None}, text, inputs

    if is_rank():
        task = run_as_rank(prepare, machine)
        if task is None:
            return
    else:
        task = prepare()
        if measures(task[0]):
            try:
                run_job(*task, machine)
            except (KeyboardInterrupt, Terminated):
                err().print("what has been measured is kept: the same command goes on from there", soft_wrap=True)
                raise
    job, text, _ = task
    count = len(job["ops"]) + len(job["collectives"]) + len(job["copies"]) + len(job["pairs"])
    with Store(path) as kept:
        found = kept.profile(machine.fingerprint)
    estimate_rest(found, text, machine)
    if export:
        write_text(export, found.text())
    facts = {"measured_now": count, "seconds": time.monotonic() - begin, "store": str(path), **facts_of(found, text)}
    print_json({**facts, "export": export}) if as_json else print_summary(facts, export)


def show(
    ranks: Ranks = None, threads: Threads = None, network: Network = None,
    machine: Annotated[str | None, typer.Option("--machine", help="A fingerprint instead of this machine's.")] = None,
    store: StorePath = None, export: Export = None, top: Annotated[int, typer.Option("--top", help="Ops to list, the longest first.")] = 12,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    path = store_path(store)
    if not path.exists():
        raise StoreError(f"there is no {path}: nothing has been measured; run: interlace profile")
    fingerprint = machine or machine_here(ranks or DEFAULT_RANKS, threads, network).fingerprint
    with Store(path) as kept:
        for note in kept.notes:
            err().print(f"warning: {note}")
        found, others = kept.profile(fingerprint), kept.machines()
    if export:
        write_text(export, found.text())
    if as_json:
        print_json({**facts_of(found), "store": str(path), "machines": list(others), "export": export,
                    "op_us": {key: op.us for key, op in found.ops.items()}})  # fmt: skip
        return
    print_profile(found, top)
    rest = [name for name in others if name != fingerprint]
    if rest:
        console_out().print("\nalso measured: " + "; ".join(rest), soft_wrap=True)


def machine_here(ranks: int, threads: int | None, network: str | None) -> Machine:
    return Machine.here(ranks, threads or max(1, cores() // ranks), network)


def group_size(asked: int | None) -> int:
    """How many ranks measure: as many as a launcher has started, or as asked for."""
    if not is_rank():
        return DEFAULT_RANKS if asked is None else asked
    world = ranks_of_launcher(asked)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here != world:
        raise InterlaceError(
            f"the launcher started {world} ranks, {here} of them on this host: a profile is of one host's ranks; "
            "run it on one host (--nnodes 1). Training measures transfers between hosts itself (interlace train)"
        )
    return world


def store_path(store: str | None) -> Path:
    return Path(store) if store else cache_folder() / STORE_FILE


def program_of_model(model: str, config: Config, ranks: int, micro_batch: int, seq: int | None) -> tuple[str, bytes]:
    """The program that training this model here would run, and one micro-batch for it (saved tensors)."""
    from interlace import _core, models
    from interlace.capture import capture
    from interlace.capture.attention import OneAttention

    built = models.build(model, micro_batch=micro_batch, seq=seq)
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-4)
    one_attention = OneAttention.of(config.kernels, config.one_attention)
    captured = capture(built.model, built.loss_fn, built.example_batch, optimizer=optimizer, one_attention=one_attention)
    program = _core.Program.parse(captured.text, "captured")
    program.set_meta("micro_batches", str(config.accumulation))
    program.run_passes(config.pipeline(ranks))
    inputs = {str(i): t.contiguous() for i, t in enumerate(captured.input_spec.flatten(built.example_batch))}
    return program.print(), save_tensors(inputs)


def check_mesh(text: str, file: str, ranks: int) -> None:
    from interlace import _core

    program = _core.Program.parse(text, file)
    program.verify()
    if program.symbols():
        names = ", ".join(s["name"] for s in program.symbols())
        raise FileError(f"{file}: the sizes {names} are not yet numbers: give them with interlace opt --bind")
    if program.stage is not None:
        raise FileError(
            f"{file} is a stage of a pipeline, whose ranks run unlike programs: the captured program has the same ops, measure those "
            "on one rank (interlace capture --model NAME -o captured.il, interlace profile --program captured.il --ranks 1)"
        )
    size = math.prod(program.mesh.values())
    if size != ranks:
        raise FileError(f"{file} is a program for {size} ranks: use --ranks {size}")


def check_tier(folder: str | None) -> None:
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise InterlaceError(f"--tier {folder} is not a folder; make it first, on a fast local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InterlaceError(f"--tier {folder} cannot be written to: give a folder of your own, on a fast local disk")


def missing(store: Store, machine: Machine, text: str, again: bool, tier: str | None = None) -> dict[str, Any]:
    """What is to be measured: op keys, collectives, copies and pairs of lanes that the store does not have. Pairs with files only for
    a program that offloads to them, or where a tier is named; its disk counts then, else any."""
    from interlace import _core, _runtime

    rows = {} if again else store.rows(machine.fingerprint)
    plan = _runtime.profile_plan(text)
    digest = _core.digest(text)[:16]
    keys = sorted({facts["key"] for facts in plan.values() if facts["key"]})
    points = {(f["name"].removesuffix(".start"), f["bytes"] // f["units"]) for f in plan.values() if f["bytes"]}
    in_place = [("collective", f"{kind} {machine.ranks} {size}") for kind, size in points if machine.ranks > 1]
    complete = ("stage", f"program {digest}") in rows or all(place in rows for place in [*[("op", key) for key in keys], *in_place])
    largest = max([size for _, size in points] or [LARGEST_SWEEP])
    sweeps = [(kind, size) for kind in ("gather", "reduce", "all_reduce", "p2p") for size in sweep_sizes(largest)]
    wanted = [(kind, size) for kind, size in sweeps if ("collective", f"{kind} {machine.ranks} {size}") not in rows]
    disk = None if tier is None else disk_of(tier)

    def of_files(place: tuple[str, str]) -> bool:
        row = rows.get(place, {})
        return "direct" in row and disk in (None, row.get("disk"))

    copies = [
        (kind, size)
        for kind in COPIES
        for size in COPY_SIZES
        if not (of_files(("copy", f"{kind} {size}")) if kind in FILES else ("copy", f"{kind} {size}") in rows)
    ]
    # Steps on the host need a tier in memory: its copies are made by the thread that computes.
    uses = "host" if any(f["lane"] == "host" for f in plan.values()) else "file"
    offloads = any(f["moves"] for f in plan.values())
    with_files = tier is not None or (offloads and uses == "file")
    pairs = [pair for pair in tier_pairs(machine.ranks) if not of_files(("together", " ".join(pair)))]
    free = available_bytes()
    summary = _core.Program.parse(text, "program").summary()
    need = summary["persistent_bytes"] + max(summary["step_bytes"], summary["activation_peak_bytes"] or 0)
    return {
        "machine": dataclasses.asdict(machine), "digest": digest, "ops": [] if complete else keys,
        "whole": need * machine.ranks < 0.8 * free, "memory_bytes": int(0.8 * free),
        "collectives": wanted if machine.ranks > 1 else [], "slowdown": machine.ranks > 1 and SLOWDOWN not in rows,
        "copies": copies, "pairs": pairs if with_files else [], "tier": uses if offloads else "", "folder": tier,
    }  # fmt: skip


def estimate_rest(found: Profile, text: str, machine: Machine) -> None:
    """Ops that were too large to run are given the cost model's time, marked so."""
    from interlace import _runtime
    from interlace.cost.measurements import OpTime

    plan = _runtime.profile_plan(text)
    absent = {f["key"]: f for f in plan.values() if f["key"] and f["key"] not in found.ops}
    if not absent:
        return
    estimates = _runtime.estimate_ops(text, found.text(), f"local-{machine.ranks}")
    for key, facts in absent.items():
        if estimates.get(key):
            found.ops[key] = OpTime(estimates[key], facts["result_bytes"], 0, measured=False)
