"""Plans of one stage, carried out: predicted against measured step time and memory, on the ranks of this machine.

python bench/plan_execution.py                      # 12 plans, about 3 minutes
python bench/plan_execution.py --only 'zero3'       # plans whose name matches
python bench/plan_execution.py --json out.json

Every plan is a plan file, checked and trained as `interlace train --plan` does: ZeRO level, recomputed blocks, accumulation, micro-batch.
Two predictions stand beside what was measured: `simulated`, the simulator's on the very program with times measured here (as
`interlace profile` measures them, no correction), and `planner`, the planner's own on the preset `local-N` alone, which knows no
machine but a sketch. Memory: the counting allocator's peak against both. "others" is the share of the processors that other programs
took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

SEQ = 128
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 10,
        "num_key_value_heads": 5, "vocab_size": 4096, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt": {
        "model_type": "gpt2", "n_embd": 320, "n_layer": 6, "n_head": 5, "vocab_size": 4096, "n_positions": 1024,
        "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
BLOCKS = 6
# name, model, ranks, micro-batch, accumulation, ZeRO, blocks recomputed in full and selectively
PLANS: list[tuple[str, str, int, int, int, int, int, int]] = [
    ("llama 1 rank", "llama", 1, 1, 4, 0, 0, 0),
    ("llama 1 rank, all full", "llama", 1, 2, 2, 0, 6, 0),
    ("llama 1 rank, half full", "llama", 1, 2, 2, 0, 3, 0),
    ("gpt 1 rank", "gpt", 1, 1, 4, 0, 0, 0),
    ("gpt 1 rank, all selective", "gpt", 1, 2, 2, 0, 0, 6),
    ("gpt 1 rank, full and selective", "gpt", 1, 2, 2, 0, 2, 2),
    ("llama 2 ranks, zero0", "llama", 2, 1, 2, 0, 0, 0),
    ("llama 2 ranks, zero1", "llama", 2, 1, 4, 1, 0, 0),
    ("llama 2 ranks, zero2", "llama", 2, 1, 4, 2, 0, 0),
    ("llama 2 ranks, zero3, all full", "llama", 2, 1, 2, 3, 6, 0),
    ("gpt 2 ranks, zero3", "gpt", 2, 2, 1, 3, 0, 0),
    ("gpt 2 ranks, zero1, all selective", "gpt", 2, 1, 2, 1, 0, 6),
]
WANTED = {"mean": 5.0, "memory_worst": 1.0}


def plan_text(spec: tuple[str, str, int, int, int, int, int, int], folder: Path) -> str:
    """The file of a plan, without predictions."""
    _, model, ranks, b, accumulation, zero, full, selective = spec
    return f"""interlace-plan 1
model {json.dumps(str(folder / model))}
cluster "local-{ranks}"
devices {ranks} per_node {ranks}
blocks {BLOCKS}
global_batch {b * accumulation * ranks}
sequence {SEQ}
flash_attention yes
dtype "float32"
memory_limit {2 << 30}
template runtime
accumulation {accumulation}
space "by hand"

stage 0
  layers {BLOCKS} embedding head
  devices 0..{ranks - 1}
  micro_batch {b} dp {ranks} tp 1
  zero {zero}
  recompute full {full} selective {selective}
  offload weights 0 gradients 0 states 0 activations 0
"""


# ---- in a rank ----


def run_rank(job_file: str) -> None:
    """Carries out plans one after the other; rank 0 prints a JSON line for each."""
    import torch
    from prediction import measured_steps

    import interlace
    from interlace import models
    from interlace.plan.execute import execution_of, read_plan

    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    for file in job["plans"]:
        how = execution_of(read_plan(file))
        rows = how.micro_batch * how.accumulation
        built = models.build(how.model, micro_batch=rows, seq=how.seq, dtype="float32")
        optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-5)
        config = interlace.Config(
            strategy=how.strategy, accumulation=how.accumulation, accumulate_mode=how.accumulate_mode, clip_norm=1.0,
            timeout_s=120, schedule=[(0, how.passes(built.model))], profile="off",
        )  # fmt: skip
        with interlace.compile(built.model, optimizer, built.loss_fn, built.example_batch, config) as trainer:
            found = measured_steps(trainer, built.example_batch, job["seconds"], job["folder"])
            if trainer.rank == 0:
                more = {"file": file, "profile": found["profile"].text(), "program": trainer.program, "peak_bytes": max(found["peaks"])}
                print("ROW " + json.dumps({key: found[key] for key in ("seconds", "others")} | more), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---- the whole ----


def measure(files: list[Path], ranks: int, seconds: float, folder: Path) -> dict[str, dict[str, Any]]:
    """The records of these plans, by file."""
    from network import Network

    job, out = folder / "job.json", folder / "out"
    job.write_text(json.dumps({"plans": [str(file) for file in files], "seconds": seconds, "folder": str(folder)}))
    with Network(ranks, None) as net, out.open("w") as stdout:
        words = [sys.executable, str(Path(__file__).resolve()), "--rank", str(job)]
        children = [net.spawn(rank, words, stdout=stdout if rank == 0 else None) for rank in range(ranks)]
        codes = [child.wait() for child in children]
    if any(codes):
        print(f"a rank failed (exit codes {codes})", file=sys.stderr)
    records = [json.loads(line[4:]) for line in out.read_text().splitlines() if line.startswith("ROW ")]
    return {record["file"]: record for record in records}


def row_of(name: str, record: dict[str, Any], planned: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What was measured beside both predictions."""
    from prediction import cluster

    from interlace import _core

    program = _core.Program.parse(record["program"], name)
    simulation = _core.Simulation(program, cluster(ranks, len(os.sched_getaffinity(0))), profile=record["profile"])
    measured, stage = statistics.median(record["seconds"]), planned["stages"][0]
    low, _, high = statistics.quantiles(record["seconds"], n=4)
    return {
        "row": name, "ranks": ranks, "measured_ms": measured * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3,
        "simulated_ms": simulation.step_us / 1e3, "error": simulation.step_us / 1e6 / measured - 1,
        "planner_ms": planned["step_us"] / 1e3, "planner_error": planned["step_us"] / 1e6 / measured - 1,
        "peak_bytes": record["peak_bytes"], "memory_error": simulation.peak_bytes / record["peak_bytes"] - 1,
        "planner_memory_error": stage["peak_bytes"] / record["peak_bytes"] - 1, "others": record["others"],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    spread = f"[{row['q1_ms']:.1f}, {row['q3_ms']:.1f}]"
    print(
        f"{row['row']:<36} {row['measured_ms']:8.1f} {spread:<16} {row['simulated_ms']:8.1f} {100 * row['error']:+6.1f} %"
        f" {row['planner_ms']:8.1f} {100 * row['planner_error']:+7.1f} %  {row['peak_bytes'] / 1e6:8.2f} MB"
        f" {100 * row['memory_error']:+6.2f} % {100 * row['planner_memory_error']:+6.2f} %   {100 * row['others']:3.0f} %",
        flush=True,
    )


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    def mean(key: str) -> float:
        return statistics.fmean(100 * abs(row[key]) for row in found)

    return {
        "plans": float(len(found)), "mean": mean("error"), "worst": max(100 * abs(row["error"]) for row in found),
        "memory_worst": max(100 * abs(row["memory_error"]) for row in found), "planner_mean": mean("planner_error"),
        "planner_memory_mean": mean("planner_memory_error"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a plan's name must match")
    parser.add_argument("--seconds", type=float, default=5.0, help="for one plan: profile and measured steps together")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return
    from prediction import cluster
    from transformers.utils import logging

    from interlace import _core
    from interlace.plan.layers import model_text

    logging.set_verbosity_error()
    wanted = [spec for spec in PLANS if re.search(args.only, spec[0])]
    if not wanted:
        raise SystemExit(f"no plan matches {args.only}: " + ", ".join(spec[0] for spec in PLANS))
    print(f"{'plan':<36} {'measured ms':>11} {'quartiles':<13} {'simulated':>8} {'':>8} {'planner':>8} {'':>9}  {'peak':>11} "
          f"{'simulated':>8} {'planner':>8}  others")  # fmt: skip
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, config in MODELS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        layers = {
            name: model_text(str(folder / name), seq=SEQ, dtype="float32") for name in {spec[1] for spec in wanted}
        }
        for ranks in sorted({spec[2] for spec in wanted}):
            files: dict[Path, tuple[str, dict[str, Any]]] = {}
            for number, spec in enumerate(wanted):
                if spec[2] == ranks:
                    file = folder / f"{number}.plan"
                    machine = cluster(ranks, len(os.sched_getaffinity(0)))
                    file.write_text(_core.predict_plan(plan_text(spec, folder), layers[spec[1]], machine))
                    files[file] = (spec[0], json.loads(_core.read_plan(file.read_text())))
            records = measure(list(files), ranks, args.seconds, folder)
            for file, (name, planned) in files.items():
                if str(file) in records:
                    found.append(row_of(name, records[str(file)], planned, ranks))
                    show(found[-1])
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if found:
        print(json.dumps({key: round(value, 2) for key, value in summary(found).items()} | {"wanted": WANTED}))


if __name__ == "__main__":
    main()
