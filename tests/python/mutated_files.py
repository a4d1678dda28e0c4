"""Files that somebody changed, given to every reader in Python: it says so in an error of its own, or reads what stands there.

    python tests/python/mutated_files.py --inputs 100000       # of each reader an equal part
    python tests/python/mutated_files.py --reader cache --seed 17    # one of them again, with what it raised

A finding is a signal, another exception, 2 s of the processor's time, more memory than 64 MiB and 16 times the file, and, where a file
has checksums, a value that nobody wrote. What has checksums comes a second time with these made right again ("forged"), so that what
stands behind them is met, too. Readers in C++ have targets of their own (make fuzz).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import mmap
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from file_readers import READERS, Reader

from interlace import _core, _runtime  # noqa: F401  here, and not in every child

SECONDS = 2.0
MEMORY, TIMES = 64 << 20, 16
MOST = 20  # findings
ODD = (
    *(b"-1", b"0", b"1e999", b"-Infinity", b"NaN", b"null", b"[]", b"{}", b'""', b"true", b"[[[[[[[[", b"\\ud800", b"\xff\xfe", b"\0"),
    *(b"9" * 25, b"9" * 401, b"9223372036854775808", b"0.5", b"\n", b'"', b",", b"=", b"../../x", b"/etc/passwd", b"[" * 3000),
)


def mutated(choice: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Bytes changed, cut out, doubled, brought from another file, cut off; numbers and words made odd ones."""
    for _ in range(choice.choice((1, 1, 1, 2, 3, 6))):
        at, kind = choice.randrange(len(data) + 1), choice.randrange(9)
        end = min(len(data), at + choice.choice((1, 1, 2, 8, 60)))
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << choice.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + choice.randbytes(end - at) + data[end:]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:end] + data[at:]
        elif kind == 4:
            other = choice.choice(others)
            begin = choice.randrange(len(other) + 1)
            data = data[:at] + other[begin : begin + 40] + data[at:]
        elif kind == 5 and choice.random() < 0.3:
            data = data[:at]
        elif kind == 6 and len(data) >= at + 8:
            data = data[:at] + struct.pack("<q", choice.choice((-1, 0, 1 << 40, (1 << 63) - 1, 255))) + data[at + 8 :]
        else:
            word = _word_at(data, at)
            data = data[: word[0]] + choice.choice(ODD) + data[word[1] :]
    return data


def _word_at(data: bytes, at: int) -> tuple[int, int]:
    """The number, word or text in quotes from the next one of these on."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._"
    while at < len(data) and data[at] not in plain:
        at += 1
    end = at
    while end < len(data) and data[end] in plain:
        end += 1
    if at > 0 and data[at - 1 : at] == data[end : end + 1] == b'"':
        return at - 1, end + 1
    return at, end


class _Memory:
    """What a call took at its height."""

    def __enter__(self) -> _Memory:
        self._can = False
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._before, self._can = self._read("VmRSS"), True
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._read("VmHWM") - self._before if self._can else 0

    @staticmethod
    def _read(name: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])


class Case:
    """A reader with its files in a folder; one input after the other."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        folder.mkdir()
        reader.make(folder)
        self.written = self._files()
        self.names = [name for name in self.written if reader.takes(name)]
        self.value = reader.read(folder)
        self._restore()

    def _files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in sorted(self.folder.rglob("*")) if p.is_file()}

    def _restore(self) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_file() and str(path.relative_to(self.folder)) not in self.written:
                path.unlink()
        for name, data in self.written.items():
            place = self.folder / name
            if place.stat().st_size != len(data) or place.read_bytes() != data:
                place.write_bytes(data)

    def run(self, seed: int) -> tuple[str, str | None]:
        """What became of it, and what is wrong with that."""
        choice = random.Random(f"{self.reader.name} {seed}")
        name = choice.choice(self.names)
        old = self.reader.opened(name, self.written[name])
        new = mutated(choice, old, [self.reader.opened(n, self.written[n]) for n in self.names])
        if new == old:
            return "the same", None
        self.reader.put(self.folder, name, new)
        wrong, said = None, "read"
        with _Memory() as memory:
            try:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                value = self.reader.read(self.folder)
                if self.reader.checked and value is not None and value != self.value:
                    wrong = f"{name}: another value was believed"
                said = "nothing" if value is None else said
            except self.reader.errors as e:
                said = "error"
                if not str(e):
                    wrong = f"{name}: {type(e).__name__} without a message"
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                wrong = f"{name}: {type(e).__name__}: {str(e)[:150]}\n{traceback.format_exc()[-1500:]}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        if memory.bytes > MEMORY + TIMES * len(new):
            wrong = f"{name}, {len(new)} bytes: {memory.bytes >> 20} MiB"
        self._restore()
        return said, wrong


def run_seeds(reader: Reader, seeds: range, folder: Path) -> tuple[collections.Counter[str], dict[int, str]]:
    """How often what became of them, and the findings. In children, one after the other: where one ends by a signal, that is a finding."""
    said: collections.Counter[str] = collections.Counter()
    findings: dict[int, str] = {}
    at = mmap.mmap(-1, 8)
    number = 0
    next_seed = seeds.start
    while next_seed < seeds.stop and len(findings) < MOST:
        number += 1
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                logging.getLogger("interlace").setLevel(logging.ERROR)  # what is damaged is said each time
                os.close(read)
                with open(write, "w") as answers:
                    case = Case(reader, folder / f"{reader.name}-{number}")
                    for seed in range(next_seed, seeds.stop):
                        at[:] = struct.pack("<q", seed)
                        what, wrong = case.run(seed)
                        answers.write(f"{seed}\0{what}\0{wrong or ''}\1")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        with open(read) as answers:
            told = answers.read().split("\1")
        for line in told:
            with contextlib.suppress(ValueError):
                seed_text, what, wrong = line.split("\0")
                said[what] += 1
                if wrong:
                    findings[int(seed_text)] = wrong
        (last,) = struct.unpack("<q", at[:])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(folder / f"{reader.name}-{number}", ignore_errors=True)
        if status == 0:
            break
        if status > 0:
            raise RuntimeError(f"the files of reader {reader.name} cannot be made, see above")
        findings[last] = f"ended by {signal.Signals(-status).name} (SIGPROF: {SECONDS:g} s of the processor)"
        said["signal"] += 1
        next_seed = last + 1
    return said, findings


def run_all(inputs: int, names: list[str], begin: int = 0) -> Iterator[tuple[str, collections.Counter[str], dict[int, str], float]]:
    share = -(-inputs // len(names))
    with tempfile.TemporaryDirectory() as where:
        for name in names:
            start = time.monotonic()
            said, findings = run_seeds(READERS[name], range(begin, begin + share), Path(where))
            yield name, said, findings, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--reader", action="append", choices=sorted(READERS))
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--begin", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    names = args.reader or sorted(READERS)
    if args.seed is not None:
        args.inputs, args.begin = len(names), args.seed
    found, total = 0, 0
    for name, said, findings, seconds in run_all(args.inputs, names, args.begin):
        count = sum(said.values())
        found, total = found + len(findings), total + count
        words = ", ".join(f"{what} {n}" for what, n in sorted(said.items()))
        print(f"{name:12} {count} inputs in {seconds:.0f} s ({count / max(seconds, 1e-9):.0f} a second): {words}", flush=True)
        for seed, wrong in findings.items():
            print(f"  --reader {name} --seed {seed}: {wrong}", flush=True)
    print(f"{total} inputs, {found} findings")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
