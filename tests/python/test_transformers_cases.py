"""transformers.Trainer on compiled steps in the cases where padding, short batches, outputs and the user's own code decide the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import Dataset

import interlace

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytestmark = pytest.mark.host("transformers puts the trainer's tensors on CUDA or the CPU, and knows no device that is registered")
F = nn.functional


class Rows(Dataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


def texts(count: int, label: Callable[[torch.Tensor], Any], low: int = 5, high: int = 13, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 31, (n,), generator=generator) for n in lengths]
    return Rows([{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": label(x)} for x in ids])


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    out = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        longest = max(v.shape[0] if v.dim() else 0 for v in values)
        fill = -100 if name == "labels" else 0
        ends = [(*(0, 0) * (v.dim() - 1), 0, longest - v.shape[0]) if v.dim() else () for v in values]
        out[name] = torch.stack([F.pad(v, by, value=fill) for v, by in zip(values, ends, strict=True)])
    return out


class Reader(nn.Module):
    """A text as one vector (or one for each word), and what is made of it. `kind`: number, word or place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.words, self.head = kind, nn.Embedding(31, 8), nn.Linear(8, {"number": 1, "word": 4, "place": 1}[kind])
        self.double()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, Any]:
        hidden = self.words(input_ids) * attention_mask[..., None]
        mean = hidden.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None]
        if self.kind == "number":
            scores = self.head(mean)[:, 0, 0]
            loss = None if labels is None else F.mse_loss(scores, labels)
        elif self.kind == "place":  # a softmax over positions, padding among them
            scores = self.head(hidden + mean)[..., 0]
            loss = None if labels is None else F.cross_entropy(scores, labels)
        else:
            scores = self.head(hidden + mean)
            loss = None if labels is None else F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        found = {"scores": scores, "all": (hidden, mean[:, 0])}
        return found if loss is None else {"loss": loss, **found}


LABELS: dict[str, Callable[[torch.Tensor], Any]] = {
    "number": lambda x: x.double().mean() / 30, "word": lambda x: x % 4, "place": lambda x: torch.tensor(len(x) - 2),
}  # fmt: skip


class Pictures(nn.Module):
    """Float inputs and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        scores = self.net(pixel_values)
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


def pictures(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return Rows([{"pixel_values": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(rows)])


def trained(kind: str, folder: Path | str, model: Any, train: Rows, more: dict[str, Any], mix: Any = None, **given: Any) -> Any:
    """transformers' own trainer or ours, after training and a prediction; `mix` makes the body of a subclass."""
    import transformers
    from accelerate.state import AcceleratorState

    from interlace.integrations import transformers as ours

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29557")
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    base: Any = (transformers if kind == "theirs" else ours).Trainer
    if mix is not None:
        base = type("Mine", (base,), mix(base))
    args = transformers.TrainingArguments(**{**dict(
        output_dir=str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, num_train_epochs=2, learning_rate=5e-2,
        logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True), **more})  # fmt: skip
    given = {k: v() if k == "callbacks" else v for k, v in given.items()}
    trainer = base(args=args, train_dataset=train, data_collator=collate, **(model if isinstance(model, dict) else {"model": model}), **given)
    trainer.train()
    return trainer


def numbers(trainer: Any, evaluated: Rows | None = None) -> dict[str, Any]:
    found = trainer.predict(evaluated) if evaluated is not None else None
    compiled = getattr(trainer, "compiled", None)
    state = compiled.state_dict(all_ranks=True) if compiled is not None else trainer.model.state_dict()
    kept = ("loss", "grad_norm", "train_loss", "eval_loss", "told")
    history = [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]
    result = {
        "history": history, "state": {n: t.detach().clone() for n, t in state.items()},
        "predictions": found and found.predictions, "loss": found and found.metrics["test_loss"],
    }  # fmt: skip
    if compiled is not None:
        compiled.close()
    return result


def same(ours: Any, theirs: Any, near: float = 2e-6) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            same(ours[name], theirs[name], near)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b, near)
    elif theirs is None or isinstance(theirs, float):
        assert ours == (theirs if theirs is None else pytest.approx(theirs, rel=near, abs=1e-8))
    else:
        a, b = torch.as_tensor(ours), torch.as_tensor(theirs)
        torch.testing.assert_close(a, b, rtol=near, atol=1e-7, equal_nan=True)


def both(folder: Path, model: Callable[[], Any], train: Rows, more: dict[str, Any], evaluated: Rows | None = None, **given: Any) -> Any:
    """What ours gives, after it was compared."""
    theirs = numbers(trained("theirs", folder / "theirs", model(), train, more, **given), evaluated)
    ours = numbers(trained("ours", folder / "ours", model(), train, more, **given), evaluated)
    same(ours, theirs)
    return ours


def on_ranks(kind: str, folder: str, case: str) -> Any:
    train, more = texts(12, LABELS[case]), {"gradient_accumulation_steps": 2 if case == "number" else 1}
    return numbers(trained(kind, folder, Reader(case), train, more), texts(8, LABELS[case], seed=1))


@pytest.mark.parametrize("kind", ["number", "word", "place"])
def test_lengths_come_as_they_are_where_a_loss_sees_padding(kind: str, tmp_path: Path) -> None:
    both(tmp_path, lambda: Reader(kind), texts(11, LABELS[kind]), {}, texts(6, LABELS[kind], seed=1))


@pytest.mark.parametrize("kind", ["place", "number"])
def test_lengths_of_one_step_that_a_loss_sees(kind: str, tmp_path: Path, caplog: Any) -> None:
    """Steps run in Python; the last one has fewer micro-batches, the last of which has fewer rows."""
    more = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
    both(tmp_path, lambda: Reader(kind), texts(11, LABELS[kind]), more, texts(6, LABELS[kind], seed=1))
    assert ("batches are taken as they are from now on: the loss of Reader changes with the padding" in caplog.text) == (kind == "place")
    with pytest.raises(interlace.InterlaceError, match=r"loss of Reader changes with the padding .* \(padding='max_length'\)"):
        settings = interlace.Config(param_dtype="bfloat16")
        trained("ours", tmp_path, Reader("place").float(), texts(8, LABELS["place"]), more, interlace=settings)


class Speech(nn.Module):
    """Sounds of several lengths, statistics, and a loss that aligns them with what was said."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ear, self.norm, self.head = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.double()

    def forward(self, input_values: Any, labels: Any = None) -> Any:
        hidden = torch.tanh(self.norm(self.ear(input_values).transpose(1, 2))).transpose(1, 2)
        scores = self.head(hidden).log_softmax(-1)
        lengths = (labels > 0).sum(1)
        spoken = labels.masked_select(labels > 0)
        loss = F.ctc_loss(scores.transpose(0, 1), spoken, torch.full_like(lengths, scores.shape[1]), lengths)
        return {"loss": loss, "scores": scores}


def sounds(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count // 2):
        n, m = torch.randint(9, 15, (2,), generator=generator).tolist()
        for _ in range(2):
            said = torch.randint(1, 5, (m - 7,), generator=generator)
            rows.append({"input_values": torch.randn(n, 3, generator=generator).double(), "labels": said})
    return Rows(rows)


def speak(kind: str, folder: str, accumulation: int, count: int = 20) -> Any:
    more = {"gradient_accumulation_steps": accumulation, "num_train_epochs": 1, "optim": "sgd"}
    trainer = trained(kind, folder, Speech(), sounds(count), {**more, "dataloader_drop_last": True})
    result = numbers(trainer)
    for name in [n for n in result["state"] if "running" in n]:  # each rank's own
        del result["state"][name]
    return result


@pytest.mark.parametrize("accumulation", [1, 3])
def test_sounds_of_several_lengths(accumulation: int, tmp_path: Path, caplog: Any) -> None:
    count = 60 if accumulation == 1 else 20
    same(speak("ours", str(tmp_path / "ours"), accumulation, count), speak("theirs", str(tmp_path / "theirs"), accumulation, count))
    assert caplog.text.count("batches are taken as they are from now on") == 1


def test_sounds_of_several_lengths_on_two_ranks(tmp_path: Path) -> None:
    theirs = ranks.run(speak, 2, "theirs", str(tmp_path / "theirs"), 2)
    for mine, other in zip(ranks.run(speak, 2, "ours", str(tmp_path / "ours"), 2), theirs, strict=True):
        same(mine, other)


@pytest.mark.parametrize("accumulation", [2, 3])
@pytest.mark.parametrize("case", ["number", "word", "pictures"])
def test_a_short_last_batch_and_a_short_last_step(case: str, accumulation: int, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 3}
    if case == "pictures":
        both(tmp_path, Pictures, pictures(14), more, pictures(5, 1))
    else:
        both(tmp_path, lambda: Reader(case), texts(14, LABELS[case]), more)


@pytest.mark.parametrize("case", ["number", "word", "place"])
def test_two_ranks_with_other_lengths(case: str, tmp_path: Path) -> None:
    theirs = ranks.run(on_ranks, 2, "theirs", str(tmp_path / "theirs"), case)
    for mine, other in zip(ranks.run(on_ranks, 2, "ours", str(tmp_path / "ours"), case), theirs, strict=True):
        same(mine, other)


def test_many_lengths_are_evaluated_by_few_programs(tmp_path: Path) -> None:
    evaluated = texts(40, LABELS["word"], high=100, seed=1)
    trainer = trained("ours", tmp_path / "ours", Reader("word"), texts(4, LABELS["word"]), {})
    ours = trainer.predict(evaluated)
    assert len(trainer.compiled._evaluation._built) <= 8
    trainer.compiled.close()
    theirs = trained("theirs", tmp_path / "theirs", Reader("word"), texts(4, LABELS["word"]), {}).predict(evaluated)
    same(ours.predictions, theirs.predictions)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=2e-6)


def test_text_to_text_outputs_in_order_and_generation(tmp_path: Path) -> None:
    import transformers
    from accelerate.state import AcceleratorState

    from interlace.integrations import transformers as ours

    def run(kind: str) -> Any:
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=31, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)).double()
        args = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path / kind), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=3, save_strategy="no",
            use_cpu=True, report_to=[], disable_tqdm=True, predict_with_generate=True, generation_max_length=6)  # fmt: skip
        base: Any = (transformers if kind == "theirs" else ours).Seq2SeqTrainer
        label = lambda x: x[:3]  # noqa: E731
        trainer = base(model=model, args=args, train_dataset=texts(6, label, 6, 8), data_collator=collate)
        trainer.train()
        written = trainer.predict(texts(4, label, 6, 8, 1)).predictions
        args.predict_with_generate = False
        logits, encoded = trainer.predict(texts(4, label, 6, 8, 1)).predictions
        assert logits.shape == (4, 3, 31) and encoded.shape[2] == 8
        return written, logits, encoded

    same(run("ours"), run("theirs"))


def weighs(base: Any) -> dict[str, Any]:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        out = model(**inputs)
        loss = out["loss"] * (1 + self.state.global_step)
        self.log({"told": loss.item()})
        return (loss, out) if return_outputs else loss

    return {"compute_loss": compute_loss}


def test_a_loss_reads_what_changes_and_logs(tmp_path: Path) -> None:
    found = both(tmp_path, lambda: Reader("word"), texts(8, LABELS["word"]), {"num_train_epochs": 1}, mix=weighs)
    assert sum("told" in entry for entry in found["history"]) == 4


def test_a_callback_changes_the_clipping(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Clip(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            args.max_grad_norm = 1.0 if state.global_step < 2 else 1e-3

    both(tmp_path, lambda: Reader("word"), texts(8, LABELS["word"]), {"optim": "sgd"}, callbacks=lambda: [Clip()])


def test_a_model_that_is_made_anew(tmp_path: Path) -> None:
    found = []
    for kind in ("theirs", "ours"):
        trainer = trained(kind, tmp_path / kind, {"model_init": lambda: Reader("word")}, texts(8, LABELS["word"]), {})
        trainer.train()
        found.append(numbers(trainer))
    same(found[1], found[0])


def test_an_optimizer_with_other_parameters_for_evaluations(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    more = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 3}
    evaluated = texts(4, LABELS["word"], seed=1)
    both(tmp_path, lambda: Reader("word"), texts(8, LABELS["word"]), more, evaluated, eval_dataset=evaluated)


def test_evaluation_in_half_precision_after_training(tmp_path: Path) -> None:
    both(tmp_path, lambda: Reader("word").float(), texts(8, LABELS["word"]), {"bf16_full_eval": True}, texts(4, LABELS["word"], seed=1))


def test_noise_of_embeddings(tmp_path: Path) -> None:
    data, found = texts(8, LABELS["word"]), []
    for kind, alpha in (("theirs", 1e-9), ("ours", 1e-9), ("ours", 50.0)):
        found.append(numbers(trained(kind, tmp_path / kind, Reader("word"), data, {"neftune_noise_alpha": alpha, "optim": "sgd"})))
    same(found[1], found[0])
    assert abs(found[2]["history"][0]["loss"] - found[0]["history"][0]["loss"]) > 1e-2


def own_step(base: Any) -> dict[str, Any]:
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    return {"training_step": training_step}


def test_what_a_compiled_step_does_not_have_is_refused(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self.total = sum(p.grad.sum() for p in model.parameters())

    data = texts(4, LABELS["word"])
    with pytest.raises(interlace.InterlaceError, match=r"Reads.on_pre_optimizer_step .* trainer.compiled.norm in on_step_end"):
        trained("ours", tmp_path, Reader("word"), data, {}, callbacks=lambda: [Reads()])
    with pytest.raises(interlace.InterlaceError, match=r"Mine.training_step made no compiled step: .* super\(\).training_step"):
        trained("ours", tmp_path, Reader("word"), data, {}, mix=own_step)
