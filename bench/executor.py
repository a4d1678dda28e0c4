"""What the executor costs: microseconds an op on tiny tensors, against eager, and the Python calls made inside a step.

python bench/executor.py
python bench/executor.py --ops 4000 --rounds 60 --json out.json
python bench/executor.py --soft                  # host time of a step on an accelerator

With --soft nothing is computed: the software accelerator (tests/accelerator) forgets what it is given, and its own time, by its own clock,
is taken off. What is left is what the host needs to issue a step: the executor, and torch's dispatcher.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

if "--soft" in sys.argv:  # torch looks for its devices when it is imported
    os.environ["SOFT_MODE"] = "nothing"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "accelerator" / "python"))

import torch
from cases import causal_loss, llama, token_batch
from common import paired, quartiles, report, write_json

import interlace
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


SMALL = {"hidden": 64, "layers": 8, "heads": 4, "inter": 176, "vocab": 256, "tokens": 32}


def soft_steps(rounds: int) -> dict[str, list[float]]:
    """Microseconds that steps on the software accelerator take beyond its own time, round by round."""
    import soft_device

    figures: dict[str, list[float]] = {}
    ways: dict[str, dict[str, Any]] = {
        "in the arena": {"device_graphs": False}, "without it": {"arena": False}, "as device graphs": {"device_graphs": True},
    }  # fmt: skip
    for name, settings in ways.items():
        model = llama(SMALL).to("soft")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = {key: value.to("soft") for key, value in token_batch(SMALL).items()}
        with interlace.compile(model, optimizer, causal_loss, batch, interlace.Config(profile="off", **settings)) as trainer:
            run: Any = trainer._run
            rows = run.hyper.values()
            for number in range(-8, rounds):
                inputs, ops = run.inputs(batch), run.executor.stats()["ops"]
                begin, own = time.perf_counter(), soft_device._C.own_seconds()
                run.executor.step(inputs, rows, number + 8)
                spent = time.perf_counter() - begin - (soft_device._C.own_seconds() - own)
                ops = run.executor.stats()["ops"] - ops
                if number >= 0:
                    figures.setdefault(f"{name}, {ops} ops issued", []).append(spent * 1e6)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--soft", action="store_true", help="host time on the software accelerator")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.soft:
        figures = soft_steps(args.rounds)
        for name, values in figures.items():
            ops = int(name.split()[-3])
            low, middle, high = quartiles(values)
            print(
                f"a Llama's step {name}: {middle:.0f} us [{low:.0f}, {high:.0f}] beyond the accelerator's own time, "
                f"{middle / ops:.2f} us [{low / ops:.2f}, {high / ops:.2f}] an op issued"
            )
        if args.json:
            write_json(args.json, figures)
        return
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
