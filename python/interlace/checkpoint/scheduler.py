"""The state of a learning-rate scheduler as a file of a checkpoint: scheduler.json, plain numbers and words, no pickle.

What state_dict() gives is a dict of numbers, words, lists, tuples, dicts and Counters (MultiStepLR's milestones); JSON has neither tuples
nor keys that are numbers, so those are written as {"tuple": [...]} and {"Counter": [[key, value], ...]}.
"""

from __future__ import annotations

import json
from typing import Any

from interlace.checkpoint.optimizer import back, plain
from interlace.checkpoint.tensor_file import CheckpointError, DamageError
from interlace.errors import UNREADABLE

SCHEDULER = "scheduler.json"


def scheduler_text(scheduler: Any) -> str:
    """Error: it has no state_dict(), or keeps what is neither a number nor a word."""
    if not callable(getattr(scheduler, "state_dict", None)) or not callable(getattr(scheduler, "load_state_dict", None)):
        raise CheckpointError(f"scheduler= takes an object with state_dict() and load_state_dict(), not {type(scheduler).__name__}")
    name, advice = type(scheduler).__name__, "; save it in a file of `extra` yourself"
    state = plain(scheduler.state_dict(), name, lambda t: t.item() if t.numel() == 1 else None, advice)
    return json.dumps({"class": name, "state": state}, indent=1) + "\n"


def scheduler_state(data: bytes, scheduler: Any) -> dict[str, Any]:
    """What load_state_dict takes. Error: another scheduler's; DamageError: not what scheduler_text wrote."""
    try:
        record = json.loads(data)
        kind, state = str(record["class"]), back(record["state"], {})
        if not isinstance(state, dict):
            raise ValueError("no dict")
    except UNREADABLE as e:
        raise DamageError(f"{SCHEDULER} is cut off or was edited ({type(e).__name__}: {e})") from e
    if kind != type(scheduler).__name__:
        raise CheckpointError(
            f"{SCHEDULER} is the state of a {kind[:80]}, not of a {type(scheduler).__name__}; pass the scheduler it was saved with"
        )
    return state
