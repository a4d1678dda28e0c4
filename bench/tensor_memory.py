"""Memory of a rank that cuts products over tp: planned against measured, and its activations against the whole model's over tp.

python bench/tensor_memory.py                  # Llama and GPT-2, tp 2 and 4, rows kept and gathered again
python bench/tensor_memory.py --only 'tp2'     # rows whose name matches

planned      top of the planned arena, bytes; top: highest byte that a tensor of the step had, less that: 0
activations  peak of what lives within a micro-batch, over that of the whole program (one rank) divided by tp
logits       largest value of a step with a row's numbers for the vocabulary, over that of the whole program: 1 / tp at most
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import causal_loss, gpt2, llama, token_batch

import interlace
from interlace import _core
from interlace.capture import capture

CASE = {"hidden": 256, "layers": 8, "heads": 8, "inter": 688, "vocab": 1048, "tokens": 128, "rows": 8}
MODELS = {"llama": llama, "gpt2": gpt2}
ROWS = {"kept": "false", "again": "true"}  # what the forward part gathered, for the backward part
BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}


def largest_of_vocabulary(text: str, parts: int) -> int:
    """Bytes of the largest value with a dimension of the vocabulary, or a rank's part of it, for every token."""
    tokens, vocab = CASE["rows"] * CASE["tokens"], CASE["vocab"] // parts
    found = [0]
    for dtype, sizes in re.findall(r"(?m)^  %\d+: (\w+)\[([\d,]+)\]", text):
        dims = [int(size) for size in sizes.split(",")]
        count = torch.Size(dims).numel()
        if dtype in BYTES and (vocab in dims or CASE["vocab"] in dims) and count >= tokens * vocab // 2:
            found.append(count * BYTES[dtype])
    return max(found)


def whole(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Peak of the activations, and bytes of the logits, of the program of one rank."""
    program = _core.Program.parse(capture(model, causal_loss, batch).text)
    program.run_passes("canonicalize,mesh(axes=dp:1),shard(axis=dp,ranks=1),update")
    return program.summary()["activation_peak_bytes"], largest_of_vocabulary(program.print(), 1)


def worker(rank: int, tp: int, names: list[tuple[str, str]], rendezvous: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=tp)
    for name, rows in names:
        torch.manual_seed(0)
        model, batch = MODELS[name](CASE), token_batch(CASE, CASE["rows"])
        peak, logits = whole(model, batch)
        passes = interlace.Config(mesh={"dp": 1, "tp": tp}, tensor="model").pipeline(tp)
        config = interlace.Config(schedule=[], passes=passes.replace("sequence=true", f"sequence=true,regather={ROWS[rows]}"))
        with interlace.compile(model, torch.optim.AdamW(model.parameters()), causal_loss, batch, config) as trainer:
            for _ in range(3):
                trainer.step(batch)
            arena, own = trainer.stats()["arena"], trainer.summary()["activation_peak_bytes"]
            row: dict[str, Any] = {
                "row": f"{name} tp{tp} {rows}", "planned_bytes": arena["planned_bytes"], "top_bytes": arena["top_bytes"],
                "activations": own * tp / peak, "logits": largest_of_vocabulary(trainer.program, tp) / logits,
            }  # fmt: skip
        if rank == 0:
            print(
                f"{row['row']:<18} planned {row['planned_bytes'] / 1e6:8.3f} MB  top {row['top_bytes'] - row['planned_bytes']:+d} B  "
                f"activations {row['activations']:.3f} x whole / {tp}  logits {row['logits']:.3f} x whole", flush=True
            )  # fmt: skip
            with open(f"{rendezvous}.rows", "a") as f:
                f.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def measured(tp: int, names: list[tuple[str, str]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(worker, args=(tp, names, store), nprocs=tp)
        with open(f"{store}.rows") as f:
            return [json.loads(line) for line in f]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that a row's name must match")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for tp in (2, 4):
        names = [(name, rows) for name in MODELS for rows in ROWS if re.search(args.only, f"{name} tp{tp} {rows}")]
        if names:
            found += measured(tp, names)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
