"""Trainer: what interlace.compile gives back. One call of step() is one optimizer step on this rank's batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlace.compiling.captures import Captures
from interlace.compiling.planner import Planner
from interlace.errors import InterlaceError
from interlace.observe.step_trace import TraceFiles
from interlace.train import state_dicts
from interlace.train.any_form import AnyForm
from interlace.train.diagnosis import Diagnosis
from interlace.train.evaluation import Evaluation
from interlace.train.follow import Follow
from interlace.train.loading import Loading
from interlace.train.loop import Loop
from interlace.train.ownership import Ownership
from interlace.train.refreeze import Frozen
from interlace.train.run import Run
from interlace.train.saving import Saving
from interlace.train.stepping import Stepping
from interlace.train.swapping import Swapping
from interlace.train.whole import save_pretrained, whole_parameters

Tensor = torch.Tensor


def _of_run(name: str) -> Any:
    return property(lambda trainer: getattr(trainer._run, name))


class Trainer:
    """A compiled model in training. Make one with interlace.compile; close it, or use it in a with statement, to free everything.

    Attributes: `config`; `rank`, `world_size`; `data_rank` of `data_ranks`: which of how many different batches this rank gets (as
    Config.data_place says before compiling: ranks along axis tp of the mesh get the same); `steps` made so far; `norm` of the last step's
    gradient (None when not computed); `outputs` of the last step by name, one tensor per micro-batch; `skipped`: whether the last update
    was left out; `swaps` so far; `program`: the text that runs, `stage_programs`: those of all stages of a pipeline, else this
    one alone, `passes`: reports of what made it.
    """

    config, rank, world_size = _of_run("config"), _of_run("rank"), _of_run("world_size")
    data_rank, data_ranks = _of_run("data_rank"), _of_run("data_ranks")
    steps, norm, outputs, skipped = _of_run("steps"), _of_run("norm"), _of_run("outputs"), _of_run("skipped")
    swaps, program, passes = _of_run("swaps"), _of_run("program"), _of_run("passes")

    @property
    def stage_programs(self) -> list[str]:
        return list(self._run.source.texts)

    def __init__(self, run: Run, captures: Captures, planner: Planner) -> None:
        self._run = run
        self.compile_seconds = run.programs.seconds
        self._swapping = Swapping(run)
        self._loop = Loop(run, planner, self._swapping)
        self._evaluation = Evaluation(run, captures, planner)
        self._diagnosis = Diagnosis(run)
        self._ownership = Ownership(run)  # what it puts in the model is no change of the user's
        self._frozen = frozen = Frozen(run, captures, planner, self._evaluation) if run.config.mode == "compiled" else None
        self._follow = Follow(run, captures, planner, self._evaluation, frozen) if frozen is not None else None
        some = frozen is not None and self._follow is not None and captures.can_run_whole
        self._any_form = AnyForm(run, captures, planner, frozen, self._follow) if some else None  # type: ignore[arg-type]
        self._stepping = Stepping(run, self._loop, self._diagnosis, frozen, self._follow, self._any_form)
        self._saving = Saving(run, self._loop)
        self._loading = Loading(run, self._saving, self._loop)
        run.peers.on_close(self._drop)
        run.peers.places.start(self._where)

    # ---- training ----

    def step(self, batch: Any, *, python: bool = False) -> Tensor:
        """One optimizer step; gives the mean loss of this rank's micro-batches (0-dim, on the device).

        `batch` is this rank's part: a structure of tensors that is cut along dimension 0 into Config.accumulation micro-batches, or
        a list of that many. One of another form than before is compiled when it comes (docs/loop.md). `python`: this step's forward and
        backward run in Python, on a batch of any form, which may be another one on each rank; every rank must say so. Errors: batches whose
        forms differ between ranks or micro-batches (with Config(fullgraph=False) such steps run in Python by themselves), a value that is not
        finite (the parameters then stay as they were when clipping or skip_nonfinite computes the norm), a rank that failed or was lost.
        """
        self._ownership.before_step()
        if python and self._any_form is None and self.config.mode == "compiled":
            raise InterlaceError("step(python=True) needs a run without stages (axis pp), param_dtype (but autocast) and output_dtype")
        return self._stepping.step(batch, python)

    def accept_any_shape(self) -> None:
        """From now on a batch of a shape that Config.shapes does not list is compiled when first met, instead of an error; ranks that
        have other sizes fill up to the largest. Every rank must call it. Error: compiled without Config.shapes."""
        if self._run.shapes is None:
            raise InterlaceError("accept_any_shape() needs Config.shapes and Config.pad, with the shape of the example batch at least")
        self._run.shapes.open_ended = True

    def evaluate(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Any] | None = None) -> dict[str, Tensor]:
        """The loss of this rank's batch with the model in eval mode (no dropout, this rank's statistics); nothing changes but parameters that
        the model's own forward writes, no step counts.

        Gives what `loss_fn` gives, by name, "loss" first; by default the loss function of training. The batch is one part, not cut into
        micro-batches, of any shape: each is compiled when first met. Parameters are gathered as in training: no rank holds the whole
        model. States that an offload keeps out of memory stay there. Every rank must call it with the same shape; with Config.pad alone
        and the loss function of training, batches are filled up as in training. Error, after which training can go on: the batch needs
        more than memory_limit, or ranks gave other shapes, or other rows where they share them.

            losses = [trainer.evaluate(b)["loss"].item() for b in validation]
        """
        self.flush()
        as_running = self._frozen.as_running() if self._frozen is not None else nullcontext()
        with self._run.peers.guard(), self._run.determinism(), as_running:
            if self._follow is not None:
                self._follow.before_evaluation()
            found = self._evaluation.run_on(batch, loss_fn)
        if isinstance(found, str):
            raise InterlaceError(found)
        return found

    def trace(
        self, batch: Any, file: str | Path | None = None, *, chakra: str | Path | None = None,
        snapshot: str | Path | None = None,
    ) -> Tensor:  # fmt: skip
        """A step like step(), recorded: rank 0 writes a Chrome trace with every rank's ops, transfers and memory to `file`, Chakra
        execution traces into the folder `chakra`, the memory history of torch.cuda._memory_viz to `snapshot` (docs/cost_model.md).

        They open beside the predicted ones of `interlace simulate`. Every rank must call it. Error: a file cannot be written; `steps`
        says whether the step was made (a disk that got full), and training can go on.
        """
        self._compiled("a trace shows the compiled program", "has none: use torch.profiler")
        return self._stepping.trace(batch, TraceFiles(file, chakra, snapshot))

    def flush(self) -> None:
        """Makes the optimizer step that the last step left to the next one (pass reposition_update), if it left one.

        Whatever reads or writes parameters through this trainer does so by itself. Every rank must call it, before the model's own
        parameters are read or changed between two steps.
        """
        self._run.check_open()
        self._run.flush()

    def swap(self, text: str = "") -> None:
        """Goes on with another program between two steps: rank 0's text counts. Every rank must call it.

        The program must have the same units and states: the same captured graph and strategy, whatever passes ran besides. Parameters,
        optimizer states, buffers and step counts stay where they are, and are not copied. Errors, with nothing changed: the text is no
        program, it has other units or states, it needs more than memory_limit.
        """
        self._compiled("a swap changes the compiled program", "has none")
        self._swapping.swap([text])

    def _compiled(self, what: str, eager: str) -> None:
        self._run.check_open()
        if self.config.mode == "eager":
            raise InterlaceError(f'{what}; mode="eager" {eager}')

    # ---- what went wrong ----

    def explain_nonfinite(self, batch: Any) -> str | None:
        """Runs the batch op by op without an update and says which op of which module first makes a value that is not finite.

        None when all values are finite. Every rank must call it.
        """
        return self._diagnosis.explain_nonfinite(self._stepping.inputs(batch))

    def inspect(self, batch: Any, stop_at: str = "") -> dict[str, Any]:
        """Runs the batch op by op without an update: `ops` with the range of every floating result, `values` of module `stop_at`."""
        return self._diagnosis.inspect(self._stepping.inputs(batch), stop_at)

    # ---- its values ----

    def state_dict(self, all_ranks: bool = False) -> OrderedDict[str, Tensor]:
        """Copies of all parameters and buffers under the names and in the order of model.state_dict(), tied ones under each name.

        On rank 0 (empty elsewhere), or on all ranks. Every rank must call it. Buffers are rank 0's: statistics such as BatchNorm's
        are each rank's own while training, as with local statistics in DDP.
        """
        return state_dicts.state_dict(self._run, all_ranks)

    def optimizer_state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state as torch.optim has it, loadable with optimizer.load_state_dict. On rank 0, or on all ranks."""
        return state_dicts.optimizer_state_dict(self._run, all_ranks)

    def whole_parameters(self, changes: bool = True, all_ranks: bool = True) -> AbstractContextManager[nn.Module]:
        """In its with statement the model has whole parameters, whatever the strategy; gives the model. Every rank must enter it.

        For what works on a plain model: model.generate, torch.save, PEFT, p.clamp_(), an EMA, model.load_state_dict. `changes`: what is
        changed goes back into the trainer at the end; when the block raises, nothing does. `all_ranks`: False gathers on rank 0 alone,
        whose changes count. A rank that gathers holds the whole model in memory meanwhile, and with changes on several ranks a second copy
        where the strategy has it whole. No step can be made inside. Errors, with nothing changed: ranks changed different things, a
        parameter got another shape or dtype.

            with trainer.whole_parameters():
                ema.update_parameters(model)
        """
        return whole_parameters(self._run, changes, all_ranks, "trainer.whole_parameters")

    def save_pretrained(self, folder: str | Path, **arguments: Any) -> None:
        """model.save_pretrained(folder, **arguments) of a Hugging Face or PEFT model with the values trained so far; rank 0 gathers and
        writes. Every rank must call it. Error, on every rank: the model has no such method, or it failed."""
        save_pretrained(self._run, folder, arguments)

    def save(
        self, folder: str | Path, extra: Mapping[str, str | bytes] | None = None, *, wait: bool = True, keep: int = 1,
        scheduler: Any = None,
    ) -> None:  # fmt: skip
        """Writes a checkpoint (checkpoint/contents.py says which files) and puts it in place whole; every rank must call it.

        wait=False: returns at once and writes beside the next steps; the folder changes when all is on the disk. saved() says when,
        finish_save() waits; what goes wrong is raised there or by the next save. Until the next step has begun its update, parameters
        must not be changed from outside. `keep`: how many checkpoints there are in the end, older ones as FOLDER.step-N.
        `scheduler`: a learning-rate scheduler of torch.optim, whose state is saved too. `extra`: more small files, by name. Other files
        already in the folder stay. When writing fails (disk full, no permission) all ranks raise CheckpointError and the old checkpoint
        is untouched; training can go on.
        """
        self._saving.save(folder, extra or {}, wait, keep, scheduler)

    def saved(self) -> bool:
        """Whether the last save(wait=False) has ended, well or not."""
        return self._run.save is None or self._run.save.done

    def finish_save(self) -> None:
        """Waits until the last save(wait=False) is on the disk and in place. Error, on every rank: it could not be written."""
        self._saving.finish()

    @property
    def last_save(self) -> dict[str, Any] | None:
        """Of the last save that ended: bytes, seconds of its parts."""
        return self._saving.last

    def reserve(self, folder: str | Path) -> None:
        """Takes a checkpoint folder for this trainer, as its first save does: another run that saves there is refused from now on.

        Every rank must call it. Error: another run has it, or it cannot be written to.
        """
        self._saving.reserve(folder)

    def load(self, folder: str | Path, *, scheduler: Any = None) -> None:
        """Goes on from a checkpoint, whatever strategy and number of ranks wrote it; every rank must call it.

        Everything is checked before anything changes, every byte against its checksum. Hyper-parameters go back into
        optimizer.param_groups, as load_state_dict does. With as many ranks as saved it, and the same model and settings, the schedule
        goes on where it stood, with the program that ran then. `scheduler`: gets the state that save(..., scheduler=) kept. Error: no
        checkpoint, of another model or optimizer (the first difference is named), no scheduler's state; DamageError where bytes are not
        those that were written.
        """
        self._loading.load(folder, scheduler)

    def load_weights(self, source: str | Path | Mapping[str, Tensor]) -> None:
        """Parameters and buffers from a safetensors file, a sharded index, a Hugging Face folder or a state dict; the optimizer stays as it
        is. Every rank must call it, with the same. Error, with nothing changed: a tensor is missing or has another shape."""
        self._loading.load_weights(source)

    # ---- what there is ----

    def summary(self) -> dict[str, Any]:
        """What the program holds and costs (docs: `interlace inspect`), with `largest_unit` as name and bytes; `not_cut`: what tensor
        parallelism leaves whole, and why; and `opaque`: what runs in Python, why, and how long (seconds, on this rank) it has taken."""
        summary = self._run.ir.summary()
        names = summary["largest_unit_params"]
        summary["largest_unit"] = {"unit": summary["largest_unit"], "name": ", ".join(names), "bytes": summary["largest_unit_bytes"]}
        summary["passes"] = self.passes
        summary["opaque"] = self._run.programs.opaque.summary() if self._run.programs.opaque is not None else []
        return summary

    def stats(self) -> dict[str, Any]:
        """What the executor has measured so far: ops, bytes sent, live and peak bytes, the op at the peak.

        After a swap the counts of steps and ops, and the peak, are those of the new program; bytes sent go on. `graphs`: whether
        micro-batches are device graphs or why not, how many, how often they were captured and run (their ops are not counted as issued),
        bytes of their inputs and outputs. `regions`: how many it
        has (docs/regions.md), how many are compiled, in how many calls, in place of how many kernels, from which step on."""
        self._run.check_open()
        return {
            **self._run.executor.stats(), "arena": self._run.executor.arena_stats(), "graphs": self._run.executor.graph_stats(),
            "trainer_steps": self.steps,
            "swaps": self.swaps, "regions": self._run.regions_table, **(self._run.shapes.stats() if self._run.shapes else {}),
        }  # fmt: skip

    def compile_table(self) -> str:
        """Where the time of compiling went, on this rank: "capture 0.02 s (cached), passes 0.31 s (shard 0.01 s, search 0.29 s), ..."."""
        cached = self._run.programs.cached
        parts = {name: 0.0 for name in cached} | self.compile_seconds
        words = {name: f"{name} {seconds:.2f} s" for name, seconds in parts.items()}
        each = [f"{r['name'].partition('(')[0]} {r['seconds']:.2f} s" for r in self.passes if r["seconds"] >= 0.005]
        for name in words:
            if name in cached:
                words[name] += " (cached)"
            elif name == "passes" and each:
                words[name] += f" ({', '.join(each)})"
        return ", ".join(words[name] for name in sorted(words, key=lambda name: name == "total"))

    @property
    def plans(self) -> list[dict[str, Any]]:
        """What the schedule did so far, plan by plan: step, reason, passes, seconds, whether it came from the cache, predicted and
        measured time and peak."""
        return self._loop.plans

    @property
    def settled(self) -> bool:
        """Whether the steps to come run as they are, until the schedule's next entry: none is recorded for a plan, compared with its
        prediction or followed by another plan. A benchmark waits for it; recorded steps take longer."""
        return self._loop.settled()

    # ---- the end ----

    def close(self) -> None:
        """Frees the program, its states and its process groups. The model's own parameters are not written back: save first.

        A save under way is finished first. Error: it could not be written (all is freed then, too).
        """
        try:
            if self._run.closed is None:
                self.finish_save()
                self._run.flush()  # the model's parameters may be those of the program
        finally:
            self._end()

    def _where(self) -> dict[str, Any]:
        """For the other ranks, from another thread."""
        if self._run.runner is not None and hasattr(self._run.runner, "where"):
            return self._run.runner.where()  # type: ignore[no-any-return]
        return {"step": self.steps, "op": "the step in Python", "units": "", "module": ""}

    def _end(self) -> None:
        if self._run.closed is None:
            self._run.closed = "it was closed"
            self._run.peers.close()

    def _drop(self) -> None:
        run = self._run
        run.closed = run.closed or "a rank failed"
        self._ownership.end()
        self._saving.drop()
        if hasattr(run.executor, "leave"):
            run.executor.leave()
        self._evaluation.forget()
        if self._follow is not None:
            self._follow.forget()
        if self._any_form is not None:
            self._any_form.forget()
        if run.shapes is not None:
            run.shapes.forget()  # their executors hold the connections too
        run.drop()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._run.peers.left_by(error)
            self._end()
