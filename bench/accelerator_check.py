"""Everything that needs an accelerator, by one command: the tests marked `accelerator`, then our step against eager and torch.compile.

python bench/accelerator_check.py
python bench/accelerator_check.py --device cuda --rounds 20 --json out.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from cases import causal_loss, llama, token_batch
from common import paired, report

import interlace

CASE = {"hidden": 2048, "layers": 8, "heads": 16, "inter": 5504, "vocab": 32000, "tokens": 2048}


def run_tests() -> int:
    tests = Path(__file__).resolve().parent.parent / "tests"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "accelerator", str(tests)], check=False
    ).returncode


def compare(device: str, rounds: int, json_path: str | None) -> None:
    batch = {name: tensor.to(device) for name, tensor in token_batch(CASE).items()}

    def plain(compiled: bool):
        model = llama(CASE, torch.bfloat16).to(device)
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            causal_loss(run, batch).backward()
            optimizer.step()
            torch.accelerator.synchronize()

        return step

    ours = llama(CASE, torch.bfloat16).to(device)
    trainer = interlace.compile(ours, torch.optim.AdamW(ours.parameters(), lr=1e-4), causal_loss, batch)

    def our_step() -> None:
        trainer.step(batch)
        torch.accelerator.synchronize()

    times = paired({"eager": plain(False), "torch.compile": plain(True), "interlace": our_step}, rounds=rounds)
    report(
        f"one {torch.accelerator.current_accelerator()}, bf16 Llama of 0.5 G parameters",
        times,
        baseline="eager",
        json_path=json_path,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        print(
            "no accelerator here: the tests marked `accelerator` skip; run this on a machine whose torch sees a device"
        )
        return run_tests() not in (0, 5)
    failed = run_tests()
    compare(args.device or str(torch.accelerator.current_accelerator()), args.rounds, args.json)
    return failed


if __name__ == "__main__":
    sys.exit(main())
