"""A model built on meta and trained on several ranks: each rank's peak against what it must hold.

The bound is: shard and optimizer states + activations + twice the largest unit + its receive buffer. The largest unit is named.

    python bench/sharded_memory.py
    python bench/sharded_memory.py --ranks 4 --hidden 512 --layers 12 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import causal_loss, token_batch

import interlace
from interlace import _core
from interlace.capture import capture
from interlace.models import on_meta


def activation_peak(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Highest bytes of activations alone: the same model as one resident rank runs it, gradients in their own state."""
    program = _core.Program.parse(capture(model, causal_loss, batch).text)
    program.run_passes("canonicalize,replicate(ranks=1)")
    return program.summary()["activation_peak_bytes"]


def worker(rank: int, ranks: int, args: argparse.Namespace, rendezvous: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    case = {"vocab": args.vocab, "tokens": args.tokens}
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=args.vocab,
        use_cache=False,
    )
    with on_meta():
        model = LlamaForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    trainer = interlace.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        causal_loss,
        token_batch(case, rank=rank),
        interlace.Config(strategy="shard", clip_norm=1.0, schedule=[]),
    )
    for step in range(3):
        trainer.step(token_batch(case, seed=step, rank=rank))
    summary, stats = trainer.summary(), trainer.stats()
    largest = summary["largest_unit"]
    states = summary["persistent_bytes"] + summary["step_bytes"]  # shard, two moments, and the shard of the gradients
    activations = activation_peak(model, token_batch(case))
    bound = states + activations + 2 * largest["bytes"] + stats["receive_buffer_peak_bytes"]
    mine = {
        "rank": rank,
        "parameters": count,
        "peak_bytes": stats["peak_bytes"],
        "bound_bytes": bound,
        "ratio": stats["peak_bytes"] / bound,
        "states_bytes": states,
        "activation_peak_bytes": activations,
        "largest_unit": largest["name"],
        "largest_unit_bytes": largest["bytes"],
        "receive_buffer_bytes": stats["receive_buffer_peak_bytes"],
        "whole_model_and_states_bytes": 16 * count,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    rows: list = [None] * ranks
    dist.all_gather_object(rows, mine)
    if rank == 0:
        mib = 2**20
        print(
            f"{count / 1e6:.1f} M parameters on {ranks} ranks; the whole model with its states is {16 * count / mib:.0f} MiB"
        )
        for r in rows:
            print(
                f"rank {r['rank']}: peak {r['peak_bytes'] / mib:.1f} MiB, bound {r['bound_bytes'] / mib:.1f} MiB, ratio {r['ratio']:.3f} "
                f"(states {r['states_bytes'] / mib:.1f}, activations {r['activation_peak_bytes'] / mib:.1f}, largest unit "
                f"{r['largest_unit']} {r['largest_unit_bytes'] / mib:.1f}, receive buffer {r['receive_buffer_bytes'] / mib:.1f}); "
                f"resident {r['resident_bytes'] / mib:.0f} MiB"
            )
        if args.json:
            with open(args.json, "w") as f:
                json.dump(rows, f, indent=1)
    trainer.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args.ranks, args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
