"""The planner's plan against data parallel alone, pipeline alone and tensor parallel alone, each with its own search, on this machine.

python bench/best_of_three.py                      # ten settings; root, for the shaped networks
python bench/best_of_three.py --only 'llama.*500' --rounds 9 --json out.json
python bench/best_of_three.py --only loopback      # without root

A setting is a model, what a rank may use of memory, a network and how many ranks. Ops, collectives and what they do to one another are
measured first, as `interlace profile` does, transfers on the very network. Then `interlace plan --local` searches everything that the
runtime trains; the others are the best of the same space with one stage and tp 1, with a stage a rank, and with one stage cut over all
ranks: micro-batch, accumulation, ZeRO and recomputed blocks are free there too. All are trained as
`interlace train --plan` does it, in the same processes, in turns that begin with another one each round. A ratio is the planner's time over
the other's in the same round; their median is printed, with quartiles. Of a plan that is among the three nothing is measured twice: it is
no slower than itself. "lost" is one whose median ratio is above 1.01.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, quartiles, ratios, write_json
from network import Network, NetworkError, missing
from planned import GPT2, LLAMA, trainer_of, write_models

SLOWER = 1.01  # of medians: what cannot be told from noise is no loss
WARM_UP = 2
CANDIDATES = 3  # plans of each of the three, of which the fastest in simulation is taken, as the planner does
WANTED = 9  # of ten settings
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 10,
                      "num_key_value_heads": 10, "vocab_size": 2048},
    "deep": LLAMA | {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 6,
                     "num_key_value_heads": 6, "vocab_size": 512},
    "gpt": GPT2 | {"n_embd": 320, "n_layer": 6, "n_head": 10, "vocab_size": 4096},
}  # fmt: skip
SEQ, BATCH = 128, 8
MICRO_BATCHES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Setting:
    model: str
    mib: int | None  # that a rank may use
    mbit: float | None  # None: loopback
    ranks: int = 2

    @property
    def network(self) -> str:
        return "loopback" if self.mbit is None else f"{self.mbit:g}mbit"

    @property
    def name(self) -> str:
        return f"{self.model}, {'any memory' if self.mib is None else f'{self.mib} MiB'}, {self.network}, {self.ranks} ranks"


SETTINGS = [
    Setting("llama", None, None), Setting("llama", None, 500), Setting("llama", None, 100), Setting("llama", 110, 500),
    Setting("deep", None, None), Setting("deep", 60, 250), Setting("gpt", None, 1000), Setting("gpt", None, 250),
    Setting("gpt", 120, None), Setting("llama", None, 500, 4),
]  # fmt: skip


# ---- the four plans ----


def plans_of(setting: Setting, model: str, store: str) -> dict[str, dict[str, Any]]:
    """The planner's plan and the best of each kind, those that there are; with the file's text."""
    from interlace.cli.plan import make_plan
    from interlace.cli.plan_here import Here
    from interlace.cli.plan_programs import simulated
    from interlace.plan.layers import model_text

    cluster = f"local-{setting.ranks}"
    here = Here(cluster, setting.network, store)
    found = make_plan(
        model, cluster, BATCH, SEQ, here=here, space="full", dtype="float32", flash=True, runnable=True,
        memory_limit=(setting.mib or 0) << 20, host_limit=0, time_limit_s=0.0, top=400, why_not=False,
    )  # fmt: skip
    if not found["plans"]:
        raise SystemExit(f"{setting.name}: no plan fits")
    layers = model_text(model, seq=SEQ, flash=True, dtype="float32")
    best, ranks = found["plans"][0], setting.ranks
    pipelines = [each for each in found["plans"] if all(s["dp"] == s["tp"] == 1 for s in each["plan"]["stages"])]
    of_kind = {"data": alone(best, setting, layers, here.text, ranks, 1), "pipeline": pipelines}
    of_kind["tensor"] = alone(best, setting, layers, here.text, 1, ranks)
    out = {"planner": best}
    for kind, several in of_kind.items():
        known = []
        for each in several[:CANDIDATES]:
            if words_of(each["plan"]) == words_of(best["plan"]):
                known.append(best)
            elif (said := simulated(each["plan"], here.text, here.profile)) and max(said["peak_bytes"]) <= best["plan"]["memory_limit"]:
                known.append(each | {"simulated": said})
        if known:
            out[kind] = min(known, key=lambda each: each.get("simulated", each["plan"])["step_us"])
    return out


def alone(best: dict[str, Any], setting: Setting, layers: str, cluster: str, dp: int, tp: int) -> list[dict[str, Any]]:
    """The best plans of one stage with these ranks that fit. The search leaves out what another layout beats."""
    from interlace import _core

    blocks, limit = best["plan"]["blocks"], best["plan"]["memory_limit"]
    predictor, found = _core.PlanPredictor(layers, SEQ), []
    levels = range(4 if dp > 1 else 1)
    for b, *how in itertools.product(range(1, BATCH // dp + 1), levels, range(blocks + 1), range(blocks + 1)):
        if BATCH % (dp * b) or how[1] + how[2] > blocks:
            continue
        plan = one_stage(best["plan"]["model"], setting, b, dp, tp, (how[0], how[1], how[2]), limit)
        try:
            us, peak, _ = predictor.run(plan, cluster)
        except _core.Error:  # sizes that do not divide
            continue
        found += [(us, plan)] if peak <= limit else []
    texts = [_core.predict_plan(plan, layers, cluster) for _, plan in sorted(found)[:CANDIDATES]]
    return [{"text": text, "plan": json.loads(_core.read_plan(text))} for text in texts]


def words_of(plan: dict[str, Any]) -> str:
    """ "3 x 2b | dp2 z1 s4" in short."""
    parts = []
    for s in plan["stages"]:
        words = [f"{s['layers']} blocks", f"dp{s['dp']}" * (s["dp"] > 1), f"tp{s['tp']}" * (s["tp"] > 1), f"z{s['zero']}" * (s["zero"] > 0)]
        words += [f"b{s['micro_batch']}", f"full{s['full']}" * (s["full"] > 0), f"sel{s['selective']}" * (s["selective"] > 0)]
        parts.append(" ".join(word for word in words if word))
    return f"{plan['accumulation']} x [{' | '.join(parts)}]"


# ---- measured on the network ----


def measure_host(setting: Setting, model: str, store: str, net: Network, logs: Path) -> None:
    """What `interlace profile` measures of the model's micro-batches, and of the network. Ops are the same on every network."""
    from interlace.cli.profile import machine_here
    from interlace.cost.store import Store

    here = machine_here(setting.ranks, None, setting.network).fingerprint
    loopback = machine_here(setting.ranks, None, "loopback").fingerprint
    if here != loopback and Path(store).exists():
        with Store(store) as kept:
            kept.put(here, {key: row for key, row in kept.rows(loopback).items() if key[0] not in ("collective", "slowdown", "issue")})
    common = ["--network", setting.network, "--store", store, "--threads", str(max(1, cores() // setting.ranks)), "--budget", "3"]
    for words in [["--model", model, "--micro-batch", str(b), "--seq", str(SEQ)] for b in MICRO_BATCHES] + [
        ["--program", file] for file in cut_programs(setting, model, logs)
    ]:
        run_ranks(net, [sys.executable, "-m", "interlace.cli", "profile", *words, *common], logs / "profile.log")
    if here != loopback:
        with Store(store) as kept:
            kept.put(loopback, {key: row for key, row in kept.rows(here).items() if key[0] in ("op", "stage", "copy")})


def cut_programs(setting: Setting, model: str, folder: Path) -> list[str]:
    """Files of what the ranks run that cut all products, of the two largest micro-batches: where tensor parallel is worth its while."""
    from interlace import _core
    from interlace.cli.plan_programs import programs_of

    files = []
    for b in MICRO_BATCHES[-2:]:
        plan = json.loads(_core.read_plan(one_stage(model, setting, b, 1, setting.ranks, (0, 0, 0), 1 << 40)))
        programs = programs_of(plan)
        files += [str(folder / f"cut-{b}.il")] if programs else []
        if programs:
            Path(files[-1]).write_text(programs[0].print())
    return files


def one_stage(model: str, setting: Setting, b: int, dp: int, tp: int, how: tuple[int, int, int], limit: int) -> str:
    """A plan's file, without predictions. `how`: ZeRO level, blocks recomputed in full and selectively."""
    blocks = int(MODELS[setting.model].get("num_hidden_layers") or MODELS[setting.model]["n_layer"])
    return (
        f'interlace-plan 1\nmodel {json.dumps(model)}\ncluster "local-{setting.ranks}"\ndevices {setting.ranks} per_node {setting.ranks}\n'
        f'blocks {blocks}\nglobal_batch {BATCH}\nsequence {SEQ}\nflash_attention yes\ndtype "float32"\nmemory_limit {limit}\n'
        f'template runtime\naccumulation {BATCH // (dp * b)}\nspace "by hand"\n\nstage 0\n  layers {blocks} embedding head\n'
        f"  devices 0..{setting.ranks - 1}\n  micro_batch {b} dp {dp} tp {tp}\n  zero {how[0]}\n"
        f"  recompute full {how[1]} selective {how[2]}\n  offload weights 0 gradients 0 states 0 activations 0\n"
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_ranks(net: Network, argv: list[str], log: Path) -> str:
    """What rank 0 printed. Error: a rank failed, with the end of the log."""
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as out:
        children = [net.spawn(rank, argv, stdout=out if rank == 0 else errors, stderr=errors) for rank in range(net.ranks)]
        codes = [child.wait() for child in children]
        out.seek(0)
        said = out.read()
    if any(codes):
        raise SystemExit(f"a rank failed (exit codes {codes}):\n{log.read_text()[-3000:]}")
    return said


def run_rank(job_file: str) -> None:
    """Builds a trainer of each plan and lets them take turns; rank 0 prints the seconds of a step in each round, by plan."""
    import torch

    torch.set_num_threads(max(1, cores() // int(os.environ["WORLD_SIZE"])))
    job = json.loads(Path(job_file).read_text())
    trainers = {name: trainer_of(file) for name, file in job["plans"].items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: dict[str, int] = {}
    order = list(trainers)
    for number in range(-1, job["rounds"]):
        for name in order if number % 2 else reversed(order):
            trainer, batch = trainers[name]
            count = WARM_UP if number < 0 else job["block"]
            trainer._run.peers.exchange(f"round {number} of {name}", True)
            start = time.perf_counter()
            for _ in range(count):
                trainer.step(batch)
            seconds = max(trainer._run.peers.exchange(f"end of {number} of {name}", time.perf_counter() - start)) / count
            if number >= 0:
                times[name].append(seconds)
            peaks[name] = max(trainer._run.peers.exchange("peaks", int(trainer.stats()["peak_bytes"])))
    if int(os.environ["RANK"]) == 0:
        print("TIMES " + json.dumps({"times": times, "peaks": peaks}), flush=True)
    for trainer, _ in trainers.values():
        trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def contest(setting: Setting, args: argparse.Namespace, store: str, folder: Path) -> dict[str, Any]:
    """A setting's row: plans, their predicted and measured steps, ratios."""
    model = str(folder / setting.model)
    with Network(setting.ranks, setting.mbit) as net:
        measure_host(setting, model, store, net, folder)
        plans = plans_of(setting, model, store)
        files: dict[str, str] = {}  # one for each plan, whatever it is called
        for kind, each in plans.items():
            file = folder / f"{kind}.plan"
            file.write_text(each["text"])
            if kind == "planner" or each is not plans["planner"]:
                files[kind] = str(file)
        job = folder / "job.json"
        job.write_text(json.dumps({"plans": files, "rounds": args.rounds, "block": args.block}))
        said = run_ranks(net, [sys.executable, str(Path(__file__).resolve()), "--rank", str(job)], folder / "rank.log")
    measured = json.loads(next(line for line in said.splitlines() if line.startswith("TIMES "))[6:])
    return row_of(setting, plans, measured["times"], measured["peaks"])


def planned_bytes(each: dict[str, Any]) -> int:
    """The largest peak of a rank: of its programs where they were simulated, else as planned."""
    return max(each["simulated"]["peak_bytes"] if "simulated" in each else [s["peak_bytes"] for s in each["plan"]["stages"]])


def row_of(setting: Setting, plans: dict[str, Any], times: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, Any]:
    sides, slower = {}, []
    for kind, each in plans.items():
        own = kind if kind in times else "planner"
        ms, predicted_ms = statistics.median(times[own]) * 1e3, each.get("simulated", each["plan"])["step_us"] / 1e3
        over = quartiles(ratios(times, "planner", own))
        sides[kind] = {
            "plan": words_of(each["plan"]), "predicted_ms": predicted_ms, "measured_ms": ms,
            "error": predicted_ms / ms - 1, "ratio": over[1], "ratio_q1": over[0], "ratio_q3": over[2],
            "peak_bytes": peaks[own], "planned_bytes": planned_bytes(each), "same": own != kind,
            "seconds": times[own],
        }  # fmt: skip
        slower += [kind] if over[1] > SLOWER else []
    return {"setting": setting.name, "sides": sides, "lost_to": slower}


def show(row: dict[str, Any]) -> None:
    print(f"{row['setting']}: {'lost to ' + ', '.join(row['lost_to']) if row['lost_to'] else 'won'}")
    for kind in ("planner", "data", "pipeline", "tensor"):
        if kind not in row["sides"]:
            print(f"  {kind:<9} no plan of it fits")
            continue
        s = row["sides"][kind]
        ratio = "the same plan" if s["same"] else f"{s['ratio']:.3f} [{s['ratio_q1']:.3f}, {s['ratio_q3']:.3f}]" * (kind != "planner")
        figures = f"measured {s['measured_ms']:7.1f} ms, predicted {s['predicted_ms']:7.1f} ({100 * s['error']:+.1f} %)"
        memory = f"{s['peak_bytes'] / 2**20:6.1f} of {s['planned_bytes'] / 2**20:6.1f} MiB"
        print(f"  {kind:<9} {figures}  {memory}  {s['plan']:<48} {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a setting's name must match")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=int, default=2, help="steps of a plan before the next has its turn")
    parser.add_argument("--json", help="add the rows to a list in this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank)
        return
    wanted = [setting for setting in SETTINGS if re.search(args.only, setting.name)]
    if not wanted:
        raise SystemExit(f"no setting matches {args.only}: " + "; ".join(setting.name for setting in SETTINGS))
    if any(setting.mbit for setting in wanted) and (reason := missing()) is not None:
        raise SystemExit(f"error: {reason} (--only loopback)")
    rows, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["INTERLACE_CACHE"] = str(folder / "cache")
        write_models(MODELS, folder)
        for setting in wanted:
            try:
                rows.append(contest(setting, args, str(folder / "profile.sqlite"), folder))
            except NetworkError as e:
                raise SystemExit(f"error: {e}") from None
            show(rows[-1])
    won = sum(not row["lost_to"] for row in rows)
    errors = [100 * abs(side["error"]) for row in rows for side in row["sides"].values() if not side["same"]]
    summary = {"settings": len(rows), "won": won, "wanted": f"{WANTED} of {len(SETTINGS)}", "predicted_within_mean": statistics.fmean(errors),
               "worst": max(errors), "minutes": (time.monotonic() - begin) / 60}  # fmt: skip
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in summary.items()}))
    if args.json:
        write_json(args.json, {"title": "best of three", "rows": rows, "summary": summary, "machine": machine()})


if __name__ == "__main__":
    main()
