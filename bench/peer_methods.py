"""The methods of bench/peers.py: each builds the same model from the same seed and gives one optimizer step on a rank's micro-batches.

A method is used as its documentation says it is fast: gradients are synchronized after the last micro-batch where it can, the fused
AdamW of torch everywhere, buckets and prefetching as they come. What each one holds decides its kind (see peer_table.py).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import blocks_of, causal_loss, causal_model, token_batch
from torch import nn

Batch = dict[str, torch.Tensor]
Step = Callable[[list[Batch]], float]  # micro-batches of one step → their mean loss on this rank
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all methods share."""

    case: dict[str, Any]
    accumulation: int = 1
    mode: str = "reduce_last"  # of sharded methods: gradients reduced after the last micro-batch, or after each


@dataclasses.dataclass(frozen=True)
class Method:
    """`crew`: methods of one crew live in the same processes; a library that patches torch gets processes of its own."""

    name: str
    title: str
    kind: str
    crew: str
    build: Callable[[Settings], Step]
    needs: str = ""  # a package that is not part of the environment
    ours: bool = False
    by_name: bool = False  # not in the table by default


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def accumulated(model: Any, batches: list[Batch], before: Callable[[bool], None] = lambda last: None) -> float:
    """Backward of every micro-batch's share of the mean loss; `before` is told whether the last one comes."""
    total = 0.0
    for i, batch in enumerate(batches):
        before(i == len(batches) - 1)
        loss = causal_loss(model, batch)
        (loss / len(batches)).backward()
        total += loss.item()
    return total / len(batches)


# ---- torch ----


def eager(settings: Settings) -> Step:
    model = causal_model(settings.case)
    optimizer = adamw(model.parameters())

    def step(batches: list[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = accumulated(model, batches)
        optimizer.step()
        return loss

    return step


def fsdp2(settings: Settings, gathered: bool = False, compiled: bool = False) -> Step:
    """fully_shard per block and for the rest. `gathered`: parameters stay whole from their first use to the last backward of a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = causal_model(settings.case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = blocks_of(model)
    for i in range(len(blocks)):
        if compiled:
            blocks[i] = torch.compile(blocks[i])  # inside fully_shard, whose hooks then stay out of the compiled graph
        fully_shard(blocks[i], mesh=mesh, reshard_after_forward=not gathered)
    fully_shard(model, mesh=mesh, reshard_after_forward=False if gathered else None)
    optimizer = adamw(model.parameters())

    def before(last: bool) -> None:
        if gathered or settings.mode == "reduce_last":
            model.set_requires_gradient_sync(last)
        if gathered:
            model.set_reshard_after_backward(last)

    def step(batches: list[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = accumulated(model, batches, before)
        optimizer.step()
        return loss

    return step


def fsdp2_hybrid(settings: Settings) -> Step:
    """fully_shard on a mesh of two axes: shards within a host, the same on each of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = causal_model(settings.case)
    mesh = init_device_mesh("cpu", hosts(), mesh_dim_names=("replicate", "shard"))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step(batches: list[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = accumulated(model, batches, model.set_requires_gradient_sync)
        optimizer.step()
        return loss

    return step


def hosts() -> tuple[int, int]:
    """How many there are, and the ranks on each."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() // per_host, per_host


def ddp(settings: Settings, zero: bool = False) -> Step:
    """DistributedDataParallel; with `zero` each rank updates its part of the parameters and sends it to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(causal_model(settings.case), gradient_as_bucket_view=True)
    optimizer: Any = adamw(model.parameters())
    if zero:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
        )

    def before(last: bool) -> None:
        model.require_backward_grad_sync = last  # what no_sync() sets

    def step(batches: list[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = accumulated(model, batches, before)
        optimizer.step()
        return loss

    return step


# ---- DeepSpeed ----


def deepspeed(settings: Settings, stage: int) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    ds.init_distributed(dist_backend="gloo", verbose=False)
    model: nn.Module = causal_model(settings.case)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # By default it keeps up to 1e9 parameters gathered, which for a small model is all of them; sharded means one block at a time.
        # Its linear layer that saves memory replaces torch's in the whole process and is not needed here.
        block = sum(p.numel() for p in blocks_of(model)[0].parameters())
        zero |= {
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # its default is 1.0
        "steps_per_print": 1 << 30,
    }
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(batches: list[Batch]) -> float:
        total = 0.0
        for batch in batches:
            loss = causal_loss(engine, batch)
            engine.backward(loss)  # divides by gradient_accumulation_steps
            engine.step()  # updates after the last micro-batch
            total += loss.item()
        return total / len(batches)

    return step


# ---- ours ----


def interlace_step(settings: Settings, strategy: str, hybrid: bool = False, regions: str = "off") -> Step:
    import interlace

    mesh = dict(zip(("replica", "dp"), hosts(), strict=True)) if hybrid else None

    model = causal_model(settings.case)
    example = [
        {name: torch.zeros(1, settings.case["tokens"], dtype=torch.long) for name in ("input_ids", "labels")}
        for _ in range(settings.accumulation)
    ]
    mode = settings.mode if strategy == "shard" else "reduce_last"
    trainer = interlace.compile(
        model,
        adamw(model.parameters()),
        causal_loss,
        _whole(example),
        interlace.Config(
            strategy=strategy, mesh=mesh, accumulation=settings.accumulation, accumulate_mode=mode, schedule=[], regions=regions,
            regions_wait=regions != "off",
        ),
    )  # fmt: skip
    return lambda batches: trainer.step(_whole(batches)).item()


PLAN_STEP = 7  # the steps before it give the times that the search decides by


def fsdp2_peak(settings: Settings) -> int:
    """Bytes of tensors that a rank holds at most in FSDP2 eager: parameters, states, gradients and activations."""
    from interlace._runtime import testing

    with testing.CountMemory() as memory:
        step = fsdp2(settings)
        for batches in _some_batches(settings, 2):
            step(batches)
    least = torch.tensor(memory.peak_bytes)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def interlace_search(
    settings: Settings, as_fsdp2: bool, hybrid: bool = False, regions: str = "off", strategy: str = "auto", after: str = ""
) -> Step:
    """Plans in some steps of a trainer that is thrown away, then trains with the passes that were chosen there, and with those `after`."""
    import interlace
    from interlace import _core
    from interlace.config import schedule

    limit = fsdp2_peak(settings) if as_fsdp2 else None
    common: dict[str, Any] = {
        "accumulation": settings.accumulation, "accumulate_mode": settings.mode, "regions": regions, "regions_wait": regions != "off",
    }  # fmt: skip
    own = {"strategy": strategy}
    mesh = {"mesh": dict(zip(("replica", "dp"), hosts(), strict=True))} if hybrid else {}
    example = _whole(_some_batches(settings, 1)[0])
    model = causal_model(settings.case)
    search = "search(cluster={cluster},profile={profile},limit={limit})"
    first = search.replace("profile={profile},", "")  # nothing is measured yet; the limit holds from the first step on
    trainer = interlace.compile(
        model, adamw(model.parameters()), causal_loss, example,
        interlace.Config(schedule=[(0, [first]), (PLAN_STEP, [search])], cache="off", **common, **own, **mesh, memory_limit=limit),
    )  # fmt: skip
    for batches in _some_batches(settings, PLAN_STEP + 1):
        trainer.step(_whole(batches))
    program = _core.Program.parse(trainer.program)
    _, _, _, recompute, passes = program.meta()["search.chosen"].split("|")
    if dist.get_rank() == 0:
        print(f"memory limit {limit}\n{program.explain()}\n{recompute} {passes}", file=sys.stderr, flush=True)
    trainer.close()
    model = causal_model(settings.case)
    config = interlace.Config(**common, **own, **mesh)
    if after:
        passes = ",".join(p for p in schedule.items(passes) if not p.startswith("overlap_update"))
    pipeline = schedule.pipeline(config.pipeline(dist.get_world_size()), [p for p in (recompute, passes, after) if p])
    trainer = interlace.compile(
        model, adamw(model.parameters()), causal_loss, example, interlace.Config(passes=pipeline, cache="off", **common)
    )
    return lambda batches: trainer.step(_whole(batches)).item()


def _some_batches(settings: Settings, steps: int) -> list[list[Batch]]:
    return [
        [token_batch(settings.case, seed=i, rank=dist.get_rank()) for i in range(settings.accumulation)]
        for _ in range(steps)
    ]


def _whole(batches: list[Batch]) -> Any:
    return batches[0] if len(batches) == 1 else batches


ALONE = {
    "eager": Method("eager", "compute alone, PyTorch eager", "alone", "alone", eager),
    "interlace-alone": Method(
        "interlace-alone",
        "compute alone, interlace",
        "alone",
        "alone",
        lambda s: interlace_step(s, "replicate"),
        ours=True,
    ),
}
METHODS = {
    m.name: m
    for m in (
        Method("fsdp2", "FSDP2 eager", "sharded", "torch", fsdp2),
        Method("fsdp2-compile", "FSDP2 + torch.compile", "sharded", "torch", lambda s: fsdp2(s, compiled=True)),
        Method("deepspeed-3", "DeepSpeed ZeRO-3", "sharded", "deepspeed", lambda s: deepspeed(s, 3), "deepspeed"),
        Method("shard", "interlace shard", "sharded", "interlace", lambda s: interlace_step(s, "shard"), ours=True),
        Method(
            "search",
            "interlace search, memory of FSDP2",
            "sharded",
            "interlace",
            lambda s: interlace_search(s, as_fsdp2=True),
            ours=True,
        ),
        Method("fsdp2-gathered", "FSDP2 kept gathered", "gathered", "torch", lambda s: fsdp2(s, gathered=True)),
        Method("torch-zero1", "torch ZeRO-1", "gathered", "torch", lambda s: ddp(s, zero=True)),
        Method("deepspeed-1", "DeepSpeed ZeRO-1", "gathered", "deepspeed", lambda s: deepspeed(s, 1), "deepspeed"),
        Method("zero1", "interlace zero1", "gathered", "interlace", lambda s: interlace_step(s, "zero1"), ours=True),
        Method(
            "search-free",
            "interlace search, free memory",
            "gathered",
            "interlace",
            lambda s: interlace_search(s, as_fsdp2=False),
            ours=True,
        ),
        Method("fsdp2-hybrid", "FSDP2, HSDP", "hybrid", "torch", fsdp2_hybrid),
        Method(
            "hybrid",
            "interlace shard on the mesh",
            "hybrid",
            "interlace",
            lambda s: interlace_step(s, "shard", hybrid=True),
            ours=True,
        ),
        Method(
            "hybrid-search",
            "interlace search on the mesh",
            "hybrid",
            "interlace",
            lambda s: interlace_search(s, as_fsdp2=False, hybrid=True),
            ours=True,
        ),
        Method(
            "hybrid-zero1",
            "interlace zero1 on the mesh, searched, parameters gathered in the next step",
            "hybrid",
            "interlace",
            lambda s: interlace_search(s, as_fsdp2=False, hybrid=True, strategy="zero1", after="reposition_update"),
            ours=True,
            by_name=True,
        ),
        Method("ddp", "DDP", "replicated", "torch", ddp),
        Method(
            "replicate",
            "interlace replicate",
            "replicated",
            "interlace",
            lambda s: interlace_step(s, "replicate"),
            ours=True,
        ),
        *(
            Method(
                f"{strategy}-regions", f"interlace {strategy}, compiled regions", kind, "interlace",
                partial(interlace_step, strategy=strategy, regions="on"), ours=True, by_name=True,
            )
            for strategy, kind in (("shard", "sharded"), ("zero1", "gathered"), ("replicate", "replicated"))
        ),
        *(
            Method(
                f"{name}-regions", f"interlace search, {memory}, compiled regions", kind, "interlace",
                partial(interlace_search, as_fsdp2=name == "search", regions="on"), ours=True, by_name=True,
            )
            for name, memory, kind in (("search", "memory of FSDP2", "sharded"), ("search-free", "free memory", "gathered"))
        ),
    )
}  # fmt: skip


def absent(method: Method) -> str | None:
    """Why a method cannot run in this environment, with what to do."""
    if method.needs and importlib.util.find_spec(method.needs) is None:
        return f"not installed: pip install {method.needs}"
    if method.ours and importlib.util.find_spec("interlace") is None:
        return "not built: make build"
    return None
