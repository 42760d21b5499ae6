"""What is wrong about tiers is noticed: marks travel with chunks, and each rule can fail."""

from __future__ import annotations

import random

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import NO_SLOT, Direction, Transfer, TransferResult
from ebbtide.offload.arena import Arena
from ebbtide.offload.below import Action, Job, JobResult, WritePolicy
from ebbtide.offload.tiers.base import OK
from ebbtide.testing.faulty import FaultyMemory
from ebbtide.testing.lower_tier import LowerTier, Place
from ebbtide.testing.rules import WatchedManager
from ebbtide.testing.simulator import simulate
from ebbtide.testing.tier_rules import TierRules, WatchedBelow, WatchedSlots
from ebbtide.testing.tiers import MemoryTier
from ebbtide.testing.witness import WitnessMemory, WitnessModel
from ebbtide.testing.world import TierWorld

KEY, OTHER = b"k" * 34, b"o" * 34
PER_CHUNK = 2
READ = Transfer(1, Direction.LOAD, KEY, NO_SLOT, 0, (2, 3), "near")


class Small:
    """A host tier of two slots, and a tier below it that is asked each time."""

    def __init__(self, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> None:
        world = TierWorld(
            immediate=True,
            policy=policy,
            writes_max=4,
            chunks_max=None,
            threads=1,
            read_s=(0.1, 0.1),
        )
        rng = random.Random(1)
        self.place = Place(None)
        never = lambda fault: False  # noqa: E731
        self.tier = LowerTier("near", world, PER_CHUNK, self.place, rng, never, WatchedBelow)
        self.slots = WatchedSlots(2)
        self.manager = WatchedManager(self.slots, PER_CHUNK, below=[self.tier.below])
        self.rules = TierRules(self.manager, self.slots, [self.tier])
        memory = WitnessMemory(WitnessModel(), 8, 4)
        arena = Arena(2, PER_CHUNK, memory.block_bytes)
        self.faulty = FaultyMemory((KVGroup(),), memory, arena, rng, never, [self.tier])

    def fill(self, key: bytes) -> int:
        slot = self.slots.reserve(key)
        assert slot is not None
        self.slots.filled(slot, good=True)
        return slot

    def collect(self) -> list[Job]:
        """As after each call: the rules hear of what was started."""
        jobs = self.manager.take_jobs()
        self.rules.started([], jobs)
        return jobs

    def write(self, key: bytes = KEY) -> None:
        """The chunk goes down, all the way."""
        self.tier.below.write(key, self.slots.pin(key))
        for job in self.collect():
            self.done(self.faulty.do(job))
        self.collect()

    def done(self, result: JobResult) -> None:
        self.manager.done(result)
        self.rules.done(result)


def test_a_bad_block_stays_bad_in_a_tier_and_on_its_way_back() -> None:
    small = Small()
    slot = small.fill(KEY)
    small.faulty.spoil([1])
    small.faulty.move(Transfer(1, Direction.STORE, KEY, slot, 0, (0, 1)))
    small.write()
    assert small.place.bad[KEY] == {1}
    small.faulty.bad_slots.clear()
    assert not small.faulty.move(READ._replace(slot=slot)).error
    assert small.faulty.bad_slots == {(slot, 1)}
    assert small.faulty.bad_blocks == {1, 3}


def test_a_part_of_a_chunk_brings_the_marks_of_that_part() -> None:
    small = Small()
    small.faulty.spoil_slot(small.fill(KEY), 1)
    small.write()
    small.faulty.move(READ._replace(offset=1, blocks=(5,)))
    assert small.faulty.bad_blocks == set()
    small.faulty.move(READ._replace(offset=0, blocks=(5,)))
    assert small.faulty.bad_blocks == {5}


def test_a_chunk_that_was_written_anew_is_not_bad_any_more() -> None:
    small = Small()
    slot = small.fill(KEY)
    small.faulty.spoil_slot(slot, 2)
    small.write()
    small.faulty.bad_slots.clear()
    small.write()
    assert small.place.bad[KEY] == frozenset()


def test_a_condemned_chunk_that_is_served_is_noticed() -> None:
    small = Small()
    small.fill(KEY)
    small.write()
    small.rules.check()
    small.manager.forgotten.append(KEY)  # and nobody has told the tier
    small.collect()
    with pytest.raises(AssertionError, match="near still serves"):
        small.rules.check()
    small.write()  # anew
    small.rules.check()


def test_a_chunk_from_before_a_reset_that_is_served_is_noticed() -> None:
    small = Small()
    small.fill(KEY)
    small.write()
    small.manager.cleared.append("near")
    small.collect()
    with pytest.raises(AssertionError, match="near still serves"):
        small.rules.check()


def test_a_failed_read_that_is_found_again_is_noticed() -> None:
    small = Small()
    small.fill(KEY)
    small.write()
    small.tier.below.reading()
    small.manager.finished(TransferResult(READ, "broken"))
    small.rules.moved(TransferResult(READ, "broken"))
    small.rules.check()
    small.tier.below._barred.clear()
    with pytest.raises(AssertionError, match="near still serves"):
        small.rules.check()


def test_a_late_read_that_is_found_is_noticed() -> None:
    small = Small()
    small.fill(KEY)
    small.write()
    small.rules.late([READ])
    with pytest.raises(AssertionError, match="came late, and is still found"):
        small.rules.check()


def test_two_changes_of_a_key_at_once_are_noticed() -> None:
    small = Small()
    slot = small.fill(KEY)
    small.rules.started([], [Job("near", Action.WRITE, KEY, slot)])
    with pytest.raises(AssertionError, match="two at once of a key"):
        small.rules.started([], [Job("near", Action.WRITE, KEY, slot)])


def test_a_slot_that_is_given_away_too_early_is_noticed() -> None:
    small = Small(WritePolicy.ON_EVICT)
    slot = small.fill(KEY)
    small.rules.started([], [Job("near", Action.WRITE, KEY, slot)])
    small.slots.evict(KEY)
    with pytest.raises(AssertionError, match=f"slot {slot} was given away"):
        small.rules.started([], [])


def test_a_chunk_that_leaves_unasked_is_noticed() -> None:
    small = Small(WritePolicy.ON_EVICT)
    small.fill(KEY)
    assert small.slots.take_victim() == KEY
    with pytest.raises(AssertionError, match="was not offered to near"):
        small.rules.started([], [])


def test_a_chunk_that_never_leaves_is_noticed() -> None:
    small = Small(WritePolicy.ON_EVICT)
    small.fill(KEY)
    small.manager._demote()
    (write,) = small.collect()
    small.rules.check_kept()
    small.rules.done(JobResult(write, OK))
    with pytest.raises(AssertionError, match="is to leave, and does not"):
        small.rules.check_kept()


def test_a_store_that_does_not_go_down_is_noticed() -> None:
    small = Small()
    store = Transfer(1, Direction.STORE, KEY, small.fill(KEY), 0, (0, 1))
    with pytest.raises(AssertionError, match="was not offered to near"):
        small.rules.moved(TransferResult(store))


def test_barred_chunks_are_neither_written_nor_read_nor_probed() -> None:
    small = Small()
    slot = small.fill(KEY)
    small.tier.below.drop(KEY)
    small.collect()
    with pytest.raises(AssertionError, match="is barred"):
        small.tier.below.write(KEY, slot)
    with pytest.raises(AssertionError, match="is barred"):
        small.rules.started([READ], [])
    with pytest.raises(AssertionError, match="is barred"):
        small.rules.started([], [Job("near", Action.PROBE, KEY)])


def test_a_chunk_that_another_process_took_is_told_apart() -> None:
    noted: list[str] = []
    small = Small()
    small.faulty._note = noted.append
    small.fill(KEY)
    assert small.faulty.move(READ).error
    assert noted == []  # it never was there
    small.write()
    small.place.doing = "another process"
    small.place.drop(KEY)
    assert small.place.took == {KEY: "another process"}
    assert small.faulty.move(READ).error
    assert noted == ["missing_chunk"]


def test_a_tier_that_mixes_up_its_chunks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_any(self: MemoryTier, key: bytes, buffer: memoryview) -> object:
        return read(self, next(iter(self.place.chunks), key), buffer)

    read = MemoryTier._read
    monkeypatch.setattr(MemoryTier, "_read", read_any)
    assert any(simulate(seed).failure for seed in range(40))
