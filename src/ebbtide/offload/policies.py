"""Eviction policies: who goes next. Constant time per operation, amortised.

A policy orders chunks and holds no bytes. Whoever holds them (``HostSlots``, a tier) asks it for a
victim when there is no room, and tells it what happens to each chunk::

    add --> [ touch, pin, unpin ]* --> victim: evicted, may leave a trace of itself (a *ghost*)
                                   --> remove: lost or dropped, leaves none

Each request that has a chunk in its prompt touches it once, when it ends: its last chunk first. The one
that brought the chunk does so too; to it, the touch only ends the add. So all chunks of a request line up
in their queue from the end of its chain to the start, and as a chunk is worth nothing without those
before it, chains are eaten from their end. Whoever finds chunks at its start adds and touches each.

A ghost is the key of an evicted chunk. Each tier has a policy of its own; ``docs/eviction.md`` says how
they compare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from ebbtide.errors import InputError

Queue = OrderedDict[bytes, int]  # next to go first; what the number says is up to the policy


class EvictionPolicy(Protocol):
    """Made with the number of chunks that there is room for. Calls of one thread at a time."""

    def add(self, key: bytes) -> None:
        """A chunk that is not there has come in."""
        ...

    def touch(self, key: bytes) -> None:
        """A request that has the chunk in its prompt has ended. No-op where it is not there."""
        ...

    def pin(self, key: bytes) -> None:
        """The chunk, which is not pinned, is no victim until ``unpin``. It can be touched and removed."""
        ...

    def unpin(self, key: bytes) -> None:
        """The pinned chunk may go again, as the last of its queue: it has just been read or written."""
        ...

    def remove(self, key: bytes) -> None:
        """The chunk, pinned or not, is gone for another reason than room."""
        ...

    def victim(self) -> bytes | None:
        """Take out the chunk to evict; None where there is none."""
        ...


class LRU:
    """The least recently used chunk goes first.

    Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies", IBM Systems
    Journal 9(2), 1970.
    """

    def __init__(self, capacity: int = 0) -> None:  # the same with any capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._pinned: set[bytes] = set()

    def add(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def pin(self, key: bytes) -> None:
        del self._keys[key]
        self._pinned.add(key)

    def unpin(self, key: bytes) -> None:
        self._pinned.remove(key)
        self._keys[key] = None

    def remove(self, key: bytes) -> None:
        if key in self._pinned:
            self._pinned.remove(key)
        else:
            del self._keys[key]

    def victim(self) -> bytes | None:
        return self._keys.popitem(last=False)[0] if self._keys else None


class _TwoQueues(ABC):
    """What the other policies share: a queue of newcomers, one of the proven, ghosts, pins.

    A pinned chunk is in no queue. A *fresh* one was not touched yet by the request that brought it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._new: Queue = OrderedDict()
        self._proven: Queue = OrderedDict()
        self._fresh: set[bytes] = set()
        self._pinned: dict[bytes, tuple[Queue, int]] = {}

    def touch(self, key: bytes) -> None:
        if key in self._pinned:
            self.unpin(key)
            self.touch(key)
            self.pin(key)
            return
        queue = self._queue_of(key)
        if queue is None:
            return
        if key in self._fresh:
            self._fresh.remove(key)
            queue.move_to_end(key)
        else:
            self._used(key, queue)

    def pin(self, key: bytes) -> None:
        queue = self._queue_of(key)
        assert queue is not None, "only a chunk that is there and not pinned can be pinned"
        self._pinned[key] = queue, queue.pop(key)

    def unpin(self, key: bytes) -> None:
        queue, number = self._pinned.pop(key)
        queue[key] = number

    def remove(self, key: bytes) -> None:
        self._fresh.discard(key)
        if self._pinned.pop(key, None) is None:
            queue = self._queue_of(key)
            assert queue is not None, "the chunk is not there"
            del queue[key]

    def _queue_of(self, key: bytes) -> Queue | None:
        if key in self._new:
            return self._new
        return self._proven if key in self._proven else None

    def _add(self, key: bytes, queue: Queue, number: int = 0) -> None:
        queue[key] = number
        self._fresh.add(key)

    def _take(self, queue: Queue) -> tuple[bytes, int]:
        """Evict the first of the queue."""
        key, number = queue.popitem(last=False)
        self._fresh.discard(key)
        return key, number

    @abstractmethod
    def _used(self, key: bytes, queue: Queue) -> None:
        """Another request than the one that brought it has used the chunk, which is in the queue."""


class ARC(_TwoQueues):
    """Chunks used once, and more than once, each least recent first; ghosts say which list is too short.

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, section IV,
    figure 4. T1 and T2 are ``_new`` and ``_proven``. Room is made before it is known for whom, so REPLACE
    does not look at the page to come, and p moves when that comes.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._new_ghosts: Queue = OrderedDict()  # B1
        self._proven_ghosts: Queue = OrderedDict()  # B2
        self._new_target = 0.0  # p

    def add(self, key: bytes) -> None:
        b1, b2 = self._new_ghosts, self._proven_ghosts
        queue = self._proven
        if key in b1:
            self._new_target = min(self.capacity, self._new_target + max(1.0, len(b2) / len(b1)))
            del b1[key]
        elif key in b2:
            self._new_target = max(0.0, self._new_target - max(1.0, len(b1) / len(b2)))
            del b2[key]
        else:
            queue = self._new
        self._add(key, queue)
        while b1 and len(self._new) + len(b1) > self.capacity:
            b1.popitem(last=False)
        lists = (self._new, self._proven, b1, b2)
        while b2 and sum(map(len, lists)) > 2 * self.capacity:
            b2.popitem(last=False)

    def victim(self) -> bytes | None:
        if self._new and (len(self._new) > self._new_target or not self._proven):
            key, _ = self._take(self._new)
            self._new_ghosts[key] = 0
        elif self._proven:
            key, _ = self._take(self._proven)
            self._proven_ghosts[key] = 0
        else:
            return None
        return key

    def _used(self, key: bytes, queue: Queue) -> None:
        del queue[key]
        self._proven[key] = 0


class S3FIFO(_TwoQueues):
    """A small queue that newcomers must survive, a main queue, ghosts of those who did not; no reordering.

    Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023,
    section 4.1, algorithm 1. S and M are ``_new`` and ``_proven``, the number of a chunk its uses, 3 at
    most. One call evicts one chunk, so EVICTS goes to M only when S has become short.
    """

    USES_MAX = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._new_target = max(1, capacity // 10)
        self._ghosts: Queue = OrderedDict()
        self._ghosts_max = capacity - self._new_target

    def add(self, key: bytes) -> None:
        known = self._ghosts.pop(key, None) is not None
        self._add(key, self._proven if known else self._new)

    def victim(self) -> bytes | None:
        while self._new or self._proven:
            if len(self._new) >= self._new_target or not self._proven:
                key, uses = self._new.popitem(last=False)
                if uses <= 1:
                    self._fresh.discard(key)
                    self._ghosts[key] = 0
                    if len(self._ghosts) > self._ghosts_max:
                        self._ghosts.popitem(last=False)
                    return key
                self._proven[key] = 0
            else:
                key, uses = self._proven.popitem(last=False)
                if not uses:
                    self._fresh.discard(key)
                    return key
                self._proven[key] = uses - 1
        return None

    def _used(self, key: bytes, queue: Queue) -> None:
        queue[key] = min(self.USES_MAX, queue[key] + 1)


class MQ(_TwoQueues):
    """Chunks that were used again go after all others, unless unused for the lifetime; ghosts remember.

    Zhou, Philbin and Li, "The Multi-Queue Replacement Algorithm for Second Level Buffer Caches", USENIX
    ATC 2001, section "Multi-Queue Algorithm", with two queues (more gain little on the traces): Q0 and Q1
    are ``_new`` and ``_proven``, Qout the ghosts, the number of a chunk the time of its last use, counted
    in uses of any. The lifetime is to be the "peak temporal distance": here the distance that 9 of 10
    repeated uses stay under, found as they come (Robbins and Monro, 1951: each that is over it raises it a
    bit, each under lowers it by a ninth of that).
    """

    GHOSTS_PER_CHUNK = 4  # how long the way back may be at small capacities
    GHOSTS_MAX = 1 << 18  # of tiers with fewer chunks than that; the others have a ghost per chunk
    SHARE = 0.9
    STEP = 0.01

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: Queue = OrderedDict()
        self._ghosts_max = min(self.GHOSTS_PER_CHUNK * capacity, max(capacity, self.GHOSTS_MAX))
        self._lifetime = max(1.0, float(capacity))
        self._now = 0

    def add(self, key: bytes) -> None:
        self._now += 1
        last = self._ghosts.pop(key, None)
        if last is not None:
            self._learn(self._now - last)
        self._add(key, self._new if last is None else self._proven, self._now)
        self._expire()

    def victim(self) -> bytes | None:
        queue = self._new or self._proven
        if not queue:
            return None
        key, last = self._take(queue)
        self._ghosts[key] = last
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)
        return key

    def _used(self, key: bytes, queue: Queue) -> None:
        self._now += 1
        self._learn(self._now - queue.pop(key))
        self._proven[key] = self._now
        self._expire()

    def _expire(self) -> None:
        """One per use is enough, since a use proves one at most."""
        if self._proven:
            key = next(iter(self._proven))
            if self._now - self._proven[key] > self._lifetime:
                self._new[key] = self._proven.pop(key)

    def _learn(self, distance: int) -> None:
        share = self.SHARE if distance > self._lifetime else self.SHARE - 1
        self._lifetime = max(1.0, self._lifetime * (1 + self.STEP * share))


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "mq": MQ,
}
DEFAULT_POLICY = "mq"  # docs/eviction.md says why


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy of that name for ``capacity`` chunks. Raises InputError where there is none."""
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise InputError(f"there is no eviction policy {name!r}: choose one of {known}", "policy")
    return POLICIES[name](capacity)
