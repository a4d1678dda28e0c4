"""Trainer.evaluate: the loss of plain PyTorch in eval mode on the same weights, and a training run that does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import on_device
import parity
import pytest
import ranks
import tensor_models
import torch
import zoo
from test_offload import batch as small_batch
from test_offload import compiled
from test_trainer_bits import digest
from torch import nn

import interlace

STEPS = 6
Tensor = torch.Tensor


def plain(case: str, weights: dict[str, Tensor], batch: Any) -> float:
    """The loss of the user's own model in eval mode."""
    model = zoo.build(case, torch.float32)
    model.load_state_dict(weights, strict=False)
    model.eval()
    with torch.no_grad():
        return float(zoo.CASES[case].loss(model, batch))


def with_logits(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": zoo.causal_loss(model, batch), "logits": model(input_ids=batch["input_ids"]).logits}


def train(case: str, evaluate: bool, **config: Any) -> dict[str, Any]:
    rank, _ = parity.rank_and_size()
    model = zoo.build(case, torch.float32)
    opt = parity.make_optimizer("adamw", model)
    accumulation = config.get("accumulation", 1)
    settings = interlace.Config(clip_norm=0.3, timeout_s=60, **{"schedule": [], **config})
    losses, pairs, training = [], [], [m.training for m in model.modules()]
    with interlace.compile(
        model, opt, zoo.CASES[case].loss, parity.batch_of(case, 0, rank, accumulation), settings
    ) as trainer:
        for step in range(STEPS):
            losses.append(float(trainer.step(parity.batch_of(case, step, rank, accumulation))))
            if not evaluate or step % 2:
                continue
            weights = trainer.state_dict(all_ranks=True)
            for rows in (3, 2, 3):  # two shapes; the first one again
                batch = zoo.CASES[case].batch(rows, 100 + step + rank)
                ours = trainer.evaluate(batch)
                assert list(ours) == ["loss"] and not ours["loss"].requires_grad
                pairs.append((float(ours["loss"]), plain(case, weights, batch)))
        assert [m.training for m in model.modules()] == training
        return {"losses": losses, "weights": digest(trainer.state_dict(all_ranks=True)), "pairs": pairs,
                "steps": trainer.steps}  # fmt: skip


def compare(case: str, **config: Any) -> list[dict[str, Any]]:
    return [train(case, False, **config), train(case, True, **config)]


@pytest.mark.parametrize(
    ("size", "case", "config"),
    [
        (1, "llama", {}),
        (2, "gpt2_dropout", {"accumulation": 2}),
        (2, "batchnorm", {"strategy": "replicate"}),
        (2, "vit", {"strategy": "zero1"}),
        (2, "llama", {"schedule": [(0, ["unshard(units=all)"]), (3, ["reorder"])]}),
        (2, "gpt2_dropout", {"mode": "eager"}),
        (2, "llama", {"schedule": [(0, ["offload_sync(cluster={cluster})"])], "tier": "tier"}),
        (
            2,
            "llama",
            {"schedule": [(0, ["reposition_update", "offload_sync(cluster={cluster},kinds=states)"])], "tier": "tier"},
        ),
    ],
    ids=["one", "dropout", "replicate", "zero1", "schedule", "eager", "tier", "pending-tier"],
)
def test_same_loss_as_pytorch_and_training_goes_on(
    size: int, case: str, config: dict[str, Any], tmp_path: Path
) -> None:
    if "tier" in config:
        config = {**config, "tier": str(tmp_path)}
    for rank, (alone, beside) in enumerate(ranks.run(compare, size, case, **{"strategy": "shard", **config})):
        assert beside["steps"] == alone["steps"] == STEPS
        assert len(beside["pairs"]) == 9
        # Statistics are each rank's own, and those of the state dict are rank 0's.
        for ours, theirs in beside["pairs"] if case != "batchnorm" or rank == 0 else ():
            assert ours == pytest.approx(theirs, rel=2e-6)
        assert beside["losses"] == alone["losses"] and beside["weights"] == alone["weights"]


def other_function() -> tuple[float, float, float]:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    first = parity.batch_of("llama", 0, rank, 1)
    with interlace.compile(
        model,
        parity.make_optimizer("adamw", model),
        zoo.causal_loss,
        first,
        interlace.Config(timeout_s=60, schedule=[]),
    ) as trainer:
        trainer.step(first)
        batch = zoo.tokens(2, 7)
        found = trainer.evaluate(batch, with_logits)
        reference = zoo.build("llama", torch.float32)
        reference.load_state_dict(trainer.state_dict(all_ranks=True))
        with torch.no_grad():
            logits = reference.eval()(input_ids=batch["input_ids"]).logits
        peak = trainer._evaluation._built.popitem()[1][0].built.executor.stats()["peak_bytes"]
        return float((found["logits"].cpu() - logits).abs().max()), peak, trainer.stats()["peak_bytes"]


def test_another_function_gives_its_outputs_in_the_memory_of_a_step() -> None:
    for difference, peak, peak_of_step in ranks.run(other_function, 2):
        assert difference < 1e-5
        assert peak < peak_of_step


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second, self.frozen = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2), nn.Embedding(5, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(torch.tanh(self.body(x)))


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return (model(batch["x"]).argmax(-1) == batch["y"]).double().mean()


OTHERS: list[Any] = [
    lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
    lambda model, batch: model.second(model.body(batch["x"])).square().mean(), lambda model, batch: model.second.weight.mean(),
    lambda model, batch: model.body(batch["x"]).mean(), lambda model, batch: model.frozen.weight.square().sum(), accuracy,
]  # fmt: skip


def other_parameters(config: dict[str, Any]) -> None:
    rank, _ = parity.rank_and_size()
    model, g = Heads().double(), torch.Generator().manual_seed(0 if "mesh" in config else rank)
    batch = {"x": torch.randn(4, 8, dtype=torch.float64, generator=g), "y": torch.randint(0, 4, (4,), generator=g)}
    theirs, settings = Heads().double(), interlace.Config(schedule=[], timeout_s=60, **config)
    with interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=0.1), OTHERS[0], batch, settings) as trainer:
        for _ in range(2):
            trainer.step(batch)
            theirs.load_state_dict(trainer.state_dict(all_ranks=True))
            for function in OTHERS if "mesh" not in config else (OTHERS[0], accuracy):
                with torch.no_grad():
                    expected = float(function(theirs, batch))
                assert float(trainer.evaluate(batch, function)["loss"]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        if "mesh" in config:
            with pytest.raises(interlace.InterlaceError, match=r"evaluate: pass 'pipeline': .*in `with trainer\.whole_parameters\(\):`"):
                trainer.evaluate(batch, OTHERS[2])


@pytest.mark.parametrize(
    "size, config", [(1, {}), (1, {"fullgraph": False}), (2, {"strategy": "shard"}), (2, {"mesh": {"pp": 2}, "accumulation": 2})], ids=str
)
def test_other_parameters_than_training_has_are_evaluated(size: int, config: dict[str, Any]) -> None:
    """Those that have no gradient in training, fewer than it trains, and none at all."""
    ranks.run(other_parameters, size, config)


def different_shapes() -> str:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    batch = parity.batch_of("llama", 0, rank, 1)
    config = interlace.Config(timeout_s=20, schedule=[])
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batch, config) as trainer:
        with pytest.raises(interlace.InterlaceError) as error:
            trainer.evaluate(zoo.tokens(2 + rank, 7))
        trainer.evaluate(zoo.tokens(2, 7))  # and training goes on
        trainer.step(batch)
    return str(error.value)


def test_ranks_with_different_batches_are_named() -> None:
    for text in ranks.run(different_shapes, 2):
        assert (
            "evaluate: rank 1 gave another batch than rank 0: 'input_ids' is int64[3, 12] there and int64[2, 12] on rank 0"
            in text
        )


def beside(trainer: interlace.Trainer, rows: int = 2) -> tuple[list[tuple[float, float]], int, int]:
    """Losses of steps and evaluations in turns; the highest peak of an evaluation; bytes that evaluations brought in from the tier."""
    losses, came = [], 0
    for _ in range(3):
        step = float(trainer.step(small_batch()))
        before = trainer.stats()["tier_bytes_in"]
        losses.append((step, float(trainer.evaluate({k: v[:rows] for k, v in small_batch().items()})["loss"])))
        came += trainer.stats()["tier_bytes_in"] - before
    peaks = [ready.built.executor.stats()["peak_bytes"] for kept in trainer._evaluation._built.values() for ready in kept]
    return losses, max(peaks), came


@pytest.mark.parametrize("percent", [75, 50, 40])
def test_a_memory_limit_holds_and_optimizer_states_stay_out(tmp_path: Path, percent: int) -> None:
    with compiled(["overlap_update"]) as plain:
        expected, _, _ = beside(plain)
        weights, peak = digest(dict(plain.state_dict())), int(plain.stats()["peak_bytes"])
    del plain  # and its model, of which a device's counter knows
    limit = peak * percent // 100
    passes = ["overlap_update", f"offload(cluster={{cluster}},limit={limit - 65536})"]
    with compiled(passes, tmp_path, memory_limit=limit) as trainer:
        found, highest, came = beside(trainer)
        assert found == expected
        assert max(highest, trainer.stats()["peak_bytes"]) <= limit
        out = [4 * s["shape"][0] for s in trainer._run.ir.states() if s["out"] and s["role"] != "shard"]
        assert sum(out) > 0
        if percent == 75:
            assert came == 0, "forward reads no optimizer state, and has room beside those in memory"
        else:
            assert came < sum(out), (
                "three evaluations: what lies out stays there; some of the rest makes room and is back afterwards"
            )
        # Too much for the limit whatever moves: said, and training goes on.
        large = {k: v.repeat(200, 8) for k, v in small_batch().items()}
        with pytest.raises(
            interlace.InterlaceError,
            match=r"evaluate: a rank needs .* memory_limit is .*; raise it to \d+MiB, or evaluate on a smaller batch",
        ):
            trainer.evaluate(large)
        assert digest(dict(trainer.state_dict())) == weights
        trainer.step(small_batch())


def gradients_out(tier: str) -> tuple[list[list[tuple[float, float]]], set[str], int]:
    """With and without a tier that gradients leave to; their roles, and what they take beside a program that evaluates."""
    limit, found = None, []
    for passes in ([], ["offload(cluster={cluster},limit={limit})"]):
        model = zoo.build("llama", torch.float32)
        room = {"tier": tier, "memory_limit": limit} if passes else {}
        config = interlace.Config(accumulation=2, accumulate_mode="reduce_last", schedule=[(0, passes)], timeout_s=60, **room)
        batch = zoo.tokens(4, parity.rank_and_size()[0])
        with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batch, config) as trainer:
            found.append([(float(trainer.step(batch)), float(trainer.evaluate(zoo.tokens(2, 7))["loss"])) for _ in range(3)])
            most = torch.tensor(trainer.stats()["peak_bytes"])
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            limit = int(most) * 7 // 10
            out = {s["role"] for s in trainer._run.ir.states() if s["out"]}
            (ready,) = next(iter(trainer._evaluation._built.values()))
            needs = trainer._run.programs.needed_bytes
            beside = needs(ready.built.ir, trainer._run.ir) - needs(ready.built.ir)
    return found, out, beside


def test_gradients_that_lie_out_of_memory(tmp_path: Path) -> None:
    """Full gradients, which a program that only evaluates does not have."""
    for (plain, moving), out, beside in ranks.run(gradients_out, 2, str(tmp_path)):
        assert moving == plain and "full_grad" in out
        assert beside == 0, "what lies out takes no memory when another program runs"


def on_stages(tier: str) -> list[list[float]]:
    found = []
    for passes, more in (([], {}), (["offload_sync(cluster={cluster},kinds=states)"], {"tier": tier})):
        with tensor_models.compiled("llama", mesh={"pp": 2}, accumulation=2, schedule=[(0, passes)], **more) as trainer:
            found.append([])
            for step in range(3):
                found[-1] += tensor_models.steps(trainer, step, step + 1)
                found[-1].append(float(trainer.evaluate(tensor_models.batch_of(7, 0))["loss"]))
    assert any(s["out"] for s in trainer._run.ir.states())
    return found


def test_each_stage_of_a_pipeline_has_states_of_its_own_out(tmp_path: Path) -> None:
    for plain, moving in ranks.run(on_stages, 2, str(tmp_path)):
        assert moving == plain


def test_parameters_come_one_by_one_where_the_limit_asks_for_it(tmp_path: Path) -> None:
    """Training fits in the limit with its states in memory; a large batch of evaluation fits only without them, and unit by unit."""
    rows = 64
    with compiled([]) as plain:
        plain.step(small_batch())
        wide = {k: v.repeat(rows, 1) for k, v in small_batch().items()}
        expected = float(plain.evaluate(wide)["loss"])
        second, third = (float(plain.step(small_batch())) for _ in range(2))
        limit = int(plain.stats()["peak_bytes"]) + 65536
        needs = next(iter(plain._evaluation._built.values()))[0].built.executor.stats()["peak_bytes"]
    assert needs > limit
    del plain
    with compiled([], tmp_path, memory_limit=limit) as trainer:
        trainer.step(small_batch())
        trainer.save(tmp_path / "saved", wait=False)
        assert float(trainer.evaluate(wide)["loss"]) == expected
        assert all(not s["moves"] for s in trainer._run.ir.states())
        assert trainer.stats()["tier_bytes_in"] > 0
        peaks = [ready.built.executor.stats()["peak_bytes"] for kept in trainer._evaluation._built.values() for ready in kept]
        beside = 0 if on_device.DEVICE == "cpu" else sum(x.nbytes for x in wide.values())  # a device's peak has its copy of the batch
        assert max(peaks) <= limit + beside
        assert float(trainer.step(small_batch())) == second
        trainer.finish_save()
    with compiled([], tmp_path, memory_limit=limit) as again:
        again.load(tmp_path / "saved")
        assert [float(again.step(small_batch())) for _ in range(2)] == [second, third]
