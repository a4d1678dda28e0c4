"""What a loss function may give: a scalar, a dict with "loss", or a tuple with the loss first; the rest are outputs by name."""

from __future__ import annotations

from typing import Any

import torch

from interlace.capture.inputs import leaves, path_name
from interlace.errors import CaptureError

Tensor = torch.Tensor


class Evaluated(frozenset[str]):
    """Of a loss that is evaluated beside a training, the parameters that have a gradient in it: all but these, whatever the loss depends
    on, as its program is to have the states of the one that trains."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


class LossForm(CaptureError):
    """A loss function gives or does what no step can be made of, however it is computed."""


def unwritable(kind: type) -> CaptureError:
    """Of an operator's argument of this type."""
    if kind.__name__ != "ScriptObject":
        return CaptureError(f"an argument of type {kind.__name__} cannot be written in a program")
    return LossForm(  # a process group, or its work; one rank alone would wait for the others in a real run
        "a collective of torch.distributed is called, which is no part of a program: that averages gradients over ranks by itself; average "
        'what is only logged after the step, or take mode="eager", which runs the model\'s own Python on every rank'
    )


def outputs_of(result: Any, numbers: bool = True) -> dict[str, Tensor]:
    """The tensors and `numbers` in it by name ("loss" first, "logits", "1.logits"); texts and None are left out. Error: LossForm."""
    if isinstance(result, dict):
        if "loss" not in result:
            raise LossForm(f"the loss function gave a dict without 'loss' (keys: {', '.join(map(str, result))})")
        loss, rest = result["loss"], {str(k): v for k, v in result.items() if k != "loss"}
    elif isinstance(result, (tuple, list)) and result:
        loss, rest = result[0], {str(i): v for i, v in enumerate(result) if i > 0}
    else:
        loss, rest = result, {}
    if not isinstance(loss, Tensor):
        raise LossForm(f"the loss is a {type(loss).__name__}; return a scalar tensor")
    if loss.numel() != 1:
        raise LossForm(f"the loss has shape {tuple(loss.shape)}; return a scalar, for example loss.mean()")
    if not loss.is_floating_point():
        raise LossForm(f"the loss is of dtype {loss.dtype}; return a floating-point scalar")
    found = {"loss": loss.reshape(()) if loss.dim() else loss}
    for path, value in leaves(rest):
        if value is None or isinstance(value, str):
            continue  # nothing that a program could give
        if not isinstance(value, (Tensor, bool, int, float)):
            what = type(value).__name__
            raise LossForm(f"output '{path_name(path)}' of the loss function is a {what}; return tensors and numbers beside the loss")
        if numbers or isinstance(value, Tensor):
            found[path_name(path)] = value if isinstance(value, Tensor) else torch.tensor(value)
    return found
