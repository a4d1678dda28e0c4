"""What a flag of the model costs the step behind it: when the state is new, and when it was seen before, in this process or another one.

    python bench/flags.py
    python bench/flags.py --model gpt2-10m --rounds 5 --json out.json

The flag is `training` of the whole model (`model.eval()`, `model.train()`). Seconds are those of the step that follows the change less an
ordinary step. In the second process the program cache has what the first one captured. One rank, the default schedule.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

from common import machine, quartiles, write_json


def measure(model_name: str, cache: str, rounds: int) -> dict[str, list[float]]:
    import torch

    import interlace
    from interlace.models import build

    torch.set_num_threads(1)
    preset = build(model_name, micro_batch=1, seq=128)
    optimizer = torch.optim.AdamW(preset.model.parameters(), lr=1e-4)
    with interlace.compile(
        preset.model, optimizer, preset.loss_fn, preset.example_batch, interlace.Config(cache=cache)
    ) as trainer:

        def seconds() -> float:
            begin = time.perf_counter()
            trainer.step(preset.example_batch)
            return time.perf_counter() - begin

        usual = quartiles([seconds() for _ in range(6)][2:])[1]
        found: dict[str, list[float]] = {"new": [], "seen": []}
        for i in range(rounds + 1):
            for training in (False, True):
                preset.model.train(training)
                found["new" if i == 0 and not training else "seen"].append(seconds() - usual)
                seconds()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-10m", help="preset name (default llama-10m)")
    parser.add_argument("--rounds", type=int, default=3, help="changes there and back (default 3)")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        print(json.dumps(measure(args.model, args.inner, args.rounds)))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as cache:
        for process in ("first", "second"):
            words = [sys.executable, __file__, "--model", args.model, "--rounds", str(args.rounds), "--inner", cache]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            rows[process] = found
            seen = quartiles(found["seen"])[1]
            print(f"{args.model}, {process} process: {found['new'][0]:.2f} s the first time, {seen:.2f} s when seen (median)", flush=True)
    if args.json:
        write_json(args.json, {"title": "flags", "model": args.model, "rows": rows, "machine": machine()})


if __name__ == "__main__":
    main()
