"""How long until a rank whose host is cut off is named by the others, with the default settings of `interlace train`.

python bench/cut_cable.py
python bench/cut_cable.py --ranks 3 --rounds 3 --json out.json

Each rank is on a host of its own (a network namespace). While they train, the cable of the last one is cut: nothing says so, packets
just do not come any more. The clock runs from there to the end of each other rank, whose message must name the lost one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, write_json
from network import Network

SECRET = "a secret of the ranks of this run"
LIMIT_S = 60.0
NAMED_S = 15.0


def seconds_of(ranks: int, secret: bool, where: str) -> list[float]:
    with Network(ranks=ranks, mbit=1000) as net:
        environment = {"LOCAL_WORLD_SIZE": "1", "INTERLACE_CACHE": "off", "XDG_CACHE_HOME": where}
        environment |= {"INTERLACE_SECRET": SECRET} if secret else {}
        log = Path(where, "log")
        log.unlink(missing_ok=True)
        words = ["train", "--model", "llama-10m", "--batch", str(2 * ranks), "--seq", "128", "--steps", "100000", "--schedule", "none"]
        command = [sys.executable, "-m", "interlace.cli", *words, "--log", str(log)]
        jobs = [net.spawn(r, command, environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for r in range(ranks)]
        while not log.exists() or len(log.read_text().splitlines()) < 5:
            if any(job.poll() is not None for job in jobs):
                raise SystemExit(f"a rank ended: {[job.communicate()[1] for job in jobs if job.poll() is not None]}")
            time.sleep(0.1)
        lost = ranks - 1
        subprocess.run(["ip", "-n", net.namespace("hub"), "link", "set", f"port{lost}", "down"], check=True)
        cut, found = time.monotonic(), []
        for rank, job in enumerate(jobs[:lost]):
            _, said = job.communicate(timeout=LIMIT_S)
            found.append(time.monotonic() - cut)
            if f"rank {lost}" not in said:
                raise SystemExit(f"rank {rank} did not name rank {lost}: {said[-600:]}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as where:
        for secret in (True, False):
            found = [s for _ in range(args.rounds) for s in seconds_of(args.ranks, secret, where)]
            rows.append({"secret": secret, "seconds": found})
            print(f"{args.ranks} ranks {'with' if secret else 'without'} a secret, one cut off: named after at most {max(found):.1f} s")
    if args.json:
        write_json(args.json, {"title": "a cut cable", "ranks": args.ranks, "rows": rows, "machine": machine()})
    if max(s for row in rows for s in row["seconds"]) > NAMED_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
