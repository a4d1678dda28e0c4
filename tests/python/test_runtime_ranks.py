"""The executor on several ranks: every way to shard gives the same bits, near those of one process."""

from __future__ import annotations

import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from runtime_support import Run, capture, language_loss, llama, tokens
from torch import nn

from interlace.dist.groups import transport

STEPS = 3
KINDS = ("shard", "replicate", "zero1")


def model_in_float64() -> nn.Module:
    return llama(num_hidden_layers=1).double()


def batches(rows: int) -> list[dict[str, torch.Tensor]]:
    """One row each, the whole batch of a step."""
    whole = tokens(rows)
    return [{k: v[i : i + 1] for k, v in whole.items()} for i in range(rows)]


def axis(rank: int, size: int) -> dict:
    device = torch.device(on_device.DEVICE)
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    names = [dist.new_group(list(range(size)), backend=dist.get_default_backend_for_device(device)).group_name for _ in range(2)]
    return {"name": "dp", "rank": rank, "size": size, "backend": transport(device), "native": names[0], "beside": names[1]}


def train() -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = model_in_float64()
    optimizer = torch.optim.AdamW(model.parameters())
    captured = capture(model, language_loss, batches(1)[0], optimizer=optimizer)
    axes = [axis(rank, size)]
    results = {}
    for kind in KINDS:
        for micro in (1, 2):
            for mode in ("reduce_each", "reduce_last") if micro > 1 else ("reduce_each",):
                passes = f"canonicalize,{kind}(axis=dp,ranks={size})"
                passes += f",accumulate(steps={micro},mode={mode})" if micro > 1 else ""
                passes += ",update(clip=0.5)"
                run = Run(model, batches(1)[0], language_loss, passes, optimizer, axes, captured)
                mine = batches(size * micro)[rank * micro : (rank + 1) * micro]
                inputs = [run.captured.input_spec.flatten(b) for b in mine]
                losses, norms = [], []
                for step in range(STEPS):
                    hyper = [[1e-2, 0.9, 0.999, 1e-8, 1e-2, step + 1.0, 0.0]]
                    result = run.executor.step(inputs, hyper, step)
                    losses.append([x.item() for x in result["outputs"]["loss"]])
                    norms.append(result["norm"])
                params = {k: v.clone() for k, v in run.params().items()}
                stats = run.executor.stats()
                results[kind, micro, mode] = {"losses": losses, "norms": norms, "params": params, "stats": stats}
    return results


def reference(rows: int) -> tuple[list[float], list[float], nn.Module]:
    model = model_in_float64()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches(rows):  # the mean is taken last, as in the programs: parts of the model compute in float32
            part = language_loss(model, batch)
            part.backward()
            loss += part.item() / rows
        for param in model.parameters():
            param.grad /= rows
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss)
    return losses, norms, model


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_each_other_and_with_one_process(size: int) -> None:
    found = ranks.run(train, size)
    for case, mine in found[0].items():
        _, micro, mode = case
        losses, norms, model = reference(size * micro)
        for step in range(STEPS):
            mean = sum(sum(r[case]["losses"][step]) for r in found) / (size * micro)
            assert mean == pytest.approx(losses[step], rel=1e-9), case
            assert mine["norms"][step] == pytest.approx(norms[step], rel=1e-9), case
        for name, value in mine["params"].items():
            assert torch.allclose(value, model.get_parameter(name), rtol=1e-7, atol=1e-9), (case, name)
            for other in found[1:]:
                assert torch.equal(value, other[case]["params"][name]), (case, name)
            # Bits: the same at equal ranks and equal accumulation setting, however it is sharded.
            assert torch.equal(value, found[0]["shard", micro, mode]["params"][name]), (case, name)
        for r in found:
            assert r[case]["norms"] == found[0]["shard", micro, mode]["norms"]
            assert on_device.DEVICE != "cpu" or r[case]["stats"]["copied_bytes"] == 0, case
            assert r[case]["stats"]["bytes_sent"] > 0
    shard, full = (found[0][kind, 1, "reduce_each"]["stats"]["persistent_bytes"] for kind in ("shard", "replicate"))
    assert shard < full
