"""What the capture tests share: eager PyTorch as the reference, and the comparison of bits."""

from __future__ import annotations

import copy

import torch
from evaluator import Evaluator, same

from interlace import _core
from interlace.capture import Captured, capture


def eager(model, loss_fn, batch):
    """Loss, gradients by name (first of tied names) and buffers after one plain step of a copy of the model."""
    model = copy.deepcopy(model)
    loss = loss_fn(model, batch)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, dict(model.named_buffers())


def check(model, loss_fn, batch, seed=0, **options) -> Captured:
    """Captures, evaluates and compares bits with eager: loss, gradients, changed buffers."""
    c = capture(model, loss_fn, batch, **options)
    program = _core.Program.parse(c.text, "captured")
    program.verify()
    assert program.print() == c.text
    loss_fn = loss_fn or (lambda m, b: m(**b).loss)
    torch.manual_seed(seed)
    loss, grads, buffers = eager(model, loss_fn, batch)
    torch.manual_seed(seed)
    got = Evaluator(c.text, c.tensors).run(c.input_spec.flatten(batch))
    assert same(got["outputs"]["loss"], loss)
    assert got["grads"].keys() == grads.keys()
    for name, g in grads.items():
        assert same(got["grads"][name], g), name
    before = dict(model.named_buffers())
    changed = {n for n, b in buffers.items() if not same(b, before[n])}
    assert {n for n in got["assigned"]} >= changed
    for name, value in got["assigned"].items():
        assert same(value, buffers[name]), name
    return c
