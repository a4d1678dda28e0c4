"""`interlace capture`: the training step of a model as program text, without any memory for its weights."""

from __future__ import annotations

import threading
import time
from typing import Annotated, Any

import typer

from interlace.cli.console import PLAIN_EVERY_S, Work, count, err, out, print_facts, print_json, resident_bytes, seconds
from interlace.cli.program_file import FileError, check_output, write_text
from interlace.config import format_bytes

HELP = """Capture the training step of a model as program text.

Parameters and activations take no memory, so a 70B model is captured on a laptop.

[bold]Examples[/bold]
  interlace capture --model llama-10m -o llama.il
  interlace capture --model llama-3-70b --micro-batch 1 --seq 2048 -o llama70b.il --json
  interlace capture --model gpt2 --micro-batch 2 --seq 128 --symbolic -o gpt2.il
  interlace capture --model llama-3-8b --param-dtype bfloat16 -o master.il      # float32 masters
  interlace capture --list
"""


def capture(
    model: Annotated[str, typer.Option("--model", help="A preset, or a Hugging Face config.json.")] = "llama-10m",
    output: Annotated[str | None, typer.Option("--output", "-o", help="Where the program goes.")] = None,
    micro_batch: Annotated[int, typer.Option("--micro-batch", min=1, help="Sequences of one micro-batch.")] = 1,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Tokens in a sequence.", show_default="the model's usual")] = None,
    symbolic: Annotated[bool, typer.Option("--symbolic", help="Leave batch and sequence open (sizes of at least 2).")] = False,
    param_dtype: Annotated[
        str, typer.Option("--param-dtype", help="bfloat16 or float16: float32 parameters, cast to it for forward and backward.")
    ] = "",
    list_models: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    if list_models:
        _list(as_json)
        return
    if output is None:
        raise FileError("no output file: name one with -o FILE (examples: interlace capture --help)")
    check_output(output)
    if param_dtype not in ("", "bfloat16", "float16"):
        raise FileError(f"--param-dtype {param_dtype}: bfloat16 or float16")
    facts = _capture(model, output, micro_batch, seq, symbolic, param_dtype)
    if as_json:
        print_json(facts)
        return
    rows = {
        "model": f"{facts['model']}, {count(facts['parameters'])} parameters",
        "program": f"{facts['ops']:,} ops, {facts['bytes']:,} bytes in {output}",
        "time": f"build {seconds(facts['build_seconds'])}, capture {seconds(facts['capture_seconds'])}, "
        f"write {seconds(facts['write_seconds'])}",
        "memory": f"{format_bytes(facts['resident_bytes'])} resident at the peak",
    }
    print_facts(rows)


def _capture(model: str, output: str, micro_batch: int, seq: int | None, symbolic: bool, param_dtype: str) -> dict[str, Any]:
    with Work() as work, _Ticker(work) as ticker:
        ticker.stage = "loading"
        from interlace.models import resolve

        resolve(model)  # a wrong name is said before torch is imported
        from interlace.capture import capture
        from interlace.capture.casts import Casts
        from interlace.models import build

        ticker.stage = f"building {model}"
        start = time.monotonic()
        dtype = "float32" if param_dtype else None
        built = build(model, micro_batch=micro_batch, seq=seq, meta=True, dtype=dtype)
        built_at = time.monotonic()
        ticker.stage = f"capturing {model}"
        casts = Casts.named(param_dtype or None, None)
        captured = capture(built.model, built.loss_fn, built.example_batch, symbolic=symbolic, casts=casts)
        captured_at = time.monotonic()
        ticker.stage = f"writing {output}"
        write_text(output, captured.text)
        written_at = time.monotonic()
    shape = next(iter(built.example_batch.values())).shape
    return {
        "model": model, "output": output, "micro_batch": micro_batch, "seq": shape[1] if len(shape) == 2 else None,
        "symbolic": symbolic, "parameters": sum(parameter.numel() for parameter in built.model.parameters()),
        "ops": captured.num_ops, "bytes": len(captured.text.encode()), "opaque_modules": captured.opaque,
        "build_seconds": built_at - start, "capture_seconds": captured_at - built_at,
        "write_seconds": written_at - captured_at, "resident_bytes": resident_bytes(peak=True),
    }  # fmt: skip


class _Ticker:
    """Says what is being done, for how long, and how much memory it has, while the main thread does it."""

    def __init__(self, work: Work):
        self.work = work
        self.stage = ""
        self.started = time.monotonic()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Ticker:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _run(self) -> None:
        period = 0.2 if self.work.bar is not None else PLAIN_EVERY_S
        while not self.stop.wait(period):
            age = seconds(time.monotonic() - self.started)
            self.work.update(f"{self.stage}, {age}, {format_bytes(resident_bytes())} resident")


def _list(as_json: bool) -> None:
    from interlace.models import PRESETS

    if as_json:
        print_json({"models": [{"name": p.name, "kind": p.kind, "help": p.help} for p in PRESETS.values()]})
        return
    console = out()
    for preset in PRESETS.values():
        console.print(f"[bold]{preset.name:<18}[/bold] {preset.help}")
    err().print("or the path of a Hugging Face config.json")
