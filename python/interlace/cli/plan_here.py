"""`interlace plan --local`: plans of this host rest on what `interlace profile` has measured of it, and say where they do not."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from interlace.calibrate.here import MeasuredCluster
from interlace.cli.console import Work, err
from interlace.cli.plan_programs import TOP, judge, programs_of
from interlace.cli.simulation import LOCAL
from interlace.errors import InterlaceError

MEASURE_ROUNDS = 4  # a plan on new times may take another micro-batch, whose ops are measured in turn
BUDGET_S = 5  # of running a program's ops


class Here:
    """This host with so many ranks: its cluster file where anything was measured, else the preset."""

    def __init__(self, cluster: str, network: str | None = None, store: str | None = None) -> None:
        self.ranks, self.network, self.store = int(cluster.removeprefix(LOCAL)), network, store
        self.fingerprint = ""
        self.measured: MeasuredCluster | None = None
        self.profile = ""  # as the simulator reads it
        self.read()

    @property
    def text(self) -> str:
        """Of its cluster file, or the name of the preset."""
        return self.measured.text if self.measured is not None else f"{LOCAL}{self.ranks}"

    def read(self) -> None:
        """Takes what the store has now."""
        if importlib.util.find_spec("torch") is None:
            return  # nothing can have been measured
        from interlace.calibrate.here import measured_cluster
        from interlace.cli.profile import machine_here, store_path
        from interlace.cost.store import Store

        machine = machine_here(self.ranks, None, self.network)
        self.fingerprint = machine.fingerprint
        path = store_path(self.store)
        if not path.exists():
            return
        with Store(path) as kept:
            for note in kept.notes:
                err().print(f"warning: {note}")
            if kept.rows(machine.fingerprint):
                profile = kept.profile(machine.fingerprint)
                self.measured, self.profile = measured_cluster(profile, machine), profile.text()

    def command(self, model: str = "MODEL", micro_batch: int | None = None, seq: int | None = None) -> str:
        """What measures this."""
        words = ["interlace", "profile", "--model", model, "--ranks", str(self.ranks)]
        for option, value in (("--micro-batch", micro_batch), ("--seq", seq), ("--network", self.network), ("--store", self.store)):
            words += [option, str(value)] if value is not None else []
        return shlex.join(words)

    # ---- what a plan rests on ----

    def facts(self, found: dict[str, Any], layers: str, model: str, seq: int) -> dict[str, Any]:
        """For the output: what was measured, and which ops of the best plan were at their shapes; as lines "said"."""
        known = self.measured
        rows: list[dict[str, Any]] = []
        for plan in (each["plan"] for each in found["plans"][:1] if self.fingerprint):
            cut = cut_program(plan)
            for b, tp in sorted({(stage["micro_batch"], stage["tp"]) for stage in plan["stages"]}):
                keys = op_keys(layers, b, plan["sequence"]) if cut is None else keys_of(cut)
                count = len(keys & known.keys) if known is not None else 0
                rows.append({"micro_batch": b, "tp": tp, "ops": len(keys), "measured": count})
        said, ops = (known.said, known.ops) if known is not None else ([], 0)
        facts = {"fingerprint": self.fingerprint, "measured": said, "ops": ops, "micro_batches": rows}
        return facts | {"said": lines(facts, self, model, seq)}

    @staticmethod
    def missing(facts: dict[str, Any]) -> int | None:
        """A micro-batch of the plan most of whose ops have been measured at other shapes at best."""
        return next((row["micro_batch"] for row in facts["micro_batches"] if 2 * row["measured"] < row["ops"]), None)

    def measure(self, model: str, micro_batch: int, seq: int, cut: str | None = None) -> None:
        """Runs `interlace profile`, which shows how far it is on stderr, on the model or on a program. Error: what it says."""
        command = self.command(model, micro_batch, seq)
        with tempfile.TemporaryDirectory(prefix="interlace-plan-") as folder:
            words = shlex.split(command)[1:]
            if cut is not None:
                file = Path(folder) / "cut.il"
                file.write_text(cut)
                words += ["--program", str(file)]
            done = subprocess.run([sys.executable, "-m", "interlace.cli", *words, "--budget", str(BUDGET_S)], stdout=subprocess.DEVNULL)
        if done.returncode:
            raise InterlaceError(f"measuring failed: {command}")
        self.read()


def plan_on(
    here: Here, model: str, layers: str, seq: int, planned: Callable[[str, int], dict[str, Any]], measure: bool, top: int
) -> dict[str, Any]:  # fmt: skip
    """The `top` plans on what was measured, judged by their programs; with `measure` what the first one lacks is measured, until that is
    nothing."""
    asked: set[tuple[int, str | None]] = set()
    while True:
        found = planned(here.text, max(top, TOP) if here.measured is not None else top)
        if here.measured is not None and found["plans"]:
            with Work() as work:
                found = judge(found, here.text, here.profile, work.update, top)
        found["here"] = here.facts(found, layers, model, seq)
        b = here.missing(found["here"]) if measure else None
        cut = cut_program(found["plans"][0]["plan"]) if b is not None else None
        if b is None or (b, cut) in asked or len(asked) == MEASURE_ROUNDS:
            return found
        asked.add((b, cut))
        here.measure(model, b, seq, cut)


def lines(facts: dict[str, Any], here: Here, model: str, seq: int) -> list[str]:
    """What of a plan for this host was measured and what is estimated, with the command that measures the rest."""
    if not facts["measured"]:
        asked = f" ({facts['fingerprint']})" if facts["fingerprint"] else ""
        return [f"nothing has been measured here{asked}: all times are a sketch's; {here.command(model, seq=seq)}"]
    said = [f"measured here: {line}" for line in facts["measured"]]
    for row in facts["micro_batches"]:
        what = f"{row['measured']} of {row['ops']} kinds of op at micro-batch {row['micro_batch']} measured"
        what += f" as {row['tp']} ranks cut them" * (row["tp"] > 1)
        if row["tp"] > 1 and 2 * row["measured"] < row["ops"]:
            said.append(f"{what}, the others estimated from other shapes; --measure measures them")
        elif 2 * row["measured"] < row["ops"]:
            said.append(f"{what}, the others estimated from other shapes; {here.command(model, row['micro_batch'], seq)}")
        else:
            said.append(what)
    return said


def cut_program(plan: dict[str, Any]) -> str | None:
    """What all ranks of a plan of one stage run, where they cut products."""
    if len(plan["stages"]) > 1 or plan["stages"][0]["tp"] == 1:
        return None
    programs = programs_of(plan)
    return None if programs is None else str(programs[0].print())


def keys_of(text: str) -> frozenset[str]:
    """The signatures of a program's ops, those that take no time left out."""
    from interlace import _runtime

    return frozenset(facts["key"] for facts in _runtime.profile_plan(text).values() if facts["key"] and not facts["bytes"])


@functools.cache
def op_keys(layers: str, micro_batch: int, seq: int) -> frozenset[str]:
    """The signatures of the ops of a model's layers (plan/layers.py) at these sizes, those that take no time left out."""
    from interlace import _core

    found: set[str] = set()
    for text in _programs(layers.splitlines()):
        # The trace calls a size of 1 another case because of broadcasting, which changes no size.
        program = _core.Program.parse(re.sub(r"(?m)^symbol b \d+", "symbol b 1", text), "layer").bind({"b": micro_batch, "s": seq})
        program.run_passes("canonicalize")
        found |= keys_of(program.print())
    return frozenset(found)


def _programs(rows: list[str]) -> Iterator[str]:
    """Those that a model's text holds: "program block 412" and so many lines."""
    for at, row in enumerate(rows):
        if row.startswith("program "):
            yield "\n".join(rows[at + 1 : at + 1 + int(row.split()[2])]) + "\n"
