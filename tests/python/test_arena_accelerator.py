"""The arena of a step on a device: the CPU's bits, no wait left out whatever the order of streams, and the framework's own counter of
bytes says what the memory plan says.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo

import interlace
from interlace import _runtime
from interlace.train.diagnosis import NonFiniteError

pytestmark = pytest.mark.software
SOAK = os.environ.get("INTERLACE_SOAK") == "1"
MODES = ["free", "lockstep:0:1", "lockstep:0:0", *(f"starve:{seed}" for seed in range(20))] if SOAK else ["free", "starve:1"]
ROUND = 512  # bytes: what the software accelerator's allocator makes of a request


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def train(case: str, device: str, mode: str = "free", plant: str = "none", **settings: Any) -> dict[str, Any]:
    """Five steps, and what the framework's allocator says of one more; with a fault `plant`ed in that one."""
    steps = 5
    rank = 0 if "mesh" in settings else int(os.environ.get("RANK", "0"))  # of the ranks with data of their own
    gc.collect()
    memory = torch.accelerator.memory
    before = memory.memory_allocated() if device == "soft" else 0
    model = zoo.build(case, zoo.CASES[case].dtype).to(device)
    optimizer = parity.make_optimizer("adamw", model)
    accumulation = settings.get("accumulation", 1)
    # Graphs have memory, and keep what was planted; the software accelerator has torch's kernels.
    settings = {"clip_norm": 0.3, "profile": "off", "device_graphs": False, "kernels": "torch", **settings}
    compile = getattr(interlace.compile, "__wrapped__", interlace.compile)  # the model is where it shall be
    if device == "soft":
        import soft_device

        soft_device.use(mode)

    def batch(step: int) -> Any:
        return torch.utils._pytree.tree_map(lambda t: t.to(device), parity.batch_of(case, step, rank, accumulation))

    out: dict[str, Any] = {}
    with compile(model, optimizer, zoo.CASES[case].loss, batch(0), interlace.Config(**settings)) as trainer:
        losses = [float(trainer.step(batch(step))) for step in range(steps)]
        if device == "soft":
            gc.collect()  # what the last step left in cycles
            last, live = batch(steps), memory.memory_allocated()
            memory.reset_peak_memory_stats()
            soft_device._C.plant(plant)
            losses.append(float(trainer.step(last)))
            out |= {"live": live - before, "peak": memory.max_memory_allocated() - live}
        else:
            losses.append(float(trainer.step(batch(steps))))
        weights = {name: t.clone() for name, t in trainer.state_dict().items()}
        out |= {"losses": losses, "weights": weights, "arena": trainer.stats()["arena"], "stats": trainer.stats()}
    if device == "soft":
        soft_device._C.plant("none")
        soft_device.use("free")
    return out


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["losses"] == b["losses"] and all(torch.equal(t, b["weights"][name]) for name, t in a["weights"].items())


RECOMPUTE: dict[str, Any] = {"schedule": [(0, ["recompute(mode=full)"])]}
ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 1, {}),
    "llama recompute": ("llama", 1, RECOMPUTE),
    "llama accumulation": ("llama", 1, {"accumulation": 3}),
    "gpt2": ("gpt2", 1, {}),
    "gpt2 recompute": ("gpt2", 1, RECOMPUTE),
    "gpt2 dropout": ("gpt2_dropout", 1, {}),
    "vit": ("vit", 1, {}),
    "vit recompute": ("vit", 1, RECOMPUTE),
    "batchnorm": ("batchnorm", 1, {}),
    "llama shard": ("llama", 2, {}),
    "llama shard recompute": ("llama", 2, RECOMPUTE),
    "llama shard accumulation": ("llama", 2, {"accumulation": 2}),
    "llama zero1": ("llama", 2, {"strategy": "zero1"}),
    "llama replicate": ("llama", 2, {"strategy": "replicate"}),
    "gpt2 shard": ("gpt2", 2, {}),
    "vit zero1": ("vit", 2, {"strategy": "zero1"}),
    "llama stages": ("llama", 2, {"mesh": {"pp": 2, "dp": 1}, "accumulation": 4}),
    "llama tensor": ("llama", 2, {"mesh": {"dp": 1, "tp": 2}}),
    "llama hybrid": ("llama", 4, {"mesh": {"replica": 2, "dp": 2}}),
}


SAMPLE = {"llama accumulation", "gpt2 dropout", "vit recompute", "llama shard", "llama stages", "llama tensor", "llama hybrid"}


def run(case: str, count: int, device: str, **settings: Any) -> list[dict[str, Any]]:
    return ranks.run(train, count, case, device, **settings) if count > 1 else [train(case, device, **settings)]


@pytest.mark.parametrize("what", [what if what in SAMPLE else pytest.param(what, marks=pytest.mark.soak) for what in ROWS])
def test_bits_and_bytes(what: str) -> None:
    case, count, settings = ROWS[what]
    without = run(case, count, "soft", arena=False, **settings)
    if not case.startswith("gpt2"):  # whose biases of keys have gradients of rounding errors alone, which AdamW makes large
        assert all(same(*pair) for pair in zip(run(case, count, "cpu", **settings), without, strict=True))
    for mode in MODES:
        for got, plain in zip(run(case, count, "soft", mode=mode, **settings), without, strict=True):
            assert same(got, plain), mode
            facts = got["arena"]
            assert facts["on"] and facts["settled"] and facts["unforeseen"] == [] and facts["kept"] == [], facts
            # What the framework's allocator has beyond the states is the arena, and in a step no more but what it returns.
            assert facts["top_bytes"] == facts["planned_bytes"]
            assert got["live"] - plain["live"] == rounded(facts["planned_bytes"])
            losses = settings.get("accumulation", 1)
            assert facts["outside_peak_bytes"] <= losses * ROUND, facts
            if "stages" not in what:  # which share their losses afterwards
                assert got["peak"] == (losses + (losses > 1)) * ROUND, got["peak"]  # and their mean


def test_a_program_that_runs_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation between steps; and somebody takes the memory that a program left meanwhile, so that it lies elsewhere afterwards."""

    def losses(arena: bool, greedy: bool) -> tuple[list[float], list[int]]:
        gc.collect()
        model = zoo.build("llama").to("soft")
        batches = [{k: v.to("soft") for k, v in parity.batch_of("llama", step, 0, 1).items()} for step in range(6)]
        compile = getattr(interlace.compile, "__wrapped__", interlace.compile)
        settings = interlace.Config(profile="off", arena=arena, device_graphs=False)
        out, bytes, held = [], [], []
        with compile(model, parity.make_optimizer("adamw", model), zoo.CASES["llama"].loss, batches[0], settings) as trainer:
            for batch in batches:
                out.append(float(trainer.step(batch)))
                bytes.append(torch.accelerator.memory.memory_allocated())
                if greedy and arena:
                    held.append(torch.empty(trainer.stats()["arena"]["planned_bytes"] // 4, device="soft"))
                out.append(float(trainer.evaluate(batch)["loss"]))
                bytes.append(torch.accelerator.memory.memory_allocated())
                if greedy:
                    held.append(torch.empty(32_000, device="soft"))
                    held.append(torch.empty(trainer.stats()["arena"].get("planned_bytes", 0) // 4, device="soft"))
        return out, bytes

    plain, _ = losses(arena=False, greedy=False)
    planned, bytes = losses(arena=True, greedy=False)
    assert planned == plain
    steps, evaluations = bytes[4::2], bytes[5::2]  # settled
    assert len(set(steps)) == len(set(evaluations)) == 1 and evaluations[0] < steps[0]
    assert losses(arena=True, greedy=True)[0] == plain


def without_a_hook() -> None:
    """In a process of its own: what the device's own allocator is asked, nobody else sees."""
    got, plain = train("gpt2", "soft"), train("gpt2", "soft", arena=False)
    facts = got["arena"]
    assert same(got, plain) and facts["on"] and facts["settled"], facts
    kept = {request["op"].split("=")[-1].split("(")[0].strip() for request in facts["kept"]}
    print(sorted(kept), facts["planned_bytes"], facts["outside_peak_bytes"])
    import soft_device

    assert soft_device.take_reports() == []


def test_an_evaluation_after_the_first_step_runs_in_the_place_of_training() -> None:
    """The block of a plan that was made anew after the step was nobody's yet, and stayed beside the evaluation's. The framework has one
    peak for all programs: an evaluation began it anew, and from then on the step's was said to be the evaluation's."""
    batch = parity.batch_of("llama", 0, 0, 1)
    model = zoo.build("llama", torch.float32).to("soft")
    settings = interlace.Config(profile="off", device_graphs=False)
    with interlace.compile(model, parity.make_optimizer("adamw", model), zoo.causal_loss, batch, settings) as trainer:
        trainer.step(batch)
        peak, resident = trainer.stats()["peak_bytes"], trainer.stats()["arena"]["resident_bytes"]
        trainer.evaluate(batch)
        assert resident > 0 and trainer.stats()["arena"]["resident_bytes"] == 0
        assert trainer.stats()["peak_bytes"] == peak
        for _ in range(2):
            trainer.step(batch)
            settled = trainer.stats()["peak_bytes"]
            trainer.evaluate(batch)
            assert trainer.stats()["peak_bytes"] == settled


def test_where_nothing_can_be_served_some_results_are_left_to_the_framework() -> None:
    code = "import test_arena_accelerator; test_arena_accelerator.without_a_hook()"
    env = {**os.environ, "SOFT_HOOK": "0"}
    here = Path(__file__).parent
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=here, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "aten.native_layer_norm" in result.stdout, result.stdout


def faulty(what: str, mode: str) -> tuple[dict[str, Any] | None, list[str]]:
    """None: it was so wrong that the step stopped (on all ranks, by the norm of their gradients)."""
    import soft_device

    try:
        got = train("llama", "soft", mode, plant=what)
    except NonFiniteError:
        got = None
    soft_device._C.plant("none")
    soft_device.use("free")
    return got, soft_device.take_reports()


@pytest.mark.parametrize("what", ["wait", "start"])
def test_places_reused_before_a_transfer_is_over_are_reported(what: str) -> None:
    right = ranks.run(train, 2, "llama", "soft")
    for seed in range(20):
        try:
            results = ranks.run(faulty, 2, what, f"starve:{seed}")
        except AssertionError as e:  # what is overwritten may be labels, which then name no class, or one rank's norm: it stops alone
            assert "out of bounds" in str(e) or "closed its trainer while others went on" in str(e), e
            return
        assert all(any("overwrites without a wait" in line for line in reports) for _, reports in results)
        if not all(got is not None and same(got, right[rank]) for rank, (got, _) in enumerate(results)):
            return
    pytest.fail("no order of streams has shown it")


def test_no_room_says_what_takes_it_and_what_to_lower() -> None:
    import soft_device

    text = "\n".join([
        "interlace 1 captured", 'input %0: f32[1024,1024] "x"', "phase micro_batch takes () gives () {",
        "  %1: f32[1024,1024] = aten.exp(%0) {fwd}", "  %2: f32[1024,1024] = aten.mul.Tensor(%1, %0) {fwd}",
        "  %3: f32[] = aten.sum(%2) {fwd}", '  output(%3) {fwd name="y"}', "}", "",
    ])  # fmt: skip
    x = torch.ones(1024, 1024, device="soft")
    used = torch.accelerator.memory.memory_allocated()
    held = -(-used // 2**20)
    facts = (
        f"memory: soft:0 has {held + 6} MiB; parameters and states take 0 MiB, the step as planned 8 MiB, others of this process {held} MiB"
        f" in {held} MiB that the framework holds; give a memory_limit (the search then recomputes or offloads), a smaller micro-batch with"
        " more accumulation, or more ranks"
    )
    try:
        soft_device._C.set_capacity(used + (6 << 20))
        with pytest.raises(_runtime.Error, match="no room for an arena of 8388608 bytes on soft:0") as planned:
            _runtime.Executor(text, "soft", [], 10.0, {})
        assert facts in str(planned.value)
        executor = _runtime.Executor(text, "soft", [], 10.0, {"arena": False})
        with pytest.raises(_runtime.Error, match=r"aten\.mul\.Tensor failed: soft device out of memory") as alone:
            executor.step([[x]], [], 0)
        assert "lane:   compute of soft:0" in str(alone.value) and "the step as planned 0 MiB" in str(alone.value)
        soft_device._C.set_capacity(used + (12 << 20))
        assert executor.step([[x]], [], 0)["outputs"]["y"][0].item() == pytest.approx(2**20 * 2.718281828)
    finally:
        soft_device._C.set_capacity(64 << 30)
