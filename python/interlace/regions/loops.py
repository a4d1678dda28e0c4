"""The loops of captured optimizers (src/ir/rule_loop.h), compiled: one library for those of a program, made and kept as that of its regions.

    executor built ─► begin(): in the cache? ──yes──► used from the first step
                            └─no─► a process beside the training compiles (a second) ─► poll() between steps ─► used from the next one

The bits are those of the runtime's kernel that goes op after op, and it runs until then. So no rank has to know what another one
runs, and where nothing can be compiled nothing is lost but time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from interlace.regions import kept, library
from interlace.regions.beside import Making
from interlace.regions.kept import FORMAT, RegionsError, log, say_once
from interlace.regions.library import Library, Wanted, reason_of
from interlace.version import __version__

# Bits: nothing is contracted or reordered. Speed: loops become vector code where neither errno nor traps are observed, and chains of choices
# where redundancies are not looked for across branches (g++ 12 makes branches of Rprop's, ten times slower). Asking for memory ahead
# takes 2 to 6 % off NAdam, RAdam and Rprop.
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-tree-pre", "-fprefetch-loop-arrays",
    "-fPIC", "-shared", "-w",
)  # fmt: skip


@dataclasses.dataclass
class WantedLoops(Wanted):
    """The library of one file of loops."""

    text: str = ""
    what = "the loops of the optimizer"

    @classmethod
    def of_text(cls, text: str, folder: Path | None) -> WantedLoops:
        """Error: OSError."""
        parts = [text, FLAGS, FORMAT, __version__, library._cpu(), library._compiler()]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return cls([], "on", kept.place(folder), 1, key, text)

    def read(self, say: Callable[[str], None] = log.warning, seconds: float = 0.0) -> Library | None:
        if kept.read(self.path, self.key, say) is None:
            return None
        return Library(self.path, self.key, [], {}, [], seconds)

    def make(self, limit_s: float) -> tuple[dict[str, Any], bytes]:
        from torch._inductor.cpp_builder import get_cpp_compiler

        with TemporaryDirectory(prefix="interlace-regions-") as scratch:
            source, made = Path(scratch) / "loops.cpp", Path(scratch) / "loops.so"
            source.write_text(self.text)
            command = [get_cpp_compiler(), *FLAGS, str(source), "-o", str(made)]
            code, errors = kept.run_within(command, "the C++ compiler", limit_s, cwd=scratch)
            if code != 0 or not made.is_file():
                raise library.failed(code, errors)
            return {}, made.read_bytes()


class Loops:
    """Those of one trainer."""

    def __init__(self, folder: Path | None, say: Callable[[str], None] = log.warning) -> None:
        self._folder, self._say = folder, say
        self._known: set[str] = set()
        self._making: list[Making] = []

    @property
    def pending(self) -> bool:
        return bool(self._making)

    def begin(self, text: str) -> None:
        """Has the loops of a file used: now, or when they are compiled. After the executors that are to use them were built."""
        if not text or text in self._known:
            return
        self._known.add(text)
        with self._or_not():
            wanted = WantedLoops.of_text(text, self._folder)
            if (found := wanted.read(self._say)) is None:
                self._making.append(Making(wanted, " beside the training", log.info))
            else:
                self._use(found)

    def poll(self) -> None:
        """Between two steps."""
        for making in list(self._making):
            over = True
            with self._or_not():
                found = making.poll()
                over = found is not None
                if found is not None:
                    self._use(found)
            if over:
                making.close()
                self._making.remove(making)

    def close(self) -> None:
        for making in self._making:
            making.close()
        self._making.clear()

    def _use(self, found: Library) -> None:
        from interlace import _runtime

        try:
            left = _runtime.use_rule_loops(str(found.path))
        except _runtime.Error as e:
            raise RegionsError(str(e)) from None
        if left:
            raise RegionsError(f"{len(left)} of them give other bits than their ops ({', '.join(left)})")

    @contextlib.contextmanager
    def _or_not(self) -> Iterator[None]:
        try:
            yield
        except (RegionsError, OSError) as e:
            say_once(self._say, f"the loops of the optimizer are not compiled, its ops run one after the other: {reason_of(e)}")
