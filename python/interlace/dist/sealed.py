"""What goes between ranks by torch's process groups (initial parameters, rows of checkpoints), encrypted where ranks encrypt.

Each message has a key of its own: of the run, the group, who sends, to whom (-1: all), and how many came before. One that was changed,
repeated or exchanged on its way is an error.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.dist.secret import MESH_KEY, derive, encrypts
from interlace.errors import InterlaceError

TAG = 16  # bytes behind each message
_sent: Counter[tuple[str, int, int]] = Counter()  # messages by group, sender and receiver
_came: Counter[tuple[str, int, int]] = Counter()


def broadcast(tensor: Tensor, group: Any, source: int) -> None:
    """The values of a rank of the group, written into everyone's contiguous tensor."""
    if not encrypts():
        dist.broadcast(tensor, group=group, group_src=source)
        return
    mine = dist.get_rank(group) == source
    box = _seal(tensor, group) if mine else _box(tensor)
    dist.broadcast(box, group=group, group_src=source)
    _open(box, tensor, tensor, group, source)


def gather(mine: Tensor, parts: list[Tensor] | None, group: Any, everywhere: bool) -> None:
    """The ranks' equal tensors, on all of the group or on its first rank alone, where `parts` is given."""
    sealed, to = encrypts(), -1 if everywhere else 0
    sent = _seal(mine, group, to) if sealed else mine
    boxes = [_box(part) for part in parts] if sealed and parts is not None else parts
    if everywhere:
        dist.all_gather(boxes, sent, group=group)
    else:
        dist.gather(sent, boxes, group=group, group_dst=0)
    for rank, (box, part) in enumerate(zip(boxes or [], parts or [], strict=True)):
        if sealed:
            _open(box, part, mine, group, rank, to)


def exchange(found: Tensor, mine: Tensor, to: list[int], came: list[int], group: Any) -> None:
    """Bytes: `to[r]` of `mine` go to rank r of the group, `came[r]` of `found` come from it."""
    if not encrypts():
        dist.all_to_all_single(found, mine, came, to, group=group)
        return
    parts, own = mine.split(to), dist.get_rank(group)
    sent = torch.cat([_seal(part, group, rank) for rank, part in enumerate(parts)])
    boxes = torch.empty(sum(came) + TAG * len(came), dtype=torch.uint8)
    dist.all_to_all_single(boxes, sent, [n + TAG for n in came], [n + TAG for n in to], group=group)
    for rank, (box, part) in enumerate(zip(boxes.split([n + TAG for n in came]), found.split(came), strict=True)):
        _open(box, part, parts[own], group, rank, own)


def objects(mine: Any, group: Any, everywhere: bool = True) -> list[Any] | None:
    """Every rank's object, by rank of the group, pickled: on all ranks or on the first; None elsewhere."""
    here = everywhere or dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if here else None
    if not encrypts():
        if everywhere:
            dist.all_gather_object(found, mine, group=group)
        else:
            dist.gather_object(mine, found, group=group, group_dst=0)
        return found
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    parts = [torch.empty(int(size), dtype=torch.uint8) for _ in found or []]
    gather(torch.cat([data, data.new_zeros(int(size) - data.numel())]), parts if here else None, group, everywhere)
    return [pickle.loads(part.numpy().tobytes()) for part in parts] if here else None  # what follows the pickle's end is not read


def _box(form: Tensor) -> Tensor:
    return torch.empty(form.nbytes + TAG, dtype=torch.uint8)


def _key(group: Any, source: int, to: int, count: Counter[tuple[str, int, int]]) -> bytes:
    place = (group.group_name, source, to)
    count[place] += 1
    return derive(bytes.fromhex(os.environ[MESH_KEY]), f"group {place} {count[place]}")


def _seal(tensor: Tensor, group: Any, to: int = -1) -> Tensor:
    from interlace import _runtime

    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(_runtime.seal(_key(group, dist.get_rank(group), to, _sent), 0, data), dtype=torch.uint8)


def _open(box: Tensor, tensor: Tensor, mine: Tensor, group: Any, source: int, to: int = -1) -> None:
    """What a rank sealed, into `tensor`; `mine`: what this rank did, which it does not count as come."""
    from interlace import _runtime

    if source == dist.get_rank(group):
        tensor.detach().copy_(mine.detach())
        return
    found = _runtime.unseal(_key(group, source, to, _came), 0, box.numpy())
    if found is None:
        raise InterlaceError(f"what rank {source} of group {group.group_name} sent was changed on the way; is somebody else on the network?")
    if found:
        tensor.detach().view(-1).view(torch.uint8).copy_(torch.frombuffer(found, dtype=torch.uint8))
