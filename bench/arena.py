"""The arena of a step: its plan against what is really used, and the step time with and without it, paired.

python bench/arena.py                        # the plans of all models, then the two timed cases
python bench/arena.py --only 'llama.*rec'    # rows whose name matches
python bench/arena.py --time overhead --rounds 100 --json out.json

planned  top of the plan, bytes          top      highest byte that a tensor of the step has: the same number
live     largest sum of what lives at once; lost: planned over live, less 1 (sizes rounded up to 64 bytes)
outside  tensor data of a steady step that is not in the arena: the step's results, and what kernels keep
resident pages of the arena in memory; process: of the whole process
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from cases import MATMUL_BOUND, OVERHEAD_BOUND, causal_loss, gpt2, llama, token_batch
from common import paired, report, write_json

import interlace
from interlace import models

SMALL = {"hidden": 256, "layers": 4, "heads": 4, "inter": 688, "vocab": 512, "tokens": 256}
TIMED = {"matmul": (MATMUL_BOUND, 12), "overhead": (OVERHEAD_BOUND, 120)}
RECOMPUTE = {"": None, " recompute": "recompute(mode=full)"}


def cases() -> dict[str, Any]:
    """name → (model, loss function, batch)."""

    def built(name: str, **options: Any) -> Any:
        one = models.build(name, **options)
        return one.model, one.loss_fn, one.example_batch

    return {
        "llama": lambda: (llama(SMALL), causal_loss, token_batch(SMALL)),
        "llama matmul": lambda: (llama(MATMUL_BOUND), causal_loss, token_batch(MATMUL_BOUND)),
        "llama overhead": lambda: (llama(OVERHEAD_BOUND), causal_loss, token_batch(OVERHEAD_BOUND)),
        "llama bf16": lambda: (llama(SMALL, torch.bfloat16), causal_loss, token_batch(SMALL)),
        "gpt2": lambda: (gpt2(SMALL), causal_loss, token_batch(SMALL)),
        "gpt2 dropout": lambda: (gpt2(SMALL, dropout=0.1), causal_loss, token_batch(SMALL)),
        "vit": lambda: built("vit-tiny", micro_batch=8, seq=None),
    }


def trainer_of(case: tuple[Any, Any, Any], **config: Any) -> interlace.Trainer:
    model, loss, batch = case
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return interlace.compile(model, optimizer, loss, batch, interlace.Config(profile="off", **config))


def resident_kb() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS"))


def plan_row(name: str, case: tuple[Any, Any, Any], **config: Any) -> dict[str, Any]:
    """Runs a few steps and says what the arena did."""
    with trainer_of(case, **config) as trainer:
        for _ in range(7):
            trainer.step(case[2])
        facts = trainer.stats()["arena"]
        process = resident_kb()
    row = {"row": name, **facts, "process_bytes": process * 1024}
    mb = 1e6
    print(
        f"{name:<28} planned {facts['planned_bytes'] / mb:9.3f} MB  top {facts['top_bytes'] - facts['planned_bytes']:+d} B  "
        f"live {facts['live_bytes'] / mb:9.3f}  lost {100 * facts['fragmentation']:.3f} %  outside {facts['outside_peak_bytes']:>8} B  "
        f"resident {facts['resident_bytes'] / mb:8.2f} MB  process {process / 1e3:7.0f} MB"
        + ("" if facts["settled"] else "  NOT SETTLED"),
        flush=True,
    )
    for kind in ("kept", "unforeseen"):
        for request in facts[kind]:
            print(f"    {kind}: {request['bytes']} B x {request['times']}  {request['op'][:110]}")
    return row


def timed(name: str, rounds: int | None, clock: str, json_path: str | None) -> None:
    case, standard = TIMED[name]
    batch = token_batch(case)
    eager = llama(case)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-4, fused=True)

    def eager_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        causal_loss(eager, batch).backward()
        optimizer.step()

    sides: dict[str, Any] = {}
    faults: dict[str, int] = {}
    for side, arena in (("without", False), ("arena", True)):
        trainer = trainer_of((llama(case), causal_loss, batch), arena=arena)
        for _ in range(6):
            trainer.step(batch)
        before = minor_faults()
        trainer.step(batch)
        faults[side] = minor_faults() - before
        sides[side] = lambda trainer=trainer: trainer.step(batch)
    sides["eager"] = eager_step
    times = paired(sides, rounds=rounds or standard, clock=time.process_time if clock == "cpu" else time.perf_counter)
    report(f"{name}-bound, against our step without the arena, {clock} time", times, baseline="without")
    report(f"{name}-bound, against eager, {clock} time", times, baseline="eager", json_path=json_path, faults=faults)
    print(f"  page faults of a step: {faults}")


def minor_faults() -> int:
    return int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[7])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a row's name must match")
    parser.add_argument("--time", choices=[*TIMED, "all", "none"], default="all", help="which timed cases to run")
    parser.add_argument("--plans", choices=["yes", "no"], default="yes", help="print the rows of the plans")
    parser.add_argument("--rounds", type=int, help="paired rounds (default: 12 matmul, 120 overhead)")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a machine that is busy with other things"
    )
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plans == "yes":
        for name, build in cases().items():
            for suffix, passes in RECOMPUTE.items():
                if not re.search(args.only, name + suffix):
                    continue
                extra: dict[str, Any] = {}
                if passes:
                    extra["passes"] = interlace.Config().pipeline(1).replace("canonicalize,", f"canonicalize,{passes},")
                row = plan_row(name + suffix, build(), **extra)
                if args.json:
                    write_json(args.json, row)
    for name in TIMED if args.time == "all" else [args.time] if args.time != "none" else []:
        timed(name, args.rounds, args.clock, args.json)


if __name__ == "__main__":
    main()
