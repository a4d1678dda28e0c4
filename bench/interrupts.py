"""Ctrl-C at random moments of `interlace train`: whether each leaves what goes on with the same bits as a run that nobody stopped.

python bench/interrupts.py --times 20
python bench/interrupts.py --times 5 --seed 7 --json out.json

A small Llama trains on two ranks on a text of this machine (with --stream, tokenized while it trains). Each time a run of its own gets
SIGINT, as a terminal sends it (to the whole process group), after a moment drawn from the seed, between just after its start and its end. It
must end with 130 and a line that says what is saved, or with 0 if all steps were made; `--resume auto` then takes it to the end. All
losses, and the weights and the optimizer's states of the last checkpoint, must have the bits of the run that nobody stopped. A run that was
over before its moment proves nothing: it is left out, and another moment drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common import machine, write_json

STEPS = 24
RUN = ["--model", "llama-tiny", "--steps", str(STEPS), "--batch", "8", "--seq", "64", "--ranks", "2", "--save-every", "3", "--log-every", "1"]
SAVED = ("model.safetensors", "optimizer.safetensors")
STOPPED = r"^stopped by Ctrl-C after step (\d+), saved: interlace train --resume run\d+ goes on$"


@dataclass
class Row:
    """One run that was stopped: when, what it said, and whether what followed is the same."""

    moment_s: float
    at: str  # what the run was doing
    code: int
    stop_s: float  # from the signal to the end
    losses: bool
    files: bool
    wrong: list[str]


def begin(folder: Path, name: str, options: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "interlace.cli", "train", *RUN, *options, "--save", name, "--log", f"{name}.jsonl", "--resume", "auto"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip


def losses_of(folder: Path, name: str, wrong: list[str]) -> dict[int, float]:
    """Losses by step; of a step that was made twice, both must be the same."""
    found: dict[int, float] = {}
    file = folder / f"{name}.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        entry = json.loads(line)
        if "loss" in entry and found.setdefault(entry["step"], entry["loss"]) != entry["loss"]:
            wrong.append(f"step {entry['step']} was made twice, with other bits")
    return found


def interrupt(folder: Path, name: str, moment: float, options: list[str], expected: dict[int, float]) -> Row | None:
    """One row; None where the run was over before its moment."""
    wrong: list[str] = []
    process = begin(folder, name, options)
    time.sleep(moment)
    if process.poll() is not None:
        process.communicate()
        return None
    made, signalled = len(losses_of(folder, name, wrong)), time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    seconds = time.monotonic() - signalled
    stopped = re.search(STOPPED, err, flags=re.MULTILINE)
    steps = [int(step) for step in re.findall(r"^step (\d+) loss", err, flags=re.MULTILINE)]
    if stopped is not None:
        at = f"step {stopped.group(1)}"
        saved = json.loads((folder / name / "trainer.json").read_text())["step"]
        if saved != int(stopped.group(1)):
            wrong.append(f"it said step {stopped.group(1)}, and saved step {saved}")
    elif process.returncode == 0:
        at = "the end"
        if made < STEPS - 1:
            wrong.append(f"Ctrl-C was lost: it went on to the end, though only {made} steps were made at the signal")
    else:
        at = f"after step {steps[-1]}" if steps else "before a step"
        if "interrupted" not in err and process.returncode != -signal.SIGINT:
            wrong.append("no line says that it was interrupted")
    # The interpreter itself, before our first line: a traceback of its own, and nothing of ours.
    starting = process.returncode == -signal.SIGINT and "KeyboardInterrupt" in err and "interlace/" not in err
    if process.returncode not in (0, 130) and not starting:
        wrong.append(f"exit status {process.returncode}: {err.strip()[-300:]}")
    if ("Traceback" in err and not starting) or re.search(r"rank \d+ failed", err):
        wrong.append("a traceback, or a rank that failed: " + err.strip()[-300:])
    code = process.returncode
    process = begin(folder, name, options)
    _, err = process.communicate(timeout=300)
    if process.returncode:
        wrong.append(f"it did not go on: {err.strip()[-300:]}")
    same_losses = losses_of(folder, name, wrong) == expected
    same_files = all((folder / name / file).read_bytes() == (folder / "whole" / file).read_bytes() for file in SAVED)
    return Row(round(moment, 2), at, code, round(seconds, 2), same_losses, same_files, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="runs that are stopped")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--stream", action="store_true", help="tokenize the text while it is trained on")
    parser.add_argument("--json", help="write the rows here")
    args = parser.parse_args()
    options = ["--stream", "--shuffle-buffer", "32", "--eval-share", "0.05"] if args.stream else []
    generator = random.Random(args.seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this with & has it ignored, and so would the runs
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("first", "whole"):  # the first one fills the caches, as all others have them
            begun = time.monotonic()
            process = begin(folder, name, options)
            _, err = process.communicate(timeout=600)
            if process.returncode:
                sys.exit(f"the run that nobody stops failed:\n{err}")
            whole_s = time.monotonic() - begun
        expected = losses_of(folder, "whole", [])
        print(f"a run of {STEPS} steps takes {whole_s:.1f} s; {args.times} are stopped (seed {args.seed})", flush=True)
        rows: list[Row] = []
        tries = 0
        while len(rows) < args.times:
            tries += 1
            moment = generator.uniform(0.2, 0.98 * whole_s)
            row = interrupt(folder, f"run{tries}", moment, options, expected)
            if row is None:
                print(f"  left out: the run was over before {moment:.2f} s", flush=True)
                continue
            rows.append(row)
            verdict = "; ".join(row.wrong) or ("same bits" if row.losses and row.files else "OTHER BITS")
            said = f"SIGINT after {row.moment_s:5.2f} s, {row.at}, ended in {row.stop_s:.2f} s: {verdict}"
            print(f"{len(rows):>3} of {args.times}: {said}", flush=True)
    print(f"\n{'moment':>8}  {'stopped':<16}{'exit':>5}{'ended in':>10}  {'losses':<8}{'checkpoint'}")
    for row in sorted(rows, key=lambda row: row.moment_s):
        same = ["same" if same else "OTHER" for same in (row.losses, row.files)]
        print(f"{row.moment_s:>6.2f} s  {row.at:<16}{row.code:>5}{row.stop_s:>8.2f} s  {same[0]:<8}{same[1]}")
    good = sum(row.losses and row.files and not row.wrong for row in rows)
    trained = sum(row.at.startswith("step") for row in rows)
    slowest = max(row.stop_s for row in rows)
    print(f"\n{good} of {len(rows)} went on with the same bits; {trained} were stopped in training; the slowest took {slowest:.1f} s to end")
    if args.json:
        write_json(args.json, {"title": "Ctrl-C at random moments", "rows": [asdict(row) for row in rows], "machine": machine()})
    sys.exit(good != len(rows))


if __name__ == "__main__":
    main()
