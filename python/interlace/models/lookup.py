"""Models by name or config.json: presets to build, and transformers configs to plan for.

resolve("llama-10m").kind == "causal-lm"
config_of("gpt-22b").hidden_size == 6144
config_of("path/to/config.json")           # keys that the architecture does not know are named
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from interlace.errors import InterlaceError
from interlace.models.presets import ALIASES, PLANNED, PRESETS, Preset


def resolve(name: str) -> Preset:
    """The preset of that name, or one made from a Hugging Face config.json (a file, or a folder that holds one).

    Errors: unknown name (did you mean), unreadable file, a model type that transformers does not know.
    """
    preset = PRESETS.get(name)
    if preset is not None:
        return preset
    path = _config_file(name)
    if path is not None:
        return _from_file(path)
    if name in PLANNED:
        model_type, options = PLANNED[name]
        return Preset(name, "causal-lm", "a model to plan for", dict(options), model_type, "bfloat16", 2048, True)
    raise _unknown(name, list(PRESETS), 0.4)


def _config_file(name: str) -> Path | None:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


def _unknown(name: str, known: list[str], cutoff: float) -> InterlaceError:
    close = difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    said = f"unknown model '{name}': neither a preset nor a Hugging Face config.json{hint}"
    return InterlaceError(f"{said} Presets: {', '.join(known)}")


def _read_config(path: Path, images: bool = False) -> tuple[str, dict[str, Any]]:
    """The model type and the options of a config.json. Error: what cannot be read, no such type, no language model (nor, with `images`, a
    ViT)."""
    try:
        options = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as e:
        why = f"it is no JSON ({e})" if isinstance(e, ValueError) else str(e)
        raise InterlaceError(f"{path} cannot be read as a Hugging Face config: {why}; give a config.json, its folder or a preset") from e
    if not isinstance(options, dict) or not isinstance(options.get("model_type"), str):
        raise InterlaceError(f"{path} has no 'model_type'; pass the config.json of a Hugging Face model")
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    model_type = options.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(model_type, CAUSAL, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise InterlaceError(f"{path}: transformers knows no model type '{model_type}'{hint}")
    if model_type not in CAUSAL and not (images and model_type == "vit"):
        more = " (or a ViT)" if images else ""
        raise InterlaceError(f"{path}: model type '{model_type}' is not a causal language model{more}")
    for key in _LAYERS & options.keys():
        if isinstance(options[key], int) and options[key] > MAX_LAYERS:
            raise InterlaceError(f"{path}: {key} is {options[key]}; a model of more than {MAX_LAYERS} layers is taken for a mistake")
    return model_type, options


def _from_file(path: Path) -> Preset:
    model_type, options = _read_config(path, images=True)
    import torch

    dtype = options.pop("dtype", None) or options.pop("torch_dtype", None) or "float32"
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise InterlaceError(f"{path}: unknown dtype '{dtype}'")
    kind = "image" if model_type == "vit" else "causal-lm"
    if kind == "causal-lm":
        options["use_cache"] = False
    return Preset(str(path), kind, f"from {path}", options, model_type, str(dtype), 2048)


MAX_LAYERS = 10_000  # each is a module that is built: more would take hours
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_experts", "num_local_experts"}

# Keys that published config.json files have and that say nothing about the shape of the network.
_HARMLESS = {
    *("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "model_type", "use_cache"),
    *("task_specific_params", "n_ctx", "pretraining_tp", "rope_theta", "rope_scaling", "head_dim", "_name_or_path"),
    *("gradient_checkpointing", "tokenizer_class", "attn_implementation", "quantization_config"),
}


def names() -> list[str]:
    """Every model that can be planned for by name, small ones to train included."""
    return [*PLANNED, *ALIASES, *(name for name, preset in PRESETS.items() if preset.kind == "causal-lm")]


def config_of(name: str, seq: int | None = None, ignore: tuple[str, ...] = ()) -> Any:
    """The transformers config of a preset, or of a config.json (the file, or a folder that holds it).

    Positions are made enough for `seq`. `ignore`: keys of the file that may be unknown. Errors: unknown name (did you mean),
    unreadable file, a model type that is no causal language model, keys that the architecture does not know.
    """
    model_type, options = options_of(name, ignore)
    from transformers import CONFIG_MAPPING

    length = "n_positions" if model_type == "gpt2" else "max_position_embeddings"
    if seq is not None and options.get(length) is not None and options[length] < seq:
        options[length] = seq
    try:
        return CONFIG_MAPPING[model_type](**options)
    except Exception as e:  # config classes check themselves, with errors of their own
        raise InterlaceError(f"'{name}': transformers refuses this {model_type} config: {' '.join(str(e).split())}") from e


def options_of(name: str, ignore: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """The model type and the options of that config, without making it. Errors: those of config_of but what the config itself refuses."""
    if name in PLANNED:
        model_type, options = PLANNED[name]
        return model_type, dict(options)
    built = PRESETS.get(ALIASES.get(name, name))
    if built is not None:
        if built.kind != "causal-lm":
            raise InterlaceError(f"'{name}' is no language model: plans are made for causal language models")
        return built.model_type, dict(built.options)
    path = _config_file(name)
    if path is None:
        raise _unknown(name, names(), 0.5)
    model_type, options = _read_config(path)
    _check_keys(path, model_type, options, ignore)
    return model_type, {**options, "use_cache": False}


def _check_keys(path: Path, model_type: str, options: dict[str, Any], ignore: tuple[str, ...]) -> None:
    """A key that the config does not know would be kept and never read: a misspelt size is planned with its default."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
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
