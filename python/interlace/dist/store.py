"""The key-value store of a run, behind its secret: what torch's store does, for those alone who prove that they know the secret.

    rank                                      whoever holds the store
     | -- "ILS1", nonce --------------------> |
     | <------------------- "ILS1", nonce --- |
     | -- proof of both nonces -------------> |      a stranger gets no further than this, and has seen random bytes
     | <---------- proof of both nonces ----- |
     | -- size, number of the op, ... tag --> |      every message has a tag of the connection's own key and its number

Where ranks encrypt (secret.encrypts), greetings begin with "ILS2", and what stands before the tag is encrypted.

Strangers cost little: so many may be connected at once, each for so long, and each is read 36 and 32 bytes of. A rank whose connection
ends is remembered as gone, so that nobody waits for it; one whose host is cut off is noticed within DEAD_S.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from interlace.dist.secret import ENCRYPT, derive, encrypts

MAGIC, SEALED = b"ILS1", b"ILS2"
NONCE, PROOF, TAG = 32, 32, 16
GREETING = len(MAGIC) + NONCE
MAX_MESSAGE = 4 << 20  # bytes; peers.py writes pieces of 1 MiB
MAX_KEY = 4096
MAX_BYTES, MAX_KEYS = 2 << 30, 1 << 20  # of the whole store
MAX_STRANGERS = 256  # connected at once; the one that came first goes
STRANGER_S = 5.0  # for their proof
MESSAGE_S = 30.0  # from a part of a message to its next: a size that was changed on the way is waited for no longer
MAX_UNREAD = 8 << 20  # bytes of answers that a client leaves unread
ACCEPTS = 64  # at a time, so that those who are in are not kept waiting
KEEPALIVE = (3, 1, 5)  # seconds until the first question to a silent host, between two, and how many
DEAD_S = 8.0  # by when a host that does not answer is noticed
CONNECT_S = 60.0  # for all of connecting

SET, GET, CHECK, ADD, COMPARE, DELETE, COUNT, APPEND, RANK, GONE = range(10)
OK, MISSING, REFUSED = range(3)


class StoreError(RuntimeError):
    """The store of a run cannot be reached, or refuses."""


def keep_alive(sock: socket.socket) -> None:
    """The system asks a silent peer whether it is there, and ends the connection when nothing comes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEPALIVE, strict=True):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_S * 1000))


def _pack(op: int, *parts: bytes) -> bytes:
    return bytes([op]) + b"".join(struct.pack("<I", len(p)) + p for p in parts)


def _parts(body: bytes) -> list[bytes]:
    found, at = [], 1
    while at < len(body):
        (size,) = struct.unpack_from("<I", body, at)
        if at + 4 + size > len(body):
            raise ValueError("a part is cut off")
        found.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return found


class _Channel:
    """The messages of one connection, one way: numbered, each with a tag, and encrypted where ranks encrypt."""

    def __init__(self, key: bytes, encrypted: bool) -> None:
        self._key, self._encrypted, self._number = key, encrypted, 0

    def seal(self, body: bytes) -> bytes:
        self._number += 1
        if self._encrypted:
            from interlace import _runtime

            return struct.pack("<I", len(body)) + _runtime.seal(self._key, self._number, body)
        return struct.pack("<I", len(body)) + body + self._tag(body)

    def open(self, body: bytes, tag: bytes) -> bytes | None:
        """What was sealed; None: it was changed on its way."""
        self._number += 1
        if self._encrypted:
            from interlace import _runtime

            found = _runtime.unseal(self._key, self._number, body + tag)
            return None if found is None else bytes(found)
        return body if hmac.compare_digest(self._tag(body), tag) else None

    def _tag(self, body: bytes) -> bytes:
        return hmac.new(self._key, struct.pack("<QI", self._number, len(body)) + body, hashlib.sha256).digest()[:TAG]


def _proof(key: bytes, who: str, nonces: bytes) -> bytes:
    return hmac.new(key, who.encode() + nonces, hashlib.sha256).digest()


class _Guest:
    """A connection of the server: a stranger until `inward` is there."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.since = sock, time.monotonic()
        self.read, self.unsent = bytearray(), bytearray()
        self.nonces = b""
        self.inward: _Channel | None = None
        self.outward: _Channel | None = None
        self.rank: int | None = None


class StoreServer:
    """Holds the values, in a thread of its own. Listens on one address, at port 0 on one that is free."""

    def __init__(self, secret: bytes, host: str, port: int = 0) -> None:
        self._key, self._encrypts = derive(secret, "store"), encrypts()
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0
        self._gone: set[int] = set()
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listening = socket.socket(family[0], socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(family[4])
            self._listening.listen(1024)
        except OSError as e:
            self._listening.close()
            raise StoreError(f"cannot listen on {host}:{port} for the ranks ({e.strerror})") from None
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._strangers: dict[_Guest, None] = {}
        self._partial: dict[_Guest, float] = {}  # ranks of whom a part of a message has come, and since when no more
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="interlace-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        for s in (self._wake, self._woken):
            s.close()

    # ---- in the thread ----

    def _run(self) -> None:
        running = True
        while running:
            for key, events in self._selector.select(1.0):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._woken:
                    running = False
                else:
                    self._serve(key.data, events)
            self._drop_late()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.sock.close()
        self._listening.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # it went away again, or no descriptor is left: then the oldest goes
                if not self._strangers:
                    time.sleep(0.01)
                    return
                self._drop(next(iter(self._strangers)))
                continue
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                keep_alive(sock)
            guest = _Guest(sock)
            self._strangers[guest] = None
            self._selector.register(sock, selectors.EVENT_READ, guest)
            if len(self._strangers) > MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _drop_late(self) -> None:
        now = time.monotonic()
        late = [g for g in self._strangers if g.since < now - STRANGER_S]
        for guest in late + [g for g, since in self._partial.items() if since < now - MESSAGE_S]:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if guest.sock.fileno() < 0:
            return
        self._strangers.pop(guest, None)
        self._partial.pop(guest, None)
        self._selector.unregister(guest.sock)
        guest.sock.close()
        if guest.rank is not None:
            self._gone.add(guest.rank)

    def _serve(self, guest: _Guest, events: int) -> None:
        if guest.sock.fileno() < 0:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(guest)
            if events & selectors.EVENT_READ:
                room = 1 << 16 if guest.inward is not None else GREETING + PROOF - len(guest.read)
                data = guest.sock.recv(room)
                if not data:
                    raise ConnectionError
                guest.read += data
                while self._take(guest):
                    pass
                if guest.inward is not None and guest.read:
                    self._partial[guest] = time.monotonic()
                else:
                    self._partial.pop(guest, None)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError, struct.error, IndexError):
            self._drop(guest)

    def _take(self, guest: _Guest) -> bool:
        """Handles the next whole message; whether there was one. Error: what no rank would send."""
        if guest.inward is None:
            return self._greet(guest)
        if len(guest.read) < 4:
            return False
        (size,) = struct.unpack_from("<I", guest.read)
        if not 1 <= size <= MAX_MESSAGE:
            raise ValueError("size")
        if len(guest.read) < 4 + size + TAG:
            return False
        body, tag = bytes(guest.read[4 : 4 + size]), bytes(guest.read[4 + size : 4 + size + TAG])
        del guest.read[: 4 + size + TAG]
        asked = guest.inward.open(body, tag)
        if asked is None:
            raise ValueError("tag")
        assert guest.outward is not None
        self._say(guest, guest.outward.seal(self._answer(guest, asked)))
        return True

    def _greet(self, guest: _Guest) -> bool:
        if not guest.nonces:
            if len(guest.read) < GREETING:
                return False
            if guest.read[: len(MAGIC)] not in (MAGIC, SEALED):
                raise ValueError("magic")
            own = os.urandom(NONCE)
            guest.nonces = bytes(guest.read[len(MAGIC) : GREETING]) + own
            del guest.read[:GREETING]
            self._say(guest, (SEALED if self._encrypts else MAGIC) + own)  # a rank of the other kind learns why it cannot go on
            return True
        if len(guest.read) < PROOF:
            return False
        if not hmac.compare_digest(bytes(guest.read[:PROOF]), _proof(self._key, "rank", guest.nonces)):
            raise ValueError("proof")
        del guest.read[:PROOF]
        self._strangers.pop(guest, None)
        guest.inward = _Channel(_proof(self._key, "to store", guest.nonces), self._encrypts)
        guest.outward = _Channel(_proof(self._key, "to rank", guest.nonces), self._encrypts)
        self._say(guest, _proof(self._key, "store", guest.nonces))
        return True

    def _say(self, guest: _Guest, data: bytes) -> None:
        guest.unsent += data
        if len(guest.unsent) > MAX_UNREAD:
            raise ValueError("unread")
        self._flush(guest)

    def _flush(self, guest: _Guest) -> None:
        with contextlib.suppress(BlockingIOError):
            del guest.unsent[: guest.sock.send(guest.unsent)]
        self._selector.modify(guest.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.unsent else 0), guest)

    def _put(self, key: bytes, value: bytes) -> bool:
        grown = self._bytes + len(key) + len(value) - len(self._values.get(key, b""))
        if len(key) > MAX_KEY or grown > MAX_BYTES or len(self._values) >= MAX_KEYS:
            return False
        self._values[key], self._bytes = value, grown
        return True

    def _answer(self, guest: _Guest, body: bytes) -> bytes:
        op, parts = body[0], _parts(body)
        done, refused = _pack(OK), _pack(REFUSED)
        if op == SET:
            return done if self._put(parts[0], parts[1]) else refused
        if op == GET:
            value = self._values.get(parts[0])
            return _pack(MISSING) if value is None else _pack(OK, value)
        if op == CHECK:
            return done if all(key in self._values for key in parts) else _pack(MISSING)
        if op == ADD:
            number = int(self._values.get(parts[0], b"0")) + int(parts[1])
            return _pack(OK, str(number).encode()) if self._put(parts[0], str(number).encode()) else refused
        if op == COMPARE:
            key, expected, wanted = parts
            found = self._values.get(key)
            if (found is None and not expected) or found == expected:
                return _pack(OK, wanted) if self._put(key, wanted) else refused
            return _pack(OK, expected if found is None else found)
        if op == APPEND:
            return done if self._put(parts[0], self._values.get(parts[0], b"") + parts[1]) else refused
        if op == DELETE:
            old = self._values.pop(parts[0], None)
            if old is None:
                return _pack(MISSING)
            self._bytes -= len(parts[0]) + len(old)
            return done
        if op == COUNT:
            return _pack(OK, str(len(self._values)).encode())
        if op == RANK:
            guest.rank = int(parts[0])
            self._gone.discard(guest.rank)
            return done
        if op == GONE:
            return _pack(OK, ",".join(map(str, sorted(self._gone))).encode())
        raise ValueError("op")


class SecretStore(dist.Store):
    """A rank's end, as torch takes it. From any thread; one request at a time."""

    def __init__(self, secret: bytes, host: str, port: int, rank: int | None = None, timeout_s: float = CONNECT_S) -> None:
        super().__init__()
        self._key, self.host, self.port, self.rank = derive(secret, "store"), host, port, rank
        self._wait_s = timeout_s
        self._lock = threading.Lock()
        self._sock = self._connect(time.monotonic() + timeout_s)
        if rank is not None:
            self._ask(RANK, str(rank).encode())

    def _connect(self, deadline: float) -> socket.socket:
        said, pause = "", 0.02
        while time.monotonic() < deadline:
            sock = None
            try:
                sock = socket.create_connection((self.host, self.port), min(STRANGER_S, max(0.1, deadline - time.monotonic())))
                keep_alive(sock)
                self._prove(sock)
                return sock
            except StoreError:
                if sock is not None:
                    sock.close()
                raise
            except OSError as e:  # not there yet, or crowded out by others
                said = e.strerror or str(e) or type(e).__name__
                if sock is not None:
                    sock.close()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        raise StoreError(
            f"cannot reach the store of the run at {self.host}:{self.port} ({said}); is the first rank there, and is its secret the same?"
        )

    def _prove(self, sock: socket.socket) -> None:
        own, mine = os.urandom(NONCE), encrypts()
        magic, other = (SEALED, MAGIC) if mine else (MAGIC, SEALED)
        sock.sendall(magic + own)
        said = _receive(sock, GREETING)
        if said[: len(MAGIC)] == other:
            does, does_not = ("this rank", "rank 0 or the launcher") if mine else ("rank 0 or the launcher", "this rank")
            raise StoreError(f"{does} encrypts ({ENCRYPT}=1) and {does_not} does not; set it for all ranks or for none")
        if said[: len(MAGIC)] != magic:
            raise StoreError(f"what listens at {self.host}:{self.port} is no store of interlace")
        nonces = own + said[len(MAGIC) :]
        sock.sendall(_proof(self._key, "rank", nonces))
        if not hmac.compare_digest(_receive(sock, PROOF), _proof(self._key, "store", nonces)):
            raise StoreError(f"what listens at {self.host}:{self.port} does not know the secret of this run")
        self._outward = _Channel(_proof(self._key, "to store", nonces), mine)
        self._inward = _Channel(_proof(self._key, "to rank", nonces), mine)
        sock.settimeout(None)  # a host that is gone is noticed by keep_alive

    # ---- requests ----

    def _ask(self, op: int, *parts: bytes) -> tuple[int, list[bytes]]:
        body = _pack(op, *parts)
        if len(body) > MAX_MESSAGE:
            raise StoreError(f"a value of {len(body)} bytes is too large for the store")
        with self._lock:
            try:
                self._sock.sendall(self._outward.seal(body))
                (size,) = struct.unpack("<I", _receive(self._sock, 4))
                if not 1 <= size <= MAX_MESSAGE:
                    raise StoreError("the store sent what cannot be an answer")
                self._sock.settimeout(MESSAGE_S)
                answer, tag = _receive(self._sock, size), _receive(self._sock, TAG)
                self._sock.settimeout(None)
            except OSError as e:
                raise StoreError(f"the connection to the store is lost ({e.strerror or e})") from None
            opened = self._inward.open(answer, tag)
            if opened is None:
                raise StoreError("an answer of the store was changed on its way")
            answer = opened
        if answer[0] == REFUSED:
            raise StoreError(f"the store is full (at most {MAX_BYTES >> 30} GiB and {MAX_KEYS} keys)")
        return answer[0], _parts(answer)

    def gone(self) -> list[int]:
        """Ranks whose connections have ended."""
        text = self._ask(GONE)[1][0].decode()
        return [int(r) for r in text.split(",")] if text else []

    # ---- what torch calls ----

    def set(self, key: str, value: Any) -> None:  # type: ignore[override]
        self._ask(SET, key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._polled(lambda: self._ask(GET, key.encode()), [key], self._wait_s)[0]

    def check(self, keys: list[str]) -> bool:
        return self._ask(CHECK, *[k.encode() for k in keys])[0] == OK

    def add(self, key: str, value: int) -> int:
        return int(self._ask(ADD, key.encode(), str(value).encode())[1][0])

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        return self._ask(COMPARE, key.encode(), _bytes(expected), _bytes(wanted))[1][0]

    def delete_key(self, key: str) -> bool:
        return self._ask(DELETE, key.encode())[0] == OK

    def num_keys(self) -> int:
        return int(self._ask(COUNT)[1][0])

    def append(self, key: str, value: Any) -> None:
        self._ask(APPEND, key.encode(), _bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = self._wait_s if timeout is None else timeout.total_seconds()
        self._polled(lambda: self._ask(CHECK, *[k.encode() for k in keys]), keys, limit)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._wait_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._wait_s)

    def clone(self) -> SecretStore:
        return self

    # The names under which torch's C++ looks for them.
    getNumKeys, deleteKey, compareSet = num_keys, delete_key, compare_set  # noqa: N815

    def _polled(self, ask: Callable[[], tuple[int, list[bytes]]], keys: list[str], limit_s: float) -> list[bytes]:
        deadline, pause = time.monotonic() + limit_s, 0.0002
        while True:
            answer, parts = ask()
            if answer == OK:
                return parts
            if time.monotonic() > deadline:
                raise StoreError(f"timed out after {limit_s:g} s waiting for {', '.join(keys)[:200]} in the store")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError(0, "it was closed")
        data += part
    return bytes(data)
