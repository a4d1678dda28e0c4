"""Methods of model parallelism that take turns on the same ranks, all of them on one batch, beside one rank that does all the work.

The processes of all methods stay alive, ratios are taken within a round (as in bench/peers.py). What bounds a step from below is given by
the seconds of computing all of it on one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import machine, quartiles, write_json
from network import Network, on_network
from peer_methods import ALONE, Method
from peer_table import LOSS_TOLERANCE
from peers import BUILD_TIMEOUT_S, STEP_TIMEOUT_S, WARM_UP_STEPS, Crew, CrewError

WHOLE = "eager"  # every rank trains the whole model by itself


@dataclasses.dataclass(frozen=True)
class Contest:
    title: str
    methods: dict[str, Method]
    peers: tuple[str, ...]  # the best of them is what the others are compared with
    case: dict[str, int]
    tiny: dict[str, int]  # only shows that all of it works
    wire_bytes: Callable[[dict[str, int], int], float]  # that a rank must send in a step
    part: Callable[[float, int], float]  # of the seconds of the whole step: what a step over so many ranks must compute, filling included
    warm_up: int = WARM_UP_STEPS


def measured(contest: Contest, args: argparse.Namespace, names: list[str], net: Network, logs: Path) -> dict[str, Any]:
    """Seconds of a step in every round, losses and problems, by method; goodput in bytes/s."""
    methods = {name: (ALONE | contest.methods)[name] for name in (WHOLE, *names)}
    case = contest.tiny if args.tiny else contest.case
    settings = {"case": case, "threads": args.threads}
    os.environ["PEERS_DATA_RANK"] = "0"  # one batch for all ranks
    crews = {crew: Crew(net, crew, settings, logs, alone=crew == "alone") for crew in {m.crew for m in methods.values()}}
    found: dict[str, Any] = {name: {"seconds": [], "losses": [], "problem": None} for name in methods}
    goodput = max(net.goodput() for _ in range(2))
    for crew in crews.values():
        with contextlib.suppress(CrewError):  # its methods tell it
            crew.ask(None, BUILD_TIMEOUT_S)

    def turn(name: str, what: str) -> None:
        row, crew = found[name], crews[methods[name].crew]
        if row["problem"] is not None:
            return
        try:
            if what == "build":
                crew.ask({"do": "build", "method": name, "table": contest.title}, BUILD_TIMEOUT_S)
                return
            count = args.block if what == "round" else contest.warm_up
            answers = crew.ask({"do": "steps", "method": name, "first": len(row["losses"]), "count": count}, STEP_TIMEOUT_S)
        except CrewError as e:
            row["problem"], row["seconds"] = f"failed ({what}): {e}", []
            return
        row["losses"] += answers[0]["losses"]
        if what == "round":
            row["seconds"].append(max(a["seconds"] for a in answers) / count)

    for what in ("build", "warm up", *["round"] * args.rounds):
        for name in methods:
            turn(name, what)
        times = ", ".join(f"{n} {r['seconds'][-1] * 1e3:.0f}" for n, r in found.items() if r["seconds"])
        print(f"{what}: {times + ' ms' if times else 'done'}", file=sys.stderr, flush=True)
    for crew in crews.values():
        crew.end()
    return {"rows": found, "goodput": max(goodput, net.goodput()), "wire_bytes": contest.wire_bytes(case, args.ranks)}


def report(contest: Contest, args: argparse.Namespace, names: list[str], out: dict[str, Any]) -> bool:
    """Prints the table. False: losses disagree, or a method failed."""
    rows, good = out["rows"], True
    compute = [contest.part(s, args.ranks) for s in rows[WHOLE]["seconds"]]
    wire = out["wire_bytes"] / out["goodput"]
    network = "unshaped loopback" if args.mbit is None else f"{args.mbit:g} Mbit/s a rank"
    print(f"{args.ranks} ranks, {network}, {args.threads} thread(s) each, {len(compute)} rounds of {args.block} steps")
    if compute:
        print(f"compute at least {quartiles(compute)[1] * 1e3:.0f} ms, wire at least {wire * 1e3:.0f} ms ({out['goodput'] / 1e6:.1f} MB/s)")
    # The better of the two, as its medians say, in every round.
    peers = {name: quartiles(rows[name]["seconds"])[1] for name in contest.peers if name in names and rows[name]["seconds"]}
    best = min(peers, key=lambda name: peers[name], default=None)
    reference = next((rows[n]["losses"] for n in names if rows[n]["problem"] is None), [])
    out["figures"] = {}
    for name in names:
        row = rows[name]
        if row["problem"] is not None:
            print(f"{contest.methods[name].title}: {row['problem']}")
            good = False
            continue
        low, middle, high = quartiles(row["seconds"])
        text = f"{contest.methods[name].title}: {middle * 1e3:.0f} ms [{low * 1e3:.0f}, {high * 1e3:.0f}]"
        figures = {"ms": middle * 1e3}
        if best is not None:
            ratio = quartiles([a / b for a, b in zip(row["seconds"], rows[best]["seconds"], strict=True)])
            text += f", {ratio[1]:.3f} [{ratio[0]:.3f}, {ratio[2]:.3f}] x {contest.methods[best].title}"
            figures |= {"ratio": ratio[1], "ratio_q1": ratio[0], "ratio_q3": ratio[2]}
        if compute:
            over = quartiles([a / max(wire, c) for a, c in zip(row["seconds"], compute, strict=True)])[1]
            text += f", {over:.2f} x the bound"
            figures["over_bound"] = over
        out["figures"][name] = figures
        far = max((abs(a - b) / abs(b) for a, b in zip(row["losses"], reference, strict=False)), default=0.0)
        if far > LOSS_TOLERANCE:
            text, good = text + f" WRONG: losses {far:.1e} from the others'", False
        print(text)
    return good


def run(contest: Contest, description: str | None) -> None:
    """The command line of such a benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="sending rate of each rank in Mbit/s (default: unshaped loopback)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {', '.join(contest.methods)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=1, help="steps of a method before the next has its turn")
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that all of it works")
    parser.add_argument("--logs", help="a folder that keeps what every process printed")
    parser.add_argument("--json", metavar="FILE", help="add the figures to a list in this file")
    args = parser.parse_args()
    names = [n.strip() for n in args.only.split(",")] if args.only else list(contest.methods)
    unknown = [n for n in names if n not in contest.methods]
    if unknown:
        sys.exit(f"error: unknown method '{unknown[0]}' (methods: {', '.join(contest.methods)})")
    out = on_network(args, lambda net, logs: measured(contest, args, names, net, logs))
    good = report(contest, args, names, out)
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "logs")}
        write_json(args.json, {"title": contest.title, "settings": settings, **out, "machine": machine() | {"threads": args.threads}})
    sys.exit(0 if good else 1)
