"""Ranks that encrypt: the same bits as without, nothing of the parameters on the network, and who cannot or does not is told why."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import commands
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors import safe_open

from interlace import _runtime
from interlace.data import find_text
from interlace.dist import sealed, store
from interlace.dist.launch import free_port
from interlace.dist.secret import ENCRYPT, MESH_KEY, SecretError, encrypts
from interlace.dist.store import SecretStore, StoreError, StoreServer
from interlace.errors import InterlaceError

SECRET = b"of this run alone"
TRAIN = ["train", "--text", "text.py", "--model", "llama-tiny", "--steps", "4", "--batch", "8", "--seq", "32", "--dtype", "float64"]
TRAIN += ["--log-every", "1"]
SAVES = ["--save-every", "3", "--keep", "2"]


def test_what_is_sealed_opens_with_its_key_and_number_alone() -> None:
    key = bytes(range(32))
    for size in (0, 1, 16, 1000):
        data = os.urandom(size)
        sealed = _runtime.seal(key, 7, data)
        assert len(sealed) == size + 16 and _runtime.unseal(key, 7, sealed) == data
        assert _runtime.unseal(key, 8, sealed) is None and _runtime.unseal(key[::-1], 7, sealed) is None
        for place in range(0, len(sealed), max(1, size // 50)):
            changed = bytearray(sealed)
            changed[place] ^= 4
            assert _runtime.unseal(key, 7, changed) is None
    assert _runtime.unseal(key, 7, b"short") is None
    with pytest.raises(ValueError, match="32 bytes"):
        _runtime.seal(b"short", 7, b"")


def test_who_cannot_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(_runtime.Error, match=r"needs OpenSSL's libcrypto, and none is here \(looked for libnone.so\); install OpenSSL"):
        _runtime.find_crypto(["libnone.so"])
    monkeypatch.setenv(ENCRYPT, "yes")
    with pytest.raises(SecretError, match="INTERLACE_ENCRYPT is 'yes'; it must be 1 or 0"):
        encrypts()


@pytest.fixture
def tap() -> Iterator[tuple[StoreServer, int, list[bytes]]]:
    """A store that encrypts, a port that leads to it, and what went through there."""
    os.environ[ENCRYPT] = "1"
    server, heard = StoreServer(SECRET, "127.0.0.1"), []
    listening = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, to: socket.socket) -> None:
        while data := source.recv(1 << 16):
            heard.append(data)
            to.sendall(data)

    def serve() -> None:
        near, _ = listening.accept()
        far = socket.create_connection(("127.0.0.1", server.port))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield server, listening.getsockname()[1], heard
    listening.close()
    server.close()
    os.environ.pop(ENCRYPT, None)


def test_the_store_is_encrypted(tap: tuple[StoreServer, int, list[bytes]]) -> None:
    server, port, heard = tap
    rank = SecretStore(SECRET, "127.0.0.1", port, 0)
    words = b"a program that nobody else is to read " * 100
    rank.set("program", words)
    assert rank.get("program") == words and server._values[b"program"] == words
    wire = b"".join(heard)
    assert len(wire) > 2 * len(words) and b"program" not in wire and wire.count(store.SEALED) == 2


def test_a_rank_of_the_other_kind_is_refused_by_the_store(tap: tuple[StoreServer, int, list[bytes]]) -> None:
    server = tap[0]
    os.environ.pop(ENCRYPT)
    with pytest.raises(StoreError, match=r"^rank 0 or the launcher encrypts \(INTERLACE_ENCRYPT=1\) and this rank does not; set it for all"):
        SecretStore(SECRET, "127.0.0.1", server.port, 1)
    plain = StoreServer(SECRET, "127.0.0.1")
    os.environ[ENCRYPT] = "1"
    with pytest.raises(StoreError, match=r"^this rank encrypts \(INTERLACE_ENCRYPT=1\) and rank 0 or the launcher does not; set it for all"):
        SecretStore(SECRET, "127.0.0.1", plain.port, 1)
    plain.close()


def collectives() -> list[bool]:
    """Whether what came is what was sent, of everything that goes over torch's process groups; and whether a changed message is noticed."""
    rank, group = dist.get_rank(), dist.group.WORLD
    os.environ.update({ENCRYPT: "1", MESH_KEY: "ab" * 32})
    good = []
    try:
        for turn in range(2):
            mine = torch.arange(5, dtype=torch.bfloat16) + rank + turn
            both = [mine - rank, mine - rank + 1]
            one = mine.clone()
            sealed.broadcast(one, group, 1)
            good.append(torch.equal(one, both[1]))
            for everywhere in (True, False):
                parts = list(torch.zeros(10, dtype=mine.dtype).chunk(2)) if everywhere or rank == 0 else None
                sealed.gather(mine, parts, group, everywhere)
                good.append(parts is None or all(map(torch.equal, parts, both)))
                found = sealed.objects({"rank": rank, "x": "y" * 1000 * rank}, group, everywhere)
                good.append(found == ([{"rank": r, "x": "y" * 1000 * r} for r in range(2)] if everywhere or rank == 0 else None))
            sent = torch.arange(7, dtype=torch.uint8) + 10 * rank
            came = torch.zeros(6 if rank == 0 else 8, dtype=torch.uint8)  # three from each to rank 0, four to rank 1
            sealed.exchange(came, sent, [3, 4], [3, 3] if rank == 0 else [4, 4], group)
            first = torch.arange(3 * rank, 3 + 4 * rank, dtype=torch.uint8)
            good.append(torch.equal(came, torch.cat([first, first + 10])))
        if rank == 1:
            sealed._sent[group.group_name, 1, -1] += 1  # as if a message had been left out, or an old one repeated
        try:
            sealed.broadcast(torch.ones(3), group, 1)
            good.append(rank == 1)
        except InterlaceError as e:
            good.append(rank == 0 and "sent was changed on the way" in str(e))
    finally:
        del os.environ[ENCRYPT], os.environ[MESH_KEY]
    return good


def test_what_torchs_groups_carry_is_sealed() -> None:
    for good in ranks.run(collectives, 2):
        assert all(good) and len(good) == 13, good


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **variables}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.py").write_bytes(b"".join(file.read_bytes() for file in find_text().files[:12]))
    return tmp_path


SO_RCVBUFFORCE = 33  # Linux: a receive buffer above the system's limit, for root
PACKET_OUTGOING = 4


class Heard:
    """A command of the training, in a network of its own, and all that goes over that network's loopback."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self.packets: list[bytes] = []
        self.over = False
        self.error: OSError | None = None
        self.code, self.said = -1, ""
        thread = threading.Thread(target=self.run, args=(folder, *arguments), kwargs=variables)
        thread.start()
        thread.join()
        if self.error is not None:
            pytest.skip(f"this user may not make a network: {self.error}")
        assert self.code == 0, self.said
        self.bytes = b"".join(self.packets)

    def run(self, folder: Path, *arguments: str, **variables: str) -> None:
        clone_newnet, siocsifflags, up = 0x40000000, 0x8914, 1
        if ctypes.CDLL(None, use_errno=True).unshare(clone_newnet) != 0:  # of this thread and the processes that it starts
            self.error = OSError(ctypes.get_errno(), "unshare")
            return
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, siocsifflags, struct.pack("16sh", b"lo", up) + bytes(22))
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as ears:
            with contextlib.suppress(PermissionError):  # a thread that waits for a processor does not lose packets
                ears.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 28)
            ears.bind(("lo", 0))
            ears.settimeout(0.2)
            listening = threading.Thread(target=self.listen, args=(ears,))
            listening.start()
            command = [sys.executable, "-m", "interlace.cli", *TRAIN, *arguments]
            place = environment(folder, **variables)
            done = subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, timeout=300)
            self.code, self.said, self.over = done.returncode, done.stderr, True
            listening.join()

    def listen(self, ears: socket.socket) -> None:
        while not self.over:
            try:
                packet, (_, _, kind, *_) = ears.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if kind != PACKET_OUTGOING:  # a loopback has each twice
                self.packets.append(packet)


def runs_of(file: Path, found: bytes) -> int:
    """How many stretches of the weights in a file are in what was heard."""
    with safe_open(str(file), "np") as weights:
        values = [weights.get_tensor(name).tobytes() for name in weights.keys()]  # noqa: SIM118
    pieces = [data[at : at + 32] for data in values for at in range(0, len(data) - 32, max(32, len(data) // 4 // 32 * 32))]
    pieces = [piece for piece in pieces if len(set(piece)) > 16]
    text = np.frombuffer(found, np.uint8)
    ahead = np.zeros(1 << 16, bool)  # two bytes of a piece: one in a hundred places has some
    ahead[[int.from_bytes(piece[:2], "little") for piece in pieces]] = True
    at = np.flatnonzero(ahead[text[:-1].astype(np.uint16) | text[1:].astype(np.uint16) << 8])
    heard = {found[i : i + 32] for i in at.tolist()}
    return sum(piece in heard for piece in pieces)


def test_training_has_the_same_bits_and_nobody_reads_along(folder: Path) -> None:
    """The parameters after step 3 are gathered by step 4: they are on the network, or are not, as where ranks share memory."""
    heard, losses = {}, {}
    for name, arguments, variables in (
        ("plain", [], {"INTERLACE_SHARED_MEMORY": "0"}), ("memory", [], {}), ("sealed", ["--encrypt"], {}),
    ):  # fmt: skip
        run = Heard(folder, "--ranks", "2", "--save", name, *SAVES, "--log", f"{name}.jsonl", *arguments, **variables)
        heard[name] = run.bytes
        losses[name] = [json.loads(line)["loss"] for line in (folder / f"{name}.jsonl").read_text().splitlines() if '"loss"' in line]
    assert losses["plain"] == losses["memory"] == losses["sealed"] and len(losses["plain"]) == 4
    for file in ("model.safetensors", "optimizer.safetensors"):
        for name in ("memory", "sealed"):
            assert (folder / "plain" / file).read_bytes() == (folder / name / file).read_bytes()
    assert runs_of(folder / "plain.step-3" / "model.safetensors", heard["plain"]) > 100
    for name in ("memory", "sealed"):
        assert runs_of(folder / f"{name}.step-3" / "model.safetensors", heard[name]) == 0


def test_ranks_without_a_secret_or_of_two_kinds_do_not_start(folder: Path) -> None:
    """Started as Slurm would."""
    secret = {"INTERLACE_SECRET": "of this run and of no other"}
    for kinds, words in (
        (({ENCRYPT: "1"}, {ENCRYPT: "1"}), "INTERLACE_ENCRYPT=1 needs a secret that all ranks have and nobody else: (umask 077;"),
        (({**secret, ENCRYPT: "1"}, secret), "rank 0 or the launcher encrypts (INTERLACE_ENCRYPT=1) and this rank does not"),
    ):
        port = str(free_port())
        slurm = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places = [environment(folder, **slurm, **kind, RANK=str(r), LOCAL_RANK=str(r)) for r, kind in enumerate(kinds)]
        started = [commands.Command(*TRAIN, cwd=folder, env=place) for place in places]
        said = started[1].communicate(timeout=120)[1]
        started[0].send_signal(signal.SIGKILL)
        started[0].communicate()
        assert started[1].returncode != 0 and words in " ".join(said.split()), said
