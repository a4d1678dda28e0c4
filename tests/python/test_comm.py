"""Collectives on real ranks: sockets over the loopback interface, one process a rank (comm_worker.py)."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import comm_worker
import pytest
import ranks

from interlace import _runtime


def run_ranks(
    scenario: str, size: int, folder: Path, silent: tuple[int, ...] = (), timeout_s: float = 120
) -> dict[int, dict]:
    """Runs a scenario; returns what every rank but the silent ones reported."""
    server = ranks.context()
    processes = [server.Process(target=comm_worker.serve, args=(scenario, r, size, folder)) for r in range(size)]
    try:
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank not in silent:
                process.join(max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:  # the stopped ones too
            process.kill()
            process.join()
    results = {}
    for rank in range(size):
        if rank in silent:
            continue
        report = folder / f"{rank}.json"
        assert report.exists(), f"rank {rank} did not finish:\n{(folder / f'{rank}.log').read_text()}"
        results[rank] = json.loads(report.read_text())
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits_aliases_order_and_misuse(size: int, tmp_path: Path) -> None:
    results = run_ranks("everything", size, tmp_path)
    assert [result["ok"] for result in results.values()] == [True] * size


@pytest.mark.parametrize(
    ("scenario", "size", "culprit"), [("kill", 2, 1), ("kill", 4, 3), ("kill0", 3, 0), ("exit", 3, 1)]
)
def test_a_lost_rank_is_named(scenario: str, size: int, culprit: int, tmp_path: Path) -> None:
    for rank, result in run_ranks(scenario, size, tmp_path, silent=(culprit,)).items():
        text = result["error"]
        assert f"on axis dp: rank {culprit} was lost after" in text, (rank, text)
        assert text.startswith(("gather u", "reduce u")), (rank, text)
        assert "restart all ranks from the last checkpoint" in text
        assert result["same_again"], (rank, text)


@pytest.mark.parametrize("size", [2, 4])
def test_a_stopped_rank_times_out_and_is_named(size: int, tmp_path: Path) -> None:
    for rank, result in run_ranks("stop", size, tmp_path, silent=(1,)).items():
        text = result["error"]
        assert re.search(r"on axis dp: rank 1 did not answer for \d+\.\d+ s", text), (rank, text)
        assert "timed out" in text and "was lost" not in text, (rank, text)
        assert result["same_again"], (rank, text)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_do_different_things_are_told(size: int, tmp_path: Path) -> None:
    for rank, result in run_ranks("mismatch", size, tmp_path).items():
        text = result["error"]
        mine, theirs = ("gather u1", "reduce u0") if rank < size - 1 else ("reduce u0", "gather u1")
        assert text.startswith(f"{mine} on axis dp: rank"), (rank, text)
        assert "started another operation" in text and "restart all ranks" in text, (rank, text)
        if "reported by" not in text:
            assert f'as number 1 it sends 4000 bytes of "{theirs}" (number 1), this rank expects 4000' in text, text


def test_strangers_and_hostile_bytes(tmp_path: Path) -> None:
    results = run_ranks("hostile", 2, tmp_path)
    assert results[0]["error"].startswith(
        "gather u0 on axis dp: rank 1 started another operation: as number 0 it sends 4611686018427387904 bytes of "
        '"gather ??" (number 0), this rank expects 16;'
    )
    assert results[1]["note"] == [2, 1, 1]


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 1 is not a rank"):
        _runtime.Comm("dp", 1, 1, "none", 5.0)
