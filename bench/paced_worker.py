"""Steps of one program on one rank of a paced cluster: the real executor issues, the software accelerator takes the cost model's time
(tests/accelerator/pace.h). bench/paced.py starts it in a process a rank; tests call steps_of in processes of their own.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

Job = dict[str, Any]


def steps_of(job: Job, rank: int) -> dict[str, Any]:
    """Seconds of a job's steps by the cluster's clock, divided by the factor; what its last one did, and what the host did meanwhile.

    A job has the `program`'s text, the `cluster`'s, `ranks`, how many `times` as long everything takes, whether time is `virtual`, the
    `file` that ranks share, and how many `steps` are timed after `warm` ones. With several ranks torch.distributed has gloo.
    """
    import soft_device
    import torch

    from interlace import _core, _runtime
    from interlace.cost.measure import hyper_of, plain_inputs
    from interlace.dist.groups import Groups

    program = _core.Program.parse(job["program"], "program")
    pacing = _core.testing.pacing(program, job["cluster"])
    groups = Groups(torch.device("soft", 0), rank, job["ranks"], 120.0)
    device = soft_device._C
    soft_device.pace(job["file"], rank, job["ranks"], job["virtual"])
    try:
        groups.open()
        options = {"join_updates": False}  # each op takes its time, when it gives the device something
        executor = _runtime.Executor(job["program"], "soft", groups.axes(program), 120.0, options)
        count = len(program.inputs()) // program.width
        batch = [tensor.to("soft") for tensor in plain_inputs(program)[:count]]
        hyper = hyper_of(program)
        soft_device.pace_program(pacing, job["times"], _runtime.testing.current_op())
        seconds, paced, waits, busy = [], [], 0, 0.0
        for step in range(job["warm"] + job["steps"]):
            device.take_paced()
            begin, waited, used = device.paced_now_ns(), device.waits(), time.process_time()
            executor.step([list(batch) for _ in range(program.accumulation)], hyper, step)
            torch.accelerator.synchronize()
            end = device.paced_now_ns()
            if step >= job["warm"]:
                seconds.append((end - begin) / 1e9 / job["times"])
                busy += time.process_time() - used
                waits = device.waits() - waited
            paced = [(op, stream, start - begin, stop - begin) for op, stream, start, stop in device.take_paced()]
        stats = executor.stats()
        del executor
        return {"seconds": seconds, "paced": paced, "waits": waits, "host_s": busy / job["steps"], "instructions": stats["instructions"]}
    finally:
        soft_device.use("free")
        groups.close()


def serve(job: Job, rank: int, pipe: Connection) -> None:
    """steps_of in a process of its own; the answer is its result, or the text of an error."""
    import traceback

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if job["ranks"] > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank, world_size=job["ranks"])
        pipe.send(steps_of(job, rank))
        if job["ranks"] > 1:
            dist.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())
