"""The executor on small programs written by hand, compared with the same calls in PyTorch, bit by bit."""

from __future__ import annotations

import on_device
import pytest
import torch

_runtime = on_device.executors(pytest.importorskip("interlace._runtime"))

# y = x w^T + b; loss = mean(y * y); gradients and SGD in the program. One unit of two parameters, 32 elements for each.
LINEAR = """interlace 1 sharded
mesh dp 1
step 1 reduce_each
group 0 sgd
module 0 "" "Net"
module 1 "fc" "Linear"
source 0 "net.py:7"
unit u0 dp f32 numel 64 shard 64
state %0: f32[64] u0.shard persistent
param %1: f32[3,5] in %0+0 "fc.weight" trainable group 0 unit u0+0
param %2: f32[3] in %0+32 "fc.bias" trainable group 0 unit u0+32
input %3: f32[4,5] "x"
phase micro_batch takes () gives (%12) {
  %4: f32[5,3]{1,5} in %0+0 = view(%0) {fwd m1 s0}
  %5: f32[4,3] = aten.addmm(%2, %3, %4) {fwd m1 s0}
  %6: f32[4,3] = aten.mul.Tensor(%5, %5) {fwd m0}
  %7: f32[] = aten.mean(%6) {fwd m0}
  output(%7) {fwd name="loss"}
  %8: f32[4,3] = aten.mul.Tensor(%5, 0.16666666666666666) {bwd m0}
  %9: f32[64] = grad.begin() {bwd units=[u0]}
  %10: f32[3] into %9+32 = aten.sum.dim_IntList(%8, [0]) {bwd m1 s0}
  %11: f32[3,4]{1,3} in %8+0 = view(%8) {bwd m1}
  %13: f32[3,5] into %9+0 = aten.mm(%11, %3) {bwd m1 s0}
  %12: f32[64] = reduce.start(%9) {bwd units=[u0]}
  reduce.wait(%12) {bwd}
  release(%9) {bwd}
}
phase update once takes (%14: f32[64]) gives () {
  %15: i64[68] = norm.partial(%14) {upd units=[u0]}
  %16: f64[3] = norm.coef(%15) {upd max_norm=none scale=1.0}
  update.sgd(%0, %14, %16) {upd units=[u0] scale=1.0 ranges=[0,15,0,32,35,0]}
}
"""
SGD = [[0.1, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]


def executor(text: str, **options: object) -> object:
    return _runtime.Executor(text, "cpu", [], 10.0, options)


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*s, generator=g) for s in ((3, 5), (3,), (4, 5)))  # type: ignore[return-value]


def linear(**options: object) -> tuple[object, torch.Tensor, torch.Tensor, torch.Tensor]:
    ex = executor(LINEAR, **options)
    w, b, x = data()
    ex.tensor(1).copy_(w)
    ex.tensor(2).copy_(b)
    return ex, w, b, x


def test_step_equals_pytorch_bit_by_bit() -> None:
    ex, w, b, x = linear()
    result = ex.step([[x]], SGD, 0)
    y = torch.addmm(b, x, w.t())
    dy = y * 0.16666666666666666
    assert torch.equal(result["outputs"]["loss"][0], (y * y).mean())
    dw, db = dy.t() @ x, dy.sum(0)
    assert torch.equal(ex.tensor(1), w - dw * 0.1)
    assert torch.equal(ex.tensor(2), b - db * 0.1)
    norm = torch.cat([dw.flatten(), db]).double().norm().item()
    assert result["norm"] == pytest.approx(norm, rel=1e-12)
    assert result["finite"] is True


def test_padding_stays_zero_and_gradients_need_no_copy() -> None:
    ex, _, _, x = linear()
    for step in range(3):
        ex.step([[x]], SGD, step)
    flat = ex.tensor(0)
    assert flat.data_ptr() % 64 == 0
    assert torch.equal(flat[15:32], torch.zeros(17))
    assert torch.equal(flat[35:], torch.zeros(29))
    stats = ex.stats()
    assert stats["copied_bytes"] == 0
    assert stats["placed_bytes"] == 3 * 4 * (15 + 3)
    assert stats["steps"] == 3


def test_tensor_is_shared_not_copied() -> None:
    ex, _, _, _ = linear()
    ex.tensor(1).fill_(2.0)
    assert torch.equal(ex.tensor(0)[:15], torch.full((15,), 2.0))
    with pytest.raises(_runtime.Error, match="%5 is no state"):
        ex.tensor(5)
    with pytest.raises(_runtime.Error, match="no value %99"):
        ex.tensor(99)


def test_same_bits_every_time() -> None:
    states = []
    for _ in range(2):
        ex, _, _, x = linear()
        for step in range(4):
            ex.step([[x]], SGD, step)
        states.append(ex.tensor(0).clone())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[torch.zeros(4, 6)]], r'input "x" of micro-batch 0: expected f32\[4,5\] on DEVICE, got f32\[4,6\] on DEVICE'),
        ([[torch.zeros(4, 5, dtype=torch.float64)]], r"expected f32\[4,5\] on DEVICE, got f64\[4,5\] on DEVICE"),
        ([[torch.zeros(4, 5, device="meta")]], r"got f32\[4,5\] on meta"),
        ([[]], r"micro-batch 0 has 0 inputs, the program takes 1: x"),
        ([], r"the program takes 1 micro-batches a step, got 0"),
    ],
)
def test_wrong_inputs_are_named(batches: list[list[torch.Tensor]], message: str) -> None:
    ex, w, _, x = linear()
    with pytest.raises(_runtime.Error, match=message.replace("DEVICE", str(ex.tensor(1).device))):
        ex.step(batches, SGD, 0)
    assert torch.equal(ex.tensor(1), w)
    ex.step([[x]], SGD, 0)


def test_wrong_hyper_parameters_are_named() -> None:
    ex, _, _, x = linear()
    with pytest.raises(_runtime.Error, match="has 1 optimizer groups, got numbers for 0"):
        ex.step([[x]], [], 0)
    with pytest.raises(_runtime.Error, match=r"group 0 \(sgd\) needs 7 numbers, got 2"):
        ex.step([[x]], [[0.1, 0.2]], 0)


def test_strided_and_offset_inputs_are_read_right() -> None:
    ex, w, b, x = linear()
    wide = torch.zeros(5, 6)
    wide[:, 1:5] = x.t()
    loss = ex.step([[wide[:, 1:5].t()]], SGD, 0)["outputs"]["loss"][0]
    y = torch.addmm(b, x, w.t())
    assert torch.equal(loss, (y * y).mean())


def test_failing_op_is_named_with_module_and_source() -> None:
    text = LINEAR.replace("input %3: f32[4,5]", "input %3: f32[4,6]")
    ex = executor(text)
    with pytest.raises(_runtime.Error) as info:
        ex.step([[torch.zeros(4, 6)]], SGD, 0)
    message = str(info.value)
    assert message.startswith("aten.addmm failed: mat1 and mat2 shapes cannot be multiplied")
    assert "%5: f32[4,3] = aten.addmm(%2, %3, %4)" in message
    assert "module: fc (Linear)" in message
    assert "source: net.py:7" in message


def test_wrong_result_type_in_the_text_is_caught() -> None:
    ex = executor(LINEAR.replace("%6: f32[4,3] = aten.mul", "%6: f64[4,3] = aten.mul"))
    with pytest.raises(_runtime.Error, match=r"%6 is f32\[4,3\]; the program says f64\[4,3\]"):
        ex.step([[torch.zeros(4, 5)]], SGD, 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("aten.addmm(", "aten.adddmm(", "torch has no operator aten::adddmm, did you mean"),
        ("aten.addmm(%2, %3, %4)", 'aten.from_file("/etc/passwd")', "programs may not read files"),
        ("aten.mul.Tensor(%5, %5)", "aten.mul.Tenso(%5, %5)", 'aten::mul has no overload "Tenso"; it has'),
        ("aten.addmm(%2, %3, %4)", "aten.addmm(%2, %3)", 'the argument "mat2" of aten::addmm is missing'),
        ("aten.mean(%6)", "aten.mean(%6, axis=1)", "a keyword argument is unknown to aten::mean"),
        ("aten.sum.dim_IntList(%8, [0])", 'aten.sum.dim_IntList(%8, "x")', "does not fit its type"),
    ],
)
def test_bad_operators_are_errors_when_loaded(old: str, new: str, message: str) -> None:
    assert old in LINEAR
    with pytest.raises(_runtime.Error, match=message):
        executor(LINEAR.replace(old, new))


def test_missing_axis_and_unknown_option() -> None:
    with pytest.raises(_runtime.Error, match="unknown option"):
        executor(LINEAR, sed=1)
    two = LINEAR.replace("mesh dp 1", "mesh dp 2").replace("shard 64", "shard 32")
    with pytest.raises(_runtime.Error):
        executor(two)


def test_symbols_must_be_bound() -> None:
    text = LINEAR.replace("group 0 sgd", "symbol b 2 64\ngroup 0 sgd").replace("f32[4,5]", "f32[b,5]")
    with pytest.raises(_runtime.Error):
        executor(text)


def test_non_finite_steps_are_flagged_and_skipped() -> None:
    ex, w, _, x = linear(skip_nonfinite=True)
    bad = x.clone()
    bad[1, 2] = float("nan")
    result = ex.step([[bad]], SGD, 0)
    assert result["finite"] is False
    assert torch.equal(ex.tensor(1), w)
    assert ex.stats()["skipped_updates"] == 1
    assert ex.step([[x]], SGD, 1)["finite"] is True
    assert not torch.equal(ex.tensor(1), w)


@pytest.mark.host("a device's counter has all of the process")
def test_nothing_of_a_step_stays_alive() -> None:
    ex, _, _, x = linear()
    kept = ex.step([[x]], SGD, 0)
    del kept
    before = ex.stats()
    assert before["live_bytes"] - before["persistent_bytes"] <= 128  # the loss
    assert before["peak_bytes"] > before["live_bytes"]
    assert before["peak_op"]
    for step in range(5):
        ex.step([[x]], SGD, step)
    assert ex.stats()["peak_bytes"] <= before["peak_bytes"] + 128


def test_inputs_and_outputs_are_not_kept() -> None:
    ex, _, _, x = linear()
    storage = x.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)
    loss = ex.step([[x]], SGD, 0)["outputs"]["loss"][0]
    assert torch._C._storage_Use_Count(storage._cdata) == count
    assert torch._C._storage_Use_Count(loss.untyped_storage()._cdata) <= 3  # the tensor, its Python storage, the call


def test_debug_step_describes_results_and_changes_nothing() -> None:
    ex, w, b, x = linear()
    report = ex.debug_step([[x]], 0)
    names = [op["name"] for op in report["ops"]]
    assert names[:3] == ["aten.addmm", "aten.mul.Tensor", "aten.mean"]
    first = report["ops"][0]
    y = torch.addmm(b, x, w.t()).double()
    assert first["module"] == "fc" and first["source"] == "net.py:7"
    assert first["results"][0]["min"] == y.min().item()
    assert first["results"][0]["mean"] == pytest.approx(y.mean().item())
    assert report["first_nonfinite"] is None
    assert torch.equal(ex.tensor(1), w)


def test_debug_names_the_op_that_made_the_first_bad_value() -> None:
    ex, w, _, x = linear(debug=True, skip_nonfinite=True)
    w = w.clone()
    w[0] = 3e38
    ex.tensor(1).copy_(w)
    result = ex.step([[x]], SGD, 0)
    assert result["finite"] is False
    assert result["nonfinite"]["name"] == "aten.addmm"
    assert result["nonfinite"]["module"] == "fc"
    assert result["nonfinite"]["source"] == "net.py:7"
    assert "aten.addmm(%2, %3, %4)" in result["nonfinite"]["text"]


def test_debug_stops_at_a_module_and_shows_its_values() -> None:
    ex, w, b, x = linear()
    report = ex.debug_step([[x]], 0, stop_at="fc")
    assert [name for name, _ in report["values"]] == ["%5"]
    assert torch.equal(report["values"][0][1], torch.addmm(b, x, w.t()))
    assert len(report["ops"]) == 1
    with pytest.raises(_runtime.Error, match='no module "fcc", did you mean'):
        ex.debug_step([[x]], 0, stop_at="fcc")
    assert ex.step([[x]], SGD, 0)["finite"] is True
