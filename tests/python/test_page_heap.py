"""The heap of steps that move storages (src/runtime/step_heap.h)."""

from __future__ import annotations

import random

import torch
from interlace._runtime.testing import page_heap_block, page_heap_bytes

LARGE = 2 << 20
PAGE = 4096


def test_blocks_are_apart_and_gaps_are_used_again() -> None:
    rng = random.Random(0)
    blocks: dict[int, torch.Tensor] = {}
    live = most = 0
    before = page_heap_bytes()
    for number in range(2000):
        if blocks and rng.random() < 0.5:
            key = rng.choice(list(blocks))
            block = blocks.pop(key)
            assert bool((block == key % 251).all())  # nothing else was written there
            live -= -(-block.numel() // PAGE) * PAGE
        else:
            block = page_heap_block(rng.choice([1, 65536, 100_000, 720_896, 3 << 20]))
            assert block.data_ptr() % PAGE == 0
            blocks[number] = block.fill_(number % 251)
            live += -(-block.numel() // PAGE) * PAGE
            most = max(most, live)
    assert all(bool((block == key % 251).all()) for key, block in blocks.items())
    grown = page_heap_bytes() - before
    assert grown <= 1.5 * most
    del block
    blocks.clear()
    whole = page_heap_block(most)  # the gaps have become one again
    assert page_heap_bytes() - before <= max(grown, most)
    del whole


def test_outside_of_steps_the_system_gets_the_pages_back() -> None:
    block = page_heap_block(8 * LARGE).fill_(1)
    place = block.data_ptr()
    del block
    block = page_heap_block(8 * LARGE)
    assert block.data_ptr() == place
    assert not bool(block[LARGE:-LARGE].any())  # fresh pages are zeros
