"""Checkpoints: other numbers of ranks, other strategies, plain PyTorch, Hugging Face, and what can go wrong with files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from safetensors.torch import load_file

import interlace
from interlace.checkpoint import convert, disk
from interlace.checkpoint import folder as checkpoint_folder
from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.tensor_file import CheckpointError, checksum_text, sums_of

Tensor = torch.Tensor
TOTAL = 6  # sequences of a global step, whatever the number of ranks


def global_batch(case: str, step: int) -> dict[str, Tensor]:
    """This rank's part of the same global batch."""
    rank, size = parity.rank_and_size()
    return {k: v.chunk(size)[rank] for k, v in zoo.CASES[case].batch(TOTAL, step).items()}


def make(case: str, optimizer: str, **config: Any) -> interlace.Trainer:
    model = zoo.build(case, torch.float64 if case == "vit" else None)
    opt = parity.make_optimizer(optimizer, model)
    settings = interlace.Config(**{"timeout_s": 30, **config})
    return interlace.compile(model, opt, zoo.CASES[case].loss, global_batch(case, 0), settings)


def losses(trainer: interlace.Trainer, case: str, first: int, last: int) -> list[float]:
    return [parity.mean_over_ranks(trainer.step(global_batch(case, i))) for i in range(first, last)]


def run(
    case: str, optimizer: str, folder: str, start: int, stop: int, **config: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Steps [start, stop), from the checkpoint in `folder` when start > 0, saved there at the end."""
    with make(case, optimizer, **config) as trainer:
        if start:
            trainer.load(folder)
            assert trainer.steps == start
        found = losses(trainer, case, start, stop)
        trainer.save(folder)
        return found, dict(trainer.state_dict(all_ranks=True))


def in_between() -> None:
    """Another program, and other random numbers, between saving and going on."""
    with make("vit", "sgd") as trainer:
        losses(trainer, "vit", 0, 1)
    torch.rand(7)


@pytest.mark.parametrize("case", ["gpt2_dropout", "batchnorm"])
@pytest.mark.parametrize("rng", ["keyed", "compat"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(case: str, rng: str, tmp_path: Path) -> None:
    whole = ranks.run(run, 2, case, "adamw", str(tmp_path / "a"), 0, 4, rng=rng)
    ranks.run(run, 2, case, "adamw", str(tmp_path / "b"), 0, 2, rng=rng)
    ranks.run(in_between, 2)
    rest = ranks.run(run, 2, case, "adamw", str(tmp_path / "b"), 2, 4, rng=rng)
    buffers = {"body.1.running_mean", "body.1.running_var", "body.4.running_mean", "body.4.running_var"}
    for (all_losses, all_values), (last, values) in zip(whole, rest, strict=True):
        if case != "batchnorm":
            assert last == all_losses[2:]
        assert all(torch.equal(values[k], all_values[k]) for k in values if k not in buffers)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_any_number_of_ranks_and_any_strategy_goes_on(optimizer: str, tmp_path: Path) -> None:
    expected, final = ranks.run(run, 1, "vit", optimizer, str(tmp_path / "whole"), 0, 8)[0]
    folder = str(tmp_path / "part")
    seen: list[float] = []
    for i, (size, strategy) in enumerate([(2, "shard"), (3, "zero1"), (1, "shard"), (3, "replicate")]):
        part, values = ranks.run(run, size, "vit", optimizer, folder, 2 * i, 2 * i + 2, strategy=strategy)[0]
        seen += part
    assert seen == pytest.approx(expected, rel=1e-9)
    for name, t in final.items():
        torch.testing.assert_close(values[name], t, rtol=1e-7, atol=1e-9)


def test_plain_pytorch_and_hugging_face_read_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "gpt2"
    _, values = ranks.run(run, 2, "gpt2", "adamw", str(folder), 0, 3)[0]
    plain = zoo.build("gpt2", seed=9)
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    hugging = AutoModelForCausalLM.from_pretrained(folder)
    assert type(hugging) is type(plain) and hugging.lm_head.weight is hugging.transformer.wte.weight
    for model in (plain, hugging):
        assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert sorted(p.name for p in folder.iterdir()) == [
        "checksums.json", "config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors",
        "program.il", "trainer.json",
    ]  # fmt: skip


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    found = ranks.run(run, 2, "batchnorm", "sgd", str(tmp_path / "c"), 0, 2)
    assert torch.equal(found[0][1]["body.1.running_mean"], found[1][1]["body.1.running_mean"])
    saved = load_file(tmp_path / "c" / "model.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in found[0][1].items())
    assert saved["body.1.num_batches_tracked"] == 2 and saved["body.1.num_batches_tracked"].dtype == torch.int64


# ---- files that are wrong ----


@pytest.fixture
def trainer() -> Any:
    with make("vit", "adamw") as t:
        losses(t, "vit", 0, 1)
        yield t


def names(folder: Path) -> list[str]:
    """What lies in a folder, but for the lock of the trainer that is still open."""
    return sorted(p.name for p in folder.iterdir() if p.name != ".c.lock")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_second_save_replaces_the_first_and_keeps_other_files(trainer: interlace.Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    trainer.save(folder, {"tokenizer.json": "{}"})
    (folder / "data").mkdir()
    (folder / "data" / "notes.txt").write_text("mine")
    losses(trainer, "vit", 1, 2)
    trainer.save(folder)
    assert json.loads((folder / "trainer.json").read_text())["step"] == 2
    assert (folder / "data" / "notes.txt").read_text() == "mine" and (folder / "tokenizer.json").read_text() == "{}"
    assert names(tmp_path) == ["c"], "something was left beside the checkpoint"
    trainer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_cannot_swap_folders_at_one_blow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: two renames instead; a run that ends between them leaves a checkpoint that --resume auto finds."""
    folder = tmp_path / "c"
    monkeypatch.setattr(disk.Disk, "exchange", lambda self, a, b: False)

    def save(step: int) -> None:
        record = {"format": 2, "step": step, "kind": [], "groups": []}
        files = {"model.safetensors": {"w": torch.full((3,), float(step))}, "optimizer.safetensors": {}}
        convert.write_checkpoint(folder, files, record)

    for step in (1, 2):
        save(step)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    rename, calls = os.rename, []

    def killed(a: Any, b: Any) -> None:
        calls.append(a)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(a, b)

    with monkeypatch.context() as once:
        once.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(3)
    (found,) = checkpoint_folder.kept_checkpoints(folder)
    with Checkpoint(found) as checkpoint:
        assert checkpoint.record["step"] == 2 and checkpoint.verify() > 0
    save(4)
    assert load_file(folder / "model.safetensors")["w"].tolist() == [4.0, 4.0, 4.0]


LIMITED = """
import resource, sys, zoo, torch, interlace
model = zoo.build("vit")
trainer = interlace.compile(model, torch.optim.AdamW(model.parameters()), zoo.class_loss, zoo.images(2, 0))
trainer.step(zoo.images(2, 0))
trainer.save(sys.argv[1])
trainer.step(zoo.images(2, 1))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    trainer.save(sys.argv[1])
except interlace.InterlaceError as e:
    print("error:", e)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trainer.load(sys.argv[1])
print("step", trainer.steps, float(trainer.step(zoo.images(2, 1))) > 0)
trainer.save(sys.argv[1])
"""


@pytest.mark.parametrize("limit", [2000, 60000])
def test_no_room_while_writing_leaves_the_old_checkpoint(limit: int, tmp_path: Path) -> None:
    """The system refuses to let a file grow, in the first file and in a later one."""
    folder = tmp_path / "c"
    path = os.pathsep.join([str(Path(__file__).parent), *[p for p in sys.path if p]])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), str(limit)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        f"error: cannot save to {folder}: a file became too big; an older checkpoint there is untouched" in done.stdout
    )
    assert "step 1 True" in done.stdout
    assert names(tmp_path) == ["c"]


def disk_full(folder: str) -> tuple[str, list[float]]:
    """A file-size limit on rank 0 alone stands for its full disk: both ranks hear of it and train on."""
    with make("vit", "adamw") as t:
        losses(t, "vit", 0, 1)
        if t.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        text = ""
        try:
            t.save(folder)
        except CheckpointError as e:
            text = str(e)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found = losses(t, "vit", 1, 2)
        t.save(folder)
        return text, found


def test_all_ranks_hear_of_a_full_disk_and_train_on(tmp_path: Path) -> None:
    found = ranks.run(disk_full, 2, str(tmp_path / "c"))
    for text, _ in found:
        assert text == f"cannot save to {tmp_path / 'c'}: a file became too big; an older checkpoint there is untouched"
    assert found[0][1] == found[1][1]
    assert (tmp_path / "c" / "trainer.json").is_file()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("/proc/checkpoint", "cannot save to /proc/checkpoint: "),
        ("{tmp}/file", "{tmp}/file is a file; a checkpoint is a folder"),
        ("{tmp}/file/c", "cannot save to {tmp}/file/c: "),
        ("{cwd}", "{cwd} holds {cwd}; name a folder of the checkpoint's own"),
    ],
)
def test_places_where_nothing_can_be_saved(
    trainer: interlace.Trainer, where: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    places = {"tmp": str(tmp_path), "cwd": os.getcwd()}
    with pytest.raises(CheckpointError) as e:
        trainer.save(where.format(**places))
    assert str(e.value).startswith(message.format(**places))
    losses(trainer, "vit", 1, 2)


def test_an_extra_file_cannot_leave_the_folder(trainer: interlace.Trainer, tmp_path: Path) -> None:
    for name in ("../x", "trainer.json", "a/b", ".hidden", "checksums.json"):
        with pytest.raises(CheckpointError, match="cannot be the name of an extra file"):
            trainer.save(tmp_path / "c", {name: "x"})
    assert names(tmp_path) == []


def test_damaged_checkpoints_are_refused_and_change_nothing(trainer: interlace.Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    trainer.save(folder)
    good = contents(folder)
    before = trainer.state_dict()

    def with_sums(name: str, data: bytes) -> dict[str, bytes]:
        """A file that was changed together with its checksums: an attack, or a newer version."""
        sums = json.loads(good["checksums.json"])
        sums["files"][name] = {"bytes": len(data), "ranges": sums_of(data)}
        sums.pop("self")
        text = json.dumps(sums, separators=(",", ":"))
        return {name: data, "checksums.json": f'{text[:-1]},"self":"{checksum_text(text.encode())}"}}'.encode()}

    def flipped(name: str, at: int) -> dict[str, bytes | None]:
        data = bytearray(good[name])
        data[at] ^= 4
        return {name: bytes(data)}

    record = json.loads(good["trainer.json"])
    first = json.loads(good["checksums.json"])["files"]["model.safetensors"]["ranges"][1]
    torn = good["model.safetensors"][: first[0]] + bytes(first[1]) + good["model.safetensors"][first[0] + first[1] :]
    cases: list[tuple[dict[str, bytes | None], str]] = [
        ({"model.safetensors": good["model.safetensors"][:-8]}, "was cut off or edited"),
        ({"model.safetensors": b""}, "has 0 bytes, its checksums are of"),
        ({"model.safetensors": torn}, f"bytes {first[0]} to {first[0] + first[1]} have the checksum"),
        (flipped("model.safetensors", -9), "model.safetensors is damaged in 'head.bias'"),
        (flipped("model.safetensors", 20), "model.safetensors is damaged in its header"),
        (flipped("optimizer.safetensors", -1), "optimizer.safetensors is damaged in 'exp_avg_sq."),
        (flipped("trainer.json", 30), "trainer.json is damaged: bytes 0 to"),
        (flipped("program.il", 100), "program.il is damaged"),
        (flipped("checksums.json", 60), "checksums.json is cut off or was edited"),
        ({"optimizer.safetensors": None}, "no such file"),
        ({"checksums.json": None}, "cannot read"),
        ({"checksums.json": b"[" * 100_000}, "checksums.json is cut off or was edited (RecursionError"),
        ({"trainer.json": good["trainer.json"][:40]}, "has 40 bytes, its checksums are of"),
        (with_sums("trainer.json", b"[]"), "trainer.json is cut off or was edited"),
        (
            with_sums("trainer.json", json.dumps({**record, "format": 99}).encode()),
            "was written by a newer version (format 99, this one reads 2)",
        ),
        ({"trainer.json": None}, "is no checkpoint: trainer.json is missing; it holds weights only"),
        (
            with_sums("trainer.json", json.dumps({**record, "kind": ["sgd", "sgd"]}).encode()),
            "was saved with another optimizer: group 0 is sgd there, adamw here",
        ),
        (with_sums("trainer.json", json.dumps({**record, "step": -3}).encode()), "a negative number of steps"),
        (with_sums("trainer.json", json.dumps({**record, "loop": {"count": -1}}).encode()), "the schedule stands nowhere"),
        (
            with_sums("trainer.json", json.dumps({**record, "groups": [{**record["groups"][0], "hyper": {"params": []}}]}).encode()),
            "the hyper-parameter 'params' is no number",
        ),
        (
            with_sums("trainer.json", json.dumps({**record, "groups": [{**record["groups"][0], "hyper": {"lr": {}}}]}).encode()),
            "the hyper-parameter 'lr' is no number",
        ),
    ]  # fmt: skip
    for changes, message in cases:
        for other, content in good.items():
            (folder / other).write_bytes(content)
        for name, data in changes.items():
            (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError) as e:
            trainer.load(folder)
        assert message in str(e.value), (changes.keys(), str(e.value))
    assert trainer.steps == 1 and all(torch.equal(v, before[k]) for k, v in trainer.state_dict().items())
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        trainer.load(tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(trainer: interlace.Trainer, tmp_path: Path) -> None:
    with make("batchnorm", "adamw") as other:
        other.save(tmp_path / "other")
    with pytest.raises(CheckpointError, match="has no 'token' for 'token'; was it saved from another model\\?"):
        trainer.load(tmp_path / "other")
    with pytest.raises(CheckpointError, match="has no 'token' for 'token'; was it saved from another model\\?"):
        trainer.load_weights(tmp_path / "other")


def test_the_first_difference_of_another_optimizer_is_named(trainer: interlace.Trainer, tmp_path: Path) -> None:
    def saved_by(make_optimizer: Any, name: str) -> Path:
        model = zoo.build("vit", torch.float64)
        with interlace.compile(model, make_optimizer(model), zoo.class_loss, zoo.images(TOTAL, 0)) as other:
            other.save(tmp_path / name)
        return tmp_path / name

    cases = {
        "groups": (lambda m: torch.optim.AdamW(m.parameters()), "1 parameter groups there, 2 here"),
        "kind": (lambda m: parity.make_optimizer("sgd", m), "group 0 is sgd there, adamw here"),
        "order": (
            lambda m: torch.optim.AdamW([{"params": list(reversed(list(m.parameters())))[:20]}, {"params": list(m.parameters())[:-20]}]),
            "parameter 0 of group 0 is 'head.bias' there, 'token' here",
        ),
    }  # fmt: skip
    for name, (make_optimizer, difference) in cases.items():
        with pytest.raises(CheckpointError) as e:
            trainer.load(saved_by(make_optimizer, name))
        assert f"was saved with another optimizer: {difference}; make the optimizer as it was" in str(e.value)


def test_hyper_parameters_come_back(trainer: interlace.Trainer, tmp_path: Path) -> None:
    trainer._run.optimizer.param_groups[1]["lr"] = 0.125
    trainer.save(tmp_path / "c")
    with make("vit", "adamw") as other:
        other.load(tmp_path / "c")
        assert other._run.optimizer.param_groups[1]["lr"] == 0.125
        assert other._run.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        assert losses(other, "vit", 1, 3) == losses(trainer, "vit", 1, 3)
