"""The evaluation of Mist's paper, predicted: every system's space searched under one cost model.

    python bench/mist.py                                  # all sections, GPT, Llama and Falcon
    python bench/mist.py --quick                          # the smallest case of each section
    python bench/mist.py --only ablation,depth
    python bench/mist.py --json out/mist.json             # keeps every tuning as it is done; a second start goes on from there
    python bench/mist.py --against out/mist.json          # ... and how much faster the plans kept there are, from another build

Sections: speedup (Fig. 11, 12), ablation (Fig. 13), depth (Fig. 14), batch (Fig. 15), 40b (section 6.3), space (Fig. 5, 16) and
motivating (Fig. 2, 3). The paper's own figures stand beside ours where its text has them. Times are predictions of the
planner's model: what is compared is what each space allows, not how well a system runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace import _core
from interlace.plan.layers import model_text

SYSTEMS = ("full", "paper", "artifact", "megatron", "deepspeed", "aceso")
# Table 4: model size, devices, global batch.
WORKLOADS = (("1.3b", 2, 32), ("2.6b", 4, 64), ("6.7b", 8, 128), ("13b", 16, 256), ("22b", 32, 512))
PLATFORMS = {"l4": ("l4-24gb", 2048), "a100": ("a100-40gb", 4096)}

Tuned = dict[str, Any]


@functools.cache
def text_of(model: str, flash: bool, blocks: int | None = None) -> str:
    text = model_text(model, seq=4096, flash=flash)
    if blocks is None:
        return text
    lines = [f"blocks {blocks}" if line.startswith("blocks ") else line for line in text.split("\n")]
    return "\n".join(lines)


@functools.lru_cache(maxsize=4)
def core_layers(model: str, flash: bool, cluster: str, sequence: int, blocks: int | None) -> _core.testing.PlanLayers:
    return _core.testing.PlanLayers(text_of(model, flash, blocks), cluster, sequence)


class Kept:
    """Tunings by name, those of an earlier start among them: what was found is what will be found."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.found: dict[str, Tuned] = {}
        self.done = 0
        self.begin = time.monotonic()

    def read(self, file: Path) -> None:
        self.file = file
        if file.exists():
            self.found = json.loads(file.read_text()).get("tunings", {})

    def write(self, results: dict[str, Any] | None = None) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"results": results or {}, "tunings": self.found}, indent=1)
            self.file.with_suffix(".tmp").write_text(text + "\n")
            self.file.with_suffix(".tmp").replace(self.file)

    def say(self, name: str) -> None:
        self.done += 1
        if sys.stderr.isatty():
            print(
                f"\r\x1b[K{self.done} tunings, {time.monotonic() - self.begin:.0f} s: {name}", end="\r", file=sys.stderr
            )


KEPT = Kept()


@dataclasses.dataclass(frozen=True)
class Layers:
    """A model's layers on a cluster, read when something is to be tuned that is not kept."""

    model: str
    flash: bool
    cluster: str
    sequence: int
    blocks: int | None = None

    def core(self) -> _core.testing.PlanLayers:
        return core_layers(self.model, self.flash, self.cluster, self.sequence, self.blocks)

    def tune(self, system: str, batch: int) -> Tuned:
        attention = "flash" if self.flash else "plain"
        blocks = f" of {self.blocks} blocks" if self.blocks else ""
        name = f"{self.model}{blocks} {attention} on {self.cluster}, sequence {self.sequence}, batch {batch}, {system}"
        KEPT.say(name)
        if name not in KEPT.found:
            KEPT.found[name] = self.core().tune(system, batch)
            KEPT.write()
        return KEPT.found[name]


def layers_of(model: str, flash: bool, cluster: str, sequence: int, blocks: int | None = None) -> Layers:
    return Layers(model, flash, cluster, sequence, blocks)


def samples_per_s(tuned: Tuned) -> float:
    return tuned["plans"][0]["samples_per_s"] if tuned["plans"] else 0.0


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.inf


def show(value: float) -> str:
    return "does not fit" if math.isinf(value) or value == 0 else f"{value:.2f}x"


def mean_of(values: list[float]) -> str:
    finite = [v for v in values if math.isfinite(v) and v > 0]
    return (
        f"{statistics.mean(finite):.2f}x mean, {max(finite):.2f}x at most ({len(finite)} cases)"
        if finite
        else "no case"
    )


def shape(tuned: Tuned) -> str:
    if not tuned["plans"]:
        return "-"
    stages = tuned["plans"][0]["stages"]
    first = stages[0]
    parts = [f"G {first['micro_batches']}, {len(stages)} stage{'s' if len(stages) > 1 else ''}"]
    layouts = {(s["micro_batch"], s["dp"], s["tp"]) for s in stages}
    parts.append(" ".join(f"b{b} dp{dp} tp{tp}" for b, dp, tp in sorted(layouts)))
    for name, key in (("layers", "layers"), ("zero", "zero"), ("full", "full"), ("sel", "selective")):
        values = [s[key] for s in stages]
        if any(values):
            parts.append(f"{name} {values[0] if len(set(values)) == 1 else '/'.join(map(str, values))}")
    for name, key in (("WO", "weights_out"), ("GO", "gradients_out"), ("OO", "states_out"), ("AO", "activations_out")):
        values = [s[key] for s in stages]
        if any(v > 0.005 for v in values):
            parts.append(f"{name} {'/'.join(f'{v:.2f}' for v in values)}")
    return ", ".join(parts)


def speedup(families: list[str]) -> dict[str, Any]:
    """Fig. 11, 12: throughput by model, cluster and attention; what the full space gains over each other."""
    out: dict[str, Any] = {}
    worse: list[str] = []
    over: dict[tuple[str, str], dict[str, list[float]]] = {}  # by (column, family): system → full over it
    for flash in (True,) if QUICK else (True, False):
        for platform, (gpu, sequence) in PLATFORMS.items():
            gains: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            print(
                f"\n{platform.upper()}, sequence {sequence}, {'flash attention' if flash else 'attention written out'}"
            )
            print(f"{'':12}{'devices':>8}{'samples/s':>11}" + "".join(f"{s:>14}" for s in SYSTEMS[1:]))
            for family in families:
                for size, devices, batch in WORKLOADS[:2] if QUICK else WORKLOADS:
                    layers = layers_of(f"{family}-{size}", flash, f"{gpu}-{devices}", sequence)
                    tuned = {system: layers.tune(system, batch) for system in SYSTEMS}
                    rates = {system: samples_per_s(tuned[system]) for system in SYSTEMS}
                    row = {system: ratio(rates["full"], rates[system]) for system in SYSTEMS}
                    case = f"{platform} {family}-{size} {'flash' if flash else 'plain'}"
                    worse += [f"{case}: {system} beats full" for system, value in row.items() if value < 1 - 1e-9]
                    if rates["paper"] < rates["artifact"] * (1 - 1e-9):
                        worse.append(f"{case}: artifact beats paper")
                    column = over.setdefault((f"{platform.upper()}, {'flash' if flash else 'plain'}", family), {})
                    for system in SYSTEMS:
                        gains[system].append(row[system])
                        column.setdefault(system, []).append(row[system])
                    print(
                        f"{family + '-' + size:12}{devices:8}{rates['full']:11.3f}"
                        + "".join(f"{show(row[s]):>14}" for s in SYSTEMS[1:]),
                        flush=True,
                    )
                    out[case] = rates
            paper = {
                ("l4", True): "paper: Mist over megatron 1.32x mean (GPT 1.22x), over deepspeed 1.51x",
                ("a100", True): "paper: Mist over megatron 1.34x mean (GPT 1.20x)",
            }.get((platform, flash), "paper, both GPUs, GPT: Mist over megatron 1.14x mean, over aceso 1.27x")
            for system in SYSTEMS[1:]:
                print(f"  full over {system}: {mean_of(gains[system])}")
            print(f"  ({paper})")
    summary(over, families)
    print(f"\ncases in which a space beats the full one, or the artifact's the paper's: {len(worse)} of {len(out)}")
    for case in worse:
        print(f"  {case}")
    out["worse"] = worse
    return out


def summary(over: dict[tuple[str, str], dict[str, list[float]]], families: list[str]) -> None:
    """A table for documents: what the full space gains over each other, mean (most)."""
    columns = list(dict.fromkeys(column for column, _ in over))
    print(f"\n| over | family | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for system in SYSTEMS[1:]:
        for family in families:
            cells = []
            for column in columns:
                values = over.get((column, family), {}).get(system, [])
                finite = [v for v in values if math.isfinite(v)]
                beside = f", {len(values) - len(finite)} do not fit" if len(finite) < len(values) else ""
                cells.append(f"{statistics.mean(finite):.2f} ({max(finite):.2f}{beside})" if finite else "none fits")
            print(f"| {system} | {family} | {' | '.join(cells)} |")


def ablation(_: list[str]) -> dict[str, Any]:
    """Fig. 13: the space grown step by step, GPT on 8, 16, 32 L4, throughput over Megatron's grid."""
    steps = ("grid", "grid+ckpt", "grid+offload", "grid+imbalance", "paper", "full")
    rows: dict[str, list[float]] = {step: [] for step in steps}
    print(f"\n{'over megatron':16}" + "".join(f"{step:>16}" for step in steps))
    for flash in (True,) if QUICK else (True, False):
        for size, devices, batch in WORKLOADS[2:3] if QUICK else WORKLOADS[2:]:
            layers = layers_of(f"gpt-{size}", flash, f"l4-24gb-{devices}", 2048)
            base = samples_per_s(layers.tune("megatron", batch))
            for step in steps:
                rows[step].append(ratio(samples_per_s(layers.tune(step, batch)), base))
            name = f"{devices} L4, {'flash' if flash else 'plain'}"
            print(f"{name:16}" + "".join(f"{rows[step][-1]:15.2f}x" for step in steps), flush=True)
    means = {step: statistics.mean(values) for step, values in rows.items()}
    print(f"{'mean':16}" + "".join(f"{means[step]:15.2f}x" for step in steps))
    print("(paper: checkpoint tuning 1.12x, offload 7 % more, imbalance awareness 9 % more)")
    return means


def depth(_: list[str]) -> dict[str, Any]:
    """Fig. 14: GPT of 22B's width with 32 to 80 blocks on 32 L4."""
    out: dict[str, Any] = {}
    systems = ("megatron", "grid+ckpt", "paper", "full")
    for flash in (True,) if QUICK else (False, True):
        print(
            f"\n{'flash' if flash else 'plain':8}{'blocks':>8}"
            + "".join(f"{s + ' /s':>14}" for s in systems)
            + f"{'full/megatron':>16}"
        )
        for blocks in (32, 80) if QUICK else (32, 40, 48, 56, 64, 72, 80):
            layers = layers_of("gpt-22b", flash, "l4-24gb-32", 2048, blocks)
            rates = {s: samples_per_s(layers.tune(s, 512)) for s in systems}
            out[f"{blocks} {'flash' if flash else 'plain'}"] = rates
            gain = show(ratio(rates["full"], rates["megatron"]))
            print(f"{'':8}{blocks:8}" + "".join(f"{rates[s]:14.3f}" for s in systems) + f"{gain:>16}", flush=True)
    print("(paper: up to 1.32x, at 80 layers)")
    return out


def batch(_: list[str]) -> dict[str, Any]:
    """Fig. 15: GPT-22B on 32 L4 over global batches."""
    out: dict[str, Any] = {}
    systems = ("megatron", "grid+ckpt", "grid+offload", "grid+imbalance", "full")
    layers = layers_of("gpt-22b", True, "l4-24gb-32", 2048)
    print(f"\n{'batch':>8}" + "".join(f"{s + ' /s':>18}" for s in systems))
    for size in (64, 512) if QUICK else (64, 128, 256, 512, 1024):
        rates = {s: samples_per_s(layers.tune(s, size)) for s in systems}
        out[str(size)] = rates
        print(f"{size:8}" + "".join(f"{rates[s]:18.3f}" for s in systems), flush=True)
    gains = [ratio(r["grid+imbalance"], r["grid+offload"]) for r in out.values()]
    print(f"imbalance awareness alone: {mean_of(gains)} (paper: 1.13x mean)")
    return out


def forty(_: list[str]) -> dict[str, Any]:
    """Section 6.3: GPT-40B on 32 A100-40GB."""
    out: dict[str, Any] = {}
    layers = layers_of("gpt-40b", True, "a100-40gb-32", 4096)
    print()
    for system in ("megatron", "grid+ckpt", "paper", "full"):
        tuned = layers.tune(system, 512)
        out[system] = samples_per_s(tuned)
        gain = show(ratio(out[system], out["megatron"]))
        print(f"{system:12}{out[system]:8.3f} samples/s  {gain:>8}   {shape(tuned)}", flush=True)
    print("(paper: checkpoint tuning 1.04x, Mist 1.10x)")
    return out


def count_plans(blocks: int, devices: int, node: int, batch_size: int, weigh: Callable[[int, int], int]) -> int:
    """All plans: every G, cut into stages, (b, dp, tp) a stage, times `weigh(layers, dp)` choices within it."""
    counts = [c for c in range(1, devices + 1) if (c < node and node % c == 0) or c % node == 0]
    total = 0
    for g in (g for g in range(1, batch_size + 1) if batch_size % g == 0):
        inside: dict[tuple[int, int], int] = {}
        for c in counts:
            degrees = [c // tp for tp in (1, 2, 4, 8) if c % tp == 0 and batch_size % (g * (c // tp)) == 0]
            for k in range(1, blocks + 1):
                inside[c, k] = sum(weigh(k, dp) for dp in degrees)
        plans = [[0] * (devices + 1) for _ in range(blocks + 1)]
        plans[0][0] = 1
        for l in range(1, blocks + 1):  # noqa: E741
            for n in range(1, devices + 1):
                plans[l][n] = sum(plans[l - k][n - c] * inside[c, k] for c in counts if c <= n for k in range(1, l + 1))
        total += plans[blocks][devices]
    return total


def space(_: list[str]) -> dict[str, Any]:
    """Fig. 5, 16: how the space grows and what searching it costs; GPT-22B on 32 L4, offload in eighths."""

    def zero(dp: int) -> int:
        return 4 if dp > 1 else 1

    dimensions: tuple[tuple[str, Callable[[int, int], int]], ...] = (
        ("parallelism", lambda k, dp: 1),
        ("+ recomputed blocks", lambda k, dp: k + 1),
        ("+ ZeRO 0 to 3", lambda k, dp: (k + 1) * zero(dp)),
        ("+ offload of states", lambda k, dp: (k + 1) * zero(dp) * 9),
        ("+ weights, gradients, activations", lambda k, dp: (k + 1) * zero(dp) * 9**4),
        ("+ selective recomputation", lambda k, dp: (k + 1) * (k + 2) // 2 * zero(dp) * 9**4),
    )
    out: dict[str, Any] = {}
    print("\nplans of GPT-22B on 32 L4, batch 512")
    for name, weigh in dimensions[:1] if QUICK else dimensions:
        size = count_plans(48, 32, 8, 512, weigh)
        out[name] = math.log10(size)
        print(f"  {name:36} 10^{math.log10(size):.1f}", flush=True)
    # Times are of now: nothing here is kept.
    layers = layers_of("gpt-22b", True, "l4-24gb-32", 2048).core()
    layers.tune("full", 512)  # layer costs are computed once
    print(
        f"\n{'tuning time':24}{'wall s':>8}{'cpu s':>8}{'pairs':>7}{'solved':>8}{'frontiers':>11}{'points':>9}{'checks':>9}"
    )
    for name in ("megatron", "deepspeed", "grid+ckpt", "grid+imbalance", "artifact", "aceso", "paper", "full"):
        t = layers.tune(name, 512)
        out[name] = {
            key: t[key] for key in ("wall_s", "cpu_s", "pairs", "pairs_solved", "frontiers", "points", "checks")
        }
        numbers = f"{t['pairs']:7}{t['pairs_solved']:8}{t['frontiers']:11}{t['points']:9}{t['checks']:9}"
        print(f"  {name:22}{t['wall_s']:8.2f}{t['cpu_s']:8.2f}{numbers}", flush=True)
    found = layers.tune("full", 512)
    limit = int(0.97 * max(s["peak_bytes"] for s in found["plans"][0]["stages"]))
    print("\nplanning again after one change, full space: from nothing, and from the plan before")
    for change, size, limit_bytes in (("3 % less memory", 512, limit), ("half the batch", 256, 0)):
        layers.tune("full", 512)
        warm = layers.tune("full", size, device_bytes=limit_bytes, from_last=True)
        cold = layers.tune("full", size, device_bytes=limit_bytes)
        out[f"again: {change}"] = {"cold_cpu_s": cold["cpu_s"], "warm_cpu_s": warm["cpu_s"]}
        same = abs(warm["plans"][0]["step_us"] / cold["plans"][0]["step_us"] - 1) < 1e-8
        print(
            f"  {change:22}{cold['cpu_s']:8.2f}{warm['cpu_s']:8.2f} s cpu   {'the same time' if same else 'NOT the same time'}",
            flush=True,
        )
    promised = (
        ("gpt-1.3b", "l4-24gb-2", 2048, 32, 1),
        ("gpt-22b", "l4-24gb-32", 2048, 512, 10),
        ("llama-3-70b", "h100-80gb-64", 8192, 1024, 30),
    )
    print("\nwhole tuning, full space, from the model's text")
    for model, cluster, sequence, size, limit in promised[:1] if QUICK else promised:
        fresh = _core.testing.PlanLayers(text_of(model, True), cluster, sequence)
        t = fresh.tune("full", size)
        out[f"{model} {cluster}"] = t["wall_s"]
        print(
            f"  {model:12} {cluster:14} {t['wall_s']:7.2f} s wall {t['cpu_s']:7.2f} s cpu  (promised {limit} s)   {shape(t)}",
            flush=True,
        )
    return out


def motivating(_: list[str]) -> dict[str, Any]:
    """Fig. 2: GPT-2.6B on 4 L4, sequence 4096, batch 8. Fig. 3: GPT-6.7B on 8 L4, sequence 2048, batch 512."""
    out: dict[str, Any] = {}
    said = {"ckpt": "1.22x", "zero": "1.25x", "offload": "1.16x", "all": "1.30x"}
    for title, model, cluster, sequence, size in (
        ("Fig. 2", "gpt-2.6b", "l4-24gb-4", 4096, 8),
        ("Fig. 3", "gpt-6.7b", "l4-24gb-8", 2048, 512),
    ):
        layers = layers_of(model, True, cluster, sequence)
        print(f"\n{title}: {model} on {cluster}, sequence {sequence}, batch {size}; over all blocks recomputed")
        base = samples_per_s(layers.tune("full-ckpt", size))
        for name in ("parallel", "full-ckpt", "ckpt", "zero", "offload", "all", "full"):
            tuned = layers.tune(name, size)
            out[f"{title} {name}"] = samples_per_s(tuned)
            paper = f"paper {said[name]}" if title == "Fig. 2" and name in said else ""
            print(f"  {name:10}{show(ratio(samples_per_s(tuned), base)):>13} {paper:12} {shape(tuned)}", flush=True)
    print("  (paper, Fig. 3: all together 1.22x over parallelism, 1.11x over parallelism and checkpointing)")
    return out


QUICK = False
SECTIONS = {
    "speedup": speedup,
    "ablation": ablation,
    "depth": depth,
    "batch": batch,
    "40b": forty,
    "space": space,
    "motivating": motivating,
}


def compare(kept: dict[str, Tuned]) -> None:
    """How much faster the plans kept are than those found now."""
    faster = {
        name: samples_per_s(kept[name]) / samples_per_s(tuned)
        for name, tuned in KEPT.found.items()
        if kept.get(name, {}).get("plans") and tuned["plans"]
    }
    most = max(faster, key=lambda name: faster[name])
    print(
        f"\n{len(faster)} plans against those kept: these are {statistics.mean(faster.values()) - 1:.3%} faster, mean; "
        f"at most {faster[most] - 1:.3%} ({most})"
    )


def main() -> None:
    global QUICK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", default="gpt,llama,falcon", help="of the speedup section, with commas between them"
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--quick", action="store_true", help="the smallest case of each section, GPT only: a minute")
    parser.add_argument("--json", type=Path, help="the figures and every tuning; those in it are not made again")
    parser.add_argument("--against", type=Path, help="what --json of another build wrote: compares the plans")
    given = parser.parse_args()
    wanted = given.only.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"no section '{unknown[0]}'; there are {', '.join(SECTIONS)}")
    QUICK = given.quick
    families = ["gpt"] if QUICK else given.families.split(",")
    if given.json:
        KEPT.read(given.json)
    results = {}
    for name in wanted:
        section = SECTIONS[name]
        print(f"\n== {name}: {section.__doc__}")
        results[name] = section(families)
        KEPT.write(results)
    if given.against:
        compare(json.loads(given.against.read_text())["tunings"])
    print(
        f"\n{KEPT.done} tunings in {time.monotonic() - KEPT.begin:.0f} s, {time.process_time():.0f} s of processor time"
    )


if __name__ == "__main__":
    main()
