"""Host memory for chunks: one anonymous mapping, cut into page-aligned slots."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ebbtide.errors import InputError

# madvise(2); the module mmap need not name them
MADV_HUGEPAGE, MADV_WIPEONFORK, MADV_POPULATE_WRITE = 14, 18, 23
WARM_BYTES = 256 << 20
Bytes = npt.NDArray[np.uint8]


def slot_bytes_for(block_bytes: int, blocks_per_chunk: int) -> int:
    """Bytes that a slot takes: a chunk, rounded up to whole pages."""
    return -(-block_bytes * blocks_per_chunk // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapping(size: int) -> mmap.mmap:
    """Memory in huge pages where there are such: a page fault per 2 MiB that are first written, not 512.

    Forked children get it empty, as direct I/O into pages that are shared with one may be lost (open(2)).
    (Without it, by MADV_DONTFORK, they would unmap what has come in its place when they collect garbage.)
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        for advice in (MADV_HUGEPAGE, MADV_WIPEONFORK):
            with contextlib.suppress(OSError):  # a system that cannot is not worse off
                memory.madvise(advice)
    return memory


class ChunkMemory(Protocol):
    """Where the bytes of chunks lie: ``Arena``, or memory of somebody else's."""

    def slot(self, number: int, offset: int, count: int) -> Bytes:
        """Writable view [count, block_bytes] of ``count`` blocks of a slot, from ``offset`` on."""
        ...

    def buffer(self, number: int) -> memoryview:
        """The whole slot, writable, in whole pages: what a tier reads and writes."""
        ...

    def slots(self, numbers: Sequence[int]) -> Bytes:
        """A copy of whole chunks, [slot, bytes]: for inspection."""
        ...


class Arena:
    """``num_slots`` slots; ``slot(i, offset, count)`` views blocks of slot i as [count, block_bytes].

    Pages are taken from the system when they are first written, or before (``warm``). A forked child has
    them empty. Raises InputError where the system refuses the mapping.
    """

    def __init__(self, num_slots: int, blocks_per_chunk: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.blocks_per_chunk = blocks_per_chunk
        stride = slot_bytes_for(block_bytes, blocks_per_chunk)
        size = max(1, num_slots) * stride
        try:
            memory = _mapping(size)
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(
                f"the host tier asked for {size / 2**20:.0f} MiB, which the system refused "
                f"({error}): ask for less host memory"
            ) from error
        self._slots = np.frombuffer(memory, np.uint8).reshape(-1, stride)

    def warm(self, size: int) -> threading.Thread:
        """Take the pages of the first slots from the system, ``size`` bytes of them, on a thread beside.

        The first use of a page can cost more than all that is then done with it: on a virtual machine
        whose host gives memory late, a chunk of 1.4 MiB was read from disk in 3.2 ms the first time, then
        in 0.7. Content stays. Where the system cannot be asked, pages come when they are used.
        """
        first = self._slots[: size // self._slots.shape[1]]
        thread = threading.Thread(target=_populate, args=[first], name="ebbtide-arena", daemon=True)
        thread.start()
        return thread

    def slot(self, number: int, offset: int, count: int) -> Bytes:
        """Writable view of ``count`` blocks of a slot, from its block ``offset`` on."""
        start = offset * self.block_bytes
        chunk = self._slots[number, start : start + count * self.block_bytes]
        return chunk.reshape(count, self.block_bytes)

    def buffer(self, number: int) -> memoryview:
        """The whole slot, writable, in whole pages."""
        return memoryview(self._slots[number])

    def slots(self, numbers: Sequence[int]) -> Bytes:
        """A copy of whole chunks, [slot, bytes]: for inspection."""
        return self._slots[list(numbers), : self.blocks_per_chunk * self.block_bytes]


def _populate(memory: Bytes) -> None:
    if sys.platform == "linux":  # ctypes lets other threads run meanwhile
        address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
        ctypes.CDLL(None).madvise(address, size, MADV_POPULATE_WRITE)
