"""Memory snapshots as files; here, because predicted ones are written where there is no torch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

PICKLED = (".pickle", ".pkl")  # names of memory snapshots that are not JSON


def snapshot_bytes(file: str | Path, text: str) -> bytes:
    """A memory snapshot as JSON, or as torch.cuda.memory._dump_snapshot writes it and pytorch.org/memory_viz opens it."""
    if Path(file).suffix in PICKLED:
        return pickle.dumps(json.loads(text))
    return text.encode()
