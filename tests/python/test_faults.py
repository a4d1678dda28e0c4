"""Faults injected for real: a stopped process, a full and a read-only file system, damage in a tier, two runs and one folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import failing
import pytest
import ranks
import torch
import torch.distributed as dist
import zoo

import interlace
from interlace.checkpoint.tensor_file import CheckpointError

HERE = Path(__file__).parent
TIMEOUT_S = 4.0
WAKE_S = 60  # a stopped process goes on at the latest then, so that the pool gets it back


def make() -> interlace.Trainer:
    """A trainer with the short timeout, once all ranks have compiled before: the first time takes as long as it takes."""
    failing.make(timeout_s=120).close()
    dist.barrier()
    return failing.make(timeout_s=TIMEOUT_S)


def with_one_stopped(
    trainer: interlace.Trainer, steps: int, victim: int, what: str, action: Callable[[], object]
) -> str:
    """SIGSTOP: the process is there, its connections are open, and nothing comes any more. The last of the others wakes it."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    places = trainer._run.peers.places
    while any((places.of(rank) or {}).get("step") != steps - 1 for rank in range(len(pids))):
        time.sleep(0.02)  # until every rank has told its place
    dist.barrier()
    if dist.get_rank() == victim:
        subprocess.Popen(["sh", "-c", f"sleep {WAKE_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    found = failing.observed(action)
    # Rank 0 holds the key-value store here; under a launcher the launcher does.
    if victim != 0 and dist.get_rank() != victim:
        store = dist.distributed_c10d._get_default_store()
        if store.add(f"{what}/{pids[victim]}", 1) == len(pids) - 1:
            os.kill(pids[victim], signal.SIGCONT)
    return found


def stopped_in_step(victim: int) -> str:
    trainer = make()
    for step in range(2):
        trainer.step(zoo.tokens(2, step))
    return with_one_stopped(trainer, 2, victim, "step", lambda: [trainer.step(zoo.tokens(2, i)) for i in range(50)])


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_stopped_rank_is_named_with_every_place(victim: int) -> None:
    found = ranks.run(stopped_in_step, 3, victim)
    for rank, text in enumerate(found):
        if rank == victim:
            continue
        assert f"rank {victim} did not answer for " in text, text
        if victim != 0:
            for r in range(3):
                step = "1" if r == victim else "2"
                assert re.search(rf"\n  rank {r}: step {step}, at .*, said [\d.]+ s ago", text), text
            assert re.search(r", unit u\d+", text), text


def stopped_in_save(folder: str, victim: int) -> str:
    trainer = make()
    trainer.step(zoo.tokens(2, 0))
    return with_one_stopped(trainer, 1, victim, "save", lambda: trainer.save(folder))


def test_a_rank_that_stops_in_a_save_does_not_hang_the_others(tmp_path: Path) -> None:
    text, _ = ranks.run(stopped_in_save, 2, str(tmp_path / "c"), 1)
    assert "rank 1" in text, text
    assert not (tmp_path / "c").exists()


OFFLOAD = "overlap_update", "offload_sync(cluster={cluster},kinds=states)"  # every state goes to the tier and back

SMALL_DISK = """
import shutil, subprocess, sys, zoo, torch, interlace
from pathlib import Path
from test_faults import OFFLOAD
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1400k", "small", disk], check=True)

def compiled(**config):
    model = zoo.build("vit")
    optimizer = torch.optim.AdamW(model.parameters())
    return interlace.compile(model, optimizer, zoo.class_loss, zoo.images(2, 0), interlace.Config(**config))

trainer = compiled()
(disk / "tier").mkdir()

def tier(label):
    try:
        compiled(tier=str(disk / "tier"), schedule=[(0, list(OFFLOAD))]).close()
        print(label, "works")
    except interlace.InterlaceError as e:
        print(label, "error:", str(e).replace(chr(10), " "))

def attempt(label):
    try:
        trainer.save(disk / "c", wait=False)
        loss = float(trainer.step(zoo.images(2, trainer.steps)))
        trainer.finish_save()
        print(label, "saved")
    except interlace.InterlaceError as e:
        print(label, "error:", e)

trainer.step(zoo.images(2, 0))
attempt("first")
(disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 60_000))
attempt("full")
tier("full tier")
trainer.load(disk / "c")
print("step", trainer.steps)
needed = sum((disk / "c" / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
(disk / "other").unlink()
(disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - needed - 16384))  # the large files fit, the small ones do not
attempt("nearly full")
(disk / "other").unlink()
attempt("room again")
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
attempt("read-only")
tier("read-only tier")
trainer.load(disk / "c")
print("step", trainer.steps, sorted(p.name for p in disk.iterdir() if not p.name.endswith(".lock")))
"""


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    """A small file system of our own: the old checkpoint stays, training goes on, and there is room again later."""
    alone = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets nobody mount in a namespace of his own")
    path = os.pathsep.join([str(HERE), *[p for p in sys.path if p]])
    done = subprocess.run(
        [*alone, sys.executable, "-c", SMALL_DISK, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert said[0] == "first saved"
    assert re.fullmatch(
        rf"full error: {re.escape(str(tmp_path))} has [\d.]+ KiB free, the checkpoint needs [\d.]+ KiB; make room or save elsewhere "
        r"\(nothing was written, an older checkpoint there is untouched\)",
        said[1],
    ), said[1]
    tier = re.escape(str(tmp_path / "tier"))
    assert re.search(
        rf"^full tier error: .*the tier folder '{tier}' has no room for state u\d+\.exp_avg\w* \(\d+ bytes after \d+ reserved, \d+ free\): "
        r"No space left on device; give a folder on a larger disk, or a higher memory limit$",
        said[2],
    ), said[2]
    untouched = f"error: cannot save to {tmp_path}/c: {{}}; an older checkpoint there is untouched".format
    assert said[3] == "step 1" and said[4] == "nearly full " + untouched("the disk is full"), said[4]
    assert said[5] == "room again saved"
    assert said[6] == "read-only " + untouched("the file system is read-only"), said[6]
    assert re.search(
        rf"^read-only tier error: .*the tier folder '{tier}' is not writable: Read-only file system$", said[7]
    ), said[7]
    assert said[8] == "step 2 ['c', 'tier']"


@pytest.mark.host("devices send to pinned memory, and have no tier of files")
@pytest.mark.parametrize("name", ["lock", "data"])
def test_a_link_in_a_tier_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    """Whoever can write to the folder could have the run empty a file of its user's."""
    tier = tmp_path / "tier"
    tier.mkdir()
    (tmp_path / "secret").write_text("mine")
    link = tier / f"interlace-tier-0.{name}"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(interlace.InterlaceError, match=r"interlace-tier-0.* is a link"):
        failing.make(tier=str(tier), schedule=[(0, list(OFFLOAD))])
    assert (tmp_path / "secret").read_text() == "mine" and link.is_symlink()


def flip(file: Path) -> None:
    with open(file, "r+b") as f:
        f.seek(4096 + 17)
        byte = f.read(1)[0]
        f.seek(4096 + 17)
        f.write(bytes([byte ^ 4]))
        f.flush()
        os.fsync(f.fileno())


@pytest.mark.host("devices send to pinned memory, and have no tier of files")
def test_damage_in_a_tier_stays_known(tmp_path: Path) -> None:
    """Neither a save nor a step makes the damaged bytes into sound ones, and closing does not wait for the save that failed."""
    trainer = failing.make(tier=str(tmp_path), schedule=[(0, list(OFFLOAD))])
    trainer.step(zoo.tokens(2, 0))
    flip(tmp_path / "interlace-tier-0.data")
    for action in (
        lambda: trainer.save(tmp_path / "c", wait=False),
        lambda: trainer.step(zoo.tokens(2, 1)),
        lambda: trainer.step(zoo.tokens(2, 1)),
        lambda: trainer.save(tmp_path / "c"),
    ):
        with pytest.raises(interlace.InterlaceError, match="gives other bytes than were written"):
            action()
    trainer.close()
    assert not [p.name for p in tmp_path.iterdir() if p.name != "interlace-tier-0.lock"]


def damaged_tier(folder: str) -> str:
    """One bit of rank 1's tier file changes between two steps."""
    trainer = failing.make(tier=folder, schedule=[(0, list(OFFLOAD))])
    trainer.step(zoo.tokens(2, 0))
    if dist.get_rank() == 1:
        flip(Path(folder) / "interlace-tier-1.data")
    dist.barrier()
    return failing.observed(lambda: [trainer.step(zoo.tokens(2, i)) for i in range(3)])


@pytest.mark.host("devices send to pinned memory, and have no tier of files")
def test_damage_in_one_rank_s_tier_stops_all(tmp_path: Path) -> None:
    other, own = ranks.run(damaged_tier, 2, str(tmp_path))
    said = rf"the tier file {tmp_path}/interlace-tier-1.data gives other bytes than were written, between \d+ and \d+ \(state u\d+\.exp_avg"
    assert re.search(said, own), own
    assert "rank 1 failed" in other and re.search(said, other), other


HOLDER = """
import sys, time, zoo, torch, interlace
model = zoo.build("vit")
trainer = interlace.compile(model, torch.optim.AdamW(model.parameters()), zoo.class_loss, zoo.images(2, 0))
trainer.reserve(sys.argv[1])
print("held", flush=True)
time.sleep(100)
"""


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), *[p for p in sys.path if p]])
    folder = tmp_path / "c"
    (tmp_path / ".c.0000.part").mkdir()  # of a run that was killed
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as other:  # fmt: skip
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert not (tmp_path / ".c.0000.part").exists()
        with failing.make() as trainer:
            for action in (lambda: trainer.save(folder), lambda: trainer.reserve(folder)):
                with pytest.raises(CheckpointError) as e:
                    action()
                said = str(e.value)
                assert said.startswith(f"{folder} is being written by another run (process {other.pid} on "), said
                assert said.endswith("save to another folder, or stop that run")
            trainer.save(tmp_path / "elsewhere")
            other.kill()
            other.wait()
            trainer.save(folder)
            assert trainer.step(zoo.tokens(2, 0)) > 0
    assert isinstance(e.value, interlace.InterlaceError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "elsewhere"]


def lost_in_the_loop(folder: str) -> None:
    """Rank 1 dies, rank 0 in a transfer of the loop's own learns it first, and rank 2 in a save."""
    with make() as trainer:
        trainer.step(zoo.tokens(2, 0))
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pair = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.recv(pair, 1)
        time.sleep(5)  # what rank 0 says of its end is there by then
        trainer.save(folder)


def test_a_rank_that_the_loops_own_transfer_loses_is_named(tmp_path: Path) -> None:
    first, _, third = ranks.outcomes(lost_in_the_loop, 3, str(tmp_path / "c"))
    assert first is not None and third is not None
    assert isinstance(first.error, RuntimeError) and "Connection" in str(first.error), first
    assert "rank 1 was lost: " in str(third.error) and "; every rank must call" not in str(third.error), third


def failed_in_the_loop() -> None:
    with make() as trainer:
        trainer.step(zoo.tokens(2, 0))
        if dist.get_rank() == 1:
            raise ValueError("no more data here")
        trainer.step(zoo.tokens(2, 1))
        trainer.step(zoo.tokens(2, 2))


def test_an_error_of_one_ranks_loop_is_told_to_the_others() -> None:
    first, second = ranks.outcomes(failed_in_the_loop, 2)
    assert first is not None and second is not None
    assert isinstance(second.error, ValueError)
    assert "rank 1 failed: no more data here" in str(first.error), first
