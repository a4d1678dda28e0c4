"""Regions: bodies as functions, compiled kernels against them, training with them, and what happens where they cannot be had."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
import zoo
from torch._inductor import config as inductor

import interlace
from interlace import _core
from interlace.regions import Library, library, ready
from interlace.regions.body import function_of, operands_of, view_of
from interlace.regions.check import added, compare

Tensor = torch.Tensor
HEAD = "interlace 1 captured\nstep 1 reduce_each\n"
GATED = """func f0(%0: f32[6,8], %1: f32[6,8]) gives (%2, %3) {
  %2: f32[6,8] = aten.silu(%0)
  %3: f32[6,8] = aten.mul.Tensor(%2, %1)
}
"""
ROTATED = """func f1(%0: f32[2,3,4,8]{96,8,24,1}, %1: f32[1,1,4,8]) gives (%6) {
  %2: f32[2,3,4,8]{96,8,24,1} = aten.mul.Tensor(%0, %1)
  %3: f32[2,3,4,4]{96,8,24,1} in %2+4 = view(%2)
  %4: f32[2,3,4,4]{96,8,24,1} in %2+0 = view(%2)
  %5: f32[2,3,4,4]{48,4,12,1} = aten.neg(%3)
  %6: f32[2,3,4,8] = aten.cat([%5, %4], -1)
}
"""
NORMED = """func f2(%0: f32[6,8], %1: f32[8]) gives (%4, %6) {
  %2: f32[6,8] = aten.pow.Tensor_Scalar(%0, 2)
  %3: f32[6,1] = aten.mean.dim(%2, [-1], true)
  %4: f32[6,1] = aten.rsqrt(%3)
  %5: f32[6,8] = aten.mul.Tensor(%0, %4)
  %6: f32[6,8] = aten.mul.Tensor(%5, %1)
}
"""


def funcs(*texts: str) -> list[dict[str, Any]]:
    program = _core.Program.parse(HEAD + "".join(texts) + "phase micro_batch takes () gives () {\n}\n")
    program.verify()
    return list(program.funcs())


ALL = (GATED, ROTATED, NORMED)


pytestmark = pytest.mark.usefixtures("unsaid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(folder: Path) -> Library:
    found = ready(funcs(*ALL), "on", folder, print)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("root", "view"),
    [
        (((4, 6), (6, 1), 0), ((6, 4), (1, 6), 0)),
        (((4, 6), (6, 1), 0), ((4, 3), (6, 1), 3)),
        (((4, 6), (6, 1), 0), ((2, 2, 6), (12, 6, 1), 0)),
        (((4, 6), (1, 4), 0), ((4, 1, 5), (1, 7, 4), 4)),
        (((2, 3, 4), (12, 4, 1), 0), ((5, 3, 2), (0, 4, 1), 14)),
        (((24,), (1,), 0), ((), (), 5)),
        (((24,), (1,), 0), ((3, 3), (1, 1), 2)),  # overlapping: as_strided
        (((4, 6), (8, 1), 0), ((4, 6), (8, 1), 0)),  # gaps in the root: as_strided
    ],
)
def test_views_are_those_of_the_storage(root: Any, view: Any) -> None:
    x = torch.arange(64.0).as_strided(root[0], root[1])
    types = [dict(zip(("shape", "strides", "offset"), part, strict=True)) for part in (root, view)]
    found = view_of(x, *types)
    assert found.data_ptr() == x.as_strided(*view).data_ptr()
    assert found.shape == x.as_strided(*view).shape
    assert torch.equal(found, x.as_strided(*view))


def test_a_body_is_what_its_ops_say() -> None:
    gated, rotated, normed = funcs(*ALL)
    x, y = operands_of(gated)
    assert all(map(torch.equal, function_of(gated)(x, y), (torch.nn.functional.silu(x), torch.nn.functional.silu(x) * y)))
    z, w = operands_of(rotated)
    assert z.stride() == (96, 8, 24, 1)
    product = z * w
    assert torch.equal(function_of(rotated)(z, w)[0], torch.cat([-product[..., 4:], product[..., :4]], -1))
    assert added(gated) == 1 and added(normed) == 8


def test_kernels_are_compared_with_their_bodies(made: Library, folder: Path) -> None:
    assert made.left == {}
    assert len(made.keys) == 3
    keys = {func["name"]: func["key"][:16] for func in funcs(*ALL)}
    assert keys["f1"] in made.exact  # f0's sigmoid has the bits of its body on some processors and not on others
    assert keys["f2"] not in made.exact  # a sum's order is the code generation's choice
    import ctypes

    loaded = ctypes.CDLL(str(made.path))
    for func in funcs(*ALL):
        assert compare(loaded, func)[1] == ""
    # A kernel of another body is told apart.
    wrong = funcs(GATED.replace("silu", "neg"))[0] | {"key": keys["f0"]}
    assert "from the exact value" in compare(loaded, wrong)[1]


def test_it_is_made_once(made: Library, folder: Path) -> None:
    said: list[str] = []
    again = ready(funcs(*ALL), "on", folder, said.append)
    assert again is not None and again.artifact == made.artifact and again.seconds == 0.0 and said == []
    exact = ready(funcs(*ALL), "exact", folder, said.append)
    assert exact is not None and sorted(exact.keys) == sorted(made.exact) and exact.artifact != made.artifact
    assert "f2: other bits than its body" in said[0]
    # The order and the numbers of funcs say nothing.
    turned = ready(funcs(*(text.replace(f"f{i}", f"f{2 - i}", 1) for i, text in list(enumerate(ALL))[::-1])), "on", folder)
    assert turned is not None and turned.path == made.path


def test_a_damaged_library_is_made_again(made: Library, tmp_path: Path) -> None:
    shutil.copytree(made.path.parent, tmp_path / "regions")
    file = tmp_path / "regions" / made.path.name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said: list[str] = []
    second = ready(funcs(*ALL), "on", tmp_path, said.append)
    assert second is not None and second.seconds > 0
    assert "is damaged (its digest is not the noted one); it is made again" in said[0]
    third = ready(funcs(*ALL), "on", tmp_path, said.append)
    assert third is not None and third.seconds == 0


def test_what_others_could_have_written_is_not_loaded(made: Library, folder: Path) -> None:
    said: list[str] = []
    made.path.chmod(0o666)
    try:
        assert ready(funcs(*ALL), "on", folder, said.append) is None
    finally:
        made.path.chmod(0o600)
    assert "is not loaded: others may write to it" in said[0]


def script(path: Path, text: str) -> tuple[str]:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o700)
    return (str(path),)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (
            "if [ $1 = --version ]; then echo broken 1; else echo 'x: error: no' >&2; exit 1; fi\n",
            "the C++ compiler failed (1): x: error: no",
        ),
        ("if [ $1 = --version ]; then echo slow 1; else sleep 1000; fi\n", "the C++ compiler took longer than 1 s"),
        ("exit 1\n", "there is no C++ compiler (g++)"),
    ],
    ids=["fails", "hangs", "none"],
)
def test_without_a_working_compiler_bodies_run(tmp_path: Path, compiler: str, reason: str) -> None:
    said: list[str] = []
    with inductor.patch({"cpp.cxx": script(tmp_path / "cc", compiler)}):
        assert ready(funcs(GATED), "on", tmp_path / "cache", said.append, limit_s=1.0) is None
        assert ready(funcs(GATED), "on", tmp_path / "cache", said.append, limit_s=1.0) is None
    assert [text for text in said if "compiling" not in text] == [f"regions are not compiled, their bodies run op by op: {reason}"]


def test_where_nothing_can_be_kept_bodies_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    assert ready(funcs(GATED), "on", tmp_path / "file", said.append) is None
    assert "their bodies run op by op" in said[0]


def test_an_untested_torch_runs_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "TESTED", ("1.13",))
    said: list[str] = []
    assert ready(funcs(GATED), "on", tmp_path, said.append) is None
    assert "was not tested, only that of 1.13" in said[0]


def test_a_region_without_a_kernel_is_named(tmp_path: Path) -> None:
    sorted_ = "func f0(%0: f32[6,8]) gives (%1) {\n  %1: f32[6,8], _ = aten.sort(%0)\n}\n"
    said: list[str] = []
    found = ready(funcs(sorted_, GATED.replace("f0", "f1")), "on", tmp_path, said.append)
    assert found is not None and list(found.left) == ["f0"] and len(found.keys) == 1
    assert said[-1].startswith("regions whose bodies run op by op: f0: an operator that has no kernel")


def train(case: str, regions: str, cache: str, **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = copy.deepcopy(zoo.build(case, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = torch.distributed.is_initialized() and "mesh" not in config
    batch = zoo.CASES[case].batch(2, 1 + torch.distributed.get_rank() if own else 1)
    # Tiles of our own attention are larger than all that regions save in so small a model.
    config = {"schedule": [], "regions_wait": True, "kernels": "torch", **config}
    trainer = interlace.compile(model, optimizer, zoo.CASES[case].loss, batch, interlace.Config(regions=regions, cache=cache, **config))
    losses = [trainer.step(batch).item() for _ in range(5)]
    found = trainer._run.source.regions
    arena = trainer.stats()["arena"]
    calls = sum(func["calls"] for func in trainer._run.ir.funcs())
    trainer.close()
    return {
        "losses": losses, "arena": arena, "calls": calls, "compiled": found is not None, "left": found.left if found else {},
        "artifact": found.artifact if found else "",
    }  # fmt: skip


@pytest.mark.parametrize("case", ["gpt2", *(pytest.param(case, marks=pytest.mark.soak) for case in ("llama", "vit"))])
def test_training(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(case, "off", "off")
    fused = train(case, "on", str(folder))
    exact = train(case, "exact", str(folder))
    monkeypatch.setattr(library, "TESTED", ())
    bodies = train(case, "on", str(folder))
    assert plain["calls"] == 0 and fused["calls"] > 4 and fused["compiled"] and fused["left"] == {}
    assert parity.loss_distance(fused["losses"], plain["losses"]) < 1e-5
    assert exact["losses"] == plain["losses"]
    assert bodies["losses"] == plain["losses"] and not bodies["compiled"]
    for run in (fused, exact, bodies):
        assert run["arena"]["settled"] and run["arena"]["unforeseen"] == []
        assert run["arena"]["planned_bytes"] == run["arena"]["top_bytes"]
    most = {"llama": 0.87, "gpt2": 0.73, "vit": 1.0}[case]  # what regions can make again is not kept
    assert fused["arena"]["planned_bytes"] <= plain["arena"]["planned_bytes"] * most


def test_the_same_bits_for_every_strategy(folder: Path) -> None:
    found = {
        name: ranks.run(train, 2, "llama", "on", str(folder), **config)
        for name, config in {
            "shard": {}, "zero1": {"strategy": "zero1"}, "replicate": {"strategy": "replicate"},
            "recomputed": {"schedule": [(0, ["recompute(mode=full)"])]},
        }.items()
    }  # fmt: skip
    assert all(run["compiled"] for both in found.values() for run in both)
    assert len({run["artifact"] for both in found.values() for run in both}) == 1
    for rank in range(2):
        assert len({json.dumps(both[rank]["losses"]) for both in found.values()}) == 1


def test_stages_keep_less(folder: Path) -> None:
    stages: dict[str, Any] = {"mesh": {"pp": 2, "dp": 1}, "accumulation": 2}
    plain = ranks.run(train, 2, "gpt2", "off", "off", **stages)
    fused = ranks.run(train, 2, "gpt2", "on", str(folder), **stages)
    for a, b in zip(fused, plain, strict=True):
        assert a["compiled"] and parity.loss_distance(a["losses"], b["losses"]) < 1e-5
        assert a["arena"]["top_bytes"] == a["arena"]["planned_bytes"] <= 0.85 * b["arena"]["planned_bytes"]


def test_a_resume_with_other_kernels_says_so(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trainer(regions: str) -> interlace.Trainer:
        model = zoo.build("llama", torch.float32)  # whose library test_training has made
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = interlace.Config(regions=regions, regions_wait=True, cache=str(folder))
        return interlace.compile(model, optimizer, zoo.CASES["llama"].loss, zoo.CASES["llama"].batch(2, 1), config)

    first = trainer("on")
    first.step(zoo.CASES["llama"].batch(2, 1))
    first.save(tmp_path / "checkpoint")
    trainer("on").load(tmp_path / "checkpoint")
    assert "other bits" not in caplog.text
    trainer("off").load(tmp_path / "checkpoint")
    assert "this run has no compiled regions: it goes on with other bits" in caplog.text


def by_rank(case: str, folder: str, empty: str) -> dict[str, Any]:
    """Rank 1 has no compiler, and a cache of its own."""
    library._compiler.cache_clear()
    rank = torch.distributed.get_rank()
    broken = {"cpp.cxx": ("no-such-compiler",)} if rank == 1 else {}
    with inductor.patch(broken):
        found = train(case, "on", empty if rank == 1 else folder)
    library._compiler.cache_clear()
    return found


def test_ranks_that_have_other_kernels_run_bodies(folder: Path, tmp_path: Path) -> None:
    first, second = ranks.run(by_rank, 2, "llama", str(folder), str(tmp_path))
    assert not first["compiled"] and not second["compiled"]
    plain = ranks.run(train, 2, "llama", "off", "off")
    assert first["losses"] == plain[0]["losses"] and second["losses"] == plain[1]["losses"]
