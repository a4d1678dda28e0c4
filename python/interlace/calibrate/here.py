"""This host as a cluster file for the planner: the preset `local-N` with what `interlace profile` has measured in its place.

    found = measured_cluster(profile, machine)
    found.text          # [device] [kernels] [intra] fitted, [interference] measured, [ops] the times of ops by shape
    found.said          # what of it is measured, a line each

An op of a shape that was measured takes that time. One of another shape is estimated by the kernel model, with the rates at which
the measured ops of its class (products, attention forward and backward, updates, all else) take as long as measured, all together.
Ranks that share cores are slower by so many as share one: all of them compute at the same time.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable

from interlace import _core
from interlace.calibrate.predict import value_of, with_line
from interlace.cost.machine import Machine
from interlace.cost.measurements import Profile, factor, quoted

BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "b8": 1}
UPDATE_BYTES = 24  # that the planner counts for a parameter's update: two moments read and written, gradient and weight
LARGE = 1 << 16  # bytes of a transfer from which its rate says more than its latency
_TYPE = re.compile(r"\b(f64|f32|f16|bf16|i64|i32|i16|i8|u8|b8)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class MeasuredCluster:
    text: str
    said: list[str]
    ops: int  # of how many shapes
    keys: frozenset[str] = frozenset()  # their signatures (cost/signature.h)


def measured_cluster(profile: Profile, machine: Machine) -> MeasuredCluster:
    """The cluster of `machine.ranks` devices that the profile, taken under the machine's fingerprint, describes."""
    text = _core.preset_cluster(f"local-{machine.ranks}")
    text = _put(_put(text, "host", "cores", machine.cores), "host", "compute_threads", machine.threads)
    crowd = max(1.0, machine.ranks * machine.threads / machine.cores)
    ops = {key: op.us for key, op in profile.ops.items() if op.measured and op.us > 0}
    text, said = _kernels(text, ops, crowd)
    count = len(ops)
    for key, us in list(ops.items()):  # a layer's program has a gradient's product without the place that it is written to
        ops.setdefault(key.replace("->!", "->"), us)
    if machine.ranks > 1:
        text, of_links = _links(text, profile, machine.ranks)
        said += of_links
    if crowd > 1:
        said.append(f"{machine.ranks} ranks of {machine.threads} on {machine.cores} cores: ops take {crowd:.3g} times as long as alone")
    if ops:
        text += "\n[ops]\n" + "".join(f"{quoted(key)} = {us * crowd:.6g}\n" for key, us in sorted(ops.items()))
    return MeasuredCluster(text, said, count, frozenset(ops))


def _put(text: str, table: str, key: str, value: float) -> str:
    """The text with a measured number in place of the preset's, whose comment names another source."""
    line = f"{key} = {value:.6g}"
    return re.sub(rf"(?m)^{re.escape(line)}  #.*$", line, with_line(text, table, key, f"{value:.6g}"))


# ---- ops ----


@dataclasses.dataclass(frozen=True)
class _Work:
    kind: str  # product, forward, backward (attention), update, memory
    amount: float  # flops, elements of an update, or bytes


def _kernels(text: str, ops: dict[str, float], crowd: float) -> tuple[str, list[str]]:
    """The preset with rates at which the ops of each class take as long as measured."""
    found: dict[str, list[tuple[_Work, float]]] = defaultdict(list)
    for key, us in ops.items():
        work = _work_of(key)
        if work is not None and work.amount > 0:
            found[work.kind].append((work, us))

    def number(table: str, key: str) -> float:
        return float(value_of(text, table, key) or 0)

    def rate(kind: str) -> float | None:
        """Amount in a microsecond, all measured ops of the class together."""
        rows = found.get(kind)
        return sum(w.amount for w, _ in rows) / sum(us for _, us in rows) / crowd if rows else None

    said = []
    product, update, memory = rate("product"), rate("update"), rate("memory")
    if product:
        peak = product / 1e6 / number("kernels", "mm_efficiency")  # Tflop/s
        for key, share in (("tflops_half", 1.0), ("tflops_single", 1.0), ("tflops_double", 0.5)):
            text = _put(text, "device", key, peak * share)
        text = _put(_put(text, "kernels", "mm_half_k", 0), "kernels", "mm_transposed_half_k", 0)
        said.append(f"products {product / 1e3:.1f} GFLOP/s")
    peak = number("device", "tflops_single") * 1e6
    for kind, key in (("forward", "attention_efficiency"), ("backward", "attention_backward_efficiency")):
        attention = rate(kind)
        if attention:
            text = _put(text, "kernels", key, min(attention / peak, 1.0))
            said.append(f"attention {kind} {attention / 1e3:.1f} GFLOP/s")
    if update:
        gb_per_s = update * UPDATE_BYTES / 1e3
        text = _put(text, "device", "memory_gb_per_s", gb_per_s / number("kernels", "memory_efficiency"))
        said.append(f"updates {gb_per_s:.1f} GB/s")
    if memory:
        text = _put(text, "device", "cache_gb_per_s", memory / 1e3)
        said.append(f"other ops {memory / 1e3:.1f} GB/s")
    return text, [f"{len(ops)} ops by shape; of other shapes: " + ", ".join(said)] if said else []


def _work_of(key: str) -> _Work | None:
    """What an op does, by its signature (cost/signature.h). None: what the planner does not count."""
    name, _, rest = key.partition("(")
    shapes = [(kind, [int(n) for n in sizes.split(",") if n]) for kind, sizes in _TYPE.findall(rest)]
    if not shapes or name.startswith(("grad.", "norm.", "call")) or name == "aten.embedding":
        return None
    if name.startswith("update."):
        return _Work("update", math.prod(shapes[0][1]))
    if "scaled_dot_product" in name:
        backward = name.endswith("_backward")
        query, keys = shapes[backward][1], shapes[backward + 1][1]
        if len(query) != 4:
            return None
        causal = 0.5 if ",true" in rest else 1.0
        return _Work("backward" if backward else "forward", 4 * math.prod(query) * keys[2] * causal * (2.5 if backward else 1.0))
    if name in ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"):
        a = shapes["add" in name or "badd" in name][1]
        return _Work("product", 2 * math.prod(shapes[-1][1]) * a[-1])
    return _Work("memory", sum(BYTES[kind] * math.prod(sizes) for kind, sizes in shapes))


# ---- links ----


def _links(text: str, profile: Profile, ranks: int) -> tuple[str, list[str]]:
    """The preset with the latency and rate of collectives among all ranks, what they take of the cores, and how they slow compute."""
    word, hops, share = str(ranks), ranks - 1, (ranks - 1) / ranks
    points: dict[str, list[tuple[int, float, float]]] = defaultdict(list)  # bytes, us, processor time
    for (kind, group, size), time in profile.collectives.items():
        if group == word and time.us > 0:
            points["ring" if kind in ("gather", "reduce") else kind].append((size, time.us, time.core_us))
    said, cores = [], []
    for kind, prefix, rounds in (("ring", "", 1), ("all_reduce", "all_reduce_", 2)):
        large = [p for p in points[kind] if p[0] >= LARGE]
        if not large:
            continue
        latency = min(us for _, us, _ in points[kind])
        rate = _middle((rounds * share * size / max(us - latency, us / 10), size) for size, us, _ in large)  # bytes/us
        text = _put(text, "intra", f"{prefix}alpha_us", latency / hops / rounds)
        text = _put(text, "intra", f"{prefix}gb_per_s", rate / 1e3)
        cores += [core / (rounds * share * size / 1e6) for size, _, core in large if core > 0]
        said.append(f"{'gather, reduce' if kind == 'ring' else 'all-reduce'} {latency:.0f} us and {8 * rate:,.0f} Mbit/s")
    if cores:
        text = _put(text, "host", "comm_core_us_per_mb", statistics.median(cores))
    if profile.slowdown is not None:
        text = with_line(text, "interference", "factors", _factors(profile.slowdown))
        said.append(f"compute beside a transfer {factor(profile.slowdown)} times as long")
    return text, [f"collectives of {ranks} ranks: " + ", ".join(said)] if said else []


def _middle(values: Iterable[tuple[float, float]]) -> float:
    """The median, each value counted by its weight."""
    rows = sorted(values)
    half, seen = sum(weight for _, weight in rows) / 2, 0.0
    for value, weight in rows:
        seen += weight
        if seen >= half:
            return value
    return rows[-1][0]


def _factors(slowdown: float) -> str:
    """The 28 factors of cost/cluster.h, where compute beside a transfer between ranks is slower, and nothing else."""
    sets = ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    return "[" + ", ".join(factor(slowdown if member == 0 and 1 in each else 1.0) for each in sets for member in each) + "]"
