"""Lightning Fabric and Accelerate: a script that changes by a few lines gives the numbers of the plain one, on one rank and on two."""

from __future__ import annotations

import difflib
import os
from typing import Any

import pytest
import ranks
import torch

import interlace

COMMON = '''
import torch
from torch.utils.data import DataLoader, TensorDataset

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    x = torch.randn(32, 6, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader

def loss_fn(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

'''  # fmt: skip
LOOP = """
losses = []
for epoch in range(2):
    for batch in loader:
        loss = loss_fn(model, batch)
        {}.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
"""
FABRIC = COMMON + '''
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1, num_nodes=size, strategy="ddp" if size > 1 else "auto", plugins=plugins)
fabric.launch()
model, optimizer, loader = build()
loader = fabric.setup_dataloaders(loader)
model, optimizer = fabric.setup(model, optimizer)
''' + LOOP.format("fabric")  # fmt: skip
ACCELERATE = COMMON + '''
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer, loader = build()
loader = accelerator.prepare(loader)
model, optimizer = accelerator.prepare(model, optimizer)
''' + LOOP.format("accelerator")  # fmt: skip


def ours(script: str, kind: str) -> str:
    name = {"fabric": "fabric", "accelerate": "accelerator"}[kind]
    set_up = f"model, optimizer = {name}.{'setup' if kind == 'fabric' else 'prepare'}(model, optimizer)"
    assert set_up in script
    script = script.replace(set_up, f"trainer = setup({name}, model, optimizer, loss_fn, next(iter(loader)))")
    begin, end = script.index("        loss = loss_fn(model, batch)\n"), script.index("        losses.append")
    script = script[:begin] + "        loss = trainer.step(batch)\n" + script[end:]
    return f"from interlace.integrations.{kind} import setup\n" + script


def run(script: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29556")
    size = int(os.environ["WORLD_SIZE"]) if torch.distributed.is_initialized() else 1
    space: dict[str, Any] = {"size": size, "plugins": None}
    if kind == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    elif size > 1:
        from lightning_fabric.plugins.environments import TorchElasticEnvironment

        os.environ.update(LOCAL_RANK="0", GROUP_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="1")
        space["plugins"] = [TorchElasticEnvironment()]
    if config:
        script = script.replace("next(iter(loader)))", f"next(iter(loader)), interlace.Config(**{config!r}))")
        space["interlace"] = interlace
    exec(compile(script, "script.py", "exec"), space)
    trainer = space.get("trainer")
    state = trainer.state_dict(all_ranks=True) if trainer is not None else space["model"].state_dict()
    if trainer is not None:
        trainer.close()
    return {"losses": space["losses"], "state": {n.removeprefix("module."): t for n, t in state.items()}}


@pytest.mark.parametrize("size,strategy", [(1, "shard"), (2, "shard"), (2, "zero1"), (2, "replicate")])
@pytest.mark.parametrize("kind", ["fabric", "accelerate"])
def test_the_numbers_of_the_plain_script(kind: str, size: int, strategy: str) -> None:
    pytest.importorskip({"fabric": "lightning_fabric", "accelerate": "accelerate"}[kind])
    script = FABRIC if kind == "fabric" else ACCELERATE
    changed = ours(script, kind)
    added = [line for line in difflib.ndiff(script.splitlines(), changed.splitlines()) if line.startswith("+ ")]
    assert len(added) <= 4
    theirs = ranks.run(run, size, script, kind, {})
    for mine, other in zip(ranks.run(run, size, changed, kind, {"strategy": strategy}), theirs, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=1e-9)
        for name, t in other["state"].items():
            torch.testing.assert_close(mine["state"][name], t, rtol=1e-9, atol=1e-11)


def test_what_is_wrapped_already_is_refused() -> None:
    pytest.importorskip("accelerate")
    wrapped = "model, optimizer = accelerator.prepare(model, optimizer)\ntrainer = setup"
    script = ours(ACCELERATE, "accelerate").replace("trainer = setup", wrapped)
    with pytest.raises(interlace.InterlaceError, match=r"accelerator.prepare\(\) the data loaders alone"):
        run(script, "accelerate", {})
    pytest.importorskip("lightning_fabric")
    script = ours(FABRIC, "fabric").replace("trainer = setup", "model, optimizer = fabric.setup(model, optimizer)\ntrainer = setup")
    with pytest.raises(interlace.InterlaceError, match=r"what fabric.setup gives back is wrapped already"):
        run(script, "fabric", {})


def kept(folder: str) -> bool:
    """Whether the losses after accelerator.load_state are those after save_state."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29556")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from interlace.integrations.accelerate import setup

    AcceleratorState._reset_state(True)
    space: dict[str, Any] = {}
    exec(COMMON, space)
    accelerator, (model, optimizer, loader) = Accelerator(cpu=True), space["build"]()
    loader = accelerator.prepare(loader)
    trainer = setup(accelerator, model, optimizer, space["loss_fn"], next(iter(loader)))
    for batch in loader:
        trainer.step(batch)
    accelerator.save_state(folder)
    first = [trainer.step(batch).item() for batch in loader]
    if torch.distributed.is_initialized():  # accelerator.wait_for_everyone() would have gloo wait on the accelerator of this host
        torch.distributed.all_reduce(torch.zeros(1))
    accelerator.load_state(folder)
    again = [trainer.step(batch).item() for batch in loader]
    trainer.close()
    return first == again


@pytest.mark.parametrize("size", [1, 2])
def test_what_accelerate_saves_has_the_trainer(size: int, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    assert ranks.run(kept, size, str(tmp_path / "state")) == [True] * size


@pytest.mark.parametrize(
    ("kind", "line", "way"),
    [("accelerate", "accelerator.clip_grad_norm_(model.parameters(), 1.0)", r"Config\(clip_norm=...\)"),
     ("accelerate", "accelerator.accumulate(model)", "a list of gradient_accumulation_steps batches"),
     ("fabric", "fabric.clip_gradients(model, optimizer, max_norm=1.0)", r"Config\(clip_norm=...\)"),
     ("fabric", "fabric.no_backward_sync(model)", r"Config\(accumulation=G\)")],
)  # fmt: skip
def test_lines_of_the_old_loop_that_would_do_nothing_are_refused(kind: str, line: str, way: str) -> None:
    pytest.importorskip({"fabric": "lightning_fabric", "accelerate": "accelerate"}[kind])
    script = ours(FABRIC if kind == "fabric" else ACCELERATE, kind)
    with pytest.raises(interlace.InterlaceError, match=rf"does nothing to a compiled model, which has no gradients; .*{way}"):
        run(script + f"\n{line}\n", kind, {})


@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
def test_backward_of_the_old_loop_is_refused_by_its_line(kind: str) -> None:
    pytest.importorskip({"fabric": "lightning_fabric", "accelerate": "accelerate"}[kind])
    script = ours(FABRIC if kind == "fabric" else ACCELERATE, kind)
    loop = "fabric" if kind == "fabric" else "accelerator"
    with pytest.raises(interlace.InterlaceError, match=r":\d+: \w+.backward\(\) of a loss without a graph, .* delete this line"):
        run(script + f"\nloss = trainer.step(next(iter(loader)))\n{loop}.backward(loss)\n", kind, {})
