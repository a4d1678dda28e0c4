"""What is claimed of predictions alone, which need no second machine: cuts of products, orders of pipelines, and the time to find them.

python bench/predicted.py                                # all sections
python bench/predicted.py --only bubble,stages --json out/predicted.json

auto     `tensor(plan=auto)` against what the model itself says (Hugging Face's tp_plan, or our table), by the simulator: as pass `tensor`
         judges the two, and behind all passes of the standard pipeline
without  models that say nothing about tensor parallelism: seconds until a plan is found, and the step against no cut at all
search   Llama-3-70B for 32 H100 (8 are too few): captured, its cuts by 8 searched, the schedule's search behind it; in a process of its own
bubble   10 pipelines of 4 to 16 stages: `order(schedule=auto)` against 1F1B; what a step takes beyond its busiest stage's work (and that
         stage's waits for transfers under way, which tensor parallelism has in any order), and the largest peak of a rank; within 1F1B's
         peak, and within what the device has
stages   Llama-3-70B captured and cut into 8 stages of tp 4, orders searched; seconds and resident memory of a process of its own

Seconds are by the clock and, in brackets, of the processor (all threads): on a machine that others use the latter say more.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import machine, write_json

WITH_PLAN = (  # model, ranks that cut products, data ranks, cluster
    ("llama-3-8b", 8, 1, "h100-80gb-8"), ("llama-3-8b", 2, 4, "h100-80gb-8"), ("qwen3-8b", 4, 2, "h100-80gb-8"),
    ("mistral-7b", 4, 1, "l4-24gb-4"), ("gpt-6.7b", 4, 2, "a100-40gb-8"), ("falcon-6.7b", 8, 1, "a100-40gb-8"),
)  # fmt: skip
WITHOUT_PLAN = ("gpt2", "vit", "bert", "roberta", "electra", "opt", "bloom", "gptj", "t5", "bart", "convnext", "mixer")
PIPELINES = (  # model, mesh, micro-batches of a step, cluster
    ("llama-3-8b", "pp=4,dp=2", 16, "h100-80gb-8"), ("mistral-7b", "pp=4", 16, "h100-80gb-4"), ("gpt-6.7b", "pp=4", 16, "a100-40gb-4"),
    ("falcon-6.7b", "pp=4,tp=2", 16, "a100-40gb-8"), ("llama-6.7b", "pp=8", 32, "a100-40gb-8"), ("gpt-6.7b", "pp=8", 32, "a100-40gb-8"),
    ("llama-13b", "pp=8,tp=2", 32, "a100-40gb-16"), ("gpt-22b", "pp=8,tp=4", 32, "a100-40gb-32"),
    ("gpt-22b", "pp=12,tp=4", 48, "a100-40gb-48"), ("gpt-22b", "pp=16,tp=2", 64, "a100-40gb-32"),
)  # fmt: skip
LARGE = "llama-3-70b"


@contextmanager
def timed(row: dict[str, Any], name: str) -> Iterator[None]:
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    row[f"{name}_s"], row[f"{name}_cpu_s"] = time.perf_counter() - clock, time.process_time() - cpu


def said(row: dict[str, Any], name: str) -> str:
    return f"{name} {row[f'{name}_s']:.1f} s ({row[f'{name}_cpu_s']:.1f})"


def text_of(name: str, seq: int = 2048) -> str:
    from interlace.capture import capture
    from interlace.models import build

    built = build(name, micro_batch=1, seq=seq, meta=True)
    return str(capture(built.model, built.loss_fn, built.example_batch).text)


def other(name: str) -> str:
    """A captured model of transformers that is no preset, in about its usual size: text or pixels in, a mean of squares out."""
    import torch
    import transformers as hf
    from torch import nn

    from interlace.capture import capture

    ids, image = torch.zeros(4, 512, dtype=torch.long), torch.zeros(8, 3, 224, 224)
    text, image_batch = {"input_ids": ids}, {"pixel_values": image}
    both = {"input_ids": ids, "decoder_input_ids": ids[:, :128]}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    base = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    lines = {
        "gpt2": (hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16), text),
        "vit": (hf.ViTConfig(**large), image_batch),
        "bert": (hf.BertConfig(**large), text),
        "roberta": (hf.RobertaConfig(max_position_embeddings=514), {"input_ids": ids + 2}),
        "electra": (hf.ElectraConfig(embedding_size=768, **base), text),
        "opt": (hf.OPTConfig(hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32, use_cache=False), text),
        "bloom": (hf.BloomConfig(hidden_size=1024, n_layer=24, n_head=16, use_cache=False), text),
        "gptj": (hf.GPTJConfig(n_embd=2048, n_layer=16, n_head=16, use_cache=False), text),
        "t5": (hf.T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, use_cache=False), both),
        "bart": (hf.BartConfig(use_cache=False), both),
        "convnext": (hf.ConvNextConfig(), image_batch),
    }
    with torch.device("meta"):
        if name == "mixer":
            blocks = [nn.ModuleList([_two(196, 384), _two(768, 3072)]) for _ in range(12)]
            model: Any = nn.ModuleList([nn.Linear(768, 768), *blocks])
            return str(capture(model, _mixed, {"x": torch.zeros(8, 196, 768)}).text)
        config, batch = lines[name]
        config._attn_implementation = "eager" if name in ("bloom", "gptj", "t5", "convnext") else "sdpa"  # what transformers has
        model = hf.AutoModel.from_config(config)
    model.train()
    return str(capture(model, lambda m, b: m(**b).last_hidden_state.float().square().mean(), batch).text)


def _two(width: int, inner: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def _mixed(model: Any, batch: Any) -> Any:
    x = model[0](batch["x"])
    for tokens, channels in model[1:]:
        x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
        x = x + channels(x)
    return x.square().mean()


def judged(program: Any) -> list[tuple[str, float]]:
    """As pass `tensor` judged the plans, the chosen first: name and microseconds."""
    rows = [line.split("|") for line in program.meta()["tensor.judged"].split("\n")]
    return [(name, float(us)) for name, us, _ in rows]


def cut(text: str, plan: str, tp: int, dp: int, cluster: str) -> Any:
    from interlace import _core

    program = _core.Program.parse(text)
    passes = _core.standard_pipeline(mesh=[("dp", dp), ("tp", tp)], tensor_axis="tp", tensor_plan=plan, clip=1.0)
    costs = f"cluster={cluster}"
    passes = passes.replace(f"plan={plan}", f"plan={plan}" + (f",{costs}" if plan == "auto" else ""))
    program.run_passes(passes.replace(",overlap,", f",overlap({costs}),"), verify=False)
    return program


def auto() -> list[dict[str, Any]]:
    from interlace import _core

    rows = []
    for name, tp, dp, cluster in WITH_PLAN:
        text = text_of(name)
        row: dict[str, Any] = {"model": name, "tp": tp, "dp": dp, "cluster": cluster}
        with timed(row, "cut"):
            found = cut(text, "auto", tp, dp, cluster)
        by_pass = judged(found)
        row["judged_ms"], row["model_judged_ms"] = by_pass[0][1] / 1e3, next(us for n, us in by_pass if n.startswith("the model")) / 1e3
        row["ms"] = _core.Simulation(found, cluster).step_us / 1e3
        row["model_ms"] = _core.Simulation(cut(text, "model", tp, dp, cluster), cluster).step_us / 1e3
        print(
            f"  {name:<12} tp {tp} dp {dp} {cluster:<13} judged {row['judged_ms']:8.1f} ms, the model's plan {row['model_judged_ms']:8.1f}; "
            f"whole pipeline {row['ms']:8.1f} and {row['model_ms']:8.1f} ms, {row['ms'] / row['model_ms']:.3f} x; {said(row, 'cut')}",
            flush=True,
        )
        rows.append(row)
    return rows


def without() -> list[dict[str, Any]]:
    from interlace import _core

    rows = []
    for name in WITHOUT_PLAN:
        text = re.sub(r'^meta tensor ".*"\n', "", other(name), flags=re.MULTILINE)
        row: dict[str, Any] = {"model": name, "tp": 4, "cluster": "a100-40gb-4"}
        program = _core.Program.parse(text)
        program.run_passes("canonicalize,mesh(axes=dp:1+tp:4)")
        with timed(row, "found"):
            program.run_passes("tensor(axis=tp,plan=auto,cluster=a100-40gb-4)", verify=False)
        rows_judged = judged(program)
        row["ms"], row["estimates"] = rows_judged[0][1] / 1e3, int(program.meta()["tensor.estimates"])
        row["whole_ms"] = max(us for _, us in rows_judged) / 1e3
        row["cuts"] = program.meta()["tensor"].count(";") + bool(program.meta()["tensor"])
        print(
            f"  {name:<9} {said(row, 'found')}, {row['estimates']} estimates, {row['cuts']} patterns cut: {row['ms']:.1f} ms a step "
            f"({rows_judged[0][0]}), slowest judged {row['whole_ms']:.1f}",
            flush=True,
        )
        rows.append(row)
    return rows


def stage_passes(mesh: str, micro_batches: int, cluster: str, order: str, limit: float | None = None, **more: Any) -> tuple[list[str], Any]:
    """The standard passes of a pipeline, decided by this cluster; limit: bytes of a rank, None for what its device has."""
    from interlace.config import Config
    from interlace.config.schedule import items

    config = Config(mesh=mesh, clip_norm=1.0, accumulation=micro_batches, stage_order=order, **more)
    assert config.mesh is not None
    passes = config.pipeline(math.prod(size for _, size in config.mesh)).replace("plan=auto", f"plan=auto,cluster={cluster}")
    costs = f"cluster={cluster}" + (f",limit={int(limit)}" if limit is not None and order == "auto" else "")
    return items(passes.replace(",overlap,", f",overlap(cluster={cluster}),").replace(",at=auto", f",at=auto,{costs}")), config


def stages_of(text: str, mesh: str, micro_batches: int, cluster: str, order: str, **more: Any) -> Any:
    from interlace import _core
    from interlace.config.schedule import for_stage, pass_name

    passes, config = stage_passes(mesh, micro_batches, cluster, order, **more)
    at = next(i for i, one in enumerate(passes) if pass_name(one) == "pipeline")
    whole = _core.Program.parse(text)
    whole.run_passes(",".join(passes[:at]), verify=False)
    programs = []
    for stage in range(config.stage_ranks):
        programs.append(whole.clone())
        programs[-1].run_passes(for_stage(",".join(passes[at:]), stage, config), verify=False)
    made = _core.ProgramSet("pp", programs)
    made.check()
    return made


def beyond(found: dict[str, Any]) -> float:
    """Microseconds that a step takes beyond what its busiest stage does by itself: its work, and its waits for transfers under way (tp)."""
    return float(found["step_us"] - max(s["compute_us"] + s["optimizer_us"] + s["bubble_us"]["transfers"] for s in found["stages"]))


def idle(found: dict[str, Any]) -> float:
    return float(sum(sum(stage["bubble_us"].values()) for stage in found["stages"]))


def bubble() -> list[dict[str, Any]]:
    from interlace import _core

    rows: list[dict[str, Any]] = []
    known: dict[str, str] = {}
    for name, mesh, micro_batches, cluster in PIPELINES:
        if name not in known:
            known[name] = text_of(name)
        text = known[name]
        row: dict[str, Any] = {"model": name, "mesh": mesh, "micro_batches": micro_batches, "cluster": cluster}
        peak = None  # of 1F1B, which `auto` keeps to; "device": what the device has
        for name_of, order, limit in (("1f1b", "1f1b", False), ("auto", "auto", True), ("device", "auto", False)):
            with timed(row, name_of):
                made = stages_of(text, mesh, micro_batches, cluster, order, limit=peak if limit else None)
                found = json.loads(_core.simulate_set(made, cluster))
            peak = max(stage["peak_bytes"] for stage in found["stages"])
            times = {"ms": found["step_us"] / 1e3, "bubble_ms": beyond(found) / 1e3, "idle_ms": idle(found) / 1e3}
            row |= {f"{name_of}_{what}": number for what, number in (times | {"peak_gib": peak / 2**30}).items()}
            known_of = _core.Program.parse(made.texts()[0][1]).meta()
            row[f"{name_of}_stages"] = "V" if "stages.deal" in known_of else "one a rank"
            row[f"{name_of}_stages"] += ", rows gathered again" if "stages.gathers" in known_of else ""
        row["ratio"] = row["auto_bubble_ms"] / row["1f1b_bubble_ms"]
        print(
            f"  {name:<11} {mesh:<10} x{micro_batches:<3} {cluster:<13} step {row['1f1b_ms']:8.1f} -> {row['auto_ms']:8.1f} ms, bubble "
            f"{row['1f1b_bubble_ms']:7.1f} -> {row['auto_bubble_ms']:7.1f} ms, {row['ratio']:.3f} x (idle of all stages "
            f"{row['auto_idle_ms'] / row['1f1b_idle_ms']:.3f} x), peak {row['1f1b_peak_gib']:.2f} -> {row['auto_peak_gib']:.2f} GiB "
            f"({row['auto_stages']}); with the device's memory {row['device_ms']:.1f} ms, {row['device_peak_gib']:.2f} GiB "
            f"({row['device_stages']})",
            flush=True,
        )
        rows.append(row)
    return rows


def search_inner() -> dict[str, Any]:
    from interlace import _core

    row: dict[str, Any] = {"model": LARGE}
    with timed(row, "capture"):
        text = text_of(LARGE)
    program = _core.Program.parse(text)
    with timed(row, "cut"):
        program.run_passes("canonicalize,mesh(axes=dp:4+tp:8),tensor(axis=tp,plan=auto,cluster=h100-80gb-32)", verify=False)
    with timed(row, "passes"):
        program.run_passes("canonicalize,overlap(cluster=h100-80gb-32),shard(axis=dp),update(clip=1.0)", verify=False)
    with timed(row, "schedule"):
        program.run_passes("search(cluster=h100-80gb-32)", verify=False)
    return row


def stages_inner() -> dict[str, Any]:
    row: dict[str, Any] = {"model": LARGE}
    with timed(row, "capture"):
        text = text_of(LARGE)
    with timed(row, "stages"):
        stages_of(text, "pp=8,tp=4", 32, "h100-80gb-32", "auto")
    return row


def apart(section: str, parts: tuple[str, ...]) -> list[dict[str, Any]]:
    """A section in a process of its own, whose memory is its own."""
    done = subprocess.run([sys.executable, __file__, "--inner", section], check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    total, cpu = (sum(row[f"{part}_{unit}"] for part in parts) for unit in ("s", "cpu_s"))
    listed = ", ".join(said(row, part) for part in parts)
    print(f"  {listed}; in all {total:.1f} s ({cpu:.1f}), resident {row['resident_gb']:.2f} GB", flush=True)
    return [row | {"total_s": total, "total_cpu_s": cpu}]


SECTIONS = {
    "auto": auto,
    "without": without,
    "search": lambda: apart("search", ("capture", "cut", "passes", "schedule")),
    "bubble": bubble,
    "stages": lambda: apart("stages", ("capture", "stages")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--inner", choices=("search", "stages"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        row = search_inner() if args.inner == "search" else stages_inner()
        print(json.dumps(row | {"resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))
        return
    wanted = args.only.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"no section '{unknown[0]}'; there are {', '.join(SECTIONS)}")
    found = {}
    for name in wanted:
        print(f"{name}:", flush=True)
        found[name] = SECTIONS[name]()
    if args.json:
        write_json(args.json, {"title": "predictions, and the time to find plans", "machine": machine(), **found})


if __name__ == "__main__":
    main()
