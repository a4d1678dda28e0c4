"""Classifies images: bfloat16 autocast, BatchNorm, two micro-batches a step, on as many ranks as torchrun starts.

torchrun --nproc-per-node 2 examples/images.py --steps 60
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import interlace

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=32, help="images of a rank in a step")
parser.add_argument("--accumulation", type=int, default=2, help="micro-batches that they are cut into")
parser.add_argument("--save", default=None, help="a folder for the checkpoint")
args = parser.parse_args()

torch.manual_seed(0)
CLASSES = 4
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(32, CLASSES),
)  # fmt: skip
patterns = torch.randn(CLASSES, 3, 16, 16)  # what makes up a class, on every rank the same


def images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A batch of noisy patterns; put a data set of yours here."""
    labels = torch.randint(CLASSES, (args.batch,), generator=generator)
    noise = torch.randn(args.batch, 3, 16, 16, generator=generator)
    return {"pixels": patterns[labels] + noise, "labels": labels}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["pixels"])
    right = (logits.argmax(dim=1) == batch["labels"]).float().mean()
    return {"loss": nn.functional.cross_entropy(logits.float(), batch["labels"]), "right": right}


optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
config = interlace.Config(strategy="replicate", accumulation=args.accumulation, param_dtype="autocast")
trainer = interlace.compile(model, optimizer, loss_fn, images(torch.Generator().manual_seed(0)), config)
draw = torch.Generator().manual_seed(1 + trainer.data_rank)
for step in range(args.steps):
    loss = trainer.step(images(draw))
    if trainer.rank == 0 and (step + 1) % 20 == 0:
        right = torch.stack(trainer.outputs["right"]).mean().item()
        print(f"step {step + 1} loss {loss.item():.4f} right {right:.2f} of rank 0's images", flush=True)
found = trainer.evaluate(images(torch.Generator().manual_seed(12345)))  # with BatchNorm's running statistics
if trainer.rank == 0:
    print(f"evaluation: loss {found['loss'].item():.4f}, right {found['right'].item():.2f}", flush=True)
if args.save:
    trainer.save(args.save)
trainer.close()
if dist.is_initialized():
    dist.destroy_process_group()
