"""Where every parameter and optimizer state of a running program lies, and how to fill, read and gather them.

A unit is a flat buffer of several parameters. A state of a unit is either whole on every rank or one shard of it:

    unit u0 (numel 1024, 2 ranks)   | fc1.weight ........ | pad | fc1.bias | pad |
    state u0.exp_avg on rank 1                    [512, 1024)  ← the window

so the part of a parameter that a rank holds is the overlap of its range with the rank's window. Where replicas have the same shard of a
parameter, each may have a part of the shard's optimizer states only. Averages over rows and columns of a
parameter (Adafactor) have units of their own, whose one "parameter" stands for the average: it has the parameter's name and another
shape. Where the mesh cuts a parameter (cuts.py), that range is of the rank's part of it; all that comes in and goes out is of the whole.
Of a pipeline a rank has the parameters of its stage; `everything` lists those of all stages.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from interlace.capture.literals import DTYPES as NAMES
from interlace.compiling.cuts import Cuts
from interlace.dist import sealed
from interlace.dist.mesh import STAGES, TENSOR, Mesh, UnlikeStages
from interlace.dist.peers import Peers

Tensor = torch.Tensor
WEIGHT = "weight"  # the role under which parameters themselves are addressed here

READ_ELEMENTS = 1 << 22  # that a parameter is read in at a time where this rank's part of it lies in many places

_TORCH_NAMES = {"momentum": "momentum_buffer"}  # roles that torch.optim calls otherwise

DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclasses.dataclass(frozen=True)
class Parameter:
    name: str
    aliases: tuple[str, ...]
    value: int
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    trainable: bool
    group: int | None
    unit: int | None  # None: it owns its storage
    offset: int  # elements from the unit's start
    numel: int  # of this rank's part; of the whole where nothing cuts it
    cuts: Cuts


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter of any stage."""

    stage: int  # the first that has it
    name: str
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    group: int | None
    roles: dict[str, torch.dtype]  # optimizer states
    shapes: dict[str, tuple[int, ...]]  # of those that have another one

    def shape_of(self, role: str) -> tuple[int, ...]:
        return self.shapes.get(role, self.shape)


@dataclasses.dataclass(frozen=True)
class Unit:
    id: int
    axis: str  # of the mesh, over which it is sharded: "dp"
    replicas: str  # whose ranks have the same shard, "" for none
    numel: int
    shard: int
    part: int  # of the shard, with optimizer states here; less than the shard where each of the replicas has one
    parameters: tuple[Parameter, ...]  # by offset


class States:
    """The storages of one executor, by unit and role."""

    def __init__(self, program: Any, executor: Any, peers: Peers) -> None:
        self.peers, self.executor = peers, executor
        self.mesh = Mesh.of(program, peers.rank)
        self.parameters: dict[str, Parameter] = {}
        for p in program.params():
            cuts = Cuts.of(p["cuts"], tuple(p["shape"]), self.mesh)
            self.parameters[p["name"]] = Parameter(
                p["name"], tuple(p["aliases"]), p["value"], cuts.whole, DTYPES[p["dtype"]], p["trainable"], p["group"],
                p["unit"], p["unit_offset"] if p["unit"] is not None else 0, torch.Size(cuts.part).numel(), cuts,
            )  # fmt: skip
        by_unit: dict[int | None, list[Parameter]] = {}
        for q in self.parameters.values():
            by_unit.setdefault(q.unit, []).append(q)
        self.loose = tuple(by_unit.get(None, []))
        self._averages: dict[tuple[str, str], Parameter] = {}  # by the parameter's name and role
        average_of: dict[int, str] = {}  # the role of a unit without parameters
        for s in program.states():
            if s["unit"] is not None and s["unit"] not in by_unit and (match := _AVERAGE.fullmatch(s["role"])) is not None:
                of, role = by_unit[int(match[2])][0], match[1]
                average = dataclasses.replace(of, shape=_shape_of(of.shape, role), unit=s["unit"], offset=0)
                average = dataclasses.replace(average, numel=torch.Size(average.shape).numel())
                by_unit[s["unit"]], average_of[s["unit"]] = [average], role
                self._averages[of.name, role] = average
        self.units = [
            Unit(
                u["id"], u["axis"], u["replicas"], u["numel"], u["shard"], u["part"],
                tuple(sorted(by_unit.get(u["id"], []), key=lambda q: q.offset)),
            )
            for u in program.units()
        ]
        self._tensors: dict[tuple[int, str], Tensor] = {}
        # States that lie out of memory at times, by value: a tensor on meta stands for them, local() brings them in.
        self._moving: dict[tuple[int, str], int] = {}
        for s in program.states():
            if s["unit"] is None or not s["persistent"]:
                continue
            key = s["unit"], average_of.get(s["unit"], _TORCH_NAMES.get(s["role"], s["role"]))
            if s["moves"]:
                self._moving[key] = s["value"]
                self._tensors[key] = torch.empty(tuple(s["shape"]), dtype=DTYPES[s["dtype"]], device="meta")
            else:
                self._tensors[key] = executor.tensor(s["value"])
        for u in self.units:
            role = "full" if (u.id, "full") in self._tensors else "shard"
            if (u.id, role) in self._tensors:
                self._tensors[u.id, WEIGHT] = self._tensors[u.id, role]
            if (u.id, role) in self._moving:
                self._moving[u.id, WEIGHT] = self._moving[u.id, role]
        self._roles: dict[int, list[str]] = {u.id: [] for u in self.units}
        for unit, role in self._tensors:
            if role not in ("full", "shard", "grad", WEIGHT):
                self._roles[unit].append(role)
        self._loose = {q.name: executor.tensor(q.value) for q in self.loose}
        self.stage, self.stages = self.mesh.stage, self.mesh.stages
        # Shared parameters of which another stage is the first that has them.
        self._elsewhere = {p["name"] for p in program.params() if p["shared"] and p["shared"][0] != self.stage}
        own = [self._entry(p) for u in self.units if u.id not in average_of for p in u.parameters] + [self._entry(p) for p in self.loose]
        own = [entry for entry in own if entry.name not in self._elsewhere]
        self.everything: list[Entry] = own
        self.outputs: list[dict[str, Any]] = [program.outputs()]  # by stage and name: dtype and shape
        self._tensor_ranks = [self.mesh.size(TENSOR)]  # by stage
        self.changed = [[b["name"] for b in program.buffers() if b["changed"]]]  # buffers that the model changes, by stage
        if self.stages > 1:
            along = self.mesh.group(STAGES)
            mine = own, self.outputs[0], self.changed[0], self.mesh.size(TENSOR)
            found = sealed.objects(mine, self._along_stages()) or []
            found = [found[along.index(leader)] for leader in self.mesh.leaders()]
            self.everything = [entry for entries, *_ in found for entry in entries]
            _, self.outputs, self.changed, self._tensor_ranks = map(list, zip(*found, strict=True))

    def _along_stages(self) -> Any:
        return self.peers.groups.along(self.mesh, STAGES)

    def _entry(self, p: Parameter) -> Entry:
        places = {role: self.place_of(p.name, role) for role in self.roles_of(p.name)}
        roles = {role: self._tensors[q.unit, role].dtype for role, q in places.items() if q.unit is not None}
        others = {role: q.shape for role, q in places.items() if q.shape != p.shape}
        return Entry(self.stage, p.name, p.shape, p.dtype, p.group, roles, others)

    def from_stage(self, stage: int, tensor: Tensor) -> Tensor:
        """What the ranks of a stage have as `tensor`, on all ranks. Every rank must call it, with a tensor of that form."""
        return self._from(self.mesh.leaders()[stage], tensor) if self.stages > 1 else tensor

    def _from(self, rank: int, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        sealed.broadcast(tensor, self._along_stages(), self.mesh.group(STAGES).index(rank))
        return tensor

    def mean_of_stage(self, stage: int, mine: Tensor | None, form: Tensor) -> Tensor:
        """The mean of what the data ranks of a stage have as `mine`, of the form of `form`, on all ranks; where stages have as many ranks,
        what the one with this rank's batch has. Every rank must call it."""
        if not isinstance(self.mesh, UnlikeStages):
            return self.from_stage(stage, form if mine is None else mine)
        first, ranks = self.mesh.first_of(stage), self.mesh.stage_ranks[stage]
        leaders = range(first, first + ranks, self._tensor_ranks[stage])  # those along tp have the same
        parts = [self._from(rank, form.clone() if mine is None else mine.clone()) for rank in leaders]
        return torch.stack(parts).mean(dim=0)

    def roles_of(self, name: str) -> list[str]:
        """Optimizer states that a parameter has, by the names of torch.optim ("exp_avg", ...)."""
        unit = self.parameters[name].unit
        return [] if unit is None else [*self._roles[unit], *(role for of, role in self._averages if of == name)]

    def kept(self) -> list[tuple[Unit, str]]:
        """Each storage of a unit that outlives a step, by its role in the program ("full", "shard", "exp_avg"), once."""
        return [(self.units[unit], role) for unit, role in self._tensors if role != WEIGHT]

    def place_of(self, name: str, role: str) -> Parameter:
        """The parameter, or what stands for its average of this role."""
        return self._averages.get((name, role), self.parameters[name])

    def updated(self, roles: Iterable[str]) -> Iterator[tuple[str, Unit, Parameter]]:
        """Every parameter that has one of these optimizer states, role by role and unit by unit."""
        return ((r, u, p) for r in roles for u in self.units if r in self._roles[u.id] for p in u.parameters)

    def has(self, unit: Unit, role: str) -> bool:
        return (unit.id, role) in self._tensors

    def local(self, unit: Unit, role: str) -> tuple[Tensor, int]:
        """This rank's storage of a role, and the unit's element that it begins with. Valid until the next step or settle()."""
        t = self._tensors[unit.id, role]
        if (unit.id, role) in self._moving:
            t = self.executor.tensor(self._moving[unit.id, role])
        base = self.mesh.index(unit.axis) * unit.shard if t.numel() < unit.numel else 0
        return t, base + (self.mesh.index(unit.replicas) * unit.part if t.numel() < unit.shard else 0)

    def written(self, unit: Unit, role: str) -> tuple[int, int]:
        """The elements of a unit's role that this rank writes into a checkpoint: its share of what it and others have."""
        t, base = self.local(unit, role)
        cuts = next((p.cuts.axes for p in unit.parameters), ())  # a unit's parameters are cut over the same axes
        apart = {*cuts, *(unit.axis.split(",") if t.numel() < unit.numel else ())}
        apart |= {*unit.replicas.split(",")} if t.numel() < unit.shard else set()
        alike = ",".join(axis for axis in self.mesh.sizes if axis not in apart and axis != STAGES)
        if any(p.name in self._elsewhere for p in unit.parameters):
            return base, base
        part = -(-t.numel() // self.mesh.size(alike))
        low = base + min(self.mesh.index(alike) * part, t.numel())
        return low, min(low + part, base + t.numel())

    def parts(self, p: Parameter, role: str) -> Iterator[tuple[Tensor, int, int]]:
        """(flat storage, start, end): the elements [start, end) of this rank's part of the parameter that lie here; none when there are
        none."""
        p = self._averages.get((p.name, role), p)
        if p.unit is None:
            if role == WEIGHT:
                yield self._loose[p.name].view(-1), 0, p.numel
            return
        if (p.unit, role) not in self._tensors:
            return
        t, base = self.local(self.units[p.unit], role)
        start, end = max(base, p.offset), min(base + t.numel(), p.offset + p.numel)
        if start < end:
            yield t[start - base : end - base], start - p.offset, end - p.offset

    def fill(self, name: str, role: str, read: Callable[[int, int], Tensor]) -> None:
        """Copies read(start, end), elements of the whole parameter in row-major order, to where they lie on this rank."""
        p = self.place_of(name, role)
        with torch.no_grad():
            for part, start, end in self.parts(p, role):
                _fill(part, start, end, p.cuts, read)
        self.settle(p.unit, role)

    def settle(self, unit: int | None, role: str) -> None:
        """What came into memory for a look at this role goes back out; tensors over it must not be read any more."""
        if (unit, role) in self._moving:
            self.executor.settle()

    def fill_from(self, name: str, role: str, whole: Tensor) -> None:
        flat = whole.detach().contiguous().view(-1)
        self.fill(name, role, lambda start, end: flat[start:end])

    def moves(self, unit: Unit, role: str) -> bool:
        """Whether this state is out of memory at times."""
        return (unit.id, role) in self._moving

    def put_back(self, unit: Unit, role: str) -> None:
        """Like settle(), for one state that was read and not changed: nothing is written again."""
        if (unit.id, role) in self._moving:
            self.executor.put_back(self._moving[unit.id, role])

    def gather(self, unit: Unit, role: str, everywhere: bool = False) -> Tensor | None:
        """The flat buffer of a unit's role that no rank has a shard of only: on the first rank along the unit's axes (or on all ranks),
        None elsewhere. All ranks must call it."""
        t, _ = self.local(unit, role)
        if t.numel() == unit.numel:
            return t
        groups = self.peers.groups
        shard: Tensor | None = t
        if t.numel() < unit.shard:
            shard = groups.gather(t, self.mesh, unit.replicas, everywhere)
            groups.along(self.mesh, unit.axis)  # which all ranks make, whoever transfers
        return None if shard is None else groups.gather(shard, self.mesh, unit.axis, everywhere)

    def _whole(self, p: Parameter, flat: Tensor | None, everywhere: bool) -> Tensor | None:
        """A parameter in its unit's buffer, with the parts of other ranks where it is cut; on rank 0 (or on all ranks), None elsewhere."""
        mine = None if flat is None else flat[p.offset : p.offset + p.numel]
        if p.cuts.axes:
            group = self.peers.groups.along(self.mesh, p.cuts.word)  # which all ranks make, whoever transfers
            if mine is None or not (everywhere or self._leader in self.mesh.group(p.cuts.word)):
                return None
            mine = self.peers.groups.gather_in(group, mine, self.mesh.size(p.cuts.word), everywhere)
            mine = None if mine is None else p.cuts.joined(mine.chunk(self.mesh.size(p.cuts.word)))
        if mine is None or not (everywhere or self.peers.rank == self._leader):
            return None
        return mine.view(p.shape)

    @property
    def _leader(self) -> int:
        """The first rank of this rank's stage."""
        return self.mesh.first_of(self.stage)

    def resident(self, name: str) -> Tensor | None:
        """A view of the whole parameter where this rank holds it, else None."""
        if name not in self.parameters:
            return None
        p = self.parameters[name]
        if p.unit is None:
            return self._loose[name]
        if (p.unit, WEIGHT) in self._moving or p.cuts.axes:
            return None
        t, _ = self.local(self.units[p.unit], WEIGHT)
        return t[p.offset : p.offset + p.numel].view(p.shape) if t.numel() == self.units[p.unit].numel else None

    def whole(self, role: str, everywhere: bool = False) -> Iterator[tuple[Entry, Tensor | None]]:
        """Every parameter's values of a role, unit by unit, whole on rank 0 (or everywhere). The views live until the next one."""
        own = ((p, t) for p, t in self._whole_of_stage(role, everywhere) if p.name not in self._elsewhere)
        takes_part = everywhere or 0 in self.mesh.group(STAGES)
        for entry in self.everything:
            dtype = entry.dtype if role == WEIGHT else entry.roles.get(role)
            if dtype is None:
                continue
            value = None
            if entry.stage == self.stage:
                p, value = next(own)
                assert p.name == entry.name, f"{p.name} came where {entry.name} was expected"
            if self.stages > 1 and (entry.stage > 0 or everywhere) and takes_part:
                if value is None:
                    value = torch.empty(entry.shape_of(role), dtype=dtype, device=self.peers.device)
                value = self.from_stage(entry.stage, value)
            yield entry, value if everywhere or self.peers.rank == 0 else None
        for _ in own:  # what comes behind the last parameter
            raise AssertionError("more parameters than entries")

    def _whole_of_stage(self, role: str, everywhere: bool) -> Iterator[tuple[Parameter, Tensor | None]]:
        for unit in self.units:
            if (unit.id, role) in self._tensors:
                flat = self.gather(unit, role, everywhere)
                for p in unit.parameters:
                    yield p, self._whole(p, flat, everywhere)
                self.put_back(unit, role)
        if role == WEIGHT:
            for p in self.loose:
                yield p, self._loose[p.name]


_AVERAGE = re.compile(r"(row_var|col_var)_of_u(\d+)")  # as src/passes/update_factors.h has them


def _shape_of(shape: tuple[int, ...], role: str) -> tuple[int, ...]:
    """Of the average of a parameter of this shape."""
    return (*shape[:-1], 1) if role == "row_var" else (*shape[:-2], 1, shape[-1])


def _fill(part: Tensor, start: int, end: int, cuts: Cuts, read: Callable[[int, int], Tensor]) -> None:
    """Elements [start, end) of a part, of reads from the whole: few and long ones, whatever lies between what is wanted."""
    waiting: list[tuple[int, int, int]] = []

    def take() -> None:
        first = waiting[0][2]
        low, high, place = waiting[-1]
        values = read(first, place + high - low)
        for low, high, place in waiting:
            part[low - start : high - start].copy_(values[place - first : place - first + high - low])
        waiting.clear()

    for run in cuts.runs(start, end):
        if waiting and run[2] + run[1] - run[0] - waiting[0][2] > READ_ELEMENTS:
            take()
        waiting.append(run)
    if waiting:
        take()
