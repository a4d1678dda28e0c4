"""One run of the model on real values, whose effects are taken back; and what a model makes in its own size when it first runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from interlace.capture.effects import Stored, kept_draws, kept_generators, kept_values
from interlace.capture.inputs import leaves, on_device, rebuild
from interlace.capture.model_tensors import ModelTensor, collect, device_type, swapped, tensors_of
from interlace.capture.watch import Watch
from interlace.capture.writes import Writes, refuse_writes
from interlace.errors import CaptureError

Tensor = torch.Tensor
Run = Callable[[nn.Module, Any], Any]


class Resized(CaptureError):
    """A buffer or tensor attribute that the model puts one of another size or dtype in the place of."""


def resized(where: str, before: Tensor, after: Tensor) -> str:
    was, now = (f"of shape {tuple(t.shape)}" + (f" and {t.dtype}" if before.dtype != after.dtype else "") for t in (before, after))
    return (
        f"{where} is a tensor {was} and the model puts one {now} in its place while it "
        "runs; a program keeps both (where only its first run does so, let it run once before interlace.compile)"
    )


def refuse_empty(written: list[ModelTensor]) -> None:
    """Tensors that an operator resizes when it first writes them: the observers of quantization."""
    for t in written:
        if t.real.numel() == 0:
            raise Resized(f"'{t.name}' has no elements and is written; run the model once before interlace.compile")


def run_for_real(
    model: nn.Module, loss_fn: Run, batch: Any, values: Mapping[int, Tensor] | None, prepare: Callable[[contextlib.ExitStack], Run]
) -> None:  # fmt: skip
    """Runs what `prepare` gives, once, without gradients; buffers, attributes and generators are afterwards as they were. `values`: of
    parameters on meta, by their ids. Errors: a model that fails; parameters that it writes."""
    own = tensors_of(model, model)[0]
    others = [t.real for t in collect(model) if t.kind != "param" and not t.real.is_meta]
    writes = Writes({n: p if values is None else values.get(id(p), p) for n, p in own.items()})
    watch = Watch(model, loss_fn)
    device = device_type(values.values() if values else own.values())
    batch = on_device(batch, torch.device(device))
    with contextlib.ExitStack() as stack:
        stack.callback(watch.restore)
        stack.enter_context(torch.no_grad())
        stack.enter_context(kept_draws(device))
        stack.enter_context(kept_generators())
        if values is not None:
            stack.enter_context(swapped(model, {id(t): values.get(id(t), t) for t in (*model.parameters(), *model.buffers())}))
        run = prepare(stack)
        stack.enter_context(kept_values(others))
        there = {name: p for name, p in model.named_parameters() if name in own}
        try:
            with writes:
                run(model, batch)
            writes.note_others(there, model)
        except CaptureError:
            raise
        except Exception as e:
            raise CaptureError(f"the model fails on the example batch: {type(e).__name__}: {e}") from e
        finally:
            writes.restore()
    refuse_writes({name: own[name].requires_grad for name in writes.by}, writes.by)


def another(batch: Any) -> Any:
    """Another batch: the first rows again and again, and other fractions."""

    def of(t: Tensor) -> Tensor:
        rows = t[:1].expand_as(t).clone()
        return rows * 1.5 if t.is_floating_point() else rows

    return rebuild(batch, {path: of(t) for path, t in leaves(batch) if isinstance(t, Tensor) and t.dim()})


def grow(model: nn.Module, tensors: list[ModelTensor], loss_fn: Run, batch: Any) -> list[str]:
    """Gives buffers and tensor attributes the sizes that the model's first run makes them in (tables of positions), as if it had run once,
    where a run with another batch leaves them as they are, and the dtypes, with the values that they have; gives their names. All else is
    as before."""
    found: dict[int, tuple[ModelTensor, Tensor]] = {}
    kept: dict[int, tuple[ModelTensor, torch.dtype]] = {}

    def prepare(stack: contextlib.ExitStack) -> Run:
        stored = Stored(model, {id(t.real): t for t in tensors if t.kind != "param" and not t.real.is_meta})

        def run(model: nn.Module, batch: Any) -> None:
            sizes = [(t, t.real.shape) for t in tensors if t.kind != "param" and not t.real.is_meta]

            def made() -> dict[int, tuple[ModelTensor, Tensor]]:
                resized = {id(t): (t, t.real.detach().clone()) for t, size in sizes if t.real.shape != size}
                return resized | {id(t): (t, new.detach().clone()) for t, new, _ in stored.replaced() if new.shape != t.real.shape}

            loss_fn(model, batch)
            found.update(made())
            kept.update({id(t): (t, x.dtype) for t, x, _ in stored.replaced() if x.shape == t.real.shape and x.dtype != t.real.dtype})
            if found:  # what goes on from batch to batch would count this one twice
                loss_fn(model, another(batch))
                again = made()
                if any(key not in again or not torch.equal(again[key][1], new) for key, (_, new) in found.items()):
                    found.clear()

        return run

    run_for_real(model, loss_fn, batch, None, prepare)
    for t, new in (*found.values(), *((t, t.real.to(dtype)) for t, dtype in kept.values())):
        t.real.data = new
    return [t.name for t, _ in (*found.values(), *kept.values())]
