"""The pass `recompute` on real ranks: the same bits as without it, and a lower peak."""

from __future__ import annotations

import gc
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest
from torch import nn

import interlace

STEPS = 30
ROWS = 8
# A budget lies between what is kept without recomputation and what mode=full keeps.
PASSES = {
    "llama": ["recompute", "recompute(mode=selective)", "recompute(mode=budget,bytes=270KiB)"],
    "gpt2_dropout": ["recompute", "recompute(mode=selective)", "recompute(mode=budget,bytes=550KiB)"],
    "batchnorm_blocks": ["recompute", "recompute(mode=selective)", "recompute(mode=budget,bytes=200KiB)"],
    # One block that is the whole body (the elements of its list are single layers): its peak is that of its backward part.
    "batchnorm": [
        "recompute(blocks=body)",
        "recompute(mode=selective,blocks=body)",
        "recompute(mode=budget,bytes=17KiB,blocks=body)",
    ],
}


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class ConvBlocks(nn.Module):
    """Residual blocks with BatchNorm, whose statistics must change once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


zoo.CASES["batchnorm_blocks"] = zoo.Case(ConvBlocks, zoo.images, zoo.class_loss)


def train(
    case: str, passes: list[str], accumulation: int = 1, steps: int = STEPS
) -> list[tuple[list[float], str, int, int]]:
    """(losses, digest of all weights, peak bytes, ops of a step) of each pipeline, from the same start."""
    rank, _ = parity.rank_and_size()
    out = []
    for pipeline in passes:
        model = zoo.build(case, torch.float32)
        settings = interlace.Config(passes=pipeline, accumulation=accumulation, timeout_s=120)
        example = zoo.CASES[case].batch(ROWS, rank)
        with interlace.compile(
            model, parity.make_optimizer("adamw", model), zoo.CASES[case].loss, example, settings
        ) as trainer:
            losses = [
                parity.mean_over_ranks(trainer.step(zoo.CASES[case].batch(ROWS, step * 100 + rank)))
                for step in range(steps)
            ]
            stats: dict[str, Any] = trainer.stats()
            out.append((losses, digest(dict(trainer.state_dict(all_ranks=True))), stats["peak_bytes"], stats["ops"]))
        del model, trainer  # a device's counter knows of the model as long as it is there
        gc.collect()
    return out


@pytest.mark.parametrize("sharding", ["shard", "zero1"])
@pytest.mark.parametrize("case", list(PASSES))
def test_the_same_bits_and_a_lower_peak(case: str, sharding: str) -> None:
    rest = f"{sharding}(ranks=2),update(clip=0.3)"
    pipelines = [f"canonicalize,{rest}", *(f"canonicalize,{p},{rest}" for p in PASSES[case])]
    for plain, *others in ranks.run(train, 2, case, pipelines, timeout_s=300):
        for name, other in zip(PASSES[case], others, strict=True):
            assert other[:2] == plain[:2], f"{name}: losses or weights have other bits"
            assert other[3] > plain[3], f"{name}: nothing ran again"
            if case != "batchnorm":
                assert other[2] < plain[2], f"{name}: peak {other[2]} bytes, {plain[2]} without"


def test_the_same_bits_with_accumulation() -> None:
    rest = "shard(ranks=2),accumulate(steps=2,mode=reduce_last),update"
    pipelines = [f"canonicalize,{rest}", *(f"canonicalize,{p},{rest}" for p in PASSES["gpt2_dropout"])]
    for plain, *others in ranks.run(train, 2, "gpt2_dropout", pipelines, 2, timeout_s=300):
        assert all(other[:2] == plain[:2] for other in others)


# ---- against FSDP2 with activation checkpointing ----

MIB = 1 << 20


def llama_of_six_blocks() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            use_cache=False,
        )
    )


def tokens(rows: int, seed: int) -> dict[str, torch.Tensor]:
    return zoo.tokens(rows, seed, vocab=256, length=128)


zoo.CASES["llama_of_six_blocks"] = zoo.Case(llama_of_six_blocks, tokens, zoo.causal_loss)


def peak_of_fsdp2(case: str, steps: int = 3) -> tuple[float, int]:
    """(last loss, peak bytes) of FSDP2 by layer with activation checkpointing by layer; the peak is that of the last step.

    Counted from the allocations that torch's profiler reports, on top of shards and optimizer states.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    rank, size = parity.rank_and_size()
    model = zoo.build(case, torch.float32)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, LlamaDecoderLayer))
    mesh = init_device_mesh("cpu", (size,))
    for module in list(model.modules()):
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = parity.make_optimizer("adamw", model)

    def step(number: int) -> float:
        loss = zoo.CASES[case].loss(model, zoo.CASES[case].batch(ROWS, number * 100 + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return parity.mean_over_ranks(loss)

    for number in range(steps - 1):
        step(number)
    states = [t for state in optimizer.state.values() for t in state.values()]
    held = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in [*model.parameters(), *states])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = step(steps - 1)
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return loss, held + peak


def test_the_peak_is_no_higher_than_that_of_fsdp2_with_activation_checkpointing() -> None:
    case, rest = "llama_of_six_blocks", "shard(ranks=2),update"
    ours = ranks.run(train, 2, case, [f"canonicalize,recompute,{rest}"], 1, 3, timeout_s=150)
    theirs = ranks.run(peak_of_fsdp2, 2, case, timeout_s=150)
    for (mine,), (loss, peak) in zip(ours, theirs, strict=True):
        assert abs(mine[0][-1] - loss) < 1e-3 * loss, "the two must train alike"
        assert mine[2] <= peak, (
            f"ours {mine[2] / MIB:.2f} MiB, FSDP2 with activation checkpointing {peak / MIB:.2f} MiB"
        )
