"""A real network to measure on: one network namespace per rank, joined by a bridge, each rank's sending rate shaped.

    with Network(ranks=2, mbit=500) as net:
        workers = [net.spawn(rank, [sys.executable, "train.py"]) for rank in range(2)]
        print(net.goodput())                                # bytes/s a rank sends while it also receives as much

        namespace rank 0                hub namespace              namespace rank 1
        net0 10.77.0.1  --- veth ---  [ port0 bridge port1 ]  --- veth ---  net0 10.77.0.2
        tc tbf 500 Mbit/s                                      tc tbf 500 Mbit/s

`per_host` ranks share a namespace, as on machines with several devices: what they send one another stays within it, unshaped, and
they share its sending rate. Only sending is shaped, so a link is full duplex; several ranks that send to one at once may exceed its
rate. The bridge lives in a namespace of its own: the host's interfaces stay as they are, and deleting the namespaces removes
everything. Their names hold the process id and its start time, so a run also removes what a killed one left. mbit=None: the ranks
run on plain loopback, and neither root nor `ip` is needed.

python bench/network.py --ranks 2 --mbit 500      # nominal rate and what plain sockets reach
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "interlace-net"
INTERFACE = "net0"
PORT = 29500  # of the ranks' rendezvous; free in every fresh namespace
BURST = "20k"  # bytes tbf lets through at once: above one segmented packet (gso), far below a step's traffic
LATENCY = "10ms"  # longest time in tbf's queue
# Linux's own choice, whatever this system has: BBR takes a while to use what another connection of the host leaves, which costs a step
# of hybrid sharding on 2 hosts of 2 ranks at 100 Mbit/s 14 % (3229 and 3678 ms), and no profile of single transfers shows it.
CONGESTION = os.environ.get("CONGESTION", "cubic")  # CONGESTION=bbr measures with that
GSO_BYTES = 16384  # packets larger than the burst would be cut one by one in tbf; the default is 65536
WARM_UP_S = 0.4  # TCP's slow start, before bytes are counted
_PR_SET_PDEATHSIG = 1


class NetworkError(RuntimeError):
    """The network cannot be made here; the message says what to do."""


class Network:
    """Ranks in namespaces on one bridge, `per_host` in each, every namespace sending at `mbit` Mbit/s at most; loopback for mbit=None.
    Use with `with`.
    """

    def __init__(self, ranks: int = 2, mbit: float | None = None, per_host: int = 1) -> None:
        if not 1 <= ranks <= 200:
            raise NetworkError(f"ranks must be 1 to 200, not {ranks}")
        if per_host < 1 or ranks % per_host:
            raise NetworkError(f"{ranks} ranks cannot be {per_host} on each host")
        if mbit is not None and not 1 <= mbit <= 100_000:
            raise NetworkError(f"mbit must be 1 to 100000 Mbit/s, not {mbit:g}; leave it out for unshaped loopback")
        self.ranks, self.mbit, self.per_host = ranks, mbit, per_host
        self._tag = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
        self._children: list[subprocess.Popen[Any]] = []
        self._port = PORT
        self._open = False

    # ---- making and removing ----

    def __enter__(self) -> Network:
        if self.mbit is None:
            self._port = free_port()
        else:
            require()
            remove_leftovers()
            try:
                self._make()
            except BaseException:
                self.close()
                raise
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what was spawned and still runs, and removes the namespaces; may be called twice."""
        self._open = False
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()
        if self.mbit is not None:
            _remove([name for name in _namespaces() if name.startswith(self._tag + "-")])

    def _make(self) -> None:
        hub = self.namespace("hub")
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for host in range(self.ranks // self.per_host):
            rank = host * self.per_host
            name, port = self.namespace(rank), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", hub, "link", "set", port, "gso_max_size", str(GSO_BYTES), "master", "bridge", "up")
            _ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(GSO_BYTES), "up")
            _ip("-n", name, "address", "add", f"{self.address(rank)}/16", "dev", INTERFACE, "noprefixroute")
            _ip("-n", name, "route", "add", "10.77.0.0/16", "dev", INTERFACE, "src", self.address(rank), "congctl", CONGESTION)
            shape = ["rate", f"{self.mbit}mbit", "burst", BURST, "latency", LATENCY]
            _command(["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape])

    def namespace(self, part: int | str) -> str:
        """Of a rank, or the hub."""
        return f"{self._tag}-{part // self.per_host if isinstance(part, int) else part}"

    # ---- running ranks ----

    def address(self, rank: int) -> str:
        return "127.0.0.1" if self.mbit is None else f"10.77.0.{rank // self.per_host + 1}"

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for this rank, and the interface that gloo must use."""
        interface = "lo" if self.mbit is None else INTERFACE
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank % self.per_host if self.per_host > 1 else rank),
            "LOCAL_WORLD_SIZE": str(self.per_host if self.per_host > 1 else self.ranks),
            "GROUP_RANK": str(rank // self.per_host if self.per_host > 1 else 0),
            "GROUP_WORLD_SIZE": str(self.ranks // self.per_host if self.per_host > 1 else 1),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.ranks),
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def spawn(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a program as a rank. `env` is added to this process's environment and the rank's; `options` go to Popen.

        It is killed when the network is closed or this process dies. Two jobs at once need a MASTER_PORT each in `env`.
        """
        if not self._open:
            raise NetworkError("the network is not open: spawn inside `with Network(...) as net`")
        if not 0 <= rank < self.ranks:
            raise NetworkError(f"rank {rank} is not one of the {self.ranks} of this network")
        inside = [] if self.mbit is None else ["ip", "netns", "exec", self.namespace(rank)]
        child = subprocess.Popen(
            [*inside, *argv],
            env={**os.environ, **self.environment(rank), **(env or {})},
            preexec_fn=_die_with_parent,  # ip replaces itself with the program, which keeps this
            **options,
        )
        self._children.append(child)
        return child

    # ---- what it carries ----

    def goodput(self, seconds: float = 1.0) -> float:
        """Duplex: bytes/s of payload that a rank sends while it receives as much; every rank to the next one, over plain sockets."""
        first = range(0, self.ranks, self.per_host)  # one rank of each host
        return self._measure([(r, (r + self.per_host) % self.ranks) for r in first], seconds)

    def simplex_goodput(self, seconds: float = 1.0) -> float:
        """Bytes/s of payload from rank 0 to rank 1 while nothing else is sent."""
        return self._measure([(0, 1)], seconds)

    def _measure(self, flows: list[tuple[int, int]], seconds: float) -> float:
        if self.ranks < 2:
            raise NetworkError("one rank has nobody to send to: goodput needs 2 ranks or more")
        ends: list[subprocess.Popen[Any]] = []
        try:
            receivers = [self._end(to, ["receive", self.address(to), str(seconds)]) for _, to in flows]
            ends = list(receivers)
            ports = [_line(end) for end in receivers]
            for (rank, to), port in zip(flows, ports, strict=True):
                ends.append(self._end(rank, ["send", self.address(to), port, str(seconds)]))
            for end in ends:
                if _line(end) != "connected":
                    raise NetworkError("the goodput measurement could not connect two ranks")
            for end in ends:
                assert end.stdin is not None
                end.stdin.write("go\n")
                end.stdin.flush()
            rates = [float(_line(end)) for end in receivers]
        finally:
            for end in ends:
                end.kill()
            for end in ends:
                end.communicate()
                self._children.remove(end)
        return sum(rates) / len(rates)

    def _end(self, rank: int, words: list[str]) -> subprocess.Popen[Any]:
        argv = [sys.executable, "-S", str(Path(__file__).resolve()), "--end", *words]
        return self.spawn(rank, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# ---- the ends of a measurement: processes of their own, so that each is in its rank's namespace ----


def _end_main(words: list[str]) -> None:
    """receive ADDRESS SECONDS: prints its port, then the rate.  send ADDRESS PORT SECONDS."""
    seconds = float(words[-1])
    if words[0] == "receive":
        with socket.create_server((words[1], 0)) as server:
            print(server.getsockname()[1], flush=True)
            link, _ = server.accept()
        print("connected", flush=True)
        print(_received_rate(link, seconds), flush=True)
        sys.stdin.read()  # the measuring process ends this one; until then the sender must not see a closed connection
    else:
        link = socket.create_connection((words[1], int(words[2])), timeout=10)
        print("connected", flush=True)
        sys.stdin.readline()
        data = bytes(1 << 18)
        with contextlib.suppress(ConnectionError):  # the measurement is over
            while True:
                link.sendall(data)


def _received_rate(link: socket.socket, seconds: float) -> float:
    """Bytes/s over `seconds`, counted after the warm-up; reads on for a moment so that all receivers count at full load."""
    buffer = bytearray(1 << 20)
    link.recv_into(buffer)
    begin = time.monotonic() + WARM_UP_S
    now = time.monotonic()
    while now < begin:
        link.recv_into(buffer)
        now = time.monotonic()
    first, count = now, 0
    while now < first + seconds:
        count += link.recv_into(buffer)
        now = time.monotonic()
    threading.Thread(target=_drain, args=(link,), daemon=True).start()
    return count / (now - first)


def _drain(link: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while link.recv_into(buffer):
        pass


# ---- commands ----


def missing() -> str | None:
    """Why no shaped network can be made here, with what to do; None when it can be tried."""
    if sys.platform != "linux":
        return "a shaped network needs Linux (network namespaces); leave out --mbit to measure on loopback"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a shaped network needs the command '{tool}': apt-get install iproute2; or leave out --mbit"
    if os.geteuid() != 0:
        return "a shaped network needs root: run the same command with sudo, or leave out --mbit to measure on loopback"
    return None


def require() -> None:
    reason = missing()
    if reason is not None:
        raise NetworkError(reason)


def remove_leftovers() -> list[str]:
    """Removes the namespaces of runs whose process is gone, with the processes in them; gives their names."""
    dead = [name for name in _namespaces() if name.startswith(PREFIX + "-") and not _owner_lives(name)]
    _remove(dead)
    return dead


def _owner_lives(namespace: str) -> bool:
    match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\w+", namespace)
    return match is None or _start_time(int(match[1])) == match[2]  # another form of name is not ours to remove


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of a process; "" when it is gone. With the pid it names a process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def _remove(names: list[str]) -> None:
    for name in names:
        for pid in _command(["ip", "netns", "pids", name], check=False).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        _command(["ip", "netns", "delete", name], check=False)
    left = sorted(set(names) & set(_namespaces()))
    if left:
        raise NetworkError(f"could not remove {', '.join(left)}; remove each with `ip netns delete NAME`")


def _ip(*words: str) -> None:
    _command(["ip", *words])


def _command(argv: list[str], check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode != 0:
        reason = done.stderr.strip() or f"status {done.returncode}"
        raise NetworkError(
            f"`{' '.join(argv)}` failed: {reason}. The network needs the right to make namespaces, bridges and tbf queues "
            "(in a container: --privileged); leave out --mbit to measure on loopback"
        )
    return done.stdout


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _line(end: subprocess.Popen[Any]) -> str:
    line: str = end.stdout.readline().strip() if end.stdout else ""
    if not line:
        raise NetworkError("a process of the goodput measurement ended early; its error is above")
    return line


def rates(net: Network, seconds: float = 1.0) -> dict[str, float | None]:
    """Nominal, simplex and duplex rate in bytes/s."""
    nominal = None if net.mbit is None else net.mbit * 1e6 / 8
    return {"nominal": nominal, "simplex": net.simplex_goodput(seconds), "duplex": net.goodput(seconds)}


def on_network(args: argparse.Namespace, work: Callable[[Network, Path], Any], per_host: int = 1) -> Any:
    """What work(network, folder for logs) gives on the network of a benchmark's arguments (ranks, mbit, logs), which is gone afterwards,
    also when the benchmark is told to end. Ends the program where the network cannot be made.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(args.logs or scratch)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            with Network(args.ranks, args.mbit, per_host) as net:
                return work(net, logs)
        except NetworkError as e:
            sys.exit(f"error: {e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="sending rate of each rank, Mbit/s (default: unshaped loopback)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measurement")
    parser.add_argument("--json", action="store_true", help="print bytes/s as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go with a polite kill
    try:
        with Network(args.ranks, args.mbit) as net:
            measured = rates(net, args.seconds)
    except NetworkError as e:
        sys.exit(f"error: {e}")
    if args.json:
        print(json.dumps(measured))
        return
    for name, rate in measured.items():
        print(f"{name:<8} " + ("unshaped" if rate is None else f"{rate * 8e-6:9.1f} Mbit/s  {rate / 1e6:8.2f} MB/s"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--end"]:
        _end_main(sys.argv[2:])
    else:
        main()
