"""The forms of the settings that are more than one value, and the error of all settings."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from interlace.errors import InterlaceError


class ConfigError(InterlaceError, ValueError):
    """A setting that does not exist or has a value that cannot be."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'shard'?" when a known word is near, else ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "double": "float64", "float": "float32",
               "half": "float16", "f64": "float64", "f32": "float32", "f16": "float16"}  # fmt: skip


def dtype_name(given: Any) -> str:
    """torch's name of a dtype, however it is written: torch.bfloat16, "bf16", "bfloat16". What is none stays as it is."""
    text = str(given).removeprefix("torch.")
    return DTYPE_NAMES.get(text, text)


def schedule_form(value: Any) -> tuple[tuple[int, tuple[str, ...]], ...] | str:
    """The schedule as tuples, or "auto". Error: another form, steps that do not rise, unknown placeholders."""
    form = 'schedule must be "auto" or a list of (step, [passes]), for example [(0, []), (5, ["unshard()"])]'
    known = ("profile", "cluster", "limit", "ranks")
    found: list[tuple[int, tuple[str, ...]]] = []
    if value is None:
        return ()
    if value == "auto":
        return "auto"
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{form}, not {value!r}")
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise ConfigError(f"{form}, not {entry!r}")
        step, passes = entry
        if isinstance(passes, str):
            passes = [passes]
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"a step of the schedule must be a whole number of at least 0, not {step!r}")
        if not isinstance(passes, (list, tuple)) or not all(isinstance(p, str) and p.strip() for p in passes):
            raise ConfigError(f"{form}, not {entry!r}")
        if found and step <= found[-1][0]:
            raise ConfigError(f"the steps of the schedule must rise, but {step} comes after {found[-1][0]}")
        for name in (name for text in passes for name in re.findall(r"\{(.*?)\}", text)):
            if name not in known:
                listed = ", ".join(known)
                raise ConfigError(f"unknown placeholder '{name}' in the schedule{did_you_mean(name, known)} (there are: {listed})")
        found.append((step, tuple(p.strip() for p in passes)))
    return tuple(found)


AXES = ("replica", "dp", "tp", "pp")


Mesh = tuple[tuple[str, Any], ...]  # axes by name and size, or sizes by stage


def mesh_form(value: Any) -> Mesh | None:
    """The axes of the mesh by name and size, the last one fastest: of {"replica": 2, "dp": 2} or "replica=2,dp=2". Without a data axis
    dp of one rank comes first. Of stages that differ an axis has a size for each: {"pp": 2, "dp": (2, 1)} or "pp=2,dp=2+1"; so may tp.
    Error: another form, an axis that no pass lays anything along, no axis dp, an axis twice, data axes apart.
    """
    form = 'mesh must name axes and their ranks, for example {"replica": 2, "dp": 4} (the last axis is the fastest)'
    if value is None:
        return None
    if isinstance(value, str):
        pairs: list[Any] = [tuple(entry.split("=", 1)) for entry in value.split(",")]
        if any(len(pair) != 2 or not all(size.strip().isdecimal() for size in pair[1].split("+")) for pair in pairs):
            raise ConfigError(f"mesh '{value}' has another form than 'replica=2,dp=4' (or, of stages that differ, 'pp=2,dp=2+1')")
        value = [(name.strip(), tuple(map(int, size.split("+")))) for name, size in pairs]
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f"{form}, not {value!r}")
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise ConfigError(f"{form}, not {value!r}")
        name, size = entry
        if name not in AXES:
            raise ConfigError(
                f"unknown axis {name!r} of the mesh{did_you_mean(str(name), AXES)} (dp: its ranks share the units; "
                "replica: its ranks hold the same and add up their gradients; tp: its ranks cut the products of one batch; pp: its ranks run "
                "one stage each of a pipeline)"
            )
        for one in size if isinstance(size, (list, tuple)) and size else [size]:
            if isinstance(one, bool) or not isinstance(one, int) or one < 1:
                raise ConfigError(f"axis {name} of the mesh must have a whole number of ranks, not {size!r}")
    if {name for name, _ in value} <= {"tp", "pp"}:
        value = [*(entry for entry in value if entry[0] == "pp"), ("dp", 1), *(entry for entry in value if entry[0] == "tp")]
    names = [name for name, _ in value]
    if len(set(names)) < len(names) or "dp" not in names:
        raise ConfigError(f"{form}: {'an axis is named twice' if 'dp' in names else 'axis dp is missing'} in {names}")
    data = [i for i, name in enumerate(names) if name in ("replica", "dp")]
    if data[-1] - data[0] >= len(data):
        raise ConfigError(
            f"axis {names[data[0] + 1]} of the mesh stands between {names[data[0]]} and {names[data[-1]]}, which must be neighbours: put pp "
            "first and tp last"
        )
    return _with_stages([(name, tuple(size) if isinstance(size, (list, tuple)) else (size,)) for name, size in value])


def _with_stages(axes: list[tuple[str, tuple[int, ...]]]) -> Mesh:
    """Axes with one size or a size for each stage. Error: not as many sizes as stages, stages that differ in what must be alike."""
    stages = next((sizes[0] for name, sizes in axes if name == "pp" and len(sizes) == 1), 1)
    for name, sizes in axes:
        if len(sizes) not in (1, stages) or (name == "pp" and len(sizes) > 1):
            written = "+".join(map(str, sizes))
            raise ConfigError(
                f"{name}={written} of the mesh has sizes for {len(sizes)} stages, but axis pp has {stages}; write one for each, or one for "
                "all of them"
            )
    mesh = tuple((name, sizes[0] if len(set(sizes)) == 1 else sizes) for name, sizes in axes)
    if any(isinstance(size, tuple) for _, size in mesh):
        names = [name for name, _ in mesh]
        if names not in (["pp", "dp"], ["pp", "dp", "tp"]):
            raise ConfigError(f"stages that differ have the axes pp, dp and tp, in this order, not {', '.join(names)}")
    return mesh


def stage_meshes(mesh: Mesh | None) -> list[dict[str, int]]:
    """Of stages that differ, the axes of each, without pp; else none."""
    if mesh is None or not any(isinstance(size, tuple) for _, size in mesh):
        return []
    axes = dict(mesh)
    return [{name: size[s] if isinstance(size, tuple) else size for name, size in mesh if name != "pp"} for s in range(axes["pp"])]


def mesh_ranks(mesh: Mesh) -> int:
    """Ranks of all stages together."""
    each = stage_meshes(mesh)
    return sum(math.prod(axes.values()) for axes in each) if each else math.prod(size for _, size in mesh)


def mesh_text(mesh: Mesh) -> str:
    """ "pp=2 x dp=2+1"."""
    return " x ".join(f"{name}={'+'.join(map(str, size)) if isinstance(size, tuple) else size}" for name, size in mesh)


def place_in_stages(mesh: Mesh, rank: int) -> tuple[int, int]:
    """Of stages that differ: the stage of a rank, and the rank that it begins with."""
    first = 0
    for stage, axes in enumerate(stage_meshes(mesh)):
        if rank < first + math.prod(axes.values()):
            return stage, first
        first += math.prod(axes.values())
    raise ConfigError(f"mesh {mesh_text(mesh)} is for {first} ranks, and has no rank {rank}")


def data_place(mesh: Mesh | None, rank: int, ranks: int) -> tuple[int, int]:
    """Which of how many different batches a rank of a run gets; those along axes tp and pp get the same."""
    each = stage_meshes(mesh)
    if mesh is not None and each:
        stage, first = place_in_stages(mesh, rank)
        return data_place(tuple(each[stage].items()), rank - first, math.prod(each[stage].values()))
    at, count, rest = 0, 1, ranks
    for name, size in mesh or (("dp", ranks),):
        rest //= size
        if name not in ("tp", "pp"):
            at, count = at * size + rank // max(rest, 1) % size, count * size
    return at, count


def shapes_form(shapes: Any, pad: Any) -> tuple[Any, Any]:
    """Both as sorted tuples of (input, ...); None for shapes: as they come. Error: another form, inputs with unequal numbers of shapes, a
    value to pad with that is missing."""
    shapes, pad = (dict(given) if isinstance(given, tuple) else given or {} for given in (shapes, pad))
    form = 'shapes must be {input: [sizes, ...]}, for example {"input_ids": [(4, 128), (4, 256)]}'
    if not isinstance(shapes, Mapping) or not isinstance(pad, Mapping):
        raise ConfigError(f"{form}, and pad {{input: value}}, for example {{'input_ids': 0}}, not {shapes or None!r} and {pad or None!r}")
    for name, value in pad.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"pad of '{name}' must be a number, not {value!r}")
    values = tuple(sorted((str(n), v) for n, v in pad.items())) or None
    if not shapes:
        return None, values
    found = {}
    for name, sizes in shapes.items():
        if not isinstance(sizes, (list, tuple)) or not sizes:
            raise ConfigError(f"{form}; '{name}' has {sizes!r}")
        for one in sizes:
            if not isinstance(one, (list, tuple)) or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in one):
                raise ConfigError(f"{form}; '{name}' has {one!r}")
        found[str(name)] = tuple(tuple(one) for one in sizes)
        if len({len(one) for one in found[str(name)]}) > 1:
            raise ConfigError(f"all shapes of '{name}' must have as many dimensions")
    counts = {name: len(sizes) for name, sizes in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{n}' {c}" for n, c in counts.items())
        raise ConfigError(f"every input of shapes needs one entry for each shape of the batch, but there are {listed}")
    for name in pad:
        if name not in found:
            raise ConfigError(f"pad has '{name}', which is not in shapes{did_you_mean(str(name), found)}")
    for name in found:
        if name not in pad:
            raise ConfigError(f"pad lacks '{name}': say which value fills it up, for example pad={{'{name}': 0}}")
    return tuple(sorted(found.items())), values


def first_loss_scale(setting: float | str | None) -> float | None:
    """The scale that a loss_scale begins with."""
    return 65536.0 if setting == "dynamic" else None if setting is None else float(setting)


def dealt(batch: Any, micro_batches: int, place: int, places: int) -> Any:
    """Of each of a batch's micro-batches the rows of one of so many places, as one batch. Error: rows that cannot be dealt out."""

    def tensors(x: Any) -> list[Any]:
        if isinstance(x, Mapping):
            x = list(x.values())
        if isinstance(x, (list, tuple)):
            return [t for item in x for t in tensors(item)]
        return [x] if hasattr(x, "unflatten") and x.dim() > 0 else []

    found = tensors(batch)
    rows, parts = int(found[0].shape[0]) if found else 0, micro_batches * places
    if not rows or rows % parts:
        raise ConfigError(
            f"a batch of {rows} samples cannot be dealt to {places} ranks in {micro_batches} micro-batches; use a multiple of {parts}"
        )

    def cut(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: cut(value) for name, value in x.items()}
        if isinstance(x, (list, tuple)):
            items = [cut(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if not hasattr(x, "unflatten") or x.dim() == 0 or x.shape[0] != rows:
            return x
        return x.unflatten(0, (micro_batches, places, rows // parts))[:, place].flatten(0, 1)

    return cut(batch)
