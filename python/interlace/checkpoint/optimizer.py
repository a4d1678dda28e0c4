"""What a torch.optim object is in files: its kind, the names of its states, its hyper-parameters as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Names of a parameter's states in the order of the update's operands, as torch.optim calls them. Other kinds have rules, which name
# theirs; a checkpoint's record does too.
STATE_NAMES: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def plain_hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters as JSON has them: numbers for tensors, lists for tuples."""
    values = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if k not in ("params", "param_names")}
