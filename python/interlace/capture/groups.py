"""Optimizer parameter groups: which update each parameter gets. Learning rates and the like are read by the trainer,
each step."""

from __future__ import annotations

import torch

from interlace.capture.model_tensors import ModelTensor
from interlace.errors import CaptureError

_KINDS: dict[type, str] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
_REFUSED = ("amsgrad", "differentiable")


def optimizer_groups(optimizer: torch.optim.Optimizer | None, params: list[ModelTensor]) -> tuple[list[str], dict[int, int]]:
    """The update of each group ("adamw", ...), and the group of each trainable parameter by id of the real tensor."""
    trainable = [p for p in params if p.real.requires_grad]
    if optimizer is None:
        return ["adamw"], {id(p.real): 0 for p in trainable}
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise CaptureError(f"optimizer {type(optimizer).__name__} is not supported; use torch.optim.AdamW, Adam or SGD")
    known = {id(p.real): p for p in params}
    kinds: list[str] = []
    group_of: dict[int, int] = {}
    for i, group in enumerate(optimizer.param_groups):
        for option in _REFUSED:
            if group.get(option):
                raise CaptureError(f"optimizer group {i} has {option}=True, which is not supported; set it to False")
        decoupled = kind == "adam" and group.get("decoupled_weight_decay")
        kinds.append("adamw" if decoupled else kind)
        for j, p in enumerate(group["params"]):
            if id(p) not in known:
                name = group["param_names"][j] if "param_names" in group else f"number {j} of shape {tuple(p.shape)}"
                raise CaptureError(
                    f"optimizer group {i} has a parameter ({name}) that is not the model's; "
                    "make the optimizer from model.parameters() after the model is built"
                )
            group_of[id(p)] = i
    for p in trainable:
        if id(p.real) not in group_of:
            raise CaptureError(
                f"the optimizer does not own parameter '{p.name}'; add it to a group, or freeze it (requires_grad=False)"
            )
    return kinds, group_of
