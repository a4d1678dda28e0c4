"""Casts: the model traced in another precision than that of its parameters, with the semantics of FSDP2's
MixedPrecisionPolicy on the whole model.

    %4: bf16[8,8] = aten._to_copy(%0, dtype=bf16) {fwd m1}      each parameter once; its gradient comes back the same way
    %5: bf16[2,8] = aten._to_copy(%3, dtype=bf16) {fwd m0}      floating inputs of the model's call
    ...                                                         buffers are what they are, and parameters of BatchNorm beside them
    %9: f32[2,8] = aten._to_copy(%8, dtype=f32) {fwd m0}        floating results of the model's call, with output_dtype
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from interlace.capture.check_ops import MixedDtypes
from interlace.capture.device_casts import rules_of
from interlace.capture.model_tensors import ModelTensor
from interlace.capture.patches import patched
from interlace.capture.sites import Sites
from interlace.errors import CaptureError

Tensor = torch.Tensor
LOSS_SCALE = "interlace.loss_scale"  # the buffer that the seed of backward is multiplied by; the pass `update` knows the name


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `value`, however nested, in `dtype`."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype else x

    return tree_map(one, value)


@dataclasses.dataclass(frozen=True)
class Casts:
    """The dtypes that parameters and inputs (`param`) and results (`output`) of the model are cast to; None: as they are.

    With a `loss_scale`, backward starts with it instead of 1, so that gradients do not vanish in float16; it is a buffer of the
    program, which the trainer may change between steps."""

    param: torch.dtype | None = None
    output: torch.dtype | None = None
    loss_scale: float | None = None
    autocast: bool = False  # the loss function runs under torch.autocast, unless it opens such a region itself

    @staticmethod
    def named(param: str | None, output: str | None, loss_scale: float | None = None) -> Casts:
        """From the settings of a Config; under "autocast" the model has its own casts."""

        def dtype(name: str | None) -> torch.dtype | None:
            return None if name in (None, "autocast") else getattr(torch, str(name))

        return Casts(dtype(param), dtype(output), loss_scale, param == "autocast")

    def seed(self) -> ModelTensor | None:
        """The buffer of the loss scale."""
        if self.loss_scale is None:
            return None
        return ModelTensor(LOSS_SCALE, torch.tensor(self.loss_scale), "plain", False)

    def mixed(self, error: CaptureError) -> str:
        """What to do where an operator has operands of several dtypes."""
        if self.param is None or not isinstance(error, MixedDtypes):
            return ""
        name = str(self.param).removeprefix("torch.")
        return (
            f". With param_dtype={name} parameters and inputs of the model are {name}, and buffers are what they are (as in FSDP2): cast "
            'what comes of a buffer to its neighbour\'s dtype (y.to(x.dtype)), or take param_dtype="autocast"'
        )

    def parameters(self, model: nn.Module, tensors: list[ModelTensor], sites: Sites) -> dict[int, Tensor]:
        """What stands in for parameters, by id of the real one; each cast belongs to the first module that has it."""
        if self.param is None:
            return {}
        owners: dict[int, nn.Module] = {}
        for module in model.modules():
            for p in module._parameters.values():
                owners.setdefault(id(p), module)
        cast: dict[int, Tensor] = {}
        for t in tensors:
            assert t.fake is not None
            if t.kind != "param" or not t.fake.is_floating_point() or t.fake.dtype == self.param:
                continue
            statistics = getattr(owners[id(t.real)], "running_mean", None)
            if isinstance(owners[id(t.real)], _NormBase) and statistics is not None and statistics.dtype == t.real.dtype:
                continue  # PyTorch's batch_norm takes narrow rows with parameters of its statistics' dtype, as FSDP1 leaves them
            sites.enter(owners[id(t.real)])
            cast[id(t.real)] = t.fake.to(self.param)
            sites.leave()
        if not cast:
            raise CaptureError(
                f"param_dtype={str(self.param).removeprefix('torch.')} changes nothing: the model's parameters have that "
                "dtype already; keep them in float32 (model.float()), which the optimizer updates"
            )
        return cast

    @contextlib.contextmanager
    def of_calls(self, model: nn.Module) -> Iterator[None]:
        """Calls of the model cast their floating inputs and results."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return _cast(args, self.param), _cast(kwargs, self.param)  # type: ignore[arg-type]

        def after(module: nn.Module, args: Any, result: Any) -> Any:
            return _cast(result, self.output)  # type: ignore[arg-type]

        hooks = []
        if self.param is not None:
            hooks.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        if self.output is not None:
            hooks.append(model.register_forward_hook(after))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


NO_CASTS = Casts()


@contextlib.contextmanager
def regions_opened(device: str) -> Iterator[list[bool]]:
    """A list that has something in it once a torch.autocast region for this device was entered."""
    opened: list[bool] = []
    enter = torch.autocast.__enter__

    def noting(region: torch.autocast) -> Any:
        if region._enabled and region.device == device:  # type: ignore[attr-defined]
            opened.append(True)
        return enter(region)

    with patched(torch.autocast, __enter__=noting):
        yield opened


@contextlib.contextmanager
def regions_of(device: str) -> Iterator[None]:
    """Regions of torch.autocast for the model's device are regions for CPUs, on which a trace's tensors lie, and cast what the device's
    cast: those that are open now, and those that are entered. One that is made for CPUs meanwhile is the device's: its maker has asked a
    tensor for its device (as Hugging Face's rotary embeddings do, to cast nothing)."""
    if device == "cpu" or not torch.amp.is_autocast_available(device):
        yield
        return
    make, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__
    cast = torch.amp.autocast_mode._cast  # of custom_fwd(cast_inputs=...), which asks a tensor for its device
    beside: list[torch.autocast] = []  # of the regions that are open now, from outside in
    forget: list[Callable[[], None]] = []

    with contextlib.ExitStack() as rules:

        def as_on_device() -> None:
            on = torch.is_autocast_enabled(device)
            if on and not forget:
                forget.append(rules.enter_context(rules_of(device)))
            region = object.__new__(torch.autocast)
            make(region, "cpu", torch.get_autocast_dtype(device) if on else None, on, torch.is_autocast_cache_enabled())
            enter(region)
            beside.append(region)

        def made(region: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            make(region, device if device_type == "cpu" and type(region) is torch.autocast else device_type, *args, **kwargs)

        def entered(region: Any) -> Any:
            found = enter(region)
            as_on_device()
            return found

        def left(region: Any, *error: Any) -> Any:
            leave(beside.pop(), *error)
            if not beside and forget:
                forget[0]()
            return leave(region, *error)

        if torch.is_autocast_enabled(device) or torch.is_autocast_enabled("cpu"):
            as_on_device()
        try:
            inputs = {"_cast": lambda x, there, dtype: cast(x, "cpu" if there == device else there, dtype)}
            with patched(torch.autocast, __init__=made, __enter__=entered, __exit__=left), patched(torch.amp.autocast_mode, **inputs):
                yield
        finally:
            while beside:
                leave(beside.pop(), None, None, None)
