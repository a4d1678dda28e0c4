"""Random numbers from a torch.Generator of the user's own: drawn while the model is traced, and constants of the program.

    generator = torch.Generator().manual_seed(0)                in forward: the same numbers at each step, so they are constants
    noise = torch.randn(8, generator=generator)

Where another run of the model draws others, because the generator goes on from step to step, the model is refused (program.py looks).
What is drawn depends on nothing that is computed; other draws (`bernoulli` of a tensor, say) are refused too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from interlace.capture.attention import BACKWARD
from interlace.errors import CaptureError

if TYPE_CHECKING:
    from interlace.capture.recorder import Recorder

aten = torch.ops.aten
Tensor = torch.Tensor
RATHER = "draw without a generator, which gives others at each step, or pass fullgraph=False to run that in Python"


class OwnDraws:
    """Of one trace. `drawn`: place, path of the module, and what was drawn there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.drawn: list[tuple[str, str | None, Tensor]] = []
        self._reseeds = ""
        self._streams: dict[int, int] = {}  # by the value of what would be a second result

    def draw(self, func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
        """What the operator gives; `args` are fakes, the generator is in `kwargs`."""
        rec = self._recorder
        target = args[0] if func._schema.name.endswith("_") and args and isinstance(args[0], Tensor) else None
        if any(isinstance(a, Tensor) for a in (args if target is None else args[1:])):
            raise CaptureError(f"{func._schema.name} draws from a generator of its own by what the model computes; {RATHER}")
        device = kwargs["generator"].device
        with _disable_current_modes():
            if target is None:
                real = func(*args, **({**kwargs, "device": device} if "device" in kwargs else kwargs))
            else:
                real = torch.empty_strided(tuple(target.shape), target.stride(), dtype=target.dtype, device=device)
                real = func(real, *args[1:], **kwargs).detach()
        stack = rec.sites.stack_paths
        self.drawn.append((rec.sites.place(), stack[-1] if stack else None, real))
        with rec.fakes:
            literal = torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device="cpu")
        rec.lift(real, literal)
        if target is None:
            return rec.call(aten.clone.default, literal)  # which may be written
        rec.copy_into(target, literal)
        return target

    def other(self, later: OwnDraws) -> tuple[str, str | None] | None:
        """Place and module of the first draw that another run made otherwise."""
        for (place, path, mine), (_, _, its) in zip(self.drawn, later.drawn, strict=False):
            if not torch.equal(mine, its):
                return place, path
        return None

    # ---- torch's own generator, seeded while the model runs ----

    def reseeded(self, name: str) -> str:
        """The model calls torch.manual_seed, say. Gives what it called before."""
        before, self._reseeds = self._reseeds, name
        return before

    def begin(self, value: int, stream: int) -> int:
        """The stream, before a draw from it whose first result is `value`. Error: the model expects it to begin with a seed, or where
        another one did."""
        if self._reseeds:
            raise CaptureError(
                f"random numbers are drawn after {self._reseeds}() while the model runs, and a program draws from streams of its own; leave "
                "that out, or pass fullgraph=False to run that module in Python"
            )
        self._streams[value + 1] = stream
        return stream

    def again(self, func: OpOverload, args: tuple) -> str:
        """What names the stream that the gradient of attention with dropout draws from: that of the operator that gave the sums."""
        return f" rng={self._streams[self._recorder.value_of(args[5])]}" if func is BACKWARD and args[6] != 0 else ""
