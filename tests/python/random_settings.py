"""Random settings of whole trainings: mesh, strategy, order, passes, tiers, optimizer, batches of other forms, evaluation and a checkpoint
that another setting goes on from, each held against plain PyTorch in one process.

    python tests/python/random_settings.py [--seeds 0:40] [--ranks 4] [--show]

What is drawn must train with the numbers of one process (float64, 1e-7) or be refused when it is compiled; a refusal is printed, for somebody
to judge. Nothing here knows which settings go together.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import parity
import ranks
import tensor_models
import torch
import torch.distributed as dist

import interlace
from interlace.errors import InterlaceError

STEPS = 14
BOUND = 1e-7  # Adam makes much of gradients near zero, of which thirds of a mean are rounded
MESHES: dict[int, list[Any]] = {
    1: [None],
    2: [None, {"tp": 2}, {"pp": 2}, {"replica": 2, "dp": 1}],
    4: [
        None, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"pp": 2, "tp": 2},
        {"replica": 2, "dp": 2}, {"pp": 2, "dp": (2, 2)},
    ],
    3: [None, {"pp": 3}, {"pp": 2, "dp": (2, 1)}, {"pp": 2, "tp": (1, 2)}, {"pp": 2, "tp": (2, 1)}, {"pp": 2, "dp": (1, 2)}],
}  # fmt: skip
PASSES = (
    ["recompute(mode=full)"], ["recompute(mode=selective)"], ["unshard(units=all)"], ["prefetch(prefetch=20KB,alpha=1)", "overlap_update"],
    ["reorder"], ["overlap_update"], ["breadth_first(micro_batches=2)"], ["split(parts=2)"], ["search(evaluations=40)"],
    ["recompute(mode=full)", "reposition_update"], ["host_update(share=0.5)"], ["offload_sync(cluster={cluster},kinds=states)"],
)  # fmt: skip


def drawn(seed: int, size: int) -> dict[str, Any]:
    """A setting: the model, the optimizer, Config's settings, and what is done between steps."""
    draw = random.Random(seed * 10 + size)

    def one(*values: Any) -> Any:
        return draw.choice(values)

    mesh = draw.choice(MESHES[size])
    stages = mesh is not None and "pp" in mesh
    config: dict[str, Any] = {
        "mesh": mesh, "accumulation": one(2, 4, 4) if stages else one(1, 1, 2, 4), "clip_norm": one(None, 0.3),
        "strategy": one("auto", "shard", "zero1", "replicate"), "accumulate_mode": one("auto", "reduce_each", "reduce_last"),
    }  # fmt: skip
    rare = {
        "arena": False, "skip_nonfinite": True, "deterministic": True, "sequence_parallel": False, "verify_steps": 2, "regions": "exact",
        "memory_limit": "1GiB", "tier": "host", "device_graphs": False,
    }  # fmt: skip
    config |= {name: value for name, value in rare.items() if draw.random() < (0.04 if name == "regions" else 0.12)}
    if "tier" in config and draw.random() < 0.5:
        config["memory_limit"] = "1GiB"
    if stages:
        config["stage_order"] = one("auto", "auto", "1f1b", "gpipe", "zero_bubble", "v", "interleaved")
        config["stage_chunks"] = 2 if config["stage_order"] == "interleaved" else 1
    how = draw.random()
    if how < 0.35:  # the loop: profile, search, swap
        config |= {"schedule": "auto", "profile": "auto"}
    elif how < 0.8:
        passes = draw.choice(PASSES)
        config["schedule"] = [(0, passes)] if draw.random() < 0.5 else [(0, []), (one(2, 5), passes)]
    model = one("llama", "tied", "deep", "gpt2", "qwen3", "mixtral", "t5", "vit")
    kind = one("adamw", "adamw", "sgd", "adam", "nadam", "lion", "amsgrad", "adafactor")
    if model in ("vit", "gpt2") and kind == "lion":  # a key's bias has a gradient of rounding alone, and Lion takes its sign
        kind = "adamw"
    between = {name: draw.randrange(1, STEPS - 1) for name in ("evaluate", "save", "freeze") if draw.random() < 0.3}
    form = one("", "", "rows", "length")
    return {"model": model, "kind": kind, "config": config, "between": between, "form": form}


def frozen(model: Any) -> Any:
    return next(p for n, p in model.named_parameters() if "norm" in n or "ln_" in n)


def whole_batch(setting: dict[str, Any], size: int, step: int) -> dict[str, torch.Tensor]:
    """Of all data ranks: rows that any number of them divides. At some steps it has another form."""
    rows = (12 if size == 3 else 4) * setting["config"]["accumulation"]
    other = setting["form"] if step % 5 in (2, 3) else ""
    batch = tensor_models.batch_of(step, 0, 2 * rows if other == "rows" else rows, setting["model"])
    if other == "length":
        batch |= {name: x[:, :-2].contiguous() for name, x in batch.items() if name != "pixel_values" and x.dim() > 1}
    return batch


def expected(setting: dict[str, Any], size: int) -> parity.Run:
    """Plain PyTorch on the whole batches."""
    config, between = setting["config"], setting["between"]
    model = tensor_models.build(setting["model"])
    optimizer = parity.make_optimizer(setting["kind"], model)
    losses = []
    for step in range(STEPS):
        if step == between.get("freeze"):
            frozen(model).requires_grad_(False)
        loss = tensor_models.loss_of(model, whole_batch(setting, size, step))
        loss.backward()
        losses.append(loss.item())
        if config["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


class Ours:
    """A trainer of a setting, with the model that it was made from."""

    def __init__(self, setting: dict[str, Any], size: int, config: dict[str, Any]) -> None:
        self.setting, self.size = setting, size
        self.model = tensor_models.build(setting["model"])
        if "tp" in (config.get("mesh") or {}):
            config = {"tensor": tensor_models.plan_of(setting["model"], self.model), **config}
        self.config = interlace.Config(**{"timeout_s": 60, "cache": ranks.CACHE, "schedule": [], "profile": "off", **config})
        optimizer = parity.make_optimizer(setting["kind"], self.model)
        self.trainer = interlace.compile(self.model, optimizer, tensor_models.loss_of, self.batch(0), self.config)

    def batch(self, step: int, micro_batches: int | None = None) -> Any:
        return self.config.deal(whole_batch(self.setting, self.size, step), *parity.rank_and_size(), micro_batches)


def ours(setting: dict[str, Any], size: int, folder: str) -> parity.Run:
    """Mean losses and the weights in the end."""
    config, between = setting["config"], setting["between"]
    run = Ours(setting, size, config)
    losses = []
    for step in range(STEPS):
        if step == between.get("evaluate"):
            run.trainer.evaluate(run.batch(100, micro_batches=1))
        if step == between.get("freeze"):
            frozen(run.model).requires_grad_(False)
        if step == between.get("save"):
            run.trainer.save(folder)
            run.trainer.close()
            other = {k: v for k, v in config.items() if k in ("accumulation", "clip_norm", "mesh")}
            run = Ours(setting, size, other | {"strategy": "shard"})
            if step >= between.get("freeze", STEPS):
                frozen(run.model).requires_grad_(False)
            run.trainer.load(folder)
        losses.append(parity.mean_over_ranks(run.trainer.step(run.batch(step))))
    with run.trainer as trainer:
        return losses, dict(trainer.state_dict(all_ranks=True))


def tried(seed: int, size: int, folder: str) -> str:
    """ "" where the numbers are those of one process, else what came of it, the refusals with "refused: " in front."""
    setting = drawn(seed, size)
    try:
        got = ours(setting, size, folder)
    except InterlaceError as e:
        return f"refused: {e}"
    except Exception:
        return traceback.format_exc()
    if dist.is_initialized() and dist.get_rank() > 0:
        return ""
    distance = parity.distance(got, expected(setting, size))
    return "" if distance.within(BOUND) else f"far: {distance}"


def outcome(seed: int, size: int) -> str:
    """Of all ranks together."""
    folder = tempfile.mkdtemp(prefix="interlace-settings-")
    try:
        found = ranks.run(tried, size, seed, size, folder, timeout_s=240)
    except Exception as e:
        return f"failed: {e}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return max(found, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:40", help="first:end")
    parser.add_argument("--ranks", type=int, default=4, choices=sorted(MESHES))
    parser.add_argument("--show", action="store_true", help="print the settings, train nothing")
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    counts = {"trained": 0, "refused": 0, "wrong": 0}
    for seed in range(first, end):
        setting = drawn(seed, args.ranks)
        said = "" if args.show else outcome(seed, args.ranks)
        counts["trained" if not said else "refused" if said.startswith("refused") else "wrong"] += 1
        if said or args.show:
            print(f"seed {seed}: {setting}\n    {said}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
