"""Capture, printing, parsing and passes of large models on meta: seconds and resident memory, each in a fresh process.

python bench/compile_time.py                       # llama-3-8b, llama-3-70b and llama-3.1-405b
python bench/compile_time.py --model llama-3-8b --json out.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from common import machine, write_json


def measure(model_name: str) -> dict[str, float | int | str]:
    born = time.perf_counter()
    from interlace import _core
    from interlace.capture import capture
    from interlace.models import build

    start = time.perf_counter()
    preset = build(model_name, micro_batch=1, seq=2048)
    captured = capture(preset.model, preset.loss_fn, preset.example_batch)
    captured_at = time.perf_counter()
    program = _core.Program.parse(captured.text)
    parsed_at = time.perf_counter()
    text = program.print()
    printed_at = time.perf_counter()
    records = program.run_passes("canonicalize,shard(axis=dp,ranks=8),update(clip=1.0)")
    done = time.perf_counter()
    return {
        "model": model_name,
        "ops": text.count("\n"),
        "capture_s": captured_at - start,
        "parse_s": parsed_at - captured_at,
        "print_s": printed_at - parsed_at,
        "passes_s": done - printed_at,
        "total_s": done - start,
        "wall_s": time.perf_counter() - born,
        "resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "passes": ", ".join(f"{r['name']} {r['seconds']:.2f}" for r in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="preset name; may be given several times")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        print(json.dumps(measure(args.inner)))
        return
    rows = []
    for name in args.model or ["llama-3-8b", "llama-3-70b", "llama-3.1-405b"]:
        done = subprocess.run([sys.executable, __file__, "--inner", name], check=True, capture_output=True, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{name}: {row['ops']} lines, capture {row['capture_s']:.2f} s, parse {row['parse_s']:.2f} s, "
            f"print {row['print_s']:.2f} s, passes {row['passes_s']:.2f} s ({row['passes']}), "
            f"in all {row['total_s']:.2f} s ({row['wall_s']:.2f} s with the imports), resident {row['resident_gb']:.2f} GB",
            flush=True,
        )
    if args.json:
        write_json(args.json, {"title": "capture and passes of large models", "rows": rows, "machine": machine()})


if __name__ == "__main__":
    main()
