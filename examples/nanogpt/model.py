"""A GPT in the manner of nanoGPT, and its data: characters of a text."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """(batch, seq) ids and targets to (logits, loss)."""

    def __init__(self, vocab: int, seq: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Characters:
    """Batches of a text, the last tenth of it for validation."""

    def __init__(self, file: str, batch: int, seq: int) -> None:
        text = Path(file).read_text()
        letters = sorted(set(text))
        ids = torch.tensor([letters.index(letter) for letter in text])
        cut = int(0.9 * len(ids))
        self.parts = {"train": ids[:cut], "valid": ids[cut:]}
        self.vocab, self.batch, self.seq = len(letters), batch, seq
        self.draw = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))  # each rank its own batches

    def __call__(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.parts[part]
        at = torch.randint(len(ids) - self.seq, (self.batch,), generator=self.draw).tolist()
        return torch.stack([ids[i : i + self.seq] for i in at]), torch.stack([ids[i + 1 : i + 1 + self.seq] for i in at])


def learning_rate(step: int, steps: int, most: float = 1e-3) -> float:
    """Warm-up over a tenth of the steps, then a cosine to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return most * (step + 1) / warm
    return most * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))
