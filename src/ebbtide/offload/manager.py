"""Decides which chunks are stored and loaded, and where. Pure logic: others move the bytes.

It knows nothing of a scheduler: an *owner* is a name for whose chain grows, a chain a list of block
digests (see ``ebbtide.core.ports``). Chunks go to the host tier, and from there to the tiers below it,
by each one's policy; they come back from wherever they are nearest. One that is read from below stays in
the host tier, and is written to the tiers that are nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbtide.core.plan import NO_SLOT, Direction, Transfer, TransferResult
from ebbtide.errors import InputError
from ebbtide.keys import chunk_key
from ebbtide.offload.below import Action, Below, Job, JobResult, WritePolicy
from ebbtide.offload.host import HostSlots
from ebbtide.offload.sketch import FrequencySketch


@dataclass(slots=True)
class OffloadCounters:
    """Totals since the start, in chunks. store_dropped: stores that never found room."""

    load_ok: int = 0
    load_failed: int = 0
    store_ok: int = 0
    store_failed: int = 0
    store_dropped: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0


class _Part(NamedTuple):
    """Blocks to load from one chunk, of which they are number ``offset`` and following."""

    key: bytes
    offset: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Progress:
    """How far an owner's chain is stored: the next chunk to store, and the next to count."""

    due: int = 0
    counted: int = 0


class OffloadManager:
    """``stores_max``: store transfers under way at once; further chunks wait for their turn.

    below: the tiers below the host tier, nearest first. store_after: a chunk is stored when so many
    requests have had it; a preempted one counts again, for it will want it back.

    Of a chain that is longer than the host tier, and has nowhere else to go, its start is kept, which is
    what a hit needs. A store that fails leaves a hole until the next request with these tokens computes
    that chunk.
    """

    def __init__(
        self,
        slots: HostSlots,
        blocks_per_chunk: int,
        num_groups: int = 1,
        stores_max: int = 64,
        *,
        below: Sequence[Below] = (),
        store_after: int = 1,
    ) -> None:
        self.slots = slots
        self.counters = OffloadCounters()
        self.blocks_per_chunk = blocks_per_chunk
        self.below = tuple(below)
        self.compute_seconds: float | None = None  # that it takes to compute a chunk
        self._num_groups = num_groups
        self._stores_max = stores_max
        self._store_after = store_after
        self._sketch = FrequencySketch() if store_after > 1 else None
        keeps_all = any(tier.policy is not WritePolicy.OFF for tier in below)
        self._chunks_max = None if keeps_all else slots.num_slots // num_groups  # of one chain
        self._stores = 0
        self._transfers = 0
        self._progress: dict[tuple[str, int], _Progress] = {}  # by owner and group
        self._awaited: dict[int, Transfer] = {}  # loads from below
        self._given_up: list[int] = []
        self._leaving: dict[int, int] = {}  # slots that are free when so many writes are done
        self._on_evict = [tier for tier in below if tier.policy is WritePolicy.ON_EVICT]
        self._spare = min(32, slots.num_slots // 8) if self._on_evict else 0  # slots to keep free

    # --- the chain's side ------------------------------------------------------------------

    def has(self, group: int, chain: Sequence[bytes], index: int) -> bool:
        last = (index // self.blocks_per_chunk + 1) * self.blocks_per_chunk - 1
        if last >= len(chain):
            return False
        key = chunk_key(chain[last], group)
        if not self.below or self.slots.holds(key):  # on its way there, it cannot be read again
            return self.slots.has(key)
        tier = self._nearest(key)
        return tier is not None and tier.pays(key, self.compute_seconds)

    def load(
        self, chain: Sequence[bytes], runs: Sequence[tuple[int, int, Sequence[int]]]
    ) -> list[list[Transfer]]:
        cut = [self._cut(chain, *run) for run in runs]
        here = {part for parts in cut for part in parts if self.slots.has(part.key)}
        for part in here:  # all of them first: what comes from below may evict others
            self.slots.pin(part.key)
        return [[self._load(part, part in here) for part in parts] for parts in cut]

    def _cut(
        self, chain: Sequence[bytes], group: int, index: int, blocks: Sequence[int]
    ) -> list[_Part]:
        parts = []
        at = 0
        while at < len(blocks):
            chunk, offset = divmod(index + at, self.blocks_per_chunk)
            end = min(len(blocks), at + self.blocks_per_chunk - offset)
            parts.append(_Part(self._key(group, chain, chunk), offset, tuple(blocks[at:end])))
            at = end
        return parts

    def _load(self, part: _Part, here: bool) -> Transfer:
        key, offset, blocks = part
        slot = self.slots.slot_of(key)
        if here:
            assert slot is not None
            return self._transfer(Direction.LOAD, key, slot, offset, blocks)
        tier = self._nearest(key) or self._any_that_may(key)
        tier.reading()
        slot = self._reserve(key) if slot is None else None  # another part of it has one already
        to = NO_SLOT if slot is None else slot
        load = self._transfer(Direction.LOAD, key, to, offset, blocks, tier.name)
        self._awaited[load.id] = load
        return load

    def store(
        self,
        owner: str,
        group: int,
        chain: Sequence[bytes],
        full: int,
        first: int,
        blocks: Sequence[int],
    ) -> list[Transfer]:
        stores: list[Transfer] = []
        if not self.slots.num_slots:
            return stores
        progress = self._progress.get((owner, group))
        new = progress is None
        progress = self._progress.setdefault((owner, group), _Progress())
        chunks = full // self.blocks_per_chunk
        end = chunks if self._chunks_max is None else min(chunks, self._chunks_max)
        while progress.due < end:
            at = progress.due * self.blocks_per_chunk - first
            key = self._key(group, chain, progress.due)
            wanted = not self.slots.holds(key) and self._is_seen_enough(key, progress)
            if at >= 0 and wanted:
                slot = self._reserve(key) if self._stores < self._stores_max else None
                if slot is None:
                    break  # no room now: it stays due
                self._stores += 1
                moved = blocks[at : at + self.blocks_per_chunk]
                stores.append(self._transfer(Direction.STORE, key, slot, 0, moved))
            elif at < 0 and wanted and not new:
                self.counters.store_dropped += 1  # it found no room until a window left it behind
            progress.due += 1
        return stores

    def _is_seen_enough(self, key: bytes, progress: _Progress) -> bool:
        if self._sketch is None:
            return True
        if progress.due >= progress.counted:
            progress.counted = progress.due + 1
            return self._sketch.add(key) >= self._store_after
        return self._sketch.count(key) >= self._store_after

    def end(self, owner: str, chain: Sequence[bytes], full: int) -> None:
        """Also touches the owner's chunks, the first one last: it is worth most, since without it
        the others are worth nothing, and so eviction eats a chain from its end."""
        chunks = full // self.blocks_per_chunk
        for group in range(self._num_groups):
            progress = self._progress.pop((owner, group), None)
            if progress is not None:
                self.counters.store_dropped += max(0, chunks - progress.due)
            for chunk in reversed(range(chunks)):
                self.slots.touch(self._key(group, chain, chunk))

    def finished(self, result: TransferResult) -> None:
        transfer, error, seconds, tried = result
        counters, slots, key = self.counters, self.slots, transfer.key
        if transfer.direction is Direction.STORE:
            self._stores -= 1
            slots.filled(transfer.slot, good=not error)
            counters.store_ok += not error
            counters.store_failed += bool(error)
            counters.stored_blocks += 0 if error else len(transfer.blocks)
            self._cascade(key, transfer.slot, self.below)
            return
        counters.load_ok += not error
        counters.load_failed += bool(error) and tried
        counters.loaded_blocks += 0 if error else len(transfer.blocks)
        if transfer.tier:
            self._awaited.pop(transfer.id, None)
            tier = self._tier(transfer.tier)
            if tried:
                tier.was_read(key, error, seconds)
            else:
                tier.called_back(key)
            if transfer.slot != NO_SLOT:
                slots.filled(transfer.slot, good=not error)
                self._cascade(key, transfer.slot, self.below[: self.below.index(tier)])
        else:
            if error and slots.slot_of(key) == transfer.slot:
                slots.drop(key)
            slots.unpin(transfer.slot)

    def abandon(self, transfer: Transfer) -> None:
        if transfer.tier:
            self._awaited.pop(transfer.id, None)
            self._tier(transfer.tier).late(transfer.key)
        if self.slots.slot_of(transfer.key) == transfer.slot:
            self.slots.drop(transfer.key)

    def forget(self, chain: Sequence[bytes], index: int) -> None:
        for chunk in range(index // self.blocks_per_chunk, len(chain) // self.blocks_per_chunk):
            for group in range(self._num_groups):
                key = self._key(group, chain, chunk)
                self.slots.drop(key)
                for tier in self.below:
                    tier.forget(key)

    def clear(self, names: Sequence[str] | None = None) -> None:
        """Empty all tiers, or those named. Raises InputError for a name that is none of them."""
        tiers: dict[str, HostSlots | Below] = {"host": self.slots}
        tiers |= {tier.name: tier for tier in self.below}
        for name in tiers if names is None else names:
            if name not in tiers:
                raise InputError(
                    f"there is no tier {name!r}: there are {', '.join(tiers)}", "tiers"
                )
        for name in tiers if names is None else names:
            tiers[name].clear()

    # --- the tiers' side -------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time passes: ``now`` in seconds, any origin."""
        for tier in self.below:
            tier.tick(now)
            stalls_at = tier.stalls_at(self.compute_seconds)
            if stalls_at is not None and stalls_at <= now:
                for transfer in [t for t in self._awaited.values() if t.tier == tier.name]:
                    self.abandon(transfer)
                    self._given_up.append(transfer.id)
        while self.slots.free + len(self._leaving) < self._spare and self._demote():
            pass

    def next_deadline(self) -> float | None:
        """When ``tick`` should be called again at the latest."""
        awaited = {transfer.tier for transfer in self._awaited.values()}
        times = [tier.next_deadline() for tier in self.below]
        times += [t.stalls_at(self.compute_seconds) for t in self.below if t.name in awaited]
        return min((time for time in times if time is not None), default=None)

    def take_given_up(self) -> list[int]:
        """Loads from a tier that stalls: those who wait for them are to go on without, and those loads that
        have not begun need not begin."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def found(self, name: str, keys: Sequence[bytes]) -> None:
        """A lookup in the tier of this name has found these chunks."""
        tier = self._tier(name)
        for key in keys:
            tier.found(key)

    def computed(self, blocks: float, seconds: float) -> None:
        """So much KV of all groups was computed in so many seconds: what loads are compared with."""
        chunk = seconds / blocks * self.blocks_per_chunk / self._num_groups
        before = self.compute_seconds
        self.compute_seconds = chunk if before is None else 0.8 * before + 0.2 * chunk

    def take_jobs(self) -> list[Job]:
        """Jobs for the tiers below. Each must come back through ``done``."""
        jobs = []
        for tier in self.below:
            jobs += tier.jobs
            tier.jobs = []
        return jobs

    def done(self, result: JobResult) -> None:
        """A job has returned."""
        job = result.job
        self._tier(job.tier).done(result)
        if job.action is not Action.WRITE:
            return
        if job.slot in self._leaving:
            self._leaving[job.slot] -= 1
            if not self._leaving[job.slot]:
                del self._leaving[job.slot]
                self._evict(job.key, job.slot)
        self.slots.unpin(job.slot)

    def flush(self) -> None:
        """Write all that the tiers below lack, the most useful first; for a host tier that is to end."""
        for key in self.slots.best_first():
            slot = self.slots.slot_of(key)
            for tier in self.below:
                if slot is not None and tier.wants(key) and tier.write(key, slot, bounded=False):
                    self.slots.pin(key)

    @property
    def uncleared(self) -> list[str]:
        """The tiers that are to be empty, and are not known to be."""
        return [tier.name for tier in self.below if tier.is_uncleared]

    @property
    def jobs_in_flight(self) -> int:
        return sum(tier.jobs_in_flight for tier in self.below)

    # --- within ----------------------------------------------------------------------------

    def _tier(self, name: str) -> Below:
        return next(tier for tier in self.below if tier.name == name)

    def _nearest(self, key: bytes) -> Below | None:
        return next((tier for tier in self.below if tier.has(key)), None)

    def _any_that_may(self, key: bytes) -> Below:
        """Where to read a chunk that has just gone: the read will say so."""
        return next(tier for tier in self.below if tier.may_be_read(key))

    def _cascade(self, key: bytes, slot: int, tiers: Sequence[Below]) -> None:
        """The slot's content is there: write it to those tiers that want it at once."""
        if self.slots.slot_of(key) != slot or not self.slots.has(key):
            return
        for tier in tiers:
            if (
                tier.policy is WritePolicy.WRITE_THROUGH
                and tier.wants(key)
                and tier.write(key, slot)
            ):
                self.slots.pin(key)

    def _reserve(self, key: bytes) -> int | None:
        """A slot for the chunk, or None where there is no room now."""
        if self._on_evict and not self.slots.free:
            self._demote()
            if not self.slots.free:
                return None  # room is on its way
        return self.slots.reserve(key)

    def _demote(self) -> bool:
        """Let a chunk leave, by way of the tiers that want it then. False where none can."""
        key = self.slots.take_victim()
        if key is None:
            return False
        slot = self.slots.slot_of(key)
        assert slot is not None
        for tier in self._on_evict:
            if tier.wants(key) and tier.write(key, slot):
                self.slots.pin(key)
                self._leaving[slot] = self._leaving.get(slot, 0) + 1
        if slot not in self._leaving:
            self._evict(key, slot)
        return True

    def _evict(self, key: bytes, slot: int) -> None:
        if self.slots.slot_of(key) == slot:
            self.slots.evict(key)

    def _key(self, group: int, chain: Sequence[bytes], chunk: int) -> bytes:
        return chunk_key(chain[(chunk + 1) * self.blocks_per_chunk - 1], group)

    def _transfer(
        self,
        direction: Direction,
        key: bytes,
        slot: int,
        offset: int,
        blocks: Sequence[int],
        tier: str = "",
    ) -> Transfer:
        self._transfers += 1
        return Transfer(self._transfers, direction, key, slot, offset, tuple(blocks), tier)
