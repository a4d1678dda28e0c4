"""The loop around training steps: measure, plan, swap, compare with the prediction, plan again.

    schedule [(0, []), (5, ["unshard(profile={profile})"])], profile "auto":

    step   0  1  2  3  4 | 5  6  7  8 | 9 ...
              └ profile ┘ │  └ timed ┘ └ compare: more than 5 % and noise off → profile the next steps and plan again (3 times at most)
                          └ plan on rank 0, send, swap

Everything happens between steps and at steps that all ranks know beforehand, so that nobody waits for a rank that is not coming.
Optimizer states exist from the start here, so the first step changes nothing that a plan depends on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import time
from typing import Any

from interlace.compiling.planner import Planner, Prediction
from interlace.compiling.programs import ProgramError, Source
from interlace.config import format_bytes
from interlace.config.schedule import needs_profile, stage_at
from interlace.observe.profiler import Profiler, free_bytes
from interlace.train.run import Run
from interlace.train.swapping import Swapping

log = logging.getLogger("interlace")
TOLERANCE = 0.05
TIMED_STEPS = 3  # after a swap, the step that warms up left out
PROFILE_STEPS = 4  # the first of them is not counted: it may be the program's first step at all
REPLANS = 3  # of one entry of the schedule
PRESSURE_STEPS = 200  # between looks at the free memory


def _as_it_was(old: Source) -> Source:
    return Source(old.text, old.reports, {}, captured=old.captured, stages=old.stages)


class Loop:
    """What becomes of one trainer's program. `plans`: a record of each plan that was put to use."""

    def __init__(self, run: Run, planner: Planner, swapping: Swapping) -> None:
        self.run, self.planner, self.swapping = run, planner, swapping
        self.config, self.peers, self.programs = planner.config, planner.programs.peers, planner.programs
        self.schedule = self.config.schedule
        self.count = 0  # steps of this start
        self.plans: list[dict[str, Any]] = []
        self._replans = REPLANS
        self._replan_at = self._check_at = -1
        self._reason = ""
        self._profiler: Profiler | None = None
        self._recording = False
        self._seconds: list[float] = []
        self._planned = ""  # the text that steps are timed of
        self._predicted: Prediction | None = None
        self._can_measure = self.config.profile == "auto" and not self.config.debug
        self._has_profile = self.config.profile not in ("auto", "off")
        self._looked_up, self._known = -2, False

    def before_step(self, traced: bool = False) -> None:
        """Between two steps: what is due at this one. Every rank comes here at every step."""
        self.programs.loops.poll()
        if self.swapping.take_regions() and self._has_profile and self.plans:  # what all ranks know
            self._seconds, self._planned, self._check_at = [], self.run.program, self.count + 1 + TIMED_STEPS
        if self.schedule:
            if self.count == 0:
                self._begin_at_0()
            stage = stage_at(self.schedule, self.count)
            if stage != self.run.stage:
                self.run.stage, self._replans = stage, REPLANS
                self._plan("schedule")
            elif self.run.program_stage != self.run.stage:
                self._plan("shapes")
            elif self._replan_at == self.count:
                self._plan(self._reason)
            elif self._check_at == self.count:
                self._compare()
            elif self.plans and self.count % PRESSURE_STEPS == 0:
                self._look_at_memory()
            self._recording = self._profile_now() and not traced
            if self._recording:
                if self._profiler is None:
                    self._profiler = Profiler(self.peers, self.config.timeout_s, self.programs.cache_folder())
                self.run.executor.set_trace("serial")
        self._begin = time.perf_counter()

    @property
    def recording(self) -> bool:
        """Whether the step under way is recorded for a profile."""
        return self._recording

    def after_step(self, timed: bool = True) -> None:
        """`timed`: False of a step that took longer than the program does."""
        self.count += 1
        if not self.schedule:
            return
        if self._recording and self._profiler is not None:
            with self.peers.guard():
                self._profiler.add(self.run.executor, self.run.program, self.count)
            self.run.executor.set_trace("off")
        elif timed and self._check_at >= 0 and self.run.program == self._planned:
            self._seconds.append(time.perf_counter() - self._begin)

    # ---- across a restart ----

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"count": self.count, "stage": self.run.stage, "has_profile": self._has_profile}

    def go_on(self, state: dict[str, Any], programs: list[str]) -> None:
        """Takes up where state() was taken, with the programs of the stages that ran then. Every rank must call it."""
        self.count, self.run.stage = int(state["count"]), stage_at(self.schedule, int(state["count"]))
        self._has_profile = self._has_profile or bool(state["has_profile"])
        self._replan_at = self._check_at = -1
        if programs != self.run.source.texts:
            self.swapping.swap(programs)
        self.run.made_for_stage()

    # ---- what is due ----

    def _profile_now(self) -> bool:
        """Whether the step about to run is recorded: the last ones before passes that ask for times."""
        if not self._to_be_measured():
            return False
        if self._replan_at > self.count:
            return True
        following = self.schedule[self.run.stage + 1]
        if self._looked_up != self.run.stage:  # the first step of the window: a plan of an earlier start needs no times
            self._looked_up = self.run.stage
            with self.peers.guard():
                known = self.peers.rank == 0 and self.planner.has(self.run.source.captured, following[1], self.run.limit)
                word = self.peers.broadcast(f"known plan at step {self.count}", json.dumps(known).encode())
            self._known = json.loads(word)
        return not self._known

    def _to_be_measured(self) -> bool:
        """Whether the next step is one of the last before a plan that asks for times."""
        if not self._can_measure or self.count == 0:
            return False
        if self._replan_at > self.count:
            return self._replan_at - self.count <= PROFILE_STEPS
        following = self.schedule[self.run.stage + 1] if self.run.stage + 1 < len(self.schedule) else None
        return following is not None and needs_profile(following[1]) and following[0] - self.count <= PROFILE_STEPS

    def settled(self) -> bool:
        """Whether the next step is an ordinary one and nothing is due after it but the schedule's next entry."""
        if self.programs.regions.pending:
            return False
        due = (self._replan_at, self._check_at)
        return stage_at(self.schedule, self.count) == self.run.stage and max(due) < 0 and not self._to_be_measured()

    def _plan(self, reason: str) -> None:
        """Runs the passes on rank 0 and goes on with what they give on all."""
        self._replan_at = self._check_at = -1
        begin, cached = time.monotonic(), len(self.programs.cached)
        self._finish_profile()
        passes, old = self.run.planned_passes, self.run.source
        failure: list[str] = []

        def make() -> Source:
            try:
                found = self.planner.source(old.captured, passes, {}, self.run.limit, fresh=reason not in ("schedule", "shapes"))
                return found if self.planner.improves(found.texts, old.texts, self.run.limit) else _as_it_was(old)
            except ProgramError as e:
                if reason in ("schedule", "shapes"):
                    raise
                failure.append(str(e))  # the plan that runs is still a good one
                return _as_it_was(old)

        with self.peers.guard():
            source = self.programs.share(f"plan for step {self.count}", make)
        self.run.made_for_stage()
        changed = source.texts != old.texts  # of a pipeline perhaps on another stage alone
        if changed:
            self.swapping.swap_to(source)
        before = self._predict(old.texts) if changed else None
        self._predicted = self._predict(source.texts)
        record = {
            "step": self.count, "reason": reason, "passes": list(passes), "changed": changed,
            "seconds": time.monotonic() - begin, "cached": len(self.programs.cached) > cached, "program_reports": source.reports,
        }  # fmt: skip
        chosen = self._chosen(source.text)
        if chosen:
            record["chosen"] = chosen
        if failure:
            record["failure"] = failure[0]
        if before is not None and self._predicted is not None:  # on rank 0
            record["faster"] = 1 - self._predicted.step_us / before.step_us
            record["less_memory"] = 1 - self._predicted.peak_bytes / before.peak_bytes
        self.plans.append(record)
        log.info(
            "step %d: planned because of %s, %s%s", self.count, reason, "swapped" if changed else "nothing changed",
            f"; chosen: {chosen}" if chosen else "",
        )  # fmt: skip
        if self._has_profile and (changed or reason == "schedule"):
            self._seconds, self._planned = [], source.text
            self._check_at = self.count + 1 + TIMED_STEPS

    @staticmethod
    def _chosen(text: str) -> str:
        """What a search has decided, in words: "search, gradients reduced once a step, predicted 2442 ms in 412.00 MiB"."""
        found = re.search(r'^meta search.chosen "([^|"]*)\|(\d+)\|(\d+)', text, re.MULTILINE)
        return "" if found is None else f"{found[1]}, predicted {int(found[2]) / 1e3:.1f} ms in {format_bytes(int(found[3]))}"

    def _predict(self, texts: list[str]) -> Prediction | None:
        """Of a program, or of all stages', on rank 0."""
        if self.peers.rank != 0:
            return None
        with self.peers.guard():
            return self.planner.predict(texts)

    def _begin_at_0(self) -> None:
        """The first program was planned when compiling; with a given profile it is compared like any other."""
        if not self._has_profile or not needs_profile(self.run.planned_passes):
            return
        self._predicted = self._predict(self.run.source.texts)
        start = {"step": 0, "reason": "start", "changed": False, "seconds": 0.0, "cached": False}
        self.plans.append(start | {"passes": list(self.run.planned_passes)})
        self._planned, self._check_at = self.run.program, 1 + TIMED_STEPS

    def _finish_profile(self) -> None:
        if self._known and self._looked_up == self.run.stage - 1:
            self._has_profile = True  # it is in the cache beside the plan
        if self._profiler is None or self._profiler.steps == 0:
            return
        profiler, self._profiler = self._profiler, None
        stats = self.run.executor.stats()
        limit = self.programs.room
        free = free_bytes(self.peers.device, profiler.machine.ranks)
        room = free if limit is None else min(free, limit - stats["persistent_bytes"])
        with self.peers.guard(), self.programs.timed("profile"):
            found = profiler.finish(self.run.program, room, self.count, copies=self.programs.room is not None)
        if found is not None:
            self.planner.profile = found.text()
        self._has_profile = True

    # ---- comparing ----

    def _measured(self) -> list[list[Any]]:
        """[seconds of a step, peak bytes, free bytes, how far the seconds lie apart] of every rank."""
        timed = self._seconds[1:] or self._seconds or [0.0]
        seconds, apart = statistics.median(timed), max(timed) - min(timed)
        free = free_bytes(self.peers.device, int(os.environ.get("LOCAL_WORLD_SIZE", self.peers.size)))
        with self.peers.guard():
            return self.peers.exchange(f"measured at step {self.count}", [seconds, self.run.executor.stats()["peak_bytes"], free, apart])

    def _compare(self) -> None:
        """Measured against predicted, on rank 0; all ranks do what it says."""
        self._check_at = -1
        everyone = self._measured()
        words: dict[str, Any] = {"measured_us": 1e6 * max(s for s, _, _, _ in everyone), "measured_bytes": max(p for _, p, _, _ in everyone)}
        words["free_bytes"] = min(f for _, _, f, _ in everyone)
        noise = max(apart / max(s, 1e-9) for s, _, _, apart in everyone)  # of single steps: what lies within says nothing about the plan
        if self._predicted is not None and len(self._seconds) > 1 and self.run.program == self._planned:
            words |= {"predicted_us": self._predicted.step_us, "predicted_bytes": self._predicted.peak_bytes}
            words["error"] = words["predicted_us"] / words["measured_us"] - 1
            words["memory_error"] = words["predicted_bytes"] / max(1, words["measured_bytes"]) - 1
            off = [
                f"the step takes {words['measured_us'] / 1e3:.1f} ms and was predicted to take {words['predicted_us'] / 1e3:.1f} ms"
                if abs(words["error"]) > TOLERANCE + noise else "",
                f"the peak is {words['measured_bytes']} bytes and was predicted to be {words['predicted_bytes']}"
                if abs(words["memory_error"]) > TOLERANCE else "",
            ]  # fmt: skip
            words["off"] = "; ".join(o for o in off if o)
        with self.peers.guard():
            words = json.loads(self.peers.broadcast(f"comparison at step {self.count}", json.dumps(words).encode()))
        self.plans[-1] |= words
        if words.get("off"):
            log.info("step %d: %s", self.count, words["off"])
            self._plan_again(words["off"])

    def _look_at_memory(self) -> None:
        """When other programs have taken so much that the plan no longer fits, it is made again for what is left."""
        persistent = self.run.executor.stats()["persistent_bytes"]
        everyone = self._measured()
        peak, free = max(p for _, p, _, _ in everyone), min(f for _, _, f, _ in everyone)
        if persistent + free < peak and (self.run.limit is None or persistent + free < self.run.limit):
            self.run.limit = persistent + free
            self._replans = max(self._replans, 1)
            self._plan_again(f"only {free} bytes are free on a rank, the program needs {peak - persistent} in a step")

    def _plan_again(self, reason: str) -> None:
        if self._replans == 0 or not needs_profile(self.run.planned_passes):
            return
        self._replans -= 1
        self._reason = reason
        self._replan_at = self.count + (PROFILE_STEPS if self._can_measure else 1)
