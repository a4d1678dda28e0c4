"""Regions that are compiled beside the training: steps run their bodies until all ranks have them; what goes wrong leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import parity
import pytest
import ranks
import torch
import zoo
from test_regions import ALL, GATED, funcs, script
from torch._inductor import config as inductor

import interlace
from interlace.regions import Making, RegionsError, Wanted, kept, library

PATIENCE_S = 300.0  # of a test for a compiler on a loaded machine; nothing is asserted about it
HANGS = 'if [ "$1" = --version ]; then echo slow 1; else echo $$ > {file}; sleep 1000; fi\n'


pytestmark = pytest.mark.usefixtures("unsaid")


def perceptron() -> torch.nn.Module:
    """The fewest regions that there are to compile."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(192, 32), torch.nn.LayerNorm(32), torch.nn.SiLU(), torch.nn.Linear(32, 5)
    )  # fmt: skip


CASES = zoo.CASES | {"perceptron": zoo.Case(perceptron, zoo.images, zoo.class_loss)}


def until(done: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := done()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def trainer_of(case: str, cache: str, **config: Any) -> tuple[interlace.Trainer, Any]:
    torch.manual_seed(0)
    model = CASES[case].build()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    batch = CASES[case].batch(2, 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = interlace.Config(cache=cache, **{"schedule": [], "regions": "on", **config})
    return interlace.compile(model, optimizer, CASES[case].loss, batch, settings), batch


def until_swapped(case: str, cache: str, folder: str, after: int = 3) -> dict[str, Any]:
    """Steps until the kernels are there, and some more; checkpoints of step 1 and of the end."""
    trainer, batch = trainer_of(case, cache)
    losses = [trainer.step(batch).item()]
    first = trainer.stats()["regions"]
    trainer.save(f"{folder}/first")
    settled = [trainer.settled]
    end = time.monotonic() + PATIENCE_S
    while trainer.swaps == 0 and time.monotonic() < end:
        losses.append(trainer.step(batch).item())
        time.sleep(0.1)
    losses += [trainer.step(batch).item() for _ in range(after)]
    settled.append(trainer.settled)
    trainer.save(f"{folder}/last")
    last, swaps, artifact = trainer.stats()["regions"], trainer.swaps, trainer._run.regions
    trainer.close()
    return {"losses": losses, "first": first, "last": last, "swaps": swaps, "artifact": artifact, "settled": settled}


def steps(case: str, cache: str, count: int, **config: Any) -> dict[str, Any]:
    trainer, batch = trainer_of(case, cache, **config)
    losses = [trainer.step(batch).item() for _ in range(count)]
    found = {"losses": losses, "regions": trainer.stats()["regions"], "artifact": trainer._run.regions, "swaps": trainer.swaps}
    trainer.close()
    return found


@pytest.mark.parametrize(("world", "case", "least"), [
    (1, "perceptron", 2), (2, "perceptron", 2), pytest.param(2, "llama", 5, marks=pytest.mark.soak),
])
def test_bodies_run_until_all_ranks_have_the_kernels(
    tmp_path: Path, world: int, case: str, least: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = str(tmp_path / "cache")
    if world == 1:
        runs = [until_swapped(case, cache, str(tmp_path))]
        said = caplog.text
        assert f"compiling {runs[0]['last']['regions']} regions beside the training (step 1 runs their bodies)" in said
        assert f"swapped in at step {runs[0]['last']['from_step']}" in said
    else:
        runs = ranks.run(until_swapped, 2, case, cache, str(tmp_path))
    count = len(runs[0]["losses"])
    call = steps if world == 1 else None
    plain = [call(case, cache, count, regions="off")] if call else ranks.run(steps, 2, case, cache, count, regions="off")
    for run, without in zip(runs, plain, strict=True):
        swapped = run["last"]["from_step"]
        assert swapped > 1 and run["swaps"] == 1 and run["settled"] == [False, True]
        assert run["first"] == {**run["last"], "compiled": 0, "calls": 0, "kernels": 0, "from_step": 1}
        assert run["last"]["kernels"] > run["last"]["calls"] >= run["last"]["compiled"] == run["last"]["regions"] >= least
        assert run["losses"][: swapped - 1] == without["losses"][: swapped - 1]
        assert parity.loss_distance(run["losses"], without["losses"]) < 1e-4
    assert len({run["last"]["from_step"] for run in runs}) == len({run["artifact"] for run in runs}) == 1
    # From the cache they run from the first step, with the bits of a run that would have waited.
    again = [steps(case, cache, 5)] if world == 1 else ranks.run(steps, 2, case, cache, 5)
    waited = [steps(case, cache, 5, regions_wait=True)] if world == 1 else ranks.run(steps, 2, case, cache, 5, regions_wait=True)
    assert again == waited
    assert all(run["regions"]["from_step"] == 1 and run["swaps"] == 0 and run["artifact"] == runs[0]["artifact"] for run in again)


def test_a_resume_compares_the_kernels_when_they_are_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = str(tmp_path / "cache")
    until_swapped("perceptron", cache, str(tmp_path))
    made, other = tmp_path / "cache" / "regions", tmp_path / "other" / "regions"
    for folder, cache_, words in (
        ("last", cache, []),
        ("first", cache, ["no compiled regions, this run has regions"]),
        ("last", str(other.parent), ["goes on with other bits until they are compiled"]),
    ):
        caplog.clear()
        with contextlib.ExitStack() as compiling:
            if cache_ != cache:  # where another process compiles the same ones
                other.mkdir(0o700, parents=True)
                for lock in made.glob("*.lock"):
                    fd = kept.take_lock(other / lock.name)
                    assert fd is not None
                    compiling.callback(os.close, fd)
            trainer, batch = trainer_of("perceptron", cache_)
            trainer.load(tmp_path / folder)
            for word in words:
                assert word in caplog.text
            assert bool(words) == ("other bits" in caplog.text)
            if cache_ != cache:
                caplog.clear()
                trainer.step(batch)
                assert trainer.swaps == 0
                for file in made.iterdir():
                    if file.suffix != ".lock":
                        shutil.copy2(file, other)
        if cache_ != cache:
            until(lambda trainer=trainer, batch=batch: trainer.step(batch) is not None and trainer.swaps)
            assert "other bits" not in caplog.text  # they are those of the run that saved
        trainer.close()


@pytest.mark.parametrize("how", ["fails", "hangs", "none"])
def test_without_a_compiler_training_goes_on(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pid"
    compiler, reason = {
        "fails": ("if [ $1 = --version ]; then echo broken 1; else echo 'x: error: no' >&2; exit 1; fi\n", "the C++ compiler failed (1)"),
        "hangs": (HANGS.format(file=file), "the C++ compiler took longer than 1 s"),
        "none": ("exit 1\n", "there is no C++ compiler (g++)"),
    }[how]
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 1.0)
    cache = tmp_path / "cache"
    with inductor.patch({"cpp.cxx": script(tmp_path / "cc", compiler)}):
        trainer, batch = trainer_of("perceptron", str(cache))
        losses = [trainer.step(batch).item()]
        until(lambda: losses.append(trainer.step(batch).item()) or trainer.settled)
        losses += [trainer.step(batch).item() for _ in range(3)]
        assert trainer.stats()["regions"]["compiled"] == trainer.swaps == 0
        trainer.close()
    assert caplog.text.count(f"regions are not compiled, their bodies run op by op: {reason}") == 1
    assert losses == steps("perceptron", str(cache), len(losses), regions="off")["losses"]
    assert not list((cache / "regions").glob("*.so"))
    if how == "hangs":
        assert not alive(int(file.read_text()))


def lacking(case: str, folder: str, count: int) -> dict[str, Any]:
    """Rank 1 has a compiler that fails, and a cache of its own."""
    rank = torch.distributed.get_rank()
    library._compiler.cache_clear()
    broken = "if [ $1 = --version ]; then echo broken 1; else echo 'x: error: no' >&2; exit 1; fi\n"
    with inductor.patch({"cpp.cxx": script(Path(folder) / "cc", broken)} if rank == 1 else {}):
        trainer, batch = trainer_of(case, os.path.join(folder, str(rank)))
        losses = [trainer.step(batch).item()]
        while not trainer.settled:
            losses.append(trainer.step(batch).item())
            time.sleep(0.05)  # the compiler has the core
        found = {"swaps": trainer.swaps, "compiled": trainer.stats()["regions"]["compiled"], "count": len(losses)}
        trainer.close()
    library._compiler.cache_clear()
    return found


def test_what_one_rank_cannot_compile_none_uses(tmp_path: Path) -> None:
    first, second = ranks.run(lacking, 2, "perceptron", str(tmp_path), 0)
    assert first == second and first["swaps"] == first["compiled"] == 0


def waited_for(case: str, folder: str) -> dict[str, Any]:
    """Rank 1 has a cache of its own, and a compiler that takes longer than the timeout."""
    rank = torch.distributed.get_rank()
    library._compiler.cache_clear()
    slow = "[ $1 = --version ] || sleep 14\nexec g++ \"$@\"\n"
    with inductor.patch({"cpp.cxx": script(Path(folder) / "cc", slow)} if rank == 1 else {}):
        trainer, batch = trainer_of(case, os.path.join(folder, str(rank)), regions_wait=True, timeout_s=10.0)
        found = {"compiled": trainer.stats()["regions"]["compiled"], "loss": trainer.step(batch).item()}
        trainer.close()
    library._compiler.cache_clear()
    return found


@pytest.mark.soak
def test_a_rank_that_compiles_for_longer_than_the_timeout_is_not_lost(tmp_path: Path) -> None:
    first, second = ranks.run(waited_for, 2, "perceptron", str(tmp_path))
    assert first["compiled"] == second["compiled"] == 0  # the compilers differ
    assert first["loss"] > 0 and second["loss"] > 0


PROGRAM = """
import sys, time
import interlace, torch
from torch._inductor import config
config.cpp.cxx = (sys.argv[1],)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.SiLU(), torch.nn.Linear(32, 1))
loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
batch = {"x": torch.randn(16, 8), "y": torch.randn(16, 1)}
settings = interlace.Config(regions="on", cache=sys.argv[2], schedule=[], regions_wait=sys.argv[3] == "wait")
trainer = interlace.compile(model, torch.optim.AdamW(model.parameters()), loss, batch, settings)
while True:
    trainer.step(batch)
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("how", "wait"), [
    (signal.SIGKILL, "beside"), (signal.SIGINT, "beside"), (signal.SIGTERM, "wait"),
    *(pytest.param(*pair, marks=pytest.mark.soak)
      for pair in [(signal.SIGKILL, "wait"), (signal.SIGINT, "wait"), (signal.SIGTERM, "beside")]),
])  # fmt: skip
def test_a_run_that_ends_leaves_no_compiler(tmp_path: Path, how: signal.Signals, wait: str) -> None:
    file, cache, temporary = tmp_path / "pid", tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "run.py").write_text(textwrap.dedent(PROGRAM))
    compiler = script(tmp_path / "cc", HANGS.format(file=file))[0]
    words = [tmp_path / "run.py", compiler, cache, wait]
    run = commands.Command(*words, env={**os.environ, "TMPDIR": str(temporary)}, stdout=commands.DEVNULL, stderr=commands.DEVNULL)
    try:
        pid = int(until(lambda: file.is_file() and file.read_text().strip()))
        session = os.getsid(pid)
        assert session != os.getsid(run.pid) and alive(session)
        run.send_signal(how)
        run.wait()
        until(lambda: not alive(pid) and not alive(session))
    finally:
        run.send_signal(signal.SIGKILL)
    (lock,) = (cache / "regions").iterdir()
    assert lock.suffix == ".lock"
    assert not [path for path in temporary.iterdir() if path.name.startswith("interlace")]
    os.close(until(lambda: kept.take_lock(lock)))  # the next run can compile them


def test_closing_and_forgetting_end_it(tmp_path: Path) -> None:
    for number, end in enumerate((lambda trainer: trainer.close(), lambda trainer: trainer._run.peers.fail(ValueError("x")))):
        file = tmp_path / f"pid{number}"
        with inductor.patch({"cpp.cxx": script(tmp_path / "cc", HANGS.format(file=file))}):
            trainer, batch = trainer_of("perceptron", str(tmp_path / f"cache{number}"))
            pid = int(until(lambda file=file: file.is_file() and file.read_text().strip()))
            assert torch.isfinite(trainer.step(batch))
            end(trainer)
            trainer.close()
            until(lambda pid=pid: not alive(pid))


def test_another_process_that_gives_up_is_replaced(tmp_path: Path) -> None:
    wanted, said = Wanted.of(funcs(*ALL), "on", tmp_path), []
    with wanted.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        making = Making(wanted, "; we train meanwhile", said.append)
        assert making.poll() is None and making._child is None
        assert said == ["another process of this host compiles the regions; we train meanwhile"]
    found = until(making.poll)
    assert said[1:] == ["compiling 3 regions; we train meanwhile"] and len(found.keys) == 3
    making.close()
    assert Making(wanted, "", said.append).poll().artifact == found.artifact and len(said) == 2


def test_a_compiling_process_that_dies_is_told(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with inductor.patch({"cpp.cxx": script(tmp_path / "cc", HANGS.format(file=file))}):
        making = Making(Wanted.of(funcs(GATED), "on", tmp_path / "cache"), "", print)
        pid = int(until(lambda: file.is_file() and file.read_text().strip()))
        assert making._child is not None
        making._child.send_signal(signal.SIGKILL)
        with pytest.raises(RegionsError, match="the process that compiles them has ended"):
            until(making.poll)
    until(lambda: not alive(pid))


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    wanted = Wanted.of(funcs(GATED), "on", tmp_path)
    wanted.place.joinpath(f"{wanted.key[:40]}.so").mkdir()  # what is made cannot be put there
    making = Making(wanted, "", print)
    with pytest.raises(RegionsError, match="directory"):
        until(making.poll)


def test_a_host_that_starts_no_more_processes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error is the one that a lock gives which another process has."""
    wanted = Wanted.of(funcs(GATED), "on", tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(BlockingIOError):
        Making(wanted, "", print)
    fd = kept.take_lock(wanted.lock)
    assert fd is not None
    os.close(fd)


def interlace_command(folder: Path, *words: str) -> str:
    done = commands.run(*words, cwd=folder, env={**os.environ, "INTERLACE_CACHE": str(folder / "cache")})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_log_and_the_reports_show_them(tmp_path: Path) -> None:
    tiny = ["train", "--model", "llama-tiny", "--steps", "3", "--batch", "4", "--seq", "32", "--schedule", "none", "--ranks", "1"]
    interlace_command(tmp_path, *tiny, "--regions", "on", "--regions-wait", "--log", "run.jsonl", "--program", "run.il", "--save", "kept")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    told = [line["regions"] for line in lines if "regions" in line]
    assert len(told) == 1 and told[0]["compiled"] == told[0]["regions"] > 4 and told[0]["from_step"] == 1
    facts = json.loads(interlace_command(tmp_path, "report", "run.jsonl", "-o", "run.html", "--json"))
    assert facts["regions"] == told[0]
    page = (tmp_path / "run.html").read_text()
    assert f"{told[0]['calls']} calls for {told[0]['kernels']} kernels, from step 1 on" in page
    interlace_command(tmp_path, "report", "run.il", "--cluster", "local-1", "-o", "program.html")
    in_program = f"{told[0]['regions']}, in {told[0]['calls']} calls for {told[0]['kernels']} kernels"
    assert in_program in (tmp_path / "program.html").read_text()
    settings = json.loads((tmp_path / "kept" / "run.json").read_text())["settings"]
    assert settings["regions"] == "on" and "regions_wait" not in settings


def in_turns(cache: str) -> dict[str, Any]:
    """Batches of two shapes; the program of the one that does not run when the kernels come is built again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(61, 24), torch.nn.LayerNorm(24), torch.nn.SiLU(), torch.nn.Linear(24, 61))
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())  # noqa: E731
    long = {"x": zoo.tokens(2, 1)["input_ids"]}
    short = {"x": long["x"][:, :8].contiguous()}
    sizes = {"x": [(2, 8), (2, 12)]}
    config = interlace.Config(regions="on", cache=cache, schedule=[], shapes=sizes, pad={"x": 0})
    trainer = interlace.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, long, config)
    trainer.step(long), trainer.step(short)
    until(lambda: trainer.step(short) is not None and trainer.settled)
    regions = [trainer.stats()["regions"]]
    trainer.step(long)
    found = {"regions": [*regions, trainer.stats()["regions"]], "shapes": trainer.stats()["compiled_shapes"]}
    trainer.close()
    return found


def test_programs_of_other_shapes_get_them_too(tmp_path: Path) -> None:
    found = in_turns(str(tmp_path))
    assert found["shapes"] == 2
    for regions in found["regions"]:
        assert regions["compiled"] == regions["regions"] > 1
