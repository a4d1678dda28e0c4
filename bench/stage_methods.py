"""The methods of bench/pipeline.py: torch.distributed.pipelining's schedules and ours, on all ranks the same batches.

PyTorch's stages are made by hand, as its tutorial has it: the first embeds, each runs its share of the layers, the last has norm and head.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from cases import causal_loss, causal_model, token_batch
from peer_methods import Batch, Method, Settings, Step, adamw
from torch import nn

MICRO_BATCHES = 8
# As the default schedule has it for step 10; whoever warms up six steps has it behind him.
SEARCHED = [(0, []), (4, ["search(cluster={cluster},limit={limit},recompute=none,profile={profile})"])]


class Layers(nn.Module):
    """Layers [first, last) of a Llama."""

    def __init__(self, model: Any, first: int, last: int, ends: bool) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if first == 0 else None
        self.rotary, self.layers = inner.rotary_emb, nn.ModuleList(inner.layers[first:last])
        self.norm, self.head = (inner.norm, model.lm_head) if ends else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) if self.embed is not None else x
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.head(self.norm(hidden)) if self.head is not None else hidden


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1))


def theirs(settings: Settings, schedule: str, chunks: int) -> Step:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = causal_model(settings.case)
    stages, layers = ranks * chunks, settings.case["layers"]
    bounds = [layers * i // stages for i in range(stages + 1)]
    # A V: the first rank has the first and the last stage.
    own = [rank, stages - 1 - rank] if schedule == "ScheduleZBVZeroBubble" else [rank + ranks * c for c in range(chunks)]
    parts = [Layers(model, bounds[s], bounds[s + 1], s == stages - 1) for s in own]
    made = [PipelineStage(part, s, stages, torch.device("cpu")) for part, s in zip(parts, own, strict=True)]
    kind = getattr(schedules, schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    runs = kind(made if several else made[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = adamw([p for part in parts for p in part.parameters()])
    first, last = 0 in own, stages - 1 in own
    last_rank = 0 if schedule == "ScheduleZBVZeroBubble" else ranks - 1

    def step(batches: list[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        batch = batches[0]
        runs.step(*([batch["input_ids"]] if first else []), **({"target": batch["labels"], "losses": losses} if last else {}))
        optimizer.step()
        loss = torch.stack(losses).mean().detach().float() if last else torch.zeros(())
        dist.broadcast(loss, last_rank)
        return loss.item()

    return step


def ours(settings: Settings, **config: Any) -> Step:
    import interlace

    example = token_batch(settings.case, rows=settings.case["rows"])
    model = causal_model(settings.case)
    chosen = interlace.Config(
        mesh={"pp": dist.get_world_size()}, strategy="replicate", accumulation=MICRO_BATCHES, cache="off", timeout_s=300,
        **{"schedule": [], **config},
    )  # fmt: skip
    trainer = interlace.compile(model, adamw(model.parameters()), causal_loss, example, chosen)
    if dist.get_rank() == 0:
        print(f"{chosen.stage_order}: stages begin with {trainer._run.ir.meta()['stages']}", file=sys.stderr, flush=True)
    return lambda batches: trainer.step(batches[0]).item()


STAGES = {
    m.name: m
    for m in (
        Method("gpipe", "PyTorch GPipe", "stages", "torch", lambda s: theirs(s, "ScheduleGPipe", 1)),
        Method("1f1b", "PyTorch 1F1B", "stages", "torch", lambda s: theirs(s, "Schedule1F1B", 1)),
        Method("interleaved", "PyTorch interleaved 1F1B", "stages", "torch", lambda s: theirs(s, "ScheduleInterleaved1F1B", 2)),
        Method("zbv", "PyTorch ZBV", "stages", "torch", lambda s: theirs(s, "ScheduleZBVZeroBubble", 2)),
        Method("ours-gpipe", "interlace GPipe", "stages", "interlace", lambda s: ours(s, stage_order="gpipe"), ours=True),
        Method("ours-1f1b", "interlace 1F1B", "stages", "interlace", lambda s: ours(s, stage_order="1f1b"), ours=True),
        Method("ours-interleaved", "interlace interleaved", "stages", "interlace",
               lambda s: ours(s, stage_order="interleaved", stage_chunks=2), ours=True),
        Method("ours-auto", "interlace auto", "stages", "interlace", lambda s: ours(s, stage_order="auto", schedule=SEARCHED), ours=True),
        Method("ours-auto-plain", "interlace auto, unmeasured", "stages", "interlace", lambda s: ours(s, stage_order="auto"), ours=True),
        Method("ours-v", "interlace V", "stages", "interlace", lambda s: ours(s, stage_order="v"), ours=True),
        Method("ours-zb", "interlace zero bubble", "stages", "interlace", lambda s: ours(s, stage_order="zero_bubble"), ours=True),
    )
}  # fmt: skip
