"""Decides which chunks are stored and loaded. Pure logic: whoever takes its transfers moves the bytes.

It knows nothing of a scheduler: an *owner* is a name for whose chain grows, a chain a list of block
digests (see ``ebbtide.core.ports``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.core.keys import chunk_key
from ebbtide.core.plan import Direction, Transfer, TransferResult
from ebbtide.offload.host import HostSlots


@dataclass(slots=True)
class OffloadCounters:
    """Totals since the start, in chunks. store_dropped: stores that never found room."""

    load_ok: int = 0
    load_failed: int = 0
    store_ok: int = 0
    store_failed: int = 0
    store_dropped: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0


class OffloadManager:
    """``stores_max``: store transfers under way at once; further chunks wait for their turn.

    Of a chain that is longer than the host tier its start is kept, which is what a hit needs. A store
    that fails leaves a hole until the next request with these tokens computes that chunk.
    """

    def __init__(
        self, slots: HostSlots, blocks_per_chunk: int, num_groups: int = 1, stores_max: int = 64
    ) -> None:
        self.slots = slots
        self.counters = OffloadCounters()
        self.blocks_per_chunk = blocks_per_chunk
        self._num_groups = num_groups
        self._stores_max = stores_max
        self._chunks_max = slots.num_slots // num_groups  # of one chain
        self._stores = 0
        self._transfers = 0
        self._due: dict[tuple[str, int], int] = {}  # (owner, group) -> the next chunk to store

    def has(self, group: int, chain: Sequence[bytes], index: int) -> bool:
        last = (index // self.blocks_per_chunk + 1) * self.blocks_per_chunk - 1
        return last < len(chain) and self.slots.has(chunk_key(chain[last], group))

    def load(
        self, group: int, chain: Sequence[bytes], index: int, blocks: Sequence[int]
    ) -> list[Transfer]:
        loads = []
        at = 0
        while at < len(blocks):
            chunk, offset = divmod(index + at, self.blocks_per_chunk)
            end = min(len(blocks), at + self.blocks_per_chunk - offset)
            key = self._key(group, chain, chunk)
            slot = self.slots.pin(key)
            loads.append(self._transfer(Direction.LOAD, key, slot, offset, blocks[at:end]))
            at = end
        return loads

    def store(
        self,
        owner: str,
        group: int,
        chain: Sequence[bytes],
        full: int,
        first: int,
        blocks: Sequence[int],
    ) -> list[Transfer]:
        stores: list[Transfer] = []
        if not self.slots.num_slots:
            return stores
        due = self._due.get((owner, group))
        chunk = due or 0
        while chunk < min(full // self.blocks_per_chunk, self._chunks_max):
            at = chunk * self.blocks_per_chunk - first
            key = self._key(group, chain, chunk)
            if at >= 0 and not self.slots.holds(key):
                slot = self.slots.reserve(key) if self._stores < self._stores_max else None
                if slot is None:
                    break  # no room now: it stays due
                self._stores += 1
                moved = blocks[at : at + self.blocks_per_chunk]
                stores.append(self._transfer(Direction.STORE, key, slot, 0, moved))
            elif at < 0 and due is not None and not self.slots.holds(key):
                self.counters.store_dropped += 1  # it found no room until a window left it behind
            chunk += 1
        self._due[owner, group] = chunk
        return stores

    def end(self, owner: str, chain: Sequence[bytes], full: int) -> None:
        """Also touches the owner's chunks, the first one last: it is worth most, since without it
        the others are worth nothing, and so eviction eats a chain from its end."""
        chunks = full // self.blocks_per_chunk
        for group in range(self._num_groups):
            due = self._due.pop((owner, group), None)
            if due is not None:
                self.counters.store_dropped += max(0, chunks - due)
            for chunk in reversed(range(chunks)):
                self.slots.touch(self._key(group, chain, chunk))

    def finished(self, result: TransferResult) -> None:
        transfer, error = result
        counters = self.counters
        if transfer.direction is Direction.STORE:
            self._stores -= 1
            self.slots.filled(transfer.slot, good=not error)
            counters.store_ok += not error
            counters.store_failed += bool(error)
            counters.stored_blocks += 0 if error else len(transfer.blocks)
            return
        if error and self.slots.slot_of(transfer.key) == transfer.slot:
            self.slots.drop(transfer.key)
        self.slots.unpin(transfer.slot)
        counters.load_ok += not error
        counters.load_failed += bool(error)
        counters.loaded_blocks += 0 if error else len(transfer.blocks)

    def abandon(self, transfer: Transfer) -> None:
        if self.slots.slot_of(transfer.key) == transfer.slot:
            self.slots.drop(transfer.key)

    def forget(self, chain: Sequence[bytes], index: int) -> None:
        for chunk in range(index // self.blocks_per_chunk, len(chain) // self.blocks_per_chunk):
            for group in range(self._num_groups):
                self.slots.drop(self._key(group, chain, chunk))

    def clear(self) -> None:
        self.slots.clear()

    def _key(self, group: int, chain: Sequence[bytes], chunk: int) -> bytes:
        return chunk_key(chain[(chunk + 1) * self.blocks_per_chunk - 1], group)

    def _transfer(
        self, direction: Direction, key: bytes, slot: int, offset: int, blocks: Sequence[int]
    ) -> Transfer:
        self._transfers += 1
        return Transfer(self._transfers, direction, key, slot, offset, tuple(blocks))
