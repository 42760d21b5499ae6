"""What leaves, what comes back and what is forgotten, decided without a scheduler."""

from __future__ import annotations

from ebbtide.core.plan import Direction, Transfer, TransferResult
from ebbtide.offload.below import Action, Below, Hints, JobResult, WritePolicy
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.tiers.base import OK

CHAIN = [bytes([i]) * 32 for i in range(8)]
OTHER = [bytes([100 + i]) * 32 for i in range(8)]


def manager(
    slots: int = 8, per_chunk: int = 2, groups: int = 1, stores_max: int = 64
) -> OffloadManager:
    return OffloadManager(HostSlots(slots), per_chunk, groups, stores_max)


def finish(m: OffloadManager, transfers: list[Transfer], error: str = "") -> None:
    for transfer in transfers:
        m.finished(TransferResult(transfer, error))


def stored(m: OffloadManager, full: int = 8, group: int = 0) -> list[Transfer]:
    stores = m.store("warm", group, CHAIN, full, 0, list(range(10, 10 + full)))
    finish(m, stores)
    m.end("warm", CHAIN, full)
    return stores


def load(m: OffloadManager, group: int, index: int, blocks: list[int]) -> list[Transfer]:
    (loads,) = m.load(CHAIN, [(group, index, blocks)])
    return loads


def has(m: OffloadManager, group: int = 0) -> list[int]:
    return [index for index in range(len(CHAIN)) if m.has(group, CHAIN, index)]


def test_full_chunks_are_stored_once_each() -> None:
    m = manager()
    first = m.store("a", 0, CHAIN, 3, 0, [10, 11, 12])
    assert [(t.direction, t.offset, t.blocks) for t in first] == [(Direction.STORE, 0, (10, 11))]
    assert has(m) == []  # not before it has arrived
    more = m.store("a", 0, CHAIN, 4, 0, [10, 11, 12, 13])
    assert [t.blocks for t in more] == [(12, 13)]
    finish(m, first + more)
    assert has(m) == [0, 1, 2, 3]
    assert m.store("b", 0, CHAIN, 4, 0, [20, 21, 22, 23]) == []  # another owner, the same chain


def test_a_chunk_is_not_found_by_a_chain_that_ends_inside_it() -> None:
    m = manager()
    stored(m)
    assert m.has(0, CHAIN[:4], 3)
    assert not m.has(0, CHAIN[:5], 4)


def test_loads_are_cut_at_chunks_and_pin_their_slots() -> None:
    m = manager()
    stores = stored(m)
    loads = load(m, 0, 1, [1, 2, 3, 4])
    assert [(t.offset, t.blocks) for t in loads] == [(1, (1,)), (0, (2, 3)), (0, (4,))]
    assert [t.slot for t in loads] == [t.slot for t in stores[:3]]
    assert m.slots.pins == 3
    finish(m, loads)
    assert m.slots.pins == 0
    assert m.counters.load_ok == 3
    assert m.counters.loaded_blocks == 4


def test_groups_have_chunks_of_their_own() -> None:
    m = manager(groups=2)
    stored(m, group=1)
    assert has(m, group=0) == []
    assert has(m, group=1) == list(range(8))


def test_a_failed_load_drops_the_chunk() -> None:
    m = manager()
    stored(m)
    loads = load(m, 0, 2, [1, 2])
    finish(m, loads, "checksum")
    assert has(m) == [0, 1, 4, 5, 6, 7]
    assert m.slots.in_use == 3


def test_a_failed_load_does_not_drop_what_has_been_stored_anew() -> None:
    m = manager()
    stored(m)
    old = load(m, 0, 0, [1, 2])
    m.forget(CHAIN, 0)
    finish(m, m.store("a", 0, CHAIN, 2, 0, [3, 4]))
    finish(m, old, "late and wrong")
    assert has(m) == [0, 1]


def test_abandoning_a_load_does_not_drop_what_has_been_stored_anew() -> None:
    m = manager()
    stored(m)
    (old,) = load(m, 0, 0, [1, 2])
    m.forget(CHAIN, 0)
    finish(m, m.store("a", 0, CHAIN, 2, 0, [3, 4]))
    m.abandon(old)
    assert has(m) == [0, 1]


def test_an_abandoned_load_is_found_no_more_but_keeps_its_slot() -> None:
    m = manager()
    stored(m)
    (late,) = load(m, 0, 0, [1, 2])
    m.abandon(late)
    assert has(m) == [2, 3, 4, 5, 6, 7]
    assert m.slots.in_use == 4
    finish(m, [late])
    assert m.slots.in_use == 3


def test_a_failed_store_is_never_served() -> None:
    m = manager()
    stores = m.store("a", 0, CHAIN, 4, 0, [1, 2, 3, 4])
    finish(m, stores, "disk full")
    assert has(m) == []
    assert m.slots.in_use == 0
    assert (m.counters.store_failed, m.counters.stored_blocks) == (2, 0)


def test_a_store_without_room_stays_due_and_is_counted_when_it_never_finds_any() -> None:
    m = manager(slots=3)
    blocks = list(range(8))
    assert len(m.store("x", 0, OTHER, 4, 0, [20, 21, 22, 23])) == 2
    first = m.store("a", 0, CHAIN, 4, 0, blocks)
    assert len(first) == 1  # all slots are being filled
    assert m.store("a", 0, CHAIN, 6, 0, blocks) == []
    finish(m, first)
    second = m.store("a", 0, CHAIN, 6, 0, blocks)
    assert [t.blocks for t in second] == [(2, 3)]  # the next in order, not the newest
    m.end("a", CHAIN, 6)
    assert m.counters.store_dropped == 1
    finish(m, second)


def test_of_a_chain_longer_than_the_host_tier_the_start_is_kept() -> None:
    m = manager(slots=5, groups=2)
    for group in (0, 1):
        stored(m, group=group)
        assert has(m, group) == [0, 1, 2, 3]
    assert m.counters.store_dropped == 2 * 2


def test_what_a_window_left_behind_for_want_of_room_counts_as_dropped() -> None:
    m = manager(stores_max=1)
    first = m.store("a", 0, CHAIN, 4, 0, [1, 2, 3, 4])
    assert [t.blocks for t in first] == [(1, 2)]
    finish(m, first)
    assert [t.blocks for t in m.store("a", 0, CHAIN, 8, 4, [5, 6, 7, 8])] == [(5, 6)]
    assert m.counters.store_dropped == 1
    m.end("a", CHAIN, 8)
    assert m.counters.store_dropped == 2


def test_what_a_request_never_had_is_not_counted_as_dropped() -> None:
    m = manager()
    m.store("a", 0, CHAIN, 8, 4, [5, 6, 7, 8])
    m.end("a", CHAIN, 8)
    assert m.counters.store_dropped == 0


def test_stores_under_way_are_bounded() -> None:
    m = manager(stores_max=2)
    stores = m.store("a", 0, CHAIN, 8, 0, list(range(8)))
    assert len(stores) == 2
    finish(m, stores[:1])
    assert len(m.store("a", 0, CHAIN, 8, 0, list(range(8)))) == 1


def test_losing_kv_takes_no_counter_back() -> None:
    m = manager()
    finish(m, m.store("a", 0, CHAIN, 8, 0, list(range(8))))
    m.forget(CHAIN, 2)
    m.end("a", CHAIN, 2)  # it had stored more than it has now
    assert m.counters.store_dropped == 0
    assert has(m) == [0, 1]


def test_forgetting_reaches_what_is_just_being_stored() -> None:
    m = manager()
    stores = m.store("a", 0, CHAIN, 8, 0, list(range(8)))
    m.forget(CHAIN, 3)
    finish(m, stores)
    assert has(m) == [0, 1]
    assert m.slots.in_use == 1


def test_clear_drops_everything_also_what_is_in_flight() -> None:
    m = manager()
    stored(m, full=4)
    loads = load(m, 0, 0, [1, 2])
    stores = m.store("a", 0, CHAIN, 8, 0, list(range(8)))
    m.clear()
    assert has(m) == []
    finish(m, loads + stores)
    assert has(m) == []
    assert m.slots.in_use == 0


def test_eviction_eats_a_chain_from_its_end() -> None:
    m = manager(slots=4)
    stored(m)
    other = [bytes([100 + i]) * 32 for i in range(2)]
    finish(m, m.store("b", 0, other, 2, 0, [1, 2]))
    assert has(m) == [0, 1, 2, 3, 4, 5]


def test_no_slots_no_stores() -> None:
    m = manager(slots=0)
    assert m.store("a", 0, CHAIN, 8, 0, list(range(8))) == []
    m.end("a", CHAIN, 8)
    assert m.counters.store_dropped == 0
    assert has(m) == []


def test_a_window_that_has_moved_on_skips_what_it_left_behind() -> None:
    m = manager()
    stores = m.store("a", 0, CHAIN, 8, 3, [13, 14, 15, 16, 17])  # blocks 0 to 2 are gone
    assert [t.blocks for t in stores] == [(14, 15), (16, 17)]


def test_the_end_writes_to_a_tier_what_is_just_being_written_to_another() -> None:
    near = Below("near", Hints())
    far = Below("far", Hints(), WritePolicy.ON_EVICT)
    m = OffloadManager(HostSlots(8), 2, below=[near, far])
    stored(m)
    writes = m.take_jobs()
    assert [job.tier for job in writes] == ["near"] * 4
    for job in writes[:2]:
        m.done(JobResult(job, OK))
    m.flush()
    last = m.take_jobs()
    assert [(job.tier, job.action) for job in last] == [("far", Action.WRITE)] * 4
    assert {job.key for job in last} == {job.key for job in writes}
    for job in writes[2:] + last:
        m.done(JobResult(job, OK))
    assert m.slots.pins == 0
