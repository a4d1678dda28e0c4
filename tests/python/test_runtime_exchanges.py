"""Transfers of activations in real programs on real ranks, over TCP and over a process group's own collectives, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from interlace import _core, _runtime
from interlace.dist.mesh import Mesh

MESHES = {"one": {"tp": 2}, "three": {"tp": 3}, "two": {"dp": 2, "tp": 2}}


def operand(rank: int, sizes: list[int]) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(100 + rank))


def stepped(mesh: dict[str, int], sizes: list[int], ops: str, result: str, backend: str) -> torch.Tensor:
    """The output of a program of these ops, whose operand %0 each rank has of its own."""
    rank = dist.get_rank()
    where = Mesh(mesh, rank)
    text = "interlace 1 scheduled\n" + "".join(f"mesh {n} {s}\n" for n, s in mesh.items()) + "step 1 reduce_each\n"
    text += f'input %0: {text_of(sizes)} "x"\nphase micro_batch takes () gives () {{\n'
    text += "".join(f"  {line}\n" for line in ops.split("\n"))
    text += f'  output({result}) {{fwd name="y"}}\n}}\n'
    axes = []
    for name, size in mesh.items():
        for group in where.groups(name):
            made = dist.new_group(group, backend="gloo")
            if rank in group:
                axes.append(
                    {"name": name, "rank": where.index(name), "size": size, "backend": backend, "native": made.group_name}
                )
    _core.Program.parse(text).verify()
    executor = _runtime.Executor(text, "cpu", axes, 20.0, {})
    for step in range(3):
        found = executor.step([[operand(rank, sizes)]], [], step)["outputs"]["y"][0].clone()
    executor.leave()
    return found


def check(mesh: dict[str, int], sizes: list[int], ops: str, result: str, expected: Any) -> None:
    for backend in ("tcp", "native"):
        found = ranks.run(stepped, Mesh(mesh, 0).ranks, mesh, sizes, ops, result, backend)
        for rank, y in enumerate(found):
            where = Mesh(mesh, rank)
            want = expected([operand(r, sizes) for r in where.group("tp")], where.index("tp"))
            assert torch.allclose(y, want, rtol=1e-6, atol=1e-6), f"{backend}, rank {rank}"


def text_of(sizes: list[int]) -> str:
    return "f32[" + ",".join(map(str, sizes)) + "]"


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_all_gather(mesh: dict[str, int], dim: int) -> None:
    whole = [6, 12, 2]
    whole[dim] *= mesh["tp"]
    ops = f"%1: {text_of(whole)} = all_gather.start(%0) {{fwd axis=tp dim={dim}}}\nall_gather.wait(%1) {{fwd}}"
    check(mesh, [6, 12, 2], ops, "%1", lambda all_, _: torch.cat(all_, dim))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter(mesh: dict[str, int], dim: int) -> None:
    part = [6, 12]
    part[dim] //= mesh["tp"]
    ops = f"%1: {text_of(part)} = reduce_scatter.start(%0) {{fwd axis=tp dim={dim}}}\nreduce_scatter.wait(%1) {{fwd}}"
    check(mesh, [6, 12], ops, "%1", lambda all_, mine: sum(all_).chunk(mesh["tp"], dim)[mine])


@pytest.mark.parametrize(("dim", "to"), [(0, 1), (1, 0), (1, 1)])
def test_all_to_all(dim: int, to: int) -> None:
    mesh, out = {"tp": 3}, [6, 12]
    out[dim] //= 3
    out[to] *= 3
    ops = f"%1: {text_of(out)} = all_to_all.start(%0) {{fwd axis=tp dim={dim} to={to}}}\nall_to_all.wait(%1) {{fwd}}"
    check(mesh, [6, 12], ops, "%1", lambda all_, mine: torch.cat([x.chunk(3, dim)[mine] for x in all_], to))


def test_broadcast_and_all_reduce() -> None:
    mesh = MESHES["two"]
    ops = "%1: f32[6,12] = broadcast.start(%0) {fwd axis=tp root=1}\nbroadcast.wait(%1) {fwd}"
    check(mesh, [6, 12], ops, "%1", lambda all_, _: all_[1])
    ops = "%1: f32[6,12] = all_reduce.start(%0) {fwd axis=tp}\nall_reduce.wait(%1) {fwd}"
    check(mesh, [6, 12], ops, "%1", lambda all_, _: sum(all_))


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_of_messages(size: int) -> None:
    ops = (
        f"%1: b8[0] = send.start(%0) {{fwd axis=tp peer=(rank_tp+1)%{size}}}\n"
        f"%2: f32[6,12] = recv.start() {{fwd axis=tp peer=(rank_tp+{size - 1})%{size}}}\n"
        "recv.wait(%2) {fwd}\nsend.wait(%1) {fwd}"
    )
    check({"tp": size}, [6, 12], ops, "%2", lambda all_, mine: all_[mine - 1])
