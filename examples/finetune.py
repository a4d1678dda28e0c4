"""Fine-tunes a Hugging Face language model from a local folder, with the folder's own tokenizer: warm-up and cosine schedule,
evaluation, early stopping, and the best checkpoint kept as a folder that from_pretrained reads.

torchrun --nproc-per-node 2 examples/finetune.py --model path/to/model --train train.txt --valid valid.txt --out best
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

import interlace

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a folder with config.json, weights and a tokenizer")
parser.add_argument("--train", required=True, help="a text")
parser.add_argument("--valid", required=True, help="a text")
parser.add_argument("--out", default="best", help="where the best checkpoint goes")
parser.add_argument("--strategy", default="shard", help="shard, zero1 or replicate")
parser.add_argument("--seq", type=int, default=256, help="tokens of a sample")
parser.add_argument("--batch", type=int, default=8, help="samples of a rank in a step")
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches that they are cut into")
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--steps", type=int, default=1000, help="at most")
parser.add_argument("--eval-every", type=int, default=50, help="steps")
parser.add_argument("--patience", type=int, default=3, help="evaluations without progress before it stops")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
model = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
model.config.use_cache = False


def samples(file: str) -> list[dict[str, torch.Tensor]]:
    """The text, tokenized and cut into samples of --seq tokens."""
    ids = torch.tensor(tokenizer(Path(file).read_text(), verbose=False)["input_ids"])
    return [{"input_ids": part, "labels": part} for part in ids.split(args.seq) if len(part) == args.seq]


config = interlace.Config(strategy=args.strategy, accumulation=args.accumulation, clip_norm=1.0)
train, valid = samples(args.train), samples(args.valid)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)
example = {name: torch.stack([train[0][name]] * args.batch) for name in train[0]}
trainer = interlace.compile(model, optimizer, None, example, config)  # None: the loss is model(**batch).loss
rank, ranks = trainer.data_rank, trainer.data_ranks
sampler = DistributedSampler(train, ranks, rank, seed=0)
loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)


def evaluate() -> float:
    """The mean loss over the whole validation text; each rank takes every ranks-th sample."""
    total = torch.zeros(2, dtype=torch.float64)
    count = len(valid) // ranks // args.batch * args.batch * ranks  # as many batches on every rank
    for i in range(rank * args.batch, count, ranks * args.batch):
        batch = {name: torch.stack([sample[name] for sample in valid[i : i + args.batch]]) for name in valid[0]}
        total += torch.tensor([trainer.evaluate(batch)["loss"].item(), 1.0])
    if ranks > 1:
        dist.all_reduce(total)
    return float(total[0] / total[1])


def say(text: str) -> None:
    if trainer.rank == 0:
        print(text, flush=True)


# The files beside the weights that from_pretrained wants, too.
beside = {
    f.name: f.read_bytes() for f in Path(args.model).iterdir() if f.name.startswith(("config", "generation", "token", "special"))
}
best, worse, epoch = evaluate(), 0, 0
say(f"step 0 valid {best:.4f}")
while trainer.steps < args.steps and worse < args.patience:
    sampler.set_epoch(epoch)
    epoch += 1
    for batch in loader:
        loss = trainer.step(batch)
        scheduler.step()
        if trainer.steps % args.eval_every == 0 or trainer.steps == args.steps:
            found = evaluate()
            say(f"step {trainer.steps} train {loss.item():.4f} valid {found:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
            worse = 0 if found < best else worse + 1
            if found < best:
                best = found
                trainer.save(args.out, beside)
        if trainer.steps == args.steps or worse == args.patience:
            break
say(f"best {best:.4f} in {args.out}" + (f"; stopped early at step {trainer.steps}" if worse == args.patience else ""))
trainer.close()
if dist.is_initialized():
    dist.destroy_process_group()
