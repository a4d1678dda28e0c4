"""The store behind a secret: what torch does with it, what strangers reach, how much they cost; gloo's listeners after the ranks have met."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
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
