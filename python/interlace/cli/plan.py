"""`interlace plan`: the best training plan of a model on a cluster, with its reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli import simulation as sim
from interlace.cli.console import Work, err, out, print_json, rows_table, seconds
from interlace.cli.program_file import FileError, write_text
from interlace.config import did_you_mean, format_bytes, parse_bytes
from interlace.errors import InterlaceError

HELP = """Find the best way to train a model on a cluster: pipeline stages, data and tensor parallel, ZeRO, recomputation, offload.

MODEL is a preset (gpt-22b, llama-3-70b, falcon-6.7b, mixtral, ...), a Hugging Face config.json, or a plan file: an edited plan is
checked, and predicted anew on its own cluster or on --cluster.

[bold]Examples[/bold]

  interlace plan gpt-22b --cluster l4-24gb-32 --global-batch 512 --seq 2048 -o gpt.plan

  interlace plan llama-3-70b --cluster h100-80gb-64 --global-batch 256 --seq 8192 --top-k 3 --json

  interlace plan path/to/config.json --cluster mine.toml --global-batch 64 --seq 4096 --memory-limit 30GiB

  interlace plan gpt.plan --export torchtitan settings/

  interlace plan llama-10m --cluster local-2 --global-batch 8 --seq 256 --dtype float32 --runnable -o here.plan

  interlace train --plan here.plan
"""
DTYPES = ("bfloat16", "float32")
EXPORTS = ("torchtitan", "megatron", "deepspeed")


class NothingFits(InterlaceError):
    """No plan of the space fits the memory."""


def register(app: typer.Typer) -> None:
    app.command("plan", help=HELP)(plan)


def plan(
    model: Annotated[str, typer.Argument(help="A preset, a config.json, or a plan file.")],
    cluster: Annotated[str | None, typer.Option("--cluster", help=sim.CLUSTER_HELP)] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", help="Samples of a step.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens of a sample.")] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit", help="Of a device, for example 20GiB.", show_default="0.9 of what is not reserved"
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Of a node, for what is offloaded.", show_default="no limit")
    ] = None,
    space: Annotated[
        str, typer.Option("--space", help="full, paper, artifact, or another system's: megatron, deepspeed, aceso.")
    ] = "full",
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable", help="Only what interlace train --plan runs: one stage, no tensor parallel, no offload."
        ),
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and gradients: bfloat16 or float32.")] = "bfloat16",
    no_flash: Annotated[bool, typer.Option("--no-flash", help="Attention scores are written to memory.")] = False,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", help="Seconds to search; then the best so far, with its gap. 0: to the end."),
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="So many plans of different shape.")] = 1,
    no_why: Annotated[bool, typer.Option("--no-why", help="Leave out the comparison with simpler plans.")] = False,
    ignore_key: Annotated[
        list[str] | None, typer.Option("--ignore-key", help="A key of config.json that may be unknown.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the plan; the others of --top-k beside it, numbered.")
    ] = None,
    export: Annotated[
        tuple[str, str] | None,
        typer.Option("--export", help="torchtitan, megatron or deepspeed, and a folder for its settings."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    if export is not None and export[0] not in EXPORTS:
        raise FileError(f"--export {export[0]}: not one of {', '.join(EXPORTS)}{did_you_mean(export[0], EXPORTS)}")
    if dtype not in DTYPES:
        raise FileError(f"--dtype {dtype}: not one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    ignore = tuple(ignore_key or ())
    if _is_plan(model):
        given = [name for name, value in (("--global-batch", global_batch), ("--seq", seq)) if value is not None]
        if given:
            raise FileError(
                f"{model} is a plan and says its own {' and '.join(given)}: leave them out, or name the model"
            )
        found = check_plan(model, cluster, ignore)
    else:
        found = make_plan(
            model, _needed("--cluster", cluster, "l4-24gb-32"), int(_needed("--global-batch", global_batch, "512")),
            int(_needed("--seq", seq, "2048")), ignore, space=space, dtype=dtype, flash=not no_flash, runnable=runnable,
            memory_limit=parse_bytes(memory_limit) if memory_limit else 0,
            host_limit=parse_bytes(host_memory) if host_memory else 0, time_limit_s=time_limit, top=top_k, why_not=not no_why,
        )  # fmt: skip
    if not found["plans"]:
        if as_json:
            print_json(found)
        raise NothingFits(nothing_fits(model, cluster or "", found))
    for number, each in enumerate(found["plans"] if output else [], 1):
        file = str(output) if number == 1 else f"{Path(str(output)).with_suffix('')}-{number}{Path(str(output)).suffix}"
        write_text(file, each["text"])
        err().print(f"wrote {file}")
    if export is not None:
        from interlace.plan.export import export_plan

        for file, inexpressible in export_plan(found["plans"][0]["plan"], *export, ignore=ignore):
            err().print(f"wrote {file}")
            for line in inexpressible:
                err().print(f"  cannot be said there: {line}", markup=False)
    if as_json:
        print_json(found)
        return
    show(found)
    if output:
        one = found["plans"][0]["plan"]
        can = len(one["stages"]) == 1 and one["stages"][0]["tp"] == 1 and not any(one["stages"][0]["offload"].values())
        train = f"interlace train --plan {output}\n      " if can else ""
        print(f"next: {train}interlace report --plan {output}")


def _needed(option: str, value: Any, example: str) -> Any:
    if value is None:
        raise FileError(f"give {option}, for example {option} {example}")
    return value


def _is_plan(name: str) -> bool:
    path = Path(name)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(14) == b"interlace-plan"


# ---- finding ----


def traced(work: Work, name: str, seq: int, flash: bool, dtype: str, ignore: tuple[str, ...]) -> str:
    """The text of the model's layers."""
    from transformers.utils import logging

    from interlace.plan.layers import model_text

    work.update(f"tracing the layers of {name}")
    logging.set_verbosity_error()  # notes on configs that are never run
    return model_text(name, seq=seq, flash=flash, dtype=dtype, ignore=ignore)


def make_plan(
    model: str, cluster: str, global_batch: int, seq: int, ignore: tuple[str, ...] = (), **options: Any
) -> dict[str, Any]:
    """What `_core.make_plans` found (src/plan/planning.h), with progress on stderr."""
    from interlace import _core

    text, cluster_file = sim.read_cluster(cluster)
    _core.cluster_devices(text, cluster_file)  # a wrong cluster is said before the model is traced
    with Work() as work:
        layers = traced(work, model, seq, options["flash"], options["dtype"], ignore)
        found = _core.make_plans(
            layers, text, global_batch, seq, model=model, cluster_file=cluster_file, progress=_progress(work), **options
        )
    return json.loads(found)


def _progress(work: Work) -> Callable[[str, int, int, float], None]:
    def say(what: str, done: int, total: int, best_us: float) -> None:
        best = f", best {seconds(best_us / 1e6)} a step" if best_us > 0 else ""
        work.update(what + best, done, total or None)

    return say


def check_plan(file: str, cluster: str | None, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """A plan file predicted anew. Error: the rules that it breaks, with the stage."""
    from interlace import _core
    from interlace.plan.execute import read_plan

    plan = read_plan(file)
    text, cluster_file = sim.read_cluster(cluster or plan["cluster"])
    with Work() as work:
        layers = traced(work, plan["model"], plan["sequence"], plan["flash_attention"], plan["dtype"], ignore)
        predicted = _core.predict_plan(Path(file).read_text(), layers, text, file=file, cluster_file=cluster_file)
    again = json.loads(_core.read_plan(predicted, file))
    return {"plans": [{"plan": again, "text": predicted, "explained": []}], "complete": True, "checked": file,
            "before_us": plan["step_us"]}  # fmt: skip


def nothing_fits(model: str, cluster: str, found: dict[str, Any]) -> str:
    """By how much, and what to change."""
    limit = found["memory_limit"]
    why = found["nothing_fits"]
    if "impossible" in why:
        return f"no plan for {model} on {cluster}: {why['impossible']}"
    least = why["least_bytes"]
    if why["over_bytes"] <= 0:
        return f"no plan for {model} on {cluster} was found in the time given: give --time-limit more than {seconds(found['seconds'])}"
    lines = [
        f"no plan for {model} fits {cluster}: what needs least takes {format_bytes(least)} of a device, "
        f"{format_bytes(why['over_bytes'])} more than the {format_bytes(limit)} there are",
        "what would fit:",
    ]
    if "host_memory" in why:
        lines.append(f"  {format_bytes(why['host_memory'])} of host memory a node (--host-memory)")
    if "devices" in why:
        lines.append(f"  {why['devices']} devices of the same kind")
    if "sequence" in why:
        lines.append(f"  sequences of {why['sequence']} tokens")
    lines.append(
        f"  devices with {format_bytes(least)} for the program (--memory-limit {-(-least // 2**20)}MiB, if they have it)"
    )
    return "\n".join(lines)


# ---- showing ----


def show(found: dict[str, Any]) -> None:
    console = out()
    for number, each in enumerate(found["plans"], 1):
        if len(found["plans"]) > 1:
            console.print(f"\n[bold]Plan {number}[/bold]")
        for line in headline(each["plan"], found):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
        console.print(stage_table(each["plan"]))
        if each["explained"]:
            console.print()
            console.print(byte_table(each["plan"], each["explained"]))
            console.print()
            console.print(time_table(each["plan"], each["explained"]))
    if found.get("why_not"):
        console.print()
        console.print(why_table(found["why_not"]))


def headline(plan: dict[str, Any], found: dict[str, Any]) -> list[str]:
    tokens = plan["samples_per_s"] * plan["sequence"]
    flash = "flash attention" if plan["flash_attention"] else "attention scores in memory"
    lines = [
        f"{plan['model']} on {plan['cluster']}: {plan['global_batch']} samples of {plan['sequence']} tokens, {plan['dtype']}, {flash}",
        f"{seconds(plan['step_us'] / 1e6)} a step, {plan['samples_per_s']:.2f} samples/s, {tokens:,.0f} tokens/s; "
        f"{plan['accumulation']} micro-batches in {len(plan['stages'])} stage(s)",
    ]
    if "checked" in found:
        before = f", it said {seconds(found['before_us'] / 1e6)}" if found["before_us"] > 0 else ""
        lines.append(f"{found['checked']} keeps its rules; predicted anew{before}")
    elif found["complete"]:
        gap = f"at most {100 * plan['gap']:.2f} % above the best" if plan["gap"] > 1e-6 else "no plan is faster"
        looked = f"{found['points']:,} points of {found['frontiers']:,} stages"
        lines.append(f"space {plan['space']}: {gap}; searched in {seconds(found['seconds'])} ({looked})")
    else:
        lines.append(
            f"stopped after {seconds(found['seconds'])}: a plan up to {100 * plan['gap']:.1f} % faster may exist; give --time-limit more"
        )
    return lines


def _alike(plan: dict[str, Any]) -> list[tuple[int, int]]:
    """Runs of stages that differ in nothing but their place: (first, last)."""
    keys = ("layers", "embedding", "head", "micro_batch", "dp", "tp", "zero", "full", "selective", "offload", "t_us",
            "d_us", "peak_forward", "peak_backward")  # fmt: skip
    runs: list[tuple[int, int]] = []
    stages = plan["stages"]
    for i, stage in enumerate(stages):
        if runs and all(stages[runs[-1][0]][key] == stage[key] for key in keys):
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs


def _named(run: tuple[int, int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"


def offload_text(offload: dict[str, float]) -> str:
    """ "states 25 %, activations 100 %"; "" when nothing is."""
    return ", ".join(f"{name} {100 * share:.3g} %" for name, share in offload.items() if share > 0)


def stage_table(plan: dict[str, Any]) -> Any:
    rows = []
    for run in _alike(plan):
        first, last = plan["stages"][run[0]], plan["stages"][run[1]]
        held = "".join(" +emb" * stage["embedding"] + " +head" * stage["head"] for stage in (first,))
        devices = f"{first['first_device']}-{last['first_device'] + last['devices'] - 1}"
        kept = first["layers"] - first["full"] - first["selective"]
        counts = ((first["full"], "full"), (first["selective"], "selective"), (kept, "kept"))
        recompute = ", ".join(f"{count} {word}" for count, word in counts if count)
        rows.append(
            [_named(run), f"{first['layers']}{held}", devices, str(first["micro_batch"]), str(first["dp"]), str(first["tp"]),
             str(first["zero"]), recompute, offload_text(first["offload"]) or "-", _ms(first["t_us"]), _ms(first["d_us"]),
             format_bytes(first["peak_bytes"]), format_bytes(first["host_bytes"]) if first["host_bytes"] else "-"]
        )  # fmt: skip
    head = [
        "stage",
        "layers",
        "devices",
        "b",
        "dp",
        "tp",
        "ZeRO",
        "recomputed",
        "offload",
        "t ms",
        "d ms",
        "peak",
        "host",
    ]
    return rows_table("Stages", head, rows, (0, 1, 2, 7, 8))


def byte_table(plan: dict[str, Any], explained: list[dict[str, Any]]) -> Any:
    """A row a stage, a column for each kind of bytes that there is, in GiB; what the host holds is beside."""
    runs = _alike(plan)
    names = [entry["name"] for entry in explained[0]["bytes"]]
    power, unit = (30, "GiB") if max(stage["peak_bytes"] for stage in plan["stages"]) >= 2**30 else (20, "MiB")

    def sized(count: int) -> str:
        return f"{count / 2**power:.2f}" if count >= 2**power / 200 else "-" if count == 0 else "<0.01"

    shown = [i for i in range(len(names)) if any(explained[run[0]]["bytes"][i]["device"] for run in runs)]
    hosted = [i for i in range(len(names)) if any(explained[run[0]]["bytes"][i]["host"] for run in runs)]
    rows = []
    for run in runs:
        entries = explained[run[0]]["bytes"]
        cells = [sized(entries[i]["device"]) for i in shown] + [sized(plan["stages"][run[0]]["peak_bytes"])]
        cells += [sized(entries[i]["host"]) for i in hosted]
        rows.append([_named(run), "forward" if explained[run[0]]["peak_in_forward"] else "backward", *cells])
    head = ["stage", "peak in", *(names[i] for i in shown), "peak", *(f"{names[i]} on the host" for i in hosted)]
    title = f"{unit} of a device at its peak (limit {sized(plan['memory_limit'])})"
    return rows_table(title, head, rows, (0, 1))


def time_table(plan: dict[str, Any], explained: list[dict[str, Any]]) -> Any:
    """What the phases of a micro-batch would take alone, and together; of the slowest stage where there are many."""
    runs = _alike(plan)
    if len(runs) > 2:
        runs = [max(runs, key=lambda run: plan["stages"][run[0]]["t_us"])]
    keys = ("compute_us", "device_us", "to_device_us", "to_host_us", "tensor_parallel_us", "exposed_us", "total_us")
    rows = []
    for run in runs:
        for phase in explained[run[0]]["phases"]:
            rows.append(
                [_named(run), phase["name"].replace(" ", "\u00a0")]
                + [_ms(phase[key]) if phase[key] else "-" for key in keys]
            )
    head = [
        "stage",
        "phase",
        "compute",
        "gather, reduce",
        "from host",
        "to host",
        "tensor parallel",
        "exposed at ends",
        "together",
    ]
    which = "" if len(runs) == len(_alike(plan)) else ", the slowest stage"
    return rows_table(f"Milliseconds of a micro-batch, each alone and together{which}", head, rows, (0, 1))


def why_table(why_not: list[dict[str, Any]]) -> Any:
    rows = []
    for row in why_not:
        if "step_us" in row:
            limit = "" if row.get("complete", True) else ", or less with more time"
            said = f"{seconds(row['step_us'] / 1e6)} a step"
            more = f"{100 * row['slower']:+.1f} %{limit}"
        elif "impossible" in row:
            said, more = "cannot be", row["impossible"]
        elif row["over_bytes"] > 0:
            said = "does not fit"
            more = f"needs {format_bytes(row['least_bytes'])} of a device at least, {format_bytes(row['over_bytes'])} too much"
        else:
            said, more = "not found", "in the time given"
        rows.append([row["name"], row["what"], said, more])
    return rows_table("Why not", ["", "", "predicted", ""], rows, (0, 1, 2, 3))


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 100 else f"{us / 1e3:.3f}"
