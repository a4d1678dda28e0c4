"""The shaped network that benchmarks measure on, and the arithmetic of the peers' table."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import network
import peer_table
from network import Network, NetworkError
from peer_table import Row

BENCH = Path(network.__file__).parent


def unavailable() -> str | None:
    """Why no shaped network can be made here: not root, a missing command, or a container without the right to."""
    reason = network.missing()
    if reason is not None:
        return reason
    try:
        with Network(ranks=1, mbit=100):
            return None
    except NetworkError as e:
        return str(e)


UNAVAILABLE = unavailable()
shaped = pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")


def namespaces_of(pid: int) -> list[str]:
    return [name for name in network._namespaces() if name.startswith(f"{network.PREFIX}-{pid}-")]


# ---- the network ----


@shaped
@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_goes_faster_than_the_nominal_rate_in_either_direction(ranks: int):
    with Network(ranks=ranks, mbit=200) as net:
        most = 1.15 * 200e6 / 8  # how near it comes to it depends on who else uses the cores: `python bench/network.py`
        assert 0 < net.simplex_goodput(0.5) < most
        assert 0 < net.goodput(0.5) < most
    assert namespaces_of(os.getpid()) == []


@shaped
def test_ranks_have_torchruns_environment_and_an_interface_of_their_own():
    program = (
        "import json, os, sys; json.dump(dict(os.environ), sys.stdout); print(); print(os.listdir('/sys/class/net'))"
    )
    with Network(ranks=2, mbit=100) as net:
        for rank in range(2):
            child = net.spawn(rank, [sys.executable, "-c", program], {"EXTRA": "1"}, stdout=subprocess.PIPE, text=True)
            out, _ = child.communicate(timeout=30)
            environment, interfaces = out.strip().splitlines()
            seen = json.loads(environment)
            expected = {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": net.address(0), "EXTRA": "1",
                "GLOO_SOCKET_IFNAME": network.INTERFACE, "MASTER_PORT": str(network.PORT),
            }  # fmt: skip
            assert {name: seen[name] for name in expected} == expected
            assert network.INTERFACE in interfaces and "eth0" not in interfaces


GATHER = """
import datetime, os, torch, torch.distributed as dist
from interlace import _runtime
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
own = dist.new_group(backend="gloo")
rank, size = dist.get_rank(), dist.get_world_size()
shard, full = torch.full((1 << 19,), rank + 1.0), torch.zeros(size << 19)
comm = _runtime.Comm("dp", rank, size, "tcp", 60.0, own.group_name)
comm.wait(comm.start_gather([shard], [full], "gather"))
dist.barrier()
sent = lambda name: int(open(f"/sys/class/net/{name}/statistics/tx_bytes").read())
print(full[:: 1 << 19].tolist(), sent(os.environ["GLOO_SOCKET_IFNAME"]) + sent("lo"), flush=True)
"""


@shaped
@pytest.mark.parametrize(("ranks", "per_host", "hosts_send"), [(2, 1, 1), (2, 2, 0), (4, 2, 4)])
def test_ranks_of_one_host_share_memory_and_those_of_two_do_not(ranks: int, per_host: int, hosts_send: int):
    """How many of the 2 MiB of a rank's shard a host sends, to another one or on its loopback."""
    with Network(ranks=ranks, mbit=1000, per_host=per_host) as net:
        children = [net.spawn(r, [sys.executable, "-c", GATHER], stdout=subprocess.PIPE, text=True) for r in range(ranks)]
        for child in children:
            full, sent = child.communicate(timeout=120)[0].strip().rsplit(" ", 1)
            assert json.loads(full) == [rank + 1.0 for rank in range(ranks)]
            assert hosts_send << 21 <= int(sent) < (hosts_send << 21) + (1 << 20)


@shaped
def test_an_exception_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), Network(ranks=2, mbit=100) as net:
        child = net.spawn(1, [sys.executable, "-c", "import time; time.sleep(60)"])
        assert len(namespaces_of(os.getpid())) == 3
        raise ZeroDivisionError
    assert namespaces_of(os.getpid()) == []
    assert child.poll() == -signal.SIGKILL


def runs_still(pid: int) -> bool:
    """Not one that has ended and waits for whoever adopted it: a test that starts ranks may have made this process adopt."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@shaped
def test_what_a_killed_run_left_is_removed_and_a_living_ones_stays():
    program = (
        "import sys, time; from network import Network\n"
        "with Network(ranks=2, mbit=100) as net:\n"
        "    rank = net.spawn(0, [sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    print(rank.pid, flush=True); time.sleep(60)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program], cwd=BENCH, stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    try:
        ranks = [int(run.stdout.readline()) for run in runs]
        runs[0].kill()
        runs[0].wait()
        deadline = time.monotonic() + 10
        while runs_still(ranks[0]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not runs_still(ranks[0]), "a rank outlives its run"
        assert len(namespaces_of(runs[0].pid)) == 3
        network.remove_leftovers()
        assert namespaces_of(runs[0].pid) == []
        assert len(namespaces_of(runs[1].pid)) == 3 and runs[1].poll() is None
    finally:
        for run in runs:
            run.kill()
            run.communicate()
        network.remove_leftovers()
    assert namespaces_of(runs[1].pid) == []


def test_without_shaping_ranks_are_plain_processes_on_loopback():
    with Network(ranks=2) as net:
        child = net.spawn(1, [sys.executable, "-c", "import os; print(os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'])"],
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert child.communicate(timeout=30)[0].split() == ["1", "lo"]
        assert net.goodput(0.2) > 10e6


def test_bad_settings_say_what_to_do():
    with pytest.raises(NetworkError, match="ranks must be 1 to 200, not 0"):
        Network(ranks=0)
    with pytest.raises(
        NetworkError, match=r"mbit must be 1 to 100000 Mbit/s, not -3; leave it out for unshaped loopback"
    ):
        Network(mbit=-3)
    with pytest.raises(NetworkError, match="not open: spawn inside"):
        Network().spawn(0, ["true"])
    with Network(ranks=1) as net:
        with pytest.raises(NetworkError, match="rank 1 is not one of the 1 of this network"):
            net.spawn(1, ["true"])
        with pytest.raises(NetworkError, match="one rank has nobody to send to"):
            net.goodput()


def test_missing_rights_or_commands_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NetworkError, match="needs the command 'tc': apt-get install iproute2"):
        Network(mbit=100).__enter__()
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="needs root: run the same command with sudo, or leave out --mbit"):
        Network(mbit=100).__enter__()


# ---- the peers' table ----


@pytest.mark.parametrize(
    "kind, ranks, accumulation, mode, times_parameters",
    [
        ("sharded", 2, 1, "reduce_last", 3 / 2),  # two gathers and a reduce, half of the bytes are a rank's own
        ("sharded", 4, 1, "reduce_each", 9 / 4),
        ("sharded", 2, 4, "reduce_last", 9 / 2),
        ("sharded", 2, 4, "reduce_each", 12 / 2),
        ("gathered", 2, 4, "reduce_last", 1),
        ("replicated", 2, 1, "reduce_last", 1),
        ("replicated", 4, 4, "reduce_each", 3 / 2),
        ("sharded", 1, 4, "reduce_each", 0),
    ],
)
def test_wire_bytes(kind: str, ranks: int, accumulation: int, mode: str, times_parameters: float):
    assert peer_table.wire_bytes(kind, 1000, ranks, accumulation, mode) == pytest.approx(1000 * times_parameters)


def test_wire_bytes_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="kind must be one of sharded, gathered, replicated, hybrid, not 'fsdp'"):
        peer_table.wire_bytes("fsdp", 1000, 2)
    with pytest.raises(ValueError, match="mode must be one of reduce_last, reduce_each, not 'last'"):
        peer_table.wire_bytes("sharded", 1000, 2, mode="last")
    with pytest.raises(ValueError, match="must be at least 1, not 2 and 0"):
        peer_table.wire_bytes("sharded", 1000, 2, 0)


FACTS = {
    "compute_s": [0.5],
    "goodput": 60e6,
    "parameter_bytes": 80_000_000,
    "ranks": 2,
    "accumulation": 1,
    "mode": "reduce_last",
}


def test_bound_is_the_larger_of_wire_and_compute():
    sharded = peer_table.figures(Row("a", "sharded", "A", seconds=[3.0], losses=[6.0]), FACTS, None)
    assert (sharded["wire_ms"], sharded["bound_ms"], sharded["over_bound"]) == pytest.approx((2000, 2000, 1.5))
    fast = peer_table.figures(Row("a", "sharded", "A", seconds=[3.0], losses=[6.0]), FACTS | {"goodput": 6e9}, None)
    assert (fast["wire_ms"], fast["bound_ms"], fast["over_bound"]) == pytest.approx((20, 500, 6.0))


def test_bound_is_paired_within_rounds():
    facts = FACTS | {
        "goodput": 400e6,
        "compute_s": [0.5, 5.0, 1.0],
    }  # 0.3 s on the wire; something else ran in the second round
    row = Row("a", "sharded", "A", seconds=[1.0, 6.0, 1.5], losses=[6.0])
    assert peer_table.figures(row, facts, None)["over_bound"] == pytest.approx(1.5)


def test_a_step_under_the_bound_is_called_noise():
    rows = [
        Row("ddp", "replicated", "DDP", seconds=[1.0], losses=[6.0]),
        Row("b", "sharded", "B", seconds=[2.5], losses=[6.0]),
    ]
    text = peer_table.lines(rows, FACTS, "ddp")
    assert text[-1].startswith("NOISE: DDP came under the bound, which cannot be: something else used the cores")
    assert "NOISE" not in "".join(peer_table.lines(rows[1:], FACTS, "ddp"))


def test_losses_that_disagree_are_found():
    good = [Row(name, "sharded", name, losses=[6.0, 5.5, 5.0]) for name in "abc"]
    assert peer_table.disagreeing(good) == {}
    off = Row("d", "sharded", "d", losses=[6.0, 5.5 * (1 + 1.1e-4), 5.0, 4.0])
    assert peer_table.disagreeing([*good, off]) == {"d": pytest.approx(1.1e-4, rel=1e-3)}
    assert peer_table.disagreeing([*good, Row("e", "sharded", "e", losses=[6.0, math.nan, 5.0])]) == {"e": math.inf}
    assert set(peer_table.disagreeing([good[0], off])) == {"d"}


def test_verdict_is_against_the_fastest_peer_of_the_same_kind():
    rows = [
        Row("fsdp2", "sharded", "", seconds=[2.0, 4.0, 2.0]),
        Row("slow", "sharded", "", seconds=[9.0, 9.0, 9.0]),
        Row("ddp", "replicated", "", seconds=[0.1, 0.1, 0.1]),
        Row("failed", "sharded", "", problem="it failed"),
        Row("shard", "sharded", "", ours=True, seconds=[1.0, 2.0, 1.5]),
    ]
    (verdict,) = peer_table.verdicts(rows)
    assert (verdict["ours"], verdict["peer"], verdict["ratio"]) == ("shard", "fsdp2", 0.5)


def test_table_has_a_row_for_a_method_that_did_not_run():
    rows = [
        Row("fsdp2", "sharded", "FSDP2 eager", seconds=[2.0, 2.2], losses=[6.0], sent_bytes=[120e6, 120e6]),
        Row("deepspeed-3", "sharded", "DeepSpeed ZeRO-3", problem="not installed: pip install deepspeed"),
    ]
    text = peer_table.lines(rows, FACTS | {"compute_s": [0.5, 0.5]}, "fsdp2", markdown=True)
    assert text[2] == (
        "| FSDP2 eager | 2100 | [2050, 2150] | 1.000 | [1.000, 1.000] | 2000 | 120.0 / 120.0 | 1.05 | 6.0000 |"
    )
    assert text[3].startswith("| DeepSpeed ZeRO-3 | - |")
    assert text[-1] == "DeepSpeed ZeRO-3: not installed: pip install deepspeed"


@pytest.mark.soak
def test_peers_train_the_same_model_and_are_compared(tmp_path: Path):
    pytest.importorskip("interlace")
    out = tmp_path / "out.json"
    words = [
        "--model-size",
        "tiny",
        "--only",
        "ddp,fsdp2,shard",
        "--accumulation",
        "2",
        "--rounds",
        "2",
        "--json",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, str(BENCH / "peers.py"), *words], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses of all methods agree at every step" in done.stdout
    assert "round 2 of 2: " in done.stderr
    (record,) = json.loads(out.read_text())
    assert [row["name"] for row in record["rows"]] == ["fsdp2", "shard", "ddp"]
    assert all(len(row["losses"]) == 6 and row["median_ms"] > 0 for row in record["rows"])
    assert set(record["compute_ms"]) == {"eager", "interlace-alone"}
    assert [v["ours"] for v in record["verdicts"]] == ["shard"]


def test_peers_names_a_method_that_it_does_not_know():
    done = subprocess.run(
        [sys.executable, str(BENCH / "peers.py"), "--only", "fdsp2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: unknown method 'fdsp2'; did you mean 'fsdp2'? (methods: fsdp2, fsdp2-compile,"
    )
