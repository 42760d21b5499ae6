"""One tier below the host tier, as decisions see it: what it has, what goes there, whether it pays.

Pure logic, like ``manager``. A tier is asked by *jobs*, which whoever moves bytes carries out in any order;
each comes back once. What keeps a key's jobs from crossing each other:

- One write or delete of a key is under way at a time.
- A key is *barred* from the moment its chunk is known or feared to be bad (or was cleared) until a delete
  has succeeded with no write under way: meanwhile it is not found, read or written.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import Result, Status

log = logging.getLogger(__name__)

BARRED_MAX = 1 << 16
HINTS_MAX = 1 << 18
STALLED = 4  # times longer than usual without an answer: the tier counts as slow
GIVE_UP, GIVE_UP_S = 12, 0.25  # times longer than usual, and seconds: its loads are not waited for
UNKNOWN_S = 0.1  # a read that is shorter pays, too, before it is known how long computing takes
PROBE_S = 1.0  # between two questions whether a slow tier is fast again, at least
RETRY_S = 1.0  # until a tier that could not be cleared is cleared again; it is not used meanwhile


class WritePolicy(enum.Enum):
    """When a chunk of the host tier is written to the tier below."""

    WRITE_THROUGH = "write-through"  # as soon as the host tier has it
    ON_EVICT = "on-evict"  # when it is to leave the host tier
    OFF = "off"  # never: the tier is only read

    @staticmethod
    def named(name: str) -> WritePolicy:
        try:
            return WritePolicy(name)
        except ValueError:
            names = ", ".join(policy.value for policy in WritePolicy)
            raise InputError(f"write must be one of {names}; got {name!r}") from None


class Action(enum.Enum):
    WRITE = "write"  # slot -> tier
    DELETE = "delete"
    CLEAR = "clear"
    PROBE = "probe"  # read, for nobody: how long does it take?
    TRY = "try"  # the same with a chunk that is written for it, and then deleted


class Job(NamedTuple):
    """Something for a tier to do beside loads. ``slot`` has the chunk, for a write."""

    tier: str
    action: Action
    key: bytes = b""
    slot: int = -1


class JobResult(NamedTuple):
    job: Job
    result: Result
    seconds: float = 0.0


class Known(Protocol):
    """What is thought to be in a tier."""

    def __contains__(self, key: bytes, /) -> bool: ...
    def add(self, key: bytes, /) -> None: ...
    def discard(self, key: bytes, /) -> None: ...
    def clear(self) -> None: ...


class Asked:
    """A tier that answers at once is asked each time. One that raises, or answers something else, which it
    must not, has nothing."""

    def __init__(self, lookup: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._lookup = lookup
        self._has_failed = False

    def __contains__(self, key: bytes) -> bool:
        try:
            (there,) = self._lookup([key])
            return bool(there)
        except Exception:  # somebody else's code, on the engine's thread
            if not self._has_failed:
                log.exception("a lookup failed, which counts as a miss; it is said only once")
            self._has_failed = True
            return False

    def add(self, key: bytes) -> None: ...
    def discard(self, key: bytes) -> None: ...
    def clear(self) -> None: ...


class Hints:
    """The keys that a remote tier was lately seen to have; the oldest are forgotten."""

    def __init__(self, keys_max: int = HINTS_MAX) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._keys_max = keys_max

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._keys_max:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


@dataclass(slots=True)
class BelowCounters:
    """Totals since the start, in chunks. Dropped writes found the queue full."""

    read_ok: int = 0
    read_failed: int = 0
    write_ok: int = 0
    write_failed: int = 0
    write_dropped: int = 0
    left_alone: int = 0  # hits that were computed instead, since reading them was slower


class Below:
    """``threads``: chunks that the tier reads at once. ``writes_max``: writes under way at once; what
    comes on top is dropped."""

    def __init__(
        self,
        name: str,
        known: Known,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        *,
        threads: int = 1,
        writes_max: int = 64,
    ) -> None:
        self.name = name
        self.policy = policy
        self.counters = BelowCounters()
        self.jobs: list[Job] = []  # to be taken
        self.chunk_seconds: float | None = None  # that one thread takes to read a chunk
        self._known = known
        self._threads = threads
        self._writes_max = writes_max
        self._writing: set[bytes] = set()
        self._deleting: set[bytes] = set()
        self._barred: OrderedDict[bytes, None] = OrderedDict()
        self._late = Counter[bytes]()  # reads that nobody waits for, until one returns
        self._uncleared = False  # it is to be empty, and is not known to be
        self._clearing = self._clear_again = False
        self._clear_at = 0.0
        self._reads = 0
        self._progress_at = 0.0  # when something was last read, or nothing was left to read
        self._has_read = False  # something, since the last tick
        self._probing = False
        self._probe_at = 0.0
        self._wanted = b""  # a chunk that was left alone: something to probe
        self._now = 0.0

    # --- what it has -----------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return self.may_be_read(key) and key in self._known

    def may_be_read(self, key: bytes) -> bool:
        return not self._uncleared and key not in self._barred and key not in self._late

    def found(self, key: bytes) -> None:
        """A lookup has found the chunk there. What is about to be deleted does not count."""
        if not self._uncleared and key not in self._barred:
            self._known.add(key)

    # --- whether it pays -------------------------------------------------------------------

    def pays(self, key: bytes, compute_seconds: float | None) -> bool:
        """Whether reading the chunk beats computing it, which takes ``compute_seconds``.

        A tier that nobody has read from yet is tried by one request, if it is not being tried already.
        One that has stopped answering is slow before its answer comes. Nobody can have computed anything
        yet: then only a fast one pays.
        """
        if self.chunk_seconds is None:
            return not self._reads and not self._probing
        read = self.chunk_seconds / self._threads
        if compute_seconds is None:
            compute_seconds = UNKNOWN_S
        stalled = self._silent_s if self._reads else 0.0
        if read <= compute_seconds and stalled <= STALLED * max(read, compute_seconds):
            return True
        self.counters.left_alone += 1
        self._wanted = key
        return False

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._has_read else self._now - self._progress_at

    def try_out(self) -> None:
        """Find out how fast the tier is before the first request needs it."""
        if self.policy is not WritePolicy.OFF:
            self._probing = True
            self.jobs.append(Job(self.name, Action.TRY))

    def tick(self, now: float) -> None:
        """Time passes: ``now`` in seconds, any origin."""
        self._now = now
        if self._has_read or not self._reads:
            self._progress_at = now
        self._has_read = False
        if self._wanted and not self._probing and now >= self._probe_at:
            self._probing = True
            self.jobs.append(Job(self.name, Action.PROBE, self._wanted))
            self._wanted = b""
        if self._uncleared and not self._clearing and now >= self._clear_at:
            self._start_clearing()

    def stalls_at(self, compute_seconds: float | None) -> float | None:
        """From when on what is being read is not worth waiting for; None where nothing is."""
        read = (self.chunk_seconds or 0.0) / self._threads
        usual = max(read, compute_seconds or UNKNOWN_S)
        return self._progress_at + max(GIVE_UP_S, GIVE_UP * usual) if self._reads else None

    def next_deadline(self) -> float | None:
        """When ``tick`` should be called again at the latest."""
        due = []
        if self._wanted and not self._probing:
            due.append(self._probe_at)
        if self._uncleared and not self._clearing:
            due.append(self._clear_at)
        return min(due, default=None)

    # --- reads -----------------------------------------------------------------------------

    def reading(self) -> None:
        """A load of a chunk of this tier has started."""
        self._reads += 1

    def was_read(self, key: bytes, error: str, seconds: float) -> None:
        self._reads -= 1
        self._late.pop(key, None)
        self._has_read = True
        before = self.chunk_seconds
        if seconds and (not error or before is None or seconds > before):
            self.chunk_seconds = seconds if before is None else (before + seconds) / 2
        if error:
            self.counters.read_failed += 1
            self.drop(key)
        else:
            self.counters.read_ok += 1

    def called_back(self, key: bytes) -> None:
        """The chunk's read, which came late, will not begin. Where none is left that could tell how slow the
        tier is, a chunk takes as long as it was silent."""
        self._reads -= 1
        self._late[key] -= 1
        if self._late[key] <= 0:
            del self._late[key]  # but another read of the chunk may be under way
        if not self._reads:
            silent = self._silent_s * self._threads
            self.chunk_seconds = max(self.chunk_seconds or 0.0, silent) or None

    def late(self, key: bytes) -> None:
        """The chunk's read takes too long: it is not to be found until that has returned."""
        self._late[key] += 1

    # --- writes and deletes ----------------------------------------------------------------

    def wants(self, key: bytes) -> bool:
        """Whether the chunk should be written there, if it can be."""
        if self.policy is WritePolicy.OFF or self._uncleared or key in self._writing:
            return False
        if key in self._barred:
            self._delete(key)  # again, if it has failed: then it can be written another time
            return False
        return key not in self._known

    def write(self, key: bytes, slot: int, *, bounded: bool = True) -> bool:
        """Start a write; the slot must stay as it is until it returns. False where too many wait."""
        if bounded and len(self._writing) >= self._writes_max:
            self.counters.write_dropped += 1
            return False
        self._writing.add(key)
        self.jobs.append(Job(self.name, Action.WRITE, key, slot))
        return True

    def drop(self, key: bytes) -> None:
        """The chunk is bad, or may be: it is not to be found again."""
        self._known.discard(key)
        if key == self._wanted:
            self._wanted = b""
        self._barred[key] = None
        if len(self._barred) > BARRED_MAX:
            self._barred.popitem(last=False)
        self._delete(key)

    def forget(self, key: bytes) -> None:
        """As ``drop``, for a chunk that may never have been there."""
        if self.policy is not WritePolicy.OFF or key in self._known:
            self.drop(key)

    def clear(self) -> None:
        self._known.clear()
        self._wanted = b""
        for key in self._writing:
            self._barred[key] = None
        self._uncleared = True
        if self._clearing:
            self._clear_again = True  # what was written meanwhile may have come after it
        else:
            self._start_clearing()

    def _start_clearing(self) -> None:
        self._clearing = True
        self.jobs.append(Job(self.name, Action.CLEAR))

    def _delete(self, key: bytes) -> None:
        if key not in self._writing and key not in self._deleting:
            self._deleting.add(key)
            self.jobs.append(Job(self.name, Action.DELETE, key))

    def done(self, result: JobResult) -> None:
        """A job has returned."""
        job, (status, _), seconds = result
        good = status is Status.OK
        if job.action is Action.CLEAR:
            self._clearing = False
            self._uncleared = self._clear_again or not good
            self._clear_again = False
            self._clear_at = self._now + (0 if good else RETRY_S)
        elif job.action is Action.DELETE:
            self._deleting.discard(job.key)
            if good:
                self._barred.pop(job.key, None)
        elif job.action in (Action.PROBE, Action.TRY):
            self._probing = False
            self._probe_at = self._now + max(PROBE_S, 10 * seconds)
            if good:
                self.chunk_seconds = seconds
        else:
            self._writing.discard(job.key)
            self.counters.write_ok += good
            self.counters.write_failed += not good
            if job.key in self._barred:
                self._delete(job.key)
            elif good:
                self._known.add(job.key)

    @property
    def is_uncleared(self) -> bool:
        """Whether it is to be empty, and is not known to be."""
        return self._uncleared

    @property
    def jobs_in_flight(self) -> int:
        return len(self._writing) + len(self._deleting) + self._clearing + self._probing
