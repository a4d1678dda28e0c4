"""The state of a learning-rate scheduler as a file of a checkpoint: scheduler.json, plain numbers and words, no pickle.

What state_dict() gives is a dict of numbers, words, lists, tuples, dicts and Counters (MultiStepLR's milestones); JSON has neither tuples
nor keys that are numbers, so those are written as {"tuple": [...]} and {"Counter": [[key, value], ...]}.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from interlace.checkpoint.tensor_file import CheckpointError, DamageError
from interlace.errors import UNREADABLE

SCHEDULER = "scheduler.json"


def scheduler_text(scheduler: Any) -> str:
    """Error: it has no state_dict(), or keeps what is neither a number nor a word."""
    if not callable(getattr(scheduler, "state_dict", None)) or not callable(getattr(scheduler, "load_state_dict", None)):
        raise CheckpointError(f"scheduler= takes an object with state_dict() and load_state_dict(), not {type(scheduler).__name__}")
    return json.dumps({"class": type(scheduler).__name__, "state": _plain(scheduler.state_dict(), type(scheduler).__name__)}, indent=1) + "\n"


def scheduler_state(data: bytes, scheduler: Any) -> dict[str, Any]:
    """What load_state_dict takes. Error: another scheduler's; DamageError: not what scheduler_text wrote."""
    try:
        record = json.loads(data)
        kind, state = str(record["class"]), _back(record["state"])
        if not isinstance(state, dict):
            raise ValueError("no dict")
    except UNREADABLE as e:
        raise DamageError(f"{SCHEDULER} is cut off or was edited ({type(e).__name__}: {e})") from e
    if kind != type(scheduler).__name__:
        raise CheckpointError(
            f"{SCHEDULER} is the state of a {kind[:80]}, not of a {type(scheduler).__name__}; pass the scheduler it was saved with"
        )
    return state


def _plain(x: Any, where: str) -> Any:
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, torch.Tensor) and x.numel() == 1:
        return x.item()
    if isinstance(x, list):
        return [_plain(v, where) for v in x]
    if isinstance(x, tuple):
        return {"tuple": [_plain(v, where) for v in x]}
    if isinstance(x, dict):
        return {"Counter" if isinstance(x, Counter) else "dict": [[_plain(k, where), _plain(v, f"{where}.{k}")] for k, v in x.items()]}
    raise CheckpointError(f"{where} is a {type(x).__name__}, which a checkpoint does not hold; save it in a file of `extra` yourself")


def _back(x: Any) -> Any:
    if isinstance(x, list):
        return [_back(v) for v in x]
    if not isinstance(x, dict):
        return x
    ((kind, items),) = x.items()
    if kind == "tuple":
        return tuple(_back(v) for v in items)
    found = {_back(k): _back(v) for k, v in items}
    return Counter(found) if kind == "Counter" else found
