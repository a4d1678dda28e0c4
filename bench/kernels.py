"""Where a step's time goes, kernel by kernel: ours without and with regions, PyTorch eager and torch.compile, one rank, one thread,
the same model.

python bench/kernels.py                      # the Llama that peers.py trains
python bench/kernels.py --model gpt2 --top 8 --json out/kernels.json
python bench/kernels.py --autocast           # loss and backward under autocast to bfloat16
python bench/kernels.py --model gpt2 --dropout 0.1
python bench/kernels.py --model gpt2 --written   # its attention written out: products, masks, softmax
python bench/kernels.py --kept               # also what regions take that make nothing again for the backward part

Steps are timed in turn; then some of each side are recorded, ours by the executor, theirs by torch's profiler (self time of each
kernel). `between kernels` is what the steps of the same recording took beyond their kernels: dispatch, autograd, guards, Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from cases import GPT2_MATMUL_BOUND, MATMUL_BOUND, VIT_MATMUL_BOUND, causal_loss, causal_model, image_batch, token_batch
from common import paired, report

import interlace

CASES = {"llama": MATMUL_BOUND, "gpt2": GPT2_MATMUL_BOUND, "vit": VIT_MATMUL_BOUND}
# kind → what is in the names of its kernels, the first that fits; kernels that torch.compile generates have no name of their own
KINDS = {
    "optimizer": ("adam", "update."),
    "attention": ("flash", "scaled_dot_product", "attention"),
    "products": ("mm", "linear", "matmul"),
    "between kernels": (
        "autograd::",
        "optimizer.",
        "profilerstep",
        "torchdynamo",
        "pregraph",
        "aotdispatcher",
        "accumulategrad",
    ),
}
REST = "norms, elementwise, copies"
BETWEEN = "between kernels"

Kernels = dict[str, float]  # name → ms of a step


def kind_of(name: str) -> str:
    if name == BETWEEN:
        return BETWEEN
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), REST)


def narrow_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return causal_loss(model, batch)


def model_of(case: dict, dropout: float, written: bool) -> torch.nn.Module:
    """`dropout`: of all layers that have some, and of attention. `written`: attention is written out."""
    model = causal_model(case).train(dropout > 0)
    if written:
        model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model


def sides(
    case: dict, kept: bool = False, autocast: bool = False, dropout: float = 0.0, written: bool = False
) -> tuple[dict[str, Callable[[], object]], dict[str, interlace.Trainer]]:
    batch = image_batch(case) if case.get("family") == "vit" else token_batch(case)
    loss = narrow_loss if autocast else causal_loss

    def by_torch(compiled: bool) -> Callable[[], object]:
        model = model_of(case, dropout, written)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if compiled else model

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss(run, batch).backward()
            optimizer.step()

        return step

    def by_us(regions: str, fuse: str = "fuse") -> interlace.Trainer:
        model = model_of(case, dropout, written)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        config = interlace.Config(regions=regions, regions_wait=True)
        if fuse != "fuse":
            config = dataclasses.replace(config, passes=config.pipeline(1).replace("fuse,", f"{fuse},"))
        return interlace.compile(model, optimizer, loss, batch, config)

    trainers = {"interlace": by_us("off"), "regions": by_us("on")}
    if kept:
        trainers["kept"] = by_us("on", "fuse(recompute=false)")
    ours = {name: lambda trainer=trainer: trainer.step(batch) for name, trainer in trainers.items()}
    return {"torch.compile": by_torch(True), "eager": by_torch(False), **ours}, trainers


def kernels_of_torch(step: Callable[[], object], steps: int) -> Kernels:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        whole = (time.perf_counter() - begin) * 1e3 / steps
    found = {e.key: e.self_cpu_time_total / 1e3 / steps for e in profile.key_averages()}
    named = sum(ms for name, ms in found.items() if kind_of(name) != BETWEEN)
    return {name: ms for name, ms in found.items() if kind_of(name) != BETWEEN} | {BETWEEN: whole - named}


def kernels_of_ours(trainer: interlace.Trainer, step: Callable[[], object], steps: int) -> Kernels:
    executor = trainer._run.executor
    executor.set_trace("on")
    found: defaultdict[str, float] = defaultdict(float)
    for _ in range(steps):
        step()
        record = executor.record()
        seconds = 0.0
        for op, _, wall, *_ in record["samples"]:
            found[record["ops"][op]["name"]] += wall * 1e3 / steps
            seconds += wall
        found[BETWEEN] += (record["seconds"] - seconds) * 1e3 / steps
    executor.set_trace("off")
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES, default="llama")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds of the step times")
    parser.add_argument("--steps", type=int, default=4, help="recorded steps of each side")
    parser.add_argument("--top", type=int, default=0, help="also list so many kernels of each side")
    parser.add_argument("--kept", action="store_true", help="also regions that keep for backward all that was kept: fuse(recompute=false)")
    parser.add_argument("--autocast", action="store_true", help="under autocast to bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability in all layers that have one, and in attention")
    parser.add_argument("--written", action="store_true", help="with attention written out by the model, as products, masks and softmax")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, trainers = sides(CASES[args.model], args.kept, args.autocast, args.dropout, args.written)
    times = paired(steps, args.rounds, warmup=3)
    found = {
        name: kernels_of_ours(trainers[name], step, args.steps) if name in trainers else kernels_of_torch(step, args.steps)
        for name, step in steps.items()
    }
    table: dict[str, dict[str, float]] = {}
    for side, kernels in found.items():
        for name, ms in kernels.items():
            row = table.setdefault(kind_of(name), dict.fromkeys(found, 0.0))
            row[side] += ms
    report(f"{args.model}, one rank, one thread", times, "torch.compile", args.json, kernels=found, kinds=table)
    print(f"\n{'ms of a recorded step':<30}" + "".join(f"{side:>16}" for side in found) + f"{'regions - compiled':>20}")
    total = dict.fromkeys(found, 0.0)
    for kind, row in sorted(table.items(), key=lambda item: -item[1]["regions"]):
        print(f"{kind:<30}" + "".join(f"{row[side]:16.1f}" for side in found) + f"{row['regions'] - row['torch.compile']:20.1f}")
        total = {side: total[side] + row[side] for side in found}
    print(
        f"{'in all':<30}"
        + "".join(f"{total[side]:16.1f}" for side in found)
        + f"{total['regions'] - total['torch.compile']:20.1f}"
    )
    rest = table[REST]
    print(
        f"{REST}: {rest['regions'] / rest['torch.compile']:.3f} x torch.compile's, {rest['regions'] / rest['interlace']:.3f} x without"
    )
    peaks = {name: trainers[name].summary()["activation_peak_bytes"] / 1e6 for name in ("interlace", "regions")}
    print("activations at the peak, MB: " + ", ".join(f"{name} {mb:.1f}" for name, mb in peaks.items()))
    for side, kernels in found.items() if args.top else ():
        print(f"\n{side}")
        for name, ms in sorted(kernels.items(), key=lambda item: -item[1])[: args.top]:
            print(f"  {ms:9.2f} ms  {name}")


if __name__ == "__main__":
    main()
