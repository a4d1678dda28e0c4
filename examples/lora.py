"""Fine-tunes a Hugging Face model with LoRA: the weights stay frozen, and only the adapter is trained and saved.

torchrun --nproc-per-node 2 examples/lora.py --model path/to/model --text text.txt --out adapter
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import interlace

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a folder with config.json, weights and a tokenizer")
parser.add_argument("--text", required=True)
parser.add_argument("--out", default="adapter", help="a folder that PeftModel.from_pretrained reads")
parser.add_argument("--rank", type=int, default=8, help="of the adapter's matrices")
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--batch", type=int, default=4, help="samples of a rank in a step")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

torch.manual_seed(0)  # the adapter's matrices begin the same on every rank
tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
model = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
model.config.use_cache = False
model = get_peft_model(
    model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
)

ids = torch.tensor(tokenizer(Path(args.text).read_text(), verbose=False)["input_ids"])
rows = torch.stack([part for part in ids.split(args.seq) if len(part) == args.seq])
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
example = {"input_ids": rows[: args.batch], "labels": rows[: args.batch]}
trainer = interlace.compile(model, optimizer, None, example, interlace.Config(clip_norm=1.0))
draw = torch.Generator().manual_seed(trainer.data_rank)
for step in range(args.steps):
    chosen = rows[torch.randint(len(rows), (args.batch,), generator=draw)]
    loss = trainer.step({"input_ids": chosen, "labels": chosen})
    if trainer.rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
trainer.save_pretrained(args.out)  # on every rank: rank 0 writes
trainer.close()
if dist.is_initialized():
    dist.destroy_process_group()
