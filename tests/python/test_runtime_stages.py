"""Program sets on real ranks: what runs save for later runs of a micro-batch, messages between stages, orders of pipelines, each against
the network in one program."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import ranks
import stage_texts
import torch
import torch.distributed as dist
from stage_texts import Net

from interlace import _core, _runtime
from interlace.dist.mesh import Mesh

STEPS = 4
MESSAGE_BYTES = 4 * 8 * 8  # of one micro-batch between two stages
FOUR = Net(chunks=4, micro_batches=8, hold=4)
# Stages, network, order.
CASES: dict[str, tuple[int, Net, Any]] = {
    "gpipe": (2, Net(2, 4), stage_texts.gpipe),
    "1f1b": (2, Net(2, 4, clip=0.5), stage_texts.one_f_one_b),
    "interleaved": (2, FOUR, stage_texts.one_f_one_b),
    "split": (2, Net(2, 4, split=True), stage_texts.one_f_one_b),
    "carried": (2, Net(2, 4, carries=True), stage_texts.one_f_one_b),
    "gpipe-4": (4, FOUR, stage_texts.gpipe),
    "1f1b-4": (4, Net(4, 8, clip=0.5), stage_texts.one_f_one_b),
    "interleaved-4": (4, Net(8, 8, layers=1, hold=4), stage_texts.one_f_one_b),
    "split-4": (4, Net(8, 8, layers=1, hold=4, split=True, skips=((0, 2), (1, 5))), stage_texts.one_f_one_b),
}


def weight(layer: int) -> torch.Tensor:
    return 0.4 * torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(layer))


def batch(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    seed = 1000 + (step * 64 + micro_batch) * 8 + rank
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Stage:
    """An executor of a text with the test's weights."""

    def __init__(self, text: str, axes: list[dict[str, Any]], data_rank: int = 0, **options: Any) -> None:
        self.program = _core.Program.parse(text)
        self.executor = _runtime.Executor(text, "cpu", axes, 20.0, options)
        self.data_rank = data_rank
        self.values = {p["name"]: p["value"] for p in self.program.params()}
        for name, value in self.values.items():
            self.executor.tensor(value).copy_(weight(int(name[1:])))
        self.results: list[dict[str, Any]] = []

    def inputs(self, step: int) -> list[list[torch.Tensor]]:
        count = len(self.program.inputs())
        return [[batch(step, m, self.data_rank)] * count for m in range(self.program.accumulation)]

    def step(self, step: int) -> None:
        hyper = [[0.1, 0.0, 0.0, 0.0, 0.0, step + 1.0, 0.0]]
        result = self.executor.step(self.inputs(step), hyper, step)
        self.results.append({"loss": [x.item() for x in result["outputs"].get("loss", [])], "norm": result["norm"]})

    def found(self) -> dict[str, Any]:
        weights = {name: self.executor.tensor(value).clone() for name, value in self.values.items()}
        plan = self.program.memory_plan(self.executor.workspaces()) if self.executor.arena_stats()["on"] else {}
        return {
            "results": self.results, "weights": weights, "stats": self.executor.stats(), "arena": self.executor.arena_stats(), "plan": plan
        }  # fmt: skip


def axes_of(mesh: dict[str, int], backend: str) -> list[dict[str, Any]]:
    where, axes = Mesh(mesh, dist.get_rank()), []
    for name, size in mesh.items():
        for group in where.groups(name) if size > 1 else []:
            made = dist.new_group(group, backend="gloo")
            if dist.get_rank() in group:
                axes.append(
                    {"name": name, "rank": where.index(name), "size": size, "backend": backend, "native": made.group_name}
                )
    return axes


def stage_of(texts: list[str], dp: int, backend: str, options: dict[str, Any]) -> Stage:
    mesh = {"pp": len(texts), "dp": dp}
    where = Mesh(mesh, dist.get_rank())
    return Stage(texts[where.index("pp")], axes_of(mesh, backend), where.index("dp"), **options)


def trained(texts: list[str], dp: int = 1, backend: str = "tcp", **options: Any) -> dict[str, Any]:
    stage = stage_of(texts, dp, backend, options)
    for step in range(STEPS):
        stage.step(step)
    return stage.found()


def alone(net: Net) -> dict[str, Any]:
    stage = Stage(stage_texts.whole(net), [])
    for step in range(STEPS):
        stage.step(step)
    return stage.found()


def alone_on_ranks(text: str, dp: int) -> dict[str, Any]:
    stage = Stage(text, axes_of({"dp": dp}, "tcp"), dist.get_rank())
    for step in range(STEPS):
        stage.step(step)
    return stage.found()


def set_of(texts: list[str]) -> Any:
    return _core.ProgramSet("pp", [_core.Program.parse(text, f"stage {s}") for s, text in enumerate(texts)])


def checked(net: Net, stages: int, order: stage_texts.Order, dp: int = 1) -> list[str]:
    texts = stage_texts.texts(net, stages, order, dp)
    set_of(texts).check()
    return texts


def check_same(found: list[dict[str, Any]], want: dict[str, Any]) -> None:
    """The stages of one pipeline have the weights and losses of the whole network, bit for bit."""
    weights = {name: w for one in found for name, w in one["weights"].items()}
    assert weights.keys() == want["weights"].keys()
    for name, w in weights.items():
        assert torch.equal(w, want["weights"][name]), name
    assert [r["loss"] for r in found[-1]["results"]] == [r["loss"] for r in want["results"]]
    for one in found:
        assert [r["norm"] for r in one["results"]] == [r["norm"] for r in want["results"]]


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_one_process(case: str) -> None:
    stages, net, order = CASES[case]
    texts, want = checked(net, stages, order(net, stages)), alone(net)
    for arena in (True, False):
        found = ranks.run(trained, stages, texts, arena=arena)
        check_same(found, want)
        for one in found:
            assert one["arena"]["on"] == arena, one["arena"]
            if not arena:
                continue
            assert one["arena"]["settled"] and one["arena"]["unforeseen"] == [], one["arena"]
            assert one["arena"]["planned_bytes"] == one["plan"]["top_bytes"]
            # With a norm the highest may be what it receives into, which is no tensor of a slot.
            assert one["arena"]["top_bytes"] == one["arena"]["planned_bytes"] or net.clip is not None
            assert one["stats"]["copied_bytes"] == 0


def test_the_window_of_1f1b_takes_less() -> None:
    net = Net(2, 8)
    peaks = {}
    for name, order in {"gpipe": stage_texts.gpipe, "1f1b": stage_texts.one_f_one_b}.items():
        texts = checked(net, 2, order(net, 2))
        peaks[name] = {
            arena: [f["stats"]["peak_bytes"] for f in ranks.run(trained, 2, texts, arena=arena)] for arena in (True, False)
        }
    for arena in (True, False):
        assert all(a < b for a, b in zip(peaks["1f1b"][arena], peaks["gpipe"][arena], strict=True)), peaks


def test_two_ranks_a_stage() -> None:
    net = Net(2, 4, clip=0.5)
    texts = checked(net, 2, stage_texts.one_f_one_b(net, 2), dp=2)
    want = ranks.run(alone_on_ranks, 2, stage_texts.whole(net, 2), 2)
    found = ranks.run(trained, 4, texts, 2)
    for rank in range(2):
        check_same([found[rank], found[2 + rank]], want[rank])


def test_messages_of_a_process_group() -> None:
    stages, net, order = CASES["split"]
    check_same(ranks.run(trained, stages, checked(net, stages, order(net, stages)), backend="native"), alone(net))


def swapped(orders: list[list[str]]) -> dict[str, Any]:
    """A step by each set, whose executors share states."""
    axes = axes_of({"pp": len(orders[0])}, "tcp")
    stage = Stage(orders[0][dist.get_rank()], axes)
    for step, texts in enumerate(orders):
        if step:
            text = texts[dist.get_rank()]
            stage.executor = _runtime.Executor(text, "cpu", axes, 20.0, {}, donor=stage.executor)
        stage.step(step)
    return stage.found()


def test_another_order_between_two_steps() -> None:
    sets = [checked(FOUR, 2, order(FOUR, 2)) for order in (stage_texts.gpipe, stage_texts.one_f_one_b)]
    check_same(ranks.run(swapped, 2, [sets[step % 2] for step in range(STEPS)]), alone(FOUR))


def recorded(texts: list[str], arena: bool) -> dict[str, Any]:
    stage = stage_of(texts, 1, "tcp", {"arena": arena})
    for step in range(STEPS):
        stage.executor.set_trace("serial" if step == 1 else "on")
        stage.step(step)
    record = stage.executor.record()
    return {
        **stage.found(), "runs": len({run for _, run, *_ in record["samples"]}), "transfers": len(record["transfers"]),
        "live": max(sample[-1] for sample in record["samples"]),
    }  # fmt: skip


def test_recorded_steps() -> None:
    stages, net, order = CASES["split"]
    texts, want = checked(net, stages, order(net, stages)), alone(net)
    with_arena, without = (ranks.run(recorded, stages, texts, arena) for arena in (True, False))
    check_same(with_arena, want)
    check_same(without, want)
    predicted = json.loads(_core.simulate_set(set_of(texts), "local-2"))["stages"]
    for a, b, stage in zip(with_arena, without, predicted, strict=True):
        assert a["runs"] == 3 * net.micro_batches + 2
        assert a["transfers"] == 2 * net.micro_batches
        # What is saved for later runs counts in the runs between. Measured are also the results that leave the step, those
        # of the step before until Python lets go of them, and blocks of torch's allocator that are a few bytes larger.
        assert 0 <= a["live"] - (stage["peak_bytes"] - stage["persistent_bytes"]) < MESSAGE_BYTES
        assert a["live"] <= b["live"] < 1.1 * a["live"]


def debugged(texts: list[str]) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    stage = stage_of(texts, 1, "tcp", {"debug": True})
    stage.step(0)
    report = stage.executor.debug_step(stage.inputs(1), 1, "")
    for step in range(1, STEPS):
        stage.step(step)
    return stage.found(), [(r["phase"], r["micro_batch"]) for r in report["ops"]]


def test_debug_steps() -> None:
    stages, net, order = CASES["split"]
    texts, want = checked(net, stages, order(net, stages)), alone(net)
    found = ranks.run(debugged, stages, texts)
    check_same([state for state, _ in found], want)
    for stage, (_, records) in enumerate(found):
        ran = list(dict.fromkeys((".".join(phase.split(".")[:2]), m) for phase, m in records))
        assert ran == [(f"{r.kind}.{r.chunk}", r.micro_batch) for r in order(net, stages)[stage]]


def random_set(seed: int) -> tuple[int, Net, stage_texts.Order]:
    """A set that the check accepts: what waits for both ends can stand still where buffers would not."""
    rng = random.Random(seed)
    while True:
        stages = rng.randint(2, 4)
        chunks = stages * rng.randint(1, 2)
        pairs = [(a, b) for a in range(chunks) for b in range(a + 2, chunks)]
        skips = tuple(sorted(rng.sample(pairs, min(len(pairs), rng.randint(0, 2)))))
        net = Net(
            chunks, rng.randint(1, 5), rng.randint(1, 2), skips, rng.random() < 0.5, rng.choice([None, 0.5]),
            shows_input=True, hold=rng.randint(1, 4), carries=rng.random() < 0.5,
        )  # fmt: skip
        try:
            order = stage_texts.at_random(net, stages, rng)
            checked(net, stages, order)
        except (stage_texts.Stuck, _core.Error):
            continue
        return stages, net, order


def stepped(texts: list[str], inputs: list[list[torch.Tensor]], arena: bool) -> dict[str, Any]:
    stage = stage_of(texts, 1, "tcp", {"arena": arena})
    losses = []
    for step, micro_batches in enumerate(inputs):
        mine = [[x] if stage.program.inputs() else [] for x in micro_batches]
        result = stage.executor.step(mine, [[0.1, 0.0, 0.0, 0.0, 0.0, step + 1.0, 0.0]], step)
        losses += [x.item() for x in result["outputs"].get("loss", [])]
    return {**stage.found(), "losses": losses}


@pytest.mark.parametrize("seed", range(12))
def test_random_sets_against_the_interpreter(seed: int) -> None:
    stages, net, order = random_set(seed)
    texts = stage_texts.texts(net, stages, order)
    weights = {f"w{i}": weight(i).flatten().tolist() for i in range(net.chunks * net.layers)}
    hyper = [[0.1, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]
    want = _core.testing.interpret("pp", texts, steps=3, hyper=hyper, params=weights)
    m = net.micro_batches
    x = [torch.tensor(v, dtype=torch.float64).view(4, 8) for v in want["outputs"]["x"]]
    for arena in (True, False):
        found = ranks.run(stepped, stages, texts, [x[m * step : m * (step + 1)] for step in range(3)], arena)
        losses = next(f["losses"] for f in found if f["losses"])
        assert losses == pytest.approx([v[0] for v in want["outputs"]["loss"]], rel=1e-12)
        for one in found:
            for name, w in one["weights"].items():
                assert torch.allclose(
                    w.flatten(), torch.tensor(want["params"][name], dtype=torch.float64), rtol=1e-12, atol=1e-14
                )


def chained(texts: list[str]) -> list[float]:
    mesh = {"pp": len(texts)}
    executor = _runtime.Executor(texts[dist.get_rank()], "cpu", axes_of(mesh, "tcp"), 10.0, {})
    x = torch.full((1 << 19,), 1.0 + dist.get_rank(), dtype=torch.float64)
    outputs = [executor.step([[x]], [], step)["outputs"] for step in range(2)]
    return [out[name][0][-1].item() for out in outputs for name in ("sum", "sent")]


def test_a_message_passes_a_collective_that_is_not_complete() -> None:
    """The last stage joins the sum when a message has come down the chain, which the first sends after it has begun the sum."""
    texts, size = [], 4
    for s in range(size):
        f = "f64[524288]"
        begin = [f"%1: {f} = all_reduce.start(%0) {{fwd axis=pp}}"]
        chain = []
        if s > 0:
            chain += [f"%2: {f} = recv.start() {{fwd axis=pp peer={s - 1}}}", "recv.wait(%2) {fwd}"]
        chain += [f"%3: {f} = aten.add.Tensor({'%2' if s else '%0'}, %0) {{fwd}}"]
        if s + 1 < size:
            chain += [f"%4: b8[0] = send.start(%3) {{fwd axis=pp peer={s + 1}}}", "send.wait(%4) {fwd}"]
        lines = [*(begin + chain if s == 0 else chain + begin), "all_reduce.wait(%1) {fwd}"]
        lines += ['output(%1) {fwd name="sum"}', 'output(%3) {fwd name="sent"}']
        texts.append(
            f'interlace 1 scheduled\nmesh pp {size}\nstep 1 reduce_each\ninput %0: {f} "x"\n'
            "phase micro_batch takes () gives () {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"
        )
    set_of(texts).check()
    for rank, values in enumerate(ranks.run(chained, size, texts)):
        assert values == [10.0, 1.0 + sum(range(1, rank + 2))] * 2
