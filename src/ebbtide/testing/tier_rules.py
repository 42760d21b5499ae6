"""Rules of the tiers below the host tier, judged from outside like those of ``rules``.

The watched classes judge decisions at the moment they are made, and remember what ``TierRules`` is to
look into after the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ebbtide.core.plan import Direction, Transfer, TransferResult
from ebbtide.offload.below import (
    STALLED,
    UNKNOWN_S,
    Action,
    Below,
    Job,
    JobResult,
    WritePolicy,
)
from ebbtide.offload.host import HostSlots, SlotState
from ebbtide.offload.tiers.base import Status
from ebbtide.testing.lower_tier import LowerTier
from ebbtide.testing.rules import WatchedManager


class WatchedSlots(HostSlots):
    """Remembers what was chosen to leave, and what was evicted, since ``TierRules`` last looked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.chosen: list[tuple[bytes, int]] = []  # key, slot
        self.evicted: list[int] = []  # slots

    def take_victim(self) -> bytes | None:
        key = super().take_victim()
        if key is not None:
            self.chosen.append((key, self._at[key]))
        return key

    def evict(self, key: bytes) -> None:
        self.evicted.append(self._at[key])
        super().evict(key)


class WatchedBelow(Below):
    """``closed``: hits that were left alone, by what closed the gate. ``refused``: writes, likewise."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.closed = Counter[str]()
        self.refused: list[bytes] = []
        self._under_way = 0  # reads
        self._waiting_since = self._time = 0.0
        self._heard = False  # since the last tick

    def tick(self, now: float) -> None:
        self._time = now
        if self._heard:
            self._waiting_since = now
        self._heard = False
        super().tick(now)

    def reading(self) -> None:
        if not self._under_way:
            self._waiting_since = self._time
        self._under_way += 1
        super().reading()

    def was_read(self, key: bytes, error: str, seconds: float) -> None:
        self._under_way -= 1
        self._heard = True
        super().was_read(key, error, seconds)

    def called_back(self, key: bytes) -> None:
        self._under_way -= 1
        super().called_back(key)
        read = (self.chunk_seconds or 0.0) / self._threads
        assert self._under_way or read >= self._waited, f"{self.name} seems fast"

    @property
    def _waited(self) -> float:
        return 0.0 if self._heard else self._time - self._waiting_since

    def pays(self, key: bytes, compute_seconds: float | None) -> bool:
        pays = super().pays(key, compute_seconds)
        if self.chunk_seconds is None:
            assert pays == (not self._under_way), "a tier that is not known is tried once"
            return pays
        if compute_seconds is None:
            compute_seconds = UNKNOWN_S
        read = self.chunk_seconds / self._threads
        waited = self._waited if self._under_way else 0.0
        is_slow, has_stalled = read > compute_seconds, waited > STALLED * max(read, compute_seconds)
        assert pays == (not is_slow and not has_stalled), (
            f"{self.name} pays: {pays}; {read} s per chunk, no answer for {waited} s, "
            f"computing takes {compute_seconds} s"
        )
        self.closed["slow"] += is_slow
        self.closed["stalled"] += has_stalled and not is_slow
        return pays

    def write(self, key: bytes, slot: int, *, bounded: bool = True) -> bool:
        assert self.policy is not WritePolicy.OFF, f"{self.name} is only to be read"
        assert not _is_barred(self, key), f"{key.hex()} is barred"
        is_full = bounded and len(self._writing) >= self._writes_max
        started = super().write(key, slot, bounded=bounded)
        assert started != is_full, f"{len(self._writing)} writes are under way"
        self.refused += [] if started else [key]
        return started


def _is_barred(below: Below, key: bytes) -> bool:
    return below._uncleared or key in below._barred


class TierRules:
    """Tell it of each result that has come back, and after each call what that has started.

    *Condemned* chunks are not to be served until they were written anew.
    """

    def __init__(
        self, manager: WatchedManager, slots: WatchedSlots, tiers: Sequence[LowerTier]
    ) -> None:
        self._manager = manager
        self._slots = slots
        self._tiers = {tier.name: tier for tier in tiers}
        self._condemned: dict[str, set[bytes]] = {name: set() for name in self._tiers}
        self._late: dict[int, Transfer] = {}
        self._affirmed: set[tuple[str, bytes]] = set()  # by lookups, since they were last written
        self._jobs: list[Job] = []  # in flight
        self._returned = Counter[tuple[str, str]]()
        self._dropped = Counter[str]()

    # --- what comes back -------------------------------------------------------------------

    def late(self, transfers: Iterable[Transfer]) -> None:
        self._late.update((t.id, t) for t in transfers if t.tier)

    def moved(self, result: TransferResult) -> None:
        """A transfer has returned, and the scheduler knows."""
        transfer, error, _, tried = result
        if transfer.tier:
            self._late.pop(transfer.id, None)
        if transfer.tier and tried:
            if not error:  # of two reads of a chunk, one that was in time is enough
                of = (transfer.tier, transfer.key)
                self._late = {n: t for n, t in self._late.items() if (t.tier, t.key) != of}
            self._returned[transfer.tier, "read_failed" if error else "read_ok"] += 1
            if error:
                self._condemned[transfer.tier].add(transfer.key)
        if transfer.direction is Direction.STORE or transfer.tier:
            self._check_cascade(transfer)

    def _check_cascade(self, filled: Transfer) -> None:
        """Who wants the chunk at once has it, gets it, or has no room for one more write."""
        if self._slots.slot_of(filled.key) == filled.slot and self._slots.has(filled.key):
            for name, tier in self._tiers.items():
                if name == filled.tier:
                    break
                if tier.world.policy is WritePolicy.WRITE_THROUGH:
                    self._check_offered(tier, filled.key)

    def _check_offered(self, tier: LowerTier, key: bytes) -> None:
        below = tier.below
        there = tier.is_found(key) or key in below._writing or key in below._late
        refused = isinstance(below, WatchedBelow) and key in below.refused
        assert there or refused or _is_barred(below, key), (
            f"{key.hex()} was not offered to {tier.name}"
        )

    def done(self, result: JobResult) -> None:
        """A job has returned, and the manager knows."""
        self._jobs.remove(result.job)
        if result.job.action is Action.WRITE:
            good = result.result.status is Status.OK
            place = (result.job.tier, result.job.key)
            hinted = result.job.key in self._tiers[result.job.tier].hints
            assert good or not hinted or place in self._affirmed, f"{result}, and is still found"
            self._returned[result.job.tier, "write_ok" if good else "write_failed"] += 1

    def found(self, tier: str, keys: Iterable[bytes]) -> None:
        """A lookup has found these."""
        self._affirmed.update((tier, key) for key in keys)

    # --- what starts -----------------------------------------------------------------------

    def started(self, transfers: Iterable[Transfer], jobs: Sequence[Job]) -> None:
        manager = self._manager
        for name, tier in self._tiers.items():
            condemned = self._condemned[name]
            if name in manager.cleared:
                condemned |= tier.place.chunks.keys() | tier.below._writing
            is_read_only = tier.world.policy is WritePolicy.OFF
            for key in manager.forgotten:
                if not is_read_only or key in tier.below._barred:
                    condemned.add(key)
        manager.cleared, manager.forgotten = [], []
        for job in jobs:
            self._check_job(job)
        for transfer in transfers:
            if transfer.tier:
                below = self._tiers[transfer.tier].below
                barred = transfer.key in below._late or _is_barred(below, transfer.key)
                assert not barred, f"{transfer} is barred"
        self._jobs += jobs
        changes = [(j.tier, j.key) for j in self._jobs if j.action in (Action.WRITE, Action.DELETE)]
        assert len(set(changes)) == len(changes), f"two at once of a key: {self._jobs}"
        self._check_leaving()

    def _check_job(self, job: Job) -> None:
        below = self._tiers[job.tier].below
        if job.action is Action.WRITE:
            self._condemned[job.tier].discard(job.key)
            self._affirmed.discard((job.tier, job.key))
        elif job.action is Action.PROBE:
            assert not _is_barred(below, job.key), f"{job}: it is barred"
        elif job.action is Action.DELETE:
            assert job.key in below._barred, f"{job}: nothing is wrong with it"

    def _check_leaving(self) -> None:
        """What has to leave is first offered to the tiers that want it then, and waits for them."""
        for slot in self._slots.evicted:
            writes = [job for job in self._jobs if job.slot == slot]
            assert not writes, f"slot {slot} was given away before {writes} have returned"
        for name, tier in self._tiers.items():
            if tier.world.policy is WritePolicy.ON_EVICT:
                for key, _ in self._slots.chosen:
                    self._check_offered(tier, key)
            assert isinstance(tier.below, WatchedBelow)
            self._dropped[name] += len(tier.below.refused)
            tier.below.refused = []
        self._slots.evicted, self._slots.chosen = [], []

    # --- at any time -----------------------------------------------------------------------

    def check(self) -> None:
        for name, tier in self._tiers.items():
            served = [key.hex() for key in self._condemned[name] if tier.serves(key)]
            assert not served, f"{name} still serves {served}"
            place, counters = tier.place, tier.below.counters
            assert place.bytes_max is None or place.bytes <= place.bytes_max, "over the quota"
            for what in ("read_ok", "read_failed", "write_ok", "write_failed"):
                count = self._returned[name, what]
                assert getattr(counters, what) == count, f"{name}: {counters}, not {count} {what}"
            assert counters.write_dropped == self._dropped[name], f"{name}: {counters}"
        for transfer in self._late.values():
            late = self._tiers[transfer.tier].is_found(transfer.key)
            assert not late, f"{transfer} came late, and is still found"

    def check_kept(self) -> None:
        """A slot that is to leave waits for a write of it, and for nothing else."""
        writing = {job.slot for job in self._jobs if job.action is Action.WRITE}
        for number, slot in enumerate(self._slots._slots):
            if slot.leaving and slot.state is SlotState.READY:
                assert number in writing, f"slot {number} is to leave, and does not"
