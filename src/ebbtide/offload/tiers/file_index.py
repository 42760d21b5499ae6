"""The file tier's memory: which chunks there are, how large, and which goes next. No I/O.

A chunk's id is its namespace and its key. Chunks are kept by *place*, the first bytes of their ids, which
is also the directory that their files are in: so a directory can be compared with what is known of it.

Bytes are counted twice over: those of chunks, and those *reserved*: for a chunk that is being written,
and of a victim whose file is still there. Their sum is what the disk holds, or is about to.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set

from ebbtide.offload.policies import EvictionPolicy

PLACE_BYTES = 33  # of an id: the namespace, and the first byte of the key
NAMESPACE_BYTES = 32
ORDERED_AT_ONCE = 4096


class Index:
    """Safe to call from any thread; ``size`` takes no lock."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.chunks = 0
        self.bytes = 0
        self.reserved = 0
        self._policy = policy
        self._places: dict[bytes, dict[bytes, int]] = {}
        self._unordered: dict[
            bytes, float
        ] = {}  # found, and not in the policy yet: time of last use
        self._changed: set[bytes] = set()  # since the look at the disk that is under way
        self._lock = threading.Lock()

    def size(self, id: bytes) -> int | None:
        place = self._places.get(id[:PLACE_BYTES])
        return None if place is None else place.get(id)

    @property
    def used(self) -> int:
        with self._lock:
            return self.bytes + self.reserved

    def touch(self, id: bytes) -> None:
        with self._lock:
            self._policy.touch(id)

    def reserve(self, size: int) -> None:
        with self._lock:
            self.reserved += size

    def release(self, size: int) -> None:
        with self._lock:
            self.reserved -= size

    def put(self, id: bytes, size: int) -> None:
        """A chunk is there now. Its bytes were reserved."""
        with self._lock:
            self._changed.add(id)
            self._drop(id)
            self.reserved -= size
            self._add(id, size)
            self._come_in(id)

    def discard(self, id: bytes) -> None:
        """A chunk is not there any more, if it ever was."""
        with self._lock:
            self._changed.add(id)
            self._drop(id)

    def victim(self) -> tuple[bytes, int] | None:
        """Take out the chunk that is to go. Its bytes stay reserved until its file has gone."""
        with self._lock:
            id = self._policy.victim()
            if id is None:
                return None
            self._changed.add(id)
            size = self._places[id[:PLACE_BYTES]].pop(id)
            self.chunks -= 1
            self.bytes -= size
            self.reserved += size
            return id, size

    def places(self) -> list[bytes]:
        return list(self._places)

    def known(self, place: bytes) -> Mapping[bytes, int]:
        return self._places.get(place, {})

    def begin_look(self) -> None:
        """The disk is going to be looked at. What changes from now on is known better here."""
        with self._lock:
            self._changed.clear()

    def end_look(
        self, place: bytes, seen: Set[bytes], new: Mapping[bytes, tuple[int, float]]
    ) -> None:
        """What was seen of a place. ``new``: size and time of last use of what was not known."""
        with self._lock:
            gone = [id for id in self.known(place) if id not in seen and id not in self._changed]
            for id in gone:
                self._drop(id)
            for id, (size, used_at) in new.items():
                if id not in self._changed and self.size(id) is None:
                    self._add(id, size)
                    self._unordered[id] = used_at

    def order(self) -> None:
        """Hand what was found to the policy, the longest unused first."""
        found = list(self._unordered)
        found.sort(key=lambda id: self._unordered.get(id, 0.0))
        for start in range(0, len(found), ORDERED_AT_ONCE):
            with self._lock:  # others are served in between
                for id in found[start : start + ORDERED_AT_ONCE]:
                    if self._unordered.pop(id, None) is not None:
                        self._come_in(id)
        with self._lock:
            self._unordered = dict(self._unordered)  # a dict that was emptied keeps its memory

    def _add(self, id: bytes, size: int) -> None:
        self._places.setdefault(id[:PLACE_BYTES], {})[id] = size
        self.chunks += 1
        self.bytes += size

    def _come_in(self, id: bytes) -> None:
        self._policy.add(id)
        self._policy.touch(id)  # by whoever brought it: the next one is another use

    def _drop(self, id: bytes) -> None:
        size = self._places.get(id[:PLACE_BYTES], {}).pop(id, None)
        if size is None:
            return
        self.chunks -= 1
        self.bytes -= size
        if self._unordered.pop(id, None) is None:
            self._policy.remove(id)
