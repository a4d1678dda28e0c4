"""Models with their losses and example batches, by name (lookup.py).

    built = build("llama-10m", vocab_size=4096, seq=128, micro_batch=8)
    built.model, built.loss_fn, built.example_batch

A large preset is built on meta: its parameters take no memory, its buffers (rotary frequencies) are real.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from interlace.errors import InterlaceError
from interlace.models.lookup import resolve
from interlace.models.presets import Preset

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


@dataclasses.dataclass
class Built:
    """A model, its loss and a synthetic batch of random tokens or pixels, the same for the same arguments."""

    name: str
    kind: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    example_batch: dict[str, Tensor]
    config: Any = None  # the Hugging Face config, if any


def build(
    name: str, *, micro_batch: int = 1, seq: int | None = None, vocab_size: int | None = None, dtype: str | None = None,
    meta: bool | None = None, seed: int = 0, **options: Any,
) -> Built:  # fmt: skip
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


def import_class(name: str) -> None:
    """Imports what building a causal language model of that name would."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[resolve(name).model_type]]


def _batch(preset: Preset, options: dict[str, Any], config: Any, rows: int, seq: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if preset.kind == "causal-lm":
        ids = torch.randint(0, config.vocab_size, (rows, seq), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}
    if preset.kind == "seq2seq":
        tokens = torch.randint(0, options["vocab_size"], (3, rows, seq), generator=generator)
        return {"source": tokens[0], "target": tokens[1], "labels": tokens[2]}
    if config is None:
        images = torch.randn(rows, 3, 32, 32, generator=generator)
        return {"images": images, "labels": torch.randint(0, options["classes"], (rows,), generator=generator)}
    pixels = torch.randn(rows, config.num_channels, config.image_size, config.image_size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (rows,), generator=generator)}
