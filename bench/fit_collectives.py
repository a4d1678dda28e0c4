"""Fits alpha and bandwidth of the collective model on public all-gather and all-reduce tables; prints the error of every row.

    python bench/fit_collectives.py --data ../shared/data

Model (src/cost/collective_model.h): time = alpha * (n - 1) + bytes * (n - 1) / n / bandwidth, with bytes the whole buffer
and n ranks; an all-reduce around a ring is twice that. Fitted on the 16- and 64-GPU rows of nccl_p5_all_gather.csv (8 H100 a node,
EFA): mean absolute relative error, which single outliers of the tables do not pull. Predictions for 32, 128 and 256 GPUs
follow. An all-reduce between nodes goes along trees and within a node through the switches: another form, whose rate
falls for small buffers and many nodes. Then rows inside one node of comm_{l4,a100,a10g}.csv, which the presets of those machines use,
and how far the presets are from them: their gathers and reduce-scatters hold the copies of lists of tensors.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from fit_kernels import search
from numpy.typing import NDArray

from interlace import _core

Array = NDArray[np.float64]
MIB = 1 << 20
PRESETS = {"l4": "l4-24gb-8", "a100": "a100-40gb-8", "a10g": "a10g-24gb-8"}


def model_us(alpha: float, gb_per_s: float, ranks: Array, size: Array) -> Array:
    return alpha * (ranks - 1) + size * (ranks - 1) / ranks / (gb_per_s * 1e3)


def fit(ranks: Array, size: Array, measured: Array) -> tuple[float, float, float]:
    """alpha (us a hop), bandwidth (GB/s), mean absolute error of the logarithm."""
    scale = float(np.median(size / measured)) / 1e3

    def loss(p: Array) -> float:
        return float(np.abs(np.log(model_us(p[0], p[1] * scale, ranks, size) / measured)).mean())

    point, error = search(loss, [8.0, 1.2], [3.0, 0.3], [0.01, 0.05], [500.0, 20.0])
    return float(point[0]), float(point[1]) * scale, error


def p5(path: Path) -> tuple[Array, Array, Array]:
    """ranks, bytes, us: out-of-place and in-place columns averaged."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ranks = np.array([float(r["GPUs"]) for r in rows])
    size = np.array([float(r["size(MB)"]) * MIB for r in rows])
    rate = np.array([(float(r["out algbw(GB/s)"]) + float(r["in algbw(GB/s)"])) / 2 for r in rows])
    return ranks, size, size / (rate * 1e3)


def show_p5(data: Path) -> None:
    ranks, size, measured = p5(data / "nccl_p5_all_gather.csv")
    alpha, bandwidth, _ = fit(ranks, size, measured)
    predicted = model_us(alpha, bandwidth, ranks, size)
    print(f"p5 (H100, EFA) all-gather: alpha {alpha:.2f} us, bandwidth {bandwidth:.1f} GB/s")
    for n, s, t, p in zip(ranks, size, measured, predicted, strict=True):
        print(
            f"  {n:4.0f} GPUs {s / MIB:6.0f} MiB: measured {t:8.1f} us, model {p:8.1f} us, {100 * (p / t - 1):+6.1f} %"
        )
    print(f"  mean absolute error {100 * np.abs(predicted / measured - 1).mean():.1f} %")
    print("  predictions, us:  MiB " + " ".join(f"{32 << i:9d}" for i in range(7)))
    for n in (32, 128, 256):
        row = [model_us(alpha, bandwidth, np.array([float(n)]), np.array([float(32 << i) * MIB]))[0] for i in range(7)]
        print(f"    {n:4d} GPUs             " + " ".join(f"{t:9.1f}" for t in row))
    show_all_reduce(data)


def tree_us(p: Array, ranks: Array, size: Array) -> Array:
    """p = GB/s of many nodes, GB/s of two, half MiB, spread, power (src/cost/collective_model.h)."""
    nodes = np.maximum(ranks / 8, 1)
    rate = np.where(nodes == 2, p[1], p[0])
    slow = (p[2] * MIB * nodes ** p[3] / size) ** p[4]
    return 2 * size * (ranks - 1) / ranks / (rate * 1e3) * (1 + slow)


def fit_tree(ranks: Array, size: Array, measured: Array) -> Array:
    def loss(p: Array) -> float:
        off = np.abs(np.log(tree_us(p, ranks, size) / measured))
        return float(np.where(off < 0.1, off**2 / 0.2, off - 0.05).mean())  # single outliers of the tables pull little

    start, steps = [370.0, 480.0, 40.0, 0.5, 0.7], [40.0, 40.0, 20.0, 0.3, 0.2]
    return search(loss, start, steps, [50, 50, 0.1, 0, 0.1], [900, 900, 500, 1, 1])[0]


# 8 H200, NVLink SHARP, bus GB/s by MiB: stas00/ml-engineering 744d01e, network/README.md
NVLS = ((1, 39.93), (4, 107.16), (16, 219.89), (64, 346.51), (256, 436.15), (1024, 463.58), (4096, 473.10))


def show_all_reduce(data: Path) -> None:
    tables = [data / name for name in ("nccl_p5_all_reduce.csv", "nccl_p5_all_reduce_more.csv") if (data / name).exists()]
    ranks, size, measured = (np.concatenate(parts) for parts in zip(*(p5(table) for table in tables), strict=True))
    point = fit_tree(ranks, size, measured)
    error = np.abs(tree_us(point, ranks, size) / measured - 1)
    print(f"p5 all-reduce, {len(size)} rows: {point[0]:.0f} GB/s (two nodes {point[1]:.0f}), half at {point[2]:.1f} MiB x"
          f" nodes^{point[3]:.2f}, power {point[4]:.2f}; error {100 * error.mean():.1f} % mean, {100 * error.max():.1f} % worst")  # fmt: skip
    for left in sorted(set(ranks)):
        if left > 16:  # two nodes have a rate of their own
            rest = ranks != left
            off = np.abs(tree_us(fit_tree(ranks[rest], size[rest], measured[rest]), ranks, size) / measured - 1)[~rest]
            print(f"  without {left:.0f} GPUs, on them: {100 * off.mean():.1f} % mean, {100 * off.max():.1f} % worst")
    for n in (256, 512):
        row = [tree_us(point, np.array([float(n)]), np.array([float(32 << i) * MIB]))[0] for i in range(0, 9, 2)]
        print(f"  predicted, {n} GPUs, us at 32 MiB x 4^i: " + " ".join(f"{t:9.1f}" for t in row))
    mib, bus = np.array(NVLS).T
    size, ranks = mib * MIB, np.full(len(mib), 8.0)
    measured = 2 * size * 7 / 8 / (bus * 1e3)
    point = fit_tree(ranks, size, measured)
    error = np.abs(tree_us(point, ranks, size) / measured - 1)
    print(f"8 H200 all-reduce in the switches: {point[0]:.0f} GB/s, half at {point[2]:.1f} MiB, power {point[4]:.2f};"
          f" error {100 * error.mean():.1f} % mean, {100 * error.max():.1f} % worst")  # fmt: skip


def show_node(data: Path, gpu: str) -> None:
    """One node: sizes are what each GPU passes in, so an all-gather's whole buffer is that times the ranks."""
    table: dict[str, list[tuple[float, float, float]]] = {}
    with (data / f"comm_{gpu}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] != "ok" or row["op"].startswith("p2p") or "inter" in row["set"]:
                continue
            n, mib = int(row["gpus"]), float(row["size_mib"])
            whole = mib * MIB * (n if row["op"] == "all_gather" else 1)
            factor = 2.0 if row["op"] == "all_reduce" else 1.0
            table.setdefault(row["op"], []).append((n, whole, float(row["time_ms"]) * 1e3 / factor))
    for op, rows in table.items():
        for n in sorted({r[0] for r in rows}):
            ranks, size, measured = np.array([r for r in rows if r[0] == n]).T
            alpha, bandwidth, error = fit(ranks, size, measured)
            factor = 2.0 if op == "all_reduce" else 1.0
            whole = [_core.predict_collective(PRESETS[gpu], op, int(s), int(n))[0] / factor for s in size]
            off = np.array(whole) / measured - 1
            print(
                f"{gpu:5} {op:15} {n:.0f} GPUs, {len(size):4d} rows: alpha {alpha:6.1f} us, {bandwidth:7.2f} GB/s, error {100 * error:.1f} %;"
                f" the preset {100 * np.abs(off).mean():.1f} %, bias {100 * off.mean():+.1f} %"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder with nccl_p5_*.csv and comm_*.csv")
    options = parser.parse_args()
    if not (options.data / "nccl_p5_all_gather.csv").exists():
        print(f"{options.data}/nccl_p5_all_gather.csv is not there; give the folder with --data", file=sys.stderr)
        return 2
    show_p5(options.data)
    for gpu in ("l4", "a100", "a10g"):
        if (options.data / f"comm_{gpu}.csv").exists():
            show_node(options.data, gpu)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
