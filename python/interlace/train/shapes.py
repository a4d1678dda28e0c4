"""Batches of several lengths: one program for each declared shape, chosen by all ranks together.

    Config(shapes={"input_ids": [(4, 128), (4, 256)], "labels": [(4, 128), (4, 256)]}, pad={"input_ids": 0, "labels": -100})

    rank 0 has 4 x 90, rank 1 has 3 x 170  →  both need 4 x 170 at most  →  both pad to (4, 256) and run its program

A step begins with one all-reduce of the largest sizes; a shape is compiled when it is first met, so there are as many compilations as
shapes at most. All programs work on the same parameters and states (programs.py: donor).

With pad alone, shapes are made as lengths come, eight between a length and twice that:

    length 137 (the example's), 90, 95, 131, 200  →  137, 96, 96, 137, 208
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from interlace.capture.inputs import InputSpec, leaves, rebuild
from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, Source
from interlace.config import Config, ConfigError, did_you_mean
from interlace.dist.peers import Peers
from interlace.errors import InterlaceError
from interlace.train import batch as batches
from interlace.train.run import Run, shared_capture

log = logging.getLogger("interlace")
Tensor = torch.Tensor
KEPT = 32  # programs of shapes that nobody declared


@dataclasses.dataclass
class Bucket:
    """One declared shape of a micro-batch."""

    sizes: dict[str, tuple[int, ...]]  # of the inputs that vary
    spec: InputSpec | None = None  # of the padded micro-batch
    built: Built | None = None
    stage: int = -1  # of the schedule, whose passes its program has
    steps: int = 0
    used: int = 0  # of all steps, the last one

    @property
    def elements(self) -> int:
        return sum(math.prod(s) for s in self.sizes.values())

    def fits(self, need: dict[str, list[int]]) -> bool:
        return all(all(n <= s for n, s in zip(need[name], size, strict=True)) for name, size in self.sizes.items())

    def describe(self) -> str:
        return ", ".join(f"{name} {list(size)}" for name, size in self.sizes.items())


class Shapes:
    """The declared shapes of a run, from the smallest on. `real` and `padded`: elements of this rank's batches so far, without and with
    padding."""

    def __init__(self, config: Config, peers: Peers, captures: Captures, planner: Planner, example: list[Any]) -> None:
        self.peers, self.accumulation, self.captures, self.planner = peers, config.accumulation, captures, planner
        shapes, self.pad = dict(config.shapes or ()), dict(config.pad)
        count = len(next(iter(shapes.values()), ()))
        buckets = [Bucket({name: sizes[i] for name, sizes in shapes.items()}) for i in range(count)]
        self.buckets = sorted(buckets, key=lambda b: b.elements)
        self.real = self.padded = self.steps = 0
        self._parts: list[Any] = []  # of the step under way
        self.as_running: Callable[[], AbstractContextManager[None]] = nullcontext  # what was frozen since the last step is followed later
        self.open_ended = False  # shapes that nobody declared are compiled when first met, as they are
        self.rounds = not shapes  # and of sizes that are rounded up
        self._dims = {t.name: len(t.shape) for t in InputSpec.of(example[0]).tensors}
        self.current = self.choose(example)

    def switch(self, run: Run, batch: Any) -> list[Any]:
        """A step's micro-batches, padded to the shape that all ranks agree on, whose program then runs."""
        self._parts = batches.micro_batches(None, batch, self.accumulation)
        bucket = self.choose(self._parts)
        filled = self.filled(self._parts, bucket)
        if bucket is self.current and bucket.built is not None and bucket.built.executor is run.executor:
            return filled
        run.flush()
        if bucket.built is None or self.planner.programs.regions.stale(bucket.built.source.waits):
            if self.rounds and len(kept := [b for b in self.buckets if b.built is not None]) >= KEPT:
                min(kept, key=lambda b: b.used).built = None
            bucket.built, bucket.spec = self._build(run, bucket, filled[0]), InputSpec.of(filled[0])
            bucket.stage = run.stage
        else:
            bucket.built = self.planner.programs.again_beside(bucket.built, run.executor, run.ir)
        assert bucket.spec is not None
        self.current = bucket
        run.use(bucket.built)
        run.spec = bucket.spec
        return filled

    def _build(self, run: Run, bucket: Bucket, micro_batch: Any) -> Built:
        """The program of a shape that is met for the first time, on the states of the one that runs."""
        programs = self.planner.programs

        def make() -> Source:
            text, constants = self.captures.training_text(micro_batch)
            return self.planner.source(text, run.planned_passes, constants, run.limit)

        log.info("step %d: compiling for %s", run.steps, bucket.describe())
        with self.as_running():
            source = shared_capture(run, self.captures, f"program for {bucket.describe()}", make)
        return programs.build_beside(source, run.executor, run.ir)

    def forget(self) -> None:
        """All programs are out of date: each shape is compiled again when it is next met."""
        for bucket in self.buckets:
            bucket.built = None

    def choose(self, parts: list[Any]) -> Bucket:
        """The smallest shape that holds the micro-batches of all ranks; every rank must call it. Error: none does."""
        names = list(self.pad)
        need, problem = self._need(parts)
        if problem is not None:
            raise InterlaceError(problem)  # the guard around steps tells the others
        flat = [n for name in names for n in need[name]]
        flat = self.peers.groups.largest(flat)
        for name in names:
            need[name], flat = flat[: len(need[name])], flat[len(need[name]) :]
        if self.rounds:
            chosen = self._of_few(need)
            if chosen not in self.buckets:
                self.buckets.append(chosen)
            return chosen
        if self.open_ended:
            sizes = {name: tuple(size) for name, size in need.items()}
            found = next((bucket for bucket in self.buckets if bucket.sizes == sizes), None)
            if found is None:
                self.buckets.append(found := Bucket(sizes))
            return found
        for bucket in self.buckets:
            if bucket.fits(need):
                return bucket
        listed = "; ".join(b.describe() for b in self.buckets)
        largest = ", ".join(f"{name} {need[name]}" for name in names)
        raise InterlaceError(
            f"no shape of Config.shapes holds this step's micro-batches (largest of all ranks: {largest}; declared: {listed}); "
            "declare a larger shape, or cut the batch"
        )

    def _of_few(self, need: dict[str, list[int]]) -> Bucket:
        """A shape that is there already and fills up by an eighth at most; else these sizes rounded up, but where they are the example's."""
        sizes = {name: tuple(size) for name, size in need.items()}
        if not self.buckets:
            return Bucket(sizes)
        most = Bucket(sizes).elements * 9 // 8
        fitting = [bucket for bucket in self.buckets if bucket.fits(need) and bucket.elements <= most]
        first = self.buckets[0].sizes
        rounded = {name: tuple(n if n == m else _rounded(n) for n, m in zip(size, first[name], strict=True)) for name, size in sizes.items()}
        same = (bucket for bucket in self.buckets if bucket.sizes == rounded)  # rounded in rows and length, it may add more than an eighth
        return min(fitting, key=lambda bucket: bucket.elements, default=next(same, Bucket(rounded)))

    def _need(self, parts: list[Any]) -> tuple[dict[str, list[int]], str | None]:
        """The largest sizes over this rank's micro-batches."""
        found = {name: [0] * self._dims[name] for name in self.pad}
        for part in parts:
            spec = InputSpec.of(part)
            known = {t.name: t for t in spec.tensors}
            for name, sizes in found.items():
                if name not in known:
                    return found, f"{'pad' if self.rounds else 'shapes'} has '{name}', which the batch lacks{did_you_mean(name, known)}"
                shape = known[name].shape
                if len(shape) != len(sizes):
                    known_of = "the example batch's has" if self.rounds else "its declared shapes have"
                    return found, f"batch entry '{name}' has {len(shape)} dimensions, {known_of} {len(sizes)}"
                found[name] = [max(a, int(b)) for a, b in zip(sizes, shape, strict=True)]
        return found, None

    def unfit(self, specs: list[InputSpec], spec: InputSpec) -> str:
        """Why no shape could be that of micro-batches of these forms; `spec`: of the program. Empty: one could."""
        form = lambda s: [(t.name, t.dtype, len(t.shape) if t.name in self.pad else t.shape) for t in s.tensors]  # noqa: E731
        for one in specs:
            if form(one) != form(spec) or one.fixed() != spec.fixed():
                listed = ", ".join(f"{t.name} {t.describe()}" for t in one.tensors)
                return f"the batch has the entries {listed}, which are not those that were compiled for, filled up"
            sizes = {t.name: list(map(int, t.shape)) for t in one.tensors if t.name in self.pad}
            if not (self.rounds or self.open_ended or any(bucket.fits(sizes) for bucket in self.buckets)):
                return f"no shape of Config.shapes holds {', '.join(f'{n} {size}' for n, size in sizes.items())}"
        return ""

    def filled(self, parts: list[Any], bucket: Bucket) -> list[Any]:
        """Micro-batches filled up to the bucket's sizes, behind what is there in every dimension."""
        return [self._fill(part, bucket) for part in parts]

    def _fill(self, part: Any, bucket: Bucket) -> Any:
        named = {t.name: t.path for t in InputSpec.of(part).tensors}
        values = dict(leaves(part))
        replacement: dict[tuple[Any, ...], Tensor] = {}
        for name, size in bucket.sizes.items():
            x = values[named[name]]
            if tuple(x.shape) != size:
                widths = [w for n, s in zip(reversed(x.shape), reversed(size), strict=True) for w in (0, s - n)]
                replacement[named[name]] = F.pad(x, widths, value=self.pad[name])
        return rebuild(part, replacement) if replacement else part

    def note_step(self) -> None:
        """A step was made with the micro-batches of the last switch."""
        self.current.steps += 1
        self.current.used = self.steps = self.steps + 1
        for part in self._parts:
            known = {t.name: t for t in InputSpec.of(part).tensors}
            self.real += sum(math.prod(int(n) for n in known[name].shape) for name in self.current.sizes)
            self.padded += self.current.elements
        self._parts = []

    def stats(self) -> dict[str, Any]:
        """Steps of each shape, and which part of what was computed on is padding, on this rank."""
        return {
            "shapes": {b.describe(): b.steps for b in self.buckets},
            "compiled_shapes": sum(b.built is not None for b in self.buckets),
            "padding": 1 - self.real / self.padded if self.padded else 0.0,
        }


def _rounded(n: int) -> int:
    """Up to one of eight sizes between a power of two and the next."""
    step = 1 << max(0, n.bit_length() - 4)
    return -(-n // step) * step


def check_shapes_of(spec: InputSpec, config: Config) -> None:
    """Error: shapes of entries that the batch has not."""
    known = {t.name: t for t in spec.tensors}
    for name, _ in config.pad or ():
        if name not in known:
            listed = ", ".join(f"'{n}'" for n in known)
            what = "shapes has" if config.shapes else "pad has"
            raise ConfigError(f"{what} '{name}', which the batch lacks{did_you_mean(name, known)} (entries: {listed})")
