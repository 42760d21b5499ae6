"""Device and host memory and tiers that lose, spoil and refuse bytes when told to.

A *bad* mark stands for a checksum. It travels with the content: a store of a bad block makes a bad
chunk, which stays bad in the tiers below, and makes a bad block when it is loaded. The first step that
reads a bad block reports it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import NO_SLOT, Direction, Row, StepPlan, Transfer, TransferResult
from ebbtide.offload.arena import Bytes, ChunkMemory
from ebbtide.offload.below import Action, Job, JobResult
from ebbtide.offload.mover import move
from ebbtide.testing.lower_tier import LowerTier
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


class _Driver:
    """What the tiers load blocks with. ``broken`` while a load is to fail."""

    def __init__(self, memory: WitnessMemory) -> None:
        self.broken = False
        self._memory = memory

    def load(self, block: int, source: Bytes) -> None:
        (_BrokenDriver(self._memory) if self.broken else self._memory).load(block, source)

    def store(self, block: int, target: Bytes) -> None:
        raise NotImplementedError("a tier stores no blocks")


class FaultyMemory:
    """``memory``, ``arena`` and ``tiers`` with faults. ``move`` is what executor and mover are to call,
    ``do`` what carries out jobs. ``note`` hears of a chunk that was gone when it was read."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        memory: WitnessMemory,
        arena: ChunkMemory,
        rng: random.Random,
        strikes: Strikes,
        tiers: Sequence[LowerTier] = (),
        note: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.memory = memory
        self.arena = arena
        self.tiers = {tier.name: tier for tier in tiers}
        self.bad_blocks: set[int] = set()
        self.bad_slots: set[tuple[int, int]] = set()  # (slot, block of the chunk)
        self._marking = threading.RLock()  # marks and bytes change together
        self._groups = tuple(groups)
        self._rng = rng
        self._strikes = strikes
        self._note = note
        self._driver = _Driver(memory)
        for tier in tiers:
            tier.attach(arena, self._driver, memory.block_bytes)

    def any_block(self) -> int:
        return self._rng.randrange(self.memory.words.shape[0])

    def spoil(self, blocks: Sequence[int]) -> None:
        with self._marking:
            self.memory.words[list(blocks)] = GARBAGE
            self.bad_blocks.update(blocks)

    def spoil_slot(self, slot: int, count: int) -> None:
        """``count`` blocks of a chunk turn to garbage."""
        with self._marking:
            self.arena.slot(slot, 0, count)[:] = 0xEE
            self.bad_slots.update((slot, number) for number in range(count))

    def move(self, transfer: Transfer) -> TransferResult:
        """Move the bytes, or fail, or do harm."""
        with self._marking:
            return self._read_below(transfer) if transfer.tier else self._move(transfer)

    def _move(self, transfer: Transfer) -> TransferResult:
        is_load = transfer.direction is Direction.LOAD
        if self._strikes("load_fails" if is_load else "store_fails"):
            return move(transfer, self.arena, _BrokenDriver(self.memory))
        result = move(transfer, self.arena, self.memory)
        if is_load:
            self._arrived(transfer, {n for slot, n in self.bad_slots if slot == transfer.slot})
        else:
            blocks = enumerate(transfer.blocks, transfer.offset)
            self._mark_slot(transfer.slot, {n for n, block in blocks if block in self.bad_blocks})
        return result

    def _read_below(self, transfer: Transfer) -> TransferResult:
        """From a tier, by way of a slot where it has one."""
        tier = self.tiers[transfer.tier]
        tier.place.doing = "read"
        bad = tier.place.bad.get(transfer.key, frozenset())
        was_there = transfer.key in tier.place.chunks
        self._driver.broken = self._strikes("load_fails")
        (result,) = tier.mover.read([transfer])
        self._driver.broken = False
        if not was_there and transfer.key in tier.place.took:
            self._note("missing_chunk")
        if transfer.slot != NO_SLOT:
            self._mark_slot(transfer.slot, bad)
        if not result.error:
            self._arrived(transfer, bad)
        return result

    def _mark_slot(self, slot: int, bad: Iterable[int]) -> None:
        self.bad_slots = {place for place in self.bad_slots if place[0] != slot}
        self.bad_slots.update((slot, number) for number in bad)

    def _arrived(self, load: Transfer, bad: Collection[int]) -> None:
        """The content of a chunk, of which these blocks are ``bad``, is on the device."""
        self.bad_blocks.difference_update(load.blocks)
        blocks = enumerate(load.blocks, load.offset)
        self.bad_blocks.update(block for number, block in blocks if number in bad)
        if self._strikes("corrupt_load"):
            self.spoil(load.blocks[: self._rng.randrange(len(load.blocks)) + 1])

    def do(self, job: Job) -> JobResult:
        with self._marking:
            tier = self.tiers[job.tier]
            place = tier.place
            place.doing = job.action.value
            before = place.chunks.get(job.key)
            (result,) = tier.mover.do([job])
            if job.action is Action.WRITE and place.chunks.get(job.key) is not before:
                bad = {number for slot, number in self.bad_slots if slot == job.slot}
                place.bad[job.key] = frozenset(bad)
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
