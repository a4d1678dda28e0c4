"""A sample of the zoo (zoo_models.py), and with `make soak` all of it: losses as eager's, one rank and two."""

from __future__ import annotations

import pytest
import ranks
import zoo_models

SAMPLE = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "SwinForImageClassification",
    "Swinv2ForImageClassification", "Wav2Vec2ForCTC", "HubertForCTC", "TimeSeriesTransformerForPrediction",
    "ResNetForImageClassification", "torch.nn.BatchNorm2d", "torch.nn.LSTM", "torch.nn.channels_last",
    "idiom: codes of a buffer", "idiom: inner steps", "idiom: random field",
)  # fmt: skip


def check(name: str, size: int) -> None:
    row = ranks.run(zoo_models.one, size, name)[0]
    assert row["result"] == "whole", row


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str) -> None:
    check(name, 2 if SAMPLE.index(name) % 2 and "BatchNorm" not in name else 1)


@pytest.mark.soak
def test_there_are_enough() -> None:
    assert len(zoo_models.cases()) >= 150


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_all(size: int) -> None:
    rows = [ranks.run(zoo_models.one, size, case.name, timeout_s=600)[0] for case in zoo_models.cases()]
    rows = [row for row in rows if row["result"] != "eager fails"]
    good = [row for row in rows if row["result"] in ("whole", "opaque")]
    assert len(good) >= 0.97 * len(rows), zoo_models.table(rows)
