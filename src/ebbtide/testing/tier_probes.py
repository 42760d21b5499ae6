"""Probes for the rare branches of the tiers below the host tier: see ``probes``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ebbtide.core.plan import NO_SLOT, Transfer, TransferResult
from ebbtide.offload.below import Action, Job, JobResult
from ebbtide.offload.host import SlotState
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.tiers.base import Status
from ebbtide.testing.lower_tier import LowerTier
from ebbtide.testing.tier_rules import WatchedBelow

NAMES = frozenset(
    {
        "tier: stalled loads are given up",
        "tier: a load is called back",
        "tier: read into a slot",
        "tier: read without a slot",
        "tier: two parts of one chunk are read",
        "tier: read from the far one, written to the near one",
        "tier: read failed",
        "tier: a chunk was gone when it was read",
        "tier: a hint was wrong",
        "tier: a bad block came back",
        "tier: late read returns good",
        "tier: late read returns bad",
        "tier: what is to leave is loaded meanwhile",
        "tier: a write failed",
        "tier: a write was dropped",
        "tier: its quota evicts",
        "tier: forgotten during a write",
        "tier: forgotten during a read",
        "tier: cleared alone",
        "tier: cleared during a write",
        "tier: cleared during a read",
        "tier: cleared while it is cleared",
        "tier: a failed clear is tried again",
        "tier: a failed delete is tried again",
        "tier: left alone, too slow",
        "tier: left alone, it has stalled",
        "tier: a probe opens the gate",
        "lookup: comes after its request has started",
        "lookup: it is aborted while held",
        "lookup: finds what is barred",
        "crash: while writes are under way",
        "crash: what was left is read",
        "flush: something to write",
    }
)


class TierProbes:
    def __init__(
        self, tiers: Sequence[LowerTier], manager: OffloadManager, hit: Counter[str]
    ) -> None:
        self._hit = hit
        self._manager = manager
        self._tiers = {tier.name: tier for tier in tiers}
        self._failed: set[tuple[str, Action, bytes]] = set()  # clears and deletes
        self._came_back: tuple[str, bytes] = ("", b"")  # the last chunk that was read
        self._closed = Counter[tuple[str, str]]()
        self._evictions = sum(tier.place.evictions for tier in tiers)

    def count(self, name: str, happened: object = True) -> None:
        assert name in NAMES, name
        if happened:
            self._hit[name] += 1

    # --- what comes back -------------------------------------------------------------------

    def before_read(self, result: TransferResult) -> None:
        transfer, error, *_ = result
        tier, key = self._tiers[transfer.tier], transfer.key
        place, below = tier.place, tier.below
        self.count("tier: read without a slot", transfer.slot == NO_SLOT)
        self.count("tier: read into a slot", transfer.slot != NO_SLOT)
        self.count("tier: read failed", error)
        gone = bool(error) and key not in place.chunks
        self.count("tier: a chunk was gone when it was read", gone)
        self.count("tier: a hint was wrong", gone and tier.is_found(key))
        self.count("tier: a bad block came back", not error and place.bad.get(key))
        self.count("tier: forgotten during a read", key in below._barred)
        self.count("tier: late read returns bad", error and key in below._late)
        self.count("tier: late read returns good", not error and key in below._late)
        self.count("crash: what was left is read", not error and key in place.left)
        self._came_back = (transfer.tier, key)

    def before_done(self, result: JobResult) -> None:
        (name, action, key, _), (status, _), seconds = result
        tier = self._tiers[name]
        failed = status is not Status.OK
        if action in (Action.CLEAR, Action.DELETE) and failed:
            self._failed.add((name, action, key))
        self.count("tier: a write failed", action is Action.WRITE and failed)
        barred = key in tier.below._barred and not tier.below._uncleared
        self.count("tier: forgotten during a write", action is Action.WRITE and barred)
        was, compute = tier.below.chunk_seconds, self._manager.compute_seconds
        if action is Action.PROBE and not failed and was is not None and compute is not None:
            opens = seconds <= compute * tier.world.threads < was
            self.count("tier: a probe opens the gate", opens)
        evictions = sum(tier.place.evictions for tier in self._tiers.values())
        self.count("tier: its quota evicts", evictions > self._evictions)
        self._evictions = evictions

    def answered(self, tier: str, found: Sequence[bytes], is_held: bool) -> None:
        self.count("lookup: comes after its request has started", not is_held)
        barred = self._tiers[tier].below._barred
        self.count("lookup: finds what is barred", any(key in barred for key in found))

    # --- what starts -----------------------------------------------------------------------

    def started(self, items: Iterable[Transfer | Job]) -> None:
        """After every call, with what it started, before ``TierRules`` hear of it."""
        reads = Counter(i.key for i in items if isinstance(i, Transfer) and i.tier)
        self.count("tier: two parts of one chunk are read", max(reads.values(), default=0) > 1)
        for item in items:
            if isinstance(item, Job):
                self._job_started(item)
        leaving = [
            s for s in self._manager.slots._slots if s.leaving and s.state is SlotState.READY
        ]
        busy = len(self._tiers) < 2 and any(slot.pins > 1 for slot in leaving)
        self.count("tier: what is to leave is loaded meanwhile", busy)
        for name, tier in self._tiers.items():
            below = tier.below
            assert isinstance(below, WatchedBelow)
            self.count("tier: a write was dropped", below.refused)
            closed, before = below.closed, self._closed
            self.count("tier: left alone, too slow", closed["slow"] > before[name, "slow"])
            stalled = closed["stalled"] > before[name, "stalled"]
            self.count("tier: left alone, it has stalled", stalled)
            before.update({(name, why): count - before[name, why] for why, count in closed.items()})

    def _job_started(self, job: Job) -> None:
        place = (job.tier, job.action, job.key)
        if place in self._failed:
            self._failed.remove(place)
            what = "clear" if job.action is Action.CLEAR else "delete"
            self.count(f"tier: a failed {what} is tried again")
        far = self._came_back[0] not in ("", job.tier) and self._came_back[1] == job.key
        writes = job.action is Action.WRITE
        self.count("tier: read from the far one, written to the near one", writes and far)

    # --- what happens to it all ------------------------------------------------------------

    def clearing(self, names: Iterable[str] | None, reads: Iterable[Transfer]) -> None:
        """``reads`` are under way."""
        read = {transfer.tier for transfer in reads}
        for name in self._tiers if names is None else names:
            if name in self._tiers:
                below = self._tiers[name].below
                self.count("tier: cleared alone", names)
                self.count("tier: cleared during a write", below._writing)
                self.count("tier: cleared during a read", name in read)
                self.count("tier: cleared while it is cleared", below._clearing)

    def crashing(self, jobs: Iterable[Job]) -> None:
        """``jobs`` are under way."""
        writes = any(job.action is Action.WRITE for job in jobs)
        self.count("crash: while writes are under way", writes)
