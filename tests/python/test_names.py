"""Ops of our own are told apart by their kind and phases by what they run for: nobody compares names outside the table of ops, the
parser and the printer.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY = re.compile(r"src/ir/(op_table|parse\w*|print)\.(cc|h)$|_test\.cc$|/testing/|_test_support\.h$")
PHASES = ("micro_batch", "micro_batch.first", "micro_batch.middle", "micro_batch.last", "update")
EQUAL = re.compile(r'\bname\s*[=!]=\s*"([^"]*)"')
PART = re.compile(r'\bname\.(?:starts_with|ends_with|find|compare)\(\s*"([^"]*)"')
FOUND_BY_NAME = re.compile(r'\bFindPhase\("')


def own_ops() -> set[str]:
    """The names in the table of ops."""
    text = (ROOT / "src/ir/op_table.cc").read_text()
    names = set(re.findall(r'\(k\w+,\s*"([a-z_.0-9]+)"', text)) | set(re.findall(r'\.name = "([a-z_.0-9]+)"', text))
    assert {"view", "gather.start", "recv.wait", "update.adamw", "call.python", "offload.wait"} <= names
    return names


def compared(text: str, ops: set[str]) -> list[tuple[int, str]]:
    """(line, name) of every comparison with the name of an op of ours, a part of one, or a phase's name."""
    parts = {name.split(".")[0] + "." for name in ops if "." in name} | {".start", ".wait", "micro_batch", "update"}
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [(number, name) for name in EQUAL.findall(line) if name in ops or name in PHASES]
        found += [(number, name) for name in PART.findall(line) if name in parts]
        found += [(number, "FindPhase") for _ in FOUND_BY_NAME.findall(line)]
    return found


def test_nobody_compares_names_of_ops_and_phases() -> None:
    ops = own_ops()
    files = [f for room in ("src", "tools") for f in (ROOT / room).rglob("*") if f.suffix in (".cc", ".h")]
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        if not MAY.search(file.relative_to(ROOT).as_posix())
        for line, name in compared(file.read_text(), ops)
    ]
    assert wrong == [], "ask op.kind, TraitsOf(op) or phase.kind instead"


@pytest.mark.parametrize(
    "line",
    [
        'if (op.name == "release") return;',
        'if (op.name != "gather.start" && x) return;',
        'bool waits = op.name.ends_with(".wait");',
        'if (program.op(id).name.starts_with("update.")) ++n;',
        'if (phase.name != "update") Inputs();',
        'Phase* phase = program.FindPhase("micro_batch");',
    ],
)
def test_a_planted_comparison_is_found(line: str) -> None:
    assert compared(f"\n{line}\n", own_ops()), line


def test_names_of_a_librarys_operators_may_be_compared() -> None:
    assert compared('if (op.name == "aten.mm" || input.name == "labels") return;', own_ops()) == []
