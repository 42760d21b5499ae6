from __future__ import annotations

import mmap

import numpy as np
import pytest

from ebbtide.errors import InputError
from ebbtide.offload.arena import Arena, slot_bytes_for


def test_slots_are_whole_pages() -> None:
    assert slot_bytes_for(1, 1) == mmap.PAGESIZE
    assert slot_bytes_for(mmap.PAGESIZE, 3) == 3 * mmap.PAGESIZE
    assert slot_bytes_for(mmap.PAGESIZE + 1, 1) == 2 * mmap.PAGESIZE


def test_slots_and_blocks_do_not_overlap() -> None:
    arena = Arena(3, 4, 100)
    for slot in range(3):
        for block in range(4):
            arena.slot(slot, block, 1)[:] = slot * 4 + block
    for slot in range(3):
        assert arena.slot(slot, 0, 4).shape == (4, 100)
        assert (arena.slot(slot, 0, 4)[:, 0] == np.arange(4) + slot * 4).all()
        assert (arena.slot(slot, 1, 2) == arena.slot(slot, 0, 4)[1:3]).all()
    assert (arena.slots([2, 0])[:, 0] == [8, 0]).all()


def test_slots_start_on_a_page() -> None:
    arena = Arena(3, 4, 100)
    addresses = [arena.slot(i, 0, 1).ctypes.data for i in range(3)]
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)


def test_no_slot_at_all() -> None:
    assert Arena(0, 4, 100).num_slots == 0


def test_more_than_the_system_gives_is_a_sentence() -> None:
    with pytest.raises(InputError, match=r"host tier asked for .* MiB"):
        Arena(1 << 40, 1 << 10, 1 << 20)
