"""From a captured text and a schedule's passes to a program, with what the simulator says of it. Rank 0 only."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from interlace.config import Config, ConfigError
from interlace.profiling import Scratch
from interlace.programs import Programs, Source
from interlace.schedule import fill, needs_profile, pipeline


@dataclasses.dataclass
class Prediction:
    step_us: float
    peak_bytes: int


class Planner:
    """Runs pipelines. `standard` is the part that every program of the run has."""

    def __init__(self, config: Config, programs: Programs, standard: str) -> None:
        self.config, self.programs, self.standard = config, programs, standard
        self.ranks = programs.peers.size
        self._scratch: Scratch | None = None
        self._profiles: dict[str, str] = {}  # text → path
        self._cluster: str | None = None
        self.profile = self._given_profile()  # text; "" when there is none yet

    def source(
        self, captured: str, passes: tuple[str, ...], constants: dict[str, Any], limit: int | None = None
    ) -> Source:
        """The program after the standard passes and these. Error: what a pass refuses."""
        whole = pipeline(self.standard, fill(passes, self._values(passes, limit)))
        program, reports = self.programs.run_passes(captured, whole)
        return Source(program.print(), reports, constants, captured)

    def predict(self, text: str) -> Prediction | None:
        """The simulator's word on a program; None without measured times, which it needs to be worth anything here."""
        from interlace import _core

        if not self.profile:
            return None
        cluster = self.cluster_text()
        simulation = _core.Simulation(
            _core.Program.parse(text, "program"), cluster, profile=self.profile, foreign=self.config.profile != "auto"
        )
        return Prediction(simulation.step_us, simulation.peak_bytes)

    def _values(self, passes: tuple[str, ...], limit: int | None) -> dict[str, Any]:
        values: dict[str, Any] = {"ranks": self.ranks, "limit": "none", "profile": "none"}
        limits = [n for n in (limit, self.config.memory_limit_bytes) if n is not None]
        if limits:
            values["limit"] = min(limits)
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
            if given is None:
                # The preset of a CPU host with this machine's cores; everything it costs is in the profile.
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                preset = _core.preset_cluster(f"local-{self.ranks}")
                self._cluster = re.sub(r"\ncores = \d+", f"\ncores = {cores}", preset).rstrip("\n") + "\n"
            else:
                path = Path(given)
                if path.suffix == ".toml" or "/" in given:
                    self._cluster = _read(path, "cluster file") + "\n"
                else:
                    self._cluster = given
        return self._cluster

    def _file(self, text: str, suffix: str) -> str:
        if self._scratch is None:
            self._scratch = Scratch()
        if text not in self._profiles:
            self._profiles[text] = self._scratch.file(text, suffix)
        return self._profiles[text]

    def _given_profile(self) -> str:
        if self.config.profile in ("auto", "off") or self.programs.peers.rank != 0:
            return ""
        return _read(Path(self.config.profile), "profile")


def _read(path: Path, what: str) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the {what} {path}: {reason}") from None
    if not text.strip():
        raise ConfigError(f"the {what} {path} is empty")
    return text
