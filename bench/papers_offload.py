"""DeepCompile's offload figure in simulation: Llama-3-70B where it does not fit, batch 1, on 16 and on 8 H100, and on 32 A100.

python bench/papers_offload.py                      # sequences 512, 1024 and 2048
python bench/papers_offload.py --seq 1024 --clusters h100-80gb-16 --limit 68GiB --json out/papers_offload.json

Rows: the optimizer on the CPU (ZeRO-Offload: its step and the parameters' way back are added to the simulated forward and backward),
everything synchronous (weights, gradients and states out after each use and back before the next), Algorithm 2 of DeepCompile
(optimizer states only, the update needs all of them), and ours: only the excess; each unit's update runs in the next step's forward
part, where its states stream, or on the host, where they lie, for as many units as the simulator finds best. The rows below it fix
that choice: all states stream, all steps on the host. Links of an H100 are nine times those of an A100 (55 and 6 GB/s), their hosts'
memories alike, so the choices differ. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from typing import Any

from common import machine, write_json
from papers import GIB, Case, measure

from interlace.config import parse_bytes

ADAM_BYTES = 28  # that a step on the CPU moves for each parameter: w, m and v read and written, g read, all float32


@dataclasses.dataclass(frozen=True)
class Machines(Case):
    name: str = ""

    @property
    def cluster(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        return f"{self.model}, {self.name}, batch {self.batch}, sequence {self.seq}"


def captured(case: Case) -> Any:
    """float32 parameters and optimizer states, cast to bfloat16 for forward and backward, as in the paper's runs."""
    from interlace import _core
    from interlace.capture import capture
    from interlace.capture.casts import Casts
    from interlace.models import build

    preset = build(case.model, micro_batch=case.batch, seq=case.seq, dtype="float32")
    text = capture(preset.model, preset.loss_fn, preset.example_batch, casts=Casts.named("bfloat16", None)).text
    return _core.Program.parse(text)


def numbers(cluster: str) -> dict[str, dict[str, float]]:
    """A preset's numbers by table; "" is the top of the file."""
    from interlace import _core

    tables: dict[str, dict[str, float]] = {"": {}}
    table = tables[""]
    for line in _core.preset_cluster(cluster).splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            table = tables.setdefault(header[1], {})
        elif entry := re.match(r"(\w+) = ([0-9.e+-]+)", line):
            table[entry[1]] = float(entry[2])
    return tables


def methods(case: Case, limit: int) -> dict[str, str]:
    base = f"precision(param=bf16,reduce=bf16),recompute(mode=full),shard(ranks={case.ranks},ahead=1),update(clip=1.0)"
    costs = f"cluster={case.cluster()},limit={limit}"
    return {
        "memory without end": base,
        "ours": f"{base},reposition_update,offload({costs},host=auto)",
        "  all states stream": f"{base},reposition_update,offload({costs})",
        "  all steps on the host": f"{base},reposition_update,offload({costs},host=always)",
        "DeepCompile, Algorithm 2": f"{base},offload_deepcompile({costs})",
        "everything synchronous": f"{base},offload_sync(cluster={case.cluster()})",
    }


def on_cpu(free: dict[str, Any], parameters: int, case: Case) -> dict[str, Any]:
    """The step with the optimizer on the hosts: after the backward part their memory is read and written, then shards go back."""
    tables = numbers(case.cluster())
    per_host = min(case.ranks, int(tables[""]["per_node"]))
    shard = parameters / case.ranks
    adam = shard * per_host * ADAM_BYTES / (tables["host"]["memory_gb_per_s"] * 1e9)
    back = shard * 4 / (tables["host"]["h2d_gb_per_s"] * 1e9)
    return {
        "step_ms": free["step_ms"] + (adam + back) * 1e3,
        "peak_bytes": free["peak_bytes"] - int(shard * 8),
        "adam_ms": adam * 1e3,
        "back_ms": back * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", default="512,1024,2048")
    parser.add_argument("--clusters", default="h100-80gb-16,h100-80gb-8,a100-40gb-32")
    parser.add_argument("--limit", help="memory of a device that a step may use; default: what the cluster's have")
    parser.add_argument("--json", help="add the figures to this file")
    args = parser.parse_args()
    record: dict[str, Any] = {"title": "DeepCompile's offload figure in simulation", "machine": machine(), "cases": []}
    for seq in (int(s) for s in args.seq.split(",")):
        program = None
        for cluster in args.clusters.split(","):
            tables = numbers(cluster)
            case = Machines("llama-3-70b", int(tables[""]["devices"]), 1, seq, name=cluster)
            room = int((tables["device"]["memory_gib"] - tables["device"]["reserve_gib"]) * GIB)
            limit = parse_bytes(args.limit) if args.limit else room
            if program is None:
                print(f"\ncapturing {case.model}, sequence {seq} ...", flush=True)
                start = time.perf_counter()
                program = captured(case)
                print(f"{time.perf_counter() - start:.0f} s", flush=True)
            parameters = sum(_elements(p) for p in program.params())
            print(f"\n{case.title}", flush=True)
            rows: dict[str, dict[str, Any]] = {}
            for name, pipeline in methods(case, limit).items():
                row = rows[name] = measure(program, case, pipeline)
                print("  " + line(name, row, rows, limit), flush=True)
            if "step_ms" in rows["memory without end"]:
                name = "optimizer on CPU"
                row = rows[name] = on_cpu(rows["memory without end"], parameters, case)
                print("  " + line(name, row, rows, limit), flush=True)
            record["cases"].append({"case": dataclasses.asdict(case), "rows": rows})
    if args.json:
        write_json(args.json, record)


def _elements(parameter: dict[str, Any]) -> int:
    count = 1
    for size in parameter["shape"]:
        count *= int(size)
    return count


def line(name: str, row: dict[str, Any], rows: dict[str, dict[str, Any]], limit: int) -> str:
    if "error" in row:
        return f"{name:<26} {row['error'].split('; raise')[0]}"
    ours = rows.get("ours", {}).get("step_ms")
    ratio = f"{row['step_ms'] / ours:6.2f} x ours" if ours else " " * 13
    fits = "" if row["peak_bytes"] <= limit else "  does not fit"
    took = f"  ({row['seconds']:.0f} s)" if "seconds" in row else ""
    if row.get("on_host"):
        took = f"  steps on the host: {row['on_host']}{took}"
    return f"{name:<26} {row['step_ms']:10.1f} ms {ratio}   needs {row['peak_bytes'] / GIB:6.1f} GiB{fits}{took}"


if __name__ == "__main__":
    sys.exit(main())
