"""Micro-batches as device graphs on the software accelerator: the bits of ops that are issued one by one whatever the order of streams,
no wait left out, nothing issued inside a graph; what cannot be captured, and why. Before that: the accelerator's own graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo

import interlace
from interlace import _runtime

pytestmark = pytest.mark.software
if not hasattr(torch.accelerator, "Graph"):
    pytest.skip("this torch has no device graphs", allow_module_level=True)
MODES = ["free", "lockstep:3", "starve:1", "starve:2"]
N = 4096


def use(mode: str) -> None:
    import soft_device

    soft_device.use(mode)


def graph_of(body: Callable[[], None]) -> Any:
    graph = torch.accelerator.Graph()
    with torch.Stream("soft"), graph:
        body()
    return graph


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((N,), float(value), device="soft")


# ---- the accelerator's graphs ----


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_runs_when_it_is_replayed(mode: str) -> None:
    use(mode)
    x, y = ones(0), ones(0)

    def body() -> None:
        x.add_(1)
        y.copy_(x * 2)

    graph = graph_of(body)
    assert x.sum().item() == 0
    for count in range(1, 4):
        graph.replay()
        graph.replay()
        assert x[0].item() == 2 * count and y[7].item() == 4 * count
    x.fill_(10)
    graph.replay()
    assert y.mean().item() == 22
    use("free")


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_streams_fork_and_join_in_a_graph_and_a_wait_left_out_is_reported(mode: str, wrong: bool) -> None:
    import soft_device

    use(mode)
    x, y, z = ones(), ones(0), ones(0)
    side = torch.Stream("soft")

    def body() -> None:
        main = torch.accelerator.current_stream()
        x.mul_(3)
        side.wait_stream(main)
        with soft_device.stream(side):
            y.copy_(x)
            early = side.record_event()
            y.mul_(2)
        if wrong:  # joined, but too early for y
            main.wait_event(early)
            z.copy_(y)
            main.wait_stream(side)
        else:
            main.wait_stream(side)
            z.copy_(y)

    graph = graph_of(body)
    assert soft_device.take_reports() == []
    for _ in range(3):
        graph.replay()
    torch.accelerator.synchronize()
    reports = soft_device.take_reports()
    assert z[0].item() == 54 or wrong
    assert bool(reports) == wrong, reports
    assert all("reads without a wait" in line or "overwrites without a wait" in line for line in reports)
    use("free")


def test_what_a_graph_leaves_is_ordered_by_waits_alone() -> None:
    """Ops of the stream that was captured beside know nothing of a replay."""
    import soft_device

    x, y = ones(), ones(0)
    side = torch.Stream("soft")

    def body() -> None:
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with soft_device.stream(side):
            x.mul_(3)
        main.wait_stream(side)

    graph = graph_of(body)
    torch.accelerator.synchronize()
    graph.replay()
    with soft_device.stream(side):
        y.copy_(x)
    torch.accelerator.synchronize()
    assert any("reads without a wait" in line for line in soft_device.take_reports())


def unjoined(x: torch.Tensor) -> None:
    import soft_device

    side = torch.Stream("soft")
    side.wait_stream(torch.accelerator.current_stream())
    with soft_device.stream(side):
        x.mul_(2)


def outside(x: torch.Tensor) -> None:
    event = torch.Event("soft")
    event.record(torch.Stream("soft"))
    torch.accelerator.current_stream().wait_event(event)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "synchronize": (lambda x: torch.accelerator.synchronize(), "the host waits for a stream that is captured"),
    "item": (lambda x: x.sum().item(), "a copy between host and device, and the stream is captured"),
    "copy in": (lambda x: x.copy_(torch.zeros(N)), "a copy between host and device, and the stream is captured"),
    "draw": (lambda x: x.bernoulli_(0.5), "takes its seed from the host, and the stream is captured"),
    "unjoined": (unjoined, "was not waited for in the end"),
    "outside": (outside, "a stream waits for an event that was recorded outside of it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_capture_refuses(what: str) -> None:
    call, said = REFUSED[what]
    x = ones()
    graph = torch.accelerator.Graph()
    with pytest.raises(RuntimeError, match=said), torch.Stream("soft"), graph:
        call(x)
    with pytest.raises(RuntimeError, match="nothing has been captured"):
        graph.replay()
    graph.reset()
    with torch.Stream("soft"), graph:
        x.add_(1)
    graph.replay()
    assert x[0].item() == 2


def test_the_default_stream_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="the default stream cannot be captured"):
        torch.accelerator.Graph().capture_begin()


def test_memory_of_a_graph_is_its_own() -> None:
    import soft_device

    x, kept = ones(3), []

    def body() -> None:
        temporary = x * 2
        kept.append(temporary + 1)
        del temporary
        kept.append(kept[0] * 2)

    graph = graph_of(body)
    for _ in range(3):
        graph.replay()
        others = [ones(float(i)) for i in range(20)]
        torch.accelerator.empty_cache()
        assert kept[0][0].item() == 7 and kept[1][0].item() == 14
        assert [t[5].item() for t in others] == list(range(20))
        del others
    gc.collect()  # what tests before it have left
    used = torch.accelerator.memory.memory_allocated()
    del graph, kept[:]
    gc.collect()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory.memory_allocated() == used - 2 * x.nbytes
    assert soft_device.take_reports() == []


# ---- steps ----


def train(case: str, mode: str, graphs: Any, steps: int = 7, between: str = "", **settings: Any) -> dict[str, Any]:
    """Steps with a learning rate that changes, and by step: ops issued by the executor, what the accelerator was given, replays."""
    import soft_device

    gc.collect()
    rank = 0 if "mesh" in settings else parity.rank_and_size()[0]  # of the ranks with data of their own
    model = zoo.build(case, zoo.CASES[case].dtype).to("soft")
    optimizer = parity.make_optimizer("adamw", model)
    accumulation = settings.get("accumulation", 1)
    settings = {"clip_norm": 0.3, "profile": "off", "schedule": [], **settings}

    def batch(step: int) -> Any:
        return torch.utils._pytree.tree_map(lambda t: t.to("soft"), parity.batch_of(case, step, rank, accumulation))

    compile = getattr(interlace.compile, "__wrapped__", interlace.compile)  # the model is where it shall be
    config = interlace.Config(device_graphs=graphs, **settings)
    use(mode)
    seen: list[dict[str, Any]] = []
    losses, extra, held = [], [], None
    with compile(model, optimizer, zoo.CASES[case].loss, batch(0), config) as trainer:
        scheduler = parity.schedule(optimizer, steps)
        for step in range(steps):
            if between == "swap" and step == 4:
                trainer.swap(trainer.program)
            if between == "evaluate":
                extra.append(float(trainer.evaluate(batch(50))["loss"]))
            if between == "moved" and step == 4:  # another program runs, and somebody takes the place of this one's memory
                extra.append(float(trainer.evaluate(batch(50))["loss"]))
                held = torch.empty(trainer.stats()["arena"]["planned_bytes"] // 4, device="soft")
            if between == "trace":
                trainer._run.executor.set_trace("on" if step == 5 else "off")
            if between == "load" and step == 4:
                trainer.load_weights({name: t * 0.5 for name, t in trainer.state_dict(all_ranks=True).items()})
            if between == "fault":
                soft_device._C.plant("wait" if step == 2 else "none")
            inputs, stats, issued = batch(step), trainer.stats(), soft_device._C.issued()
            loss = trainer.step(inputs)
            now, given = trainer.stats(), soft_device._C.issued() - issued
            losses.append(loss)
            scheduler.step()
            seen.append({
                "ops": now["ops"] - stats["ops"], "given": given, "graphs": now["graphs"], "sent": now["bytes_sent"] - stats["bytes_sent"],
                "replays": now["graphs"]["replays"] - stats["graphs"]["replays"], "placed": now["placed_bytes"] - stats["placed_bytes"],
            })  # fmt: skip
        weights = {name: t.cpu() for name, t in trainer.state_dict(all_ranks=True).items()}
        floats = [float(loss) for loss in losses]  # not before: a graph must leave alone what the steps before have given
        out = {"losses": floats, "extra": extra, "weights": weights, "seen": seen, "reports": soft_device.take_reports()}
    use("free")
    del held
    return out


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    weights = all(torch.equal(t, b["weights"][name]) for name, t in a["weights"].items())
    return a["losses"] == b["losses"] and a["extra"] == b["extra"] and weights


def run(count: int, *args: Any, **settings: Any) -> list[dict[str, Any]]:
    return ranks.run(train, count, *args, **settings) if count > 1 else [train(*args, **settings)]


ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 1, {}),
    "accumulation": ("llama", 1, {"accumulation": 3}),
    "recompute": ("gpt2", 1, {"schedule": [(0, ["recompute(mode=full)"])]}),
    "batchnorm": ("batchnorm", 1, {"clip_norm": None}),
    "shard": ("llama", 2, {}),
    "shard accumulation": ("llama", 2, {"accumulation": 3}),
    "shard once": ("llama", 2, {"accumulation": 3, "accumulate_mode": "reduce_last"}),
    "zero1": ("llama", 2, {"strategy": "zero1", "accumulation": 2}),
    "replicate": ("llama", 2, {"strategy": "replicate"}),
    "tensor": ("llama", 2, {"mesh": {"dp": 1, "tp": 2}, "tensor": "model"}),
}


@pytest.mark.parametrize("what", ROWS)
def test_bits_and_what_is_issued(what: str) -> None:
    case, count, settings = ROWS[what]
    micro_batches = settings.get("accumulation", 1)
    plain = run(count, case, "free", False, **settings)
    assert all(step["graphs"]["why_not"] == "" and not step["graphs"]["on"] for step in plain[0]["seen"])
    for mode in MODES if count == 1 else MODES[::3]:
        for got, expected in zip(run(count, case, mode, True, **settings), plain, strict=True):
            assert same(got, expected), mode
            for step, (with_graphs, without) in enumerate(zip(got["seen"], expected["seen"], strict=True)):
                assert with_graphs["sent"] == without["sent"] and with_graphs["placed"] == without["placed"], step
                assert (without["sent"] > 0) == (count > 1)
            last, without = got["seen"][-1], expected["seen"][-1]
            captures = [step["graphs"]["captures"] for step in got["seen"]]
            assert captures[0] == 0 and captures[-3] == captures[-1] == last["graphs"]["graphs"] > 0, captures
            assert last["replays"] >= micro_batches and (micro_batches > 1 or last["replays"] <= 2)
            # Nothing but the update, and for each graph: itself, inputs and outputs.
            assert last["ops"] < without["ops"] / 4
            assert last["given"] < without["given"] / 2
            assert last["graphs"]["bytes"] > 0


def test_deeper_models_issue_no_more() -> None:
    """Of two models that differ in their layers alone, with as many units, the micro-batch of either is one thing to issue."""

    def given(layers: int, graphs: bool) -> list[int]:
        import soft_device

        torch.manual_seed(0)
        shared = torch.nn.Linear(16, 16)
        model = torch.nn.Sequential(*[layer for _ in range(layers) for layer in (shared, torch.nn.Tanh())]).to("soft")
        x = torch.randn(4, 16).to("soft")
        compile = getattr(interlace.compile, "__wrapped__", interlace.compile)
        config = interlace.Config(device_graphs=graphs, profile="off", schedule=[])
        out = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with compile(model, optimizer, lambda m, b: m(b["x"]).square().mean(), {"x": x}, config) as trainer:
            for _ in range(6):
                before, ops = soft_device._C.issued(), trainer.stats()["ops"]
                trainer.step({"x": x})
                out = [soft_device._C.issued() - before, trainer.stats()["ops"] - ops]
        return out

    assert given(2, True) == given(12, True)
    assert given(2, False)[0] + 20 < given(12, False)[0]


# ---- when they are captured again, and when steps run op by op ----


@pytest.mark.parametrize("between", ["swap", "evaluate", "moved", "trace", "load"])
def test_between_steps(between: str) -> None:
    plain = train("llama", "free", False, steps=9, between=between)
    got = train("llama", "starve:5", True, steps=9, between=between)
    assert same(got, plain)
    replays = [step["replays"] for step in got["seen"]]
    captures = [step["graphs"]["captures"] for step in got["seen"]]
    assert replays[3] > 0 and replays[-1] > 0, replays
    if between == "swap":  # a program of its own, which learns its memory anew
        assert replays[4] == 0 and captures[4] == 0 and captures[-1] > 0, (replays, captures)
    if between == "trace":
        assert replays[5] == 0 and replays[6] > 0 and captures[4] == captures[-1], (replays, captures)
        assert got["seen"][5]["ops"] == plain["seen"][5]["ops"]
    if between == "moved":
        assert captures[3] < captures[-1] and replays[4] == 0, (replays, captures)
    if between == "load":
        assert captures[3] == captures[-1], captures


# Transfers that begin in one phase and are waited for in another: one comes from outside of the graph, one leaves it.
ACROSS = """interlace 1 sharded
mesh dp 2
step 1 reduce_each
run begin
run micro_batch 0
run end
group 0 sgd
unit u0 dp f32 numel 64 shard 32
state %0: f32[32] u0.shard persistent
param %1: f32[64] "w" trainable group 0 unit u0+0
input %2: f32[64] "x"
phase begin once takes () gives (%30) {
  %30: f32[64] = gather.start(%0) {fwd units=[u0]}
}
phase micro_batch takes (%3: f32[64]) gives (%8) {
  gather.wait(%3) {fwd}
  %4: f32[64] = aten.mul.Tensor(%2, %3) {fwd}
  %5: f32[] = aten.sum(%4) {fwd}
  output(%5) {fwd name="y"}
  %7: f32[64] = aten.mul.Tensor(%4, 3.0) {bwd}
  %8: f32[32] = reduce.start(%7) {bwd units=[u0]}
}
phase end once takes (%20: f32[32]) gives () {
  reduce.wait(%20) {upd}
  %21: f32[32] = aten.mul.Tensor(%20, 2.0) {upd}
  output(%21) {upd name="sum"}
}
"""


def across(mode: str) -> dict[str, Any]:
    import soft_device
    import torch.distributed as dist

    use(mode)
    group = dist.new_group(backend="soft")
    axes = [{"name": "dp", "rank": dist.get_rank(), "size": 2, "backend": "native", "native": group.group_name}]
    executor = _runtime.Executor(ACROSS, "soft", axes, 30.0, {"device_graphs": "on", "captured_here": True})
    whole = torch.arange(64.0)
    executor.tensor(0).copy_(whole.chunk(2)[dist.get_rank()])
    found = []
    for step in range(6):
        x = [torch.full((64,), float(1 + step + 10 * rank)) for rank in range(2)]
        outputs = executor.step([[x[dist.get_rank()].to("soft")]], [[0.1, 0.0, 0.0, 0.0, 0.0, step + 1.0, 0.0]], step)["outputs"]
        total = (x[0] * whole * 3 + x[1] * whole * 3).chunk(2)[dist.get_rank()] * 2
        right = float((x[dist.get_rank()] * whole).sum())
        found.append(outputs["y"][0].item() == right and torch.equal(outputs["sum"][0].cpu(), total))
    use("free")
    return {"right": found, "graphs": executor.graph_stats(), "reports": soft_device.take_reports()}


@pytest.mark.parametrize("mode", MODES)
def test_transfers_across_the_borders_of_a_graph(mode: str) -> None:
    for got in ranks.run(across, 2, mode):
        assert got["right"] == [True] * 6 and got["reports"] == [] and got["graphs"]["replays"] >= 3, got


def test_a_wait_that_is_left_out_in_a_capture() -> None:
    """The capture fails, since not all of its streams are joined; op by op it is reported as ever, and it spoils the one step."""
    for got in ranks.run(train, 2, "llama", "starve:3", "auto", steps=6, between="fault", clip_norm=None):
        facts = got["seen"][-1]["graphs"]
        assert not facts["on"] and facts["captures"] == 0, facts
        assert facts["why_not"].startswith("the phase micro_batch cannot be captured: "), facts
        assert facts["why_not"].endswith("was not waited for in the end"), facts
        assert any("without a wait" in line for line in got["reports"])


REASONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dropout": ("gpt2_dropout", {}, "it draws random numbers, by keys that the host gives in each step"),
    "no arena": ("llama", {"arena": False}, 'the memory of a step is not planned (stats()["arena"])'),
    "pending": ("llama", {"schedule": [(0, ["reposition_update"])]}, "it belongs to an optimizer step, whose numbers the host gives"),
}


@pytest.mark.parametrize("what", REASONS)
def test_reasons(what: str) -> None:
    case, settings, why = REASONS[what]
    got = train(case, "free", "auto", steps=4, **settings)
    facts = got["seen"][-1]["graphs"]
    assert not facts["on"] and facts["why_not"].endswith(why) and facts["replays"] == 0, facts
    with pytest.raises(interlace.InterlaceError, match="device_graphs=True, but there can be no device graphs: ") as refused:
        train(case, "free", True, steps=1, **settings)
    assert why in str(refused.value) and 'leave it at "auto"' in str(refused.value)


def test_stages_run_op_by_op() -> None:
    for got in ranks.run(train, 2, "llama", "free", "auto", steps=3, mesh={"pp": 2, "dp": 1}, accumulation=4):
        facts = got["seen"][-1]["graphs"]
        assert not facts["on"] and "waits for messages of its own meanwhile" in facts["why_not"], facts


def test_cpus_have_none() -> None:
    model = torch.nn.Linear(4, 4)
    compile = getattr(interlace.compile, "__wrapped__", interlace.compile)
    with pytest.raises(interlace.InterlaceError, match="there can be no device graphs: CPUs have none"):
        compile(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).sum(), torch.ones(1, 4), interlace.Config(device_graphs=True))


# Indices of a program from a file are looked at before each call, on the host.
LOOKED_AT = "\n".join([
    "interlace 1 captured", 'input %0: i64[4] "i"', 'input %1: f32[4,4] "g"', "phase micro_batch takes () gives () {",
    "  %2: f32[4,4] = aten.mul.Tensor(%1, %1) {fwd}", "  %3: f32[8,4] = aten.embedding_dense_backward(%2, %0, 8, -1, false) {fwd}",
    "  %4: f32[8,4] = aten.exp(%3) {fwd}", "  %5: f32[] = aten.sum(%4) {fwd}", '  output(%5) {fwd name="y"}', "}", "",
])  # fmt: skip


def looked_at(index: torch.Tensor, grad: torch.Tensor) -> float:
    given = torch.ops.aten.embedding_dense_backward(grad.cpu().square(), index.cpu(), 8, -1, False)
    return float(given.exp().sum())


def test_graphs_that_python_makes() -> None:
    """As torch.cuda.CUDAGraph is."""
    index, grad = torch.tensor([1, 3, 3, 7]).to("soft"), torch.linspace(0, 1, 16).view(4, 4).to("soft")
    options = {"device_graphs": "on", "graph": lambda: torch._C._acceleratorGraph(False), "captured_here": True}
    executor = _runtime.Executor(LOOKED_AT, "soft", [], 10.0, options)
    for step in range(6):
        result = executor.step([[index, grad * step]], [], step)
        assert result["outputs"]["y"][0].item() == looked_at(index, grad * step)
    assert executor.graph_stats()["replays"] >= 3 and executor.graph_stats()["captures"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_that_fails_is_told_once_and_the_step_goes_on(mode: str) -> None:
    use(mode)
    index, grad = torch.tensor([1, 3, 3, 7]).to("soft"), torch.linspace(0, 1, 16).view(4, 4).to("soft")
    executor = _runtime.Executor(LOOKED_AT, "soft", [], 10.0, {"device_graphs": "auto"})
    notes = []
    for step in range(6):
        result = executor.step([[index, grad * step]], [], step)
        notes.append(result["note"])
        assert result["outputs"]["y"][0].item() == looked_at(index, grad * step)
    told = [note for note in notes if note]
    assert len(told) == 1 and told[0].startswith("the phase micro_batch cannot be captured: aten.embedding_dense_backward failed: "), notes
    assert "the stream is captured" in told[0] and executor.graph_stats()["why_not"] == told[0]
    strict = _runtime.Executor(LOOKED_AT, "soft", [], 10.0, {"device_graphs": "on"})
    with pytest.raises(_runtime.Error, match=r"the phase micro_batch cannot be captured: aten\.embedding_dense_backward failed: "):
        for step in range(6):
            strict.step([[index, grad]], [], step)
    use("free")
