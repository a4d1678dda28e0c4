"""How the ranks of a run meet: which store they use, and whom they listen for until they have met.

    interlace train          the launcher holds a store behind a secret (store.py), on the loopback; INTERLACE_STORE says where
    torchrun with a secret   rank 0 holds one at MASTER_ADDR, port INTERLACE_STORE_PORT (else the one after MASTER_PORT)
    Slurm with a secret      rank 0 holds one at MASTER_ADDR:MASTER_PORT
    without a secret         torch's own store, for networks on which everybody is trusted (docs/security.md)
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import select
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from interlace.dist import secret as secrets
from interlace.dist.launch import STORE
from interlace.dist.store import SecretStore, StoreError, StoreServer
from interlace.errors import InterlaceError

STORE_PORT = "INTERLACE_STORE_PORT"
NO_SECRET = (
    f"{secrets.ENCRYPT}=1 needs a secret that all ranks have and nobody else: (umask 077; openssl rand -hex 32 >~/run.secret), on "
    f"each host, and start every rank with {secrets.FILE}=~/run.secret"
)
_STAY_S = 3.0
_held: list[Any] = []  # torch keeps only the C++ half of a store
_last: list[Any] = []  # what _leave takes, of the group that was made last
_connections: list[tuple[int, int]] = []  # descriptor and number of gloo's sockets


def meet(backend: str, limit: datetime.timedelta) -> None:
    """Makes the process group of all ranks."""
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == int(os.environ["WORLD_SIZE"])
    if one_host and "GLOO_SOCKET_IFNAME" not in os.environ and _has_loopback():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    secret = secrets.given()
    if secrets.encrypts() and secret is None:
        raise secrets.SecretError(NO_SECRET)
    with listening_until_met():
        if secret is None:
            dist.init_process_group(backend, timeout=limit, **_store_of_restart(limit))
            return
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        attempt = "0" if STORE in os.environ else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        secret = secrets.derive(secret, f"attempt {attempt}")  # who is left over from an earlier start is a stranger
        try:
            store = _open_store(secret, rank, limit)
            os.environ[secrets.MESH_KEY] = secrets.derive(secret, "mesh " + _name_of_run(store, rank)).hex()
        except StoreError as e:
            raise InterlaceError(f"rank {rank}: {e}") from None
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)


def _open_store(secret: bytes, rank: int, limit: datetime.timedelta) -> SecretStore:
    host, port = place_of_store()
    if STORE not in os.environ and rank == 0:
        _held.append(StoreServer(secret, host, port))
    store = SecretStore(secret, host, port, rank, limit.total_seconds())
    _held.append(store)
    return store


def _name_of_run(store: SecretStore, rank: int) -> str:
    """What no other run has, though its secret be the same: its keys are others."""
    place = f"interlace/run {store.add(f'interlace/met {rank}', 1)}"
    if rank == 0:
        store.set(place, secrets.fresh())
    return store.get(place).decode()


def place_of_store() -> tuple[str, int]:
    if STORE in os.environ:
        host, _, number = os.environ[STORE].rpartition(":")
        return host, int(number)
    port = int(os.environ["MASTER_PORT"])
    if STORE_PORT in os.environ:
        port = int(os.environ[STORE_PORT])
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own store is at MASTER_PORT
        port += 1
    return os.environ["MASTER_ADDR"], port


def presence() -> SecretStore | None:
    """The store that knows which ranks are there, in a run that has a secret."""
    return next((held for held in reversed(_held) if isinstance(held, SecretStore)), None)


def leave_last(store: Any, rank: int, size: int) -> None:
    """At the end of this process: rank 0, if the store lives in it, stays until the others have left, for three seconds at most. One of
    them may still be reading what all have agreed on, or why rank 0 has failed."""
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if STORE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or isinstance(inner, dist.FileStore):
        return
    if not _last:
        atexit.register(_leave)
    _last[:] = [store, rank, size]


def _leave() -> None:
    store, rank, size = _last
    with contextlib.suppress(Exception):  # the store has gone, with who held it
        store.set(f"interlace/left/{rank}", b"")
        end = time.monotonic() + _STAY_S
        while rank == 0 and not store.check([f"interlace/left/{r}" for r in range(size)]) and time.monotonic() < end:
            time.sleep(0.005)


def _has_loopback() -> bool:
    with contextlib.suppress(OSError):
        return any(name == "lo" for _, name in socket.if_nameindex())
    return False


def _store_of_restart(limit: datetime.timedelta) -> dict[str, Any]:
    """Keys of their own for ranks that torchrun has started again: its store still has the addresses of those that ended."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False, timeout=limit)
    return {"store": dist.PrefixStore(f"interlace/attempt {attempt}", store), "rank": rank, "world_size": size}


# ---- listeners ----


@contextlib.contextmanager
def listening_until_met() -> Iterator[list[tuple[int, int]]]:
    """Around the making of gloo groups: when the ranks have met, gloo's listeners are closed. It would keep them for as long as the
    group lives, and take in whoever connects. Gives the connections that were made, once they are: for ended()."""
    before, connected = _sockets(listening=True), _sockets(listening=False)
    made: list[tuple[int, int]] = []
    yield made
    for fd in _sockets(listening=True) - before:
        with contextlib.suppress(OSError):
            _silence(fd)
    for fd in _sockets(listening=False) - connected:
        with contextlib.suppress(OSError):
            made.append((fd, os.fstat(fd).st_ino))
    _connections.extend(made)


def ended(connections: list[tuple[int, int]]) -> bool:
    """Whether the other side of any of these is gone. Gloo's own loop closes the descriptor then."""
    poll = select.poll()
    for fd, number in connections:
        try:
            if os.fstat(fd).st_ino != number:
                return True
        except OSError:
            return True
        poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def sever() -> None:
    """Ends gloo's connections: a rank is lost whose host is cut off, and gloo alone would wait for it as long as its timeout allows."""
    while _connections:
        fd, number = _connections.pop()
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == number:  # else it was closed, and the descriptor is another's
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)


def _sockets(listening: bool) -> set[int]:
    """This process's descriptors of TCP sockets that listen, or that do not (Linux)."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                    continue
                with socket.socket(fileno=os.dup(fd)) as sock:
                    tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                    if tcp and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                        found.add(fd)
            except OSError:
                continue
    return found


def _silence(fd: int) -> None:
    """Puts something that never becomes ready in a listener's place, where the loop that watches it expects to find it later. A listener
    that no loop of this process watches is not gloo's and stays."""
    for name in os.listdir("/proc/self/fdinfo"):
        try:
            with open(f"/proc/self/fdinfo/{name}") as file:
                watched = any(line.split()[:2] == ["tfd:", str(fd)] for line in file)
        except OSError:
            continue
        if not watched:
            continue
        quiet = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            os.dup2(quiet, fd, inheritable=False)  # closes the listener, and with it its place in the loop
        finally:
            os.close(quiet)
        with select.epoll.fromfd(os.dup(int(name))) as loop:
            loop.register(fd, 0)
