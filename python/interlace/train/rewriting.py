"""Before a step or an evaluation: parameters that the model's forward writes (capture/rewrites.py) are written."""

from __future__ import annotations

from typing import Any

import torch

from interlace.capture.rewrites import leaves_of, rewrites_of
from interlace.capture.ways import buffer_of, computed
from interlace.compiling.states import WEIGHT
from interlace.errors import InterlaceError
from interlace.train.run import Run

Tensor = torch.Tensor


class Rewriting:
    """Of the programs of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._known: tuple[Any, dict[str, list[Any]]] = None, {}  # a program, and its rewrites

    def before(self, program: Any, inputs: list[list[Tensor]]) -> None:
        """`program`: the one that will run on these micro-batches. Every rank must call it. Error: micro-batches would write different
        values."""
        first = self._known[0] is not program
        if first:
            self._known = program, rewrites_of(program)
        if not (rewrites := self._known[1]):
            return
        run, names = self.run, set(leaves_of(rewrites))
        run.flush()
        run.settle_save()
        values = self._values(names)
        with torch.no_grad():
            found = {name: computed(ops, inputs[0], values.__getitem__)[0] for name, ops in rewrites.items()}
            for name in [name for name in found if "@" in name]:
                of, one = name.partition("@")[0], found.pop(name)
                ops, other = rewrites[name], found[of]
                if ops[-1][0] == "aten.embedding_renorm":  # only these rows are read
                    rows = computed(ops[: ops[-1][1][1]["v"] + 1], inputs[0], values.__getitem__)[0]
                    one, other = one[rows], other[rows]
                self._refuse(of, torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True))
            if first and len(inputs) > 1:
                again = {name: computed(rewrites[name], inputs[0], (values | found).__getitem__)[0] for name in found}
                for name, t in found.items():
                    alone = not leaves_of({name: rewrites[name]}, "input")
                    self._refuse(name, alone and torch.allclose(t, again[name], rtol=1e-5, atol=1e-7, equal_nan=True))
            for name, t in found.items():
                run.states.fill_from(name, WEIGHT, t)

    @staticmethod
    def _refuse(name: str, same: bool) -> None:
        if not same:
            raise InterlaceError(
                f"parameter '{name}' is changed by each run of the model, so that those of one step (micro-batches, or calls in the loss "
                "function) would compute with different values; change it between two steps, or once before it is used"
            )

    def _values(self, names: set[str]) -> dict[str, Tensor]:
        """Of parameters and buffers, whole."""
        run, values = self.run, dict[str, Tensor]()
        here = {name: run.states.resident(name) for name in names.intersection(run.states.parameters)}
        values = {name: t for name, t in here.items() if t is not None}
        if len(values) < len(here):
            values |= {p.name: t.clone() for p, t in run.states.whole(WEIGHT, everywhere=True) if t is not None and p.name in here}
        return values | {name: buffer_of(run.model, name) for name in names - here.keys()}
