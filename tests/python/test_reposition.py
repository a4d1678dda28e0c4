"""`reposition_update`: the optimizer step of a unit runs in the next step. The same bits as the plain program, whoever looks when."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import on_device
import parity
import pytest
import ranks
import test_offload as offload
import torch
import zoo
from test_shapes import PAD, SHAPES, batch_of, loss
from test_trainer_bits import digest

import interlace

STEPS = 7
MOVED: list[tuple[int, list[str]]] = [(0, ["reposition_update"])]


def compiled(case: str, optimizer: str = "adamw", **config: Any) -> tuple[interlace.Trainer, Any]:
    """A trainer and a scheduler, whose next learning rate is set before the step at hand has moved the parameters."""
    rank, _ = parity.rank_and_size()
    gc.collect()  # a peak of a device has what is left of the trainer before, too
    model = zoo.build(case, torch.float32)
    opt = parity.make_optimizer(optimizer, model)
    accumulation = config.get("accumulation", 1)
    settings = interlace.Config(**{"clip_norm": 0.3, "timeout_s": 60, "schedule": [], **config})
    trainer = interlace.compile(
        model, opt, zoo.CASES[case].loss, parity.batch_of(case, 0, rank, accumulation), settings
    )
    return trainer, parity.schedule(opt, 2 * STEPS)


def step(trainer: interlace.Trainer, scheduler: Any, case: str) -> float:
    made = float(trainer.step(parity.batch_of(case, trainer.steps, trainer.rank, trainer.config.accumulation)))
    scheduler.step()
    return made


def everything(trainer: interlace.Trainer) -> tuple[str, str]:
    state = trainer.optimizer_state_dict(all_ranks=True)
    moments = {f"{i}.{role}": t for i, entry in state["state"].items() for role, t in entry.items()}
    return digest(dict(trainer.state_dict(all_ranks=True))), digest(moments)


def run(case: str, read: bool = False, **config: Any) -> dict[str, Any]:
    """Losses, digests of weights and moments (after each step with `read`), and what the program was."""
    trainer, scheduler = compiled(case, **config)
    with trainer:
        losses, seen = [], []
        for _ in range(STEPS):
            losses.append(step(trainer, scheduler, case))
            if read:
                seen.append(everything(trainer))
        return {
            "losses": losses, "states": everything(trainer), "seen": seen, "moved": "pending=true" in trainer.program,
            "unforeseen": trainer.stats()["arena"]["unforeseen"], "swaps": trainer.swaps, "peak": trainer.stats()["peak_bytes"],
        }  # fmt: skip


def compare(case: str, changes: list[dict[str, Any]], **config: Any) -> list[dict[str, Any]]:
    return [run(case, **config), *(run(case, **{**config, **change}) for change in changes)]


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"strategy": "shard"}),
        (2, {"strategy": "shard", "accumulation": 4, "clip_norm": None}),
        (2, {"strategy": "zero1"}),
        (2, {"strategy": "zero1", "accumulation": 4, "accumulate_mode": "reduce_last"}),
        (2, {"strategy": "replicate", "optimizer": "sgd"}),
        (1, {"strategy": "shard"}),
        (1, {"strategy": "zero1", "accumulation": 4, "optimizer": "adam"}),
    ],
    ids=lambda c: str(c) if isinstance(c, int) else "-".join(str(v) for v in c.values()),
)
def test_the_same_bits(size: int, config: dict[str, Any]) -> None:
    # Gradients have their memory between steps already, but for those that no rank or micro-batch adds to (transient_gradients).
    alone = size == config.get("accumulation", 1) == 1
    unit = 1 if on_device.DEVICE == "cpu" else 512  # a device's allocator gives multiples
    gradients = sum(-(-p.nbytes // unit) * unit for p in zoo.build("llama", torch.float32).parameters()) if alone else 0
    for plain, moved in ranks.run(compare, size, "llama", [{"schedule": MOVED}], **config):
        assert (plain["moved"], moved["moved"]) == (False, True)
        assert moved["losses"] == plain["losses"] and moved["states"] == plain["states"]
        assert moved["unforeseen"] == []
        assert moved["peak"] <= plain["peak"] + gradients + 4096


def test_with_other_passes() -> None:
    lists = [
        ["prefetch"],
        ["unshard(units=all)", "bucket(modules=transformer.h.*)"],
        ["bucket(modules=transformer.h.*,pack=copy)", "reorder"],
        ["search(evaluations=40)"],
        ["schedule(keep=u0+u1,forward=u2+u3:head;u4:2)"],
    ]
    changes = [{"schedule": [(0, [*passes, "reposition_update"])]} for passes in lists]
    for plain, *others in ranks.run(compare, 2, "gpt2_dropout", changes, accumulation=2):
        for passes, other in zip(lists, others, strict=True):
            assert other["moved"] and other["losses"] == plain["losses"] and other["states"] == plain["states"], passes


@pytest.mark.parametrize(
    "config",
    [
        {"param_dtype": "bfloat16", "output_dtype": "float32", "reduce_dtype": "bfloat16"},
        {"param_dtype": "float16", "reduce_dtype": "float32", "loss_scale": "dynamic"},
    ],
    ids=["bf16", "f16"],
)
def test_with_narrow_transfers_and_a_scaled_loss(config: dict[str, Any]) -> None:
    for plain, moved in ranks.run(compare, 2, "llama", [{"schedule": MOVED}], **config):
        assert moved["moved"] and moved["losses"] == plain["losses"] and moved["states"] == plain["states"]


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_whoever_looks_after_a_step_sees_it_made(strategy: str) -> None:
    changes = [{"schedule": MOVED}, {"schedule": MOVED, "read": True}]
    for plain, moved, looked in ranks.run(compare, 2, "llama", changes, strategy=strategy, read=True):
        assert looked["seen"] == plain["seen"] == moved["seen"]
    for plain, moved in ranks.run(compare, 2, "llama", [{"schedule": MOVED}], strategy=strategy):
        assert moved["states"] == plain["states"]


def test_swaps_between_programs_with_and_without_it() -> None:
    schedule = [(0, []), (2, ["reposition_update"]), (4, ["prefetch", "reposition_update"]), (5, ["prefetch"])]
    for strategy in ("shard", "zero1"):
        for plain, swapped in ranks.run(compare, 2, "llama", [{"schedule": schedule}], strategy=strategy):
            assert swapped["swaps"] >= 2 and not swapped["moved"]
            assert swapped["losses"] == plain["losses"] and swapped["states"] == plain["states"]


def saved(folder: str, wait: bool, schedule: list[tuple[int, list[str]]], strategy: str) -> list[Any]:
    """Trains 7 steps with a save after the third, and goes on from there with another trainer."""
    case = "llama"
    trainer, scheduler = compiled(case, schedule=schedule, strategy=strategy)
    with trainer:
        losses = [step(trainer, scheduler, case) for _ in range(3)]
        trainer.save(folder, wait=wait)
        lr = scheduler.state_dict()
        losses += [step(trainer, scheduler, case) for _ in range(4)]
        whole = everything(trainer)
        trainer.finish_save()
    trainer, scheduler = compiled(case, schedule=schedule, strategy=strategy)
    with trainer:
        step(trainer, scheduler, case)  # load replaces what this one leaves pending
        trainer.load(folder)
        scheduler.load_state_dict(lr)
        again = [step(trainer, scheduler, case) for _ in range(4)]
        return [losses, whole, again, everything(trainer)]


@pytest.mark.parametrize(("strategy", "wait"), [("shard", True), ("zero1", False)], ids=["waits", "beside"])
def test_a_checkpoint_is_of_its_moment(strategy: str, wait: bool, tmp_path: Path) -> None:
    plain = ranks.run(saved, 2, str(tmp_path / "plain"), wait, [], strategy)
    moved = ranks.run(saved, 2, str(tmp_path / "moved"), wait, MOVED, strategy)
    assert moved == plain
    for losses, whole, again, end in moved:
        assert again == losses[3:] and end == whole


def own_parameters(schedule: list[tuple[int, list[str]]], end: str) -> list[str]:
    """What the model itself shows after each of two steps, and in the end."""
    trainer, scheduler = compiled("llama", strategy="replicate", schedule=schedule)
    model = trainer._run.model
    seen = []
    for _ in range(2):
        step(trainer, scheduler, "llama")
        seen.append(digest(dict(model.state_dict())))
    trainer.flush() if end == "flush" else trainer.close()
    seen.append(digest(dict(model.state_dict())))
    trainer.close()
    return seen


@pytest.mark.parametrize("end", ["flush", "close"])
def test_the_models_own_parameters_are_a_step_behind_until_a_flush(end: str) -> None:
    plain, moved = (ranks.run(own_parameters, 1, schedule, end)[0] for schedule in ([], MOVED))
    assert plain[1] == plain[2]
    assert moved[1] == plain[0] and moved[2] == plain[2]


class Sharp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).square().mean()


def skipped(schedule: list[tuple[int, list[str]]], strategy: str) -> list[Any]:
    """Steps of which two have no finite gradient."""
    model = Sharp()
    settings = interlace.Config(skip_nonfinite=True, schedule=schedule, strategy=strategy, timeout_s=60)
    out: list[Any] = []
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(6)]
    batches[2] = batches[3] = torch.full((4, 6), float("inf"))
    with interlace.compile(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), lambda m, b: m(b), batches[0], settings
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
            out.append((trainer.skipped, trainer._run.hyper.steps[0]))
        return [*out, trainer.stats()["skipped_updates"], *everything(trainer)]


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_a_norm_that_is_not_finite_leaves_nothing_pending(strategy: str) -> None:
    plain, moved = (ranks.run(skipped, 2, schedule, strategy) for schedule in ([], MOVED))
    assert moved == plain
    assert [s for s, _ in plain[0][:6]] == [False, False, True, True, False, False] and plain[0][6] == 2


def inspected(schedule: list[tuple[int, list[str]]]) -> list[Any]:
    """A batch is looked at op by op after two steps; training then goes on."""
    trainer, scheduler = compiled("llama", schedule=schedule, clip_norm=None)
    with trainer:
        for _ in range(2):
            step(trainer, scheduler, "llama")
        batch = parity.batch_of("llama", 9, trainer.rank, 1)
        ops = trainer.inspect(batch)["ops"]
        found = [
            (o["name"], [(v["min"], v["max"]) for v in o["results"]]) for o in ops if o["name"].startswith("aten.")
        ]
        return [found, trainer.explain_nonfinite(batch), step(trainer, scheduler, "llama"), everything(trainer)]


def evaluated(schedule: list[tuple[int, list[str]]], strategy: str) -> list[Any]:
    """The loss of one batch in eval mode beside training, which goes on."""
    trainer, scheduler = compiled("gpt2_dropout", schedule=schedule, strategy=strategy)
    with trainer:
        batch = parity.batch_of("gpt2_dropout", 9, trainer.rank, 1)
        losses = []
        for _ in range(4):
            losses.append(step(trainer, scheduler, "gpt2_dropout"))
            losses.append(float(trainer.evaluate(batch)["loss"]))
        return [losses, everything(trainer)]


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_evaluation_sees_the_updated_parameters(strategy: str) -> None:
    assert ranks.run(evaluated, 2, MOVED, strategy) == ranks.run(evaluated, 2, [], strategy)


def test_a_look_at_a_batch_sees_the_updated_parameters() -> None:
    assert ranks.run(inspected, 2, MOVED) == ranks.run(inspected, 2, [])


def lengths(schedule: list[tuple[int, list[str]]], strategy: str) -> list[Any]:
    """Two declared lengths in turns: a step may end with one program and the next begin with another."""
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    settings = interlace.Config(
        shapes=SHAPES, pad=PAD, schedule=schedule, strategy=strategy, clip_norm=0.3, timeout_s=60
    )
    with interlace.compile(model, parity.make_optimizer("adamw", model), loss, batch_of(7, rank), settings) as trainer:
        losses = [float(trainer.step(batch_of(n, 10 * n + rank))) for n in (7, 16, 12, 5, 6, 13)]
        assert trainer.stats()["compiled_shapes"] == 2
        return [losses, everything(trainer)]


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_programs_of_several_shapes(strategy: str) -> None:
    assert ranks.run(lengths, 2, MOVED, strategy) == ranks.run(lengths, 2, [], strategy)


def frozen_in_between(schedule: list[tuple[int, list[str]]]) -> list[Any]:
    """A parameter is frozen between two steps: what the step before left for it is made all the same."""
    trainer, scheduler = compiled("llama", schedule=schedule, strategy="replicate")
    with trainer:
        parameter = dict(trainer._run.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
        losses = []
        for number in range(5):
            parameter.requires_grad_(number < 2)
            losses.append(step(trainer, scheduler, "llama"))
        return [losses, everything(trainer)]


def test_a_parameter_is_frozen_with_its_update_pending() -> None:
    assert ranks.run(frozen_in_between, 2, MOVED) == ranks.run(frozen_in_between, 2, [])


def test_with_states_out_of_memory(tmp_path: Path) -> None:
    schedule = [(0, ["reposition_update", "offload_sync(cluster={cluster},kinds=states)"])]
    changes = [{"schedule": schedule, "tier": str(tmp_path)}]
    for plain, moved in ranks.run(compare, 2, "llama", changes, read=True):
        assert moved["moved"] and moved["seen"] == plain["seen"]


def flushed(trainer: interlace.Trainer) -> list[Any]:
    """Steps with somebody between them who has the pending update made."""
    out: list[Any] = []
    for number in range(4):
        out.append(float(trainer.step(offload.batch())))
        if number == 1:
            trainer.flush()
        elif number == 2:
            out.append(float(trainer.evaluate(offload.batch())["loss"]))
    return [*out, *everything(trainer)]


@pytest.mark.parametrize("percent", [75, 50])
def test_a_flush_keeps_to_the_limit(tmp_path: Path, percent: int) -> None:
    with offload.compiled(MOVED[0][1]) as plain:
        expected, peak = flushed(plain), int(plain.stats()["peak_bytes"])
    del plain
    gc.collect()
    limit = peak * percent // 100
    passes = ["reposition_update", f"offload(cluster={{cluster}},limit={limit - 65536})"]
    with offload.compiled(passes, tmp_path) as trainer:
        assert flushed(trainer) == expected
        assert any(s["out"] for s in trainer._run.ir.states())
        assert trainer.stats()["peak_bytes"] <= limit


def together(folder: str, schedule: list[tuple[int, list[str]]], tier: str | None, strategy: str) -> list[Any]:
    """Saves, evaluations, swaps and reads in turns, and a second trainer that goes on from the middle of it."""
    case, config = "gpt2_dropout", {"strategy": strategy, "accumulation": 2, "tier": tier, "schedule": schedule}
    trainer, scheduler = compiled(case, **config)
    batch = parity.batch_of(case, 9, trainer.rank, 1)
    seen: list[Any] = []
    with trainer:
        for number in range(9):
            seen.append(step(trainer, scheduler, case))
            if number in (1, 4):
                trainer.save(folder, wait=False)  # the steps after it go on while it is written
            if number in (1, 3, 4):
                seen.append(float(trainer.evaluate(batch)["loss"]))
            if number == 4:
                lr, at = scheduler.state_dict(), len(seen)
            if number == 6:
                seen.append(everything(trainer))
        trainer.finish_save()
        seen.append(everything(trainer))
    other, scheduler = compiled(case, **config)
    with other:
        step(other, scheduler, case)
        other.load(folder)
        scheduler.load_state_dict(lr)
        again: list[Any] = []
        for number in range(5, 9):
            again.append(step(other, scheduler, case))
            if number == 6:
                again.append(everything(other))
        assert [*again, everything(other)] == seen[at:]
    return seen


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_saves_evaluations_swaps_and_a_resume_together(strategy: str, tmp_path: Path) -> None:
    out = "offload_sync(cluster={cluster},kinds=states)"
    schedule = [(0, ["reposition_update"]), (2, ["prefetch", "reposition_update"]), (3, []), (4, ["reposition_update", out]),
                (7, ["reposition_update"])]  # fmt: skip
    (tmp_path / "tier").mkdir()
    plain = ranks.run(together, 2, str(tmp_path / "plain"), [], None, strategy)
    assert ranks.run(together, 2, str(tmp_path / "moved"), schedule, str(tmp_path / "tier"), strategy) == plain


def test_what_it_cannot_be_combined_with() -> None:
    for passes, words in (
        (["reposition_update", "prefetch"], "run reposition_update after prefetch"),
        (["overlap_update", "reposition_update"], "use overlap_update or reposition_update"),
    ):
        with pytest.raises(interlace.InterlaceError, match=words):
            compiled("llama", schedule=[(0, passes)], clip_norm=None)
