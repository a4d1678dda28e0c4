"""`interlace checkpoint`: what a checkpoint holds, whether it is sound, and the way from and to plain PyTorch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.cli.console import count, print_facts, print_json
from interlace.cli.program_file import FileError
from interlace.config import format_bytes

HELP = """Show, verify, export or import checkpoints.

[bold]Examples[/bold]
  interlace checkpoint show runs/book
  interlace checkpoint verify runs/book
  interlace checkpoint export runs/book book.pt
  interlace checkpoint import book.pt runs/again

A checkpoint needs no export for Hugging Face: from_pretrained("runs/book") reads it as it is.
The .pt file holds {"model": ..., "optimizer": ..., "step": ...} for load_state_dict; imported ones are read with
weights_only=True, which runs no code of the file. Weights alone need no import: interlace train --weights FILE.
"""


class Action(str, enum.Enum):
    show = "show"
    verify = "verify"
    export = "export"
    import_ = "import"


def checkpoint(
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    source: Annotated[str, typer.Argument(help="A checkpoint folder; for import a .pt file.", show_default=False)],
    target: Annotated[str | None, typer.Argument(help="For export a .pt file, for import a folder.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object.")] = False,
) -> None:
    import torch

    from interlace.checkpoint import convert
    from interlace.checkpoint.contents import Checkpoint

    if (target is None) == (action in (Action.export, Action.import_)):
        needs = "a target" if target is None else "no target"
        raise FileError(f"interlace checkpoint {action.value} takes {needs}: see interlace checkpoint --help")
    if action is Action.import_:
        step = convert.import_torch(Path(source), Path(str(target)))
        facts: dict[str, Any] = {"imported": str(target), "step": step}
    else:
        with Checkpoint(source) as found:
            facts = facts_of(found)
            if action is Action.verify:
                facts["verified_bytes"] = found.verify()
            if action is Action.export:
                if Path(str(target)).suffix not in (".pt", ".pth"):
                    raise FileError(f"cannot export to {target}: name a .pt file")
                state = convert.export_torch(found)
                try:
                    with open(str(target), "xb") as file:
                        torch.save(state, file)
                except OSError as e:
                    raise FileError(f"cannot write {target}: {e.strerror}") from None
                facts["exported"] = str(target)
    if as_json:
        print_json(facts)
        return
    rows = {name: value if isinstance(value, str) else f"{value:,}" for name, value in facts.items() if name != "files"}
    for name, size in facts.get("files", {}).items():
        rows[name] = format_bytes(size)
    if "verified_bytes" in facts:
        rows["verified_bytes"] = f"{format_bytes(facts['verified_bytes'])}: every byte is as it was written"
    print_facts(rows)


def facts_of(found: Any) -> dict[str, Any]:
    """What trainer.json and the headers say."""
    from interlace.checkpoint.contents import MODEL

    record, weights = found.record, found.tensors(MODEL)
    numel = sum(e.bytes // e.dtype.itemsize for e in weights.entries.values())
    groups = ", ".join(
        f"{kind} of {len(g['parameters'])} parameters after {g['steps']} steps"
        for kind, g in zip(record["kind"], record["groups"], strict=True)
    )
    return {
        "step": int(record["step"]), "values": f"{count(numel)} in {len(weights.entries)} tensors",
        "optimizer": groups, "saved by ranks": int(record["world_size"]), "seed": int(record["seed"]),
        "files": {name: int(value["bytes"]) for name, value in found.files.items()},
    }  # fmt: skip
