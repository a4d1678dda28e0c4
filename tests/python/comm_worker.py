"""One rank of a collectives test: serve(scenario, rank, size, folder) writes FOLDER/RANK.json last, and what it prints to FOLDER/RANK.log.

The tests in test_comm.py start the ranks as processes of their own, because some scenarios kill or stop one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from interlace import _runtime


class Ranks:
    """This rank's groups and the data of all ranks (made from seeds, so that each rank knows what the others send)."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        timeout = timedelta(seconds=60)
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self.process_group = dist.new_group(backend="gloo", timeout=timeout)
        self.group = self.process_group.group_name

    def comm(self, timeout_s: float = 30.0, backend: str = "tcp") -> _runtime.Comm:
        return _runtime.Comm("dp", self.rank, self.size, backend, timeout_s, self.group)

    def data(self, rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if dtype.is_floating_point:
            return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.randint(low, high, (numel,), generator=generator, dtype=dtype)

    def rank_order_sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """((p0 + p1) + p2) + ...; 16-bit floats in float32, rounded once."""
        wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        return total.to(parts[0].dtype)


SIZES = (0, 1, 31, 32, 1000, 65_537)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return ours.dtype == expected.dtype and torch.equal(bits(ours), bits(expected))


def check_gathers(ranks: Ranks) -> None:
    comm = ranks.comm()
    for dtype in DTYPES:
        for numel in SIZES:
            parts = [ranks.data(r, numel, dtype) for r in range(ranks.size)]
            shard, full = parts[ranks.rank].clone(), torch.zeros(numel * ranks.size, dtype=dtype)
            comm.wait(comm.start_gather([shard], [full], "gather u0"))
            assert same(full, torch.cat(parts)), (dtype, numel)
            # The shard already lies at its own place.
            full = torch.zeros(numel * ranks.size, dtype=dtype)
            own = full[ranks.rank * numel : (ranks.rank + 1) * numel]
            own.copy_(shard)
            comm.wait(comm.start_gather([own], [full], "gather u0"))
            assert same(full, torch.cat(parts)), (dtype, numel, "in place")


def check_reduces(ranks: Ranks) -> None:
    comm = ranks.comm()
    for dtype in DTYPES:
        for numel in SIZES:
            flats = [ranks.data(r, numel * ranks.size, dtype) for r in range(ranks.size)]
            own = slice(ranks.rank * numel, (ranks.rank + 1) * numel)
            expected = ranks.rank_order_sum([flat[own] for flat in flats])
            flat, shard = flats[ranks.rank].clone(), torch.zeros(numel, dtype=dtype)
            comm.wait(comm.start_reduce([flat], [shard], "reduce u0"))
            assert same(shard, expected), (dtype, numel)
            assert same(flat, flats[ranks.rank]), "the source changed"
            # The result is the own part of the source.
            comm.wait(comm.start_reduce([flat], [flat[own]], "reduce u0"))
            assert same(flat[own], expected), (dtype, numel, "in place")


def check_all_reduces(ranks: Ranks) -> None:
    comm = ranks.comm()
    for dtype in (torch.int64, torch.float32, torch.float64):
        for numel in (0, 1, 68):
            values = [ranks.data(r, numel, dtype) for r in range(ranks.size)]
            value = values[ranks.rank].clone()
            comm.wait(comm.start_all_reduce(value, "all-reduce norm"))
            assert same(value, ranks.rank_order_sum(values)), (dtype, numel)
    scalar = torch.tensor(float(ranks.rank))
    comm.wait(comm.start_all_reduce(scalar, "all-reduce loss"))
    assert scalar.item() == sum(range(ranks.size))


def check_buckets(ranks: Ranks) -> None:
    """Several tensors in one call give the bits of one call each; sizes and dtypes may differ within a call."""
    comm = ranks.comm()
    numels = (5, 0, 4096, 33)
    flats = [ranks.data(ranks.rank, n * ranks.size, torch.float32, seed=n) for n in numels]
    alone = [torch.zeros(n) for n in numels]
    for flat, shard in zip(flats, alone, strict=True):
        comm.wait(comm.start_reduce([flat], [shard], "reduce"))
    together = [torch.zeros(n) for n in numels]
    comm.wait(comm.start_reduce(flats, together, "reduce u0 u1 u2 u3"))
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    shards = [ranks.data(ranks.rank, 7, torch.float32), ranks.data(ranks.rank, 9, torch.int64)]
    fulls = [torch.zeros(7 * ranks.size), torch.zeros(9 * ranks.size, dtype=torch.int64)]
    comm.wait(comm.start_gather(shards, fulls, "gather u0 u1"))
    assert same(fulls[0], torch.cat([ranks.data(r, 7, torch.float32) for r in range(ranks.size)]))
    assert same(fulls[1], torch.cat([ranks.data(r, 9, torch.int64) for r in range(ranks.size)]))


def check_many_in_flight(ranks: Ranks) -> None:
    """Forty operations under way at once on two Comms of the same groups, waited for in another order on each rank."""
    comms = [ranks.comm(), ranks.comm()]
    order = torch.Generator().manual_seed(ranks.rank)
    for round_number in range(4):
        open_ops: list[tuple[int, int, Callable[[], bool]]] = []
        for number in range(40):
            which, numel, seed = number % 2, 1 + 997 * number % 20_011, 100 * round_number + number
            if number % 3:
                parts = [ranks.data(r, numel, torch.float32, seed) for r in range(ranks.size)]
                full = torch.zeros(numel * ranks.size)
                ticket = comms[which].start_gather([parts[ranks.rank]], [full], f"gather {number}")
                open_ops.append((which, ticket, lambda full=full, parts=parts: same(full, torch.cat(parts))))
            else:
                flats = [ranks.data(r, numel * ranks.size, torch.float32, seed) for r in range(ranks.size)]
                own = slice(ranks.rank * numel, (ranks.rank + 1) * numel)
                shard = torch.zeros(numel)
                ticket = comms[which].start_reduce([flats[ranks.rank]], [shard], f"reduce {number}")
                expected = ranks.rank_order_sum([flat[own] for flat in flats])
                open_ops.append((which, ticket, lambda shard=shard, expected=expected: same(shard, expected)))
        for index in torch.randperm(len(open_ops), generator=order).tolist():
            which, ticket, right = open_ops[index]
            comms[which].wait(ticket)
            assert right(), index


def check_stats(ranks: Ranks) -> None:
    comm = ranks.comm()
    peers, numel = ranks.size - 1, 4096
    flat, shard, full = torch.ones(numel * ranks.size), torch.zeros(numel), torch.zeros(numel * ranks.size)
    for _ in range(5):
        comm.wait(comm.start_reduce([flat], [shard], "reduce"))
        comm.wait(comm.start_gather([shard], [full], "gather"))
    stats = comm.stats()
    assert stats["calls"] == 10
    assert stats["bytes_sent"] == stats["bytes_received"] == 10 * peers * numel * 4
    # One receive buffer, used again and again; gathers need none.
    assert stats["receive_buffer_peak_bytes"] == peers * numel * 4
    tickets = [comm.start_reduce([flat], [torch.zeros(numel)], "reduce") for _ in range(3)]
    for ticket in tickets:
        comm.wait(ticket)
    assert comm.stats()["receive_buffer_peak_bytes"] == 3 * peers * numel * 4


def check_dropped(ranks: Ranks) -> None:
    """A Comm that goes while transfers are under way finishes them; the next on the same groups is not disturbed."""
    comm = ranks.comm()
    keep = [torch.ones(50_000), torch.zeros(50_000 * ranks.size)]
    comm.start_gather([keep[0]], [keep[1]], "gather")
    del comm
    assert torch.equal(keep[1], torch.ones(50_000 * ranks.size))
    check_all_reduces(ranks)


def check_native(ranks: Ranks) -> None:
    comm = ranks.comm(backend="native")
    numel = 1000
    parts = [ranks.data(r, numel, torch.float32) for r in range(ranks.size)]
    full = torch.zeros(numel * ranks.size)
    ticket = comm.start_gather([parts[ranks.rank]], [full], "gather")
    flats = [ranks.data(r, numel * ranks.size, torch.float64) for r in range(ranks.size)]
    own = slice(ranks.rank * numel, (ranks.rank + 1) * numel)
    shard = torch.zeros(numel, dtype=torch.float64)
    second = comm.start_reduce([flats[ranks.rank]], [shard], "reduce")
    value = torch.full((3,), ranks.rank, dtype=torch.int64)
    third = comm.start_all_reduce(value, "all-reduce")
    for open_ticket in (ticket, second, third):
        comm.wait(open_ticket)
    assert same(full, torch.cat(parts))
    torch.testing.assert_close(shard, sum(flat[own] for flat in flats))
    assert value.tolist() == [sum(range(ranks.size))] * 3
    assert comm.stats()["calls"] == 3


def check_activations(ranks: Ranks) -> None:
    """What goes between ranks beside parameters and gradients; the same on our transport and on the group's own."""
    size, rank = ranks.size, ranks.rank
    for backend in ("tcp", "native"):
        comm = ranks.comm(backend=backend)
        every = [ranks.data(r, 6 * size, torch.float32) for r in range(size)]
        to = torch.zeros(6 * size)
        ticket = comm.start_all_to_all(every[rank].clone(), to, "all_to_all")
        value = every[rank].clone()
        second = comm.start_broadcast(value, size - 1, "broadcast")
        comm.wait(second)
        comm.wait(ticket)
        assert same(to, torch.cat([part[6 * rank : 6 * (rank + 1)] for part in every])), backend
        assert same(value, every[-1]), backend
        # Around the ring, two messages each.
        left, right = (rank - 1) % size, (rank + 1) % size
        came = [torch.zeros(6 * size), torch.zeros(2)]
        sent = [every[rank].clone(), torch.full((2,), float(rank))]
        tickets = [comm.start_send(tensor, right, "send") for tensor in sent]
        tickets += [comm.start_recv(tensor, left, "recv") for tensor in came]
        for open_ticket in reversed(tickets):
            comm.wait(open_ticket)
        assert same(came[0], every[left]) and came[1].tolist() == [left, left], backend
    large = ranks.data(rank, 50_001, torch.bfloat16)  # with three ranks, in two rounds
    comm = ranks.comm()
    comm.wait(comm.start_all_reduce(large, "all_reduce"))
    assert same(large, ranks.rank_order_sum([ranks.data(r, 50_001, torch.bfloat16) for r in range(size)]))
    assert message(lambda: comm.start_send(large, rank, "s")) == f"s on axis dp: no other rank {rank} to send to"
    assert message(lambda: comm.start_broadcast(large, size, "b")) == f"b on axis dp: no rank {size} to send it"
    assert "equal parts" in message(lambda: comm.start_all_to_all(torch.zeros(size + 1), torch.zeros(size + 1), "x"))


def check_progress(ranks: Ranks) -> None:
    """What is more than the kernel's buffers hold moves while nobody waits for it."""
    comm = ranks.comm()
    shard = torch.full((8 << 20,), ranks.rank + 1.0)
    full = torch.zeros(shard.numel() * ranks.size)
    comm.wait(comm.start_all_reduce(torch.zeros(1), "meeting"))
    ticket = comm.start_gather([shard], [full], "gather")
    ends, expected = full.view(ranks.size, -1)[:, -1], [r + 1.0 for r in range(ranks.size)]
    for _ in range(6000):
        if all(ends[r].item() == expected[r] for r in range(ranks.size) if r != ranks.rank):
            break
        time.sleep(0.01)
    else:
        raise AssertionError("it did not come in a minute")
    comm.wait(ticket)
    assert ends.tolist() == expected


def check_addresses(ranks: Ranks) -> None:
    """Without an interface's name ranks on one host meet on loopback; a name that does not exist is told to all."""
    environment = os.environ.pop("GLOO_SOCKET_IFNAME")
    group = dist.new_group(backend="gloo").group_name
    comm = _runtime.Comm("dp", ranks.rank, ranks.size, "tcp", 30.0, group)
    comm.wait(comm.start_all_reduce(torch.zeros(1), "all-reduce"))
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0,lo" if ranks.rank == 0 else environment
    group = dist.new_group(backend="gloo").group_name if ranks.rank > 0 else _group_on(environment)
    text = message(lambda: _runtime.Comm("dp", ranks.rank, ranks.size, "tcp", 30.0, group))
    if ranks.rank == 0:
        assert text.startswith('axis dp: rank 0: GLOO_SOCKET_IFNAME names the interface "nowhere0", which has no'), text
    else:
        assert text == "axis dp: rank 0 has no address for its peers (its own error says why)", text
    os.environ["GLOO_SOCKET_IFNAME"] = environment


def _group_on(interface: str) -> str:
    """A group made while another interface is named, for gloo looks at the name too."""
    named, os.environ["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"], interface
    group = dist.new_group(backend="gloo").group_name
    os.environ["GLOO_SOCKET_IFNAME"] = named
    return group


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def check_misuse(ranks: Ranks) -> None:
    comm = ranks.comm()
    size = ranks.size
    assert message(lambda: comm.start_gather([torch.zeros(4)], [torch.zeros(4 * size + 1)], "gather u7")) == (
        f"gather u7 on axis dp, tensor 0: the full buffer has {4 * size + 1} elements, the shard 4 and the axis "
        f"{size} ranks"
    )
    assert "must be contiguous" in message(lambda: comm.start_all_reduce(torch.zeros(4, 4).t(), "x"))
    assert "input is Float on cpu, output is Double on cpu" in message(
        lambda: comm.start_gather([torch.zeros(4)], [torch.zeros(4 * size, dtype=torch.float64)], "x")
    )
    full = torch.zeros(4 * size)
    wrong = (ranks.rank + 1) % size * 4
    assert "not at this rank's place" in message(lambda: comm.start_gather([full[wrong : wrong + 4]], [full], "x"))
    assert "no sum of Bool" in message(lambda: comm.start_all_reduce(torch.zeros(4, dtype=torch.bool), "x"))
    assert "no sum of ComplexFloat" in message(
        lambda: comm.start_all_reduce(torch.zeros(4, dtype=torch.complex64), "x")
    )
    ticket = comm.start_all_reduce(torch.zeros(4), "x")
    comm.wait(ticket)
    assert message(lambda: comm.wait(ticket)) == f"axis dp: no transfer {ticket} is under way (waited for twice?)"
    create = _runtime.Comm
    assert 'no process group named "nowhere"' in message(lambda: create("dp", ranks.rank, size, "tcp", 5.0, "nowhere"))
    assert f"says rank {ranks.rank} of {size}, the axis says" in message(
        lambda: create("dp", ranks.rank, size + 1, "tcp", 5.0, ranks.group)
    )
    assert "positive number of seconds" in message(lambda: create("dp", ranks.rank, size, "tcp", 0.0, ranks.group))
    assert 'backend "mpi" is not supported' in message(lambda: create("dp", ranks.rank, size, "mpi", 5.0))


def everything(ranks: Ranks) -> dict[str, object]:
    for check in (
        check_gathers,
        check_reduces,
        check_all_reduces,
        check_buckets,
        check_many_in_flight,
        check_stats,
        check_activations,
        check_progress,
        check_addresses,
        check_dropped,
        check_native,
        check_misuse,
    ):
        check(ranks)
    return {"ok": True}


def mismatch(ranks: Ranks) -> dict[str, object]:
    """The last rank starts another operation than the others."""
    comm = ranks.comm()
    shard, full = torch.ones(1000), torch.zeros(1000 * ranks.size)
    comm.wait(comm.start_gather([shard], [full], "gather u0"))
    if ranks.rank == ranks.size - 1:
        ticket = comm.start_reduce([full], [shard], "reduce u0")
    else:
        ticket = comm.start_gather([shard], [full], "gather u1")
    return {"error": message(lambda: comm.wait(ticket))}


def hostile(ranks: Ranks) -> dict[str, object]:
    """Rank 1 speaks the protocol by hand: strangers knock at rank 0's door, and then a frame says it is 4 EiB long."""
    if ranks.rank == 0:
        comm = ranks.comm()
        return {"error": message(lambda: comm.wait(comm.start_gather([torch.ones(4)], [torch.zeros(8)], "gather u0")))}
    exchange(ranks, bytes(80))  # where this rank is, and that it neither encrypts nor shares memory
    listener = struct.pack("<I4x128sI4x16s", GREETING, bytes(128), 16, bytes(16))
    address = exchange(ranks, listener)[0]
    port, host, secret = address[10:12], address[12:16], address[144:]

    def connect(greeting: bytes) -> socket.socket:
        made = socket.create_connection((socket.inet_ntoa(host), int.from_bytes(port, "big")), timeout=10)
        made.sendall(greeting)
        return made

    def dropped(stranger: socket.socket) -> bool:
        try:
            return stranger.recv(1) == b""
        except ConnectionResetError:
            return True

    silent = [connect(b""), connect(b"GET")]
    for rank, key in ((1, bytes(16)), (0, secret), (7, secret)):
        assert dropped(connect(greeting(rank, 0, key)))
    assert dropped(connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    data, control = (connect(greeting(1, kind, secret)) for kind in (0, 1))
    header = data.recv(64, socket.MSG_WAITALL)
    assert struct.unpack("<IiQQ", header[:24]) == (FRAME, 0, 0, 16) and header[24:].rstrip(b"\0") == b"gather u0"
    data.sendall(struct.pack("<IiQQ40s", FRAME, 0, 0, 1 << 62, b"gather \xff\n") + bytes(4096))
    kind, count, culprit = struct.unpack("<iii", control.recv(192, socket.MSG_WAITALL)[:12])
    for stranger in silent:
        stranger.close()
    return {"note": [kind, count, culprit]}


GREETING, FRAME = 0x324D4C49, 0x464D4C49  # first bytes of a connection, of a frame


def greeting(rank: int, control: int, key: bytes) -> bytes:
    return struct.pack("<Iii16s4xiiQ16s", GREETING, rank, control, key, 0, -1, 0, bytes(16))  # it offers no memory


def exchange(ranks: Ranks, mine: bytes) -> list[bytes]:
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    received = [torch.zeros_like(sent) for _ in range(ranks.size)]
    dist.all_gather(received, sent, group=ranks.process_group)
    return [bytes(one.tolist()) for one in received]


def train_until(ranks: Ranks, timeout_s: float, at: int, culprit: int, stop: Callable[[], None]) -> dict[str, object]:
    """Steps of gathers and reduces with some overlap; at step `at` the culprit does `stop`. Reports the error."""
    comm = ranks.comm(timeout_s)
    shards = [torch.ones(20_000) for _ in range(4)]
    fulls = [torch.zeros(20_000 * ranks.size) for _ in range(4)]
    try:
        for step in range(1000):
            units = list(enumerate(zip(shards, fulls, strict=True)))
            gathers = [comm.start_gather([s], [f], f"gather u{i}") for i, (s, f) in units]
            for ticket in gathers[:2]:
                comm.wait(ticket)
            if step == at and ranks.rank == culprit:
                stop()
            time.sleep(0.01 * (ranks.rank + step) % 0.03)  # ranks drift apart, so some wait for survivors
            for ticket in gathers[2:]:
                comm.wait(ticket)
            for i, (s, f) in units:
                comm.wait(comm.start_reduce([f], [s], f"reduce u{i}"))
                s.mul_(1 / ranks.size)
        raise AssertionError("no error in 1000 steps")
    except RuntimeError as error:
        again = [
            message(lambda: comm.start_gather(shards[:1], fulls[:1], "later")),
            message(lambda: comm.wait(gathers[-1])),
            message(lambda: ranks.comm().start_all_reduce(torch.zeros(1), "later")),
        ]
        return {"error": str(error), "same_again": all(text == str(error) for text in again)}


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(0)


SCENARIOS: dict[str, Callable[[Ranks], dict[str, object]]] = {
    "everything": everything,
    "mismatch": mismatch,
    "hostile": hostile,
    "kill": lambda ranks: train_until(ranks, 100.0, 5, ranks.size - 1, kill_self),
    "kill0": lambda ranks: train_until(ranks, 100.0, 5, 0, kill_self),
    "exit": lambda ranks: train_until(ranks, 100.0, 5, 1, leave),
    "stop": lambda ranks: train_until(ranks, 2.0, 5, 1, stop_self),
}


def serve(scenario: str, rank: int, size: int, folder: Path) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ranks = Ranks(rank, size, folder)
    result = SCENARIOS[scenario](ranks)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    # Without the ceremonies of an orderly end: what a rank that met an error does too.
    os._exit(0)
