"""Where every rank is, as far as it has said: the answer to "what was the stuck one doing".

Each rank leaves its place (step, op, unit, module) in the key-value store once a second, from a thread of its own, and once more when it
fails. A rank that hangs or is stopped leaves its last place standing, so the others can tell it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

BEAT_S = 1.0
ANSWER_S = 2.0  # how long the store may take to answer when something is wrong already
OP_LENGTH = 120  # characters of an op's text

Place = dict[str, Any]


class Places:
    """The places of one trainer's ranks. `store` is None in a run of one rank: then there is nothing to tell."""

    def __init__(
        self, store: Any, rank: int, size: int, lost: Callable[[], bool] = lambda: False, sever: Callable[[], None] = lambda: None
    ) -> None:
        """`lost`: whether a rank is known to be lost; then `sever` breaks off what waits for it."""
        self._store, self.rank, self.size, self._lost, self._sever = store, rank, size, lost, sever
        self._heard: dict[int, tuple[int | None, float]] = {}  # by rank: the last beat, and when it was first seen
        self._where: Callable[[], Callable[[], Place] | None] = lambda: None
        self._mute = False  # the store did not answer in time once: nobody asks it again
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat, self._signed = 0, -BEAT_S

    def start(self, where: Callable[[], Place]) -> None:
        """Begins to tell this rank's place, as the method `where` gives it, for as long as its object lives."""
        if self._store is None:
            return
        self._where = weakref.WeakMethod(where)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, name="interlace-places", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            if self._where() is None:
                return
            told, lost = self.tell(), self._lost()
            if lost and not self._stop.is_set():
                self._sever()
            if lost or not told:
                return

    def tell(self) -> bool:
        """Leaves the place as it is now; false when the store is gone."""
        where = self._where()
        if where is None:
            return True
        try:
            self._beat += 1
            place = {**where(), "beat": self._beat, "time": time.time()}
            self._store.set(f"at/{self.rank}", json.dumps(place))
            return True
        except Exception:  # the trainer or the store is closing
            return False

    def sign(self) -> None:
        """A sign of life where there is no trainer yet to tell of, one every BEAT_S at most."""
        if self._store is not None and time.monotonic() - self._signed >= BEAT_S:
            self._beat += 1
            self._signed = time.monotonic()
            self._store.set(f"at/{self.rank}", json.dumps({"step": -1, "beat": self._beat, "time": time.time()}))

    def stop(self) -> None:
        self._stop.set()
        self._where = lambda: None

    def of(self, rank: int) -> Place | None:
        """What a rank said last, or nothing."""
        key = f"at/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def step(self) -> int:
        """The step that this rank is in, or was in last."""
        where = self._where()
        return -1 if where is None else int(where()["step"])

    def silent(self, seconds: float) -> list[int]:
        """The other ranks that have said nothing new for so long, since this was first asked."""
        found = []
        for r in (r for r in range(self.size) if r != self.rank):
            beat, now = (self.of(r) or {}).get("beat"), time.monotonic()
            if r not in self._heard or self._heard[r][0] != beat:
                self._heard[r] = beat, now
            elif now - self._heard[r][1] >= seconds:
                found.append(r)
        return found

    def behind(self) -> list[int]:
        """The ranks that have come less far than this one, and of those the ones that have come least far."""
        self.tell()
        steps = [int((self.of(r) or {}).get("step", -1)) for r in range(self.size)]
        return [r for r, step in enumerate(steps) if step == min(steps) < steps[self.rank]]

    def text(self) -> str:
        """One line a rank, behind a line break each; empty when nothing is known."""
        found = self.ask(lambda: [self.of(r) for r in range(self.size)])
        if found is None or not any(found):
            return ""
        return "".join(f"\n  rank {r}: {describe(p)}" for r, p in enumerate(found))

    def ask(self, action: Callable[[], Any]) -> Any:
        """What an action on the store gives, or None when it fails or takes longer than ANSWER_S: a store whose process is stopped never
        answers, and then it is not asked again."""
        if self._mute:
            return None
        found: list[Any] = []

        def run() -> None:
            with contextlib.suppress(Exception):
                found.append(action())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        self._mute = thread.is_alive()
        return found[0] if found else None


def describe(place: Place | None) -> str:
    """ "step 17, in reduce.start(...) of u3 (model.layers.0.mlp), 3.2 s ago"."""
    if place is None or place.get("step", -1) < 0:
        return "no step yet"
    op = str(place["op"]).split("  #")[0].strip()
    op = op if len(op) <= OP_LENGTH else op[: OP_LENGTH - 3] + "..."
    of = f", unit {place['units']}" if place["units"] else ""
    module = f" ({place['module']})" if place["module"] else ""
    age = max(0.0, time.time() - float(place["time"]))
    return f"step {place['step']}, at {op}{of}{module}, said {age:.1f} s ago"
