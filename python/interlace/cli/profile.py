"""`interlace profile`: measures this machine, or this group of ranks, for the cost model."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from safetensors.torch import save as save_tensors

from interlace.cli.console import Work, err, print_facts, print_json, rows_table, seconds
from interlace.cli.console import out as console_out
from interlace.cli.program_file import FileError, read_program_text, write_text
from interlace.cli.train import cache_folder, ranks_of_launcher
from interlace.config import Config, format_bytes
from interlace.cost.machine import Machine
from interlace.cost.measure import COPY_SIZES, sweep_sizes
from interlace.cost.measurements import COPIES, SLOWDOWN, Profile
from interlace.cost.store import Store, StoreError
from interlace.cost.tier import FILES, disk_of, tier_pairs
from interlace.dist.launch import Terminated, is_rank, run_ranks
from interlace.dist.peers import Peers
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

Task: TypeAlias = tuple[dict[str, Any], str, bytes]  # what is to be measured, its program, its inputs

Ranks = Annotated[
    int | None, typer.Option("--ranks", help="Processes on this machine.", show_default="2, or the launcher's")
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="CPU threads of each rank.", show_default="cores / ranks")
]
Network = Annotated[
    str | None,
    typer.Option("--network", help="A name for the network, part of the fingerprint.", show_default="interface"),
]
StorePath = Annotated[
    str | None, typer.Option("--store", help="The file that keeps measurements.", show_default="the user's cache")
]
Export = Annotated[str | None, typer.Option("--export", help="Write the profile as a file for simulate and report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True, rich_markup_mode="rich", no_args_is_help=False)
    group.callback(help=HELP)(profile)
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
    again: Annotated[bool, typer.Option("--again", help="Measure also what is there already.")] = False,
    store: StorePath = None,
    export: Export = None,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from interlace.cli.train import parse_clip

    for name, value in (
        ("ranks", 1 if ranks is None else ranks),
        ("micro-batch", micro_batch),
        ("accumulation", accumulation),
        ("threads", threads or 1),
    ):
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
        return {**job, "budget_s": budget, "quiet": as_json, "store": str(path)}, text, inputs

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
    ranks: Ranks = None,
    threads: Threads = None,
    network: Network = None,
    machine: Annotated[str | None, typer.Option("--machine", help="A fingerprint instead of this machine's.")] = None,
    store: StorePath = None,
    export: Export = None,
    top: Annotated[int, typer.Option("--top", help="Ops to list, the longest first.")] = 12,
    as_json: AsJson = False,
) -> None:
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
    from interlace.cli.settings import cores

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


def program_of_model(
    model: str, config: Config, ranks: int, micro_batch: int, seq: int | None
) -> tuple[str, bytes]:  # fmt: skip
    """The program that training this model here would run, and one micro-batch for it (saved tensors)."""
    from interlace import _core, models
    from interlace.capture import capture

    built = models.build(model, micro_batch=micro_batch, seq=seq)
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-4)
    captured = capture(built.model, built.loss_fn, built.example_batch, optimizer=optimizer)
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
    size = 1
    for _, axis in program.mesh.items():
        size *= axis
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
    complete = ("stage", f"program {digest}") in rows or all(
        place in rows for place in [*[("op", key) for key in keys], *in_place]
    )
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
        "machine": dataclasses.asdict(machine),
        "digest": digest,
        "ops": [] if complete else keys,
        "whole": need * machine.ranks < 0.8 * free,
        "memory_bytes": int(0.8 * free),
        "collectives": wanted if machine.ranks > 1 else [],
        "slowdown": machine.ranks > 1 and SLOWDOWN not in rows,
        "copies": copies,
        "pairs": pairs if with_files else [],
        "tier": uses if offloads else "",
        "folder": tier,
    }


def available_bytes() -> int:
    """Memory that programs may still take, as the kernel counts it."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def measures(job: dict[str, Any]) -> bool:
    return any(job[part] for part in ("ops", "collectives", "copies", "slowdown", "pairs"))


def run_as_rank(prepare: Callable[[], Task], machine: Machine) -> Task | None:
    """The same where a launcher has started the ranks: rank 0 prepares the task and all do it. None on the others."""
    from interlace.cost.rank import TIMEOUT_S, take_part

    torch.set_num_threads(machine.threads)
    peers = Peers(torch.device("cpu"), TIMEOUT_S)
    try:
        with peers.guard():
            job, text, inputs = prepare() if peers.rank == 0 else ({}, "", b"")
            job = json.loads(peers.broadcast("job", json.dumps(job).encode()))
            text = peers.broadcast("program", text.encode()).decode()
            inputs = peers.broadcast("inputs", inputs)
            if measures(job):
                take_part(job, text, inputs, peers)
            return (job, text, inputs) if peers.rank == 0 else None
    finally:
        peers.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_job(job: dict[str, Any], text: str, inputs: bytes, machine: Machine) -> None:
    with tempfile.TemporaryDirectory(prefix="interlace-profile-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "program.il").write_text(text)
        (folder / "inputs.safetensors").write_bytes(inputs)
        command = [sys.executable, "-m", "interlace.cost.rank", str(folder)]
        failure = run_ranks(command, machine.ranks, machine.threads)
    if failure is not None:
        raise InterlaceError(failure.describe())


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


def facts_of(found: Profile, text: str | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {"fingerprint": found.fingerprint, "ops": len(found.ops)}
    facts["estimated_ops"] = sum(not op.measured for op in found.ops.values())
    if text is not None:
        from interlace import _runtime

        plan = _runtime.profile_plan(text)
        keys = {f["key"] for f in plan.values() if f["key"]}
        facts["program_ops"], facts["program_ops_known"] = len(keys), len(keys & found.ops.keys())
    facts["collectives"] = {f"{k} {r} ranks {b} bytes": t.us for (k, r, b), t in sorted(found.collectives.items())}
    facts["copies"] = {f"{k} {b} bytes": us for (k, b), us in sorted(found.copies.items())}
    facts["compute_slowdown_beside_transfer"] = found.slowdown
    facts["together"] = {f"{a} {b}": [p.first, p.second, p.samples] for (a, b), p in sorted(found.together.items())}
    facts["issue_us"] = found.issue_us
    return facts


def print_summary(facts: dict[str, Any], export: str | None) -> None:
    rows = {"machine": facts["fingerprint"]}
    rows["measured now"] = f"{facts['measured_now']} entries in {seconds(facts['seconds'])}"
    rows["program"] = f"{facts['program_ops_known']} of {facts['program_ops']} kinds of op known"
    if facts["estimated_ops"]:
        rows["estimated"] = f"{facts['estimated_ops']} ops were too large to run"
    rows["kept in"] = facts["store"]
    if export:
        rows["written to"] = export
    print_facts(rows)
    if export:
        cluster = "local-N"
        console_out().print(f"next: interlace simulate PROGRAM --cluster {cluster} --profile {shlex.quote(export)}")


def print_profile(found: Profile, top: int) -> None:
    print_facts({"machine": found.fingerprint})
    console = console_out()
    longest = sorted(found.ops.items(), key=lambda item: -item[1].us)[:top]
    rows = [[key, f"{op.us:,.1f}", format_bytes(op.bytes), format_bytes(op.transient)] for key, op in longest]
    console.print()
    console.print(rows_table("", ["op", "us", "results", "inside"], rows))
    if len(found.ops) > len(longest):
        console.print(f"and {len(found.ops) - len(longest)} shorter ops (--top)")
    if found.collectives:
        rows = []
        for (kind, ranks, size), taken in sorted(found.collectives.items()):
            rate = f"{size / taken.us / 1e3:.3f}" if taken.us > 0 else ""
            rows.append([kind, str(ranks), format_bytes(size), f"{taken.us:,.0f}", rate, f"{taken.core_us:,.0f}"])
        console.print()
        console.print(rows_table("", ["collective", "ranks", "bytes", "us", "GB/s", "core us"], rows))
    if found.copies:
        rows = [
            [k, format_bytes(b), f"{us:,.0f}", f"{b / us / 1e3:.2f}"] for (k, b), us in sorted(found.copies.items())
        ]
        console.print()
        console.print(rows_table("", ["copy", "bytes", "us", "GB/s"], rows))
    rows = []
    if found.slowdown is not None:
        rows.append(["compute", f"{found.slowdown:.2f}", "collective", "", "sharing of cores not counted"])
    for (first, second), pair in sorted(found.together.items()):
        note = "" if pair.samples else "not measured: the disk was too slow"
        rows.append([first, f"{pair.first:.2f}", second, f"{pair.second:.2f}", note])
    if rows:
        console.print()
        console.print(rows_table("", ["together", "times longer", "with", "times longer", ""], rows, left=(0, 2, 4)))
