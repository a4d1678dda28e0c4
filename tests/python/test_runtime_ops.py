"""How ops of the text reach torch: argument kinds, results, placed results, random streams, opaque modules."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runtime_support import _runtime

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def program(ops: str, declarations: str = "") -> str:
    body = "".join(f"  {line.strip()}\n" for line in ops.strip().splitlines())
    head = f'interlace 1 captured\nmodule 0 "m" "M"\n{declarations}input %0: f32[4,6] "x"\n'
    return f"{head}phase micro_batch takes () gives () {{\n{body}}}\n"


def run(ops: str, declarations: str = "", x: torch.Tensor = X, **options: object) -> torch.Tensor:
    ex = _runtime.Executor(program(ops, declarations), "cpu", [], 10.0, options)
    first = ex.step([[x]], [], 0)["outputs"]["y"][0]
    assert torch.equal(first, ex.step([[x]], [], 0)["outputs"]["y"][0])
    return first


OUT = '\noutput(%9) {fwd name="y"}'


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("%9: f32[4,6] = aten.add.Tensor(%0, 2) {fwd}", lambda x: x + 2),
        ("%9: f32[4,6] = aten.add.Tensor(%0, %0, alpha=2.5) {fwd}", lambda x: torch.add(x, x, alpha=2.5)),
        ("%9: f32[4,6] = aten.mul.Tensor(%0, true) {fwd}", lambda x: x * True),
        ("%9: f64[4,6] = aten._to_copy(%0, dtype=f64) {fwd}", lambda x: x.double()),
        ("%9: f32[6,4] = aten.clone(%8, memory_format=contiguous) {fwd}", lambda x: x.t().contiguous()),
        ("%9: f32[6,4]{1,6} = aten.clone(%8, memory_format=preserve) {fwd}", lambda x: x.t().clone()),
        ("%9: f32[8,6] = aten.cat([%0, %0]) {fwd}", lambda x: torch.cat([x, x])),
        ("%9: f32[4,12] = aten.cat([%0, %0], 1) {fwd}", lambda x: torch.cat([x, x], 1)),
        ("%9: f32[6] = aten.sum.dim_IntList(%0, 0) {fwd}", lambda x: x.sum(0)),
        ("%9: f64[6] = aten.sum.dim_IntList(%0, [0], dtype=f64) {fwd}", lambda x: x.sum(0, dtype=torch.float64)),
        ("%9: f32[3,2] = aten.full([3,2], 0.5, dtype=f32) {fwd}", lambda x: torch.full((3, 2), 0.5)),
        ("%9: i64[5] = aten.arange(5) {fwd}", lambda x: torch.arange(5)),
        ('%9: f32[4,6] = aten.gelu(%0, approximate="tanh") {fwd}',
         lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("%9: f32[4,6] = aten.clamp(%0, none, 0.25) {fwd}", lambda x: x.clamp(max=0.25)),
        ("%9: f32[4,6] = aten.where.ScalarOther(%7, %0, -inf) {fwd}", lambda x: torch.where(x > 0, x, -torch.inf)),
        ("%9: f32[4,2,6] = aten.index.Tensor(%0, [none, %6])", None),
    ],
)  # fmt: skip
def test_arguments_take_the_type_of_the_schema(op: str, expected: Callable | None) -> None:
    if expected is None:
        ops = "%6: i64[2] = aten.arange(2) {fwd}\n%9: f32[4,2] = aten.index.Tensor(%0, [none, %6]) {fwd}"
        assert torch.equal(run(ops + OUT), X[:, torch.arange(2)])
        return
    before = ""
    if "%8" in op:
        before = "%8: f32[6,4]{1,6} in %0+0 = view(%0) {fwd}\n"
    if "%7" in op:
        before = "%7: b8[4,6] = aten.gt.Scalar(%0, 0) {fwd}\n"
    assert torch.equal(run(before + op + OUT), expected(X))


def test_numbers_do_not_promote() -> None:
    ops = """%8: f16[4,6] = aten._to_copy(%0, dtype=f16) {fwd}
             %9: f16[4,6] = aten.mul.Tensor(%8, 3.5) {fwd}"""
    assert torch.equal(run(ops + OUT), X.half() * 3.5)


def test_list_results_and_results_nobody_wants() -> None:
    ops = """%1: f32[4,2]{6,1} in %0+0, _, %3: f32[4,3]{6,1} in %0+3 = aten.split_with_sizes(%0, [2,1,3], 1) {fwd}
             %4: f32[4,1], _ = aten.max.dim(%3, 1, true) {fwd}
             %9: f32[4,2] = aten.mul.Tensor(%1, %4) {fwd}"""
    assert torch.equal(run(ops + OUT), X[:, :2] * X[:, 3:].max(1, keepdim=True).values)


def test_views_have_the_geometry_of_the_text() -> None:
    ops = """%1: f32[2,3]{6,2} in %0+7 = view(%0) {fwd}
             %2: f32[3,2,4]{2,6,0} in %0+7 = view(%1) {fwd}
             %9: f32[3,2,4] = aten.mul.Tensor(%2, 1.0) {fwd}"""
    assert torch.equal(run(ops + OUT), X.as_strided((3, 2, 4), (2, 6, 0), 7))
    with pytest.raises(_runtime.Error, match=r"fit|beyond|storage"):
        run("%9: f32[4,6] in %0+1 = view(%0) {fwd}" + OUT)


def test_a_layout_other_than_declared_is_put_right() -> None:
    # The kernel keeps the strides of a transposed operand; the text (and the views made from it) say row-major.
    ops = """%1: f32[6,4]{1,6} in %0+0 = view(%0) {fwd}
             %2: f32[6,4] = aten.neg(%1) {fwd}
             %3: f32[24] in %2+0 = view(%2) {fwd}
             %9: f32[24] = aten.mul.Tensor(%3, 1.0) {fwd}"""
    assert torch.equal(run(ops + OUT), -X.t().reshape(24))


def test_constants_of_every_kind() -> None:
    declarations = """const %1: f32[2,3] "a" = [1, 2.5, -3.0, 0.0, 5.0, inf]
const %2: i64[2] "b" = [9007199254740993, -4]
const %3: b8[3] "c" = [true, false, true]
const %5: f32[] "e" = [0.5]
"""
    ex = _runtime.Executor(program("%9: f32[4,6] = aten.mul.Tensor(%0, %5) {fwd}" + OUT, declarations), "cpu")
    assert torch.equal(ex.tensor(1), torch.tensor([[1, 2.5, -3.0], [0.0, 5.0, torch.inf]]))
    assert torch.equal(ex.tensor(2), torch.tensor([9007199254740993, -4]))
    assert torch.equal(ex.tensor(3), torch.tensor([True, False, True]))
    assert torch.equal(ex.step([[X]], [], 0)["outputs"]["y"][0], X * 0.5)
    with pytest.raises(_runtime.Error, match="lists 1 numbers"):
        _runtime.Executor(program("%9: f32[4,6] = aten.neg(%0) {fwd}" + OUT, 'const %1: f32[2,3] "a" = [1.0]\n'), "cpu")


def test_mutated_buffers_and_assign() -> None:
    declarations = 'buffer %1: f32[6] "mean" persistent\nbuffer %2: i64[] "count" persistent\n'
    ops = """%3: f32[6] = aten.mean.dim(%0, [0]) {fwd}
             assign(%1, %3) {fwd}
             %4: i64[] in %2+0 = aten.add_.Tensor(%2, 1) {fwd writes=[%2]}
             %9: f32[4,6] = aten.sub.Tensor(%0, %1) {fwd}"""
    ex = _runtime.Executor(program(ops + OUT, declarations), "cpu")
    for step in range(3):
        assert torch.equal(ex.step([[X]], [], step)["outputs"]["y"][0], X - X.mean(0))
    assert ex.tensor(2).item() == 3
    ex.debug_step([[X + 1]], 3)
    assert ex.tensor(2).item() == 3
    assert torch.equal(ex.tensor(1), X.mean(0))


def test_outputs_stay_what_they_were() -> None:
    declarations = 'buffer %1: f32[4,6] "b" persistent\n'
    ops = """assign(%1, %0) {fwd}
             %2: f32[2] in %1+0 = view(%1) {fwd}
             output(%2) {fwd name="y"}"""
    ex = _runtime.Executor(program(ops, declarations), "cpu")
    y = ex.step([[X]], [], 0)["outputs"]["y"][0]
    ex.step([[X + 1]], [], 1)
    assert torch.equal(y, X.flatten()[:2])
    assert y.untyped_storage().nbytes() <= 64


PLACED = """interlace 1 sharded
mesh dp 1
step 1 reduce_each
group 0 sgd
unit u0 dp f32 numel 64 shard 64
state %1: f32[64] u0.shard persistent
param %2: f32[4,6] in %1+0 "w" trainable group 0 unit u0+0
input %0: f32[4,6] "x"
phase micro_batch takes () gives () {{
{ops}
  %5: f32[64] = grad.begin() {{bwd units=[u0]{zero}}}
  {op} {{bwd}}
  output(%5) {{bwd name="y"}}
}}
"""
SILU = torch.ops.aten.silu_backward


@pytest.mark.parametrize(
    ("before", "op", "expected", "copied"),
    [
        ("", "%6: f32[4,6] into %5+0 = aten.mul.Tensor(%0, 3.0)", lambda x: x * 3, 0),
        ("", "%6: f32[4,6] into %5+0 = aten.silu_backward(%0, %0)", lambda x: SILU(x, x), 0),
        ("", "%6: f32[4,6] into %5+0 = aten.clone(%0)", lambda x: x, 0),
        ("", "%6: f32[4,6] into %5+0 = copy(%0)", lambda x: x, 0),
        ("%4: f32[6,4]{1,6} in %0+0 = view(%0) {bwd}\n%8: f32[6,6] = aten.mm(%4, %0) {bwd}",
         "%6: f32[4,6] into %5+0 = aten.mm(%0, %8)", lambda x: x @ (x.t() @ x), 0),
        # No kernel of torch writes this one in place: computed, copied and counted.
        ("", "%6: f32[4,6] into %5+0 = aten.flip(%0, [0])", lambda x: x.flip(0), 96),
    ],
)  # fmt: skip
def test_placed_results(before: str, op: str, expected: Callable, copied: int) -> None:
    for zero in ("", " zero=true"):
        text = PLACED.format(ops="\n".join("  " + line for line in before.splitlines()), op=op, zero=zero)
        ex = _runtime.Executor(text, "cpu")
        flat = ex.step([[X]], [[0.0] * 7], 0)["outputs"]["y"][0]
        assert torch.equal(flat[:24].view(4, 6), expected(X))
        assert torch.equal(flat[24:], torch.zeros(40))
        stats = ex.stats()
        assert stats["copied_bytes"] == copied
        assert "copy" in op or stats["placed_bytes"] + stats["copied_bytes"] == 96


RANDOM = """%1: f32[4,6] = aten.empty_like(%0) {fwd}
            %2: f32[4,6] = aten.bernoulli.p(%1, 0.5) {fwd rng=1}
            %3: f32[4,6] = aten.rand_like(%0) {fwd rng=2}
            %4: f32[4,6] = aten.randn_like(%0) {fwd rng=3}
            %5: f32[4,6] = aten.add.Tensor(%2, %3) {fwd}
            %9: f32[4,6] = aten.add.Tensor(%5, %4) {fwd}"""


def test_keyed_streams_depend_on_nothing_but_their_key() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = run(RANDOM + OUT, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    lines = [line.strip() for line in RANDOM.splitlines()]
    moved = "\n".join([lines[3], lines[2], *lines[:2], *lines[4:]])
    assert torch.equal(first, run(moved + OUT, seed=1))
    assert not torch.equal(first, run(RANDOM + OUT, seed=2))
    assert not torch.equal(first, run(RANDOM.replace("rng=3", "rng=4") + OUT, seed=1))


def test_streams_are_random() -> None:
    ex = _runtime.Executor(program("%9: f32[4,6] = aten.rand_like(%0) {fwd rng=1}" + OUT), "cpu")
    draws = torch.stack([ex.step([[X]], [], step)["outputs"]["y"][0] for step in range(500)]).double()
    assert draws.unique().numel() > 11900
    assert abs(draws.mean() - 0.5) < 0.01
    flat = draws.flatten(1)
    correlation = torch.corrcoef(flat.t())
    assert (correlation - torch.eye(24)).abs().max() < 0.25
    assert (flat[1:] * flat[:-1]).mean() == pytest.approx(0.25, abs=0.01)


def test_micro_batches_draw_differently() -> None:
    head = 'interlace 1 sharded\nmesh dp 1\nstep 2 reduce_each\nrun micro_batch.first 0\nrun micro_batch.last 1\ninput %0: f32[4,6] "x"\n'
    phase = """phase micro_batch.{name} takes () gives () {{
  %{value}: f32[4,6] = aten.rand_like(%0) {{fwd rng=1}}
  output(%{value}) {{fwd name="y"}}
}}
"""
    text = head + phase.format(name="first", value=8) + phase.format(name="last", value=9)
    a, b = _runtime.Executor(text, "cpu").step([[X], [X]], [], 0)["outputs"]["y"]
    assert not torch.equal(a, b)


@pytest.mark.host("the CPU's generator; that of a device: tests/regress")
def test_compat_mode_is_torchs_generator_in_program_order() -> None:
    ex = _runtime.Executor(program(RANDOM + OUT), "cpu", [], 10.0, {"rng": "compat"})
    torch.manual_seed(3)
    y = ex.step([[X]], [], 0)["outputs"]["y"][0]
    torch.manual_seed(3)
    expected = torch.bernoulli(torch.empty_like(X), 0.5) + torch.rand_like(X) + torch.randn_like(X)
    assert torch.equal(y, expected)


OPAQUE = """%1: f32[4,6] = call.python(%0) {fwd module="m" part="forward"}
            %9: f32[4,6] = aten.mul.Tensor(%1, 2.0) {fwd}"""


def test_opaque_modules_run_as_in_python() -> None:
    calls: list[tuple[str, str]] = []

    def call(module: str, part: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append((module, part))
        x = tensors[0].detach().requires_grad_()
        (y := (x * x).sum()).backward()
        assert y.requires_grad  # autograd works inside
        return [x.grad]

    assert torch.equal(run(OPAQUE + OUT, opaque=call), X * 2 * 2)
    assert calls == [("m", "forward")] * 2


def test_opaque_modules_that_fail_or_give_something_else() -> None:
    with pytest.raises(_runtime.Error, match="needs the option `opaque`"):
        run(OPAQUE + OUT)
    wrong_shape = r"call.python failed: result 0 of the module m is f32\[2\], captured as f32\[4,6\]"
    with pytest.raises(_runtime.Error, match=wrong_shape):
        run(OPAQUE + OUT, opaque=lambda *_: [torch.zeros(2)])

    def broken(*_: object) -> list[torch.Tensor]:
        raise ValueError("my own mistake")

    with pytest.raises(_runtime.Error, match="ValueError: my own mistake"):
        run(OPAQUE + OUT, opaque=broken)


def test_other_threads_run_python_during_a_step() -> None:
    lines = ["%1: f32[4,6] = aten.neg(%0) {fwd}"]
    lines += [f"%{i + 1}: f32[4,6] = aten.neg(%{i}) {{fwd}}" for i in range(1, 60000)]
    ex = _runtime.Executor(program("\n".join(lines) + '\noutput(%60000) {fwd name="y"}'), "cpu")
    seen: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    for _ in range(5):
        ex.step([[X]], [], 0)
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(begin < t < end for t in seen) >= 5


@pytest.mark.host("memory is traced on CPUs alone")
def test_memory_trace_is_exact() -> None:
    big = torch.zeros(1024, 1024)
    declaration = program("").replace("f32[4,6]", "f32[1024,1024]")
    ops = """  %1: f32[1024,1024] = aten.neg(%0) {fwd}
  %2: f32[1024,1024] = aten.add.Tensor(%1, %1) {fwd}
  %3: f32[1024,1024] = aten.add.Tensor(%1, %2) {fwd}
  %4: f32[] = aten.sum(%3) {fwd}
  output(%4) {fwd name="y"}
}
"""
    ex = _runtime.Executor(declaration.replace("}\n", ops), "cpu", [])
    ex.set_trace("on")
    for step in range(2):  # the first checks the types of results and holds them twice for that
        ex.step([[big]], [], step)
    mebibytes = [round(peak / 2**20, 1) for *_, peak in ex.record()["samples"]]
    assert mebibytes == [4.0, 8.0, 12.0, 4.0, 0.0]  # each with its operands and results
    stats = ex.stats()
    assert round(stats["peak_bytes"] / 2**20, 1) == 12.0
    assert stats["peak_op"].startswith("%3: f32[1024,1024] = aten.add.Tensor(%1, %2)")
    assert stats["live_bytes"] < 4096


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("aten._reshape_alias(%0, [1000000], [1000000])", "out of bounds for storage"),
        ("aten.as_strided(%0, [1000000], [1000000])", "out of bounds for storage"),
        ("inductor._reinterpret_tensor(%0, [1000000], [1000000], 0)", "where storages lie and end"),
        ("aten.resize(%0, [1000000])", "where storages lie and end"),
        ("aten.add_.Tensor(%0, %0)", "changes its arguments, and the op does not say which"),
        ("aten._sparse_sum(%0)", "not on the list of operators that programs from files may use"),
        ("quantized.add(%0, %0, 1.0, 0)", "not on the list of operators that programs from files may use"),
        ('aten.from_file("/etc/passwd")', "may not read files"),
    ],
)
def test_a_program_from_a_file_stays_within_its_storages(op: str, said: str) -> None:
    line = f"%9: f32[1000000] = {op} {{fwd}}"
    with pytest.raises(_runtime.Error, match=said):
        ex = _runtime.Executor(program(line + OUT.replace("%9", "%9")), "cpu")
        ex.step([[X]], [], 0)
