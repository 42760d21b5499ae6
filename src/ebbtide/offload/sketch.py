"""How often a key was seen lately, in bounded memory: what ``store_after`` counts with."""

from __future__ import annotations

import struct

ROWS = 4
COUNT_MAX = 15


class FrequencySketch:
    """A count-min sketch with aging: counts are never too low until they age, and seldom too high.

    Cormode and Muthukrishnan, "An improved data stream summary: the count-min sketch", Journal of
    Algorithms 55(1), 2005; aged as in Einziger, Friedman and Manes, "TinyLFU", ACM Transactions on
    Storage 13(4), 2017: after ``width`` keys all counts are halved. Takes 4 * ``width`` bytes. Keys are
    digests of 32 bytes or more, so their own bytes serve as hashes.
    """

    def __init__(self, width: int = 1 << 18) -> None:
        self._width = width
        self._rows = [bytearray(width) for _ in range(ROWS)]
        self._left = width

    def add(self, key: bytes) -> int:
        """Count the key once more. Returns its count so far, this time included."""
        self._left -= 1
        if self._left < 0:
            self._age()
        places = self._places(key)
        count = min(min(row[at] for row, at in places) + 1, COUNT_MAX)
        for row, at in places:  # a row that counts more has met other keys there: leave it
            row[at] = max(row[at], count)
        return count

    def count(self, key: bytes) -> int:
        return min(row[at] for row, at in self._places(key))

    def _places(self, key: bytes) -> list[tuple[bytearray, int]]:
        salt = key[-1] * 0x9E3779B97F4A7C15 + key[-2]  # the groups of a block share its digest
        hashes = struct.unpack("<4Q", key[:32])
        return [(row, (h ^ salt) % self._width) for row, h in zip(self._rows, hashes, strict=True)]

    def _age(self) -> None:
        halves = bytes(value >> 1 for value in range(256))
        self._rows = [row.translate(halves) for row in self._rows]
        self._left = self._width // 2
