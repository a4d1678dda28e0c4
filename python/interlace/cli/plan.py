"""`interlace plan`: the best training plan of a model on a cluster, with its reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli import plan_tables
from interlace.cli import simulation as sim
from interlace.cli.console import Work, err, print_json, seconds
from interlace.cli.plan_here import Here, plan_on
from interlace.cli.plan_tables import show
from interlace.cli.program_file import FileError, write_text
from interlace.config import did_you_mean, format_bytes, parse_bytes
from interlace.errors import InterlaceError
from interlace.files import read_text

HELP = """Find the best way to train a model on a cluster: pipeline stages, data and tensor parallel, ZeRO, recomputation, offload.

MODEL is a preset (gpt-22b, llama-3-70b, falcon-6.7b, mixtral, ...), a Hugging Face config.json, a file that --write-layers wrote (which
needs neither torch nor transformers), or a plan file: an edited plan is checked, and predicted anew on its own cluster or on --cluster.

[bold]Examples[/bold]
  interlace plan gpt-22b --cluster l4-24gb-32 --global-batch 512 --seq 2048 -o gpt.plan
  interlace plan llama-3-70b --cluster h100-80gb-64 --global-batch 256 --seq 8192 --top-k 3 --json
  interlace plan path/to/config.json --cluster mine.toml --global-batch 64 --seq 4096 --memory-limit 30GiB
  interlace plan gpt-22b --cluster l4-24gb-32 --global-batch 256 --seq 2048 --from gpt.plan -o half.plan
  interlace plan gpt.plan --export torchtitan settings/
  interlace plan gpt-22b --seq 2048 --write-layers gpt.layers
  interlace plan llama-10m --local --ranks 2 --global-batch 8 --seq 256 --measure -o here.plan
  interlace train --plan here.plan
"""
DTYPES = ("bfloat16", "float32")
EXPORTS = ("torchtitan", "megatron", "deepspeed")


class NothingFits(InterlaceError):
    """No plan of the space fits the memory."""


def plan(
    model: Annotated[str, typer.Argument(help="A preset, a config.json, or a plan file.")],
    cluster: sim.Cluster = None,
    local: Annotated[
        bool,
        typer.Option("--local", help="For --ranks processes of this host, instead of --cluster: a plan that interlace train --plan runs."),
    ] = False,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="With --local, how many.", show_default="2")] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="With --local, the name that interlace profile had for it.", show_default="interface")
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="With --local, the file that keeps measurements.", show_default="the user's cache")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --local, first measure the ops of the plan's micro-batches, as interlace profile does.")
    ] = False,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1, help="Samples of a step.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Tokens of a sample.")] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="Of a device, for example 20GiB.", show_default="0.9 of what is not reserved"),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Of a node, for what is offloaded.", show_default="0.9 of the cluster's")
    ] = None,
    space: Annotated[str, typer.Option("--space", help="full, paper, artifact, or another system's: megatron, deepspeed, aceso.")] = "full",
    runnable: Annotated[
        bool,
        typer.Option("--runnable", help="Only what interlace train --plan runs, predicted as it does: tp alike on all stages."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of weights and gradients: bfloat16 or float32.", show_default="bfloat16; float32 with --local"),
    ] = None,
    no_flash: Annotated[bool, typer.Option("--no-flash", help="Attention scores are written to memory.")] = False,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0, help="Seconds for all; then the best so far, with its gap. 0: to the end.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="So many plans of different shape.")] = 1,
    begin_with: Annotated[
        str | None,
        typer.Option("--from", help="A plan of before something changed; the search begins with its stages and is shorter."),
    ] = None,
    no_why: Annotated[bool, typer.Option("--no-why", help="Leave out the comparison with simpler plans.")] = False,
    ignore_key: Annotated[list[str] | None, typer.Option("--ignore-key", help="A key of config.json that may be unknown.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan; the others of --top-k beside it, numbered.")] = None,
    export: Annotated[
        tuple[str, str] | None, typer.Option("--export", help="torchtitan, megatron or deepspeed, and a folder for its settings.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="With a plan file: what --write-layers wrote of its model, instead of tracing it again."),
    ] = None,
    write_layers: Annotated[
        str | None,
        typer.Option("--write-layers", help="Only write the model's layers to a file, to plan from it where there is no torch."),
    ] = None,
    over_memory: Annotated[
        bool, typer.Option("--over-memory", help="Of a plan file: predict it although it does not fit, and say by how much.")
    ] = False,
    page: Annotated[str | None, typer.Option("--page", help="Also write everything that is printed as an HTML page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    if export is not None and export[0] not in EXPORTS:
        raise FileError(f"--export {export[0]}: not one of {', '.join(EXPORTS)}{did_you_mean(export[0], EXPORTS)}")
    cluster = _local(cluster, local, ranks)
    needs_local = {"--network": network, "--store": store, "--measure": measure or None}
    if not local and (given := [name for name, value in needs_local.items() if value is not None]):
        raise FileError(f"{' and '.join(given)}: for --local, whose times were measured here")
    here = Here(str(cluster), network, store) if local else None
    runnable = runnable or local
    dtype = dtype or ("float32" if local else "bfloat16")
    if dtype not in DTYPES:
        raise FileError(f"--dtype {dtype}: not one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    ignore = tuple(ignore_key or ())
    if write_layers is not None:
        with Work() as work:
            write_text(write_layers, traced(work, model, seq or 2048, not no_flash, dtype, ignore))
        print(f"wrote {write_layers}; next: interlace plan {write_layers} --cluster CLUSTER --global-batch N --seq {seq or 2048}")
        return
    if _is_plan(model):
        options = (("--global-batch", global_batch), ("--seq", seq), ("--from", begin_with))
        given = [name for name, value in options if value is not None]
        if given:
            raise FileError(f"{model} is a plan: leave {' and '.join(given)} out, or name the model")
        if measure:
            raise FileError(f"--measure is for a model: {model} is a plan")
        found = check_plan(model, cluster, ignore, layers, over_memory, here)
    elif over_memory:
        raise FileError("--over-memory is for plan files: a search gives plans that fit")
    else:
        found = make_plan(
            model, _needed("--cluster", cluster, "l4-24gb-32"), int(_needed("--global-batch", global_batch, "512")),
            int(_needed("--seq", seq, "2048")), ignore, space=space, dtype=dtype, flash=not no_flash, runnable=runnable,
            memory_limit=parse_bytes(memory_limit) if memory_limit else 0,
            host_limit=parse_bytes(host_memory) if host_memory else 0, time_limit_s=time_limit, top=top_k, why_not=not no_why,
            before=begin_with, here=here, measure=measure,
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
    if page is not None:
        best = found["plans"][0]
        write_text(page, plan_page(best["plan"], best["text"], output or "the plan", found))
        err().print(f"wrote {page}")
    if as_json:
        print_json(found)
        return
    show(found)
    if output:
        from interlace.plan.execute import can_run

        one = found["plans"][0]["plan"]
        train = f"interlace train --plan {output}\n      " if can_run(one) else ""
        print(f"next: {train}interlace report --plan {output}")


def plan_page(plan: dict[str, Any], text: str, file: str, found: dict[str, Any] | None) -> str:
    """The HTML page of a plan, with all that the terminal shows where it was predicted here (`found`)."""
    from interlace import _core
    from interlace.report import render_plan

    told = plan_tables.told(found) if found is not None else ([], [])
    return render_plan(plan, _core.plan_trace(text, file), told)


def _local(cluster: str | None, local: bool, ranks: int | None) -> str | None:
    """The cluster to plan for: with --local this host's processes. Error: options that contradict each other."""
    if not local:
        if ranks is not None:
            raise FileError("--ranks is for --local; devices of a cluster are in its name, as in local-4 or l4-24gb-32")
        return cluster
    if cluster is not None:
        raise FileError(f"--local plans for this host, and --cluster {cluster} for others: leave one of them out")
    return f"{sim.LOCAL}{ranks or 2}"


def _needed(option: str, value: Any, example: str) -> Any:
    if value is None:
        raise FileError(f"give {option}, for example {option} {example}")
    return value


def _is_plan(name: str) -> bool:
    return (Path(name).suffix == ".plan" and Path(name).is_file()) or _begins(name, b"interlace-plan")


def _begins(name: str, magic: bytes) -> bool:
    """Whether there is such a file, and it begins so."""
    path = Path(name)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


# ---- finding ----


def traced(work: Work, name: str, seq: int, flash: bool, dtype: str, ignore: tuple[str, ...], cluster: str = "") -> str:
    """The text of the model's layers, for a cluster's kind of device. Error: a file of layers for another dtype or attention."""
    if _begins(name, b"interlace-model"):
        return _written_layers(name, flash, dtype)
    from interlace.models import options_of

    options_of(name, ignore)  # a wrong name is said before torch and transformers are imported, which takes seconds
    from transformers.utils import logging

    from interlace.plan.layers import model_text

    work.update(f"tracing the layers of {name}")
    logging.set_verbosity_error()  # notes on configs that are never run
    return model_text(name, seq=seq, flash=flash, dtype=dtype, ignore=ignore, cpu=cluster.startswith(sim.LOCAL))


def _written_layers(file: str, flash: bool, dtype: str) -> str:
    """What --write-layers wrote, for the attention and dtype that are asked for. The sizes of a batch are open in it."""
    text = read_text(file, "a file of layers", FileError)
    facts = dict(line.split(" ", 1) for line in text.splitlines()[:16] if " " in line)
    wanted = {"flash": "true" if flash else "false", "dtype": {"bfloat16": "bf16", "float32": "f32"}[dtype]}
    differ = [name for name, value in wanted.items() if facts.get(name) != value]
    if differ:
        said = ", ".join(f"{name} {facts.get(name)}" for name in differ)
        raise FileError(
            f"{file} was written for {said}, and the plan is for {', '.join(f'{name} {wanted[name]}' for name in differ)}: "
            "give --dtype and --no-flash as --write-layers had them"
        )
    return text


def make_plan(
    model: str, cluster: str, global_batch: int, seq: int, ignore: tuple[str, ...] = (), before: str | None = None,
    here: Here | None = None, measure: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """What `_core.make_plans` found (src/plan/planning.h), with progress on stderr. `before`: a plan file to begin with. `here`: the
    cluster, of what was measured on it; with `measure` what a plan lacks is measured, and another one made."""
    from interlace import _core
    from interlace.plan.execute import plan_text, read_plan

    if before is not None:  # a wrong one is said before the model is traced
        read_plan(before)
        options |= {"before": plan_text(before), "before_file": before}
    text, cluster_file = sim.read_cluster(cluster) if here is None else (here.text, cluster)
    _core.cluster_devices(text, cluster_file)  # a wrong cluster is said before the model is traced
    with Work() as work:
        layers = traced(work, model, seq, options["flash"], options["dtype"], ignore, cluster)

    def planned(text: str, top: int) -> dict[str, Any]:
        with Work() as work:
            found: dict[str, Any] = json.loads(_core.make_plans(
                layers, text, global_batch, seq, model=model, cluster_file=cluster_file, progress=_progress(work), **options | {"top": top}
            ))  # fmt: skip
        return found | ({"from": before} if before is not None else {})

    top = options["top"]
    return planned(text, top) if here is None else plan_on(here, model, layers, seq, planned, measure, top)


def _progress(work: Work) -> Callable[[str, int, int, float], None]:
    def say(what: str, done: int, total: int, best_us: float) -> None:
        best = f", best {seconds(best_us / 1e6)} a step" if best_us > 0 else ""
        work.update(what + best, done, total or None)

    return say


def check_plan(
    file: str, cluster: str | None, ignore: tuple[str, ...] = (), layers_file: str | None = None, over_memory: bool = False,
    here: Here | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A plan file predicted anew. Error: the rules that it breaks, with the stage; those of memory not with `over_memory`."""
    from interlace import _core
    from interlace.plan.execute import read_plan

    plan = json.loads(_core.read_plan(Path(file).read_text(), file, over_memory=True)) if over_memory else read_plan(file)
    if cluster is None and plan["cluster"].startswith(sim.LOCAL):
        here = Here(plan["cluster"])
    text, cluster_file = sim.read_cluster(cluster or plan["cluster"]) if here is None else (here.text, plan["cluster"])
    with Work() as work:
        layers = traced(
            work, layers_file or plan["model"], plan["sequence"], plan["flash_attention"], plan["dtype"], ignore, cluster or plan["cluster"]
        )
        predicted = _core.predict_plan(Path(file).read_text(), layers, text, file=file, cluster_file=cluster_file, over_memory=over_memory)
        error = _core.PlanPredictor(layers, plan["sequence"]).run(predicted, text, cluster_file)[2]
        explained = json.loads(_core.explain_plan(predicted, layers, text, cluster_file=cluster_file))
    again = json.loads(_core.read_plan(predicted, file, over_memory=over_memory))
    found = {"plans": [{"plan": again, "text": predicted, "explained": explained, "error": error}], "complete": True, "checked": file,
             "before_us": plan["step_us"]}  # fmt: skip
    return found if here is None else found | {"here": here.facts(found, layers, plan["model"], plan["sequence"])}


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
    lines.append(f"  devices with {format_bytes(least)} for the program (--memory-limit {-(-least // 2**20)}MiB, if they have it)")
    return "\n".join(lines)
