"""The simulator's speed on a 70B step, the same bits each time, and its lower bounds under changed machines.

python bench/simulator.py                                  # Llama-3-70B on 32 H100; capture takes half a minute
python bench/simulator.py --keep build/llama-3-70b.il      # keeps the captured and sharded program for the next run
python bench/simulator.py --model llama-3-8b --ranks 8 --json out/bench.json
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

from common import machine, quartiles, write_json

TARGETS_MS = {"alike": 50.0, "different": 1000.0}  # Llama-3-70B, 32 ranks


def program_of(model: str, ranks: int, seq: int):
    from interlace import _core
    from interlace.capture import capture
    from interlace.models import build

    preset = build(model, micro_batch=1, seq=seq)
    captured = capture(preset.model, preset.loss_fn, preset.example_batch)
    program = _core.Program.parse(captured.text)
    program.run_passes(f"canonicalize,shard(axis=dp,ranks={ranks}),update(clip=1.0)")
    sizes = {"b": 1, "s": seq}
    bound = {symbol["name"]: sizes[symbol["name"]] for symbol in program.symbols()}
    return program.bind(bound) if bound else program


def timed(call, rounds: int) -> tuple[list[float], str]:
    """Seconds of every round, and one digest of all results (they must be equal)."""
    seconds, digests = [], set()
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        digests.add(hashlib.sha256((result.json() + result.trace(0)).encode()).hexdigest())
    if len(digests) != 1:
        raise SystemExit(f"{len(digests)} different results of one simulation")
    return seconds, digests.pop()


def bounds(simulator, cluster: str, runs: int, seed: int) -> dict[str, float]:
    """The smallest gap between step and lower bound over randomly changed machines; below zero would be a defect."""
    draw = random.Random(seed)
    gaps = []
    for _ in range(runs):
        names = ("compute", "links", "latency", "copies", "launches")
        factors = [(name, draw.choice((0.0, 0.25, 0.5, 1.0, 2.0, 8.0))) for name in names]
        factors = [(name, factor or 0.1) if name == "compute" else (name, factor) for name, factor in factors]
        result = simulator.run(cluster, what_if=[*factors, ("interference", float(draw.random() < 0.5))])
        gaps.append(result.step_us / result.lower_bound_us - 1)
    if min(gaps) < 0:
        raise SystemExit(f"a step is {-min(gaps):.2e} below its lower bound (seed {seed})")
    low, middle, high = quartiles(gaps)
    return {"runs": runs, "least": min(gaps), "q1": low, "median": middle, "q3": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-70b", help="preset name")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--gpu", default="h100-80gb", help="cluster preset without its count")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", help="a file for the program, read when it is there")
    parser.add_argument("--json", help="add the figures to this file")
    args = parser.parse_args()
    from interlace import _core

    kept = Path(args.keep) if args.keep else None
    if kept is not None and kept.is_file():
        program = _core.Program.parse(kept.read_text(), str(kept))
    else:
        program = program_of(args.model, args.ranks, args.seq)
        if kept is not None:
            kept.write_text(program.print())
    cluster = f"{args.gpu}-{args.ranks}"
    start = time.perf_counter()
    simulator = _core.Simulator(program)
    prepared_ms = 1e3 * (time.perf_counter() - start)
    slow = [(rank, 1 + rank / 100) for rank in range(args.ranks)]
    print(
        f"{args.model}, {program.summary()['ops']:,} ops, {cluster}; verified and copied once in {prepared_ms:.0f} ms"
    )
    record: dict[str, object] = {
        "title": f"simulator: {args.model} on {cluster}",
        "prepared_ms": prepared_ms,
        "machine": machine(),
    }
    for name, call in (
        ("alike", lambda: simulator.run(cluster)),
        ("different", lambda: simulator.run(cluster, slow=slow)),
    ):
        seconds, digest = timed(call, args.rounds)
        low, middle, high = (1e3 * value for value in quartiles(seconds))
        result = call()
        target = f", target {TARGETS_MS[name]:.0f} ms" if (args.model, args.ranks) == ("llama-3-70b", 32) else ""
        print(
            f"  {args.ranks} ranks {name:<10} {middle:8.1f} ms   [{low:.1f}, {high:.1f}]{target}; step {result.step_us / 1e3:.3f} ms, "
            f"{args.rounds} times the same bits ({digest[:12]})",
            flush=True,
        )
        record[name] = {
            "median_ms": middle,
            "q1_ms": low,
            "q3_ms": high,
            "rounds": args.rounds,
            "step_us": result.step_us,
        }
    record["bounds"] = found = bounds(simulator, cluster, 4 * args.rounds, args.seed)
    print(
        f"  step above its lower bound on {found['runs']} randomly changed machines: least {100 * found['least']:.2f} %, "
        f"median {100 * found['median']:.1f} % (10,000 random programs: sim_test, RandomSteps.NeverBelowTheLowerBound)"
    )
    if args.json:
        write_json(args.json, record)


if __name__ == "__main__":
    main()
