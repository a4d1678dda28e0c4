"""Parts of parameters that a mesh cuts, plans that say how, and batches by data rank: what needs no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import interlace
from interlace.capture.tensor_plan import PlanError, cuts_text, model_plan, read_plan
from interlace.compiling.cuts import Cuts
from interlace.compiling.states import _fill
from interlace.config import ConfigError
from interlace.dist.mesh import Mesh

Cut = tuple[str, int, int]


def cut(whole: torch.Tensor, cuts: list[Cut], mesh: Mesh) -> torch.Tensor:
    """A rank's part, cut after cut, block by block."""
    for axis, dim, blocks in cuts:
        pieces = whole.chunk(blocks, dim)
        whole = torch.cat([piece.chunk(mesh.size(axis), dim)[mesh.index(axis)] for piece in pieces], dim)
    return whole.contiguous()


CASES: list[tuple[dict[str, int], tuple[int, ...], list[Cut]]] = [
    ({"dp": 2, "tp": 3}, (6, 4), [("tp", 0, 1)]),
    ({"tp": 2, "dp": 2}, (4, 6), [("tp", 1, 1)]),
    ({"dp": 1, "tp": 2}, (12, 5), [("tp", 0, 3)]),
    ({"dp": 1, "tp": 2}, (3, 12), [("tp", 1, 3)]),
    ({"dp": 1, "tp": 2}, (3, 8, 5), [("tp", 1, 2)]),
    ({"ep": 2, "tp": 2}, (4, 12, 3), [("tp", 1, 3), ("ep", 0, 1)]),
    ({"ep": 2, "tp": 2}, (3, 16), [("tp", 1, 2), ("ep", 1, 2)]),
    ({"dp": 2, "tp": 1}, (3, 5), [("tp", 1, 1)]),
    ({"dp": 2}, (3, 5), []),
]


@pytest.mark.parametrize(("axes", "shape", "cuts"), CASES)
def test_parts_and_the_whole(axes: dict[str, int], shape: tuple[int, ...], cuts: list[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts: dict[int, torch.Tensor] = {}
    for rank in range(Mesh(axes, 0).ranks):
        mesh = Mesh(axes, rank)
        expected = cut(whole, cuts, mesh)
        found = Cuts.of(cuts, tuple(expected.shape), mesh)
        assert found.whole == shape and (found.word == "") == (not any(mesh.size(a) > 1 for a, _, _ in cuts))
        flat = expected.view(-1)
        for start, end in ((0, flat.numel()), (1, flat.numel() - 1), (flat.numel() // 2, flat.numel())):
            runs = list(found.runs(start, end))
            assert [r[0] for r in runs] == [start, *(r[1] for r in runs[:-1])] and runs[-1][1] == end
            for a, b, place in runs:
                assert torch.equal(whole.view(-1)[place : place + b - a], flat[a:b])
            for most in (1, 7, 1 << 20):
                monkeypatch.setattr("interlace.compiling.states.READ_ELEMENTS", most)
                part = torch.zeros(end - start, dtype=torch.int64)
                _fill(part, start, end, found, lambda a, b: whole.view(-1)[a:b])
                assert torch.equal(part, flat[start:end])
        if mesh.index(found.word) not in parts:
            parts[mesh.index(found.word)] = flat
    assert torch.equal(found.joined([parts[i] for i in range(len(parts))]), whole)


# ---- plans ----


def test_the_plans_of_models() -> None:
    import tensor_models

    lines = model_plan(tensor_models.build("llama")).split("; ")
    assert "model.layers.*.self_attn.q_proj.weight 0" in lines and "model.layers.*.self_attn.o_proj.weight 1" in lines
    assert "lm_head.weight 0" in lines and not any("norm" in line for line in lines)
    lines = model_plan(tensor_models.build("gpt2")).split("; ")  # Conv1D: [in, out]
    assert "transformer.h.*.attn.c_attn.weight 1 blocks 3" in lines and "transformer.h.*.attn.c_attn.bias 0 blocks 3" in lines
    assert "transformer.h.*.mlp.c_proj.weight 0" in lines and not any("c_proj.bias" in line for line in lines)
    assert model_plan(nn.Sequential(nn.Linear(4, 4))) == ""
    inside = model_plan(nn.ModuleDict({"lm": tensor_models.build("llama")}))
    assert "lm.model.layers.*.mlp.down_proj.weight 1" in inside.split("; ")


class _Cut:
    def __init__(self, cuts: dict[str, list[Cut]]) -> None:
        self.cuts = cuts

    def params(self) -> list[dict[str, object]]:
        return [{"name": name, "cuts": cuts} for name, cuts in self.cuts.items()]


def test_the_text_of_cuts_names_layers_once_where_they_are_alike() -> None:
    program = _Cut({"h.0.w": [("tp", 1, 3)], "h.1.w": [("tp", 1, 3)], "h.0.v": [("tp", 0, 1)], "h.1.v": [], "x": [("ep", 0, 1)]})
    assert cuts_text(program) == "h.*.w 1 blocks 3; h.0.v 0"


SHAPES = {"h.0.up.weight": (8, 4), "h.1.up.weight": (8, 4), "h.0.qkv.weight": (12, 4), "embed.weight": (16, 4)}
TIED = {"head.weight": "embed.weight"}


def test_a_plan_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.write_text("# columns\nh.*.up.weight 0\n\nh.0.qkv.weight 0 blocks 3  # fused\nhead.weight 0\nembed.weight 0\n")
    assert read_plan(file, SHAPES, TIED) == "h.*.up.weight 0; h.*.qkv.weight 0 blocks 3; embed.weight 0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h.*.up.weight 0\nh.*.upp.weight 1\n", "2: the model has no parameter 'h.*.upp.weight'; did you mean 'h.*.up.weight'?"),
        ("h.0.up.weight\n", "1: 'h.0.up.weight' has another form than 'PARAMETER DIMENSION [blocks N]'"),
        ("h.0.up.weight 0 block 3\n", "1: 'h.0.up.weight 0 block 3' has another form"),
        ("h.0.up.weight 0 blocks 0\n", "1: 'h.0.up.weight 0 blocks 0' has another form"),
        ("h.0.up.weight 2\n", "1: 'h.0.up.weight' is [8, 4] and has no dimension 2"),
        ("h.0.up.weight 0 blocks 3\n", "1: 3 blocks do not divide dimension 0 of 'h.0.up.weight', which is [8, 4]"),
        ("h.*.up.weight 0\nh.1.up.weight 1\n", "2: 'h.1.up.weight' is cut in line 1 already; write one line for it"),
        ("embed.weight 0\nhead.weight 1\n", "2: 'head.weight' is tied to 'embed.weight', which line 1 cuts another way"),
        ("# nothing\n", "cuts nothing"),
    ],
)
def test_a_plan_file_that_cannot_be(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.write_text(text)
    with pytest.raises(PlanError) as error:
        read_plan(file, SHAPES, TIED)
    assert words in str(error.value) and str(file) in str(error.value)


# ---- settings ----


def test_batches_by_data_rank() -> None:
    places = {
        "dp=2,tp=2": [0, 0, 1, 1], "tp=2,dp=2": [0, 1, 0, 1], "tp=4": [0, 0, 0, 0], "replica=2,dp=2": [0, 1, 2, 3],
        "replica=2,dp=2,tp=2": [0, 0, 1, 1, 2, 2, 3, 3],
    }  # fmt: skip
    for mesh, expected in places.items():
        config, size = interlace.Config(mesh=mesh), len(expected)
        assert [config.data_place(rank, size) for rank in range(size)] == [(place, max(expected) + 1) for place in expected]
        sizes = dict(config.axes or ())
        assert [Mesh(sizes, r).index(Mesh(sizes, r).data) for r in range(size)] == expected
    given = interlace.Config(passes="canonicalize,mesh(axes=dp:2+tp:2),tensor(axis=tp),shard,update")
    assert [given.data_place(rank, 4)[0] for rank in range(4)] == [0, 0, 1, 1]
    assert interlace.Config().data_place(2, 3) == (2, 3)
    assert interlace.Config(mesh={"tp": 2}).mesh == (("dp", 1), ("tp", 2))


def test_the_standard_pipeline_cuts_before_it_shards() -> None:
    config = interlace.Config(mesh={"replica": 2, "dp": 2, "tp": 2}, param_dtype="bfloat16", sequence_parallel=False)
    assert config.pipeline(8) == (
        "canonicalize,mesh(axes=replica:2+dp:2+tp:2),tensor(axis=tp,plan=auto,sequence=false),canonicalize,overlap,"
        "precision(param=bf16,reduce=bf16),"
        "shard(axis=dp,replicas=replica),update(clip=none,norm=auto,momentum=true)"
    )
    assert "tensor" not in interlace.Config(mesh={"dp": 2, "tp": 1}).pipeline(2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mesh": {"tp": 2}, "mode": "eager"}, "axis tp of the mesh needs mode='compiled'"),
        ({"mesh": {"tp": 2}, "rng": "compat"}, "axis tp of the mesh needs rng='keyed'"),
        ({"tensor": "model"}, "tensor='model' needs an axis tp in the mesh"),
        ({"mesh": {"replica": 2, "tp": 2, "dp": 2}}, "axis tp of the mesh stands between replica and dp, which must be neighbours"),
        ({"mesh": {"tp": 2}, "sequence_parallel": 1}, "sequence_parallel must be True or False, not 1"),
        ({"mesh": {"replica": 2, "tp": 2}}, "axis dp is missing"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        interlace.Config(**settings)  # type: ignore[arg-type]
    assert words in str(error.value)
