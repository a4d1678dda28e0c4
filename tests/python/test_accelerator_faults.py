"""Faults planted in small programs: the order checker reports each in every order of streams, and within 20 seeds it is seen as wrong
bits. Without the fault there is neither.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.software
SEEDS = 20
N = 4096  # elements: whole pages
Result = list[torch.Tensor]
FAULTS: dict[str, Callable[[bool], Result]] = {}


def fault(make: Callable[[bool], Result]) -> Callable[[bool], Result]:
    FAULTS[make.__name__] = make
    return make


def on(stream: Any) -> Any:
    import soft_device

    return soft_device.stream(stream)


def current() -> Any:
    return torch.accelerator.current_stream()


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((N,), float(value), device="soft")


def pinned(value: float = 0.0) -> torch.Tensor:
    t = torch.empty(N, pin_memory=True)
    return t.fill_(value)


def streams() -> tuple[Any, Any]:
    """The current one, and one beside it that knows what it was given."""
    side = torch.Stream("soft")
    side.wait_stream(current())
    return current(), side


# torch 2.13 has new names for these, and warns of the old ones.
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def ended(*tensors: torch.Tensor) -> Result:
    torch.accelerator.synchronize()
    return [t.cpu().clone() for t in tensors]


@fault
def a_read_that_waits_for_nothing(wrong: bool) -> Result:
    main, side = streams()
    x = ones()
    if not wrong:
        side.wait_stream(main)
    with on(side):
        y = x + 1
    return ended(x, y)


@fault
def a_write_under_a_read(wrong: bool) -> Result:
    x, y = ones(), ones(0)
    main, side = streams()
    with on(side):
        y.copy_(x)
    if not wrong:
        main.wait_stream(side)
    x.fill_(7)
    return ended(x, y)


@fault
def two_writers(wrong: bool) -> Result:
    x = ones()
    main, side = streams()
    with on(side):
        x.fill_(2)
    if not wrong:
        main.wait_stream(side)
    x.fill_(3)
    return ended(x)


@fault
def an_event_recorded_too_early(wrong: bool) -> Result:
    x = ones()
    main, side = streams()
    event = torch.Event("soft")
    if wrong:
        event.record(main)
    x.mul_(3)
    if not wrong:
        event.record(main)
    side.wait_event(event)
    with on(side):
        y = x + 1
    return ended(y)


@fault
def an_event_of_another_stream(wrong: bool) -> Result:
    x = ones()
    main, side = streams()
    other = torch.Stream("soft")
    x.mul_(3)
    event = torch.Event("soft")
    event.record(other if wrong else main)
    side.wait_event(event)
    with on(side):
        y = x + 1
    return ended(y)


@fault
def a_wait_before_the_record(wrong: bool) -> Result:
    x = ones()
    main, side = streams()
    event = torch.Event("soft")
    x.mul_(3)
    if wrong:
        side.wait_event(event)
    event.record(main)
    if not wrong:
        side.wait_event(event)
    with on(side):
        y = x + 1
    return ended(y)


@fault
def a_buffer_freed_under_a_read(wrong: bool) -> Result:
    x, y = ones(5), ones(0)
    _, side = streams()
    with on(side):
        y.copy_(x)
    if not wrong:
        x.record_stream(side)
    del x
    z = ones(9)
    return ended(y, z)


@fault
def a_place_reused_across_lanes(wrong: bool) -> Result:
    arena = ones(0)
    first, second = arena[: N // 2], arena[N // 4 : 3 * N // 4]  # of two values, one after the other
    out = ones(0)[: N // 2]
    main, side = streams()
    first.fill_(4)
    side.wait_stream(main)
    with on(side):
        out.copy_(first)
    if not wrong:
        main.wait_stream(side)
    second.fill_(6)
    return ended(out)


@fault
def a_host_read_without_a_wait(wrong: bool) -> Result:
    x, there = ones(5), pinned()
    there.copy_(x, non_blocking=True)
    if not wrong:
        torch.accelerator.synchronize()
    seen = there.clone()
    torch.accelerator.synchronize()
    return [seen]


@fault
def a_host_write_under_a_copy(wrong: bool) -> Result:
    x, there = ones(0), pinned(5)
    x.copy_(there, non_blocking=True)
    if not wrong:
        torch.accelerator.synchronize()
    there.fill_(8)
    return ended(x)


@fault
def a_copy_in_before_the_copy_out(wrong: bool) -> Result:
    x, y, there = ones(5), ones(0), pinned()
    main, side = streams()
    there.copy_(x, non_blocking=True)
    if not wrong:
        side.wait_stream(main)
    with on(side):
        y.copy_(there, non_blocking=True)
    return ended(y)


@fault
def a_copy_out_under_a_copy_in(wrong: bool) -> Result:
    x, y, there = ones(5), ones(0), pinned(2)
    main, side = streams()
    with on(side):
        y.copy_(there, non_blocking=True)
    if not wrong:
        main.wait_stream(side)
    there.copy_(x, non_blocking=True)
    return ended(y)


@fault
def the_next_batch_in_the_place_of_this_one(wrong: bool) -> Result:
    batch, total, there = ones(1), ones(0), pinned(2)
    main, side = streams()
    for _ in range(3):
        total.add_(batch)
        if not wrong:
            side.wait_stream(main)
        with on(side):
            batch.copy_(there, non_blocking=True)
        main.wait_stream(side)
    return ended(total)


@fault
def a_gather_that_nobody_waited_for(wrong: bool) -> Result:
    shard, full = ones(3), ones(0)
    work = gather(full, shard, async_op=True)
    if not wrong:
        work.wait()
    y = full + 1
    result = ended(y)
    work.wait()
    return result


@fault
def gradients_changed_under_their_reduction(wrong: bool) -> Result:
    flat, shard = ones(3), ones(0)
    work = scatter(shard, flat, async_op=True)
    if not wrong:
        work.wait()
    flat.zero_()
    work.wait()
    return ended(shard)


@fault
def a_gather_of_what_is_not_made_yet(wrong: bool) -> Result:
    shard, full = ones(3), ones(0)
    main, side = streams()
    shard.mul_(2)
    if not wrong:
        side.wait_stream(main)
    with on(side):  # the collective is ordered after this one alone
        work = gather(full, shard, async_op=True)
    work.wait()
    return ended(full)


@fault
def a_gather_into_what_is_still_read(wrong: bool) -> Result:
    shard, full, out = ones(9), ones(2), ones(0)
    main, side = streams()
    out.copy_(full)
    if not wrong:
        side.wait_stream(main)
    with on(side):
        work = gather(full, shard, async_op=True)
    work.wait()
    return ended(out, full)


@fault
def a_step_before_its_gradient(wrong: bool) -> Result:
    w = torch.nn.Parameter(ones())
    w.grad = ones(0)
    optimizer = torch.optim.SGD([w], lr=0.5, foreach=False)
    main, side = streams()
    w.grad.copy_(ones(3))
    if not wrong:
        side.wait_stream(main)
    with on(side):
        optimizer.step()
    return ended(w.detach())


@fault
def a_mask_used_before_it_is_drawn(wrong: bool) -> Result:
    torch.manual_seed(1)
    mask, x = ones(1), ones(2)
    main, side = streams()
    with on(side):
        mask.bernoulli_(0.5)
    if not wrong:
        main.wait_stream(side)
    return ended(x * mask)


@fault
def a_scalar_read_by_another_stream(wrong: bool) -> Result:
    x, total = ones(2), torch.zeros((), device="soft")
    main, side = streams()
    total.add_(x.sum())
    if not wrong:
        side.wait_stream(main)
    with on(side):
        scaled = x / total
    return ended(scaled)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this rank alone: its operations have a stream of their own all the same."""
    dist.init_process_group("soft", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_are_twenty() -> None:
    assert len(FAULTS) == 20


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported_in_every_run_and_seen_within_20_seeds(group: None, name: str) -> None:
    import soft_device

    extension = soft_device._C

    def run(mode: str, wrong: bool) -> tuple[Result, int]:
        soft_device.use(mode)
        before = extension.count()
        result = FAULTS[name](wrong)
        torch.accelerator.synchronize()
        return result, extension.count() - before

    def same(a: Result, b: Result) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    right, reports = run("lockstep:0:1", False)
    assert reports == 0
    seen = 0
    for seed in range(SEEDS):
        mode = f"{'starve' if seed % 2 else 'lockstep'}:{seed}:0.2"
        result, reports = run(mode, False)
        assert reports == 0 and same(result, right), f"{mode}: {soft_device.take_reports()}"
        result, reports = run(mode, True)
        assert reports > 0, mode
        seen += not same(result, right)
    soft_device.use("free")
    soft_device.take_reports()
    assert seen > 0, "never wrong bits"


def other_order(rank: int) -> list[str]:
    import soft_device

    if not dist.is_initialized():
        return []
    group = dist.new_group(backend="soft", timeout=datetime.timedelta(seconds=2))
    x, full = torch.ones(8, device="soft"), torch.ones(16, device="soft")
    calls = [lambda: dist.all_reduce(x, group=group), lambda: gather(full, x, group=group)]
    for call in calls if dist.get_rank() == 0 else calls[::-1]:
        call()
    with pytest.raises(RuntimeError, match="the other ranks did not come within 2 s"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # the second one, and what comes later, waits no timeout of its own
    with pytest.raises(RuntimeError, match="the other ranks did not come within 2 s"):
        dist.all_reduce(x, group=group)
    return soft_device.take_reports()


@pytest.mark.soak
def test_collectives_in_another_order_are_told_and_hang_until_the_timeout() -> None:
    import ranks

    for reports in ranks.run(other_order, 2, 0):
        assert any("is another operation on rank" in text for text in reports)


def test_plain_pytorch_trains_with_the_bits_of_the_cpu() -> None:
    import soft_device

    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
        model = model.to(device)
        x, y = torch.randn(16, 32).to(device), torch.randint(0, 10, (16,)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    cpu = train("cpu")
    for mode in ("free", "lockstep:1:0", *(f"starve:{seed}" for seed in range(5))):
        soft_device.use(mode)
        assert train("soft") == cpu, mode
    soft_device.use("free")


def fsdp2(device: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(device)
    backend = dist.get_default_backend_for_device(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), backend_override={0: backend})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(5):
        loss = model(torch.randn(8, 16, generator=generator).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp2_in(modes: list[str]) -> tuple[list[float], list[list[float]], list[str]]:
    import soft_device

    cpu, there = fsdp2("cpu"), []
    for mode in modes:
        soft_device.use(mode)
        there.append(fsdp2("soft"))
    soft_device.use("free")
    return cpu, there, soft_device.take_reports()


@pytest.mark.soak
def test_fsdp2_trains_without_a_report() -> None:
    import ranks

    modes = ["free", "lockstep:3:0.3", "starve:1", "starve:2"]
    for cpu, there, reports in ranks.run(fsdp2_in, 2, modes):
        assert there == [cpu] * len(modes) and reports == []


