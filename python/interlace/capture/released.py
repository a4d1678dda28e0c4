"""What stands for a parameter whose values lie in a trainer, cut over ranks, or out of memory: its shape can be asked for, nothing else.

Whatever reads or writes its values (state_dict, torch.save, generate, clamp_, load_state_dict, deepcopy) would work on a tensor without
data; here it is an error that names the user's line and the call that works.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from interlace.capture.sites import is_installed, line_now
from interlace.errors import InterlaceError

Tensor = torch.Tensor

_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that give values
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "storage_offset", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "get_device", "requires_grad_", "type", "__hash__", "__len__", "__repr__", "__format__", "__dir__",
    "is_same_size", "dim_order", "register_hook",
)  # fmt: skip


def _allowed() -> set[Any]:
    functions: set[Any] = {getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)}
    for name in dir(Tensor):
        attribute = getattr(Tensor, name)
        if name not in _VALUES and type(attribute).__name__ in ("getset_descriptor", "property"):
            functions.add(attribute.__get__)
    for name in ("requires_grad", "grad", "_backward_hooks"):
        descriptor: Any = getattr(Tensor, name)
        functions |= {descriptor.__set__, descriptor.__delete__}
    return functions


_ALLOWED = _allowed()
_IS_META = getattr(Tensor, "is_meta").__get__  # noqa: B009 (typed as bool)  # which load_state_dict asks for first; what comes later it would say once for each parameter


def user_line() -> str:
    """ "script.py:12", the innermost line that is the user's own: of no installed package, nor of Python's library, nor ours."""
    waiting = (f for f in sys._current_frames().values() if f.f_code.co_name == "_engine_run_backward")  # for a thread of a device
    return next(filter(None, (line_now(lambda file: not is_installed(file), f) for f in (None, *waiting))), "(no line of yours)")


class Released(nn.Parameter):
    """A parameter of a compiled model that has no values here."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED and not (func == _IS_META and sys._getframe(1).f_code.co_name == "_load_from_state_dict"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "data")
            name = "load_state_dict" if attribute == "is_meta" else f".{attribute}"
        raise InterlaceError(
            f"{user_line()}: {name} of a parameter whose values are in a trainer, not in the model; on every rank, put this between "
            "steps into `with trainer.whole_parameters():`, or call trainer.state_dict(), save_pretrained(folder), load_weights(values), "
            "save(folder) or evaluate(batch)"
        )
