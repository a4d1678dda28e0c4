"""The process groups of one trainer, and what travels on them outside of programs.

A program's mesh names axes; each axis is a set of groups, one for every place on the other axes:

    mesh dp=4                    one group: 0 1 2 3
    mesh replica=2 dp=2          dp: 0 1 | 2 3     replica: 0 2 | 1 3     (mesh.py)
"""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from interlace.dist import sealed
from interlace.dist.mesh import Mesh, UnlikeStages
from interlace.dist.rendezvous import ended, listening_until_met
from interlace.errors import InterlaceError


class Groups:
    """Groups of all ranks for one trainer alone. With one rank there are none, and every method gives what this rank has."""

    def __init__(self, device: torch.device, rank: int, size: int, timeout_s: float) -> None:
        self.device, self.rank, self.size, self.timeout_s = device, rank, size, timeout_s
        self._groups: dict[str, Any] = {}
        # By the ranks of all groups along some axes this rank's: one, one beside it, and two more for each further channel of messages
        # (AxisSpec in src/runtime/comm.h).
        self._along: dict[tuple[int, tuple[tuple[int, ...], ...]], Any] = {}
        self._connections: list[tuple[int, int]] = []  # of the host's group beside a device's
        self._within: set[tuple[int, ...]] = set()  # of stages with unlike ranks: groups of one's ranks that have been made

    def open(self) -> None:
        """Makes the groups, once; call when all ranks have been heard of, because it waits for them."""
        if self.size == 1 or self._groups:
            return
        self._groups["native"], _ = self._group(None, "native")
        if self.device.type != "cpu":
            self._groups["host"], self._connections = self._group(None, "host", "gloo")

    def _group(self, ranks: tuple[int, ...] | None, what: str, backend: str = "") -> tuple[Any, list[tuple[int, int]]]:
        """A group of torch's of these ranks (None: all), for tensors on the trainer's device, and its connections. All ranks must call it."""
        backend = backend or ("gloo" if self.device.type == "cpu" else native_backend(self.device))
        limit = datetime.timedelta(seconds=self.timeout_s)
        with listening_until_met() as connections:
            made = dist.new_group(ranks and list(ranks), backend=backend, timeout=limit, group_desc=f"interlace {what}")
        return made, connections

    @property
    def native(self) -> Any:
        """For tensors on this trainer's device."""
        return self._groups["native"]

    @property
    def host(self) -> Any:
        """For tensors in the host's memory."""
        return self._groups.get("host", self.native)

    def axes(self, program: Any) -> list[dict[str, Any]]:
        """The executor's description of a program's mesh and of the groups that it transfers along. All ranks make the same groups,
        so all must ask. Error: a mesh that this world cannot be.
        """
        mesh = Mesh.of(program, self.rank)
        if mesh.ranks != self.size:
            raise InterlaceError(
                f"the program is for a mesh of {mesh}, which has {mesh.ranks} ranks, but the run has {self.size}; "
                f"write a mesh of {self.size}, or start {mesh.ranks} ranks"
            )
        backend = "none" if self.size == 1 else transport(self.device)
        wanted = program.transfer_axes(backend == "tcp")
        if isinstance(mesh, UnlikeStages):
            self._meet_within_stages(mesh, wanted)
        two = backend not in ("none", "tcp")

        def described(name: str, axes: str, first: int) -> dict[str, Any]:
            native = self.along(mesh, axes, first).group_name if axes in wanted else ""
            beside = self.along(mesh, axes, first + 1).group_name if two and axes in wanted else ""
            return {"name": name, "rank": mesh.index(axes), "size": mesh.size(axes), "backend": backend, "native": native, "beside": beside}

        found = [described(axes, axes, 0) for axes in dict.fromkeys([*mesh.sizes, *wanted])]
        for axis, channels in program.message_axes().items() if two else ():
            found += [described(f"{axis} messages {channel}", axis, 2 * channel) for channel in range(1, channels)]
        return found

    def along(self, mesh: Mesh, axes: str, number: int = 0) -> Any:
        """This rank's process group along some axes of a mesh, for tensors on the trainer's device. `number`: of those of the same ranks."""
        if mesh.size(axes) == self.size and number == 0:
            return self.native
        groups = tuple(map(tuple, mesh.groups(axes))) if not isinstance(mesh, UnlikeStages) else (tuple(mesh.group(axes)),)
        if (number, groups) not in self._along:
            for ranks in groups:
                made, _ = self._group(ranks, axes)
                if self.rank in ranks:
                    self._along[number, groups] = made
        return self._along[number, groups]

    def _meet_within_stages(self, mesh: UnlikeStages, wanted: list[str]) -> None:
        """Makes the groups that stages need among their own ranks, each of which knows of its own only, on all ranks in one order."""
        mine = [tuple(mesh.group(axes)) for axes in wanted if mesh.size(axes) < self.size]
        everyone = sealed.objects(mine, self.host) or []
        for ranks in sorted({group for groups in everyone for group in groups} - self._within):
            for number in range(1 if self.device.type == "cpu" else 2):
                made, _ = self._group(ranks, "stage")
                if self.rank in ranks:
                    self._along[number, (ranks,)] = made
            self._within.add(ranks)

    def gather(self, mine: torch.Tensor, mesh: Mesh, axes: str, everywhere: bool = False) -> torch.Tensor | None:
        """The equal 1-D parts of the ranks along some axes, one after the other, on the first rank of each such group (or on all);
        None elsewhere. The group's timeout holds.
        """
        size = mesh.size(axes)
        return mine if size == 1 else self.gather_in(self.along(mesh, axes), mine, size, everywhere)

    def gather_in(self, group: Any, mine: torch.Tensor, size: int, everywhere: bool) -> torch.Tensor | None:
        """gather() in a group of so many ranks."""
        here = everywhere or dist.get_rank(group) == 0
        whole = torch.empty(size * mine.numel(), dtype=mine.dtype, device=mine.device) if here else None
        parts = list(whole.chunk(size)) if whole is not None else None
        sealed.gather(mine.contiguous(), parts, group, everywhere)
        return whole

    def gather_objects(self, mine: Any) -> list[Any] | None:
        """Every rank's object by rank, on rank 0; None elsewhere."""
        if self.size == 1:
            return [mine]
        return sealed.objects(mine, self.host, everywhere=False)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values, written into everyone's contiguous tensor."""
        if self.size > 1:
            sealed.broadcast(tensor, self.native, 0)

    def largest(self, numbers: list[int]) -> list[int]:
        """Number by number the largest that any rank has."""
        if self.size == 1:
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.host)
        return [int(n) for n in found.tolist()]

    def cut_off(self) -> bool:
        """Devices: whether a rank's process has ended, or closed its groups. Transfers between devices do not tell."""
        return self.device.type != "cpu" and ended(self._connections)

    def abort(self) -> None:
        """Breaks off what a device's groups are at, which would wait for a lost rank as long as their timeout allows. From any thread."""
        for group in [*self._along.values(), self._groups.get("native")]:
            with contextlib.suppress(Exception):  # not every backend's can
                group.abort()

    def close(self) -> None:
        """Whoever still holds a group by name (an executor) must have been dropped before."""
        groups = [*self._along.values(), *self._groups.values()]
        self._along, self._groups = {}, {}
        while groups:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(groups.pop())


def transport(device: torch.device) -> str:
    """What an executor's collectives go by on a device: our own transport, or the process group's own, of which it knows NCCL by name."""
    if device.type == "cpu":
        return "tcp"
    return "nccl" if native_backend(device) == "nccl" else "native"


def native_backend(device: torch.device) -> str:
    return dist.get_default_backend_for_device(device.type)


def check_streams(device: torch.device) -> None:
    """Error: a device whose work cannot be ordered."""
    if device.type == "cpu":
        return
    try:
        torch.Event(device.type).record(torch.Stream(device))
    except (RuntimeError, NotImplementedError) as e:
        raise InterlaceError(
            f"{device} gives no streams and events ({str(e).splitlines()[0]}), by which steps are ordered; train on the CPU: model.cpu()"
        ) from None


def device_name(device: torch.device) -> str:
    """What tells a device from all others, where only one rank can use it; else empty."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None) if device.type != "cpu" else None
    return str(getattr(properties(device), "uuid", "")) if properties is not None else ""


def default_device() -> torch.device:
    """This rank's accelerator when there is one (chosen by LOCAL_RANK), else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    return torch.device("cpu")
