"""Rank functions whose runs go wrong; each gives the message that the rank saw."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import parity
import torch
import torch.distributed as dist
import zoo

import interlace
from interlace.dist.peers import PeerError, Peers


def observed(action: Callable[[], Any]) -> str:
    """The text of the error; empty when there was none."""
    try:
        action()
    except interlace.InterlaceError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def make(case: str = "llama", rows: int = 2, timeout_s: float = 20.0, **config: Any) -> interlace.Trainer:
    model = zoo.build(case, torch.float32)
    opt = parity.make_optimizer("adamw", model)
    return interlace.compile(
        model,
        opt,
        zoo.CASES[case].loss,
        zoo.CASES[case].batch(rows, 0),
        interlace.Config(timeout_s=timeout_s, **config),
    )


def other_batch_in_step(strategy: str) -> str:
    trainer = make(strategy=strategy)
    trainer.step(zoo.tokens(2, 0))
    rows = 3 if dist.get_rank() == 1 else 2
    found = observed(lambda: [trainer.step(zoo.tokens(rows, i)) for i in range(3)])
    again = observed(lambda: trainer.step(zoo.tokens(2, 0)))
    assert "can no longer be used" in again, again
    return found


def other_batch_at_compile() -> str:
    return observed(lambda: make(rows=3 if dist.get_rank() == 1 else 2))


def other_model_at_compile() -> str:
    return observed(lambda: make("gpt2" if dist.get_rank() == 2 else "llama"))


def other_setting_at_compile() -> str:
    return observed(lambda: make(clip_norm=1.0 if dist.get_rank() == 0 else 2.0))


def one_rank_does_not_compile() -> str:
    text = "" if dist.get_rank() == 1 else observed(lambda: make(timeout_s=2.0))
    dist.barrier()
    return text


def one_rank_cannot_capture() -> str:
    """Rank 0 captures; its error must reach the others."""
    model = zoo.build("llama")
    opt = torch.optim.AdamW(model.parameters())

    def loss(m: torch.nn.Module, b: Any) -> torch.Tensor:
        value = zoo.causal_loss(m, b)
        return value if value.item() > 0 else -value

    return observed(lambda: interlace.compile(model, opt, loss, zoo.tokens(2, 0), interlace.Config(timeout_s=20)))


def killed_in_step(strategy: str, victim: int) -> str:
    trainer = make(strategy=strategy, timeout_s=100)  # longer than a run may take: it must be found by its connections
    trainer.step(zoo.tokens(2, 0))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return observed(lambda: [trainer.step(zoo.tokens(2, i)) for i in range(50)])


def raises_in_step(victim: int) -> str:
    """A rank whose own Python fails while the others train: it closes its trainer and goes on without them."""
    trainer = make()
    trainer.step(zoo.tokens(2, 0))
    text = ""
    if dist.get_rank() == victim:
        trainer.close()
    else:
        text = observed(lambda: [trainer.step(zoo.tokens(2, i)) for i in range(50)])
    dist.barrier()
    return text


def stuck_in_step(victim: int) -> str:
    trainer = make(timeout_s=3.0)
    trainer.step(zoo.tokens(2, 0))
    text = ""
    if dist.get_rank() != victim:
        text = observed(lambda: [trainer.step(zoo.tokens(2, i)) for i in range(50)])
    dist.barrier()
    return text


def nan_on_one_rank(clip: float | None, strategy: str = "shard") -> tuple[str, bool]:
    """Rank 1's batch makes a gradient that is not finite."""
    model = zoo.build("vit", torch.float32)
    opt = parity.make_optimizer("adamw", model)
    config = interlace.Config(clip_norm=clip, timeout_s=20, strategy=strategy)
    trainer = interlace.compile(model, opt, zoo.class_loss, zoo.images(2, 0), config)
    before = trainer.state_dict(all_ranks=True)
    batch = zoo.images(2, 1)
    if (dist.is_initialized() and dist.get_rank() == 1) or not dist.is_initialized():
        batch["x"][0, 0, 0, 0] = float("nan")
    text = observed(lambda: trainer.step(batch))
    unchanged = False
    if clip is not None:
        after = trainer.state_dict(all_ranks=True)
        unchanged = all(torch.equal(before[k], after[k]) for k in before)
        trainer.step(zoo.images(2, 2))
    return text, unchanged


def a_word_before_the_end() -> int:
    """Rank 0 writes a value and fails; rank 1 looks for the value before, and for failures after."""
    peers = Peers(torch.device("cpu"), 20.0)
    if peers.rank == 0:
        peers.collect_one("looked", 1, lambda: True)
        peers.post("word/0", 7)
        peers.fail(RuntimeError("after its word"))
        return 7
    posted = peers._posted

    def posted_later(start: int | None = None) -> PeerError | None:
        peers.post("looked/1", True)
        while (cause := posted(start)) is None:
            time.sleep(0.001)
        return cause

    peers._posted = posted_later  # type: ignore[method-assign]
    word = int(peers.collect_one("word", 0, lambda: True))
    peers.close()
    return word
