"""The store behind a secret: what torch does with it, what strangers reach, how much they cost; gloo's listeners after the ranks have met."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch.distributed as dist

from interlace.dist import rendezvous, secret, store
from interlace.dist.secret import SecretError
from interlace.dist.store import SecretStore, StoreError, StoreServer

SECRET = b"of this run alone"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    found = StoreServer(SECRET, "127.0.0.1")
    yield found
    found.close()


def test_it_does_what_torchs_store_does(server: StoreServer) -> None:
    first, second = (SecretStore(SECRET, "127.0.0.1", server.port, rank) for rank in (0, 1))
    a, b = dist.PrefixStore("x", first), dist.PrefixStore("x", second)  # through torch's C++
    a.set("k", "v")
    assert b.get("k") == b"v" and b.check(["k"]) and not b.check(["k", "other"])
    assert a.add("n", 2) == 2 and b.add("n", 3) == 5 and b.get("n") == b"5"
    assert a.compare_set("k", "v", "w") == b"w" and b.compare_set("k", "v", "u") == b"w"
    assert a.delete_key("k") and not a.delete_key("k")
    second.set_timeout(store.datetime.timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 s"):
        second.get("nothing")
    late = threading.Timer(0.05, lambda: first.set("late", b"\0\xff" * 1000))
    late.start()
    second.set_timeout(store.datetime.timedelta(seconds=60))
    assert second.get("late") == b"\0\xff" * 1000


def test_a_rank_whose_connection_ends_is_known_to_be_gone(server: StoreServer) -> None:
    first, second = (SecretStore(SECRET, "127.0.0.1", server.port, rank) for rank in (0, 1))
    assert first.gone() == []
    second._sock.close()
    while first.gone() != [1]:
        time.sleep(0.01)
    back = SecretStore(SECRET, "127.0.0.1", server.port, 1)
    assert first.gone() == [] and back.check([])


def test_each_start_has_a_name_of_its_own_that_all_ranks_know(server: StoreServer) -> None:
    first, second = (SecretStore(SECRET, "127.0.0.1", server.port, rank) for rank in (0, 1))
    names = [(rendezvous._name_of_run(first, 0), rendezvous._name_of_run(second, 1)) for _ in range(3)]
    assert all(a == b for a, b in names) and len(set(names)) == 3


def test_another_secret_gets_nowhere(server: StoreServer) -> None:
    SecretStore(SECRET, "127.0.0.1", server.port).set("k", "v")
    with pytest.raises(StoreError, match="cannot reach the store of the run"):
        SecretStore(b"of another run...", "127.0.0.1", server.port, timeout_s=0.2)
    assert server._values == {b"k": b"v"}


def test_who_listens_in_its_place_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            link, _ = listening.accept()
            link.recv(100)
            link.sendall(store.MAGIC + bytes(32))
            link.recv(100)
            link.sendall(bytes(32))
            link.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StoreError, match="does not know the secret of this run"):
            SecretStore(SECRET, "127.0.0.1", listening.getsockname()[1], timeout_s=10)


def test_strangers_learn_nothing_change_nothing_and_are_few(server: StoreServer) -> None:
    """All that they are told is a nonce; they do not keep ranks out; the server holds no more of them than it may."""
    rank = SecretStore(SECRET, "127.0.0.1", server.port, 0)
    rank.set("failed/0", "no")
    choice, kept, told = random.Random(3), [], b""
    for number in range(2000):
        link = socket.create_connection(("127.0.0.1", server.port))
        link.settimeout(0.2)
        kept = [*kept[-600:], link]
        kind = number % 4
        if kind == 0:
            continue
        opening = [b"", store.MAGIC + choice.randbytes(32), choice.randbytes(100), struct.pack("<B", 0) + b"failed/0"][kind]
        try:
            link.sendall(opening)
            if kind == 1 and number % 100 == 1:
                told = link.recv(1000)
                assert len(told) == 36 and told[:4] == store.MAGIC
                link.sendall(choice.randbytes(32) + choice.randbytes(1000))
                with pytest.raises((ConnectionError, TimeoutError)):
                    raise ConnectionError if link.recv(1000) == b"" else AssertionError
        except (ConnectionError, TimeoutError):
            continue
    assert told
    assert len(server._strangers) <= store.MAX_STRANGERS + 1  # one has come and the first is about to go
    assert SecretStore(SECRET, "127.0.0.1", server.port, 1).get("failed/0") == b"no"
    assert server._values == {b"failed/0": b"no"}


def test_a_changed_message_ends_the_connection(server: StoreServer) -> None:
    rank = SecretStore(SECRET, "127.0.0.1", server.port, 0)
    sealed = bytearray(rank._outward.seal(store._pack(store.SET, b"k", b"v")))
    sealed[10] ^= 1
    rank._sock.sendall(sealed)
    assert rank._sock.recv(100) == b"" and server._values == {}


def test_it_listens_where_it_is_told_and_only_there(server: StoreServer) -> None:
    assert server._listening.getsockname()[0] == "127.0.0.1"
    with pytest.raises(StoreError, match=r"cannot listen on 192\.0\.2\.1:0"):
        StoreServer(SECRET, "192.0.2.1")


def test_values_and_keys_have_limits(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SecretStore(SECRET, "127.0.0.1", server.port, 0)
    with pytest.raises(StoreError, match="too large for the store"):
        rank.set("k", bytes(store.MAX_MESSAGE))
    monkeypatch.setattr(store, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="the store is full"):
        rank.set("k", bytes(1001))
    rank.set("k", bytes(500))


def test_what_may_be_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.VALUE, raising=False)
    monkeypatch.delenv(secret.FILE, raising=False)
    assert secret.given() is None
    file = tmp_path / "secret"
    file.write_text("of sixteen letters and more\n")
    monkeypatch.setenv(secret.FILE, str(file))
    file.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        secret.given()
    file.chmod(0o600)
    assert secret.given() == b"of sixteen letters and more"
    monkeypatch.setenv(secret.VALUE, "short")
    with pytest.raises(SecretError, match="has 5 bytes; it needs 16 to 4096"):
        secret.given()
    assert secret.derive(b"a" * 16, "x") != secret.derive(b"a" * 16, "y")


def test_gloo_listens_no_longer_than_until_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch, server: StoreServer) -> None:
    """Two groups of one rank in this process, as two ranks would make them; and they still close as they should."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = rendezvous._sockets(listening=True)
    rank = SecretStore(SECRET, "127.0.0.1", server.port)
    kept = dist.ProcessGroupGloo(dist.PrefixStore("kept", rank), 0, 1)
    listens = rendezvous._sockets(listening=True) - before
    with rendezvous.listening_until_met():
        closed = dist.ProcessGroupGloo(dist.PrefixStore("closed", rank), 0, 1)
    assert rendezvous._sockets(listening=True) - before == listens
    assert len(listens) == 1, "gloo does not listen: this test shows nothing"
    del closed  # its loop looks for the listener's descriptor, and finds one
    del kept
    assert not rendezvous._sockets(listening=True) - before


# ---- what a network does ----


class FaultyLink:
    """A rank's socket. At byte `at` of what is sent, or of what comes, once: a bit flips, the connection ends, some bytes come twice, or
    change places; what comes, comes in pieces of any size."""

    spent = False  # by any of them

    def __init__(self, sock: socket.socket, choice: random.Random, kind: str, outward: bool, at: int) -> None:
        self._sock, self._choice, self._kind, self._outward = sock, choice, kind, outward
        self._at, self._sent, self._came = at, 0, bytearray()

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def _changed(self, data: bytes, begin: int) -> bytes:
        i = self._at - begin
        if FaultyLink.spent or not 0 <= i < len(data):
            return data
        FaultyLink.spent = True
        if self._kind == "flip":
            return data[:i] + bytes([data[i] ^ 1 << self._choice.randrange(8)]) + data[i + 1 :]
        if self._kind == "twice":
            return data[: i + 8] + data[i:]
        if self._kind == "swap":
            return data[:i] + data[i + 4 : i + 8] + data[i : i + 4] + data[i + 8 :]
        self._sock.sendall(data[:i]) if self._outward else None
        self._sock.shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError(104, "cut")

    def sendall(self, data: bytes) -> None:
        changed = self._changed(bytes(data), self._sent) if self._outward else data
        self._sent += len(data)
        self._sock.sendall(changed)

    def recv(self, count: int) -> bytes:
        data = self._sock.recv(self._choice.randint(1, count))
        begin = len(self._came)
        self._came += data
        return self._changed(data, begin)[:count] if not self._outward else data


def run_faulty(server: StoreServer, seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Random requests over one faulty connection, each beside a plain dict; whether the fault met one. What is answered is right, what was
    changed on the way is an error, and others are served as before."""
    choice = random.Random(seed)
    kind, outward = choice.choice(["flip", "flip", "cut", "twice", "swap"]), choice.random() < 0.5
    at, make = choice.randrange(40 if choice.random() < 0.2 else 1500), socket.create_connection
    FaultyLink.spent = False
    known: dict[str, bytes] = {}
    unsure: set[str] = set()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "create_connection", lambda *a: FaultyLink(make(*a), choice, kind, outward, at))
            rank = SecretStore(SECRET, "127.0.0.1", server.port, timeout_s=5)
        for _ in range(40):
            key, value = f"{seed} {choice.randrange(4)}", choice.randbytes(choice.randrange(60))
            what = choice.randrange(4)
            unsure = {key}
            if what == 0:
                rank.set(key, value)
                known[key] = value
            elif what == 1:
                rank.append(key, value)
                known[key] = known.get(key, b"") + value
            elif what == 2:
                assert rank.check([key]) == (key in known)
            else:
                assert rank.delete_key(key) == (known.pop(key, None) is not None)
            unsure = set()
    except StoreError:
        assert FaultyLink.spent
    other = SecretStore(SECRET, "127.0.0.1", server.port)
    for key in {f"{seed} {n}" for n in range(4)} - unsure:
        assert other.check([key]) == (key in known) and (key not in known or other.get(key) == known[key]), (seed, kind)
    return FaultyLink.spent


def test_faults_by_seed(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MESSAGE_S", 0.3)
    met = sum(run_faulty(server, seed, monkeypatch) for seed in range(150))
    assert met > 75


@pytest.mark.soak
def test_many_faults_by_seed(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MESSAGE_S", 0.3)
    assert sum(run_faulty(server, seed, monkeypatch) for seed in range(1000, 6000)) > 2500


LAST_WORD = """
import os, sys, time, torch
from interlace.dist.peers import Peers

peers = Peers(torch.device("cpu"), 60.0)
if peers.rank == 1:  # it looks for the others' values when they have long been there
    read = peers._get
    peers._get = lambda *words: time.sleep(0.7) or read(*words)
print(peers.exchange("the last word", peers.rank))
"""


@pytest.mark.parametrize("secret", [None, "of this run and of no other"])
def test_rank_0_does_not_take_the_store_away_from_who_still_reads(tmp_path: Path, secret: str | None) -> None:
    """Ranks that Slurm or a shell has started: rank 0 holds the store."""
    script = tmp_path / "ranks.py"
    script.write_text(LAST_WORD)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("INTERLACE_S", "TORCHELASTIC"))}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    env |= {"INTERLACE_SECRET": secret} if secret else {}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, script], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes) for r in range(2)
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "[0, 1]\n"), err
