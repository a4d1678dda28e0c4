"""What compares a compiled region with its body: that it sees what is wrong, wherever in a large tensor it is."""

from __future__ import annotations

import pytest
import torch

from interlace.regions import body, check


def value(id: int, dtype: str, shape: list[int]) -> dict[str, object]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return {"id": id, "dtype": dtype, "shape": shape, "strides": strides, "root": id, "offset": 0}


LARGE = value(0, "bf16", [3, 700_000])  # more than two periods of what is drawn


@pytest.mark.parametrize("place", [0, body.PERIOD - 1, body.PERIOD, 2 * body.PERIOD + 5, 3 * 700_000 - 1])
def test_a_changed_operand_is_seen_anywhere(place: int) -> None:
    (operand,) = body.operands_of({"operands": [LARGE]})
    head = body.head_of(operand)
    assert body.unchanged(operand, head)
    operand.view(-1)[place] += 1
    assert not body.unchanged(operand, head)


def test_gaps_between_rows_are_looked_at_too() -> None:
    (operand,) = body.operands_of({"operands": [{**value(0, "f32", [4, 6]), "strides": [10, 1]}]})
    head = body.head_of(operand)
    operand.as_strided([34], [1])[8] += 1
    assert not body.unchanged(operand, head)


@pytest.mark.parametrize("place", [0, check.CHUNK, 2 * check.CHUNK + 1])
def test_a_difference_is_seen_in_every_chunk(place: int) -> None:
    wide = torch.linspace(0, 1, 2 * check.CHUNK + 2, dtype=torch.float64)
    made, by_body = wide.float(), wide.float()
    assert check.difference(made, by_body, wide, check.ULPS) == ""
    made[place] += 1e-3
    assert "from the exact value" in check.difference(made, by_body, wide, check.ULPS)
    made[place] = float("nan")
    assert check.difference(made, by_body, wide, check.ULPS) == "other elements are not finite"


@pytest.mark.parametrize("place", [0, check.CHUNK, 2 * check.CHUNK + 1])
@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_what_is_near_the_body_needs_no_more(place: int, wrong: float) -> None:
    by_body = torch.linspace(0, 1, 2 * check.CHUNK + 2)
    assert check.within(by_body * (1 + 2e-7), by_body, check.ULPS)
    made = by_body.clone()
    made[place] += wrong
    assert not check.within(made, by_body, check.ULPS)
    assert not check.within(by_body, made, check.ULPS)


def test_of_whole_numbers_each_is_the_bodys() -> None:
    made, by_body = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert check.within(made, made.clone(), check.ULPS) and not check.within(made, by_body, check.ULPS)
    assert check.within(torch.empty(0), torch.empty(0), check.ULPS)


def test_what_is_as_far_off_as_the_body_is_right() -> None:
    wide = torch.linspace(0, 1, 100, dtype=torch.float64)
    by_body = wide.float() + 1e-3
    assert check.difference(wide.float() + 3e-3, by_body, wide, check.ULPS) == ""
    assert check.difference(wide.float() + 5e-3, by_body, wide, check.ULPS) != ""


def test_few_of_many_numbers_are_taken_before_they_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    table, index, taken, doubled = value(0, "bf16", [1000, 8]), value(1, "i64", [4]), value(2, "bf16", [4, 8]), value(3, "bf16", [4, 8])
    func = {
        "operands": [table, index], "gives": [doubled],
        "ops": [
            {"name": "aten.embedding", "args": [("value", 0), ("value", 1)], "named": {}, "results": [taken]},
            {"name": "aten.mul.Tensor", "args": [("value", 2), 2], "named": {}, "results": [doubled]},
        ],
    }  # fmt: skip
    widened = body.widened
    sizes: list[int] = []
    monkeypatch.setattr(body, "widened", lambda x: (sizes.append(x.numel()), widened(x))[1])
    rows, which = body.operands_of(func)
    (found,) = body.function_of(func, wide=True)(rows, which)
    assert max(sizes) == 32
    assert found.dtype == torch.float64 and torch.equal(found, rows.double()[which] * 2)
