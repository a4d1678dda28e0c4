"""What rank 0 shows of a training run: a bar on a terminal, lines `step N loss X` elsewhere, then a summary."""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from interlace.cli.console import count, err, print_facts, seconds
from interlace.cli.train_log import gained
from interlace.cli.validation import words
from interlace.config import format_bytes

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40


class TrainView:
    """Progress of the steps. The rate is that of the last ten steps, so that it tells the present."""

    def __init__(self, first_step: int, steps: int, tokens_per_step: int, log_every: int):
        self.first_step, self.steps = first_step, steps
        self.tokens_per_step, self.log_every = tokens_per_step, log_every
        self.console: Console = err()
        self.bar: Progress | None = None
        self.task: Any = None
        self.recent: list[float] = []
        self.shown: list[dict[str, Any]] = []  # plans, as far as they have been told

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> TrainView:
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
                TextColumn("{task.fields[rate]} tokens/s"), TimeRemainingColumn(), TextColumn("left"),
                console=self.console,
            )  # fmt: skip
            self.task = self.bar.add_task("train", total=self.steps, completed=self.first_step, loss="-", rate="-")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def plans(self, plans: Sequence[dict[str, Any]]) -> None:
        """Tells each new plan, and what it was measured to be once that is known."""
        for number, plan in enumerate(plans):
            if number == len(self.shown):
                self.shown.append({})
                if plan["reason"] != "start":
                    self.say(f"step {plan['step']}: {gained(plan)}")
            if "measured_us" in plan and not self.shown[number]:
                self.shown[number] = dict(plan)
                line = f"step {plan['step']}: measured {plan['measured_us'] / 1e3:.1f} ms, {format_bytes(plan['measured_bytes'])}"
                if "predicted_us" in plan:
                    line += f"; predicted {plan['predicted_us'] / 1e3:.1f} ms, {format_bytes(plan['predicted_bytes'])}"
                self.say(line)

    def step(self, step: int, loss: float, step_seconds: float) -> None:
        """Step number `step` (from 0) is done."""
        self.recent = [*self.recent[-9:], step_seconds]
        rate = self.tokens_per_step * len(self.recent) / max(sum(self.recent), 1e-9)
        if self.bar is not None:
            self.bar.update(self.task, completed=step + 1, loss=f"{loss:.3f}", rate=f"{rate:,.0f}")
            return
        done = step + 1
        if done % self.log_every == 0 or step == self.first_step or done == self.steps:
            self.say(f"step {done} loss {loss:.4f}")

    def evaluated(self, step: int, loss: float) -> None:
        """The loss of --eval-text after step number `step`."""
        self.say(f"step {step + 1} eval loss {words(loss)}")


def curve(losses: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """The losses as a line of blocks, each the mean of its part of the run."""
    values = [loss for loss in losses if math.isfinite(loss)]
    if len(values) < 2:
        return ""
    cells = min(width, len(values))
    means = [statistics.fmean(values[i * len(values) // cells : (i + 1) * len(values) // cells]) for i in range(cells)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def print_summary(summary: dict[str, Any]) -> None:
    """The figures of a finished run on stdout."""
    first, last = summary["first_loss"], summary["last_loss"]
    line = curve(summary["losses"])
    shown = line if _can_show(line) else ""
    rows = {
        "model": f"{summary['model']}, {count(summary['parameters'])} parameters, {summary['dtype']}",
        "ranks": f"{summary['ranks']}, {summary['strategy']}, {summary['threads']} thread(s) each",
        "steps": f"{summary['steps']} (number {summary['first_step'] + 1} to {summary['last_step']}), "
        f"{summary['tokens_per_step']:,} tokens each, in {seconds(summary['train_seconds'])}",
        "loss": f"{first:.4f} → {last:.4f}  ({last / first:.2f} x)  {shown}",
        **({"eval loss": words(list(summary["eval_losses"].values())[-1])} if summary["eval_losses"] else {}),
        **({"text read": f"up to {summary['text_read']}"} if "text_read" in summary else {}),
        "speed": f"{summary['tokens_per_second']:,.0f} tokens/s, median step {summary['step_ms']:.1f} ms",
        "before training": f"text {seconds(summary['text_seconds'])}, compile {seconds(summary['compile_seconds'])}",
        "peak memory": f"{format_bytes(summary['peak_bytes'])} by the allocator (the last program), "
        f"{format_bytes(summary['resident_bytes'])} resident (largest of the ranks)",
        "communicated": f"{format_bytes(summary['bytes_per_step'])} received a step by each rank",
    }
    planned = summary.get("planned")
    if planned is not None and planned["step_us"] > 0:
        error = planned["step_us"] / 1e3 / summary["step_ms"] - 1
        rows["planned"] = (
            f"{planned['step_us'] / 1e3:.1f} ms a step ({100 * error:+.1f} %), {format_bytes(planned['peak_bytes'])} "
            f"({100 * (planned['peak_bytes'] / max(1, summary['peak_bytes']) - 1):+.1f} %), by {planned['file']}"
        )
    unit = summary["largest_unit"]
    if unit["name"]:
        rows["largest unit"] = f"{unit['name']}, {format_bytes(unit['bytes'])}"
    if summary["not_cut"]:
        rows["not cut"] = "; ".join(summary["not_cut"])
    rows["saved"] = summary["saved"] or "nothing (--save FOLDER keeps the model)"
    if summary["saved"]:
        rows["as a page"] = shlex.join(["interlace", "report", summary["saved"], "-o", "run.html"])
    print_facts(rows)


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
