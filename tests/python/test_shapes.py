"""Variable lengths: shapes that all ranks choose together, padding, one set of states under several programs, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest
from torch import nn
from torch.nn import functional

import interlace
from interlace.config import Config, ConfigError
from interlace.train.shapes import _rounded

Tensor = torch.Tensor
SHAPES = {"input_ids": [(2, 12), (2, 16)], "labels": [(2, 12), (2, 16)]}
PAD = {"input_ids": 0, "labels": -100}
# Lengths of the steps on ranks 0 and 1, and the shape that holds both.
LENGTHS = [(12, 12, 12), (5, 11, 12), (7, 13, 16), (16, 3, 16), (9, 9, 12), (15, 15, 16)]


def batch_of(length: int, seed: int, rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def by_hand(batch: dict[str, Tensor], length: int, rows: int = 2) -> dict[str, Tensor]:
    out = {}
    for name, x in batch.items():
        out[name] = torch.full((rows, length), PAD[name], dtype=x.dtype)
        out[name][: x.shape[0], : x.shape[1]] = x
    return out


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1))


def train(padded: bool, case: str = "llama", rounds: int = 3, **config: Any) -> dict[str, Any]:
    """The run with batches as they come, or padded beforehand to the shape that holds those of all ranks."""
    rank, size = parity.rank_and_size()
    model = zoo.build(case, torch.float32)
    opt = parity.make_optimizer("adamw", model)
    g = config.get("accumulation", 1)
    settings = interlace.Config(timeout_s=60, clip_norm=0.5, shapes=SHAPES, pad=PAD, **{"schedule": [], **config})
    example = [batch_of(12, 0)] * g if g > 1 else batch_of(12, 0)
    losses = []
    with interlace.compile(model, opt, loss, example, settings) as trainer:
        compiled = [trainer.stats()["compiled_shapes"]]
        for step in range(rounds * len(LENGTHS)):
            lengths = LENGTHS[step % len(LENGTHS)]
            parts = [
                batch_of(lengths[rank] if size > 1 else max(lengths[:2]), 10 * step + rank + 1000 * i) for i in range(g)
            ]
            if padded:
                parts = [by_hand(part, lengths[2]) for part in parts]
            losses.append(float(trainer.step(parts if g > 1 else parts[0])))
            compiled.append(trainer.stats()["compiled_shapes"])
        moments = trainer.optimizer_state_dict(all_ranks=True)["state"]
        return {
            "losses": losses, "weights": digest(trainer.state_dict(all_ranks=True)), "stats": trainer.stats(), "compiled": compiled,
            "steps": {float(entry["step"]) for entry in moments.values()}, "plans": trainer.plans,
        }  # fmt: skip


def both(case: str, **config: Any) -> list[dict[str, Any]]:
    return [train(False, case, **config), train(True, case, **config)]


@pytest.mark.parametrize(
    ("case", "config"),
    [("llama", {}), ("llama", {"accumulation": 2, "strategy": "zero1"}), ("gpt2_dropout", {})],
    ids=["shard", "zero1", "dropout"],
)
def test_ranks_choose_together_and_pad_as_by_hand(case: str, config: dict[str, Any]) -> None:
    found = ranks.run(both, 2, case, **config)
    for ragged, padded in found:
        assert ragged["losses"] == padded["losses"] and ragged["weights"] == padded["weights"]
        assert ragged["compiled"][0] == 1 and ragged["compiled"][-1] == 2  # when met, and never again
        assert ragged["steps"] == {18.0}
        shapes = ragged["stats"]["shapes"]
        assert sorted(shapes.values()) == [9, 9] and len(shapes) == 2
    # What is real of what is computed on, by rank.
    real = [sum(lengths[r] for lengths in LENGTHS) for r in (0, 1)]
    whole = sum(lengths[2] for lengths in LENGTHS)
    for rank, (ragged, padded) in enumerate(found):
        assert ragged["stats"]["padding"] == pytest.approx(1 - real[rank] / whole)
        assert padded["stats"]["padding"] == 0


@pytest.mark.parametrize("shapes", [SHAPES, None], ids=["declared", "as they come"])
def test_padding_changes_nothing_against_plain_torch(shapes: Any) -> None:
    model = zoo.build("llama", torch.float32)
    theirs = copy.deepcopy(model)
    opt, their_opt = parity.make_optimizer("adamw", model), parity.make_optimizer("adamw", theirs)
    with interlace.compile(model, opt, loss, batch_of(7, 0), Config(shapes=shapes, pad=PAD)) as trainer:
        for step, length in enumerate([7, 16, 12, 5, 13]):
            batch = batch_of(length, step)
            expected = loss(theirs, batch)
            expected.backward()
            their_opt.step()
            their_opt.zero_grad()
            assert float(trainer.step(batch)) == pytest.approx(float(expected.detach()), rel=1e-5)
        for name, t in trainer.state_dict().items():
            torch.testing.assert_close(t, dict(theirs.state_dict())[name], rtol=1e-4, atol=1e-5)


def trained_in_parts(shapes: Any, compiled: bool) -> list[float]:
    """Layers are frozen, unfrozen and added in a group, each together with a length that is met for the first time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 61)).double()
    model[0].requires_grad_(False)
    opt, losses = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[3].parameters()}], lr=0.01), []

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(m(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    config = Config(shapes=shapes, pad=PAD, cache="off", schedule=[])
    trainer = interlace.compile(model, opt, loss_fn, batch_of(16, 0), config) if compiled else None
    for step, length in enumerate([16, 12, 9, 16, 6, 12, 9]):
        if step == 1:
            model[1].requires_grad_(False)
        elif step == 2:
            model[1].requires_grad_(True)
        elif step == 4:
            model[0].requires_grad_(True)
            opt.add_param_group({"params": model[0].parameters()})
        if trainer is not None:
            losses.append(trainer.step(batch_of(length, step)).item())
            continue
        loss = loss_fn(model, batch_of(length, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    if trainer is not None:
        trainer.close()
    return losses


@pytest.mark.parametrize("shapes", [{n: [(2, 6), (2, 9), (2, 12), (2, 16)] for n in PAD}, None], ids=["declared", "as they come"])
def test_what_is_frozen_together_with_a_new_length(shapes: Any) -> None:
    assert trained_in_parts(shapes, True) == pytest.approx(trained_in_parts(shapes, False), rel=1e-9)


def test_sizes_are_rounded_up_to_few() -> None:
    for length in range(1, 300):
        assert length <= _rounded(length) <= length * 9 / 8 and _rounded(_rounded(length)) == _rounded(length)
    assert sorted({_rounded(n) for n in range(65, 129)}) == [72, 80, 88, 96, 104, 112, 120, 128]


# Lengths of the steps on ranks 0 and 1, and the shape that holds both: the example's, a shape that is there, one rounded up.
COME = [(33, 20, 33), (40, 37, 40), (60, 57, 60), (36, 38, 40), (30, 33, 33), (5, 58, 60), (17, 17, 18), (61, 9, 64)]


def as_they_come(padded: bool, **config: Any) -> dict[str, Any]:
    """A run with pad alone, or with batches that are filled up beforehand."""
    rank, size = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    settings = interlace.Config(timeout_s=60, pad=PAD, **{"schedule": [], **config})
    found = []
    with interlace.compile(model, parity.make_optimizer("adamw", model), loss, batch_of(33, 0), settings) as trainer:
        for step, (*lengths, whole) in enumerate(COME):
            own = size > 1 and "mesh" not in config  # ranks along tp and pp share one batch
            batch = batch_of(lengths[rank] if own else max(lengths), 10 * step + rank * own)
            batch = by_hand(batch, whole) if padded else batch
            found += [trainer.step(batch).item(), trainer.evaluate(batch)["loss"].item()]
        return {"losses": found, "weights": digest(trainer.state_dict(all_ranks=True)), "stats": trainer.stats()}


def rounded_and_by_hand(**config: Any) -> list[dict[str, Any]]:
    return [as_they_come(False, **config), as_they_come(True, **config)]


@pytest.mark.parametrize("config", [{"strategy": "zero1"}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}], ids=["dp", "tp", "pp"])
def test_lengths_as_they_come_are_rounded_up_together(config: dict[str, Any]) -> None:
    for ragged, padded in ranks.run(rounded_and_by_hand, 2, **config):
        assert ragged["losses"] == padded["losses"] and ragged["weights"] == padded["weights"]
        assert sorted(ragged["stats"]["shapes"].values()) == [1, 1, 2, 2, 2]  # of 18, 64, and 33, 40, 60


def test_rows_and_lengths_that_are_both_rounded_up_are_compiled_once() -> None:
    model = zoo.build("llama", torch.float32)
    with interlace.compile(model, parity.make_optimizer("sgd", model), loss, batch_of(12, 0), Config(pad=PAD)) as trainer:
        for step in range(3):
            trainer.step(batch_of(33, step, rows=17))  # 18 x 36 numbers for 17 x 33
        assert trainer.stats()["compiled_shapes"] == 2 and sorted(trainer.stats()["shapes"].values()) == [0, 3]


def test_few_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.train.shapes.KEPT", 2)
    few = as_they_come(False)
    monkeypatch.undo()
    many = as_they_come(False)
    assert few["losses"] == many["losses"] and few["weights"] == many["weights"]
    assert (few["stats"]["compiled_shapes"], many["stats"]["compiled_shapes"]) == (2, 5)


def test_the_last_batch_may_have_fewer_rows() -> None:
    model = zoo.build("llama", torch.float32)
    with interlace.compile(
        model, parity.make_optimizer("sgd", model), loss, batch_of(12, 0), Config(shapes=SHAPES, pad=PAD)
    ) as trainer:
        few, alone = batch_of(9, 3, rows=1), copy.deepcopy(model).cpu()
        assert float(trainer.step(few)) == pytest.approx(float(loss(alone, few).detach()), rel=1e-5)


def test_a_schedule_reaches_every_shape() -> None:
    schedule = [(0, []), (8, ["schedule(keep=all)"])]
    plain, planned = ranks.run(with_and_without, 2, schedule)[0]
    assert planned["losses"] == plain["losses"] and planned["weights"] == plain["weights"]
    # Step 8 meets the longer shape, step 10 the shorter one.
    assert [(p["step"], p["reason"]) for p in planned["plans"]] == [(8, "schedule"), (10, "shapes")]
    assert planned["stats"]["swaps"] == 2


def with_and_without(schedule: Any) -> list[dict[str, Any]]:
    return [train(False), train(False, schedule=schedule)]


def too_long() -> str:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    with interlace.compile(
        model,
        parity.make_optimizer("sgd", model),
        loss,
        batch_of(12, 0),
        interlace.Config(timeout_s=20, shapes=SHAPES, pad=PAD),
    ) as trainer:
        trainer.step(batch_of(12, 1))
        with pytest.raises(interlace.InterlaceError) as error:
            trainer.step(batch_of(12 if rank == 0 else 17, 2))
        return str(error.value)


def test_a_batch_that_no_shape_holds_is_an_error_on_all_ranks() -> None:
    for said in ranks.run(too_long, 2):
        assert "no shape of Config.shapes holds this step's micro-batches" in said
        assert "input_ids [2, 17]" in said and "input_ids [2, 16], labels [2, 16]" in said


def wrong_entry() -> str:
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    with interlace.compile(
        model,
        parity.make_optimizer("sgd", model),
        loss,
        batch_of(12, 0),
        interlace.Config(timeout_s=20, shapes=SHAPES, pad=PAD),
    ) as trainer:
        batch = batch_of(12, 1)
        if rank == 1:
            del batch["labels"]
        with pytest.raises(interlace.InterlaceError) as error:
            trainer.step(batch)
        return str(error.value)


def test_a_wrong_batch_on_one_rank_is_told_to_the_others() -> None:
    first, second = ranks.run(wrong_entry, 2)
    assert "shapes has 'labels', which the batch lacks" in second
    assert "rank 1 failed" in first and "labels" in first


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shapes": {"x": [(4, 8)]}}, "pad lacks 'x': say which value fills it up, for example pad={'x': 0}"),
        ({"pad": {"x": True}}, "pad of 'x' must be a number, not True"),
        ({"pad": ["x"]}, "shapes must be {input: [sizes, ...]}, for example"),
        ({"shapes": {"x": [(4, 8)]}, "pad": {"x": 0, "y": 1}}, "pad has 'y', which is not in shapes"),
        ({"shapes": {"x": (4, 8)}, "pad": {"x": 0}}, "shapes must be {input: [sizes, ...]}, for example"),
        ({"shapes": {"x": [(4, 8), (4,)]}, "pad": {"x": 0}}, "all shapes of 'x' must have as many dimensions"),
        (
            {"shapes": {"x": [(4, 8), (4, 9)], "y": [(4, 8)]}, "pad": {"x": 0, "y": 0}},
            "every input of shapes needs one entry for each shape of the batch, but there are 'x' 2, 'y' 1",
        ),
        ({"shapes": {"x": [(4, 8)]}, "pad": {"x": "0"}}, "pad of 'x' must be a number, not '0'"),
    ],
)
def test_wrong_shapes_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Config.from_dict(values)
    assert str(e.value).startswith(message)


def test_shapes_of_an_unknown_entry_are_refused() -> None:
    model = zoo.build("llama", torch.float32)
    for more, what in (({"shapes": {"input_id": [(2, 12)]}}, "shapes"), ({}, "pad")):
        with pytest.raises(ConfigError, match=rf"{what} has 'input_id', which the batch lacks; did you mean 'input_ids'\?"):
            interlace.compile(
                model, parity.make_optimizer("sgd", model), loss, batch_of(12, 0), Config(pad={"input_id": 0}, **more)
            )


def test_another_shape_than_the_declared_ones_stays_an_error() -> None:
    model = zoo.build("llama", torch.float32)
    batch = batch_of(12, 0)
    settings = interlace.Config(shapes={name: [tuple(x.shape)] for name, x in batch.items()}, pad={name: 0 for name in batch})
    trainer = interlace.compile(model, parity.make_optimizer("sgd", model), loss, batch, settings)
    with pytest.raises(interlace.InterlaceError, match="input_ids"):
        trainer.step(batch_of(13, 0))
