"""One rank, one thread: our step against PyTorch eager with fused AdamW, paired and alternating.

python bench/one_rank.py                    # both cases
python bench/one_rank.py --case overhead --rounds 40 --json out.json
"""

from __future__ import annotations

import argparse

import torch
from cases import MATMUL_BOUND, OVERHEAD_BOUND, causal_loss, llama, token_batch
from common import paired, report

import interlace

CASES = {"matmul": (MATMUL_BOUND, 12), "overhead": (OVERHEAD_BOUND, 120)}


def steps_for(case: dict[str, int]):
    """The two steps to be compared: plain PyTorch and ours, on equal models and the same batch."""
    batch = token_batch(case)
    eager = llama(case)
    eager_optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-4, fused=True)
    ours = llama(case)
    trainer = interlace.compile(ours, torch.optim.AdamW(ours.parameters(), lr=1e-4, fused=True), causal_loss, batch)

    def eager_step() -> None:
        eager_optimizer.zero_grad(set_to_none=True)
        causal_loss(eager, batch).backward()
        eager_optimizer.step()

    def our_step() -> None:
        trainer.step(batch)

    return eager_step, our_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, help="paired rounds (default: 12 matmul, 120 overhead)")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in CASES if args.case == "all" else [args.case]:
        case, rounds = CASES[name]
        eager_step, our_step = steps_for(case)
        times = paired({"eager": eager_step, "interlace": our_step}, rounds=args.rounds or rounds)
        report(f"one rank, {name}-bound", times, baseline="eager", json_path=args.json)


if __name__ == "__main__":
    main()
