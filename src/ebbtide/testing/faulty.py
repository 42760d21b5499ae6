"""Device and host memory that lose, spoil and refuse bytes when told to.

A *bad* mark stands for a checksum. It travels with the content: a store of a bad block makes a bad
chunk, which makes a bad block when it is loaded. The first step that reads a bad block reports it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import Direction, Row, StepPlan, Transfer, TransferResult
from ebbtide.offload.arena import Bytes, ChunkMemory
from ebbtide.offload.mover import move
from ebbtide.testing.witness import WitnessMemory

GARBAGE = np.uint64(0xBAD0BAD0BAD0BAD0)
Strikes = Callable[[str], bool]  # whether the named fault of ``world.Faults`` happens now


class _BrokenDriver:
    """Copies garbage, and then says that it could not copy."""

    def __init__(self, memory: WitnessMemory) -> None:
        self._memory = memory

    def load(self, block: int, source: Bytes) -> None:
        self._memory.words[block] = GARBAGE
        raise OSError("injected")

    def store(self, block: int, target: Bytes) -> None:
        target[:] = 0xEE
        raise OSError("injected")


class FaultyMemory:
    """``memory`` and ``arena`` with faults. ``move`` is what executor and mover are to call."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        memory: WitnessMemory,
        arena: ChunkMemory,
        rng: random.Random,
        strikes: Strikes,
    ) -> None:
        self.memory = memory
        self.arena = arena
        self.bad_blocks: set[int] = set()
        self.bad_slots: set[tuple[int, int]] = set()  # (slot, block of the chunk)
        self._marking = threading.RLock()  # marks and bytes change together
        self._groups = tuple(groups)
        self._rng = rng
        self._strikes = strikes

    def any_block(self) -> int:
        return self._rng.randrange(self.memory.words.shape[0])

    def spoil(self, blocks: Sequence[int]) -> None:
        with self._marking:
            self.memory.words[list(blocks)] = GARBAGE
            self.bad_blocks.update(blocks)

    def move(self, transfer: Transfer) -> TransferResult:
        """Move the bytes, or fail, or do harm."""
        with self._marking:
            return self._move(transfer)

    def _move(self, transfer: Transfer) -> TransferResult:
        is_load = transfer.direction is Direction.LOAD
        if self._strikes("load_fails" if is_load else "store_fails"):
            return move(transfer, self.arena, _BrokenDriver(self.memory))
        result = move(transfer, self.arena, self.memory)
        for number, block in enumerate(transfer.blocks, transfer.offset):
            place = (transfer.slot, number)
            if is_load:
                self.bad_blocks.discard(block)
                self.bad_blocks.update({block} if place in self.bad_slots else ())
            else:
                self.bad_slots.discard(place)
                self.bad_slots.update({place} if block in self.bad_blocks else ())
        if is_load and self._strikes("corrupt_load"):
            self.spoil(transfer.blocks[: self._rng.randrange(len(transfer.blocks)) + 1])
        return result

    def noticed(self, plan: StepPlan) -> frozenset[int]:
        """The plan has run: the bad blocks that it read."""
        for row in plan.rows:
            self.bad_blocks.difference_update(self._begun(row))
        read = {block for row in plan.rows for block in self._read(row)}
        return frozenset(self.bad_blocks & read)

    def spoil_written(self, plan: StepPlan) -> None:
        """What the plan loaded and wrote turns to garbage, as when its step failed half way."""
        size = self.memory.block_size
        for load in plan.loads:
            self.memory.words[list(load.blocks)] = GARBAGE
        for row in plan.rows:
            for first, blocks in row.tables:
                for position in range(row.start, row.end):
                    index, slot = divmod(position, size)
                    self.memory.words[blocks[index - first], slot] = GARBAGE

    def _read(self, row: Row) -> list[int]:
        """Blocks that hold earlier positions which the row can see."""
        size = self.memory.block_size
        blocks: list[int] = []
        for group, (first, table) in zip(self._groups, row.tables, strict=True):
            begin = group.first_visible(row.start) // size
            blocks += table[begin - first : -(-row.start // size) - first]
        return blocks

    def _begun(self, row: Row) -> list[int]:
        """Blocks that the row fills from their first position on: what was there does not matter."""
        size = self.memory.block_size
        begin, end = -(-row.start // size), -(-row.end // size)
        return [
            block for first, table in row.tables for block in table[begin - first : end - first]
        ]
