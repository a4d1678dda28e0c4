"""What the parts of a Trainer work on: the model, the ranks, the program that runs, and where training stands."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from interlace.capture.groups import is_rule, kind_of
from interlace.capture.in_python import takes_any
from interlace.capture.inputs import InputSpec, on_device
from interlace.capture.model_tensors import collect
from interlace.capture.opaque import TOLD
from interlace.checkpoint.optimizer import STATE_NAMES
from interlace.checkpoint.saver import Save
from interlace.checkpoint.tensor_file import CheckpointError, DamageError
from interlace.compiling.captures import Captures
from interlace.compiling.programs import Built, Programs, Source
from interlace.compiling.states import DTYPES, WEIGHT, Entry, Parameter, States
from interlace.config import Config
from interlace.config.schedule import stage_at
from interlace.dist.peers import PeerError, Peers
from interlace.errors import CaptureError, InterlaceError
from interlace.train import batch as batches
from interlace.train.hyper import Hyper
from interlace.train.laid_by import LaidBy
from interlace.train.loss_scale import LossScale
from interlace.train.materialize import checksum, release

if TYPE_CHECKING:
    from interlace.train.shapes import Shapes

Tensor = torch.Tensor
log = logging.getLogger("interlace")


class Runner(Protocol):
    """What runs the steps: the C++ executor, or the eager runner around it."""

    def step(self, micro_batches: Any, hyper: list[list[float]], step: int) -> dict[str, Any]: ...


@dataclasses.dataclass
class Tensors:
    """The names of a model's tensors: of every entry of state_dict(), the parameter or buffer behind it."""

    entries: list[tuple[str, str, bool]]  # name in state_dict, canonical name, whether it is a parameter
    buffers: dict[str, Tensor]  # canonical name → the executor's storage
    hf_prefix: str | None  # "transformer", "model": what file names may lack

    def places(self, name: str) -> list[str]:
        return [entry for entry, canonical, _ in self.entries if canonical == name]


class Run:
    """The data of one Trainer, and the few moves that keep it whole. Its parts read and change it; nobody else has it."""

    def __init__(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, peers: Peers, programs: Programs, built: Built,
        spec: InputSpec, runner: Runner, tensors: Tensors, hyper: Hyper, shapes: Shapes | None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.config, self.peers = model, optimizer, config, peers
        self.programs, self.spec, self.tensors = programs, spec, tensors
        self.hyper, self.shapes, self.loss_scale = hyper, shapes, LossScale(config.loss_scale)
        self.rank, self.world_size = peers.rank, peers.size
        self.mesh = built.states.mesh
        self.data_rank, self.data_ranks = self.mesh.index(self.mesh.data), self.mesh.size(self.mesh.data)
        self.steps = self.swaps = 0
        self.norm: float | None = None
        self.outputs: dict[str, list[Tensor]] = {}
        self.skipped = False
        self.left_out: dict[str, int] = {}  # steps that a parameter has made fewer than its group, without a gradient
        self.behind: dict[str, LaidBy] = {}  # where their optimizer was then
        self.laid_by: dict[str, LaidBy] = {}
        self.listed = False  # the example batch was a list, as one batch
        self.stage = stage_at(config.schedule, 0)  # entry of the schedule
        self.limit: int | None = None  # bytes that plans keep to, where other programs have left less than memory_limit
        self.save: Save | None = None  # under way
        self.closed: str | None = None  # why
        self.lent: str | None = None  # where the model has its parameters for a while, so that no step can be made
        self.regions_table: dict[str, Any] = {}
        self.loaded: tuple[str, str] | None = None  # a checkpoint's folder and the digest of its regions, until they are compared
        self._group_names: list[list[str]] | None = None
        self.use(built)
        self.runner: Runner = runner

    @property
    def regions(self) -> str:
        """The digest of the compiled regions that the program runs with; empty: none."""
        return self.source.regions.artifact if self.source.regions is not None else ""

    def use(self, built: Built) -> None:
        """From now on this program runs."""
        built.source.constants = {}  # they are in the executor's buffers by now
        self.program, self.passes = built.source.text, built.source.reports
        self.takes_any = takes_any(self.program)
        self.source, self.ir, self.executor, self.states = built.source, built.ir, built.executor, built.states
        self.runner = built.executor
        self.loss_scale.attach(built.ir, built.executor)
        self.hyper.attach(built.ir)
        if any(s["moves"] for s in built.ir.states()):  # the model's parameters cannot be views of what leaves memory
            for t in collect(self.model):
                if t.kind == "param" and built.states.resident(t.name) is None:
                    release(t.real)
        if self.shapes is not None and not self.takes_any:
            self.shapes.current.built = built
        if self.config.regions != "off":
            self.regions_table = self._regions_table()

    def _regions_table(self) -> dict[str, Any]:
        funcs, library = self.ir.funcs(), self.source.regions
        compiled = [func for func in funcs if library is not None and func["key"][:16] in library.keys]
        kernels = sum(func["calls"] * sum(op["name"] != "view" for op in func["ops"]) for func in compiled)
        before = self.regions_table
        found = {"regions": len(funcs), "compiled": len(compiled), "calls": sum(f["calls"] for f in compiled), "kernels": kernels}
        same = bool(before) and (before["compiled"] > 0) == (len(compiled) > 0)
        return {**found, "from_step": before["from_step"] if same else self.steps + 1}

    def compare_kernels(self, folder: str, then: str | None) -> None:
        """Says where this machine's operators have other bits than those of the loaded checkpoint's."""
        now = self.programs.kernels
        if then is not None and then != now and self.rank == 0:
            said = "%s was saved by a run with the kernels of %s, this run has those of %s: it goes on with other bits"
            log.warning(said, folder, then, now)

    def compare_regions(self) -> None:
        """Says where the kernels are not those that the loaded checkpoint was trained with; again when they are compiled."""
        if self.loaded is None or self.rank != 0:
            return
        folder, artifact = self.loaded
        then, now = (f"regions {each[:12]}" if each else "no compiled regions" for each in (artifact, self.regions))
        if self.programs.regions.waiting(self.source.waits):
            if artifact:
                log.warning(
                    "%s was saved by a run with %s: it goes on with other bits until they are compiled (Config(regions_wait=True) waits)",
                    folder, then,
                )  # fmt: skip
            return
        self.loaded = None
        if artifact != self.regions:
            log.warning("%s was saved by a run with %s, this run has %s: it goes on with other bits", folder, then, now)

    def drop(self) -> None:
        """The executor goes, with all that it has."""
        self.executor = self.runner = self.states = None  # type: ignore[assignment]

    # ---- between steps ----

    def check_open(self) -> None:
        if self.closed is not None:
            raise InterlaceError(f"this trainer can no longer be used: {self.closed}; compile again and load a checkpoint")
        if self.lent is not None:
            raise InterlaceError(f"a call of the trainer {self.lent}, where the model has the parameters: leave the with statement first")

    def flush(self) -> None:
        """Makes the optimizer step that the last step left to the next one, if it left one."""
        if self.executor is not None:
            with self.peers.guard():
                self.executor.flush()

    def settle_save(self) -> None:
        """Before states are changed: what is being saved has been copied."""
        if self.save is not None:
            self.save.wait_staged()

    def all_here(self, call: str) -> None:
        """Error, where a rank does not make this call: it goes on to its next step, or ends, and would be waited for in vain."""
        if self.world_size == 1:
            return
        with self.peers.guard():
            try:
                self.peers.exchange(f"{call} at step {self.steps}", None, self.steps)
            except PeerError as e:
                if " lost: " in str(e):
                    raise PeerError(f"{e} (if its script has come to its end: every rank must call {call})", e.rank) from e
                raise PeerError(f"{e}; every rank must call {call}: it is no call for `if rank == 0:`", e.rank) from e

    def agree(self, what: str, check: Callable[[], Callable[[], None]], error: type[InterlaceError] = CheckpointError) -> Callable[[], None]:
        """Runs check() on every rank; if it fails on any, all raise that error and nothing has changed."""
        problem, action = None, None
        try:
            action = check()
        except InterlaceError as e:
            problem = [str(e), isinstance(e, DamageError)]
        with self.peers.guard():
            problems = self.peers.exchange(what, problem)
        for rank in (self.rank, *range(self.world_size)):  # its own first
            if problems[rank] is not None:
                text, damage = problems[rank]
                kind = DamageError if damage else error
                raise kind(text if rank == self.rank else f"on rank {rank}: {text}")
        assert action is not None
        return action

    @contextlib.contextmanager
    def determinism(self) -> Iterator[None]:
        """Around what runs, where Config.deterministic asks for it."""
        if not self.config.deterministic or torch.are_deterministic_algorithms_enabled():
            yield
            return
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    # ---- batches ----

    @property
    def row_ranks(self) -> int:
        """Data ranks of this rank's stage, where stages differ in them: so many have the rows of a micro-batch; else 1."""
        return self.data_ranks if self.config.stage_meshes else 1

    def inputs(self, batch: Any) -> Any:
        """A step's batch as the runner takes it; with several shapes, the program of the one that holds it runs from now on."""
        if self.takes_any:
            return self._beside(batch)
        if self.shapes is not None:
            parts = self.shapes.switch(self, batch)
            if self.takes_any:  # it could not be captured
                return self._beside(batch)
        else:
            parts = batches.micro_batches(self.spec, batch, self.config.accumulation)
        return parts if self.config.mode == "eager" else batches.flatten(self.spec, parts, self.peers.device)

    def _beside(self, batch: Any) -> list[list[Tensor]]:
        """Of a program that takes any batch: the numbers of the micro-batches, which lie where it looks for them."""
        table = self.programs.opaque
        assert table is not None
        table.given[:] = [on_device(part, self.peers.device) for part in self._any_parts(batch)]
        table.outputs.clear()
        return [[torch.tensor(i, device=self.peers.device)] for i in range(len(table.given))]

    def _any_parts(self, batch: Any) -> list[Any]:
        return batches.any_micro_batches(self.spec, batch, self.config.accumulation, self.listed)

    def example(self, batch: Any) -> Any:
        """A micro-batch of a step, as the program takes it."""
        if self.takes_any:
            return self._any_parts(batch)[0]
        parts = batches.micro_batches(self.spec if self.shapes is None else None, batch, self.config.accumulation)
        return parts[0] if self.shapes is None else self.shapes.filled(parts, self.shapes.current)[0]

    def check_same_batch(self, what: str, inputs: Any, evaluates: bool = False) -> None:
        """Error: ranks along axes tp and pp, which work on one batch, that were given different ones. Every rank must call it. Training can
        go on after it where the batch is not trained on."""
        axes = self.mesh.shared
        if self.mesh.size(axes) == 1:
            return
        if self.config.stage_meshes:
            return self._check_same_rows(what, inputs, evaluates)
        digest = hashlib.sha256(b"".join(checksum(t) for part in inputs for t in part)).hexdigest()
        with self.peers.guard():
            everyone = self.peers.exchange(what, digest)
            for group in self.mesh.groups(axes):
                other = next((r for r in group if everyone[r] != everyone[group[0]]), None)
                if other is not None:
                    raise PeerError(
                        f"ranks {group[0]} and {other} work on one batch along {axes} of the mesh, but were given different ones; "
                        "give every rank batch number trainer.data_rank of trainer.data_ranks (Config.data_place before compiling)", other,
                        agreed=evaluates,
                    )  # fmt: skip

    def _check_same_rows(self, what: str, inputs: Any, evaluates: bool) -> None:
        """Stages that differ in their data ranks: each must have the same rows in the same micro-batch."""
        mine = []
        for part in inputs:
            count = next((t.shape[0] for t in part if t.dim() > 0), 1)
            cut = [[t[r] if t.dim() > 0 and t.shape[0] == count else t for t in part] for r in range(count)]
            mine.append([hashlib.sha256(b"".join(checksum(t.contiguous()) for t in row)).hexdigest()[:16] for row in cut])
        with self.peers.guard():
            everyone = self.peers.exchange(what, [self.config.stage_of(self.rank, self.world_size), self.data_rank, mine])
            known: dict[tuple[int, int], tuple[str, int, int]] = {}  # by micro-batch and row: digest, rank, stage
            for rank, (stage, place, parts) in enumerate(everyone):
                for k, rows in enumerate(parts):
                    for r, digest in enumerate(rows):
                        first = known.setdefault((k, place * len(rows) + r), (digest, rank, stage))
                        if first[0] != digest:
                            raise PeerError(
                                f"ranks {first[1]} (stage {first[2]}) and {rank} (stage {stage}) have other rows in micro-batch {k}: "
                                f"row {place * len(rows) + r} of all its rows differs; give every rank "
                                + ("config.deal(batch, rank, ranks) of the step's whole batch" if not evaluates else
                                   "config.deal(batch, rank, ranks, micro_batches=1) of the whole batch that is evaluated"), rank, evaluates
                            )  # fmt: skip

    # ---- the schedule ----

    @property
    def planned_passes(self) -> tuple[str, ...]:
        """What the schedule has now."""
        return self.config.schedule[self.stage][1] if self.stage >= 0 else ()

    @property
    def program_stage(self) -> int:
        """The entry of the schedule that the current shape's program was made for."""
        return self.stage if self.shapes is None or self.takes_any else self.shapes.current.stage

    def made_for_stage(self) -> None:
        """The current shape's program is that of the schedule's entry now."""
        if self.shapes is not None and not self.takes_any:
            self.shapes.current.stage = self.stage

    # ---- names of the optimizer's states ----

    def roles(self) -> list[str]:
        """In torch's order."""
        present = {role for record in self.states.everything for role in record.roles}
        names = [n for group in range(len(self.hyper.steps)) for n in self.state_names(group)]
        return [role for role in dict.fromkeys(names) if role in present]

    def kind_of(self, group: int) -> str:
        return kind_of(self.optimizer, self.optimizer.param_groups[group])

    def state_names(self, group: int) -> tuple[str, ...]:
        """Of a group's parameters, in torch's order."""
        kind = self.kind_of(group)
        return self.hyper.rule_states(group) if is_rule(kind) else STATE_NAMES[kind]

    def share_buffers(self, names: Collection[str] | None = None) -> None:
        """Of a pipeline: every rank's buffers (these ones) are those of the stage that changes them. Every rank must call it."""
        if self.states.stages == 1:
            return
        storages = {b["name"]: b["value"] for b in self.ir.buffers()}
        for stage, changed in enumerate(self.states.changed):
            for name in changed:
                if names is None or name in names:
                    storage = self.executor.tensor(storages[name])
                    storage.copy_(self.states.from_stage(stage, storage.clone()))

    def share_outputs(self, states: States, result: dict[str, Any], micro_batches: int) -> None:
        """Of a pipeline: what any stage gave, on all ranks. Every rank must call it. Of a program that takes any batch, what its loss
        function gave."""
        if self.takes_any and self.programs.opaque is not None:
            given = [self.programs.opaque.outputs[i] for i in range(micro_batches)]
            names = [n for n in given[0] if n != "loss" and all(n in one for one in given)]
            result["outputs"] |= {n: [one[n] for one in given] for n in names}
        if states.stages == 1:
            return
        mine, outputs = result["outputs"], {}
        for stage, named in enumerate(states.outputs):
            for name, form in sorted(named.items()):
                own = torch.stack(list(mine[name])) if stage == states.stage else None
                empty = torch.empty((micro_batches, *form["shape"]), dtype=DTYPES[form["dtype"]], device=self.peers.device)
                scalar = not form["shape"] and empty.is_floating_point()
                found = states.mean_of_stage(stage, own, empty) if scalar else states.from_stage(stage, empty if own is None else own)
                outputs[name] = list(found)
        result["outputs"] = outputs
        scalars = [t for values in outputs.values() for t in values if t.numel() == 1 and t.is_floating_point()]
        result["finite"] = result["finite"] and all(bool(torch.isfinite(t)) for t in scalars)

    def own_steps(self, name: str, group: int) -> int:
        """The optimizer steps of a parameter, which may have begun later than its group, or had no gradient in some."""
        return self.hyper.steps[group] - self.left_out.get(name, 0)

    def has_state(self, p: Parameter | Entry) -> bool:
        return p.group is not None and self.hyper.steps[p.group] > 0

    def frozen(self) -> dict[str, Tensor]:
        """The optimizer's parameters that are frozen, in the model or still in the program."""
        trained = {p.name for p in self.states.everything if p.roles}
        named = (zip(self.names_of_group(i), g["params"], strict=True) for i, g in enumerate(self.optimizer.param_groups))
        return {name: p for pairs in named for name, p in pairs if not p.requires_grad or name not in trained}

    def forget_names(self) -> None:
        """The optimizer has other groups."""
        self._group_names = None

    def names_of_group(self, i: int) -> list[str]:
        if self._group_names is None or len(self._group_names) != len(self.optimizer.param_groups):
            by_id = {id(t): name for name, t in self.model.named_parameters()}
            self._group_names = [[by_id[id(t)] for t in g["params"]] for g in self.optimizer.param_groups]
        return self._group_names[i]


@contextlib.contextmanager
def gathered(run: Run, captures: Captures) -> Iterator[None]:
    """For a capture of a model with opaque modules, which are run for real to learn what they give: the whole parameters, on every
    rank, of a model whose own are on meta. Every rank must enter it."""
    opaque = run.programs.opaque
    some = opaque is not None and (any(c.path != TOLD for c in opaque.calls.values()) or (captures.undecided and not captures.fullgraph))
    if not some or captures.values is not None or all(run.states.resident(name) is not None for name in run.states.parameters):
        yield
        return
    run.flush()
    whole = {p.name: t for p, t in run.states.whole(WEIGHT, everywhere=True) if t is not None}
    captures.values = {id(p): whole[name] for name, p in run.model.named_parameters() if name in whole}
    try:
        yield
    finally:
        captures.values = None


def shared_capture(
    run: Run, captures: Captures, what: str, make: Callable[[], Source], loss_fn: Callable[[nn.Module, Any], Any] | None = None
) -> Source:  # fmt: skip
    """Programs.share of what make() captures. Where batches differ too often in what Python reads of them, and what reads it cannot be
    captured otherwise, that runs in Python from here on: a training does not stop for it. Every rank must call it; all have its errors."""
    programs, failed, caught = run.programs, "cannot be captured", list[CaptureError]()

    def first() -> Source:
        try:
            return make()
        except CaptureError as e:
            caught.append(e)
            return Source("", [{failed: str(e)}])

    while True:
        with gathered(run, captures):
            source = programs.share(what, first, loss_fn)
        if not source.reports or failed not in source.reports[0]:
            return source
        if not captures.may_leave_out:
            raise caught[-1] if caught else CaptureError(source.reports[0][failed])
        programs.in_python = True
        log.warning(
            "step %d: what cannot be captured for so many different batches runs in Python from now on, as Config(fullgraph=False) has it, "
            "which may be slower (trainer.summary()['opaque'] says what it costs): %s",
            run.steps, source.reports[0][failed].partition(", or pass fullgraph=False")[0],
        )  # fmt: skip
