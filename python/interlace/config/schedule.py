"""A schedule: which passes shape the program from which step of this start on.

Config(schedule=[(0, []), (5, ["unshard(profile={profile},limit={limit})"]), (100, ["search(cluster={cluster})"])])

Each entry names all passes beside the standard ones, not what is new. Steps are counted from this start, not from a checkpoint.
schedule="auto", the default, is spelled out by `default_schedule`.
Placeholders: {profile} a file with the times measured so far, {cluster} Config.cluster, {limit} bytes that a rank may use (or none),
{ranks} how many there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from interlace.config.config import STRATEGIES, Config
from interlace.config.forms import ConfigError, did_you_mean

Schedule = tuple[tuple[int, tuple[str, ...]], ...]
# These work on the captured program: they run after canonicalize, before parameters are sharded.
CAPTURED_LEVEL = ("recompute", "precision", "breadth_first", "split")


AUTO_STEP = 10  # the last steps before it are measured


def default_schedule(config: Config, ranks: int, device: str = "cpu") -> Schedule:
    """What schedule="auto" stands for: the search decides as soon as it has measured times, and from the start where there is a limit.

    It changes no bit of the training, but where it also decides when gradients are reduced (accumulate_mode "auto"). One rank without a
    limit has nothing to decide. `device`: its type; from an accelerator storages can always leave to the host's memory.
    """
    if config.mode == "eager" or config.passes is not None or config.profile == "off":
        return ()
    limited, stages = config.memory_limit is not None, config.stage_ranks > 1
    if ranks == 1 and not limited:
        return ()
    search = "search(cluster={cluster},limit={limit},recompute=" + ("auto" if limited else "none")
    if config.accumulation > 1 and config.accumulate_mode == "auto" and ranks > 1 and not stages:
        search += ",accumulate=auto"
    if ranks == config.accumulation == 1:  # as the last pass makes it (`Planner`)
        search += ",transient=true"
    tier = config.tier is not None or device != "cpu"
    leaves = limited and tier and not stages  # what does not fit may leave memory
    if leaves:
        search += ",offload=host" if config.tier == "host" else ",offload=auto"
    if config.strategy == "shard" and ranks > 1 and (leaves or "replica" in dict(config.mesh or ())):
        search += ",reposition=auto"  # with other strategies the model's own parameters are whole, and looked at between steps
    if config.profile != "auto":
        return ((0, (search + ",profile={profile})",)),)
    start = (search + ")",) if limited else ()
    if ranks == 1 and not tier:
        return ((0, start),)
    return ((0, start), (AUTO_STEP, (search + ",profile={profile})",)))


def needs_profile(passes: Iterable[str]) -> bool:
    return any("{profile}" in text for text in passes)


def joined_recompute(chosen: Iterable[str]) -> str | None:
    """One pass that recomputes what the searches of a pipeline's stages have chosen, each of blocks of its own: "recompute(mode=full,
    blocks=a)" and "recompute(mode=selective,blocks=b)" are "recompute(mode=selective,blocks=a+b,whole=a)". None: none does."""
    blocks: dict[str, list[str]] = {"full": [], "selective": []}
    for text in chosen:
        for found in re.finditer(r"recompute\(mode=(full|selective),blocks=([^,)]+)\)", text):
            blocks[found[1]] += found[2].split("+")
    full, some = blocks["full"], blocks["selective"]
    if not full and not some:
        return None
    if not some:
        return f"recompute(mode=full,blocks={'+'.join(full)})"
    return f"recompute(mode=selective,blocks={'+'.join(full + some)}{',whole=' + '+'.join(full) if full else ''})"


def recomputed_already(passes: Iterable[str]) -> list[str]:
    """The passes with searches that recompute nothing."""
    return [_without_recompute(text) if pass_name(text) == "search" else text for text in passes]


def _without_recompute(search: str) -> str:
    options = search.partition("(")[2].removesuffix(")").split(",")
    return f"search({','.join([*(o for o in options if o and not o.startswith('recompute=')), 'recompute=none'])})"


def pass_name(text: str) -> str:
    return text.partition("(")[0].strip()


def items(pipeline: str) -> list[str]:
    """The passes of a pipeline: "a(x=1,y=2),b" is "a(x=1,y=2)" and "b"."""
    return [item.strip() for item in re.split(r",(?![^()]*\))", pipeline) if item.strip()]


def fill(passes: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    """Pass texts with their placeholders replaced."""
    filled = []
    for text in passes:
        for name, value in values.items():
            text = text.replace("{" + name + "}", str(value))
        filled.append(text)
    return filled


def pipeline(standard: str, passes: Iterable[str]) -> str:
    """The standard pipeline with passes added where they belong: those of the captured level after canonicalize, the rest behind."""
    passes = list(passes)
    before = items(standard)
    if "fuse" in before and not any(pass_name(p) in ("tensor", "pipeline") for p in before):
        # What repeats ops comes behind it: whole regions are repeated, with the bits that they have.
        again = [p for p in passes if pass_name(p) in ("recompute", "breadth_first")]
        at = before.index("fuse") + 1
        standard, passes = ",".join([*before[:at], *again, *before[at:]]), [p for p in passes if p not in again]
    early = [p for p in passes if pass_name(p) in CAPTURED_LEVEL]
    late = [p for p in passes if pass_name(p) not in CAPTURED_LEVEL]
    first, comma, rest = standard.partition(",")
    if pass_name(first) == "canonicalize":
        return ",".join([first, *early, *([rest] if comma else []), *late])
    return ",".join([*early, standard, *late])


def for_stage(passes: str, stage: int, config: Config) -> str:
    """A pipeline for another stage of the model than the first, by the stage's own strategy."""
    passes = re.sub(r"(\bpipeline\(axis=\w+,stage=)\d+", rf"\g<1>{stage}", passes)
    if config.passes is not None:
        return passes
    strategy, mode = config.strategy_of(stage)
    if config.stage_meshes:
        axes = config.stage_meshes[stage]
        written = "".join(f"+{name}:{size}" for name, size in axes.items())
        passes = re.sub(r"(\bmesh\(axes=pp:\d+)[\w:+]*(,stages=[\d+]+,stage=)\d+", rf"\g<1>{written}\g<2>{stage}", passes)
        passes = re.sub(rf"(\b(?:{'|'.join(STRATEGIES)})\(axis=dp,ranks=)\d+", rf"\g<1>{axes['dp']}", passes)
    passes = re.sub(rf"\b({'|'.join(STRATEGIES)})\(axis=", f"{strategy}(axis=", passes)
    return re.sub(r"(\baccumulate\(steps=\d+,mode=)\w+", rf"\g<1>{mode}", passes)


def stage_at(schedule: Schedule, step: int) -> int:
    """The index of the entry that holds at a step, -1 before the first."""
    return sum(begin <= step for begin, _ in schedule) - 1


def check_passes(config: Config, table: list[dict[str, Any]]) -> None:
    """Refuses at the start what would fail hours later: unknown passes and options, a profile that cannot be there in time."""
    known = {entry["name"]: [option["name"] for option in entry["options"]] for entry in table}
    for text in items(config.passes or ""):
        if pass_name(text) not in known:
            raise ConfigError(f"passes: unknown pass '{pass_name(text)}'{did_you_mean(pass_name(text), known)}")
    if config.passes is not None and "update" not in map(pass_name, items(config.passes)):
        raise ConfigError(f"passes '{config.passes}' make no optimizer step: add update, for example update(clip=1.0)")
    for step, passes in config.schedule:
        for text in passes:
            where = f"schedule, step {step}, '{text}'"
            name = pass_name(text)
            if name not in known:
                raise ConfigError(f"{where}: unknown pass '{name}'{did_you_mean(name, known)}")
            if name == "fuse":
                raise ConfigError(f'{where}: regions are made before the strategy: give Config(regions="on") instead')
            match = re.fullmatch(r"[^()]*(\(([^()]*)\))?\s*", text)
            if match is None:
                raise ConfigError(f"{where}: expected NAME or NAME(OPTION=VALUE,...)")
            for part in (match.group(2) or "").split(",") if match.group(2) else []:
                option, equals, _ = part.partition("=")
                if not equals or option not in known[name]:
                    listed = ", ".join(known[name]) or "none"
                    raise ConfigError(f"{where}: unknown option '{option}'{did_you_mean(option, known[name])} (options: {listed})")
        if not needs_profile(passes):
            continue
        if config.profile == "off":
            raise ConfigError(f'schedule, step {step}: the passes use {{profile}}, but profile is "off"; use "auto" or a file')
        if config.profile == "auto" and step < 2:
            raise ConfigError(
                f"schedule, step {step}: {{profile}} is measured from step 1 on; give these passes step 2 or later, or name a file of "
                "`interlace profile --export` as Config.profile"
            )
