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
import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

import interlace
from interlace.capture.reach import mentions
from interlace.capture.sites import is_installed
from interlace.config import Config
from interlace.dist.peers import PeerError
from interlace.errors import InterlaceError
from interlace.integrations.losses import ITEMS, ROWS, WEIGHT, Loss, keeping_statistics, nested, unheard
from interlace.integrations.padding import Sizes, filled, positions_of, rounded, sizes_of
from interlace.integrations.unseen import Dimensions, Near, Unseen

Tensor = torch.Tensor
log = logging.getLogger("interlace")
FORMS = 8  # sizes that are compiled
NO_CLIP = 1e30  # a limit that no gradient reaches: the norm is computed, for the log


class _Made:
    """Stands in the loop for the optimizer: its step has been made by the time it is asked for."""

    def __init__(self, optimizer: torch.optim.Optimizer, owner: Trainer) -> None:
        self.optimizer, self._owner, self._mode = optimizer, weakref.proxy(owner), ""

    @property
    def step_was_skipped(self) -> bool:
        """As accelerate asks it, so that a scheduler waits."""
        return bool(self._owner.compiled is not None and self._owner.compiled.skipped)

    def turn(self, mode: str) -> None:
        """`train` and `eval` of an optimizer without a schedule: evaluations have other parameters, which it makes of its states."""
        if callable(switch := getattr(self.optimizer, mode, None)) and mode != self._mode:
            switch()
            self._mode = mode

    def step(self, *_: Any) -> None:
        pass

    def zero_grad(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.optimizer, name)
        return functools.partial(self.turn, name) if name in ("train", "eval") and callable(found) else found


class Trainer(transformers.Trainer):
    """transformers.Trainer on compiled steps; `interlace`: an interlace.Config whose strategy, memory_limit and so on are used (accumulation,
    clip_norm, seed and mixed precision come from TrainingArguments). Other trainers take it up as a base: class My(Trainer, SFTTrainer).

    `compiled`: the interlace.Trainer, once the first step was made. Errors: what cannot be trained so is named when training begins.
    """

    def __init__(self, *args: Any, interlace: Config | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.compiled: Any = None
        self.optimizer: Any
        self.lr_scheduler: Any
        self._settings = interlace or Config()
        self._waiting: list[dict[str, Any]] = []  # micro-batches of the step under way
        self._first: dict[bool, dict[str, int]] = {}  # lengths of the first step's texts, and of the first evaluation's
        self._unseen, self._clip = Unseen(), 0.0
        self._beside: dict[str, float] = {}  # numbers of the batches
        self._others: set[Any] = set()  # sizes of entries that are no texts
        self._as_they_are = False  # no program takes all batches: what has none runs in Python
        self.quiet = False  # while what a loss does is undone
        self._loss, self._loss_and_outputs = Loss(self, False), Loss(self, True)

    # ---- the loop ----

    def train(self, *args: Any, **more: Any) -> Any:
        self.give_back()
        if isinstance(self.optimizer, _Made):
            self.optimizer = self.optimizer.optimizer
        return super().train(*args, **more)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._check()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        optimizer = self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.optimizer = _Made(optimizer, self)
        model: Any = self.model
        self.model_wrapped = model
        self.accelerator._models.append(model)  # so that evaluation takes it as it is
        self.accelerator._optimizers.append(self.optimizer)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._waiting, self._first, self._unseen, self._beside, self._others, self._as_they_are = [], {}, Unseen(), {}, set(), False
        return model, train_dataloader

    def _check(self) -> None:
        args = self.args
        wrong = {
            "deepspeed": self.is_deepspeed_enabled, "fsdp": self.is_fsdp_enabled or bool(args.fsdp), "torch_compile": args.torch_compile,
            "auto_find_batch_size": args.auto_find_batch_size,
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
        events = [(c, n) for c in self.callback_handler.callbacks for n in ("on_pre_optimizer_step", "on_optimizer_step")]
        for owner, name in [*events, (self, "training_step")]:
            code = getattr(getattr(type(owner), name, None), "__code__", None)
            if code is None or is_installed(code.co_filename):
                continue
            if name == "on_pre_optimizer_step" or "grad" in mentions(code):
                raise InterlaceError(
                    f"{type(owner).__name__}.{name} ({code.co_filename}:{code.co_firstlineno}) runs where the loop has gradients and the "
                    "step is still to be made; a compiled step has made it by then and leaves no gradients. Read trainer.compiled.norm in "
                    "on_step_end, change param_groups in on_step_begin, and what changes gradients belongs into the loss"
                )

    def give_back(self) -> None:
        """The model gets its parameters, the optimizer its states; a training step compiles again."""
        if self.compiled is None:
            return
        state = self.compiled.optimizer_state_dict(all_ranks=True)
        with self.compiled.whole_parameters(changes=False):
            self.compiled.close()
        self.compiled = None
        self.optimizer.optimizer.load_state_dict(state)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        self.optimizer.turn("train")
        batch = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            batch[ITEMS] = torch.as_tensor(num_items_in_batch)
        self._waiting.append(batch)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        if len(batches) > self.args.gradient_accumulation_steps:
            raise InterlaceError(
                "an epoch was stopped within a step (should_epoch_stop in on_substep_end), whose micro-batches would count in the next step; "
                "stop it in on_step_end"
            )
        if self.compiled is not None and self._clip != self.args.max_grad_norm:  # a callback's
            self.give_back()
        sizes = self._sizes_of_few(batches, num_items_in_batch is not None)
        parts = self._parts(batches, sizes, num_items_in_batch is not None)
        if self.compiled is None:
            self._compile(parts)
        loss: Tensor = self.compiled.step(parts if len(parts) > 1 else parts[0])
        return loss.detach()

    def _sizes_of_few(self, batches: list[dict[str, Any]], items: bool) -> Sizes | None:
        """Sizes that few programs are enough for, filled up; None: the batches are as they are."""
        if self._as_they_are:
            return None
        beside = {n: x for b in batches for n, x in b.items() if type(x) in (int, float)}
        other = next((n for b in batches for n, x in b.items() if n in beside and x != self._beside.get(n, x)), None)
        self._beside |= beside
        try:
            sizes = sizes_of(batches, f"batch entry '{other}' is a number beside the tensors that changes (packed texts)" if other else "")
        except InterlaceError as e:
            self._take_as_they_are(str(e).partition(";")[0], e)
            return None
        if self.compiled is None:
            self._first[True] = sizes.lengths()
            self._compile(self._parts(batches, sizes, items))
        wide, found = self._wide(batches[0], sizes, self._loss)
        self._others.add(tuple((n, s[1:]) for n, s in sizes.largest.items() if n not in sizes.texts))
        if len(self._others) > FORMS and self.can_take_any:
            self._take_as_they_are(f"there have been {FORMS} sizes of what cannot be filled up ({dict(max(self._others))})", None)
            return None
        if found is not None:
            return wide
        why = f"the loss of {type(self.model).__name__} changes with the padding behind a text"
        if wide is None or self.can_take_any:
            self._take_as_they_are(why, None)
            return None
        log.warning("%s: each length that comes is compiled; a data collator that pads to one length needs one program", why)
        return wide

    @property
    def can_take_any(self) -> bool:
        """Whether steps may run in Python, on batches as they are."""
        args, settings = self.args, self._settings
        return settings.mode == "compiled" and settings.output_dtype is None and (args.bf16 or args.fp16 or settings.param_dtype is None)

    def _take_as_they_are(self, why: str, error: InterlaceError | None) -> None:
        """From now on no batch is filled up. Error: where no step may run in Python."""
        if not self.can_take_any:
            raise error or InterlaceError(
                f"{why}, and a step has several lengths; have the data collator pad to one length (padding='max_length'), or take "
                "gradient_accumulation_steps=1 on one rank"
            )
        log.warning(
            "batches are taken as they are from now on: %s. Up to eight forms that all ranks and micro-batches have are compiled, other "
            "steps run in Python, which may be slower: a data collator that pads to one length (padding='max_length') needs one program", why,
        )  # fmt: skip
        self.give_back()
        self._as_they_are = True

    def _wide(self, batch: dict[str, Any], sizes: Sizes, loss: Loss) -> tuple[Sizes | None, Dimensions | None]:
        """Lengths that few programs are enough for, where neither loss nor outputs change with padding, and which dimensions of outputs are
        such; else the sizes as they are, or None where they must be padded, and no dimensions."""
        model: Any = self.model
        training = loss is self._loss and model.training
        most = positions_of(getattr(model, "config", None))
        wide = rounded(sizes, self._first.setdefault(training, sizes.lengths()), most)
        if wide == sizes and not sizes.uneven:
            return sizes, {}
        found = None
        if not (training and keeping_statistics(model)):
            near = Near.of(model, bool(self.args.bf16 or self.args.fp16))
            with unheard(self):
                found = self._unseen.of(batch, sizes, lambda b: self.compiled.evaluate(b, loss), loss.outputs, most, near, self._pad_id())
        if found is not None:
            return wide, found
        return (None if sizes.uneven else sizes), None

    def _parts(self, batches: list[dict[str, Any]], sizes: Sizes | None, items: bool) -> list[dict[str, Any]]:
        """As many micro-batches as a step has, in one form where sizes say so, with weights whose mean is the sum that transformers makes."""
        made = batches if sizes is None else [filled(b, sizes, self._pad_id()) for b in batches]
        count = self.args.gradient_accumulation_steps
        if count == 1 and self.args.world_size == 1:
            return made
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items) or self.compute_loss_func is not None
        self._loss.short = short = {} if sizes is None else sizes.short
        one = float(count) if scaled else count / len(batches)
        few = [any(b[n].shape[0] == rows for n, rows in short.items()) for b in batches]
        most = 1 if sizes is None else max((s[0] for s in sizes.largest.values()), default=1)
        rows = torch.zeros(next(iter(short.values()), most), device=self.args.device)
        weights = torch.tensor([[0.0, one] if f else [one, 0.0] for f in few], dtype=torch.float64, device=self.args.device)
        made = [{**b, WEIGHT: w, ROWS: rows} for b, w in zip(made, weights, strict=True)]
        return made + [{**made[-1], WEIGHT: torch.zeros_like(weights[0])} for _ in range(count - len(batches))]

    def _pad_id(self) -> int:
        for holder in (self.processing_class, getattr(self.model, "config", None)):
            found = getattr(holder, "pad_token_id", None)
            if isinstance(found, int):
                return found
        return 0

    def autocast(self) -> Any:
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return torch.autocast(self.args.device.type, dtype=dtype, enabled=dtype is not None)

    def _compile(self, parts: list[dict[str, Any]]) -> None:
        args, self._clip = self.args, self.args.max_grad_norm
        clip = float(args.max_grad_norm) if args.max_grad_norm and args.max_grad_norm > 0 else NO_CLIP
        more: dict[str, Any] = {"param_dtype": "autocast"} if args.bf16 or args.fp16 else {}
        if args.fp16:
            more["loss_scale"] = "dynamic"
        sizes = {n: tuple(t.shape) for n, t in parts[0].items() if isinstance(t, Tensor) and t.dim() and n != WEIGHT}
        compiles = self._settings.mode == "compiled" and not self._as_they_are  # the model's own Python takes any shape
        if self._as_they_are:
            more["fullgraph"] = False
        if compiles:
            more |= {"shapes": {n: [s] for n, s in sizes.items()}, "pad": dict.fromkeys(sizes, 0)}
        count = args.gradient_accumulation_steps
        config = dataclasses.replace(self._settings, accumulation=count, clip_norm=clip, seed=args.seed, **more)
        example = parts if len(parts) > 1 else parts[0]
        self.compiled = interlace.compile(self.model_wrapped, self.optimizer.optimizer, self._loss, example, config)
        if compiles:
            self.compiled.accept_any_shape()

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.compiled is None:
            raise InterlaceError(
                f"{type(self).__name__}.training_step made no compiled step: it has to end in super().training_step(model, inputs, "
                "num_items_in_batch), and what it computes otherwise belongs into compute_loss"
            )
        return self.compiled.norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model)

    def log(self, *args: Any, **more: Any) -> None:
        if not self.quiet:
            super().log(*args, **more)

    # ---- evaluation ----

    def evaluation_loop(self, *args: Any, **more: Any) -> Any:
        if self.compiled is not None and not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval):
            self.give_back()  # the model is cast, as it is when training has ended
        return super().evaluation_loop(*args, **more)

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        eager = functools.partial(super().prediction_step, model, inputs, prediction_loss_only, ignore_keys)
        if self.compiled is None:
            return eager()
        labelled = len(self.label_names) > 0 and all(inputs.get(k) is not None for k in self.label_names)
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if not labelled or ignore_keys is not None or generates or _predicts_otherwise(type(self)):
            return self._eagerly(eager)
        batch = dict(self._prepare_inputs(inputs))
        items = self._get_num_items_in_batch([batch], self.args.device)
        labels = tuple(batch[name].detach() for name in self.label_names)
        if items is not None:
            batch[ITEMS] = torch.as_tensor(items)
        loss_fn = self._loss if prediction_loss_only else self._loss_and_outputs
        try:
            sizes = sizes_of([batch])
        except InterlaceError:
            return self._eagerly(eager)
        wide, lengths = self._wide(batch, sizes, loss_fn)
        if wide is None or sizes.short:
            return self._eagerly(eager)
        outputs = self.compiled.evaluate(filled(batch, wide, self._pad_id()), loss_fn)
        loss = outputs.pop("loss")
        if prediction_loss_only:
            return loss, None, None
        for name, of in (lengths or {}).items():
            for dim, texts in of.items():
                outputs[name] = outputs[name].narrow(dim, 0, batch[texts[0]].shape[-1])
        logits = nested(outputs)
        return loss, logits[0] if len(logits) == 1 else logits, labels[0] if len(labels) == 1 else labels

    def _eagerly(self, step: Callable[[], Any]) -> Any:
        with self.compiled.whole_parameters(changes=False), self.autocast():
            return step()

    # ---- checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.compiled is None:
            super().save_model(output_dir, _internal_call)
            return
        try:
            with self.compiled.whole_parameters(changes=False, all_ranks=False):
                super().save_model(output_dir, _internal_call)
        except PeerError as e:
            raise PeerError(f"save_model() gathers what the ranks have: call it on every rank, rank 0 writes; here {e}", e.rank) from e

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


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer on compiled steps. What is generated for an evaluation is generated by the model in Python."""


def _predicts_otherwise(cls: type) -> bool:
    """Whether another library's trainer beneath has a prediction_step of its own."""
    beneath = cls.__mro__[cls.__mro__.index(Trainer) + 1 :]
    return any("prediction_step" in vars(c) for c in beneath if c not in (transformers.Trainer, transformers.Seq2SeqTrainer))
