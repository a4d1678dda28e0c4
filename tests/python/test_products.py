"""Products on CPUs against torch's: those of few rows and those that oneDNN does, on some processors, and the rest, which are torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch

import interlace
from interlace import _runtime  # noqa: F401  (it has the operators)
from interlace.compiling.programs import Programs

Tensor = torch.Tensor
LARGE, SMALL = (300, 200, 500), (16, 8, 24)  # m, k, n: some of the first are oneDNN's
FEW = [(1, 1, 64), (7, 300, 97), (8, 256, 1024), (9, 17, 100), (31, 513, 144), (48, 1000, 79), (49, 64, 64)]


def matrix(rows: int, columns: int, layout: str, batch: tuple[int, ...] = ()) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    if layout == "rows":
        return torch.randn(*batch, rows, columns, generator=generator)
    if layout == "columns":
        return torch.randn(*batch, columns, rows, generator=generator).transpose(-1, -2)
    return torch.randn(*batch, rows, 2 * columns, generator=generator)[..., ::2]  # gaps


@pytest.mark.parametrize("m, k, n", [LARGE, SMALL, *FEW])
@pytest.mark.parametrize("left", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("right", ["rows", "columns", "gaps"])
def test_products_are_those_of_torch(m: int, k: int, n: int, left: str, right: str) -> None:
    ours, a, b = torch.ops.interlace, matrix(m, k, left), matrix(k, n, right)
    bias, into = torch.randn(n), torch.full((m, n), torch.nan)
    assert_close(ours.mm(a, b), torch.mm(a, b))
    assert ours.mm.out(a, b, out=into) is into
    assert_close(into, torch.mm(a, b))
    assert_close(ours.addmm(bias, a, b), torch.addmm(bias, a, b))
    assert_close(ours.addmm(bias, a, b, beta=0.5, alpha=2), torch.addmm(bias, a, b, beta=0.5, alpha=2))
    assert_close(ours.addmm.out(into, a, b, out=torch.empty(m, n)), torch.addmm(into, a, b))
    many, others = matrix(m, k, left, (3,)), matrix(k, n, right, (3,))
    assert_close(ours.bmm(many, others), torch.bmm(many, others))
    assert_close(ours.bmm.out(many, others, out=torch.empty(3, m, n)), torch.bmm(many, others))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-4)


def test_few_rows_have_the_same_bits_on_any_number_of_threads() -> None:
    a, b = matrix(24, 700, "rows"), matrix(700, 5000, "columns")
    whole, threads = torch.ops.interlace.mm(a, b), torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert torch.equal(torch.ops.interlace.mm(a, b), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    a, b = matrix(300, 200, "rows").mul(10).to(dtype), matrix(200, 500, "rows").to(dtype)
    assert torch.equal(torch.ops.interlace.mm(a, b), torch.mm(a, b))


def test_places_with_gaps_and_nothing_at_all() -> None:
    a, b, wide = matrix(300, 200, "rows"), matrix(200, 500, "rows"), torch.zeros(300, 1000)
    torch.ops.interlace.mm.out(a, b, out=wide[:, ::2])
    torch.testing.assert_close(wide[:, ::2], a @ b, rtol=1e-5, atol=2e-4)
    assert not wide[:, 1::2].any()
    assert torch.ops.interlace.mm(torch.empty(0, 5), torch.empty(5, 3)).shape == (0, 3)


def large(**settings: object) -> interlace.Trainer:
    """Of a model whose products are large enough."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    loss, optimizer = lambda m, x: (m(x) - x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)
    return interlace.compile(model, optimizer, loss, torch.randn(256, 256), interlace.Config(schedule=[], cache="off", **settings))


def large_step(**settings: object) -> tuple[list[float], Tensor]:
    """Losses and weights."""
    trainer = large(**settings)
    batch = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    losses = [trainer.step(batch).item() for _ in range(3)]
    return losses, trainer.state_dict()["0.weight"].clone()


def test_a_training_has_one_set_of_bits_and_torchs_where_they_are_asked_for() -> None:
    found = [large_step(strategy=strategy) for strategy in ("shard", "zero1", "replicate")]
    for losses, weight in found[1:]:
        assert losses == found[0][0] and torch.equal(weight, found[0][1])
    losses, weight = large_step(kernels="torch")
    torch.testing.assert_close(weight, found[0][1], rtol=1e-5, atol=1e-6)
    assert losses == pytest.approx(found[0][0], rel=1e-6)


@pytest.mark.host("products that are not torch's are those of CPUs")
def test_a_resume_with_other_kernels_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large().save(tmp_path)
    large().load(tmp_path)
    assert "bits" not in caplog.text
    large(kernels="torch").load(tmp_path)
    assert f"{tmp_path} was saved by a run with the kernels of torch {torch.__version__}, " in caplog.text
    assert caplog.text.count("kernels by torch: it goes on with other bits") == 1


def on_another_processor() -> list[str]:
    """What rank 0 says where rank 1 has kernels of another kind."""
    kernels = Programs.__dict__["kernels"]
    if torch.distributed.get_rank() == 1:
        Programs.kernels = property(lambda self: "torch 2.13.0, AVX2, products by torch")  # type: ignore[assignment,misc]
    try:
        with ranks.heard() as said:
            large(strategy="shard").close()
    finally:
        Programs.kernels = kernels  # type: ignore[method-assign]
    return [text for text in said if "bits" in text]


def test_ranks_with_other_kernels_are_told() -> None:
    first, second = ranks.run(on_another_processor, 2)
    assert not second and len(first) == 1
    assert "rank 1: torch 2.13.0, AVX2, products by torch): what several ranks compute alike differs in its last bits" in first[0]
