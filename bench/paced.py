"""The predicted step against the run on a paced cluster: eight ranks on this machine that behave like eight H100.

python bench/paced.py                                   # 20 programs, about 7 minutes on two cores
python bench/paced.py --virtual                         # by a clock that stands while a host runs, in two minutes
python bench/paced.py --only '8 ranks' --times 400      # everything takes 400 times as long as predicted
python bench/paced.py --list

Each rank is a process that runs a program with the real executor: its order of issue, its streams, events and waits, its process groups.
The device is the software accelerator's paced mode (tests/accelerator/pace.h): a kernel takes the time that the simulator's cost model
gives it, times the factor, and computes nothing; collectives begin when all ranks' streams have come to them; what runs together slows
down by the simulator's own table and shares of links. The prediction is `interlace simulate`'s of the same text and cluster, whose hosts
launch at once (issue_us = 0): the host here is real. What is compared is all that the simulator takes for granted of the runtime. "host" is
the processor time that a rank took for a step, over the step. It needs the build that tests have (`make test`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOFT = str(HERE.parent / "tests" / "accelerator" / "python")
if __name__ == "__main__":  # torch looks for its devices when it is imported, here and in the ranks' processes
    sys.path[:0] = [str(HERE), SOFT]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), SOFT, os.environ.get("PYTHONPATH", "")]))
    os.environ |= {"SOFT_CHECK": "0", "OMP_NUM_THREADS": "1", "INTERLACE_CACHE": "off"}

from common import quartiles, write_json  # noqa: E402

# Of the size at which the times of products and of a layer's gathers are near to one another on the networks below.
MODEL = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 8192,
}  # fmt: skip
SEQ = 512
# GB/s within a node, and of a node of four to others; None: the preset's own (NVLink, 8 x 400 Gb/s).
NETWORKS: dict[str, tuple[float, float] | None] = {"nvlink": None, "slow": (60, 50)}
LIMIT_S = 600.0

# mesh, network, and what else: strategy, accumulation, passes before the strategy's, and behind the standard ones
ROWS: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "1 rank": ({"dp": 1}, "nvlink", {}),
    "1 rank x4": ({"dp": 1}, "nvlink", {"accumulation": 4}),
    "1 rank recompute": ({"dp": 1}, "nvlink", {"first": "recompute(mode=full)"}),
    "1 rank offload": ({"dp": 1}, "nvlink", {"then": "offload(cluster={cluster},limit=75%)"}),
    "2 ranks shard": ({"dp": 2}, "nvlink", {}),
    "2 ranks shard prefetch": ({"dp": 2}, "slow", {"then": "prefetch(cluster={cluster})"}),
    "2 ranks zero1": ({"dp": 2}, "slow", {"strategy": "zero1"}),
    "2 ranks replicate x4": ({"dp": 2}, "slow", {"strategy": "replicate", "accumulation": 4}),
    "2 ranks search": ({"dp": 2}, "slow", {"then": "search(cluster={cluster})"}),
    "2 ranks offload": ({"dp": 2}, "slow", {"then": "offload(cluster={cluster},limit=75%)"}),
    "4 ranks shard": ({"dp": 4}, "slow", {}),
    "4 ranks shard x4 unshard": ({"dp": 4}, "slow", {"accumulation": 4, "then": "unshard(cluster={cluster})"}),
    "4 ranks reorder": ({"dp": 4}, "slow", {"then": "bucket(mode=manual,modules=model.layers.*),reorder"}),
    "4 ranks tensor": ({"dp": 1, "tp": 4}, "nvlink", {}),
    "8 ranks shard": ({"dp": 8}, "nvlink", {}),
    "8 ranks replicate": ({"dp": 8}, "slow", {"strategy": "replicate"}),
    "8 ranks search": ({"dp": 8}, "slow", {"then": "search(cluster={cluster})"}),
    "8 ranks search x4": ({"dp": 8}, "slow", {"accumulation": 4, "then": "search(cluster={cluster})"}),
    "8 ranks hybrid": ({"replica": 2, "dp": 4}, "slow", {}),
    "8 ranks hybrid search": ({"replica": 2, "dp": 4}, "slow", {"then": "search(cluster={cluster})"}),
}  # fmt: skip


def cluster_of(network: str) -> str:
    """The cluster's file: two nodes of four H100, whose hosts launch at once."""
    from interlace import _core

    text = re.sub(r"\nissue_us = \S+", "\nissue_us = 0", _core.preset_cluster("h100-80gb-8"))
    text = text.replace("per_node = 8", "per_node = 4")
    if (rates := NETWORKS[network]) is None:
        return text
    for table, rate in zip(("intra", "inter"), rates, strict=True):
        alpha = re.search(rf"\[{table}\][^\[]*?(alpha_us = \S+)", text)
        assert alpha is not None
        text = re.sub(rf"\[{table}\][^\[]*", f"[{table}]\n{alpha[1]}\ngb_per_s = {rate:g}\n\n", text)
    return text


def captured(sizes: dict[str, int], seq: int) -> str:
    """The training step of a Llama in bfloat16."""
    from interlace.capture import capture
    from interlace.models import build

    built = build("llama-10m", micro_batch=1, seq=seq, meta=True, dtype="bfloat16", **sizes)
    return str(capture(built.model, built.loss_fn, built.example_batch).text)


def program_of(source: str, mesh: dict[str, int], more: dict[str, Any], cluster: str) -> Any:
    """The row's program; `75%`: of the peak without the pass."""
    from interlace import _core

    program = _core.Program.parse(source, "captured")
    if first := more.get("first"):
        program.run_passes(f"canonicalize,{first}")
    standard = _core.standard_pipeline(
        strategy=more.get("strategy", "shard"), mesh=list(mesh.items()), accumulation=more.get("accumulation", 1),
        tensor_axis="tp" if "tp" in mesh else "", clip=1.0,
    )  # fmt: skip
    program.run_passes(standard)
    if then := more.get("then"):
        limit = int(0.75 * _core.Simulation(program, cluster).peak_bytes)
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(cluster)
            file.flush()
            program.run_passes(then.format(cluster=file.name).replace("75%", str(limit)))
    return program


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says of the job, each in a process of its own. Error: a rank failed, or said nothing for LIMIT_S."""
    from network import free_port
    from paced_worker import serve

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "interlace.train.compile"])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        job = job | {"file": f"{folder}/model", "port": free_port()}
        ranks = []
        for rank in range(job["ranks"]):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(job, rank, there), daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        try:
            said = []
            for rank, (_, pipe) in enumerate(ranks):
                said.append(pipe.recv() if pipe.poll(LIMIT_S) else "no answer")
                if isinstance(said[-1], str):
                    raise RuntimeError(f"rank {rank}: {said[-1]}")
            return said
        finally:
            for process, pipe in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
                pipe.close()


def measured(name: str, source: str, args: argparse.Namespace) -> dict[str, Any]:
    from interlace import _core

    mesh, network, more = ROWS[name]
    cluster = cluster_of(network)
    program = program_of(source, mesh, more, cluster)
    text, ranks = program.print(), 1
    for size in mesh.values():
        ranks *= size
    predicted = _core.testing.pacing(program, cluster)["step_ns"] / 1e9
    job = {"program": text, "cluster": cluster, "ranks": ranks, "times": args.times, "virtual": args.virtual, "warm": 3,
           "steps": 1 if args.virtual else args.steps}  # fmt: skip
    said = run(job)
    low, middle, high = quartiles(said[0]["seconds"])
    host = sum(rank["host_s"] for rank in said)
    if args.keep:
        Path(args.keep).mkdir(parents=True, exist_ok=True)
        (Path(args.keep) / f"{name.replace(' ', '_')}.il").write_text(text)
        (Path(args.keep) / f"{name.replace(' ', '_')}.toml").write_text(cluster)
        (Path(args.keep) / f"{name.replace(' ', '_')}.json").write_text(json.dumps(said))
    return {
        "row": name, "ranks": ranks, "network": network, "predicted_us": predicted * 1e6, "run_us": middle * 1e6, "q1_us": low * 1e6,
        "q3_us": high * 1e6, "error": predicted / middle - 1, "times": args.times, "virtual": args.virtual,
        "host_share": statistics.fmean(rank["host_s"] for rank in said) / (middle * args.times),
        "cores": host / (middle * args.times), "waits": said[0]["waits"], "instructions": said[0]["instructions"],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    spread = f"[{row['q1_us']:.0f}, {row['q3_us']:.0f}]"
    print(
        f"{row['row']:<26} {row['network']:<7} {row['predicted_us']:10.1f} {row['run_us']:10.1f} {spread:<18} {100 * row['error']:+7.2f} %"
        f"   host {100 * row['host_share']:3.0f} %, {row['cores']:.2f} cores, {row['waits']} waits",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a row's name must match")
    parser.add_argument("--times", type=float, default=200.0, help="how many times as long as predicted everything takes (default 200)")
    parser.add_argument("--steps", type=int, default=7, help="steps that are timed (default 7)")
    parser.add_argument("--virtual", action="store_true", help="virtual time: hosts take none, and all steps are the same")
    parser.add_argument("--json", help="add the rows to the list in this file")
    parser.add_argument("--keep", help="a folder that gets the program, the cluster and what the ranks said of every row")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    args = parser.parse_args()
    wanted = [name for name in ROWS if re.search(args.only, name)]
    if args.list or not wanted:
        print("\n".join(wanted) or f"no row matches {args.only}; --list shows them")
        return
    source = captured(MODEL, SEQ)
    print(f"H100, every time {args.times:g} x as long, {'virtual' if args.virtual else 'real'} time; microseconds of the cluster")
    print(f"{'row':<26} {'network':<7} {'predicted':>10} {'run':>10} {'quartiles':<18} {'error':>9}")
    found = []
    for name in wanted:
        found.append(measured(name, source, args))
        show(found[-1])
        if args.json:
            write_json(args.json, found[-1])
    errors = [100 * abs(row["error"]) for row in found]
    print(f"{len(found)} programs: error {statistics.fmean(errors):.2f} % mean, {max(errors):.2f} % worst")


if __name__ == "__main__":
    main()
