"""Captured optimizer steps: what is written down, what is refused, and the kernel that runs it."""

from __future__ import annotations

import re
from typing import Any

import parity
import pytest
import torch
from interlace._runtime import testing

import interlace
from interlace.capture.groups import rules_of
from interlace.capture.pilot import Pilot
from interlace.capture.rules import Form, evaluate
from interlace.errors import CaptureError

Tensor = torch.Tensor
# Every op, with numbers and with memory where it takes both.
EVERY_OP = """rule 0 "Every" (a, b) {
  form {
    t0 = copy(g)
    t1 = neg(a)
    t2 = abs(t1)
    t3 = sign(a)
    t4 = sqrt(t2)
    t5 = rsqrt(t2)
    t6 = reciprocal(t2)
    t7 = tanh(a)
    t8 = exp(t7)
    t9 = log(t8)
    t10 = mul(a, b)
    t10 = mul(t10, n0)
    t11 = div(n1, t8)
    t11 = div(t11, t4)
    t12 = max(a, b)
    t12 = max(t12, n0)
    t13 = min(n1, b)
    t14 = pow(t2, n0)
    t15 = gt(a, n0)
    t16 = ge(a, b)
    t17 = lt(n0, b)
    t18 = le(a, b)
    t19 = eq(a, a)
    t20 = ne(a, b)
    t0 = add(t0, t1, n2)
    t0 = add(n1, t0, n2)
    t3 = lerp(t3, t4, n0)
    t5 = lerp(t5, t6, n3)
    t6 = lerp(t6, t9, t7)
    t15 = where(t15, t10, t11)
    t16 = where(t16, n1, t12)
    t17 = where(t17, t13, n2)
    t18 = where(t18, n0, n1)
    t19 = addcmul(t19, t14, t20, n2)
    a = addcdiv(t0, t3, t8, n3)
    b = addcmul(t5, t6, t15, n1)
    g = add(t16, t17, n0)
    t18 = add(t18, t19, n0)
    w = add(g, t18, n1)
  }
}"""
NUMBERS = [0.3, -0.7, 1.5, 0.8]


def form_in(text: str, numbers: list[float]) -> Form:
    ops = [(r, name, tuple(o.split(", "))) for r, name, o in re.findall(r"(\w+) = (\w+)\(([^)]*)\)", text)]
    return Form((), numbers, ops)


@pytest.mark.parametrize("aten", [False, True], ids=["ours", "aten"])
@pytest.mark.parametrize("dtype, bound", [("float64", 1e-12), ("float32", 2e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("numel, scale", [(1, 1.0), (511, 0.5), (70001, 1.0)])
def test_the_kernel_does_what_the_ops_say(numel: int, scale: float, dtype: str, bound: float, aten: bool) -> None:
    generator = torch.Generator().manual_seed(numel)
    kind = getattr(torch, dtype)
    w, g, a, b = ((0.5 + torch.rand(numel, generator=generator)).mul(s).to(kind) for s in (1, -1, -1, 1))
    wide = torch.float64 if kind == torch.float64 else torch.float32
    registers = {"w": w.to(wide), "g": g.to(wide) * scale, "a": a.to(wide), "b": b.to(wide)}
    expected = evaluate(form_in(EVERY_OP, NUMBERS), registers)
    before = g.clone()
    testing.rule_step(EVERY_OP, 0, [w, g, a, b], NUMBERS, grad_scale=scale, aten=aten)
    assert torch.equal(g, before)
    for name, got in (("w", w), ("a", a), ("b", b)):
        torch.testing.assert_close(got, expected[name].to(kind), rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", list(parity.RULES))
def test_the_kernel_gives_pytorchs_own_numbers(kind: str) -> None:
    """Parameters of several shapes, laid one behind the other and updated as one."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(40, 30), (7, 3, 2), (100,)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    optimizer = parity.RULES[kind](params)
    rules = rules_of(optimizer)
    forms = [tuple(re.findall(r"(\w+ = .*)", block)) for block in "\n".join(rules.lines).split("form {")[1:]]
    pilot = Pilot.fresh(optimizer, [[(2, 3)]])
    names = pilot.step().after.states()[0]
    numel = sum(p.numel() for p in params)
    flats = [torch.cat([p.detach().reshape(-1) for p in params]), torch.empty(0), *(torch.zeros(numel).double() for _ in names)]
    for _ in range(10):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        flats[1] = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        step = pilot.step()
        testing.rule_step("\n".join(rules.lines), forms.index(step.forms[0].lines), flats, step.forms[0].numbers)
        pilot = step.after
        optimizer.step()
        torch.testing.assert_close(flats[0], torch.cat([p.detach().reshape(-1) for p in params]), rtol=1e-12, atol=1e-13)
    for name, flat in zip(names, flats[2:], strict=True):
        whole = torch.cat([optimizer.state[p][name].reshape(-1) for p in params])
        torch.testing.assert_close(flat, whole, rtol=1e-11, atol=1e-13)


class Own(torch.optim.Optimizer):
    """One whose step is given."""

    def __init__(self, params: Any, update: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p], group)


def trust(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    p.sub_(g * (p.norm() / g.norm()))


def by_size(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    p.sub_(g, alpha=group["lr"] / p.numel())


def turned(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    p.sub_(g.t() if p.dim() == 2 and p.shape[0] == p.shape[1] else g, alpha=group["lr"])


def if_large(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    if bool((g > 1).all()):
        p.sub_(g)


def rows(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    state.setdefault("row", torch.zeros_like(p).sum(-1, keepdim=True))
    p.sub_(g + state["row"])


def counted_wide(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    state.setdefault("mean", torch.zeros_like(p, dtype=torch.float64)).lerp_(g.double(), 0.1)
    p.sub_(state["mean"])


def named_w(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    p.sub_(state.setdefault("n1", torch.zeros_like(p)).add_(g))


def broken(p: Tensor, g: Tensor, state: dict, group: dict) -> None:
    p.sub_(g, alpha=group["rate"])


@pytest.mark.parametrize(
    "update, why",
    [
        (trust, "its step uses aten.linalg_vector_norm"),
        (by_size, "parameters of group 0 that differ in shape alone get other steps"),
        (turned, "its step uses aten.t"),
        (if_large, "its step uses aten.all"),
        (rows, "its step uses aten.sum"),
        (counted_wide, "its state 'mean' becomes float64"),
        (named_w, "a state cannot be called 'n1' in a program"),
        (broken, "its step fails on a small parameter (KeyError: 'rate')"),
    ],
)
def test_what_is_not_elementwise_is_refused_by_name(update: Any, why: str) -> None:
    model = torch.nn.Linear(6, 6)
    with pytest.raises(CaptureError) as e:
        rules_of(Own(model.parameters(), update))
    assert str(e.value).startswith("optimizer Own cannot run on the parts of parameters that ranks hold: ")
    assert why in str(e.value)


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda p: torch.optim.LBFGS(p), "optimizer LBFGS cannot run on the parts of parameters that ranks hold: it takes products"),
        (lambda p: torch.optim.SparseAdam(p), "optimizer SparseAdam cannot run on the parts of parameters that ranks hold: it takes sparse"),
    ],
    ids=["lbfgs", "sparse-adam"],
)
def test_optimizers_of_whole_matrices_are_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(CaptureError) as e:
        rules_of(make(list(torch.nn.Linear(6, 6).parameters())))
    assert str(e.value).startswith(why)


def test_settings_that_a_scheduler_changes_are_followed() -> None:
    """Weight decay that is turned on, a learning rate that changes, a step that goes another way from the fifth on (RAdam)."""
    torch.manual_seed(0)
    batches = [torch.randn(8, 5, dtype=torch.float64) for _ in range(12)]

    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
        optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def loss(m: torch.nn.Module, b: dict[str, Tensor]) -> Tensor:
            return m(b["x"]).square().mean()

        trainer = interlace.compile(model, optimizer, loss, {"x": batches[0]}, interlace.Config(cache="off")) if compiled else None
        for i, x in enumerate(batches):
            optimizer.param_groups[0]["weight_decay"] = 0.1 if 3 <= i < 9 else 0.0
            if trainer is None:
                optimizer.zero_grad()
                loss(model, {"x": x}).backward()
                optimizer.step()
            else:
                trainer.step({"x": x})
            scheduler.step()
        return [p.detach().clone() for p in model.parameters()]

    for got, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
