"""Several ranks on a device in software: every strategy and mesh has the CPU's bits in every order of streams, and no wait is left out
(ranks.py asks each rank).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import ranks
from test_accelerator import same, train, use

from interlace.dist.peers import PeerError

pytestmark = pytest.mark.software

SEEDS = range(20 if os.environ.get("INTERLACE_SOAK") == "1" else 2)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {}),
    "zero1": (2, {"strategy": "zero1"}),
    "replicate": (2, {"strategy": "replicate"}),
    "accumulation": (2, {"accumulation": 2}),
    "four": (4, {}),
    "hybrid": (4, {"mesh": {"replica": 2, "dp": 2}}),
    "replicas alone": (2, {"mesh": {"replica": 2, "dp": 1}}),
    "tensor": (2, {"mesh": {"dp": 1, "tp": 2}}),
    "tensor and data": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "stages": (2, {"mesh": {"pp": 2, "dp": 1}, "accumulation": 4}),
    "stages and data": (4, {"mesh": {"pp": 2, "dp": 2}, "accumulation": 2}),
}
SAMPLE = {"shard", "hybrid", "replicas alone", "tensor", "stages"}


def of_unlike_devices() -> str:
    device = "cpu" if os.environ["RANK"] == "1" else "soft"
    with pytest.raises(PeerError) as told:
        train(device)
    return str(told.value)


def test_ranks_on_unlike_devices_are_refused() -> None:
    said = "rank 1 differs from rank 0: device 'kind' is cpu there and soft on rank 0; every rank must compile the same"
    assert all(said in text for text in ranks.run(of_unlike_devices, 2))


def in_order(mode: str, **settings: Any) -> Any:
    use(mode)
    try:
        return train("soft", **settings)
    finally:
        use("free")


@pytest.mark.parametrize("what", [what if what in SAMPLE else pytest.param(what, marks=pytest.mark.soak) for what in CASES])
def test_ranks_have_the_bits_of_the_cpu(what: str) -> None:
    count, settings = CASES[what]
    cpu = ranks.run(train, count, "cpu", clip_norm=1.0, **settings)
    for mode in ("free", *(f"starve:{seed}" for seed in SEEDS)):
        soft = ranks.run(in_order, count, mode, clip_norm=1.0, **settings)
        assert all(same(*pair) for pair in zip(soft, cpu, strict=True)), mode
