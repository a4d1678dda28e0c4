"""Models and batches that the benchmarks and the tests share."""

from __future__ import annotations

from typing import Any

import torch

MATMUL_BOUND = {"hidden": 512, "layers": 6, "heads": 8, "inter": 1376, "vocab": 512, "tokens": 512}  # 19.5 M parameters
GPT2_MATMUL_BOUND = {"family": "gpt2", "hidden": 512, "layers": 6, "heads": 8, "vocab": 512, "tokens": 512}  # 19.7 M
VIT_MATMUL_BOUND = {"family": "vit", "hidden": 512, "layers": 6, "heads": 8, "vocab": 512, "image": 224, "patch": 16, "rows": 4}
OVERHEAD_BOUND = {"hidden": 64, "layers": 12, "heads": 4, "inter": 172, "vocab": 512, "tokens": 64}


def llama(case: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A Hugging Face Llama of the given case, attention through scaled_dot_product_attention, tied weights off."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=case["hidden"],
        intermediate_size=case["inter"],
        num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case.get("key_heads", case["heads"]),
        vocab_size=case["vocab"],
        max_position_embeddings=max(2048, case["tokens"]),
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).to(dtype)


def gpt2(
    case: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0, dropout: float = 0.0
) -> torch.nn.Module:
    """A Hugging Face GPT-2 with the case's width and depth; its head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=case["hidden"],
        n_layer=case["layers"],
        n_head=case["heads"],
        vocab_size=case["vocab"],
        n_positions=max(1024, case["tokens"]),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).to(dtype)


def vit(case: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A Hugging Face ViT with the case's width and depth, `vocab` classes, without dropout."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=case["hidden"],
        intermediate_size=4 * case["hidden"],
        num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"],
        image_size=case["image"],
        patch_size=case["patch"],
        num_labels=case["vocab"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config).to(dtype)


def causal_model(case: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The model of a case: a Llama unless its `family` says another."""
    return {"gpt2": gpt2, "vit": vit}.get(case.get("family", ""), llama)(case, dtype, seed)


def image_batch(case: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """`rows` random images of a ViT's case, with their classes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(case["rows"], 3, case["image"], case["image"], generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, case["vocab"], (case["rows"],), generator=generator)}


def blocks_of(model: Any) -> Any:
    """The list of a causal model's layers."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def token_batch(case: dict[str, Any], rows: int = 1, seed: int = 0, rank: int = 0) -> dict[str, torch.Tensor]:
    """`rows` sequences of the case's length; labels equal inputs, as Hugging Face shifts them itself."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.randint(0, case["vocab"], (rows, case["tokens"]), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def causal_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    return model(**batch).loss
