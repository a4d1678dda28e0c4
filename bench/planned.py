"""Plan files as trainers in this process, as `interlace train --plan` makes them: what benchmarks of plans share.

MODELS are written as config.json folders, which `interlace plan`, `interlace profile` and `models.build` take.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False, **TOKENS}
GPT2 = {
    "model_type": "gpt2", "n_positions": 1024, "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "tie_word_embeddings": False, **TOKENS,
}  # fmt: skip


def write_models(models: dict[str, dict[str, Any]], folder: Path) -> None:
    """A folder with a config.json for each."""
    for name, config in models.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def trainer_of(file: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The trainer of a plan file, and this rank's part of a batch of its rows; every rank must call it. `settings`: more of Config."""
    import torch

    import interlace
    from interlace import models
    from interlace.plan.execute import execution_of, read_plan

    how = execution_of(read_plan(file))
    built = models.build(how.model, micro_batch=how.batch, seq=how.seq, dtype="float32")
    config = interlace.Config(**{
        "strategy": how.strategy, "mesh": how.mesh, "stages": how.borders(built.model), "stage_order": how.stage_order,
        "accumulation": how.accumulation, "accumulate_mode": how.accumulate_mode, "clip_norm": 1.0, "timeout_s": 120,
        "schedule": [(0, how.passes(built.model))], "profile": "off", **settings,
    })  # fmt: skip
    batch = config.deal(built.example_batch, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-5)
    return interlace.compile(built.model, optimizer, built.loss_fn, batch, config), batch
