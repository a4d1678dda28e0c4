"""The factor that keeps float16 gradients from vanishing: backward starts with it, the update divides it out.

step:      1      2         3 ... 2002   2003                as torch.amp.GradScaler: halved when the gradient is not finite
scale:  65536  65536 (inf)  32768 ...   65536                (that step changes nothing), doubled after 2000 steps that are
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.capture.casts import LOSS_SCALE
from interlace.config.forms import first_loss_scale

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
_LEAST = 2.0**-14  # below it, no scale helps: the loss itself is not finite


class LossScale:
    """The scale of a trainer's program; every rank changes it the same way, because all see the same gradient norm."""

    def __init__(self, setting: float | str | None) -> None:
        self.dynamic = setting == "dynamic"
        self.value = first_loss_scale(setting)
        self.good_steps = 0  # since it last changed
        self._storage: torch.Tensor | None = None

    def attach(self, program: Any, executor: Any) -> None:
        """From here on, steps are made by this program."""
        if self.value is None:
            return
        value = next(b["value"] for b in program.buffers() if b["name"] == LOSS_SCALE)
        self._storage = executor.tensor(value)
        self._write()

    def after_step(self, finite: bool) -> None:
        if not self.dynamic or self.value is None:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value *= BACKOFF
        elif self.good_steps == INTERVAL:
            self.value, self.good_steps = self.value * GROWTH, 0
        else:
            return
        self._write()

    @property
    def exhausted(self) -> bool:
        """Whether steps were skipped so often that no scale can be the cause."""
        return self.dynamic and self.value is not None and self.value < _LEAST

    def state(self) -> list[float] | None:
        return None if self.value is None else [self.value, self.good_steps]

    def restore(self, state: list[float] | None) -> None:
        """From a checkpoint; one without a scale, or a fixed scale here, changes nothing."""
        if state is None or not self.dynamic:
            return
        self.value, self.good_steps = float(state[0]), int(state[1])
        self._write()

    def _write(self) -> None:
        if self._storage is not None and self.value is not None:
            self._storage.fill_(self.value)
