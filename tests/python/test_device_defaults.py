"""What a run on an accelerator does without being asked: it keeps to the memory there is, and regions are kernels where they can be."""

from __future__ import annotations

import copy
import types
from typing import Any

import parity
import pytest
import torch
import zoo
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from interlace.capture import check_ops
from interlace.capture.functional import promised
from interlace.compiling import regions
from interlace.config.schedule import default_schedule
from interlace.cost import device_copies
from interlace.cost.machine import allocator_bytes, beside_bytes
from interlace.train import compile as compiling

aten = torch.ops.aten


def trained(config: interlace.Config) -> tuple[list[float], str, int]:
    """Losses, the program, and bytes that it needs beside the model's own parameters."""
    torch.manual_seed(0)
    model = zoo.build("llama", torch.float32).to("soft")
    batch = {name: x.to("soft") for name, x in zoo.tokens(2, 0).items()}
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batch, config) as trainer:
        need = trainer._run.programs.needed_bytes(trainer._run.ir)
        return [float(trainer.step(batch)) for _ in range(3)], trainer.program, need


def given() -> int:
    return sum(p.nbytes for p in zoo.build("llama", torch.float32).parameters())


@pytest.mark.software
def test_a_step_that_does_not_fit_is_planned_for_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the losses of a run that has enough; a schedule of the user's own stays as it is."""
    plenty, text, need = trained(interlace.Config(cache="off"))
    assert "offload.start" not in text and "meta recompute" not in text
    monkeypatch.setattr(compiling, "room_of", lambda device: given() + need)
    assert trained(interlace.Config(cache="off"))[1] == text  # it fits
    monkeypatch.setattr(compiling, "room_of", lambda device: given() + need * 3 // 4)
    little, text, less = trained(interlace.Config(cache="off"))
    assert ("offload.start" in text or "meta recompute" in text) and less <= need * 3 // 4
    assert little == plenty
    _, text, _ = trained(interlace.Config(cache="off", schedule=[]))
    assert "offload.start" not in text and "meta recompute" not in text


@pytest.mark.software
def test_what_cannot_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "room_of", lambda device: given() + 65536)
    with pytest.raises(interlace.InterlaceError, match="the smallest schedule that was found needs"):
        trained(interlace.Config(cache="off"))


def test_storages_leave_an_accelerator_where_memory_is_limited() -> None:
    limited = interlace.Config(memory_limit="1GiB")
    assert "offload=auto" in default_schedule(limited, 1, "cuda")[0][1][0]
    assert "offload" not in default_schedule(limited, 1)[0][1][0]
    assert default_schedule(interlace.Config(), 1, "cuda") == ()
    device = torch.device("cuda")
    assert beside_bytes(torch.device("cpu"), 1 << 30) == 0 < beside_bytes(device, 1 << 20) <= 1 << 19
    assert beside_bytes(device, 4 << 30) > 32 << 20


@pytest.mark.parametrize(
    "config, kind, lacks, found",
    [
        ({}, "cuda", "", "on"), ({}, "cpu", "", "off"), ({}, "cuda", "there is no triton here", "off"),
        ({"deterministic": True}, "cuda", "", "off"),
        ({"debug": True}, "cuda", "", "off"), ({"regions": "off"}, "cuda", "", "off"), ({"regions": "exact"}, "cpu", "", "exact"),
        ({"mode": "eager"}, "cuda", "", "off"),
    ],
)  # fmt: skip
def test_regions_are_kernels_where_there_can_be_some(
    config: dict[str, Any], kind: str, lacks: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "has_kernels", lambda device: lacks)
    peers = types.SimpleNamespace(device=torch.device(kind), rank=0, exchange=lambda what, mine: [mine])
    assert regions.settled(interlace.Config(**config), peers).regions == found  # type: ignore[arg-type]
    if found == "on":  # one rank of two cannot
        peers.exchange = lambda what, mine: [mine, "there is no triton here"]
        assert regions.settled(interlace.Config(**config), peers).regions == "off"  # type: ignore[arg-type]


def test_what_operators_give_beside_their_results_on_cuda() -> None:
    """Sizes and dtypes as its kernels have them (bench/accelerator_check.py runs models with both there)."""
    x, channels = torch.randn(4, 6), torch.ones(6)
    frozen = (x, channels, channels, channels, channels, False, 0.1, 1e-5)
    assert [tuple(r.shape) for r in promised(aten.native_batch_norm.default, frozen, {})] == [(4, 6), (0,), (0,)]
    assert [tuple(r.shape) for r in promised(aten.native_batch_norm.default, frozen, {}, "cuda")] == [(4, 6), (6,), (6,)]
    half = tuple(a.bfloat16() if isinstance(a, torch.Tensor) else a for a in frozen)
    assert [r.dtype for r in promised(aten.native_batch_norm.default, half, {}, "cuda")] == [torch.bfloat16, torch.float32, torch.float32]
    assert [tuple(r.shape) for r in promised(aten.log_sigmoid_forward.default, (x,), {}, "cuda")] == [(4, 6), (0,)]


@pytest.mark.software
def test_copies_and_what_runs_beside_them_are_measured_where_memory_is_limited() -> None:
    """Once a profile: sizes in both directions, and each two lanes, with factors of at least 1."""
    torch.manual_seed(0)
    model = zoo.build("llama", torch.float32).to("soft")
    batch = {name: x.to("soft") for name, x in zoo.tokens(2, 0).items()}
    config = interlace.Config(cache="off", memory_limit="1GiB")
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batch, config) as trainer:
        for _ in range(12):
            trainer.step(batch)
        lines = trainer._loop.planner.profile.splitlines()
    for kind in ("h2d", "d2h"):
        found = {int(line.split()[3]): float(line.split()[5]) for line in lines if line.startswith(f"copy {kind} ")}
        assert list(found) == sorted(device_copies.SIZES) and found[max(found)] > found[min(found)] > 0
    pairs = [line.split()[1:] for line in lines if line.startswith("together ")]
    assert [(first, second) for first, _, second, _ in pairs] == [("compute", "d2h"), ("compute", "h2d"), ("h2d", "d2h")]
    assert all(float(factor) >= 1 for _, one, _, two in pairs for factor in (one, two))


def test_the_allocators_part_of_a_prediction() -> None:
    """As torch's allocator rounds on CUDA: 21.5 MiB become 22, of 125 the last MiB is not split off, of 2240.2 it is."""
    mib = 1 << 20
    sizes = [8 * mib, 21 * mib + mib // 2, 125 * mib, 2240 * mib + 200_000]
    assert allocator_bytes(torch.device("cpu"), sizes) == 0
    assert allocator_bytes(torch.device("cuda"), sizes) == 32 * mib + mib // 2 + mib


class Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert lengths.device.type == "cpu"
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(packed.data.tanh()).mean(0)


@pytest.mark.software
@pytest.mark.parametrize("settings", [{"fullgraph": False}, {"mode": "eager"}], ids=str)
def test_lengths_stay_in_the_hosts_memory(settings: dict[str, Any]) -> None:
    """As a loop of PyTorch's gives them: beside tensors on the device they are meant to lie there."""
    torch.manual_seed(0)
    model = Packed().to("soft")
    batches = [(torch.randn(4, 5, 4).to("soft"), torch.randint(1, 6, (4,)).clamp(min=1)) for _ in range(3)]
    batches = [(x, torch.cat([lengths[:-1], torch.tensor([5])])) for x, lengths in batches]
    theirs = copy.deepcopy(model)
    optimizer, expected = torch.optim.SGD(theirs.parameters(), lr=0.1), []
    for batch in batches:
        loss = theirs(*batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    config = interlace.Config(cache="off", schedule=[], **settings)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with interlace.compile(model, own, lambda m, batch: m(*batch).square().mean(), batches[0], config) as trainer:
        assert [float(trainer.step(batch)) for batch in batches] == pytest.approx(expected, rel=1e-5)
        if "fullgraph" in settings:
            assert "the host reads what it takes" in trainer.stats()["graphs"]["why_not"]


@pytest.mark.software
def test_looking_at_operators_draws_nothing() -> None:
    """Dtypes in 16 bits come from a run on the device, whose generator is then as it was."""
    check_ops._dtypes.clear()
    module = torch.get_device_module("soft")
    before = module.get_rng_state()
    with FakeTensorMode():
        result, mask = check_ops.promise(aten.native_dropout.default, (torch.ones(4, 8, dtype=torch.bfloat16), 0.5, True), {}, "soft")
    assert (result.dtype, mask.dtype) == (torch.bfloat16, torch.bool) and len(check_ops._dtypes) == 1
    torch.accelerator.synchronize()
    assert torch.equal(module.get_rng_state(), before)
