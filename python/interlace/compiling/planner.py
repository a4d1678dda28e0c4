"""From a captured text and a schedule's passes to a program, with what the simulator says of it. Rank 0 only."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from interlace.capture.tensor_plan import cuts_text
from interlace.compiling.cache import key_of
from interlace.compiling.dropout import put_back, take_out
from interlace.compiling.programs import Made, ProgramError, Programs, Source, state_name
from interlace.config import Config, ConfigError
from interlace.config.schedule import (
    Schedule,
    fill,
    for_stage,
    items,
    joined_recompute,
    needs_profile,
    pass_name,
    pipeline,
    recomputed_already,
)  # fmt: skip
from interlace.cost.machine import Machine, accelerator_name, cores, device_bytes, physical_bytes
from interlace.dist.mesh import STAGES
from interlace.errors import InterlaceError
from interlace.files import read_text

# Meta lines that stages of unlike ranks have from the first of them that is made.
OF_STAGES = ("stages.rows", "stages.times", "stages.room")


@dataclasses.dataclass
class Prediction:
    step_us: float
    peak_bytes: int


def check_stages(texts: list[str]) -> None:
    """Error: programs of stages that do not fit one another, or would wait for one another for ever."""
    from interlace import _core

    try:
        _core.ProgramSet(STAGES, [_core.Program.parse(text, f"stage{s}.il") for s, text in enumerate(texts)]).check()
    except _core.Error as e:
        raise ProgramError(str(e)) from e


def layout_of(program: Any) -> list[Any]:
    """What one program must have as another one has it, to go on with its states."""
    return [(state_name(s), s["dtype"], s["shape"]) for s in program.states() if s["role"] in ("full", "shard")]


class Planner:
    """Runs pipelines. `standard` is the part that every program of the run has."""

    def __init__(self, config: Config, programs: Programs, standard: str) -> None:
        self.config, self.programs, self.standard = config, programs, standard
        self.ranks = programs.peers.size
        self._unsettled: dict[int, str] = {}  # passes of `standard` as they were before settle_stages()
        self._cluster: str | None = None
        self.profile = self._given_profile()  # text; "" when there is none yet

    def source(
        self, captured: str, passes: tuple[str, ...], constants: dict[str, Any], limit: int | None = None,
        fresh: bool = False,
    ) -> Source:  # fmt: skip
        """The program after the standard passes and these, from the cache unless `fresh`; of a pipeline, those of all stages. Error: what a
        pass refuses, stages that do not fit one another."""
        count = self.config.stage_ranks
        if count == 1:
            return self._source(self.standard, captured, passes, constants, limit, fresh)
        made = self._stages(captured, passes, constants, limit, fresh)
        # What a stage recomputes may change what others send it: all are made of one text in which all of it runs again.
        again = joined_recompute(self._chosen(source.text) for source in made)
        if again is not None:
            made = self._stages(captured, (again, *recomputed_already(passes)), constants, limit, fresh)
        made[0].captured, made[0].stages = captured, [source.text for source in made]
        check_stages(made[0].stages)
        return made[0]

    def _stages(
        self, captured: str, passes: tuple[str, ...], constants: dict[str, Any], limit: int | None, fresh: bool,
    ) -> list[Source]:  # fmt: skip
        """Of each stage."""
        made: dict[int, Source] = {}
        for s in self.stages_in_order():
            text = self.text_of_stage(captured, s, made.values())
            try:
                made[s] = self._source(for_stage(self.standard, s, self.config), text, passes, constants, limit, fresh)
            except ProgramError as e:
                raise ProgramError(f"stage {s}: {e}") from e
        return [made[s] for s in range(self.config.stage_ranks)]

    @staticmethod
    def _chosen(text: str) -> str:
        """The passes on the captured program that a search has chosen."""
        found = re.search(r'^meta search.chosen "[^|"]*\|\d+\|\d+\|([^|"]*)', text, re.MULTILINE)
        return found[1] if found is not None else ""

    def stages_in_order(self) -> list[int]:
        """As their programs are made: first that whose micro-batches have the most rows, which finds out what follows the rows."""
        unlike = self.config.stage_meshes
        return sorted(range(self.config.stage_ranks), key=lambda s: unlike[s]["dp"] if unlike else 0)

    def text_of_stage(self, captured: str, stage: int, made: Iterable[Source]) -> str:
        """The captured text for a stage's micro-batches, with what a stage that has been made knows of all."""
        from interlace import _core

        text = self.programs.captured_of(captured, stage)
        if not self.config.stage_meshes:
            return text
        program = _core.Program.parse(text, "captured")
        for source in made:
            known = _core.Program.parse(source.text, "program").meta()
            for name in OF_STAGES:
                if name in known:
                    program.set_meta(name, known[name])
            return str(program.print())
        return text

    def _source(
        self, standard: str, captured: str, passes: tuple[str, ...], constants: dict[str, Any], limit: int | None, fresh: bool,
    ) -> Source:  # fmt: skip
        key, numbers = self._key(captured, passes, limit, standard)
        found = None if fresh else self.programs.cache.get("plan", key)
        text = put_back(found[0]["text"], numbers) if found is not None else None
        if found is not None and text is not None:
            self.programs.cached.append("passes")
            self.profile = found[0]["profile"] or self.profile
            return Source(text, found[0]["reports"], constants, captured=captured)

        if needs_profile(passes) and self.profile:  # a pipeline's runs are ordered by what they were measured to take
            standard = re.sub(r"\bpipeline\([^()]*cluster=\{cluster\}", r"\g<0>,profile={profile}", standard)
        # Other passes know gradients as states.
        last = ["transient_gradients"] if self.config.passes is None and self.ranks == self.config.accumulation == 1 else []

        def made(within: int | None) -> Made:
            late = [*self.filled(passes, within), *last]
            return self.programs.run_passes(captured, pipeline(",".join(self.filled([standard], limit)), late))

        most = self._limit(limit)
        if most is not None and any("{limit}" in text for text in passes):
            program, reports = self.programs.within_limit(made, most)
        else:
            program, reports = made(limit)
        if self.config.passes is None and program.accumulation != self.config.accumulation:
            raise ProgramError(
                f"the schedule's passes make {program.accumulation} micro-batches of a step, and the setting is accumulation="
                f"{self.config.accumulation}; write accumulation={program.accumulation}, or leave breadth_first out"
            )
        text = program.print()
        template, left = take_out(text)
        if left.keys() <= numbers.keys() and put_back(template, numbers) == text:
            profile = self.profile if needs_profile(passes) else ""
            self.programs.cache.put("plan", key, {"text": template, "reports": reports, "profile": profile})
        return Source(text, reports, constants, captured=captured)

    def settle_stages(self, captured: str) -> None:
        """Decides once where the model is cut into stages, for all programs of the run: as pass `borders` or `pipeline`, whichever is first,
        does it on this captured text, with what the schedule recomputes first. A later entry that recomputes across these borders is refused
        when it is rehearsed."""
        passes = items(self.standard)
        at = next((i for i, text in enumerate(passes) if pass_name(text) in ("borders", "pipeline")), None)
        if at is None or ",at=auto" not in passes[at]:
            return
        self._unsettled = {i: text for i, text in enumerate(passes) if ",at=auto" in text}
        room = f",limit={self._room_of_rank()}" if ",deal=auto" in passes[at] else ""
        asked = passes[at].replace(",at=auto", ",at=auto,cluster={cluster}" + room)
        entries = ([p for p in entry if pass_name(p) == "recompute"] for _, entry in self.config.schedule)
        before = items(pipeline(",".join(passes[:at]), next(filter(None, entries), [])))
        key = key_of(captured, *before, asked, self.cluster_text())
        found = self.programs.cache.get("stages", key)
        if found is None:
            largest = self.stages_in_order()[0]
            wanted = for_stage(",".join(self.filled([*before, asked])), largest, self.config)
            program, _ = self.programs.run_passes(self.programs.captured_of(captured, largest), wanted)
            meta = program.meta()
            at_meta = "stages" if pass_name(asked) == "pipeline" else "stages.at"
            found = {"at": meta[at_meta], "gathers": meta.get("stages.gathers", "once")}, {}
            self.programs.cache.put("stages", key, found[0])
        settled, gathers = found[0]["at"], found[0]["gathers"]

        def said(text: str) -> str:
            known = ",cluster={cluster}" + room if pass_name(text) == "pipeline" else ""
            text = re.sub(r"(^(?:borders|pipeline)\(.*),at=auto", rf"\g<1>,at={settled}{known}", text)
            return text.replace(",gathers=auto", f",gathers={gathers}")

        self.standard = ",".join(said(text) for text in passes)

    def settle_again(self, captured: str) -> bool:
        """Cuts a model into stages anew, where they were not said: a stage may have nothing to train since parameters were frozen."""
        passes = items(self.standard)
        for i, text in self._unsettled.items():
            passes[i] = text
        self.standard = ",".join(passes)
        self.settle_stages(captured)
        return bool(self._unsettled)

    def _room_of_rank(self) -> int | str:
        """Bytes that an order of a pipeline's runs may take: of CPUs without a memory_limit a rank's part of the host's memory. "none": what
        the accelerator has."""
        if self.programs.room is not None:
            return self.programs.room
        if self.programs.peers.device.type != "cpu":
            return "none"
        return physical_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))

    def settle_cuts(self, captured: str, given: str | None) -> str:
        """Decides once how tensor parallelism cuts the parameters, for all programs of the run, whose states are the same: as `given` (lines
        of a plan), or as pass `tensor` does it on this captured text, where the stages' borders are settled before it. Gives the text with
        that as its plan. Error: what the pass refuses."""
        passes = items(self.standard)
        at = next((i for i, text in enumerate(passes) if pass_name(text) == "tensor"), None)
        if at is None:
            return captured
        unlike = self.config.stage_meshes
        stage = max(range(len(unlike)), key=lambda s: unlike[s].get("tp", 1), default=0)  # that whose ranks cut the most
        asked = passes[at]
        if "plan=auto" in asked and "cluster=" not in asked:
            asked = asked.replace("plan=auto", "plan=auto,limit={limit},cluster={cluster}")
        key = key_of(captured, *passes[:at], asked, str(stage), given or "", self.cluster_text(), str(self.programs.room))
        found = self.programs.cache.get("cuts", key)
        if found is None:
            if given is not None:
                asked = re.sub(r"plan=[^,)]+", "plan=" + self._file(given, ".plan"), asked)
            wanted = for_stage(",".join(self.filled([*passes[:at], asked])), stage, self.config)
            program, _ = self.programs.run_passes(self.programs.captured_of(captured, stage), wanted)
            meta = {name: text for name, text in program.meta().items() if name.startswith("tensor.")}
            found = {"meta": meta | {"tensor": cuts_text(program)}}, {}
            self.programs.cache.put("cuts", key, found[0])
        self.programs.cuts = found[0]["meta"]
        passes[at] = re.sub(r"plan=[^,)]+", "plan=model", passes[at])
        self.standard = ",".join(passes)
        return self.programs.settled(captured)

    def rehearse(self, captured: str, later: Schedule, first: Source) -> None:
        """Runs the passes of later entries of the schedule that need neither measured times nor a search, so that what would fail at its
        step fails at the start. What they make is in the cache then. Error: what is refused or does not fit, with the entry's step."""
        for step, passes in later:
            searches = any(pass_name(text) == "search" for text in passes)
            if not passes or searches or needs_profile(passes) or self.has(captured, passes):
                continue
            try:
                for text, before in zip(self.source(captured, passes, {}).texts, first.texts, strict=True):
                    program = self.programs.parse(Source(text))
                    self.programs.check_room(program)
                    if layout_of(program) != layout_of(self.programs.parse(Source(before))):
                        raise ProgramError("these passes change which states a stage has: give them from step 0 on, or leave them out")
            except InterlaceError as e:
                raise ProgramError(f"schedule, step {step}: {e}") from e

    def filled(self, passes: Sequence[str], limit: int | None = None) -> list[str]:
        """Pass texts with their placeholders replaced."""
        return fill(passes, self._values(passes, limit))

    def has(self, captured: str, passes: tuple[str, ...], limit: int | None = None) -> bool:
        """Whether source() would take this plan from the cache."""
        return self.programs.cache.get("plan", self._key(captured, passes, limit, for_stage(self.standard, 0, self.config))[0]) is not None

    def _key(self, captured: str, passes: tuple[str, ...], limit: int | None, standard: str) -> tuple[str, dict[int, str]]:
        """Everything that decides what the passes make: the captured text without its dropout probabilities, the passes, the machines, the
        limit, and the profile or, where it is measured here, the machine that it is measured on."""
        template, numbers = take_out(captured)
        values = {"limit": limit if limit is not None else self.programs.room, "ranks": self.ranks}
        parts = [template, str(self.config.accumulation), *fill([standard, *passes], values)]
        if any("{cluster}" in text for text in (standard, *passes)):
            parts.append(self.cluster_text())
        if needs_profile(passes):
            local = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
            here = Machine.here(local, torch.get_num_threads(), device=self.programs.peers.device).fingerprint
            parts.append(here if self.config.profile == "auto" else self.profile)
        parts.append(self._files(passes))
        return key_of(*parts), numbers

    @staticmethod
    def _files(passes: tuple[str, ...]) -> str:
        """The contents of files that passes name as options."""
        found = [Path(word) for text in passes for word in re.findall(r"=([^,()]+)", text)]
        return "\0".join(path.read_text(errors="replace") for path in found if path.is_file())

    def predict(self, texts: list[str]) -> Prediction | None:
        """The simulator's word on a program, or on those of all stages, whose largest peak counts; None without measured times, which it
        needs to be worth anything here."""
        from interlace import _core

        if not self.profile:
            return None
        how: dict[str, Any] = {"profile": self.profile, "foreign": self.config.profile != "auto"}
        programs = [_core.Program.parse(text, "program") for text in texts]
        if len(programs) == 1:
            one = _core.Simulation(programs[0], self.cluster_text(), **how)
            step_us, taken = one.step_us, [one.taken_bytes]
        else:
            facts = json.loads(_core.simulate_set(_core.ProgramSet(STAGES, programs), self.cluster_text(), **how))
            step_us, taken = facts["step_us"], [stage["taken_bytes"] for stage in facts["stages"]]
        peaks = [bytes_ + self.programs.allocator_bytes(program) for bytes_, program in zip(taken, programs, strict=True)]
        return Prediction(step_us, max(peaks))

    def improves(self, texts: list[str], before: list[str], limit: int | None) -> bool:
        """Whether stages, each of which was searched for by itself, are predicted to be no slower together than those before, or those
        before need more memory than there is."""
        if len(texts) == 1 or (old := self.predict(before)) is None or (new := self.predict(texts)) is None:
            return True
        most = self._limit(limit)
        return new.step_us <= old.step_us or (most is not None and old.peak_bytes > most)

    def _limit(self, limit: int | None) -> int | None:
        return min((n for n in (limit, self.programs.room) if n is not None), default=None)

    def _values(self, passes: Sequence[str], limit: int | None) -> dict[str, Any]:
        values: dict[str, Any] = {"ranks": self.ranks, "limit": "none", "profile": "none"}
        most = self._limit(limit)
        if most is not None:
            values["limit"] = most
        if needs_profile(passes) and self.profile:
            values["profile"] = self._file(self.profile, ".profile")
        if any("{cluster}" in text for text in passes):
            given = self.config.cluster
            values["cluster"] = given if given is not None else self._file(self.cluster_text(), ".toml")
        return values

    def cluster_text(self) -> str:
        """What the simulator takes: the name of a preset, or the text of a file."""
        from interlace import _core

        if self._cluster is None:
            given = self.config.cluster
            if given is None and self.programs.peers.device.type != "cpu":
                self._cluster = accelerators(self.programs.peers.device, self.ranks)
            elif given is None:
                # The preset of a CPU host with this machine's cores; everything it costs is in the profile.
                preset = _core.preset_cluster(f"local-{self.ranks}")
                text = re.sub(r"\ncores = \d+", f"\ncores = {cores()}", preset).rstrip("\n") + "\n"
                self._cluster = tier_speed(text, self.config) if self.config.tier is not None else text
            else:
                path = Path(given)
                if path.suffix == ".toml" or "/" in given:
                    self._cluster = _read(path, "cluster file") + "\n"
                else:
                    self._cluster = given
        return self._cluster

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Gone with the process."""
        return tempfile.TemporaryDirectory(prefix="interlace-")

    def _file(self, text: str, suffix: str) -> str:
        """The path of a file with this text, for passes to read; it has none of the characters that end an option of a pass."""
        path = Path(self._scratch.name) / f"{key_of(text)[:16]}{suffix}"
        path.write_text(text)
        return str(path)

    def _given_profile(self) -> str:
        if self.config.profile in ("auto", "off") or self.programs.peers.rank != 0:
            return ""
        return _read(Path(self.config.profile), "profile")


def accelerators(device: torch.device, ranks: int) -> str:
    """The preset of these devices, or that of an H100 with the name and the memory of what is here: what it costs is in the profile."""
    from interlace import _core

    name = accelerator_name(device)
    presets = ("h100-80gb", "a100-40gb", "l4-24gb")
    known = next((p for p in presets if p.partition("-")[0] in name.lower()), presets[0])
    text = _core.preset_cluster(f"{known}-{ranks}")
    text = re.sub(r'\nname = "[^"]*"', f'\nname = "{name}"', text, count=1)
    text = re.sub(r"\nmemory_gib = [^\n]*", f"\nmemory_gib = {device_bytes(device)[1] / 2**30!r}", text, count=1)
    return text.rstrip("\n") + "\n"


def tier_speed(cluster: str, config: Config) -> str:
    """A CPU host's cluster file with the run's tier: files, and how fast they may go, or memory."""
    if config.tier == "host":
        return re.sub(r"\ntier = [^\n]*", '\ntier = "memory"', cluster)
    if config.tier_bandwidth is not None:
        speed = float(config.tier_bandwidth) / 1e9
        cluster = re.sub(r"\n(file_\w+_gb_per_s) = [^\n]*", rf"\n\1 = {speed!r}", cluster)
        cluster = re.sub(r"\ntier = [^\n]*", rf"\g<0>\ntier_gb_per_s = {speed!r}", cluster)
    # A thread wakes up for each: 3 to 5 ms when all cores are taken.
    return re.sub(r"\ncopy_us = [^\n]*", "\ncopy_us = 3000", cluster)


def _read(path: Path, what: str) -> str:
    text = read_text(path, f"a {what}", ConfigError)
    if not text.strip():
        raise ConfigError(f"the {what} {path} is empty")
    return text
