"""Model presets by name: tiny ones to train, large ones to capture; or any Hugging Face config.json.

    built = build("llama-10m", vocab_size=4096, seq=128, micro_batch=8)
    built.model, built.loss_fn, built.example_batch

A large preset is built on meta: its parameters take no memory, its buffers (rotary frequencies) are real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlace.errors import InterlaceError

Tensor = torch.Tensor
_META_FROM = 1 << 14  # elements; smaller tensors are made for real and dropped when they become parameters


# ---- building on meta ----


class _LargeOnMeta(torch.overrides.TorchFunctionMode):
    """torch.empty of a large tensor gives one on meta: layers make their parameters so."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            if torch.Size(kwargs.get("size", size)).numel() >= _META_FROM:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on meta and their buffers in memory.

    torch.device("meta") would put both there, and buffers that no checkpoint holds, such as rotary frequencies, would
    be lost.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = type(param)(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# ---- models of our own ----


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, pooling, and a linear classifier."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(images)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean(dim=(2, 3)))


class Seq2Seq(nn.Module):
    """torch.nn.Transformer between an embedding and a linear head."""

    def __init__(self, vocab_size: int = 128, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.transformer = nn.Transformer(width, 4, layers, layers, 4 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.head(self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


# ---- losses and batches ----


def hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a Hugging Face model computes itself from `labels`."""
    return model(**batch).loss


def classifier_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


def seq2seq_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _token_batch(rows: int, seq: int, vocab_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, vocab_size, (rows, seq), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


# ---- presets ----


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


@dataclasses.dataclass
class Built:
    """A model, its loss and a synthetic batch of random tokens or pixels, the same for the same arguments."""

    name: str
    kind: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    example_batch: dict[str, Tensor]
    config: Any = None  # the Hugging Face config, if any


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
        _lm("qwen3-tiny", "qwen3", "Qwen3 (norms of queries and keys)", 64, 160, 2, 4, 2, 256, head_dim=16),
        _lm("mistral-tiny", "mistral", "Mistral (sliding window)", 64, 160, 2, 4, 2, 256, sliding_window=32),
        _lm("mixtral-tiny", "mixtral", "Mixtral, 4 experts, bf16 grouped matrix products", 64, 128, 2, 4, 2, 256,
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


def resolve(name: str) -> Preset:
    """The preset of that name, or one made from a Hugging Face config.json (a file, or a folder that holds one).

    Errors: unknown name (did you mean), unreadable file, a model type that transformers does not know.
    """
    preset = PRESETS.get(name)
    if preset is not None:
        return preset
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path)
    from interlace.plan.presets import PRESETS as PLANNED

    if name in PLANNED:
        model_type, options = PLANNED[name]
        return Preset(name, "causal-lm", "a model to plan for", dict(options), model_type, "bfloat16", 2048, True)
    close = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise InterlaceError(
        f"unknown model '{name}': neither a preset nor a Hugging Face config.json{hint} Presets: {', '.join(PRESETS)}"
        if hint
        else f"unknown model '{name}': neither a preset nor a Hugging Face config.json. Presets: {', '.join(PRESETS)}"
    )


def _from_file(path: Path) -> Preset:
    try:
        options = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise InterlaceError(f"{path} cannot be read as a Hugging Face config: {e}") from e
    if not isinstance(options, dict) or "model_type" not in options:
        raise InterlaceError(f"{path} has no 'model_type'; pass the config.json of a Hugging Face model")
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    model_type = options.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise InterlaceError(f"{path}: transformers knows no model type '{model_type}'")
    if model_type not in CAUSAL and model_type != "vit":
        raise InterlaceError(f"{path}: model type '{model_type}' is not a causal language model (or a ViT)")
    dtype = options.pop("dtype", None) or options.pop("torch_dtype", None) or "float32"
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise InterlaceError(f"{path}: unknown dtype '{dtype}'")
    kind = "image" if model_type == "vit" else "causal-lm"
    if kind == "causal-lm":
        options["use_cache"] = False
    return Preset(str(path), kind, f"from {path}", options, model_type, str(dtype), 2048)


def build(
    name: str,
    *,
    micro_batch: int = 1,
    seq: int | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
    meta: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> Built:
    """Builds a preset, in train mode. `options` go to the Hugging Face config (or the class); `meta` overrides the
    preset's choice.

    The weights in memory depend on `seed` only. Errors: those of resolve, and a config that transformers refuses.
    """
    preset = resolve(name)
    merged = {**preset.options, **options}
    if vocab_size is not None and preset.kind != "image":
        merged["vocab_size"] = vocab_size
    seq = seq or preset.seq
    length = "n_positions" if preset.model_type == "gpt2" else "max_position_embeddings"
    if preset.kind == "causal-lm" and merged.get(length) is not None and seq > merged[length]:
        merged[length] = seq
    on = preset.meta if meta is None else meta
    with torch.random.fork_rng(devices=[]), on_meta() if on else contextlib.nullcontext():
        torch.manual_seed(seed)
        model, config = _make(preset, merged, getattr(torch, dtype or preset.dtype))
    model.train()
    loss_fn = {"seq2seq": seq2seq_loss}.get(preset.kind, hf_loss if config is not None else classifier_loss)
    try:
        batch = _batch(preset, merged, config, micro_batch, seq, seed)
    except (RuntimeError, TypeError, OverflowError) as e:  # no such memory, or sizes beyond 64 bits
        raise InterlaceError(
            f"an example batch of {micro_batch} rows, {seq} long, cannot be made: take fewer rows or a shorter sequence"
        ) from e
    return Built(preset.name, preset.kind, model, loss_fn, batch, config)


def _make(preset: Preset, options: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, Any]:
    if not preset.model_type:
        model: nn.Module = ConvNet(**options) if preset.kind == "image" else Seq2Seq(**options)
        return model.to(dtype), None
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageClassification

    maker = AutoModelForImageClassification if preset.kind == "image" else AutoModelForCausalLM
    try:
        config = CONFIG_MAPPING[preset.model_type](**options)
        model = maker.from_config(config, dtype=dtype)
    except Exception as e:  # a config is a file of anybody's, and transformers says so in many ways
        raise InterlaceError(f"model '{preset.name}' cannot be built from its config ({type(e).__name__}: {e})") from e
    return model, config


def _batch(preset: Preset, options: dict[str, Any], config: Any, rows: int, seq: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if preset.kind == "causal-lm":
        return _token_batch(rows, seq, config.vocab_size, generator)
    if preset.kind == "seq2seq":
        tokens = torch.randint(0, options["vocab_size"], (3, rows, seq), generator=generator)
        return {"source": tokens[0], "target": tokens[1], "labels": tokens[2]}
    if config is None:
        images = torch.randn(rows, 3, 32, 32, generator=generator)
        return {"images": images, "labels": torch.randint(0, options["classes"], (rows,), generator=generator)}
    pixels = torch.randn(rows, config.num_channels, config.image_size, config.image_size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (rows,), generator=generator)}
