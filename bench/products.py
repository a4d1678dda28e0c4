"""Kernels of ours on CPUs beside torch's, one thread: products by shape (forward, gradients of input and of weight, batches) and attention.

python bench/products.py
python bench/products.py --rounds 60 --threads 2
python bench/products.py --only attention --dtype bfloat16
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from common import paired, quartiles, ratios

from interlace import _runtime  # noqa: F401  (it has the operators)

PRODUCTS = ((512, 512, 512), (512, 512, 1376), (512, 1376, 512), (2048, 512, 2048), (1024, 768, 3072), (128, 256, 688))
FEW_ROWS = ((8, 256, 1024), (16, 256, 1024), (32, 512, 2048), (48, 512, 512))
BATCHES = ((8, 512, 64, 512), (8, 512, 512, 64), (64, 128, 64, 128))
ATTENTION = ((1, 8, 512, 64), (4, 8, 128, 64), (1, 8, 2048, 64), (2, 8, 512, 128))


def compared(what: str, flops: float, theirs: Callable[[], object], ours: Callable[[], object], rounds: int) -> None:
    times = paired({"torch": theirs, "ours": ours}, rounds=rounds)
    low, middle, high = quartiles(ratios(times, "ours", "torch"))
    rate = [flops / quartiles(times[name])[1] * 1e-9 for name in ("torch", "ours")]
    print(f"{what:44s} torch {rate[0]:6.1f}  ours {rate[1]:6.1f} GFLOP/s   time {middle:.3f} [{low:.3f}, {high:.3f}] x torch's", flush=True)


def products(rounds: int) -> None:
    own, torchs = torch.ops.interlace, torch
    for m, k, n in (*PRODUCTS, *FEW_ROWS):
        x, w, g, flops = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n), 2.0 * m * k * n
        for name, a, b in (("forward", x, w.T), ("gradient of input", g, w), ("gradient of weight", g.T, x)):
            out = torch.empty(a.shape[0], b.shape[1])
            compared(
                f"{m} x {k} x {n}, {name}", flops, lambda a=a, b=b, out=out: torchs.mm(a, b, out=out),
                lambda a=a, b=b, out=out: own.mm.out(a, b, out=out), rounds,
            )  # fmt: skip
    for batch, m, k, n in BATCHES:
        a, b, out = torch.randn(batch, m, k), torch.randn(batch, n, k).transpose(1, 2), torch.empty(batch, m, n)
        compared(
            f"{batch} of {m} x {k} x {n}", 2.0 * batch * m * k * n, lambda a=a, b=b, out=out: torchs.bmm(a, b, out=out),
            lambda a=a, b=b, out=out: own.bmm.out(a, b, out=out), rounds,
        )  # fmt: skip


def packed(rounds: int) -> None:
    """Products in bfloat16 with weights that oneDNN has packed, before the call or in it, beside the plain ones that a step makes."""
    mkldnn = torch.ops.mkldnn

    for m, k, n in PRODUCTS:
        x, w = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16)
        before, flops = mkldnn._reorder_linear_weight(w, m), 2.0 * m * k * n

        def call(weight: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
            return mkldnn._linear_pointwise(x, weight, None, "none", [], "")

        compared(f"{m} x {k} x {n}, bfloat16, packed before", flops, lambda x=x, w=w: torch.mm(x, w.T), lambda p=before: call(p), rounds)
        compared("    packed in the call", flops, lambda x=x, w=w: torch.mm(x, w.T),
                 lambda w=w, m=m: call(mkldnn._reorder_linear_weight(w, m)), rounds)  # fmt: skip


def attention(rounds: int, dtype: torch.dtype) -> None:
    aten, own = torch.ops.aten, torch.ops.interlace
    forwards = aten._scaled_dot_product_flash_attention_for_cpu, own.attention_for_cpu
    backwards = aten._scaled_dot_product_flash_attention_for_cpu_backward, own.attention_for_cpu_backward
    for batch, heads, rows, width in ATTENTION:
        q, k, v, g = (torch.randn(batch, rows, heads, width, dtype=dtype).transpose(1, 2) for _ in range(4))
        later = torch.ones(rows, rows).triu(1).bool()
        masks = {
            "causal": None, "whole": None,
            "a causal mask": torch.zeros(batch, 1, rows, rows, dtype=dtype).masked_fill(later, -math.inf),
            "a window of a quarter": torch.zeros(batch, 1, rows, rows, dtype=dtype).masked_fill(later | later.T.tril(-rows // 4), -math.inf),
        }  # fmt: skip
        for name, mask in masks.items():
            causal = name == "causal"
            calls = [lambda f=f, m=mask, c=causal: f(q, k, v, 0.0, c, attn_mask=m) for f in forwards]  # noqa: B023
            needed = 2.0 * batch * heads * rows * rows * width * (2 if name == "whole" else 1)  # or below the diagonal
            compared(f"attention {batch}, {heads}, {rows}, {width}, {name}", needed, *calls, rounds)
            out, sums = calls[0]()
            back = [lambda f=f, m=mask, c=causal: f(g, q, k, v, out, sums, 0.0, c, attn_mask=m) for f in backwards]  # noqa: B023
            compared("    backward", 2.5 * needed, *back, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("products", "packed", "attention"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of attention")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only in (None, "products"):
        products(args.rounds)
    if args.only in (None, "packed"):
        packed(args.rounds)
    if args.only in (None, "attention"):
        attention(args.rounds, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
