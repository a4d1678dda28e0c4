"""Our flat optimizer kernels and exact norm against torch's fused ones on a CPU, alternating in one process.

    python bench/optimizer.py
    python bench/optimizer.py --numel 20e6 --threads 1 2 --rounds 30 --json out.json
    python bench/optimizer.py --rules --numel 20e6           # captured ones, compiled and op by op: per byte that they move, over our AdamW

The sides work on one flat tensor each, which is torch's best case; the norm's peer is `torch.linalg.vector_norm`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from common import paired, report
from interlace._runtime import testing

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


def compare(dtype: torch.dtype, numel: int, args: argparse.Namespace, threads: int) -> None:
    name = next(key for key, value in DTYPES.items() if value is dtype)

    def flat() -> torch.Tensor:
        return torch.randn(numel, dtype=torch.float32).to(dtype)

    w, g, first, second = flat(), flat(), flat(), flat().abs()
    ours_w, ours_first, ours_second = w.clone(), first.clone(), second.clone()
    step = torch.tensor(10.0)
    accumulator = torch.zeros(68, dtype=torch.int64)

    def torch_adamw() -> None:
        torch._fused_adamw_(
            [w], [g], [first], [second], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def ours_adamw() -> None:
        testing.adam_step(ours_w, g, ours_first, ours_second, lr=1e-4, beta2=0.95, weight_decay=0.1, t=10.0)

    def torch_sgd() -> None:
        torch._fused_sgd_(
            [w], [g], [first], weight_decay=0.1, momentum=0.9, lr=1e-4, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False,
        )  # fmt: skip

    def ours_sgd() -> None:
        testing.sgd_step(ours_w, g, ours_first, lr=1e-4, momentum=0.9, weight_decay=0.1, t=10.0)

    cases = {
        "AdamW": (torch_adamw, ours_adamw),
        "SGD": (torch_sgd, ours_sgd),
        "norm": (lambda: torch.linalg.vector_norm(g), lambda: testing.norm_partial(g, accumulator)),
    }
    for case, (peer, ours) in cases.items():
        times = paired({"torch": peer, "interlace": ours}, rounds=args.rounds)
        title = f"{case}, {name}, {numel / 1e6:g} M elements, {threads} threads"
        report(title, times, "torch", args.json, case=case, dtype=name)


def use_loops(text: str, dtype: str) -> None:
    """Has the loops of a rule compiled and used. Error: they cannot be."""
    from interlace.private import cache_folder
    from interlace.regions import Loops

    said: list[str] = []
    loops = Loops(cache_folder(), said.append)
    loops.begin(testing.rule_loops([text], [dtype]))
    while loops.pending:
        time.sleep(0.05)
        loops.poll()
    if said:
        raise SystemExit("; ".join(said))


RULES = {
    "AdamW as a rule": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def compare_rules(dtype: torch.dtype, numel: int, args: argparse.Namespace) -> None:
    """Bytes: the weight and the states are read and written, the gradient is read. Rounds alternate with the hand-written AdamW."""
    from interlace.capture.groups import rules_of
    from interlace.capture.pilot import Pilot

    def flat() -> torch.Tensor:
        return (0.5 + torch.rand(numel, dtype=torch.float32)).to(dtype)

    base = [flat() for _ in range(4)]
    for name, make in RULES.items():
        optimizer = make([torch.nn.Parameter(torch.randn(4, 3))])
        pilot = Pilot.fresh(optimizer, [[(2, 3)]])
        for _ in range(10):
            step = pilot.step()
            pilot = step.after
        flats = [flat() for _ in range(2 + len(pilot.states()[0]))]
        text = "\n".join(rules_of(optimizer).lines)
        forms = [tuple(line.strip() for line in block.splitlines() if " = " in line) for block in text.split("form {")[1:]]
        number, numbers = forms.index(step.forms[0].lines), step.forms[0].numbers
        use_loops(text, next(key for key, value in DTYPES.items() if value is dtype))

        def adamw() -> None:
            testing.adam_step(*base, lr=1e-4, beta2=0.95, weight_decay=0.1, t=10.0)

        def rule(compiled: bool, text: str = text, number: int = number, flats: list = flats, numbers: list = numbers) -> None:
            testing.rule_step(text, number, flats, numbers, compiled=compiled)

        times = paired({"AdamW": adamw, "loop": partial(rule, True), "ops": partial(rule, False)}, rounds=args.rounds)
        moved = (2 * len(flats) - 1) / 7
        loop, ops = (statistics.median(b / a / moved for a, b in zip(times["AdamW"], times[way], strict=True)) for way in ("loop", "ops"))
        print(f"{name:18} {len(flats) - 2} states, {len(forms[number]):2} ops: {loop:.3f} x AdamW per byte, op by op {ops:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=8e6, help="elements of the flat buffer (default 8e6)")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["f32", "f64", "bf16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of threads (default 1)")
    parser.add_argument("--rules", action="store_true", help="captured optimizers against our AdamW")
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds a figure (default 20)")
    parser.add_argument("--json", help="add the records to this file")
    args = parser.parse_args()
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.dtypes:
            if args.rules:
                compare_rules(DTYPES[name], int(args.numel), args)
                continue
            compare(DTYPES[name], int(args.numel), args, threads)


if __name__ == "__main__":
    main()
