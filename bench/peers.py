"""Against the peers: FSDP2, DDP, ZeRO-1 of torch, DeepSpeed and ours, on the same ranks, network, model, seeds and batches.

python bench/peers.py --ranks 2 --mbit 500                       # root: network namespaces shaped with tc
python bench/peers.py --ranks 2                                  # loopback, unshaped
python bench/peers.py --mbit 250 --accumulation 4 --only fsdp2,shard --rounds 5 --json out.json
python bench/peers.py --only search-free-regions --before ../older    # and search-free of another checkout, built in its own .venv

The processes of all methods stay alive and take turns, a block of steps each, so that what else the machine does falls on all of
them; ratios are taken within a round. Beside them runs compute alone: every rank trains by itself, at the same time, without any
communication. Each row shows wire time alone (bytes the method must send over the measured duplex goodput; what it sent, where that is
less than its kind must), the bytes it did send, and the step over its bound, the larger of compute alone and wire time. Losses of all
methods are compared step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import GPT2_MATMUL_BOUND, MATMUL_BOUND
from common import machine, quartiles, write_json
from network import Network, free_port, on_network
from peer_methods import ALONE, METHODS, Method, absent
from peer_table import ACCUMULATE_MODES, LOSS_TOLERANCE, Row, disagreeing, figures, lines, verdicts

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "inter": 172, "vocab": 512, "tokens": 64},
    "5m": {"hidden": 256, "layers": 6, "heads": 4, "inter": 688, "vocab": 512, "tokens": 512},
    "20m": MATMUL_BOUND,
    "50m": {"hidden": 768, "layers": 7, "heads": 12, "inter": 2048, "vocab": 512, "tokens": 512},
    "gpt2-20m": GPT2_MATMUL_BOUND,
}
BASELINE = "fsdp2"
BEFORE = "@before"  # after the name of a method that another checkout runs
WARM_UP_STEPS = 2
BUILD_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 180.0


class CrewError(RuntimeError):
    """A process of a crew failed; the message is its error."""


class Crew:
    """One process per rank with some methods in it. `alone`: each process is a world of one, with its rank's data."""

    def __init__(
        self, net: Network, name: str, settings: dict[str, Any], logs: Path, alone: bool = False, tree: Path | None = None
    ) -> None:
        python, bench = (sys.executable, Path(__file__).parent) if tree is None else (str(tree / ".venv/bin/python"), tree / "bench")
        self.name, self.broken = name, ""
        self._workers: list[subprocess.Popen[str]] = []
        self._lines: list[queue.Queue[str | None]] = []
        self._logs = [logs / f"{name}-{rank}.log" for rank in range(net.ranks)]
        port = str(free_port())
        for rank in range(net.ranks):
            env = {"MASTER_PORT": port, "OMP_NUM_THREADS": str(settings["threads"]), "TOKENIZERS_PARALLELISM": "false"}
            if alone:
                one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
                env |= one | {"ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "PEERS_DATA_RANK": str(rank)}
            argv = [python, str(bench / "peer_worker.py"), json.dumps(settings)]
            with self._logs[rank].open("w") as log:
                pipes: dict[str, Any] = {
                    "stdin": subprocess.PIPE,
                    "stdout": subprocess.PIPE,
                    "stderr": log,
                    "text": True,
                }
                worker = net.spawn(
                    rank, argv, env, **pipes, start_new_session=True
                )  # an interrupt is the driver's alone
            self._workers.append(worker)
            self._lines.append(queue.Queue())
            threading.Thread(target=self._read, args=(worker, self._lines[-1]), daemon=True).start()

    @staticmethod
    def _read(worker: subprocess.Popen[str], out: queue.Queue[str | None]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            out.put(line)
        out.put(None)

    def ask(self, message: dict[str, Any] | None, timeout_s: float) -> list[dict[str, Any]]:
        """Sends a message to all ranks (None: only listens) and gives their answers. Error: a rank failed, ended or hangs."""
        if self.broken:
            raise CrewError(self.broken)
        if message is not None:
            for worker in self._workers:
                with contextlib.suppress(BrokenPipeError):  # it has ended; its log is reported below
                    assert worker.stdin is not None
                    worker.stdin.write(json.dumps(message) + "\n")
                    worker.stdin.flush()
        deadline = time.monotonic() + timeout_s
        answers: list[dict[str, Any]] = []
        try:
            for rank, out in enumerate(self._lines):
                line = out.get(timeout=max(0.0, deadline - time.monotonic()))
                if line is None:
                    raise self._break(f"rank {rank} ended: {self._tail(rank)}")
                answers.append(json.loads(line))
        except queue.Empty:
            raise self._break(f"no answer within {timeout_s:g} s: {self._tail(len(answers))}") from None
        failed = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
        for rank, answer in failed:
            with self._logs[rank].open("a") as log:
                log.write(answer.get("trace", ""))
        if failed:
            rank, answer = failed[0]
            if len(failed) < len(answers):  # the ranks are no longer at the same place
                raise self._break(f"rank {rank}: {answer['error']}")
            raise CrewError(f"rank {rank}: {answer['error']}")
        return answers

    def _break(self, problem: str) -> CrewError:
        self.broken = problem
        self.end()
        return CrewError(problem)

    def _tail(self, rank: int) -> str:
        text = self._logs[rank].read_text(errors="replace").strip().splitlines()
        return text[-1][:300] if text else "it printed nothing"

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


class Progress:
    """One line that is rewritten on a terminal; without one a plain line per round."""

    def __init__(self, turns: int) -> None:
        self.turns, self.done, self.begin = turns, 0, time.monotonic()
        self.live = sys.stderr.isatty()

    def show(self, text: str, turn: bool = False) -> None:
        self.done += turn
        if self.live:
            spent = time.monotonic() - self.begin
            left = f", {spent / self.done * (self.turns - self.done):.0f} s left" if self.done else ""
            print(f"\r\x1b[K{text} ({self.done}/{self.turns}{left})", end="", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        clear = "\r\x1b[K" if self.live else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)


class Bench:
    """One table: settings, the crews, and what was measured."""

    table = "peers"  # where its methods' names are looked up: methods of other benchmarks have the same

    def __init__(self, args: argparse.Namespace, methods: Sequence[Method]) -> None:
        self.args = args
        self.methods = [*ALONE.values(), *methods]
        self.rows = {m.name: Row(m.name, m.kind, m.title, m.ours) for m in self.methods}
        self.crews: dict[str, Crew] = {}
        self.baseline = BASELINE if args.per_host == 1 else "fsdp2-hybrid"
        if getattr(args, "before", None) is not None and self.baseline not in self.rows:
            self.baseline = f"search-free{BEFORE}"
        self.parameter_bytes = 0
        self.goodput = 0.0
        self.interrupted = False

    def run(self, net: Network, logs: Path) -> None:
        # The network's rate is the largest seen: what else the machine does only lowers it.
        self.goodput = max(net.goodput() for _ in range(2))
        progress = Progress(len(self.methods) * (self.args.rounds + 2))
        settings = {
            "case": MODELS[self.args.model_size], "accumulation": self.args.accumulation, "mode": self.args.accumulate_mode,
            "threads": self.args.threads,
        }  # fmt: skip
        for method in self.methods:
            problem = absent(method)
            if problem is not None:
                self.rows[method.name].problem = problem
            elif method.crew not in self.crews:
                tree = self.args.before if method.crew == "before" else None
                self.crews[method.crew] = Crew(net, method.crew, settings, logs, alone=method.crew == "alone", tree=tree)
        for name, crew in self.crews.items():
            progress.show(f"starting {name}")
            with contextlib.suppress(CrewError):  # reported by the methods of this crew
                crew.ask(None, BUILD_TIMEOUT_S)
        try:
            for method in self.methods:
                self._attempt(method, progress, "build")
            for method in self.methods:
                self._attempt(method, progress, "warm up")
            for number in range(self.args.rounds):
                for method in self.methods if number % 2 == 0 else reversed(self.methods):
                    self._attempt(method, progress, f"round {number + 1}")
                progress.line(f"round {number + 1} of {self.args.rounds}: {self._round_text()}")
        except KeyboardInterrupt:
            self.interrupted = True
            working = [row for row in self.rows.values() if row.problem is None]
            whole = min((len(row.seconds) for row in working), default=0)
            for row in working:  # the round that was cut short cannot be paired
                del row.seconds[whole:]
            progress.line(f"interrupted: the table holds the {whole} rounds that were measured")
        for crew in self.crews.values():
            crew.end()
        self.goodput = max(self.goodput, net.goodput())

    def _attempt(self, method: Method, progress: Progress, what: str) -> None:
        row = self.rows[method.name]
        progress.show(f"{what}: {method.title}", turn=True)
        if row.problem is not None:
            return
        crew = self.crews[method.crew]
        try:
            if what == "build":
                message = {"do": "build", "method": method.name.removesuffix(BEFORE), "table": self.table}
                answers = crew.ask(message, BUILD_TIMEOUT_S)
                self.parameter_bytes = answers[0]["parameter_bytes"]
            else:
                self._steps(crew, row, WARM_UP_STEPS if what == "warm up" else self.args.block, what != "warm up")
        except CrewError as e:
            row.problem = f"failed while {what}: {e}"
            row.seconds.clear()  # half a series would be paired with other rounds
            progress.line(f"{method.title}: {row.problem}")

    def _steps(self, crew: Crew, row: Row, count: int, counted: bool) -> None:
        message = {"do": "steps", "method": row.name.removesuffix(BEFORE), "first": len(row.losses), "count": count}
        answers = crew.ask(message, STEP_TIMEOUT_S + (BUILD_TIMEOUT_S if not counted else 0))
        row.losses += [sum(a["losses"][i] for a in answers) / len(answers) for i in range(count)]
        if counted:
            row.seconds.append(max(a["seconds"] for a in answers) / count)
            if self.args.mbit is not None:  # plain loopback's counter is that of the whole machine
                row.sent_bytes.append(sum(a["sent_bytes"] for a in answers) / len(answers) / count)

    def _round_text(self) -> str:
        last = [f"{row.name} {row.seconds[-1] * 1e3:.0f}" for row in self.rows.values() if row.seconds]
        return ", ".join(last) + " ms"

    # ---- what came out ----

    def compute_s(self) -> list[float]:
        """Compute alone in every round, the faster of the two: what no method can be under."""
        return [min(seconds) for seconds in zip(*(r.seconds for r in self._alone()), strict=False)]

    def _alone(self) -> list[Row]:
        return [self.rows[name] for name in ALONE if name in self.rows and self.rows[name].seconds]

    def facts(self) -> dict[str, Any]:
        return {
            "compute_s": self.compute_s(), "goodput": self.goodput, "parameter_bytes": self.parameter_bytes,
            "ranks": self.args.ranks // self.args.per_host, "accumulation": self.args.accumulation, "mode": self.args.accumulate_mode,
        }  # fmt: skip

    def compared(self) -> list[Row]:
        return [row for name, row in self.rows.items() if name not in ALONE]

    def print(self) -> bool:
        """The table and the verdicts. False: losses disagree or a method of ours failed."""
        a, rows = self.args, self.compared()
        family = "GPT-2" if MODELS[a.model_size].get("family") == "gpt2" else "Llama"
        network = "unshaped loopback" if a.mbit is None else f"{a.mbit:g} Mbit/s a rank"
        print(
            f"{a.ranks} ranks, {network}, {family} of {self.parameter_bytes / 4e6:.1f} M parameters, fp32, "
            f"{MODELS[a.model_size]['tokens']} tokens a rank and micro-batch, accumulation {a.accumulation}, "
            f"{a.threads} thread{'s' if a.threads > 1 else ''} a rank; {len(self.compute_s())} rounds of {a.block} steps"
        )
        if len(self._alone()) == 0:
            print("compute alone was not measured: no bound")
            return False
        for row in self._alone():
            low, middle, high = quartiles(row.seconds)
            print(f"{row.title}: {middle * 1e3:.0f} ms [{low * 1e3:.0f}, {high * 1e3:.0f}]")
        print(f"wire alone: {self.goodput / 1e6:.2f} MB/s duplex goodput a rank ({self.goodput * 8e-6:.0f} Mbit/s)")
        print("\n".join(lines(rows, self.facts(), self.baseline, markdown=a.markdown)))
        for v in verdicts(rows):
            word = "faster" if v["ratio_q3"] < 1 else "SLOWER" if v["ratio_q1"] > 1 else "about equal"
            print(
                f"interlace {v['ours']} / {v['peer']} (fastest of its kind): {v['ratio']:.3f} "
                f"[{v['ratio_q1']:.3f}, {v['ratio_q3']:.3f}], {word}"
            )
        wrong = disagreeing(rows)
        for name, distance in wrong.items():
            print(
                f"WRONG: the losses of {name} are {distance:.2e} (relative) from the others', tolerance {LOSS_TOLERANCE}"
            )
        if not wrong:
            print(f"losses of all methods agree at every step (relative {LOSS_TOLERANCE})")
        return not wrong and not any(row.ours and row.problem for row in rows)

    def record(self) -> dict[str, Any]:
        rows = self.compared()
        baseline = next((r for r in rows if r.name == self.baseline), None)
        return {
            "title": "peers", "settings": {k: v for k, v in vars(self.args).items() if k not in ("json", "logs", "markdown", "before")},
            "parameter_bytes": self.parameter_bytes, "duplex_goodput": self.goodput,
            "compute_ms": {r.name: quartiles(r.seconds)[1] * 1e3 for r in self._alone()}, "compute_s": self.compute_s(),
            "rows": [figures(row, self.facts(), baseline) | {"losses": row.losses} for row in rows] if self._alone() else [],
            "verdicts": verdicts(rows), "disagreeing": disagreeing(rows), "interrupted": self.interrupted,
            "machine": machine() | {"threads": self.args.threads},
        }  # fmt: skip


def chosen(only: str | None, hybrid: bool = False) -> list[Method]:
    """Methods by name, in the table's order; without names those of a mesh of two axes, or all others, but no method that is only there by
    name. Error: an unknown name (did you mean)."""
    if only is None:
        return [m for m in METHODS.values() if (m.kind == "hybrid") == hybrid and not m.by_name]
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise SystemExit(f"error: unknown method '{name}'{hint} (methods: {', '.join(METHODS)})")
    return [m for m in METHODS.values() if m.name in names]


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_at_least(2), default=2)
    parser.add_argument("--mbit", type=float, help="sending rate of each rank in Mbit/s (default: unshaped loopback)")
    parser.add_argument(
        "--per-host", type=_at_least(1), default=1,
        help="ranks that share a host and its rate; more than one: methods that shard within a host and replicate across",
    )
    parser.add_argument("--accumulation", type=_at_least(1), default=1, help="micro-batches a step")
    parser.add_argument(
        "--accumulate-mode", choices=ACCUMULATE_MODES, default="reduce_last", help="of FSDP2 eager, compiled and ours"
    )
    parser.add_argument(
        "--model-size", choices=MODELS, default="20m", help="a Llama, or gpt2-20m (default: %(default)s)"
    )
    parser.add_argument("--threads", type=_at_least(1), default=1, help="of each rank")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout with its own .venv: its search-free, beside ours")
    parser.add_argument("--rounds", type=_at_least(1), default=7)
    parser.add_argument("--block", type=_at_least(1), default=2, help="steps of a method before the next has its turn")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--logs", help="a folder that keeps what every process printed")
    parser.add_argument("--json", metavar="FILE", help="add the figures to a list in this file")
    args = parser.parse_args()
    methods = chosen(args.only, hybrid=args.per_host > 1)
    if args.before is not None:
        if not (args.before / ".venv/bin/python").exists():
            raise SystemExit(f"error: --before: {args.before} has no .venv (run make build there)")
        then = METHODS["search-free"]
        methods.append(dataclasses.replace(then, name=then.name + BEFORE, title=f"{then.title}, before", crew="before"))
    bench = Bench(args, methods)
    on_network(args, bench.run, args.per_host)
    good = bench.print()
    if args.json:
        write_json(args.json, bench.record())
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
