"""What all parts of a Trainer share: its attributes, and how ranks agree before they change anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from interlace.capture.inputs import InputSpec
from interlace.checkpoint.saver import Locks, Save
from interlace.checkpoint.tensor_file import CheckpointError, DamageError
from interlace.compiling.programs import Programs, Source
from interlace.compiling.states import States
from interlace.config import Config
from interlace.dist.peers import Peers
from interlace.errors import InterlaceError
from interlace.train.hyper import Hyper
from interlace.train.loss_scale import LossScale
from interlace.train.shapes import Shapes

Tensor = torch.Tensor


class NonFiniteError(InterlaceError):
    """The loss or the gradient of a step is infinite or not a number."""


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


class TrainerBase:
    """Attributes of a Trainer; trainer.py sets them."""

    config: Config
    rank: int
    world_size: int
    steps: int
    norm: float | None
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _peers: Peers
    _spec: InputSpec
    _ir: Any
    _executor: Any
    _runner: Runner
    _source: Source
    _states: States
    _tensors: Tensors
    _hyper: Hyper
    _programs: Programs
    _shapes: Shapes | None
    _loss_scale: LossScale
    _loop: Any
    _evaluation: Any
    program: str
    last_save: dict[str, Any] | None  # of the last save that ended: bytes, seconds of its parts
    _save: Save | None
    _saves: int
    _save_begin: dict[str, float]
    _locks: Locks
    _hf_texts: tuple[dict[str, Any], dict[str, str | bytes]] | None  # of the configs as they were
    _closed: str | None

    def _inputs(self, batch: Any) -> Any:
        raise NotImplementedError

    def flush(self) -> None:
        """Makes the optimizer step that the last step left to the next one (pass reposition_update), if it left one.

        Whatever reads or writes parameters through this trainer does so by itself. Every rank must call it, before the model's own
        parameters are read or changed between two steps.
        """
        self._check_open()
        self._flush()

    def _flush(self) -> None:
        if self._executor is not None:
            with self._peers.guard():
                self._executor.flush()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise InterlaceError(
                f"this trainer can no longer be used: {self._closed}; compile again and load a checkpoint"
            )

    def _agree(
        self, what: str, check: Callable[[], Callable[[], None]], error: type[InterlaceError] = CheckpointError
    ) -> Callable[[], None]:
        """Runs check() on every rank; if it fails on any, all raise that error and nothing has changed."""
        problem, action = None, None
        try:
            action = check()
        except InterlaceError as e:
            problem = [str(e), isinstance(e, DamageError)]
        with self._peers.guard():
            problems = self._peers.exchange(what, problem)
        for rank, found in enumerate(problems):
            if found is not None:
                text, damage = found
                kind = DamageError if damage else error
                raise kind(text if self.world_size == 1 or rank == self.rank else f"on rank {rank}: {text}")
        assert action is not None
        return action
