"""`interlace profile`: what is measured, kept, found again, and refused."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import commands
import pytest
import torch

from interlace.cli import profile as command
from interlace.cost import Machine, Store, StoreError, tier
from interlace.cost.measure import StepTimes
from interlace.cost.measurements import CollectiveTime, OpTime, Profile, from_rows
from interlace.cost.rank import Keeper, measure
from interlace.dist.launch import PARENT, free_port, rank_environment
from interlace.dist.peers import Peers

_core = pytest.importorskip("interlace._core")
_runtime = pytest.importorskip("interlace._runtime")

PROGRAM = """interlace 1 captured
input %0: f32[64,64] "x"
const %1: f32[] "c" = [2.0]
phase micro_batch takes () gives () {
  %2: f32[64,64] = aten.mm(%0, %0) {fwd}
  %3: f32[64,64] = aten.mm(%2, %0) {fwd}
  %4: f32[64,64]{1,64} in %3+0 = view(%3) {fwd}
  %5: f32[64,64] = aten.mul.Tensor(%2, %4) {fwd}
  %6: f32[] = aten.sum(%5) {fwd}
  output(%6) {fwd name="loss"}
}
"""


OFFLOADED = """interlace 1 scheduled
input %0: f32[512,512] "x"
phase micro_batch takes () gives () {
  %2: f32[512,512] = aten.mm(%0, %0) {fwd}
  offload.start(%2) {fwd}
  %3: f32[512,512] = aten.mul.Tensor(%0, %0) {fwd}
  offload.wait(%2) {fwd}
  reload.start(%2) {fwd}
  %4: f32[512,512] = aten.mm(%3, %0) {fwd}
  reload.wait(%2) {fwd}
  %5: f32[512,512] = aten.mul.Tensor(%2, %4) {fwd}
  %6: f32[] = aten.sum(%5) {fwd}
  output(%6) {fwd name="loss"}
}
"""


def interlace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(*arguments)


def profiled(*arguments: str) -> tuple[dict[str, Any], str]:
    done = interlace("profile", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "small.il"
    file.write_text(PROGRAM)
    return str(file)


def test_second_start_measures_nothing(program: str, tmp_path: Path) -> None:
    store, export = str(tmp_path / "kept" / "p.sqlite"), str(tmp_path / "here.profile")
    options = ["--program", program, "--ranks", "1", "--threads", "1", "--budget", "0.2", "--store", store]
    first, _ = profiled(*options)
    assert first["program_ops"] == first["program_ops_known"] == 3  # the two products are one kind
    assert first["measured_now"] > 4 and first["estimated_ops"] == 0
    second, _ = profiled(*options, "--export", export)
    assert second["measured_now"] == 0 and second["copies"] == first["copies"]
    simulation = _core.Simulation(_core.Program.parse(PROGRAM, "small"), "local-1", profile=Path(export).read_text())
    facts = json.loads(simulation.json())
    assert facts["profile"]["op_kinds"] == facts["profile"]["measured_op_kinds"] == 3
    assert simulation.step_us > 0
    shown = interlace("profile", "show", "--ranks", "1", "--threads", "1", "--store", store)
    assert shown.returncode == 0 and "aten.mm(f32[64,64],f32[64,64])->f32[64,64]" in shown.stdout


def test_two_ranks_measure_together(tmp_path: Path) -> None:
    facts, _ = profiled(
        "--model", "llama-tiny", "--seq", "32", "--micro-batch", "1", "--budget", "1", "--store", str(tmp_path / "p")
    )
    assert facts["program_ops"] == facts["program_ops_known"] > 30
    kinds = {name.split()[0] for name in facts["collectives"]}
    assert kinds == {"gather", "reduce", "all_reduce", "p2p"}
    assert {name.split()[0] for name in facts["copies"]} == {"h2d", "d2h", "file_read", "file_write"}
    assert facts["together"] == {}, "nobody asked for a tier"
    assert facts["compute_slowdown_beside_transfer"] >= 1 and facts["issue_us"] > 0
    gathers = {int(name.split()[3]): us for name, us in facts["collectives"].items() if name.startswith("gather")}
    assert len(gathers) > 1 and min(gathers.values()) > 0


def test_a_program_that_offloads_is_measured_beside_its_files(tmp_path: Path) -> None:
    file, store, export = tmp_path / "off.il", str(tmp_path / "p.sqlite"), str(tmp_path / "here.profile")
    file.write_text(OFFLOADED)
    options = ["--program", str(file), "--ranks", "1", "--threads", "1", "--budget", "0.1", "--store", store]
    first, _ = profiled(*options)
    assert first["program_ops"] == first["program_ops_known"] == 3
    assert first["together"].keys() == {"compute file_read", "compute file_write", "file_read file_write"}
    for one, two, samples in first["together"].values():
        assert one >= 1 and two >= 1 and samples >= 0
    second, _ = profiled(*options, "--export", export)
    assert second["measured_now"] == 0 and second["together"] == first["together"]
    third, _ = profiled(*options, "--tier", str(tmp_path))
    assert third["measured_now"] in (0, 8 + 3), "the same disk as the temporary folder's, or another"
    profile = Path(export).read_text()
    assert profile.startswith("interlace-profile 2\n") and "\ntogether compute 1" in profile
    program = _core.Program.parse(OFFLOADED, "off")
    steps = [_core.Simulation(program, "local-1", profile=text).step_us for text in (
        profile, "".join(line for line in profile.splitlines(True) if not line.startswith("together")),
        "".join(line + "\n" for line in profile.splitlines() if not line.startswith("together"))
        + "together compute 9 file_read 1\ntogether compute 9 file_write 1\n")]  # fmt: skip
    assert steps[1] <= steps[0] and steps[1] < steps[2], steps
    shown = interlace("profile", "show", "--ranks", "1", "--threads", "1", "--store", store)
    assert shown.returncode == 0 and "file_read" in shown.stdout and "together" in shown.stdout
    assert not list(tmp_path.glob("interlace-tier-*"))


def test_pairs_of_two_ranks_and_only_where_asked_for(tmp_path: Path) -> None:
    machine = Machine.here(2, 1, "test")
    with Store(tmp_path / "p") as store:
        assert command.missing(store, machine, PROGRAM, again=False)["pairs"] == []
        job = command.missing(store, machine, PROGRAM, again=False, tier=str(tmp_path))
        assert job["pairs"] == [
            ("compute", "file_read"), ("compute", "file_write"), ("collective", "file_read"),
            ("collective", "file_write"), ("file_read", "file_write"),
        ]  # fmt: skip
        row = {"first": 1.5, "second": 1.0, "samples": 5, "direct": 1, "disk": tier.disk_of(str(tmp_path))}
        store.put(machine.fingerprint, {("together", "compute file_read"): row})
        store.put(machine.fingerprint, {("together", "file_read file_write"): row | {"disk": -1}})
        rest = command.missing(store, machine, PROGRAM, again=False, tier=str(tmp_path))["pairs"]
        assert ("compute", "file_read") not in rest and ("file_read", "file_write") in rest, "of another disk"
        assert ("file_read", "file_write") not in command.missing(store, machine, OFFLOADED, again=False)["pairs"]
        assert (
            store.profile(machine.fingerprint)
            .text()
            .endswith("together compute 1.5 file_read 1\ntogether file_read 1.5 file_write 1\n")
        )


def test_a_tier_that_cannot_be_used_is_named(program: str, tmp_path: Path) -> None:
    for folder in ("none", "small.il"):
        done = interlace("profile", "--program", program, "--ranks", "1", "--tier", str(tmp_path / folder))
        assert done.returncode != 0 and done.stderr == (
            f"error: --tier {tmp_path / folder} is not a folder; make it first, on a fast local disk\n"
        )


def job_of(store: Store, machine: Machine) -> dict[str, Any]:
    return command.missing(store, machine, PROGRAM, again=False) | {"budget_s": 0.05}


def test_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    machine = Machine.here(1, 1, "test")
    peers = Peers(torch.device("cpu"), 10.0)
    with Store(tmp_path / "p") as store:
        keeper = Keeper(store, machine.fingerprint)
        whole = job_of(store, machine)

        def interrupt(stage: str, done: int, total: int) -> None:
            if stage.startswith("d2h") and done > 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            measure(whole, PROGRAM, b"", peers, keeper, interrupt)
    with Store(tmp_path / "p") as store:
        rest = job_of(store, machine)
        assert whole["ops"] and not rest["ops"] and 0 < len(rest["copies"]) < len(whole["copies"])
        kept = store.rows(machine.fingerprint)
        measure(rest, PROGRAM, b"", peers, Keeper(store, machine.fingerprint))
        after = job_of(store, machine)
        assert not (after["ops"] or after["copies"] or after["collectives"])
        assert {place: store.rows(machine.fingerprint)[place] for place in kept} == kept, "measured again"


def test_corrupt_store_is_set_aside(program: str, tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    garbage = b"SQLite format 3\x00" + bytes(range(256)) * 40
    file.write_bytes(garbage)
    options = ["--program", program, "--ranks", "1", "--threads", "1", "--budget", "0.1", "--store", str(file)]
    _, err = profiled(*options)
    (aside,) = [path for path in tmp_path.glob("p.sqlite.corrupt-*")]
    assert aside.read_bytes() == garbage
    assert str(aside) in err and "was moved" in err
    assert sqlite3.connect(file).execute("select count(*) from measurements").fetchone()[0] > 4


def rows_of(file: Path, kind: str) -> dict[str, str]:
    try:
        found = sqlite3.connect(f"file:{file}?mode=ro", uri=True).execute(
            "select key, value from measurements where kind = ?", (kind,)
        )
        return dict(found.fetchall())
    except sqlite3.OperationalError:  # not there yet
        return {}


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL])
def test_a_command_that_is_ended_goes_on_at_the_next_start(number: int, program: str, tmp_path: Path) -> None:
    store = tmp_path / "p.sqlite"
    options = ["--program", program, "--ranks", "1", "--threads", "1", "--store", str(store)]
    process = commands.Command("profile", *options, stdout=commands.DEVNULL, session=True)
    while len(rows_of(store, "copy")) < 2:
        assert process.returncode is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(number, group=True)  # as Ctrl-C does: to the command and to its ranks
    _, err = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in err, err
        assert err.endswith(
            "what has been measured is kept: the same command goes on from there\nerror: interrupted\n"
        ), err
    ops, copies = rows_of(store, "op"), rows_of(store, "copy")
    facts, err = profiled(*options)
    assert "was moved" not in err and facts["program_ops_known"] == 3 == len(ops)
    assert facts["measured_now"] == len(facts["copies"]) - len(copies) < len(facts["copies"])
    assert rows_of(store, "op") == ops and copies.items() <= rows_of(store, "copy").items()


@pytest.mark.parametrize("damage", ["cut", "pages", "not a database"])
def test_a_damaged_store_is_kept_beside_the_new_one(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    with Store(file) as store:
        store.put("m", {("op", f"key {i}"): {"us": 1.0, "bytes": 1, "transient": 0} for i in range(3000)})
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "pages":
        data[3 * 4096 : 40 * 4096] = os.urandom(37 * 4096)
    else:
        data[:20] = b"something else at all"[:20]
    file.write_bytes(data)
    with Store(file) as store:
        (note,) = store.notes
        (aside,) = tmp_path.glob("p.sqlite.corrupt-*")
        assert note.startswith(f"{file} cannot be read (") and note.endswith(
            f"it was moved to {aside} and a new one begun"
        )
        assert aside.read_bytes() == data and store.rows("m") == {}
        store.put("m", {("op", "x"): {"us": 1.0, "bytes": 1, "transient": 0}})


@pytest.mark.parametrize("value", ["nonsense", "[1]", '{"us": "fast"}', '{"us": NaN}', "{}", None])
def test_an_edited_measurement_is_named(value: str | None, tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    with Store(file) as store:
        store.put("m", {("op", "x"): {"us": 1.0, "bytes": 1, "transient": 0}})
    with sqlite3.connect(file) as db:
        db.execute("update measurements set value = ?", (value or "null",))
    with Store(file) as store, pytest.raises(StoreError, match="the op 'x' is no measurement; move the file away"):
        store.profile("m")


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mail.sqlite"
    with sqlite3.connect(file) as db:
        db.execute("create table letters (text)")
    before = file.read_bytes()
    with pytest.raises(
        StoreError, match=r"a database of something else \(it has the table 'letters'\): name another file"
    ):
        Store(file)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["mail.sqlite"]


FILL = """
import resource, sys
from interlace.cost import Store, StoreError
row = {"us": 1.0, "bytes": 1, "transient": 0}
with Store(sys.argv[1]) as store:
    store.put("m", {("op", "first"): row})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        for i in range(1000):
            store.put("m", {("op", f"{i} {j}"): row for j in range(100)})
    except StoreError as e:
        print("error:", e)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.put("m", {("op", "last"): row})
"""


def test_no_room_for_measurements_loses_none(tmp_path: Path) -> None:
    file = tmp_path / "p"
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"error: cannot use {file}: ") and done.stdout.endswith(
        "what was measured before is kept\n"
    )
    with Store(file) as store:
        assert not store.notes and {("op", "first"), ("op", "last")} <= store.rows("m").keys()
        assert len(store.rows("m")) % 100 == 2, "half of a block of measurements"


def _write(path: str, writer: int, count: int) -> None:
    with Store(path) as store:
        for number in range(count):
            store.put("machine", {("op", f"{writer} {number}"): {"us": 1.0, "bytes": 1, "transient": 0}})


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path, count = str(tmp_path / "p"), 150
    context = mp.get_context("forkserver")
    writers = [context.Process(target=_write, args=(path, number, count)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    with Store(path) as store:
        assert len(store.rows("machine")) == 3 * count
        assert store.machines()["machine"][0] == 3 * count and store.forget("machine") == 3 * count


def test_another_machine_is_refused(program: str, tmp_path: Path) -> None:
    text = Profile("another machine", {"aten.sum(f32[64,64])->f32[]": OpTime(3.0, 4, 0)}).text()
    parsed = _core.Program.parse(PROGRAM, "small")
    with pytest.raises(_core.Error, match="measured on another machine"):
        _core.Simulation(parsed, "local-1", profile=text, machine="this one")
    assert json.loads(_core.Simulation(parsed, "local-1", profile=text, machine="this one", foreign=True).json())[
        "profile"
    ]["foreign"]
    with Store(tmp_path / "p") as store:
        store.put("another machine", {("op", "x"): {"us": 1.0, "bytes": 1, "transient": 0}})
        with pytest.raises(StoreError, match=r"no profile of this machine \(here\)[^$]*another machine"):
            store.profile("here")
    shown = interlace("profile", "show", "--store", str(tmp_path / "p"))
    assert shown.returncode == 1 and "run: interlace profile" in shown.stderr


def test_too_large_for_memory_is_measured_one_by_one_or_estimated(tmp_path: Path) -> None:
    machine = Machine.here(1, 1, "test")
    peers = Peers(torch.device("cpu"), 10.0)
    with Store(tmp_path / "p") as store:
        job = job_of(store, machine) | {"whole": False, "copies": []}
        measure(job, PROGRAM, b"", peers, Keeper(store, machine.fingerprint))
        found = store.profile(machine.fingerprint)
        assert {key.partition("(")[0] for key in found.ops} == {"aten.mm", "aten.mul.Tensor", "aten.sum"}
        assert found.ops.keys() == set(job["ops"])
        store.forget(machine.fingerprint)
        job["memory_bytes"] = 20_000  # less than a 64 x 64 product needs, enough for the sum
        measure(job, PROGRAM, b"", peers, Keeper(store, machine.fingerprint))
        rows = store.rows(machine.fingerprint)
        found = store.profile(machine.fingerprint)
        assert [key.partition("(")[0] for kind, key in rows if kind == "op"] == ["aten.sum"]
        command.estimate_rest(found, PROGRAM, machine)
        assert found.ops.keys() == set(job["ops"]) and sum(not op.measured for op in found.ops.values()) == 2
        assert found.text().count(" estimated\n") == 2


def test_text_form_is_what_the_simulator_reads() -> None:
    profile = Profile('a "quoted" µ machine', {"aten.sum(f32[64,64])->f32[]": OpTime(3.25, 4, 16)})
    profile.collectives["reduce", 2, 4096] = CollectiveTime(100.0, 130.0, 20.0)
    profile.copies["h2d", 65536] = 12.0
    profile.slowdown, profile.issue_us = 1.25, 9.0
    text = profile.text()
    for line in ("core reduce ranks 2 bytes 4096 us 130", "finish reduce ranks 2 bytes 4096 us 20", "issue us 9"):
        assert line in text.splitlines()
    _core.Simulation(_core.Program.parse(PROGRAM, "small"), "local-1", profile=text)


def test_times_of_one_signature_are_the_mean_of_its_places() -> None:
    times = StepTimes(ranks=1, threads=1, cores=2)
    facts = {"key": "k", "name": "aten.mm", "result_bytes": 8, "bytes": 0, "units": 1}
    for wall in (1.0, 9.0, 2.0):  # the median of each place counts, a disturbed step does not
        times.add({"ops": {7: facts, 8: facts}, "transfers": [], "samples": [
            (7, 0, wall, wall * 1e-6, 100, 140), (8, 0, wall, 3 * wall * 1e-6, 100, 108)]})  # fmt: skip
    assert times.rows() == {
        ("op", "k"): {"us": pytest.approx(4.0), "bytes": 8, "transient": 32, "measured": 1, "steps": 3}
    }


def test_times_add_up_to_a_step() -> None:
    """Now one op is late, now another: none in its median, one in every step."""
    times = StepTimes(ranks=1, threads=1, cores=2)
    facts = {"name": "aten.mm", "result_bytes": 8, "bytes": 0, "units": 1}
    for first, second in ((1.0, 1.0), (1.0, 4.0), (4.0, 1.0)):
        times.add({"ops": {7: facts | {"key": "k"}, 8: facts | {"key": "l"}}, "transfers": [], "samples": [
            (7, 0, first, first * 1e-6, 100, 140), (8, 0, second, second * 1e-6, 100, 108)]})  # fmt: skip
    assert [row["us"] for row in times.rows().values()] == [pytest.approx(2.5), pytest.approx(2.5)]


def launched(*words: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks with the environment that another launcher gives, each as it ended."""
    port = free_port()
    places = [{**os.environ, **rank_environment(rank, 2, port, 1), PARENT: ""} for rank in range(2)]
    started = [commands.Command("profile", *words, env=place) for place in places]
    said = [process.communicate() for process in started]
    return [subprocess.CompletedProcess(words, p.returncode or 0, *both) for p, both in zip(started, said, strict=True)]


def by_torchrun(*words: str) -> list[subprocess.CompletedProcess[str]]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "interlace.cli"]
    return [subprocess.run([*start, "profile", *words], capture_output=True, text=True, timeout=240)]


@pytest.mark.parametrize("launch", [launched, pytest.param(by_torchrun, marks=pytest.mark.soak)])
def test_ranks_that_a_launcher_started_measure_for_later_starts(launch: Any, tmp_path: Path) -> None:
    options = ["--model", "llama-tiny", "--seq", "32", "--micro-batch", "1", "--budget", "0.2", "--json"]
    options += ["--store", str(tmp_path / "p.sqlite")]
    ended = launch(*options)
    assert all(rank.returncode == 0 for rank in ended), ended
    facts = json.loads("".join(rank.stdout for rank in ended))  # of rank 0 alone
    assert facts["program_ops"] == facts["program_ops_known"] > 30 and facts["measured_now"] > 60
    again, _ = profiled(*options[:-3], *options[-2:], "--ranks", "2")
    assert again["measured_now"] == 0
    for refused in launch(*options, "--ranks", "3"):
        assert refused.returncode != 0 and "--ranks 3, but the launcher started 2" in refused.stderr, refused


def test_a_collective_takes_until_the_last_rank_has_it() -> None:
    times = StepTimes(ranks=2, threads=1, cores=2)
    facts = {"key": "", "name": "reduce.start", "result_bytes": 0, "bytes": 1 << 20, "units": 1, "ranks": "2"}
    for mine, other in ((4.0, 6.0), (5.0, 3.0), (9.0, 70.0)):  # seconds of this rank and of the other, the data of both
        times.add(
            {"ops": {7: facts}, "transfers": [(7, 0, 1 << 20, mine - 1)], "samples": [(7, 0, mine, 0.5, 0, 0)]},
            lambda own, other=other: [own, ["", [other]], ["of another stage", [1e3, 1e3]]],
        )
    (row,) = times.rows().values()
    assert row["us"] == pytest.approx(6e6)  # the median of 6, 5 and 70
    assert row["finish_us"] == pytest.approx(1e6) and row["core_us"] == pytest.approx(5e5)


def test_where_ranks_share_cores_a_collective_tells_only_its_work() -> None:
    times = StepTimes(ranks=4, threads=1, cores=2)
    facts = {"key": "", "name": "gather.start", "result_bytes": 0, "units": 1, "ranks": "4"}
    ops = {7: facts | {"bytes": 81920}, 8: facts | {"bytes": 1 << 18}}
    times.add(
        {"ops": ops, "transfers": [(7, 0, 0, 6e-4), (8, 0, 0, 6e-4)], "samples": [(op, 0, 7e-4, 1.5e-4, 0, 0) for op in ops]},
        lambda own: [own] * 4,
    )
    rows = times.rows()  # 1 << 18 is a size that is measured by itself
    assert list(rows) == [("collective", "gather 4 81920")]
    text = from_rows("here", rows).text()
    assert "core gather ranks 4 bytes 81920 us 150" in text and "collective gather" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--program", "none.il"], "no such file: none.il"),
        (["--model", "lama-10m"], "did you mean"),
        (["--budget", "-1"], "--budget must be a positive number"),
        (["--store", "."], "is a folder"),
    ],
)
def test_errors(arguments: list[str], said: str) -> None:
    done = interlace("profile", *arguments)
    assert done.returncode == 1 and said in done.stderr
