"""`interlace inspect`: what a program holds, as tables."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from interlace.cli.console import count, fitted, out, print_facts, print_json, rows_table
from interlace.cli.opt import parse_binding
from interlace.cli.program_file import read_program
from interlace.config import format_bytes

HELP = """Show what is in a program: phases, ops, units, bytes, peak of memory.

[bold]Examples[/bold]
  interlace inspect model.il
  interlace inspect --bind b=4,s=512 model.il
  interlace inspect --memory sharded.il
  interlace inspect --regions fused.il
  interlace inspect --regions --target sm_90 fused.il
  interlace inspect --json sharded.il
"""
MOST_UNITS = 12
KERNEL = ("region", "kernel", "blocks", "warps", "registers", "spilled", "shared", "bytes", "seconds")  # seconds: of its region


def inspect(
    file: Annotated[str, typer.Argument(help="A program file; - reads stdin.")],
    bind: Annotated[str, typer.Option("--bind", help="Numbers for symbolic sizes: b=4,s=128.")] = "",
    all_units: Annotated[bool, typer.Option("--all", help="List every unit, not only the largest.")] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Show the memory plan of a step: its arena, what lives at the peak, the largest values."),
    ] = False,
    regions: Annotated[bool, typer.Option("--regions", help="Show the regions: how often each is called, its ops, its text.")] = False,
    target: Annotated[
        str, typer.Option("--target", help="With --regions: compile them for sm_80 or sm_90 (needs no device) and show their kernels.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    program = read_program(file)
    program.verify()
    if bind:
        program = program.bind(parse_binding(bind))
    facts: dict[str, Any] = dict(program.summary())
    facts.pop("text", None)
    units, params = program.units(), program.params()
    names: dict[int, list[str]] = {unit["id"]: [] for unit in units}
    for param in params:
        if param["unit"] is not None:
            names[param["unit"]].append(param["name"])
    for unit in units:
        unit["params"] = names[unit["id"]]
    plan = program.memory_plan() if memory else None
    funcs = program.funcs() if regions or target else []
    kernels = _kernels(funcs, target) if target and funcs else []
    if as_json:
        inputs, symbols, groups = program.inputs(), program.symbols(), program.groups()
        print_json({"file": file, **facts, "mesh": program.mesh, "meta": program.meta(), "unit_list": units,
                    "inputs": inputs, "symbols": symbols, "groups": groups} | ({"memory_plan": plan} if plan else {})
                   | ({"regions": funcs} if regions or target else {}) | ({"kernels": kernels} if target else {}))  # fmt: skip
        return
    if kernels:
        rows = [[str(row[name]) for name in KERNEL] for row in kernels]
        out().print(rows_table("", list(KERNEL), rows, left=(0, 1)))
        return
    if regions or target:
        _print_regions(funcs)
        return
    if plan:
        out().print(fitted(plan["text"]), markup=False, highlight=False, soft_wrap=True)
        out().print("Kernels' own workspaces come on top; a run learns them in its first steps.")
        return
    _print(file, program, facts, units, all_units)


def _print(file: str, program: Any, facts: dict[str, Any], units: list[dict[str, Any]], all_units: bool) -> None:
    console = out()
    mesh = " x ".join(f"{axis}={size}" for axis, size in program.mesh.items())
    unknown = "symbolic: give numbers with --bind"
    rows = {"file": f"{file} ({facts['level']}{', mesh ' + mesh if mesh else ''})"}
    rows |= {key: value for key, value in program.meta().items() if len(value) < 200 and key != "tensor.notes"}
    inputs = [f"{i['name']} {i['dtype']}[{','.join(str(d) for d in i['shape'])}]" for i in program.inputs()]
    rows["inputs"] = ", ".join(inputs) or "none"
    for symbol in program.symbols():
        rows[f"symbol {symbol['name']}"] = f"{symbol['min']} to {symbol['max']}"
    trainable = facts["trainable_elements"]
    frozen = "" if trainable == facts["param_elements"] else f", {count(trainable)} trainable"
    rows["parameters"] = f"{facts['params']} tensors, {count(facts['param_elements'])} elements{frozen}"
    if program.accumulation > 1:
        side = f", {program.width} side by side" if program.width > 1 else ""
        rows["accumulation"] = f"{program.accumulation} micro-batches a step{side}, {program.accumulate_mode}"
    if units:
        gathered, reduced = format_bytes(facts["gathered_bytes"]), format_bytes(facts["reduced_bytes"])
        rows["received a step"] = f"{gathered} by gathers, {reduced} by reduces (each rank)"
        placed, copied, added = (format_bytes(facts[f"{how}_gradient_bytes"]) for how in ("placed", "copied", "added"))
        rows["gradients"] = f"{placed} written in place, {copied} copied, {added} added"
    if facts["not_cut"]:
        rows["not cut"] = "; ".join(facts["not_cut"])
    rows["held between steps"] = format_bytes(facts["persistent_bytes"])
    if facts["step_bytes"]:
        rows["held within a step"] = format_bytes(facts["step_bytes"])
    peak = facts["activation_peak_bytes"]
    rows["activation peak"] = unknown if peak is None else format_bytes(peak)
    print_facts(rows)
    console.print()
    console.print(_phases(facts["phases"]))
    if units:
        console.print()
        _print_units(console, units, all_units)


def _print_regions(funcs: list[dict[str, Any]]) -> None:
    """A row a region, then the texts."""
    if not funcs:
        out().print("The program has no regions: pass fuse makes them (Config(regions='on')).")
        return
    rows = []
    for func in funcs:
        ops = [op["name"].split(".")[1] for op in func["ops"] if op["name"] != "view"]
        shown = ", ".join(ops[:5]) + (f", and {len(ops) - 5} more" if len(ops) > 5 else "")
        numbers = [func["calls"], len(ops), len(func["operands"]), len(func["gives"])]
        rows.append([func["name"], func["key"][:16], *map(str, numbers), shown])
    head = ["region", "key", "calls", "ops", "operands", "gives", "what"]
    out().print(rows_table("", head, rows, left=(0, 1, 6)))
    for func in funcs:
        out().print(func["text"], markup=False, highlight=False, soft_wrap=True)


def _kernels(funcs: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """A row a kernel of the regions; of a region that has none, why. Error: no Triton, another target."""
    from interlace.private import cache_folder
    from interlace.regions.beside import cubins

    found = cubins(funcs, target, cache_folder(), lambda text: print(text, file=sys.stderr))
    names = {func["key"][:16]: func["name"] for func in funcs}
    rows = [
        {"region": names[region.key], "kernel": kernel.name, "blocks": " x ".join(map(str, kernel.grid)), "warps": kernel.warps,
         "registers": kernel.registers, "spilled": kernel.spills, "shared": kernel.shared, "bytes": len(kernel.cubin),
         "seconds": f"{region.seconds:.2f}"}
        for region in found.regions for kernel in region.kernels
    ]  # fmt: skip
    return rows + [dict.fromkeys(KERNEL, "") | {"region": name, "kernel": f"its body runs: {why}"} for name, why in found.left.items()]


def _phases(phases: list[dict[str, Any]]) -> Any:
    """One column a phase: how often it runs, its ops by kind, its peak."""
    kinds = sorted({kind for phase in phases for kind in phase["kinds"]}, key=lambda kind: (kind != "compute", kind))
    rows = [
        ["runs in a step", *(str(phase["repeats"]) for phase in phases)],
        ["ops", *(f"{phase['ops']:,}" for phase in phases)],
        *([f"  {kind}", *(f"{phase['kinds'].get(kind, 0):,}" for phase in phases)] for kind in kinds),
        ["peak", *("symbolic" if p["peak_bytes"] is None else format_bytes(p["peak_bytes"]) for p in phases)],
    ]
    return rows_table("", ["phase", *(phase["name"] for phase in phases)], rows)


def _print_units(console: Any, units: list[dict[str, Any]], all_units: bool) -> None:
    bytes_of = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1}
    ordered = sorted(units, key=lambda unit: (-unit["numel"] * bytes_of.get(unit["dtype"], 1), unit["id"]))
    shown = ordered if all_units else ordered[:MOST_UNITS]
    rows = []
    for unit in shown:
        size = bytes_of.get(unit["dtype"], 1)
        what = ", ".join(unit["params"][:3])
        if len(unit["params"]) > 3:
            what += f", and {len(unit['params']) - 3} more"
        full, shard = format_bytes(unit["numel"] * size), format_bytes(unit["shard"] * size)
        rows.append([f"u{unit['id']}", unit["dtype"], full, shard, what])
    console.print(rows_table("", ["unit", "dtype", "full", "shard", "parameters"], rows, left=(0, 4)))
    if len(shown) < len(ordered):
        console.print(f"and {len(ordered) - len(shown)} smaller units (--all lists them)")
