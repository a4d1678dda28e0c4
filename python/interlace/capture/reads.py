"""What Python reads of values that a step makes, and only hands on: `meter.update(loss.item())`, `print(f"{loss:.3f}")`, `{"ce": float(ce)}`.

The trace goes on with some number in its place, and is made again with others: all must compute the same. The program then has one more
op, `call.python` of the loss function's own Python (`Told`), which runs once more, for real, on what the modules gave in the step. Modules in
which something is read, and those around them, run again, too; the others do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from interlace.capture.constants import NotConstant
from interlace.capture.functional import draws, op_info
from interlace.capture.inputs import leaves, path_name, rebuild
from interlace.capture.numbers import standing
from interlace.capture.patches import patched
from interlace.capture.sites import OUTSIDE, TORCH, Sites, is_user_file, user_place
from interlace.capture.watch import plain
from interlace.capture.ways import Ways
from interlace.errors import CaptureError

Tensor = torch.Tensor
TURNS = 3  # sets of numbers to trace with
_MOST = 256  # reads of one trace: a loop that waits for a value would not end
_BETWEEN = (*(TORCH + file.replace("/", os.sep) for file in ("_tensor.py", "_compile.py", "_dynamo/eval_frame.py")), __file__)
_BETWEEN += (os.path.join(os.path.dirname(__file__), "numbers.py"),)


def around(path: str) -> list[str]:
    """A module and those that it is in."""
    return ["", *(path[:i] for i, x in enumerate(path) if x == "."), path]


def depends(place: str, module: str) -> str:
    return (
        f"{place}: the model reads a tensor's value while it runs (.item(), bool(), int(), an `if` or a loop on a tensor){module}; a program "
        "cannot branch on data. Keep the value a tensor (torch.where, masks), or pass fullgraph=False to run that module in Python"
    )


class Depends(CaptureError):
    """What is computed depends on a number that is read at `place`, by code with these globals (`space`)."""

    def __init__(self, place: str, module: str, space: dict[str, Any] | None = None, why: str = "") -> None:
        super().__init__(depends(place, module) + why)
        self.place, self.space = place, space


class Reads:
    """Of one trace. `turn`: the set of numbers that it goes on with, at these `places` (None: all); elsewhere the first one. `stands`: places
    where tensors stand for the numbers, with the globals of the code there."""

    def __init__(self, sites: Sites, ways: Ways) -> None:
        self.sites, self.ways, self.allowed, self.turn, self.count = sites, ways, False, 0, 0
        self.places: Collection[str] | None = None
        self.taken: dict[str, tuple[str | None, bool]] = {}  # the module, and whether it is a truth value, by "/home/.../train.py:12"
        self.stands: dict[str, dict[str, Any]] = {}
        self.spaces: dict[str, dict[str, Any]] = {}  # globals of the code at the places of `taken`
        self.open: set[str] = set()  # modules
        self.holds: set[str] = set()  # instructions whose truth values the trace goes on with as true
        self.last = ""  # of a truth value

    def number(self, t: Tensor, frame: Any) -> Any:
        """Of a tensor with one element. Raises NotConstant."""
        with contextlib.suppress(NotConstant), no_dispatch():
            return self.ways.constants.number(t)
        with contextlib.suppress(NotConstant):
            return self.ways.number(t, self.sites.place())
        return self.take(t, frame).item()

    def array(self, t: Tensor, frame: Any) -> Any:
        """Of a tensor with any number of elements. Raises NotConstant."""
        with contextlib.suppress(NotConstant), no_dispatch():
            return self.ways.constants.array(t).numpy()
        with contextlib.suppress(NotConstant):
            read = self.ways.number(t, self.sites.place())
            with _disable_current_modes():
                return torch.tensor(read, dtype=t.dtype).reshape(tuple(t.shape)).numpy()
        return self.take(t, frame)

    def take(self, t: Tensor, frame: Any) -> Any:
        """An array with something in the place of what a step will hand to Python. Raises NotConstant."""
        while frame.f_code.co_filename in _BETWEEN:
            frame = frame.f_back
        if not (self.allowed and is_user_file(frame.f_code.co_filename)) or self.count >= _MOST:
            raise NotConstant
        if not self.count:
            logging.disable(logging.CRITICAL)
        place, number, stack = f"{frame.f_code.co_filename}:{frame.f_lineno}", self.count % 32, self.sites.stack_paths
        self.count += 1
        self.spaces[place] = frame.f_globals
        self.taken.setdefault(place, (stack[-1] if stack else OUTSIDE, t.dtype == torch.bool))
        self.open.update(path for path in stack if path != OUTSIDE)
        turn = self.turn if self.places is None or place in self.places else 0
        self.last = f"{place}:{frame.f_lasti}" if t.dtype == torch.bool else self.last
        holds = self.last in self.holds
        value: float = (turn == 1) != holds if t.dtype == torch.bool else (1, 0 if t.dim() else 3, 1 if t.dim() else 2)[turn]
        if t.dtype.is_floating_point:
            most = torch.finfo(t.dtype).max / 2
            value = (0.7, min(1e10, most), max(-1e10, -most))[turn] * (1 + (0.01, -0.01, 0.02)[turn] * number)
        with _disable_current_modes():
            array = torch.full(tuple(t.shape), value, dtype=torch.float32 if t.dtype == torch.bfloat16 else t.dtype)
            if turn and t.dim() and t.dtype != torch.bool:  # in another order, as np.argsort, np.unique or an assignment would see
                n = torch.arange(array.numel()).reshape(array.shape)
                array = array * (1 + n / array.numel()) if array.is_floating_point() else ((n + turn) % 2).to(t.dtype)
            return array.numpy()


@contextlib.contextmanager
def reading(reads: Reads) -> Iterator[None]:
    """numpy(), tolist() and format() of fake tensors, which would read element by element or not at all; the truth of one that is a number,
    which is another question than what number it is; and what is printed and logged of numbers that are none goes nowhere."""
    numpy, form, level, out = torch.Tensor.numpy, torch.Tensor.__format__, logging.root.manager.disable, sys.stdout
    item, truth = torch.Tensor.item, torch.Tensor.__bool__
    until = types.SimpleNamespace(write=lambda text: len(text) if reads.count else out.write(text), flush=out.flush, isatty=out.isatty)

    def to_numpy(t: Any, **more: Any) -> Any:
        with contextlib.suppress(NotConstant):
            return reads.array(t, sys._getframe(1)) if isinstance(t, FakeTensor) else numpy(t, **more)
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    def to_bool(t: Any) -> bool:
        return truth(t.ne(0) if isinstance(t, FakeTensor) and t.dtype != torch.bool and t.numel() == 1 else t)

    def to_format(t: Any, spec: str) -> str:
        return format(item(t), spec) if isinstance(t, FakeTensor) and not t.dim() else form(t, spec)

    def to_list(t: Any) -> Any:
        return to_numpy(t).tolist() if t.dim() else item(t)

    try:
        with patched(torch.Tensor, numpy=to_numpy, __format__=to_format, __bool__=to_bool), patched(FakeTensor, tolist=to_list), \
                contextlib.redirect_stdout(until), standing(reads.ways.constants, reads.stands):  # type: ignore[type-var]  # fmt: skip
            yield
    finally:
        logging.disable(level)


class Told(nn.Module):
    """A loss function's own Python with the model in it, whose modules do not run, but for those that are open."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(
        self, results: list[Any], batch: Any, loss: Tensor, opened: list[str], given: list[list[Tensor]], drawn: list[list[Tensor]]
    ) -> dict[str, Tensor]:  # fmt: skip
        """`results`: of the modules that do not run; `given`: by those that do; `drawn`: random numbers. Gives the numbers that the loss
        function gives. Error: the loss, or what a module gives, is another one."""
        try:
            with Replay(drawn) if drawn else contextlib.nullcontext():
                found = self.again(results, batch, opened, given)
            first = found["loss"] if isinstance(found, dict) else found[0] if isinstance(found, (tuple, list)) else found
            first = torch.as_tensor(first)
        except CaptureError:
            raise
        except Exception as e:
            raise CaptureError(
                f"{user_place(e.__traceback__)}: {type(e).__name__}: {e} (in Python that runs for the numbers it reads of this step; where "
                "eager steps go without this error, pass fullgraph=False)"
            ) from e
        _compare("the loss function", [loss], [first.detach().reshape(())])
        return {**numbers_in(found), "(told)": torch.tensor(0.0, dtype=torch.float64)}

    def again(self, results: list[Any], batch: Any, opened: list[str], given: list[list[Tensor]] | None = None) -> Any:
        call, left, wanted = nn.Module.__call__, iter(results), iter(given or ())
        paths = {id(m): path for path, m in self.model.named_modules()}

        def run(m: nn.Module, *args: Any, **named: Any) -> Any:
            if paths.get(id(m), "") not in opened and id(m) in paths:
                return next(left)
            result = call(m, *args, **named)
            if given is not None and id(m) in paths:
                _compare(f"module '{paths[id(m)]}'", next(wanted), _tensors(result))
            return result

        with patched(nn.Module, __call__=run):
            return self.loss_fn(self.model, batch)


def _tensors(result: Any) -> list[Tensor]:
    return [t for _, t in leaves(result, objects=False) if isinstance(t, Tensor) and t.is_floating_point()]


def _compare(who: str, program: list[Tensor], python: list[Tensor]) -> None:
    for ours, theirs in zip(program, python, strict=False):
        one, other = ours.detach().double().nan_to_num(), theirs.detach().double().nan_to_num()
        if one.shape != other.shape or (one - other).norm() > 0.02 * other.norm() + 1e-4 * one.numel() ** 0.5:
            values = f" {theirs.item()}, and the program computes {ours.item()}" if one.shape == other.shape == () else " something else"
            raise CaptureError(
                f"a number that {who} reads (.item(), an `if` on a tensor) had it compute{values}; keep the value a tensor (torch.where, "
                "masks), or pass fullgraph=False to run that in Python"
            )


def numbers_in(result: Any) -> dict[str, Tensor]:
    """Beside the loss, by the names that outputs have."""
    rest = result if isinstance(result, dict) else dict(enumerate(result)) if isinstance(result, (tuple, list)) else {}
    return {path_name(p): torch.tensor(float(x), dtype=torch.float64) for p, x in leaves(rest) if type(x) in (bool, int, float)}


class Hidden(CaptureError):
    """A module, at this path, gives an object of a class: it runs again itself."""


class Telling:
    """Notes what modules give that are not open, while the model is traced (tracing.OpaqueModules)."""

    def __init__(self, recorder: Any, opened: Collection[str], blank: bool) -> None:
        """`blank`: what is no tensor nor plain (caches of keys and values) is None among the results; else such a module is Hidden."""
        self.opened, self.results, self.blank, self._recorder, self.inside = opened, list[Any](), blank, recorder, False
        self.given: list[list[Tensor]] = []  # by modules that are open
        self._call = nn.Module.__call__

    def replaces(self, module: nn.Module) -> bool:
        return not self.inside and id(module) in self._recorder.sites.paths

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self._recorder.sites.paths[id(module)] in self.opened:
            result = self._call(module, *args, **kwargs)
            self.given.append([self._recorder.snapshot(t) for t in _tensors(result)])
            return result
        self.inside = True
        try:
            result = module(*args, **kwargs)
        finally:
            self.inside = False
        others = [p for p, x in leaves(result, objects=False) if not (isinstance(x, Tensor) or plain(x))]
        if others and not self.blank:
            raise Hidden(self._recorder.sites.paths[id(module)])
        kept = {p: self._recorder.snapshot(t) for p, t in leaves(result, objects=False) if isinstance(t, Tensor)}
        self.results.append(rebuild(result, {**kept, **dict.fromkeys(others)}))
        return result

    def _outside(self) -> list[str]:
        """Ops outside of such modules."""
        closed = {f"m{i}" for path, (i, _) in self._recorder.sites.modules.items() if path not in self.opened}
        return [line for line in self._recorder.lines if closed.isdisjoint(line.rpartition(" {")[2].rstrip("}").split())]

    def used(self, values: set[int]) -> set[int]:
        """Of these values, those that such ops read."""
        bodies = [line.rpartition(" {")[0] for line in self._outside()]
        return values.intersection(int(n) for body in bodies for n in re.findall(r"%(\d+)\b", body.partition(" = ")[2] or body))

    def drawn(self) -> list[list[Tensor]]:
        """The random numbers that such ops draw. Error: they are written where they are."""
        found, by_value = [], dict(self._recorder.known_values())
        for line in self._outside():
            if " rng=" in line.rpartition(" {")[2]:
                values = [int(n) for n in re.findall(r"%(\d+):", line.partition(" = ")[0])]
                if not by_value.keys() >= set(values):
                    raise CaptureError("random numbers are drawn beside what is read")
                found.append([self._recorder.at(n, by_value[n]) for n in values])
        return found


class Replay(TorchDispatchMode):
    """What draws random numbers gives these."""

    def __init__(self, drawn: list[list[Tensor]]) -> None:
        super().__init__()
        self._left = iter(drawn)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        info = op_info(func)
        if not (info.random and draws(info, args, kwargs or {})):
            return func(*args, **(kwargs or {}))
        found = next(self._left, [])
        shape = args[0].shape if info.mutated and found else found[0].shape if found else None
        if func is torch.ops.aten.native_dropout.default and len(found) == 1:  # of devices; the program has what torch has on CPUs
            return args[0] * (found[0] / (1 - args[1])), found[0].bool()
        if not found or found[0].shape != shape or len(found) < len(func._schema.returns):
            raise CaptureError("what is read had the loss function draw other random numbers than the program does; draw them in any case")
        if info.mutated:
            return args[0].copy_(found[0])
        return found[0].clone() if len(func._schema.returns) == 1 else tuple(t.clone() for t in found)
