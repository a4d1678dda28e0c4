"""Programs for the tests of simulate, report and the trace formats, and a command line called in this process."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = ROOT / "tests" / "golden" / "sim" / "step.il"  # two ranks, two products, sgd
PROFILE = ROOT / "tests" / "golden" / "sim" / "step.profile"  # of "some machine"

CAPTURED = """interlace 1 captured
meta model "tiny"
{symbol}module 0 "" "Net"
module 1 "layers.0" "Linear"
module 2 "layers.1" "Linear"
source 0 "net.py:7"
group 0 adamw
param %0: f32[64,64] "layers.0.weight" trainable group 0
param %1: f32[64,64] "layers.1.weight" trainable group 0
input %2: f32[{rows},64] "x"
phase micro_batch takes () gives () {{
  %3: f32[{rows},64] = aten.mm(%2, %0) {{fwd m1 s0}}
  %4: f32[{rows},64] = aten.mm(%3, %1) {{fwd m2 s0}}
  %5: f32[] = aten.sum(%4) {{fwd m0}}
  %6: f32[{rows},64] = aten.ones_like(%4) {{bwd m0}}
  %7: f32[64,{rows}]{{1,64}} in %3+0 = view(%3) {{bwd m2}}
  %8: f32[64,64] = aten.mm(%7, %6) {{bwd m2 s0}}
  grad(%1, %8) {{bwd m2}}
  %9: f32[64,64]{{1,64}} in %1+0 = view(%1) {{bwd m2}}
  %10: f32[{rows},64] = aten.mm(%6, %9) {{bwd m2 s0}}
  %11: f32[64,{rows}]{{1,64}} in %2+0 = view(%2) {{bwd m1}}
  %12: f32[64,64] = aten.mm(%11, %10) {{bwd m1 s0}}
  grad(%0, %12) {{bwd m1}}
  output(%5) {{fwd name="loss"}}
}}
"""


def captured(rows: int | None = 32) -> str:
    """Two linear layers on `rows` rows, or on b of them."""
    if rows is None:
        return CAPTURED.format(symbol="symbol b 2 4096\n", rows="b")
    return CAPTURED.format(symbol="", rows=rows)


def cut() -> str:
    """On two data ranks of two that cut both products."""
    from interlace import _core

    plan = 'meta tensor "layers.0.weight 1; layers.1.weight 0"\n'
    program = _core.Program.parse(captured().replace('meta model "tiny"\n', 'meta model "tiny"\n' + plan))
    program.run_passes("canonicalize,mesh(axes=dp:2+tp:2),tensor(plan=model),canonicalize,shard(axis=dp,ranks=2),update(clip=1.0)")
    return program.print()


def sharded(ranks: int = 2, accumulation: int = 1, rows: int = 32) -> str:
    from interlace import _core

    program = _core.Program.parse(captured(rows))
    accumulate = f",accumulate(steps={accumulation},mode=reduce_each)" if accumulation > 1 else ""
    program.run_passes(f"canonicalize,shard(axis=dp,ranks={ranks}){accumulate},update(clip=1.0)")
    return program.print()
