"""Several ranks on a device in software: every strategy and mesh has the CPU's bits in every order of streams, and no wait is left out
(ranks.py asks each rank).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import ranks
from test_accelerator import OUT, SOAK, batches, compiled, orders, same, train, use

from interlace.dist.peers import PeerError

pytestmark = pytest.mark.software

HUNDRED = {"shard", "accumulation", "offload", "hybrid"}  # seeds in soak; of the others 20
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {}),
    "zero1": (2, {"strategy": "zero1"}),
    "replicate": (2, {"strategy": "replicate"}),
    "accumulation": (2, {"accumulation": 2}),
    "offload": (2, {"schedule": [(0, OUT)], "tier": "host"}),
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
    for mode in ("free", *orders((100 if what in HUNDRED else 20) if SOAK else 2)):
        soft = ranks.run(in_order, count, mode, clip_norm=1.0, **settings)
        assert all(same(*pair) for pair in zip(soft, cpu, strict=True)), mode


SEARCHES: dict[str, dict[str, Any]] = {
    "shard": {},
    # Said, since the search may change it at the swap, and with it the order in which gradients are added up.
    "zero1, accumulation": {"strategy": "zero1", "accumulation": 4, "accumulate_mode": "reduce_each"},
    "limit": {"memory_limit": 1_250_000, "tier": "host"},  # a device may always send states there, a CPU where it is said
    "host memory": {"memory_limit": 1_100_000, "tier": "host"},
}


FILES = re.compile(r"(?<=[=,])/[^,)\s]*/interlace-[^,)\s]*")  # of profiles and clusters, which a program's texts name


def decided(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Runs of a measured loop on the device, and of both devices with the times that it took: programs after each step, losses, weights."""
    rank = int(os.environ["RANK"])
    file = Path(folder) / "times.profile"

    def run(device: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"programs": [], "losses": []}
        with compiled(device, clip_norm=1.0, cluster="l4-24gb-2", **settings, **more) as trainer:
            for batch in batches(14):
                found["losses"].append(trainer.step(batch))
                found["programs"].append(trainer.program)
            found["programs"] = [FILES.sub("", text) for text in found["programs"]]
            found["losses"] = [loss.item() for loss in found["losses"]]
            found["weights"] = {name: t.clone() for name, t in trainer.state_dict().items()}
            found["chosen"] = [plan.get("chosen") for plan in trainer.plans][:1]
            if more["profile"] == "auto" and rank == 0:
                file.write_text(trainer._loop.planner.profile)
            trainer._run.peers.exchange("written", True)
        return found

    measured = run("soft", profile="auto", cache="off")
    return {"measured": measured, "soft": run("soft", profile=str(file)), "cpu": run("cpu", profile=str(file))}


@pytest.mark.parametrize("what", [what if "zero1" in what else pytest.param(what, marks=pytest.mark.soak) for what in SEARCHES])
def test_the_same_times_lead_to_the_same_decisions_as_on_a_cpu(what: str, tmp_path: Path) -> None:
    for runs in ranks.run(decided, 2, SEARCHES[what], str(tmp_path)):
        measured, soft, cpu = runs["measured"], runs["soft"], runs["cpu"]
        assert soft["chosen"] == cpu["chosen"] and soft["programs"][0] == cpu["programs"][0]
        assert len(set(measured["programs"])) > 1, "it swapped"
        for run in (measured, soft):
            assert same((run["losses"], run["weights"]), (cpu["losses"], cpu["weights"]))
