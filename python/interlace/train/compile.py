"""interlace.compile: from a model, an optimizer and a loss function to a Trainer, the same on every rank.

every rank: checks its own arguments → tells the others what it has → compares           (nobody waits for a rank that is wrong)
rank 0:     captures, runs the passes → text                                              → broadcast, digests compared
every rank: builds the executor → fills the units from the model, unit by unit → Trainer
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from interlace.capture import InputSpec, OpaqueTable
from interlace.capture.groups import optimizer_groups
from interlace.capture.inputs import Path, no_input, with_numbers
from interlace.capture.model_tensors import check_parameters, collect, count_as_buffers
from interlace.capture.pilot import as_scalars
from interlace.capture.program import default_loss
from interlace.capture.several import Several, members_of, name_of, runs_itself
from interlace.capture.tensor_plan import read_plan
from interlace.checkpoint.weights import Weights, find_name
from interlace.compiling.captures import Captures, in_python
from interlace.compiling.planner import Planner
from interlace.compiling.programs import Built, ProgramError, Programs, Source
from interlace.compiling.regions import settled
from interlace.compiling.states import WEIGHT, States
from interlace.config import Config, ConfigError, format_bytes
from interlace.config.schedule import check_passes, default_schedule, stage_at
from interlace.cost.machine import beside_bytes, room_of
from interlace.dist.groups import check_streams, default_device, device_name
from interlace.dist.peers import PeerError, Peers, first_difference, ranks_text
from interlace.errors import CaptureError, InterlaceError
from interlace.train import batch as batches
from interlace.train.agreement import agree_on_batch, agree_on_values, captured_alike
from interlace.train.eager import EagerRunner, eager_text
from interlace.train.hyper import Hyper, uses_momentum
from interlace.train.laid_by import states_of
from interlace.train.materialize import adopt, checksum, initialize, release
from interlace.train.own_steps import let_run
from interlace.train.run import Run, Tensors
from interlace.train.shapes import Shapes, check_shapes_of
from interlace.train.trainer import Trainer

Tensor = torch.Tensor
log = logging.getLogger("interlace")


def compile(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[nn.Module, Any], Any] | None = None, example_batch: Any = None, config: Config | None = None,
) -> Trainer:  # fmt: skip
    """Compiles the training step of `model` for the ranks that torchrun (or torch.distributed) says there are.

    `loss_fn(model, batch)` gives the loss; None means model(**batch).loss. `example_batch` has the shapes of the batches to come: what
    one step gets on this rank. `optimizer` is any whose step is elementwise, torch.optim's or a class of yours, or torch.optim.Muon or
    Adafactor, or a list of optimizers that share the parameters out; hyper-parameters are read anew each step, so schedulers work.
    Afterwards the parameters live in the trainer: where every rank holds them whole, the model's parameters are views of them; else
    they become meta tensors. Raises InterlaceError with what is wrong and what to do.
    """
    config = config or Config()
    if not isinstance(config, Config):
        raise ConfigError(f"config must be an interlace.Config, not {type(config).__name__}; use Config.from_dict for a dict")
    if not isinstance(model, nn.Module):
        raise InterlaceError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(optimizer, (list, tuple)) and optimizer and all(isinstance(o, torch.optim.Optimizer) for o in optimizer):
        optimizer = Several(optimizer) if len(optimizer) > 1 else optimizer[0]
    if not isinstance(optimizer, torch.optim.Optimizer):
        swapped = isinstance(loss_fn, torch.optim.Optimizer) and callable(optimizer)
        raise InterlaceError(
            f"optimizer must be a torch.optim optimizer, or a list of them, not {type(optimizer).__name__}"
            + ("; it comes before the loss function: interlace.compile(model, optimizer, loss_fn, example_batch)" if swapped else "")
        )
    let_run(optimizer, config)
    if example_batch is None:
        raise InterlaceError("example_batch is missing: pass a batch such as the training loop will give to trainer.step")
    first = next((p for p in model.parameters() if not p.is_meta), None)
    device = first.device if first is not None else default_device()
    check_streams(device)
    peers = Peers(device, config.timeout_s)
    peers.locate = lambda rank: config.where(rank, peers.size)
    if peers.rank == 0 and config.few_micro_batches:
        log.warning("%s", config.few_micro_batches)
    try:
        with peers.guard():
            begin = time.monotonic()
            trainer = _Build(model, optimizer, loss_fn, example_batch, settled(config, peers), peers).trainer()
            trainer.compile_seconds["total"] = time.monotonic() - begin
            log.info("compiled: %s", trainer.compile_table())
            return trainer
    except BaseException:
        peers.close()
        raise


class _Build:
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[[nn.Module, Any], Any] | None,
        example_batch: Any, config: Config, peers: Peers,
    ) -> None:  # fmt: skip
        self.decides, given = config.schedule == "auto", config
        if self.decides:
            config = dataclasses.replace(config, schedule=default_schedule(config, peers.size, peers.device.type))
        self.model, self.optimizer, self.loss_fn, self.given, self.config, self.peers = model, optimizer, loss_fn, given, config, peers
        self.differ = dict[Path, torch.dtype]()
        self.unfit = ""  # why no program takes this rank's batch
        self.tensors = collect(model)
        check_parameters(self.tensors)
        optimizer_groups(optimizer, self.tensors)
        self.names = {id(t.real): t.name for t in self.tensors}
        self.frozen_states: dict[str, tuple[Tensor, dict[str, Any]]] = {}  # of an optimizer that has made steps
        self.programs = Programs(config, peers)
        self.programs.opaque = OpaqueTable(model, loss_fn=loss_fn or default_loss, compat=config.rng == "compat")
        self.captures = Captures(model, loss_fn, optimizer, self.programs)
        try:
            self.parts = batches.micro_batches(None, example_batch, config.accumulation)
            self.spec = InputSpec.of(self.parts[0])
            check_shapes_of(self.spec, config)
        except InterlaceError as e:
            if isinstance(e, ConfigError) or not self.captures.may_run_whole:
                raise
            listed = type(example_batch) is list and config.accumulation == 1
            self.unfit = f"the batch is a list of {len(example_batch)} that are no tensors" if listed else in_python(e)
            self.parts, self.spec = batches.any_micro_batches(None, example_batch, config.accumulation), InputSpec((), ())
        self.micro_batch, self.listed = self.parts[0], self.parts[0] is example_batch and type(example_batch) is list
        self.planner = Planner(config, self.programs, config.pipeline(peers.size, uses_momentum(optimizer)))

    def trainer(self) -> Trainer:
        self._check_schedule()
        self._compare_ranks()
        self._agree_on_values()
        self.peers.groups.open()
        shapes = self._open_shapes()
        share = lambda: self._source("program")  # noqa: E731
        any_batch = bool(self.captures.any_batch)
        source = share() if any_batch else captured_alike(share, self.micro_batch, self.peers, self.captures)
        source = self._within_device(source)
        built = self._built(source)
        self.captures.grows = False
        for t in self.tensors:
            if t.kind != "param" and t.name in source.constants:  # which has another size there
                t.real.data = source.constants[t.name].to(t.real.device)
        self._name_buffers(built)
        self._fill_parameters(built.states)
        buffers = self._fill_buffers(built)
        runner: Any = built.executor
        if self.config.mode == "eager":
            adopt(self.tensors, built.states, buffers)
            runner = self._eager_runner(built)
            used = self._used(runner)
            if used is not None:
                built = self._rebuild(used, built.states, buffers)
                buffers = self._fill_buffers(built)
                runner = self._eager_runner(built)
        hyper = Hyper(self.optimizer, built.ir)
        behind = hyper.import_steps()
        if behind is not None:
            self._import_optimizer(built.states)
        adopt(self.tensors, built.states, buffers)
        kinds = {id(t.real): t.kind for t in self.tensors}
        entries = [
            (name, self.names[id(t)], kinds[id(t)] == "param")
            for name, t in self.model.state_dict(keep_vars=True).items()
            if isinstance(t, Tensor) and id(t) in self.names
        ]
        kept = {name for _, name, _ in entries}
        tensors = Tensors(entries, {n: t for n, t in buffers.items() if n in kept}, getattr(self.model, "base_model_prefix", None))
        run = Run(
            model=self.model, optimizer=self.optimizer, config=self.config, peers=self.peers, programs=self.programs, built=built,
            spec=self.spec, runner=runner, tensors=tensors, hyper=hyper, shapes=shapes,
        )  # fmt: skip
        run.listed = self.listed
        run.left_out = {self.names[p]: n for p, n in (behind or {}).items()}
        self._lay_by(run)
        return Trainer(run, self.captures, self.planner)

    # ---- the same on every rank ----

    def _compare_ranks(self) -> None:
        groups = [[self.names.get(id(p), "?") for p in g["params"]] for g in self.optimizer.param_groups]
        varying = {t.name: f"{t.dtype} of {len(t.shape)} dimensions" for t in self.spec.tensors if t.name in dict(self.config.pad or ())}
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("dump_ir", "cache")}
        rows = self.config.data_place(self.peers.rank, self.peers.size)[1] if self.config.stage_meshes else 1
        compiled = self.config.mode == "compiled"
        mine = {
            "setting": {k: repr(v) for k, v in config.items()},
            "device": {"kind": self.peers.device.type},
            "batch entry": {n: varying.get(n, d) for n, d in batches.describe(self.spec, rows).items() if compiled},
            "parameter": {
                t.name: f"{str(t.real.dtype).removeprefix('torch.')}{list(t.real.shape)}{'' if t.real.requires_grad else ' frozen'}"
                for t in self.tensors if t.kind == "param"
            },
            "optimizer": {"class": name_of(self.optimizer), "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:12]},
        }  # fmt: skip
        everyone = self.peers.exchange("compile", mine | {"name": device_name(self.peers.device), "unfit": self.unfit})
        names, unfit = ([other.pop(key) for other in everyone] for key in ("name", "unfit"))
        if shared := [r for r, name in enumerate(names) if name and names.count(name) > 1]:
            same = [r for r in shared if names[r] == names[shared[0]]]
            raise PeerError(
                f"{ranks_text(same)} have one device, {self.peers.device.type} {names[same[0]]}; start no more ranks on a host than it has "
                f"devices (rank {self.peers.rank} sees {torch.accelerator.device_count()}), each with its own, by LOCAL_RANK or model.to"
            )
        if self.captures.may_run_whole:
            apart = first_difference([other["batch entry"] for other in everyone])
            if apart is not None or any(unfit):
                other, name, theirs, ours = apart or ([], "", "", "")
                said = f"batch entry '{name}' is {theirs} on {ranks_text(other)} and {ours} on rank 0" if other else ""
                self._take_any(next((why for why in unfit if why), said))
                mine.pop("batch entry")
        for kind in mine:
            found = first_difference([other[kind] for other in everyone])
            if found is None:
                continue
            differing, name, theirs, ours = found
            advice = ' (fullgraph=False or mode="eager" takes other batches on each rank)' if kind == "batch entry" else ""
            raise PeerError(
                f"{ranks_text(differing)} {'differ' if len(differing) > 1 else 'differs'} from rank 0: {kind} '{name}' is "
                f"{theirs} there and {ours} on rank 0; every rank must compile the same{advice}",
                differing[0],
            )

    def _take_any(self, why: str) -> None:
        """The first program takes any batch."""
        self.spec, self.captures.any_batch = InputSpec((), ()), why
        if self.config.pad:
            raise ConfigError(f"Config(pad, shapes) is for batches that a program takes, and these are none: {why}")
        log.warning("all of the model and its loss runs in Python, as Config(fullgraph=False) has it: %s", why)

    def _agree_on_values(self) -> None:
        """What is no tensor, in the batch and around the model, may differ between ranks where that is an input of the program or nobody
        reads it. Error: elsewhere."""
        if self.peers.size == 1 or self.config.mode == "eager" or self.captures.any_batch:
            return
        self.differ, free = agree_on_batch(self.spec, self.micro_batch, self.peers, self.captures)
        self.parts = [with_numbers(part, self.differ) for part in self.parts]
        self.micro_batch = self.parts[0]
        self.spec = dataclasses.replace(InputSpec.of(self.micro_batch), free=free)
        agree_on_values(self.micro_batch, self.peers, self.captures)

    def _within_device(self, source: Source) -> Source:
        """The program that fits into the memory that the devices have: this one, or where it does not and nobody has said how much it may
        take, the one that the search finds for what they have."""
        device = self.peers.device
        if device.type == "cpu" or not self.decides or self.given.memory_limit is not None:
            return source
        # The model's own parameters go when the program's states have their values.
        given = sum(t.real.nbytes for t in self.tensors if t.kind == "param" and t.real.device == device)
        mine = [self.programs.needed_bytes(self.programs.parse(source)), room_of(device) - given]
        everyone = self.peers.exchange("memory of devices", mine)
        need, room = max(n for n, _ in everyone), min(r for _, r in everyone)
        if need <= room - beside_bytes(device, room) or room <= 0:
            return source
        limited = dataclasses.replace(self.given, memory_limit=room)
        schedule = default_schedule(limited, self.peers.size, device.type)
        if not schedule:
            return source
        log.info(
            "the step as it is takes %s and the device has %s: the search recomputes and moves out what does not fit",
            format_bytes(need), format_bytes(room),
        )  # fmt: skip
        self.config = self.programs.config = self.planner.config = dataclasses.replace(limited, schedule=schedule)
        return self._source("program within the device")

    def _source(self, what: str, used: list[str] | None = None) -> Source:
        """Rank 0's program on every rank."""

        def make() -> Source:
            captured, constants = self._capture(used)
            try:
                return self._made(captured, constants)
            except ProgramError as e:
                if self.config.stage_ranks == 1 or self.config.stage_order != "auto" or self.programs.room is None:
                    raise
                log.info("stage_order: what auto finds is refused (%s); 1f1b holds the fewest activations", e)
                narrow = dataclasses.replace(self.config, stage_order="1f1b")
                self.planner.standard = narrow.pipeline(self.peers.size, uses_momentum(self.optimizer))
                return self._made(captured, constants)

        return self.programs.share(what, make)

    def _made(self, captured: str, constants: dict[str, Any]) -> Source:
        """What the planner makes of a captured text, with borders and cuts that are settled."""
        unlike = bool(self.config.stage_meshes)
        if unlike:  # borders are settled on the whole program
            self.planner.settle_stages(captured)
        if self.config.tensor_ranks > 1:
            captured = self.planner.settle_cuts(captured, self._given_cuts())
        if not unlike:
            self.planner.settle_stages(captured)
        stage = stage_at(self.config.schedule, 0)
        source = self.planner.source(captured, self.config.schedule[stage][1] if stage >= 0 else (), constants)
        self.planner.rehearse(captured, self.config.schedule[stage + 1 :], source)
        return source

    def _given_cuts(self) -> str | None:
        """Those of a plan file, if there is one."""
        if self.config.tensor in ("auto", "model"):
            return None
        parameters = [t for t in self.tensors if t.kind == "param"]
        tied = {alias: t.name for t in parameters for alias in t.aliases}
        return read_plan(self.config.tensor, {t.name: tuple(t.real.shape) for t in parameters}, tied)

    def _capture(self, used: list[str] | None) -> tuple[str, dict[str, Tensor]]:
        if self.config.mode == "eager":
            return eager_text(self.model, self.tensors, self.optimizer, used), {}
        try:
            return self.captures.training_text(self.micro_batch)
        except CaptureError as e:
            if self.differ:
                raise InterlaceError(no_input(next(iter(self.differ)), e)) from e
            raise

    def _open_shapes(self) -> Shapes | None:
        """With several shapes, the example batch stands for the one that holds it."""
        if not self.config.pad:
            return None
        shapes = Shapes(self.config, self.peers, self.captures, self.planner, self.parts)
        self.micro_batch = shapes.filled(self.parts, shapes.current)[0]
        shapes.current.spec = self.spec = InputSpec.of(self.micro_batch)
        shapes.current.stage = stage_at(self.config.schedule, 0)
        return shapes

    def _check_schedule(self) -> None:
        if self.config.schedule or self.config.passes is not None:
            from interlace import _core

            check_passes(self.config, _core.pass_table())
            if self.peers.rank == 0 and any("{cluster}" in text for _, passes in self.config.schedule for text in passes):
                _core.cluster_devices(self.planner.cluster_text(), self.config.cluster or "cluster")

    def _built(self, source: Source) -> Built:
        self.programs.compare_digests(source)
        return self.programs.build(source)

    def _name_buffers(self, built: Built) -> None:
        """Frozen parameters that the model writes are buffers of the program, on every rank."""
        buffers = {b["name"] for b in built.ir.buffers()}
        written = [t for t in self.tensors if t.kind == "param" and t.name in buffers]
        for t in written:
            t.kind = "buffer"
        count_as_buffers(self.model, [t.name for t in written])

    # ---- values ----

    def _fill_parameters(self, states: States) -> None:
        self._agree_on_tensors()
        weights = Weights(self.config.weights) if self.config.weights else None
        prefix = getattr(self.model, "base_model_prefix", None)
        missing: set[str] = set()
        for t in self.tensors:
            if t.kind != "param":
                continue
            if t.name not in states.parameters:  # another stage's
                release(t.real)
                continue
            file = find_name(weights, [t.name, *t.aliases], prefix) if weights else None
            if file is not None and weights is not None:
                shape = tuple(weights.shape(file))
                if shape != tuple(t.real.shape):
                    raise InterlaceError(f"{weights.source}: '{file}' has shape {shape}, the model's has {tuple(t.real.shape)}")
                states.fill(t.name, WEIGHT, partial(weights.read_range, file))
            elif t.real.is_meta:
                missing.add(t.name)
            elif weights is not None:
                raise InterlaceError(f"{weights.source} has no '{t.name}'; was it saved from another model?")
            else:
                states.fill_from(t.name, WEIGHT, t.real)
            if self.config.mode == "compiled" and states.resident(t.name) is None:
                release(t.real)
        if weights is not None and missing:
            raise InterlaceError(f"{weights.source} has no '{sorted(missing)[0]}'; was it saved from another model?")
        if weights is not None:
            weights.close()
        initialize(self.model, missing, self.config.seed, lambda name, value: states.fill_from(name, WEIGHT, value))

    def _agree_on_tensors(self) -> None:
        """As in DDP, rank 0's parameters and buffers count; nothing is sent where all ranks have the same bits already."""
        if self.peers.size == 1:
            return
        real = [t.real for t in self.tensors if t.kind != "plain" and not t.real.is_meta]
        digests = self.peers.exchange("values", hashlib.sha256(b"".join(checksum(t) for t in real)).hexdigest())
        if len(set(digests)) > 1:
            for t in real:
                value = t.detach().contiguous()
                self.peers.groups.broadcast(value)
                t.data.copy_(value)

    def _fill_buffers(self, built: Built) -> dict[str, Tensor]:
        """The executor's storage of every buffer, with the model's values in it."""
        storages = {b["name"]: built.executor.tensor(b["value"]) for b in built.ir.buffers()}
        by_name = {t.name: t for t in self.tensors}
        meta: set[str] = set()
        weights = Weights(self.config.weights) if self.config.weights else None
        for name, storage in storages.items():
            known = by_name.get(name)
            if known is None:
                storage.copy_(built.source.constants[name])
            elif weights is not None and known.persistent and name in weights:
                storage.copy_(weights.read(name))
            elif known.real.is_meta:
                meta.add(name)
            else:
                storage.copy_(known.real)
        initialize(self.model, meta, self.config.seed, lambda name, value: storages[name].copy_(value))
        return storages

    def _import_optimizer(self, states: States) -> None:
        """The moments of an optimizer that has already made steps; its own copies are dropped."""
        others = [m for m in members_of(self.optimizer) if not runs_itself(m)]
        for p, state in ((p, state) for member in others for p, state in member.state.items()):
            name = self.names[id(p)]
            if not p.requires_grad:  # Run has them
                self.frozen_states[name] = p, state
                continue
            for role, value in state.items():
                if role == "step" or not isinstance(value, Tensor) or (value.dim() == 0 and p.dim() > 0):
                    continue
                if name not in states.parameters:
                    continue
                if role not in states.roles_of(name):
                    raise InterlaceError(
                        f"the optimizer has a state '{role}' of parameter '{name}', which the program does not update; start with a "
                        "fresh optimizer, or make the model use that parameter"
                    )
                states.fill_from(name, role, value)
        for member in others:
            member.state.clear()

    def _lay_by(self, run: Run) -> None:
        """States of frozen parameters of an optimizer that has already made steps."""
        for i, group in enumerate(self.optimizer.param_groups):
            for name in (self.names[id(p)] for p in group["params"] if self.names[id(p)] in self.frozen_states):
                parameter, entry = self.frozen_states[name]
                states = states_of(entry, parameter, run.state_names(i))
                if states and (made := int(entry.get("step", 1))) > 0:
                    scalars = as_scalars({k: v for k, v in entry.items() if k not in states})
                    run.laid_by[name] = run.hyper.laid_by(i, made, scalars, list(states))
                    for role, t in states.items():
                        run.laid_by[name].put_whole(run, role, t)

    # ---- eager mode ----

    def _eager_runner(self, built: Built) -> EagerRunner:
        inputs = [i["name"] for i in built.ir.inputs()]
        seed, rng = self.config.seed, self.config.rng
        return EagerRunner(self.model, self.loss_fn, built.executor, built.states, self.peers, inputs, seed, rng)

    def _used(self, runner: EagerRunner) -> list[str] | None:
        """The parameters with a gradient, when some trainable ones have none on any rank."""
        mine = runner.used_parameters(self.micro_batch)
        anyone = set().union(*self.peers.exchange("used parameters", mine))
        used = [name for name in runner.gradients if name in anyone]
        if not used:
            raise InterlaceError("the loss depends on no trainable parameter")
        return None if len(used) == len(runner.gradients) else used

    def _rebuild(self, used: list[str], old: States, buffers: dict[str, Tensor]) -> Built:
        """The program without the parameters that get no gradient: like torch.optim, it must leave them as they are."""
        for t in self.tensors:
            if t.name in buffers and t.kind == "buffer":
                t.real.data = buffers[t.name].clone()
        built = self._built(self._source("program of the used parameters", used))
        for p, value in old.whole(WEIGHT, everywhere=True):
            assert value is not None
            built.states.fill_from(p.name, WEIGHT, value)
        return built
