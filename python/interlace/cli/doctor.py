"""`interlace doctor`: what is installed, what a run would use, what is missing and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli.console import out, print_facts, print_json
from interlace.config import format_bytes
from interlace.cost.machine import available_bytes, cores, processor_name
from interlace.errors import built_with, what_to_install
from interlace.private import cache_folder
from interlace.version import __version__

HELP = """Show what is installed, what a run would use, and what is missing, each with the command that installs it.

Exit code 1 when something is missing that training needs.

[bold]Examples[/bold]
  interlace doctor
  interlace doctor --json
"""
# Packages that are needed only for something, and for what.
OPTIONAL = {
    "transformers": "models by name or config.json, and Hugging Face folders",
    "peft": "LoRA",
    "datasets": "parquet and compressed texts",
    "tensorboard": "--tensorboard",
    "wandb": "--wandb",
}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False) -> None:
    found = look()
    if as_json:
        print_json(found)
    else:
        _print(found)
    if any(problem["needed"] for problem in found["problems"]):
        raise typer.Exit(1)


def look() -> dict[str, Any]:
    """Everything, as names and values; `problems`: what is missing, for what, whether training needs it, and the fix."""
    problems: list[dict[str, Any]] = []
    parts = {name: _module(f"interlace.{name}", problems) for name in ("_core", "_runtime")}
    torch = _torch(problems) if parts["_runtime"] != "missing" or _version("torch") else None
    for package, purpose in OPTIONAL.items():
        if _version(package) is None:
            problems.append({"missing": package, "for": purpose, "needed": False, "fix": f"pip install {package}"})
    return {
        "interlace": {"version": __version__, "folder": str(Path(__file__).parents[1]), **parts, "built_with_torch": built_with()},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "torch": torch,
        "packages": {name: _version(name) for name in (*OPTIONAL, "tokenizers", "safetensors", "numpy")},
        "machine": {
            "processor": processor_name(), "cores": cores(), "free_memory": available_bytes(),
            "free_shared_memory": _free("/dev/shm"),
        },
        "cache": _cache(problems),
        "problems": problems,
    }  # fmt: skip


def _module(name: str, problems: list[dict[str, Any]]) -> str:
    """ "there", "missing" or "broken" for one of the two compiled modules."""
    try:
        if name.endswith("_runtime"):
            importlib.import_module("torch")
        importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        fix = what_to_install(error) or str(error)
        purpose = "training and profiles; plans, simulations and reports go without" if name.endswith("_runtime") else "everything"
        problems.append({"missing": name, "for": purpose, "needed": True, "fix": fix.partition("\n")[2] or fix, "error": str(error)})
        return "missing" if missing else "broken"
    return "there"


def _torch(problems: list[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return None
    cuda = torch.cuda.is_available()
    devices = []
    for i in range(torch.cuda.device_count() if cuda else 0):
        free, total = torch.cuda.mem_get_info(i)
        devices.append({"name": torch.cuda.get_device_name(i), "free_memory": free, "memory": total})
    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    if "gloo" not in backends:
        problems.append({
            "missing": "gloo in torch.distributed", "for": "several ranks", "needed": False, "fix": "install a torch that has it",
        })  # fmt: skip
    return {
        "version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda if cuda else None,
        "devices": devices, "backends": backends,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free(folder: str) -> int | None:
    return shutil.disk_usage(folder).free if os.path.isdir(folder) else None


def _cache(problems: list[dict[str, Any]]) -> dict[str, Any]:
    folder = cache_folder()
    if folder is None:
        return {"folder": None}
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        problems.append({
            "missing": f"write access to {there}", "for": "keeping compiled programs and measured times", "needed": False,
            "fix": "export INTERLACE_CACHE=FOLDER, or off",
        })  # fmt: skip
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return {"folder": str(folder), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _print(found: dict[str, Any]) -> None:
    torch, machine, cache, own = found["torch"], found["machine"], found["cache"], found["interlace"]
    runtime = own["_runtime"] + (f" (built with torch {own['built_with_torch']})" if own["built_with_torch"] else "")
    rows = {
        "interlace": f"{own['version']} in {own['folder']}",
        "  planner, simulator": own["_core"],
        "  runtime": runtime,
        "python": f"{found['python']['version']}, {found['python']['executable']}",
        "torch": f"{torch['version']}, backends {', '.join(torch['backends'])}" if torch else "not installed",
        "packages": ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version),
        "processor": f"{machine['processor']}, {machine['cores']} core{'' if machine['cores'] == 1 else 's'}",
        "free memory": format_bytes(machine["free_memory"]),
    }
    for i, device in enumerate(torch["devices"] if torch else ()):
        rows[f"device {i}"] = f"{device['name']}, {format_bytes(device['free_memory'])} of {format_bytes(device['memory'])} free"
    rows["cache"] = "off" if cache["folder"] is None else f"{cache['folder']}, {cache['files']} files, {format_bytes(cache['bytes'])}"
    rows["a run would use"] = would_use(found)
    print_facts(rows)
    console = out()
    for problem in found["problems"]:
        console.print(f"\n{'missing' if problem['needed'] else 'optional'}: {problem['missing']}, for {problem['for']}", markup=False)
        console.print(f"  {problem['fix'].strip()}", markup=False)
    if not found["problems"]:
        console.print("\nnothing is missing")


def would_use(found: dict[str, Any]) -> str:
    """In words: where a training script runs as things are."""
    torch, runtime = found["torch"], found["interlace"]["_runtime"]
    if runtime != "there":
        return "nothing: training needs the runtime; plan, simulate, report, opt, inspect and explain work"
    if torch["devices"]:
        return f"the device of the model: up to {len(torch['devices'])} GPUs with NCCL, or the processor"
    from interlace import _runtime

    ranks = found["machine"]["cores"]
    between = "share memory" if _runtime.shares_memory() else "talk over TCP (the system or INTERLACE_SHARED_MEMORY=0 forbids shared memory)"
    return f"the processor: one rank with {torch['threads']} threads, or up to {ranks} ranks, which {between}"
