"""Cubins launched as their manifest says, by what launches them for the executor, and compared with the bodies of their regions on the same
device. The context is torch's own, the stream its current one."""

from __future__ import annotations

import math
from typing import Any

import torch

from interlace import _runtime
from interlace.regions import RegionsError, cuda
from interlace.regions.body import empty_of, function_of, moved, operands_of
from interlace.regions.check import ULPS, added, difference, same

MOST_BYTES = 8 << 30  # of a region's operands; larger ones are left out


def target_here() -> str:
    try:
        return cuda.target_of(torch.device("cuda"))
    except (RegionsError, RuntimeError, AssertionError) as e:
        raise SystemExit(str(e)) from None


def compare_on_device(funcs: list[dict[str, Any]], found: cuda.Cubins, device: torch.device) -> dict[str, str]:
    """Name of a func → what is wrong with its kernels; "" where each result is as near to the value in float64 as the body's own."""
    loaded = _runtime.Cubins(cuda.target_of(device), str(device), found.regions)
    refused, regions, wrong = loaded.refused(), {region.key: region for region in found.regions}, {}
    for func in funcs:
        region = regions.get(func["key"][:16])
        if region is not None and region.key in refused:
            wrong[func["name"]] = refused[region.key]
            continue
        operands = [moved(x, device) for x in operands_of(func)] if region is not None else []
        if region is None or sum(x.nbytes for x in operands) > MOST_BYTES:
            continue
        given = [empty_of(value, str(device)).fill_(0) for value in func["gives"]]
        workspace = torch.empty(max(region.workspace, 1), dtype=torch.uint8, device=device)
        loaded.launch(region.key, [x.data_ptr() for x in [*operands, *given, workspace]])
        torch.accelerator.synchronize()
        with torch.no_grad():
            bodies = function_of(func)(*operands)
            exact = function_of(func, wide=True)(*operands)
        said = [
            difference(made, body, wide, ULPS * max(1.0, math.log2(added(func))))
            for made, body, wide in zip(given, bodies, exact, strict=True)
            if not same(made, body)
        ]
        wrong[func["name"]] = "; ".join(text for text in said if text)
    return wrong
