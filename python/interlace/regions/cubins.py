"""Regions → cubins, in a process of its own, which is told of a CUDA device that need not be there.

    python -m interlace.regions.cubins TARGET PROCESSES FILE < pickled funcs      FILE: list[Region], pickled

Inductor makes Triton text of a region's body and Triton compiles it; of several ways to run a kernel the first one is taken, since nothing
is measured. What is imported and said of the device here stays in this process and those that it forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from interlace.regions.body import Func
from interlace.regions.cuda import TARGETS, Kernel, Region
from interlace.regions.lower import LoweringError, lowered, places_of, settings

# What code generation asks of a device: A100 and H100, SXM.
DEVICES = {
    80: {"name": "NVIDIA A100-SXM4-80GB", "multi_processor_count": 108, "shared_memory_per_block_optin": 166912, "L2_cache_size": 40 << 20},
    90: {"name": "NVIDIA H100 80GB HBM3", "multi_processor_count": 132, "shared_memory_per_block_optin": 232448, "L2_cache_size": 50 << 20},
}
OPTIONS: dict[str, Any] = {
    "joint_graph_constant_folding": False,  # it makes the constants on the device
    "autotune_local_cache": False, "triton.unique_kernel_names": True,
    "triton.mix_order_reduction": False,  # it sums parts of a reduction with an operator, not a kernel
}  # fmt: skip
PARAMETERS = {"*": "u64", "i1": "u8", "i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64"}  # Triton's types → those of PTX


def pretend(capability: int) -> None:
    """From now on torch and Triton have such a device, on which nothing can run."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, post_grad
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import cache
    from triton.runtime.driver import driver

    cache.triton_key = lambda: ""  # a digest of all of Triton, for a cache that is thrown away
    facts = DEVICES[capability]
    properties = SimpleNamespace(
        major=capability // 10, minor=capability % 10, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32, total_memory=80 << 30, shared_memory_per_block=49152, gcnArchName="", **facts,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "get_device_properties": properties, "get_device_capability": (capability // 10, capability % 10), "current_device": 0,
        "device_count": 1, "is_available": True, "synchronize": None, "get_compute_capability": capability, "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }  # fmt: skip
    for name, answer in answers.items():
        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
            if hasattr(owner, name):
                setattr(owner, name, staticmethod(lambda *_, _answer=answer, **__: _answer))
    limits = {"max_shared_mem": facts["shared_memory_per_block_optin"], "multiprocessor_count": facts["multi_processor_count"]}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32), get_current_device=lambda: 0, get_current_stream=lambda *_: 0,
            get_active_torch_device=lambda: torch.device("cuda:0"), is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda *_: limits),
        )
    )  # fmt: skip
    # Patterns of products and attention, which no region has, a pass that runs copies on the device to see whether shapes fit, and what
    # gives the device a context before anything fake is there: that needs a driver, and cannot be forked.
    for module, name in (
        (fuse_attention, "_sfdp_init"), (misc_patterns, "_misc_patterns_init"), (post_grad, "reinplace_inplaceable_ops"),
        (fake_tensor, "init_gpu_context"),
    ):  # fmt: skip
        setattr(module, name, lambda *_, **__: None)


def region_of(func: Func) -> Region:
    """A region's kernels, or why it has none."""
    region = Region(func["key"][:16], len(func["operands"]), len(func["gives"]))
    begin = time.monotonic()
    try:
        plan = lowered(func, settings(1) | OPTIONS, "cuda:0")
        places, region.workspace = places_of(plan)
        compiled = {name: _compiled(name, text) for name, text in plan.kernels.items()}
        for name, arguments, _ in plan.calls:
            region.kernels.append(_launch(compiled[name], arguments, places))
    except LoweringError as e:
        region.why = str(e)[:300]
    except Exception as e:  # private code: whatever it raises, the body runs
        region.why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:250]}"
    region.seconds = time.monotonic() - begin
    return region


def _compiled(name: str, text: str) -> SimpleNamespace:
    """A kernel's tuner, way to run and binary, and what ptxas said."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = re.search(r"async_compile\.triton\('(\w+)', '''(.*?)'''", text, re.DOTALL)
    if found is None:
        raise LoweringError(f"a kernel of another form: {name}")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # Triton reads the source of what it compiles
        file.write(found[2].replace("triton_helpers.set_driver_to_gpu()", ""))
        file.flush()
        spec = importlib.util.spec_from_file_location(found[1], file.name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, found[1])
        way = tuner.configs[0]
        meta = tuner._create_compile_meta(way)
        source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        # What ptxas says is printed, each time; and no names of files, so that the same region has the same bytes wherever it is made.
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = knobs.compilation.disable_line_info = True
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            target = GPUTarget("cuda", meta["cc"], 32)
            binary = triton.compile(source, target=target, options=tuner._create_compile_options(way, meta))
    return SimpleNamespace(name=name, tuner=tuner, way=way, meta=meta, binary=binary, said=said.getvalue())


def _launch(compiled: SimpleNamespace, arguments: list[Any], places: dict[str, tuple[int, int]]) -> Kernel:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    meta, facts = compiled.meta, compiled.binary.metadata
    if facts.num_ctas != 1 or facts.global_scratch_size or facts.profile_scratch_size or facts.launch_cooperative_grid:
        raise LoweringError(f"a kernel that needs more than a plain launch: {compiled.name}")
    takes, types, numbers = [], [], dict(meta["constants"])
    for (name, kind), argument in zip(meta["signature"].items(), arguments, strict=False):
        pointer = kind.startswith("*")
        if not pointer and not str(argument).isdigit():
            raise LoweringError(f"an argument that is no number: {name}={argument}")
        if not pointer:
            numbers[name] = int(argument)
        if kind == "constexpr" or name in meta["constants"]:
            continue
        if pointer and str(argument) not in places:
            raise LoweringError(f"an argument that is no buffer: {argument}")
        takes.append("p{}+{}".format(*places[str(argument)]) if pointer else f"{kind}:{numbers[name]}")
        types.append(PARAMETERS.get("*" if pointer else kind, kind))
    takes += ["null", "null"]  # scratch, of the launch and of a profiler
    entry = re.search(r"\.entry [^(]*\(([^)]*)\)", compiled.binary.asm["ptx"])
    parameters = re.findall(r"\.param \.(\w+)", entry[1]) if entry else []
    if [p.replace("b", "u") for p in parameters] != [*types, "u64", "u64"]:
        raise LoweringError(f"a kernel with other parameters than its call: {compiled.name}: {parameters}, {types}")
    grid = GridExpr.from_meta(compiled.tuner.inductor_meta, compiled.way).eval_slow({**numbers, **compiled.way.kwargs})
    used = re.search(r"Used (\d+) registers", compiled.said)
    spilled = re.search(r"(\d+) bytes spill stores", compiled.said)
    if used is None or spilled is None:
        raise LoweringError(f"ptxas did not say what it uses: {compiled.name}")
    return Kernel(
        facts.name, [int(n) for n in grid], facts.num_warps, facts.shared, int(used[1]), int(spilled[1]), takes,
        compiled.binary.asm["cubin"],
    )  # fmt: skip


def main() -> None:
    gc.disable()  # a fifth of the time, of a process that soon ends
    target, processes, path = sys.argv[1:]
    funcs: list[Func] = pickle.load(sys.stdin.buffer)
    funcs.sort(key=lambda func: (-len(func["ops"]), func["key"]))
    pretend(TARGETS[target])
    made = [region_of(funcs.pop())]  # what all need is imported and made once, before the processes part
    if int(processes) == 1:
        made += map(region_of, funcs)
    else:
        with multiprocessing.get_context("fork").Pool(int(processes)) as pool:
            made += pool.imap(region_of, funcs)
    Path(path).write_bytes(pickle.dumps(made))
    os._exit(0)  # taking apart all that was imported takes a second


if __name__ == "__main__":
    main()
