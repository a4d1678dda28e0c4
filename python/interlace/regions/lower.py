"""Inductor's code generation alone: a region's body → C++ or Triton kernels, and the calls that run them.

Inductor writes a Python wrapper around its kernels. Here the wrapper is a `Plan`: the buffers that it would make and the calls that it would
write (for CUDA see cubins.py), of which on CPUs one C++ function is made for each region,

    extern "C" void r_KEY(void* const* p)          // p: operands, results, workspace

These are private classes of torch, so only versions that the tests have run with are used (TESTED).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

from interlace.regions.body import Func, empty_of, function_of

TESTED = ("2.11", "2.12", "2.13", "2.14")  # versions of torch whose code generation the tests have run with
ALIGNMENT = 64  # bytes, of parts of a workspace
UNNEEDED = ("LineContext", "EnterDeviceContextManagerLine", "ExitDeviceContextManagerLine")  # of a wrapper's lines, by class


class LoweringError(Exception):
    """A region that code generation makes no plain kernel of."""


@dataclasses.dataclass
class Plan:
    """What Inductor's wrapper would do."""

    inputs: list[str] = dataclasses.field(default_factory=list)
    outputs: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=list)  # name, sizes, strides
    buffers: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # name, bytes
    aliases: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)  # name → buffer, bytes from its start
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)  # name → text
    calls: list[tuple[str, list[Any], list[str]]] = dataclasses.field(default_factory=list)  # kernel, arguments, their C++ types


def settings(threads: int) -> dict[str, Any]:
    """Of Inductor, for what is made here; part of the key."""
    return {
        "allow_buffer_reuse": False, "inplace_buffers": False, "fx_wrapper": True, "comprehensive_padding": False, "size_asserts": False,
        "cpp.threads": threads, "cpp.vec_isa_ok": True,  # else each instruction set is tried by compiling something
        "compile_threads": 1,  # else a pool of processes is started, for what is not compiled here
    }  # fmt: skip


def source_of(func: Func, threads: int) -> str:
    """The C++ text of one region: its kernels, r_KEY and w_KEY. Error: LoweringError."""
    plan = lowered(func, settings(threads))
    key = func["key"][:16]
    texts, names = [], {}
    for kernel, body in plan.kernels.items():
        found = re.search(r"cpp_pybinding\(.*?,\s*(?:r)?'''(.*?)'''", body, re.DOTALL)
        if found is None or len(re.findall(r"\bkernel\(", found[1])) != 1:
            raise LoweringError(f"a kernel of another form: {kernel}")
        names[kernel] = f"k_{key}_{kernel}"
        text = re.sub(r"#include.*\n", "", found[1]).replace('extern "C"', "static")
        texts.append(re.sub(r"\bkernel\(", f"{names[kernel]}(", text))
    places, workspace = places_of(plan)

    def argument(name: Any, kind: str) -> str:
        if str(name) not in places:
            raise LoweringError(f"an argument that is no buffer: {name}")
        index, offset = places[str(name)]
        return f"({kind})((char*)p[{index}] + {offset})"

    calls = "".join(
        f"  {names[kernel]}({', '.join(argument(a, t) for a, t in zip(arguments, types, strict=True))});\n"
        for kernel, arguments, types in plan.calls
    )
    texts.append(f'extern "C" void r_{key}(void* const* p) {{\n{calls}}}\nextern "C" {{ extern const int64_t w_{key} = {workspace}; }}\n')
    return "\n".join(texts)


def places_of(plan: Plan) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each buffer of a plan lies: the index of its pointer among operands, results and workspace, and bytes from there; and the
    workspace's bytes. Error: LoweringError."""
    places = {name: (i, 0) for i, name in enumerate([*plan.inputs, *(name for name, _, _ in plan.outputs)])}
    last, workspace = len(plan.inputs) + len(plan.outputs), 0
    if len(places) != last:
        raise LoweringError("a result that is an operand or another result")
    for name, size in plan.buffers:
        if name not in places:
            places[name] = (last, workspace)
            workspace += -(-size // ALIGNMENT) * ALIGNMENT
    for name, (buffer, offset) in plan.aliases.items():
        if buffer in places:
            index, begin = places[buffer]
            places[name] = (index, begin + offset)
    return places, workspace


def lowered(func: Func, options: dict[str, Any], device: str = "cpu") -> Plan:
    """A region's kernels and calls, by Inductor with these settings. Error: LoweringError."""
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes, fake_tensor_prop
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    plans: list[Plan] = []
    try:
        mode = FakeTensorMode()
        with config.patch(options), _wrapped(plans, torch.device(device).type), torch.no_grad(), DebugContext(), V.set_fake_mode(mode):
            with mode:  # traced on a CPU: ops of tensors on a device that is not there have no kernels even there
                traced = make_fx(function_of(func), decomposition_table=select_decomp_table())(*map(empty_of, func["operands"]))
                fakes = [empty_of(value, device) for value in func["operands"]]
            for node in traced.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device(device)}
            # Results lie as the program says, whatever layout code generation would like.
            output = next(iter(traced.graph.find_nodes(op="output")))
            output.meta["user_visible_output_idxs"] = list(range(len(func["gives"])))
            output.meta["original_output_strides"] = [tuple(value["strides"]) for value in func["gives"]]
            fake_tensor_prop(traced, fakes, force_allow_non_fake_inputs=True)
            if device != "cpu":  # else the loss needs a workspace as large as the logits; on CPUs what they do is slower
                _recursive_joint_graph_passes(traced)
            _recursive_post_grad_passes(traced, is_inference=True)
            graph = GraphLowering(traced, example_inputs=fakes, shape_env=ShapeEnv(), is_inference=True, fx_wrapper=True)
            with V.set_graph_handler(graph):
                graph.run(*fakes)
                graph.codegen()
    except LoweringError:
        raise
    except Exception as e:  # private code: whatever it raises, the body runs
        raise LoweringError(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
    plan = plans.pop()
    for value, (name, sizes, strides) in zip(func["gives"], plan.outputs, strict=True):
        if sizes != tuple(value["shape"]) or _strides(sizes, strides) != _strides(sizes, value["strides"]):
            raise LoweringError(f"result {name} has another layout: {sizes} {strides}")
    return plan


def _strides(sizes: Any, strides: Any) -> list[int]:
    """Those that an address depends on."""
    return [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]


@contextlib.contextmanager
def _wrapped(plans: list[Plan], device: str) -> Iterator[None]:
    """Inductor's wrapper for a device is ours meanwhile."""
    from torch._inductor.codegen.common import device_codegens, init_backend_registration, register_backend_for_device
    if device == "cpu":
        from torch._inductor.codegen.cpp import CppScheduling as Scheduling
    else:
        from torch._inductor.codegen.triton import TritonScheduling as Scheduling  # type: ignore[assignment]

    init_backend_registration()
    before = device_codegens[device]
    register_backend_for_device(device, Scheduling, before.wrapper_codegen, before.cpp_wrapper_codegen, _wrapper(plans))
    try:
        yield
    finally:
        device_codegens[device] = before


def _wrapper(plans: list[Plan]) -> Any:
    from torch._inductor.codegen import wrapper as w
    from torch._inductor.virtualized import V

    class PlanWrapper(w.PythonWrapperCodegen):
        supports_caching = False

        @classmethod
        def create(cls, is_subgraph: bool, *_: Any, **__: Any) -> Any:
            if is_subgraph:
                raise LoweringError("a graph within the graph")
            return cls()

        def register_alignment_check_inputs(self) -> None:
            pass

        def _generate(self, is_inference: bool) -> Any:
            self.run_wrapper_ir_passes(is_inference)
            plan = Plan()
            for line in self.lines:
                _read(plan, line, w)
            plan.inputs = list(V.graph.graph_inputs)
            for node in self.get_graph_outputs():
                offset = getattr(node.get_layout(), "offset", 0)
                if int(offset) != 0:
                    raise LoweringError("a result that is a part of a buffer")
                plan.outputs.append((node.get_name(), tuple(map(int, node.get_size())), tuple(map(int, node.get_stride()))))
            plans.append(plan)

            class Text:
                value = ""

            return Text(), None

    return PlanWrapper


def _read(plan: Plan, line: Any, w: Any) -> None:
    """One line that the wrapper would have written."""
    if isinstance(line, w.AllocateLine):
        node = line.node
        sizes, strides = [int(n) for n in node.get_size()], [int(n) for n in node.get_stride()]
        span = 0 if 0 in sizes else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        plan.buffers.append((node.get_name(), span * node.get_dtype().itemsize))
    elif isinstance(line, w.KernelCallLine):
        plan.calls.append((line.kernel_name, list(line.call_args), list(line.arg_types or [])))
    elif isinstance(line, w.KernelDefinitionLine):
        plan.kernels[line.kernel_name] = line.kernel_body
    elif isinstance(line, w.ReinterpretLine):
        # The layout's own offset is 0 whatever the view's is.
        begin = int(line.layout.view.get_layout().offset) * line.node.get_dtype().itemsize
        buffer, before = plan.aliases.get(line.node.get_name(), (line.node.get_name(), 0))
        plan.aliases[line.reused_as.get_name()] = (buffer, before + begin)
    elif isinstance(line, (w.FreeIfNotReusedLine, w.FreeLine, w.NullLine, w.CommentLine)) or type(line).__name__ in UNNEEDED:
        pass
    elif not isinstance(line, str) or (line.strip() and not line.strip().startswith("#")):
        raise LoweringError(f"an operator that has no kernel: {line if isinstance(line, str) else type(line).__name__}")
