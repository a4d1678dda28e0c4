"""Finding out which op of which module first makes a value that is not finite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from interlace.capture import InputSpec
from interlace.compiling.states import WEIGHT
from interlace.errors import InterlaceError
from interlace.train.run import Run

Tensor = torch.Tensor


class NonFiniteError(InterlaceError):
    """The loss or the gradient of a step is infinite or not a number."""


class Diagnosis:
    """Looking at what went wrong."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def explain_nonfinite(self, inputs: Any) -> str | None:
        with self._run.peers.guard():
            return self._find_culprit(inputs)

    def inspect(self, inputs: Any, stop_at: str = "") -> dict[str, Any]:
        if self._run.config.mode == "eager":
            raise InterlaceError('inspect() looks at the compiled program; in mode="eager" use print and pdb in the model itself')
        with self._run.peers.guard():
            return self._run.executor.debug_step(inputs, self._run.steps, stop_at)

    def _find_culprit(self, inputs: Any) -> str | None:
        # Ranks run op by op together or not at all: the ops talk to the other ranks.
        wrong = self._run.peers.exchange(f"inputs of step {self._run.steps}", self._nonfinite_inputs(inputs))
        for rank, text in enumerate(wrong):
            if text is not None:
                return str(text) if self._run.world_size == 1 else f"on rank {rank}, {text}"
        mine: list[object] | None
        if self._run.config.mode == "eager":
            text = self._run.runner.find_nonfinite(inputs, self._run.steps)  # type: ignore[attr-defined]
            mine = None if text is None else [1, text]
        else:
            record = first_cause(self._run.program, self._run.executor.debug_step(inputs, self._run.steps))
            # What arrives from another rank, or comes from parameters that are bad already, is not the cause.
            carried = record is not None and record["name"].partition(".")[0] in ("gather", "reduce", "all_reduce")
            mine = None if record is None else [2 if carried else 1, describe_op(record)]
        everyone = self._run.peers.exchange(f"culprit of step {self._run.steps}", mine)
        found = sorted((order, rank, text) for rank, (order, text) in enumerate(m or (9, "") for m in everyone) if text)
        if found and found[0][0] < 2:
            _, rank, text = found[0]
            return text if self._run.world_size == 1 else f"on rank {rank}, {text}"
        for p in self._run.states.parameters.values():
            for part, _, _ in self._run.states.parts(p, WEIGHT):
                if part.is_floating_point() and not torch.isfinite(part).all():
                    return f"parameter '{p.name}' is not finite already"
        return found[0][2] if found else None

    def _nonfinite_inputs(self, inputs: Any) -> str | None:
        eager = self._run.config.mode == "eager"
        if self._run.takes_any:
            return None  # they are beside the inputs
        for i, part in enumerate(inputs):
            spec = InputSpec.of(part) if eager else self._run.spec
            for t, x in zip(spec.tensors, spec.flatten(part) if eager else part, strict=True):
                if x.is_floating_point() and not torch.isfinite(x).all():
                    return f"batch entry '{t.name}' itself has values that are not finite (micro-batch {i})"
        return None

    def nonfinite_norm(self, inputs: Any) -> str:
        """What to say of a step whose gradient is not finite."""
        with self._run.peers.guard():
            culprit = self._find_culprit(inputs)
        cause = culprit or "every micro-batch alone is finite: the sum of the gradients overflows"
        return (
            f"step {self._run.steps}: the norm of the gradient is {self._run.norm}; {cause}. The parameters are as they were before this "
            "step; lower the learning rate, look at this batch, or leave such steps out with skip_nonfinite=True"
        )

    def nonfinite_loss(self, inputs: Any, loss: Tensor, result: Mapping[str, Any]) -> str:
        """What to say of a step whose loss alone is not finite."""
        self._run.flush()
        record = result.get("nonfinite")
        config = self._run.config
        if config.mode == "eager":
            again = "with clip_norm the module that made it would be named"
        else:
            again = "look at this batch" if config.stage_ranks > 1 else "run again with debug=True to see which op made it"
        where = self._nonfinite_inputs(inputs) or (describe_op(record) if record else again)
        return (
            f"step {self._run.steps}: the loss is {loss.item()}; {where}. The update of this step was made; set clip_norm or "
            "skip_nonfinite to have such a step refused before the update"
        )


_LINE = re.compile(r"^  (?:(%\d+:.*) = )?([\w.]+)\((.*)\) \{", re.MULTILINE)


def _left_out(program: str, bad: set[str]) -> set[str]:
    """Values that come to no loss, gradient or other rank, as far as what is made of them is bad: masks and conversions leave them out (T5's
    log(0))."""
    counts, used = set[str](), set[str]()
    for results, name, operands in reversed(_LINE.findall(program)):  # users come behind what they read
        made = re.findall(r"(%\d+):", results)
        # An output, an update, a transfer; a sum of gradients.
        passes = (not name.startswith("aten.") and name != "view") or name.endswith("_") or " into " in results
        read = set(re.findall(r"%\d+", operands))
        if passes or any((v in counts or v not in used) and (v in bad or name == "view") for v in made):
            counts |= read
        used |= read
    return used - counts


def first_cause(program: str, report: Mapping[str, Any]) -> Any:
    """Of a debug run, the op that first made a value that is not finite and is not left out of all that counts."""
    bad = {v["value"] for op in report["ops"] for v in op["results"] if v["nonfinite"]}
    left_out, first = _left_out(program, bad), report["first_nonfinite"]

    def counts(op: Mapping[str, Any]) -> bool:
        return any(v["value"] not in left_out for v in op["results"] if v["nonfinite"])

    if first is None or counts(first):
        return first
    others = [op for op in report["ops"] if counts(op)]
    return next((op for op in others if "inf" not in op["text"]), others[0] if others else None)  # asked for: a mask


def describe_op(record: Mapping[str, Any]) -> str:
    """An op of a debug run as words: what it is, in which module, and where the user wrote it."""
    parts = [f"the first such value comes from {record['name']} ({record['phase']}, micro-batch {record['micro_batch']})"]
    if record["module"]:
        parts.append(f"in module '{record['module']}'")
    if record["source"]:
        parts.append(f"at {record['source']}")
    bad = [v for v in record["results"] if v["nonfinite"]]
    if bad:
        parts.append(f"({bad[0]['nonfinite']} of the elements of {bad[0]['type']})")
    return " ".join(parts)
