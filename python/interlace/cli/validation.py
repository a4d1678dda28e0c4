"""The loss of a text, or a share of it, that is not trained on: the same sequences each time, an equal share of them on each rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from interlace.cli.settings import SettingError, TrainSettings
from interlace.cli.train_text import Text, evaluated_on
from interlace.data import TokenDataset
from interlace.data.text import DataError


class Validation:
    """Sequences of --eval-text or --eval-share in the order of a fixed seed, cut into batches as large as a micro-batch of training."""

    def __init__(self, settings: TrainSettings, tokens: Text) -> None:
        self.every = settings.eval_every
        batch = settings.micro_batch * settings.data_ranks
        try:
            self.data = TokenDataset(evaluated_on(tokens, settings), settings.seq, batch)
        except DataError as e:
            option = f"--eval-text {settings.eval_text}" if settings.eval_text is not None else f"--eval-share {settings.eval_share}"
            raise SettingError(f"{option}: {e}") from None
        self.batches = max(1, min(settings.eval_sequences, self.data.windows) // batch)

    def due(self, done: int, last: bool) -> bool:
        return last or done % self.every == 0

    def loss(self, trainer: Any) -> float:
        """Mean loss of a token. Every rank must call it."""
        total = torch.zeros((), dtype=torch.float64)
        for i in range(self.batches):
            inputs, labels = self.data.batch_at(i, trainer.data_rank, trainer.data_ranks)
            total += trainer.evaluate({"input_ids": inputs, "labels": labels})["loss"].double().cpu()
        if trainer.world_size > 1:
            dist.all_reduce(total)
        return total.item() / (self.batches * trainer.world_size)


def words(loss: float) -> str:
    """ "2.3026 (perplexity 10.00)"."""
    return f"{loss:.4f} (perplexity {math.exp(min(loss, 700)):.2f})"
