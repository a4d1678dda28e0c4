"""What the planner's model says of a measured run: its plan on its cluster, and that cluster with other constants."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from interlace import _core, private
from interlace.calibrate.runs import Run
from interlace.errors import InterlaceError
from interlace.version import __version__

# The constants of a software stack that runs can determine ([step.STACK] of a cluster file), and the rate between nodes.
CONSTANTS = ("products", "attention", "memory", "issue_us", "issue_backward", "inter")


def cluster_text(run: Run, base: str = "") -> str:
    """The run's cluster: its preset at its number of devices, or `base` (a cluster file's text) at that number."""
    name = f"{run.gpu}-{run.gpus}"
    text = _core.preset_cluster(name)
    if base:
        per_node = min(int(re.search(r"(?m)^per_node\s*=\s*(\d+)", base)[1]), run.gpus)  # type: ignore[index]
        text = with_line(with_line(base, "", "devices", str(run.gpus)), "", "per_node", str(per_node))
    text = with_line(text, "", "stack", f'"{run.stack}"')
    return with_line(text, "inter", "gb_per_s", f"{run.inter_gb_per_s:g}") if run.inter_gb_per_s else text


def with_constants(text: str, stack: str, constants: Mapping[str, float]) -> str:
    """The cluster with these of CONSTANTS (and "error") in place of its own; "inter" is a factor of the rates between nodes."""
    for name, value in constants.items():
        if name == "inter":
            for key in ("gb_per_s", "tree_gb_per_s", "tree_pair_gb_per_s", "all_reduce_gb_per_s"):
                own = value_of(text, "inter", key)
                text = text if own is None else with_line(text, "inter", key, f"{own * value:.6g}")
        else:
            text = with_line(text, f"step.{stack}", name, f"{value:.6g}")
    return text


def value_of(text: str, table: str, key: str) -> float | None:
    """A number of a cluster file."""
    begin, end = _table(text, table)
    found = re.search(rf"(?m)^{re.escape(key)}\s*=\s*([-+0-9.e]+)", text[begin:end]) if begin >= 0 else None
    return float(found[1]) if found else None


def _table(text: str, table: str) -> tuple[int, int]:
    """Where a table's lines begin and end; (-1, -1) without it."""
    if not table:
        return 0, (found.start() if (found := re.search(r"(?m)^\[", text)) else len(text))
    found = re.search(rf"(?m)^\[{re.escape(table)}\][^\n]*\n", text)
    if not found:
        return -1, -1
    following = re.search(r"(?m)^\[", text[found.end() :])
    return found.end(), found.end() + following.start() if following else len(text)


def with_line(text: str, table: str, key: str, value: str) -> str:
    """The text with `key = value` in that table, in place of the line that says it."""
    begin, end = _table(text, table)
    if begin < 0:
        return f"{text.rstrip()}\n\n[{table}]\n{key} = {value}\n"
    part, count = re.subn(rf"(?m)^{re.escape(key)}\s*=[^#\n]*", f"{key} = {value}  ", text[begin:end])
    if not count:
        part = f"{key} = {value}\n" + text[begin:end]
    return text[:begin] + re.sub(r"(?m) +$", "", part) + text[end:]


def plan_text(run: Run, blocks: int) -> str:
    """The plan that the run was: stages of as many blocks each as come out even, the first ones one more."""
    each, more = divmod(blocks, run.pp)
    node = min(8, run.gpus)
    lines = [
        "interlace-plan 1", f'model "{run.size}"', 'cluster "measured"', f"devices {run.gpus} per_node {node}", f"blocks {blocks}",
        f"global_batch {run.global_batch}", f"sequence {run.seq}", f"flash_attention {'yes' if run.flash else 'no'}",
        'dtype "bfloat16"', f"memory_limit {2**40}", "template overlap", f"accumulation {run.accumulation}", 'space "full"',
    ]  # fmt: skip
    width = run.dp * run.tp
    for stage in range(run.pp):
        count = each + (stage < more)
        ends = (" embedding" if stage == 0 else "") + (" head" if stage == run.pp - 1 else "")
        recomputed = {name: count if run.recompute == name else 0 for name in ("full", "selective")}
        lines += [
            f"stage {stage}", f"  layers {count}{ends}", f"  devices {stage * width}..{(stage + 1) * width - 1}",
            f"  micro_batch {run.micro_batch} dp {run.dp} tp {run.tp}", f"  zero {run.zero}",
            f"  recompute full {recomputed['full']} selective {recomputed['selective']}",
            "  offload weights 0 gradients 0 states 0 activations 0",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def model_lines(run: Run) -> str:
    """The text of the run's layers (interlace.plan.layers), kept in the cache folder: tracing takes seconds."""
    import torch
    import transformers

    shape = [run.model] if run.model else ["gpt2", run.hidden, run.heads, run.vocab, run.tied]
    key = json.dumps([*shape, run.flash, __version__, torch.__version__, transformers.__version__])
    file = private.user_folder() / "layers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.txt"
    if not file.exists():
        text = _traced(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        private.write(file, text.encode())
    text = file.read_text()
    return re.sub(r"(?m)^blocks \d+$", f"blocks {run.layers}", text, count=1) if run.layers else text


def _traced(run: Run) -> str:
    from interlace.plan.layers import model_text

    if run.model:
        return model_text(run.model, seq=run.seq, flash=run.flash)
    config = {
        "model_type": "gpt2", "n_embd": run.hidden, "n_layer": 1, "n_head": run.heads, "vocab_size": run.vocab, "n_positions": 8192,
        "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": run.tied,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        return model_text(str(file), flash=run.flash)


class Predictor:
    """Predictions of runs; models are read once."""

    def __init__(self, base: str = "") -> None:
        self.base = base
        self._models: dict[tuple[Any, ...], Any] = {}
        self._texts: dict[tuple[Any, ...], tuple[str, int]] = {}

    def _of(self, run: Run) -> tuple[Any, int]:
        key = (run.size, run.heads, run.vocab, run.flash)
        if key not in self._texts:
            text = model_lines(run)
            self._texts[key] = text, int(re.search(r"(?m)^blocks (\d+)$", text)[1])  # type: ignore[index]
        text, blocks = self._texts[key]
        place = (*key, run.seq)
        if place not in self._models:
            self._models[place] = _core.PlanPredictor(text, run.seq)
        return self._models[place], blocks

    def predict(self, run: Run, constants: Mapping[str, float] | None = None) -> tuple[float, int, float]:
        """us of a step, bytes of a device with what the cluster reserves, standard deviation of ln(measured / predicted)."""
        predictor, blocks = self._of(run)
        try:
            text = with_constants(cluster_text(run, self.base), run.stack, constants or {})
            us, peak, error = predictor.run(plan_text(run, blocks), text)
        except _core.Error as e:
            raise InterlaceError(f"line {run.line} is no run that can be predicted: {e}") from None
        fill = run.pp - 1  # micro-batches that a step waits for its pipeline; parts of stages fill it in as many times less
        us *= (run.accumulation + fill / run.interleave) / (run.accumulation + fill)
        return us, peak + int((value_of(text, "device", "reserve_gib") or 0) * 2**30), error


def errors(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Mean and worst of |predicted / measured - 1|."""
    all_of = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return (math.fsum(all_of) / len(all_of), max(all_of)) if all_of else (math.nan, math.nan)
