"""Seconds from the regions of a model to cubins, with no device: those of a layer of Llama-3-8B and of its ends, captured on meta.

python bench/cubins.py                                # 10 regions of llama-3-8b for sm_90
python bench/cubins.py --model llama-3-70b --regions 16 --target sm_80 --rounds 3 --json out.json
python bench/cubins.py --run                          # on a machine with a CUDA device: launches them and compares with their bodies

Nothing is taken from a cache: each round compiles all of them, the processes' imports included. The regions are those that are called most
often, the ones of every layer first.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, quartiles, write_json
from cubins_run import compare_on_device, target_here

from interlace import _core
from interlace.capture import capture
from interlace.models import build
from interlace.regions.beside import cubins
from interlace.regions.cuda import TARGETS


def regions_of(model: str, seq: int, most: int) -> list[dict[str, Any]]:
    preset = build(model, micro_batch=1, seq=seq)
    program = _core.Program.parse(capture(preset.model, preset.loss_fn, preset.example_batch).text)
    program.run_passes("canonicalize,fuse")
    return sorted(program.funcs(), key=lambda func: (-func["calls"], func["name"]))[:most]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help="preset name")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--regions", type=int, default=10, help="how many, those called most often first")
    parser.add_argument("--target", choices=TARGETS, help="default: sm_90, with --run that of the device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", action="store_true", help="launch them on this machine's device and compare with their bodies")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    target = args.target or (target_here() if args.run else "sm_90")
    funcs = regions_of(args.model, args.seq, args.regions)
    seconds, processor = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            begin = time.monotonic()
            found = cubins(funcs, target, Path(folder), lambda _: None)
            seconds.append(time.monotonic() - begin)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            compared = compare_on_device(funcs, found, torch.device("cuda")) if args.run else {}
    kernels = [kernel for region in found.regions for kernel in region.kernels]
    low, middle, high = quartiles(seconds)
    record = {
        "model": args.model, "target": target, "regions": len(funcs), "compiled": len(found.regions), "kernels": len(kernels),
        "bytes": sum(len(kernel.cubin) for kernel in kernels), "seconds": middle, "seconds_all": seconds, "processor_seconds": processor,
        "spilling": sum(kernel.spills > 0 for kernel in kernels), "left": found.left, "compared": compared, "machine": machine(),
    }  # fmt: skip
    print(
        f"{args.model}, {target}: {len(found.regions)} of {len(funcs)} regions, {len(kernels)} kernels, {record['bytes']:,} bytes, "
        f"{record['spilling']} that spill; {middle:.1f} s [{low:.1f}, {high:.1f}] of {args.rounds} rounds, fastest {min(seconds):.1f} s; "
        f"processor {sorted(processor)[len(processor) // 2]:.1f} s on {os.cpu_count()} cores"
    )
    for name, why in {**found.left, **{k: v for k, v in compared.items() if v}}.items():
        print(f"  {name}: {why}")
    if args.json:
        write_json(args.json, record)
    return int(any(compared.values()))


if __name__ == "__main__":
    sys.exit(main())
