"""interlace simulate: the same numbers as the library, every option, and the message of everything that cannot be."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess

import pytest
from simulation_support import PROFILE, STEP, captured, cut, sharded

from interlace import _core, models
from interlace.capture import capture
from interlace.cli import app
from interlace.config import Config
from interlace.cost.machine import Machine
from interlace.report import read_trace


@pytest.fixture
def cli(capfd, monkeypatch, tmp_path):
    """Runs `interlace simulate` in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = app.run(["simulate", *map(str, arguments)])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def error(cli):
    def call(*arguments: object) -> str:
        code, out, err = cli(*arguments)
        assert code == 1 and out == "" and "Traceback" not in err, err
        return err.removeprefix("error: ").rstrip("\n")

    return call


def step_program():
    return _core.Program.parse(STEP.read_text())


# ---- results ----


def test_summary_is_the_golden_text(cli):
    code, out, _ = cli(STEP, "--cluster", "a100-40gb-2")
    assert code == 0
    assert out == STEP.with_name("step.a100.txt").read_text()


def test_json_has_the_numbers_of_the_library(cli):
    code, out, _ = cli(STEP, "--cluster", "h100-80gb-2", "--json")
    facts = json.loads(out)
    result = _core.Simulation(step_program(), "h100-80gb-2")
    assert code == 0
    assert facts["step_us"] == result.step_us >= facts["lower_bound_us"] == result.lower_bound_us > 0
    assert facts["memory"]["peak_bytes"] == result.peak_bytes
    assert facts["ranks"] == 2 and facts["simulated_ranks"] == 1


def test_a_program_from_stdin(tmp_path):
    import sys

    command = [sys.executable, "-m", "interlace.cli", "simulate", "-", "--cluster", "local-1", "--json"]
    done = subprocess.run(command, input=captured(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ranks"] == 1


def test_a_slow_rank_makes_all_ranks_real_and_the_step_longer(cli):
    _, alike, _ = cli(STEP, "--cluster", "h100-80gb-2", "--json")
    code, out, _ = cli(STEP, "--cluster", "h100-80gb-2", "--slow", "1=2", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["simulated_ranks"] == 2
    assert facts["step_us"] > 1.5 * json.loads(alike)["step_us"]
    first, second = (rank["compute_us"] for rank in facts["per_rank"])
    assert second == pytest.approx(2 * first, rel=1e-3)


def test_every_rank_gives_the_same_step(cli):
    _, folded, _ = cli(STEP, "--cluster", "l4-24gb-2", "--json")
    _, every, _ = cli(STEP, "--cluster", "l4-24gb-2", "--every-rank", "--json")
    assert json.loads(folded)["step_us"] == json.loads(every)["step_us"]
    assert json.loads(every)["simulated_ranks"] == 2


def test_same_bits_each_time():
    texts = {_core.Simulation(step_program(), "a100-40gb-2", slow=[(1, 1.3)]).trace() for _ in range(3)}
    assert len(texts) == 1


def test_cluster_file_gives_what_its_preset_gives(cli, tmp_path):
    code, text, _ = cli("--show-cluster", "h100-80gb-2")
    assert code == 0
    (tmp_path / "mine.toml").write_text(text)
    _, by_file, _ = cli(STEP, "--cluster", "mine.toml")
    _, by_name, _ = cli(STEP, "--cluster", "h100-80gb-2")
    assert by_file == by_name
    faster = re.sub(r"(?m)^mm_efficiency = .*$", "mm_efficiency = 0.1", text)
    assert faster != text
    (tmp_path / "mine.toml").write_text(faster)
    assert cli(STEP, "--cluster", "mine.toml")[1] != by_name


def test_profile_is_used_and_marked_when_foreign(cli):
    _, out, _ = cli(STEP, "--cluster", "local-2", "--profile", PROFILE, "--machine", "some machine")
    assert re.search(r"times: 1 of \d+ kinds of op measured, profile of some machine\n", out)
    code, out, _ = cli(STEP, "--cluster", "local-2", "--profile", PROFILE, "--machine", "here", "--foreign", "--json")
    assert code == 0 and json.loads(out)["profile"]["foreign"] is True


def test_outputs_are_valid(cli, tmp_path):
    code, _, err = cli(STEP, "--cluster", "a100-40gb-2", "--trace", "t.json", "--snapshot", "m.json", "--slow", "0=1.5")
    assert code == 0 and err == "wrote t.json\nwrote m.json\n"
    _core.testing.check_chrome_trace((tmp_path / "t.json").read_text())
    _core.testing.check_memory_snapshot((tmp_path / "m.json").read_text())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event.get("args", {}).get("source") == "net.py:12" for event in events)


def test_checkers_refuse_what_is_broken():
    trace = json.loads(_core.Simulation(step_program(), "a100-40gb-2").trace())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 7]
    slices[0]["dur"] += slices[1]["dur"] / 2
    with pytest.raises(_core.Error, match="slices overlap on thread 7"):
        _core.testing.check_chrome_trace(json.dumps(trace))
    with pytest.raises(_core.Error, match="no 'segments'"):
        _core.testing.check_memory_snapshot("{}")


# ---- what others read ----


def test_torch_reads_the_memory_snapshot(cli, tmp_path):
    from torch.cuda import _memory_viz as viz

    assert cli(STEP, "--cluster", "a100-40gb-2", "--snapshot", "m.pickle")[0] == 0
    snapshot = pickle.loads((tmp_path / "m.pickle").read_bytes())
    summary = viz.segsum(snapshot)
    assert "total_reserved: 32.0MiB" in summary and "total_allocated: 8.0MiB" in summary, (
        "peak, and states of 8 MiB at the end"
    )
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    listing = viz.trace(snapshot)
    assert listing.startswith(f"Device 0 ----------------\n{len(actions)} entries\n")
    assert listing.count("del ") == actions.count("free_requested") > 0
    assert listing.count(" = ") == actions.count("alloc") > 0
    assert "<html>" in viz.trace_plot(snapshot) and "<html>" in viz.segment_plot(snapshot)
    live = 0
    peak = 0
    for entry in snapshot["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, live)
    assert peak == _core.Simulation(step_program(), "a100-40gb-2").peak_bytes, "all sizes here are multiples of 512"


def test_the_snapshot_of_a_cpu_has_the_planned_addresses(cli, tmp_path):
    from torch.cuda import _memory_viz as viz

    assert cli(STEP, "--cluster", "local-2", "--snapshot", "m.pickle")[0] == 0
    snapshot = pickle.loads((tmp_path / "m.pickle").read_bytes())
    arena, others = snapshot["segments"]
    plan = step_program().memory_plan()
    assert arena["frames"][0]["name"] == "arena of a step" and arena["total_size"] == plan["top_bytes"]
    states = sum(4 * s["shape"][0] for s in step_program().states())
    assert others["allocated_size"] == others["total_size"] == states
    entries = [e for e in snapshot["device_traces"][0] if e["addr"] < arena["address"] + arena["total_size"]]
    live: dict[int, int] = {}
    most = 0
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        most = max(most, sum(live.values()))
    assert most == plan["live_bytes"], "all sizes here are multiples of 64"
    assert any("gather.start" in e["frames"][0]["name"] for e in entries)
    assert "total_reserved" in viz.segsum(snapshot)
    assert "<html>" in viz.trace_plot(snapshot) and "<html>" in viz.segment_plot(snapshot)


@pytest.mark.skipif(
    "TRACE_PROCESSOR" not in os.environ, reason="TRACE_PROCESSOR names Perfetto's trace_processor_shell"
)
def test_perfetto_reads_the_trace(cli, tmp_path):
    assert cli(STEP, "--cluster", "a100-40gb-2", "--trace", "t.json")[0] == 0
    (tmp_path / "q.sql").write_text(
        "select count(*) as n from slice; select value from stats where name = 'json_parser_failure';"
    )
    done = subprocess.run(
        [os.environ["TRACE_PROCESSOR"], "-q", "q.sql", "t.json"], capture_output=True, text=True, check=True
    )
    slices = sum(event["ph"] == "X" for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    numbers = [line.strip() for line in done.stdout.splitlines() if line.strip().isdigit()]
    assert numbers == [str(slices), "0"]


# ---- changed machines ----


def test_what_if_factors_change_what_they_name():
    program = step_program()

    def step(**factors: float) -> float:
        return _core.Simulation(program, "h100-80gb-2", what_if=list(factors.items())).step_us

    base = step()
    assert step(links=1, compute=1) == base
    assert step(compute=0.5) < base < step(compute=2)
    assert step(links=0, latency=0) < step(links=0.5) < base < step(links=4)
    assert step(latency=0) < base
    assert step(copies=0) == base, "nothing is copied"
    lanes = json.loads(_core.Simulation(program, "h100-80gb-2", what_if=[("links", 0.0), ("latency", 0.0)]).json())[
        "per_rank"
    ][0]["lanes"]
    assert all(lane["exposed_us"] == 0 for lane in lanes)


@pytest.mark.parametrize(
    "factors, said",
    [
        ([("conpute", 1.0)], "unknown factor 'conpute', did you mean 'compute'?"),
        ([("links", -1.0)], "the times of links cannot be multiplied by -1; give 0 to 1000"),
        ([("links", float("nan"))], "the times of links cannot be multiplied by nan; give 0 to 1000"),
    ],
)
def test_what_if_errors(factors, said):
    with pytest.raises(_core.Error) as error:
        _core.Simulation(step_program(), "h100-80gb-2", what_if=factors)
    assert str(error.value) == said


# ---- bad input ----


def test_no_program_and_no_cluster(error):
    assert error() == "no program file: name one, or - for stdin (examples: interlace simulate --help)"
    presets = (
        "h100-80gb-8, h200-141gb-8, b200-180gb-8, mi300x-192gb-8, a100-80gb-8, a100-40gb-8, a10g-24gb-8, l4-24gb-8, local-8"
    )
    assert error(STEP) == f"no cluster: give --cluster, a file or one of the presets {presets} (any count)"


def test_symbolic_sizes_name_the_command(error, tmp_path):
    (tmp_path / "graph.il").write_text(captured(None))
    said = error("graph.il", "--cluster", "local-1")
    assert said == (
        "graph.il: the sizes b are not yet numbers: the time of a step depends on them. Give them with\n"
        "  interlace opt --bind b=NUMBER graph.il -o graph-sized.il"
    )
    assert app.run(["opt", "--bind", "b=32", "graph.il", "-o", "graph-sized.il"]) == 0
    assert app.run(["simulate", "graph-sized.il", "--cluster", "local-1"]) == 0


def test_captured_program_on_a_cluster_names_the_command_that_works(error, tmp_path):
    import shlex

    (tmp_path / "graph.il").write_text(captured())
    said = error("graph.il", "--cluster", "h100-80gb-8")
    head, command = said.split("\n")
    assert head == "graph.il is a captured program for one device, and the cluster h100-80gb-8 has 8. Shard it with"
    assert command == (
        "  interlace opt --passes='canonicalize,shard(axis=dp,ranks=8),"
        "update(clip=1.0,norm=auto,momentum=true)' graph.il -o graph-sharded.il"
    )
    assert app.run(shlex.split(command)[1:]) == 0
    assert app.run(["simulate", "graph-sharded.il", "--cluster", "h100-80gb-8"]) == 0


def test_a_captured_program_is_laid_out_on_a_mesh(cli, error, tmp_path):
    """As `interlace opt` does it with the standard passes for that mesh and the cluster's costs."""
    (tmp_path / "graph.il").write_text(captured())
    costs = "cluster=local-4"
    passes = Config(mesh="dp=2,tp=2", clip_norm=1.0).pipeline(4)
    passes = passes.replace("plan=auto", f"plan=auto,{costs}").replace(",overlap,", f",overlap({costs}),")
    assert costs in passes and app.run(["opt", f"--passes={passes}", "graph.il", "-o", "laid.il"]) == 0
    code, out, _ = cli("graph.il", "--mesh", "dp=2,tp=2", "--cluster", "local-4")
    assert code == 0 and out.startswith("4 ranks on local-4") and out == cli("laid.il", "--cluster", "local-4")[1]
    assert error("laid.il", "--mesh", "dp=4", "--cluster", "local-4") == (
        "--mesh lays a captured program out, and laid.il is laid out already: leave --mesh out"
    )
    assert error("graph.il", "--mesh", "dp=2,tq=2", "--cluster", "local-4").startswith("unknown axis 'tq' of the mesh")


def test_stages_of_a_mesh_are_simulated_together(cli, error, tmp_path):
    """Every micro-batch has its runs on every stage, on the page too; where the time goes adds up to the step."""
    from interlace.report.set_page import runs

    (tmp_path / "graph.il").write_text(captured())
    given = ("graph.il", "--mesh", "pp=2,dp=2", "--accumulation", "4", "--cluster", "local-4", "--stage-order", "1f1b")
    code, out, _ = cli(*given, "--json", "--trace", "t.json")
    assert code == 0
    found, timeline = json.loads(out), runs(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert {"stage 0", "stage 1", "sends 0", "sends 1"} == set(timeline.lanes)
    wanted = {f"{turn} {micro_batch}" for turn in ("forward", "backward") for micro_batch in range(4)}
    for lane in ("stage 0", "stage 1"):
        assert {e.op for e in timeline.lanes[lane] if e.part != "upd"} == wanted
    assert timeline.span_ns / 1e3 == pytest.approx(found["step_us"], rel=1e-3)
    for stage in found["stages"]:
        whole = stage["compute_us"] + stage["optimizer_us"] + sum(stage["bubble_us"].values())
        assert whole == pytest.approx(found["step_us"], rel=1e-6)
    assert app.run(["report", *given, "-o", "p.html"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "Pipeline: graph.il on local-4" in page and "for a stage behind it" in page
    assert error(*given, "--slow", "1=2").startswith("--slow is for one program")
    assert error("graph.il", "--accumulation", "4", "--cluster", "local-1").startswith("--accumulation is of a captured program")


def test_activations_of_an_axis_have_lanes_of_their_own(cli, tmp_path):
    (tmp_path / "cut.il").write_text(cut())
    code, out, _ = cli("cut.il", "--cluster", "local-4", "--json", "--trace", "t.json")
    (rank,) = json.loads(out)["per_rank"]
    lanes = {lane["lane"]: lane["transfers"] for lane in rank["lanes"]}
    assert code == 0 and {"gather", "reduce"} < lanes.keys() and any(name.endswith(" tp") for name in lanes)
    shown = read_trace((tmp_path / "t.json").read_bytes(), "t.json").lanes
    assert {name: len(events) for name, events in shown.items() if name != "compute"} == lanes


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("devices = 2", "devics = 2", "bad.toml:{line}:1: unknown key 'devics', did you mean 'devices'?"),
        ("[inter]", "[intr]", "unknown table [intr], did you mean 'intra'?"),
        (r"memory_gb_per_s = [\d.]+", "memory_gb_per_s = 0", "'memory_gb_per_s' must be above zero"),
        (r"memory_gb_per_s = [\d.]+", "memory_gb_per_s = -3", "'memory_gb_per_s' must be above zero"),
        (r"alpha_us = [\d.]+", "alpha_us = -1", "'alpha_us' must not be negative"),
        (r"memory_gb_per_s = [\d.]+", "memory_gb_per_s = 1e300", "'memory_gb_per_s' is too large to be true"),
        ("devices = 2", "devices = 0", "'devices' must be from 1 to 1048576"),
        ('kind = "gpu"', 'kind = "tpu"', 'kind is "gpu" or "cpu"'),
    ],
)
def test_cluster_files_that_cannot_be(error, tmp_path, old, new, said):
    text, changes = re.subn(
        f"(?m)^{re.escape(old) if '[' in old[:1] else old}", new, _core.preset_cluster("h100-80gb-2"), count=1
    )
    assert changes == 1
    (tmp_path / "bad.toml").write_text(text)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if each.startswith(new.split("\n")[0]))
    line += new.startswith("[")  # an unknown table is told of at its first key
    message = error(STEP, "--cluster", "bad.toml")
    assert message.startswith(f"bad.toml:{line}:") and said.format(line=line) in message


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--cluster", "h200-2"],
            "there is no cluster file or preset 'h200-2'; presets: h100-80gb-N, h200-141gb-N, b200-180gb-N, mi300x-192gb-N, "
            "a100-80gb-N, a100-40gb-N, a10g-24gb-N, l4-24gb-N, local-N",
        ),
        (["--cluster", "none.toml"], "no such cluster file: none.toml"),
        (["--cluster", "."], ". is a folder: name a cluster file or a preset such as h100-80gb-8"),
        (
            ["--cluster", "local-1"],
            "the program's mesh has 2 ranks, the cluster 'local-1' has 1 device; take a larger cluster or a smaller mesh",
        ),
        (["--cluster", "local-2", "--slow", "3"], "--slow '3' is not RANK=FACTOR, for example 3=1.2"),
        (["--cluster", "local-2", "--slow", "2=1.5"], "rank 2 is to be slow, but the program's mesh has 2 ranks"),
        (["--cluster", "local-2", "--slow", "1=0.5"], "rank 1 cannot be 0.5 times slower; give 1 to 1000"),
        (["--cluster", "local-2", "--slow", "1=nan"], "rank 1 cannot be nan times slower; give 1 to 1000"),
        (["--cluster", "local-2", "--profile", "none.profile"], "no such profile: none.profile"),
        (["--cluster", "local-2", "--profile", "."], ". is a folder: name a profile file"),
        (
            ["--cluster", "local-2", "--trace", "nowhere/t.json"],
            "cannot write nowhere/t.json: there is no folder nowhere",
        ),
        (["--cluster", "local-2", "--trace", "."], "cannot write .: it is a folder"),
        (
            ["--cluster", "local-2", "--snapshot", "nowhere/m.pkl"],
            "cannot write nowhere/m.pkl: there is no folder nowhere",
        ),
        (["--cluster", "local-2", "--chakra", "a-file"], "cannot write to a-file: it is a file, not a folder"),
        (["--cluster", "local-2", "--chakra", "a-file/x"], "cannot write to a-file/x: Not a directory"),
    ],
)
def test_messages(error, tmp_path, arguments, said):
    (tmp_path / "a-file").write_text("")
    assert error(STEP, *arguments) == said


@pytest.mark.skipif(
    os.geteuid() == 0 and not os.path.isdir("/proc/self"), reason="needs a place where nobody may write"
)
def test_a_folder_where_nobody_may_write(error):
    said = error(STEP, "--cluster", "local-2", "--chakra", "/proc/self/traces")
    assert said.startswith("cannot write to /proc/self/traces: ")


def test_profiles_of_this_host_are_told_from_others(cli, error, tmp_path):
    """What local-N takes without --machine: this machine's, whatever ranks and threads it was measured with."""
    said = error(STEP, "--cluster", "local-2", "--profile", PROFILE)
    here = Machine.here(2, 1)
    assert said == (
        f"the profile was measured on another machine ('some machine', here '{here.host}'); "
        "measure here, or allow it with --foreign"
    )
    _, out, _ = cli(STEP, "--cluster", "local-2", "--profile", PROFILE, "--foreign")
    assert "profile of some machine (ANOTHER MACHINE)" in out
    for ranks, threads in ((2, 1), (1, 4)):
        text = PROFILE.read_text().replace("some machine", Machine.here(ranks, threads).fingerprint)
        (tmp_path / "mine.profile").write_text(text)
        code, out, _ = cli(STEP, "--cluster", "local-2", "--profile", "mine.profile")
        assert code == 0 and "ANOTHER" not in out and here.host in out
    assert cli(STEP, "--cluster", "h100-80gb-2", "--profile", PROFILE)[0] == 0, "an H100 is never here"


def test_foreign_profile_is_refused(error):
    said = error(STEP, "--cluster", "local-2", "--profile", PROFILE, "--machine", "here")
    assert said == (
        "the profile was measured on another machine ('some machine', here 'here'); measure here, or allow it with --foreign"
    )


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "p.profile is empty: a profile begins with the line 'interlace-profile 2'"),
        ("interlace-profile 3\n", "p.profile:1:"),
        ('interlace-profile 1\nfingerprint "x"\ncopy h2d bytes 8 us -1\n', "p.profile:3:"),
        ('interlace-profile 1\nfingerprint "x"\ncolective gather ranks 2 bytes 8 us 1\n', "did you mean 'collective'"),
    ],
)
def test_profiles_that_cannot_be(error, tmp_path, text, said):
    (tmp_path / "p.profile").write_text(text)
    assert said in error(STEP, "--cluster", "local-2", "--profile", "p.profile")


def test_a_profile_that_is_not_text(error, tmp_path):
    (tmp_path / "p.profile").write_bytes(b"\xff\xfe\x00")
    assert (
        error(STEP, "--cluster", "local-2", "--profile", "p.profile")
        == "p.profile is not a profile: it is not UTF-8 text"
    )


def test_buckets_with_copies_lose_on_one_node_and_win_on_eight():
    """The sign of SimpleFSDP's Table 5, Llama-3.1-8B on 8 and 64 H100, on four of its layers; bench/papers.py has them all."""
    built = models.build("llama-3-8b", seq=2048, num_hidden_layers=4)
    text = capture(built.model, built.loss_fn, built.example_batch).text

    def step_us(ranks: int, after: str) -> float:
        program = _core.Program.parse(text)
        program.run_passes(f"canonicalize,shard(ranks={ranks},ahead=0),update(clip=1.0){after}")
        return _core.Simulator(program).run(f"h100-80gb-{ranks}").step_us

    bucket = ",bucket(modules=model.layers.*,pack={})"
    for reorder in ("", ",reorder"):
        plain, copies, flat = (
            {ranks: step_us(ranks, form + reorder) for ranks in (8, 64)}
            for form in ("", bucket.format("copy"), bucket.format("flat"))
        )
        assert copies[8] > plain[8] and copies[64] < plain[64]
        assert flat[8] <= plain[8] and flat[64] <= plain[64]


def test_sizes_beyond_64_bits(error, tmp_path):
    huge = captured().replace("f32[32,64]", f"f32[{1 << 56},64]").replace("f32[64,32]", f"f32[64,{1 << 56}]")
    (tmp_path / "huge.il").write_text(huge)
    assert "64 bits" in error("huge.il", "--cluster", "local-1")
    (tmp_path / "beyond.il").write_text(captured().replace("f32[32,64]", f"f32[{1 << 64},64]"))
    assert error("beyond.il", "--cluster", "local-1").startswith("beyond.il:")


def test_no_space_left(cli):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    code, _, err = cli(STEP, "--cluster", "local-2", "--trace", "/dev/full")
    assert code == 1 and err.startswith("error: cannot write /dev/full: No space left on device")


def test_the_program_can_change_after_a_simulation():
    program = _core.Program.parse(sharded(2))
    result = _core.Simulation(program, "local-2")
    before = result.json()
    program.run_passes("canonicalize")
    del program
    assert result.json() == before and result.summary() and result.chakra(0)


def test_tool_and_command_print_the_same(cli):
    tool = shutil.which("interlace-sim")
    if tool is None:
        pytest.skip("interlace-sim is not on the path")
    done = subprocess.run([tool, str(STEP), "--cluster", "l4-24gb-2"], capture_output=True, text=True, check=True)
    assert cli(STEP, "--cluster", "l4-24gb-2")[1] == done.stdout
