"""Capture, printing, parsing, passes and search of large models on meta: seconds and resident memory, each in a fresh process.

python bench/compile_time.py                       # llama-3-8b on 8 H100, llama-3-70b on 32 and llama-3.1-405b on 512
python bench/compile_time.py --model llama-3-8b --json out.json

The search is the whole one: every recomputation, prefetching, buckets and kept units, within the device's memory. `in all` is what a
first start takes: capture, parsing, passes and search.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from common import machine, write_json

RANKS = {"llama-3-8b": 8, "llama-3-70b": 32, "llama-3.1-405b": 512}
SHARDED = "canonicalize,shard(axis=dp,ranks={ranks}),update(clip=1.0)"


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
    sharded = SHARDED.format(ranks=RANKS.get(model_name, 8))
    records = program.run_passes(sharded)
    passed_at, passed_cpu = time.perf_counter(), time.process_time()
    searched = _core.Program.parse(captured.text)
    search = f"search(cluster=h100-80gb-{RANKS.get(model_name, 8)})"
    *_, last = searched.run_passes(f"{sharded},{search}")
    searched_cpu = time.process_time() - passed_cpu
    done = parsed_at - start + (passed_at - printed_at) + last["seconds"]
    return {
        "model": model_name,
        "ops": text.count("\n"),
        "capture_s": captured_at - start,
        "parse_s": parsed_at - captured_at,
        "print_s": printed_at - parsed_at,
        "passes_s": passed_at - printed_at,
        "search_s": last["seconds"],
        "search_cpu_s": searched_cpu,
        "chosen": searched.meta()["search.chosen"].split("|")[0],
        "total_s": done,
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
            f"search {row['search_s']:.2f} s ({row['chosen']}; processor {row['search_cpu_s']:.1f} s), "
            f"in all {row['total_s']:.2f} s ({row['wall_s']:.2f} s the whole process), resident {row['resident_gb']:.2f} GB",
            flush=True,
        )
    if args.json:
        write_json(
            args.json, {"title": "capture, passes and search of large models", "rows": rows, "machine": machine()}
        )


if __name__ == "__main__":
    main()
