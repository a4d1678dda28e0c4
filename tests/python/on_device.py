"""Runs tests that know nothing of devices on the accelerator that INTERLACE_DEVICE names: what they compile goes there first."""

from __future__ import annotations

import functools
import os
from typing import Any

DEVICE = os.environ.get("INTERLACE_DEVICE", "cpu")
_installed = False


def install() -> None:
    """interlace.compile moves a model that has memory to DEVICE; the trainer moves batches itself."""
    global _installed
    if _installed or DEVICE == "cpu":
        return
    _installed = True
    import torch

    import interlace

    compile_there = interlace.compile

    @functools.wraps(compile_there)
    def compile(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, torch.nn.Module):
            for module in model.modules():
                recurrent = isinstance(module, torch.nn.RNNBase)  # has weak references to its weights, which its own Module.to lets go, too
                if recurrent:
                    module._flat_weight_refs = []
                for t in (*module._parameters.values(), *module._buffers.values()):
                    if t is None or t.device.type != "cpu":
                        continue
                    there = t.detach().to(DEVICE)
                    if isinstance(t, torch.nn.Parameter):
                        there = torch.nn.Parameter(there, t.requires_grad)
                    if torch._has_compatible_shallow_copy_type(t, there):  # type: ignore[attr-defined]
                        t.data = there.data  # as Module.to does
                    else:
                        torch.utils.swap_tensors(t, there)  # the same object: optimizers and ties know it
                if recurrent:
                    module._init_flat_weights()
        return compile_there(model, *args, **kwargs)

    interlace.compile = compile
    equal = torch.equal
    torch.equal = lambda a, b: equal(a, b) if a.device == b.device else equal(a.cpu(), b.cpu())
    torch.testing.assert_close = functools.partial(torch.testing.assert_close, check_device=False)


def _moved(value: Any, device: str) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda t: t if t.device.type == device or t.is_meta else t.detach().to(device), value)


def there(value: Any) -> Any:
    """A batch, where what is compiled lies: for eager steps of such a model."""
    return value if DEVICE == "cpu" else _moved(value, DEVICE)


def home(value: Any) -> Any:
    """What a rank gives back, on the CPU: no process can open another one's memory of a device."""
    return value if DEVICE == "cpu" else _moved(value, "cpu")


def executors(runtime: Any) -> Any:
    """The runtime for tests that make executors: those for "cpu" are for DEVICE, take inputs from the host and give outputs there."""
    if DEVICE == "cpu":
        return runtime
    import torch

    def there(batches: list[list[Any]]) -> list[list[Any]]:
        return [[x.to(DEVICE) if isinstance(x, torch.Tensor) and not x.is_meta else x for x in batch] for batch in batches]

    class Executor(runtime.Executor):  # type: ignore[misc]
        def __init__(self, text: str, device: str = "cpu", *args: Any) -> None:
            super().__init__(text, DEVICE if device == "cpu" else device, *args)

        def step(self, batches: Any, *args: Any) -> Any:
            found = super().step(there(batches), *args)
            return {**found, "outputs": {name: [x.cpu() for x in tensors] for name, tensors in found["outputs"].items()}}

        def debug_step(self, batches: Any, *args: Any, **named: Any) -> Any:
            return super().debug_step(there(batches), *args, **named)

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            return Executor if name == "Executor" else getattr(runtime, name)

    return Runtime()


def needs(ranks: int) -> None:
    """Skips a test for want of devices; that in software has as many as are asked for."""
    if DEVICE in ("cpu", "soft"):
        return
    import pytest
    import torch

    if ranks > 1 and torch.accelerator.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need as many devices")


def left_out() -> list[str]:
    """The waits that this process left out since the last call, which only the device in software can tell."""
    if DEVICE != "soft":
        return []
    import gc

    import soft_device
    import torch

    torch.accelerator.synchronize()
    gc.collect()  # or a device's peak has what a test before has left
    return list(soft_device.take_reports())
