"""What a model's layers are: one program per kind of layer, with the sizes b (micro-batch) and s (sequence) open, and the
facts the planner needs beside them, as one text (read by src/plan/model_text.h).

    text = model_text("llama-3-70b", seq=8192)     # seconds, no weights in memory
    text = model_text("path/to/config.json", flash=False)

    interlace-model 1
    name "llama-3-70b"
    blocks 80 ... hidden 8192 heads 64 ...          one fact a line
    parallel column 0 "self_attn.q_proj.weight"     how tensor parallel cuts a block's parameters
    program block 412                               the next 412 lines are a program (docs/ir.md)

Blocks are found by structure: the outermost list of modules whose elements are alike.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from interlace.capture.layers import ROLES, capture_layers
from interlace.capture.literals import dtype_name, quote
from interlace.capture.tensor_plan import cut_of, style_of, styles_of
from interlace.errors import InterlaceError
from interlace.models import config_of, hf_loss, on_meta

_DROPOUT = re.compile(r"  (%\d+): (\S+), (%\d+): \S+ = aten\.native_dropout\((%\d+), ([\d.e-]+), true\) \{(.*) (rng=\d+)\}")
_TRACED = {"b": 6, "s": 154}  # sizes of the batch that is traced; both stay open


def model_text(
    name: str, seq: int | None = None, flash: bool = True, dtype: str = "bfloat16", ignore: tuple[str, ...] = (), cpu: bool = False,
    **options: Any,
) -> str:  # fmt: skip
    """The text for a preset or a config.json. `flash`: attention as one kernel, else its scores are written out; `cpu`: other
    dropout as it is made there.

    `options` go to the Hugging Face config. Errors: those of models.config_of, a model whose blocks are not alike (names
    the first two that differ, and how), and CaptureError for one that cannot be traced.
    """
    config = config_of(name, seq, ignore)
    for key, value in {**options, "use_cache": False}.items():
        setattr(config, key, value)
    config._attn_implementation = "sdpa" if flash else "eager"
    if flash:  # such a kernel drops attention weights inside, without memory for a mask
        for key in ("attn_pdrop", "attention_dropout"):
            if getattr(config, key, 0.0):
                setattr(config, key, 0.0)
    model = _built(name, config, dtype)
    path, blocks = find_blocks(model, name)
    count = len(blocks)
    tied = _tied(model)
    del blocks[1:]
    ids = torch.zeros(_TRACED["b"], _TRACED["s"], dtype=torch.int64)
    programs = capture_layers(model, blocks, hf_loss, {"input_ids": ids, "labels": ids.clone()})
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads)
    facts: dict[str, Any] = {
        "name": quote(name), "family": quote(str(config.model_type)), "blocks": count, "dtype": dtype_name(getattr(torch, dtype)),
        "hidden": int(config.hidden_size), "heads": heads, "kv_heads": kv_heads, "vocab": int(config.vocab_size),
        "sequence": seq or 2048, "flash": "true" if flash else "false", "tied": quote(tied) if tied else "none",
    }  # fmt: skip
    lines = ["interlace-model 1", *(f"{key} {value}" for key, value in facts.items())]
    lines += _parallel(model, f"{path}.0")
    for role in ROLES:
        program = _dropout_in_steps(programs[role]) if cpu else programs[role].splitlines()
        lines += [f"program {role} {len(program)}", *program]
    return "\n".join(lines) + "\n"


def _dropout_in_steps(program: str) -> list[str]:
    """The lines as CPUs run them, which have no kernel for dropout: its mask has the values' dtype. A trace of open sizes has the kernel."""
    fresh, lines = itertools.count(1 + max(map(int, re.findall(r"%(\d+)", program)))), []
    for line in program.splitlines():
        if (made := _DROPOUT.match(line)) is None:
            lines.append(re.sub(r"aten\.native_dropout_backward\((%\d+), (%\d+), [^)]*\)", r"aten.mul.Tensor(\1, \2)", line))
            continue
        out, of, mask, x, p, tags, rng = made.groups()
        kept, empty, drawn = 1 - float(p), f"%{next(fresh)}", f"%{next(fresh)}"
        lines += [
            f"  {empty}: {of} = aten.empty_like({x}) {{{tags}}}", f"  {drawn}: {of} = aten.bernoulli.p({empty}, {kept}) {{{tags} {rng}}}",
            f"  {mask}: {of} = aten.div.Scalar({drawn}, {kept}) {{{tags}}}", f"  {out}: {of} = aten.mul.Tensor({x}, {mask}) {{{tags}}}",
        ]  # fmt: skip
    return lines


def _built(name: str, config: Any, dtype: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise InterlaceError(f"unknown dtype '{dtype}'; weights are bfloat16, float16 or float32")
    try:
        with torch.random.fork_rng(devices=[]), on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=chosen, attn_implementation=config._attn_implementation)
    except (TypeError, ValueError, KeyError, RuntimeError, ImportError) as e:
        raise InterlaceError(f"model '{name}' cannot be built from its config: {e}") from e
    return model.train()


# ---- blocks ----


def find_blocks(model: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """The path of the list of blocks, and the list. Error: none, several, or elements that are not alike."""
    lists = list(_outermost(model, ""))
    if not lists:
        raise InterlaceError(f"model '{name}' has no list of modules, so no blocks that a pipeline could be made of")
    if len(lists) > 1:
        paths = " and ".join(f"'{path}'" for path, _ in lists)
        raise InterlaceError(f"model '{name}' has several lists of blocks ({paths}); models with one can be planned")
    path, blocks = lists[0]
    first = dict(_structure(blocks[0]))
    for i, block in enumerate(blocks[1:], 1):
        other = dict(_structure(block))
        differing = next((key for key in [*first, *other] if first.get(key) != other.get(key)), None)
        if differing is not None:
            raise InterlaceError(
                f"model '{name}': blocks '{path}.0' and '{path}.{i}' differ in {differing}: {first.get(differing, 'absent')} "
                f"and {other.get(differing, 'absent')}; models whose blocks are alike can be planned"
            )
    return path, blocks


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and len(child):
            yield inside, child
        else:
            yield from _outermost(child, inside)


def _structure(block: nn.Module) -> Iterator[tuple[str, str]]:
    """What two blocks must have in common: classes, sizes of parameters and buffers, and the plain attributes that
    forward may read; which place a block has in the list is none of them."""
    for path, module in block.named_modules():
        at = f"'{path}'" if path else "itself"
        yield f"the class of {at}", type(module).__name__
        for name, t in [*module._parameters.items(), *module._buffers.items()]:
            yield (f"'{path}.{name}'".replace("'.", "'"), "none" if t is None else f"{dtype_name(t.dtype)}{list(t.shape)}")
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)) and name not in ("layer_idx", "layer_id", "training"):
                yield f"attribute '{name}' of {at}", repr(value)


def _tied(model: nn.Module) -> str:
    """The head's parameter that is the embedding's own, by its first name, or "" ."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if embedding is None or head is None or embedding.weight is not head.weight:
        return ""
    return next(name for name, p in model.named_parameters() if p is embedding.weight)


# ---- tensor parallel ----


def _parallel(model: nn.Module, block: str) -> list[str]:
    """Lines "parallel column|row DIM [blocks N] NAME" for the parameters that are cut, and for the vocabulary."""
    styles = styles_of(model)
    lines = []
    for name, p in model.named_parameters():
        if not name.startswith(block + "."):
            continue
        style = style_of(styles, name)
        kind = {"colwise": "column", "rowwise": "row", "packed_colwise": "column"}.get((style or "").partition(" ")[0])
        cut = cut_of(style, p, model.get_submodule(name.rpartition(".")[0]))
        if kind is not None and cut is not None:  # a bias after a row-parallel product is added once, to the whole result
            blocks = f" blocks {cut[1]}" if cut[1] > 1 else ""
            lines.append(f"parallel {kind} {cut[0]}{blocks} {quote(name)}")
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        table = getattr(embedding, "weight", None)
        lines += [f"parallel vocabulary 0 {quote(n)}" for n, p in model.named_parameters() if p is table]
    return list(dict.fromkeys(lines))
