"""Captured optimizer steps compiled to one loop: the bits of the kernel that goes op after op, and what runs where there is none."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import ranks
import torch
from interlace._runtime import testing
from test_regions import script
from test_regions_beside import HANGS, alive, until
from test_rules import EVERY_OP, NUMBERS
from torch._inductor import config as inductor

import interlace
from interlace.capture.groups import rules_of
from interlace.capture.pilot import Pilot
from interlace.regions import Loops, kept, library
from interlace.regions.loops import WantedLoops

Tensor = torch.Tensor
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


pytestmark = pytest.mark.usefixtures("unsaid")


def text_of(kind: str) -> str:
    return "\n".join(rules_of(parity.RULES[kind]([torch.nn.Parameter(torch.randn(4, 3))])).lines)


def used(text: str, folder: Path) -> list[str]:
    """Has loops compiled and used; what was said."""
    said: list[str] = []
    loops = Loops(folder, said.append)
    loops.begin(text)
    until(lambda: loops.poll() or not loops.pending)
    return said


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The loops of all forms of all rules, and of every op."""
    texts = [text_of(kind) for kind in parity.RULES]
    assert used(testing.rule_loops([*texts, EVERY_OP], ["f32", "f64", "bf16"]), tmp_path_factory.mktemp("loops")) == []
    assert used(testing.rule_loops([EVERY_OP], ["f16"]), tmp_path_factory.mktemp("half")) == []


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.isnan(), y.isnan()) and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def bits(x: Tensor) -> Tensor:
    """Of all numbers; what is no number is 0."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), 0, x).view(whole)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("kind", list(parity.RULES))
def test_the_bits_are_those_of_the_ops(kind: str, dtype: str) -> None:
    """Steps from the first on, in all forms that the optimizer takes on its way; lengths that no vector divides."""
    optimizer = parity.RULES[kind]([torch.nn.Parameter(torch.randn(4, 3))])
    text = text_of(kind)
    forms = [tuple(line.strip() for line in block.splitlines() if " = " in line) for block in text.split("form {")[1:]]
    pilot = Pilot.fresh(optimizer, [[(2, 3)]])
    states = len(pilot.step().after.states()[0])
    generator = torch.Generator().manual_seed(2)
    for numel, scale in ((1, 1.0), (70_001, 0.3)):
        at = pilot
        before = torch.randn(numel, generator=generator).to(DTYPES[dtype])
        ops, loop = ([before.clone() for _ in range(2)] + [torch.zeros_like(before) for _ in range(states)] for _ in range(2))
        for _ in range(8):
            step = at.step()
            number, numbers = forms.index(step.forms[0].lines), step.forms[0].numbers
            ops[1] = loop[1] = torch.randn(numel, generator=generator).to(DTYPES[dtype])
            testing.rule_step(text, number, ops, numbers, grad_scale=scale)
            testing.rule_step(text, number, loop, numbers, grad_scale=scale, compiled=True)
            assert same(ops, loop)
            at = step.after
        assert numel == 1 or not torch.equal(ops[0], before)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_op_has_its_bits(dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    ops = [(4 * torch.randn(9_999, generator=generator)).to(DTYPES[dtype]) for _ in range(4)]
    for x in ops:
        x[::97], x[1::101], x[2::103], x[3::107] = 0.0, float("inf"), float("nan"), -0.0
    loop = [x.clone() for x in ops]
    gradient = ops[1].clone()
    for numbers in (NUMBERS, [0.5, 0.0, -1.0, 0.49999], [-0.0, float("inf"), 2.0, float("nan")]):
        testing.rule_step(EVERY_OP, 0, ops, numbers, grad_scale=0.5)
        testing.rule_step(EVERY_OP, 0, loop, numbers, grad_scale=0.5, compiled=True)
        assert same(ops, loop) and same([gradient], [loop[1]])
    assert int(ops[0].isnan().sum()) > 0


# Rules of which each is taken up by one test: what is there stays for the process.
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "taken up": lambda p: torch.optim.NAdam(p, lr=1e-3, maximize=True),
    "damaged": lambda p: torch.optim.Adamax(p, lr=1e-3, maximize=True),
    "other bits": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, maximize=True),
    "regions": lambda p: torch.optim.Adadelta(p, lr=0.5, maximize=True),
    "ends": lambda p: torch.optim.Adagrad(p, lr=1e-3, maximize=True),
    "ranks": lambda p: torch.optim.Rprop(p, lr=1e-3, maximize=True),
}
BROKEN = "if [ $1 = --version ]; then echo broken 1; else echo 'x: error: no' >&2; exit 1; fi\n"
ONE_BY_ONE = "the loops of the optimizer are not compiled, its ops run one after the other: "


def trainer_of(kind: str, cache: Path, **config: Any) -> tuple[interlace.Trainer, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    batch = {"x": torch.randn(8, 16)}
    settings = interlace.Config(cache=str(cache), schedule=[], **config)
    return interlace.compile(model, OTHERS[kind](model.parameters()), lambda m, b: m(b["x"]).square().mean(), batch, settings), batch


def train(kind: str, cache: Path, least: int = 5, **config: Any) -> tuple[list[int], list[float]]:
    """Of each step how many parts of parameters ran as loops, and the loss; until no rank compiles any more, and one more."""
    trainer, batch = trainer_of(kind, cache, **config)
    loops, looped, losses = trainer._run.programs.loops, [0], []
    end = time.monotonic() + 300
    over = False
    while not over or len(losses) < least:
        assert time.monotonic() < end
        busy = torch.tensor(float(loops.pending))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(busy)
        over = not busy
        losses.append(trainer.step(batch).item())
        looped.append(trainer.stats()["looped_updates"])
        time.sleep(0.0 if over else 0.05)
    trainer.close()
    return [after - before for before, after in itertools.pairwise(looped)], losses


of_the_host = pytest.mark.host("a device has kernels of its own for a captured step")


def alike(*runs: list[float]) -> bool:
    count = min(map(len, runs))
    return all(run[:count] == runs[0][:count] for run in runs) and len(set(runs[0])) == len(runs[0])


@of_the_host
def test_a_training_takes_them_up_without_another_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with inductor.patch({"cpp.cxx": script(tmp_path / "broken", BROKEN)}):
        without, expected = train("taken up", tmp_path / "other")
        train("taken up", tmp_path / "other")
    assert set(without) == {0}
    assert caplog.text.count(f"{ONE_BY_ONE}the C++ compiler failed (1): x: error: no") == 1
    caplog.clear()
    library._compiler.cache_clear()
    begun, losses = train("taken up", tmp_path / "cache")
    again, repeated = train("taken up", tmp_path / "cache")
    assert begun[0] == 0 and begun[-1] > 0 and set(again) == {begun[-1]}
    assert alike(expected, losses, repeated)
    assert caplog.text == ""


@of_the_host
def test_compiled_regions_and_loops_are_made_beside_one_another(tmp_path: Path) -> None:
    looped, _ = train("regions", tmp_path, regions="on")
    assert looped[0] == 0 and looped[-1] > 0


@of_the_host
def test_without_a_compiler_it_is_said_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with inductor.patch({"cpp.cxx": script(tmp_path / "none", "exit 1\n")}):
        looped, _ = train("ends", tmp_path / "cache")
    assert set(looped) == {0}
    assert caplog.text.count(f"{ONE_BY_ONE}there is no C++ compiler (g++)") == 1


def test_a_damaged_library_is_made_again(tmp_path: Path) -> None:
    rules = rules_of(OTHERS["damaged"]([torch.nn.Parameter(torch.randn(4, 3))]))
    text = testing.rule_loops(["\n".join(rules.lines)], ["f64"])
    wanted = WantedLoops.of_text(text, tmp_path)
    kept.put(wanted.path, wanted.key, {}, b"no library")  # as it was noted, and yet it cannot be loaded
    assert [line.partition(str(wanted.path))[0] for line in used(text, tmp_path)] == [ONE_BY_ONE]
    wanted.path.write_bytes(b"something else")
    assert used(text, tmp_path) == [f"{wanted.path} is damaged (its digest is not the noted one); it is made again"]
    assert wanted.path.read_bytes()[:4] == b"\x7fELF"


def test_loops_with_other_bits_are_not_used(tmp_path: Path) -> None:
    """A compiler that means it too well."""
    reads = 'sed -i "s/return a + n \\* b \\/ c/return a + n * (b \\/ c)/" *.cpp; exec g++ "$@"'
    compiler = f"if [ $1 = --version ]; then echo wrong 1; else {reads}; fi\n"
    text = "\n".join(rules_of(OTHERS["other bits"]([torch.nn.Parameter(torch.randn(4, 3))])).lines)
    with inductor.patch({"cpp.cxx": script(tmp_path / "cc", compiler)}):
        said = used(testing.rule_loops([text], ["f32"]), tmp_path / "cache")
    assert len(said) == 1 and said[0].startswith(ONE_BY_ONE) and "of them give other bits than their ops (rule_" in said[0]
    flats = [torch.ones(4) for _ in range(4)]
    with pytest.raises(ValueError, match="the form has no loop"):
        testing.rule_step(text, 0, flats, [0.5] * 12, compiled=True)


@of_the_host
def test_a_training_that_ends_leaves_no_compiler(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with inductor.patch({"cpp.cxx": script(tmp_path / "cc", HANGS.format(file=file))}):
        trainer, batch = trainer_of("ends", tmp_path / "cache")
        pid = int(until(lambda: trainer.step(batch) is not None and file.is_file() and file.read_text().strip()))
        trainer.close()
        until(lambda: not alive(pid))
    assert [path.suffix for path in (tmp_path / "cache" / "regions").iterdir()] == [".lock"]


def on_a_rank(cache: str) -> tuple[list[int], list[float]]:
    return train("ranks", Path(cache))


@of_the_host
def test_ranks_take_them_up_each_by_itself(tmp_path: Path) -> None:
    """One compiles, the other waits for it; their steps need not be the same ones."""
    (first, losses), (second, others) = ranks.run(on_a_rank, 2, str(tmp_path))
    assert first[-1] > 0 and second[-1] > 0 and alike(losses, others)
    assert len(list((tmp_path / "regions").glob("*.so"))) == 1
