"""Ops one at a time, for programs that do not fit in the memory that is free: each ATen op as a program of its own.

Operands become inputs, results that are placed elsewhere become results of their own. What is too large even so, and our own ops
on a unit's states, are left to the cost model, which marks them as estimated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch

from interlace.cost.measure import MAX_STEPS, MIN_STEPS, Rows, StepTimes, plain_inputs

OP_BUDGET_S = 0.15
_VALUE = re.compile(r"%(\d+)")


def program_of(text: str, types: dict[int, str]) -> str | None:
    """The program of one printed op; `types` gives the type of every value. None for ops that only make sense in their program."""
    line = text.strip().split(" {")[0]
    results, equals, call = line.partition(" = ")
    if not equals or not call.startswith("aten."):
        return None
    results = re.sub(r" (in|into) %\d+(\+\S+)?(?=,|$)", "", results)
    operands = list(dict.fromkeys(int(number) for number in _VALUE.findall(call)))
    if any(number not in types for number in operands):
        return None
    lines = ["interlace 1 captured"]
    lines += [f'input %{number}: {types[number]} "x{number}"' for number in operands]
    kept = [int(part) for part in re.findall(r"%(\d+):", results)]
    lines.append("phase micro_batch takes () gives () {")
    lines.append(f"  {results} = {call} {{fwd}}")
    lines += [f'  output(%{number}) {{fwd name="y{number}"}}' for number in kept]
    return "\n".join([*lines, "}"]) + "\n"


def measure_one_by_one(
    text: str, wanted: list[str], machine: Any, peers: Any, put: Callable[[Rows], None],
    progress: Callable[[str, int, int], None], memory_bytes: int, trusted: bool = False,
) -> None:  # fmt: skip
    """Measures the ops with the keys `wanted`; every rank must call it. `trusted`: their operators may be any."""
    from interlace import _core, _runtime

    plan = _runtime.profile_plan(text)
    types = {int(n): t for n, t in re.findall(r"%(\d+): ([a-z0-9]+\[[^\]]*\](?:\{[^}]*\})?)", text)}
    places: dict[str, Any] = {}
    for facts in plan.values():
        if facts["key"] in wanted:
            places.setdefault(facts["key"], facts)
    for number, (key, facts) in enumerate(places.items()):
        progress(f"{facts['name']}, alone", number, len(places))
        alone = program_of(facts["text"], types)
        if alone is None:
            continue
        one = _core.Program.parse(alone, "one op")
        if facts["result_bytes"] * 2 * machine.ranks > memory_bytes:
            continue
        times = StepTimes(machine.ranks, machine.threads, machine.cores)
        problem = None
        try:
            executor = _runtime.Executor(alone, "cpu", [], 60.0, {"captured_here": trusted})
            inputs = plain_inputs(one)
            executor.set_trace("serial")
            start = time.monotonic()
            for step in range(MAX_STEPS):
                executor.step([list(inputs)], [], step)
                if step > 0:
                    times.add(executor.record())
                if step >= MIN_STEPS and time.monotonic() - start > OP_BUDGET_S:
                    break
        except (RuntimeError, MemoryError) as error:
            problem = str(error)
        torch.set_num_threads(machine.threads)
        peers.exchange(f"op {number}", None)  # all ranks on the same op
        if problem is None:
            rows = [value for (kind, _), value in times.rows().items() if kind == "op"]
            put({("op", key): rows[0]} if rows else {})
