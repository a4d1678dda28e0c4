"""tools/lint: the walls between rooms hold, and what crosses one is told with file, line and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = """
| room | what lives there | may include |
|---|---|---|
| `src/base` | results | - |
| `src/ir` | programs | base |
| `src/passes` | passes | ir |
| `src/trace` | timelines | base |
| `src/runtime` | executor | ir, trace |
| `src/bindings` | modules | all |
| `tools/opt`, `tools/sim` | tools | passes |
| `bench` | benchmarks | passes |
| `python/interlace` | packages | - |
| `interlace/config` | forms of values | errors |
"""


def lint(script: str, root: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "tools" / "lint" / script), str(root)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not ran.stderr
    return ran.returncode, ran.stdout.splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, "docs/architecture.md", TABLE)
    write(tmp_path, "CMakeLists.txt", "interlace_room(ir DEPS base)\ninterlace_room(passes DEPS ir)\n")
    write(tmp_path, "src/passes/shard.cc", '#include "passes/shard.h"\n\n#include <vector>\n#include "base/result.h"\n')
    write(tmp_path, "src/runtime/comm.cc", '#include <ATen/ATen.h>\n#include <sys/socket.h>\n#include "ir/program.h"\n')
    write(tmp_path, "src/bindings/core.cc", '#include <pybind11/pybind11.h>\n#include "passes/shard.h"\n')
    write(tmp_path, "src/passes/shard_test.cc", '#include "ir/testing/interpreter.h"\n')
    write(tmp_path, "tools/opt/main.cc", '#include "passes/shard.h"\n')
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_no_include_of_this_tree_crosses_a_wall() -> None:
    assert lint("walls.py", ROOT) == (0, ["walls: no include crosses one"])


def test_a_tree_that_keeps_to_its_table_passes(tree: Path) -> None:
    assert lint("walls.py", tree) == (0, ["walls: no include crosses one"])


CHANGE = "or change its row in docs/architecture.md and its DEPS"
PLANTED = {
    "a room above": (
        "src/ir/program.cc",
        "// program.cc\n#include <vector>\n\n#include \"passes/shard.h\"\n",
        "src/ir/program.cc:4: ir may include base, not passes/shard.h: passes is built on ir: move what both need down "
        f"into ir, {CHANGE}",
    ),
    "a room beside": (
        "src/trace/json.h",
        '#pragma once\n#include "ir/program.h"\n',
        "src/trace/json.h:2: trace may include base, not ir/program.h: move what both need into a room that both may "
        f"include, {CHANGE}",
    ),
    "torch": (
        "src/passes/fold.cc",
        "#include <ATen/core/Tensor.h>\n",
        "src/passes/fold.cc:1: passes may not see torch (ATen/core/Tensor.h): only src/runtime and the module _runtime "
        "do; pass plain data instead",
    ),
    "torch in _core": (
        "src/bindings/core_plan.cc",
        "#include <c10/util/Exception.h>\n",
        "src/bindings/core_plan.cc:1: bindings may not see torch (c10/util/Exception.h): only src/runtime and the module "
        "_runtime do; pass plain data instead",
    ),
    "Python": (
        "src/runtime/executor.cc",
        "#include <pybind11/pytypes.h>\n",
        "src/runtime/executor.cc:1: runtime may not see Python (pybind11/pytypes.h): only src/bindings does",
    ),
    "code for tests": (
        "src/passes/runner.cc",
        '#include "ir/testing/interpreter.h"\n',
        "src/passes/runner.cc:1: ir/testing/interpreter.h is for tests: move what is needed out of testing, or this file "
        "into it",
    ),
    "testing in the package": (
        "python/interlace/measure.py",
        "x = 1\nfrom interlace._runtime import testing\n",
        "python/interlace/measure.py:2: _runtime.testing is not in what pip installs: bind it in _runtime itself",
    ),
    "a room without a row": (
        "src/tier/file.cc",
        '#include "base/result.h"\n',
        "src/tier/file.cc: tier has no row in docs/architecture.md, Rooms: add one",
    ),
    "a link that the table does not have": (
        "CMakeLists.txt",
        "interlace_room(base)\ninterlace_room(ir DEPS base trace)\n",
        "CMakeLists.txt: ir links base, trace; docs/architecture.md lets it include base: make them the same",
    ),
    "a row that names no room": (
        "docs/architecture.md",
        TABLE.replace("executor | ir, trace", "executor | ir, trace, spam"),
        "docs/architecture.md: the row of runtime names spam, which has no row",
    ),
    "a circle": (
        "docs/architecture.md",
        TABLE.replace("results | -", "results | passes"),
        "docs/architecture.md: rooms include each other in a circle: base -> passes -> ir -> base",
    ),
}


@pytest.mark.parametrize(("path", "text", "said"), PLANTED.values(), ids=PLANTED.keys())
def test_what_crosses_a_wall_is_told(tree: Path, path: str, text: str, said: str) -> None:
    write(tree, path, text)
    assert lint("walls.py", tree) == (1, [said])


def test_files_and_sums_that_grow_too_long_are_told(tmp_path: Path) -> None:
    write(tmp_path, "src/ir/long.cc", "int x;\n" * 501)
    write(tmp_path, "src/ir/long_test.cc", "int x;\n" * 560)
    write(tmp_path, "tests/python/test_long.py", "x = 1\n" * 561)
    code, said = lint("lines.py", tmp_path)
    assert code == 1
    assert said[0].startswith("lines: C++ 501 of ")
    assert said[1:] == [
        "src/ir/long.cc: 501 lines; 500 at most: split it",
        "tests/python/test_long.py: 561 lines; 560 at most: split it",
    ]
    for i in range(100):
        write(tmp_path, f"python/interlace/m{i}.py", "x = 1\n" * 499)
    assert any(line.startswith("Python: 49,900 lines; ") for line in lint("lines.py", tmp_path)[1])
