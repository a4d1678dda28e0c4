"""Going on with another program between two steps, on the states of the one that ran."""

from __future__ import annotations

from collections.abc import Callable

from interlace.compiling.programs import Built, Source
from interlace.errors import InterlaceError
from interlace.train.run import Run


class Swapping:
    """The swaps of one trainer. Every rank must call them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def swap(self, text: str) -> None:
        """To rank 0's text."""
        run = self._run
        with run.peers.guard():
            what = f"program of a swap at step {run.steps}"
            source = run.programs.share(what, lambda: Source(text, [], {}, captured=run.source.captured))
        self.swap_to(source)

    def swap_to(self, source: Source) -> None:
        run = self._run
        with run.peers.guard():
            run.programs.compare_digests(source)
        run.flush()
        found: list[Built] = []

        def check() -> Callable[[], None]:
            found.append(run.programs.build(source, donor=run.executor))
            return lambda: run.use(found[0])

        run.settle_save()
        run.agree(f"swap {run.swaps} at step {run.steps}", check, InterlaceError)()
        run.runner = run.executor
        run.swaps += 1
