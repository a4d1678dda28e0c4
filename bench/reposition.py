"""The optimizer step left to the next step (`reposition_update`) against the same program without it, on a shaped network.

python bench/reposition.py                          # two ranks at 500 Mbit/s, about six minutes
python bench/reposition.py --mbit 250 --only zero1  # rows whose name matches
python bench/reposition.py --rounds 12 --json out/reposition.json
python bench/reposition.py --simulate               # no run: two CPU hosts at 500 Mbit/s and an 8B model on 8 H100, one minute

One trainer a row, which swaps between the two programs: in each round each side makes one step to get going and two that are timed.
The figure is the median of the ratios of the rounds, with its quartiles. Clipping is on: every update waits for the norm.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from common import quartiles, ratios, write_json  # noqa: E402

ROWS: dict[str, tuple[str, str]] = {  # strategy, schedule passes of both sides
    "shard": ("shard", ""),
    "shard, prefetch, unshard": ("shard", "prefetch,unshard(units=all)"),
    "zero1": ("zero1", ""),
    "replicate": ("replicate", ""),
}
CASE = {"hidden": 384, "layers": 4, "heads": 6, "inter": 1032, "vocab": 512, "tokens": 256}  # 7.6 M parameters
TIMED = 2


def run_rank(job_file: str) -> None:
    """Measures the rows; rank 0 prints a JSON line for each."""
    import torch
    from cases import causal_loss, llama, token_batch

    import interlace
    from interlace import _core

    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    for name in job["rows"]:
        strategy, passes = ROWS[name]
        batch = token_batch(CASE)
        model = llama(CASE)
        config = interlace.Config(strategy=strategy, clip_norm=1.0, timeout_s=120, schedule=[])
        with interlace.compile(
            model, torch.optim.AdamW(model.parameters(), lr=1e-5), causal_loss, batch, config
        ) as trainer:
            texts = {"plain": "", "moved": ""}
            for side in texts:
                if trainer.rank == 0:
                    program = _core.Program.parse(trainer.program)
                    more = [passes] if passes else []
                    program.run_passes(
                        ",".join([*more, *(["reposition_update"] if side == "moved" else [])]) or "canonicalize"
                    )
                    texts[side] = program.print()
            times: dict[str, list[float]] = {side: [] for side in texts}
            peaks = {}
            for number in range(-1, job["rounds"]):
                for side in list(texts) if number % 2 == 0 else list(reversed(texts)):
                    trainer.swap(texts[side])
                    trainer.step(batch)
                    start = time.perf_counter()
                    for _ in range(TIMED):
                        trainer.step(batch)
                    seconds = (time.perf_counter() - start) / TIMED
                    peaks[side] = trainer.stats()["peak_bytes"]
                    if number >= 0:
                        times[side].append(seconds)
            if trainer.rank == 0:
                print("ROW " + json.dumps({"row": name, "seconds": times, "peak_bytes": peaks}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure(rows: list[str], mbit: float | None, rounds: int) -> list[dict[str, Any]]:
    from network import Network

    with tempfile.TemporaryDirectory() as folder, Network(2, mbit) as net:
        job, out = Path(folder) / "job.json", Path(folder) / "out"
        job.write_text(json.dumps({"rows": rows, "rounds": rounds}))
        with out.open("w") as stdout:
            words = [sys.executable, str(Path(__file__).resolve()), "--rank", str(job)]
            children = [net.spawn(rank, words, stdout=stdout if rank == 0 else None) for rank in range(2)]
            codes = [child.wait() for child in children]
        found = [json.loads(line[4:]) for line in out.read_text().splitlines() if line.startswith("ROW ")]
    if any(codes):
        raise SystemExit(f"a rank failed (exit codes {codes})")
    return found


def simulate() -> None:
    """The same comparison by the simulator, without a profile: on two hosts of a CPU each, and on eight GPUs."""
    from cases import MATMUL_BOUND, causal_loss, llama, token_batch

    from interlace import _core
    from interlace.capture import capture
    from interlace.models import build

    preset = build("llama-3-8b", micro_batch=1, seq=2048)
    hosts = _core.preset_cluster("local-2").replace("per_node = 2", "per_node = 1")
    places = {
        "19.5M Llama, two hosts, 500 Mbit/s": (2, hosts, lambda: capture(llama(MATMUL_BOUND), causal_loss, token_batch(MATMUL_BOUND))),
        "llama-3.1-8b, 8 H100": (8, "h100-80gb-8", lambda: capture(preset.model, preset.loss_fn, preset.example_batch)),
    }  # fmt: skip
    for place, (ranks, cluster, make) in places.items():
        text = make().text
        print(place)
        for name, (strategy, passes) in ROWS.items():
            found = []
            for last in ("", "reposition_update"):
                program = _core.Program.parse(text)
                parts = ["canonicalize", f"{strategy}(ranks={ranks})", "update(clip=1.0)", passes, last]
                program.run_passes(",".join(p for p in parts if p), verify=False)
                found.append(_core.Simulation(program, cluster))
            plain, moved = found
            print(
                f"  {name:<26} {plain.step_us / 1e3:9.2f} {moved.step_us / 1e3:9.2f} ms  {moved.step_us / plain.step_us:.3f}   "
                f"{plain.peak_bytes / 1e6:.2f} -> {moved.peak_bytes / 1e6:.2f} MB",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=500, help="sending rate of each rank in Mbit/s; 0: unshaped")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="a regular expression that a row's name must match")
    parser.add_argument(
        "--simulate", action="store_true", help="by the simulator, on two machines that need not be here"
    )
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return
    if args.simulate:
        simulate()
        return
    rows = [name for name in ROWS if re.search(args.only, name)]
    found = measure(rows, args.mbit or None, args.rounds)
    print(f"{'row':<26} {'plain ms':>9} {'moved ms':>9}  {'moved / plain':<22} peak of a rank")
    for row in found:
        low, middle, high = quartiles(ratios(row["seconds"], "moved", "plain"))
        row |= {"ratio": middle, "quartiles": [low, high]}
        plain, moved = (1e3 * quartiles(row["seconds"][side])[1] for side in ("plain", "moved"))
        peak = " -> ".join(f"{row['peak_bytes'][side] / 1e6:.2f}" for side in ("plain", "moved"))
        print(f"{row['row']:<26} {plain:9.1f} {moved:9.1f}  {middle:.3f} [{low:.3f}, {high:.3f}]   {peak} MB")
    if args.json:
        write_json(args.json, {"mbit": args.mbit, "case": CASE, "rows": found})


if __name__ == "__main__":
    main()
