"""The ranks of a run: who is there, how they agree, and how a failure on one reaches the others by name.

Agreement goes through torch's key-value store, never through a collective, so a rank that is missing or differs gives an error
that names it. Tensors travel on process groups that belong to one trainer alone (groups.py); all waits have a deadline.

How a failure spreads: the rank that fails posts its reason in the store, then closes its groups. The others' transfers break at
once, they look into the store and report the first cause, not the neighbour whose connection closed:

    rank 2: batch of a wrong shape → posts "failed/2", closes
    rank 1: connection to 2 closed → posts "lost/1" = 2, closes, reports rank 2 and its reason
    rank 0: connection to 1 closed → follows 1 → 2,              reports rank 2 and its reason

Between devices no transfer breaks. There the thread that tells this rank's place (places.py) looks for ranks that have failed or are gone,
and aborts the groups; where a rank is merely not coming, they end at their timeout, and who has come least far is the one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import InterlaceError
from interlace.dist.groups import Groups, native_backend
from interlace.dist.places import Places
from interlace.dist.rendezvous import leave_last, meet, presence, sever
from interlace.dist.secret import ENCRYPT, MESH_KEY, encrypts
from interlace.dist.store import SecretStore, StoreError

_CHUNK = 1 << 20  # bytes of one store entry
_PAUSE_S = 0.05  # longest pause between two looks for a key
_MOST = 1 << 30  # bytes of a value, also after it was unpacked
_SILENT_S = 3.0  # without a sign of life, of a rank to which a connection has ended
_FAILED = "a rank has failed"  # a key that is there when "failed/R" or "lost/R" is, of any rank


class PeerError(InterlaceError):
    """Another rank failed, differs or is gone. `rank` is its number, or None when unknown. `agreed`: every rank found the same in what
    they exchanged, before anything came of it; nobody needs to be told, and all can go on."""

    placed = False  # whether the message tells where every rank is

    def __init__(self, message: str, rank: int | None = None, agreed: bool = False) -> None:
        super().__init__(message)
        self.rank, self.agreed = rank, agreed


def ranks_text(ranks: list[int]) -> str:
    """ "rank 2", "ranks 1 and 3", "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> tuple[list[int], str, Any, Any] | None:
    """The ranks whose entries are not rank 0's, and of the first one that the first of them has otherwise: its name, theirs, rank 0's."""
    here = everyone[0]
    other = [r for r, theirs in enumerate(everyone) if theirs != here]
    if not other:
        return None
    there = everyone[other[0]]
    name = next(n for n in (*here, *there) if here.get(n) != there.get(n))
    return other, name, there.get(name, "missing"), here.get(name, "missing")


class Peers:
    """One trainer's view of the ranks. With one rank and no torchrun there is no process group and nothing ever waits."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self.rank, self.size = 0, 1
        self._store: Any = None
        self._presence: SecretStore | None = None  # who knows which ranks are there
        self._exchanged: dict[str, int] = {}  # name -> how often exchange() was called with it
        self._on_close: list[Callable[[], None]] = []
        self._closed = False
        self._failed = False
        if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if device.type != "cpu":
                if encrypts():
                    raise InterlaceError(f"{ENCRYPT}=1 is for TCP, and {device.type} devices transfer otherwise; leave it out, or train on the CPU")
                torch.accelerator.set_device_index(device)
            backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{native_backend(device)}"
            meet(backend, datetime.timedelta(seconds=max(timeout_s, 60.0)))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if encrypts() and MESH_KEY not in os.environ:
                raise InterlaceError(f"{ENCRYPT}=1: the process group has no secret; leave init_process_group to interlace.compile")
            store = dist.distributed_c10d._get_default_store()
            self._presence = presence()
            leave_last(store, self.rank, self.size)
            # Every rank makes its trainers in the same order, so its own count names the trainer.
            count = store.add(f"interlace/trainers/{self.rank}", 1)
            self._store = dist.PrefixStore(f"interlace/{count}", store)
            if device.type != "cpu":
                weakref.finalize(self, _ended_well, self._store, self.rank)
        # Where a rank lies on the mesh, in words: "stage 1 of pp, dp 0"; "" while there is no mesh.
        self.locate: Callable[[int], str] = lambda rank: ""
        self.groups = Groups(device, self.rank, self.size, timeout_s)
        self._aborted: PeerError | None = None  # why a device's groups were, by the thread of places
        lost = weakref.WeakMethod(self._somebody_lost)  # or the thread of places would keep this, and a trainer that nobody closes
        self.places = Places(self._store, self.rank, self.size, lambda: (lost() or bool)(), sever if device.type == "cpu" else self.groups.abort)

    # ---- agreement through the store ----

    def exchange(self, what: str, value: Any, before_step: int | None = None) -> list[Any]:
        """Every rank's value (JSON), by rank. `before_step`: one that only ranks with a question exchange before. Errors: ranks that did not
        come within the timeout, failed meanwhile, or are in that step."""
        if self._store is None:
            return [value]
        if before_step is not None and self.places.step() == before_step:  # a checkpoint was loaded: places say where ranks were before
            before_step = None
        times = self._exchanged[what] = self._exchanged.get(what, 0) + 1
        key = what if times == 1 else f"{what} ({times})"  # else a rank could read what another said the time before
        self._put(f"{key}/{self.rank}", json.dumps(value).encode())
        deadline = time.monotonic() + self.timeout_s
        return [json.loads(self._get(f"{key}/{r}", r, what, deadline, before_step)) for r in range(self.size)]

    def broadcast(self, what: str, data: bytes, patience_s: float | None = None) -> bytes:
        """Rank 0's bytes on every rank; `data` of the others is not looked at."""
        if self._store is None:
            return data
        if self.rank == 0:
            self._put(what, zlib.compress(data, 1))
            return data
        return _unpacked(self._get(what, 0, what, time.monotonic() + (patience_s or self.timeout_s)), what)

    def post(self, key: str, value: Any) -> None:
        """Leaves a value (JSON) for collect_one of the others; does not wait."""
        if self._store is not None:
            self._put(key, json.dumps(value).encode())

    def collect(self, what: str, value: Any, go_on: Callable[[], bool]) -> list[Any]:
        """What every rank posts under what/rank, `value` being this one's: as long as it takes, or until go_on() is false."""
        return [value if r == self.rank else self.collect_one(what, r, go_on) for r in range(self.size)]

    def collect_one(self, what: str, rank: int, go_on: Callable[[], bool]) -> Any:
        """What a rank posts under what/rank. Error: it failed, or has given no sign of life for the timeout."""
        key, pause = f"{what}/{rank}", 0.005
        beat, since = None, time.monotonic()
        while not self._there(key):
            with self._store_errors():
                place = self.places.of(rank)
            if not go_on():
                raise PeerError(f"'{what}' was given up")
            if place is not None and place["beat"] != beat:
                beat, since = place["beat"], time.monotonic()
            if time.monotonic() - since > self.timeout_s:
                raise PeerError(f"rank {rank} gave no sign of life for {self.timeout_s:g} s in '{what}'", rank)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return json.loads(self._value(key))

    def _put(self, key: str, data: bytes) -> None:
        chunks = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)] or [b""]
        with self._store_errors():
            for i, chunk in enumerate(chunks):
                self._store.set(f"{key}#{i}", chunk)
            self._store.set(key, str(len(chunks)))  # last: the value is complete when its key is there

    def _get(self, key: str, owner: int, what: str, deadline: float, before_step: int | None = None) -> bytes:
        pause = 0.0005
        while not self._there(key):
            if before_step is not None:
                with self._store_errors():
                    step = int((self.places.of(owner) or {}).get("step", -1))
                if step == before_step and not self._there(key):
                    raise PeerError(f"rank {owner} makes step {before_step} as it is", owner)
            if time.monotonic() > deadline:
                with self._store_errors():
                    # Keys that all ranks write end in their number; then say all that are missing.
                    stem, _, tail = key.rpartition("/")
                    absent = ([r for r in range(self.size) if not self._store.check([f"{stem}/{r}"])] if tail.isdigit() else [owner])
                absent = absent or [owner]
                raise PeerError(
                    f"{ranks_text(absent)} did not reach '{what}' in time (Config.timeout_s is {self.timeout_s:g}); "
                    "every rank must compile and step the same trainers in the same order",
                    absent[0],
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)
        return self._value(key)

    def _there(self, key: str) -> bool:
        """Whether a value has been written. Error: it has not, and a rank has failed."""
        with self._store_errors():
            if self._store.check([key]):
                return True
            cause = self._posted() or self._lost()
            # It may have written the value, and failed or closed after that, since the look above.
            if cause is None or self._store.check([key]):
                return cause is not None
        raise cause

    def _value(self, key: str) -> bytes:
        with self._store_errors():
            count = int(self._store.get(key))
            if not 0 <= count <= _MOST // _CHUNK:
                raise PeerError(f"the store holds no value under '{key}' that a rank would write")
            return b"".join(self._store.get(f"{key}#{i}") for i in range(count))

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # DistStoreError and DistNetworkError are among them
            raise _no_store(e) from e

    # ---- failures ----

    def fail(self, reason: BaseException) -> None:
        """Tells the others that this rank stops, and why, then closes the groups so that nobody waits for it. Never raises."""
        if self._store is None or self._failed:
            return
        self._failed = True
        self.places.ask(self.places.tell)
        peer = reason.rank if isinstance(reason, PeerError) else None
        key, words = f"failed/{self.rank}", str(reason) or type(reason).__name__
        if isinstance(reason, PeerError):
            key, words = f"lost/{self.rank}", json.dumps([peer, str(reason)])
        self.places.ask(lambda: (self._store.set(key, words), self._store.set(_FAILED, "")))
        self.close()

    def left_by(self, error: BaseException) -> None:
        """Tells the others of an error outside of the trainer's calls that ends this rank's loop. Where a transfer of the loop's own broke,
        that is the failure of another rank, which is known a while later. Never raises."""
        if self._store is None or self._failed or self._closed or isinstance(error, SystemExit):
            return
        cause, end = None, time.monotonic() + 2 * _SILENT_S
        while cause is None and isinstance(error, RuntimeError) and is_transfer_error(error) and time.monotonic() < end:
            cause = self.places.ask(lambda: self._posted() or self._lost() or _gone(self.places.silent(_SILENT_S)))
            time.sleep(_PAUSE_S)
        self.fail(cause or error)

    def explain(self, error: BaseException) -> PeerError:
        """The cause behind a broken transfer: a failed rank's own words (posted before it closed), or the rank that was lost."""
        text = str(error).split("\n")[0]
        match = re.search(r"\branks? (\d+)", text)
        peer = int(match.group(1)) if match else None
        cause = self.places.ask(lambda: self._posted(peer) or (self._lost() if peer is None else None))  # the store may be gone, or stopped, with its process
        if cause is None and peer is None and self.device.type != "cpu":
            cause = self._aborted or self._not_coming(text)
        if cause is not None:
            return cause
        return PeerError(text if peer is not None else f"a transfer between ranks failed: {text}", peer)

    def _posted(self, start: int | None = None) -> PeerError | None:
        """What a failed rank has posted; a rank that only lost another one leads to that one."""
        for r in range(self.size):
            if r != self.rank and self._store.check([f"failed/{r}"]):
                return PeerError(f"rank {r} failed: {self._store.get(f'failed/{r}').decode()}", r)
        seen = {self.rank}
        candidates = [start] if start is not None else [r for r in range(self.size) if r != self.rank]
        for r in candidates:
            root: int | None = r
            while root is not None and root not in seen and self._store.check([f"lost/{root}"]):
                seen.add(root)
                peer, message = json.loads(self._store.get(f"lost/{root}"))
                if peer is None or peer in seen or not self._store.check([f"lost/{peer}"]):
                    return PeerError(message, peer)
                root = peer
        return None

    def _somebody_lost(self) -> bool:
        try:
            if self.device.type != "cpu":
                self._aborted = self._lost_to_device()
                return self._aborted is not None
            return self._lost() is not None
        except StoreError:  # it has gone with whoever held it
            return self._presence is not None

    def _lost_to_device(self) -> PeerError | None:
        """Who has failed or is gone, which devices' transfers do not tell."""
        try:
            if (lost := self._lost()) is not None:
                return lost
            if self._store.check([_FAILED]) and (posted := self._posted()) is not None:
                return posted
            if not self.groups.cut_off():
                return None
            # Who has closed its trainer has said so, and what it was needed for is under way.
            silent = [r for r in self.places.silent(_SILENT_S) if not self._store.check([f"failed/{r}"])]
        except RuntimeError as e:
            return _no_store(e) if self.groups.cut_off() else None
        return _gone(silent)

    def _not_coming(self, text: str) -> PeerError | None:
        """After a device's transfer has timed out."""
        late = self.places.ask(self.places.behind)
        return PeerError(f"{ranks_text(late)} did not answer for {self.timeout_s:g} s: {text}", late[0]) if late else None

    def _lost(self) -> PeerError | None:
        """A rank whose connection to the store has ended, in a run whose store knows."""
        lost = [r for r in self._presence.gone() if r != self.rank] if self._presence is not None else []
        return _gone(lost)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around code that every rank runs: a failure here is told to the others, and one of theirs is reported as theirs."""
        try:
            yield
            if self._aborted is not None and not self._closed:  # what came of it is nothing
                raise self._aborted
        except PeerError as e:
            if not e.agreed:
                self.fail(e)
            raise self._placed(e) from e
        except (InterlaceError, KeyboardInterrupt, OSError) as e:
            self.fail(e)
            raise
        except RuntimeError as e:
            # On a device a peer that does not come is whatever its process group calls it, and told where the host waits.
            if self._store is not None and (is_transfer_error(e) or self.device.type != "cpu" and self.places.ask(self._posted)):
                cause = self.explain(e)
                self.fail(cause)
                raise self._placed(cause) from e
            self.fail(e)
            if type(e).__module__ == "interlace._runtime":
                raise InterlaceError(str(e)) from e
            raise
        except BaseException as e:
            self.fail(e)
            raise

    def _placed(self, error: PeerError) -> PeerError:
        """The error with the place of every rank. Outer guards add nothing."""
        if error.placed or self._store is None:
            return error
        on_mesh = self.locate(error.rank) if error.rank is not None else ""
        told = str(error) + (f" (rank {error.rank} is {on_mesh})" if on_mesh else "")
        placed = PeerError(told + ("" if error.agreed else self.places.text()), error.rank, error.agreed)
        placed.placed = True
        return placed

    def close(self) -> None:
        """Ends this trainer's groups."""
        if self._closed:
            return
        self._closed = True
        self.places.stop()
        if self._store is not None and not self._failed:
            with contextlib.suppress(Exception):
                self._store.set(f"failed/{self.rank}", "it closed its trainer while others went on")
        for hook in self._on_close:
            hook()
        self.groups.close()

    def on_close(self, hook: Callable[[], None]) -> None:
        """Runs before the groups go, also after a failure: the place to drop what holds them."""
        self._on_close.append(hook)


def _gone(ranks: list[int]) -> PeerError | None:
    if not ranks:
        return None
    return PeerError(f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} lost: process ended or host cut off", ranks[0])


def _ended_well(store: Any, rank: int) -> None:
    """At the end of a process, or of a trainer that nobody closed: a rank that ends before others is not one that was lost."""
    with contextlib.suppress(Exception):
        if not any(store.check([f"{word}/{rank}"]) for word in ("failed", "lost")):
            store.set(f"failed/{rank}", "it ended while others went on")


def _no_store(error: RuntimeError) -> PeerError:
    said = str(error).split("\n")[0]
    return PeerError(f"the key-value store of the run does not answer: rank 0 or the launcher, who holds it, has ended ({said})", 0)


def _unpacked(data: bytes, what: str) -> bytes:
    """Decompressed. Error: no compressed text, or one that grows beyond all measure."""
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, _MOST)
    except zlib.error as e:
        raise PeerError(f"what rank 0 sent as '{what}' cannot be unpacked: {e}", 0) from None
    if not unpacker.eof:
        raise PeerError(f"what rank 0 sent as '{what}' is cut off, or more than {_MOST >> 30} GiB when unpacked", 0)
    return found


def is_transfer_error(error: BaseException) -> bool:
    """Whether an error of the runtime or of torch.distributed is about the connection to another rank."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    words = (
        "connection", "gloo", "nccl", "timed out", "timeout", "process group", "lost rank", "socket", "broken pipe",
    )  # fmt: skip
    return any(w in text for w in words)
