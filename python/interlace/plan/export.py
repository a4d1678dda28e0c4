"""Plans as settings of other systems, with what those cannot say.

    export_plan(plan, "torchtitan", "settings/")     # settings/train.toml
    export_plan(plan, "megatron", "settings/")       # settings/arguments.txt: one argument a line
    export_plan(plan, "deepspeed", "settings/")      # settings/deepspeed.json

Each of them has one (dp, tp, ZeRO, micro-batch) for all stages. Where the plan's stages differ the first stage's value is
written and the difference is reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace.errors import InterlaceError

Plan = dict[str, Any]
KINDS = ("weights", "gradients", "states", "activations")


def export_plan(plan: Plan, system: str, folder: str, ignore: tuple[str, ...] = ()) -> list[tuple[str, list[str]]]:
    """Writes the settings; gives each file with what it cannot say. Error: unknown system, a folder that cannot be written."""
    writers: dict[str, tuple[str, Callable[[Plan, tuple[str, ...]], tuple[str, list[str]]]]] = {
        "torchtitan": ("train.toml", torchtitan), "megatron": ("arguments.txt", megatron),
        "deepspeed": ("deepspeed.json", deepspeed),
    }  # fmt: skip
    if system not in writers:
        raise InterlaceError(f"plans are exported for {', '.join(writers)}, not for '{system}'")
    name, writer = writers[system]
    text, left_out = writer(plan, ignore)
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InterlaceError(f"cannot write {path}: {error.strerror}") from None
    return [(str(path), left_out)]


def torchtitan(plan: Plan, _: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    stages, first = plan["stages"], plan["stages"][0]
    left = _uneven(plan, ("dp", "tp", "micro_batch", "zero")) + _offloads(stages)
    pipeline = len(stages) > 1
    b, dp = first["micro_batch"], first["dp"]
    if first["zero"] == 1:
        left.append("ZeRO 1: FSDP2 shards gradients too (fsdp_reshard_after_forward = never is ZeRO 2)")
    lines = [
        f"# {plan['model']}, {plan['blocks']} blocks, on {plan['devices']} devices; predicted {plan['step_us'] / 1e6:.3f} s a step",
        "[training]",
        # With a pipeline a rank's whole batch goes through the schedule, which cuts it; without, gradients are accumulated.
        f"local_batch_size = {b * plan['accumulation'] if pipeline else b}",
        f"global_batch_size = {plan['global_batch']}",
        f"seq_len = {plan['sequence']}",
        f'mixed_precision_param = "{plan["dtype"]}"',
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {dp if first['zero'] == 0 else 1}",
        f"data_parallel_shard_degree = {1 if first['zero'] == 0 else dp}",
        f'fsdp_reshard_after_forward = "{"always" if first["zero"] == 3 else "never"}"',
        f"tensor_parallel_degree = {first['tp']}",
        f"pipeline_parallel_degree = {len(stages)}",
    ]
    if pipeline:
        parts = []
        for stage in stages:
            names = [f"layers.{i}" for i in range(stage["first_block"], stage["first_block"] + stage["layers"])]
            parts.append((["tok_embeddings"] if stage["embedding"] else []) + names + (["norm", "output"] if stage["head"] else []))
        lines += [
            'pipeline_parallel_schedule = "1F1B"', f"pipeline_parallel_microbatch_size = {b}",
            f"module_fqns_per_model_part = {json.dumps(parts)}",
        ]  # fmt: skip
    mode, note = _recompute_mode(stages)
    left += [note] if note else []
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append('selective_ac_option = "op"')
    return "\n".join(lines) + "\n", left


def megatron(plan: Plan, ignore: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    from interlace.models import config_of

    stages, first = plan["stages"], plan["stages"][0]
    config = config_of(plan["model"], plan["sequence"], ignore)
    left = _uneven(plan, ("dp", "tp", "micro_batch", "zero"))
    words = [
        f"--num-layers {plan['blocks']}", f"--hidden-size {config.hidden_size}",
        f"--num-attention-heads {config.num_attention_heads}", f"--seq-length {plan['sequence']}",
        f"--max-position-embeddings {plan['sequence']}", f"--micro-batch-size {first['micro_batch']}",
        f"--global-batch-size {plan['global_batch']}", f"--tensor-model-parallel-size {first['tp']}",
        f"--pipeline-model-parallel-size {len(stages)}",
    ]  # fmt: skip
    if first["tp"] > 1:
        words.append("--sequence-parallel")
    if plan["dtype"] == "bfloat16":
        words.append("--bf16")
    if plan["flash_attention"]:
        words.append("--attention-backend flash")
    words += {
        0: [],
        1: ["--use-distributed-optimizer"],
        2: ["--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads"],
        3: ["--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"],
    }[first["zero"]]
    layers = [stage["layers"] for stage in stages]
    if len(set(layers)) > 1:
        if len(set(layers[1:-1])) <= 1:
            words += [f"--decoder-first-pipeline-num-layers {layers[0]}", f"--decoder-last-pipeline-num-layers {layers[-1]}"]
        else:
            left.append(f"layers by stage {layers}: only the first and the last stage may differ from the others")
    full = {stage["full"] for stage in stages}
    if full != {0}:
        if any(stage["selective"] for stage in stages):
            left.append("stages that recompute some blocks in full and others selectively: written as full")
        words += ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {max(full)}"]
        if len(full) > 1:
            left.append(f"recomputed blocks by stage {[stage['full'] for stage in stages]}: one number for all, the largest")
    elif any(stage["selective"] for stage in stages):
        words.append("--recompute-granularity selective")
        if any(stage["selective"] != stage["layers"] for stage in stages):
            left.append("selective recomputation of some blocks only: all of them do it")
    states = max(stage["offload"]["states"] for stage in stages)
    if states > 0:
        words += ["--use-precision-aware-optimizer", "--optimizer-cpu-offload", f"--optimizer-offload-fraction {states:g}"]
        left.append("offloaded states come back for the update: there the host makes it")
    left += _offloads(stages, ("weights", "gradients", "activations"))
    return "\n".join(words) + "\n", left


def deepspeed(plan: Plan, _: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    stages, first = plan["stages"], plan["stages"][0]
    left = _uneven(plan, ("dp", "tp", "micro_batch", "zero"))
    zero: dict[str, Any] = {"stage": first["zero"], "overlap_comm": True, "contiguous_gradients": True}
    out: dict[str, Any] = {
        "train_batch_size": plan["global_batch"], "train_micro_batch_size_per_gpu": first["micro_batch"],
        "gradient_accumulation_steps": plan["accumulation"], "bf16": {"enabled": plan["dtype"] == "bfloat16"},
        "zero_optimization": zero,
    }  # fmt: skip
    offload = first["offload"]
    if offload["states"] > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if first["zero"] == 3:
            zero["offload_optimizer"]["ratio"] = offload["states"]
        elif offload["states"] < 1:
            left.append(f"states {100 * offload['states']:.3g} % on the host: below ZeRO 3 all or nothing")
        left.append("offloaded states come back for the update: there the host makes it")
    if offload["weights"] > 0:
        if first["zero"] == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if first["zero"] < 3 or offload["weights"] < 1:
            left.append(f"weights {100 * offload['weights']:.3g} % on the host: all of them, and with ZeRO 3 only")
    left += _offloads(stages, ("gradients",))
    if any(stage["full"] for stage in stages):
        out["activation_checkpointing"] = {"partition_activations": first["tp"] > 1, "cpu_checkpointing": offload["activations"] > 0}
        mode, note = _recompute_mode(stages)
        left.append("which blocks are recomputed is the model's code" + (f" ({note})" if mode and note else ""))
    elif any(stage["selective"] for stage in stages):
        left.append("selective recomputation: it is the model's code")
    if 0 < offload["activations"] < 1:
        left.append(f"activations {100 * offload['activations']:.3g} % on the host: all of the checkpoints or none")
    if len(stages) > 1:
        left.append(
            f"{len(stages)} pipeline stages are PipelineModule's arguments, blocks {[s['layers'] for s in stages]}; it runs with ZeRO 0 or 1"
        )
    if first["tp"] > 1:
        left.append(f"tensor parallel {first['tp']} is the model's code (mpu)")
    return json.dumps(out, indent=2) + "\n", left


# ---- what has no words ----


def _uneven(plan: Plan, keys: tuple[str, ...]) -> list[str]:
    out = []
    for key in keys:
        values = [stage[key] for stage in plan["stages"]]
        if len(set(values)) > 1:
            out.append(f"{key.replace('_', '-')} by stage {values}: one for all, {values[0]} is written")
    return out


def _offloads(stages: list[dict[str, Any]], kinds: tuple[str, ...] = KINDS) -> list[str]:
    out = []
    for kind in kinds:
        shares = [stage["offload"][kind] for stage in stages]
        if any(shares):
            out.append(f"{kind} on the host, by stage " + ", ".join(f"{100 * share:.3g} %" for share in shares))
    return out


def _recompute_mode(stages: list[dict[str, Any]]) -> tuple[str, str]:
    """One mode for all blocks, and what differs from it."""
    kinds = {"full": sum(stage["full"] for stage in stages), "selective": sum(stage["selective"] for stage in stages)}
    kinds["none"] = sum(stage["layers"] for stage in stages) - kinds["full"] - kinds["selective"]
    mode = "full" if kinds["full"] else "selective" if kinds["selective"] else "none"
    if kinds[mode] == sum(kinds.values()):
        return mode, ""
    said = "; ".join(
        f"stage {i}: {stage['full']} full, {stage['selective']} selective of {stage['layers']}" for i, stage in enumerate(stages)
    )
    return mode, f"recomputation of some blocks only ({said}): {mode} is written for all, which needs less memory and takes longer"
