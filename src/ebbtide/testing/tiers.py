"""Tiers for tests: one in memory, and one that does harm to another when told to.

``FaultyFiles`` does harm to the files below a file tier, at any single operation.
"""

from __future__ import annotations

import enum
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ebbtide.offload.tiers.base import (
    MISSING,
    OK,
    Entry,
    Result,
    Status,
    Tier,
    TierContext,
    TierStats,
)
from ebbtide.offload.tiers.file_io import FileSystem

CLOSED = Result(Status.FAILED, "the memory tier is closed")
GARBAGE = 0xEE
SPACE_BYTES = 32  # of a namespace


class MemoryPlace:
    """Where memory tiers keep their chunks: what a directory is for a file tier.

    bytes_max: the quota of all chunks there; the least recently used goes first. None: no limit.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        self.bytes_max = bytes_max
        self.chunks: OrderedDict[bytes, bytes] = OrderedDict()  # namespace and key: payload
        self.bytes = 0
        self.evictions = 0
        self.lock = threading.Lock()

    def put(self, id: bytes, payload: bytes) -> bool:
        """Whether there is room. The lock is held by the caller, as for the other methods."""
        if self.bytes_max is not None and len(payload) > self.bytes_max:
            return False
        self.drop(id)
        while self.bytes_max is not None and self.bytes + len(payload) > self.bytes_max:
            self.drop(next(iter(self.chunks)))
            self.evictions += 1
        self.chunks[id] = payload
        self.bytes += len(payload)
        return True

    def drop(self, id: bytes) -> None:
        self.bytes -= len(self.chunks.pop(id, b""))


class MemoryTier:
    """Keeps chunks in a ``MemoryPlace``, which can outlive it and be shared with other tiers."""

    name = "memory"
    immediate = True

    def __init__(self, context: TierContext, place: MemoryPlace | None = None) -> None:
        self.place = place or MemoryPlace()
        self._space = context.namespace
        self._is_closed = False

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        if self._is_closed:
            return [False] * len(keys)
        with self.place.lock:
            return [self._space + key in self.place.chunks for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        if self._is_closed:
            return [CLOSED] * len(keys)
        with self.place.lock:
            return [self._read(*row) for row in zip(keys, buffers, strict=True)]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        if self._is_closed:
            return [CLOSED] * len(keys)
        with self.place.lock:
            return [self._write(*row) for row in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> list[Result]:
        if self._is_closed:
            return [CLOSED] * len(keys)
        with self.place.lock:
            for key in keys:
                self.place.drop(self._space + key)
        return [OK] * len(keys)

    def clear(self) -> Result:
        if self._is_closed:
            return CLOSED
        with self.place.lock:
            for id in [id for id in self.place.chunks if id.startswith(self._space)]:
                self.place.drop(id)
        return OK

    def entries(self) -> Iterator[Entry]:
        if self._is_closed:
            raise OSError(CLOSED.message)
        with self.place.lock:
            sizes = {id: len(payload) for id, payload in self.place.chunks.items()}
        for id, size in sizes.items():
            yield Entry(id[:SPACE_BYTES], id[SPACE_BYTES:], size, None)

    def check(self, entry: Entry) -> Result:
        if self._is_closed:
            return CLOSED
        with self.place.lock:
            return OK if entry.namespace + entry.key in self.place.chunks else MISSING

    def remove(self, entries: Sequence[Entry]) -> list[Result]:
        if self._is_closed:
            return [CLOSED] * len(entries)
        with self.place.lock:
            for entry in entries:
                self.place.drop(entry.namespace + entry.key)
        return [OK] * len(entries)

    def stats(self) -> TierStats:
        with self.place.lock:
            return TierStats(
                chunks=len(self.place.chunks),
                bytes=self.place.bytes,
                bytes_max=self.place.bytes_max,
                evictions=self.place.evictions,
            )

    def close(self) -> None:
        self._is_closed = True

    def _read(self, key: bytes, buffer: memoryview) -> Result:
        payload = self.place.chunks.get(self._space + key)
        if payload is None:
            return MISSING
        if len(payload) != buffer.nbytes:
            self.place.drop(self._space + key)
            return Result(Status.CORRUPT, f"it has {len(payload)} bytes, not {buffer.nbytes}")
        buffer[:] = payload
        self.place.chunks.move_to_end(self._space + key)
        return OK

    def _write(self, key: bytes, buffer: memoryview) -> Result:
        if self.place.put(self._space + key, bytes(buffer)):
            return OK
        return Result(Status.FULL, "the chunk is larger than the memory tier")


class Fault(enum.Enum):
    """What happens to one key of one call."""

    FAIL = "fail"  # nothing is done
    LOST = "lost"  # it is done, and the answer is lost: FAILED all the same
    CORRUPT = "corrupt"  # read: found to be bad, and dropped. Write: it will be, when it is read
    FULL = "full"  # write: there is no room. Else as FAIL
    SLOW = "slow"  # it is done, after ``delay_s``
    DOWN = "down"  # nothing is done for this and the next ``down_keys`` keys


Faults = Callable[[str, bytes], Fault | None]
"""The fault for a key, by the name of the method; asked once for each key of each call, in order."""


def random_faults(rng: random.Random, chances: dict[Fault, float]) -> Faults:
    """Each fault with its own chance per key. One seed gives one row of faults."""

    def draw(method: str, key: bytes) -> Fault | None:
        struck = [fault for fault, chance in chances.items() if rng.random() < chance]
        return struck[0] if struck else None

    return draw


class FaultyTier:
    """``tier``, with faults. Set ``down`` to a reason to take it down, and to "" to bring it back."""

    def __init__(
        self,
        tier: Tier,
        faults: Faults = lambda method, key: None,
        *,
        delay_s: float = 0.0,
        down_keys: int = 10,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = tier.name
        self.immediate = tier.immediate
        self.down = ""
        self._tier = tier
        self._faults = faults
        self._delay_s = delay_s
        self._down_keys = down_keys
        self._sleep = sleep
        self._refusals_left = 0
        self._spoiled: set[bytes] = set()
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        found = []
        for key in keys:
            fault = self._strike("lookup", key)
            is_lost = fault in (Fault.FAIL, Fault.LOST, Fault.DOWN, Fault.FULL)
            found.append(not is_lost and self._tier.lookup([key])[0])
        return found

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return [self._read(*row) for row in zip(keys, buffers, strict=True)]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return [self._write(*row) for row in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> list[Result]:
        return [self._done("delete", key, partial(self._delete, key)) for key in keys]

    def clear(self) -> Result:
        return self._done("clear", b"", self._tier.clear)

    def stats(self) -> TierStats:
        stats = self._tier.stats()
        down = self.down or ("injected" if self._refusals_left else "")
        return replace(stats, state=f"down: {down}") if down else stats

    def close(self) -> None:
        self._tier.close()

    def _delete(self, key: bytes) -> Result:
        return self._tier.delete([key])[0]

    def _read(self, key: bytes, buffer: memoryview) -> Result:
        fault = self._strike("read", key)
        with self._lock:
            is_spoiled = key in self._spoiled
        if fault in (None, Fault.SLOW, Fault.LOST) and not is_spoiled:
            result = self._tier.read([key], [buffer])[0]
            return _lost() if fault is Fault.LOST else result
        buffer[:] = bytes([GARBAGE]) * buffer.nbytes
        if fault not in (None, Fault.SLOW, Fault.LOST, Fault.CORRUPT):
            return _failed(fault)
        if not self._tier.lookup([key])[0]:
            return MISSING
        self._tier.delete([key])
        with self._lock:
            self._spoiled.discard(key)
        return Result(Status.CORRUPT, "injected")

    def _write(self, key: bytes, buffer: memoryview) -> Result:
        fault = self._strike("write", key)
        if fault in (Fault.FAIL, Fault.DOWN):
            return _failed(fault)
        if fault is Fault.FULL:
            return Result(Status.FULL, "injected")
        result = self._tier.write([key], [buffer])[0]
        if fault is Fault.CORRUPT and result.status is Status.OK:
            with self._lock:
                self._spoiled.add(key)
        return _lost() if fault is Fault.LOST else result

    def _done(self, method: str, key: bytes, act: Callable[[], Result]) -> Result:
        fault = self._strike(method, key)
        if fault not in (None, Fault.SLOW, Fault.LOST):
            return _failed(fault)
        result = act()
        return _lost() if fault is Fault.LOST else result

    def _strike(self, method: str, key: bytes) -> Fault | None:
        with self._lock:
            if self.down:
                return Fault.DOWN
            if self._refusals_left:
                self._refusals_left -= 1
                return Fault.DOWN
            fault = self._faults(method, key)
            if fault is Fault.DOWN:
                self._refusals_left = self._down_keys
        if fault is Fault.SLOW:
            self._sleep(self._delay_s)
        return fault


def _failed(fault: Fault) -> Result:
    return Result(Status.FAILED, f"injected: {fault.value}")


def _lost() -> Result:
    return Result(Status.FAILED, "injected: the answer was lost")


@dataclass(frozen=True, slots=True)
class Strike:
    """An operation raises ``error``; ``is_done``: after it was done all the same."""

    error: BaseException
    is_done: bool = False


Harm = Callable[[int, str, tuple[Any, ...]], Strike | None]
"""What happens to an operation: its number from 1 on, its name in ``FileSystem``, its arguments."""


class Crash(BaseException):
    """Raised by every operation of a process that is said to be dead."""


class FaultyFiles:
    """A ``FileSystem`` whose operations are counted, and struck by ``harm`` (which may also just look on).

    ``crash`` does what the operating system does for a process that has died.
    """

    def __init__(
        self,
        harm: Harm = lambda number, name, arguments: None,
        files: FileSystem | None = None,
    ) -> None:
        self.harm = harm
        self.count = 0
        self.after: Callable[[str], None] = lambda name: None
        """Called when an operation was done."""
        self.skew_s = 0.0
        self._files = files or FileSystem()
        self._open: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._do, name, getattr(self._files, name))

    def now(self) -> float:
        return self._files.now() + self.skew_s

    def crash(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _do(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        strike = self.harm(self.count, name, arguments)
        is_closing = name == "close" and not (strike and isinstance(strike.error, Crash))
        if strike is None or strike.is_done or is_closing:  # a close that fails has closed
            result = operation(*arguments)
            if name == "open":
                self._open.add(result)
            elif name == "close":
                self._open.discard(arguments[0])
            self.after(name)
            if strike and strike.is_done and name == "open":
                self._open.discard(result)
                os.close(result)
        if strike is not None:
            raise strike.error
        return result


def strike_at(number: int, error: BaseException, *, for_ever: bool, is_done: bool = False) -> Harm:
    """Strike the operation ``number``, and all later ones if ``for_ever``."""

    def harm(now: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        is_struck = now >= number if for_ever else now == number
        return Strike(error, is_done) if is_struck else None

    return harm
