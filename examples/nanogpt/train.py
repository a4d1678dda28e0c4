"""The loop of nanoGPT on any number of ranks: torchrun --nproc-per-node 2 examples/nanogpt/train.py TEXT"""

import sys

import torch
from model import GPT, Characters, learning_rate

import interlace

file, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
torch.manual_seed(0)
batch = Characters(file, batch=8, seq=32)
model = GPT(batch.vocab, seq=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
example = (torch.zeros(8, 32, dtype=torch.long),) * 2
trainer = interlace.compile(model, optimizer, lambda model, xy: model(*xy)[1], example, interlace.Config(clip_norm=1.0))
for step in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps)
    loss = trainer.step(batch("train"))
    if (step + 1) % 50 == 0:
        valid = trainer.evaluate(batch("valid"))["loss"]
        print(f"step {step + 1} train {loss.item():.4f} valid {valid.item():.4f}", flush=True)
