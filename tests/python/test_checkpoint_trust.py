"""Files that somebody else made: what a checkpoint, an index or a .pt file may not do; and the way from and to plain PyTorch."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import commands
import parity
import pytest
import torch
import zoo

import interlace
from interlace import private
from interlace.checkpoint.contents import Checkpoint
from interlace.checkpoint.folder import kept_checkpoints
from interlace.checkpoint.tensor_file import (
    CheckedTensors,
    CheckpointError,
    DamageError,
    Layout,
    checksum_text,
    sums_of,
)
from interlace.checkpoint.weights import Weights

ROOT = Path(__file__).resolve().parents[2]


def trainer(**config: Any) -> interlace.Trainer:
    model = zoo.build("vit")
    return interlace.compile(
        model, parity.make_optimizer("adamw", model), zoo.class_loss, zoo.images(2, 0), interlace.Config(**config)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust") / "c"
    with trainer() as t:
        for step in range(2):
            t.step(zoo.images(2, step))
        t.save(folder)
    return folder


# ---- what nothing here does ----


def test_no_file_is_unpickled_or_evaluated() -> None:
    """The package: what could run code of a file does not occur, but for one reader of tensors alone, and what processes of one run give
    one another: a rank and the process that compiles its regions (through its stdin or a folder of theirs alone), and ranks that encrypt
    (opened with their key before it is read)."""
    pattern = re.compile(r"\b(pickle\.loads?|torch\.load|np\.load|numpy\.load|allow_pickle|marshal|shelve|eval|exec)\(")
    found = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in (ROOT / "python").rglob("*.py")
        for line in file.read_text().splitlines()
        if pattern.search(line) and not line.strip().startswith("#") and ".eval()" not in line
    }
    assert found == {
        'python/interlace/checkpoint/convert.py: data = torch.load(path, map_location="cpu", weights_only=True)',
        "python/interlace/dist/sealed.py: return [pickle.loads(part.numpy().tobytes()) for part in parts] if here else None"
        "  # what follows the pickle's end is not read",
        "python/interlace/regions/beside.py: wanted, limit_s, compiler, parent = pickle.load(file)",
        "python/interlace/regions/cubins.py: funcs: list[Func] = pickle.load(sys.stdin.buffer)",
        "python/interlace/regions/cuda.py: regions: list[Region] = pickle.loads(made.read_bytes())",
    }


# ---- safetensors headers and checksums ----


def file_of(header: Any, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header"),
        (b"\xff" * 8, "no header"),
        (struct.pack("<Q", 2**63), "no header"),
        (file_of(b"[" * 100_000), "its header is no JSON"),
        (file_of([1, 2]), "its header is no JSON object"),
        (file_of({"a": 3}), "entry 'a' is no tensor"),
        (file_of({"a": entry([4], 0, 16, "PICKLE")}), "entry 'a' is no tensor"),
        (file_of({"a": entry([2**61, 2**61], 0, 16)}), "does not fill bytes 0 to 16"),
        (file_of({"a": entry([-4], 0, 16)}), "entry 'a' is no tensor"),
        (file_of({"a": entry([True, 4], 0, 16)}), "entry 'a' is no tensor"),
        (file_of({"a": entry([2**70], 0, 16)}), "entry 'a' is no tensor"),
        (
            file_of({"a": entry([2], 0, 8), "b": entry([3], 4, 16)}),
            "'b' does not begin where the tensor before it ends",
        ),
        (file_of({"a": entry([2], 8, 16)}), "'a' does not begin where the tensor before it ends"),
        (file_of({"a": entry([2], 0, 8)}), "its tensors end at byte"),
        (file_of({"a": entry([8], 0, 32)}), "its tensors end at byte"),
    ],
)
def test_headers_that_cannot_be(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamageError) as e:
        CheckedTensors(path, sums_of(content))
    assert message in str(e.value) and str(path) in str(e.value)


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        None,
        [[0, 2**70, "00"]],
        [[0, 10, "00"], [5, 200, "00"]],
        [[0, -1, "00"]],
        [[0, 10, 7]],
        [[0, 10, "xyz"]],
        [[0, 10]],
        "abc",
        [[0, 1 << 40, "00"]],
    ],
)
def test_checksums_that_cannot_be(ranges: Any, tmp_path: Path) -> None:
    content = file_of({"a": entry([4], 0, 16)})
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(DamageError):
        CheckedTensors(tmp_path / "x.safetensors", ranges)


def test_random_bytes_never_do_more_than_fail(tmp_path: Path) -> None:
    """Flips, cuts and insertions in header and index: an error of ours, or a file that reads."""
    layout = Layout(
        [("a", torch.float32, (3, 5)), ("b", torch.int64, ()), ("c", torch.bfloat16, (0, 4))], {"format": "pt"}
    )
    whole = layout.head + bytes(range(68))
    assert len(whole) == layout.bytes
    choice = random.Random(3)
    path = tmp_path / "x.safetensors"
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(choice.randint(1, 3)):
            at = choice.randrange(len(data))
            kind = choice.randrange(3)
            if kind == 0:
                data[at] = choice.randrange(256)
            elif kind == 1:
                del data[at : at + choice.randint(1, 9)]
            else:
                data[at:at] = choice.randbytes(choice.randint(1, 9))
        path.write_bytes(data)
        try:
            with CheckedTensors(path, sums_of(bytes(data))) as file:
                for name in file.names():
                    assert list(file.read(name).shape) == file.shape(name)
        except DamageError:
            pass


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", ".hidden", "a/b"])
def test_an_index_cannot_name_files_outside(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    body = json.loads((folder / "checksums.json").read_text())
    body.pop("self")
    body["files"][name] = body["files"]["trainer.json"]
    text = json.dumps(body, separators=(",", ":"))
    (folder / "checksums.json").write_text(f'{text[:-1]},"self":"{checksum_text(text.encode())}"}}')
    with pytest.raises(DamageError, match="outside the folder"):
        Checkpoint(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", "."])
def test_a_sharded_index_cannot_name_files_outside(place: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(interlace.InterlaceError, match=r"an index names \.safetensors files of its own folder only"):
        Weights(tmp_path)


def test_a_link_is_not_followed_when_writing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / ".c.lock").symlink_to(tmp_path / "secret")
    with trainer() as t, pytest.raises(CheckpointError, match="cannot save to"):
        t.save(tmp_path / "c")
    assert (tmp_path / "secret").read_text() == "mine"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to others")
def test_what_others_lay_beside_a_checkpoint_is_none_of_it(tmp_path: Path) -> None:
    for name in ("c.step-1", "c.step-9"):
        (tmp_path / name).mkdir()
    os.chown(tmp_path / "c.step-9", 12345, 12345)
    assert kept_checkpoints(tmp_path / "c") == [tmp_path / "c.step-1"]
    os.chown(tmp_path, 12345, 12345)
    assert kept_checkpoints(tmp_path / "c") == [tmp_path / "c.step-9", tmp_path / "c.step-1"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to others")
def test_a_link_of_another_user_is_no_private_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert private.make_folder(tmp_path / "link") == tmp_path / "link"
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(private.PrivateError, match="it is a link that another user made"):
        private.make_folder(tmp_path / "link")


# ---- plain PyTorch ----


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run("checkpoint", *arguments)


def test_to_plain_pytorch_and_back(saved: Path, tmp_path: Path) -> None:
    """Exported, loaded into plain PyTorch, trained there, saved there, imported: and both go on with the same losses."""
    from interlace.checkpoint import convert

    with Checkpoint(saved) as checkpoint:
        torch.save(convert.export_torch(checkpoint), tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    model = zoo.build("vit", seed=4)
    optimizer = parity.make_optimizer("adamw", model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert state["step"] == 2

    def plain_step(step: int) -> float:
        loss = zoo.class_loss(model, zoo.images(2, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    plain = [plain_step(2)]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "back.pt")
    assert convert.import_torch(tmp_path / "back.pt", tmp_path / "back") == 3
    plain += [plain_step(step) for step in (3, 4)]
    with trainer() as t:
        t.load(saved)
        assert float(t.step(zoo.images(2, 2))) == pytest.approx(plain[0], rel=1e-5)
        t.load(tmp_path / "back")
        assert t.steps == 3
        assert [float(t.step(zoo.images(2, s))) for s in (3, 4)] == pytest.approx(plain[1:], rel=1e-5)


def test_parameters_that_cannot_be_told_apart_are_not_guessed(tmp_path: Path) -> None:
    """Two matrices of one shape, one of them trained: which, only names can tell."""
    from interlace.checkpoint import convert

    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))

    def file(parameters: Any) -> Path:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
        return tmp_path / "x.pt"

    with pytest.raises(CheckpointError, match="cannot tell which parameters are those of the optimizer's group 0"):
        convert.import_torch(file([model[1].weight]), tmp_path / "c")
    assert convert.import_torch(file([("1.weight", model[1].weight)]), tmp_path / "c") == 1
    with Checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.record["groups"][0]["parameters"] == ["1.weight"] and checkpoint.record["kind"] == ["sgd"]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_a_pickle_with_code_in_it_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from interlace.checkpoint import convert

    torch.save({"model": Evil(), "optimizer": {}}, tmp_path / "evil.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "evil.pt").read_bytes()[:200])
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    refused = {"text": "is no file of torch.save; give one", "evil": "is refused", "torn": "is refused", "list": "must hold"}
    for name, said in (refused | {"none": "cannot read"}).items():
        with pytest.raises(CheckpointError, match=said):
            convert.import_torch(tmp_path / f"{name}.pt", tmp_path / "c")
    assert "this ran" not in capfd.readouterr().out
    assert not (tmp_path / "c").exists()


def test_the_command(saved: Path, tmp_path: Path) -> None:
    done = cli("verify", str(saved))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step +2$", done.stdout, flags=re.M) and "every byte is as it was written" in done.stdout
    assert "adamw of " in done.stdout and "after 2 steps" in done.stdout
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 128
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in saved.iterdir():
        (bad / file.name).write_bytes(bytes(data) if file.name == "model.safetensors" else file.read_bytes())
    done = cli("verify", str(bad))
    assert done.returncode == 1 and "model.safetensors is damaged in 'head.bias'" in done.stderr
    done = cli("export", str(saved))
    assert done.returncode == 1 and done.stderr.startswith("error: interlace checkpoint export takes a target")
