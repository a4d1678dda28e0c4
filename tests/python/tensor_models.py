"""Models whose sizes two and four ranks of axis tp divide, and training runs of them on a mesh and in one process."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import ranks
import torch
from torch import nn

import interlace

Tensor = torch.Tensor
ROWS, LENGTH, VOCAB = 2, 12, 64
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
WIDE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**COMMON, **WIDE, **more}))


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=16, **drops))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON, **WIDE, head_dim=8))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: dict[str, Any] = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
    return MixtralForCausalLM(MixtralConfig(**COMMON, **WIDE, **experts))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    small: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=VOCAB, use_cache=False, decoder_start_token_id=0, dropout_rate=0.0, **small)
    return T5ForConditionalGeneration(config)


def mpnet() -> nn.Module:
    """Its bias of positions is expanded to all rows once, and used in all layers."""
    from transformers import MPNetConfig, MPNetForMaskedLM

    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return MPNetForMaskedLM(MPNetConfig(vocab_size=VOCAB, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in WIDE.items() if name not in ("num_key_value_heads", "max_position_embeddings")}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "deep": lambda: llama(tie_word_embeddings=True, num_hidden_layers=5),
    "gpt2": gpt2,
    "gpt2_dropout": lambda: gpt2(0.1),
    "qwen3": qwen3,
    "mixtral": mixtral,
    "t5": t5,
    "mpnet": mpnet,
    "vit": vit,
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype).train()


# Of models that say nothing themselves: what is cut along dimension 0, and along dimension 1.
CUTS = {
    "vit": (r"\.(q_proj|k_proj|v_proj|query|key|value|fc1|intermediate\.dense)\.(weight|bias)$",
            r"layers?\.\d+\..*(o_proj|fc2|output\.dense)\.weight$"),
    "t5": (r"(\.(q|k|v|wi)|^shared)\.weight$", r"\.(o|wo)\.weight$"),
}  # fmt: skip


def plan_of(name: str, model: nn.Module) -> str:
    """For `Config.tensor`: so small a model the search would leave whole."""
    if name not in CUTS:
        return "model"
    lines = [f"{n} {dim}" for dim in (0, 1) for n, _ in model.named_parameters() if re.search(CUTS[name][dim], n)]
    file, mine = (Path(ranks.CACHE) / f"{name}{own}.plan" for own in ("", f".{os.getpid()}"))
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("\n".join(lines))
    return str(mine.replace(file))  # the same for all ranks, each of which writes it


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "labels" in batch:  # of images, or of a decoder
        logits = model(**batch).logits
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch["input_ids"][:, 1:].reshape(-1))


def batch_of(step: int, place: int, rows: int = ROWS, name: str = "llama") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + place)
    if name == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, 8, (rows,), generator=generator)}
    tokens = {"input_ids": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)}
    return tokens | ({"labels": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)} if name in ("t5", "mpnet") else {})


def compiled(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> interlace.Trainer:
    model = build(name, dtype, seed)
    if "tp" in (config.get("mesh") or {}):
        config.setdefault("tensor", plan_of(name, model))
    settings = interlace.Config(**{"timeout_s": 60, "cache": ranks.CACHE, "schedule": [], "profile": "off", **config})
    place, _ = settings.data_place(*parity.rank_and_size())
    return interlace.compile(
        model, parity.make_optimizer("adamw", model), loss_of, batch_of(0, place, ROWS * settings.accumulation, name), settings
    )


def steps(trainer: interlace.Trainer, first: int, last: int, name: str = "llama") -> list[float]:
    """Mean losses of the global batch."""
    rows = ROWS * trainer.config.accumulation
    batches = (batch_of(step, trainer.data_rank, rows, name) for step in range(first, last))
    return [parity.mean_over_ranks(trainer.step(batch)) for batch in batches]


def on_mesh(name: str, count: int, dtype: torch.dtype = torch.float64, **config: Any) -> parity.Run:
    with compiled(name, dtype, **config) as trainer:
        assert " cut tp " in trainer.program or "tp" not in (config.get("mesh") or {}), f"no weight of {name} is cut"
        losses = steps(trainer, 0, count, name)
        return losses, dict(trainer.state_dict(all_ranks=True))


@functools.cache
def in_one_process(name: str, count: int, places: int, clip: float | None, accumulation: int) -> parity.Run:
    """Plain PyTorch on the batches of so many data ranks, one after the other; once in a process of the pool."""
    model = build(name)
    optimizer = parity.make_optimizer("adamw", model)
    losses = []
    for step in range(count):
        total = 0.0
        for place in range(places):
            for part in parity.pieces(batch_of(step, place, ROWS * accumulation, name), accumulation):
                loss = loss_of(model, part) / (accumulation * places)
                loss.backward()
                total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.state_dict())
