"""A plan carried out: the settings and passes that make the runtime do what a plan says, of one stage or of several.

plan = read_plan("gpt.plan")
how = execution_of(plan)             # error: names everything the runtime cannot do yet
how.passes(model)                    # ["recompute(mode=full,blocks=model.layers.1+model.layers.3)"]

ZeRO 0   replicate, gradients reduced after the last micro-batch     ZeRO 2   zero1, reduced in every micro-batch
ZeRO 1   zero1, gradients reduced after the last micro-batch         ZeRO 3   shard, reduced in every micro-batch

Several stages are a mesh pp x dp x tp, each beginning with the first of its blocks; data ranks (and with them rows of a micro-batch), ZeRO
level and recomputed blocks are those of its own. They run in the order `auto` or, near the limit, 1F1B.

Offload: the pass `offload` with the plan's memory limit, for the kinds that the plan moves. The shares are the planner's estimate of
how much that is; the pass moves what the limit asks for, tensor by tensor, spread evenly over the step, and no more. Of several
stages, where it does not plan: optimizer states alone, all of them on every stage, waited for (`offload_sync`).
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from interlace.errors import InterlaceError
from interlace.files import read_text

if TYPE_CHECKING:
    from torch import nn

Plan = dict[str, Any]  # as `_core.read_plan` gives it

# ZeRO level → strategy and accumulate_mode of Config
_LEVELS = (("replicate", "reduce_last"), ("zero1", "reduce_last"), ("zero1", "reduce_each"), ("shard", "reduce_each"))


# What a plan moves → what the pass `offload` calls it, in the order in which it leaves.
_KINDS = {"states": "states", "gradients": "gradients", "weights": "master", "activations": "activations"}


class PlanError(InterlaceError):
    """A plan that cannot be read or carried out."""


def plan_text(file: str) -> str:
    """What is in a plan file, not yet read. Error: no such file, or no text."""
    return read_text(file, "a plan", PlanError)


def read_plan(file: str) -> Plan:
    """A plan file, checked. Error: no such file, what cannot be read, or the rules that the plan breaks."""
    from interlace import _core

    return json.loads(_core.read_plan(plan_text(file), file))


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks [first, first + count) of a model on dp x tp ranks, and how many of the blocks are recomputed."""

    dp: int
    tp: int
    first: int
    count: int
    full: int
    selective: int


@dataclasses.dataclass(frozen=True)
class Execution:
    """What a plan asks of the runtime."""

    model: str
    ranks: int
    batch: int
    micro_batch: int
    accumulation: int
    seq: int
    strategy: str  # of all stages, or one for each: "zero1+shard"; so is accumulate_mode
    accumulate_mode: str
    param_dtype: str | None  # parameters are float32 in the optimizer
    blocks: int
    stages: tuple[Stage, ...]
    offload: dict[str, float]  # shares by kind
    memory_limit: int
    step_us: float  # predicted; 0: not known
    peak_bytes: int
    stage_order: str  # of several stages

    @property
    def mesh(self) -> str | None:
        """As Config.mesh takes it, "pp=2,dp=2"; None: all ranks on dp."""
        data, tensor = [stage.dp for stage in self.stages], [stage.tp for stage in self.stages]
        if data == [self.ranks]:
            return None
        sizes = {"pp": str(len(data)), "dp": _sizes(data), "tp": _sizes(tensor)}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size != "1" or name == "dp")

    def borders(self, model: nn.Module) -> str:
        """Config.stages: the blocks that the second stage and the following ones begin with."""
        if len(self.stages) == 1:
            return "auto"
        paths = block_paths(model, self.blocks)
        return "+".join(paths[stage.first] for stage in self.stages[1:])

    def passes(self, model: nn.Module) -> list[str]:
        """The passes beside strategy and accumulation. Error: the model has other blocks than the plan is of."""
        block_paths(model, self.blocks)
        return self._recompute(model) + self._offload()

    def _offload(self) -> list[str]:
        kinds = [name for kind, name in _KINDS.items() if self.offload[kind] > 0]
        if not kinds:
            return []
        if len(self.stages) > 1:
            return ["overlap_update", "offload_sync(cluster={cluster},kinds=states)"]
        return ["overlap_update", f"offload(cluster={{cluster}},limit={self.memory_limit},kinds={'+'.join(kinds)})"]

    def _recompute(self, model: nn.Module) -> list[str]:
        """Recomputed blocks are spread evenly among the others of a stage."""
        chosen: list[int] = []
        whole: list[int] = []
        for stage in self.stages:
            own = [stage.first + i for i in spread(stage.full + stage.selective, stage.count)]
            chosen += own
            whole += [own[i] for i in spread(stage.full, len(own))]
        if not chosen:
            return []
        paths = block_paths(model, self.blocks)
        if len(whole) == len(chosen):
            return [f"recompute(mode=full,blocks={'+'.join(paths[i] for i in chosen)})"]
        more = f",whole={'+'.join(paths[i] for i in whole)}" if whole else ""
        return [f"recompute(mode=selective,blocks={'+'.join(paths[i] for i in chosen)}{more})"]


def _sizes(ranks: list[int]) -> str:
    """Of an axis, by stage."""
    return "+".join(map(str, ranks)) if len(set(ranks)) > 1 else str(ranks[0])


def execution_of(plan: Plan) -> Execution:
    """What the runtime has to do. Error: everything in the plan that it cannot do."""
    missing = _missing(plan)
    if missing:
        raise PlanError("this plan cannot be trained yet: " + "; ".join(missing) + "\n  " + _way_out(plan))
    stage = plan["stages"][0]
    levels = [_LEVELS[s["zero"]] for s in plan["stages"]]
    strategy, mode = ("+".join(names) if len(set(names)) > 1 else names[0] for names in zip(*levels, strict=True))
    return Execution(
        model=plan["model"], ranks=sum(s["devices"] for s in plan["stages"]), batch=plan["global_batch"], micro_batch=stage["micro_batch"],
        accumulation=plan["accumulation"], seq=plan["sequence"], strategy=strategy, accumulate_mode=mode,
        param_dtype="bfloat16" if plan["dtype"] == "bfloat16" else None, blocks=plan["blocks"],
        stages=tuple(Stage(s["dp"], s["tp"], s["first_block"], s["layers"], s["full"], s["selective"]) for s in plan["stages"]),
        offload={kind: max(s["offload"][kind] for s in plan["stages"]) for kind in _KINDS}, memory_limit=plan["memory_limit"],
        step_us=plan["step_us"],
        peak_bytes=max(s["peak_bytes"] for s in plan["stages"]), stage_order=_order(plan),
    )  # fmt: skip


def _order(plan: Plan) -> str:
    """Memory is planned for 1F1B, in which stage k of S holds S - k micro-batches. Faster orders hold up to S on each
    (passes/stages/list_schedule.h): they are taken where even a stage all of whose memory is theirs has room for that."""
    peaks = [stage["peak_bytes"] for stage in plan["stages"]]
    most = max(peak * len(peaks) / (len(peaks) - k) for k, peak in enumerate(peaks))
    return "auto" if len(peaks) == 1 or most <= plan["memory_limit"] else "1f1b"


def can_run(plan: Plan) -> bool:
    """Whether the runtime trains it."""
    return not _missing(plan)


def _missing(plan: Plan) -> list[str]:
    out = []
    stages = plan["stages"]
    moved = [kind for kind in _KINDS if kind != "states" and any(stage["offload"][kind] > 0 for stage in stages)]
    if len(stages) > 1 and moved:
        out.append(f"it moves {' and '.join(moved)} out of memory on several stages, and the runtime moves optimizer states alone there")
    if any(stage["layers"] == 0 for stage in stages):
        out.append("a stage without blocks, and the runtime cuts at blocks")
    if not plan["flash_attention"]:
        out.append("attention without the flash kernel, and the runtime trains with it")
    return out


def _way_out(plan: Plan) -> str:
    options = f"--cluster {plan['cluster']} --global-batch {plan['global_batch']} --seq {plan['sequence']} --runnable"
    return f"A plan that can: interlace plan {plan['model']} {options}"


def spread(count: int, total: int) -> list[int]:
    """`count` of the numbers below `total`, as evenly as can be."""
    return [i for i in range(total) if (i + 1) * count // total > i * count // total]


def block_paths(model: nn.Module, blocks: int) -> list[str]:
    """The paths of the model's blocks. Error: it has no list of so many."""
    from torch import nn

    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == blocks:
            return [f"{path}.{i}" for i in range(blocks)]
    raise PlanError(f"the model has no list of {blocks} blocks, as the plan says it has: is it of another model?")
