"""Optimizer states of parameters that are frozen for now: laid by when they are frozen, a part on each rank, kept in checkpoints and state
dicts, and taken up when they are unfrozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from interlace.train.run import Run

Tensor = torch.Tensor


@dataclasses.dataclass
class LaidBy:
    """Of a parameter: the steps that it has made, its optimizer's pilot, and of each flat state this rank's part and the whole's shape."""

    made: int
    pilot: Any
    roles: list[str] = dataclasses.field(default_factory=list)  # that put() is to be called with
    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def put(self, run: Run, role: str, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> None:
        """Keeps this rank's part of what read(begin, end) gives of the whole."""
        count = torch.Size(shape).numel()
        low, high = share(run, count)
        part = torch.zeros(-(-count // run.world_size), dtype=read(0, 0).dtype, device=run.peers.device)
        if low < high:
            part[: high - low] = read(low, high)
        self.parts[role], self.shapes[role] = part, shape

    def put_whole(self, run: Run, role: str, whole: Tensor) -> None:
        flat = whole.detach().reshape(-1)
        self.put(run, role, tuple(whole.shape), lambda begin, end: flat[begin:end])

    def whole(self, run: Run, role: str) -> Tensor:
        """Every rank must call it."""
        groups, part = run.peers.groups, self.parts[role]
        every = part if run.world_size == 1 else groups.gather_in(groups.native, part, run.world_size, True)
        assert every is not None
        return every[: torch.Size(self.shapes[role]).numel()].view(self.shapes[role])


def states_of(entry: dict[str, Any], parameter: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What an optimizer's entry of a parameter has for each element, or by these names."""
    tensors = {name: t for name, t in entry.items() if isinstance(t, Tensor)}
    return {name: t for name, t in tensors.items() if name in names or (t.shape == parameter.shape and name != "step")}


def share(run: Run, count: int) -> tuple[int, int]:
    """This rank's part of what every rank has."""
    part = -(-count // run.world_size)
    return min(run.rank * part, count), min((run.rank + 1) * part, count)
