"""Calls that ended a process, or could read and write beyond their storages, when a program from a file made them: refused, each by name.

Found by tests/python/random_programs.py, or by reading the kernels that it calls.
"""

from __future__ import annotations

import pytest
import torch

_runtime = pytest.importorskip("interlace._runtime")

HEAD = """interlace 1 captured
module 0 "m" "M"
input %0: f32[2,3,4,4] "x"
input %1: f32[2,3,2,2] "pooled"
input %2: i64[2,3,2,2] "places"
input %3: f32[3] "channels"
input %4: f32[1] "one"
input %5: i64[2] "rows"
input %6: f32[2,5] "table"
input %7: f32[] "scalar"
input %8: f32[6] "line"
phase micro_batch takes () gives () {
"""
INPUTS = [
    torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 2, 2), torch.full((2, 3, 2, 2), 1 << 40), torch.zeros(3), torch.zeros(1),
    torch.tensor([-(1 << 63), 1 << 40]), torch.zeros(2, 5), torch.zeros(()), torch.zeros(6),
]  # fmt: skip


def run(line: str, **options: object) -> None:
    text = f'{HEAD}  {line} {{fwd}}\n  output(%20) {{fwd name="y"}}\n}}\n'
    executor = _runtime.Executor(text, "cpu", [], 10.0, {"arena": False, **options})
    executor.step([INPUTS], [], 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # Indices that no kernel looks at.
        ("%20: f32[2,3,4,4] = aten.max_pool2d_with_indices_backward(%1, %0, [2,2], [2,2], [0,0], [1,1], false, %2)", r"not in 0\.\.15"),
        ("%20: f32[2,3,4,4] = aten.adaptive_max_pool2d_backward(%1, %0, %2)", r"not in 0\.\.15"),
        ("%20: f32[7,5] = aten.embedding_dense_backward(%6, %5, 7, -1, false)", r"not in 0\.\.6"),
        ("%20: f32[2,5] = aten.nll_loss_backward(%7, %6, %5, none, 1, -100, %7)", r"not in 0\.\.4"),
        # Statistics of another size than the input's.
        ("%20: f32[2,5], _, _ = aten.native_layer_norm_backward(%6, %6, [5], %4, %4, none, none, [true,false,false])", "for each row"),
        ("%20: f32[2,3,4,4], _, _ = aten.native_group_norm_backward(%0, %0, %4, %4, none, 2, 3, 16, 3, [true,false,false])", "each group"),
        ("%20: f32[2,3,4,4], _, _ = aten.native_batch_norm_backward(%0, %0, none, none, none, %4, %4, true, 1e-05, [true,false,false])",
         "each channel"),
        ("%20: f32[6], _, _ = aten._native_batch_norm_legit.no_stats(%8, none, none, true, 0.1, 1e-05)", "no channels"),
        ("%20: f32[2,3,4,4], _, _ = aten.native_group_norm(%0, none, none, 200, 3, 16, 3, 1e-05)", "not those of the input"),
        ("%20: f32[6], _, _ = aten._native_batch_norm_legit.no_stats(%0, none, none, false, 0.1, 1e-05)", "needs running statistics"),
        # Gradients of another size.
        ("%20: f32[2,5] = aten._log_softmax_backward_data(%4, %6, 1, f32)", "sizes of the output"),
        ("%20: f32[2,3,4,4], _, _ = aten.convolution_backward(%1, %0, %0, none, [1,1], [9,9], [1,1], false, [0,0], 1, [true,false,false])",
         "do not fit"),
        ("%20: f32[4,2,2], _ = aten._scaled_dot_product_flash_attention_for_cpu(%0, %1, %1, 0.0, false)", "do not fit the queries"),
        ("%20: f32[9] = aten.unfold_backward(%3, [9], 0, 2, 1)", "not of the windows"),
        # Numbers that kernels compute addresses from.
        ("%20: c64[6] = aten._fft_r2c(%8, [7], 0, false)", "not those of the operand"),
        ("%20: f32[2,3,8,8] = aten.upsample_nearest2d(%0, [8,8], 1e-300, 1e-300)", "scale is out of range"),
        ("%20: i64[2] = aten.floor_divide.Scalar(%5, -1)", "divided by a negative number"),
        ("%20: f32[6] = aten._to_copy(%8, layout=1)", "does not fit its type"),
        ("%20: f32[6] = aten._to_copy(%8, dtype=99)", "does not fit its type"),
        ("%20: f32[6] = aten.roll(%8, [4611686018427387904], [0])", "4611686018427387904"),
        ("%20: f32[6] = aten.add.Tensor(none, %8)", "needs a value"),
        ("%20: f32[6] = aten.sin.out(%8, out=%3)", "changes its arguments"),
        ("%20: f32[6] = aten.bucketize.Tensor(%8, %3)", "not on the list.*--trust-program"),
    ],
)  # fmt: skip
def test_a_program_from_a_file_is_refused(line: str, said: str) -> None:
    with pytest.raises(_runtime.Error, match=f"(?s){said}"):
        run(line)


def test_programs_captured_here_use_any_operator() -> None:
    run("%20: i64[6] = aten.bucketize.Tensor(%8, %3)", captured_here=True)
    run("%20: f32[6] = aten.sin(%8)")
