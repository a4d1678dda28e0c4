"""The very programs of a plan, as `interlace train --plan` makes them, and what the simulator says of them with times measured here.

The planner's formula judges thousands of plans; of the few that it finds best the programs are made, with their order of runs, transfers
side by side, and ranks that share cores, and the fastest of those is taken (`judge`).
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace.cli.simulation import LOCAL, first_of_stage, with_costs
from interlace.config import Config
from interlace.config.schedule import fill, for_stage, items, pipeline
from interlace.cost.machine import cores
from interlace.errors import InterlaceError

CANDIDATES = 8  # plans whose programs are made
FAR = 1.5  # times the best by the formula, beyond which a plan is not looked at
TOP = 200  # plans that the search gives for it


def judge(found: dict[str, Any], cluster: str, profile: str, update: Callable[[str, int, int], None], top: int = 1) -> dict[str, Any]:
    """The first `top` plans: of some those whose programs fit, the fastest in simulation first, with "simulated"; then the others as they
    were found. Some are the best of each layout, then the best of all, and then more of the fastest's layout. "judged": all whose programs
    were simulated, in that order."""
    near = [each for each in found["plans"] if each["plan"]["step_us"] <= FAR * found["plans"][0]["plan"]["step_us"]]
    best = _by_layout(near)
    best = [*best, *_others(near, best)][:CANDIDATES]
    judged: list[dict[str, Any]] = []

    def simulate(several: list[dict[str, Any]]) -> None:
        for number, each in enumerate(several):
            update("simulating programs", number, len(several))
            said = simulated(each["plan"], cluster, profile)
            if said is not None:
                judged.append(each | {"simulated": said})
        judged.sort(key=lambda each: each["simulated"]["step_us"])

    simulate(best)
    if judged:
        simulate([each for each in _others(near, best) if _layout(each) == _layout(judged[0])][: CANDIDATES // 2])
    known = [each for each in judged if max(each["simulated"]["peak_bytes"]) <= found["memory_limit"]]
    rest = [each for each in found["plans"] if each["text"] not in [one["text"] for one in known]]
    rows = [{"plan": each["plan"], "fits": each in known} | each["simulated"] for each in judged]
    return found | {"plans": (known + rest)[:top], "judged": rows}


def _by_layout(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best by the formula of each number of data and tensor ranks of the stages."""
    out: dict[Any, dict[str, Any]] = {}
    for each in plans:
        out.setdefault(_layout(each), each)
    return list(out.values())


def _layout(each: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((stage["dp"], stage["tp"]) for stage in each["plan"]["stages"])


def _others(plans: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in plans if all(each is not other for other in known)]


def simulated(plan: dict[str, Any], cluster: str, profile: str) -> dict[str, Any] | None:
    """Step and the peak of a rank of each stage: {"step_us", "peak_bytes"}. None: passes that refuse."""
    from interlace import _core

    programs = programs_of(plan)
    if programs is None:
        return None
    if len(programs) == 1:
        one = _core.Simulation(programs[0], cluster, profile=profile)
        return {"step_us": one.step_us, "peak_bytes": [one.taken_bytes]}
    made = _core.ProgramSet("pp", programs)
    made.check()
    facts = json.loads(_core.simulate_set(made, cluster, profile=profile))
    return {"step_us": facts["step_us"], "peak_bytes": [stage["taken_bytes"] for stage in facts["stages"]]}


def programs_of(plan: dict[str, Any]) -> list[Any] | None:
    """Of each stage. None: passes that refuse."""
    from interlace import _core

    with tempfile.TemporaryDirectory(prefix="interlace-plan-") as folder:
        file = Path(folder) / "cluster.toml"  # what passes decide by when the plan is trained (compiling/planner.py)
        here = _core.preset_cluster(f"{LOCAL}{sum(stage['devices'] for stage in plan['stages'])}")
        file.write_text(re.sub(r"\ncores = \d+", f"\ncores = {cores()}", here))
        try:
            return _programs(plan, str(file))
        except (_core.Error, InterlaceError):
            return None


def _programs(plan: dict[str, Any], cluster_file: str) -> list[Any]:
    from interlace import _core
    from interlace.capture.attention import OneAttention
    from interlace.compiling.planner import OF_STAGES
    from interlace.plan.execute import execution_of

    how = execution_of(plan)
    _, model = _captured(how.model, how.micro_batch, how.seq, None)
    config = Config(
        strategy=how.strategy, mesh=how.mesh, stages=how.borders(model), stage_order=how.stage_order, accumulation=how.accumulation,
        accumulate_mode=how.accumulate_mode, clip_norm=1.0,
    )  # fmt: skip
    standard = with_costs(config.pipeline(how.ranks), cluster_file)
    one_attention = OneAttention.of(config.kernels, config.one_attention)
    passes = items(pipeline(standard, fill(how.passes(model), {"cluster": cluster_file, "ranks": how.ranks})))
    cut = first_of_stage(passes, config)
    programs, known = dict[int, Any](), dict[str, str]()
    whole: dict[int, Any] = {}  # by rows of a micro-batch; the most first: stages with unlike ranks have some meta lines from that one
    for stage, rows in sorted(((s, each["micro_batch"]) for s, each in enumerate(plan["stages"])), key=lambda entry: -entry[1]):
        if rows not in whole:
            whole[rows] = _core.Program.parse(_captured(how.model, rows, how.seq, one_attention)[0], "captured")
            whole[rows].set_meta("micro_batches", str(how.accumulation))
            whole[rows].run_passes(",".join(passes[:cut]))
        programs[stage] = program = whole[rows].clone()
        for name in known:
            program.set_meta(name, known[name])
        if cut < len(passes):
            program.run_passes(for_stage(",".join(passes[cut:]), stage, config))
        known |= {name: text for name, text in program.meta().items() if name in OF_STAGES and config.stage_meshes}
    return [programs[stage] for stage in range(len(programs))]


@functools.lru_cache(maxsize=8)
def _captured(name: str, micro_batch: int, seq: int, one_attention: Any) -> tuple[str, Any]:
    """The step of a micro-batch, and the model. It has no values."""
    import torch

    from interlace import models
    from interlace.capture import capture

    built = models.build(name, micro_batch=micro_batch, seq=seq, dtype="float32")
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-4)
    captured = capture(built.model, built.loss_fn, built.example_batch, optimizer=optimizer, one_attention=one_attention)
    return captured.text, built.model
