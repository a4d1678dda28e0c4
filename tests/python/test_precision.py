"""Mixed precision: 16-bit parameters and gradients on the wire, float32 in the optimizer; against FSDP2's policy on real ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import interlace
from interlace.capture import Casts, capture
from interlace.config import Config, ConfigError
from interlace.errors import CaptureError
from interlace.train.loss_scale import LossScale

Tensor = torch.Tensor
STEPS = 30
# Largest relative distance of a step's loss, and of all weights, after 30 steps of AdamW; bf16 has 8 bits of mantissa (4e-3).
# FSDP2 itself comes as close to float32: 3.1e-3 and 1.9e-3 in the worst of these cases.
TO_FSDP2 = (2e-4, 2e-3)
TO_FLOAT32 = (6e-3, 4e-3)


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16):
        return zoo.CASES["llama"].loss(model, batch)


def by_fsdp2(case: str, model: nn.Module, accumulation: int, reduce: torch.dtype, param: torch.dtype) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    losses, model = parity.by_torch(case, model, "adamw", STEPS, 1.0, accumulation)
    return losses, {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def compare(case: str, config: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(loss, weight) distances to FSDP2 with the same policy and to training in float32."""
    first = zoo.build(case, torch.float32)
    accumulation = config.get("accumulation", 1)
    ours = parity.by_interlace(case, copy.deepcopy(first), "adamw", STEPS, 1.0, **config)
    plain = {k: v for k, v in config.items() if not k.endswith("_dtype") and k != "loss_scale"}
    wide = parity.by_interlace(case, copy.deepcopy(first), "adamw", STEPS, 1.0, **plain)
    param = getattr(torch, config["param_dtype"])
    reduce = getattr(torch, config.get("reduce_dtype") or config["param_dtype"])
    fsdp2 = by_fsdp2(case, copy.deepcopy(first), accumulation, reduce, param)
    assert all(v.dtype == torch.float32 for v in ours[1].values() if v.is_floating_point())
    return {
        "fsdp2": (parity.loss_distance(ours[0], fsdp2[0]), parity.weight_distance(ours[1], fsdp2[1])),
        "float32": (parity.loss_distance(ours[0], wide[0]), parity.weight_distance(ours[1], wide[1])),
        "fsdp2 to float32": (parity.loss_distance(fsdp2[0], wide[0]), parity.weight_distance(fsdp2[1], wide[1])),
    }


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {"reduce_dtype": "float32"}),
        ("llama", {}),
        ("gpt2", {"reduce_dtype": "float32", "accumulation": 2}),
        ("llama", {"accumulation": 2, "accumulate_mode": "reduce_last"}),
        ("gpt2", {"strategy": "zero1"}),
        ("vit", {"strategy": "replicate", "accumulation": 2}),
        ("llama", {"param_dtype": "float16", "reduce_dtype": "float32", "loss_scale": 256}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())) or "bfloat16",
)
def test_close_to_fsdp2(case: str, config: dict[str, Any]) -> None:
    dtypes = {"param_dtype": "bfloat16", "output_dtype": "float32"}
    found = ranks.run(compare, 2, case, {**dtypes, **config}, timeout_s=300)[0]
    print(case, config, found)
    assert all(x <= bound for x, bound in zip(found["fsdp2"], TO_FSDP2, strict=True)), found
    assert all(x <= bound for x, bound in zip(found["float32"], TO_FLOAT32, strict=True)), found


# ---- what travels ----


def bytes_of_steps(config: dict[str, Any], loss: str = "zoo") -> tuple[int, list[float], list[str], int]:
    """Bytes sent by two steps, their losses, the dtypes of the program's gathers and reductions, and the peak of live bytes."""
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    loss_fn = under_autocast if loss == "autocast" else zoo.CASES["llama"].loss
    settings = Config(timeout_s=60, **{"schedule": [], **config})
    batch = parity.batch_of("llama", 0, rank, settings.accumulation)
    with interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, batch, settings) as trainer:
        losses = [float(trainer.step(parity.batch_of("llama", step, rank, settings.accumulation))) for step in range(2)]
        starts = [
            line for line in trainer._run.source.text.splitlines() if "= gather.start" in line or "= reduce.start" in line
        ]
        stats = trainer.stats()
        return stats["bytes_sent"], losses, [line.split()[1].partition("[")[0] for line in starts], stats["peak_bytes"]


def test_half_the_bytes_travel() -> None:
    wide = ranks.run(bytes_of_steps, 2, {})[0]
    narrow = ranks.run(bytes_of_steps, 2, {"param_dtype": "bfloat16"})[0]
    gathers = ranks.run(bytes_of_steps, 2, {"param_dtype": "bfloat16", "reduce_dtype": "float32"})[0]
    reduces = ranks.run(bytes_of_steps, 2, {"reduce_dtype": "bfloat16"})[0]
    assert set(wide[2]) == {"f32"} and set(narrow[2]) == {"bf16"}
    assert narrow[0] * 2 == wide[0]
    # Gathers in forward and backward are more than reductions; each alone saves its half.
    assert narrow[0] < gathers[0] < reduces[0] < wide[0]
    assert (wide[0] - gathers[0]) + (wide[0] - reduces[0]) == wide[0] - narrow[0]


def test_accumulation_reduced_last_travels_in_16_bits() -> None:
    config = {"accumulation": 3, "accumulate_mode": "reduce_last"}
    wide = ranks.run(bytes_of_steps, 2, config)[0]
    narrow = ranks.run(bytes_of_steps, 2, {**config, "param_dtype": "bfloat16"})[0]
    assert narrow[0] * 2 == wide[0]


def test_casts_of_autocast_move_onto_shards() -> None:
    plain = ranks.run(bytes_of_steps, 2, {}, "autocast")[0]
    moved = ranks.run(bytes_of_steps, 2, {"param_dtype": "autocast"}, "autocast")[0]
    assert moved[1] == plain[1]  # the same bits
    assert set(plain[2]) == {"f32"} and set(moved[2]) == {"f32", "bf16"}
    # Without the move, the 16-bit copies of forward live until backward, so nothing is gathered twice, in twice the bytes.
    assert moved[0] <= plain[0]
    assert moved[3] < plain[3]


def test_kept_casts_of_autocast_travel_once() -> None:
    def passes(precision: str) -> dict[str, Any]:
        text = f"canonicalize,{precision}shard(axis=dp,ranks=2),unshard(units=all),update(clip=none,norm=auto,momentum=true)"
        return {"passes": text}

    plain = ranks.run(bytes_of_steps, 2, passes(""), "autocast")[0]
    moved = ranks.run(bytes_of_steps, 2, passes("precision(param=auto),"), "autocast")[0]
    assert moved[1] == plain[1]
    assert moved[0] < 0.8 * plain[0]


# ---- with other passes ----


@pytest.mark.parametrize(
    "passes",
    [
        "recompute(mode=full),precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2)",
        "precision(param=bf16,reduce=bf16),recompute(mode=full),shard(axis=dp,ranks=2)",
        "precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),bucket(modules=model.layers.*)",
        "precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),bucket(modules=model.layers.*,pack=copy)",
        "precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),bucket(mode=greedy)",
        "precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),prefetch,unshard(units=all)",
        "precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),reorder",
        "precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),search",
    ],
)
def test_other_passes_keep_the_bits(passes: str) -> None:
    plain = ranks.run(bytes_of_steps, 2, {"param_dtype": "bfloat16"})[0]
    config = {"param_dtype": "bfloat16", "passes": f"canonicalize,{passes},update(clip=none,norm=auto,momentum=true)"}
    other = ranks.run(bytes_of_steps, 2, config)[0]
    assert other[1] == plain[1]
    assert set(other[2]) == {"bf16"}
    assert other[0] <= plain[0]


# ---- capture and settings ----


def test_captured_casts() -> None:
    model = zoo.build("vit", torch.float32)
    captured = capture(
        model, zoo.CASES["vit"].loss, zoo.CASES["vit"].batch(2, 0), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        casts=Casts(torch.bfloat16, torch.float32),
    )  # fmt: skip
    params = set(captured.params.values())
    casts = [line for line in captured.text.splitlines() if "aten._to_copy(" in line and "{fwd" in line]
    of_params = [line for line in casts if int(line.split("_to_copy(%")[1].split(",")[0]) in params]
    assert len(of_params) == len(params) and all("dtype=bf16" in line for line in of_params)
    assert any("dtype=f32" in line for line in casts)  # the result
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)])
def test_norms_with_statistics_keep_their_parameters(norm: nn.Module) -> None:
    """PyTorch's batch_norm takes no parameters in 16 bits beside statistics in 32; the first step failed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 1), copy.deepcopy(norm), nn.ReLU(), nn.Conv1d(8, 1, 1))
    other = copy.deepcopy(model)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    def narrow(batch: Tensor) -> Tensor:
        cast = {n: p if n.startswith("1.") else p.bfloat16() for n, p in other.named_parameters()}
        return loss(lambda x: torch.func.functional_call(other, cast, (x.bfloat16(),)), batch)

    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    x = torch.randn(6, 4, 5)
    with interlace.compile(model, optimizer, loss, x, Config(cache="off", param_dtype="bfloat16")) as trainer:
        for _ in range(4):
            plain.zero_grad()
            expected = narrow(x)
            expected.backward()
            plain.step()
            assert trainer.step(x).item() == pytest.approx(expected.item(), rel=5e-3)
        other.eval()
        assert trainer.evaluate(x)["loss"].item() == pytest.approx(narrow(x).item(), rel=5e-3)


class WithTable(nn.Module):
    """A buffer is added before a product, so that what is multiplied is as wide as the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1, bias=False)
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x) + self.table)


def test_products_of_several_dtypes_are_refused_by_line() -> None:
    """Its first step failed, naming neither the setting nor a way."""
    model = WithTable()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4)
    said = r"test_precision.py:\d+: aten.mm takes operands of one dtype, and has float32 and bfloat16 .* in module 'out'.*=\"autocast\""
    with pytest.raises(CaptureError, match=said):
        interlace.compile(model, optimizer, loss, x, Config(cache="off", param_dtype="bfloat16"))
    with interlace.compile(model, optimizer, loss, x, Config(cache="off", param_dtype="autocast")) as trainer:
        assert trainer.step(x).isfinite()


def test_nothing_to_cast() -> None:
    model = zoo.build("vit", torch.bfloat16)
    with pytest.raises(CaptureError, match="param_dtype=bfloat16 changes nothing"):
        capture(model, zoo.CASES["vit"].loss, zoo.CASES["vit"].batch(2, 0), casts=Casts(torch.bfloat16))


def test_pipelines() -> None:
    def precision(**settings: Any) -> str:
        return Config(**settings).pipeline(2).split(",shard")[0]

    assert precision(param_dtype="bfloat16") == "canonicalize,precision(param=bf16,reduce=bf16)"
    assert (
        precision(param_dtype=torch.float16, reduce_dtype="float32") == "canonicalize,precision(param=f16,reduce=f32)"
    )
    assert precision(reduce_dtype="bfloat16") == "canonicalize,precision(param=none,reduce=bf16)"
    assert precision(param_dtype="autocast") == "canonicalize,precision(param=auto,reduce=none)"
    assert precision(output_dtype="float32") == "canonicalize"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"param_dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"param_dtype": "float32"}, "param_dtype must be one of 'bfloat16', 'float16', 'autocast', not 'float32'"),
        ({"reduce_dtype": "float64"}, "reduce_dtype must be one of"),
        ({"param_dtype": "bfloat16", "mode": "eager"}, "need mode='compiled'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


# ---- float16 and the loss scale ----


def losses_of(config: dict[str, Any], factor: float = 1.0, steps: int = 6) -> dict[str, Any]:
    """A run on a loss that is `factor` times as large."""
    rank, _ = parity.rank_and_size()
    model = zoo.build("llama", torch.float32)
    settings = Config(timeout_s=60, **{"schedule": [], **config})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-12)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return zoo.CASES["llama"].loss(model, batch).float() * factor

    batch = parity.batch_of("llama", 0, rank, 1)
    with interlace.compile(model, opt, loss, batch, settings) as trainer:
        out: dict[str, Any] = {"losses": [], "skipped": [], "norms": [], "scales": []}
        before = trainer.state_dict(all_ranks=True)
        for step in range(steps):
            out["losses"].append(float(trainer.step(parity.batch_of("llama", step, rank, 1))))
            out["skipped"].append(trainer.skipped)
            out["norms"].append(trainer.norm)
            out["scales"].append(trainer._run.loss_scale.value)
            if step == 0:
                after = trainer.state_dict(all_ranks=True)
                out["moved"] = any(not torch.equal(before[n], after[n]) for n in before)
        out["weights"] = dict(trainer.state_dict(all_ranks=True))
    return out


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_power_of_two_changes_no_bit(clip: float | None) -> None:
    plain = ranks.run(losses_of, 2, {"clip_norm": clip})[0]
    scaled = ranks.run(losses_of, 2, {"clip_norm": clip, "loss_scale": 1024})[0]
    assert scaled["losses"] == plain["losses"]
    assert all(torch.equal(scaled["weights"][n], w) for n, w in plain["weights"].items())
    if clip is not None:
        assert scaled["norms"] == pytest.approx(plain["norms"], rel=1e-12)


def test_small_gradients_do_not_vanish() -> None:
    # Gradients of about 1e-8 are below float16's least number, 6e-8.
    half = {"param_dtype": "float16", "output_dtype": "float32"}
    wide = ranks.run(losses_of, 2, {}, 1e-6)[0]
    lost = ranks.run(losses_of, 2, half, 1e-6)[0]
    kept = ranks.run(losses_of, 2, {**half, "loss_scale": "dynamic"}, 1e-6)[0]
    assert not any(kept["skipped"])
    near, far = (parity.weight_distance(run["weights"], wide["weights"]) for run in (kept, lost))
    assert near < 2e-3 and near < 0.2 * far, (near, far)
    assert parity.loss_distance(kept["losses"], wide["losses"]) < 1e-3


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    run = ranks.run(
        losses_of, 2, {"param_dtype": "float16", "output_dtype": "float32", "loss_scale": "dynamic"}, 100.0, 10
    )[0]
    assert run["skipped"][0] and not run["moved"] and not run["skipped"][-1]
    scale = 65536.0
    for skipped, norm, after in zip(run["skipped"], run["norms"], run["scales"], strict=True):
        scale *= 0.5 if skipped else 1.0
        assert after == scale
        assert skipped != math.isfinite(norm)


def test_growth_and_backoff() -> None:
    scale = LossScale("dynamic")
    for _ in range(1999):
        scale.after_step(True)
    assert scale.value == 65536.0
    scale.after_step(True)
    assert (scale.value, scale.good_steps) == (131072.0, 0)
    scale.after_step(True)
    scale.after_step(False)
    assert (scale.value, scale.good_steps) == (65536.0, 0)
    fixed = LossScale(8)
    fixed.after_step(False)
    assert fixed.value == 8.0 and not fixed.exhausted
    for _ in range(31):
        scale.after_step(False)
    assert scale.exhausted


def interrupted(config: dict[str, Any], folder: str) -> tuple[list[Any], list[Any]]:
    """The scale's state and loss after two steps more, without and with a checkpoint between."""
    found = []
    for again in (False, True):
        model = zoo.build("llama", torch.float32)
        batch = parity.batch_of("llama", 0, 0, 1)
        with interlace.compile(
            model, torch.optim.AdamW(model.parameters()), zoo.CASES["llama"].loss, batch, Config(timeout_s=60, **config)
        ) as trainer:
            if again:
                trainer.load(folder)
            else:
                trainer._run.loss_scale.restore([4096.0, 1998])
                trainer.step(batch)
                trainer.save(folder)
            losses = [float(trainer.step(batch)) for _ in range(2)]
            found.append([trainer._run.loss_scale.state(), losses])
    return found[0], found[1]


def test_checkpoints_keep_the_scale(tmp_path: Any) -> None:
    config = {"param_dtype": "float16", "output_dtype": "float32", "loss_scale": "dynamic"}
    through, resumed = ranks.run(interrupted, 2, config, str(tmp_path / "checkpoint"))[0]
    assert through == resumed
    assert through[0] == [8192.0, 1]


def test_wrong_loss_scale() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dynamic'"):
        Config(loss_scale="dynamci")
    with pytest.raises(ConfigError, match="loss_scale must be a positive number"):
        Config(loss_scale=-1)


def test_swapped_programs_keep_the_bits_and_the_scale() -> None:
    half = {"param_dtype": "float16", "output_dtype": "float32", "loss_scale": "dynamic"}
    plain = ranks.run(losses_of, 2, half, 100.0, 6)[0]
    swapped = ranks.run(
        losses_of, 2, {**half, "schedule": [(2, ["prefetch", "unshard(units=all)"])], "profile": "off"}, 100.0, 6
    )[0]
    assert any(plain["skipped"])
    assert swapped["losses"] == plain["losses"] and swapped["scales"] == plain["scales"]
    assert all(torch.equal(swapped["weights"][n], w) for n, w in plain["weights"].items())
