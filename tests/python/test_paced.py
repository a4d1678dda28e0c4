"""The software accelerator's paced mode (tests/accelerator/pace.h): ops take the times they are given and compute nothing, and on virtual
time the real executor's step is the simulated one, op by op. No clock of the machine is read.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import paced
import paced_worker

from interlace import _core

pytestmark = pytest.mark.software
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 256}  # fmt: skip
COMPUTE, WITHIN, TO_DEVICE, TO_HOST = 1, 2, 4, 5  # soft::Cost::Kind
ALONE = [[1.0] * 4 for _ in range(16)]


def cost(kind: int, work: float, latency: float = 0.0) -> tuple[int, bool, bool, float, float]:
    return (kind, True, True, latency, work)


class Paced:
    """A device of virtual time whose ops are named by hand: `with at(op): ...` issues as an executor's op would."""

    def __init__(self, file: str, rank: int = 0, size: int = 1) -> None:
        import soft_device

        self.op = -1
        self.device = soft_device._C
        self._current = ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: self.op)
        soft_device.pace(file, rank, size, virtual=True)

    def program(self, costs: list[Any], factors: list[list[float]] = ALONE, shares: tuple[float, float] = (0.0, 0.0)) -> None:
        address = ctypes.cast(self._current, ctypes.c_void_p).value
        self.device.pace_program(costs, factors, shares, 8, 1.0, address)

    def issue(self, op: int, function: Any, *args: Any) -> Any:
        self.op = op
        try:
            return function(*args)
        finally:
            self.op = -1

    def taken(self) -> list[tuple[int, float, float]]:
        torch.accelerator.synchronize()
        return [(op, begin, end) for op, _, begin, end in self.device.take_paced()]


@pytest.fixture
def pace(tmp_path: Path) -> Iterator[Paced]:
    import soft_device

    yield Paced(str(tmp_path / "model"))
    soft_device.use("free")


def test_nothing_is_computed_and_the_host_reads_ones(pace: Paced) -> None:
    torch.accelerator.synchronize()  # of a test before
    executed = pace.device.executed()
    x = torch.zeros(1000, device="soft")
    assert (x + 1).sum().item() == 1.0 and x.cpu().tolist() == [1.0] * 1000
    assert (x > 0).all().item() is True and pace.device.executed() == executed
    with pytest.raises(RuntimeError, match="soft device, paced: aten::nonzero depends on data, and nothing is computed"):
        x.nonzero()


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch has no device graphs")
def test_a_paced_device_does_not_wait_for_streams_that_graphs_left(tmp_path: Path) -> None:
    """Graphs have streams beyond torch's pool. Whoever waited for all of them read what lay behind the model's own streams."""
    import soft_device

    x, side = torch.ones(8, device="soft"), torch.Stream("soft")
    graph = torch.accelerator.Graph()
    with torch.Stream("soft"), graph:
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with soft_device.stream(side):
            x.mul_(3)
        main.wait_stream(side)
    graph.replay()
    assert x[0].item() == 3
    here = Paced(str(tmp_path / "model"))
    try:
        here.program([cost(COMPUTE, 100), cost(COMPUTE, 40)])
        with soft_device.stream(side):
            here.issue(1, x.add_, 1)  # the first that ends is on a stream that is not the default one
        here.issue(0, x.add_, 1)
        assert here.taken() == [(1, 0, 40), (0, 0, 100)]
    finally:
        soft_device.use("free")


def test_times_add_up_on_a_stream_and_over_a_wait(pace: Paced) -> None:
    """
        main  |= 0: 100 =|= 1: 50 =|......|= 3: 10 =|
        side  |......... 0 |==== 2: 80 ===|             behind op 0; op 3 waits for it
    """
    pace.program([cost(COMPUTE, 100), cost(COMPUTE, 50), cost(TO_DEVICE, 75, latency=5), cost(COMPUTE, 10)])
    x, side = torch.zeros(8, device="soft"), torch.Stream("soft")
    main = torch.accelerator.current_stream()
    pace.issue(0, x.add_, 1)
    side.wait_stream(main)
    pace.issue(1, x.mul_, 2)
    torch.accelerator.set_stream(side)
    pace.issue(2, x.add_, 1)
    torch.accelerator.set_stream(main)
    main.wait_stream(side)
    pace.issue(3, x.add_, 1)
    assert pace.taken() == [(0, 0, 100), (1, 100, 150), (2, 100, 180), (3, 180, 190)]
    begin, end = torch.Event("soft", enable_timing=True), torch.Event("soft", enable_timing=True)
    begin.record()
    pace.issue(0, x.add_, 1)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(100e-6)


def test_one_op_takes_its_time_once(pace: Paced) -> None:
    pace.program([cost(COMPUTE, 100), cost(COMPUTE, 30)])
    x = torch.zeros(8, device="soft")
    pace.issue(0, lambda: x.add_(1).mul_(2).add_(3))
    pace.issue(1, x.add_, 1)
    x.add_(1)  # of no op
    assert pace.taken() == [(0, 0, 100), (1, 100, 130)]


def test_what_runs_together_slows_down_by_the_table_and_by_shares(pace: Paced) -> None:
    """Compute of 90 runs beside a copy of 40 at half the rate, which itself takes 1.5 times as long: 60 together, 30 of 90 done, 60 alone."""
    factors = [row[:] for row in ALONE]
    factors[0b101] = [2.0, 1.0, 1.5, 1.0]
    x, side = torch.zeros(8, device="soft"), torch.Stream("soft")
    main = torch.accelerator.current_stream()

    def both() -> list[tuple[int, float, float]]:
        begin = pace.device.paced_now_ns()
        pace.issue(0, x.add_, 1)
        torch.accelerator.set_stream(side)
        pace.issue(1, x.add_, 1)
        torch.accelerator.set_stream(main)
        return sorted((op, a - begin, b - begin) for op, a, b in pace.taken())

    pace.program([cost(COMPUTE, 90), cost(TO_DEVICE, 40)], factors)
    assert both() == [(0, 0, pytest.approx(120)), (1, 0, pytest.approx(60))]
    pace.program([cost(COMPUTE, 90), cost(TO_DEVICE, 40)], ALONE, shares=(3.0, 0.0))
    assert both() == [(0, 0, pytest.approx(90)), (1, 0, pytest.approx(120))]


# torch 2.13 has a new name for it, and warns of the old one.
gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)


def meet(file: str, late: int, other: bool = False) -> list[tuple[int, float, float]]:
    """Rank `late` computes 100 before a gather, the other 10; both then reduce, beside compute that waits for nothing."""
    import soft_device
    import torch.distributed as dist

    rank = dist.get_rank()
    here = Paced(file, rank, 2)
    try:
        group, beside = dist.new_group(backend="soft"), dist.new_group(backend="soft")
        here.program([cost(COMPUTE, 100 if rank == late else 10), cost(WITHIN, 40, latency=5), cost(WITHIN, 40), cost(COMPUTE, 30)])
        x, whole = torch.zeros(8, device="soft"), torch.zeros(16, device="soft")
        here.issue(0, x.add_, 1)
        work = here.issue(1, lambda: gather(whole, x, group=group, async_op=True))
        total = here.issue(2, lambda: dist.all_reduce(x if not (other and rank == 1) else whole, group=beside, async_op=True))
        here.issue(3, x.add_, 1)
        work.wait()
        total.wait()
        return here.taken()
    finally:
        soft_device.use("free")


def test_a_collective_begins_when_the_last_has_come_and_ends_for_all_at_once(tmp_path: Path) -> None:
    """
        rank 0  compute |== 0: 100 ==|= 3 =|
        rank 1  compute |0|= 3 =|
        both    gather               |-5-|===== 1: 40 =====|    behind its latency of 5 it shares the link with the sum:
                reduce               |====== 2: 40 ======|      5 of that alone, 35 at half the rate, and the gather's last 5 alone
    """
    late, early = ranks.run(meet, 2, str(tmp_path / "model"), 0)
    transfers = [(2, 100, pytest.approx(175)), (1, 100, pytest.approx(180))]
    assert late == [(0, 0, 100), (3, 100, 130), *transfers]
    assert early == [(0, 0, 10), (3, 10, 40), *transfers]


def test_ranks_that_meet_in_different_operations_are_told(tmp_path: Path) -> None:
    found = ranks.outcomes(meet, 2, str(tmp_path / "model"), 0, True)
    said = [str(outcome.error) for outcome in found if outcome is not None]
    assert all("meets the others of its group in another operation" in text for text in said) and len(said) == 2


def steps(job: dict[str, Any]) -> dict[str, Any]:
    return paced_worker.steps_of(job, int(os.environ.get("RANK", "0")) if job["ranks"] > 1 else 0)


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({"dp": 1}, {"accumulation": 2}),
    "offload": ({"dp": 1}, {"then": "offload(cluster={cluster},limit=75%)"}),
    "shard": ({"dp": 2}, {}),
    "search": ({"dp": 2}, {"accumulation": 2, "then": "search(cluster={cluster})"}),
    "replicate": ({"dp": 2}, {"strategy": "replicate"}),
    "hybrid": ({"replica": 2, "dp": 2}, {}),
}


@pytest.fixture(scope="module")
def source() -> str:
    return paced.captured(TINY, 32)


@pytest.mark.parametrize("case", CASES)
def test_the_executors_step_is_the_simulated_one(source: str, case: str, tmp_path: Path) -> None:
    mesh, more = CASES[case]
    cluster = paced.cluster_of("slow")
    program = paced.program_of(source, mesh, more, cluster)
    size = torch.Size(mesh.values()).numel()
    job = {"program": program.print(), "cluster": cluster, "ranks": size, "times": 1.0, "virtual": True, "file": str(tmp_path / "model"),
           "warm": 3, "steps": 2}  # fmt: skip
    simulated = _core.testing.pacing(program, cluster)
    found = ranks.run(steps, size, job)
    for rank in found:
        assert rank["seconds"] == [pytest.approx(simulated["step_ns"] / 1e9, rel=1e-4)] * 2
    lanes: dict[str, list[int]] = {}
    for op, lane, _, _ in sorted(simulated["step"], key=lambda row: row[2]):
        lanes.setdefault(lane, []).append(op)
    ran = [op for op, _, _, _ in sorted(found[0]["paced"], key=lambda row: row[2])]
    assert len(ran) == len(simulated["step"]) > 100
    for lane, ops in lanes.items():
        assert [op for op in ran if op in set(ops)] == ops, lane
