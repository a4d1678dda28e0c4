"""Programs of a run: made on rank 0, the same text on every rank, built into an executor, swapped for another one.

rank 0: make() → text, reports, constants ──broadcast──► every rank: parse, compare digests, check memory, build
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import re
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from interlace.capture import OpaqueCall, OpaqueTable
from interlace.compiling.cache import Cache, load_tensors, save_tensors
from interlace.compiling.regions import Regions
from interlace.compiling.states import DTYPES, States
from interlace.compiling.structures import pack, unpack
from interlace.config import Config, format_bytes
from interlace.cost.machine import KERNELS, accelerator_name, allocator_bytes, beside_bytes, torch_version
from interlace.dist.peers import PeerError, Peers, ranks_text
from interlace.errors import InterlaceError
from interlace.private import cache_folder
from interlace.regions import Library, Loops, say_once

log = logging.getLogger("interlace")

Tensor = torch.Tensor
Made = tuple[Any, list[dict[str, Any]]]  # a program, with a report of each pass
COMPILE_PATIENCE = 20.0  # how many timeouts the others wait for rank 0's capture and passes


def _asks(problem: str) -> float:
    """How much memory would solve it: the most is what all ranks are told of."""
    found = re.search(r"raise it to (\d+)MiB", problem)
    return float(found[1]) if found else math.inf


class ProgramError(InterlaceError):
    """The compiler or the runtime refused a program."""


@dataclasses.dataclass
class Source:
    """A program as all ranks get it from rank 0."""

    text: str
    reports: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    constants: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # tensors that only the trace has seen
    stages: list[str] = dataclasses.field(default_factory=list)  # of a pipeline the texts of all stages, this rank's among them
    # A program made from other passes over the same captured text begins here; rank 0 only, empty elsewhere.
    captured: str = ""
    regions: Library | None = None  # compiled, where it was built with such
    waits: int | None = None  # where it runs bodies until they are: Regions.of

    @property
    def texts(self) -> list[str]:
        """Of all stages; of a run without, its one program."""
        return self.stages or [self.text]


@dataclasses.dataclass
class Built:
    """A program that can run."""

    source: Source
    ir: Any
    executor: Any
    states: States


class Programs:
    """Makes programs for all ranks together: every method must be called by every rank, in the same order."""

    def __init__(self, config: Config, peers: Peers) -> None:
        self.config, self.peers = config, peers
        self.cache = Cache(None if config.dump_ir else self.cache_folder())
        self.seconds: dict[str, float] = {}  # of compiling, by part
        self.cached: list[str] = []  # parts that came from the cache
        # How tensor parallelism cuts the parameters, and why: meta lines of all programs of the run, whose states are the same; rank 0 only.
        self.cuts: dict[str, str] = {}
        self.opaque: OpaqueTable | None = None  # what runs in Python, of all programs
        self.in_python = False  # what cannot be captured: a training has met too many different batches (train/run.py)
        self.learnt: tuple[list[OpaqueCall], list[str]] | None = None  # on rank 0, until the others know it: OpaqueTable.add
        # Stages that differ in their data ranks have micro-batches of other sizes: by the captured text of the first stage those of all
        # stages (compiling/captures.py); rank 0 only.
        self.by_stage: dict[str, list[str]] = {}
        self.regions = Regions(config, peers, self.cache_folder())
        self.loops = Loops(self.cache_folder())
        peers.on_close(self.loops.close)
        self._shared = 0
        self._builds = 0
        self._alive: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # programs that can run, by their executors

    def captured_of(self, captured: str, stage: int) -> str:
        """The text for a stage's own micro-batches."""
        return self.by_stage[captured][stage] if captured in self.by_stage else captured

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - begin

    def cache_folder(self) -> Path | None:
        """Where compiled programs and measured times are kept: Config.cache, $INTERLACE_CACHE or the user's cache."""
        return cache_folder(self.config.cache)

    def share(self, what: str, make: Callable[[], Source], loss_fn: Any = None) -> Source:
        """What make() gives on rank 0, on every rank. `loss_fn`: what it captures, where that is not the one of training."""
        parts: dict[str, Any] = {}
        constants: dict[str, Tensor] = {}
        captured = ""
        if self.peers.rank == 0:
            source = make()
            parts = {"text": source.text, "stages": source.stages, "reports": source.reports}
            constants, captured = source.constants, source.captured
            parts["opaque"] = pack(self.learnt) if self.learnt else ""
            self.learnt = None
        self._shared += 1
        what = f"{what} ({self._shared})"  # a key of the store is written once
        patience = self.config.timeout_s * COMPILE_PATIENCE
        parts = json.loads(self.peers.broadcast(what, json.dumps(parts).encode(), patience))
        packed = save_tensors(constants)
        data = self.peers.broadcast(f"{what}: constants", packed, patience)
        if parts["opaque"] and self.opaque is not None:  # rank 0's, of this very run
            calls, sometimes = unpack(parts["opaque"])
            self.opaque.add(calls, sometimes, loss_fn)
        text = parts["stages"][self.stage] if parts["stages"] else parts["text"]
        return Source(text, parts["reports"], load_tensors(data), captured=captured, stages=parts["stages"])

    @property
    def stage(self) -> int:
        """This rank's place along the axis of the stages."""
        return self.config.stage_of(self.peers.rank, self.peers.size)

    def with_cuts(self, captured: str) -> str:
        """A captured text with the run's cuts as its plan."""
        if not self.cuts:
            return captured
        from interlace import _core

        program = _core.Program.parse(captured, "captured")
        for name, text in self.cuts.items():
            program.set_meta(name, text)
        return str(program.print())

    def settled(self, captured: str) -> str:
        """A text captured before the run's cuts were settled, and those of the stages with it."""
        text = self.with_cuts(captured)
        if captured in self.by_stage:
            self.by_stage[text] = [self.with_cuts(one) for one in self.by_stage[captured]]
        return text

    def run_passes(self, captured: str, pipeline: str, micro_batches: int | None = None) -> Made:
        """The program after a pipeline over a captured text, with a report of each pass. Rank 0 only."""
        from interlace import _core

        with self.timed("passes"):
            try:
                program = _core.Program.parse(captured, "captured")
                program.set_meta("micro_batches", str(micro_batches or self.config.accumulation))
                reports = program.run_passes(pipeline, dump_dir=self.config.dump_ir)
            except _core.Error as e:
                if "pass 'precision'" in str(e) and "precision(param=auto," in pipeline:  # all that casts runs in Python
                    return self.run_passes(captured, pipeline.replace("precision(param=auto,", "precision(param=none,"), micro_batches)
                raise ProgramError(str(e)) from e
        return program, reports

    def build(self, source: Source, donor: Any = None, beside: Any = None, take_states: bool = True) -> Built:
        """An executor of the program. With a donor, an executor between steps, it goes on with the donor's states, or with its tier alone.
        `beside`: the donor's program, when it goes on as well."""
        with self.timed("executor"):
            return self._build(source, donor, beside, take_states)

    def build_beside(self, source: Source, executor: Any, ir: Any) -> Built:
        """An executor of a program that takes turns with the one that runs, on its states and buffers."""
        self.compare_digests(source)
        built = self.build(source, executor, ir)
        for buffer in _own_buffers(built, ir):
            if buffer["name"] in source.constants:  # of this trace alone; else values.py has it
                built.executor.tensor(buffer["value"]).copy_(source.constants[buffer["name"]])
        return built

    def again_beside(self, kept: Built, executor: Any, ir: Any) -> Built:
        """A program that ran before, to go on from the one that runs. Its executor looks in the tier for the states that it moves, and for
        those that lay there when it was made: where more do by now, it is made anew."""
        known = {state_name(s) for s in kept.ir.states() if s["moves"]}
        if known.issuperset(state_name(s) for s in ir.states() if s["out"]):
            return kept
        built = self.build(kept.source, executor)  # there was room for both
        for buffer in _own_buffers(built, ir):
            built.executor.tensor(buffer["value"]).copy_(kept.executor.tensor(buffer["value"]))
        return built

    def parse(self, source: Source) -> Any:
        from interlace import _core

        try:
            return _core.Program.parse(source.text, "program")
        except _core.Error as e:
            raise ProgramError(str(e)) from e

    def _build(self, source: Source, donor: Any, beside: Any, take_states: bool) -> Built:
        from interlace import _runtime

        program = self.parse(source)
        options = {
            "rng": self.config.rng, "seed": self.config.seed, "debug": self.config.debug, "arena": self.config.arena,
            # A step whose norm is not finite never updates: the trainer raises, and the parameters are what they were.
            "skip_nonfinite": True, "captured_here": True,
            "tier": self.config.tier or "", "tier_bandwidth": float(self.config.tier_bandwidth or 0),
            "device_graphs": {"auto": "auto", True: "on", False: "off"}[self.config.device_graphs],
            "own_kernels": self.config.kernels == "auto",
        }  # fmt: skip
        if self.peers.device.type == "cuda":
            options["graph"] = torch.cuda.CUDAGraph
            if self.config.device_graphs == "auto" and self.peers.size > 1:  # NCCL's calls in a graph were never tried
                options["device_graphs"] = "off"
        if "call.python(" in source.text:
            if self.opaque is None or not self.opaque.calls:
                raise ProgramError("the program runs modules in Python, and this run has captured none; compile again")
            options["opaque"] = self.opaque.run_opaque
        problem: InterlaceError | None = None
        try:
            self.check_room(program, beside)
            if not take_states:
                self._check_both(program, beside)
        except InterlaceError as e:
            problem = e
        self._agree(problem)  # or ranks of other stages would wait for this one's connections
        library, source.waits = self.regions.of(program)
        source.regions = library
        if library is not None:
            options |= {"regions": str(library.path), "cubins": library.cubins, "region_keys": library.keys}
            options["say"] = partial(say_once, log.warning)
        axes = self.peers.groups.axes(program)
        try:
            executor = _runtime.Executor(source.text, str(self.peers.device), axes, self.config.timeout_s, options, donor, take_states)
        except _runtime.Error as e:
            problem = ProgramError(str(e))
        self._agree(problem)
        self.loops.begin(program.rule_loops(on_host=self.peers.device.type != "cpu"))
        note = executor.stats()["tier_note"]
        if note and donor is None:
            log.warning("%s", note)
        why = executor.graph_stats()["why_not"]
        if why and self.peers.device.type != "cpu" and donor is None:
            log.info("steps are given to the device op by op: %s", why)
        self._alive[executor] = program
        return Built(source, program, executor, States(program, executor, self.peers))

    def _agree(self, problem: InterlaceError | None) -> None:
        """Error: `problem`, or a worse one of another stage's program, whose ranks would not come to what follows."""
        if self.config.stage_ranks > 1:
            self._builds += 1
            mine = [str(problem), isinstance(problem, ProgramError)] if problem is not None else None
            with self.peers.guard():
                everyone = self.peers.exchange(f"program built ({self._builds})", mine)
            failed = [r for r, found in enumerate(everyone) if found is not None]
            worst = max(failed, key=lambda r: _asks(everyone[r][0]), default=self.peers.rank)
            if worst != self.peers.rank:
                said, of_program = everyone[worst]
                problem = (ProgramError if of_program else InterlaceError)(f"on rank {worst}: {said}")
        if problem is not None:
            raise problem

    @cached_property
    def kernels(self) -> str:
        """What decides operators' bits on this rank beside its program: "torch 2.13.0+cpu, AVX512, kernels 3, products by oneDNN"."""
        from interlace import _runtime

        found = [f"torch {torch_version()}"]
        if self.peers.device.type != "cpu":
            return ", ".join([*found, accelerator_name(self.peers.device)])
        own = [f"kernels {KERNELS}", f"products by {_runtime.products()}"] if self.config.kernels == "auto" else ["kernels by torch"]
        return ", ".join([*found, torch.backends.cpu.get_cpu_capability(), *own])

    def compare_digests(self, source: Source) -> None:
        """Error: a rank that has another text than rank 0 sent. Ranks whose kernels have other bits are said, once."""
        from interlace import _core

        self._shared += 1
        what = f"digest of a program ({self._shared})"
        mine = [_core.digest("".join(source.texts)), self.kernels]
        digests, kernels = zip(*self.peers.exchange(what, mine), strict=True)
        if len(set(kernels)) > 1 and self.peers.rank == 0:
            other = next(r for r, each in enumerate(kernels) if each != kernels[0])
            say_once(
                log.warning,
                f"ranks compute with other kernels (rank 0: {kernels[0]}; rank {other}: {kernels[other]}): what several ranks compute alike "
                "differs in its last bits",
            )
        wrong = [r for r, d in enumerate(digests) if d != digests[0]]
        if wrong:
            raise PeerError(
                f"{ranks_text(wrong)} received another program than rank 0 sent (digest {digests[wrong[0]][:12]}, rank 0's is "
                f"{digests[0][:12]}): what goes through the run's store is damaged on the way; start the run again",
                wrong[0],
            )

    def check_room(self, program: Any, beside: Any = None) -> None:
        """Error: it takes more than memory_limit, or moves what there is no tier for. `beside` as in over_limit."""
        problem = self.over_limit(program, beside)
        if problem is not None:
            config = self.config
            searches = config.profile != "off" if config.schedule == "auto" and config.passes is None else "search(" in str(config.schedule)
            more = "" if searches else '; no search runs here: without profile="off", schedule and passes it recomputes what does not fit'
            raise InterlaceError(f"{problem}, use more ranks, or a smaller micro-batch with more accumulation{more}")
        moved = next((s for s in program.states() if s["moves"] and s["persistent"]), None)
        if moved is not None and not self.has_tier:
            raise InterlaceError(
                f"state {state_name(moved)} goes out of memory in this program, but there is no tier to hold it; give tier=\"host\" or, "
                "but for steps that are made there (host_update), a folder on a local disk"
            )

    def _check_both(self, program: Any, before: Any) -> None:
        """Error: the states of two programs, of which one gets the other's values in other units, take more than memory_limit."""
        summaries = [one.summary() for one in (before, program)]
        need, limit, room = sum(s["persistent_bytes"] + s["step_bytes"] for s in summaries), self.config.memory_limit_bytes, self.room
        if limit is not None and room is not None and need > room:
            raise InterlaceError(
                f"other parameters are trained from here on: while states are copied a rank needs {format_bytes(need)}, for those of "
                f"before and after, memory_limit is {format_bytes(limit)}; raise it to {math.ceil((need + limit - room) / 2**20)}MiB, or "
                "save before the change, compile again after it, and load"
            )

    def over_limit(self, program: Any, beside: Any = None) -> str | None:
        """What a rank needs, where that is more than it may have. `beside`: the program that has left its own memory of a step there."""
        limit, room = self.config.memory_limit_bytes, self.room
        if limit is None or room is None:
            return None
        need = self.needed_bytes(program, beside)
        if need <= room:
            return None
        return (
            f"a rank needs {format_bytes(need)} (parameters and states {format_bytes(program.summary()['persistent_bytes'])}, the rest "
            f"activations and gradients), memory_limit is {format_bytes(limit)}; raise it to {math.ceil((need + limit - room) / 2**20)}MiB"
        )

    @property
    def room(self) -> int | None:
        """Bytes that a program may take: memory_limit, on an accelerator less what its libraries and allocator take beside."""
        limit = self.config.memory_limit_bytes
        return limit if limit is None else max(0, limit - beside_bytes(self.peers.device, limit))

    def needed_bytes(self, program: Any, beside: Any = None) -> int:
        """What a rank takes, with all in its place, which is a little more than what lives at once. `beside` as in over_limit; so have other
        programs that are kept."""
        summary = program.summary()
        need = predicted_peak_bytes(summary)
        if self.config.arena:
            here = self.peers.device.type == "cpu"
            plan = program.memory_plan(receive_buffers=here)
            if here or plan["placed"]:  # what moves has places on no device
                need = summary["persistent_bytes"] + summary["step_bytes"] + plan["taken_bytes"]
        if beside is not None:
            more: dict[str, int] = {}
            for other in (beside, *self._alive.values()):
                out = {state_name(s) for s in other.states() if s["out"]}  # which take no memory between steps
                more |= {name: size for name, size in step_states(other).items() if name not in out}
            own = step_states(program)
            need += sum(size for name, size in more.items() if name not in own)
        return need

    def allocator_bytes(self, program: Any) -> int:
        """What a device's allocator takes beside a program's states that stay there, and beside the arena of a step."""
        if self.peers.device.type != "cuda":
            return 0
        states = [math.prod(s["shape"]) * DTYPES[s["dtype"]].itemsize for s in program.states() if s["persistent"] and not s["moves"]]
        return allocator_bytes(self.peers.device, [*states, program.memory_plan()["taken_bytes"]])

    def within_limit(self, make: Callable[[int], Made], limit: int, beside: Any = None) -> Made:
        """What make(limit) gives. Passes but the search hold what lives at once to it: where that takes more than memory_limit with all in
        its place, again for as much less, a few times; as it was where less is refused."""
        found = make(limit)
        for _ in range(3):
            over = self.needed_bytes(found[0], beside) - (self.room or math.inf)
            if over <= 0:
                break
            summary = found[0].summary()
            live = summary["persistent_bytes"] + summary["step_bytes"] + found[0].memory_plan()["live_bytes"]
            limit = min(limit - int(over), live - 1)  # below what lives an offload moves something
            try:
                found = make(limit)
            except ProgramError:
                break
        return found

    @property
    def has_tier(self) -> bool:
        """Whether there is a place for what leaves memory."""
        return self.config.tier is not None or self.peers.device.type != "cpu"


def _own_buffers(built: Built, running: Any) -> list[dict[str, Any]]:
    """Those that the running program has not."""
    known = {b["name"] for b in running.buffers()}
    return [b for b in built.ir.buffers() if b["name"] not in known]


def state_name(state: dict[str, Any]) -> str:
    """As texts have it: "u3.exp_avg"."""
    return state["role"] if state["unit"] is None else f"u{state['unit']}.{state['role']}"


def idle_of(program: Any) -> list[str]:
    """Trainable parameters that had no gradient in any program so far."""
    return list(json.loads(program.meta().get("idle", "[]")))


def step_states(program: Any) -> dict[str, int]:
    """Bytes of the states of one step and of tables of the trace, which have their memory between steps too."""
    named = [*((state_name(s), s) for s in program.states()), *((f"buffer {b['name']}", b) for b in program.buffers())]
    return {name: math.prod(x["shape"]) * DTYPES[x["dtype"]].itemsize for name, x in named if not x["persistent"]}


def predicted_peak_bytes(summary: dict[str, Any]) -> int:
    """What a rank needs at most: what it keeps between steps and the largest of what lives within one."""
    return summary["persistent_bytes"] + max(summary["step_bytes"], summary["activation_peak_bytes"] or 0)
