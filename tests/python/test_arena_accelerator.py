"""The arena of a step on a device: the CPU's bits, no wait left out whatever the order of streams, and the framework's own counter of
bytes says what the memory plan says.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo

import interlace

pytestmark = pytest.mark.software
ROUND = 512  # bytes: what the software accelerator's allocator makes of a request


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def train(case: str, device: str, mode: str = "free", steps: int = 5, **settings: Any) -> dict[str, Any]:
    """Some steps, and what the framework's allocator says of one more."""
    rank = int(os.environ.get("RANK", "0"))
    gc.collect()
    memory = torch.accelerator.memory
    before = memory.memory_allocated() if device == "soft" else 0
    model = zoo.build(case, zoo.CASES[case].dtype).to(device)
    optimizer = parity.make_optimizer("adamw", model)
    accumulation = settings.get("accumulation", 1)
    settings = {"clip_norm": 0.3, "profile": "off", **settings}
    compile = getattr(interlace.compile, "__wrapped__", interlace.compile)  # the model is where it shall be
    if device == "soft":
        import soft_device

        soft_device.use(mode)

    def batch(step: int) -> Any:
        return torch.utils._pytree.tree_map(lambda t: t.to(device), parity.batch_of(case, step, rank, accumulation))

    out: dict[str, Any] = {}
    with compile(model, optimizer, zoo.CASES[case].loss, batch(0), interlace.Config(**settings)) as trainer:
        losses = [float(trainer.step(batch(step))) for step in range(steps)]
        if device == "soft":
            last, live = batch(steps), memory.memory_allocated()
            memory.reset_peak_memory_stats()
            losses.append(float(trainer.step(last)))
            out |= {"live": live - before, "peak": memory.max_memory_allocated() - live}
        else:
            losses.append(float(trainer.step(batch(steps))))
        weights = {name: t.clone() for name, t in trainer.state_dict().items()}
        out |= {"losses": losses, "weights": weights, "arena": trainer.stats()["arena"], "stats": trainer.stats()}
    if device == "soft":
        soft_device.use("free")
    return out


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["losses"] == b["losses"] and all(torch.equal(t, b["weights"][name]) for name, t in a["weights"].items())


RECOMPUTE: dict[str, Any] = {"schedule": [(0, ["recompute(mode=full)"])]}
ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 1, {}),
    "llama recompute": ("llama", 1, RECOMPUTE),
    "llama accumulation": ("llama", 1, {"accumulation": 3}),
    "gpt2": ("gpt2", 1, {}),
    "gpt2 recompute": ("gpt2", 1, RECOMPUTE),
    "gpt2 dropout": ("gpt2_dropout", 1, {}),
    "vit": ("vit", 1, {}),
    "vit recompute": ("vit", 1, RECOMPUTE),
    "batchnorm": ("batchnorm", 1, {}),
    "llama shard": ("llama", 2, {}),
    "llama shard recompute": ("llama", 2, RECOMPUTE),
    "llama shard accumulation": ("llama", 2, {"accumulation": 2}),
    "llama zero1": ("llama", 2, {"strategy": "zero1"}),
    "llama replicate": ("llama", 2, {"strategy": "replicate"}),
    "gpt2 shard": ("gpt2", 2, {}),
    "vit zero1": ("vit", 2, {"strategy": "zero1"}),
    "llama stages": ("llama", 2, {"mesh": {"pp": 2, "dp": 1}, "accumulation": 4}),
    "llama tensor": ("llama", 2, {"mesh": {"dp": 1, "tp": 2}}),
}


def checked(case: str, count: int, modes: list[str], **settings: Any) -> None:
    def run(device: str, **more: Any) -> list[dict[str, Any]]:
        return ranks.run(train, count, case, device, **settings, **more) if count > 1 else [train(case, device, **settings, **more)]

    cpu, without = run("cpu"), run("soft", arena=False)
    for mode in modes:
        for rank, got in enumerate(run("soft", mode=mode)):
            assert same(got, cpu[rank]) and same(without[rank], cpu[rank])
            facts = got["arena"]
            assert facts["on"] and facts["settled"] and facts["unforeseen"] == [], facts
            assert facts["top_bytes"] == facts["planned_bytes"]
            print(facts, got["live"], got["peak"], without[rank]["live"], without[rank]["peak"])
            assert got["live"] - without[rank]["live"] == rounded(facts["planned_bytes"])


@pytest.mark.parametrize("what", ROWS)
def test_bits_and_bytes(what: str) -> None:
    case, count, settings = ROWS[what]
    checked(case, count, ["free"], **settings)
