"""Tiny models and a captured model in an executor, for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from interlace.capture import capture

_runtime = on_device.executors(pytest.importorskip("interlace._runtime"))
_core = pytest.importorskip("interlace._core")
torch.set_num_threads(1)

TINY = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def llama(**kw: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, "num_key_value_heads": 2, "use_cache": False, **kw}))


def gpt2(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


def tokens(batch: int = 2, seq: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(128, (batch, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def language_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Run:
    """A captured model in an executor, loaded with the model's own tensors."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Callable, passes: str = "", optimizer: Any = None,
        axes: list[dict] | None = None, captured: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        rng = options.get("rng", "keyed")
        self.rank = axes[0]["rank"] if axes else 0
        self.captured = captured or capture(model, loss, batch, optimizer=optimizer, rng_mode=rng)
        self.program = _core.Program.parse(self.captured.text, "captured")
        if passes:
            self.program.run_passes(passes)
        self.executor = _runtime.Executor(self.program.print(), "cpu", axes or [], 60.0, options)
        self.buffer_ids = {b["name"]: b["value"] for b in self.program.buffers()}
        for name, value in self.buffer_ids.items():
            self.executor.tensor(value).copy_(self.captured.tensors[name])
        self.load()
        self.hyper = [[0.0] * 7 for _ in self.program.groups()]

    def load(self) -> None:
        """The model's own parameters, into whatever holds them on this rank."""
        states = {(s["unit"], s["role"]): s["value"] for s in self.program.states()}
        units = {u["id"]: u for u in self.program.units()}
        for p in self.program.params():
            real = self.captured.tensors[p["name"]].detach()
            if p["unit"] is None:
                self.executor.tensor(p["value"]).copy_(real)
                continue
            unit = units[p["unit"]]
            full = torch.zeros(unit["numel"], dtype=real.dtype)
            full[p["unit_offset"] : p["unit_offset"] + real.numel()] = real.flatten()
            if (p["unit"], "full") in states:
                at, length = 0, unit["numel"]
                flat = self.executor.tensor(states[p["unit"], "full"])
            else:
                at, length = self.rank * unit["shard"], unit["shard"]
                flat = self.executor.tensor(states[p["unit"], "shard"])
            covered = slice(max(p["unit_offset"] - at, 0), max(p["unit_offset"] + real.numel() - at, 0))
            flat[covered] = full[at : at + length][covered]

    def params(self) -> dict[str, torch.Tensor]:
        out = {}
        states = {(s["unit"], s["role"]): s["value"] for s in self.program.states()}
        for p in self.program.params():
            if p["unit"] is None:
                out[p["name"]] = self.executor.tensor(p["value"])
            else:
                full, at = self._whole(states, p["unit"]), p["unit_offset"]
                like = self.captured.tensors[p["name"]]
                out[p["name"]] = full[at : at + like.numel()].view(like.shape)
        return out

    def _whole(self, states: dict[tuple[int, str], int], unit: int) -> torch.Tensor:
        """A unit's flat buffer; of a sharded one on several ranks, the shards of all."""
        if (unit, "full") in states:
            return self.executor.tensor(states[unit, "full"])
        own = self.executor.tensor(states[unit, "shard"]).cpu()
        if not dist.is_initialized():
            return own
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    def step(self, batch: Any, step: int = 0) -> dict[str, Any]:
        return self.executor.step([self.captured.input_spec.flatten(batch)], self.hyper, step)
