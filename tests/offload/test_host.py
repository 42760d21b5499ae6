"""Host slots: against a model that keeps one record per slot in use, and no index at all."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbtide.offload.host import HostSlots

KEYS = [bytes([i]) for i in range(6)]
NUM_SLOTS = 3
keys = st.sampled_from(KEYS)


@dataclass
class Record:
    slot: int
    key: bytes
    ready: bool = False
    found: bool = True
    pins: int = 0
    used_at: int = 0


class HostSlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = HostSlots(NUM_SLOTS)
        self.records: list[Record] = []
        self.time = 0

    def find(self, key: bytes) -> Record | None:
        return next((r for r in self.records if r.key == key and r.found), None)

    def now(self) -> int:
        self.time += 1
        return self.time

    @rule(key=keys)
    def reserve(self, key: bytes) -> None:
        if self.find(key) is not None:
            return
        slot = self.slots.reserve(key)
        if len(self.records) == NUM_SLOTS:
            idle = [r for r in self.records if r.ready and r.found and not r.pins]
            if not idle:
                assert slot is None
                return
            victim = min(idle, key=lambda r: r.used_at)
            assert slot == victim.slot
            self.records.remove(victim)
        assert slot is not None
        assert slot not in [r.slot for r in self.records]
        self.records.append(Record(slot, key))

    @precondition(lambda self: any(not r.ready for r in self.records))
    @rule(data=st.data(), good=st.booleans())
    def filled(self, data: st.DataObject, good: bool) -> None:
        record = data.draw(st.sampled_from([r for r in self.records if not r.ready]))
        self.slots.filled(record.slot, good)
        if good and record.found:
            record.ready, record.used_at = True, self.now()
        else:
            self.records.remove(record)

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        record = self.find(key)
        if record is not None and record.ready:
            assert self.slots.pin(key) == record.slot
            record.pins += 1

    @precondition(lambda self: any(r.pins for r in self.records))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from([r for r in self.records if r.pins]))
        self.slots.unpin(record.slot)
        record.pins -= 1
        if not record.pins:
            record.used_at = self.now()
            if not record.found:
                self.records.remove(record)

    @rule(key=keys)
    def touch(self, key: bytes) -> None:
        self.slots.touch(key)
        record = self.find(key)
        if record is not None and record.ready and not record.pins:
            record.used_at = self.now()

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        self.slots.drop(key)
        self.dropped(self.find(key))

    @rule()
    def clear(self) -> None:
        self.slots.clear()
        for record in list(self.records):
            self.dropped(record if record.found else None)

    def dropped(self, record: Record | None) -> None:
        if record is not None:
            record.found = False
            if record.ready and not record.pins:
                self.records.remove(record)

    @invariant()
    def agrees(self) -> None:
        assert self.slots.in_use == len(self.records)
        assert self.slots.pins == sum(r.pins for r in self.records)
        for key in KEYS:
            record = self.find(key)
            assert self.slots.holds(key) == (record is not None)
            assert self.slots.slot_of(key) == (record.slot if record else None)
            assert self.slots.has(key) == (record is not None and record.ready)


TestHostSlots = HostSlotsMachine.TestCase
TestHostSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ready(slots: HostSlots, key: bytes) -> int:
    slot = slots.reserve(key)
    assert slot is not None
    slots.filled(slot, good=True)
    return slot


def test_a_pinned_chunk_is_never_evicted() -> None:
    slots = HostSlots(1)
    ready(slots, b"a")
    at = slots.pin(b"a")
    assert slots.reserve(b"b") is None
    slots.unpin(at)
    assert slots.reserve(b"b") == at
    assert slots.evictions == 1


def test_unpinning_too_often_is_our_bug() -> None:
    slots = HostSlots(1)
    at = ready(slots, b"a")
    with pytest.raises(AssertionError, match="unpinned more often"):
        slots.unpin(at)


def test_repr_tells_what_is_in_use() -> None:
    slots = HostSlots(2)
    ready(slots, b"a")
    slots.pin(b"a")
    assert repr(slots) == "<HostSlots 1/2 in use, 1 pins>"
