"""Training with states, weights and gradients out of memory: the same bits, within the limit; faults of a tier are named."""

from __future__ import annotations

import fcntl
import gc
import glob
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import on_device
import pytest
import ranks
import torch
from runtime_support import llama

import interlace
from interlace.config import ConfigError
from interlace.errors import InterlaceError

STEPS = 5
SIZES = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=6)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def compiled(passes: list[str], tier: Path | None = None, example: Any = None, **more: Any) -> interlace.Trainer:
    gc.collect()  # models of earlier tests, which a device's allocator counts
    model = llama(**SIZES)
    settings: dict[str, Any] = {"schedule": [(0, passes)], **more}
    if tier is not None:
        settings["tier"] = str(tier)
    return interlace.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        loss_of,
        batch() if example is None else example,
        config=interlace.Config(**settings),
    )


def train(trainer: interlace.Trainer) -> tuple[list[float], dict[str, torch.Tensor], int]:
    losses = [float(trainer.step(batch())) for _ in range(STEPS)]
    stats = trainer.stats()
    return losses, {name: tensor.cpu() for name, tensor in trainer.state_dict().items()}, int(stats["peak_bytes"])


@pytest.fixture(scope="module")
def unlimited() -> tuple[list[float], dict[str, torch.Tensor], int]:
    trainer = compiled(["overlap_update"])
    found = train(trainer)
    trainer.close()
    return found


# What leaves an accelerator goes to its host's memory, whatever the folder.
in_a_file = pytest.mark.skipif(on_device.DEVICE != "cpu", reason="the tier of an accelerator is no file")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("percent", [75, 50, 40])
def test_a_limit_changes_no_bit_and_is_kept(tmp_path: Path, unlimited: Any, percent: int) -> None:
    losses, weights, peak = unlimited
    limit = peak * percent // 100
    trainer = compiled(["overlap_update", f"offload(cluster={{cluster}},limit={limit - 65536})"], tmp_path)
    ours = train(trainer)
    stats = trainer.stats()
    trainer.close()
    assert ours[0] == losses
    assert same(ours[1], weights)
    assert ours[2] <= limit < peak
    assert stats["tier_bytes_in"] > 0
    assert not glob.glob(str(tmp_path / "*.data")), "the tier's file goes with the run"


OWN = ["overlap_update", "offload(cluster={cluster},limit={limit})"]


@pytest.mark.parametrize("passes", [pytest.param(OWN, marks=pytest.mark.soak), None])
def test_above_a_limit_that_trains_all_do(tmp_path: Path, unlimited: Any, passes: Any) -> None:
    """None: the search of the default schedule. What lives may come close to the limit, what a rank takes stays within it."""
    peak, trained = unlimited[2], 0
    for thousandth in range(300, 1061, 76 if passes is None else 38):
        limit = peak * thousandth // 1000
        schedule = "auto" if passes is None else [(0, passes)]
        try:
            trainer = compiled([], tmp_path, schedule=schedule, memory_limit=limit)
        except interlace.InterlaceError as e:
            assert trained == 0, f"{limit} bytes are refused, fewer were not: {e}"
            continue
        trained += 1
        assert trainer._run.programs.needed_bytes(trainer._run.ir) <= limit
        trainer.close()
    assert trained >= 8


@pytest.mark.parametrize("more", [{}, {"pad": {"input_ids": 0, "labels": -100}}], ids=["other forms", "padded"])
def test_programs_that_take_turns_have_other_states_out(tmp_path: Path, unlimited: Any, more: dict[str, Any]) -> None:
    """A batch of another form has a program of its own, which leaves more in the tier: the first one finds that there again."""
    few, many = batch(), {name: x.repeat(2, 1)[:3] for name, x in batch().items()}
    moving = f"offload(cluster={{cluster}},limit={unlimited[2] * 9 // 10})"
    found, out = [], list[set[str]]()
    for passes in (["overlap_update"], ["overlap_update", moving]):
        with compiled(passes, tmp_path, **more) as trainer:
            losses = []
            for one in (few, few, many, many, few, many, few):
                losses.append(float(trainer.step(one)))
                out.append({f"{s['unit']} {s['role']}" for s in trainer._run.ir.states() if s["out"]})
            found.append((losses, dict(trainer.state_dict())))
    assert out[-2] - out[-1], "what the first program keeps in memory"
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def peaks(tier: str, limit: int, passes: list[str]) -> list[int]:
    """The highest peak so far of the program that runs, after each step over a swap, and at the end with all that was put off."""
    moved = "offload(cluster={cluster},limit={limit})"
    schedule = [(0, ["overlap_update", moved]), (2, [*passes, moved])]
    with compiled([], Path(tier), schedule=schedule, memory_limit=limit) as trainer:
        found = []
        for _ in range(STEPS):
            trainer.step(batch())
            found.append(int(trainer.stats()["peak_bytes"]))
        assert trainer.swaps == 1 and trainer.stats()["tier_bytes_in"] > 0
        trainer.flush()
        return [*found, int(trainer.stats()["peak_bytes"])]


@pytest.mark.parametrize(
    "passes", [["bucket(modules=model.layers.*)", "overlap_update"], ["reposition_update(share=0.5)", "overlap_update"]]
)
def test_two_ranks_keep_a_limit_in_every_step(tmp_path: Path, passes: list[str]) -> None:
    """Reductions that overlap receive into buffers that go with them: none is kept for the next, which the plan knows nothing of."""
    rounding = 0 if on_device.DEVICE == "cpu" else 32 << 10  # a framework's allocator gives 512 bytes where 128 are asked for
    for limit in (1_900_000, 2_200_000):
        for found in ranks.run(peaks, 2, str(tmp_path), limit, passes):
            assert max(found) <= limit + rounding, [limit - peak for peak in found]


def inspected(tier: str, limit: int) -> list[tuple[float, float]]:
    """The loss of each step's batch, as inspected before and as trained with."""
    passes = ["reposition_update(share=1)", "overlap_update", "offload(cluster={cluster},limit={limit})"]
    found = []
    with compiled([], Path(tier), schedule=[(0, passes)], memory_limit=limit) as trainer:
        assert re.search(r"reload.wait\(%(\d+)\) \{upd(?:.*\n)*?.* = gather.start\(%\1\)", trainer.program)
        for _ in range(3):
            ops = trainer.inspect(batch())["ops"]
            loss = next(op["results"][0]["mean"] for op in ops if "nll_loss_forward" in op["text"])
            found.append((loss, float(trainer.step(batch()))))
    return found


def test_an_inspection_waits_for_what_an_update_that_it_leaves_out_has_called_back(tmp_path: Path) -> None:
    for found in ranks.run(inspected, 2, str(tmp_path), 1_400_000):
        assert [loss for loss, _ in found] == pytest.approx([loss for _, loss in found], rel=1e-6)


@pytest.mark.parametrize(
    "passes", [["offload_sync(cluster={cluster})"], ["overlap_update", "offload_sync(cluster={cluster},kinds=states)"]]
)
def test_everything_out_and_back(tmp_path: Path, unlimited: Any, passes: list[str]) -> None:
    trainer = compiled(passes, tmp_path)
    losses, weights, _ = train(trainer)
    trainer.close()
    assert losses == unlimited[0]
    assert same(weights, unlimited[1])


def test_a_swap_sends_states_out_and_brings_them_back(tmp_path: Path, unlimited: Any) -> None:
    out = ["overlap_update", "offload_sync(cluster={cluster})"]
    trainer = compiled(
        [], tmp_path, schedule=[(0, ["overlap_update"]), (2, out), (4, ["overlap_update"])], profile="off"
    )
    losses, weights, _ = train(trainer)
    trainer.close()
    assert losses == unlimited[0]
    assert same(weights, unlimited[1])


def test_a_checkpoint_holds_what_is_out(tmp_path: Path, unlimited: Any) -> None:
    (tmp_path / "tier").mkdir()
    passes = ["overlap_update", "offload_sync(cluster={cluster})"]
    trainer = compiled(passes, tmp_path / "tier")
    for _ in range(2):
        trainer.step(batch())
    trainer.save(tmp_path / "saved")
    trainer.close()
    again = compiled(passes, tmp_path / "tier")
    again.load(tmp_path / "saved")
    losses = [float(again.step(batch())) for _ in range(STEPS - 2)]
    weights = dict(again.state_dict())
    again.close()
    assert losses == unlimited[0][2:]
    assert same(weights, unlimited[1])


@in_a_file
def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    trainer = compiled(["offload_sync(cluster={cluster},kinds=states)"], tmp_path)
    trainer.step(batch())
    (file,) = glob.glob(str(tmp_path / "*.data"))
    with open(file, "r+b") as f:
        f.seek(4096 * 3 + 17)
        byte = f.read(1)
        f.seek(4096 * 3 + 17)
        f.write(bytes([byte[0] ^ 4]))
        f.flush()
        os.fsync(f.fileno())
    with pytest.raises(
        InterlaceError,
        match=r"(?s)reload.wait failed: the tier file .*gives other bytes than were written, between \d+ and",
    ):
        trainer.step(batch())
    trainer.close()


@in_a_file
def test_a_file_cut_short_is_found(tmp_path: Path) -> None:
    trainer = compiled(["offload_sync(cluster={cluster},kinds=states)"], tmp_path)
    trainer.step(batch())
    (file,) = glob.glob(str(tmp_path / "*.data"))
    os.truncate(file, 8192)
    with pytest.raises(
        InterlaceError, match=r"(?s)the tier file .* ends at byte 8192, within state u\d+\.exp_avg.*cut short"
    ):
        trainer.step(batch())
    trainer.close()


@in_a_file
def test_folders_that_cannot_be(tmp_path: Path) -> None:
    passes = ["offload_sync(cluster={cluster},kinds=states)"]
    with pytest.raises(
        InterlaceError, match=r"the tier folder '.*/none' cannot be used: No such file or directory; make it first"
    ):
        compiled(passes, tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(InterlaceError, match="is not a folder"):
        compiled(passes, tmp_path / "file")
    with pytest.raises(
        InterlaceError, match=r"goes out of memory in this program, but there is no tier to hold it.*tier="
    ):
        compiled(passes)
    with pytest.raises(ConfigError, match="tier_bandwidth limits the tier: give tier=FOLDER as well"):
        interlace.Config(tier_bandwidth="1GB")


@in_a_file
def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    passes = ["offload_sync(cluster={cluster},kinds=states)"]
    first = compiled(passes, tmp_path)
    with pytest.raises(
        InterlaceError, match=rf"is in use by another run \(process {os.getpid()}\); give each run a folder of its own"
    ):
        compiled(passes, tmp_path)
    first.close()
    compiled(passes, tmp_path).close()


@in_a_file
def test_what_a_killed_run_with_more_ranks_left_is_removed(tmp_path: Path) -> None:
    passes = ["offload_sync(cluster={cluster},kinds=states)"]
    tier, outside = tmp_path / "tier", tmp_path / "outside"
    tier.mkdir()
    outside.write_text("process 1")
    first = compiled(passes, tier)
    files = {kind: (tier / f"interlace-tier-0.{kind}").read_bytes() for kind in ("lock", "data")}
    first.close()
    assert files["data"]
    for name in ("1", "12", "2", "4", "05", "6x"):
        for kind, content in files.items():
            (tier / f"interlace-tier-{name}.{kind}").write_bytes(content)
    (tier / "interlace-tier-3.lock").symlink_to(outside)
    (tier / "interlace-tier-3.data").write_text("beside a link")
    (tier / "interlace-tier-4.lock").write_text("notes of somebody")
    (tier / "interlace-tier-7.data").write_text("without a lock")
    os.link(outside, tier / "interlace-tier-8.lock")
    os.mkfifo(tier / "interlace-tier-9.lock")
    expected = {p.name for p in tier.iterdir()} - {f"interlace-tier-{n}.{k}" for n in (1, 12) for k in files}
    with open(tier / "interlace-tier-2.lock", "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # a run that is alive
        second = compiled(passes, tier)
        found = {p.name for p in tier.iterdir()}
        second.close()
    assert found == expected | {"interlace-tier-0.data"}
    assert outside.read_text() == "process 1"
    compiled(passes, tier).close()
    assert not (tier / "interlace-tier-2.data").exists(), "its run has ended"


def test_a_limit_that_cannot_be_met_says_the_least(tmp_path: Path) -> None:
    with pytest.raises(
        InterlaceError,
        match=r"(?s)the limit of 30000 bytes cannot be met with everything out.*raise the limit to \d+MiB",
    ):
        compiled(["overlap_update", "offload(cluster={cluster},limit=30000)"], tmp_path)


SMALL_DISK = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from test_offload import compiled
from interlace.errors import InterlaceError
try:
    compiled(["offload_sync(cluster={{cluster}},kinds=states)"], Path({folder!r}))
except InterlaceError as e:
    print("REFUSED", str(e).replace(chr(10), " "))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_named_before_the_first_step(tmp_path: Path) -> None:
    # A file system of 256 KiB in a namespace of its own: it goes when the process ends.
    code = SMALL_DISK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    script = f'mount -t tmpfs -o size=256k small {tmp_path} && exec {sys.executable} -c "$CODE"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env={**os.environ, "CODE": code},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if "REFUSED" not in done.stdout and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert "has no room for state u" in done.stdout, done.stdout + done.stderr
    assert "No space left on device; give a folder on a larger disk" in done.stdout
