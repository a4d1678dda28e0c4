"""The papers' comparisons, in simulation, on H100 clusters: every method on the same program, with its memory beside its time.

python bench/papers.py                                     # a sample of the settings, about ten minutes
python bench/papers.py --only llama-3.1-8b                 # SimpleFSDP's Tables 5 and 6
python bench/papers.py --all --json out/papers.json        # every batch, sequence and accumulation
python bench/papers.py --only llama-3-70b --evaluations 60 # a shorter search
python bench/papers.py --setup deepcompile                 # as the paper ran it (bench/paper_setups.py): deepcompile, simplefsdp, mist

Nothing runs on a GPU: times are those of the cost model (docs/cost_model.md) and the simulator. `needs` is the peak of a rank, on
80 GB devices; "out of memory" marks what does not fit. All methods but `ours` and the 8B rows recompute whole blocks, as the papers'
runs do; `ours` decides that too. Without --setup everything is bfloat16, on kernels as fast as alone (stack `kernels`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from common import machine, write_json
from paper_setups import SETUPS, Setup
from paper_setups import captured as captured_as

GIB = 2**30
DEVICE_BYTES = 73 * GIB  # an H100 without context and communication library (its preset, docs/cost_model.md)


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    batch: int
    seq: int
    accumulation: int = 1

    @property
    def title(self) -> str:
        return f"{self.model}, {self.ranks} H100, batch {self.batch}, sequence {self.seq}, accumulation {self.accumulation}"

    def cluster(self, stack: str = "kernels") -> str:
        return f"h100-80gb-{self.ranks}:{stack}"


SAMPLE = [
    *(Case("llama-3-70b", 32, 1, seq) for seq in (512, 1024, 2048)),
    Case("llama-3-70b", 32, 4, 1024),
    Case("llama-3-70b", 32, 1, 1024, 4),
    *(Case("mixtral-8x7b", ranks, 1, seq) for ranks in (16, 32) for seq in (512, 2048)),
    Case("mixtral-8x7b", 32, 1, 1024, 4),
    Case("llama-3.1-8b", 8, 1, 2048),
    Case("llama-3.1-8b", 64, 1, 2048),
    Case("llama-3.1-405b", 512, 1, 2048),
]
EVERYTHING = [
    *(
        Case(model, ranks, batch, seq, steps)
        for model, counts in (("llama-3-70b", (32,)), ("mixtral-8x7b", (16, 32)))
        for ranks in counts for batch in (1, 2, 4) for seq in (512, 1024, 2048) for steps in (1, 4, 16)
    ),
    *(Case("llama-3.1-8b", ranks, batch, 2048) for ranks in (8, 64) for batch in (1, 2)),
    Case("llama-3.1-405b", 512, 1, 2048),
]  # fmt: skip


def methods(case: Case, evaluations: int, setup: Setup | None = None) -> dict[str, str]:
    """Name -> what follows `canonicalize` in the pipeline."""
    cost = f"cluster={case.cluster(setup.stack('P+S') if setup else 'kernels')}"
    if setup is not None:
        cost += f",limit={setup.limit_bytes}"
    blocks = "model.layers.*"

    def steps(recompute: bool, ahead: int, mode: str, after: str, strategy: str = "shard") -> str:
        sharding = f"{strategy}(ranks={case.ranks}{f',ahead={ahead}' if strategy == 'shard' else ''})"
        parts = [f"precision(param=bf16,reduce={setup.reduce})"] if setup is not None else []
        parts += ["recompute(mode=full)"] if recompute else []
        parts.append(sharding)
        if case.accumulation > 1:
            parts.append(f"accumulate(steps={case.accumulation},mode={mode})")
        parts.append("update(clip=1.0)")
        return ",".join([*parts, *([after] if after else [])])

    search = f"search({cost}{f',evaluations={evaluations}' if evaluations else ''})"
    if case.model == "llama-3.1-8b":
        bucket = f"bucket(mode=manual,modules={blocks},pack=copy)"
        flat = f"bucket(mode=manual,modules={blocks},pack=flat)"
        table = {
            "vanilla": "",
            "reorder": "reorder",
            "bucket (copies)": bucket,
            "bucket (copies), reorder": f"{bucket},reorder",
            "bucket (flat)": flat,
            "bucket (flat), reorder": f"{flat},reorder",
            "greedy (copies), reorder": f"bucket(mode=greedy,pack=copy,{cost}),reorder",
        }
        rows = {name: steps(False, 0, "reduce_each", after) for name, after in table.items()}
        for forward in ("before", "after"):
            for backward in ("before", "after"):
                name = f"both, order forward {forward}, backward {backward}"
                after = f"{bucket},reorder(forward={forward},backward={backward})"
                rows[name] = steps(False, 0, "reduce_each", after)
        rows["ZeRO-1"] = steps(False, 0, "reduce_last", "", "zero1")
        rows["ours"] = steps(False, 0, "reduce_each", search)
        return rows
    prefetch, unshard = f"prefetch({cost})", f"unshard({cost})"
    return {
        "ZeRO-3": steps(True, 1, "reduce_each", ""),
        "P (prefetch)": steps(True, 0, "reduce_each", prefetch),
        "S (selective unsharding)": steps(True, 1, "reduce_each", unshard),
        "P+S": steps(True, 0 if setup is None else 1, "reduce_each", f"{prefetch},{unshard}" if setup is None else f"{unshard},{prefetch}"),
        "FSDP, full gradients": steps(
            True, 0, "reduce_last", f"bucket(mode=manual,modules={blocks},pack=copy),reorder"
        ),
        "SimpleFSDP manual": steps(True, 0, "reduce_each", f"bucket(mode=manual,modules={blocks},pack=copy),reorder"),
        "SimpleFSDP greedy": steps(True, 0, "reduce_each", f"bucket(mode=greedy,pack=copy,{cost}),reorder"),
        "ours": steps(False, 0, "reduce_each", search),
    }


def captured(case: Case, setup: Setup | None = None) -> Any:
    if setup is not None:
        return captured_as("llama-3-8b" if case.model == "llama-3.1-8b" else case.model, case.batch, case.seq, setup)
    from interlace import _core
    from interlace.capture import capture
    from interlace.models import build

    name = "llama-3-8b" if case.model == "llama-3.1-8b" else case.model
    preset = build(name, micro_batch=case.batch, seq=case.seq)
    return _core.Program.parse(capture(preset.model, preset.loss_fn, preset.example_batch).text)


def measure(program: Any, case: Case, pipeline: str, stack: str = "kernels") -> dict[str, Any]:
    from interlace import _core

    start = time.perf_counter()
    work = _core.Program.parse(program.print())
    try:
        work.run_passes(f"canonicalize,{pipeline}", verify=False)
        result = json.loads(_core.Simulator(work).run(case.cluster(stack)).json())
    except _core.Error as e:
        return {"pipeline": pipeline, "error": str(e).splitlines()[0], "seconds": time.perf_counter() - start}
    meta = work.meta()
    return {
        "pipeline": pipeline, "step_ms": result["step_us"] / 1e3, "bound_ms": result["lower_bound_us"] / 1e3,
        "peak_bytes": result["memory"]["peak_bytes"], "seconds": time.perf_counter() - start,
        "chosen": meta.get("search.chosen", "").split("|")[0], "on_host": meta.get("host_update", "").split(":")[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="models, separated by commas")
    parser.add_argument("--all", action="store_true", help="every batch, sequence and accumulation of the papers")
    parser.add_argument(
        "--evaluations", type=int, default=0, help="simulations of the search (0: by the program's size)"
    )
    parser.add_argument("--setup", choices=[*SETUPS, "mist"], help="as a paper ran it, not all in bfloat16 on kernels as fast as alone")
    parser.add_argument("--json", help="add the figures to this file")
    args = parser.parse_args()
    if args.setup == "mist":
        mist()
        return
    setup = SETUPS.get(args.setup or "")
    cases = EVERYTHING if args.all else SAMPLE
    if setup is not None:
        cases = [case for case in cases if (case.model == "llama-3.1-8b") == (setup.name == "simplefsdp")]
        cases = [case for case in cases if case.model != "llama-3.1-405b" and not (case.model == "mixtral-8x7b" and case.ranks > 16)]
    wanted = args.only.split(",") if args.only else sorted({case.model for case in cases})
    unknown = set(wanted) - {case.model for case in cases}
    if unknown:
        parser.error(f"no case of {sorted(unknown)[0]}; there are {', '.join(sorted({c.model for c in cases}))}")
    record: dict[str, Any] = {"title": "papers in simulation", "machine": machine(), "cases": []}
    programs: dict[tuple[str, int, int], Any] = {}
    for case in cases:
        if case.model not in wanted:
            continue
        key = (case.model, case.batch, case.seq)
        if key not in programs:
            programs = {key: captured(case, setup)}
        print(f"\n{case.title}", flush=True)
        rows: dict[str, dict[str, Any]] = {}
        for name, pipeline in methods(case, args.evaluations, setup).items():
            row = rows[name] = measure(programs[key], case, pipeline, setup.stack(name) if setup else "kernels")
            print("  " + line(name, row, rows), flush=True)
        record["cases"].append({"case": dataclasses.asdict(case), "rows": rows})
    if args.json:
        write_json(args.json, record)


def mist() -> None:
    """The planner on the paper's workloads, on whole steps of Megatron's stack."""
    from mist import PLATFORMS, WORKLOADS, layers_of, samples_per_s

    for platform, (gpu, seq) in PLATFORMS.items():
        for size, devices, batch in WORKLOADS:
            found = {system: samples_per_s(layers_of(f"gpt-{size}", True, f"{gpu}-{devices}:megatron", seq).tune(system, batch))
                     for system in ("megatron", "deepspeed", "full")}  # fmt: skip
            rates = ", ".join(f"{system} {rate:.2f}" for system, rate in found.items())
            print(f"GPT-{size} on {devices} {platform}, batch {batch}: {rates} samples/s", flush=True)


def line(name: str, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    if "error" in row:
        return f"{name:<44} {row['error']}"
    first = next(iter(rows.values()))
    ratio = f"{row['step_ms'] / first['step_ms']:6.3f} x" if "step_ms" in first else " " * 8
    fits = "" if row["peak_bytes"] <= DEVICE_BYTES else "  out of memory"
    chosen = f"  ({row['chosen']}; {row['seconds']:.0f} s)" if row.get("chosen") else ""
    return f"{name:<44} {row['step_ms']:10.1f} ms {ratio}   needs {row['peak_bytes'] / GIB:6.1f} GiB{fits}{chosen}"


if __name__ == "__main__":
    sys.exit(main())
