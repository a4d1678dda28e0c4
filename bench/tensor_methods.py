"""The methods of bench/tensor_parallel.py: PyTorch's DTensor modules and ours, on all ranks the same batches.

PyTorch's are `parallelize_module` as its tutorial has it for Llama: the products cut by columns and rows, an all-reduce behind each pair;
or with SequenceParallel, which gathers in front of a pair and scatters behind it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch.distributed as dist
from cases import causal_loss, causal_model, token_batch
from peer_methods import Batch, Method, Settings, Step, adamw

PLAN_STEP = 7  # the steps before it give the times that the search decides by
LAST_STEP = 40  # until all plans are settled


def dtensor(settings: Settings, sequence: bool) -> Step:
    """parallelize_module over all ranks; its parameters and the others have an optimizer group each, as fused AdamW does not mix them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model: Any = causal_model(settings.case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, rows = Replicate(), Shard(1)
    between = rows if sequence else whole
    block: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    block |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    block |= {"self_attn.o_proj": RowwiseParallel(output_layouts=between), "mlp.down_proj": RowwiseParallel(output_layouts=between)}
    head: dict[str, Any] = {"lm_head": ColwiseParallel(input_layouts=between, output_layouts=whole)}
    if sequence:
        block |= {
            "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": rows}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        }  # fmt: skip
        head |= {
            "model.norm": SequenceParallel(use_local_output=True),
            "model.layers.0": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(rows,), use_local_output=True),
        }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, head)
    parameters = list(model.parameters())
    cut = [p for p in parameters if isinstance(p, DTensor)]
    rest = [p for p in parameters if not isinstance(p, DTensor)]
    optimizer = adamw([{"params": group} for group in (cut, rest) if group])

    def step(batches: list[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = causal_loss(model, batches[0])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(settings: Settings, plan: bool, sequence: bool = True, **more: Any) -> Step:
    """`plan`: with the program that a search chooses on the times of the first steps."""
    import interlace
    from interlace import _core

    example = token_batch(settings.case, rows=settings.case["rows"])
    common: dict[str, Any] = {"cache": "off", "timeout_s": 300, **more}
    on_mesh = interlace.Config(
        mesh={"tp": dist.get_world_size()}, strategy="replicate", sequence_parallel=sequence,
        schedule=[(PLAN_STEP, ["search(cluster={cluster},profile={profile},limit={limit})"])] if plan else [], **common,
    )  # fmt: skip

    model = causal_model(settings.case)
    trainer = interlace.compile(model, adamw(model.parameters()), causal_loss, example, on_mesh)
    if plan:
        for step in range(LAST_STEP):
            if step > PLAN_STEP and trainer.settled:
                break
            trainer.step(example)
        text = trainer.program
        trainer.close()
        # From the same weights as the others: a checkpoint of the start would bring back the program of the start.
        model = causal_model(settings.case)
        trainer = interlace.compile(model, adamw(model.parameters()), causal_loss, example, dataclasses.replace(on_mesh, schedule=[]))
        trainer.swap(text)
        if dist.get_rank() == 0:
            print(_core.Program.parse(trainer.program).explain(), file=sys.stderr, flush=True)
    return lambda batches: trainer.step(batches[0]).item()


TENSOR = {
    m.name: m
    for m in (
        Method("dtensor", "DTensor, parallelize_module", "tensor", "torch", lambda s: dtensor(s, sequence=False)),
        Method("dtensor-sequence", "DTensor with SequenceParallel", "tensor", "torch", lambda s: dtensor(s, sequence=True)),
        Method("plain", "interlace, whole between products", "tensor", "interlace", lambda s: ours(s, False, sequence=False), ours=True),
        Method("sequence", "interlace", "tensor", "interlace", lambda s: ours(s, False), ours=True),
        Method("search", "interlace search", "tensor", "interlace", lambda s: ours(s, True), ours=True),
        Method(
            "regions", "interlace search, elementwise ops compiled", "tensor", "interlace",
            lambda s: ours(s, True, regions="on", regions_wait=True), ours=True,
        ),
    )
}
