"""Search from the command line: what it decides is in the program file, and `interlace explain` shows it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import commands
import pytest

from interlace import _core


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(*arguments)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("explain") / "model.il"
    done = command("capture", "--model", "llama-tiny", "--micro-batch", "2", "--seq", "32", "-o", str(file))
    assert done.returncode == 0, done.stderr
    return file


def searched(captured: Path, search: str) -> _core.Program:
    program = _core.Program.parse(captured.read_text(), str(captured))
    sizes = {"b": 2, "s": 32}
    bound = {symbol["name"]: sizes[symbol["name"]] for symbol in program.symbols()}
    if bound:
        program = program.bind(bound)
    program.run_passes(f"canonicalize,shard(ranks=8,ahead=0),accumulate(steps=2),update(clip=1.0),{search}")
    return program


def test_a_searched_program_explains_itself(captured: Path, tmp_path: Path) -> None:
    program = searched(captured, "search(cluster=l4-24gb-8,evaluations=120)")
    file = tmp_path / "program.il"
    file.write_text(program.print())
    done = command("explain", str(file))
    assert done.returncode == 0, done.stderr
    for words in ("no schedule is faster than", "schedules were simulated", "decided (", "what each decision is worth",
                  "rejected", "bucket by module, reorder", "memory against time", "chosen"):  # fmt: skip
        assert words in done.stdout, done.stdout
    told = json.loads(command("explain", "--json", str(file)).stdout)
    name, time_us, peak_bytes = told["search.chosen"].split("|")[:3]
    simulated = _core.Simulator(program).run("l4-24gb-8")
    assert int(time_us) == pytest.approx(simulated.step_us, abs=1.0), name
    assert int(peak_bytes) == json.loads(simulated.json())["memory"]["peak_bytes"]


def test_more_memory_is_never_slower_and_the_limit_is_obeyed(captured: Path) -> None:
    front = searched(captured, "search(cluster=l4-24gb-8,evaluations=120)").meta()["search.front"].splitlines()
    sizes = [int(line.split("|")[2]) for line in front]
    last = float("inf")
    for limit in (sizes[0], (sizes[0] + sizes[-1]) // 2, sizes[-1]):
        meta = searched(captured, f"search(cluster=l4-24gb-8,evaluations=120,limit={limit})").meta()
        time_us, peak_bytes = (int(x) for x in meta["search.chosen"].split("|")[1:3])
        assert peak_bytes <= limit
        assert time_us <= last
        last = time_us
    with pytest.raises(
        _core.Error, match=rf"nothing fits into the limit of {sizes[0] // 2} bytes: the smallest .* needs"
    ):
        searched(captured, f"search(cluster=l4-24gb-8,evaluations=30,limit={sizes[0] // 2})")


def test_a_program_without_a_search_says_how_to_make_one(captured: Path) -> None:
    done = command("explain", str(captured))
    assert done.returncode == 1
    assert "was not made by a search; run the pass search" in done.stderr
