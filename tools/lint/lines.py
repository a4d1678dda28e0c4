"""Counts lines, and fails above the limits below: what grows must make something else smaller.

    python3 tools/lint/lines.py [ROOT]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CPP = 65_605  # src and tools, without tests and code for tests; to become 42,000
PYTHON = 36_995  # to become 16,500
FILE, TEST_FILE = 500, 560  # one file; split it by what it says, not in the middle
FOR_TESTS = re.compile(r"_(test|fuzz)\.cc$|/testing/|_test_support\.h$")


def check(root: Path) -> tuple[str, list[str]]:
    """What was counted, in a line, and what is too long."""
    faults = []
    total = {"C++": 0, "Python": 0}
    counted = {"src": "C++", "tools": "C++", "python/interlace": "Python", "tests": "", "bench": ""}
    for top, kind in counted.items():
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in (".h", ".cc", ".inc", ".py"):
                continue
            path = file.relative_to(root).as_posix()
            lines = len(file.read_text().splitlines())
            shipped = bool(kind) and not FOR_TESTS.search(path) and (kind == "Python") == (file.suffix == ".py")
            if shipped:
                total[kind] += lines
            limit = TEST_FILE if FOR_TESTS.search(path) or top == "tests" else FILE
            if lines > limit:
                faults.append(f"{path}: {lines} lines; {limit} at most: split it")
    for kind, limit in ("C++", CPP), ("Python", PYTHON):
        if total[kind] > limit:
            faults.append(f"{kind}: {total[kind]:,} lines; {limit:,} at most")
    return f"lines: C++ {total['C++']:,} of {CPP:,}, Python {total['Python']:,} of {PYTHON:,}", faults


def main() -> None:
    said, faults = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
    print("\n".join([said, *faults]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
