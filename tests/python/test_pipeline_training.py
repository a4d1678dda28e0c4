"""Pipelines on real ranks: the numbers of one process under every schedule, tied weights on two stages, checkpoints between meshes,
evaluation, and what cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import tensor_models
import torch
from safetensors.torch import load_file
from test_tensor_parallel import distances, resumed
from test_trainer_bits import digest
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.checkpoint.contents import MODEL, OPTIMIZER
from interlace.dist.peers import PeerError
from interlace.errors import InterlaceError

STEPS = 8  # moments, clipping and a settled arena have all been there

ORDERS: list[dict[str, Any]] = [
    {"accumulation": 4, "stage_order": "1f1b"},
    {"accumulation": 4, "stage_order": "gpipe", "clip_norm": 0.3},
    {"accumulation": 4, "stage_order": "zero_bubble"},
    {"accumulation": 4, "stage_order": "interleaved", "stage_chunks": 2, "clip_norm": 0.3},
    {"accumulation": 4, "accumulate_mode": "reduce_last", "clip_norm": 0.3},
    {"accumulation": 8, "stage_order": "v", "clip_norm": 0.3},
    {"accumulation": 2, "stage_order": "v"},
    {},
]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_numbers_of_one_process(name: str) -> None:
    """Two stages; of GPT-2 the embedding is on both."""
    for config, distance in zip(ORDERS, ranks.run(distances, 2, name, {"pp": 2}, ORDERS, timeout_s=300)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


@pytest.mark.parametrize("name", ["t5", "vit", "mixtral"])
def test_of_other_models(name: str) -> None:
    """T5's encoder and decoder lie on different stages."""
    settings = [{"accumulation": 4, "stage_order": "auto", "clip_norm": 0.3}]
    (distance,) = ranks.run(distances, 2, name, {"pp": 2}, settings, timeout_s=300)[0]
    assert distance.within(1e-9), distance


WITH_PASSES: list[dict[str, Any]] = [
    {"schedule": [(0, ["recompute(mode=full)"])]},
    {"schedule": [(0, ["recompute(mode=selective)"])], "stages": "model.layers.1"},
    {"schedule": [(0, ["bucket(modules=model.layers.*)", "reorder"])]},
    {"schedule": [(0, ["prefetch(prefetch=20KB,alpha=1)", "overlap_update"])]},
    {"arena": False},
    {"strategy": "zero1+shard", "accumulate_mode": "reduce_last+reduce_each"},
    {"strategy": "shard+replicate", "clip_norm": 0.3},
    {"schedule": [(0, ["overlap_update", "offload_sync(cluster={cluster},kinds=states)"])], "tier": "host"},
]


def test_with_other_passes() -> None:
    settings = [{"accumulation": 4, **config} for config in WITH_PASSES]
    found = ranks.run(distances, 4, "llama", {"pp": 2, "dp": 2}, settings, timeout_s=300)[0]
    for config, distance in zip(settings, found, strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


@pytest.mark.parametrize(
    "mesh",
    [{"pp": 4}, {"pp": 2, "tp": 2}, *(pytest.param(mesh, marks=pytest.mark.soak) for mesh in ({"dp": 2, "pp": 2}, {"pp": 2, "dp": 2}))],
)
def test_on_four_ranks(mesh: dict[str, int]) -> None:
    strategies = [{"strategy": s, "accumulation": 4, "clip_norm": 0.3} for s in ("shard", "zero1", "replicate")]
    few = mesh.get("pp") == 2  # of the eight stages of a V on four ranks some would have nothing to train
    settings = strategies + [c for c in ORDERS if few or (c.get("stage_chunks", 1) == 1 and c.get("stage_order") != "v")]
    for config, distance in zip(settings, ranks.run(distances, 4, "tied", mesh, settings, timeout_s=600)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def gathered_again(mesh: dict[str, int], settings: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """The numbers where rows are gathered again for gradients of weights, whatever is faster here, and one rank's text."""
    from interlace import Config

    chosen = Config.pipeline
    Config.pipeline = lambda *args: chosen(*args).replace("gathers=auto", "gathers=again")  # type: ignore[method-assign]
    with tensor_models.compiled("tied", mesh=mesh, **settings[0]) as trainer:
        text = trainer.program
    return distances("tied", mesh, settings), text


def test_rows_gathered_again() -> None:
    settings = [{"accumulation": 4, "stage_order": "auto", "clip_norm": 0.3}, {"accumulation": 8, "stage_order": "auto", "strategy": "shard"}]
    found = ranks.run(gathered_again, 4, {"pp": 2, "tp": 2}, settings, timeout_s=300)
    for config, distance in zip(settings, found[0][0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"
    for _, text in found:
        assert 'meta stages.gathers "again"' in text


V: list[dict[str, Any]] = [
    {"accumulation": 8, "clip_norm": 0.3},
    {"accumulation": 2, "strategy": "zero1", "schedule": [(0, ["recompute(mode=selective)"])]},
    {"accumulation": 4, "strategy": "replicate", "accumulate_mode": "reduce_last", "clip_norm": 0.3},
]


@pytest.mark.parametrize("mesh", [{"pp": 4}, pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.soak)])
def test_a_v_over_layers_that_ranks_do_not_divide(mesh: dict[str, int]) -> None:
    """Embedding and head are one parameter, on the first rank, whose stages are the first and the last."""
    settings = [{"stage_order": "v", **config} for config in V]
    for config, distance in zip(settings, ranks.run(distances, 4, "deep", mesh, settings, timeout_s=600)[0], strict=True):
        assert distance.within(1e-9), f"{config}: {distance}"


def test_an_entry_of_the_schedule_that_changes_one_stage_alone() -> None:
    """Of this model the updates of the last stage stay where they are; both ranks go on with the entry's programs."""
    settings = [{"accumulation": 4, "stage_order": "1f1b", "schedule": [(0, []), (2, ["overlap_update"])]}]
    (distance,) = ranks.run(distances, 2, "vit", {"pp": 2}, settings, timeout_s=300)[0]
    assert distance.within(1e-9), distance


def gone_on(folder: str) -> tuple[list[float], list[float], bool]:
    """Two steps behind a save, of the trainer that saved and of one that loads; whether its program is the one that ran."""
    settings: dict[str, Any] = {"mesh": {"pp": 2}, "accumulation": 4, "schedule": [(0, []), (2, ["overlap_update"])]}
    with tensor_models.compiled("llama", **settings) as trainer:
        tensor_models.steps(trainer, 0, 4)
        trainer.save(folder)
        ran, expected = trainer.program, tensor_models.steps(trainer, 4, 6)
    with tensor_models.compiled("llama", **settings) as trainer:
        trainer.load(folder)
        return expected, tensor_models.steps(trainer, 4, 6), trainer.program == ran


def test_a_schedule_goes_on_with_the_programs_of_all_stages(tmp_path: Path) -> None:
    for expected, found, same in ranks.run(gone_on, 2, str(tmp_path / "run")):
        assert found == expected and same


def schedules(name: str, mesh: dict[str, int]) -> list[str]:
    found = []
    for config in ORDERS[:3]:
        losses, weights = tensor_models.on_mesh(name, 4, mesh=mesh, **{**config, "clip_norm": 0.3})
        found.append(f"{losses} {digest(weights)}")
    return found


def test_schedules_that_reduce_in_one_order_have_the_same_bits() -> None:
    everywhere = ranks.run(schedules, 4, "gpt2_dropout", {"pp": 2, "dp": 2}, timeout_s=300)
    assert len({text for found in everywhere for text in found}) == 1


def evaluated(mesh: dict[str, int] | None, order: str = "auto") -> list[float]:
    found = []
    with tensor_models.compiled("gpt2_dropout", mesh=mesh, accumulation=2, stage_order=order) as trainer:
        for step in range(2):
            found.append(parity.mean_over_ranks(trainer.evaluate(tensor_models.batch_of(100, trainer.data_rank))["loss"]))
            tensor_models.steps(trainer, step, step + 1)
    return found


def test_evaluate() -> None:
    two = ranks.run(evaluated, 2, None)[0]
    for order in ("auto", "v"):
        assert ranks.run(evaluated, 4, {"pp": 2, "dp": 2}, order)[0] == pytest.approx(two, rel=1e-9)


MESHES: list[tuple[int, Any]] = [(1, None), (2, None), (2, {"pp": 2}), (4, {"pp": 2, "dp": 2}), (4, {"pp": 4}), (4, {"dp": 2, "tp": 2})]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("size", "mesh"), [(4, {"pp": 2, "dp": 2}), (2, None)])
def test_a_checkpoint_loads_on_any_other_mesh(name: str, size: int, mesh: Any, tmp_path: Path) -> None:
    """Saved after three steps, loaded and saved again elsewhere: the same tensors; in a file they stand as stages have them."""

    def of_file(folder: Path, file: str) -> str:
        return digest(dict(sorted(load_file(folder / file).items())))

    _, saved = ranks.run(resumed, size, name, str(tmp_path / "start"), 0, 3, mesh, "shard")[0]
    kept = load_file(tmp_path / "start" / MODEL)
    assert digest(kept) == digest({n: saved[n] for n in kept})
    for other_size, other in MESHES:
        folder = tmp_path / f"{other_size} {other}"
        shutil.copytree(tmp_path / "start", folder)
        assert digest(ranks.run(resumed, other_size, name, str(folder), 3, 3, other, "shard")[0][1]) == digest(saved), other
        for file in (MODEL, OPTIMIZER):
            assert of_file(folder, file) == of_file(tmp_path / "start", file), f"{file}, {other}"


# ---- what cannot be ----


def other_batches() -> None:
    with tensor_models.compiled("llama", mesh={"pp": 2}) as trainer:
        trainer.step(tensor_models.batch_of(0, trainer.rank))


def test_stages_of_one_pipeline_must_have_the_same_batch() -> None:
    for outcome in ranks.outcomes(other_batches, 2):
        assert outcome is not None and isinstance(outcome.error, PeerError)
        assert "ranks 0 and 1 work on one batch along pp of the mesh, but were given different ones" in str(outcome.error)


def swapped_for_one_stage() -> tuple[str, list[float]]:
    """To the first stage's program on both, which the second cannot go on with."""
    with tensor_models.compiled("llama", mesh={"pp": 2}, accumulation=2) as trainer:
        losses = tensor_models.steps(trainer, 0, 1)
        with pytest.raises(InterlaceError) as error:
            trainer.swap(trainer.program)
        return str(error.value), losses + tensor_models.steps(trainer, 1, 2)


def test_a_program_that_another_stage_cannot_build_is_told_to_all() -> None:
    (first, losses), (second, _) = ranks.run(swapped_for_one_stage, 2)
    assert len(losses) == 2 and "the new program wants" in second and first == f"on rank 1: {second}"


def refused(config: dict[str, Any]) -> None:
    tensor_models.compiled("llama", **config).close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mesh": {"pp": 2}, "stages": "model.layers.7"}, "'model.layers.7' is no parameter or module that a stage can begin with"),
        ({"mesh": {"pp": 2}, "stages": "model.layers.1+lm_head"}, "2 borders make 3 stages"),
        ({"mesh": {"pp": 2}, "stage_order": "interleaved", "accumulation": 3}, "write accumulation=4"),
        ({"mesh": {"pp": 2}, "stage_chunks": 2}, 'needs stage_order="interleaved"'),
        ({"mesh": {"pp": 2}, "stage_order": "v", "stages": "model.layers.1"}, "1 border makes 2 stages"),
        ({"mesh": {"dp": 2}, "stage_order": "gpipe"}, "needs an axis pp in the mesh"),
        pytest.param(
            {"mesh": {"pp": 2}, "schedule": [(0, []), (5, ["offload_sync(cluster={cluster},kinds=states)"])]},
            "schedule, step 5: state u0.exp_avg goes out of memory",
            marks=pytest.mark.host("what leaves a device's memory always has the host's"),
        ),
        ({"mesh": {"pp": 2}, "stage_chunks": 20, "stage_order": "gpipe"}, "cannot be cut into 40 stages"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(config: dict[str, Any], words: str) -> None:
    for outcome in ranks.outcomes(refused, 2, config):
        assert outcome is not None and words in str(outcome.error)


class Moving(nn.Module):
    """Averages in buffers, which the backward part reads as they were, and BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))
        for i in range(4):
            self.register_buffer(f"mean{i}", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            mean = getattr(self, f"mean{i}")
            y = norm(torch.tanh(layer(x) * mean)).view(-1, 2, 4) * mean.view(2, 4)
            setattr(self, f"mean{i}", 0.9 * mean + 0.1 * y.detach().mean(0).view(8))
            x = y.view(-1, 8) + mean
        return self.last(x)


def moved(config: dict[str, Any], make: type[nn.Module] = Moving) -> tuple[list[float], dict[str, torch.Tensor]]:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 8, generator=generator).double(), torch.randint(0, 4, (16,), generator=generator)
    model = make().double()
    settings = interlace.Config(accumulation=4, cache="off", **{"schedule": [], **config})
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, {"x": x, "y": y}, settings) as trainer:
        return [float(trainer.step({"x": x, "y": y})) for _ in range(3)], trainer.state_dict(all_ranks=True)


def test_buffers_change_from_micro_batch_to_micro_batch() -> None:
    losses, state = ranks.run(moved, 1, {})[0]
    for config in ({"stage_order": "1f1b"}, {"stage_order": "gpipe", "schedule": [(0, ["recompute(mode=full)"])]}, {"regions": "on"}):
        found, buffers = ranks.run(moved, 2, {"mesh": {"pp": 2}, **config})[0]
        assert found == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(buffers, state, rtol=1e-9, atol=1e-12)


class Remembering(nn.Module):
    """A buffer that the second layer changes and the third reads, in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            elif i == 2:
                x = x + self.mean
        return self.last(x)


def test_no_border_parts_a_buffer_from_what_changes_it() -> None:
    losses, state = ranks.run(moved, 1, {}, Remembering)[0]
    found, buffers = ranks.run(moved, 2, {"mesh": {"pp": 2}}, Remembering)[0]
    assert found == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(buffers, state, rtol=1e-9, atol=1e-12)


class Averaging(nn.Module):
    """A buffer has the average of a weight that ranks of axis tp cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4)), nn.Linear(8, 4)
        self.register_buffer("average", self.layers[1].weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(self.layers[1].weight, 0.1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def test_a_buffer_that_averages_a_cut_weight(tmp_path: Path) -> None:
    plan = tmp_path / "cuts.plan"
    plan.write_text("".join(f"layers.{i}.weight {i % 2}\n" for i in range(4)))
    losses, state = ranks.run(moved, 1, {}, Averaging)[0]
    for order in ("1f1b", "gpipe"):
        config = {"mesh": {"pp": 2, "tp": 2}, "tensor": str(plan), "stage_order": order}
        found, buffers = ranks.run(moved, 4, config, Averaging)[0]
        assert found == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(buffers, state, rtol=1e-9, atol=1e-12)
