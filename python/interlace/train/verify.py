"""Finding hardware that computes wrong without saying so: every so many steps, a step is made twice from the same state and compared.

    step    39 | 40: keep the states in a file ─► step ─► digests A ─► put the states back ─► step ─► digests B, A == B | 41 ...

A processor or memory that is wrong now and then gives two results; one that is always wrong in the same way is not found. The copy lies
in a file, so no memory limit is broken. Of what differs, the losses say most: they are a rank's own, while a wrong gradient has reached
all ranks with the sums.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import torch

from interlace.compiling.states import WEIGHT, Unit
from interlace.errors import InterlaceError
from interlace.train import generators
from interlace.train.materialize import checksum
from interlace.train.run import Run

Tensor = torch.Tensor
CHUNK = 4 << 20  # bytes that come from a device at a time


class SilentCorruptionError(InterlaceError):
    """A step, made twice from the same state, gave two results."""


Digests = tuple[dict[str, str], dict[str, str]]  # of a rank's own results, and of what ranks make together, by what they are of


class Verify:
    """Of one trainer. Every rank must call its methods in the same steps, as all ranks have the same Config.verify_steps."""

    def __init__(self, run: Run) -> None:
        self._run, self._since = run, 0
        self._file: IO[bytes] | None = None
        self._first: Digests = {}, {}
        opaque = run.programs.opaque
        if run.config.verify_steps and opaque is not None and opaque.calls:
            raise InterlaceError(
                f"verify_steps makes a step twice, but {', '.join(sorted(str(call['module']) for call in opaque.summary())[:3])} runs in "
                "Python, where a second call may see what the first one left; leave verify_steps out, or have that module captured"
            )

    def due(self, ordinary: bool) -> bool:
        """Whether the step about to run is one of those; `ordinary`: it is not recorded, else the next one that is not."""
        if not self._run.config.verify_steps:
            return False
        self._since += 1
        if self._since < self._run.config.verify_steps or not ordinary:
            return False
        self._since = 0
        return True

    def first(self, inputs: Any, rows: list[list[float]]) -> None:
        """The first of the two: afterwards all is as it was. Error, on every rank: the states cannot be written to a file."""
        run = self._run
        run.settle_save()
        run.flush()
        try:
            run.agree(f"copy of the states at step {run.steps}", self._keep, InterlaceError)()
        except InterlaceError:
            self._forget()  # what it has taken of a full disk
            raise
        generator = generators.state(run.peers.device) if run.config.rng == "compat" else None
        with run.peers.guard(), run.determinism():
            self._first = self._digests(run.runner.step(inputs, rows, run.steps))
            self._put_back()
        if generator is not None:
            generators.restore(run.peers.device, generator)

    def second(self, result: dict[str, Any]) -> None:
        """Compares what the second one gave. Error, on every rank, with the states as they were before the step: they differ."""
        run = self._run
        with run.peers.guard():
            both = zip(self._first, self._digests(result), strict=True)
            own, shared = ([name for name, value in b.items() if a[name] != value] for a, b in both)
            everyone = run.peers.exchange(f"both of step {run.steps}", [socket.gethostname(), own, shared])
            wrong = any(own or shared for _, own, shared in everyone)
            if wrong:
                self._put_back()
        self._forget()
        if wrong:
            raise SilentCorruptionError(f"step {run.steps}, made twice from the same state, gave two results: {_words(everyone)}")

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    # ---- what a step changes on this rank ----

    def _storages(self) -> Iterator[tuple[str, Tensor, Unit | None, str]]:
        """(name, storage, unit, role) of everything that outlives a step; a tensor is valid until the next one is asked for."""
        states = self._run.states
        for unit, role in states.kept():
            of = ", ".join(repr(p.name) for p in unit.parameters[:1]) + (" and others" if len(unit.parameters) > 1 else "")
            yield f"{'weight' if role in ('full', 'shard') else role} of {of}", states.local(unit, role)[0], unit, role
        for p in states.loose:
            yield f"weight of '{p.name}'", next(states.parts(p, WEIGHT))[0], None, WEIGHT
        for name, buffer in self._run.tensors.buffers.items():
            yield f"buffer '{name}'", buffer, None, ""

    def _keep(self) -> Any:
        tier = self._run.config.tier
        folder = tier if tier not in (None, "host") else None
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            for _, t, unit, role in self._storages():
                for part in _parts(t):
                    _write(self._file, part.cpu())
                if unit is not None:
                    self._run.states.put_back(unit, role)
        except OSError as e:
            raise InterlaceError(
                f"verify_steps keeps a copy of this rank's states in {folder or tempfile.gettempdir()}: {e.strerror}; "
                "make room there, set TMPDIR to another folder, or leave verify_steps out"
            ) from None
        return lambda: None

    @torch.no_grad()
    def _put_back(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        for _, t, unit, role in self._storages():
            for part in _parts(t):
                host = part if part.device.type == "cpu" else torch.empty(part.shape, dtype=part.dtype)
                _read(self._file, host)
                if host is not part:
                    part.copy_(host)
            if unit is not None:
                self._run.states.settle(unit.id, role)

    def _digests(self, result: dict[str, Any]) -> Digests:
        own: dict[str, str] = {}
        for name, values in result["outputs"].items():
            for k, value in enumerate(values):
                own[f"output '{name}'" + (f" of micro-batch {k}" if len(values) > 1 else "")] = checksum(value).hex()
        norm = result["norm"]
        shared = {"the gradient's norm": repr(norm)}
        self._run.flush()
        for name, t, unit, role in self._storages():
            shared[name] = checksum(t).hex()
            if unit is not None:
                self._run.states.put_back(unit, role)
        return own, shared


def _parts(t: Tensor) -> Iterator[Tensor]:
    """A storage in pieces that are looked at one by one; of host memory in one."""
    flat = t.detach().view(-1)
    yield from [flat] if t.device.type == "cpu" else flat.split(max(1, CHUNK // t.element_size()))


def _bytes(t: Tensor) -> memoryview:
    return t.view(torch.uint8).numpy().data.cast("B") if t.numel() else memoryview(b"")


def _write(file: IO[bytes], t: Tensor) -> None:
    rest = _bytes(t)
    while rest:
        rest = rest[file.write(rest) :]


def _read(file: IO[bytes], t: Tensor) -> None:
    rest = _bytes(t)
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise InterlaceError("the copy of this rank's states is shorter than it was written; is its disk full, or broken?")
        rest = rest[count:]


def _words(everyone: list[list[Any]]) -> str:
    """What differs, and who is to be looked at. `everyone`: host, own results that differ, others that do, of each rank."""
    several = len(everyone) > 1
    parts = []
    for rank, (_, own, shared) in enumerate(everyone):
        names = own + shared
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            parts.append((f"on rank {rank} " if several else "") + ", ".join(names[:2]) + more)
    suspects = [f"rank {rank} (host {host})" for rank, (host, own, _) in enumerate(everyone) if own]
    if not several:
        who = f"Test the memory and the processor of host {everyone[0][0]}"
    elif suspects and len(suspects) < len(everyone):
        who = f"Outputs come from what a rank computes itself, so test the memory and the processor of {', '.join(suspects)} first"
    else:
        who = "This may have come from any of the ranks; test the memory and the processors of their hosts one by one"
    return (
        f"{'; '.join(parts)}. {who}. The parameters are as they were before this step: save them and go on elsewhere. (On an "
        "accelerator, kernels that give other bits each time look the same: set deterministic=True)"
    )
