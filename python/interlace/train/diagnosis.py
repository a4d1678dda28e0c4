"""How a Trainer finds out which op of which module first makes a value that is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interlace.compiling.states import WEIGHT
from interlace.errors import InterlaceError
from interlace.train.run import TrainerBase

Tensor = torch.Tensor


class TrainerDiagnosis(TrainerBase):
    """Looking at what went wrong."""

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
        self._flush()
        record = result.get("nonfinite")
        where = self._nonfinite_inputs(inputs) or (
            describe_op(record) if record else "run again with debug=True to see which op made it"
        )
        return (
            f"step {self.steps}: the loss is {loss.item()}; {where}. The update of this step was made; set clip_norm or "
            "skip_nonfinite to have such a step refused before the update"
        )


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
