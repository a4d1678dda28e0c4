"""One rank of a crew of methods in bench/peers.py: builds methods and runs blocks of steps when told, over its own pipes.

in   {"do": "build", "method": "fsdp2"}                            out  {"parameter_bytes": 78121984}
in   {"do": "steps", "method": "fsdp2", "first": 4, "count": 2}    out  {"seconds": 1.92, "losses": [6.2, 6.1], "sent_bytes": 234e6}
any error                                                          out  {"error": "ValueError: ...", "trace": "..."}

Everything that libraries print goes to standard error; the pipes carry the protocol alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

DISTINCT_BATCHES = 4  # batches come round again, so that the loss falls and a method that learns something else shows


def sent_bytes(interface: str) -> int:
    """Bytes sent on an interface of this namespace since it was made, packet headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"there is no network interface {interface}")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        worker = Worker(json.loads(sys.argv[1]))
        reply({"ready": True})
    except Exception as e:
        reply({"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()})
        return
    for line in sys.stdin:
        try:
            reply(worker.do(json.loads(line)))
        except Exception as e:
            reply({"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()})
    os._exit(0)  # libraries that wait for one another at exit have nothing left to say


class Worker:
    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from peer_methods import Settings

        torch.set_num_threads(int(settings.pop("threads", 1)))
        self.settings = Settings(**settings)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.data_rank = int(os.environ.get("PEERS_DATA_RANK", self.rank))
        if self.ranks > 1:
            dist.init_process_group("gloo")
            if self.rank == 0:
                print(f"{self.ranks} ranks met", flush=True)
        self.steps: dict[str, Any] = {}

    def do(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "build":
            return self.build(message["method"], message.get("table", "peers"))
        return self.run(message["method"], int(message["first"]), int(message["count"]))

    def build(self, name: str, table: str) -> dict[str, Any]:
        from cases import causal_model
        from default_methods import DEFAULTS
        from peer_methods import ALONE, METHODS
        from stage_methods import STAGES
        from tensor_methods import TENSOR

        tables = {"peers": METHODS, "tensor parallel": TENSOR, "pipeline": STAGES, "defaults": METHODS | DEFAULTS}
        self.steps[name] = (ALONE | tables[table])[name].build(self.settings)
        parameters = causal_model(self.settings.case).parameters() if self.rank == 0 else []
        return {"parameter_bytes": sum(p.numel() * p.element_size() for p in parameters)}

    def batches(self, step: int) -> list[Any]:
        from cases import token_batch

        first = (step % DISTINCT_BATCHES) * self.settings.accumulation
        return [
            token_batch(self.settings.case, self.settings.case.get("rows", 1), seed=first + i, rank=self.data_rank)
            for i in range(self.settings.accumulation)
        ]

    def run(self, name: str, first: int, count: int) -> dict[str, Any]:
        """Seconds and bytes of a block of steps, all ranks beginning together."""
        import torch.distributed as dist

        step = self.steps[name]
        batches = [self.batches(s) for s in range(first, first + count)]
        if self.ranks > 1:
            dist.barrier()
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        sent = sent_bytes(interface)
        begin = time.perf_counter()
        losses = [step(b) for b in batches]
        seconds = time.perf_counter() - begin
        if self.ranks > 1:
            dist.barrier()  # so that all that this block sends is counted on every rank
        return {"seconds": seconds, "losses": losses, "sent_bytes": sent_bytes(interface) - sent}


if __name__ == "__main__":
    main()
