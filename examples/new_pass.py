"""A pass of your own, without C++: a function from program text to program text. This one starts every gather one unit earlier, so that two
are under way at a time. It is predicted on a cluster, then put into a training run between two steps, which changes no bit of the losses.

torchrun --nproc-per-node 2 examples/new_pass.py
"""

from __future__ import annotations

import json
import re
import sys

import torch
import torch.distributed as dist
from torch import nn

import interlace
from interlace import _core


def gather_earlier(text: str) -> str:
    """In every phase the start of each gather moves up to where the one before it stood. Its operand is a shard, which is always there."""
    phases = re.split(r"(?m)^(?=phase )", text)
    for number, phase in enumerate(phases):
        lines = phase.splitlines()
        places = [i for i, line in enumerate(lines) if "= gather.start(" in line]
        starts = [lines[i] for i in places]
        if not places:
            continue
        for place, start in zip(places, [*starts[1:], None], strict=True):
            lines[place] = start
        lines.insert(places[0], starts[0])
        phases[number] = "".join(f"{line}\n" for line in lines if line is not None)
    return "".join(phases)


def predicted_ms(text: str) -> float:
    """A step of the program on two L4, in milliseconds."""
    program = _core.Program.parse(text, "program")
    program.verify()
    return json.loads(_core.Simulation(program, "l4-24gb-2").json())["step_us"] / 1e3


torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.Tanh()) for _ in range(4)], nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(0)
batches = []
for _ in range(20):
    x = torch.randn(256, 512, generator=draw)
    batches.append({"x": x, "y": x.mean(dim=1, keepdim=True)})


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


# schedule=[]: no search of our own replaces the program meanwhile.
trainer = interlace.compile(model, optimizer, loss_fn, batches[0], interlace.Config(schedule=[]))
for batch in batches[:10]:
    loss = trainer.step(batch)
before = trainer.program
after = gather_earlier(before)
if "--without" not in sys.argv:
    trainer.swap(after)
for batch in batches[10:]:
    loss = trainer.step(batch)
if trainer.rank == 0:
    print(f"predicted: {predicted_ms(before):.4f} ms a step before, {predicted_ms(after):.4f} ms after", flush=True)
    print(f"step {trainer.steps} loss {loss.item():.9f}, {trainer.swaps} swap{'' if trainer.swaps == 1 else 's'}", flush=True)
trainer.close()
if dist.is_initialized():
    dist.destroy_process_group()
