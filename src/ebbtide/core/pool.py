"""The device's KV blocks: who uses them, and which content can be found again.

A block's state follows from two facts, its references and its name:

    references > 0              in use by requests and transfers
    no reference, named         cached: free, but its content can still be hit; oldest goes first
    no reference, no name       blank: free, nothing to lose

Only whoever has just filled and committed a block names it (``publish``), so whatever ``find``
returns holds exactly the KV that its digest stands for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks shared by ``num_groups`` KV groups."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.released = 0  # blocks that became free, ever: tells whether a retry can succeed
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # Values without references of their own keep the garbage collector out of large pools.
        self._name: dict[int, bytes] = {}  # block -> digest
        self._group = [0] * num_blocks  # of a named block

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def find(self, group: int, digest: bytes) -> int | None:
        """The block of ``group`` that holds the KV named ``digest``, in use or cached."""
        return self._index[group].get(digest)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks with one reference each, blank ones before the oldest cached ones."""
        assert count <= self.available, f"{count} blocks asked, {self.available} free"
        blank, references = self._blank, self._references
        taken = []
        for _ in range(count):
            if blank:
                block = blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            references[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; a cached one is in use again."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._name, f"block {block} is blank and cannot be held"
                del self._cached[block]
            self._references[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One reference less to each block. The last one dropped is the last one to be evicted."""
        for block in blocks:
            left = self._references[block] - 1
            assert left >= 0, f"block {block} was dropped more often than held"
            self._references[block] = left
            if left == 0:
                self.released += 1
                if block in self._name:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def publish(self, group: int, digest: bytes, block: int) -> None:
        """Name a full, committed block. Where the content has a block already, that one keeps the name."""
        assert self._references[block] > 0, f"block {block} is free and cannot be published"
        if block not in self._name and self._index[group].setdefault(digest, block) == block:
            self._name[block] = digest
            self._group[block] = group

    def unpublish(self, block: int) -> bool:
        """Take a block's name away: nobody finds its content any more. Returns whether it had one."""
        named = block in self._name
        if named:
            self._forget(block)
            if self._references[block] == 0:
                del self._cached[block]
                self._blank.append(block)
        return named

    def unpublish_all(self) -> None:
        for block in list(self._name):
            self.unpublish(block)

    def _forget(self, block: int) -> None:
        del self._index[self._group[block]][self._name.pop(block)]

    def __repr__(self) -> str:
        used = self.num_blocks - self.available
        return f"<BlockPool {used} in use, {self.cached} cached, {len(self._blank)} blank>"
