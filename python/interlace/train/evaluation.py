"""Trainer.evaluate: the loss of a batch in eval mode, without a step, on the parameters where they lie.

    capture(model.eval()) → canonicalize, shard, update → forward_only ─ the program of forward alone, on the trainer's own shards

A program is made for each shape of batch and loss function when it is first met, and shares parameters and buffers with the one that
trains (programs.py: donor); one of the two has memory for activations at a time.

States that lie in the tier between steps stay there while forward does not need them, so a memory limit holds here as in training:

    within the limit?   what is out stays out  →  all optimizer states are out  →  parameters come when they are needed, and leave
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from interlace.capture.any_batch import ANY
from interlace.capture.effects import kept_values
from interlace.capture.inputs import InputSpec, Path, differing, numbers_in, on_device, path_name, with_numbers
from interlace.capture.loss import Evaluated, outputs_of
from interlace.capture.model_tensors import collect
from interlace.capture.opaque import TOLD
from interlace.capture.program import default_loss
from interlace.capture.watch import Watch
from interlace.capture.ways import other_way, ways_of
from interlace.compiling.captures import Captures, autocast_of
from interlace.compiling.planner import Planner, check_stages
from interlace.compiling.programs import Built, Made, ProgramError, Source, idle_of, state_name, step_states
from interlace.config.schedule import for_stage, items, pass_name
from interlace.dist.peers import PeerError, first_difference, ranks_text
from interlace.errors import CaptureError
from interlace.train import batch as batches
from interlace.train.agreement import captured_alike
from interlace.train.batch import describe
from interlace.train.eager import EagerRunner
from interlace.train.rewriting import Rewriting
from interlace.train.run import Run, gathered, shared_capture

Tensor = torch.Tensor
LossFn = Callable[[nn.Module, Any], Any]
# What decides units and states; the others say when things move in a step.
MANY_FORMS = 8  # that are captured with fullgraph=False; others are evaluated in Python
MANY_WAYS = 8  # programs for the ways of batches of one shape
STRUCTURE = ("canonicalize", "mesh", "borders", "tensor", "precision", "pipeline", "shard", "replicate", "zero1", "update")


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """model.eval(), and every module as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


class Evaluation:
    """The evaluating programs of one trainer."""

    def __init__(self, run: Run, captures: Captures, planner: Planner) -> None:
        self.run, self.captures, self.planner = run, captures, planner
        self._built: dict[Any, list[_Ready]] = {}  # for the ways that batches have taken so far
        self._undecided: set[str] = set()  # as in Captures
        self._calls = self._forgotten = 0
        self._numbers: dict[Path, torch.dtype] = {}  # of batches, that are inputs
        self._in_python: set[str] = set()  # forms that cannot be captured
        self._met: set[str] = set()
        self._asked = 0
        self.settle: Callable[[], None] = lambda: None
        self._rewriting = Rewriting(run)

    @property
    def structure(self) -> list[str]:
        return self.planner.filled([text for text in items(self.planner.standard) if pass_name(text) in STRUCTURE])

    def run_on(self, batch: Any, loss_fn: LossFn | None) -> dict[str, Tensor] | str:
        """The outputs of the loss function by name, the loss first; or why memory does not suffice, the same on every rank. Every rank
        must call it with a batch of the same shape."""
        run = self.run
        loss_fn = loss_fn or self.captures.loss_fn
        if isinstance(run.runner, EagerRunner):
            return self._run_eager(run.runner, batch, loss_fn)
        if self.captures.may_run_whole and self._unfit(batch, loss_fn):
            return self._run_python(batch, loss_fn)
        if run.shapes is not None and run.shapes.rounds and loss_fn is self.captures.loss_fn:
            batch = run.shapes.filled([batch], run.shapes.choose([batch]))[0]
        self._numbers |= run.spec.numbers()
        batch = with_numbers(batch, self._numbers)
        spec = dataclasses.replace(InputSpec.of(batch), free=run.spec.free)
        if differ := self._agree(spec):
            self._numbers |= differ
            batch = with_numbers(batch, differ)
            spec = dataclasses.replace(InputSpec.of(batch), free=run.spec.free)
        trainable = tuple(p.requires_grad for p in run.model.parameters())
        out = _left_out(run.ir)
        tensors = tuple((t.name, t.dtype, t.shape) for t in spec.tensors)
        key = (id(loss_fn), trainable, out, tensors, repr(spec.fixed()))
        inputs = batches.flatten(spec, [batch], run.peers.device)
        kept = self._built.setdefault(key, [])
        kept[:] = [ready for ready in kept if not ready.stale()]
        while (ready := self._fitting(kept, inputs)) is None:
            run.check_same_batch(f"batch of evaluation {self._calls}", inputs, evaluates=True)
            try:
                made = self._build(batch, loss_fn)
            except (CaptureError, ProgramError):  # a program of parameters that training has no gradients of, say
                if not self.captures.may_run_whole:
                    raise
                self._in_python.add(self._form(batch, loss_fn))
                return self._run_python(batch, loss_fn)
            if isinstance(made, str):
                return made
            kept.append(made)
            other = other_way(made.ways, inputs, self.captures.buffer)
            places = {at for at in run.peers.exchange("ways of evaluation", "" if other is None else made.ways[other[0]]["at"]) if at}
            if len(kept) > MANY_WAYS:
                places |= {way["at"] for way in made.ways}
            self._undecided |= places  # ranks differ there, or too many batches do: what reads it cannot be captured
        if ready.moves:
            run.settle_save()  # what a save has not copied yet must not leave memory
        self._rewriting.before(ready.built.ir, inputs)
        if ready.afar:
            run.share_buffers(ready.afar)
        result = ready.built.executor.step(inputs, run.hyper.idle(ready.built.ir), run.steps)
        run.share_outputs(ready.built.states, result, 1)
        ready.bring_back(run.ir)
        if TOLD in result["outputs"]:
            self.settle()
        return {name: values[0] for name, values in result["outputs"].items() if name != TOLD}

    def _unfit(self, batch: Any, loss_fn: LossFn | None) -> bool:
        """Whether a batch of whatever form is evaluated in Python. Every rank must call it."""
        self._asked += 1
        form = self._form(batch, loss_fn)
        everyone = self.run.peers.exchange(f"form of evaluation {self._asked}", form.partition(" ")[2])
        if not form or form in self._in_python or any(theirs != everyone[0] for theirs in everyone):
            return True
        if len(self._met) < MANY_FORMS:
            self._met.add(form)
        return form not in self._met

    def _form(self, batch: Any, loss_fn: LossFn | None) -> str:
        """Empty: a program takes none such."""
        try:
            spec = dataclasses.replace(InputSpec.of(batch), free=self.run.spec.free)
        except CaptureError:
            return ""
        shapes = self.run.shapes
        varies = shapes.pad if shapes is not None and shapes.rounds and loss_fn is self.captures.loss_fn else ()
        tensors = [(t.name, t.dtype, len(t.shape) if t.name in varies else t.shape) for t in spec.tensors]
        return f"{id(loss_fn)} {tensors} {[(p, x) for p, x in spec.fixed() if type(x) not in (int, float)]}"

    def _run_python(self, batch: Any, loss_fn: LossFn | None) -> dict[str, Tensor]:
        """In Python on the whole parameters; buffers are as they were afterwards."""
        run, table = self.run, self.run.programs.opaque
        call = table.calls.get(ANY) if table is not None else None
        dtype = call.autocast if call is not None else autocast_of(self.captures, run.peers.device.type)
        region = contextlib.nullcontext() if dtype is None else torch.autocast(run.peers.device.type, dtype)
        runner = EagerRunner(run.model, loss_fn, run.executor, run.states, run.peers, [], run.config.seed, run.config.rng)
        with region, kept_values(run.model.buffers()):
            return self._run_eager(runner, batch, loss_fn)

    def _fitting(self, kept: list[_Ready], inputs: list[list[Tensor]]) -> _Ready | None:
        """The first that was made for the ways that this batch takes, on all ranks. Every rank must call it."""
        mine = [int(other_way(ready.ways, inputs, self.captures.buffer) is not None) for ready in kept]
        if any(ready.ways for ready in kept):
            mine = self.run.peers.groups.largest(mine)
        return next((ready for ready, other in zip(kept, mine, strict=True) if not other), None)

    def forget(self) -> None:
        """The executors hold the connections of the ranks, and the states of the program that ran when they were made."""
        self._built.clear()
        self._met.clear()
        self._forgotten += 1

    def _agree(self, spec: InputSpec) -> dict[Path, torch.dtype]:
        """Gives the numbers beside the tensors that differ between ranks."""
        self._calls += 1
        numbers = numbers_in(spec)
        texts = {path_name(path): repr(x) for path, x in spec.fixed() if x is None or type(x) in (bool, str)}
        mine = describe(spec, self.run.row_ranks) | texts | {path_name(path): "a number" for path in numbers}
        ours = (mine, {path_name(path): x for path, x in numbers.items()}, self._forgotten)
        everyone = self.run.peers.exchange(f"evaluation {self._calls}", ours)
        if other := [rank for rank, theirs in enumerate(everyone) if theirs[2] != everyone[0][2]]:
            raise PeerError(
                f"evaluate: what the model or the loss function reads has changed otherwise on {ranks_text(other)} than on rank 0; every "
                "rank must change the same", other[0],
            )  # fmt: skip
        found = first_difference([form for form, *_ in everyone])
        if found is not None:
            wrong, name, theirs, ours = found
            raise PeerError(
                f"evaluate: {ranks_text(wrong)} gave another batch than rank 0: '{name}' is {theirs} there and {ours} on rank 0; "
                "fill up the last batch, or leave it out on every rank",
                wrong[0], agreed=True,
            )  # fmt: skip
        return differing([values for _, values, _ in everyone], numbers)

    def _build(self, batch: Any, loss_fn: LossFn | None) -> _Ready | str:
        run, programs, captures = self.run, self.run.programs, self.captures
        if loss_fn is not captures.loss_fn:
            captures = Captures(captures.model, loss_fn, captures.optimizer, programs)
            captures.prefix = f"evaluation {self._calls}: "
        captures.undecided |= self._undecided

        def make() -> Source:
            text, constants = captures.text(batch)
            made: dict[int, Made] = {}
            try:
                for stage in self.planner.stages_in_order():
                    known = (Source(program.print()) for program, _ in made.values())
                    made[stage] = self._within_limit(self.planner.text_of_stage(text, stage, known), stage)
            except ProgramError as e:
                raise ProgramError(f"evaluate: {e}; on the whole model, evaluate this in `with trainer.whole_parameters():`") from e
            texts = [made[stage][0].print() for stage in range(run.config.stage_ranks)]
            if len(texts) > 1:
                check_stages(texts)
            return Source(texts[0], made[0][1], constants, captured=text, stages=texts if len(texts) > 1 else [])

        captures.evaluated = Evaluated(idle_of(run.ir))
        try:
            with gathered(run, captures), in_eval_mode(run.model):
                share = lambda: shared_capture(run, captures, f"program of evaluation {self._calls}", make, loss_fn)  # noqa: E731
                source = captured_alike(share, batch, run.peers, captures)
        finally:
            captures.evaluated = None
        problem = programs.over_limit(programs.parse(source), run.ir)
        if run.config.stage_ranks > 1 and run.config.memory_limit is not None:  # each has its own program
            everyone = run.peers.exchange(f"room of evaluation {self._calls}", problem)
            problem = next((f"on rank {rank}, {said}" for rank, said in enumerate(everyone) if said is not None), None)
        if problem is not None:
            return f"evaluate: {problem}, or evaluate on a smaller batch"
        built, watch = programs.build_beside(source, run.executor, run.ir), Watch(run.model, loss_fn, captures.prefix)
        plain = {t.name: t.real for t in collect(run.model) if t.kind == "plain" and not t.real.is_meta}
        own, shared = watch.tensors() | watch.outside | plain, {b["name"] for b in run.ir.buffers()}
        for b in built.ir.buffers():
            if b["name"] in own and b["name"] not in shared:  # it came with rank 0's
                built.executor.tensor(b["value"]).copy_(own[b["name"]].detach())
        return _Ready(built, loss_fn, watch if captures.prefix else None, self._afar(source))

    def _afar(self, source: Source) -> set[str]:
        """Buffers that a stage of a pipeline reads here, and another one changes while it trains."""
        programs = [self.run.programs.parse(Source(text)) for text in source.stages]
        used = [{b["name"] for b in program.buffers() if b["used"]} for program in programs]
        changed = self.run.states.changed
        return {name for s, names in enumerate(used) for t, theirs in enumerate(changed) if s != t for name in names.intersection(theirs)}

    def _within_limit(self, text: str, stage: int) -> Made:
        """The program (of a stage) that moves least among those that the limit allows; else the one that needs least."""

        run, programs = self.run, self.run.programs
        running = run.ir if run.config.stage_ranks == 1 else programs.parse(Source(run.source.texts[stage]))

        def made(idle: str, *more: str) -> Made:
            passes = [*items(for_stage(",".join(self.structure), stage, run.config)), f"forward_only(out={idle})", "reorder", *more]
            return programs.run_passes(text, ",".join(passes), micro_batches=1)

        found = made("+".join(_left_out(running)) or "none")
        if programs.over_limit(found[0], running) is None or not programs.has_tier:
            return found
        found = made("all")
        if programs.over_limit(found[0], running) is None:
            return found
        limit = (programs.room or 0) - sum(step_states(running).values())

        def streamed(within: int) -> Made:
            stream = f"offload(limit={within},kinds=master+activations,cluster={{cluster}})"
            return made("all", *self.planner.filled([stream]))

        with contextlib.suppress(ProgramError):  # not even so: what the limit lacks is said of the program before
            found = programs.within_limit(streamed, limit, running)
        return found

    def _run_eager(self, runner: EagerRunner, batch: Any, loss_fn: LossFn | None) -> dict[str, Tensor]:
        with runner.installed(), in_eval_mode(self.run.model), torch.no_grad():
            result = (loss_fn or default_loss)(self.run.model, on_device(batch, self.run.peers.device))
            return {name: value.detach().clone() for name, value in outputs_of(result).items()}


def _left_out(ir: Any) -> tuple[str, ...]:
    """What a running program has in the tier between steps, but for gradients, which no evaluation has."""
    return tuple(state_name(s) for s in ir.states() if s["out"] and s["persistent"])


class _Ready:
    """An evaluating program on the states of one that trains. `watch`: of a loss function that the trainer does not follow, whose id stays
    its own as long as it is kept."""

    def __init__(self, built: Built, loss_fn: LossFn | None, watch: Watch | None, afar: set[str]) -> None:
        self.built, self.ways, self.afar = built, ways_of(built.ir), afar
        self._loss_fn, self._watch = loss_fn, watch
        outside = {} if watch is None else watch.outside
        self._outside = [(built.executor.tensor(b["value"]), outside[b["name"]]) for b in built.ir.buffers() if b["name"] in outside]
        self.left_out = {state_name(s): s["value"] for s in built.ir.states() if s["out"]}
        self.moves = any(s["moves"] for s in built.ir.states())

    def stale(self) -> bool:
        """Whether the loss function would compute something else now. Parameters and buffers of its modules are taken as they are."""
        for storage, t in self._outside:
            if t.shape != storage.shape:
                return True
            storage.copy_(t.detach())
        return self._watch is not None and any(c.owner is None for c in self._watch.moved())

    def bring_back(self, running: Any) -> None:
        """States that only this program leaves out: the one that trains does not look for them in the tier."""
        if self.left_out:
            for state in running.states():
                if not state["moves"] and state_name(state) in self.left_out:
                    self.built.executor.tensor(self.left_out[state_name(state)])
