"""Fits the size-dependent efficiency of GPU kernels on public timings and prints constants with their errors.

    python bench/fit_kernels.py --data ../shared/data

Matrix products (m, n, k), as in src/cost/kernel_model.cc:
    time = t0 + flops / (peak * efficiency) * waves^q * (1 + k0 / k)      or the memory time, where that is longer
where waves = ceil(tiles / processors) * processors / tiles is what the last, partly filled wave of output tiles costs (best
of four tile shapes). Memory-bound kernels: time = t0 + bytes / (bandwidth * efficiency), with a faster rate for what the
last-level cache holds. Flash attention: efficiency = e / (1 + s0 / sequence).

Sources: op_times_gpt_{l4,a100,a10g}.csv (Aceso profiles in github.com/Dazz993/Mist), op_times_l4.csv (Mist), and the H100 rows of
kernels.md, which stand below with their sources. Rows whose flag says that they failed are left out; so are the attention
projections (the source times layout changes with them) and times that hold a tensor-parallel all-reduce. t0 of the Aceso
tables is a host clock with synchronisation: fitted, printed, and not used for a kernel on a device.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# name -> processors, peak TFLOP/s (fp16/bf16 dense), memory TB/s: vendor data sheets
DEVICES = {"l4": (58, 121.0, 0.300), "a10g": (80, 70.0, 0.600), "a100": (108, 312.0, 1.555), "h100": (132, 989.5, 3.35)}
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8))  # and their share of the peak rate
MODELS = {"1_3B": (2048, 32), "2_6B": (2560, 32), "6_7B": (4096, 32), "13B": (5120, 40), "20B": (6144, 64),
          "22B": (6144, 64), "40B": (8192, 64)}  # hidden size, heads  # fmt: skip
# TFLOP/s, bf16. Square: zzc0721/torch-performance-test-data#79. N=6144 K=4096: vLLM#17126.
H100_GEMM = [(1024, 1024, 1024, 176.6), (2048, 2048, 2048, 676.6), (4096, 4096, 4096, 788.7), (8192, 8192, 8192, 797.5),
             (10240, 10240, 10240, 719.7), (16, 6144, 4096, 39.1), (64, 6144, 4096, 160.6), (128, 6144, 4096, 307.9),
             (256, 6144, 4096, 544.3)]  # fmt: skip
# FlashAttention-2, H100, causal, head 128, TFLOP/s by sequence length: Dao-AILab/flash-attention 0251105.
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
H100_FA2_FORWARD = (191, 260, 298, 319, 333, 335)
H100_FA2_BOTH = (163, 221, 265, 294, 308, 328)  # forward and backward together, 3.5 times the forward's flops


def search(loss: Callable[[Array], float], start: list[float], steps: list[float], low: list[float], high: list[float]):
    """Coordinate search with shrinking steps; the losses here have kinks and few parameters."""
    point, step = np.array(start), np.array(steps)
    best = loss(point)
    for sweep in range(80):
        moved = False
        for k in range(len(point)):
            for sign in (1, -1):
                trial = point.copy()
                trial[k] = min(max(trial[k] + sign * step[k], low[k]), high[k])
                if (value := loss(trial)) < best:
                    point, best, moved = trial, value, True
        if not moved:
            step /= 1.7
            if sweep > 20 and (step < 1e-4 * np.maximum(np.abs(point), 1e-3)).all():
                break
    return point, best


def gemm_us(p: Array, shapes: Array, device: str) -> Array:
    """p = efficiency, q, k0, t0 (us)."""
    m, n, k = shapes.T
    processors, peak, memory = DEVICES[device]
    slow = np.full(len(m), np.inf)
    for rows, columns, share in TILES:
        waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / processors) * processors
        slow = np.minimum(slow, (waves * rows * columns / (m * n)) ** p[1] / share)
    compute = 2 * m * n * k / (peak * 1e6 * p[0]) * slow * (1 + p[2] / k)
    return p[3] + np.maximum(compute, 2 * (m * n + n * k + m * k) / (memory * 1e6 * 0.85))


def read_gpt(data: Path, gpu: str) -> tuple[Array, Array, NDArray[np.bool_], dict[str, Array]]:
    """Pure matrix products as (m, n, k), us and whether it is a forward one; (bytes, us) of memory-bound ops by name."""
    sequence = 4096 if gpu == "a100" else 2048
    shapes: list[tuple[int, int, int]] = []
    times: list[float] = []
    forwards: list[bool] = []
    memory: dict[str, list[tuple[float, float]]] = {}
    with (data / f"op_times_gpt_{gpu}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["flag"]:
                continue
            h, heads = MODELS[row["model"].removeprefix("gpt_")]
            tp, m, op = int(row["tp"]), int(row["microbatch"]) * sequence, row["op"]
            forward, backward = float(row["fwd_us"]), float(row["bwd_us"])
            # Column parallel: no all-reduce forward. Row parallel: none backward, and that is the input gradient alone.
            if op == "enc-MLP-GEMM-1":
                shapes.append((m, 4 * h // tp, h))
                times.append(forward)
                forwards.append(True)
            elif op in ("enc-attention-dense", "enc-MLP-GEMM-2"):
                inner = (h if op == "enc-attention-dense" else 4 * h) // tp
                if gpu != "a10g":  # whose times hold the gradient of the weight too
                    shapes.append((m, inner, h))
                    times.append(backward)
                    forwards.append(False)
                if tp == 1:
                    shapes.append((m, h, inner))
                    times.append(forward)
                    forwards.append(True)
            size = {"enc-MLP-gelu": 2 * 2 * m * 4 * h / tp, "enc-attention-dropout": 5 * m * sequence * heads / tp,
                    "enc-attention-softmax": 4 * m * sequence * heads / tp}.get(op)  # fmt: skip
            if size is not None and not (op == "enc-attention-softmax" and "13B" in row["model"]):
                memory.setdefault(op, []).append((size, forward))
    return np.array(shapes, float), np.array(times), np.array(forwards), {k: np.array(v) for k, v in memory.items()}


def fit_gemm(device: str, what: str, shapes: Array, times: Array, t0: float | None) -> Array:
    low, high = [0.2, 0.0, 0.0, t0 or 0.0], [1.0, 1.0, 600.0, t0 or 60.0]
    start = [0.85, 0.6, 100.0, t0 or 5.0]

    def loss(p: Array) -> float:
        return float(np.abs(np.log(gemm_us(p, shapes, device) / times)).mean())

    point, _ = search(loss, start, [0.05, 0.2, 60.0, 4.0], low, high)
    error = gemm_us(point, shapes, device) / times - 1
    print(
        f"{device:5} matrix products, {what}, {len(times)} rows: efficiency {point[0]:.3f}, q {point[1]:.2f}, k0 {point[2]:.0f},"
        f" t0 {point[3]:.1f} us; error mean {100 * np.abs(error).mean():.1f} %, median {100 * np.median(np.abs(error)):.1f} %,"
        f" bias {100 * error.mean():+.1f} %"
    )
    return point


def fit_linear_l4(data: Path) -> None:
    """Linear layers on L4, forward and both gradients: op_times_l4.csv, whose `current` rows ran at 1050 MHz."""
    for db in ("current", "backup"):
        with (data / "op_times_l4.csv").open(newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["db"] == db and r["gemm_m"] and float(r["fwd_median_ms"]) > 0.1]
        m, n, k, forward, backward = (np.array([float(r[key]) for r in rows])
                                      for key in ("gemm_m", "gemm_n", "gemm_k", "fwd_median_ms", "bwd_median_ms"))  # fmt: skip

        def off(p: Array, m: Array = m, n: Array = n, k: Array = k, forward: Array = forward, backward: Array = backward):
            p = np.append(p, 2.2)
            both = [gemm_us(p, np.stack(shape, 1), "l4") for shape in ((m, n, k), (m, k, n), (n, k, m))]
            return both[0] / (forward * 1e3), (both[1] + both[2]) / (backward * 1e3)

        point, _ = search(lambda p, off=off: float(sum(np.abs(np.log(x)).mean() for x in off(p))), [0.5, 0.3, 50.0],
                          [0.1, 0.2, 40.0], [0.2, 0.0, 0.0], [1.0, 1.0, 600.0])  # fmt: skip
        error = [100 * np.abs(x - 1).mean() for x in off(point)]
        print(f"l4    linear layers, {db}, {len(rows)} rows: efficiency {point[0]:.3f}, q {point[1]:.2f}, k0 {point[2]:.0f};"
              f" error {error[0]:.1f} % forward, {error[1]:.1f} % backward")  # fmt: skip


def fit_memory(device: str, name: str, table: Array) -> None:
    """Bandwidth share of large sizes, and what the cache adds for small ones is left to the model's own constant."""
    large = table[table[:, 0] > 2.5e8]
    table = large if len(large) > 8 else table
    peak = DEVICES[device][2]
    point, error = search(
        lambda p: float(np.abs(np.log((p[1] + table[:, 0] / (peak * 1e6 * p[0])) / table[:, 1])).mean()),
        [0.8, 3.0], [0.05, 2.0], [0.05, 0.0], [1.5, 40.0],
    )  # fmt: skip
    print(f"{device:5} {name}, {len(table)} rows over {table[:, 0].min() / 1e6:.0f} MB: {point[0]:.3f} of the memory"
          f" bandwidth; error {100 * error:.1f} %")  # fmt: skip


def fit_attention(device: str, sequences: Array, tflops: Array, what: str) -> None:
    peak = DEVICES[device][1]
    point, error = search(
        lambda p: float(np.abs(np.log(peak * p[0] / (1 + p[1] / sequences) / tflops)).mean()),
        [0.4, 300.0], [0.05, 100.0], [0.05, 0.0], [1.0, 4000.0],
    )  # fmt: skip
    print(f"{device:5} flash attention {what}: efficiency {point[0]:.3f}, s0 {point[1]:.0f}; error {100 * error:.1f} %")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder with op_times_*.csv")
    options = parser.parse_args()
    h100 = np.array(H100_GEMM)
    times = 2 * h100[:, 0] * h100[:, 1] * h100[:, 2] / (h100[:, 3] * 1e6)
    point = fit_gemm("h100", "public rates", h100[:, :3], times, None)
    for row, measured, predicted in zip(h100, times, gemm_us(point, h100[:, :3], "h100"), strict=True):
        print(f"        {row[0]:6.0f} x {row[1]:5.0f} x {row[2]:5.0f}: {measured:8.1f} us, predicted {predicted:8.1f}")
    sequences = np.array(SEQUENCES, float)
    forward, both = np.array(H100_FA2_FORWARD, float), np.array(H100_FA2_BOTH, float)
    fit_attention("h100", sequences, forward, "forward")
    fit_attention("h100", sequences, 2.5 / (3.5 / both - 1 / forward), "backward (from forward and both)")
    for gpu in ("a100", "l4", "a10g"):
        if not (options.data / f"op_times_gpt_{gpu}.csv").exists():
            print(f"{options.data}/op_times_gpt_{gpu}.csv is not there; give the folder with --data", file=sys.stderr)
            return 2
        shapes, measured, is_forward, memory = read_gpt(options.data, gpu)
        fit_gemm(gpu, "all rows", shapes, measured, None)
        # Forward products read a transposed weight, input gradients a plain one; the presets use these two, with the t0
        # of a kernel alone.
        for what, chosen in (
            ("second operand transposed (forward)", is_forward),
            ("plain (input gradient)", ~is_forward),
        ):
            if chosen.any():
                fit_gemm(gpu, what, shapes[chosen], measured[chosen], float(point[3]))
        for name, table in memory.items():
            fit_memory(gpu, name, table)
    fit_linear_l4(options.data)
    with (options.data / "op_times_l4.csv").open(newline="") as file:
        flash = [r for r in csv.DictReader(file) if r["op"].endswith("flash_attn_qkvpacked_func")]
    for db in ("current", "backup"):
        for what, column, factor in (("forward", "fwd_median_ms", 1.0), ("backward", "bwd_median_ms", 2.5)):
            rates = []
            for row in flash:
                b, s, _, a, d = (int(x) for x in row["tensor_shapes"].removeprefix("qkv=").split("x"))
                if row["db"] == db and b * a >= 64 and d == 128:
                    rates.append(factor * 2 * b * a * s * s * d / (float(row[column]) * 1e9))
            print(f"l4    flash attention {what}, sequence 2048, head 128, {db}: median {np.median(rates):.1f} TFLOP/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
