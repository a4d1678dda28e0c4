"""transformers.Trainer whose training steps run as a compiled program. A script changes by the line that imports it:

    from interlace.integrations.transformers import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=more)       # interlace=Config(...) if wanted
    trainer.train()                                                                        # under torchrun on several ranks

Arguments, callbacks, schedulers, evaluation, checkpoints and resume are Transformers' own; its checkpoints are the same files. What
changes: the micro-batches of an optimizer step are collected and run by trainer.step, clipping included; the optimizer's states lie in
the trainer until they are saved. Other shapes of batches are compiled when first met; what ranks have in several lengths is filled up.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

import interlace
from interlace.config import Config
from interlace.errors import InterlaceError
from interlace.integrations.padding import FILL, Sizes, filled, sizes_of

Tensor = torch.Tensor
WEIGHT = "interlace_weight"  # an entry of every micro-batch: 0 for one that only fills the last step of an epoch
ITEMS = "num_items_in_batch"
ROUND = 64  # tokens
NO_CLIP = 1e30  # a limit that no gradient reaches: the norm is computed, for the log


class _Made:
    """Stands in the loop for the optimizer: its step has been made by the time it is asked for."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, *_: Any) -> None:
        pass

    def zero_grad(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class _Loss:
    """The loss of a micro-batch as transformers computes it. Of a class of this package, so that nobody looks into the whole trainer."""

    def __init__(self, owner: Trainer, outputs: bool) -> None:
        self.owner, self.outputs = owner, outputs

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        inputs = dict(batch)
        weight, items = inputs.pop(WEIGHT, None), inputs.pop(ITEMS, None)
        with self.owner.compute_loss_context_manager(), self.owner.autocast():
            found: Any = self.owner.compute_loss(model, inputs, return_outputs=self.outputs, num_items_in_batch=items)
        if not self.outputs:
            return found if weight is None else found * weight.to(found.dtype)
        loss, outputs = found
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
        kept = {str(k): v for k, v in named.items() if k not in (*ignored, "loss") and isinstance(v, Tensor)}
        return {"loss": loss, **kept}


class Trainer(transformers.Trainer):
    """transformers.Trainer on compiled steps; `interlace`: an interlace.Config whose strategy, memory_limit and so on are used (accumulation,
    clip_norm, seed and mixed precision come from TrainingArguments).

    `compiled`: the interlace.Trainer, once the first step was made. Errors: what cannot be trained so is named when training begins.
    """

    def __init__(self, *args: Any, interlace: Config | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.compiled: Any = None
        self.optimizer: Any
        self.lr_scheduler: Any
        self._settings = interlace or Config()
        self._waiting: list[dict[str, Any]] = []  # micro-batches of the step under way
        self._first: Sizes | None = None  # of the first step's batches
        self._loss, self._loss_and_outputs = _Loss(self, False), _Loss(self, True)

    # ---- the loop ----

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._check()
        self._give_back()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        optimizer = self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.optimizer = _Made(optimizer)
        model: Any = self.model
        self.model_wrapped = model
        self.accelerator._models.append(model)  # so that evaluation takes it as it is
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._waiting = []
        return model, train_dataloader

    def _check(self) -> None:
        args = self.args
        wrong = {
            "deepspeed": self.is_deepspeed_enabled, "fsdp": self.is_fsdp_enabled, "torch_compile": args.torch_compile,
            "neftune_noise_alpha": args.neftune_noise_alpha is not None, "auto_find_batch_size": args.auto_find_batch_size,
            "n_gpu > 1 (start it with torchrun, a process a GPU)": args.n_gpu > 1,
        }  # fmt: skip
        for name, asked in wrong.items():
            if asked:
                raise InterlaceError(f"TrainingArguments has {name}, which a compiled step does not do; leave it out")
        if dict(self._settings.axes or ()).keys() & {"tp", "pp"}:
            raise InterlaceError(
                "transformers gives every rank a batch of its own, which axes tp and pp of the mesh do not have; leave them out, or use "
                "interlace.compile with a loop of your own"
            )

    def _give_back(self) -> None:
        """An earlier training ends: the model gets its parameters, the optimizer its states."""
        if self.compiled is None:
            return
        state = self.compiled.optimizer_state_dict(all_ranks=True)
        with self.compiled.whole_parameters(changes=False):
            self.compiled.close()
        self.compiled, self.optimizer = None, self.optimizer.optimizer
        self.optimizer.load_state_dict(state)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        batch = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            batch[ITEMS] = torch.as_tensor(num_items_in_batch)
        self._waiting.append(batch)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        sizes = self._rounded(sizes_of(batches))
        parts = self._weighted([filled(b, sizes, self._pad_id()) for b in batches], num_items_in_batch is not None)
        if self.compiled is None:
            self._compile(parts, sizes)
        loss: Tensor = self.compiled.step(parts if len(parts) > 1 else parts[0])
        return loss.detach()

    def _weighted(self, batches: list[dict[str, Any]], items: bool) -> list[dict[str, Any]]:
        """As many micro-batches as a step has, with weights whose mean is the sum that transformers makes."""
        count = self.args.gradient_accumulation_steps
        if count == 1:
            return batches
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items) or self.compute_loss_func is not None
        one = torch.tensor(float(count) if scaled else count / len(batches), dtype=torch.float64, device=self.args.device)
        made = [{**b, WEIGHT: one} for b in batches]
        return made + [{**batches[-1], WEIGHT: torch.zeros_like(one)} for _ in range(count - len(batches))]

    def _rounded(self, sizes: Sizes) -> Sizes:
        """Lengths of text up to a multiple of ROUND, so that few programs are compiled, where a mask says what is text."""
        if "attention_mask" not in sizes or self._first is None:
            self._first = sizes
            return sizes
        length = sizes["attention_mask"][-1]
        if length == self._first.get("attention_mask", (0,))[-1]:
            return sizes
        most = getattr(getattr(self.model, "config", None), "max_position_embeddings", None) or 2**30
        wide = max(length, min(-(-length // ROUND) * ROUND, most))
        return {n: (*s[:-1], wide) if n in FILL and s[-1] == length else s for n, s in sizes.items()}

    def _pad_id(self) -> int:
        for holder in (self.processing_class, getattr(self.model, "config", None)):
            found = getattr(holder, "pad_token_id", None)
            if isinstance(found, int):
                return found
        return 0

    def autocast(self) -> Any:
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return torch.autocast(self.args.device.type, dtype=dtype, enabled=dtype is not None)

    def _compile(self, parts: list[dict[str, Any]], sizes: Sizes) -> None:
        args = self.args
        clip = float(args.max_grad_norm) if args.max_grad_norm and args.max_grad_norm > 0 else NO_CLIP
        more: dict[str, Any] = {"param_dtype": "autocast"} if args.bf16 or args.fp16 else {}
        if args.fp16:
            more["loss_scale"] = "dynamic"
        config = dataclasses.replace(
            self._settings, accumulation=args.gradient_accumulation_steps, clip_norm=clip, seed=args.seed,
            shapes={n: [s] for n, s in sizes.items()}, pad=dict.fromkeys(sizes, 0), **more,
        )  # fmt: skip
        example = parts if len(parts) > 1 else parts[0]
        self.compiled = interlace.compile(self.model_wrapped, self.optimizer.optimizer, self._loss, example, config)
        self.compiled.accept_any_shape()

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.compiled.norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.compiled.norm

    # ---- evaluation ----

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        labelled = len(self.label_names) > 0 and all(inputs.get(k) is not None for k in self.label_names)
        if self.compiled is None or not labelled or ignore_keys is not None:
            if self.compiled is None:
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            with self.compiled.whole_parameters(changes=False):
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        batch = dict(self._prepare_inputs(inputs))
        items = self._get_num_items_in_batch([batch], self.args.device)
        labels = tuple(batch[name].detach() for name in self.label_names)
        batch = filled(batch, sizes_of([batch]), self._pad_id())
        if items is not None:
            batch[ITEMS] = torch.as_tensor(items)
        outputs = self.compiled.evaluate(batch, self._loss if prediction_loss_only else self._loss_and_outputs)
        loss = outputs.pop("loss")
        if prediction_loss_only:
            return loss, None, None
        logits = tuple(outputs.values())
        return loss, logits[0] if len(logits) == 1 else logits, labels[0] if len(labels) == 1 else labels

    # ---- checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.compiled is None:
            super().save_model(output_dir, _internal_call)
            return
        with self.compiled.whole_parameters(changes=False, all_ranks=False):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.compiled is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.compiled.optimizer_state_dict()
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_best_model(self) -> None:
        if self.compiled is None:
            super()._load_best_model()
            return
        with self.compiled.whole_parameters():
            super()._load_best_model()
