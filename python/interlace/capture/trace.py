"""One run of a model on fake tensors, and the parts of its text: declarations, ops of forward and backward, what is written at the end."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._mode_utils import no_dispatch

from interlace.capture.attention import one_attention
from interlace.capture.casts import Casts, regions_of
from interlace.capture.check_ops import check_op_kinds
from interlace.capture.constants import Constants, NotConstant
from interlace.capture.effects import Stored, alike_tensors, generators, kept_places
from interlace.capture.groups import Groups
from interlace.capture.inputs import InputSpec, Path, rebuild
from interlace.capture.literals import DimPrinter, number, quote
from interlace.capture.loss import Evaluated, LossForm, outputs_of
from interlace.capture.model_tensors import OWN_HOOK, ModelTensor, device_type, in_memory_order, make_fake, shares, swapped
from interlace.capture.opaque import TAIL, TOLD, CalledOtherwise, OpaqueCall, OpaqueTrace, StandIn, tensor_leaves, told_call
from interlace.capture.reads import Depends, Hidden, Telling, Told, numbers_in, reading
from interlace.capture.real_run import Resized, refuse_empty, resized
from interlace.capture.recorder import Recorder
from interlace.capture.rewrites import Rewrites, Written, leaves_of
from interlace.capture.sites import OUTSIDE, Sites, line_now, user_globals, user_place
from interlace.capture.symbols import make_symbols
from interlace.capture.tensor_plan import model_plan
from interlace.capture.tracing import (
    followed_modules,
    known_seeds,
    known_values_are_no_trace,
    plainly,
    tensors_in_lists,
    with_left,
    without_backward,
    without_checkpointing,
)
from interlace.capture.watch import Change
from interlace.capture.ways import Counts, Ways, buffer_of
from interlace.capture.writes import refuse_writes, said
from interlace.errors import CaptureError, InterlaceError
from interlace.version import __version__

Tensor = torch.Tensor
_READ = 1 << 12  # elements of a buffer that Python may read before every step
_MAX_CONST = 64  # elements; a bigger tensor met on the way becomes a plain buffer instead of numbers in the text


class Trace:
    """One run of the model on fakes, and the parts of its text."""

    def __init__(
        self, model: nn.Module, tensors: list[ModelTensor], spec: InputSpec, symbolic: bool | Collection[str],
        opaque_calls: dict[str, list[OpaqueCall]], casts: Casts, example: Any = None, undecided: Collection[str] = (),
        trained: Collection[str] = (), rewrites: bool = False,
    ) -> None:  # fmt: skip
        """`example`: the batch whose ways (ways.py) are taken, but at places that are `undecided`; None: Python may read none. `trained`:
        names of parameters that get a gradient of zeros where they have none. `rewrites`: what writes trained parameters is looked for."""
        self.opaque_calls, self.casts = opaque_calls, casts
        self.model, self.tensors = model, tensors
        self.symbols, self.spec = make_symbols(spec, symbolic)
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.symbols.env if self.symbols else None)
        self.sites = Sites(model)
        self.dims = DimPrinter()
        if self.symbols:
            self.dims.names.update(self.symbols.expressions)
        self.constants = (Rewrites if rewrites else Constants)(self.symbols.size_in if self.symbols else lambda n, _: int(n))
        self.rewrites: dict[str, list[Any]] = {}  # of trained parameters that are written, how
        self.stand_ins: list[tuple[ModelTensor, Tensor]] = []  # what the model sees of parameters, where that is not the fake itself
        self.ways = Ways(self.constants, None if symbolic or example is None else spec.flatten(example), undecided)
        device = device_type(t.real for t in tensors)
        self.recorder = Recorder(self.fakes, self.sites, self.dims, self.constants, self.ways, self._lift, device)
        self.ids, self.consts = dict[int, int](), dict[str, int]()  # id(ModelTensor), name -> value id
        self.outputs: dict[str, Tensor] = {}
        self._decls: dict[int, str] = {}
        self._input_lines: list[str] = []
        self._const_lines: list[str] = []
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}  # id(real) -> real (kept alive), fake
        self._num_captured = 0
        self._const_values: dict[tuple[str, str], int] = {}  # type and numbers -> value id
        self.names: dict[int, str] = {}  # of buffers that are not the model's, by the tensor's id
        self.kept: Collection[int] = ()  # ids of constants that caches hold (caches.py)
        self._moved: set[int] = set()  # ids of parameters whose places the model gave another one
        self._assigned: set[int] = set()  # ids of buffers whose places the model gave another tensor
        self._strange: list[tuple[Tensor, str]] = []  # tensors that are none of the model and require gradients, with the user's line
        self.trained = trained
        self.told: Telling | None = None
        self.begun: list[Change] = []  # states that were None
        self.unused: list[str] = []  # of `trained`, those without a gradient
        self.idle: list[str] = []  # others that have none
        self.first_result = 0  # the values before it are declared
        self.drew = False  # random numbers of Python or NumPy

    # ---- tensors that are not results ----

    def _declare(self, t: ModelTensor) -> None:
        with self.fakes:
            t.fake = make_fake(t)
        self.ids[id(t)] = self.recorder.next_value
        self._decls[id(t)] = self.recorder.declare(t.fake)
        with contextlib.suppress(AttributeError):  # in a list of the model's, say
            if t.kind != "param" and not t.real.is_meta and t.real.numel() <= _READ and buffer_of(self.model, t.name) is t.real:
                self.constants.set_buffer(t.fake, t.name)
                self.ways.buffers[t.name] = t.real
            if isinstance(self.constants, Rewrites) and buffer_of(self.model, t.name) is t.real:
                self.constants.set_tensor(t.fake, t.name)

    def _inputs(self, batch: Any) -> Any:
        """The batch with fakes in place of its tensors."""
        replacement: dict[Path, Tensor] = {}
        for t in self.spec.tensors:
            size: list[Any] = [self.symbols.sizes[n] if self.symbols and isinstance(n, str) else n for n in t.shape]
            with self.fakes:
                fake = torch.empty(size, dtype=t.dtype, device="cpu")
            self.constants.set_input(fake, len(self._input_lines))
            if t.number:
                self.ways.stands(fake, "input", len(self._input_lines))
            self._input_lines.append(f"input {self.recorder.declare(fake)} {quote(t.name)}")
            replacement[t.path] = fake
        return rebuild(batch, replacement)

    def _lift(self, real: Tensor, fake: Tensor | None = None) -> Tensor:
        """A real tensor that reached an op. A literal of the model's code (then its `fake` exists already) becomes a
        constant of the program; any other tensor may change between steps, so it becomes a plain buffer."""
        if fake is None and (known := self._lifted.get(id(real))) is not None:
            return known[1]
        if real.layout != torch.strided:
            raise CaptureError(f"a tensor of layout {real.layout} is used by the model; make it dense (.to_dense())")
        literal = fake is not None and not real.is_complex()
        if fake is None:
            with self.fakes:
                fake = torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device="cpu")
        hooks = getattr(real, "_post_accumulate_grad_hooks", None) or {}
        if real.requires_grad and torch.is_grad_enabled() and not any(hasattr(hook, OWN_HOOK) for hook in hooks.values()):
            self._strange.append((real, line_now()))  # what another trainer trains needs no gradient here
        self._lifted[id(real)] = (real, fake)
        if literal or id(real) in self.kept:
            self.constants.set_value(fake, real)
        if literal and real.numel() <= _MAX_CONST and real.is_contiguous():
            with no_dispatch():
                data = real.detach().cpu().reshape(-1).tolist()
            items = ", ".join(str(int(x)) if isinstance(x, bool) else number(x) for x in data)
            type_text = self.dims.type(real.dtype, tuple(real.shape), real.stride())
            value = self._const_values.get((type_text, items))
            if value is not None:
                self.recorder.declare_as(fake, value)
            else:
                decl = self.recorder.declare(fake)
                value = int(decl.partition(":")[0][1:])
                name = f"c{len(self.consts)}"
                self.consts[name] = self._const_values[(type_text, items)] = value
                self._const_lines.append(f"const {decl} {quote(name)} = [{items}]")
        else:
            name = self.names.get(id(real), f"captured.{self._num_captured}")
            self._num_captured += id(real) not in self.names
            t = ModelTensor(name, real, "plain", False, fake=fake)
            self.tensors.append(t)
            self.ids[id(t)] = self.recorder.next_value
            self._decls[id(t)] = self.recorder.declare(fake)
            self.ways.stands(fake, "buffer", name, real)
        return fake

    # ---- the run ----

    def run(self, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> None:
        for t in self.tensors:
            self._declare(t)
        model_tensors = list(self.tensors)
        scale = self.casts.seed()
        if scale is not None:
            self.tensors.append(scale)
            self._declare(scale)
        batch = self._inputs(batch)
        self.first_result = self.recorder.next_value
        params = [t for t in model_tensors if t.kind == "param" and t.real.requires_grad]
        replaced = {id(t.real): t.fake for t in model_tensors}
        rec = self.recorder
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_checkpointing(self.model))
            stack.enter_context(known_values_are_no_trace(self.constants))
            self._opaque = OpaqueTrace(self.model, self.opaque_calls, rec, loss_fn)
            stack.enter_context(followed_modules(self.sites, self.told or self._opaque))
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # what is wrapped in torch.compile runs as it is
            stack.enter_context(known_seeds(rec.own_draws.reseeded))
            told = self.told  # Python that runs again draws what torch's own function draws
            stack.enter_context(one_attention(lambda: told is None or told.inside))
            for one in (reading(rec.reads), without_backward(lambda: rec.part == "bwd"), tensors_in_lists(self.constants)):
                stack.enter_context(one)
            stack.enter_context(plainly())
            stack.enter_context(regions_of(device_type(t.real for t in model_tensors)))
            if self.symbols:  # operators whose C++ form would fix symbolic sizes have a Python form
                stack.enter_context(enable_python_dispatcher())
            stack.enter_context(self.fakes)
            stack.enter_context(rec)
            replaced.update(self.casts.parameters(self.model, model_tensors, self.sites))
            for p in model_tensors:
                if p.kind == "param":
                    replaced[id(p.real)] = in_memory_order(p.real, replaced[id(p.real)])  # type: ignore[arg-type]
            self.stand_ins = [(p, replaced[id(p.real)]) for p in params if replaced[id(p.real)] is not p.fake]  # type: ignore[misc]
            stack.enter_context(swapped(self.model, replaced))  # type: ignore[arg-type]
            stored = Stored(self.model, {id(t.fake): t for t in model_tensors})
            stack.enter_context(self.casts.of_calls(self.model))
            before = generators()
            self._locating("forward", lambda: self._forward(loss_fn, batch))
            self.drew = generators() != before
            for name, value in self.outputs.items():
                rec.mark("output", f"%{rec.value_of(value)}", attrs=f" name={quote(name)}")
            rec.part = "bwd"
            self._locating("backward", lambda: self._gradients(params, scale))
            rec.part = "fwd"
            self._locating("forward", lambda: self._replaced(stored))
        self._written()

    def _written(self) -> None:
        """Buffers that were written in place, or by `b.data = ...`: their next values."""
        rec = self.recorder
        for t in self.tensors:  # torch.nn.utils.spectral_norm shows the weight itself until its hook has run
            if t.owner is not None and self._is_read(t):
                raise CaptureError(shares(t))
        changed = self._moved | (self._assigned & {id(t) for t in self.tensors if t.name in self.ways.counts})
        written = [t for t in self.tensors if t.fake is not None and (id(t) in changed or rec.was_written(t.fake))]
        refuse_writes({t.name: False for t in written if t.kind == "param" and not t.real.requires_grad})
        if counts := {self.ways.counts[t.name] for t in written if t.name in self.ways.counts and not self._settled(t)}:
            raise Counts(counts)
        refuse_empty([t for t in written if t.kind != "param"])
        params = [t for t in written if t.kind == "param"]
        others = [t for t, shown in self.stand_ins if rec.value_of(shown) >= 0 and rec.was_written(shown)]
        refuse_writes({t.name: True for t in (*others, *(t for t in params if id(t) in self._moved))})
        if params:
            self._rewritten(params)
        for t in written:
            if id(t) not in self._assigned and t.kind != "param":
                rec.mark("assign", f"%{self.ids[id(t)]}", f"%{rec.next_of(t.fake)}")  # type: ignore[arg-type]

    def _settled(self, t: ModelTensor) -> bool:
        """Whether a buffer that was written holds a constant now."""
        value, known = self.recorder.next_of(t.fake), self.constants.knows  # type: ignore[arg-type]
        return id(t) not in self._assigned and any(v == value and known(x) for v, x in self.recorder.known_values())

    def _rewritten(self, trained: list[ModelTensor]) -> None:
        """Trained parameters that were written: the program is that of parameters that were before."""
        if not isinstance(self.constants, Rewrites):
            raise Written(said(trained[0].name))
        rec, last = self.recorder, dict[int, int]()
        for t in trained:
            last[rec.next_of(t.fake)] = self.ids[id(t)]  # type: ignore[arg-type]
            if rec._is_whole(t.fake, storage := rec._entries[id(t.fake)].storage):  # type: ignore[arg-type]
                last[storage.root] = self.ids[id(t)]
        try:
            self.rewrites = {t.name: self.constants.computed(t.fake) for t in trained}  # type: ignore[arg-type]
            like = [(t.name, t.fake, self.ids[id(t)]) for t in trained]
            self.rewrites |= self.constants.leave_out(rec.lines, last, like, dict(rec.known_values()))  # type: ignore[arg-type]
            if leaves_of(self.rewrites, "input") and dist.is_initialized() and dist.get_world_size() > 1:
                raise NotConstant
        except NotConstant:
            raise CaptureError(said(trained[0].name)) from None

    def number_dtype(self) -> torch.dtype:
        """What numbers that become tensors are kept in: as wide as the model's parameters, float32 at least."""
        widest = {t.real.dtype for t in self.tensors if t.kind == "param"}
        return torch.float64 if torch.float64 in widest else torch.float32

    def body(self) -> str:
        """The text without what another trace of the same would have in other words."""
        return "\n".join([*self._decls.values(), *self._const_lines, *self.recorder.lines])

    def _replaced(self, stored: Stored) -> None:
        """Buffers and tensor attributes that the model assigned anew: their next values."""
        for t, new, where in stored.replaced():
            if t.kind == "param":
                self._moved.add(id(t))
                continue
            other = (new.dtype, new.shape) != (t.real.dtype, t.real.shape)
            if other and t.kind != "buffer" and not self._is_read(t):
                continue  # it is only kept for somebody to look at
            self._assign(t, new.detach(), f"'{where}'")

    def _is_read(self, t: ModelTensor) -> bool:
        return any(re.search(rf"[(\[ ]%{self.ids[id(t)]}\b", line.partition(" = ")[2]) for line in self.recorder.lines)

    def assign(self, change: Change) -> bool:
        """Tensors that the trace has read outside of the model, and others that are in their places now: their next values."""
        before, after = change.before, change.after
        if isinstance(before, Tensor):
            before, after = [before], [after]
        if not isinstance(before, (list, tuple)) or type(before) is not type(after) or len(before) != len(after):
            return False
        found: dict[int, tuple[ModelTensor, Tensor]] = {}
        moved = [(x, y) for x, y in zip(before, after, strict=True) if x is not y]
        for x, y in moved:
            if id(x) in self.names and id(x) not in self._lifted and alike_tensors(x, y):  # somebody else looks at it
                self._lift(x)
            known = self._lifted.get(id(x))
            t = next((t for t in self.tensors if known is not None and t.fake is known[1]), None)
            if t is not None and isinstance(y, FakeTensor):
                found[id(t)] = t, y
        if not moved or len(found) < len(moved):
            return False
        for t, y in found.values():
            self._assign(t, y, change.where)
        return True

    def _assign(self, t: ModelTensor, new: Tensor, where: str) -> None:
        if (new.dtype, tuple(new.shape)) != (t.real.dtype, tuple(t.real.shape)):
            raise Resized(resized(where, t.real, new))
        self.recorder.mark("assign", f"%{self.ids[id(t)]}", f"%{self.recorder.value_of(new)}")
        self._assigned.add(id(t))

    def _gradients(self, params: list[ModelTensor], scale: ModelTensor | None) -> None:
        """Traces the backward part and marks the parameters' gradients."""
        loss, evaluated = self.outputs["loss"], isinstance(self.trained, Evaluated)
        seed = scale.fake.to(loss.dtype) if scale is not None and scale.fake is not None else None
        nodes, seen = [loss.grad_fn], set()
        while self._strange and nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            for t, line in self._strange:
                if getattr(node, "variable", None) is t:
                    raise CaptureError(
                        f"{line}: a tensor of shape {tuple(t.shape)} that requires gradients is not part of the model; make it an "
                        "nn.Parameter of the model (a loss with parameters must be a module of the model), use it under torch.no_grad() "
                        "where it is not trained, or compile first the network that it belongs to (a GAN's discriminator, say)"
                    )
        fakes: Any = [p.fake for p in params]
        found = torch.autograd.grad(loss, fakes, seed, allow_unused=True) if loss.requires_grad else [None] * len(fakes)
        grads = with_left(found, fakes)
        for p, g in zip(params, grads, strict=True):
            if g is None or (evaluated and p.name not in self.trained):
                (self.unused if p.name in self.trained else self.idle).append(p.name)
                if p.name not in self.trained:
                    continue
                # Not zeros_like, for which the parameter would be gathered, and not in param_dtype.
                g = torch.zeros(p.fake.shape, dtype=p.fake.dtype, device=p.fake.device)  # type: ignore[union-attr]
            for hook in (p.real._backward_hooks or {}).values():  # of register_hook: before averaging, as DDP
                changed = hook(g)
                g = g if changed is None else changed
            self.recorder.mark("grad", f"%{self.ids[id(p)]}", f"%{self.recorder.value_of(g)}")
        if not evaluated and all(g is None for g in grads):
            raise CaptureError("the loss depends on no trainable parameter")

    def _forward(self, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> None:
        opened = self.told.opened if self.told is not None else ()
        inside = [t for t in self.tensors if t.kind == "buffer" and t.name.rpartition(".")[0] in opened and isinstance(t.fake, Tensor)]
        buffers = {f"model.{t.name}": self.recorder.snapshot(t.fake) for t in inside}  # type: ignore[arg-type]
        result = self._result(loss_fn, batch)
        self.outputs.update(outputs_of(result, numbers=not self.recorder.reads.taken))
        if not (self.outputs["loss"].requires_grad or isinstance(self.trained, Evaluated)):
            read = next(reversed(self.recorder.reads.taken), "")
            why = f"; or a value that is read at {read} decides it, which fullgraph=False runs in Python" if read else ""
            raise LossForm(f"the loss does not depend on any trainable parameter, or was computed under no_grad or detached{why}")
        if self.told is not None:
            writes = self.constants.writes
            self._tell(loss_fn, batch, self.told, buffers)
            if self.constants.writes != writes:
                raise CaptureError("parameters are written beside what is read")

    def _tell(self, loss_fn: Callable[[nn.Module, Any], Any], batch: Any, telling: Telling, buffers: dict[str, Tensor]) -> None:
        """Has the loss function's Python run in each step on what modules gave; tries it. `buffers`: of its modules, as a step begins."""
        rec, told, opened = self.recorder, Told(self.model, loss_fn), sorted(telling.opened)
        used = telling.used({self.ids[id(t)] for t in self.tensors if t.kind == "param"})
        params: dict[str, Any] = {f"model.{t.name}": t.fake for t in self.tensors if self.ids[id(t)] in used}
        given = (telling.results, batch, self.outputs["loss"].detach(), opened, list(telling.given), telling.drawn())
        operands = [*(t for _, t in tensor_leaves(given)), *params.values(), *buffers.values()]
        begin = max(rec.value_of(t) for t in operands), len(rec.lines), rec._next_stream  # their views are there by now
        objects: list[Any] = [*rec._entries.values(), *rec._storages.values()]
        known = [(x, {name: getattr(x, name) for name in x.__slots__}) for x in objects]
        with torch.no_grad(), kept_places(self.model):
            numbers = list(numbers_in(told.again(telling.results, batch, opened)))
        rec.lines[begin[1] :], rec._next_stream = [], begin[2]
        for x, values in known:  # what that run has written is as it was
            for name, value in values.items():
                setattr(x, name, value)
        numbers += [] if self.model.training else [TOLD]  # what only evaluates keeps what gives an output
        region = torch.get_autocast_dtype(rec.device) if self.casts.autocast else None
        call = told_call(told, given, list(params), list(buffers), numbers, region, ", ".join(rec.reads.taken))
        self.opaque_calls = {TOLD: [call]}
        results = rec.call_python(TOLD, "forward", operands, [(m.dtype, m.size) for _, m in call.outputs], False)
        self.outputs.update(zip(numbers, results, strict=True))

    def was_written(self, t: ModelTensor) -> bool:
        """Of tensors that are not the model's buffers, and that it reads."""
        written = id(t) in self._assigned or (t.kind == "plain" and t.fake is not None and self.recorder.was_written(t.fake))
        return t.kind != "buffer" and written and self._is_read(t)

    def _result(self, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """What the loss function gives; it may be opaque itself, or what it does after the model's calls."""
        if (whole := self._opaque.whole) is not None:
            return whole(batch)
        if TAIL not in self.opaque_calls:
            return loss_fn(self.model, batch)
        stand_in = StandIn(self.model, self.model)
        try:
            loss_fn(stand_in, batch)  # type: ignore[arg-type]
        except Exception:
            if not stand_in.results or self.sites.failed not in (None, OUTSIDE):
                raise
        self.sites.failed = None
        return self._opaque.modules[TAIL](stand_in.results, batch)

    def check(self) -> None:
        """Every kind of op does what the text says. Error: one does not, with the line and module that have it first."""
        for key, call in self.recorder.calls.items():
            try:
                check_op_kinds([call])
            except CaptureError as e:
                self.sites.failed, place = self.sites.place_of(self.recorder.tags[key])
                raise CaptureError(f"{place}: {e}{self.module()}{self.casts.mixed(e)}" if place else str(e)) from e

    def _locating(self, what: str, call: Callable[[], Any]) -> Any:
        """Runs call(); errors become CaptureErrors that name the user's line and module."""
        try:
            return call()
        except CaptureError as e:
            place = user_place(e.__traceback__)
            if not place:
                raise
            kind = type(e) if type(e) in (CalledOtherwise, LossForm, Resized) else CaptureError
            if isinstance(e, Hidden):
                raise
            raise kind(f"{place}: {e}{self.module()}") from e
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as e:
            raise Depends(user_place(e.__traceback__) or what, self.module(), user_globals(e.__traceback__)) from e
        except DynamicOutputShapeException as e:
            place = user_place(e.__traceback__) or what
            raise CaptureError(
                f"{place}: the size of {e.args[0] if e.args else 'a result'} depends on data{self.module()}; use a form with "
                "fixed sizes (torch.where, masks), or pass fullgraph=False to run that module in Python"
            ) from e
        except InterlaceError as e:  # of a parameter without values (released.py), which is not the model's: those are fakes here
            raise CaptureError(
                f"{user_place(e.__traceback__) or what}: a parameter of another trainer, whose ranks have a part of it each; give that "
                'trainer Config(strategy="zero1") or "replicate", whose parameters are whole on every rank'
            ) from e
        except Exception as e:
            said = str(e).partition("\nIf you're using torch.compile")[0]  # advice for others
            text = f"{user_place(e.__traceback__) or what}: {type(e).__name__} while tracing {what}{self.module()}: {said}"
            if not isinstance(e, RuntimeError) or re.search("numpy|subclass|fake|data_ptr|storage|allocated", str(e), re.I):
                text += " (A trace has shapes and no values: where eager steps do not fail, fullgraph=False runs that module in Python.)"
            if self.symbols and self.symbols.rename(str(e)) != str(e):
                names = " and ".join(self.symbols.sizes)
                text = self.symbols.rename(text) + f" (The size {names} is symbolic; symbolic=False captures with numbers.)"
            raise CaptureError(text) from e

    def module(self) -> str:
        return f" in module '{self.sites.failed}'" if self.sites.failed not in ("", None, OUTSIDE) else ""

    # ---- the text ----

    def text(self, groups: Groups, micro_batches: int, rng_mode: str) -> str:
        lines = ["interlace 1 captured"]
        lines.append(f"meta model {quote(type(self.model).__name__)}")
        lines.append(f"meta created_by {quote('interlace ' + __version__)}")
        lines.append(f"meta torch {quote(torch.__version__)}")
        first = self.spec.tensors[0].shape
        lines.append(f"meta micro_batch {quote(str(first[0]) if first else '1')}")
        lines.append(f"meta micro_batches {quote(str(micro_batches))}")
        lines.append(f"meta rng {quote(rng_mode)}")
        plan = model_plan(self.model)
        if plan:
            lines.append(f"meta tensor {quote(plan)}")
        if self.ways.read:
            lines.append(f"meta ways {quote(json.dumps(self.ways.read))}")
        lines += [f"meta {word} {quote(json.dumps(x))}" for word in ("unused", "idle", "rewrites") if (x := getattr(self, word))]
        if self.symbols:
            lines += [f"symbol {name} {low} {high}" for name, low, high in self.symbols.ranges()]
        lines.append("step 1 reduce_each")
        lines += groups.lines()
        lines += [f"module {i} {quote(path)} {quote(cls)}" for path, (i, cls) in self.sites.modules.items()]
        lines += [f"source {i} {quote(place)}" for place, i in self.sites.sources.items()]
        for t in self.tensors:
            decl, name = self._decls[id(t)], quote(t.name)
            if t.kind != "param":
                lines.append(f"buffer {decl} {name} {'persistent' if t.persistent else 'plain'}")
                continue
            line = f"param {decl} {name}"
            if t.real.requires_grad:
                line += f" trainable group {groups.of[id(t.real)]}"
            else:
                line += " frozen"
            lines.append(line + "".join(f" alias {quote(a)}" for a in t.aliases))
        lines += self._input_lines + self._const_lines
        lines.append("phase micro_batch takes () gives () {")
        lines += self.recorder.lines
        lines.append("}")
        return "\n".join(lines) + "\n"
