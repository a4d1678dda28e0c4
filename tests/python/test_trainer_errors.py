"""Runs that go wrong: every rank ends with a message that names the rank or the entry, soon, and nothing is trained on."""

from __future__ import annotations

import failing
import on_device
import pytest
import ranks
import torch
import zoo

import interlace


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({k: v.to(torch.int32) for k, v in zoo.tokens(2, 0).items()}, "int32"),
        ({}, "input_ids"),
        ({"input": zoo.tokens(2, 0)["input_ids"]}, "input_ids"),
        ({**zoo.tokens(2, 0), "mask": torch.ones(2)}, "mask"),
        ({**zoo.tokens(2, 0), "name": "a"}, "name"),
        ({k: v.numpy() for k, v in zoo.tokens(2, 0).items()}, "ndarray"),
        ([zoo.tokens(2, 0)] * 3, "3 micro-batches"),
        ({k: v.to("meta") for k, v in zoo.tokens(2, 0).items()}, "meta"),
    ],
    ids=["dtype", "missing", "misspelt", "unknown", "string", "numpy", "list", "meta"],
)
def test_a_batch_that_was_not_compiled_for(batch: object, said: str) -> None:
    trainer = failing.make()
    before = trainer.state_dict()
    with pytest.raises(interlace.InterlaceError) as e:
        trainer.step(batch)
    assert said in str(e.value), str(e.value)
    after = trainer.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert trainer.step(zoo.tokens(2, 0)) > 0, "it must go on with a right batch"


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_another_batch_on_one_rank(strategy: str) -> None:
    for rank, text in enumerate(ranks.run(failing.other_batch_in_step, 3, strategy)):
        assert "[3, " in text, text
        assert rank == 1 or "rank 1" in text, text


def test_ranks_that_compile_different_things() -> None:
    for function, size, culprit, what in (
        (failing.other_batch_at_compile, 2, 1, "batch entry 'input_ids'"),
        (failing.other_model_at_compile, 3, 2, "parameter"),
        (failing.other_setting_at_compile, 2, 1, "setting 'clip_norm'"),
    ):
        for text in ranks.run(function, size):
            assert f"rank {culprit} differs from rank 0: {what}" in text, text


def test_what_a_rank_wrote_before_it_ended_counts() -> None:
    assert ranks.run(failing.a_word_before_the_end, 2) == [7, 7]


def test_a_rank_that_does_not_come_to_compile_is_named() -> None:
    text, _ = ranks.run(failing.one_rank_does_not_compile, 2)
    assert "rank 1" in text, text


def test_what_rank_0_cannot_capture_is_told_to_all() -> None:
    for text in ranks.run(failing.one_rank_cannot_capture, 3):
        assert "failing.py:" in text and "item()" in text, text


@pytest.mark.parametrize(("strategy", "victim"), [("shard", 1), ("zero1", 0), ("replicate", 2)])
def test_a_rank_that_dies_is_named(strategy: str, victim: int) -> None:
    found = ranks.outcomes(failing.killed_in_step, 3, strategy, victim)
    assert found[victim] is None
    for rank, outcome in enumerate(found):
        if rank != victim:
            assert outcome is not None and outcome.error is None, outcome
            text = outcome.value
            assert f"rank {victim}" in text and "did not answer" not in text, (rank, text)


def test_a_rank_that_leaves_or_is_stuck_is_named() -> None:
    left, _ = ranks.run(failing.raises_in_step, 2, 1)
    assert "rank 1" in left and "did not answer" not in left, left
    stuck, _ = ranks.run(failing.stuck_in_step, 2, 1)
    assert "rank 1 did not answer for " in stuck, stuck


@pytest.mark.parametrize(("size", "clip"), [(1, 1.0), (2, 1.0), (2, None)])
def test_values_that_are_not_finite_are_traced_to_their_batch(size: int, clip: float | None) -> None:
    for rank, (text, unchanged) in enumerate(ranks.run(failing.nan_on_one_rank, size, clip)):
        if clip is None and rank == 0:
            assert text == "", "without a norm, a rank learns of another's loss at its next step"
            continue
        assert "batch entry 'x'" in text, text
        assert size == 1 or clip is None or "rank 1" in text, text
        assert clip is None or unchanged


def test_a_permutation_that_is_cut_with_the_batch() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    loss_fn = lambda model, b: model(b["x"][b["order"]]).square().mean()  # noqa: E731
    batch = {"x": x, "order": torch.arange(8)}
    trainer = interlace.compile(model, torch.optim.SGD(model.parameters()), loss_fn, batch, interlace.Config(accumulation=2, cache="off"))
    where = r"test_trainer_errors.py:\d+" if on_device.DEVICE == "cpu" else "it may be of any op of the step"  # which no device tells
    with pytest.raises(interlace.InterlaceError, match=rf"(?s){where}.*numbers rows of the whole batch"):
        trainer.step(batch)
