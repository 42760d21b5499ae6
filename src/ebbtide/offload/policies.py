"""Eviction policies: who goes next. Constant time per operation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the chunks that may be evicted. A pinned chunk is taken out with ``remove`` meanwhile."""

    def add(self, key: bytes) -> None: ...
    def touch(self, key: bytes) -> None: ...
    def remove(self, key: bytes) -> None: ...
    def victim(self) -> bytes | None:
        """Take out the chunk to evict; None where there is none."""
        ...


class LRU:
    """The least recently added or touched chunk goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def victim(self) -> bytes | None:
        return self._keys.popitem(last=False)[0] if self._keys else None
