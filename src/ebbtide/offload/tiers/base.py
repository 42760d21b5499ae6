"""What a tier is: a place below host memory that keeps chunks, such as a disk or a remote store.

A tier is dumb: it keeps bytes under keys. Which chunks go there and come back, and whether it is worth
asking, is decided above it. Every call takes many keys and returns a result for each, in order; one bad
chunk, or a whole tier that is gone, is a result and never an exception. Calls come from several threads
at once, never from the engine's own thread (but ``lookup`` of a tier that is ``immediate``).

``testing.tier_contract`` is a test suite for any tier.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


class Status(enum.Enum):
    OK = "ok"
    MISSING = "missing"  # it is not there, or not any more: an ordinary miss
    CORRUPT = "corrupt"  # it was there, and is not what was written; the tier has dropped it
    FULL = "full"  # no room, and none could be made
    FAILED = "failed"  # the tier could not do it; it may another time


class Result(NamedTuple):
    status: Status
    message: str = ""  # for people: what went wrong, where


OK = Result(Status.OK)
MISSING = Result(Status.MISSING)


@dataclass(frozen=True, slots=True)
class TierStats:
    """``chunks`` and ``bytes``: what it keeps now, as far as it knows. ``bytes_max``: its quota."""

    chunks: int = 0
    bytes: int = 0
    bytes_max: int | None = None
    evictions: int = 0
    state: str = "up"  # "up", "starting" or "down: <why>"
    note: str = ""  # something that people should know, in a sentence


class Tier(Protocol):
    """Keys are ``keys.chunk_key``; buffers are page-aligned, and exactly ``chunk_bytes`` long."""

    name: str
    """What metrics and messages call it: "file", "valkey", "object"."""

    immediate: bool
    """Whether ``lookup`` answers from memory, within microseconds."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each chunk is likely to be there: a hint. False for all where the tier is down."""
        ...

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        """Fill each buffer with its chunk, verified. A buffer's content is undefined unless OK."""
        ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        """Keep each chunk, if need be in place of others. It is found whole, or not at all.

        OK also where the chunk is there already.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> list[Result]:
        """Forget each chunk. OK also where it is not there."""
        ...

    def clear(self) -> Result:
        """Forget every chunk of this tier's namespace."""
        ...

    def stats(self) -> TierStats:
        """May take I/O, but not long: never called by the engine's own thread."""
        ...

    def close(self) -> None:
        """Finish what is under way and let go of everything. Later calls fail, and do not raise."""
        ...


class Entry(NamedTuple):
    """A stored chunk. ``used_at``: when it was last written or read, in seconds of the epoch, as far as
    the place knows. ``bytes``: that it takes there."""

    namespace: bytes
    key: bytes
    bytes: int
    used_at: float | None


@runtime_checkable
class Inventory(Protocol):
    """What a tier may offer besides: for people who look at what is stored, of every namespace.

    While others use the same place: an entry may be gone by the time it is asked for.
    """

    def entries(self) -> Iterator[Entry]:
        """Every chunk there, in any order, without holding them all. Raises OSError where that fails."""
        ...

    def check(self, entry: Entry) -> Result:
        """Read the chunk and verify its envelope: OK, MISSING, CORRUPT or FAILED. Nothing is removed."""
        ...

    def remove(self, entries: Sequence[Entry]) -> list[Result]:
        """Forget these chunks. OK also for one that is not there."""
        ...


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is opened for. namespace: 32 bytes, the digest of all that gives KV its meaning."""

    namespace: bytes
    chunk_bytes: int  # of a buffer: whole pages


OpenTier = Callable[[str, TierContext], Tier]
"""Opens a tier from its URL. Raises InputError, in one sentence, where the URL or place cannot work."""
