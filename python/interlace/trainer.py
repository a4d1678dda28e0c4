"""Trainer: what interlace.compile gives back. One call of step() is one optimizer step on this rank's batch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from interlace import batch as batches
from interlace.capture.inputs import InputSpec
from interlace.captures import Captures
from interlace.checkpoint import (
    FORMAT,
    MODEL,
    OPTIMIZER,
    TRAINER,
    CheckpointError,
    SafetensorsWriter,
    Staging,
    check_shapes,
    read_trainer_file,
    saving,
)  # fmt: skip
from interlace.config import Config
from interlace.distributed import PeerError, Peers
from interlace.errors import InterlaceError
from interlace.hyper import STATE_NAMES, Hyper, kind_of
from interlace.loop import Loop
from interlace.loss_scale import LossScale
from interlace.materialize import Weights, find_name
from interlace.planning import Planner
from interlace.programs import Built, Source
from interlace.refreeze import Frozen
from interlace.shapes import Shapes
from interlace.states import WEIGHT, Parameter
from interlace.step_trace import TraceError, check_writable, write_trace

Tensor = torch.Tensor


class NonFiniteError(InterlaceError):
    """The loss or the gradient of a step is infinite or not a number."""


class Runner(Protocol):
    """What runs the steps: the C++ executor, or the eager runner around it."""

    def step(self, micro_batches: Any, hyper: list[list[float]], step: int) -> dict[str, Any]: ...


@dataclasses.dataclass
class Tensors:
    """The names of a model's tensors: of every entry of state_dict(), the parameter or buffer behind it."""

    entries: list[tuple[str, str, bool]]  # name in state_dict, canonical name, whether it is a parameter
    buffers: dict[str, Tensor]  # canonical name → the executor's storage
    hf_prefix: str | None  # "transformer", "model": what file names may lack

    def places(self, name: str) -> list[str]:
        return [entry for entry, canonical, _ in self.entries if canonical == name]


class Trainer:
    """A compiled model in training. Make one with interlace.compile; close it, or use it in a with statement, to free everything.

    Attributes: `config`; `rank`, `world_size`; `steps` made so far; `norm` of the last step's gradient (None when not computed);
    `outputs` of the last step by name, one tensor per micro-batch; `skipped`: whether the last update was left out.
    """

    def __init__(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, peers: Peers, planner: Planner, built: Built,
        spec: InputSpec, runner: Runner, tensors: Tensors, hyper: Hyper, captures: Captures, shapes: Shapes | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.rank, self.world_size = peers.rank, peers.size
        self.steps = 0
        self.norm: float | None = None
        self.outputs: dict[str, list[Tensor]] = {}
        self.skipped = False
        self.swaps = 0
        self.compile_seconds = planner.programs.seconds
        self._model, self._optimizer, self._peers, self._spec = model, optimizer, peers, spec
        self._programs, self._runner, self._tensors, self._hyper = planner.programs, runner, tensors, hyper
        self._shapes = shapes
        self._loss_scale = LossScale(config.loss_scale)
        self._use(built)
        self._frozen = Frozen(captures, planner) if config.mode == "compiled" else None
        self._loop, self._traced = Loop(self, planner), False
        self._closed: str | None = None
        peers.on_close(self._drop)

    # ---- training ----

    def step(self, batch: Any) -> Tensor:
        """One optimizer step; gives the mean loss of this rank's micro-batches (0-dim, on the device).

        `batch` is this rank's part: a structure of tensors that is cut along dimension 0 into Config.accumulation micro-batches, or
        a list of that many. Errors: a batch of another shape or dtype than compiled for, a value that is not finite (the parameters
        then stay as they were when clipping or skip_nonfinite computes the norm), a rank that failed or was lost.
        """
        self._check_open()
        with self._peers.guard():
            inputs = self._inputs(batch)
            if self._frozen is not None:
                self._frozen.follow(self, lambda: self._example(batch))
        self._loop.before_step(self._traced)
        if self._traced:
            self._executor.set_trace("on")  # of the program that this step runs
        with self._peers.guard(), self._determinism():
            self._hyper.before_step()
            hyper = self._hyper.values()
            result = self._runner.step(inputs, hyper, self.steps)
            self._loop.after_step()
        self.norm, self.outputs = result["norm"], result["outputs"]
        losses = self.outputs["loss"]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        self.skipped = self.norm is not None and not math.isfinite(self.norm)
        self._loss_scale.after_step(not self.skipped)
        if self.skipped and (
            self._loss_scale.exhausted or not (self.config.skip_nonfinite or self._loss_scale.dynamic)
        ):
            raise NonFiniteError(self._nonfinite_norm(inputs, result))
        if not self.skipped:
            if not result["finite"] and self.norm is None and not self.config.skip_nonfinite:
                with self._peers.guard():
                    raise NonFiniteError(self._nonfinite_loss(inputs, loss, result))
            self._hyper.advance()
        self._hyper.after_step()
        if self._shapes is not None:
            self._shapes.note_step()
        self.steps += 1
        return loss

    def trace(self, batch: Any, file: str | Path) -> Tensor:
        """A step like step(), recorded: rank 0 writes a Chrome trace with every rank's ops, transfers and memory (docs: traces).

        Opens in Perfetto or chrome://tracing beside a predicted one (`interlace simulate --trace`). Every rank must call it.
        """
        self._check_open()
        if self.config.mode == "eager":
            raise InterlaceError('a trace shows the compiled program; mode="eager" has none: use torch.profiler')
        with self._peers.guard():
            problem = self._peers.exchange("trace file", check_writable(file) if self.rank == 0 else None)[0]
        if problem is not None:
            raise TraceError(problem)
        self._traced = True
        try:
            loss = self.step(batch)
            with self._peers.guard():
                write_trace(self._executor, self._peers, file)
        finally:
            self._traced = False
            if self._executor is not None:  # gone when a rank has failed
                self._executor.set_trace("off")
        return loss

    def _inputs(self, batch: Any) -> Any:
        if self.config.mode == "eager":
            return batches.micro_batches(self._spec, batch, self.config.accumulation)
        if self._shapes is not None:
            parts = self._shapes.switch(self, batch)
            return batches.flatten_parts(self._spec, parts, self._peers.device)
        return batches.flatten(self._spec, batch, self.config.accumulation, self._peers.device)

    def _example(self, batch: Any) -> Any:
        """A micro-batch of a step, as the program takes it."""
        parts = batches.micro_batches(self._spec if self._shapes is None else None, batch, self.config.accumulation)
        return parts[0] if self._shapes is None else self._shapes.filled(parts, self._shapes.current)[0]

    @contextlib.contextmanager
    def _determinism(self) -> Iterator[None]:
        if not self.config.deterministic or torch.are_deterministic_algorithms_enabled():
            yield
            return
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    # ---- another program ----

    def swap(self, text: str = "") -> None:
        """Goes on with another program between two steps: rank 0's text counts. Every rank must call it.

        The program must have the same units and states: the same captured graph and strategy, whatever passes ran besides. Parameters,
        optimizer states, buffers and step counts stay where they are, and are not copied. Errors, with nothing changed: the text is no
        program, it has other units or states, it needs more than memory_limit.
        """
        self._check_open()
        if self.config.mode == "eager":
            raise InterlaceError('a swap changes the compiled program; mode="eager" has none')
        with self._peers.guard():
            source = self._programs.share(
                f"program of a swap at step {self.steps}", lambda: Source(text, [], {}, self._source.captured)
            )
        self._swap(source)

    def _swap(self, source: Source) -> None:
        with self._peers.guard():
            self._programs.compare_digests(source)
        found: list[Built] = []

        def check() -> Callable[[], None]:
            found.append(self._programs.build(source, donor=self._executor))
            return lambda: self._use(found[0])

        self._agree(f"swap {self.swaps} at step {self.steps}", check, InterlaceError)()
        self._runner = self._executor
        self.swaps += 1

    def _use(self, built: Built) -> None:
        self.program, self.passes = built.source.text, built.source.reports
        self._source, self._ir, self._executor, self._states = built.source, built.ir, built.executor, built.states
        self._loss_scale.attach(built.ir, built.executor)
        if self._shapes is not None:
            self._shapes.current.built = built

    def shape_stage(self, new: int | None = None) -> int:
        """The entry of the schedule that the current shape's program was made for; or that it is made for now."""
        if self._shapes is None:
            return self._loop.stage
        if new is not None:
            self._shapes.current.stage = new
        return self._shapes.current.stage

    # ---- looking at what went wrong ----

    def explain_nonfinite(self, batch: Any) -> str | None:
        """Runs the batch op by op without an update and says which op of which module first makes a value that is not finite.

        None when all values are finite. Every rank must call it.
        """
        self._check_open()
        with self._peers.guard():
            return self._find_culprit(self._inputs(batch))

    def inspect(self, batch: Any, stop_at: str = "") -> dict[str, Any]:
        """Runs the batch op by op without an update: `ops` with the range of every floating result, `values` of module `stop_at`."""
        self._check_open()
        if self.config.mode == "eager":
            raise InterlaceError(
                'inspect() looks at the compiled program; in mode="eager" use print and pdb in the model itself'
            )
        with self._peers.guard():
            return self._executor.debug_step(self._inputs(batch), self.steps, stop_at)

    def _find_culprit(self, inputs: Any) -> str | None:
        # Ranks run op by op together or not at all: the ops talk to the other ranks.
        wrong = self._peers.exchange(f"inputs of step {self.steps}", self._nonfinite_inputs(inputs))
        for rank, text in enumerate(wrong):
            if text is not None:
                return str(text) if self.world_size == 1 else f"on rank {rank}, {text}"
        mine: list[object] | None
        if self.config.mode == "eager":
            text = self._runner.find_nonfinite(inputs, self.steps)  # type: ignore[attr-defined]
            mine = None if text is None else [1, text]
        else:
            record = self._executor.debug_step(inputs, self.steps)["first_nonfinite"]
            # What arrives from another rank, or comes from parameters that are bad already, is not the cause.
            carried = record is not None and record["name"].partition(".")[0] in ("gather", "reduce", "all_reduce")
            mine = None if record is None else [2 if carried else 1, describe_op(record)]
        everyone = self._peers.exchange(f"culprit of step {self.steps}", mine)
        found = sorted((order, rank, text) for rank, (order, text) in enumerate(m or (9, "") for m in everyone) if text)
        if found and found[0][0] < 2:
            _, rank, text = found[0]
            return text if self.world_size == 1 else f"on rank {rank}, {text}"
        for p in self._states.parameters.values():
            for part, _, _ in self._states.parts(p, WEIGHT):
                if part.is_floating_point() and not torch.isfinite(part).all():
                    return f"parameter '{p.name}' is not finite already"
        return found[0][2] if found else None

    def _nonfinite_inputs(self, inputs: Any) -> str | None:
        parts = [self._spec.flatten(part) for part in inputs] if self.config.mode == "eager" else inputs
        for i, tensors in enumerate(parts):
            for t, x in zip(self._spec.tensors, tensors, strict=True):
                if x.is_floating_point() and not torch.isfinite(x).all():
                    return f"batch entry '{t.name}' itself has values that are not finite (micro-batch {i})"
        return None

    def _nonfinite_norm(self, inputs: Any, result: Mapping[str, Any]) -> str:
        with self._peers.guard():
            culprit = self._find_culprit(inputs)
        cause = culprit or "every micro-batch alone is finite: the sum of the gradients overflows"
        return (
            f"step {self.steps}: the norm of the gradient is {self.norm}; {cause}. The parameters are as they were before this step; "
            "lower the learning rate, look at this batch, or leave such steps out with skip_nonfinite=True"
        )

    def _nonfinite_loss(self, inputs: Any, loss: Tensor, result: Mapping[str, Any]) -> str:
        record = result.get("nonfinite")
        where = self._nonfinite_inputs(inputs) or (
            describe_op(record) if record else "run again with debug=True to see which op made it"
        )
        return (
            f"step {self.steps}: the loss is {loss.item()}; {where}. The update of this step was made; set clip_norm or "
            "skip_nonfinite to have such a step refused before the update"
        )

    # ---- what there is ----

    def summary(self) -> dict[str, Any]:
        """What the program holds and costs (docs: `interlace inspect`), with `largest_unit` as name and bytes."""
        summary = self._ir.summary()
        names = summary["largest_unit_params"]
        summary["largest_unit"] = {
            "unit": summary["largest_unit"],
            "name": ", ".join(names),
            "bytes": summary["largest_unit_bytes"],
        }
        summary["passes"] = self.passes
        return summary

    def stats(self) -> dict[str, Any]:
        """What the executor has measured so far: ops, bytes sent, live and peak bytes, the op at the peak.

        After a swap the counts of steps and ops, and the peak, are those of the new program; bytes sent go on."""
        self._check_open()
        return {
            **self._executor.stats(),
            "trainer_steps": self.steps,
            "swaps": self.swaps,
            **(self._shapes.stats() if self._shapes else {}),
        }

    def compile_table(self) -> str:
        """Where the time of compiling went, on this rank: "capture 0.02 s (cached), passes 0.01 s, executor 0.05 s, total 0.31 s"."""
        cached = self._programs.cached
        parts = {name: 0.0 for name in cached} | self.compile_seconds
        order = sorted(parts, key=lambda name: name == "total")
        return ", ".join(f"{n} {parts[n]:.2f} s{' (cached)' if n in cached else ''}" for n in order)

    @property
    def plans(self) -> list[dict[str, Any]]:
        """What the schedule did so far, plan by plan: step, reason, passes, seconds, predicted and measured time and peak."""
        return self._loop.plans

    # ---- state dicts ----

    def state_dict(self, all_ranks: bool = False) -> OrderedDict[str, Tensor]:
        """Copies of all parameters and buffers under the names and in the order of model.state_dict(), tied ones under each name.

        On rank 0 (empty elsewhere), or on all ranks. Every rank must call it. Buffers are rank 0's: statistics such as BatchNorm's
        are each rank's own while training, as with local statistics in DDP.
        """
        self._check_open()
        with self._peers.guard():
            values: dict[str, Tensor] = {}
            for p, t in self._states.whole(WEIGHT, everywhere=all_ranks):
                if t is not None and (all_ranks or self.rank == 0):
                    values[p.name] = t.detach().to("cpu", copy=True)
            for name, t in self._tensors.buffers.items():
                copy = t.detach().clone()
                if all_ranks:
                    self._peers.broadcast_tensor(copy)
                if all_ranks or self.rank == 0:
                    values[name] = copy.cpu()
        if not values:
            return OrderedDict()
        return OrderedDict((entry, values[name]) for entry, name, _ in self._tensors.entries)

    def optimizer_state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state as torch.optim has it, loadable with optimizer.load_state_dict. On rank 0, or on all ranks."""
        self._check_open()
        index: dict[str, int] = {}
        groups = []
        for i, group in enumerate(self._optimizer.param_groups):
            names = self._names_of_group(i)
            for name in names:
                index[name] = len(index)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": [index[n] for n in names]})
        state: dict[int, dict[str, Tensor]] = {}
        with self._peers.guard():
            for role in self._roles():
                for p, t in self._states.whole(role, everywhere=all_ranks):
                    if t is None or not (all_ranks or self.rank == 0) or not self._has_state(p):
                        continue
                    entry = state.setdefault(index[p.name], {})
                    if role != "momentum_buffer":
                        entry["step"] = torch.tensor(float(self._hyper.steps[p.group or 0]))
                    entry[role] = t.detach().to("cpu", copy=True)
        if not (all_ranks or self.rank == 0):
            return {}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _roles(self) -> list[str]:
        """The optimizer states' names, in torch's order."""
        kind = kind_of(self._optimizer, self._optimizer.param_groups[0])
        present = {role for unit in self._states.units for role in self._states.roles(unit)}
        return [role for role in STATE_NAMES[kind] if role in present]

    def _has_state(self, p: Parameter) -> bool:
        return p.group is not None and self._hyper.steps[p.group] > 0

    def _names_of_group(self, i: int) -> list[str]:
        if not hasattr(self, "_group_names"):
            by_id = {id(t): name for name, t in self._model.named_parameters()}
            self._group_names = [[by_id[id(t)] for t in g["params"]] for g in self._optimizer.param_groups]
        return self._group_names[i]

    # ---- checkpoints ----

    def save(self, folder: str | Path, extra: Mapping[str, str | bytes] | None = None) -> None:
        """Writes a checkpoint (see checkpoint.py for its files) and puts it in place whole; every rank must call it.

        `extra`: more small files, by name, that belong to it. Other files already in the folder stay. When writing fails (disk full,
        no permission) all ranks raise CheckpointError and the old checkpoint is untouched; training can go on.
        """
        self._check_open()
        with self._peers.guard():
            problem = self._save(folder, extra or {})
            problem = self._peers.exchange(f"save at step {self.steps}", problem)[0]
        if problem is not None:
            raise CheckpointError(problem)

    def _save(self, folder: str | Path, extra: Mapping[str, str | bytes]) -> str | None:
        """Returns what went wrong with the files. Rank 0 takes part in every gather even after that, so that nobody waits."""
        roles = self._roles()
        rng = self._rng_states()
        staging: Staging | None = None
        problem: str | None = None
        writer: SafetensorsWriter | None = None

        def attempt(action: Callable[[], Any]) -> Any:
            nonlocal problem
            if problem is None and self.rank == 0:
                try:
                    with saving(Path(folder)):
                        return action()
                except CheckpointError as e:
                    problem = str(e)
            return None

        model_list, optimizer_list = self._file_lists(roles, rng)
        size = sum(torch.Size(s).numel() * d.itemsize for _, d, s in (*model_list, *optimizer_list))
        staging = attempt(lambda: Staging(folder, size, {**self._hf_files(), **extra}))
        try:
            # The first file: parameters in the order of the units, each under all of its names; then buffers.
            writer = attempt(lambda: SafetensorsWriter(staging.folder / MODEL, model_list, {"format": "pt"}))  # type: ignore
            for p, t in self._states.whole(WEIGHT):
                for name in self._tensors.places(p.name):
                    attempt(lambda name=name, t=t: writer.write(name, t))  # type: ignore
            for entry, name, is_parameter in self._tensors.entries:
                if not is_parameter:
                    attempt(lambda entry=entry, name=name: writer.write(entry, self._tensors.buffers[name]))  # type: ignore
            attempt(lambda: writer.finish())  # type: ignore
            writer = attempt(lambda: SafetensorsWriter(staging.folder / OPTIMIZER, optimizer_list, {"format": "pt"}))  # type: ignore
            for role in roles:
                for p, t in self._states.whole(role):
                    if self._has_state(p):
                        attempt(lambda role=role, p=p, t=t: writer.write(f"{role}.{p.name}", t))  # type: ignore
            for r, state in enumerate(rng):
                attempt(lambda r=r, state=state: writer.write(f"rng.{r}", state))  # type: ignore
            attempt(lambda: writer.finish())  # type: ignore
            attempt(lambda: staging.write(TRAINER, json.dumps(self._record(), indent=1) + "\n"))  # type: ignore
            attempt(lambda: staging.commit())  # type: ignore
        finally:
            if writer is not None:
                writer.abandon()
            if staging is not None:
                staging.discard()
        return problem

    def _file_lists(self, roles: list[str], rng: list[Tensor]) -> tuple[list[Any], list[Any]]:
        """(name, dtype, shape) of both files, in the order in which tensors are gathered."""
        order = [p for unit in self._states.units for p in unit.parameters] + list(self._states.loose)
        model = [(name, p.dtype, p.shape) for p in order for name in self._tensors.places(p.name)]
        buffers = self._tensors.buffers
        model += [
            (e, buffers[n].dtype, tuple(buffers[n].shape))
            for e, n, is_parameter in self._tensors.entries
            if not is_parameter
        ]
        optimizer = []
        for role in roles:
            for unit in self._states.units:
                if role in self._states.roles(unit):
                    dtype = self._states.local(unit, role)[0].dtype
                    optimizer += [(f"{role}.{p.name}", dtype, p.shape) for p in unit.parameters if self._has_state(p)]
        optimizer += [(f"rng.{r}", t.dtype, tuple(t.shape)) for r, t in enumerate(rng)]
        return model, optimizer

    def _rng_states(self) -> list[Tensor]:
        """Every rank's default generator; needed in compat mode only, because keyed streams have no state."""
        if self.config.rng != "compat":
            return []
        texts = self._peers.exchange(f"generators at step {self.steps}", torch.get_rng_state().numpy().tobytes().hex())
        return [torch.frombuffer(bytearray.fromhex(t), dtype=torch.uint8) for t in texts]

    def _hf_files(self) -> dict[str, str | bytes]:
        """config.json (and generation_config.json) of a Hugging Face model."""
        files: dict[str, str | bytes] = {}
        config: Any = getattr(self._model, "config", None)
        if hasattr(config, "to_json_string") and hasattr(config, "architectures"):
            config.architectures = [type(self._model).__name__]
            files["config.json"] = config.to_json_string(use_diff=True)
            generation: Any = getattr(self._model, "generation_config", None)
            if hasattr(generation, "to_json_string"):
                files["generation_config.json"] = generation.to_json_string(use_diff=True)
        return files

    def _record(self) -> dict[str, Any]:
        groups = []
        for i, group in enumerate(self._optimizer.param_groups):
            hyper = {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"steps": self._hyper.steps[i], "hyper": hyper, "parameters": self._names_of_group(i)})
        return {
            "format": FORMAT, "step": self.steps, "kind": [kind_of(self._optimizer, g) for g in self._optimizer.param_groups],
            "groups": groups, "seed": self.config.seed, "rng": self.config.rng, "world_size": self.world_size,
            "loss_scale": self._loss_scale.state(),
        }  # fmt: skip

    def load(self, folder: str | Path) -> None:
        """Goes on from a checkpoint, whatever strategy and number of ranks wrote it; every rank must call it.

        Everything is checked before anything changes. Hyper-parameters go back into optimizer.param_groups, as load_state_dict does.
        """
        self._check_open()
        folder = Path(folder)
        with contextlib.ExitStack() as files:

            def check() -> Callable[[], None]:
                record = read_trainer_file(folder)
                weights, moments = Weights(folder / MODEL), Weights(folder / OPTIMIZER)
                files.callback(weights.close)
                files.callback(moments.close)
                return self._checked_load(record, weights, moments)

            self._agree(f"load at step {self.steps}", check)()

    def _agree(
        self, what: str, check: Callable[[], Callable[[], None]], error: type[InterlaceError] = CheckpointError
    ) -> Callable[[], None]:
        """Runs check() on every rank; if it fails on any, all raise that error and nothing has changed."""
        problem, action = None, None
        try:
            action = check()
        except InterlaceError as e:
            problem = str(e)
        with self._peers.guard():
            problems = self._peers.exchange(what, problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise error(text if self.world_size == 1 or rank == self.rank else f"on rank {rank}: {text}")
        assert action is not None
        return action

    def _checked_load(self, record: dict[str, Any], weights: Weights, moments: Weights) -> Callable[[], None]:
        """Checks files against the model and the optimizer; gives the function that then reads them."""
        groups = self._optimizer.param_groups
        kinds = [kind_of(self._optimizer, g) for g in groups]
        saved_groups = [g["parameters"] for g in record["groups"]]
        if record["kind"] != kinds or saved_groups != [self._names_of_group(i) for i in range(len(groups))]:
            raise CheckpointError(
                f"{weights.source.parent} was saved with another optimizer: groups {_group_text(record['kind'], saved_groups)} there, "
                f"{_group_text(kinds, [g['params'] for g in groups])} here; make the optimizer as it was when saving"
            )
        names = self._weight_names(weights)
        steps = [int(g["steps"]) for g in record["groups"]]
        wanted = {}
        roles = self._roles()
        for role in roles:
            for unit in self._states.units:
                for p in unit.parameters if role in self._states.roles(unit) else ():
                    if p.group is not None and steps[p.group] > 0:
                        wanted[f"{role} of '{p.name}'"] = (f"{role}.{p.name}", p.shape)
        check_shapes(moments, wanted)

        def read() -> None:
            self._read_weights(weights, names)
            for role in roles:
                for unit in self._states.units:
                    for p in unit.parameters if role in self._states.roles(unit) else ():
                        if f"{role} of '{p.name}'" in wanted:
                            key = f"{role}.{p.name}"
                            self._states.fill(p.name, role, partial(moments.read_range, key))
                        else:
                            self._states.fill(p.name, role, lambda a, b: torch.zeros(b - a))
            self.steps = int(record["step"])
            self._hyper.steps = steps
            self._loss_scale.restore(record.get("loss_scale"))
            self._restore_groups([g["hyper"] for g in record["groups"]])
            if self.config.rng == "compat" and f"rng.{self.rank}" in moments:
                torch.set_rng_state(moments.read(f"rng.{self.rank}"))

        return read

    def _restore_groups(self, saved: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def load_weights(self, source: str | Path) -> None:
        """Parameters and buffers from a safetensors file, a sharded index or a Hugging Face folder; the optimizer stays as it is."""
        self._check_open()
        with contextlib.ExitStack() as files:

            def check() -> Callable[[], None]:
                weights = Weights(source)
                files.callback(weights.close)
                names = self._weight_names(weights)
                return lambda: self._read_weights(weights, names)

            self._agree(f"load weights at step {self.steps}", check)()

    def _weight_names(self, weights: Weights) -> dict[str, str]:
        """The file's name for every parameter and saved buffer, checked."""
        names: dict[str, str] = {}
        shapes = {p.name: p.shape for p in self._states.parameters.values()}
        shapes |= {n: tuple(t.shape) for n, t in self._tensors.buffers.items()}
        for name in dict.fromkeys(canonical for _, canonical, _ in self._tensors.entries):
            found = find_name(weights, [name, *self._tensors.places(name)], self._tensors.hf_prefix)
            names[name] = found or name
        check_shapes(weights, {f"'{n}'": (file, shapes[n]) for n, file in names.items()})
        return names

    def _read_weights(self, weights: Weights, names: dict[str, str]) -> None:
        for name, file in names.items():
            if name in self._states.parameters:
                self._states.fill(name, WEIGHT, partial(weights.read_range, file))
            else:
                self._tensors.buffers[name].copy_(weights.read(file))

    # ---- the end ----

    def close(self) -> None:
        """Frees the program, its states and its process groups. The model's own parameters are not written back: save first."""
        if self._closed is None:
            self._closed = "it was closed"
            self._peers.close()

    def _drop(self) -> None:
        self._closed = self._closed or "a rank failed"
        if hasattr(self._executor, "leave"):
            self._executor.leave()
        self._executor = self._runner = self._states = None  # type: ignore[assignment]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise InterlaceError(
                f"this trainer can no longer be used: {self._closed}; compile again and load a checkpoint"
            )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe_op(record: Mapping[str, Any]) -> str:
    """An op of a debug run as words: what it is, in which module, and where the user wrote it."""
    parts = [
        f"the first such value comes from {record['name']} ({record['phase']}, micro-batch {record['micro_batch']})"
    ]
    if record["module"]:
        parts.append(f"in module '{record['module']}'")
    if record["source"]:
        parts.append(f"at {record['source']}")
    bad = [v for v in record["results"] if v["nonfinite"]]
    if bad:
        parts.append(f"({bad[0]['nonfinite']} of the elements of {bad[0]['type']})")
    return " ".join(parts)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _group_text(kinds: list[str], groups: list[Any]) -> str:
    return ", ".join(f"{k} with {len(g)} parameters" for k, g in zip(kinds, groups, strict=False)) or "none"


__all__ = ["NonFiniteError", "PeerError", "Tensors", "Trainer"]
