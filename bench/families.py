"""One rank, one thread: our step against PyTorch eager with AdamW for model families of many kinds, as `Config()` runs them.

python bench/families.py                              # all: processor seconds of the step's thread, so that other work disturbs little
python bench/families.py --compile --only "lstm;gru" --rounds 20 --json out.json

Each of a few million parameters or fewer, from its library's own class, with random weights. Steps take
turns, ours once its plan has settled.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from common import paired, report
from torch import nn
from torch.nn import functional

import interlace

Tensor = torch.Tensor
Case = tuple[nn.Module, dict[str, Tensor], Callable[[nn.Module, Any], Tensor]]
VOCAB, WIDTH, DEPTH, ROWS, LENGTH = 2000, 256, 4, 8, 128
SETTLE_S = 60.0
VIT = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
TEXT = {**VIT, "vocab_size": VOCAB}


def ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCAB, (rows, length))


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def text(model: nn.Module, **batch: Tensor) -> Case:
    tokens = ids()
    return model, {"input_ids": tokens, "labels": tokens, **batch}, own_loss


def images(model: nn.Module, size: int = 96, classes: int = 2) -> Case:
    return model, {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, classes, (ROWS,))}, own_loss


def deberta() -> Case:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 64}
    model = hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**TEXT, **relative))
    return text(model, labels=torch.randint(0, 2, (ROWS,)))


def t5() -> Case:
    shape = {"d_model": WIDTH, "d_kv": 64, "d_ff": 4 * WIDTH, "num_heads": 4}
    config = hf.T5Config(vocab_size=VOCAB, num_layers=DEPTH, num_decoder_layers=DEPTH, decoder_start_token_id=0, **shape)
    return text(hf.T5ForConditionalGeneration(config), labels=ids(length=64))


def whisper() -> Case:
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 4 * WIDTH}
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in sizes.items()}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(vocab_size=VOCAB, d_model=WIDTH, max_source_positions=200, **layers, **special)
    )
    return model, {"input_features": torch.randn(4, 80, 400), "labels": ids(4, 32)}, own_loss


def wav2vec() -> Case:
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512, "conv_dim": [64] * 7}
    config = hf.Wav2Vec2Config(vocab_size=32, mask_time_prob=0.0, layerdrop=0.0, **shape)
    batch = {"input_values": torch.randn(4, 8000), "labels": torch.randint(0, 2, (4,))}
    return hf.Wav2Vec2ForSequenceClassification(config), batch, own_loss


def lora() -> Case:
    import peft

    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=4))
    return text(peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(VOCAB, width), kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0][:, -1])


def classes_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def recurrent(kind: type[nn.RNNBase], width: int = 256, rows: int = 8, length: int = 64, layers: int = 2) -> Case:
    return Recurrent(kind, width, layers), {"x": ids(rows, length), "y": torch.randint(0, 10, (rows,))}, classes_loss


class Double(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        convs = [(inner, outer), (outer, outer)]
        super().__init__(*(m for i, o in convs for m in (nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(3, 32), Double(32, 64), Double(64, 128)])
        self.up, self.out = nn.ModuleList([Double(192, 64), Double(96, 32)]), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for block, skip in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), skip], 1))
        return self.out(x)


def unet() -> Case:
    batch = {"x": torch.randn(4, 3, 64, 64), "y": torch.randn(4, 3, 64, 64)}
    return UNet(), batch, lambda model, batch: functional.mse_loss(model(batch["x"]), batch["y"])


def mlp() -> Case:
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.BatchNorm1d(1024), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers), {"x": torch.randn(128, 512), "y": torch.randint(0, 10, (128,))}, classes_loss


CASES: dict[str, Callable[[], Case]] = {
    "bert": lambda: text(hf.BertForMaskedLM(hf.BertConfig(**TEXT)), attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.int64)),
    "deberta": deberta,
    "gpt2, dropout": lambda: text(
        hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=DEPTH, n_head=4))
    ),
    "qwen3": lambda: text(hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=64))),
    "llama, lora": lora,
    "mixtral": lambda: text(hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4))),
    "t5": t5,
    "whisper": whisper,
    "wav2vec2": wav2vec,
    "vit": lambda: images(hf.ViTForImageClassification(hf.ViTConfig(**VIT, image_size=96, patch_size=8))),
    "swin": lambda: images(
        hf.SwinForImageClassification(
            hf.SwinConfig(image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12], window_size=4)
        ), 64
    ),
    "convnext": lambda: images(hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 3, 2]))),
    "resnet": lambda: images(
        hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2] * 4, layer_type="basic")
        )
    ),
    "efficientnet": lambda: images(
        hf.EfficientNetForImageClassification(
            hf.EfficientNetConfig(image_size=96, width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640)
        )
    ),
    "unet": unet,
    "mlp": mlp,
    "lstm": lambda: recurrent(nn.LSTM),
    "lstm, 512": lambda: recurrent(nn.LSTM, 512, 32, 50, 1),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
}


def adamw(model: nn.Module, **words: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, **words)


def plain_step(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor], **words: bool) -> Callable[[], None]:
    optimizer = adamw(model, **words)

    def step() -> None:
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, compiled: bool, rounds: int, json_path: str | None) -> float:
    """The median ratio of our step to eager's, or to that of torch.compile with a fused AdamW."""
    torch.manual_seed(0)
    model, batch, loss_fn = CASES[name]()
    model.train()
    sides = {"eager": plain_step(copy.deepcopy(model), batch, loss_fn)}
    if compiled:
        torch.compiler.reset()
        sides["torch.compile"] = plain_step(copy.deepcopy(model), batch, torch.compile(loss_fn), fused=True)
        sides["torch.compile"]()
    ours = adamw(model)
    with interlace.compile(model, ours, loss_fn, batch) as trainer:
        end = time.monotonic() + SETTLE_S
        while trainer.steps < 8 or (not trainer.settled and time.monotonic() < end):
            trainer.step(batch)
        sides["interlace"] = lambda: trainer.step(batch)
        times = paired(sides, rounds, warmup=3, clock=time.thread_time)
    record: Any = report(name, times, baseline=list(sides)[-2], json_path=json_path)
    return float(record["sides"]["interlace"]["ratio"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"names, joined by ';' ({'; '.join(CASES)})")
    parser.add_argument("--compile", action="store_true", help="against torch.compile with a fused AdamW as well (a minute more a family)")
    parser.add_argument("--rounds", type=int, default=12, help="paired rounds (default: 12)")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = [name.strip() for name in args.only.split(";")] if args.only else list(CASES)
    for name in names:
        if name not in CASES:
            parser.error(f"no family '{name}' (there are {'; '.join(CASES)})")
    found = {name: measure(name, args.compile, args.rounds, args.json) for name in names}
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(found.items(), key=lambda item: item[1]))
    print(said, "x", "torch.compile" if args.compile else "eager")


if __name__ == "__main__":
    main()
