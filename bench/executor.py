"""What the executor costs: microseconds an op on tiny tensors, against eager, and the Python calls made inside a step.

python bench/executor.py
python bench/executor.py --ops 4000 --rounds 60 --json out.json
"""

from __future__ import annotations

import argparse
import sys

import torch
from common import paired, report

from interlace import _runtime


def chain(ops: int) -> str:
    """A captured-level program: `ops` additions, each of four elements, in a row."""
    lines = ["interlace 1 captured", 'input %0: f32[4] "x"', "phase micro_batch takes () gives () {"]
    lines += [f"  %{i + 1}: f32[4] = aten.add.Tensor(%{i}, %0) {{fwd}}" for i in range(ops)]
    lines += [f'  output(%{ops}) {{fwd name="y"}}', "}"]
    return "\n".join(lines) + "\n"


def python_calls(function) -> int:
    """Python and C calls that the interpreter sees while `function` runs, without the call of `function` itself."""
    count = 0

    def hook(frame, event, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 2  # function itself, and setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.full((4,), 1e-3)
    executor = _runtime.Executor(chain(args.ops), "cpu", [], 60.0, {})

    def ours() -> None:
        executor.step([[x]], [], 0)

    def eager() -> None:
        with torch.no_grad():
            y = x
            for _ in range(args.ops):
                y = torch.ops.aten.add.Tensor(y, x)

    times = paired({"eager": eager, "interlace": ours}, rounds=args.rounds)
    per_op = {name: [t / args.ops for t in values] for name, values in times.items()}
    report(
        f"{args.ops} additions of 4 elements, time of one (kernel included)",
        per_op,
        baseline="eager",
        json_path=args.json,
    )
    print(f"calls seen by the interpreter in a step of {args.ops} ops: {python_calls(ours)}")


if __name__ == "__main__":
    main()
