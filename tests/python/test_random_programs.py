"""Programs as files might bring them, loaded and run: an error or numbers, never a signal (random_programs.py, program_worker.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("interlace._core")
_runtime = pytest.importorskip("interlace._runtime")
if not hasattr(_runtime, "testing"):
    pytest.skip("needs a build with INTERLACE_TESTING", allow_module_level=True)

import program_worker  # noqa: E402
import random_programs  # noqa: E402


def check(seeds: range) -> None:
    said, findings = program_worker.run_seeds(seeds)
    again = [f"python tests/python/random_programs.py {seed}  # {how}" for seed, how in findings.items()]
    assert not findings, "\n".join(again)
    assert sum(said.values()) == len(seeds)
    assert said["legal numbers"] >= 0.9 * sum(n for kind, n in said.items() if kind.startswith("legal")), said


def test_sample() -> None:
    check(range(500))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_many(part: int) -> None:
    check(range(1000 + 10_000 * part, 1000 + 10_000 * (part + 1)))


def test_a_seed_is_a_program() -> None:
    for seed in (0, 3, 7):
        assert random_programs.program(seed) == random_programs.program(seed)


def test_a_worker_that_dies_is_a_finding() -> None:
    worker = program_worker.Worker()
    assert worker.ask(1) is not None
    worker.process.kill()
    worker.process.wait()
    assert worker.ask(2) is None and worker.end() == -9
