"""A process that runs programs by seed, and the side that watches it: which seeds ended by a signal, or in nothing for a long time.

The worker reads a seed a line and answers a line when it has run. Its address space is limited, so that a program that wants too
much gets an error and not the machine.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
HANGS, STUCK = 60.0, 1800.0  # seconds of the processor, nothing that is run here takes one; by the clock, where others have the processor
HEAP = 3 << 30


def run(text: str, seed: int) -> str:
    """Loads a program and runs three steps of it: "numbers", or the class of the error."""
    import torch

    from interlace import _core, _runtime
    from interlace.cost.measure import fill_states, hyper_of, plain_inputs

    torch.manual_seed(seed)
    choice = random.Random(seed)
    wild = seed % 10 != 0  # legal programs (random_programs.py) get indices that are
    try:
        program = _core.Program.parse(text, "random")
        program.verify()
        executor = _runtime.Executor(text, "cpu", [], 10.0, {"arena": choice.random() < 0.7})
        fill_states(program, executor)
        steps = [line.split()[1] for line in text.split("\n") if line.startswith("step ")]
    except (RuntimeError, ValueError, MemoryError, KeyError) as e:
        return type(e).__name__
    said = "numbers"
    for step in range(3):  # the first learns the arena's places; what a failed one leaves behind must do no harm
        try:
            batches = [plain_inputs(program) for _ in range(int(steps[0]) if steps else 1)]
            for tensor in (t for batch in batches for t in batch):
                if not tensor.is_floating_point() and not tensor.is_complex() and choice.random() < 0.8:
                    tensor.random_(0, 2 if tensor.dtype == torch.bool else 4)
                    if wild and choice.random() < 0.2 and tensor.numel() and tensor.dtype == torch.int64:
                        tensor.view(-1)[0] = choice.choice([-1, -100, 1 << 20, 1 << 40, -(1 << 63)])
            outputs = executor.step(batches, hyper_of(program), step)["outputs"]
            for tensor in (t for tensors in outputs.values() for t in tensors):
                tensor.clone()  # reads all of it
        except (RuntimeError, ValueError, MemoryError, KeyError, TypeError) as e:
            said = type(e).__name__
    return said


def serve() -> None:
    import random_programs
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as sizes:
        mapped = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEAP, mapped + HEAP))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        kind, text = random_programs.program(int(line))
        answers.write(f"{line.strip()} {kind} {run(text, int(line))}\n")
        answers.flush()


class Worker:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            bufsize=1, cwd=HERE, env=environment,
        )  # fmt: skip

    def ask(self, seed: int) -> str | None:
        """What became of it; None: the worker is dead, or hangs and is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{seed}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        used, end = self._processor_s(), time.monotonic() + STUCK
        while not select.select([self.process.stdout], [], [], 5.0)[0]:
            if self._processor_s() - used > HANGS or time.monotonic() > end:
                self.process.kill()
                return None
        return self.process.stdout.readline().strip() or None

    def _processor_s(self) -> float:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self) -> int:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait()


def run_seeds(seeds: Iterable[int], found_at_most: int = 20) -> tuple[collections.Counter[str], dict[int, str]]:
    """How often what became of them, and the seeds whose worker died, with how."""
    said: collections.Counter[str] = collections.Counter()
    findings: dict[int, str] = {}
    worker = Worker()
    for seed in seeds:
        answer = worker.ask(seed)
        if answer is not None:
            said[answer.split(" ", 1)[1]] += 1
            continue
        findings[seed] = f"ended with {worker.end()} (a signal, where negative; -9: no answer)"
        worker = Worker()
        if len(findings) >= found_at_most:
            break
    worker.end()
    return said, findings


if __name__ == "__main__":
    serve()
