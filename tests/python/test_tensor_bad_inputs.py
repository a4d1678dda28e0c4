"""What cannot be cut, or not as asked: one message each, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ranks
import tensor_models
import torch
from torch import nn

import interlace


def compiled(name: str, plan: str | None, tp: int = 2) -> list[str]:
    with tensor_models.compiled(name, mesh={"tp": tp}, **({} if plan is None else {"tensor": plan})) as trainer:
        return trainer.summary()["not_cut"]


LAYER = "model.layers.*."


@pytest.mark.parametrize(
    ("name", "tp", "lines", "said"),
    [
        ("llama", 3, f"{LAYER}self_attn.q_proj.weight 0", "32 in 1 block, cannot be cut into 3 equal parts; 33 could, and 32 into 2, 4"),
        ("llama", 2, f"{LAYER}mlp.up.weight 0", "plan.txt:1: the model has no parameter 'model.layers.*.mlp.up.weight'; did you mean"),
        ("llama", 2, f"{LAYER}mlp.up_proj.weight 0\nmodel.layers.0.mlp.up_proj.weight 0", "mlp.up_proj.weight' is cut in line 1"),
        ("llama", 2, f"{LAYER}mlp.up_proj.weight 2", "has no dimension 2"),
        ("llama", 2, "# nothing", "plan.txt cuts nothing; write lines such as 'model.layers.*.mlp.up_proj.weight 0'"),
        ("gpt2", 2, "transformer.h.*.attn.c_attn.weight 1", "c_attn.weight' makes is taken in 3 parts, and a cut along dimension 1"),
        ("gpt2", 2, "transformer.h.*.attn.c_attn.weight 1", "write 'transformer.h.*.attn.c_attn.weight 1 blocks 3', which cuts each"),
        ("llama", 4, f"{LAYER}self_attn.k_proj.weight 0", "of heads, fewer than ranks, write nothing: they stay whole"),
        ("tied", 2, "model.embed_tokens.weight 0\nlm_head.weight 1", "is tied to 'model.embed_tokens.weight', which line 1 cuts another way"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be(name: str, tp: int, lines: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text(lines)
    for outcome in ranks.outcomes(compiled, tp, name, str(tmp_path / "plan.txt"), tp):
        assert outcome is not None and said in str(outcome.error)


def test_ranks_that_divide_no_head() -> None:
    """Without a file: whole, and said so."""
    notes = ranks.run(compiled, 3, "llama", None, 3)[0]
    said = r"self_attn.q_proj.weight', 32 in 1 block, cannot be cut into 3 equal parts; 33 could"
    assert any(re.search(said, note) for note in notes), notes


class Opaque(nn.Module):
    """Runs in Python: what it does depends on numbers that only a step has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 1e9 else self.inner(x) * 2


def of_opaque() -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Opaque(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    batch = {"x": torch.randn(4, 8)}

    def loss_of(m: nn.Module, b: dict[str, torch.Tensor]) -> Any:
        return m(b["x"]).square().mean()

    config = interlace.Config(mesh={"tp": 2}, fullgraph=False, schedule=[], profile="off", cache="off", timeout_s=60)
    expected = loss_of(model, batch).item()
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batch, config) as trainer:
        return trainer.summary()["not_cut"], trainer.step(batch).item() - expected


def test_a_module_that_is_opaque() -> None:
    notes, apart = ranks.run(of_opaque, 2)[0]
    assert "module '1' is opaque: every rank runs all of it" in notes and abs(apart) < 1e-5
