"""What a stranger on the network of a run can do: two ranks on two hosts with a secret, a third host that attacks them all the time.

python bench/strangers.py                          # 10,000 connections, a small model
python bench/strangers.py --connections 2000 --steps 40 --json out.json

Each host is a network namespace. The stranger looks for open ports of both ranks before they start, while they meet and while they train;
to each it opens connections, as many at once as it can: silent ones, ones that say what torch's store or gloo would expect, ones that begin
as a rank would and guess the proof, ones that send random bytes. The losses must be those of a run that nobody attacks, and no process
may need 20 MB more. Also printed: the ports that a run on one host listens on, and which of them on other addresses than the loopback.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import machine, write_json
from network import Network

SECRET = "a secret of the two ranks and of nobody else"
MEMORY_LIMIT = 20 << 20
TRAIN = ["train", "--model", "llama-10m", "--strategy", "zero1", "--batch", "4", "--seq", "32", "--schedule", "none", "--json"]


def listening(pid: int) -> list[tuple[str, int]]:
    """(address, port) that sockets listen on, in a process's network namespace."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] != "0A":
                    continue
                host, port = words[1].split(":")
                address = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host
                found.append((address, int(port, 16)))
    return found


# ---- the stranger ----


def attack(hosts: list[str], ports: list[int], connections: int, seed: int) -> None:
    """Until it is killed, and faster than it must be. Prints the connections made, to which ports, and what was answered."""
    choice = random.Random(seed)
    selector = selectors.DefaultSelector()
    made: collections.Counter[tuple[str, int]] = collections.Counter()  # by place; where there is one, more follow
    tried, answers, said = 0, 0, set()
    kept: collections.deque[socket.socket] = collections.deque()

    def end(sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(sock)
        sock.close()

    report = 0.0
    while True:
        asked = [(host, port) for host in hosts for port in ports]
        scanned = [(choice.choice(hosts), choice.randrange(32768, 61000)) for _ in range(40)]  # where systems put listeners of any port
        again = [choice.choice(list(made) or asked) for _ in range(60)]
        tried += len(asked) + len(again)
        for place in [*asked, *scanned, *again]:
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect_ex(place)
                selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, place)
                kept.append(sock)
        for key, _ in selector.select(0.002):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if key.events & selectors.EVENT_WRITE:  # new; one that has been ended since was made, too
                    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if error not in (0, errno.ECONNRESET):
                        raise OSError
                    made[key.data] += 1
                    sock.send(_opening(choice))
                    selector.modify(sock, selectors.EVENT_READ, key.data)
                elif data := sock.recv(4096):
                    answers += len(data)
                    said.add(data[:4])
                    sock.send(choice.randbytes(32))  # a guess at the proof
                else:
                    raise OSError
            except OSError:
                end(sock)
        while len(kept) > 700:  # as many at once
            end(kept.popleft())
        if time.monotonic() > report:
            report = time.monotonic() + 0.5
            words = sorted(w.decode("latin1") for w in said)
            told = {"tried": tried, "made": made.total(), "ports": len(made), "answered_bytes": answers, "answers_begin_with": words[:10]}
            print(json.dumps(told), flush=True)
        if tried >= 50 * connections:
            time.sleep(0.05)


def _opening(choice: random.Random) -> bytes:
    kind = choice.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:  # torch's TCPStore: validate, then set failed/0
        return b"\x09" + struct.pack("<I", 0x3C85F7CE) + b"\x00" + struct.pack("<Q", 8) + b"failed/0" + struct.pack("<Q", 1) + b"x"
    if kind == 2:  # gloo: a sequence number
        return struct.pack("<Q", choice.randrange(64))
    if kind == 3:
        return b"ILS1" + choice.randbytes(32)
    return choice.randbytes(choice.randrange(1, 2000))


# ---- the run ----


def run(net: Network, args: argparse.Namespace, port: int, attacked: bool, where: str, steps: int) -> dict[str, Any]:
    stranger = None
    if attacked:
        hosts = [net.address(0), net.address(1)]
        words = [*hosts, str(port), str(args.connections)]
        stranger = net.spawn(2, [sys.executable, __file__, "--attack", *words], stdout=subprocess.PIPE, text=True)
        time.sleep(1.0)
    environment = {
        "WORLD_SIZE": "2", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "1", "INTERLACE_SECRET": SECRET, "INTERLACE_CACHE": "off",
        "XDG_CACHE_HOME": where,
    }  # fmt: skip
    command = [sys.executable, "-m", "interlace.cli", *TRAIN, "--steps", str(steps), "--log", f"{where}/log-{port}"]
    ranks = [net.spawn(r, command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in (0, 1)]
    peaks, ports, texts = [0, 0], [set(), set()], [("", ""), ("", "")]  # type: ignore[var-annotated]

    def read(rank: int) -> None:
        texts[rank] = ranks[rank].communicate()

    readers = [threading.Thread(target=read, args=(r,)) for r in (0, 1)]
    for reader in readers:
        reader.start()
    log = Path(f"{where}/log-{port}")
    while any(reader.is_alive() for reader in readers):
        for r in (0, 1):
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = Path(f"/proc/{ranks[r].pid}/status").read_text()
                peaks[r] = max(peaks[r], 1024 * int(status.split("VmHWM:")[1].split()[0]))
                if log.exists() and log.stat().st_size:  # steps are being made
                    ports[r] |= set(listening(ranks[r].pid))
        time.sleep(0.1)
    told = {}
    if stranger is not None:
        assert stranger.stdout is not None
        stranger.kill()
        lines = stranger.stdout.read().splitlines()
        told = json.loads(lines[-1]) if lines else {}
    if any(r.returncode for r in ranks):
        raise SystemExit(f"a rank failed {'under attack' if attacked else 'in peace'}:\n{texts[0][1]}\n{texts[1][1]}")
    return {"losses": json.loads(texts[0][0])["losses"], "peaks": peaks, "ports": [sorted(p) for p in ports], "stranger": told}


def one_host(where: str) -> list[tuple[str, int]]:
    """What `interlace train` on one host listens on, in a namespace of its own, from its start to its end."""
    with Network(ranks=1, mbit=1000) as net:
        command = [sys.executable, "-m", "interlace.cli", *TRAIN, "--steps", "20", "--ranks", "2"]
        plain = {"INTERLACE_CACHE": "off", "XDG_CACHE_HOME": where}
        clean = ["env", *(f"-u{n}" for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"))]
        job = net.spawn(0, [*clean, *command], plain, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        found: set[tuple[str, int]] = set()
        while job.poll() is None:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{job.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:  # it has gone into its namespace
                    found |= set(listening(job.pid))
            time.sleep(0.02)
        assert job.stderr is not None
        if job.returncode:
            raise SystemExit(f"the run on one host failed: {job.stderr.read()}")
        return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--attack", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        *hosts, port, connections = args.attack
        attack(hosts, [int(port), int(port) + 1], int(connections), os.getpid())
        return
    with tempfile.TemporaryDirectory() as where:
        ports = one_host(where)
        outside = [p for p in ports if p[0] != "127.0.0.1"]
        print(f"one host: {len(ports)} ports, {len(outside)} of them not on the loopback: {outside}")
        with Network(ranks=3, mbit=1000) as net:
            run(net, args, 29400, False, where, 2)  # the text is prepared
            peace, war = (run(net, args, port, attacked, where, args.steps) for port, attacked in ((29500, False), (29600, True)))
    same = peace["losses"] == war["losses"]
    grown = [b - a for a, b in zip(peace["peaks"], war["peaks"], strict=True)]
    print(f"stranger: {war['stranger']}")
    print(f"losses of {args.steps} steps {'equal, to the bit' if same else 'DIFFER'}")
    print(f"memory of the ranks {', '.join(f'{g / 2**20:+.1f} MiB' for g in grown)} (at most {MEMORY_LIMIT >> 20})")
    print(f"listening while steps are made: {war['ports']}")
    if args.json:
        row = {"same": same, "grown": grown, "stranger": war["stranger"], "one_host_outside": outside, "ports": war["ports"]}
        write_json(args.json, {"title": "strangers", "rows": [row], "machine": machine()})
    few = war["stranger"]["tried"] < args.connections  # once the ranks have met, nothing of theirs listens, and none is made
    if few:
        print(f"fewer than {args.connections} connections were tried while the ranks ran: give more --steps")
    if not same or few or max(grown) > MEMORY_LIMIT or outside:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
