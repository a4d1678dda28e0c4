"""Everything that needs an accelerator, by one command: tests with what they compile on the device, then our step against eager and
torch.compile, and its memory as the device's allocator counts it. Writes one page to send back.

python bench/accelerator_check.py
python bench/accelerator_check.py --device cuda --rounds 20 --json out.json --page page.md
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from cases import causal_loss, llama, token_batch
from common import paired, report

import interlace
from interlace.cost.machine import accelerator_name

CASE = {"hidden": 2048, "layers": 8, "heads": 16, "inter": 5504, "vocab": 32000, "tokens": 2048}


TESTS = Path(__file__).resolve().parent.parent / "tests"
ON_THE_DEVICE = ("test_trainer_bits", "test_offload", "test_swap", "test_checkpoint")  # they compile on CPUs otherwise


def run_tests(device: str) -> tuple[int, list[str]]:
    """The tests marked `accelerator`, then files of others on the device: whether any failed, and pytest's last words of each."""
    failed, said = 0, []
    files = [str(TESTS / "python" / f"{name}.py") for name in ON_THE_DEVICE]
    environment = {**os.environ, "INTERLACE_DEVICE": device}
    for what, arguments in (("accelerator", ["-m", "accelerator", str(TESTS)]), ("on the device", files if device != "cpu" else [])):
        if not arguments:
            continue
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = result.stdout.splitlines()
        print("\n".join(lines[-40:]), flush=True)
        failed |= result.returncode not in (0, 5)
        said.append(f"{what}: {lines[-1] if lines else result.stderr[-200:]}")
        said += [f"- {line}" for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed, said


def compare(device: str, rounds: int, json_path: str | None) -> list[str]:
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
    record = report(
        f"one {torch.accelerator.current_accelerator()}, bf16 Llama of 0.5 G parameters",
        times,
        baseline="eager",
        json_path=json_path,
    )
    sides: dict[str, dict[str, float]] = record["sides"]  # type: ignore[assignment]
    lines = [f"{name}: {row['median_ms']:.3f} ms, {row['ratio']:.3f} x eager" for name, row in sides.items()]
    stats = trainer.stats()
    return [*lines, f"memory of all three: the allocator's peak {stats['peak_bytes']:,} bytes, now {stats['live_bytes']:,}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--page", default="out/accelerator.md", help="write the page here")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        print(
            "no accelerator here: the tests marked `accelerator` skip; run this on a machine whose torch sees a device"
        )
        return run_tests("cpu")[0]
    device = args.device or str(torch.accelerator.current_accelerator())
    failed, tests = run_tests(torch.device(device).type)
    figures = compare(device, args.rounds, args.json)
    page = Path(args.page)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([f"# {accelerator_name(torch.device(device))}, torch {torch.__version__}", "", *tests, "", *figures, ""]))
    print(f"written to {page}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
