"""Tiny models, their batches and loss functions, shared by the tests that compare with plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]  # (rows, seed) → batch
    loss: Callable[[nn.Module, Any], Tensor]
    dtype: torch.dtype | None = None  # of the parameters, when the model has a natural one


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).float().to(logits.dtype), batch["input_ids"][:, 1:].reshape(-1)
    )


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].to(next(model.parameters()).dtype)
    return functional.cross_entropy(model(x), batch["y"])


def tokens(rows: int, seed: int, vocab: int = 61, length: int = 12) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))}


def images(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, 8, 8, generator=g), "y": torch.randint(0, 5, (rows,), generator=g)}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=36,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=12,
            vocab_size=61,
            max_position_embeddings=32,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=36,
            n_layer=2,
            n_head=3,
            vocab_size=61,
            n_positions=16,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def gpt2_dropout() -> nn.Module:
    return gpt2(0.1)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=61,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).to(torch.bfloat16)


class ViT(nn.Module):
    """Patches, a class token, learned positions, encoder blocks: 8x8 images of 5 classes."""

    def __init__(self, width: int = 24, depth: int = 2, heads: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class BatchNormNet(nn.Module):
    """Convolutions with BatchNorm; biases that BatchNorm would cancel are left out, as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.Conv2d(7, 10, 3, stride=2, bias=False),
            nn.BatchNorm2d(10),
            nn.ReLU(),
        )
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


CASES = {
    "llama": Case(llama, tokens, causal_loss),
    "gpt2": Case(gpt2, tokens, causal_loss),
    "gpt2_dropout": Case(gpt2_dropout, tokens, causal_loss),
    "vit": Case(ViT, images, class_loss),
    "batchnorm": Case(BatchNormNet, images, class_loss),
    "mixtral": Case(mixtral, tokens, causal_loss, torch.bfloat16),
}


def build(name: str, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = CASES[name].build()
    return model.to(dtype) if dtype is not None else model
