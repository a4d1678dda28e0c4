"""Capturing a run's model for one shape of its batches, or finding the text of an earlier start. Rank 0 only."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interlace.capture import Captured, Casts, InputSpec, OpaqueCall, capture
from interlace.capture.attention import OneAttention
from interlace.capture.groups import optimizer_groups
from interlace.capture.in_python import capture_any
from interlace.capture.inputs import leaves, of_rows
from interlace.capture.literals import quote
from interlace.capture.loss import Evaluated, LossForm, outputs_of
from interlace.capture.model_tensors import collect
from interlace.capture.program import default_loss
from interlace.capture.reach import mentions
from interlace.capture.real_run import run_for_real
from interlace.capture.watch import Watch
from interlace.capture.ways import buffer_of, buffers_in, other_way
from interlace.capture.writes import said
from interlace.compiling.cache import key_of
from interlace.compiling.dropout import changed, reads_of
from interlace.compiling.fingerprint import Fingerprint, Unsure
from interlace.compiling.programs import ProgramError, Programs
from interlace.config.forms import first_loss_scale
from interlace.errors import CaptureError, InterlaceError

Tensor = torch.Tensor
log = logging.getLogger("interlace")
# Settings that a captured program does not depend on. What is not named here counts.
_LATER = frozenset(
    {
        "seed", "timeout_s", "debug", "passes", "memory_limit", "dump_ir", "skip_nonfinite", "deterministic", "weights", "schedule",
        "profile", "cluster", "cache", "arena", "strategy", "mesh", "accumulation", "accumulate_mode", "clip_norm", "shapes", "pad",
        "tier", "tier_bandwidth", "tensor", "sequence_parallel", "trust_program", "verify_steps", "device_graphs", "kernels",
    }
)  # fmt: skip


class Captures:
    """Captured texts of one model, loss function and optimizer."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any] | None, optimizer: torch.optim.Optimizer, programs: Programs
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.optimizer, self.programs = model, loss_fn, optimizer, programs
        self.config = programs.config
        self.one_attention = OneAttention.of(self.config.kernels, self.config.one_attention, programs.peers.device.type)
        self.numbers: set[str] = set()  # places (watch.py) whose numbers programs read from buffers
        self.undecided: set[str] = set()  # places whose reads of a batch are no ways (capture/ways.py): too many batches differ there
        self.trained: set[str] = set()  # parameters that had a gradient in some program; in others they have zeros (`meta unused`)
        self.evaluated: Evaluated | None = None  # in their place, while an evaluation is captured
        self.grows = True  # until there is a program: buffers may get other sizes, which rank 0's constants tell the others
        self.any_batch = ""  # why all of it runs in Python now, on batches of any form (capture/any_batch.py); empty: it is captured
        self._opens: bool | None = None  # whether the loss function opens regions of torch.autocast; None: not known yet
        self.prefix = ""  # of names of the loss function's tensors
        self.values: dict[int, Tensor] | None = None  # of parameters on meta, by their ids, while they are gathered

    @property
    def fullgraph(self) -> bool:
        """Whether what cannot be captured is refused."""
        return self.config.fullgraph and not self.programs.in_python

    @property
    def may_leave_out(self) -> bool:
        """Whether it may run in Python instead: it was captured before, for batches that had more in common."""
        return self.fullgraph and bool(self.undecided) and self.config.param_dtype in (None, "autocast")

    @property
    def may_run_whole(self) -> bool:
        """Whether all of it runs in Python where it cannot be captured, without being asked to."""
        return not self.fullgraph and self.can_run_whole

    @property
    def can_run_whole(self) -> bool:
        config = self.config
        casts = config.param_dtype in (None, "autocast") and config.output_dtype is None
        return config.mode == "compiled" and casts and config.stage_ranks == 1

    def buffer(self, name: str) -> Tensor:
        """The model's, or a number that programs read from one."""
        if name not in self.numbers:
            return buffer_of(self.model, name)
        return torch.tensor(Watch(self.model, self.loss_fn, self.prefix).numbers()[name], dtype=torch.float64)

    def training_text(self, micro_batch: Any) -> tuple[str, dict[str, Tensor]]:
        """text(), or where that cannot be the text of a step on batches of any form, which is said. Error: what may not run in Python, what
        could not run there either."""
        why = self.any_batch
        if not why:
            try:
                return self.text(micro_batch)
            except CaptureError as e:
                if not self.may_run_whole or isinstance(e, LossForm) or (self.grows and not self._runs(micro_batch)):
                    raise
                self._opens, why = getattr(e, "opens", self._opens), in_python(e)
            log.warning("all of the model and its loss runs in Python, as Config(fullgraph=False) has it: %s", why)
        with self.programs.timed("capture"):
            casts = Casts.named(self.config.param_dtype, self.config.output_dtype, first_loss_scale(self.config.loss_scale))
            opens = _mentions_autocast(self.loss_fn) if self._opens is None else self._opens
            found = capture_any(
                self.model, self.loss_fn, why, optimizer=self.optimizer, rng_mode=self.config.rng, casts=casts, opens=opens
            )  # fmt: skip
        self.programs.learnt = found.opaque_calls, found.sometimes
        text, constants = self._named_by_content(found)
        return self.programs.with_cuts(text), constants

    def _runs(self, micro_batch: Any) -> bool:
        """Whether the model and its loss run on this batch in Python."""
        if any(p.is_meta for p in self.model.parameters()):
            return False
        loss_fn = self.loss_fn or default_loss
        try:
            run_for_real(self.model, loss_fn, micro_batch, None, lambda _: lambda model, batch: outputs_of(loss_fn(model, batch)))
        except CaptureError:
            return False
        return True

    def text(self, micro_batch: Any) -> tuple[str, dict[str, Tensor]]:
        """The captured text for a micro-batch, and the tensors that only the trace has seen. Once the run's cuts are settled, the text has
        them as its plan."""
        text, constants = self._text(micro_batch)
        text = self.programs.with_cuts(text)
        if self.config.stage_meshes:
            self.programs.by_stage[text] = self._of_stages(micro_batch, text, constants)
        return text, constants

    def _of_stages(self, micro_batch: Any, first: str, constants: dict[str, Tensor]) -> list[str]:
        """The texts for the micro-batches of stages that differ in their data ranks; adds what their traces have seen to `constants`. Error:
        rows that cannot be dealt to a stage, tensors of the trace that depend on how many there are."""
        data = [axes["dp"] for axes in self.config.stage_meshes]
        own = next((x.shape[0] for _, x in leaves(micro_batch) if isinstance(x, torch.Tensor) and x.dim() > 0), 1)
        found: dict[int, str] = {data[0]: first}
        for ranks in data:
            if ranks in found:
                continue
            if own * data[0] % ranks:
                raise ProgramError(
                    f"the {own * data[0]} rows of a micro-batch cannot be dealt to the {ranks} ranks of stage {data.index(ranks)}; use a "
                    f"multiple of {math.lcm(*data)}"
                )
            text, more = self._text(of_rows(micro_batch, own, own * data[0] // ranks))
            found[ranks] = self.programs.with_cuts(text)
            for name, value in more.items():
                if not torch.equal(constants.setdefault(name, value), value):
                    raise ProgramError(f"the trace's tensor '{name}' depends on the rows of a micro-batch; give all stages the same dp")
        return [found[ranks] for ranks in data]

    def _text(self, micro_batch: Any) -> tuple[str, dict[str, Tensor]]:
        cache = self.programs.cache
        with self.programs.timed("capture"):
            key, drops, holders = self._key(micro_batch)
            while (found := cache.get("capture", key)) is not None:
                record, constants = found
                other = other_way(record["ways"], [InputSpec.of(micro_batch).flatten(micro_batch)], self.buffer)
                if other is not None and key is not None:  # what was captured for this way
                    key = key_of(key, repr(other))
                    continue
                old = [(place, p) for place, p in record["drops"]]
                used = {place for place, _ in old}
                text = changed(record["text"], old, [(place, p) for place, p in drops if place in used])
                if text is not None:
                    self.programs.cached.append("capture")
                    return text, constants
                break
            watch = Watch(self.model, self.loss_fn, self.prefix)
            watch.tells = self.config.stage_ranks == 1
            with reads_of(holders) as read:
                captured, text, constants = self._captured(micro_batch, watch)
            drops = [(place, p) for place, p in drops if place not in holders or place in read]
            text = self._named(text, captured.opaque_calls)
            if captured.opaque_calls:
                self.programs.learnt = (captured.opaque_calls, captured.sometimes)
            cache.put("capture", None if captured.opaque_calls else key, {"text": text, "drops": drops, "ways": captured.ways}, constants)
        return text, constants

    def _captured(self, micro_batch: Any, watch: Watch) -> tuple[Captured, str, dict[str, Tensor]]:
        """A capture, its text and the tensors of the trace by what they hold."""
        casts = Casts.named(self.config.param_dtype, self.config.output_dtype, first_loss_scale(self.config.loss_scale))
        captured = capture(
            self.model, self.loss_fn, micro_batch, optimizer=self.optimizer, fullgraph=self.fullgraph, rng_mode=self.config.rng,
            casts=casts, watch=watch, values=self.values, numbers=self.numbers, undecided=self.undecided,
            trained=self.trained if self.evaluated is None else self.evaluated, grows=self.grows, one_attention=self.one_attention,
        )  # fmt: skip
        self._refuse_turns(captured)
        return captured, *self._named_by_content(captured)

    def _named_by_content(self, captured: Captured) -> tuple[str, dict[str, Tensor]]:
        own = {t.name for t in collect(self.model)}.difference(captured.grown)
        return _by_content(captured.text, {n: t.detach().cpu() for n, t in captured.tensors.items() if n not in own})

    def _refuse_turns(self, captured: Captured) -> None:
        """Error: the model changes a buffer that it branches on, between the micro-batches of one step."""
        if captured.rewrites and self.config.stage_ranks > 1:
            raise CaptureError(said(min(captured.rewrites)))
        if captured.begun and self.config.accumulation > 1:
            raise CaptureError(
                f"{captured.begun[0]} is None when a step begins and a tensor after it, so micro-batches of one step would compute different "
                "things; let it begin with zeros, or run the model once before compiling it"
            )
        read = buffers_in(captured.ways) if self.config.accumulation > 1 else set()
        written = set(re.findall(r"^  assign\(%(\d+)", captured.text, re.M)) if read else set()
        read &= {name for number, name in re.findall(r'^buffer %(\d+): \S+ "([^"]*)"', captured.text, re.M) if number in written}
        if read:
            at = next(way["at"] for way in captured.ways if buffers_in([way]) & read)
            raise CaptureError(
                f"{at}: the model branches on '{min(read)}', which it changes, so micro-batches of one step would take "
                "different ways; where only a first run is another one, run the model once before compiling it, else pass accumulation=1"
            )

    def traced(self, micro_batch: Any) -> tuple[str, list[OpaqueCall]]:
        """What a trace finds, whatever was found before."""
        captured, text, _ = self._captured(micro_batch, Watch(self.model, self.loss_fn))
        return text, captured.opaque_calls

    def mark(self, micro_batch: Any) -> str | None:
        """The same on two ranks whose traces find the same, as far as anybody can say. None: nobody can."""
        mark = Fingerprint()
        try:
            self._mark(mark, micro_batch)
        except Unsure:
            return None
        return key_of(mark.digest(), repr(mark.drops))

    def _mark(self, mark: Fingerprint, micro_batch: Any) -> None:
        spec = InputSpec.of(micro_batch)
        mark.settings()
        mark.model(self.model)
        mark.value(self.loss_fn, "loss_fn")
        mark.word([(t.name, t.path, t.dtype, t.shape, t.number) for t in spec.tensors])
        mark.value(dict(spec.constants), "the batch")
        mark.type(type(micro_batch), "the batch")

    def _named(self, text: str, calls: list[OpaqueCall]) -> str:
        """The text with names of opaque calls that no other call of this run has."""
        known = self.programs.opaque.calls if self.programs.opaque is not None else {}
        for call in calls:
            key, number = call.key, 1
            while known.get(call.key, call) != call:
                number += 1
                call.key = f"{key}#{number}"
            if call.key != key:
                text = text.replace(f"module={quote(key)} ", f"module={quote(call.key)} ")
        return text

    def _key(self, micro_batch: Any) -> tuple[str | None, list[tuple[str, float]], dict[str, tuple[Any, str]]]:
        """The key of the capture, the dropout probabilities that it leaves out and who holds them. None when it is not sure what the
        capture depends on."""
        if self.programs.cache.folder is None or not self.fullgraph:
            return None, [], {}
        mark = Fingerprint()
        try:
            self._mark(mark, micro_batch)
        except Unsure as e:
            log.info("the model is captured: %s", e)
            return None, [], {}
        tensors = collect(self.model)
        groups = optimizer_groups(self.optimizer, tensors)
        mark.word(groups.lines(), [groups.of.get(id(t.real)) for t in tensors if t.kind == "param"])
        mark.word(sorted(self.numbers))
        mark.word(sorted(self.undecided))
        mark.word(sorted(self.trained) if self.evaluated is None else ["evaluated", *sorted(self.evaluated)])
        mark.word(repr(self.one_attention))
        settings = {k: v for k, v in self.config.to_dict().items() if k not in _LATER}
        return key_of(mark.digest(), repr(sorted(settings.items()))), mark.drops, mark.holders


def in_python(error: InterlaceError) -> str:
    """Why something runs in Python: the error without its advice."""
    return re.split(r", or pass fullgraph=False|; pass |; leave |; make it a tensor", str(error), maxsplit=1)[0]


def autocast_of(captures: Captures, device: str) -> torch.dtype | None:
    """The region of torch.autocast that a loss function in Python is called in, where nobody has traced it."""
    if captures.config.param_dtype != "autocast" or _mentions_autocast(captures.loss_fn):
        return None
    return torch.get_autocast_dtype(device)


def _mentions_autocast(loss_fn: Any) -> bool:
    """Whether a loss function that nobody has traced may open regions of torch.autocast itself."""
    code = getattr(loss_fn, "__code__", None)
    return bool(getattr(loss_fn, "opens_autocast", code is not None and "autocast" in mentions(code)))


def _by_content(text: str, constants: dict[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Tensors of the trace named by what they hold: programs for several shapes share equal ones and keep others apart."""
    renamed: dict[str, Tensor] = {}
    for name, t in constants.items():
        if not name.startswith("captured."):  # it has a name of its own
            renamed[name] = t
            continue
        flat = t.contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        digest = hashlib.sha256(f"{t.dtype} {tuple(t.shape)} {t.stride()}".encode() + data).hexdigest()[:16]
        new = f"captured.{digest}"
        while new in renamed:  # two tensors with equal contents are two buffers: one of them may be written
            new += "'"
        text = text.replace(f" {quote(name)} plain", f" {quote(new)} plain")
        renamed[new] = t
    return text, renamed
