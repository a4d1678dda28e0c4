"""The default against every explicit setting: what nobody wrote must be as fast as the best that somebody could have written.

python bench/defaults.py --mbit 500 --accumulation 4            # root: network namespaces shaped with tc
python bench/defaults.py --only default,shard-reduce_last,ddp --accumulation 4 --rounds 3 --json out.json
python bench/defaults.py --rows                                 # all rows of the table in bench/README.md: hours
python bench/defaults.py --rows --predict                       # the same rows by the simulator alone: 10 minutes

As bench/peers.py: the processes of all methods stay alive and take turns, ratios are taken within a round. Every method of ours has trained
until its schedule was settled. A row is good when the default's step is within 2 % of the best explicit setting's (medians over rounds).
With --predict all settings of a row are simulated on one description of the machine (`local-N`, a core and the wire's rate for each rank),
in which there is no noise: what is compared is what the search decides.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import sys
import tempfile
from typing import Any

from cases import causal_loss, causal_model, token_batch
from common import machine, quartiles, write_json
from default_methods import DEFAULTS, explicit
from network import on_network
from peer_methods import METHODS
from peer_table import Row
from peers import MODELS, Bench

WITHIN = 1.02
ROWS = list(itertools.product((1, 4), (250.0, 500.0, 1000.0, None), ("20m", "gpt2-20m"), (2, 4)))


class Defaults(Bench):
    """A row: the default, the explicit settings, and DDP to compare with."""

    table = "defaults"

    def __init__(self, args: argparse.Namespace) -> None:
        names = ["default", *explicit(args.accumulation), "ddp"]
        if args.only:
            wanted = args.only.split(",")
            unknown = sorted(set(wanted) - set(names))
            if unknown:
                raise SystemExit(f"error: unknown methods {', '.join(unknown)} (methods: {', '.join(names)})")
            names = ["default", *(n for n in names[1:] if n in wanted)]
        super().__init__(args, [])
        self.methods = [(DEFAULTS | METHODS)[name] for name in names]
        self.rows = {m.name: Row(m.name, m.kind, m.title, m.ours) for m in self.methods}

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of each method: its median step and, within rounds, the default's step over it."""
        default = self.rows["default"].seconds
        found: dict[str, dict[str, Any]] = {}
        for name, row in self.rows.items():
            if row.problem is not None or not row.seconds:
                found[name] = {"problem": row.problem or "not measured"}
                continue
            low, middle, high = quartiles([a / b for a, b in zip(default, row.seconds, strict=False)] or [float("nan")])
            found[name] = {"ms": quartiles(row.seconds)[1] * 1e3, "ratio": middle, "ratio_q1": low, "ratio_q3": high}
        return found

    def print(self) -> bool:
        a, found = self.args, self.figures()
        network = "unshaped loopback" if a.mbit is None else f"{a.mbit:g} Mbit/s a rank"
        print(f"{a.ranks} ranks, {network}, {a.model_size}, accumulation {a.accumulation}; {a.rounds} rounds of {a.block} steps")
        for name, f in found.items():
            if "problem" in f:
                print(f"  {name:32} {f['problem']}")
            else:
                print(f"  {name:32} {f['ms']:8.0f} ms   default / it {f['ratio']:.3f} [{f['ratio_q1']:.3f}, {f['ratio_q3']:.3f}]")
        written = {name: f for name, f in found.items() if name not in ("default", "ddp") and "ms" in f}
        if "ms" not in found["default"] or not written:
            return False
        best = min(written, key=lambda name: written[name]["ms"])
        good = written[best]["ratio"] <= WITHIN
        print(f"the best explicit setting is {best}: default / best {written[best]['ratio']:.3f}, {'good' if good else 'NOT within 2 %'}")
        return good

    def record(self) -> dict[str, Any]:
        settings = {k: v for k, v in vars(self.args).items() if k not in ("json", "logs", "all_rows")}
        return {"title": "defaults", "settings": settings, "methods": self.figures(), "machine": machine()}


def cluster(ranks: int, mbit: float | None) -> str:
    """`local-N` with a core for each rank and, where the network is shaped, goodput as it is measured there."""
    from interlace import _core

    text = re.sub(r"\bcores = \d+", f"cores = {ranks}", _core.preset_cluster(f"local-{ranks}"))
    goodput = 0.95 * (mbit or 0) / 8e3
    return text if mbit is None else re.sub(r"(\n\[int(?:ra|er)\][^\[]*?gb_per_s = )[\d.]+", rf"\g<1>{goodput:.6f}", text)


@functools.cache
def captured(size: str) -> str:
    from interlace.capture import capture

    return str(capture(causal_model(MODELS[size]), causal_loss, token_batch(MODELS[size])).text)


def predicted_ms(args: argparse.Namespace, written: dict[str, Any], machine: str, path: str) -> float:
    """A step of what is written, as the search makes it from the same times that its step is simulated with."""
    from interlace import Config, _core
    from interlace.config.schedule import default_schedule, fill, pipeline

    config = Config(accumulation=args.accumulation, **written)
    schedule = default_schedule(config, args.ranks) if config.schedule == "auto" else config.schedule
    values = {"cluster": path, "limit": "none", "profile": "none", "ranks": args.ranks}
    passes = fill(schedule[-1][1] if schedule else (), values)
    program = _core.Program.parse(captured(args.model_size), "captured")
    program.run_passes(pipeline(",".join(fill([config.pipeline(args.ranks)], values)), passes), verify=False)
    return float(_core.Simulation(program, machine).step_us) / 1e3


def predict_row(args: argparse.Namespace) -> bool:
    text = cluster(args.ranks, args.mbit)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        found = {name: predicted_ms(args, written, text, file.name) for name, written in explicit(args.accumulation).items()}
        default = predicted_ms(args, {}, text, file.name)
    best = min(found, key=lambda name: found[name])
    network = "loopback" if args.mbit is None else f"{args.mbit:g} Mbit/s"
    print(
        f"{args.model_size}, {args.ranks} ranks, {network}, accumulation {args.accumulation}: default {default:.0f} ms, "
        f"best {best} {found[best]:.0f} ms, ratio {default / found[best]:.3f}", flush=True,
    )  # fmt: skip
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "logs", "all_rows")}
        write_json(args.json, {"title": "defaults, predicted", "settings": settings, "default_ms": default, "ms": found})
    return default <= WITHIN * found[best]


def one_row(args: argparse.Namespace) -> bool:
    if args.predict:
        return predict_row(args)
    bench = Defaults(args)
    on_network(args, bench.run)
    good = bench.print()
    if args.json:
        write_json(args.json, bench.record())
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="sending rate of each rank in Mbit/s (default: unshaped loopback)")
    parser.add_argument("--accumulation", type=int, choices=(1, 4), default=1, help="micro-batches a step")
    parser.add_argument("--model-size", choices=MODELS, default="20m")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--only", metavar="NAMES", help="the default and some of the others")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=2, help="steps of a method before the next has its turn")
    parser.add_argument("--rows", dest="all_rows", action="store_true", help="all rows of the table")
    parser.add_argument("--predict", action="store_true", help="simulated, nothing is trained")
    parser.add_argument("--logs", help="a folder that keeps what every process printed")
    parser.add_argument("--json", metavar="FILE", help="add the figures to a list in this file")
    args = parser.parse_args()
    args.per_host, args.accumulate_mode = 1, "reduce_last"  # the latter is DDP's way
    good = True
    for accumulation, mbit, size, ranks in ROWS if args.all_rows else [(args.accumulation, args.mbit, args.model_size, args.ranks)]:
        row = vars(args) | {"accumulation": accumulation, "mbit": mbit, "model_size": size, "ranks": ranks}
        good = one_row(argparse.Namespace(**row)) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
