"""Everything that needs an accelerator, by one command: the tests on the device, then our step, without compiled regions and with them,
against eager, torch.compile, DDP and FSDP2, its prediction against what was measured, and its memory. Writes one page to send back.

python bench/accelerator_check.py                                       # all devices of this machine
python bench/accelerator_check.py --ranks 1 --rounds 20 --json out.json --page page.md
python bench/accelerator_check.py --skip-tests --size tiny              # the figures alone, of a model for trying it out

Every way to train has processes of its own, one after the other, so that the allocator's peak is its own; the first losses of all are
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerator_worker import METHODS, OURS, SIZES
from common import write_json
from network import free_port

from interlace.cost.machine import accelerator_name

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
# They compile on CPUs otherwise.
ON_THE_DEVICE = ("test_trainer_bits", "test_parity", "test_hybrid", "test_offload", "test_swap", "test_checkpoint")
LIMIT_S = 1200.0  # of one way to train
LESS = 0.7  # of the memory that it takes, for the row with less
CLOSE = 0.02  # losses of bfloat16, relative


def run_tests(device: str) -> tuple[int, list[str]]:
    """The tests marked `accelerator`, then files of others on the device: whether any failed, and pytest's last words of each."""
    failed, said = 0, []
    files = [str(TESTS / "python" / f"{name}.py") for name in ON_THE_DEVICE]
    environment = {**os.environ, "INTERLACE_DEVICE": device}
    for what, arguments in (("accelerator", ["-m", "accelerator", str(TESTS)]), ("on the device", files if device != "cpu" else [])):
        if not arguments:
            continue
        print(f"tests, {what} ...", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = result.stdout.splitlines()
        print("\n".join(lines[-40:]), flush=True)
        failed |= result.returncode not in (0, 5)
        said.append(f"- tests, {what}: {lines[-1] if lines else result.stderr[-200:]}")
        said += [f"  - {line}" for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed, said


def run(method: str, device: str, ranks: int, size: str, rounds: int, limit: int | None) -> dict[str, Any]:
    """What rank 0 measured, or {"method", "error"}. limit: bytes of a rank."""
    command = [sys.executable, str(HERE / "accelerator_worker.py"), "--method", method, "--device", device]
    command += ["--size", size, "--rounds", str(rounds), *(["--memory-limit", str(limit)] if limit else [])]
    port = str(free_port())
    workers = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **{k: str(v) for k, v in place.items()}}
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    except subprocess.TimeoutExpired:
        return {"method": method, "error": f"it took longer than {LIMIT_S:g} s"}
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, said, strict=True):
        if worker.returncode != 0:
            lines = errors.strip().splitlines()
            return {"method": method, "error": lines[-1] if lines else f"exit status {worker.returncode}"}
    return dict(json.loads(said[0][0].splitlines()[-1]))


def table(found: list[dict[str, Any]], baseline: str) -> list[str]:
    """One row a way to train, against the baseline."""
    base = next((facts for facts in found if facts["method"] == baseline and "error" not in facts), None)
    rows = ["| way | step, ms | quartiles | x " + baseline + " | allocator's peak, GiB | first losses |", "|---|---|---|---|---|---|"]
    for facts in found:
        if "error" in facts:
            rows.append(f"| {facts['method']} | not run: {facts['error'][:160]} | | | | |")
            continue
        ratio = f"{facts['median_ms'] / base['median_ms']:.3f}" if base else ""
        peak = f"{facts['peak_bytes'] / 2**30:.2f}" if facts["peak_bytes"] is not None else "not counted"
        near = not base or all(abs(a - b) <= CLOSE * abs(b) for a, b in zip(facts["losses"], base["losses"], strict=True))
        losses = " ".join(f"{loss:.4f}" for loss in facts["losses"]) + ("" if near else f", which differ from {baseline}'s")
        quarters = f"{facts['q1_ms']:.2f} to {facts['q3_ms']:.2f}"
        rows.append(f"| {facts['method']} | {facts['median_ms']:.2f} | {quarters} | {ratio} | {peak} | {losses} |")
    return rows


def ours_in_words(facts: dict[str, Any]) -> list[str]:
    """What our side predicted, planned and measured."""
    if "error" in facts:
        return []
    lines = [f"- {facts['method']} compiled in {facts['compile_s']:.1f} s and was settled at step {facts['steps_to_settle']}"]
    lines.append(f"- its own count of the peak: {facts['trainer_peak_bytes']:,} bytes")
    if facts["regions"]:
        lines.append("- {compiled} of {regions} regions are kernels, which run {calls} times for {kernels} ops".format(**facts["regions"]))
    graphs = facts["graphs"]
    if graphs["replays"] or graphs["why_not"]:
        lines.append(f"- device graphs: {graphs['graphs']}, run {graphs['replays']} times {graphs['why_not']}".rstrip())
    forecast, arena = facts["forecast"], facts["arena"]
    predicted, measured = forecast["predicted_ms"], forecast["measured_ms"]
    error = 100 * (predicted / measured - 1)
    lines.append(f"- on a profile taken there: predicted {predicted:.2f} ms, measured {measured:.2f} ({error:+.1f} %)")
    lines.append(
        f"- memory predicted {forecast['predicted_bytes']:,} bytes; the step planned {arena['planned_bytes']:,}, has its top at "
        f"{arena['top_bytes']:,} and {arena['outside_peak_bytes']:,} outside {arena['why_not']}".rstrip()
    )
    for plan in facts["plans"]:
        text = f"- plan at step {plan['step']} ({plan['reason']})"
        if plan["predicted_us"] and plan["measured_us"]:
            error = plan["predicted_us"] / plan["measured_us"] - 1
            text += f": predicted {plan['predicted_us'] / 1e3:.2f} ms, measured {plan['measured_us'] / 1e3:.2f} ({100 * error:+.1f} %)"
        if plan["predicted_bytes"] and plan["measured_bytes"]:
            text += f"; peak predicted {plan['predicted_bytes']:,}, measured {plan['measured_bytes']:,} bytes"
        lines.append(text)
    return lines


def run_cubins() -> tuple[int, str]:
    """Regions of Llama-3-8B compiled for this device, launched and compared with their bodies: whether any is wrong, and a row."""
    command = [sys.executable, str(HERE / "cubins.py"), "--run", "--rounds", "1", "--regions", "16"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    lines = result.stdout.splitlines() or result.stderr.splitlines()[-1:] or ["nothing was said"]
    verdict = "each as near to float64 as its body" if result.returncode == 0 else "WRONG or not run"
    return int(result.returncode != 0), "\n".join([f"- compiled regions against their bodies: {verdict}; {lines[0]}", *lines[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--ranks", type=int, help="default: one, and if there are more devices also one on each")
    parser.add_argument("--rounds", type=int, default=20, help="steps that are timed")
    parser.add_argument("--size", choices=SIZES, default="0.5g", help="parameters of the Llama (default 0.5g)")
    parser.add_argument("--skip-tests", action="store_true", help="figures alone")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--page", default="out/accelerator.md", help="write the page here")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        print("no accelerator here: the tests marked `accelerator` skip; run this on a machine whose torch sees a device")
        return run_tests("cpu")[0]
    device = torch.device(args.device or str(torch.accelerator.current_accelerator())).type
    failed, lines = (0, []) if args.skip_tests else run_tests(device)
    if device == "cuda":
        print("compiled regions ...", flush=True)
        wrong, row = run_cubins()
        failed |= wrong
        lines.append(row)
    count = torch.accelerator.device_count()
    record: dict[str, Any] = {"device": accelerator_name(torch.device(device)), "torch": torch.__version__, "size": args.size}
    for ranks in [args.ranks] if args.ranks else sorted({1, count}):
        found: list[dict[str, Any]] = []
        for method in METHODS:
            if method in (("ddp", "fsdp2") if ranks == 1 else ("eager", "torch.compile")):
                continue
            print(f"{method} on {ranks} rank{'s' if ranks > 1 else ''} ...", flush=True)
            peak = next((facts.get("trainer_peak_bytes", 0) for facts in found if facts["method"] == "interlace"), 0)
            limit = int(LESS * peak) if method == "interlace, less memory" else None
            found.append(run(method, device, ranks, args.size, args.rounds, limit))
            failed |= method in OURS and "error" in found[-1]
        lines += ["", f"## {ranks} rank{'s' if ranks > 1 else ''}, bfloat16 Llama of size {args.size}", ""]
        lines += [*table(found, "eager" if ranks == 1 else "fsdp2"), ""]
        lines += [line for facts in found if facts["method"] in OURS for line in ours_in_words(facts)]
        record[f"ranks_{ranks}"] = found
    page = Path(args.page)
    page.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {record['device']}, torch {record['torch']}", "", *lines, ""])
    page.write_text(text)
    if args.json:
        write_json(args.json, record)
    print(text + f"\nwritten to {page}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
