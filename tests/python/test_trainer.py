"""The training API on one rank and on several: losses, schedulers, optimizer states, what becomes of the model."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import on_device
import parity
import pytest
import ranks
import tensor_models
import torch
import torch.distributed as dist
import zoo
from torch import nn

import interlace
from interlace.train.diagnosis import first_cause

Tensor = torch.Tensor


class Mixed(nn.Module):
    """Frozen and unused parameters, a tied matrix, a buffer that changes, one that does not, a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)
        self.shift = torch.linspace(0, 1, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.out(torch.tanh(self.frozen(self.embed(x)) * self.scale + self.shift))


def mixed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).reshape(-1, 11), batch[:, 1:].reshape(-1))


def mixed_batch(rows: int, seed: int) -> Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))


def torch_steps(model: nn.Module, opt: torch.optim.Optimizer, loss_fn: Any, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert list(a) == list(b)
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def test_frozen_unused_tied_and_buffers() -> None:
    torch.manual_seed(1)
    model = Mixed()
    theirs = copy.deepcopy(model)
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1)  # noqa: E731
    opt, their_opt = make(model), make(theirs)
    trainer = interlace.compile(model, opt, mixed_loss, mixed_batch(4, 0))
    batches = [mixed_batch(4, i) for i in range(4)]
    ours = [trainer.step(b).item() for b in batches]
    assert ours == pytest.approx(torch_steps(theirs, their_opt, mixed_loss, batches), rel=1e-6)
    close(trainer.state_dict(), theirs.state_dict())
    close(model.state_dict(), theirs.state_dict())  # one rank: the model's own tensors are the trainer's
    assert model.out.weight is model.embed.weight
    # The optimizer's state goes back to torch, which trains on from there.
    state, their_state = trainer.optimizer_state_dict(), their_opt.state_dict()
    assert state["state"].keys() == their_state["state"].keys()
    fresh = Mixed()
    fresh.load_state_dict(trainer.state_dict())
    fresh.frozen.requires_grad_(False)
    fresh_opt = make(fresh)
    fresh_opt.load_state_dict(state)
    more = [mixed_batch(4, 9), mixed_batch(4, 10)]
    assert torch_steps(fresh, fresh_opt, mixed_loss, more) == pytest.approx(
        torch_steps(theirs, their_opt, mixed_loss, more), rel=1e-6
    )


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_it_goes_on_from_an_optimizer_that_has_trained(kind: str) -> None:
    model = zoo.build("llama")
    theirs = copy.deepcopy(model)
    batches = [zoo.tokens(2, i) for i in range(6)]
    opt, their_opt = parity.make_optimizer(kind, model), parity.make_optimizer(kind, theirs)
    torch_steps(model, opt, zoo.causal_loss, batches[:3])
    expected = torch_steps(theirs, their_opt, zoo.causal_loss, batches)
    trainer = interlace.compile(model, opt, zoo.causal_loss, batches[0])
    assert [trainer.step(b).item() for b in batches[3:]] == pytest.approx(expected[3:], rel=1e-6)
    close(trainer.state_dict(), dict(theirs.state_dict()), 1e-5)


def test_schedulers_and_hooks_of_torch_work_and_do_not_warn() -> None:
    model = zoo.build("vit")
    theirs = copy.deepcopy(model)
    opt, their_opt = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    calls: list[str] = []

    def before(*_: object) -> None:
        with torch.no_grad():
            calls.append("before")

    opt.register_step_pre_hook(before)
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    trainer = interlace.compile(model, opt, zoo.class_loss, zoo.images(4, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.1) for o in (opt, their_opt)]
        for i in range(3):
            trainer.step(zoo.images(4, i))
            torch_steps(theirs, their_opt, zoo.class_loss, [zoo.images(4, i)])
            for s in schedulers:
                s.step()
    close(trainer.state_dict(), dict(theirs.state_dict()))
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert calls == ["before", "after"] * 3


def test_a_list_of_micro_batches_is_the_same_as_one_batch_cut() -> None:
    batch = zoo.tokens(8, 3)
    parts = [{"input_ids": p} for p in batch["input_ids"].chunk(4)]
    losses = []
    for example, step in ((batch, batch), (parts, parts), (batch, parts)):
        model = zoo.build("llama")
        opt = parity.make_optimizer("adamw", model)
        trainer = interlace.compile(model, opt, zoo.causal_loss, example, interlace.Config(accumulation=4))
        losses.append([trainer.step(step).item() for _ in range(2)])
    assert losses[0] == losses[1] == losses[2]


def test_the_default_loss_and_named_outputs() -> None:
    model = zoo.build("llama")
    batch = zoo.tokens(2, 0)
    batch["labels"] = batch["input_ids"]
    expected = model(**batch).loss.item()
    trainer = interlace.compile(model, torch.optim.AdamW(model.parameters()), None, batch)
    assert trainer.step(batch).item() == pytest.approx(expected, rel=1e-6)
    model = zoo.build("vit")

    def loss(m: nn.Module, b: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = m(b["x"])
        return {"loss": nn.functional.cross_entropy(logits, b["y"]), "right": (logits.argmax(1) == b["y"]).sum()}

    images = zoo.images(6, 1)
    expected = int((model(images["x"]).argmax(1) == images["y"]).sum())
    trainer = interlace.compile(
        model, torch.optim.AdamW(model.parameters()), loss, images, interlace.Config(accumulation=2)
    )
    trainer.step(images)
    assert sum(int(t) for t in trainer.outputs["right"]) == expected and len(trainer.outputs["right"]) == 2


class Branches(nn.Module):
    """Reads values and counts its calls: what no program can do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.line(x)
        return y.square() if y.sum().item() > 0 else y.abs()


def test_eager_mode_runs_the_users_own_python() -> None:
    torch.manual_seed(0)
    model = Branches()
    theirs = copy.deepcopy(model)
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)  # noqa: E731
    opt, their_opt = make(model), make(theirs)
    loss = lambda m, b: m(b).mean()  # noqa: E731
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    with pytest.raises(interlace.InterlaceError, match="a program cannot branch on data"):
        compiled = copy.deepcopy(model)
        interlace.compile(compiled, make(compiled), loss, batches[0])
    trainer = interlace.compile(model, opt, loss, batches[0], interlace.Config(mode="eager"))
    calls = model.calls
    ours = [trainer.step(b).item() for b in batches]
    assert ours == pytest.approx(torch_steps(theirs, their_opt, loss, batches), rel=1e-6)
    assert model.calls == calls + len(batches)
    close(trainer.state_dict(), dict(theirs.state_dict()))


def both_modes(strategy: str) -> list[parity.Run]:
    return [
        parity.by_interlace("llama", zoo.build("llama"), "adamw", 5, 0.3, accumulation=2, strategy=strategy, mode=mode)
        for mode in ("compiled", "eager")
    ]


@pytest.mark.parametrize("strategy", ["shard", "zero1"])
def test_eager_mode_trains_what_the_program_trains(strategy: str) -> None:
    for compiled, eager in ranks.run(both_modes, 2, strategy):
        assert parity.distance(eager, compiled).within(1e-5)


def test_two_trainers_in_one_process_share_nothing() -> None:
    def losses(*trainers: interlace.Trainer) -> list[list[float]]:
        return [[t.step(zoo.tokens(2, i)).item() for t in trainers] for i in range(3)]

    def make(lr: float) -> interlace.Trainer:
        model = zoo.build("gpt2_dropout")
        return interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=lr), zoo.causal_loss, zoo.tokens(2, 0))

    alone = [losses(make(1e-3)), losses(make(1e-2))]
    together = losses(make(1e-3), make(1e-2))
    assert [[a] for a, _ in together] == alone[0] and [[b] for _, b in together] == alone[1]
    assert alone[0] != alone[1]


def sharded_model() -> dict[str, Any]:
    model = zoo.build("gpt2", seed=dist.get_rank())  # every rank another start: rank 0's counts
    start = {k: v.clone() for k, v in model.state_dict().items()}
    opt = parity.make_optimizer("adamw", model)
    trainer = interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(2, 0))
    got = trainer.state_dict(all_ranks=True)
    summary = trainer.summary()
    trainer.step(zoo.tokens(2, dist.get_rank()))
    return {
        "meta": all(p.is_meta and p.numel() > 0 for p in model.parameters()),
        "start": start, "got": got, "only_rank_0": len(trainer.state_dict()), "summary": summary, "stats": trainer.stats(),
    }  # fmt: skip


def test_a_sharded_model_is_freed_and_has_rank_0s_values() -> None:
    found = ranks.run(sharded_model, 2)
    for f in found:
        assert f["meta"]
        assert list(f["got"]) == list(f["start"])
        assert all(torch.equal(f["got"][k], found[0]["start"][k]) for k in f["got"])
    assert found[0]["only_rank_0"] == len(found[0]["start"]) and found[1]["only_rank_0"] == 0
    assert found[0]["summary"]["largest_unit"]["name"] == "transformer.h.0.mlp.c_fc.weight"
    assert found[0]["stats"]["bytes_sent"] > 0
    # Only CPUs have backward kernels of ours that write to a gradient's place where ATen's have no such form.
    assert on_device.DEVICE != "cpu" or found[0]["stats"]["copied_bytes"] == 0


def test_memory_limit_says_how_much_is_needed() -> None:
    model = zoo.build("llama")
    opt = torch.optim.AdamW(model.parameters())
    limit = 100 if on_device.DEVICE == "cpu" else 50  # of a device's memory all but what one op needs can leave
    with pytest.raises(interlace.InterlaceError) as e:
        interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(2, 0), interlace.Config(memory_limit=f"{limit}kB"))
    assert f"the limit of {limit}000 bytes: the smallest schedule that was found needs" in str(e.value)
    assert "raise it to 1MiB, use more ranks" in str(e.value)
    with pytest.raises(interlace.InterlaceError, match=r"memory_limit is 97.66 KiB; raise it to 1MiB, use more ranks.*; no search runs"):
        plain = interlace.Config(memory_limit="100kB", schedule=[])
        interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(2, 0), plain)
    interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(2, 0), interlace.Config(memory_limit="2MiB")).step(
        zoo.tokens(2, 0)
    )


def test_dump_ir_and_a_pipeline_of_ones_own(tmp_path: Path) -> None:
    model = zoo.build("vit")
    passes = "canonicalize,replicate(axis=dp,ranks=1),update(clip=0.5)"
    config = interlace.Config(passes=passes, dump_ir=str(tmp_path))
    trainer = interlace.compile(model, torch.optim.AdamW(model.parameters()), zoo.class_loss, zoo.images(2, 0), config)
    assert [p["name"].partition("(")[0] for p in trainer.passes] == ["canonicalize", "replicate", "update"]
    assert len(list(tmp_path.iterdir())) == 4
    assert trainer.program.startswith("interlace 1 ")
    trainer.step(zoo.images(2, 0))
    assert trainer.norm is not None and trainer.norm > 0


def test_a_norm_that_is_not_finite_is_explained_and_changes_nothing() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(self.line(x)).sum()

    model = Root()
    nn.init.ones_(model.line.weight)
    nn.init.zeros_(model.line.bias)
    good, bad = torch.ones(3, 2), -torch.ones(3, 2)
    opt = torch.optim.AdamW(model.parameters())
    trainer = interlace.compile(model, opt, lambda m, b: m(b), good, interlace.Config(clip_norm=1.0))
    trainer.step(good)
    before = trainer.state_dict()
    with pytest.raises(interlace.InterlaceError) as e:
        trainer.step(bad)
    assert (
        "step 1: the norm of the gradient is nan; the first such value comes from aten.sqrt (micro_batch, micro-batch 0)"
        in str(e.value)
    )
    assert "test_trainer.py:" in str(e.value)
    assert all(torch.equal(before[k], v) for k, v in trainer.state_dict().items())
    assert trainer.explain_nonfinite(good) is None
    trainer.step(good)
    report = trainer.inspect(good, stop_at="line")
    assert report["ops"] and report["values"]
    assert trainer.inspect(torch.ones(5, 2), stop_at="line")["values"]  # of another form: compiled
    assert trainer.explain_nonfinite(-torch.ones(4, 2)) is not None
    skipping = interlace.compile(
        model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b), good, interlace.Config(skip_nonfinite=True)
    )
    skipping.step(bad)
    assert skipping.skipped
    skipping.step(good)
    assert not skipping.skipped and skipping.optimizer_state_dict()["state"][0]["step"] == 1


def test_what_a_model_leaves_out_itself_is_no_cause() -> None:
    """T5's log of distance 0, of which a mask is made: no fault in a good step, and not the fault of a bad one."""
    model = tensor_models.build("t5", torch.float32)
    batch = tensor_models.batch_of(0, 0, name="t5")

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return tensor_models.loss_of(model, batch) * torch.sqrt(batch["labels"].float().min())

    opt = torch.optim.AdamW(model.parameters())
    trainer = interlace.compile(model, opt, loss_fn, batch, interlace.Config(clip_norm=1.0))
    assert any(v["nonfinite"] for op in trainer.inspect(batch)["ops"] for v in op["results"])
    assert trainer.explain_nonfinite(batch) is None
    bad = batch | {"labels": batch["labels"].clone()}
    bad["labels"][0, 0] = -100
    with pytest.raises(interlace.InterlaceError, match=r"the first such value comes from aten\.sqrt .* at .*test_trainer\.py:"):
        trainer.step(bad)
    trainer.step(batch)


def test_debug_names_the_op_while_it_runs() -> None:
    model = zoo.build("vit")
    trainer = interlace.compile(
        model, torch.optim.AdamW(model.parameters()), zoo.class_loss, zoo.images(2, 0), interlace.Config(debug=True)
    )
    trainer.step(zoo.images(2, 0))
    with torch.no_grad():
        model.head.bias.fill_(float("inf"))
    with pytest.raises(interlace.InterlaceError, match="the loss is nan; the first such value comes from"):
        trainer.step(zoo.images(2, 0))


def test_the_cause_is_found_in_a_program_of_any_depth() -> None:
    """Values that are left out are not the cause (a mask behind %1); of those behind it a thousand are bad, one after the other."""
    deep = 1000
    lines = ["  %1: f32[2] = aten.log(%0) {fwd}", "  %9: f32[2] = aten.where(%8, %1, %0) {fwd}", "  %10: f32[2] = aten.sqrt(%9) {fwd}"]
    lines += [f"  %{i}: f32[2] = aten.exp(%{i - 1}) {{fwd}}" for i in range(11, 11 + deep)]
    program = "\n".join([*lines, f'  output(%{10 + deep}) {{fwd name="loss"}}'])
    bad = [1, *range(10, 11 + deep)]
    ops = [{"text": f"%{i}", "results": [{"value": f"%{i}", "nonfinite": 1}]} for i in bad]
    assert first_cause(program, {"ops": ops, "first_nonfinite": ops[0]}) is ops[1]


def test_a_loss_that_is_not_finite_in_eager_mode_advises_what_works_there() -> None:
    model, batch = zoo.build("vit"), zoo.images(2, 0)
    for more, said in ({}, "the loss is nan; with clip_norm the module"), ({"clip_norm": 1.0}, r"the output of module '\w"):
        with interlace.compile(
            model, torch.optim.AdamW(model.parameters()), zoo.class_loss, batch, interlace.Config(mode="eager", **more)
        ) as trainer:
            with torch.no_grad():
                model.head.bias.fill_(float("inf"))
            with pytest.raises(interlace.InterlaceError, match=said):
                trainer.step(batch)
        model = zoo.build("vit")


SCRIPT = """
import torch, interlace, sys, zoo
model = zoo.build("llama")
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(2, 0))
for i in range(3):
    loss = trainer.step(zoo.tokens(2, 10 * i + trainer.rank))
sys.stdout.write(f"rank {trainer.rank} of {trainer.world_size} loss {loss.item():.5f}\\n")  # in one piece: both ranks write
trainer.save(sys.argv[1])
trainer.close()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), *[p for p in sys.path if p]])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 2 loss" in done.stdout and "rank 1 of 2 loss" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


class Branching(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(self.scale.sum()) > 0 else 1.0)


def let_go(kind: type[nn.Module], config: dict[str, Any]) -> list[bool]:
    model = kind()
    trainer = interlace.compile(model, torch.optim.AdamW(model.parameters()), mixed_loss, mixed_batch(2, 0), interlace.Config(**config))
    trainer.step(mixed_batch(2, 0))
    there = [weakref.ref(x) for x in (trainer, trainer._run.executor, model, model.embed.weight)]
    del trainer, model
    gc.collect()
    return [x() is None for x in there]


@pytest.mark.parametrize(
    "size, kind, config",
    [(1, Mixed, {}), (1, Branching, {"fullgraph": False}), (2, Mixed, {"strategy": "shard"}), (2, Mixed, {"schedule": []})],
)
def test_a_trainer_that_nobody_closes_leaves_no_memory(size: int, kind: type[nn.Module], config: dict[str, Any]) -> None:
    assert ranks.run(let_go, size, kind, config) == [[True] * 4] * size
