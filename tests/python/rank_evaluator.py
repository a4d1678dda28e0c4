"""The tiny evaluator (evaluator.py) on all ranks of a mesh axis at once, in one process: each line runs for every rank
before the next one does, and collectives are made of what all of them have.

    ranks = RankEvaluator(text, tensors, axis="tp", ranks=2)     # whole tensors: each rank takes its part by the text's cuts
    results = ranks.run(inputs)                                  # one result a rank
    whole = ranks.whole("fc.weight", [r["grads"]["fc.weight"] for r in results])
"""

from __future__ import annotations

import re
from typing import Any

import torch
from evaluator import _TYPED, Args, Evaluator, parse_decl

_PARAM = re.compile(r'^param %\d+: \S+ "([^"]*)"(.*)$')


class RankEvaluator:
    def __init__(self, text: str, tensors: dict[str, torch.Tensor], axis: str, ranks: int) -> None:
        self.ranks = ranks
        self.cuts: dict[str, tuple[int, int]] = {}  # name → dimension, blocks
        for line in text.splitlines():
            if found := _PARAM.match(line):
                cut = re.search(rf"\bcut {axis} (\d+)(?: blocks (\d+))?", found[2])
                if cut:
                    self.cuts[found[1]] = (int(cut[1]), int(cut[2] or 1))
        mesh = re.findall(r"^mesh (\w+) ", text, re.MULTILINE)
        self.each = [
            Evaluator(text, {name: self.part(name, t, rank) for name, t in tensors.items()},
                      {**{f"rank_{name}": 0 for name in mesh}, f"rank_{axis}": rank})
            for rank in range(ranks)
        ]  # fmt: skip

    def part(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        if name not in self.cuts:
            return whole
        dim, blocks = self.cuts[name]
        pieces = [block.chunk(self.ranks, dim)[rank] for block in whole.chunk(blocks, dim)]
        return torch.cat(pieces, dim).contiguous()

    def whole(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """What the ranks' parts are parts of. Of a tensor that is not cut: equal bits on all ranks, checked."""
        if name not in self.cuts:
            assert all(torch.equal(p, parts[0]) for p in parts), f"{name} differs between ranks"
            return parts[0]
        dim, blocks = self.cuts[name]
        chunks = [p.chunk(blocks, dim) for p in parts]
        return torch.cat([chunks[r][b] for b in range(blocks) for r in range(self.ranks)], dim)

    def run(self, inputs: list[torch.Tensor]) -> list[dict[str, dict[str, torch.Tensor]]]:
        values: list[dict[int, torch.Tensor]] = [dict(e.start) for e in self.each]
        results: list[dict[str, dict[str, torch.Tensor]]] = [{"outputs": {}, "grads": {}, "assigned": {}} for _ in self.each]
        for e, v in zip(self.each, values, strict=True):
            v.update({d.value: x.detach().clone() for d, x in zip(e.inputs, inputs, strict=True)})
        with torch.no_grad():
            for lines in zip(*(e.ops for e in self.each), strict=True):
                try:
                    self._line(lines[0], values, results)
                except Exception as e:
                    raise AssertionError(f"{e}\n  at: {lines[0]}") from e
        return results

    def _line(self, line: str, values: list[dict[int, torch.Tensor]], results: list[Any]) -> None:
        m = re.match(rf"((?:(?:{_TYPED}|_)(?:, )?)+ = )?([a-z_]+)\.(start|wait)\((.*)\) \{{(.*)\}}$", line)
        if m is None:
            state = torch.get_rng_state()  # a draw is the same on every rank
            for e, v, r in zip(self.each, values, results, strict=True):
                torch.set_rng_state(state)
                if " = copy(" in line:
                    line_of = line.replace(" = copy(", " = aten.clone(")
                    e._op(line_of[: line_of.rindex("{")].rstrip()[:-1] + ", memory_format=contiguous) {bwd}", v, r)
                else:
                    e._op(line, v, r)
            return
        if m[3] == "wait":
            return
        decls = re.findall(_TYPED, m[1])
        operands = [Args(m[4], v, e.binding).read()[0] for e, v in zip(self.each, values, strict=True)]
        dim = int(found[1]) if (found := re.search(r"\bdim=(\d+)", m[5])) else 0
        for i, text in enumerate(decls):
            parts = [o[i] for o in operands]
            for rank, (e, v) in enumerate(zip(self.each, values, strict=True)):
                if m[2] == "all_gather":
                    x = torch.cat(parts, dim)
                else:
                    x = sum(parts[1:], parts[0])
                    if m[2] == "reduce_scatter":
                        x = x.chunk(self.ranks, dim)[rank].contiguous()
                    else:
                        assert m[2] == "all_reduce", m[2]
                        x = x.clone()
                d = parse_decl(text, e.binding)
                assert (x.dtype, tuple(x.shape), x.stride()) == (d.dtype, d.size, d.stride), text
                v[d.value] = x
