"""Faults of the past on accelerators: copies that nothing was ordered after, looks at storages that had gone, ranks on devices other than
CUDA's. All seeds of `starve` give the bits of `run=1`, which carries out every op as it is issued.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from runtime_support import llama

import interlace

KERNELS = {"kernels": "torch"}  # those that the software accelerator has, too
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
OUT = ["offload_sync(cluster={cluster})"]
SOAK = os.environ.get("INTERLACE_SOAK") == "1"


def orders(count: int) -> list[str]:
    """Orders of streams, drawn from so many seeds."""
    return [f"lockstep:{seed}" if seed % 4 == 3 else f"starve:{seed}" for seed in range(count)]


software = pytest.mark.software


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 128, (count, 4, 16), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": part, "labels": part} for part in ids]


def compiled(device: str, **settings: Any) -> interlace.Trainer:
    model = llama(**SIZES).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compile = getattr(interlace.compile, "__wrapped__", interlace.compile)  # the model is where it shall be
    return compile(model, optimizer, loss_of, batches(1)[0], interlace.Config(**{"profile": "off", **KERNELS, **settings}))


def train(device: str, steps: int = 3, looks: bool = False, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights. `looks`: also at the weights after every step, which change none."""
    trainer = compiled(device, **settings)
    losses, seen = [], {}
    for n, batch in enumerate(batches(steps)):
        losses.append(trainer.step(batch))
        if looks:
            seen.update({f"{n} {name}": t.clone() for name, t in trainer.state_dict().items()})
    losses = [loss.item() for loss in losses]
    weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    trainer.close()
    return losses, {**seen, **weights}


def same(a: tuple[list[float], dict[str, torch.Tensor]], b: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def use(mode: str) -> None:
    import soft_device

    soft_device.use(mode)


@pytest.fixture
def modes() -> Any:
    yield use
    use("free")


SETTINGS = {
    "plain": {"clip_norm": 1.0},
    "accumulation": {"accumulation": 2, "clip_norm": 1.0},
    "offload": {"schedule": [(0, OUT)], "tier": "host"},
    "overlap_update": {"schedule": [(0, ["overlap_update"])]},
    "overlap_update, offload": {"schedule": [(0, ["overlap_update", "offload_sync(cluster={cluster},kinds=states)"])], "tier": "host"},
    "host_update": {"schedule": [(0, ["overlap_update", *OUT, "host_update"])], "tier": "host"},
    "swap": {"schedule": [(0, ["overlap_update"]), (1, ["overlap_update", *OUT]), (2, ["overlap_update"])], "tier": "host"},
}


@software
@pytest.mark.parametrize("looks", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "looks"])
@pytest.mark.parametrize("what", SETTINGS)
def test_every_order_of_streams_gives_the_bits_of_the_cpu(modes: Any, what: str, looks: bool) -> None:
    settings = SETTINGS[what]
    cpu = train("cpu", looks=looks, **settings)
    modes("lockstep:0:1")
    assert same(train("soft", looks=looks, **settings), cpu)
    modes("lockstep:0:0")
    assert same(train("soft", looks=looks, **settings), cpu)
    few, many = (20, 100) if what == "offload" else (3, 20)
    for mode in orders(many if SOAK else few):
        modes(mode)
        assert same(train("soft", looks=looks, **settings), cpu), mode


@software
def test_a_step_waits_once(modes: Any) -> None:
    """For its norm, or where there is none for its loss. It waited for the squares, for their numbers on their way to the device and on
    their way back, and then for the loss."""
    import soft_device

    modes("lockstep:0:0")  # nothing is done before the host waits
    waits = []
    for clip in (None, 1.0):
        trainer = compiled("soft", clip_norm=clip)
        for batch in batches(4):
            batch = {name: x.to("soft") for name, x in batch.items()}
            before = soft_device._C.waits()
            trainer.step(batch)
        waits.append(soft_device._C.waits() - before)
        trainer.close()
    assert waits == [1, 1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("soft", marks=software)])
def test_a_look_at_a_step_whose_storages_go_out(device: str) -> None:
    trainer = compiled(device, schedule=[(0, OUT)], tier="host")
    trainer.step(batches(1)[0])
    assert len(trainer.inspect(batches(1)[0])["ops"]) > 10
    assert trainer.explain_nonfinite(batches(1)[0]) is None
    trainer.close()


@software
def test_the_loop_measures_searches_and_swaps_and_changes_no_bit() -> None:
    search = "search(cluster={cluster},limit={limit},recompute=none,profile={profile})"
    data, seen = batches(7), []
    measured = {"profile": "auto", "cache": "off", "schedule": [(0, []), (4, [search])]}
    for device, settings in (("cpu", {"profile": "off"}), ("soft", measured)):
        trainer = compiled(device, **settings)
        losses = [trainer.step(batch).item() for batch in data]
        if device == "soft":
            assert [plan["step"] for plan in trainer.plans] == [4]
        seen.append((losses, {name: t.clone() for name, t in trainer.state_dict().items()}))
        trainer.close()
    assert same(*seen)


def two(device: str) -> Any:
    return train(device, clip_norm=1.0)


@software
@pytest.mark.soak
def test_two_ranks_on_a_device_whose_backend_is_its_own() -> None:
    for there, cpu in zip(ranks.run(two, 2, "soft"), ranks.run(two, 2, "cpu"), strict=True):
        assert same(there, cpu)


@software
@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_a_resumed_run_draws_what_the_device_would_have_drawn(mode: str, tmp_path: Path) -> None:
    def part(first: int, last: int) -> list[float]:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)).to("soft")
        rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to("soft")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = interlace.Config(rng="compat", mode=mode, profile="off")
        with interlace.compile(model, optimizer, lambda m, x: m(x).square().mean(), rows, config) as trainer:
            if first:
                trainer.load(tmp_path / "saved")
            losses = [trainer.step(rows).item() for _ in range(first, last)]
            trainer.save(tmp_path / "saved")
        return losses

    whole = part(0, 6)
    assert [*part(0, 3), *part(3, 6)] == whole and len(set(whole)) == 6


@software
def test_memory_that_is_given_back_takes_nothing_from_its_neighbours() -> None:
    """Blocks are smaller than pages, and a page that went back took with it what others had there: at a swap, which drops the graphs' pool,
    losses of earlier steps were zeros, or the next step's gradients were wrong."""
    import soft_device

    blocks = [torch.full((4,), float(n), device="soft") for n in range(64)]
    there = [float(n) for n in range(64) if n % 2]
    del blocks[::2]
    soft_device._C.release_idle()
    assert [block.sum().item() / 4 for block in blocks] == there


@software
@pytest.mark.parametrize("island", [False, True])
def test_regions_of_autocast_for_the_device_are_captured(island: bool, tmp_path: Path) -> None:
    """They changed nothing: a trace's tensors lie on the CPU, and the model was trained in float32. A capture of the model that was kept
    from when it lay on the CPU must not be taken."""
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))

    def train(device: str, of: str) -> tuple[list[float], str]:
        def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(of, dtype=torch.bfloat16):
                y = model[0](x)
                with torch.autocast(of, enabled=False) if island else contextlib.nullcontext():
                    return model[1](y.float()).float().square().mean()

        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)).to(device)
        config = interlace.Config(profile="off", schedule=[], cache=str(tmp_path))
        compile = getattr(interlace.compile, "__wrapped__", interlace.compile)  # the model is where it shall be
        with compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, rows, config) as trainer:
            return [trainer.step(rows).item() for _ in range(3)], trainer.program

    plain, casts = train("cpu", "soft"), train("cpu", "cpu")
    assert "bf16" in casts[1] and "bf16" not in plain[1], "regions for another device than the model's"
    assert train("soft", "soft") == casts
