"""Public model classes from tiny random configurations: what `make zoo` trains, one rank against eager and two ranks against one process.

    python tests/python/zoo_models.py [--ranks 1 2] [--only WORD] [--timeout SECONDS] [--out FILE]

Hugging Face's models are found by their configuration classes, made small by the names of their settings; torch.nn's own by hand.
torchvision, timm, diffusers and peft are left out where they are not installed, which the table says.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
VOCAB, LENGTH, STEPS, BOUND = 64, 8, 3, 1e-6
SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "hidden_dim": 32, "embedding_size": 32, "d_embed": 32,
    "emb_dim": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "d_ff": 48, "d_inner": 48, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "num_heads": 4,
    "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "n_positions": 64, "max_length": 64, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "image_size": 16,
    "patch_size": 4, "num_labels": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "use_cache": False,
    "pooler_num_attention_heads": 4, "state_size": 4, "time_step_rank": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def listed(words: str) -> list[str]:
    return words.split()


STAGED = {"depths", "hidden_sizes", "embed_dims", "neck_hidden_sizes", "width_coefficient", "depth_multiplier", "stage_channels"}
LANGUAGE = listed(
    """
    Llama GPT2 GPTNeo GPTNeoX GPTJ GPTBigCode OPT Bloom Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Gemma Gemma2
    Phi Phi3 Falcon StableLm Starcoder2 Cohere Cohere2 Olmo Olmo2 OlmoE Granite GraniteMoe Persimmon CodeGen Mpt Nemotron
    XGLM BioGpt Biogpt CTRL Ctrl OpenAIGPT Helium Glm Glm4 Mamba Mamba2 FalconMamba RecurrentGemma JetMoe Dbrx DeepseekV2
    DeepseekV3 Bamba Zamba Exaone4 SmolLM3 Arcee Ernie4_5 HunYuanDenseV1 Lfm2 MiniMax Apertus Seed_oss SeedOss GptOss BitNet
    DiffLlama Dots1 Moshi Rwkv Xglm Trocr TrOCR Bart Pegasus MBart Bert RoFormer Electra Roberta Camembert XLMRoberta
    MegatronBert Ernie RemBert BertGeneration Blenderbot BlenderbotSmall Marian Git Reformer XLNet XLM Doge Jamba Ministral
    Olmo3 Vaultgemma VaultGemma Flexolmo FlexOlmo LongcatFlash NanoChat Youtu Afmoe Jais2
    """
)
MASKED = listed(
    """
    Bert Roberta Albert DistilBert Electra Deberta DebertaV2 MPNet Camembert XLMRoberta MobileBert SqueezeBert ConvBert
    Ernie Longformer BigBird FNet Funnel LayoutLM MegatronBert Nystromformer RemBert RoFormer Yoso MRA Mra XLM Flaubert Esm
    ModernBert NomicBert Data2VecText IBert Luke XmodWithAdapters Xmod RobertaPreLayerNorm Perceiver Lxmert EuroBert
    """
)
SEQUENCES = listed(
    """
    T5 MT5 Bart MBart Pegasus PegasusX Marian Blenderbot BlenderbotSmall M2M100 LED UMT5 SwitchTransformers NllbMoe FSMT
    ProphetNet LongT5 Plbart PLBart BigBirdPegasus Mvp BartMvp
    """
)
IMAGES = listed(
    """
    ViT DeiT Beit Swin Swinv2 ConvNext ConvNextV2 ResNet RegNet MobileNetV1 MobileNetV2 MobileViT MobileViTV2 EfficientNet
    LeViT Levit Cvt PoolFormer PvtV2 Pvt Segformer SwiftFormer VAN Van FocalNet BitForImage Bit Dinov2 Dinov2WithRegisters
    DINOv3ViT ViTMSN Hiera IJepa Data2VecVision EfficientFormer CLIP Siglip Siglip2 MetaClip2 PerceiverFor TextNet HGNetV2
    TimmWrapper
    """
)
TOKENS = listed(
    """
    Bert Roberta Albert DistilBert Electra DebertaV2 MPNet XLMRoberta Ernie ModernBert Longformer FNet Funnel RemBert
    SqueezeBert
    """
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A case: how to build the model, a batch of (rows, seed), and the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    loss: Callable[[nn.Module, Any], Tensor]


def _staged(config: type) -> bool:
    """Whether images become smaller from stage to stage."""
    known = config().to_dict()
    return bool(known.keys() & STAGED)


def tiny(config: type, **more: Any) -> Any:
    """A configuration with the settings of SMALL that it has, and no dropout."""
    known = config().to_dict()
    given = {k: v for k, v in SMALL.items() if k in known and not isinstance(known[k], (list, dict))}
    given |= {k: 0.0 for k, v in known.items() if isinstance(v, float) and ("drop" in k or k.endswith("pdrop") or k == "layerdrop")}
    if _staged(config):  # their widths and heads are lists that go together
        given = {k: v for k, v in given.items() if k == "num_labels" or isinstance(v, float)}
        given |= {k: v for k, v in (("image_size", 64), ("window_size", 4)) if isinstance(known.get(k), int)}
    if isinstance(known.get("image_size"), list):
        given["image_size"] = [64, 64]
    # Of each stage; random draws are another stream than eager's.
    given |= {k: [0.0] * len(v) for k, v in known.items() if "drop" in k and isinstance(v, list)}
    if config.__name__.startswith("Swin") and "num_heads" in known:
        given |= {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    for name, part in (getattr(config, "sub_configs", None) or {}).items():  # a text's and a picture's, say
        if part.__name__ != "AutoConfig":
            given[name] = tiny(part).to_dict()
    if known.get("is_encoder_decoder"):  # not among a fresh configuration's settings
        given["decoder_start_token_id"] = 0
    if "attention_types" in known:  # GPT-Neo's layers
        given["attention_types"] = [[["global", "local"], 1]]
    if "rotary_dim" in known:
        given["rotary_dim"] = 4
    if "kv_lora_rank" in known and "num_key_value_heads" in known:  # latent attention has keys for each head
        given["num_key_value_heads"] = given["num_attention_heads"]
    made = config(**(given | more))
    if hasattr(made, "_experts_implementation"):
        made._experts_implementation = "eager"  # products of groups know no float64
    return made


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(rows: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=generator(seed))


def words(rows: int, seed: int) -> dict[str, Tensor]:
    x = ids(rows, seed)
    return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": ids(rows, seed + 1000)}


def classes(rows: int, seed: int) -> dict[str, Tensor]:
    x = ids(rows, seed)
    return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": torch.randint(0, 2, (rows,), generator=generator(seed))}


def tagged(rows: int, seed: int) -> dict[str, Tensor]:
    batch = words(rows, seed)
    return {**batch, "labels": batch["labels"] % 2}


def large_pixels(rows: int, seed: int) -> dict[str, Tensor]:
    return pixels(rows, seed, 64)


def pixels(rows: int, seed: int, size: int = 16) -> dict[str, Tensor]:
    x = torch.randn(rows, 3, size, size, generator=generator(seed)).double()
    return {"pixel_values": x, "labels": torch.randint(0, 2, (rows,), generator=generator(seed))}


def speech(rows: int, seed: int) -> dict[str, Tensor]:
    """Sound, and labels of several lengths."""
    labels = torch.randint(1, 30, (rows, 6), generator=generator(seed))
    labels[0, 2 + seed % 4 :] = -100
    return {"input_values": torch.randn(rows, 4000, generator=generator(seed)).double(), "labels": labels}


def series(rows: int, seed: int) -> dict[str, Tensor]:
    g = generator(seed)
    past, future = (torch.rand(rows, n, generator=g).double() + 0.5 for n in (32, 8))
    features = [torch.randn(rows, n, 2, generator=g).double() for n in (32, 8)]
    return {
        "past_values": past, "future_values": future, "past_time_features": features[0], "future_time_features": features[1],
        "past_observed_mask": torch.ones(rows, 32).double(),
    }  # fmt: skip


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(**batch)
    return out.loss if getattr(out, "loss", None) is not None else F.cross_entropy(out.logits.flatten(0, -2), batch["labels"].flatten())


def found(head: str, families: list[str], batch: Callable[[int, int], dict[str, Tensor]]) -> list[Model]:
    """The classes FAMILY + HEAD that the installed transformers has."""
    import transformers

    cases = []
    for family in dict.fromkeys(families):
        cls = getattr(transformers, family + head, None)
        config = getattr(cls, "config_class", None)
        if cls is not None and config is not None:
            mine = large_pixels if batch is pixels and _staged(config) else batch
            cases.append(Model(family + head, lambda cls=cls, config=config: cls(tiny(config)), mine, own_loss))
    return cases


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type, **more: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, 16), kind(16, 24, batch_first=True, **more)
        self.head = nn.Linear(48 if more.get("bidirectional") else 24, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.rnn(self.embed(input_ids))[0]).flatten(0, 1), labels.flatten())


def image_net(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(layers))


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def branching() -> list[Model]:
    """Models that look at their batch in Python."""
    import transformers as T

    sound = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "conv_dim": (16, 16, 16),
        "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3, "vocab_size": 32, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean",
        "ctc_zero_infinity": True, "pad_token_id": 0,
    }  # fmt: skip
    times = {
        "prediction_length": 8, "context_length": 25, "lags_sequence": [1, 2, 7], "num_time_features": 2, "d_model": 32,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0, "use_cache": False,
    }  # fmt: skip
    cases = []
    for family in listed("Wav2Vec2 Hubert WavLM UniSpeech UniSpeechSat Data2VecAudio SEW"):
        more = {"Data2VecAudio": {"conv_pos_kernel_size": 3}, "SEW": {"squeeze_factor": 2}}.get(family, {})
        cls, config = getattr(T, f"{family}ForCTC"), getattr(T, f"{family}Config")
        cases.append(Model(f"{family}ForCTC", lambda cls=cls, config=config, more=more: cls(config(**sound, **more)), speech, own_loss))
    build = lambda: T.TimeSeriesTransformerForPrediction(T.TimeSeriesTransformerConfig(**times))  # noqa: E731
    return [*cases, Model("TimeSeriesTransformerForPrediction", build, series, own_loss)]


def plain_models() -> list[Model]:
    """torch.nn's layers in small nets."""
    conv, flat = nn.Conv2d(3, 8, 3, padding=1), nn.Flatten()
    cases = []
    activations = (
        nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.PReLU,
        nn.Softplus, nn.Softsign, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.ReLU6, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink,
    )  # fmt: skip
    for kind in activations:
        cases.append(Model(f"torch.nn.{kind.__name__}", image_net(conv, kind(), flat, nn.Linear(2048, 5)), pixels, image_loss))
    norms = {
        "BatchNorm2d": nn.BatchNorm2d(8), "GroupNorm": nn.GroupNorm(2, 8), "InstanceNorm2d": nn.InstanceNorm2d(8, affine=True),
        "LayerNorm": nn.LayerNorm([16, 16]), "LocalResponseNorm": nn.LocalResponseNorm(2), "RMSNorm": nn.RMSNorm([16, 16]),
    }  # fmt: skip
    pools = {
        "MaxPool2d": nn.MaxPool2d(2), "AvgPool2d": nn.AvgPool2d(2), "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(4), 
        "LPPool2d": nn.LPPool2d(2, 2),
        "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(4), "PixelUnshuffle": nn.PixelUnshuffle(2), "Upsample": nn.Upsample(scale_factor=2),
        "Bilinear upsampling": nn.Upsample(scale_factor=2, mode="bilinear"), "ReflectionPad2d": nn.ReflectionPad2d(1),
        "ConvTranspose2d": nn.ConvTranspose2d(8, 4, 2, stride=2), 
        "Depthwise": nn.Conv2d(8, 8, 3, groups=8), "Dilated": nn.Conv2d(8, 8, 3, dilation=2),
        "Unfold": nn.Sequential(nn.Unfold(2), nn.Flatten()), "Fold": nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((16, 16), 2, stride=2)),
        "Residual": Residual(nn.Conv2d(8, 8, 3, padding=1)), "channels_last": nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
    }  # fmt: skip
    for name, layer in {**norms, **pools}.items():
        width = int(nn.Sequential(conv, copy.deepcopy(layer), flat)(torch.zeros(2, 3, 16, 16)).shape[1])
        cases.append(Model(f"torch.nn.{name}", image_net(conv, layer, flat, nn.Linear(width, 5)), pixels, image_loss))
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for more in ({}, {"num_layers": 2}, {"bidirectional": True}):
            name = f"torch.nn.{kind.__name__}{''.join(f', {k}' for k in more)}"
            build = lambda kind=kind, more=more: Recurrent(kind, **more)  # noqa: E731
            cases.append(Model(name, build, words, lambda m, b: m(**b)))
    for first in (False, True):
        for act in ("relu", "gelu"):
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, act, batch_first=True, norm_first=first)
            body = (nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), Swap(), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), flat)
            cases.append(Model(f"torch.nn.Transformer, {act}, {first}", image_net(*body, nn.Linear(256, 5)), pixels, image_loss))
    return cases


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def cases() -> list[Model]:
    import zoo_more

    every = [
        *found("ForCausalLM", LANGUAGE, words), *found("LMHeadModel", LANGUAGE, words), *found("ForMaskedLM", MASKED, words),
        *found("ForConditionalGeneration", SEQUENCES, words), *found("ForImageClassification", IMAGES, pixels),
        *found("ForSequenceClassification", [*TOKENS, "GPT2", "Llama", "Mistral", "Qwen2", "OPT", "Bloom", "Falcon", "Gemma"], classes),
        *found("ForTokenClassification", TOKENS, tagged), *branching(), *plain_models(),
        *zoo_more.cases(),
    ]  # fmt: skip
    return list({case.name: case for case in every}.values())


def missing() -> list[str]:
    return [name for name in ("torchvision", "timm", "diffusers", "peft") if importlib.util.find_spec(name) is None]


def eager(model: nn.Module, case: Model, size: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(size):
            kept = {n: b.clone() for n, b in model.named_buffers()} if rank else {}
            loss = case.loss(model, case.batch(2, 10 * step + rank)) / size
            loss.backward()
            total += loss.item()
            for n, b in model.named_buffers():
                if n in kept:
                    b.copy_(kept[n])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def one(name: str, **config: Any) -> dict[str, Any]:
    """A case on this rank: what became of it. Captured whole where it can be; else with opaque modules."""
    import parity

    import interlace

    rank, size = parity.rank_and_size()
    case = next(c for c in cases() if c.name == name)
    row: dict[str, Any] = {"case": name, "ranks": size}
    begin = time.monotonic()
    warnings.simplefilter("ignore")
    try:
        torch.manual_seed(0)
        first = case.build().double().train()
        expected = eager(copy.deepcopy(first), case, size)
        if not all(map(math.isfinite, expected)):
            raise ValueError(f"losses {expected}")
    except Exception as e:
        return {**row, "result": "eager fails", "why": f"{type(e).__name__}: {e}"[:300]}
    for whole in (True, False):
        model = copy.deepcopy(first)
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            settings = interlace.Config(schedule=[], cache="off", fullgraph=whole, timeout_s=60, **config)
            with interlace.compile(model, optimizer, case.loss, case.batch(2, rank), settings) as trainer:
                losses = [parity.mean_over_ranks(trainer.step(case.batch(2, 10 * i + rank))) for i in range(STEPS)]
            far = max(abs(a - b) / max(1e-12, abs(b)) for a, b in zip(losses, expected, strict=True))
            how = "whole" if whole else "opaque"
            return {**row, "result": how if far <= BOUND else "far", "far": far, "seconds": time.monotonic() - begin}
        except Exception as e:
            row["why" if whole else "why opaque"] = f"{type(e).__name__}: {e}"[:400]
    return {**row, "result": "refused"}


def table(rows: list[dict[str, Any]]) -> str:
    """Counts, and a line for each case that is not captured whole."""
    lines = []
    for size in sorted({row["ranks"] for row in rows}):
        mine = [row for row in rows if row["ranks"] == size and row["result"] != "eager fails"]
        counts = {kind: sum(row["result"] == kind for row in mine) for kind in ("whole", "opaque", "far", "refused")}
        good = counts["whole"] + counts["opaque"]
        lines.append(f"{size} rank(s): {good} of {len(mine)} train as eager does ({100 * good / max(1, len(mine)):.1f} %): {counts}")
    lines += [f"not installed, and left out: {name}" for name in missing()]
    for row in rows:
        if row["result"] != "whole":
            lines.append(f"{row['case']}, {row['ranks']} rank(s): {row['result']}: {row.get('why opaque', row.get('why', row.get('far')))}")
    return "\n".join(lines)


def main() -> int:
    import ranks

    parser = argparse.ArgumentParser(description="trains public model classes from tiny random configurations")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--every", type=int, default=1, help="every N-th case")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for a case on so many ranks (default 240)")
    parser.add_argument("--out", type=Path, default=Path("out/zoo.json"))
    given = parser.parse_args()
    rows = []
    for case in [c for c in cases() if given.only in c.name][:: given.every]:
        for size in given.ranks:
            try:
                result = ranks.outcomes(one, size, case.name, timeout_s=given.timeout)[0]
                why = str(result.error if result else "its process died")
            except TimeoutError as e:
                result, why = None, str(e)
            row = result.value if result is not None and result.error is None else None
            row = row or {"case": case.name, "ranks": size, "result": "refused", "why": why}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if row["result"] == "eager fails":
                break
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    return 0


if __name__ == "__main__":
    import zoo_models

    sys.exit(zoo_models.main())
