"""The model and the optimizer stay usable while a trainer has them: every call that works on plain ones is right, or an error that names
the call that is, under each strategy and mesh."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import pytest
import ranks
import tensor_models
import torch
import torch.distributed as dist
import zoo
from torch import nn

import interlace

Tensor = torch.Tensor
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and settings
    "one": (1, {}), "eager": (1, {"mode": "eager"}), "shard": (2, {"strategy": "shard"}), "zero1": (2, {"strategy": "zero1"}),
    "replicate": (2, {"strategy": "replicate"}), "tp": (2, {"mesh": {"tp": 2}, "tensor": "model"}),
    "pp": (2, {"mesh": {"pp": 2}, "accumulation": 2}),
    "late": (2, {"strategy": "zero1", "schedule": [(0, ["reposition_update"])], "clip_norm": None}),
}  # fmt: skip


def start(config: dict[str, Any], **more: Any) -> tuple[nn.Module, Any, interlace.Trainer, Any]:
    model = tensor_models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3)
    settings = interlace.Config(**{"schedule": [], **config, **more})
    return model, optimizer, interlace.compile(model, optimizer, zoo.causal_loss, zoo.tokens(4, 0), settings), scheduler


def steps(trainer: interlace.Trainer, first: int, last: int, scheduler: Any) -> list[float]:
    losses = []
    for i in range(first, last):
        losses.append(trainer.step(zoo.tokens(4, i)).item())
        scheduler.step()
    return losses


def plain(changes: dict[int, Callable[[nn.Module], None]], count: int) -> tuple[list[float], nn.Module]:
    """The same in plain PyTorch, every rank with the same batch; `changes` before the steps of these numbers."""
    model = tensor_models.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3)
    losses = []
    for i in range(count):
        changes.get(i, lambda m: None)(model)
        loss = zoo.causal_loss(model, zoo.tokens(4, i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, model


@torch.no_grad()
def clamped(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.02, 0.02)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in b)


def saved(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


def right_or_named(call: Callable[[], bool]) -> str:
    """ "right", or "error" with the line and the call that works."""
    try:
        assert call(), "neither right nor an error"
        return "right"
    except (interlace.InterlaceError, RuntimeError) as e:
        assert "test_usable.py:" in str(e) and "with trainer.whole_parameters():" in str(e), str(e)
        assert str(e).count("whole_parameters") == 1  # said once, not for each parameter
        return "error"


def bare(config: dict[str, Any]) -> dict[str, str]:
    """What the calls give on the model as it is between two steps."""
    model, _, trainer, scheduler = start(config)
    steps(trainer, 0, 2, scheduler)
    now = trainer.state_dict(all_ranks=True)
    prompt = on_device.there(zoo.tokens(1, 9)["input_ids"])
    with trainer.whole_parameters(changes=False):
        text = model.generate(prompt, max_new_tokens=3, do_sample=False)
    calls: dict[str, Callable[[], bool]] = {
        "state_dict": lambda: same(model.state_dict(), now),
        "torch.save": lambda: same(saved(model), now),
        "deepcopy": lambda: same(copy.deepcopy(model).state_dict(), now),
        "generate": lambda: torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), text),
        "forward": lambda: model(prompt).logits.isfinite().all().item(),
        "ema": lambda: same(torch.optim.swa_utils.AveragedModel(model).module.state_dict(), now),
        "load_state_dict": lambda: not model.load_state_dict(now).missing_keys and same(trainer.state_dict(all_ranks=True), now),
    }  # fmt: skip
    found = {name: right_or_named(call) for name, call in calls.items()}

    def clamp() -> bool:
        clamped(model)
        return all(t.abs().max() <= 0.02 for n, t in trainer.state_dict(all_ranks=True).items() if t.is_floating_point())

    found["clamp_"] = right_or_named(clamp)
    trainer.close()
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bare_model_is_right_or_says_what_is(name: str) -> None:
    size, config = SETTINGS[name]
    for found in ranks.run(bare, size, config):
        whole = name in ("one", "eager", "zero1", "replicate", "late")
        assert set(found.values()) == ({"right"} if whole else {"error"}), found


def lent(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The same calls with whole parameters, and what training makes of the changes."""
    from transformers import AutoModelForCausalLM

    model, _, trainer, scheduler = start(config)
    losses = steps(trainer, 0, 2, scheduler)
    with trainer.whole_parameters() as whole:
        assert whole is model
        ema = torch.optim.swa_utils.AveragedModel(model)
        with pytest.raises(interlace.InterlaceError, match="leave the with statement first"):
            trainer.step(zoo.tokens(4, 2))
        clamped(model)
    losses += steps(trainer, 2, 3, scheduler)
    with trainer.whole_parameters(all_ranks=False):
        if trainer.rank == 0:
            clamped(model)
    losses += steps(trainer, 3, 4, scheduler)
    now = trainer.state_dict(all_ranks=True)
    with trainer.whole_parameters(changes=False):
        assert same(model.state_dict(), now) and same(saved(model), now) and same(copy.deepcopy(model).state_dict(), now)
        ema.update_parameters(model)
    trainer.save_pretrained(folder)
    assert same(dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()), now)
    with trainer.whole_parameters():
        model.load_state_dict({n: t + 1 for n, t in now.items()})
    more = trainer.state_dict(all_ranks=True)
    assert same(more, {n: t + 1 for n, t in now.items()})
    with trainer.whole_parameters():
        model.load_state_dict(now, assign=True)
    assert same(trainer.state_dict(all_ranks=True), now)
    with pytest.raises(ZeroDivisionError), trainer.whole_parameters():
        clamped(model)
        raise ZeroDivisionError
    kept = trainer.world_size == 1 or same(trainer.state_dict(all_ranks=True), now)
    trainer.load_weights(more)
    assert same(trainer.state_dict(all_ranks=True), more)
    trainer.load_weights(now)
    losses += steps(trainer, 4, 6, scheduler)
    final = trainer.state_dict(all_ranks=True)
    trainer.close()
    return {"losses": losses, "final": final, "kept": kept, "ema": ema.module.state_dict()}


@pytest.mark.parametrize("name", SETTINGS)
def test_whole_parameters_lends_and_takes_back(name: str, tmp_path: Path) -> None:
    size, config = SETTINGS[name]
    losses, model = plain({2: clamped, 3: clamped}, 6)
    for found in ranks.run(lent, size, config, str(tmp_path / "out")):
        assert found["kept"] and found["losses"] == pytest.approx(losses, rel=1e-9)
        for n, t in model.state_dict().items():
            torch.testing.assert_close(found["final"][n], t, rtol=1e-8, atol=1e-10)
        assert all(t.isfinite().all() for t in found["ema"].values())


def optimizer_calls(config: dict[str, Any], folder: str) -> dict[str, Any]:
    _, optimizer, trainer, scheduler = start(config)
    steps(trainer, 0, 3, scheduler)
    weights, state = trainer.state_dict(all_ranks=True), trainer.optimizer_state_dict(all_ranks=True)
    learned, lr = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    trainer.save(folder, scheduler=scheduler)
    expected = steps(trainer, 3, 6, scheduler)
    word = "right"
    try:
        assert optimizer.state_dict()["state"].keys() == state["state"].keys()
    except interlace.InterlaceError as e:
        word = str(e)
    with pytest.raises(interlace.InterlaceError, match=r"test_usable.py:\d+: step\(\) of an optimizer .* trainer.step\(batch\)"):
        optimizer.step()
    # Into the same trainer, and into a new one.
    trainer.load_weights(weights)
    optimizer.load_state_dict(state)
    scheduler.load_state_dict(learned)
    again = steps(trainer, 3, 6, scheduler)
    short = {"state": {}, "param_groups": []}
    with pytest.raises(interlace.InterlaceError, match="another optimizer: groups of"):
        optimizer.load_state_dict(short)
    trainer.close()
    _, optimizer, trainer, scheduler = start(config)
    trainer.load(folder, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == lr and scheduler.state_dict() == learned
    resumed = steps(trainer, 3, 6, scheduler)
    trainer.close()
    return {"word": word, "expected": expected, "again": again, "resumed": resumed}


@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_and_scheduler_state(name: str, tmp_path: Path) -> None:
    size, config = SETTINGS[name]
    for found in ranks.run(optimizer_calls, size, config, str(tmp_path / "run")):
        assert found["again"] == found["expected"] and found["resumed"] == found["expected"]
        if size == 1:
            assert found["word"] == "right"
        else:
            assert "test_usable.py:" in found["word"] and "trainer.optimizer_state_dict() on every rank" in found["word"]


@pytest.mark.parametrize("kind", ["adagrad", "rmsprop", "adamw", "sgd"])
def test_what_is_exported_can_be_imported(kind: str, tmp_path: Path) -> None:
    from interlace.checkpoint.contents import Checkpoint
    from interlace.checkpoint.convert import export_torch, import_torch

    makers: dict[str, Any] = {
        "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
    }  # fmt: skip

    def begin() -> tuple[interlace.Trainer, Any]:
        model = tensor_models.build("llama")
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = makers[kind]([{"params": rest, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False)
        return interlace.compile(model, optimizer, zoo.causal_loss, zoo.tokens(4, 0), interlace.Config(schedule=[])), scheduler

    trainer, scheduler = begin()
    steps(trainer, 0, 3, scheduler)
    trainer.save(tmp_path / "run", {"note.txt": "mine"}, scheduler=scheduler)
    expected = steps(trainer, 3, 6, scheduler)
    trainer.close()
    with Checkpoint(tmp_path / "run") as found:
        torch.save(export_torch(found), tmp_path / "run.pt")
    assert import_torch(tmp_path / "run.pt", tmp_path / "again") == 3
    assert (tmp_path / "again" / "note.txt").read_text() == "mine"
    trainer, scheduler = begin()
    trainer.load(tmp_path / "again", scheduler=scheduler)
    assert steps(trainer, 3, 6, scheduler) == expected
    trainer.close()


def test_a_scheduler_of_another_kind_is_named(tmp_path: Path) -> None:
    _, optimizer, trainer, scheduler = start({})
    trainer.save(tmp_path / "with", scheduler=scheduler)
    trainer.save(tmp_path / "without")
    before = scheduler.state_dict()
    with pytest.raises(interlace.InterlaceError, match=r"without has no scheduler's state: it was saved without trainer.save"):
        trainer.load(tmp_path / "without", scheduler=scheduler)
    other = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(interlace.InterlaceError, match="is the state of a MultiStepLR, not of a ConstantLR"):
        trainer.load(tmp_path / "with", scheduler=other)
    with pytest.raises(interlace.InterlaceError, match=r"takes an object with state_dict\(\)"):
        trainer.save(tmp_path / "with", scheduler=3)
    assert scheduler.state_dict() == before
    trainer.close()


def differing(change: str) -> str:
    model, _, trainer, scheduler = start({"strategy": "shard", "timeout_s": 4.0})
    steps(trainer, 0, 1, scheduler)
    before = trainer.state_dict(all_ranks=True)
    try:
        with trainer.whole_parameters(), torch.no_grad():
            p = model.lm_head.weight
            if change == "values":
                p.add_(trainer.rank)
            elif trainer.rank == 1:
                p.data = torch.zeros(3, dtype=torch.float64, device=p.device)
    except interlace.InterlaceError as e:
        assert change != "shape" or same(trainer.state_dict(all_ranks=True), before)
        return str(e)
    return "nothing"


def test_ranks_that_change_different_things_are_told() -> None:
    for found in ranks.outcomes(differing, 2, "values"):
        assert found is not None and "parameter 'lm_head.weight' was changed otherwise on rank 1 than on rank 0" in found.value
    for found in ranks.outcomes(differing, 2, "shape"):
        assert found is not None and "'lm_head.weight' was given a tensor of float64[3]" in found.value


def saves_alone(folder: str) -> str:
    _, _, trainer, scheduler = start({"strategy": "shard", "timeout_s": 3.0})
    steps(trainer, 0, 1, scheduler)
    try:
        if dist.get_rank() == 0:
            trainer.save(folder)
        steps(trainer, 1, 2, scheduler)
    except interlace.InterlaceError as e:
        return str(e)
    return "nothing"


def test_a_save_on_one_rank_says_that_every_rank_must(tmp_path: Path) -> None:
    found = ranks.outcomes(saves_alone, 2, str(tmp_path / "run"))
    assert found[0] is not None and "every rank must call trainer.save" in found[0].value, found[0]
    assert not (tmp_path / "run").exists()


def test_a_loop_of_somebody_else_is_told() -> None:
    model, optimizer, trainer, _ = start({})
    with pytest.warns(UserWarning, match=r"test_usable.py:\d+: backward\(\) through a model that interlace.compile was given"):
        zoo.causal_loss(model, on_device.there(zoo.tokens(4, 0))).backward()
    with pytest.raises(interlace.InterlaceError, match=r"trainer.step\(batch\) computes the gradients"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.causal_loss(model, on_device.there(zoo.tokens(4, 1))).backward()  # said once
        trainer.step(zoo.tokens(4, 0))
        trainer.close()
        optimizer.step()  # their own again
