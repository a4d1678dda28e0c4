"""The models that have a name: tiny ones to train, large ones to capture, and those to plan for.

GPT, Llama and Falcon to plan for have the shapes of Mist's evaluation (its artifact's model configs; Table 4 gives the names):
vocabulary 50304, untied head, no dropout, every head has its own keys and values. 2.6b is called 2.7b there, 6.7b is 7b. GPT keeps
the biases that GPT-2 has (0.1 % of the parameters), which the artifact turns off.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model that can be built by name. `kind`: "causal-lm", "image" or "seq2seq"; `seq` is its usual sequence
    length."""

    name: str
    kind: str
    help: str
    options: dict[str, Any]  # of the Hugging Face config, or of the class
    model_type: str = ""  # of the Hugging Face config; "" for models of our own
    dtype: str = "float32"
    seq: int = 64
    meta: bool = False  # too big to be built in memory


def _lm(name: str, model_type: str, help: str, hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int,
        seq: int = 64, dtype: str = "float32", meta: bool = False, **more: Any) -> Preset:  # fmt: skip
    options = {
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
        "max_position_embeddings": max(2048, seq), "tie_word_embeddings": False, **more,
    }  # fmt: skip
    return Preset(name, "causal-lm", help, options, model_type, dtype, seq, meta)


def _gpt2(name: str, help: str, width: int, layers: int, heads: int, vocab: int, seq: int, **more: Any) -> Preset:
    options = {
        "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab, "n_positions": 1024,
        "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip
    return Preset(name, "causal-lm", help, options, "gpt2", "float32", seq)


def _large(name: str, model_type: str, hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int,
           theta: float, **more: Any) -> Preset:  # fmt: skip
    help = f"{name}'s published shape, bf16, on meta"
    return _lm(name, model_type, help, hidden, inter, layers, heads, kv, vocab, 2048, "bfloat16", True,
               rope_theta=theta, **{"max_position_embeddings": 8192, **more})  # fmt: skip


_LLAMA31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _lm("llama-tiny", "llama", "Llama, 0.9 M parameters", 128, 344, 4, 4, 2, 512),
        _lm("llama-10m", "llama", "Llama, 9 M parameters, for training on text", 320, 864, 6, 10, 5, 4096, 256),
        _gpt2("gpt2-tiny", "GPT-2, 0.5 M parameters, tied embeddings, dropout 0.1", 96, 3, 4, 512, 64),
        _gpt2("gpt2-10m", "GPT-2, 9 M parameters, tied embeddings, dropout 0.1", 320, 6, 5, 4096, 256),
        _lm("qwen3-tiny", "qwen3", "Qwen3 (norms of queries and keys)", 64, 160, 2, 4, 2, 320, head_dim=16),
        _lm("mistral-tiny", "mistral", "Mistral (sliding window)", 64, 160, 2, 4, 2, 320, sliding_window=32),
        _lm("mixtral-tiny", "mixtral", "Mixtral, 4 experts, bf16 grouped matrix products", 64, 128, 2, 4, 2, 320,
            dtype="bfloat16", num_local_experts=4, num_experts_per_tok=2),
        Preset("vit-tiny", "image", "ViT classifier on 32 x 32 images", {
            "image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "num_labels": 10,
        }, "vit"),
        Preset("convnet-tiny", "image", "convolutions with BatchNorm", {"channels": 16, "classes": 10}),
        Preset("transformer-tiny", "seq2seq", "torch.nn.Transformer, dropout 0.1", {"vocab_size": 128}, seq=16),
        _gpt2("gpt2", "GPT-2, 124 M parameters", 768, 12, 12, 50257, 1024),
        _large("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 151936, 1e6, head_dim=128, max_position_embeddings=40960),
        _large("mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 32768, 1e6, sliding_window=None),
        _large("mixtral-8x7b", "mixtral", 4096, 14336, 32, 32, 8, 32000, 1e6, num_local_experts=8,
               num_experts_per_tok=2, sliding_window=None),
        _large("llama-3-8b", "llama", 4096, 14336, 32, 32, 8, 128256, 5e5),
        _large("llama-3-70b", "llama", 8192, 28672, 80, 64, 8, 128256, 5e5),
        _large("llama-3.1-405b", "llama", 16384, 53248, 126, 128, 8, 128256, 5e5, rope_scaling=_LLAMA31_ROPE,
               max_position_embeddings=131072),
    )
}  # fmt: skip


# ---- models to plan for ----

VOCAB = 50304
LONGEST = 8192  # positions that a preset has room for; config_of(seq=) makes more

# size → (hidden, layers, heads, width of Llama's gated MLP)
SIZES: dict[str, tuple[int, int, int, int]] = {
    "1.3b": (2048, 24, 16, 5632),
    "2.6b": (2560, 32, 32, 6912),
    "6.7b": (4096, 32, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "22b": (6144, 48, 64, 16384),
    "40b": (8192, 48, 64, 22016),
    "175b": (12288, 96, 96, 32768),  # GPT-3's (Brown et al., Table 2.1)
}
_GPT_ONLY = ("40b", "175b")
ALIASES = {"llama-3-405b": "llama-3.1-405b", "llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "mixtral": "mixtral-8x7b"}
_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "tie_word_embeddings": False}


def _gpt(hidden: int, layers: int, heads: int, _: int) -> tuple[str, dict[str, Any]]:
    # One kernel for the activation, as every training framework has; GPT-2's own is seven elementwise operations.
    return "gpt2", {
        "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": LONGEST,
        "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, inter: int) -> tuple[str, dict[str, Any]]:
    return "llama", {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": inter, "max_position_embeddings": LONGEST,
    }  # fmt: skip


def _falcon(hidden: int, layers: int, heads: int, _: int) -> tuple[str, dict[str, Any]]:
    # Attention and MLP side by side, each behind a norm of its own.
    return "falcon", {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_kv_heads": heads,
        "new_decoder_architecture": True, "parallel_attn": True, "bias": False, "max_position_embeddings": LONGEST,
    }  # fmt: skip


_FAMILIES = {"gpt": _gpt, "llama": _llama, "falcon": _falcon}

# name → (model type, options of the Hugging Face config)
PLANNED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family}-{size}": (make(*shape)[0], {**_COMMON, **make(*shape)[1]})
    for family, make in _FAMILIES.items()
    for size, shape in SIZES.items()
    if family == "gpt" or size not in _GPT_ONLY
}
