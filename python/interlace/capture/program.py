"""capture(): a model, its loss function and an example batch become program text at the level "captured"
(docs/ir.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from interlace.capture import caches
from interlace.capture.attention import OneAttention, attention_with_dropout
from interlace.capture.casts import NO_CASTS, Casts, regions_opened
from interlace.capture.effects import as_after, begins, drawing_line, generators, grows, kept_generators, kept_of, refusal
from interlace.capture.groups import optimizer_groups
from interlace.capture.inputs import InputSpec
from interlace.capture.loss import LossForm
from interlace.capture.model_tensors import ModelTensor, Replaced, check_parameters, collect, count_as_buffers, device_type
from interlace.capture.numbers import asked_as_python
from interlace.capture.opaque import LOSS, TAIL, TOLD, CalledOtherwise, OpaqueCall, Unfit, learn_calls, only_in
from interlace.capture.own_draws import RATHER
from interlace.capture.reads import TURNS, Depends, Hidden, Telling, around
from interlace.capture.real_run import Resized, grow
from interlace.capture.rewrites import Written
from interlace.capture.sites import OUTSIDE, is_installed
from interlace.capture.trace import Trace
from interlace.capture.tracing import check_model, rank_asked, without_collection
from interlace.capture.watch import Change, Watch
from interlace.capture.ways import Counts, Way
from interlace.capture.writes import FrozenWritten
from interlace.capture.written import WrittenAttention
from interlace.errors import CaptureError

log = logging.getLogger("interlace")
_OURS = (CaptureError, DataDependentOutputException, DynamicOutputShapeException, type(None))  # causes of errors that are not the user's
_STAND = 16  # lines where tensors stand for what is read
_STACKED = 4  # products of a sum, from which they are one
Tensor = torch.Tensor


@dataclasses.dataclass
class Captured:
    """A captured training step of one micro-batch."""

    text: str
    input_spec: InputSpec
    params: dict[str, int]  # name (first of tied names) -> value id
    buffers: dict[str, int]  # buffers, plain tensor attributes and other tensors the model reads, name -> value id
    consts: dict[str, int]
    tensors: dict[str, Tensor]  # the real tensors of `params` and `buffers`, by the same names
    aliases: dict[str, str]  # tied name -> name in `params`
    outputs: list[str]  # "loss" first
    opaque: list[str]  # paths of the modules that run in Python
    opaque_calls: list[OpaqueCall]  # what OpaqueTable needs to run them
    sometimes: list[str]  # parameters that have a gradient in steps in which an opaque module uses them, and no other user
    num_ops: int
    seconds: float
    ways: list[Way]  # what Python has read of the example batch
    grown: list[str]  # buffers that have got another size
    begun: list[str]  # places of None that a step puts tensors into
    rewrites: list[str]  # trained parameters that the model writes


def capture(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any] | None, example_batch: Any, *,
    optimizer: torch.optim.Optimizer | None = None, micro_batches: int = 1, symbolic: bool | Collection[str] = False,
    fullgraph: bool = True, rng_mode: str = "keyed", casts: Casts = NO_CASTS, numbers: Collection[str] = (),
    watch: Watch | None = None, values: Mapping[int, Tensor] | None = None, undecided: Collection[str] = (),
    trained: Collection[str] = (), grows: bool = False, one_attention: OneAttention | None = None,
) -> Captured:  # fmt: skip
    """Traces one micro-batch of forward, loss and backward on fake tensors; no real memory is used.

    `example_batch` is the batch of a step; with `micro_batches` > 1 it is cut along dimension 0 and the first part is
    traced. `loss_fn(model, batch)` gives a scalar loss, or a dict with "loss" or a tuple with the loss first, whose
    other tensors become named outputs; None means `model(**batch).loss` for dict-like batches, else `model(batch)`.
    `symbolic` leaves the sizes of dimension 0 ("b") and 1 ("s") of the inputs open. `rng_mode` "compat" asks the
    runtime for one generator in program order, as eager PyTorch has, instead of keyed streams. `casts` has the model
    run in another precision than that of its parameters. `numbers`: places of numbers (see watch.py) that become buffers of the
    program, by their names. `watch`: of the model and loss function as they are, made here when not given.
    `values`: of parameters on meta, by their ids, for the real run that opaque modules are learnt from. `undecided`: places ("net.py:12")
    where Python may not read the example batch. `trained`: parameters, by name, that are trained with a gradient of zeros where the loss does
    not depend on them; the text says so in a line `meta unused`, and whoever runs it leaves them as they were.

    `one_attention`: which attention becomes one operator (attention.py, written.py).
    With `grows`, buffers and tensor attributes that the model makes in another size when it first runs get that size in the model (`grown`).

    Where Python branches on the batch the program is that of the example, and holds for batches that take the same ways (`ways`, see
    ways.py): whoever runs it looks.

    Raises CaptureError: the message names the parameter, the batch entry or the source line, and what to do.
    """
    begin = time.perf_counter()
    check_model(model)
    if rng_mode not in ("keyed", "compat"):
        raise CaptureError(f"unknown rng_mode '{rng_mode}'; it is 'keyed' or 'compat'")
    tensors = collect(model)
    check_parameters(tensors)
    groups = optimizer_groups(optimizer, tensors)
    whole = InputSpec.of(example_batch)
    batch = whole.split(example_batch, micro_batches)[0] if micro_batches > 1 else example_batch
    written = WrittenAttention(None if symbolic else one_attention)
    with without_collection(), attention_with_dropout(one_attention), written.followed():
        loss_fn = loss_fn or default_loss
        watch = watch or Watch(model, loss_fn)
        trace, grown, rewrites = None, list[str](), False
        while trace is None:
            try:
                traced = functools.partial(
                    _whole, model, tensors, batch, symbolic=symbolic, fullgraph=fullgraph, casts=casts, numbers=numbers, watch=watch,
                    values=values, undecided=undecided, trained=trained, rewrites=rewrites, written=written,
                )  # fmt: skip
                trace = _traced(traced, loss_fn, casts, device_type(t.real for t in tensors))
                trace = trace if written.settled(trace.recorder) else None
            except Counts as e:
                undecided = {*undecided, *e.places}
            except Written:
                if symbolic or rewrites:
                    raise
                rewrites = True
            except FrozenWritten as e:
                count_as_buffers(model, e.names)
                tensors = collect(model)
            except Resized:
                if not grows or grown or not (grown := grow(model, tensors, loss_fn, batch)):
                    raise
        text = _stacked(trace.text(groups, micro_batches, rng_mode))
    params = {t.name: trace.ids[id(t)] for t in trace.tensors if t.kind == "param"}
    # What modules give is of the trace alone; its classes need not be known to other ranks.
    opaque_calls = [dataclasses.replace(c, result=None) for calls in trace.opaque_calls.values() for c in calls]
    return Captured(
        text=text, input_spec=trace.spec, params=params,
        buffers={t.name: trace.ids[id(t)] for t in trace.tensors if t.kind != "param"}, consts=trace.consts,
        tensors={t.name: t.real for t in trace.tensors},
        aliases={a: t.name for t in trace.tensors for a in t.aliases}, outputs=list(trace.outputs),
        opaque=list(trace.opaque_calls), opaque_calls=opaque_calls,
        sometimes=only_in(opaque_calls, params, trace.recorder.lines) if opaque_calls else [],
        num_ops=trace.recorder.num_ops, seconds=time.perf_counter() - begin, ways=trace.ways.read, grown=grown,
        begun=[c.where for c in trace.begun], rewrites=list(trace.rewrites),
    )  # fmt: skip


def _stacked(text: str) -> str:
    """The program whose sums of products of few rows, the gradients of a recurrent net's weights, are products of all rows."""
    products, sums = (Counter(re.findall(rf": (\S+) = aten\.{name}\(", text)) for name in ("mm", r"add\.Tensor"))
    if all(min(count, sums[of]) < _STACKED for of, count in products.items()):
        return text
    from interlace import _core

    program = _core.Program.parse(text)
    program.run_passes(f"canonicalize,stack_products(least={_STACKED})")
    return program.print()


def default_loss(model: nn.Module, batch: Any) -> Any:
    """model(**batch).loss for dict-like batches, else model(batch)."""
    if hasattr(batch, "keys"):
        out = model(**batch)
        loss = out["loss"] if isinstance(out, dict) and "loss" in out else getattr(out, "loss", out)
        if loss is None:
            raise CaptureError("the model gave no loss; put 'labels' into the batch or pass a loss_fn")
        return loss
    return model(batch)


def _traced(whole: Callable[..., Trace], loss_fn: Callable[[nn.Module, Any], Any], casts: Casts, device: str) -> Trace:
    """The finished trace that `whole` gives, under torch.autocast where that is asked for and the loss function does not open it itself."""
    if not casts.autocast:
        return whole(loss_fn)
    with regions_opened(device) as opened:
        try:
            trace = whole(loss_fn)
        except CaptureError as e:
            e.opens = bool(opened)  # type: ignore[attr-defined]
            raise
    if opened:
        return trace

    def cast(model: nn.Module, batch: Any) -> Any:
        with torch.autocast(device):
            return loss_fn(model, batch)

    return whole(cast)


def _whole(
    model: nn.Module, tensors: list[ModelTensor], batch: Any, loss_fn: Callable[[nn.Module, Any], Any],
    symbolic: bool | Collection[str], fullgraph: bool, casts: Casts, numbers: Collection[str], watch: Watch,
    values: Mapping[int, Tensor] | None, undecided: Collection[str], trained: Collection[str], rewrites: bool,
    written: WrittenAttention,
) -> Trace:  # fmt: skip
    """The finished trace. Without `fullgraph`, modules that fail become opaque, innermost first, until the rest can
    be traced."""
    calls: dict[str, list[OpaqueCall]] = {}
    opaque: dict[str, str] = {}  # paths, with the reasons
    holds: set[str] = set()  # places of assertions
    stands: dict[str, dict[str, Any]] = {}  # places where tensors stand for what is read
    refused: tuple[Trace, CaptureError] | None = None  # without them
    while True:

        def trace() -> Trace:
            found = Trace(model, list(tensors), InputSpec.of(batch), symbolic, calls, casts, batch, undecided, trained, rewrites)  # noqa: B023
            found.recorder.reads.holds, found.recorder.reads.stands = holds, stands
            return found

        found = trace()
        try:
            found.recorder.reads.allowed = fullgraph and not symbolic and watch.tells
            found = _watched(found, trace, loss_fn, batch, watch, numbers)
            found.check()
            return found
        except (FrozenWritten, Replaced, Resized, Written):
            raise
        except CaptureError as e:
            more = isinstance(e, Depends) and e.space is not None and e.place not in stands and len(stands) < _STAND
            if more and found.recorder.reads.allowed:
                refused, stands[e.place] = refused or (found, e), e.space  # type: ignore[attr-defined]
                continue
            (found, error), refused = refused or (found, e), None
            stands.clear()
            reads = found.recorder.reads
            if reads.last and reads.last not in holds and not isinstance(error.__cause__, _OURS):  # the user's own code raises
                holds.add(reads.last)
                continue
            if not isinstance(error, Depends) and written.left_out():
                continue
            path = found.sites.failed
            if path is None or path == OUTSIDE:
                path = LOSS if TAIL in opaque else TAIL
            elif path == "" and undecided:  # other batches may give results of other sizes, and a loss is a number
                path = LOSS
            around = isinstance(error, CalledOtherwise) and path in opaque and path not in ("", LOSS, TAIL)
            if fullgraph or symbolic or isinstance(error, LossForm) or (path in opaque and not around) or casts.param is not None:
                if reads.taken and type(error) is CaptureError and "fullgraph" not in str(error):
                    raise CaptureError(
                        f"{error} (numbers that are read at {', '.join(reads.taken)} are others in a trace than in a step; where they decide "
                        "it, fullgraph=False runs that in Python)"
                    ) from error.__cause__
                raise (CaptureError(str(error)) if type(error) is Depends else error) from error.__cause__
            if around:
                path, reason = path.rpartition(".")[0], opaque[path]
            else:
                reason = str(error).partition(" (.item()")[0].partition("; ")[0]
        while True:
            opaque = _with(opaque, path, reason)
            try:
                calls = learn_calls(model, opaque, loss_fn, batch, values)
                if calls[path]:
                    break
                unfit = path  # nobody calls a list of modules, or a module that has only its methods used
            except Unfit as e:
                if (unfit := e.path) == LOSS:  # there is nothing around it
                    raise CaptureError(str(e)) from e
            path = LOSS if unfit in ("", TAIL) else unfit.rpartition(".")[0]


def _with(opaque: dict[str, str], path: str, why: str) -> dict[str, str]:
    """Another opaque module; those in it are no longer opaque by themselves."""
    if path == LOSS:
        return {path: why}
    inside = f"{path}." if path else ""
    return {p: r for p, r in opaque.items() if TAIL in (p, path) or not p.startswith(inside)} | {path: why}


def _watched(
    trace: Trace, again: Callable[[], Trace], loss_fn: Callable[[nn.Module, Any], Any], batch: Any, watch: Watch,
    numbers: Collection[str],
) -> Trace:  # fmt: skip
    """Runs the trace. Python sees nothing of it; a model that another run would find changed is refused. Gives it, or the one that hands on
    what is read."""

    def run(one: Trace) -> list[Change]:
        try:
            with kept_generators(), watch.as_tensors(numbers, one.number_dtype()) as names:
                one.names.update({id(t): where for where, t in (*watch.tensors().items(), *watch.outside.items())})
                one.names.update({key: where for key, (where, _) in names.items()})
                one.constants.numbers.update({key: t for key, (_, t) in names.items()})
                stand = names or any(t.number for t in one.spec.tensors) or one.recorder.reads.stands
                if stand and watch.matches:
                    raise CaptureError("`case` asks for the class of a number, which no tensor can stand for then")
                with asked_as_python(one.constants, watch.typed) if stand else contextlib.nullcontext():
                    one.run(loss_fn, batch)
        finally:
            changes = watch.restore()
        return [change for change in changes if not one.assign(change)]

    before = generators()
    with kept_generators(), rank_asked() as asked:
        changes = run(trace)
        drew = trace.drew
    if stand_in := next((c for c in changes if any(id(x) in trace.constants.numbers for x in tree_leaves(c.after))), None):
        raise CaptureError(f"{stand_in.where} keeps a number that is computed with")
    assert generators() == before
    if drew:
        with kept_generators():
            second = again()
            line, trace.sites.failed = drawing_line(lambda: run(second), second.sites)
        raise CaptureError(
            f"{line}: random numbers of Python or NumPy are drawn{trace.module()}, which a program would draw once and keep; draw "
            "them with torch, or in the training loop, as a part of the batch"
        )
    drawn = trace.recorder.own_draws
    if watch.varies or drawn.drawn:
        with kept_generators():
            second = again()
            watch.draw_on()
            run(second)
        if other := drawn.other(second.recorder.own_draws):
            place, trace.sites.failed = other
            raise CaptureError(
                f"{place}: random numbers are drawn from a generator of its own{trace.module()} that goes on from step to step, and a "
                f"program would draw once and keep them; {RATHER}"
            )
        if place := _differs(trace, second):
            raise CaptureError(
                f"{place}: what is computed here is something else at each run{trace.module()}: a clock, an iterator or a generator of "
                "Python's or NumPy's decides it; make it a part of the batch, or pass fullgraph=False to run it in Python"
            )
    if asked:
        with kept_generators(), rank_asked(shift=1):
            second = again()
            run(second)
        if place := _differs(trace, second):
            raise CaptureError(
                f"{place}: what is computed here depends on the rank{trace.module()}, and a program is one of all ranks; make it a part of "
                "the batch or a tensor, which each rank has of its own, or pass fullgraph=False to run it in Python"
            )
    kept: dict[int, str] = {}  # names of what caches hold, by the ids of the tensors in them
    held: list[Tensor] = []
    names = functools.cache(lambda: caches.names(trace))

    def real(fake: Tensor) -> Tensor | None:
        found = caches.value(trace, fake)
        name = names().get(id(fake)) if found is None else caches.digest(found)
        if found is None and name is not None:
            with no_dispatch():
                found = torch.empty_strided([int(n) for n in fake.shape], [int(n) for n in fake.stride()], dtype=fake.dtype).zero_()
        if found is not None and name is not None:
            held.append(found)
            kept[id(found)] = name
        return found

    values = [c for c in changes if c.kind == "value"]
    for many in (False, True) if any(grows(c) for c in values) else (False,):
        try:
            _run_again(trace, again, loss_fn, batch, values, real, kept, many)
        except CaptureError:
            trace.begun = [c for c in values if begins(c)] if trace.recorder.reads.allowed else []
            if not trace.begun:
                raise
            _run_again(trace, again, loss_fn, batch, [c for c in values if c not in trace.begun], real, kept, many)
    begun, read = trace.begun, bool(trace.recorder.reads.taken or trace.begun)
    seen = [c for c in values if trace.recorder.reads.allowed and (new := kept_of(c)) and any(real(t) is None for t in new)]
    seen = [c for c in seen if c not in begun and (c.owner is None or not in_library(trace, c.owner))]
    found = None
    if seen:
        trace.begun, opened = [*begun, *seen], set(trace.recorder.reads.open)
        try:
            found = _telling(trace, again, run)
        except CaptureError as e:  # only somebody else would look at it
            log.warning("%s keeps tensors of a step, which none of the compiled steps does: %s", seen[0].where, e.__cause__ or e)
            trace.recorder.reads.open = opened
        trace.begun = begun
    if found is None:
        found = _telling(trace, again, run) if read else trace
    found.begun = begun
    return found


def _differs(trace: Trace, second: Trace) -> str:
    """The user's line where another trace computes something else; empty: nowhere."""
    for mine, its in zip(trace.body().splitlines(), second.body().splitlines(), strict=False):
        if mine != its:
            number = re.match(r"const (%\d+):", mine)  # one has no line, who reads it has
            lines = (line for line in trace.recorder.lines if number is not None and re.search(rf"{number[1]}\b", line))
            trace.sites.failed, place = trace.sites.place_of(next(lines, mine).rpartition("{")[2].rstrip("}"))
            return place or "the loss function"
    return ""


def in_library(trace: Trace, path: str) -> bool:
    return is_installed(sys.modules[type(trace.model.get_submodule(path)).__module__].__file__ or "")


def _telling(trace: Trace, again: Callable[[], Trace], run: Callable[[Trace], Any]) -> Trace:
    """The same trace with the op that hands on what is read, and puts the tensors of states that begin with None into their places, where
    the next step finds them. Error: what is computed depends on what is read, by its line; there can be no such op."""
    reads = trace.recorder.reads
    reads.open.update(*(around(c.owner) for c in trace.begun if c.owner is not None))
    if trace.begun:  # what hooks keep is kept when their modules run
        reads.open.update(*(around(path) for path, m in trace.model.named_modules() if _hooked(m)))

    def traced(turn: int, places: Collection[str] | None = None, tells: bool = False, blank: bool = False) -> Trace:
        second = again()
        its = second.recorder.reads
        its.allowed, its.turn, its.places = True, turn, places
        second.told = Telling(second.recorder, reads.open, blank) if tells else None
        with kept_generators():
            run(second)
        return second

    def same(turn: int, places: Collection[str]) -> bool:
        try:
            second = traced(turn, places)
        except CaptureError as e:  # the user's own code may raise where a truth value is another one, and math.exp does of large numbers
            ours = isinstance(e.__cause__, _OURS)
            return not ours and (all(reads.taken[p][1] for p in places) or isinstance(e.__cause__, (ArithmeticError, ValueError)))
        lifted = [[t.real for t in one.tensors if t.name.startswith("captured.")] for one in (trace, second)]  # made by NumPy
        return second.body() == trace.body() and all(torch.equal(a, b) for a, b in zip(*lifted, strict=True))

    place, why = next(iter(reads.taken), ""), ""
    for turn in range(1, TURNS):
        if reads.taken and not same(turn, reads.taken):
            place = next((at for at in reads.taken if not same(turn, {at})), place)
            break
    else:
        try:
            second = None
            with contextlib.suppress(CaptureError):
                second = traced(0, tells=True, blank=True)
            while second is None:
                try:
                    second = traced(0, tells=True)
                except Hidden as e:
                    reads.open.update(around(str(e)))
            closed = set(second.sites.paths.values()) - reads.open
            written = (t.name for t in second.tensors if second.was_written(t) and t.name.rpartition(".")[0] not in closed)
            others = {second.recorder.value_of(t) for _, t in second.stand_ins}
            apart = reads.open or second.opaque_calls[TOLD][0].params or (second.told is not None and second.told.used(others))
            if trace.casts.param is not None and apart:
                raise CaptureError("modules and parameters that it is read of are in another precision")
            if (name := next(written, None)) is None:
                second.begun = trace.begun
                return second
            why = f" ('{name}' is written beside it)"
        except CaptureError as e:
            why = f" ({e})"
    if trace.begun:
        raise CaptureError(f"{refusal(trace.begun)}{why}")
    trace.sites.failed = reads.taken[place][0]
    raise Depends(place, trace.module(), reads.spaces.get(place), why)


def _hooked(module: nn.Module) -> bool:
    """Whether the user's own hooks run with it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not getattr(hook, "__module__", type(hook).__module__).startswith("torch.") for hook in hooks)


def _run_again(
    trace: Trace, again: Callable[[], Trace], loss_fn: Callable[[nn.Module, Any], Any], batch: Any, values: list[Change],
    real: Callable[[Tensor], Tensor | None], kept: dict[int, str], many: bool,
) -> None:  # fmt: skip
    """Error: another run, from what the trace's has left, computes something else. `many`: as after many runs."""
    with as_after(values, real, many) as made:
        if made:
            second = again()
            second.recorder.reads.allowed = (reads := trace.recorder.reads).allowed
            second.kept = {key for key, name in kept.items() if name.startswith("constant")}
            watched = Watch(trace.model, loss_fn)
            try:
                with kept_generators():
                    second.run(loss_fn, batch)
                differs = second.body() != trace.body() and not caches.same_in_every_step(trace, second, kept)
            except CaptureError:
                differs = True
            finally:
                asked = [c for c in made if c.reads]  # before anybody else asks
                moved = {c.where for c in watched.restore()}
            # What they decide may be something else in a later run; of what is handed on, each step sees to it.
            counters = [c for c in asked if c.where in moved and not (reads.taken and (c.owner or "") in {"", *reads.open})]
            if differs or counters:
                trace.sites.failed = next((c.owner for c in made if c.owner is not None), None)
                raise refusal(made if differs else counters)


