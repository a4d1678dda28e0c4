"""Power lost at any moment of a save (simulated_disk.py), and readers while others replace what they read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import simulated_disk

from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.disk import Disk
from interlace.checkpoint.folder import Staging


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("keep", [1, 3])
def test_power_loss_leaves_a_whole_checkpoint(keep: int, swaps: bool) -> None:
    assert simulated_disk.crash_points(200, seed=keep, keep=keep, swaps=swaps) > 40


@pytest.mark.soak
def test_power_loss_at_10_000_points() -> None:
    for keep in (1, 3):
        for swaps in (True, False):
            simulated_disk.crash_points(2500, seed=7, keep=keep, swaps=swaps)


def test_without_its_syncs_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation finds what it is there to find."""
    monkeypatch.setattr(simulated_disk.RecordingDisk, "sync_folder", lambda self, path: None)
    with pytest.raises(AssertionError, match="power lost after record"):
        simulated_disk.crash_points(500, seed=1, keep=1, swaps=True)


def test_names_last_before_what_they_replace_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing the old files before the new name lasts loses both."""
    commit = Staging.commit

    def eager(self: Staging, keep: int = 1) -> None:
        sync, parent = self._disk.sync_folder, self.final.parent
        monkeypatch.setattr(self._disk, "sync_folder", lambda path: None if path == parent else sync(path))
        commit(self, keep)
        monkeypatch.setattr(self._disk, "sync_folder", sync)
        sync(parent)

    monkeypatch.setattr(Staging, "commit", eager)
    with pytest.raises(AssertionError, match="power lost after record"):
        simulated_disk.crash_points(500, seed=1, keep=1, swaps=True)


def read_while_replaced(tmp_path: Path, reads: int) -> tuple[int, int]:
    """Reads and verifies while another thread saves without pause; (different steps seen, saves made)."""
    final, stop, step = tmp_path / simulated_disk.NAME, threading.Event(), [1]
    disk = simulated_disk.RecordingDisk(True)
    simulated_disk.save(disk, final, 1, 1)

    def replace() -> None:
        while not stop.is_set():
            step[0] += 1
            simulated_disk.save(disk, final, step[0], 1)
            disk.events.clear()

    thread = threading.Thread(target=replace)
    thread.start()
    seen = set()
    try:
        for _ in range(reads):
            with Checkpoint(final) as found:
                found.verify()
                assert found.read("note.txt").decode() == f"of step {found.record['step']}"
                assert found.tensors("model.safetensors").read("b")[0] == found.record["step"]
                seen.add(found.record["step"])
    finally:
        stop.set()
        thread.join()
    return len(seen), step[0]


def test_readers_see_one_whole_checkpoint(tmp_path: Path) -> None:
    if not Disk().exchange(*[_made(tmp_path / n) for n in "ab"]):
        pytest.skip("this file system cannot exchange names")
    seen, saves = read_while_replaced(tmp_path, 300)
    assert seen > 1 and saves > 2


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.soak
def test_20_000_reads_while_saves_replace(tmp_path: Path) -> None:
    assert read_while_replaced(tmp_path, 20_000)[0] > 100
