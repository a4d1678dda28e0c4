"""The compile cache: what a second start leaves out, what changes its keys and what does not, damaged files, other versions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import followed_values
import parity
import pytest
import ranks
import torch
import zoo
from test_trainer_bits import digest
from torch import nn

import interlace
from interlace import _core
from interlace.compiling.cache import Cache, versions
from interlace.compiling.dropout import changed, put_back, take_out
from interlace.compiling.fingerprint import Fingerprint, Unsure
from interlace.dist.peers import PeerError, Peers

SCALE = 1.0


def start(
    folder: str,
    case: str = "llama",
    dropout: float = 0.1,
    lr: float = 1e-3,
    rows: int = 2,
    steps: int = 2,
    **config: Any,
) -> dict[str, Any]:
    """One start: what came from the cache, and what the steps gave."""
    torch.manual_seed(0)
    model = zoo.gpt2(dropout) if case == "gpt2" else zoo.CASES[case].build()
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    settings = interlace.Config(timeout_s=60, cache=folder, **config)
    with interlace.compile(model, opt, zoo.causal_loss, zoo.tokens(rows, 0), settings) as trainer:
        losses = [float(trainer.step(zoo.tokens(rows, i))) for i in range(steps)]
        cache = trainer._run.programs.cache
        return {
            "cached": sorted(trainer._run.programs.cached), "losses": losses, "notes": list(cache.notes),
            "program": _core.digest(_core.Program.parse(trainer.program).print()), "table": trainer.compile_table(),
            "weights": digest(trainer.state_dict(all_ranks=True)),
        }  # fmt: skip


BOTH = ["capture", "passes"]


def test_a_second_start_leaves_out_capture_and_passes(tmp_path: Path) -> None:
    first = ranks.run(start, 2, str(tmp_path))
    second = ranks.run(start, 2, str(tmp_path))
    assert [r["cached"] for r in first] == [[], []]
    assert [r["cached"] for r in second] == [BOTH, []]  # rank 0 reads, the others are sent the text
    for a, b in zip(first, second, strict=True):
        assert (a["program"], a["losses"], a["weights"]) == (b["program"], b["losses"], b["weights"])
    assert "(cached)" in second[0]["table"] and "total" in second[0]["table"]


def test_a_rank_whose_cache_differs_gets_the_text_of_rank_0(tmp_path: Path) -> None:
    fresh = ranks.run(start, 2, str(tmp_path / "0"))
    ranks.run(start, 2, str(tmp_path / "other"), strategy="zero1")
    # Rank 1 has sound files under the same keys, but of another strategy.
    mine = tmp_path / "1" / "programs"
    mine.mkdir(parents=True)
    for file in (tmp_path / "0" / "programs").iterdir():
        kind = file.name.partition("-")[0]
        (other,) = (tmp_path / "other" / "programs").glob(f"{kind}-*")
        (mine / file.name).write_bytes(other.read_bytes())
    found = ranks.run(start_of_rank, 2, str(tmp_path))
    assert [f["cached"] for f in found] == [BOTH, []] and [f["notes"] for f in found] == [[], []]
    for key in ("program", "losses", "weights"):
        assert [f[key] for f in found] == [f[key] for f in fresh], key


def start_of_rank(folder: str) -> dict[str, Any]:
    return start(f"{folder}/{parity.rank_and_size()[0]}")


def damaged_on_the_way() -> str:
    """A start in which what rank 1 takes from the store has one word changed."""
    whole = Peers.broadcast

    def changed(self: Peers, what: str, data: bytes, patience_s: float | None = None) -> bytes:
        found = whole(self, what, data, patience_s)
        return found.replace(b"aten.silu", b"aten.relu", 1) if self.rank == 1 else found

    with mock.patch.object(Peers, "broadcast", changed), pytest.raises(PeerError) as error:
        start("off")
    return str(error.value)


def test_a_rank_with_another_program_is_named_on_all_ranks() -> None:
    for said in ranks.run(damaged_on_the_way, 2):
        assert "rank 1 received another program than rank 0 sent (digest " in said and "start the run again" in said


@pytest.mark.parametrize(
    "other", [{"lr": 0.5}, {"dropout": 0.25}, {"config": {"seed": 7}}, {"config": {"timeout_s": 90.0}}], ids=str
)
def test_rates_probabilities_and_seeds_are_no_part_of_the_key(tmp_path: Path, other: dict[str, Any]) -> None:
    config = {k: v for k, v in other.pop("config", {}).items() if k != "timeout_s"}
    start(str(tmp_path), "gpt2")
    files = sorted(p.name for p in (tmp_path / "programs").iterdir())
    second = start(str(tmp_path), "gpt2", **other, **config)
    fresh = start("off", "gpt2", **other, **config)
    assert second["cached"] == BOTH and fresh["cached"] == []
    assert (second["program"], second["losses"], second["weights"]) == (
        fresh["program"],
        fresh["losses"],
        fresh["weights"],
    )
    assert sorted(p.name for p in (tmp_path / "programs").iterdir()) == files


def test_dropout_switched_off_is_another_program(tmp_path: Path) -> None:
    start(str(tmp_path), "gpt2", dropout=0.1)
    second = start(str(tmp_path), "gpt2", dropout=0.0)
    assert second["cached"] == []
    assert second["program"] == start("off", "gpt2", dropout=0.0)["program"]


@pytest.mark.parametrize("other", [{"rows": 4}, {"case": "gpt2"}, {"rng": "compat"}, {"fullgraph": False}], ids=str)
def test_what_shapes_a_capture_is_part_of_its_key(tmp_path: Path, other: dict[str, Any]) -> None:
    start(str(tmp_path))
    assert "capture" not in start(str(tmp_path), **other)["cached"]


@pytest.mark.parametrize("other", [{"clip_norm": 1.0}, {"strategy": "zero1"}, {"accumulation": 2, "rows": 4}], ids=str)
def test_what_passes_do_is_part_of_a_plans_key(tmp_path: Path, other: dict[str, Any]) -> None:
    start(str(tmp_path))
    assert start(str(tmp_path), **other)["cached"] == ["capture"]


@pytest.mark.parametrize("kind", ["flipped", "short", "empty", "version", "format", "json"])
def test_damaged_files_and_other_versions_are_made_again_and_said_once(tmp_path: Path, kind: str) -> None:
    first = start(str(tmp_path))
    for file in (tmp_path / "programs").iterdir():
        data = bytearray(file.read_bytes())
        line, _, rest = bytes(data).partition(b"\n")
        head = json.loads(line)
        if kind == "flipped":
            data[-20] ^= 1
        elif kind == "version":
            data = bytearray(json.dumps({**head, "versions": "interlace 0.0.9, torch 1.0"}).encode() + b"\n" + rest)
        elif kind == "format":
            data = bytearray(json.dumps({**head, "format": 99}).encode() + b"\n" + rest)
        elif kind == "json":
            data = bytearray(b"[]\n" + rest)
        else:
            data = data[: len(data) // 2] if kind == "short" else bytearray()
        file.write_bytes(bytes(data))
    second = start(str(tmp_path))
    assert second["cached"] == [] and second["program"] == first["program"]
    if kind in ("version", "format"):  # both files are, said once
        (note,) = second["notes"]
        assert f"programs in {tmp_path / 'programs'} are of another version (" in note and "compiled again" in note
    else:  # one file of the capture, one of the plan
        assert len(second["notes"]) == 2
        assert all("is damaged (" in note and "compiled again and replaced" in note for note in second["notes"])
    third = start(str(tmp_path))
    assert third["cached"] == BOTH and third["notes"] == []


def test_a_folder_that_cannot_be_written_is_said_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    found = start(str(tmp_path / "file"))
    assert found["cached"] == [] and any(
        "cannot keep the compiled program" in note or "cannot read" in note for note in found["notes"]
    )


def test_every_byte_of_a_file_counts(tmp_path: Path) -> None:
    Cache(tmp_path).put("plan", "k" * 64, {"text": "abc"}, {"t": torch.arange(3)})
    (file,) = (tmp_path / "programs").iterdir()
    good = file.read_bytes()
    record, tensors = Cache(tmp_path).get("plan", "k" * 64) or ({}, {})
    assert record == {"text": "abc"} and tensors["t"].tolist() == [0, 1, 2]
    assert versions() in good.decode(errors="replace")
    for i in range(len(good)):
        file.write_bytes(good[:i] + bytes([good[i] ^ 0x5A]) + good[i + 1 :])
        assert Cache(tmp_path).get("plan", "k" * 64) is None, i


# ---- what a fingerprint sees ----


class Net(nn.Module):
    def __init__(self, width: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scale = scale
        self.shift = torch.ones(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc(x)) * self.scale * SCALE + self.shift


def mark(model: nn.Module, loss: Any = None) -> str:
    f = Fingerprint()
    f.model(model)
    f.value(loss, "loss_fn")
    return f.digest()


def closure(value: Any) -> Any:
    return lambda m, b: m(b) * value


def from_elsewhere(m: Any, b: Any) -> Any:
    from followed_values import SCALE

    return m(b) * SCALE * float(os.environ.get("INTERLACE_TEST_SCALE", "1")) * len(sys.argv)


def test_structure_and_code_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    base = mark(Net())
    assert mark(Net()) == base, "values of parameters are not seen"
    assert mark(Net(5)) != base and mark(Net(scale=3.0)) != base
    for change in (
        lambda m: m.fc.weight.requires_grad_(False),
        lambda m: m.eval(),
        lambda m: m.double(),
        lambda m: setattr(m, "shift", torch.zeros(4)),
        lambda m: m.register_buffer("more", torch.zeros(1)),
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.fc.weight.register_hook(lambda g: g),
        lambda m: setattr(m.drop, "p", 0.0),
        lambda m: setattr(m, "forward", lambda x: x),
    ):
        other = Net()
        change(other)
        assert mark(other) != base
    other = Net()
    other.drop.p = 0.3
    assert mark(other) == base
    with monkeypatch.context() as patch:
        patch.setitem(Net.forward.__globals__, "SCALE", 3.0)
        assert mark(Net()) != base
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", lambda self, x: self.fc(x))
        assert mark(Net()) != base
    assert mark(Net()) == base


def test_loss_functions_count_by_code_and_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    assert mark(model, closure(1.0)) == mark(model, closure(1.0))
    assert mark(model, closure(1.0)) != mark(model, closure(2.0))
    assert mark(model, lambda m, b: m(b) + 1) != mark(model, lambda m, b: m(b) + 2)
    assert mark(model, closure(SimpleNamespace(a=1))) != mark(model, closure(SimpleNamespace(a=2)))
    with pytest.raises(Unsure, match="cannot be compared"):
        mark(model, closure(iter([1])))
    before = mark(model, from_elsewhere)
    monkeypatch.setenv("INTERLACE_TEST_SCALE", "2")
    assert mark(model, from_elsewhere) != before
    before = mark(model, from_elsewhere)
    monkeypatch.setattr(from_elsewhere, "factor", 2.0, raising=False)
    assert mark(model, from_elsewhere) != before
    before = mark(model, from_elsewhere)
    monkeypatch.setattr(followed_values, "SCALE", 3.0)
    assert mark(model, from_elsewhere) != before
    before = mark(model, from_elsewhere)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--more"])
    assert mark(model, from_elsewhere) != before
    assert mark(model, lambda m, b: torch.ops.aten.relu(m(b))) != mark(model, lambda m, b: torch.ops.aten.tanh(m(b)))
    with pytest.raises(Unsure, match="outside the model"):
        mark(model, closure(nn.Linear(2, 2)))


def test_a_replaced_function_of_a_library_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    base = mark(zoo.llama())
    assert mark(zoo.llama()) == base
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
        assert mark(zoo.llama()) != base


# ---- probabilities in texts ----

DROPPED = """\
phase micro_batch takes () gives () {
  %2: f32[4] = aten.bernoulli.p(%1, 0.9) {fwd m2 rng=3}
  %3: f32[4] = aten.div.Scalar(%2, 0.9) {fwd m2}
  %4: f32[4] = aten.mul.Tensor(%1, %3) {fwd m2}
}
"""


def test_probabilities_are_taken_out_and_put_back() -> None:
    template, numbers = take_out(DROPPED)
    assert numbers == {3: "0.9"} and template.count("<keep 3>") == 2 and "0.9" not in template
    assert put_back(template, numbers) == DROPPED
    assert put_back(template, {}) is None
    # A mask that is used in another way is no dropout as torch traces it.
    for other in (
        DROPPED.replace("mul.Tensor(%1, %3)", "mul.Tensor(%2, %3)"),
        DROPPED.replace("Scalar(%2, 0.9)", "Scalar(%2, 0.8)"),
        DROPPED.replace("}\n}", "}\n  output(%2) {fwd}\n}"),
    ):
        assert take_out(other) == (other, {})


def test_probabilities_of_attention_are_taken_out_and_put_back() -> None:
    """A dropped share, not a kept one, of both parts and of what recomputation repeats."""
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    forward = f"  %7: f32[4], %8: f32[4] = {name}(%11, %12, %13, 0.1, true, scale=0.1) {{fwd rng=4}}\n"
    backward = f"  %9: f32[4], _, _ = {name}_backward(%16, %11, %12, %13, %7, %8, 0.1, true, attn_mask=none, scale=0.1) {{bwd rng=4}}\n"
    text = DROPPED.replace("}\n}", "}\n" + forward + forward.replace("fwd", "bwd") + backward + "}")
    template, numbers = take_out(text)
    assert numbers == {3: "0.9", 4: "0.1"} and template.count("<drop 4>") == 3 and template.count("0.1") == 3
    assert put_back(template, numbers) == text
    assert changed(text, [("a.p", 0.1)], [("a.p", 0.25)]) is None  # the scale may be made of it
    other = changed(text.replace("scale=0.1", "scale=0.5"), [("a.p", 0.1)], [("a.p", 0.25)])
    assert other is not None and other.count(", 0.25") == 3 and other.count("0.75") == 2 and "0.1" not in other and "0.9" not in other


def test_other_probabilities_are_put_into_a_text_only_where_it_is_sure() -> None:
    old, new = [("a.p", 0.1)], [("a.p", 0.25)]
    assert changed(DROPPED, old, old) == DROPPED
    assert changed(DROPPED, old, new) == DROPPED.replace("0.9", "0.75")
    assert changed(DROPPED, old, [("b.p", 0.25)]) is None
    assert changed(DROPPED, [*old, ("c.p", 0.1)], [*new, ("c.p", 0.5)]) is None, "which of the two is it?"
    assert changed(DROPPED.replace("mul.Tensor(%1, %3)", "mul.Scalar(%1, 0.9)"), old, new) is None, (
        "p is used elsewhere"
    )
    assert changed(DROPPED.replace("bernoulli.p(%1, 0.9)", "bernoulli.p(%1, 0.7)"), old, new) is None
