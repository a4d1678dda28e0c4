"""Operators whose results have sizes that depend on data.

Where the batch alone decides, they are captured as the example batch has them (ways.py). The CTC loss is captured for targets of any
length: its memory goes by the longest, so that a sample of that length is added, whose loss nobody looks at; and targets that
masked_select has put one behind the other are rows again. bincount with a minlength gives as many.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from interlace.capture.check_ops import promise
from interlace.capture.constants import NotConstant
from interlace.capture.functional import op_info

if TYPE_CHECKING:
    from interlace.capture.recorder import Recorder

aten = torch.ops.aten
Tensor = torch.Tensor


class Sized:
    """Of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.selected: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by the id of what masked_select gave: that, and its arguments
        self._losses: dict[int, tuple[Any, ...]] = {}  # by the storage of its second result: a CTC loss's arguments and first result
        self.forms: dict[Any, Callable[..., Any]] = {
            aten.index.Tensor: self._index, aten.masked_select.default: self._select, aten._ctc_loss.Tensor: self._ctc,
            aten._ctc_loss_backward.Tensor: self._ctc_backward, aten.bincount.default: self._count,
            **{func: functools.partial(self._each, func) for func in (aten.binary_cross_entropy.default, aten.soft_margin_loss.default)},
        }  # fmt: skip

    def promised(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """The results of a call on fake tensors; where the batch alone decides their sizes, of those that the example gives."""
        rec = self.recorder
        try:
            return promise(func, args, kwargs, rec.device)
        except DynamicOutputShapeException as e:
            try:
                real = rec.ways.results(func, args, kwargs, rec.sites.place())
            except NotConstant:
                raise e from None
        with rec.fakes:
            made = [torch.empty_strided(tuple(r.shape), r.stride(), dtype=r.dtype, device="cpu") for r in real]
        return made[0] if len(func._schema.returns) == 1 else tuple(made)

    def _index(self, x: Tensor, indices: list[Tensor | None]) -> Any:
        """Masks among the indices become numbers of elements."""
        if all(i is None or i.dtype != torch.bool for i in indices):
            return None
        with self.recorder:
            each = [(i,) if i is None or i.dtype != torch.bool else torch.nonzero(i).unbind(1) for i in indices]
            return aten.index.Tensor(x, [i for group in each for i in group])

    def _count(self, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
        """Numbers below a given one; the step fails where there are others, unless the batch alone says so."""
        if minlength == 0:
            return None
        with self.recorder:
            if x.numel() and self._known((x < minlength).all()) is False:
                return None
            dtype = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
            each = torch.ones_like(x, dtype=dtype) if weights is None else weights.to(dtype)
            return each.new_zeros(minlength).scatter_add(0, x.long(), each)

    def _each(self, func: OpOverload, *args: Any) -> Any:
        """A loss as its kernel computes it, which gives the result another size meanwhile: of each element, then their mean or sum."""
        args = (*args, *(a.default_value for a in func._schema.arguments[len(args) :]))
        if (reduction := args[-1]) == 0:
            return None
        with self.recorder:
            each = func(*args[:-1], 0)
            return each.mean() if reduction == 1 else each.sum()

    def _select(self, x: Tensor, mask: Tensor) -> Any:
        """Targets of a CTC loss, so far of no known size; nothing else may use them."""
        if x.dtype.is_floating_point or x.dim() != 2 or x.shape != mask.shape:
            return None
        with self.recorder.fakes:
            made = torch.empty(ShapeEnv().create_unbacked_symint(), dtype=x.dtype)  # type: ignore[call-overload]
        self.selected[id(made)] = made, x, mask
        return made

    def _holds(self, t: Tensor) -> bool:
        """Whether the batch alone decides that it is true, which is looked at before each step."""
        return bool(self._known(t))

    def _known(self, t: Tensor) -> Any:
        with contextlib.suppress(NotConstant):
            return self.recorder.ways.number(t, self.recorder.sites.place())
        return None

    def _ctc(self, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int = 0, zero: bool = False) -> Any:
        rec = self.recorder
        with rec:
            if id(targets) in self.selected:
                _, x, mask = self.selected[id(targets)]
                if not self._holds((mask.sum(-1) == lengths).all()):
                    return None
                targets = x.masked_fill(~mask, 0).gather(1, torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True))
            elif targets.dim() != 2 or not self._holds((lengths <= targets.shape[1]).all()):
                return None
            steps, rows, longest = log_probs.shape[0], log_probs.shape[1], targets.shape[1]
            log_probs = torch.cat([log_probs, log_probs.new_zeros(steps, 1, log_probs.shape[2])], 1)
            targets = torch.cat([targets, targets.new_zeros(1, longest)])
            inputs = torch.cat([inputs, inputs.new_full((1,), steps)])
            lengths = torch.cat([lengths, lengths.new_full((1,), longest)])
        args = (log_probs, targets, inputs, lengths, blank, zero)
        with rec.fakes:
            sizes = (rows + 1,), (rows + 1, steps, 2 * longest + 1)
            loss, alpha = (torch.empty(size, dtype=log_probs.dtype, device="cpu") for size in sizes)
        rec.emit(aten._ctc_loss.Tensor, op_info(aten._ctc_loss.Tensor), args, {}, rec.arguments(args, {}), (loss, alpha))
        self._losses[alpha.untyped_storage()._cdata] = (*args[:4], loss, alpha, blank, zero)
        with rec:
            return loss[:rows].clone(), alpha

    def _ctc_backward(self, grad: Tensor, *args: Any) -> Any:
        rec = self.recorder
        args = self._losses[args[5].untyped_storage()._cdata]
        with rec:
            args = (torch.cat([grad, grad.new_zeros(1)]), *args)
        with rec.fakes:
            made = torch.empty_like(args[1], memory_format=torch.contiguous_format)
        func = aten._ctc_loss_backward.Tensor
        rec.emit(func, op_info(func), args, {}, rec.arguments(args, {}), made)
        with rec:
            return made[:, :-1]
