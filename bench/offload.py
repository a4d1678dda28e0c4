"""Training within 75, 50 and 35 % of the memory it takes without a limit, against everything out and back synchronously.

python bench/offload.py                                  # makes its tier in a temporary folder of the current disk
python bench/offload.py --tier /mnt/nvme --bandwidth 400MB --steps 12 --json out/offload.json

Prints for each limit: measured peak (the counting allocator's, with the tier's own buffers), whether losses and parameters are those
of the unlimited run bit for bit, the step against the synchronous baseline, and the bound max(compute, bytes / bandwidth), where
compute is the unlimited step, taken in turn, and bytes are the larger direction: the tier moves both at once, as a host link does.
Steps are timed when every run's program is settled: steps before are recorded op by op for the next plan, which takes longer.
Beside it a bound that knows when bytes can move: what is out where most memory is needed comes back after that, so the step takes at
least the ops before and then that traffic, with the times that were measured for the plan.
The second line of a run says where its step goes, from recorded steps, beside what the simulator says of the same program.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cases import causal_loss, llama, token_batch

import interlace
from interlace import _core
from interlace.config import parse_bytes

# Few tokens: parameters, gradients and optimizer states are nearly all of the memory.
CASE = {"hidden": 256, "layers": 8, "heads": 4, "inter": 688, "vocab": 512, "tokens": 128}
MIB = 2**20
RECORDED = 5  # steps, for the parts of a step
WARM = 40  # steps at most until all programs are settled: a plan and three more where the measured step is not the predicted one


class Run:
    """One way to train; its model and batch are the same as those of the others."""

    def __init__(
        self, passes: list[str], folder: str | None, bandwidth: int, profiled: list[str] | None = None
    ) -> None:
        torch.manual_seed(0)
        model = llama(CASE)
        self.batch = token_batch(CASE)
        schedule: list[tuple[int, list[str]]] = [(0, passes)]
        if profiled is not None:
            schedule.append((4, profiled))
        tier = {} if folder is None else {"tier": folder, "tier_bandwidth": bandwidth}
        self.plans_due = profiled is not None
        config = interlace.Config(schedule=schedule, cache="off", **tier)
        self.trainer = interlace.compile(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), causal_loss, self.batch, config=config
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bytes_out: list[int] = []
        self.bytes_in: list[int] = []
        self.highest = 0  # peak bytes of any program so far

    def step(self) -> None:
        before = self.trainer.stats()
        start = time.perf_counter()
        loss = self.trainer.step(self.batch)
        self.seconds.append(time.perf_counter() - start)
        after = self.trainer.stats()
        self.bytes_out.append(after["tier_bytes_out"] - before["tier_bytes_out"])
        self.bytes_in.append(after["tier_bytes_in"] - before["tier_bytes_in"])
        self.losses.append(float(loss))
        self.highest = max(self.highest, self._peak())

    def lanes(self) -> dict[str, float]:
        """Milliseconds of a step: its ops, issuing copies, waiting for them; the tier at work, each way; simulated ops and waits."""
        executor = self.trainer._run.executor
        found: list[dict[str, float]] = []
        for _ in range(RECORDED):
            executor.set_trace("on")
            before = executor.stats()
            self.trainer.step(self.batch)
            after, record = executor.stats(), executor.record()
            executor.set_trace("off")
            parts = {"ops": 0.0, "issuing": 0.0, "waits": 0.0}
            for op, _, seconds, *_ in record["samples"]:
                name = record["ops"][op]["name"]
                kind = "issuing" if name.endswith(".start") else "waits" if name.endswith(".wait") else "ops"
                parts[kind] += 1e3 * seconds
            for way in ("out", "in"):
                parts[way] = 1e3 * (after[f"tier_seconds_{way}"] - before[f"tier_seconds_{way}"])
            found.append(parts)
        lanes = {name: statistics.median(parts[name] for parts in found) for name in found[0]}
        planner = self.trainer._loop.planner
        if planner.profile:
            program = _core.Program.parse(self.trainer.program)
            simulation = _core.Simulation(program, planner.cluster_text(), profile=planner.profile)
            rank = json.loads(simulation.json())["per_rank"][0]
            lanes |= {"simulated": simulation.step_us / 1e3, "simulated_ops": rank["compute_us"] / 1e3,
                      "simulated_waits": rank["blocked_us"] / 1e3}  # fmt: skip
        return lanes

    def settled(self) -> bool:
        return self.trainer.settled and bool(self.trainer.plans or not self.plans_due)

    def _peak(self) -> int:
        stats = self.trainer.stats()
        return int(stats["peak_bytes"]) + (int(stats["tier_buffer_bytes"]) if stats["tier_bytes_in"] else 0)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.trainer.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", help="folder for the tiers (default: a temporary one in the current folder)")
    parser.add_argument("--bandwidth", default="400MB", help="bytes per second in each direction")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--limits", default="75,50,35", help="per cent of the unlimited peak")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth = parse_bytes(args.bandwidth)
    with tempfile.TemporaryDirectory(dir=args.tier or ".") as folder:
        facts = compare(folder, bandwidth, args.steps, [int(p) for p in args.limits.split(",")])
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


def compare(folder: str, bandwidth: int, steps: int, limits: list[int]) -> dict[str, Any]:
    def own(name: str) -> str:
        path = Path(folder) / name
        path.mkdir()
        return str(path)

    free = Run(["overlap_update"], None, bandwidth)
    free.step()
    unlimited = free.highest
    runs = {"sync": Run(["offload_sync(cluster={cluster})"], own("sync"), bandwidth)}
    budgets = {}
    for percent in limits:
        budget = unlimited * percent // 100
        budgets[f"{percent} %"] = budget
        # What the passes do not know: the tier's buffers, and allocations that are rounded up.
        limit = budget - 3 * MIB
        costs = "cluster={cluster},limit=" + str(limit)
        runs[f"{percent} %"] = Run(
            ["overlap_update", f"offload({costs})"], own(str(percent)), bandwidth,
            [f"search({costs},profile={{profile}},recompute=auto,offload=auto,reposition=auto)"],
        )  # fmt: skip
    everyone = [free, *runs.values()]
    warm = 0
    while warm < 4 or (warm < WARM and not all(run.settled() for run in everyone)):
        for run in everyone[1 if warm == 0 else 0 :]:
            run.step()
        warm += 1
    for _ in range(steps):  # in turn, so that what else the machine does falls on all of them
        for run in everyone:
            run.step()
    compute = statistics.median(free.seconds[-steps:])
    print(
        f"unlimited: peak {unlimited / MIB:.1f} MiB, step {compute * 1e3:.1f} ms; tier {bandwidth / 1e6:.0f} MB/s each way"
    )
    facts: dict[str, Any] = {
        "unlimited_bytes": unlimited,
        "compute_ms": compute * 1e3,
        "bandwidth": bandwidth,
        "rows": [],
    }
    base = statistics.median(runs["sync"].seconds[-steps:])
    for name, run in runs.items():
        seconds = statistics.median(run.seconds[-steps:])
        out, back = run.bytes_out[-1], run.bytes_in[-1]
        traffic = max(out, back) / bandwidth
        bound = max(compute, traffic)
        theirs, ours = free.parameters(), run.parameters()
        least = re.search(r'\nmeta offload ".*at least (\d+) us', run.trainer.program)
        chosen = re.search(r'\nmeta search.chosen "([^|]*)\|(\d+)', run.trainer.program)
        same = run.losses == free.losses and all(torch.equal(theirs[k], ours[k]) for k in theirs)
        row = {
            "run": name, "peak_bytes": run.highest, "limit_bytes": budgets.get(name), "step_ms": seconds * 1e3, "bits": same,
            "bytes_out": out, "bytes_in": back, "bound_ms": bound * 1e3, "over_bound": seconds / bound,
            "compute_to_io": compute / traffic if traffic else None, "faster_than_sync": base / seconds,
            "least_ms": int(least[1]) / 1e3 if least else None, "chosen": chosen[1] if chosen else "",
            "simulated_ms": int(chosen[2]) / 1e3 if chosen else None,
        }  # fmt: skip
        row["lanes_ms"] = run.lanes()
        facts["rows"].append(row)
        limit_text = (
            ""
            if name not in budgets
            else f" of {budgets[name] / MIB:.1f}{'' if run.highest <= budgets[name] else ' EXCEEDED'}"
        )
        print(
            f"{name:>5}: peak {run.highest / MIB:6.1f}{limit_text} MiB, bits {'equal' if same else 'DIFFER'}, step {seconds * 1e3:7.1f} ms, "
            f"out {out / MIB:.1f} in {back / MIB:.1f} MiB, bound {bound * 1e3:.1f} ms (x {seconds / bound:.2f}), "
            f"compute/IO {compute / traffic if traffic else float('inf'):.2f}, sync/this {base / seconds:.2f}"
            + (
                f"; at least {row['least_ms']:.1f} ms in any order (x {seconds * 1e3 / row['least_ms']:.2f})"
                if least
                else ""
            )
            + (f"; simulated {row['simulated_ms']:.1f} ms, {row['chosen']}" if row["chosen"] else "")
        )
        print("       " + said(row["lanes_ms"]))
    for run in runs.values():
        run.trainer.close()
    free.trainer.close()
    return facts


def said(lanes: dict[str, float]) -> str:
    text = ", ".join(
        f"{name} {lanes[name]:.1f}" + (f" (simulated {lanes[f'simulated_{name}']:.1f})" if f"simulated_{name}" in lanes else "")
        for name in ("ops", "issuing", "waits")
    )  # fmt: skip
    return f"{text}; tier busy out {lanes['out']:.1f}, in {lanes['in']:.1f} ms"


if __name__ == "__main__":
    main()
