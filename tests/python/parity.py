"""The same training run four ways: by interlace, FSDP2, DDP, and one process with the global batch; and how far they lie apart.

Every function here runs on all ranks of tests/python/ranks.py. compare() takes many settings of interlace and runs each peer once for all
of them: FSDP2 knows no strategy, DDP and one process neither that nor when gradients are reduced.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import interlace

Tensor = torch.Tensor
Losses = list[float]
Weights = dict[str, Tensor]
Run = tuple[Losses, Weights]
ROWS = 2  # of a micro-batch


@dataclasses.dataclass(frozen=True)
class Setting:
    """What interlace is asked for; its peers depend on the first two, FSDP2 on the mode too."""

    accumulation: int = 1
    clip: float | None = None
    strategy: str = "shard"
    mode: str = "reduce_each"

    def __str__(self) -> str:
        mode = "" if self.accumulation == 1 else f"x{self.accumulation}-{self.mode}"
        return f"{self.strategy}{mode}{'-clip' if self.clip else ''}"


@dataclasses.dataclass(frozen=True)
class Distance:
    """Relative distances of two runs; infinite where a number is not finite."""

    loss: float
    weights: float
    other: tuple[str, ...] = ()  # integer buffers that are not equal

    def within(self, bound: float) -> bool:
        return self.loss <= bound and self.weights <= bound and not self.other

    def __str__(self) -> str:
        other = f", {', '.join(self.other)} differ" if self.other else ""
        return f"loss {self.loss:.1e}, weights {self.weights:.1e}{other}"


class Lion(torch.optim.Optimizer):
    """As people write them: a class of their own, element by element."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


# Optimizers whose step is captured, each with what makes most of its step.
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, weight_decay=0.01),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, momentum=0.5, centered=True, eps=1e-4),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3, weight_decay=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, weight_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.8, weight_decay=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=4, lambd=1e-3, weight_decay=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-4),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01, amsgrad=True, maximize=False),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
}
# And those whose step needs whole parameters.
CAPTURED = RULES | {"adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1)}


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups, as people have them: matrices with weight decay, vectors without."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind in CAPTURED:
        if kind == "rprop":  # has no weight decay
            groups[1].pop("weight_decay")
        return CAPTURED[kind](groups)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=1e-3, weight_decay=0.01)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[g["lr"] for g in optimizer.param_groups], total_steps=steps + 1, cycle_momentum=False
    )


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch_of(case: str, step: int, rank: int, accumulation: int) -> Any:
    return zoo.CASES[case].batch(ROWS * accumulation, step * 100 + rank)


def pieces(batch: dict[str, Tensor], accumulation: int) -> Iterator[dict[str, Tensor]]:
    for i in range(accumulation):
        yield {k: v.chunk(accumulation)[i] for k, v in batch.items()}


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().double().cpu().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return float(value) / rank_and_size()[1]


def by_interlace(
    case: str, model: nn.Module, optimizer: str, steps: int, clip: float | None, **config: Any
) -> tuple[Losses, Weights]:
    rank, _ = rank_and_size()
    accumulation = config.get("accumulation", 1)
    opt = make_optimizer(optimizer, model)
    settings = interlace.Config(clip_norm=clip, timeout_s=120, **{"schedule": [], **config})
    with interlace.compile(
        model, opt, zoo.CASES[case].loss, batch_of(case, 0, rank, accumulation), settings
    ) as trainer:
        scheduler = schedule(opt, steps)
        losses = []
        for step in range(steps):
            losses.append(mean_over_ranks(trainer.step(batch_of(case, step, rank, accumulation))))
            scheduler.step()
        return losses, dict(trainer.state_dict(all_ranks=True))


def by_torch(
    case: str, model: nn.Module, optimizer: str, steps: int, clip: float | None, accumulation: int,
    last_only: Callable[[bool], Any] = lambda last: None,
) -> tuple[Losses, nn.Module]:  # fmt: skip
    """The usual training loop; last_only(is_last) is called before each micro-batch."""
    rank, _ = rank_and_size()
    opt = make_optimizer(optimizer, model)
    scheduler = schedule(opt, steps)
    losses = []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for i, part in enumerate(pieces(batch_of(case, step, rank, accumulation), accumulation)):
            last_only(i == accumulation - 1)
            loss = zoo.CASES[case].loss(model, part)
            (loss / accumulation).backward()
            total += loss.detach().double() / accumulation
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        losses.append(mean_over_ranks(total))
    return losses, model


def by_fsdp2(
    case: str, model: nn.Module, optimizer: str, steps: int, clip: float | None, accumulation: int, mode: str
) -> tuple[Losses, Weights]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (rank_and_size()[1],))
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    each = mode == "reduce_each"
    losses, model = by_torch(
        case, model, optimizer, steps, clip, accumulation, lambda last: model.set_requires_gradient_sync(each or last)
    )
    return losses, {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def by_ddp(
    case: str, model: nn.Module, optimizer: str, steps: int, clip: float | None, accumulation: int
) -> tuple[Losses, Weights]:
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)

    def last_only(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    losses, _ = by_torch(case, wrapped, optimizer, steps, clip, accumulation, last_only)
    return losses, dict(model.state_dict())


def by_one_process(
    case: str, model: nn.Module, optimizer: str, steps: int, clip: float | None, accumulation: int
) -> tuple[Losses, Weights]:
    """Every rank's micro-batches one after the other; BatchNorm's statistics see those of rank 0, whose buffers a state has."""
    _, size = rank_and_size()
    opt = make_optimizer(optimizer, model)
    scheduler = schedule(opt, steps)
    losses = []
    for step in range(steps):
        total = 0.0
        for r in range(size):
            kept = None if r == 0 else [(b, b.clone()) for b in model.buffers()]
            for part in pieces(batch_of(case, step, r, accumulation), accumulation):
                loss = zoo.CASES[case].loss(model, part)
                (loss / (accumulation * size)).backward()
                total += float(loss.detach().double()) / (accumulation * size)
            for b, value in kept or ():
                b.copy_(value)
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses, dict(model.state_dict())


def loss_distance(a: Losses, b: Losses) -> float:
    """Largest relative difference of a step's loss."""
    far = [abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True)]
    return max(far) if all(map(math.isfinite, far)) else math.inf


def weight_distance(a: Weights, b: Weights) -> float:
    """Relative distance of all floating tensors as one vector."""
    names = [n for n in b if b[n].is_floating_point()]
    assert list(a) == list(b), f"names differ: {set(a) ^ set(b)}"
    far = sum(float((a[n].double() - b[n].double()).square().sum()) for n in names) ** 0.5
    far /= sum(float(b[n].double().square().sum()) for n in names) ** 0.5
    return far if math.isfinite(far) else math.inf


def distance(a: Run, b: Run) -> Distance:
    other = tuple(n for n, v in b[1].items() if not v.is_floating_point() and not torch.equal(v, a[1][n]))
    return Distance(loss_distance(a[0], b[0]), weight_distance(a[1], b[1]), other)


def one_process_runs(keys: list[tuple[int, float | None]], run: Callable[..., Run]) -> dict[Any, Run]:
    """run(accumulation, clip) for each key, shared out over the ranks; all of them on rank 0."""
    rank, size = rank_and_size()
    mine = {key: run(*key) for key in keys[rank::size]}
    if size == 1:
        return mine
    every: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, every)
    return {key: value for some in every or () for key, value in some.items()}


def compare(
    case: str, dtype: str, optimizer: str, steps: int, settings: Sequence[Setting], peers: Sequence[str] = ("one", "fsdp2", "ddp"),
    cache: str = "off", seed: int = 0,
) -> list[dict[str, Distance]]:  # fmt: skip
    """On rank 0: for each setting the distance of interlace to each peer; "fsdp2-ddp" is that of the peers. With a cache folder the
    model is captured once."""
    rank, size = rank_and_size()
    first = zoo.build(case, getattr(torch, dtype), seed)
    known: dict[Any, Run] = {}

    def once(key: Any, train: Callable[..., Run], clip: float | None, *args: Any) -> Run:
        if key not in known:
            known[key] = train(case, copy.deepcopy(first), optimizer, steps, clip, *args)
        return known[key]

    def one_process(accumulation: int, clip: float | None) -> Run:
        return by_one_process(case, copy.deepcopy(first), optimizer, steps, clip, accumulation)

    ones: dict[Any, Run] = {}
    if "one" in peers:
        ones = one_process_runs(list(dict.fromkeys((s.accumulation, s.clip) for s in settings)), one_process)
    found = []
    for s in settings:
        try:
            ours = by_interlace(
                case, copy.deepcopy(first), optimizer, steps, s.clip, accumulation=s.accumulation, strategy=s.strategy,
                accumulate_mode=s.mode, cache=cache,
            )  # fmt: skip
            runs = {"one": ones[s.accumulation, s.clip]} if "one" in peers and rank == 0 else {}
            if size > 1 and "fsdp2" in peers:
                mode = s.mode if s.accumulation > 1 else "reduce_each"
                runs["fsdp2"] = once(("fsdp2", s.accumulation, s.clip, mode), by_fsdp2, s.clip, s.accumulation, mode)
            if size > 1 and "ddp" in peers:
                runs["ddp"] = once(("ddp", s.accumulation, s.clip), by_ddp, s.clip, s.accumulation)
        except Exception as e:
            raise RuntimeError(f"{case} {dtype} {optimizer} {s} on rank {rank} of {size}: {e}") from e
        if rank == 0:  # its buffers are those of a state
            found.append({name: distance(ours, run) for name, run in runs.items()})
            if "fsdp2" in runs and "ddp" in runs:
                found[-1]["fsdp2-ddp"] = distance(runs["fsdp2"], runs["ddp"])
    return found
