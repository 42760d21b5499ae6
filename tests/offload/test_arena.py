from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says so")
def test_memory_is_in_huge_pages_and_not_shared_with_children() -> None:
    arena = Arena(4, 1, 1 << 20)
    address = arena.slot(0, 0, 1).ctypes.data
    flags = flags_at(address)
    assert "wf" in flags  # wiped when the process forks
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags
    assert "sh" not in flags


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says so")
def test_the_first_slots_can_be_taken_from_the_system_beforehand() -> None:
    arena = Arena(16, 1, 1 << 20)
    arena.slot(3, 0, 1)[:] = 7
    assert sum(resident(arena.buffer(i)) for i in range(8)) < 8 << 20
    arena.warm(8 << 20).join()
    assert [resident(arena.buffer(i)) for i in range(8)] == [1 << 20] * 8
    assert arena.slots([3, 4])[:, 0].tolist() == [7, 0]


FORK = """
import gc, os
from ebbtide.offload.arena import Arena

gc.disable()
for _ in range(30):
    garbage = [Arena(64, 1, 4096)]
    garbage.append(garbage)
del garbage
if os.fork() == 0:
    arenas = [Arena(64, 1, 4096) for _ in range(30)]
    gc.collect()
    for arena in arenas:
        arena.buffer(3)[:4] = b"KKVV"
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_that_collects_garbage_keeps_its_memory() -> None:
    assert subprocess.run([sys.executable, "-c", FORK]).returncode == 7


def flags_at(address: int) -> list[str]:
    """What proc(5) says of the mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the address is not mapped")


def resident(memory: memoryview) -> int:
    """How many bytes of whole pages are in memory, by mincore(2)."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    size = ctypes.c_size_t(memory.nbytes)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), size, pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
