"""transformers.Trainer on compiled steps: the script with one line changed gives the same losses, norms, evaluation and resumed run."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

import interlace

ON_CPU = pytest.mark.host("transformers puts the trainer's tensors on CUDA or the CPU, and knows no device that is registered")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

SCRIPT = '''
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer


class Text(Dataset):
    def __init__(self, rows, seed, fixed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(5, 13, (rows,), generator=generator) if not fixed else torch.full((rows,), 10)
        self.rows = [torch.randint(3, 61, (int(n),), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])], mask[i, : len(row["input_ids"])] = row["input_ids"], 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Count(TrainerCallback):
    def __init__(self):
        self.steps = self.saves = self.evaluations = 0

    def on_step_end(self, args, state, control, **more):
        self.steps += 1

    def on_save(self, args, state, control, **more):
        self.saves += 1

    def on_evaluate(self, args, state, control, **more):
        self.evaluations += 1


def metric(found):
    return {"right": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}


def main(folder, resume=None, fixed=False, metrics=False, **more):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=61, max_position_embeddings=32,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)).double()
    args = TrainingArguments(**{**dict(
        output_dir=folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, max_steps=8,
        learning_rate=5e-3, lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.5, weight_decay=0.1, logging_steps=1,
        eval_strategy="steps", eval_steps=4, save_steps=4, load_best_model_at_end=True, use_cpu=True, report_to=[],
        disable_tqdm=True), **more})
    count = Count()
    trainer = Trainer(model=model, args=args, train_dataset=Text(21, 0, fixed), eval_dataset=Text(7, 1, fixed), data_collator=collate,
                      callbacks=[count], compute_metrics=metric if metrics else None)
    trainer.train(resume_from_checkpoint=resume)
    after = trainer.evaluate()
    trainer.save_model(folder + "/last")
    return trainer, count, after
'''  # fmt: skip
OURS = SCRIPT.replace("from transformers import Trainer\n", "from interlace.integrations.transformers import Trainer\n")


def run(script: str, folder: str, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    AcceleratorState._reset_state(True)
    space: dict[str, Any] = {}
    if config is not None:
        script = script.replace("callbacks=[count],", f"callbacks=[count], interlace=Config(**{config!r}),")
        space["Config"] = interlace.Config
    exec(compile(script, "script.py", "exec"), space)
    trainer, count, after = space["main"](folder, **more)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "train_loss", "step", "epoch")
    history = [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]
    compiled = getattr(trainer, "compiled", None)
    if compiled is not None:
        compiled.close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return {
        "history": history, "count": vars(count), "after": after["eval_loss"], "weights": load_file(f"{folder}/last/model.safetensors"),
        "compiled": compiled is not None,
    }  # fmt: skip


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["compiled"] and not theirs["compiled"]
    assert ours["count"] == theirs["count"] and len(ours["history"]) == len(theirs["history"])
    for mine, other in zip(ours["history"], theirs["history"], strict=True):
        assert mine == pytest.approx(other, rel=2e-6), (mine, other)  # transformers adds losses up in float32
    assert ours["after"] == pytest.approx(theirs["after"], rel=1e-6)
    for name, t in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], t, rtol=1e-6, atol=1e-7)


def test_a_script_changes_by_two_lines_at_most() -> None:
    changed = [line for line in difflib.ndiff(SCRIPT.splitlines(), OURS.splitlines()) if line.startswith("+ ")]
    assert len(changed) == 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[list[dict[str, Any]], Path]]:
    """What transformers' own trainer makes on so many ranks, and its folder."""

    @functools.cache
    def made(size: int) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path_factory.mktemp("theirs")
        return ranks.run(run, size, SCRIPT, str(folder)), folder

    return made


@ON_CPU
@pytest.mark.parametrize(("size", "config"), [
    (1, None), (2, {"strategy": "zero1"}), *(pytest.param(2, config, marks=pytest.mark.soak) for config in (None, {"strategy": "replicate"})),
])
def test_the_same_numbers_and_a_resumed_run(size: int, config: dict[str, Any] | None, tmp_path: Path, plain: Any) -> None:
    theirs, folder = plain(size)
    ours = ranks.run(run, size, OURS, str(tmp_path / "ours"), config)
    for mine, other in zip(ours, theirs, strict=True):
        compare(mine, other)
    again = ranks.run(run, size, OURS, str(tmp_path / "again"), config, resume=str(tmp_path / "ours" / "checkpoint-4"))
    for mine, other in zip(again, ours, strict=True):
        tail = [e for e in other["history"] if e["step"] > 4 and "train_loss" not in e]
        found = [e for e in mine["history"] if e["step"] > 4 and "train_loss" not in e]
        for a, b in zip(found, tail, strict=True):
            assert a == pytest.approx(b, rel=2e-6)
        for name, t in other["weights"].items():
            torch.testing.assert_close(mine["weights"][name], t, rtol=1e-6, atol=1e-7)
    # Their checkpoint is one of ours too, and ours one of theirs.
    for script, start in ((OURS, folder), (SCRIPT, tmp_path / "ours")) if config is None else ((SCRIPT, tmp_path / "ours"),):
        crossed = ranks.run(run, size, script, str(tmp_path / f"from-{start.name}"), resume=str(start / "checkpoint-4"))
        for name, t in theirs[0]["weights"].items():
            torch.testing.assert_close(crossed[0]["weights"][name], t, rtol=1e-6, atol=1e-8)


@ON_CPU
@pytest.mark.parametrize("more", [{"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}, {"gradient_accumulation_steps": 3}])
def test_without_accumulation_or_clipping_and_with_metrics(more: dict[str, Any], tmp_path: Path) -> None:
    settings = {**more, "fixed": True, "metrics": True, "per_device_eval_batch_size": 7}
    compare(run(OURS, str(tmp_path / "ours"), **settings), run(SCRIPT, str(tmp_path / "theirs"), **settings))
