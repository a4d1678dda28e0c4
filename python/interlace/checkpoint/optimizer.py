"""What torch.optim's objects are in files: the names of an optimizer's states, its hyper-parameters, state dicts as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from interlace.checkpoint.tensor_file import CheckpointError

# Names of a parameter's states in the order of the update's operands, as torch.optim calls them. Other kinds have rules, which name
# theirs; a checkpoint's record does too.
STATE_NAMES: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def plain_hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters as JSON has them: numbers for tensors, lists for tuples."""
    values = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if k not in ("params", "param_names")}


def plain(x: Any, where: str, keep: Callable[[torch.Tensor], Any], advice: str = "") -> Any:
    """A state dict as JSON. `keep`: what stands for a tensor; None: nothing can. Error: what a checkpoint does not hold."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, torch.Tensor) and (kept := keep(x)) is not None:
        return kept
    if isinstance(x, (list, tuple)):
        items = [plain(v, where, keep, advice) for v in x]
        return items if isinstance(x, list) else {"tuple": items}
    if isinstance(x, dict):
        pairs = [[plain(k, where, keep, advice), plain(v, f"{where}.{k}", keep, advice)] for k, v in x.items()]
        return {"Counter" if isinstance(x, Counter) else "dict": pairs}
    raise CheckpointError(f"{where} is a {type(x).__name__}, which a checkpoint does not hold{advice}")


def back(x: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What plain() wrote; `tensors` by their names, {"tensor": name}."""
    if isinstance(x, list):
        return [back(v, tensors) for v in x]
    if not isinstance(x, dict):
        return x
    ((kind, items),) = x.items()
    if kind == "tensor":
        return tensors[items]
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(back(v, tensors) for v in items)
    found = {back(k, tensors): back(v, tensors) for k, v in items}
    return Counter(found) if kind == "Counter" else found
