"""What the core asks of the offload layer, which keeps KV in tiers below the device.

It speaks of digests, blocks and transfers, so that another engine's scheduler can drive it too. A
chain is the list of a request's block digests, first block first. Every call decides and returns at
once; moving bytes is for whoever starts the transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ebbtide.core.plan import Transfer, TransferResult


class Offload(Protocol):
    @property
    def blocks_per_chunk(self) -> int:
        """Blocks leave and come back by the chunk: this many, aligned to a multiple of it."""
        ...

    def has(self, group: int, chain: Sequence[bytes], index: int) -> bool:
        """Whether block ``index`` of the chain could be loaded now."""
        ...

    def load(
        self, chain: Sequence[bytes], runs: Sequence[tuple[int, int, Sequence[int]]]
    ) -> list[list[Transfer]]:
        """Fill blocks with KV that ``has`` has just affirmed, all of it at once.

        A run ``(group, index, blocks)`` is to get the chain's blocks from ``index`` on. Per run, the
        transfers in the blocks' order. Their chunks stay until the transfers are ``finished``.
        """
        ...

    def store(
        self,
        owner: str,
        group: int,
        chain: Sequence[bytes],
        full: int,
        first: int,
        blocks: Sequence[int],
    ) -> list[Transfer]:
        """The first ``full`` blocks of the chain are committed: store what is due.

        ``blocks[i]`` is block ``first + i`` of the chain. Called as an owner's chain grows; what
        finds no room now is asked for again at the next call.
        """
        ...

    def end(self, owner: str, chain: Sequence[bytes], full: int) -> None:
        """The owner gives up its blocks; it had committed the first ``full`` of its chain."""
        ...

    def finished(self, result: TransferResult) -> None:
        """A transfer has returned. A chunk whose load was tried and failed is dropped: one try is all."""
        ...

    def abandon(self, transfer: Transfer) -> None:
        """The transfer is late: its chunk is not found until it returns, and its slot stays in use."""
        ...

    def forget(self, chain: Sequence[bytes], index: int) -> None:
        """Blocks ``index`` and later of the chain are bad: drop them, also if just being stored."""
        ...

    def clear(self) -> None:
        """Drop everything."""
        ...
