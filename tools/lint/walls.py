"""Which room includes which: fails on an include that crosses a wall, with file, line and what to do.

    python3 tools/lint/walls.py [ROOT]

The table is the one of docs/architecture.md, "Rooms": a room may include what its row names, and what those may include. So a
new room is a row there and an interlace_room() in CMakeLists.txt, which must say the same. Beside that:

    torch, ATen, c10     in src/runtime and in the files of the module _runtime only
    pybind11             in src/bindings only
    code for tests       (testing/, *_test_support.h) from tests only; python/interlace does without `_runtime.testing`
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TABLE = "docs/architecture.md"
SOURCES = (".h", ".cc", ".inc")
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
SEES_TORCH = re.compile(r"src/(runtime|bindings)/(?!core)")
FOR_TESTS = re.compile(r"/testing/|_test_support\.h$")
TESTS = re.compile(r"/testing/|_test_support\.h$|_(test|fuzz)\.cc$|^bench/")
Table = dict[str, set[str]]


def closure(table: Table) -> Table:
    """What each room may include through others as well; itself too."""

    def reach(room: str, above: tuple[str, ...]) -> set[str]:
        if room in above:
            raise ValueError(f"{TABLE}: rooms include each other in a circle: {' -> '.join([*above, room])}")
        return {room}.union(*(reach(below, (*above, room)) for below in table.get(room, ())))

    return {room: reach(room, ()) for room in table}


def rooms(text: str) -> Table:
    """The rows `src/...`, `tools/...` and `bench` of the Rooms table: a room by name, and what it names itself. Rows `interlace/...` are
    of Python's packages (tests/python/test_imports.py)."""
    table: Table = {}
    for first, last in re.findall(r"^\| (`[^|]*) \|.*\| ([^|]+) \|$", text, re.MULTILINE):
        for name in re.findall(r"`(?:src/(?=\w+`)|(?=tools/|bench`))([\w/-]+)`", first):
            table[name] = set(re.findall(r"[\w/-]*\w", last))
    everything = {name for name in table if "/" not in name}
    return {name: everything - {name} if below == {"all"} else below for name, below in table.items()}


def linked(text: str) -> Table:
    """What interlace_room() links: CMakeLists.txt."""
    calls = re.findall(r"^interlace_room\((\w+)(?: DEPS ([\w ]+))?", text, re.MULTILINE)
    return {name: set(below.split()) for name, below in calls}


def room_of(path: str) -> str:
    parts = path.split("/")
    return {"src": parts[1], "bench": "bench"}.get(parts[0], "/".join(parts[:2]))


def crossing(path: str, target: str, may: Table) -> str | None:
    """What is wrong with `#include "target"` or `<target>` in a file, and what to do."""
    room = room_of(path)
    if TORCH.match(target):
        if SEES_TORCH.match(path):
            return None
        return f"{room} may not see torch ({target}): only src/runtime and the module _runtime do; pass plain data instead"
    if target.startswith("pybind11/"):
        return None if room == "bindings" else f"{room} may not see Python ({target}): only src/bindings does"
    if "/" not in target:
        return None
    to = target.split("/")[0]
    if to not in may:
        return None  # of the system
    if FOR_TESTS.search(target) and not TESTS.search(path):
        return f"{target} is for tests: move what is needed out of testing, or this file into it"
    if to in may[room]:
        return None
    if room in may[to]:
        do = f"{to} is built on {room}: move what both need down into {room}"
    else:
        do = "move what both need into a room that both may include"
    names = ", ".join(sorted(may[room] - {room})) or "nothing"
    return f"{room} may include {names}, not {target}: {do}, or change its row in {TABLE} and its DEPS"


def includes(file: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if found := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
            yield number, found[1]


def check(root: Path) -> list[str]:
    """Every fault under a folder, as `file:line: what`."""
    table = rooms((root / TABLE).read_text())
    try:
        may = closure(table)
    except ValueError as circle:
        return [str(circle)]
    faults = [
        f"{TABLE}: the row of {name} names {room}, which has no row"
        for name, below in table.items()
        for room in sorted(below - table.keys())
    ]
    cmake = root / "CMakeLists.txt"
    for name, below in closure(linked(cmake.read_text())).items() if cmake.exists() else ():
        if below != may.get(name):
            says = ", ".join(sorted(may.get(name, set()) - {name})) or "nothing"
            links = ", ".join(sorted(below - {name})) or "nothing"
            faults.append(f"CMakeLists.txt: {name} links {links}; {TABLE} lets it include {says}: make them the same")
    for file in sorted(f for top in ("src", "tools", "bench") for f in (root / top).rglob("*") if f.suffix in SOURCES):
        path = file.relative_to(root).as_posix()
        if room_of(path) not in may:
            faults.append(f"{path}: {room_of(path)} has no row in {TABLE}, Rooms: add one")
            continue
        for number, target in includes(file):
            if fault := crossing(path, target, may):
                faults.append(f"{path}:{number}: {fault}")
    for file in sorted((root / "python" / "interlace").rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if re.search(r"\b_runtime(\.testing\b| import testing\b)", line):
                path = file.relative_to(root).as_posix()
                faults.append(f"{path}:{number}: _runtime.testing is not in what pip installs: bind it in _runtime itself")
    return faults


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    faults = check(root)
    print("\n".join(faults) if faults else "walls: no include crosses one")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
