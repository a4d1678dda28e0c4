"""The ranks of `interlace profile`: started by the command, or by a launcher.

python -m interlace.cli.profile_rank JOB     (JOB is a folder with job.json, program.il and inputs.safetensors)
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from interlace.cli.app import explain
from interlace.cli.console import Work
from interlace.cost.machine import Machine
from interlace.cost.rank import TIMEOUT_S, Keeper, measure
from interlace.cost.store import Store
from interlace.dist.launch import follow_parent, leave_failure, run_ranks
from interlace.dist.peers import Peers
from interlace.errors import InterlaceError

Task: TypeAlias = tuple[dict[str, Any], str, bytes]  # what is to be measured, its program, its inputs


def measures(job: dict[str, Any]) -> bool:
    return any(job[part] for part in ("ops", "collectives", "copies", "slowdown", "pairs"))


def run_as_rank(prepare: Callable[[], Task], machine: Machine) -> Task | None:
    """The same where a launcher has started the ranks: rank 0 prepares the task and all do it. None on the others."""
    with _peers(machine.threads) as peers:
        job, text, inputs = prepare() if peers.rank == 0 else ({}, "", b"")
        job = json.loads(peers.broadcast("job", json.dumps(job).encode()))
        text = peers.broadcast("program", text.encode()).decode()
        inputs = peers.broadcast("inputs", inputs)
        if measures(job):
            take_part(job, text, inputs, peers)
        return (job, text, inputs) if peers.rank == 0 else None


@contextlib.contextmanager
def _peers(threads: int) -> Iterator[Peers]:
    torch.set_num_threads(threads)
    peers = Peers(torch.device("cpu"), TIMEOUT_S)
    try:
        with peers.guard():
            yield peers
    finally:
        peers.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_job(job: dict[str, Any], text: str, inputs: bytes, machine: Machine) -> None:
    with tempfile.TemporaryDirectory(prefix="interlace-profile-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "program.il").write_text(text)
        (folder / "inputs.safetensors").write_bytes(inputs)
        command = [sys.executable, "-m", "interlace.cli.profile_rank", str(folder)]
        failure = run_ranks(command, machine.ranks, machine.threads)
    if failure is not None:
        raise InterlaceError(failure.describe())


def take_part(job: dict[str, Any], text: str, inputs: bytes, peers: Peers) -> None:
    """This rank's part of the job; rank 0 keeps what is measured and shows how far it is."""
    if peers.rank != 0:
        measure(job, text, inputs, peers, Keeper(None, ""))
        return
    with Store(job["store"]) as store, Work(job["quiet"]) as work:
        measure(job, text, inputs, peers, Keeper(store, Machine(**job["machine"]).fingerprint), work.update)


def run(folder: str | Path) -> None:
    folder = Path(folder)
    job = json.loads((folder / "job.json").read_text())
    text = (folder / "program.il").read_text()
    inputs = (folder / "inputs.safetensors").read_bytes()
    with _peers(job["machine"]["threads"]) as peers:
        take_part(job, text, inputs, peers)


def main() -> int:
    follow_parent()
    try:
        run(sys.argv[1])
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message, code = explain(error)
        leave_failure(message, code)
        print(f"error: {message}", file=sys.stderr, flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
