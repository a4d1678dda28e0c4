"""How tensor parallelism cuts a model's parameters: what the model itself says, and plan files.

    model.layers.*.self_attn.q_proj.weight 0            by output features
    model.layers.*.self_attn.o_proj.weight 1            by input features
    transformer.h.*.attn.c_attn.weight 1 blocks 3       query, key and value in one matrix: each of them is cut

One line a pattern: a parameter's full name, in which * stands for a number, the dimension, and how many equal blocks of it are cut one by
one. A captured program has the lines of its model as `meta tensor "LINE; LINE; ..."`; pass `tensor` reads it (docs/passes.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from interlace.errors import InterlaceError
from interlace.files import read_text

# Families whose transformers config does not say how they are cut, by module. "colwise 3": of three fused projections.
_PLANS: dict[str, dict[str, str]] = {
    "gpt2": {"h.*.attn.c_attn": "colwise 3", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise",
             "h.*.mlp.c_proj": "rowwise"},
    "falcon": {"h.*.self_attention.query_key_value": "colwise", "h.*.self_attention.dense": "rowwise",
               "h.*.mlp.dense_h_to_4h": "colwise", "h.*.mlp.dense_4h_to_h": "rowwise"},
}  # fmt: skip
# The styles of transformers that cut parameters: which dimension of a weight (counted from the end, as experts have one more in front),
# of a vector (None: whole), and into how many blocks. All others say how a module is called.
_STYLES: dict[str, tuple[int, int | None, int]] = {
    "colwise": (-2, -1, 1), "colwise_gather_output": (-2, -1, 1), "colwise_rep": (-2, -1, 1), "packed_colwise": (-2, -1, 2),
    "rowwise": (-1, None, 1), "rowwise_split_input": (-1, None, 1), "rowwise_rep": (-1, None, 1), "packed_rowwise": (-1, None, 2),
    "embedding_rowwise": (0, None, 1), "embedding_colwise": (-1, None, 1),
}  # fmt: skip


class PlanError(InterlaceError):
    """A plan file that cannot be."""


def styles_of(model: nn.Module) -> dict[str, str]:
    """The styles of a model of transformers, by the full name of a module or parameter with * for numbers; {} where nobody says."""
    config = getattr(model, "config", None)
    prefix = str(getattr(model, "base_model_prefix", ""))
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    own = _PLANS.get(getattr(config, "model_type", ""))
    if own is not None:
        return {inside + name: style for name, style in own.items()}
    given = getattr(model, "_tp_plan", None)
    if isinstance(given, Mapping) and given:
        return {str(name): str(style) for name, style in given.items()}
    return {inside + name: style for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items()}


def style_of(styles: Mapping[str, str], name: str) -> str | None:
    """The style of a parameter: its own, or its module's."""
    starred = _starred(name)
    return styles.get(starred) or styles.get(starred.rpartition(".")[0])


def cut_of(style: str | None, p: nn.Parameter, owner: nn.Module) -> tuple[int, int] | None:
    """The dimension that a style cuts of a parameter, and its blocks; None: the parameter stays whole."""
    word, _, fused = (style or "").partition(" ")
    if word not in _STYLES or p.dim() == 0:
        return None
    of_weight, of_vector, blocks = _STYLES[word]
    dim = of_weight if p.dim() > 1 else of_vector
    if dim is None:
        return None
    if p.dim() == 2 and type(owner).__name__ == "Conv1D":  # of GPT-2, whose weights are [in, out]
        dim = -1 if dim == -2 else -2
    return dim % p.dim(), int(fused or blocks)


def model_plan(model: nn.Module) -> str:
    """What the model, or the models of transformers within it, say: lines separated by "; ", "" when they say nothing."""
    found: dict[str, tuple[int, int] | None] = {}
    said: list[str] = []
    for path, module in model.named_modules():
        if any(path == outer or path.startswith(outer + ".") or not outer for outer in said):
            continue
        styles = styles_of(module)
        if not styles:
            continue
        said.append(path)
        for name, p in module.named_parameters():
            owner = module.get_submodule(name.rpartition(".")[0])
            found[f"{path}.{name}" if path else name] = cut_of(style_of(styles, name), p, owner)
    return plan_text(found)


def plan_text(cuts: Mapping[str, tuple[int, int] | None]) -> str:
    """The lines of these cuts by parameter (None: whole), names with * where all that look so are cut alike."""
    alike: dict[str, set[tuple[int, int] | None]] = {}
    for name, cut in cuts.items():
        alike.setdefault(_starred(name), set()).add(cut)
    lines: dict[str, None] = {}
    for name, cut in cuts.items():
        if cut is not None:
            pattern = _starred(name) if len(alike[_starred(name)]) == 1 else name
            lines[f"{pattern} {cut[0]}" + (f" blocks {cut[1]}" if cut[1] > 1 else "")] = None
    return "; ".join(lines)


def cuts_text(program: Any) -> str:
    """The lines of a program's cuts along axis tp."""
    cuts: dict[str, tuple[int, int] | None] = {}
    for p in program.params():
        own = [(dim, blocks) for axis, dim, blocks in p["cuts"] if axis == "tp"]
        cuts[p["name"]] = own[0] if own else None
    return plan_text(cuts)


def read_plan(path: str | Path, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> str:
    """A plan file as the text of `meta tensor`; `shapes` are those of the model's parameters, `tied` has their other names. Errors name the
    line: another form, a pattern that no parameter has, a dimension that it lacks, blocks that do not divide it, a parameter that two
    lines cut (a tied one in two ways).
    """
    text = read_text(path, "a plan of tensor parallelism (tensor is 'auto', 'model' or a file)", PlanError)
    cuts: dict[str, tuple[int, int] | None] = dict.fromkeys(shapes)
    by: dict[str, tuple[int, str]] = {}  # the line, and the name that it has there
    for number, pattern, dim, blocks in _lines(text, str(path)):
        place = f"{path}:{number}"
        names = {name: name for name in shapes if _matches(pattern, name)}
        names |= {tied[other]: other for other in tied if _matches(pattern, other)}
        if not names:
            raise PlanError(f"{place}: the model has no parameter '{pattern}'{_near(pattern, [*shapes, *tied])}")
        for name, called in names.items():
            shape = list(shapes[name])
            if dim >= len(shape):
                raise PlanError(f"{place}: '{name}' is {shape} and has no dimension {dim}")
            if shape[dim] % blocks:
                raise PlanError(f"{place}: {blocks} blocks do not divide dimension {dim} of '{name}', which is {shape}")
            line, before = by.get(name, (0, ""))
            if before == called:
                raise PlanError(f"{place}: '{called}' is cut in line {line} already; write one line for it")
            if before and cuts[name] != (dim, blocks):
                raise PlanError(f"{place}: '{called}' is tied to '{before}', which line {line} cuts another way")
            by[name], cuts[name] = (number, called), (dim, blocks)
    if not by:
        raise PlanError(f"{path} cuts nothing; write lines such as 'model.layers.*.mlp.up_proj.weight 0'")
    return plan_text(cuts)


def _lines(text: str, path: str) -> Iterator[tuple[int, str, int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        numbers = [words[1], words[3]] if len(words) == 4 and words[2] == "blocks" else words[1:]
        if len(words) not in (2, 4) or len(numbers) > 2 or not all(n.isdecimal() and len(n) < 9 for n in numbers) or numbers[1:] == ["0"]:
            raise PlanError(f"{path}:{number}: '{line.strip()[:80]}' has another form than 'PARAMETER DIMENSION [blocks N]'")
        yield number, words[0], int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 1


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def _near(pattern: str, names: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(pattern, {_starred(name) for name in names}, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
