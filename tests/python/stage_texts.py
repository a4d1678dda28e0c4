"""Small networks as program texts: whole, and cut into the stages of a pipeline in one of several orders.

A network is a chain of chunks of layers, y = tanh(h w), in float64; chunk c is on stage c % stages. What a chunk makes goes to the next
one, and to those that `skips` names, which add it to what they got. Orders come from running the chunks step by step as the stages
would: a run is ready when each message for it is the next of its channel, so that an order fits the messages by construction.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict, deque
from collections.abc import Callable

WIDTH, ROWS = 8, 4  # of an activation: f64[4,8]
ACTIVATION = f"f64[{ROWS},{WIDTH}]"
WEIGHT = f"f64[{WIDTH},{WIDTH}]"


@dataclasses.dataclass(frozen=True)
class Net:
    chunks: int
    micro_batches: int
    layers: int = 2  # of a chunk
    skips: tuple[tuple[int, int], ...] = ()
    split: bool = False  # gradients of weights in phases of their own
    clip: float | None = None
    shows_input: bool = False  # as an output of the step
    hold: int = 1  # a send is waited for so many runs later
    carries: bool = False  # but activations in the backward part of their micro-batch

    def before(self, chunk: int) -> list[int]:
        return [*(a for a, b in self.skips if b == chunk), *([chunk - 1] if chunk else [])]

    def behind(self, chunk: int) -> list[int]:
        return [*([chunk + 1] if chunk + 1 < self.chunks else []), *(b for a, b in self.skips if a == chunk)]


@dataclasses.dataclass(frozen=True)
class Run:
    kind: str  # forward, backward (with `split` of the inputs alone), weights
    chunk: int
    micro_batch: int


class Ops:
    """The lines of a phase, with fresh names of values."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.lines: list[str] = []

    def __call__(self, result: str, text: str) -> str:
        name = self.names.fresh()
        self.lines.append(f"  {name}: {result} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")


class Names:
    def __init__(self, first: int) -> None:
        self.next = first

    def fresh(self) -> str:
        self.next += 1
        return f"%{self.next}"


class Layers:
    """Ops of the layers that a program has: parameters, states and units are numbered by the layer's place among them."""

    def __init__(self, net: Net, chunks: list[int]) -> None:
        self.net = net
        self.layers = [(c, k) for c in chunks for k in range(net.layers)]

    def at(self, layer: tuple[int, int]) -> tuple[str, str, str]:
        """Weight, the state that holds it, and its gradient's."""
        i = self.layers.index(layer)
        return f"%{3 * i + 10}", f"%{3 * i + 11}", f"%{3 * i + 12}"

    def declarations(self, dp: int) -> str:
        lines = [f"unit u{i} dp f64 numel 64 shard {64 // dp}" for i in range(len(self.layers))]
        for i, layer in enumerate(self.layers):
            weight, full, _ = self.at(layer)
            name = f"w{layer[0] * self.net.layers + layer[1]}"
            lines.append(f'param {weight}: {WEIGHT} in {full}+0 "{name}" trainable group 0 unit u{i}+0')
        if (0, 0) in self.layers:
            lines.append(f'input %2: {ACTIVATION} "x"')
        for i, layer in enumerate(self.layers):
            _, full, grad = self.at(layer)
            lines += [f"state {full}: f64[64] u{i}.full persistent", f"state {grad}: f64[64] u{i}.grad step"]
        return "\n".join(lines) + "\n"

    def begin(self, ops: Ops) -> None:
        for layer in self.layers:
            grad = self.at(layer)[2]
            zero = ops("f64[64]", f"aten.zeros_like({grad}) {{upd}}")
            ops.do(f"assign({grad}, {zero}) {{upd}}")

    def update(self, ops: Ops, dp: int, stages: int) -> None:
        scale, coef = 1 / (self.net.micro_batches * dp), ""
        grads = [self.at(layer)[2] for layer in self.layers]
        if dp > 1:
            for i, grad in enumerate(grads):
                grads[i] = ops("f64[64]", f"all_reduce.start({grad}) {{upd axis=dp}}")
                ops.do(f"all_reduce.wait({grads[i]}) {{upd}}")
        units = ",".join(f" u{i}" for i in range(len(grads))).strip()
        if self.net.clip is not None:
            norm = ops("i64[68]", f"norm.partial({', '.join(grads)}) {{upd units=[{units}]}}")
            if stages > 1:
                norm = ops("i64[68]", f"all_reduce.start({norm}) {{upd axis=pp}}")
                ops.do(f"all_reduce.wait({norm}) {{upd}}")
            coef = ops("f64[3]", f"norm.coef({norm}) {{upd max_norm={self.net.clip} scale={scale}}}")
        for i, layer in enumerate(self.layers):
            operands = ", ".join([self.at(layer)[1], grads[i], *([coef] if coef else [])])
            ops.do(f"update.sgd({operands}) {{upd units=[u{i}] scale={scale} ranges=[0, 64, 0]}}")

    def forward(self, ops: Ops, chunk: int, h: str) -> list[str]:
        """What comes in and out of each layer."""
        values = [h]
        if self.net.shows_input and chunk == 0:
            ops.do(f'output({h}) {{fwd name="x"}}')
        for k in range(self.net.layers):
            z = ops(ACTIVATION, f"aten.mm({values[-1]}, {self.at((chunk, k))[0]}) {{fwd}}")
            values.append(ops(ACTIVATION, f"aten.tanh({z}) {{fwd}}"))
        return values

    def loss(self, ops: Ops, y: str) -> None:
        loss = ops("f64[]", f"aten.sum({y}) {{fwd}}")
        ops.do(f'output({loss}) {{fwd name="loss"}}')

    def backward(self, ops: Ops, chunk: int, values: list[str], dy: str, inputs: bool, weights: bool) -> tuple[str, list[str]]:
        """The gradient of what came in ("": not wanted), and those before each layer's tanh."""
        inner = []
        for k in reversed(range(self.net.layers)):
            weight, full, _ = self.at((chunk, k))
            d = ops(ACTIVATION, f"aten.tanh_backward({dy}, {values[k + 1]}) {{bwd}}")
            inner.insert(0, d)
            if weights:
                self.add_gradient(ops, (chunk, k), values[k], d)
            if k or inputs:
                turned = ops(f"{WEIGHT}{{1,8}} in {full}+0", f"aten.t({weight}) {{bwd}}")
                dy = ops(ACTIVATION, f"aten.mm({d}, {turned}) {{bwd}}")
        return dy if inputs else "", inner

    def add_gradient(self, ops: Ops, layer: tuple[int, int], h: str, d: str) -> None:
        grad = self.at(layer)[2]
        turned = ops(f"f64[{WIDTH},{ROWS}]{{1,{WIDTH}}} in {h}+0", f"aten.t({h}) {{bwd}}")
        product = ops(WEIGHT, f"aten.mm({turned}, {d}) {{bwd}}")
        shown = ops(f"{WEIGHT} in {grad}+0", f"view({grad}) {{bwd}}")
        total = ops(WEIGHT, f"aten.add.Tensor({shown}, {product}) {{bwd}}")
        ops.do(f"assign({shown}, {total}) {{bwd}}")


def added(ops: Ops, values: list[str], part: str) -> str:
    total = values[0]
    for value in values[1:]:
        total = ops(ACTIVATION, f"aten.add.Tensor({total}, {value}) {{{part}}}")
    return total


def heading(net: Net, mesh: str, runs: str) -> str:
    return f"interlace 1 sharded\n{mesh}step {net.micro_batches} reduce_each\nrun begin\n{runs}run update\ngroup 0 sgd\n"


def phase(name: str, lists: str, ops: Ops) -> str:
    return f"phase {name} {lists} {{\n" + "".join(f"{line}\n" for line in ops.lines) + "}\n"


def whole(net: Net, dp: int = 1) -> str:
    """The network in one program, one phase for all of a micro-batch."""
    layers, names = Layers(net, list(range(net.chunks))), Names(1000)
    begin, ops, update = Ops(names), Ops(names), Ops(names)
    layers.begin(begin)
    values: list[list[str]] = []
    for c in range(net.chunks):
        come = [values[b][-1] for b in net.before(c)] or ["%2"]
        values.append(layers.forward(ops, c, added(ops, come, "fwd")))
    layers.loss(ops, values[-1][-1])
    back: dict[int, str] = {}
    for c in reversed(range(net.chunks)):
        behind = [back[b] for b in net.behind(c)]
        dy = added(ops, behind, "bwd") if behind else ops(ACTIVATION, f"aten.ones_like({values[c][-1]}) {{bwd}}")
        back[c], _ = layers.backward(ops, c, values[c], dy, c > 0, True)
    layers.update(update, dp, 1)
    count = f" x{net.micro_batches}" if net.micro_batches > 1 else ""
    return (
        heading(net, f"mesh dp {dp}\n", f"run all 0{count}\n") + layers.declarations(dp)
        + phase("begin", "once takes () gives ()", begin) + phase("all", "takes () gives ()", ops)
        + phase("update", "once takes () gives ()", update)
    )  # fmt: skip


# ---- stages ----


class Stuck(Exception):
    """Messages that lie behind one another crosswise."""


Order = list[list[Run]]  # by stage
Choose = Callable[[int, list[Run], list[Run]], Run | None]  # of a stage, what is ready and what it has run: the next, or None


def messages(net: Net, stages: int, run: Run) -> tuple[list[int], list[int]]:
    """Chunks that a run receives from and sends to on other stages, in the order of its ops."""
    before, behind = net.before(run.chunk), net.behind(run.chunk)
    if run.kind == "weights":
        return [], []
    come, go = (before, behind) if run.kind == "forward" else (behind, before)
    elsewhere = [[c for c in chunks if c % stages != run.chunk % stages] for chunks in (come, go)]
    return elsewhere[0], elsewhere[1]


def ordered(net: Net, stages: int, choose: Choose) -> Order:
    """What the stages run when each does, step by step, what `choose` says."""
    done: set[Run] = set()
    channels: dict[tuple[int, int], deque[tuple[str, int, Run]]] = defaultdict(deque)  # by sender and receiver
    order: Order = [[] for _ in range(stages)]
    kinds = ["forward", "backward", *(["weights"] if net.split else [])]
    left = [
        [Run(k, c, m) for k in kinds for c in range(s, net.chunks, stages) for m in range(net.micro_batches)]
        for s in range(stages)
    ]

    def fits(stage: int, run: Run) -> bool:
        if run.kind == "backward" and Run("forward", run.chunk, run.micro_batch) not in done:
            return False
        if run.kind == "weights" and Run("backward", run.chunk, run.micro_batch) not in done:
            return False
        others = {"forward": net.before, "backward": net.behind}.get(run.kind, lambda _: [])(run.chunk)
        if any(c % stages == stage and Run(run.kind, c, run.micro_batch) not in done for c in others):
            return False
        at: dict[int, int] = defaultdict(int)
        for c in messages(net, stages, run)[0]:
            queue = channels[c % stages, stage]
            if len(queue) <= at[c % stages] or queue[at[c % stages]] != (run.kind, run.micro_batch, (c, run.chunk)):
                return False
            at[c % stages] += 1
        return True

    while any(left):
        ready = [[r for r in left[s] if fits(s, r)] for s in range(stages)]
        if not any(ready):
            raise Stuck
        picked = [(s, choose(s, ready[s], order[s])) for s in range(stages)]
        for stage, run in picked:
            if run is None:
                continue
            left[stage].remove(run)
            order[stage].append(run)
            done.add(run)
            for c in messages(net, stages, run)[0]:
                channels[c % stages, stage].popleft()
        for stage, run in picked:
            for c in messages(net, stages, run)[1] if run is not None else []:
                channels[stage, c % stages].append((run.kind, run.micro_batch, (run.chunk, c)))
    return order


def by_rule(net: Net, stages: int, window: Callable[[int], int]) -> Choose:
    """Backward before forward, of which `window(stage)` may be open; gradients of weights when there is nothing else."""

    def choose(stage: int, ready: list[Run], ran: list[Run]) -> Run | None:
        opened = sum(r.kind == "forward" for r in ran) - sum(r.kind == "backward" for r in ran)
        allowed = [r for r in ready if r.kind != "forward" or opened < window(stage)]
        rank = {"backward": 0, "forward": 1, "weights": 2}

        def first(r: Run) -> tuple[int, ...]:
            return rank[r.kind], r.micro_batch // stages, r.chunk if r.kind == "forward" else -r.chunk, r.micro_batch

        return min(allowed, key=first, default=None)

    return choose


def gpipe(net: Net, stages: int) -> Order:
    total = net.micro_batches * -(-net.chunks // stages)

    def choose(stage: int, ready: list[Run], ran: list[Run]) -> Run | None:
        forward = sum(r.kind == "forward" for r in ran) < total
        return next((r for r in ready if (r.kind == "forward") == forward), None)

    return ordered(net, stages, choose)


def one_f_one_b(net: Net, stages: int) -> Order:
    more = (net.chunks // stages - 1) * stages  # of the first stage's: the other chunks
    return ordered(net, stages, by_rule(net, stages, lambda s: stages - s + more))


def at_random(net: Net, stages: int, rng: random.Random) -> Order:
    return ordered(net, stages, lambda _s, ready, _ran: rng.choice(ready) if ready and rng.random() < 0.7 else None)


def stage(net: Net, stages: int, s: int, order: Order, dp: int = 1) -> str:
    """The program of a stage. A send is waited for `net.hold` runs later, once that run has begun to receive."""
    layers, names = Layers(net, list(range(s, net.chunks, stages))), Names(1000)
    begin, update = Ops(names), Ops(names)
    layers.begin(begin)
    layers.update(update, dp, stages)
    phases: dict[tuple[str, int, int, int, bool], str] = {}
    texts, runs = "", ""
    held = [0] * net.hold  # sends under way, by the runs since they began, the oldest first
    for i, run in enumerate(order[s]):
        last = i + 1 == len(order[s])
        key = (run.kind, run.chunk, sum(held), held[0], last)
        if key not in phases:
            phases[key] = f"{run.kind}.{run.chunk}.{sum(held)}.{held[0]}" + (".last" if last else "")
            texts += one_run(net, stages, layers, names, run, phases[key], sum(held), held[0], last)
        runs += f"run {phases[key]} {run.micro_batch}\n"
        saved = net.carries and run.kind == "forward"
        held = [*held[1:], 0 if saved else len(messages(net, stages, run)[1])]
    return (
        heading(net, f"mesh pp {stages}\nmesh dp {dp}\n", runs) + layers.declarations(dp)
        + phase("begin", "once takes () gives ()", begin) + texts + phase("update", "once takes () gives ()", update)
    )  # fmt: skip


def one_run(net: Net, stages: int, layers: Layers, names: Names, run: Run, name: str, tokens: int, due: int, last: bool) -> str:
    """A phase that takes `tokens` of sends and waits for the first `due` of them."""
    c, ops = run.chunk, Ops(names)
    loads: dict[str, str] = {}
    saves: dict[str, str] = {}

    def load(what: str) -> str:
        return loads.setdefault(what, names.fresh())

    part = "fwd" if run.kind == "forward" else "bwd"
    come, go = messages(net, stages, run)
    taken = [names.fresh() for _ in range(tokens)]
    received = {b: ops(ACTIVATION, f"recv.start() {{{part} axis=pp peer={b % stages}}}") for b in come}
    if net.carries and run.kind == "backward":
        sent = [b for b in net.behind(c) if b % stages != c % stages]
        arrived = [names.fresh() for _ in sent]
        for token in arrived:
            ops.do(f"send.wait({token}) {{{part}}}")
    for token in taken[:due]:
        ops.do(f"send.wait({token}) {{{part}}}")
    for value in received.values():
        ops.do(f"recv.wait({value}) {{{part}}}")
    out = ""
    kept = [f"h{c}.{k}" for k in range(net.layers + 1)]
    if run.kind == "forward":
        values = [received[b] if b in received else load(f"to{c}.{b}") for b in net.before(c)]
        values = layers.forward(ops, c, added(ops, values, part) if values else "%2")
        out = values[-1]
        saves.update((n, v) for n, v in zip(kept, values, strict=True) if v != "%2")
        if not net.behind(c):
            layers.loss(ops, out)
        here = {b: f"to{b}.{c}" for b in net.behind(c) if b not in go}
    else:
        values = [load(n) if c or k else "%2" for k, n in enumerate(kept)]
        here = {b: f"back{b}.{c}" for b in net.before(c) if b not in go}
    if run.kind == "backward":
        behind = [received[b] if b in received else load(f"back{c}.{b}") for b in net.behind(c)]
        dy = added(ops, behind, part) if behind else ops(ACTIVATION, f"aten.ones_like({values[-1]}) {{bwd}}")
        out, inner = layers.backward(ops, c, values, dy, c > 0, not net.split)
        if net.split:
            saves.update((n, v) for n, v in zip(kept[:-1], values, strict=False) if v != "%2")
            saves.update((f"d{c}.{k}", d) for k, d in enumerate(inner))
    if run.kind == "weights":
        del loads[kept[-1]]
        here = {}
        for k in reversed(range(net.layers)):
            layers.add_gradient(ops, (c, k), values[k], load(f"d{c}.{k}"))
    for what in here.values():
        saves[what] = ops(ACTIVATION, f"copy({out}) {{{part}}}")
    sends = [ops("b8[0]", f"send.start({out}) {{{part} axis=pp peer={b % stages}}}") for b in go]
    if net.carries and run.kind == "forward":
        saves.update((f"sent{c}.{b}", token) for b, token in zip(go, sends, strict=True))
        sends = []
    open_ = [*taken[due:], *sends]
    for token in open_ if last else []:
        ops.do(f"send.wait({token}) {{{part}}}")
    lists = f"takes ({', '.join(f'{t}: b8[0]' for t in taken)}) gives ({', '.join([] if last else open_)})"
    if saves:
        lists += f" saves ({', '.join(f'{v} as {n}' for n, v in saves.items())})"
    loaded = [f"{v}: {ACTIVATION} of {n}" for n, v in loads.items()]
    if net.carries and run.kind == "backward":
        loaded += [f"{v}: b8[0] of sent{c}.{b}" for b, v in zip(sent, arrived, strict=True)]
    if loaded:
        lists += f" loads ({', '.join(loaded)})"
    return phase(name, lists, ops)


def texts(net: Net, stages: int, order: Order, dp: int = 1) -> list[str]:
    return [stage(net, stages, s, order, dp) for s in range(stages)]
