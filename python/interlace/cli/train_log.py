"""Where the figures of a run go: lines of JSON (--log), TensorBoard (--tensorboard), Weights & Biases (--wandb, offline by default).

Of each step: loss, lr, norm, seconds, tokens_per_second, memory_bytes. Of evaluations: eval_loss. Of plans: what changed, what it gained.
What cannot be written is said once and costs the log, not the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import IO, Any

from interlace.cli.console import seconds
from interlace.cli.settings import SettingError, TrainSettings

Say = Callable[[str], None]


class JsonLines:
    def __init__(self, file: str, mode: str) -> None:
        self.name = file
        self.out: IO[str] = open(file, mode, buffering=1)  # noqa: SIM115 (kept open, and closed by close)

    def write(self, step: int, facts: dict[str, Any]) -> None:
        self.out.write(json.dumps({"step": step, **facts}) + "\n")

    def close(self) -> None:
        self.out.close()


class TensorBoard:
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.name = folder
        self.writer = SummaryWriter(folder)

    def write(self, step: int, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, step)
            elif name == "plan":
                self.writer.add_text(name, str(value), step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, settings: dict[str, Any], folder: str) -> None:
        import wandb

        self.name = project
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(silent=True, console="off")
        self.run = wandb.init(project=project, mode=mode, config=settings, dir=folder, settings=quiet)

    def write(self, step: int, facts: dict[str, Any]) -> None:
        self.run.log(facts, step=step)

    def close(self) -> None:
        self.run.finish()


class Log:
    """All of them for one run; on rank 0."""

    def __init__(self, settings: TrainSettings, first_step: int, say: Say) -> None:
        self._say = say
        self._told: list[bool] = []  # of each plan, whether its gain was measured when it was written
        self._regions: dict[str, int] = {}  # as told
        self._open: list[Any] = []
        known = {k: v for k, v in vars(settings).items() if v is not None}
        mode = "w" if settings.own_log and first_step == 0 else "a"
        for given, make in (
            (settings.log, lambda file: JsonLines(file, mode)), (settings.tensorboard, TensorBoard),
            (settings.wandb, lambda project: WeightsAndBiases(project, known, settings.save or ".")),
        ):  # fmt: skip
            if given is not None:
                with self._forgiving(given):
                    self._open.append(make(given))

    def __bool__(self) -> bool:
        return bool(self._open)

    def write(self, step: int, **facts: Any) -> None:
        for sink in list(self._open):
            with self._forgiving(sink.name, sink):
                sink.write(step, facts)

    def plans(self, plans: list[dict[str, Any]]) -> None:
        """Each plan when it is made, with what it gains."""
        for plan in plans[len(self._told) :]:
            self._told.append(True)
            if plan["reason"] != "start":
                words = {k: plan[k] for k in ("reason", "changed", "chosen", "faster", "less_memory") if plan.get(k) is not None}
                self.write(plan["step"], plan=gained(plan), **{f"plan_{k}": v for k, v in words.items()})

    def regions(self, step: int, found: dict[str, int]) -> None:
        """How many are compiled, and since when, whenever it changes."""
        if found != self._regions:
            self._regions = found
            self.write(step, regions=found)

    def close(self) -> None:
        for sink in self._open:
            with self._forgiving(sink.name, sink):
                sink.close()
        self._open = []

    @contextlib.contextmanager
    def _forgiving(self, name: str, sink: Any = None) -> Any:
        try:
            yield
        except Exception as e:
            if sink in self._open:
                self._open.remove(sink)
            why = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
            self._say(f"warning: cannot write {name}: {why}; training goes on without it")


def check(settings: TrainSettings) -> None:
    """Error: a library that an option needs is not installed."""
    import importlib.util

    for option, given, module in (("tensorboard", settings.tensorboard, "tensorboard"), ("wandb", settings.wandb, "wandb")):
        if given is not None and importlib.util.find_spec(module) is None:
            raise SettingError(f"--{option} needs the package {module}: pip install {module}, or leave it out (--log writes lines of JSON)")


def gained(plan: dict[str, Any]) -> str:
    """ "planned in 2.1 s: another program, 12 % faster and 3 % less memory than the one before, as predicted"."""
    again = "" if plan["reason"] == "schedule" else f" again ({plan['reason']})"
    line = f"planned{again} in {seconds(plan['seconds'])}: {'another program' if plan['changed'] else 'the same program'}"
    if plan["changed"] and plan.get("faster") is not None:
        by = ((plan["faster"], "faster", "slower"), (plan["less_memory"], "less memory", "more memory"))
        parts = [f"{abs(100 * share):.0f} % {gain if share > 0 else loss}" for share, gain, loss in by if round(100 * share)]
        line += f", {' and '.join(parts)} than the one before, as predicted" if parts else ", as fast and as large as the one before"
    return line
