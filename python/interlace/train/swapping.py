"""Going on with another program between two steps, on the states of the one that ran."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from interlace.compiling.programs import Built, Source
from interlace.errors import InterlaceError
from interlace.train.run import Run

log = logging.getLogger("interlace")


class Swapping:
    """The swaps of one trainer. Every rank must call them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def swap(self, texts: list[str]) -> None:
        """To rank 0's texts, of each stage one."""
        run = self._run
        with run.peers.guard():
            what = f"program of a swap at step {run.steps}"
            source = run.programs.share(what, lambda: Source(texts[0], [], {}, captured=run.source.captured, stages=texts[1:] and texts))
        self.swap_to(source)

    def take_regions(self) -> bool:
        """Before each step: with compiled regions, where the program waits for some that all ranks have now. Whether it was swapped."""
        run, regions = self._run, self._run.programs.regions
        waited = regions.waiting(run.source.waits)
        with run.peers.guard():
            regions.look()
        swapped = regions.stale(run.source.waits)
        if swapped:
            self.swap_to(dataclasses.replace(run.source))  # the same text, built again
            if run.rank == 0 and run.regions:
                log.warning("regions ready after %.1f s: swapped in at step %d", regions.seconds, run.steps + 1)
        if waited and not regions.waiting(run.source.waits):
            run.compare_regions()
        return swapped

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
        run.swaps += 1
