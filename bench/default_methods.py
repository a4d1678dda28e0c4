"""The methods of bench/defaults.py: interlace with nothing said, and with every setting that a user could write instead.

Each trains until its schedule is settled, so that what is measured is what a long run takes.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import Any

import torch.distributed as dist
from cases import causal_loss, causal_model
from peer_methods import Method, Settings, Step, _some_batches, _whole, adamw

SETTLE_STEPS = 60  # at most
STRATEGIES, MODES = ("shard", "zero1", "replicate"), ("reduce_each", "reduce_last")


def trained(settings: Settings, written: dict[str, Any]) -> Step:
    """A trainer with what is written, after its schedule is through."""
    import interlace

    model = causal_model(settings.case)
    batches = [_whole(b) for b in _some_batches(settings, 4)]
    config = interlace.Config(accumulation=settings.accumulation, cache="off", **written)
    trainer = interlace.compile(model, adamw(model.parameters()), causal_loss, batches[0], config)
    for step in range(SETTLE_STEPS):
        trainer.step(batches[step % len(batches)])
        if config.schedule == () or (step > 11 and trainer.settled):
            break
    if dist.get_rank() == 0:
        print(f"{written}: {[plan.get('chosen') for plan in trainer.plans]}", file=sys.stderr, flush=True)
    return lambda b: trainer.step(_whole(b)).item()


def explicit(accumulation: int) -> dict[str, dict[str, Any]]:
    """What a user could write: each strategy, each way to reduce gradients, as it is or searched."""
    found = {}
    modes = MODES if accumulation > 1 else MODES[:1]
    for strategy, mode, search in itertools.product(STRATEGIES, modes, (False, True)):
        written: dict[str, Any] = {"strategy": strategy, "accumulate_mode": mode}
        if not search:
            written["schedule"] = []
        name = "-".join([strategy, *([mode] if accumulation > 1 else []), *(["search"] if search else [])])
        found[name] = written
    return found


def _method(name: str, title: str, written: dict[str, Any]) -> Method:
    return Method(name, title, "default", "interlace", partial(trained, written=written), ours=True)


DEFAULTS = {"default": _method("default", "nothing said", {})} | {
    name: _method(name, f"interlace {name}", written) for a in (1, 4) for name, written in explicit(a).items()
}
