"""Config: every choice of a training run in one frozen object; a wrong value is refused where it is written.

Config(strategy="shard", accumulation=4, clip_norm=1.0, memory_limit="20GiB")
Config.from_dict({"strategy": "shard", "acumulation": 4})   # error: did you mean 'accumulation'?
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from interlace.config.forms import (
    ConfigError,
    Mesh,
    data_place,
    dealt,
    did_you_mean,
    dtype_name,
    mesh_form,
    mesh_ranks,
    mesh_text,
    place_in_stages,
    schedule_form,
    shapes_form,
    stage_meshes,
)  # fmt: skip

STRATEGIES = ("shard", "replicate", "zero1")
STAGE_ORDERS = ("1f1b", "gpipe", "interleaved", "zero_bubble", "v", "auto")
ACCUMULATE_MODES = ("auto", "reduce_each", "reduce_last")
NARROW = {"bfloat16": "bf16", "float16": "f16"}  # and how passes spell them
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes of "20GiB", "512 MB", "1e9" or a number. Error: anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = float(text)
    else:
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
        unit = _UNITS.get(match.group(2)) if match else None
        if not match or unit is None:
            raise ConfigError(f'\'{text}\' is not a size in bytes; write for example "20GiB", "512MB" or 1000000000')
        try:
            value = float(match.group(1)) * unit
        except ValueError:
            raise ConfigError(f"'{text}' is not a size in bytes; write for example \"20GiB\"") from None
    if not 0 < value < 2**63:
        raise ConfigError(f"a size in bytes must be positive and below 2^63, not {text}")
    return int(value)


def format_bytes(count: int | float) -> str:
    """ "1.50 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError


@dataclasses.dataclass(frozen=True)
class Config:
    """How a model is compiled and trained.

    strategy         "shard" (ZeRO-3), "zero1" (on a mesh with replica, states over all its data ranks) or "replicate" (DDP); with axis pp
                     also one for each stage, joined by +: "zero1+shard". "auto": shard, whose search keeps gathered what memory allows;
                     with axis pp zero1, unless memory is limited
    mesh             the ranks by axis, the last one fastest: {"replica": 2, "dp": 4} shards over dp, in groups of neighbours, and holds
                     the same on the ranks of replica, which add up their gradients and have a part of the optimizer states each (hybrid
                     sharding); {"dp": 2, "tp": 4}: four ranks work on one batch, each with a part of every product (tensor parallel);
                     {"pp": 2, "dp": (2, 1)}: stages of two ranks and of one, whose micro-batches have twice the rows (tp may differ, too);
                     None: all ranks on dp
    tensor           with axis tp: "auto" chooses how parameters are cut, "model" takes what the model says (Hugging Face's tp_plan), or
                     a file with a line "PARAMETER DIMENSION [blocks N]" for each, where * stands for the numbers in names
    sequence_parallel  with axis tp: what lies between the products is cut over its ranks, too, along the sequence
    stages           with axis pp, whose ranks run one stage each of a pipeline: "auto" cuts the model into stages that take the same time,
                     or the parameters or modules that the second stage and the following ones begin with, a list or joined by +
    stage_order      what a stage runs when: "auto", the fastest by the times of the stages that fits into memory_limit, an accelerator's
                     memory or a rank's part of the host's (or takes no more than 1f1b, which it is where nothing else fits), or
                     "1f1b", "gpipe", "interleaved" (several stages a rank), "zero_bubble", "v" (two, there and back: zero bubble, too)
    stage_chunks     stages of each rank along axis pp, dealt in turns
    accumulation     micro-batches of an optimizer step
    accumulate_mode  "reduce_each" (sharded gradients), "reduce_last" (full gradients, reduced once), or "auto": the search decides; where
                     none runs, and until it has, reduce_each (with axis pp reduce_last). The two round differently. Of each stage as strategy
    clip_norm        largest global norm of the gradient, or None
    seed             of random ops (dropout) and of parameters that are initialized from the meta device
    timeout_s        the longest wait for another rank, in seconds
    mode             "compiled", or "eager": the user's own Python on the same units, optimizer and checkpoints
    fullgraph        False: a module that cannot be captured runs in Python as one opaque op
    debug            look at every result while it is made and stop at the first that is not finite; slow
    rng              "keyed" streams (independent of order), or "compat": one generator in program order, as eager has
    passes           a whole pipeline that replaces the standard one (strategy, accumulation, clipping, precision included); {ranks}: how many
    memory_limit     refuse to train when the predicted peak of a rank is above it ("20GiB", or bytes). None: on an accelerator, for a step
                     that does not fit as it is, most of the memory that is free
    tier             where what leaves memory goes when memory_limit asks for it: a folder on a local disk, of this run alone, or
                     "host", the host's memory (which an accelerator always has; on CPUs the limit then counts the rest), where
                     optimizer steps may be made as well
    tier_bandwidth   bytes per second that go to the tier, and that come from it, at most ("500MB"); None: as the disk does
    arena            what comes and goes in a step lies in one arena, planned ahead; False: torch's allocator for each tensor
    device_graphs    accelerators: micro-batches of a program that has settled are captured once and then given to the device whole, which
                     costs the host no time an op: "auto" where that can be (stats()["graphs"] says why not; on several CUDA devices
                     it was never tried, and is not), True (an error where it cannot), False. With the bits of ops that are given one by one
    kernels          on CPUs: "auto", the fastest that is known: attention by one of our own, which computes no block of scores that no row
                     looks at (half the work below a diagonal), has tiles in bfloat16 where the processor has products for them, and
                     keeps no scores where it drops some (`dropout_p`; where the mesh has an axis tp it is taken apart as torch does),
                     also where a model writes it out (`softmax(q @ k.mT + mask) @ v` in its many forms), on accelerators too;
                     on AMD's processors with AVX-512 large products in float32 by oneDNN, not MKL; "torch", PyTorch's own, with its bits
    regions          CPUs and CUDA: groups of elementwise ops, norms and softmax run as one kernel each, compiled once and kept in the
                     cache (docs/regions.md): "on", "exact" (CPUs: only those with the bits of their ops, compared when they are made),
                     "off"; "auto": on for CUDA devices that kernels can be made for, but not with debug or deterministic, off on CPUs
    regions_wait     wait for regions that have to be compiled; False: steps run their ops meanwhile, and the kernels are swapped in between
                     two steps when all ranks have them. With "on" that step's number, and so the bits, depend on how fast they are compiled
    dump_ir          a folder that gets the program before and after every pass
    skip_nonfinite   leave out the update when the gradient is not finite, instead of an error
    verify_steps     after so many steps one is made twice from the same state and compared bit for bit, which finds processors and memory
                     that go wrong without saying so; that step takes more than twice as long, and its copy of the states lies in a file in
                     the tier or TMPDIR; 0: never
    deterministic    torch.use_deterministic_algorithms while a step runs
    weights          a safetensors file, a sharded index or a folder with either, read instead of initializing
    schedule         [(step, [passes])]: passes that shape the program from a step of this start on (docs/loop.md); "auto": the search
                     decides once times are measured, and from the start where memory is limited; []: the standard program stays
    profile          times that passes decide by: "auto" measures them in the first steps, "off", or a profile's file
    cluster          the machines that passes decide for: a preset or a file; None: this host's CPUs (local-N)
    shapes           {input: [sizes, ...]}: the shapes of a micro-batch's inputs that vary, each compiled when first met
    pad              {input: value}: what fills a batch that is smaller than its shape; without shapes: lengths as they come, rounded up
                     by an eighth at most
    cache            a folder for compiled programs; None: $INTERLACE_CACHE or ~/.cache/interlace; "off": none is kept
    trust_program    run a checkpoint's program though it was made elsewhere; False: only what was made here, or from the capture just now
    param_dtype      "bfloat16" or "float16": parameters (float32 in the optimizer) are cast to it for forward and backward, and so are
                     the floating inputs of the model's call; they are gathered in it (BatchNorm's stay with its statistics). "autocast": the
                     loss function runs under torch.autocast (its own region, or one around all of it); parameters used in its dtype alone
                     are gathered in it
    reduce_dtype     "bfloat16", "float16" or "float32": gradients are reduced in it; None: in param_dtype, as in FSDP2
    loss_scale       a number that the loss is multiplied by for backward, or "dynamic" (for float16): it starts at 65536, is halved
                     when the gradient is not finite (that step changes nothing), doubled after 2000 steps that are
    output_dtype     "bfloat16", "float16" or "float32": floating results of the model's call are cast to it; None: as they come
    """

    strategy: str = "auto"
    mesh: Any = None
    tensor: str = "auto"
    sequence_parallel: bool = True
    stages: str | Sequence[str] = "auto"
    stage_order: str = "auto"
    stage_chunks: int = 1
    accumulation: int = 1
    accumulate_mode: str = "auto"
    clip_norm: float | None = None
    seed: int = 0
    timeout_s: float = 60.0
    mode: str = "compiled"
    fullgraph: bool = True
    debug: bool = False
    rng: str = "keyed"
    passes: str | None = None
    memory_limit: int | str | None = None
    tier: str | None = None
    tier_bandwidth: int | str | None = None
    arena: bool = True
    device_graphs: bool | str = "auto"
    kernels: str = "auto"
    regions: str = "auto"
    regions_wait: bool = False
    dump_ir: str | None = None
    skip_nonfinite: bool = False
    verify_steps: int = 0
    deterministic: bool = False
    weights: str | None = None
    schedule: Any = "auto"
    profile: str = "auto"
    cluster: str | None = None
    shapes: Any = None
    pad: Any = None
    cache: str | None = None
    trust_program: bool = False
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    loss_scale: float | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", mesh_form(self.mesh))
        if self.passes is not None and not isinstance(self.passes, str):
            raise ConfigError(f"passes must be a text such as 'canonicalize,shard(ranks={{ranks}}),update', not {self.passes!r}")
        if self.mesh is not None and self.passes is not None:
            raise ConfigError("passes replaces the mesh too: write it there, as in 'canonicalize,mesh(axes=replica:2+dp:2),...'")
        if self.strategy == "auto":  # a stage's micro-batches would each gather its parameters again
            object.__setattr__(self, "strategy", "zero1" if self.stage_ranks > 1 and self.memory_limit is None else "shard")
        self._of_stages("strategy", STRATEGIES)
        self._of_stages("accumulate_mode", ACCUMULATE_MODES)
        self._one_of("mode", ("compiled", "eager"))
        self._one_of("rng", ("keyed", "compat"))
        self._one_of("kernels", ("auto", "torch"))
        self._one_of("regions", ("auto", "off", "on", "exact"))
        self._one_of("stage_order", STAGE_ORDERS)
        self._whole("accumulation", 1)
        self._whole("stage_chunks", 1)
        self._whole("seed", 0)
        self._whole("verify_steps", 0)
        for name in ("fullgraph", "debug", "arena", "skip_nonfinite", "deterministic", "sequence_parallel", "trust_program", "regions_wait"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.device_graphs != "auto" and not isinstance(self.device_graphs, bool):
            raise ConfigError(f"device_graphs must be True, False or 'auto', not {self.device_graphs!r}")
        self._positive("timeout_s")
        if self.clip_norm is not None:
            self._positive("clip_norm")
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", parse_bytes(self.memory_limit))
        if self.tier_bandwidth is not None:
            object.__setattr__(self, "tier_bandwidth", parse_bytes(self.tier_bandwidth))
            if self.tier in (None, "host"):
                raise ConfigError("tier_bandwidth limits the tier: give tier=FOLDER as well")
        self._dtype("param_dtype", (*NARROW, "autocast"))
        self._dtype("reduce_dtype", (*NARROW, "float32"))
        self._dtype("output_dtype", (*NARROW, "float32"))
        if self.loss_scale is not None and self.loss_scale != "dynamic":
            if isinstance(self.loss_scale, str):
                hint = did_you_mean(self.loss_scale, ("dynamic",))
                raise ConfigError(f"loss_scale must be a positive number or 'dynamic', not '{self.loss_scale}'{hint}")
            self._positive("loss_scale")
        if self.mode == "eager" and (self.param_dtype or self.reduce_dtype or self.output_dtype or self.loss_scale):
            raise ConfigError(
                "param_dtype, reduce_dtype, output_dtype and loss_scale need mode='compiled'; the eager mode runs the model as it is"
            )
        if self.mode == "eager" and self.verify_steps:
            raise ConfigError("verify_steps makes compiled steps twice; it needs mode='compiled'")
        for name in ("passes", "dump_ir", "weights", "cluster", "cache", "tier", "tensor", "stages"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, "+".join(value) if name == "stages" else str(value))
        self._tensor_parallel()
        self._stages()
        object.__setattr__(self, "profile", str(self.profile))
        object.__setattr__(self, "schedule", schedule_form(self.schedule))
        shapes, pad = shapes_form(self.shapes, self.pad)
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "pad", pad)
        chosen = self.schedule not in ("auto", ())
        if self.mode == "eager" and (chosen or pad):
            raise ConfigError(f'{"schedule" if chosen else "shapes" if shapes else "pad"} needs mode="compiled"')

    def _tensor_parallel(self) -> None:
        if self.tensor_ranks == 1:
            if self.tensor != "auto":
                raise ConfigError(f"tensor={self.tensor!r} needs an axis tp in the mesh, for example mesh={{'dp': 2, 'tp': 2}}")
            return
        if self.mode == "eager":
            raise ConfigError(
                "axis tp of the mesh needs mode='compiled': the eager mode runs the model's own Python, which works on whole parameters; "
                "leave tp out of the mesh to look at the model"
            )
        if self.rng == "compat":
            raise ConfigError("axis tp of the mesh needs rng='keyed': each rank's own generator would give each rank another dropout mask")

    def _stages(self) -> None:
        if self.stage_ranks == 1:
            for name, plain in (("stages", "auto"), ("stage_order", "auto"), ("stage_chunks", 1)):
                if getattr(self, name) != plain:
                    raise ConfigError(f"{name}={getattr(self, name)!r} needs an axis pp in the mesh, for example mesh={{'pp': 2, 'dp': 2}}")
            return
        if self.mode == "eager":
            raise ConfigError("axis pp of the mesh needs mode='compiled': the eager mode runs the model's own Python, which has no stages")
        if self.rng == "compat":
            raise ConfigError("axis pp of the mesh needs rng='keyed': one generator in program order knows no stages")
        if self.stage_chunks > 1 and self.stage_order not in ("interleaved", "gpipe"):
            raise ConfigError(f'stage_chunks={self.stage_chunks} needs stage_order="interleaved" (or "gpipe"), not "{self.stage_order}"')
        if self.stage_order == "v" and self.stage_meshes:
            raise ConfigError('stage_order="v" gives each rank two stages, which needs stages with as many ranks each; use "auto"')
        if self.stage_order == "interleaved" and self.accumulation % self.stage_ranks:
            raise ConfigError(
                f'stage_order="interleaved" runs micro-batches in groups of {self.stage_ranks}, and accumulation={self.accumulation} is '
                f"no multiple; write accumulation={-(-self.accumulation // self.stage_ranks) * self.stage_ranks}"
            )
        if self.stage_meshes and self.pad:
            raise ConfigError("shapes and pad need stages with as many ranks each: a shape's program is made for one size of micro-batches")
        if self.debug:
            raise ConfigError("debug runs a step op by op on all ranks, which stages of a pipeline are not; leave axis pp out for that")

    @property
    def few_micro_batches(self) -> str:
        """What it costs that stages have less than a micro-batch each; empty: they have one."""
        stages, given = self.stage_ranks, self.accumulation
        if stages <= given or self.passes is not None:
            return ""
        idle = [(stages - 1) / (n + stages - 1) for n in (given, 4 * stages)]  # of a step, in which one after the other fills and drains
        return (
            f"accumulation={given} gives fewer micro-batches than the {stages} stages of the pipeline: each stage stands still for about "
            f"{100 * idle[0]:.0f} % of a step, with accumulation={4 * stages} for about {100 * idle[1]:.0f} %"
        )

    @property
    def axes(self) -> Mesh | None:
        """The mesh, or where passes replaces it the one that is declared there; None: all ranks on dp."""
        found = re.search(r"\bmesh\(axes=([\w:+]+)\)", self.passes or "")
        if found is None:
            return self.mesh
        named = [entry.partition(":") for entry in found[1].split("+")]
        return tuple((name, int(size)) for name, _, size in named if size.isdecimal())

    @property
    def tensor_ranks(self) -> int:
        """Ranks along axis tp, of stages that differ the most."""
        size = dict(self.axes or ()).get("tp", 1)
        return max(size) if isinstance(size, tuple) else size

    def strategy_of(self, stage: int) -> tuple[str, str]:
        """Strategy and accumulate_mode of a stage's standard program, before a search: stages, which have few parameters and many
        micro-batches, reduce once."""
        strategy, mode = (parts[min(stage, len(parts) - 1)] for parts in (self.strategy.split("+"), self.accumulate_mode.split("+")))
        return strategy, mode if mode != "auto" else "reduce_last" if self.stage_ranks > 1 else "reduce_each"

    @property
    def stage_ranks(self) -> int:
        """Ranks along axis pp."""
        return dict(self.axes or ()).get("pp", 1)

    def data_place(self, rank: int, ranks: int) -> tuple[int, int]:
        """Which of how many different batches a rank of so many gets: (rank, ranks), but ranks along axes tp and pp get the same.

            sampler = DistributedSampler(data, *reversed(config.data_place(rank, ranks)))
        """
        return data_place(self.axes, rank, ranks)

    @property
    def stage_meshes(self) -> list[dict[str, int]]:
        """Of stages that differ in their ranks, the axes of each, without pp; else none."""
        return stage_meshes(self.axes)

    @property
    def one_attention(self) -> bool:
        """Whether attention with dropout is one operator on CPUs. Ranks of tp would drop alike in unlike heads."""
        axes = [dict(self.axes or ()), *self.stage_meshes]
        return self.kernels == "auto" and self.rng == "keyed" and all(each.get("tp", 1) == 1 for each in axes)

    def stage_of(self, rank: int, ranks: int) -> int:
        """The stage that a rank of so many runs; 0 without axis pp."""
        if self.stage_meshes and self.axes is not None:
            return place_in_stages(self.axes, rank)[0]
        for name, size in self.axes or ():
            ranks //= size
            if name == "pp":
                return rank // max(ranks, 1) % int(size)
        return 0

    def where(self, rank: int, ranks: int) -> str:
        """A rank's place on the mesh, in words: "stage 1 of pp, dp 0"; "" where all ranks are on one axis."""
        each, axes = self.stage_meshes, dict(self.axes or ())
        if len(axes) < 2:
            return ""
        if each:
            stage, first = place_in_stages(tuple(axes.items()), rank)
            rank, axes = rank - first, each[stage]
        else:
            stage = self.stage_of(rank, ranks)
        found = [f"stage {stage} of pp"] if self.stage_ranks > 1 else []
        for name, size in reversed(axes.items()):
            if name != "pp":
                found.insert(1 if self.stage_ranks > 1 else 0, f"{name} {rank % size}")
            rank //= size
        return ", ".join(found)

    def deal(self, batch: Any, rank: int, ranks: int, micro_batches: int | None = None) -> Any:
        """A rank's part of a step's whole batch, tensors of which dimension 0 are samples: of each micro-batch the rows of its place among
        the data ranks of its stage. So each stage has the same rows in the same micro-batch, however many ranks it has. `micro_batches`:
        other than accumulation; of a batch that is evaluated, 1. Error: rows that cannot be dealt out.
        """
        return dealt(batch, micro_batches or self.accumulation, *self.data_place(rank, ranks))

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else int(self.memory_limit)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Config:
        """A Config from names and values. Error: an unknown name (did you mean), a wrong value."""
        known = [f.name for f in dataclasses.fields(Config)]
        for name in values:
            if name not in known:
                raise ConfigError(f"unknown setting '{name}'{did_you_mean(str(name), known)} (settings: {', '.join(known)})")
        return Config(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def pipeline(self, ranks: int, momentum: bool = True) -> str:
        """The pass pipeline of this configuration for so many ranks."""
        if self.passes is not None:
            return self.passes.replace("{ranks}", str(ranks))
        from interlace import _core

        mesh = list(self.mesh) if self.mesh is not None else [("dp", ranks)]
        if mesh_ranks(tuple(mesh)) != ranks:
            raise ConfigError(
                f"mesh {mesh_text(tuple(mesh))} is for {mesh_ranks(tuple(mesh))} ranks, but the run has {ranks}; "
                "write a mesh of as many, or start as many"
            )
        unlike = self.stage_meshes
        if unlike:  # of the first stage: config/schedule.py, for_stage
            mesh = [("pp", ranks), *unlike[0].items()]
        strategy, accumulate_mode = self.strategy_of(0)
        param = "auto" if self.param_dtype == "autocast" else NARROW.get(self.param_dtype or "", "none")
        wanted = self.reduce_dtype or (self.param_dtype if self.param_dtype in NARROW else None)
        standard = str(
            _core.standard_pipeline(
                strategy=strategy, mesh=mesh, tensor_axis="tp" if "tp" in dict(mesh) else "",
                tensor_plan="auto" if self.tensor == "auto" else "model", sequence=self.sequence_parallel,
                stage_axis="pp" if self.stage_ranks > 1 else "", stages_at=self.stages, stage_order=self.stage_order,
                stage_chunks=self.stage_chunks, stage_ranks=[math.prod(axes.values()) for axes in unlike],
                stage_data=[axes["dp"] for axes in unlike], accumulation=self.accumulation, accumulate_mode=accumulate_mode, param=param,
                reduce="none" if wanted is None else NARROW.get(wanted, "f32"), clip=self.clip_norm,
                norm=self.skip_nonfinite and self.clip_norm is None, momentum=momentum,
            )
        )  # fmt: skip
        if self.regions in ("off", "auto"):  # a run has settled it before
            return standard
        # Behind what looks at single casts and products, before the strategy: all strategies have the same regions.
        # What is kept for backward parts is chosen before `pipeline` makes phases of them.
        return re.sub(r",(?=pipeline\()", ",rematerialize,", re.sub(rf"(^|,)(?=({'|'.join(STRATEGIES)})\()", r"\1fuse,", standard))

    def _dtype(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is None:
            return
        value = dtype_name(value)
        object.__setattr__(self, name, value)
        self._one_of(name, choices)

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            options = ", ".join(f"'{c}'" for c in choices)
            raise ConfigError(f"{name} must be one of {options}, not {value!r}{did_you_mean(str(value), choices)}")

    def _of_stages(self, name: str, choices: tuple[str, ...]) -> None:
        """One value, or with axis pp one for each stage, joined by +."""
        value, stages = getattr(self, name), self.stage_ranks
        if not isinstance(value, str) or "+" not in value:
            return self._one_of(name, choices)
        parts = value.split("+")
        wrong = next((part for part in parts if part not in choices), None)
        if wrong is not None or len(parts) != stages:
            options = ", ".join(f"'{c}'" for c in choices)
            raise ConfigError(
                f"{name}={value!r}: " + (f"'{wrong}' is not one of {options}{did_you_mean(wrong, choices)}" if wrong is not None else
                f"of {len(parts)} stages, but axis pp has {stages}" + ("" if stages > 1 else "; write one value"))
            )

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or not math.isfinite(value):
            raise ConfigError(f"{name} must be a positive number, not {value!r}")
        object.__setattr__(self, name, float(value))
