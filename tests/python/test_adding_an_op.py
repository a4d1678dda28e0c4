"""The example of docs/adding_an_op.md, applied to a copy of the sources: it changes what the page says and nothing else, builds, and a
program with the new op is verified and interpreted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding_an_op.md").read_text()
EXAMPLE = re.search(r"^```diff\n(.*?)^```", PAGE, flags=re.M | re.S)[1]  # type: ignore[index]
STEPS = PAGE[PAGE.index("## An op of our own") : PAGE.index("### The example")]

MAIN = r"""
#include <iostream>
#include <iterator>
#include "ir/testing/interpreter.h"
#include "ir/text.h"
#include "ir/verifier.h"
using namespace interlace;
int main() {
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  Result<Program> program = Parse(text);
  if (!program.ok()) return std::cout << program.error().ToString(), 1;
  if (Status status = Verify(*program); !status.ok()) return std::cout << status.error().ToString(), 1;
  if (Print(*program) != text) return std::cout << Print(*program), 1;
  Result<testing::RunResult> result = testing::Interpret(*program);
  if (!result.ok()) return std::cout << result.error().ToString(), 1;
  for (const char* name : {"x", "y"}) {
    for (double v : result->outputs[name][0]) std::cout << v << " ";
  }
}
"""
PROGRAM = """interlace 1 captured
step 1 reduce_each
input %0: f32[3] "x"
phase micro_batch takes () gives () {
  output(%0) {fwd name="x"}
  %1: f32[SIZE] = negate(%0) {fwd}
  output(%1) {fwd name="y"}
}
"""


def apply(folder: Path) -> None:
    subprocess.run(["git", "apply", "-p1", "-C1", "-"], cwd=folder, input=EXAMPLE, text=True, check=True)


def compile_in(folder: Path, *arguments: str) -> None:
    subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-Isrc", *arguments], cwd=folder, check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The program above over the changed sources."""
    folder = tmp_path_factory.mktemp("op")
    for room in ("src/base", "src/ir", "src/runtime"):
        shutil.copytree(ROOT / room, folder / room)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "ir.md", folder / "docs")
    apply(folder)
    sources = [f for room in ("base", "ir") for f in sorted((folder / "src" / room).rglob("*.cc"))]
    sources = [f for f in sources if not re.search(r"_(test|fuzz)\.cc$", f.name)]
    apart = [f for f in sources if f.name == "dim.cc"]  # has names of its own that others have, too
    for name, files in ("main", [f for f in sources if f not in apart]), ("dim", apart):
        text = "".join(f'#include "{f.relative_to(folder / "src")}"\n' for f in files)
        (folder / f"{name}.cc").write_text(text + (MAIN if name == "main" else ""))
    compile_in(folder, "-O0", "main.cc", "dim.cc", "-pthread", "-o", "example")
    return folder / "example"


def run(example: Path, size: int) -> str:
    return subprocess.run([example], input=PROGRAM.replace("SIZE", str(size)), capture_output=True, text=True).stdout


def test_the_new_op_is_known_verified_and_interpreted(built: Path) -> None:
    numbers = [float(word) for word in run(built, 3).split()]
    assert len(numbers) == 6 and numbers[3:] == [-x for x in numbers[:3]] and any(numbers)
    assert "negate keeps the sizes of its operand" in run(built, 4)


def test_the_kernel_compiles(built: Path) -> None:
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    compile_in(built.parent, "-fsyntax-only", f"-I{ROOT / 'src'}", *includes, "src/runtime/op_kernel_own.cc")


def test_the_example_changes_what_the_steps_name() -> None:
    changed = set(re.findall(r"^\+\+\+ b/(\S+)", EXAMPLE, flags=re.M))
    named = set(re.findall(r"`(src/[\w/*.]+)`", STEPS))
    for file in changed - {"docs/ir.md"}:
        assert any(Path(file).match(pattern) for pattern in named), f"the steps of docs/adding_an_op.md do not name {file}"
