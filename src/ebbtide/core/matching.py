"""The longest prefix of a request's tokens whose KV need not be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ebbtide.core.groups import KVGroup
from ebbtide.core.pool import BlockPool


class Match(NamedTuple):
    """The usable prefix: ``blocks`` blocks long.

    Per group, ``first[g]`` is the first block that later positions can see, and ``found[g][i]``
    the device block that holds block index ``first[g] + i``, or None where it must be loaded.
    """

    blocks: int
    first: tuple[int, ...]
    found: tuple[list[int | None], ...]

    @property
    def hits(self) -> list[int]:
        return [block for found in self.found for block in found if block is not None]

    @property
    def missing(self) -> int:
        """Blocks to load."""
        return sum(found.count(None) for found in self.found)

    @property
    def loaded(self) -> set[int]:
        """Block indexes at which some group must load."""
        return {
            first + i
            for first, found in zip(self.first, self.found, strict=True)
            for i, block in enumerate(found)
            if block is None
        }


def longest_prefix(
    groups: Sequence[KVGroup],
    block_size: int,
    limit: int,
    available: Callable[[int, int], bool],
) -> int:
    """The longest prefix, in blocks and at most ``limit``, that every group can serve.

    Full attention needs every block, a sliding window those that the next position can see.
    ``available(group, index)`` says whether a block is on the device or below. One pass: per
    group, the length of the run of available blocks that ends here.
    """
    runs = [0] * len(groups)
    best = 0
    for index in range(limit):
        usable = True
        for number, group in enumerate(groups):
            if available(number, index):
                runs[number] += 1
            elif group.window is None:
                return best
            else:
                runs[number] = 0
            needed = index + 1 - group.first_visible((index + 1) * block_size) // block_size
            usable = usable and runs[number] >= needed
        if usable:
            best = index + 1
    return best


def match(
    groups: Sequence[KVGroup],
    block_size: int,
    digests: Sequence[bytes],
    limit: int,
    pool: BlockPool,
    below: Callable[[int, int], bool],
) -> Match:
    """Match ``digests[:limit]`` against the device's blocks and, by ``below(group, index)``, the tiers."""

    def available(group: int, index: int) -> bool:
        return pool.find(group, digests[index]) is not None or below(group, index)

    length = longest_prefix(groups, block_size, limit, available)
    first = tuple(group.first_visible(length * block_size) // block_size for group in groups)
    found = tuple(
        [pool.find(number, digest) for digest in digests[first[number] : length]]
        for number in range(len(groups))
    )
    return Match(length, first, found)
