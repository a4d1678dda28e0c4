"""Swapping programs in place: bits, optimizer states, buffers and memory across a swap; what is refused."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest

import interlace
from interlace import _core

STEPS = 30
OTHER = {
    "shard": "ahead=3,wait=now",
    "zero1": "wait=now",
    "replicate": "wait=now",
}  # passes' options of the second program


def other_text(trainer: interlace.Trainer, ranks_: int, **options: str) -> str:
    """The same captured graph by the same strategy with other settings; rank 0 has the graph, the others give ""."""
    if trainer.rank != 0:
        return ""
    strategy = options.get("strategy", trainer.config.strategy)
    more = options.get("more", OTHER[strategy])
    standard = trainer.config.pipeline(ranks_)
    pipeline = standard.replace(
        f"{trainer.config.strategy}(axis=dp,ranks={ranks_})", f"{strategy}(axis=dp,ranks={ranks_},{more})"
    )
    assert pipeline != standard
    program = _core.Program.parse(trainer._run.source.captured, "captured")
    program.set_meta("micro_batches", str(trainer.config.accumulation))
    program.run_passes(pipeline)
    return program.print()


def train(case: str, swaps: list[int], steps: int = STEPS, optimizer: str = "adamw", **config: Any) -> dict[str, Any]:
    rank, size = parity.rank_and_size()
    model = zoo.build(case, torch.float32)
    opt = parity.make_optimizer(optimizer, model)
    accumulation = config.get("accumulation", 1)
    settings = interlace.Config(clip_norm=0.3, timeout_s=60, **{"schedule": [], **config})
    losses, seen, memory = [], [], []
    with interlace.compile(
        model, opt, zoo.CASES[case].loss, parity.batch_of(case, 0, rank, accumulation), settings
    ) as trainer:
        scheduler = parity.schedule(opt, steps)
        first = trainer.program
        for step in range(steps):
            if step in swaps:
                before = [t.data_ptr() for t in trainer._run.states._tensors.values()]
                second = trainer.program != first
                trainer.swap(first if second else other_text(trainer, size))
                assert [t.data_ptr() for t in trainer._run.states._tensors.values()] == before, "a state was copied"
            seen.append(_core.digest(trainer.program))
            losses.append(float(trainer.step(parity.batch_of(case, step, rank, accumulation))))
            scheduler.step()
            stats = trainer.stats()  # a device's memory has the arena's block, too, of whichever program runs
            memory.append(stats["live_bytes"] - (0 if on_device.DEVICE == "cpu" else stats["arena"]["resident_bytes"]))
        state = trainer.optimizer_state_dict(all_ranks=True)
        moments = {f"{i}.{role}": t for i, entry in state["state"].items() for role, t in entry.items()}
        own = digest(dict(model.state_dict())) if config["strategy"] == "replicate" else ""
        return {
            "losses": losses, "weights": digest(trainer.state_dict(all_ranks=True)), "moments": digest(moments),
            "programs": len(set(seen)), "memory": memory, "swaps": trainer.stats()["swaps"], "model": own,
        }  # fmt: skip


def compare(case: str, swaps: list[int], **config: Any) -> list[dict[str, Any]]:
    plain = train(case, [], **config)
    gc.collect()  # its model, of which a device's counter knows as long as it is there
    return [plain, train(case, swaps, **config)]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {"strategy": "shard"}),
        ("gpt2_dropout", {"strategy": "shard", "accumulation": 2}),
        ("batchnorm", {"strategy": "replicate"}),
        ("llama", {"strategy": "zero1", "accumulation": 3, "accumulate_mode": "reduce_last"}),
        ("llama", {"strategy": "shard", "optimizer": "sgd"}),
    ],
    ids=["shard", "dropout", "replicate", "zero1", "sgd"],
)
def test_a_swap_changes_no_bit(case: str, config: dict[str, Any]) -> None:
    for plain, swapped in ranks.run(compare, 2, case, [10, 15, 16], **config):
        assert (plain["programs"], swapped["programs"], swapped["swaps"]) == (1, 2, 3)
        for what in ("losses", "weights", "moments", "model"):
            assert swapped[what] == plain[what], what
        assert max(swapped["memory"]) <= 1.02 * max(plain["memory"])


def side_by_side(case: str, schedule: Any, **config: Any) -> dict[str, Any]:
    """Eight steps of four micro-batches with dropout or without; how many ran side by side in each, and what came out."""
    rank, _ = parity.rank_and_size()
    model = zoo.build(case, torch.float32)
    opt = parity.make_optimizer("adamw", model)
    settings = interlace.Config(
        accumulation=4, accumulate_mode="reduce_last", clip_norm=0.3, timeout_s=60, schedule=schedule, profile="off", **config
    )  # fmt: skip
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "width": [], "accumulation": []}
    with interlace.compile(model, opt, zoo.CASES[case].loss, parity.batch_of(case, 0, rank, 4), settings) as trainer:
        scheduler = parity.schedule(opt, 8)
        for number in range(8):
            trainer.step(parity.batch_of(case, number, rank, 4))
            scheduler.step()
            seen["losses"].append([float(loss) for loss in trainer.outputs["loss"]])
            seen["norms"].append(trainer.norm)
            seen["width"].append(trainer._run.ir.width)
            seen["accumulation"].append(trainer._run.ir.accumulation)
            if number == 4:
                seen["evaluated"] = [float(trainer.evaluate(parity.batch_of(case, 9, rank, 1))["loss"])]
        state = trainer.optimizer_state_dict(all_ranks=True)
        moments = {f"{i}.{role}": t for i, entry in state["state"].items() for role, t in entry.items()}
        return {**seen, "weights": digest(trainer.state_dict(all_ranks=True)), "moments": digest(moments),
                "swaps": trainer.swaps}  # fmt: skip


def compare_widths(case: str, schedule: Any, **config: Any) -> list[dict[str, Any]]:
    return [side_by_side(case, [], **config), side_by_side(case, schedule, **config)]


@pytest.mark.parametrize(("case", "strategy"), [("gpt2_dropout", "shard"), ("llama", "zero1")])
def test_swaps_to_micro_batches_side_by_side_and_back(case: str, strategy: str) -> None:
    schedule = [(0, []), (2, ["breadth_first"]), (4, ["breadth_first(micro_batches=4)", "reorder"]),
                (5, ["breadth_first", "reposition_update"]), (7, ["prefetch"])]  # fmt: skip
    for plain, swapped in ranks.run(compare_widths, 2, case, schedule, strategy=strategy):
        assert plain["width"] == [1] * 8 and swapped["width"] == [1, 1, 2, 2, 4, 2, 2, 1] and swapped["swaps"] >= 4
        assert plain["accumulation"] == swapped["accumulation"] == [4] * 8
        assert all(len(losses) == 4 for losses in swapped["losses"])
        for what in ("losses", "norms", "evaluated", "weights", "moments"):
            assert swapped[what] == plain[what], what


def test_the_search_swaps_to_micro_batches_side_by_side(tmp_path: Path) -> None:
    # Links as slow as this small model's computing: several micro-batches hide what one cannot.
    cluster = re.sub(r"bandwidth_gb_per_s = [^\n]*", "bandwidth_gb_per_s = 0.02", _core.preset_cluster("local-2"))
    (tmp_path / "slow.toml").write_text(cluster)
    schedule = [(0, []), (3, ["search(cluster={cluster},recompute=none,evaluations=60)"]), (6, [])]
    config = {"strategy": "shard", "cluster": str(tmp_path / "slow.toml")}
    for plain, swapped in ranks.run(compare_widths, 2, "gpt2_dropout", schedule, **config):
        assert swapped["width"][:3] == [1] * 3 and swapped["width"][3] > 1 and swapped["width"][6:] == [1, 1]
        assert swapped["swaps"] == 2
        for what in ("losses", "norms", "evaluated", "weights", "moments"):
            assert swapped[what] == plain[what], what


def refused(kind: str) -> list[str]:
    rank, size = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    settings = interlace.Config(timeout_s=30)
    said = []
    with interlace.compile(
        model, parity.make_optimizer("adamw", model), zoo.causal_loss, parity.batch_of("llama", 0, rank, 1), settings
    ) as trainer:
        expected = [float(trainer.step(parity.batch_of("llama", 0, rank, 1)))]
        before = digest(trainer.state_dict(all_ranks=True))
        if kind == "strategy":
            text = other_text(trainer, size, strategy="zero1", more="wait=now")
        elif kind == "layout":
            text = trainer.program.replace("u0.exp_avg_sq", "u0.exp_avg_sx")
        elif kind == "ranks":
            text = trainer.program.replace(f"mesh dp {size}", f"mesh dp {2 * size}")
        else:
            text = "not a program"
        with pytest.raises(interlace.InterlaceError) as error:
            trainer.swap(text)
        said.append(str(error.value))
        assert digest(trainer.state_dict(all_ranks=True)) == before
        expected.append(float(trainer.step(parity.batch_of("llama", 1, rank, 1))))  # it goes on
        assert trainer.swaps == 0
    return said


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("strategy", "only a program with the same units and states"),
        ("text", "program:1"),
    ],
)
def test_a_program_of_other_states_is_refused_and_training_goes_on(kind: str, words: str) -> None:
    for (said,) in ranks.run(refused, 2, kind):
        assert words in said


def resident_peak() -> tuple[int, int]:
    """(now, highest since the last reset) of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def swap_large() -> tuple[int, int]:
    """(bytes of parameters and states on this rank, how far a swap goes above what was resident before)."""
    _, size = parity.rank_and_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)])
    x = torch.randn(2, 1024)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with interlace.compile(
        model, opt, lambda m, b: m(b["x"]).square().mean(), {"x": x}, interlace.Config(timeout_s=60)
    ) as trainer:
        for _ in range(2):
            trainer.step({"x": x})
        text = other_text(trainer, size)
        Path("/proc/self/clear_refs").write_text("5")
        before, _ = resident_peak()
        trainer.swap(text)
        _, peak = resident_peak()
        trainer.step({"x": x})
        return trainer.stats()["persistent_bytes"], peak - before


@pytest.mark.host("counts the host's memory, in which nothing of a device lies")
def test_a_swap_does_not_double_memory() -> None:
    for states, above in ranks.run(swap_large, 2):
        assert states > 70 << 20
        assert above < 0.15 * states, (states, above)
