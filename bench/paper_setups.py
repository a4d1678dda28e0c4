"""How the papers ran their methods, by name, for `bench/papers.py --setup`: precision, experts, memory limit, software stack of each method.

deepcompile   Llama-3-70B on 32 and Mixtral-8x7B on 16 H100: float32 parameters, gradients and states, bfloat16 in forward and
              backward, whole blocks recomputed, each expert's weights of their own, 0.9 x (80 - 7) GB for the program; ZeRO-3 eager and
              compiled, P, S and P+S. DeepCompile decides by memory first where that is faster, so P+S is `unshard,prefetch`
simplefsdp    Llama-3.1-8B on 8 and 64 H100: float32 parameters gathered in bfloat16, reduced in float32, compiled by Inductor; eager
              FSDP2 beside it
mist          GPT of 1.3B to 22B on L4 and A100 through the planner, fp16 with float32 masters, recomputation by block
"""

from __future__ import annotations

import dataclasses
from typing import Any

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Setup:
    name: str
    limit_bytes: int  # of a device, for the program
    reduce: str  # dtype of gradients between ranks
    experts_apart: bool
    stacks: dict[str, str]  # method → stack of the cluster; others are "compiled"

    def stack(self, method: str) -> str:
        return self.stacks.get(method, "compiled")


SETUPS = {
    "deepcompile": Setup("deepcompile", int(0.9 * (80 - 7) * GB), "bf16", True,
                         {"ZeRO-3": "eager", "FSDP, full gradients": "eager", "ours": "ours"}),
    "simplefsdp": Setup("simplefsdp", 73 * 2**30, "f32", False, {"vanilla": "eager", "ZeRO-1": "eager", "ours": "ours"}),
}  # fmt: skip


def captured(model: str, batch: int, seq: int, setup: Setup) -> Any:
    """The program with float32 parameters that are cast for forward and backward."""
    from interlace import _core
    from interlace.capture import capture
    from interlace.capture.casts import Casts
    from interlace.models import build

    built = build(model, micro_batch=batch, seq=seq, dtype="float32", meta=True)
    if setup.experts_apart:
        split_experts(built.model)
    text = capture(built.model, built.loss_fn, built.example_batch, casts=Casts.named("bfloat16", None)).text
    return _core.Program.parse(text)


def split_experts(model: Any) -> int:
    """Every expert's three weights as parameters of their own, each expert given an equal part of the tokens in order: what is
    trained is another function, its sizes, transfers and times are those of experts that get equally many. Returns how many."""
    from torch import nn

    count = 0
    for module in list(model.modules()):
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and hasattr(experts, "gate_up_proj"):
            module.experts = _apart(experts, module.top_k)
            count += 1
    return count


def _apart(experts: Any, top_k: int) -> Any:
    import torch
    from torch import nn

    width, inner = experts.down_proj.shape[1], experts.down_proj.shape[2]
    like = {"device": experts.down_proj.device, "dtype": experts.down_proj.dtype}

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Linear(width, inner, bias=False, **like)
            self.w3 = nn.Linear(width, inner, bias=False, **like)
            self.w2 = nn.Linear(inner, width, bias=False, **like)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w2(experts.act_fn(self.w1(x)) * self.w3(x))

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList(Expert() for _ in range(experts.num_experts))

        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            tokens = x.shape[0]
            order = index.reshape(-1).argsort()
            rows = x[order // top_k]
            parts = rows.tensor_split(len(self.each))
            out = torch.cat([expert(part) for expert, part in zip(self.each, parts, strict=True)])
            out = out * weights.reshape(-1)[order].unsqueeze(1).to(out.dtype)
            return torch.zeros_like(x).index_add(0, order // top_k, out).view(tokens, -1)

    return Apart()
