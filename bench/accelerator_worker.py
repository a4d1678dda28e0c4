"""One way to train, on every rank of a run: steps timed on the device, the allocator's peak, losses. accelerator_check.py starts it, a
process a rank with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR as torchrun sets them; rank 0 prints one line of JSON.

torchrun --nproc-per-node 4 bench/accelerator_worker.py --method fsdp2 --device cuda --size 0.5g
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import blocks_of, causal_loss, llama, token_batch
from common import quartiles

import interlace
from interlace import _core
from interlace.config.schedule import AUTO_STEP
from interlace.cost.machine import Machine
from interlace.cost.measure import StepTimes
from interlace.cost.measurements import from_rows

SIZES = {
    "0.5g": {"hidden": 2048, "layers": 8, "heads": 16, "inter": 5504, "vocab": 32000, "tokens": 2048},
    "8b": {
        "hidden": 4096, "layers": 32, "heads": 32, "key_heads": 8, "inter": 14336, "vocab": 128256, "tokens": 4096, "rows": 2,
    },  # of Llama-3-8B
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "inter": 172, "vocab": 512, "tokens": 64},
}
OPS, WAITED = {"regions": "off"}, {"regions": "on", "regions_wait": True}
OURS: dict[str, dict[str, Any]] = {
    "interlace": OPS, "interlace, graphs": {"device_graphs": True, **OPS}, "interlace, regions": WAITED,
    "interlace, regions, graphs": {"device_graphs": True, **WAITED}, "interlace, as it comes": {"device_graphs": "auto"},
    "interlace, regions beside": {"regions": "on"}, "interlace, less memory": WAITED,  # --memory-limit
}  # fmt: skip
METHODS = ("eager", "torch.compile", "ddp", "fsdp2", *OURS)
LOSSES = 4  # of the first steps are compared between methods
SETTLE_S = 120.0  # at most until our schedule has done what it will, and regions are swapped in
Facts = dict[str, Any]


def made(size: dict[str, Any], device: torch.device, autocast: bool) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The model, made where it trains, and its loss: in bfloat16, or in float32 under torch.autocast."""
    with device:
        model = llama(size, torch.float32 if autocast else torch.bfloat16)

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return causal_loss(model, batch)

    return model, loss if autocast else causal_loss


def plain(
    method: str, size: dict[str, Any], device: torch.device, batch: dict[str, torch.Tensor], autocast: bool
) -> Callable[[], torch.Tensor]:
    """A step of PyTorch's own."""
    model, loss_of = made(size, device, autocast)
    if method == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    run: Any = model
    if method == "ddp":
        run = torch.nn.parallel.DistributedDataParallel(model)
    if method == "torch.compile":
        run = torch.compile(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = loss_of(run, batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def timed(step: Callable[[], torch.Tensor], rounds: int) -> list[float]:
    """Seconds of every step, to the end of what it gave the device."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def allocator_peak(device: torch.device) -> int | None:
    """Bytes, where the backend counts them."""
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def forecast(trainer: Any, batch: dict[str, torch.Tensor], rounds: int) -> Facts:
    """Milliseconds of a step by the simulator, on a profile that is taken as `interlace profile` does, and of the steps between."""
    machine = Machine.here(trainer.world_size, torch.get_num_threads(), device=batch["input_ids"].device)
    executor, peers = trainer._run.executor, trainer._run.peers
    times, seconds = StepTimes(trainer.world_size, machine.threads, machine.cores, on_device=True), []
    for number in range(rounds):
        executor.set_trace("serial")
        trainer.step(batch)
        times.add(executor.record(), partial(peers.exchange, f"serial step {number}"))
        executor.set_trace("off")
        trainer.step(batch)
        torch.accelerator.synchronize()
        seconds += timed(lambda: trainer.step(batch), 3)
    profile = from_rows(machine.fingerprint, times.rows()).text()
    program = _core.Program.parse(trainer.program, "program")
    simulation = _core.Simulation(program, trainer._loop.planner.cluster_text(), profile=profile)
    return {
        "predicted_ms": simulation.step_us / 1e3, "measured_ms": statistics.median(seconds) * 1e3,
        "predicted_bytes": simulation.taken_bytes + trainer._run.programs.allocator_bytes(program),
    }  # fmt: skip


def measure(
    method: str, size: dict[str, Any], device: torch.device, rounds: int, limit: int | None = None, autocast: bool = False
) -> Facts:  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    batch = {name: tensor.to(device) for name, tensor in token_batch(size, size.get("rows", 1), rank=rank).items()}
    facts: Facts = {"method": method}
    trainer = None
    if method.startswith("interlace"):
        model, loss_of = made(size, device, autocast)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        begin = time.perf_counter()
        config = interlace.Config(**{"device_graphs": False, "memory_limit": limit} | OURS[method])
        trainer = interlace.compile(model, optimizer, loss_of, batch, config)
        facts["compile_s"] = time.perf_counter() - begin
        ours = trainer

        def step() -> torch.Tensor:
            return ours.step(batch)
    else:
        step = plain(method, size, device, batch, autocast)
    facts["losses"] = [float(step()) for _ in range(LOSSES)]
    if trainer is not None:
        while not (trainer.steps > AUTO_STEP + 2 and trainer.settled) and time.perf_counter() < begin + SETTLE_S:
            trainer.step(batch)
        facts["steps_to_settle"] = trainer.steps
    torch.accelerator.reset_peak_memory_stats(device)
    low, middle, high = quartiles(timed(step, rounds))
    facts |= {"q1_ms": low * 1e3, "median_ms": middle * 1e3, "q3_ms": high * 1e3, "peak_bytes": allocator_peak(device)}
    if trainer is not None:
        stats = trainer.stats()
        facts |= {"trainer_peak_bytes": stats["peak_bytes"], "graphs": stats["graphs"], "regions": stats["regions"]}
        facts["arena"] = {key: value for key, value in stats["arena"].items() if key not in ("kept", "unforeseen")}
        facts["forecast"] = forecast(trainer, batch, 5)
        facts["plans"] = [
            {key: plan.get(key) for key in ("step", "reason", "predicted_us", "measured_us", "predicted_bytes", "measured_bytes")}
            for plan in trainer.plans
        ]
        trainer.close()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="0.5g")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--memory-limit", type=int, help="bytes of a rank, for our side")
    parser.add_argument("--autocast", action="store_true", help="float32 parameters under torch.autocast in bfloat16")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(args.device, local if torch.accelerator.device_count() > 1 else 0)
    torch.accelerator.set_device_index(device.index)
    if ranks > 1:
        dist.init_process_group(f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}")
    facts = measure(args.method, SIZES[args.size], device, args.rounds, args.memory_limit, args.autocast)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(facts), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
