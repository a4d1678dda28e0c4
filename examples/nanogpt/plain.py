"""The loop of nanoGPT on one process: python examples/nanogpt/plain.py TEXT"""

import sys

import torch
from model import GPT, Characters, learning_rate

file, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
torch.manual_seed(0)
batch = Characters(file, batch=8, seq=32)
model = GPT(batch.vocab, seq=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
for step in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps)
    _, loss = model(*batch("train"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 50 == 0:
        with torch.no_grad():
            _, valid = model(*batch("valid"))
        print(f"step {step + 1} train {loss.item():.4f} valid {valid.item():.4f}", flush=True)
