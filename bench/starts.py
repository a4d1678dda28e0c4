"""What a start takes until the first step can run: without a cache, a second time, and with another learning rate.

python bench/starts.py
python bench/starts.py --model gpt2-10m --json out.json

Each start is a process of its own on one rank, with the program cache in a folder of its own; imports and building the model are not
counted. The schedule is the default one, so the time is that of capture and of the passes of step 0, or of reading both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

from common import machine, write_json

STARTS = (("first", 1e-3), ("second", 1e-3), ("another rate", 2e-4))


def measure(model_name: str, cache: str, rate: float) -> dict[str, object]:
    import torch

    import interlace
    from interlace.models import build

    torch.set_num_threads(1)
    preset = build(model_name, micro_batch=1, seq=128)
    optimizer = torch.optim.AdamW(preset.model.parameters(), lr=rate)
    begin = time.perf_counter()
    with interlace.compile(
        preset.model, optimizer, preset.loss_fn, preset.example_batch, interlace.Config(cache=cache)
    ) as trainer:
        return {"seconds": time.perf_counter() - begin, "table": trainer.compile_table()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="preset name; may be given several times")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--inner", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        model, cache, rate = args.inner
        print(json.dumps(measure(model, cache, float(rate))))
        return
    rows = []
    for model in args.model or ["llama-10m", "gpt2-10m"]:
        with tempfile.TemporaryDirectory() as cache:
            for name, rate in STARTS:
                words = [sys.executable, __file__, "--inner", model, cache, str(rate)]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                row = {"model": model, "start": name} | json.loads(done.stdout.splitlines()[-1])
                rows.append(row)
                print(f"{model}, {name} start: {row['seconds']:.2f} s: {row['table']}", flush=True)
    if args.json:
        write_json(args.json, {"title": "starts with and without the cache", "rows": rows, "machine": machine()})


if __name__ == "__main__":
    main()
