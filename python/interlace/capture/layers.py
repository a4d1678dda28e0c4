"""capture_layers(): a language model, whose blocks are alike, becomes three small programs: what runs before its blocks
(embedding), one block, and what runs after them (head and loss).

The model is given with one block in its list and traced once. At the block's call the graph is cut: the tensors that
enter become inputs, and each part is differentiated by itself, from the gradient of what leaves it to the gradients of
its parameters and of the activation that entered:

    input %20: f32[b,s,h] "hidden"                input %90: f32[b,s,h] "hidden.grad"
    %40: f32[b,s,h] = ... {fwd}                   output(%40) {fwd name="hidden"}
    %99: f32[b,s,h] = ... {bwd}                   output(%99) {bwd name="hidden.grad"}
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from interlace.capture.casts import NO_CASTS
from interlace.capture.groups import Groups
from interlace.capture.inputs import InputSpec, leaves, path_name, rebuild
from interlace.capture.literals import quote
from interlace.capture.model_tensors import check_parameters, collect
from interlace.capture.trace import Trace
from interlace.capture.tracing import check_model, without_collection
from interlace.errors import CaptureError

Tensor = torch.Tensor
ROLES = ("embedding", "block", "head")
_VALUE = re.compile(r"%(\d+)")


class _Cut(nn.Module):
    """Stands in the model's list for its block and hands the call over."""

    def __init__(self, block: nn.Module, call: Callable[[nn.Module, tuple, dict], Any]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.block, args, kwargs)


class _LayerTrace(Trace):
    """One run of the model; the recorder writes into the lines of the part that runs."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, batch: Any) -> None:
        tensors = collect(model)
        check_parameters(tensors)
        super().__init__(model, tensors, InputSpec.of(batch), True, {}, NO_CASTS)
        self.blocks = blocks
        self.lines: dict[str, list[str]] = {role: [] for role in ROLES}
        self._entered: Tensor | None = None  # the activation that entered the part that runs

    def _begin(self, role: str) -> None:
        self.recorder.lines = self.lines[role]
        self.recorder.part = "fwd"

    def _new_input(self, like: Tensor, name: str, differentiable: bool = False) -> Tensor:
        with _disable_current_modes(), self.fakes:
            fake = torch.empty(like.shape, dtype=like.dtype, device="cpu", requires_grad=differentiable)
        self._input_lines.append(f"input {self.recorder.declare(fake)} {quote(name)}")
        return fake

    def _differentiate(self, leaves_at: Tensor, seed: Tensor | None) -> None:
        """The backward of the part that ends with `leaves_at`: gradients of the parameters it used and of what entered it."""
        rec = self.recorder
        rec.part = "bwd"
        params = [t for t in self.tensors if t.kind == "param" and t.real.requires_grad]
        wanted = [p.fake for p in params] + ([self._entered] if self._entered is not None else [])
        grads = torch.autograd.grad(leaves_at, wanted, seed, allow_unused=True)  # type: ignore[arg-type]
        for p, g in zip(params, grads, strict=False):
            if g is not None:
                rec.mark("grad", f"%{self.ids[id(p)]}", f"%{rec.value_of(g)}")
        if self._entered is not None:
            if grads[-1] is None:
                raise CaptureError("a block's result does not depend on the activation that enters it")
            rec.mark("output", f"%{rec.value_of(grads[-1])}", attrs=' name="hidden.grad"')

    def _end(self, hidden: Tensor) -> None:
        self.recorder.mark("output", f"%{self.recorder.value_of(hidden)}", attrs=' name="hidden"')
        self._differentiate(hidden, self._new_input(hidden, "hidden.grad"))

    def _block(self, block: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The call of the one block: ends the embedding, traces the block, begins the head."""
        call = {"args": args, "kwargs": kwargs}
        tensors = [(path, leaf) for path, leaf in leaves(call) if isinstance(leaf, Tensor)]
        floating = [path for path, t in tensors if t.requires_grad]
        if len(floating) != 1:
            raise CaptureError(f"{len(floating)} differentiable tensors enter a block; layers that hand on one activation can be planned")
        self._end(dict(tensors)[floating[0]])
        self._begin("block")
        fresh = {
            path: self._new_input(t, "hidden" if path == floating[0] else path_name(path[1:]), path == floating[0])
            for path, t in tensors
        }
        self._entered = fresh[floating[0]]
        new = rebuild(call, fresh)
        result = block(*new["args"], **new["kwargs"])
        made = [(path, t) for path, t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        if not made or made[0][1].shape != self._entered.shape:
            raise CaptureError("a block's first result must be an activation of the sizes that enter it")
        self._end(made[0][1])
        self._begin("head")
        self._entered = self._new_input(made[0][1], "hidden", True)
        return rebuild(result, {made[0][0]: self._entered})

    def _forward(self, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> None:
        self._begin("embedding")
        block = self.blocks[0]
        self.blocks[0] = _Cut(block, self._block)
        try:
            super()._forward(loss_fn, batch)
        finally:
            self.blocks[0] = block

    def _gradients(self, params: list, scale: Any) -> None:
        if self._entered is None:
            raise CaptureError("the model did not call the blocks of its list")
        self._differentiate(self.outputs["loss"], None)

    def program(self, role: str) -> str:
        """The text of one part, with what it reads."""
        whole = self.text(Groups(["adamw"], {id(t.real): 0 for t in self.tensors if t.kind == "param"}), 1, "keyed")
        head, _, _ = whole.partition("phase micro_batch")
        body = "\n".join(self.lines[role])
        used = set(_VALUE.findall(body))
        lines = []
        for line in head.splitlines():
            declared = line.startswith(("param ", "buffer ", "input ", "const "))
            if declared and _VALUE.findall(line)[0] not in used:
                continue
            lines.append(line)
        lines.insert(1, f"meta layer {quote(role)}")
        return "\n".join(lines) + f"\nphase micro_batch takes () gives () {{\n{body}\n}}\n"


def capture_layers(model: nn.Module, blocks: nn.ModuleList, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> dict[str, str]:
    """Program texts by role: "embedding", "block", "head". `blocks` is the model's list, with one block in it.

    Sizes of dimension 0 and 1 of the batch are the symbols b and s. Raises CaptureError, as capture does, and for a model
    whose blocks take or give anything but one activation (and tensors without gradients).
    """
    check_model(model)
    with without_collection():
        trace = _LayerTrace(model, blocks, batch)
        trace.run(loss_fn, batch)
        trace.check()
        return {role: trace.program(role) for role in ROLES}
