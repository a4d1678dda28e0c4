"""Models to plan for, by name or config.json.

    config_of("gpt-22b").hidden_size == 6144
    config_of("path/to/config.json")           # keys that the architecture does not know are named

GPT, Llama and Falcon have the shapes of Mist's evaluation (its artifact's model configs; Table 4 gives the names): vocabulary
50304, untied head, no dropout, every head has its own keys and values. 2.6b is called 2.7b there, 6.7b is 7b. GPT keeps the
biases that GPT-2 has (0.1 % of the parameters), which the artifact turns off.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from interlace.errors import InterlaceError
from interlace.models import PRESETS as MODELS

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
_ALIASES = {"llama-3-405b": "llama-3.1-405b", "mixtral": "mixtral-8x7b"}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip


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
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family}-{size}": (make(*shape)[0], {**_COMMON, **make(*shape)[1]})
    for family, make in _FAMILIES.items()
    for size, shape in SIZES.items()
    if family == "gpt" or size not in _GPT_ONLY
}

# Keys that published config.json files have and that say nothing about the shape of the network.
_HARMLESS = {
    *("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "model_type", "use_cache"),
    *("task_specific_params", "n_ctx", "pretraining_tp", "rope_theta", "rope_scaling", "head_dim", "_name_or_path"),
    *("gradient_checkpointing", "tokenizer_class", "attn_implementation", "quantization_config"),
}


def names() -> list[str]:
    """Every model that can be planned for by name, small ones to train included."""
    return [*PRESETS, *_ALIASES, *(name for name, preset in MODELS.items() if preset.kind == "causal-lm")]


def config_of(name: str, seq: int | None = None, ignore: tuple[str, ...] = ()) -> Any:
    """The transformers config of a preset, or of a config.json (the file, or a folder that holds it).

    Positions are made enough for `seq`. `ignore`: keys of the file that may be unknown. Errors: unknown name (did you mean),
    unreadable file, a model type that is no causal language model, keys that the architecture does not know.
    """
    model_type, options = _options(name, ignore)
    from transformers import CONFIG_MAPPING

    length = "n_positions" if model_type == "gpt2" else "max_position_embeddings"
    if seq is not None and options.get(length) is not None and options[length] < seq:
        options[length] = seq
    try:
        return CONFIG_MAPPING[model_type](**options)
    except Exception as e:  # config classes check themselves, with errors of their own
        raise InterlaceError(
            f"'{name}': transformers refuses this {model_type} config: {' '.join(str(e).split())}"
        ) from e


def _options(name: str, ignore: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    if name in PRESETS:
        model_type, options = PRESETS[name]
        return model_type, dict(options)
    built = MODELS.get(_ALIASES.get(name, name))
    if built is not None:
        if built.kind != "causal-lm":
            raise InterlaceError(f"'{name}' is no language model: plans are made for causal language models")
        return built.model_type, dict(built.options)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path, ignore)
    close = difflib.get_close_matches(name, names(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise InterlaceError(
        f"unknown model '{name}': neither a preset nor a Hugging Face config.json{hint} Presets: {', '.join(names())}"
    )


def _from_file(path: Path, ignore: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    try:
        options = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as e:
        raise InterlaceError(f"{path} cannot be read as a Hugging Face config: {e}") from e
    if not isinstance(options, dict) or not isinstance(options.get("model_type"), str):
        raise InterlaceError(f"{path} has no 'model_type'; pass the config.json of a Hugging Face model")
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    model_type = options.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(model_type, CAUSAL, n=1)
        raise InterlaceError(
            f"{path}: transformers knows no model type '{model_type}'"
            + (f"; did you mean '{close[0]}'?" if close else "")
        )
    if model_type not in CAUSAL:
        raise InterlaceError(f"{path}: model type '{model_type}' is not a causal language model")
    _check_keys(path, CONFIG_MAPPING[model_type], options, ignore)
    return model_type, {**options, "use_cache": False}


def _check_keys(path: Path, config_class: Any, options: dict[str, Any], ignore: tuple[str, ...]) -> None:
    """A key that the config does not know would be kept and never read: a misspelt size is planned with its default."""
    known = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", None) or ())
    unknown = [key for key in options if key not in known and key not in _HARMLESS and key not in ignore]
    if not unknown:
        return
    said = []
    for key in unknown:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        said.append(f"'{key}'" + (f" (did you mean '{close[0]}'?)" if close else ""))
    them, they = ("it", "it") if len(unknown) == 1 else ("them", "they")
    raise InterlaceError(
        f"{path}: a {config_class.model_type} has no {', '.join(said)}. Correct {them}, or say that {they} may be left out "
        f"with {' '.join(f'--ignore-key {key}' for key in unknown)}"
    )
