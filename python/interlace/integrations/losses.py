"""The loss of a micro-batch as transformers.Trainer computes it, with the weight that the micro-batch has in its step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from interlace.capture.reach import mentions
from interlace.capture.sites import is_installed

Tensor = torch.Tensor
# Entries of every micro-batch. The weight: 0 for one that only fills the last step of an epoch; two of them, of the batch as it is and of
# one of fewer rows, of which ROWS has as many.
WEIGHT, ROWS, ITEMS = "interlace_weight", "interlace_rows", "num_items_in_batch"


class Loss:
    """Of a class of this package, so that nobody looks into the whole trainer. `short`: rows of each entry in the step's smaller batches."""

    opens_autocast = True

    def __init__(self, owner: Any, outputs: bool) -> None:
        self.owner, self.outputs = owner, outputs
        self.short: dict[str, int] = {}

    def followed(self) -> tuple[frozenset[str], tuple[Any, ...], Any]:
        """What a capture follows of it (capture/reach.py)."""
        return frozenset({"compute_loss"}), (self.owner.compute_loss_func,), self.owner

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        inputs = dict(batch)
        weight, items, rows = (inputs.pop(name, None) for name in (WEIGHT, ITEMS, ROWS))
        if weight is None:
            return self._plain(model, inputs, items)
        if _get_current_dispatch_mode() is None and not weight.any():  # called for what it hands on, which only fills a step
            with unheard(self.owner):
                if torch.is_grad_enabled():  # the step runs in Python
                    return self._weighed(model, inputs, items, weight[0])
                return self._plain(model, inputs, items) * 0
        loss = self._weighed(model, dict(inputs), items, weight[0])
        if rows.shape[0] in self.short.values():
            few = {n: t[: self.short[n]] if n in self.short else t for n, t in inputs.items()}
            loss = loss + self._weighed(model, few, items, weight[1])
        return loss

    def _weighed(self, model: nn.Module, inputs: dict[str, Any], items: Any, weight: Tensor) -> Tensor:
        """Statistics (of BatchNorm) stay as they are where the weight is 0."""
        tables = [m._buffers for m in keeping_statistics(model)]
        kept = [{n: b for n, b in table.items() if b is not None} for table in tables]
        try:
            for table, own in zip(tables, kept, strict=True):  # forward writes into copies: what backward saw must not change
                table.update({n: b.clone() for n, b in own.items()})
            loss: Tensor = self._plain(model, inputs, items)
            with torch.no_grad():
                for table, own in zip(tables, kept, strict=True):
                    for n, b in own.items():
                        b.copy_(torch.where(weight != 0, cast("Tensor", table[n]), b))
        finally:
            for table, own in zip(tables, kept, strict=True):
                table.update(own)
        return loss * weight.to(loss.dtype)

    def _plain(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.owner.compute_loss_context_manager())
            stack.enter_context(self.owner.autocast())
            if _get_current_dispatch_mode() is not None:  # it is traced
                stack.enter_context(unheard(self.owner, _of_libraries(type(self.owner))))
            found: Any = self.owner.compute_loss(model, inputs, return_outputs=self.outputs, num_items_in_batch=items)
        if not self.outputs:
            return found.mean() if found.dim() else found
        loss, outputs = found
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["cache"])
        kept = [v for k, v in outputs.items() if k not in (*ignored, "loss")] if isinstance(outputs, Mapping) else outputs[1:]
        return {"loss": loss.mean() if loss.dim() else loss, **dict(_flat(kept, ""))}


@contextlib.contextmanager
def unheard(owner: Any, names: Set[str] | None = None) -> Iterator[None]:
    """What a loss leaves in the owner's attributes (of these names), and logs, is undone: it was traced, or nobody asked for it."""
    before = {n: x for n, x in vars(owner).items() if names is None or n in names}
    kept = [found for x in before.values() for found in _containers(x, 3)]
    quiet, owner.quiet = owner.quiet, True
    try:
        yield
    finally:
        for name in [n for n in vars(owner) if n not in before and (names is None or n in names)]:
            delattr(owner, name)
        vars(owner).update(before)
        owner.quiet = quiet
        for container, items in kept:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(items)


def _of_libraries(cls: type) -> frozenset[str]:
    """What compute_loss of trainers of other libraries mentions, and the methods that it calls (TRL's metrics), and none of the user's."""
    found: dict[bool, set[str]] = {True: {"compute_loss"}, False: {"compute_loss"}}
    for installed, names in found.items():
        bases = [c for c in cls.__mro__ if not c.__module__.startswith("transformers.")]
        code = [(n, f.__code__) for c in bases for n, f in vars(c).items() if hasattr(f, "__code__")]
        code = [(n, c) for n, c in code if is_installed(c.co_filename) == installed]
        size = 0
        while size < len(names):
            size = len(names)
            names |= set().union(*(mentions(c) for n, c in code if n in names))
    return frozenset(found[True] - found[False])


def _containers(x: Any, depth: int) -> list[tuple[Any, Any]]:
    if type(x) is list:
        return [(x, list(x))] if len(x) < 4096 else []
    if not isinstance(x, dict) or depth == 0 or len(x) >= 4096:
        return []
    return [(x, dict(x)), *(found for item in x.values() for found in _containers(item, depth - 1))]


def keeping_statistics(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if getattr(m, "track_running_stats", False)]


def _flat(x: Any, path: str) -> list[tuple[str, Tensor]]:
    """The tensors in it, by where they are: "2/0" in a tuple, "2/=hidden" in a dict."""
    if isinstance(x, Tensor):
        return [(path, x)]
    if isinstance(x, Mapping):
        items = [(f"={k}", v) for k, v in x.items()]
    elif isinstance(x, (tuple, list)):
        items = [(str(i), v) for i, v in enumerate(x)]
    else:
        return []
    return [found for k, v in items for found in _flat(v, f"{path}/{k}" if path else k)]


def nested(found: Mapping[str, Tensor]) -> Any:
    """What _flat took apart; tuples for lists."""
    if "" in found:
        return found[""]
    parts: dict[str, dict[str, Tensor]] = {}
    for path, t in found.items():
        head, _, rest = path.partition("/")
        parts.setdefault(head, {})[rest] = t
    if any(head.startswith("=") for head in parts):
        return {head[1:]: nested(rest) for head, rest in parts.items()}
    return tuple(nested(parts[head]) for head in sorted(parts, key=int))
