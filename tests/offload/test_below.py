"""What a tier below the host tier is asked, and what it is not asked."""

from __future__ import annotations

from ebbtide.core.plan import TransferResult
from ebbtide.keys import chunk_key
from ebbtide.offload.below import PROBE_S, RETRY_S, Action, Below, Hints, Job, JobResult
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.tiers.base import OK, Result, Status

KEY, OTHER = b"k" * 34, b"o" * 34
FAILED = Result(Status.FAILED, "it is down")


def tier(*keys: bytes) -> Below:
    hints = Hints()
    for key in keys:
        hints.add(key)
    return Below("tier", hints)


def take(below: Below) -> list[tuple[Action, bytes]]:
    jobs, below.jobs = below.jobs, []
    return [(job.action, job.key) for job in jobs]


def done(below: Below, action: Action, key: bytes = b"", result: Result = OK) -> None:
    below.done(JobResult(Job("tier", action, key), result))


def leave_alone(below: Below, key: bytes) -> None:
    """The tier is found to be slow when this chunk is wanted."""
    below.reading()
    below.was_read(OTHER, "", 10.0)
    assert not below.pays(key, 1.0)


def test_before_it_is_known_what_computing_takes_a_slow_tier_is_left_alone() -> None:
    fast, slow = tier(KEY), tier(KEY)
    for below, seconds in ((fast, 0.05), (slow, 5.0)):
        below.reading()
        below.was_read(OTHER, "", seconds)
    assert fast.pays(KEY, None)
    assert not slow.pays(KEY, None)
    assert slow.pays(KEY, 6.0)


def test_a_tier_that_stops_before_it_is_known_what_computing_takes_is_left_alone() -> None:
    below = tier(KEY)
    below.reading()
    below.was_read(OTHER, "", 0.001)
    below.tick(1.0)
    below.reading()
    assert below.pays(KEY, None)
    below.tick(2.0)
    assert not below.pays(KEY, None)


def test_a_slow_tier_is_probed_with_what_was_left_alone() -> None:
    below = tier(KEY)
    leave_alone(below, KEY)
    below.tick(PROBE_S)
    assert take(below) == [(Action.PROBE, KEY)]


def test_a_chunk_that_was_left_alone_and_then_dropped_is_no_probe() -> None:
    below = tier(KEY, OTHER)
    leave_alone(below, KEY)
    below.drop(KEY)
    assert take(below) == [(Action.DELETE, KEY)]
    below.tick(PROBE_S)
    assert take(below) == []
    assert not below.pays(OTHER, 1.0)
    below.tick(2 * PROBE_S)
    assert take(below) == [(Action.PROBE, OTHER)]


def test_a_tier_that_is_cleared_is_not_probed() -> None:
    below = tier(KEY)
    leave_alone(below, KEY)
    below.clear()
    below.tick(PROBE_S)
    assert take(below) == [(Action.CLEAR, b"")]


def test_a_lookup_does_not_bring_back_what_is_about_to_be_deleted() -> None:
    below = tier(KEY)
    below.drop(KEY)
    below.found(KEY)
    done(below, Action.DELETE, KEY)
    assert not below.has(KEY)
    assert below.wants(KEY)


def test_a_lookup_does_not_bring_back_what_is_about_to_be_cleared() -> None:
    below = tier(KEY)
    below.clear()
    below.found(KEY)
    done(below, Action.CLEAR)
    assert not below.has(KEY)
    assert below.wants(KEY)


def test_a_tier_is_not_used_until_a_clear_has_succeeded() -> None:
    below = tier(KEY)
    below.clear()
    done(below, Action.CLEAR, result=FAILED)
    assert take(below) == [(Action.CLEAR, b"")]
    assert not below.wants(KEY)
    assert below.next_deadline() == RETRY_S
    below.tick(RETRY_S)
    assert take(below) == [(Action.CLEAR, b"")]
    done(below, Action.CLEAR)
    assert below.wants(KEY)
    assert below.next_deadline() is None


def test_what_is_written_during_a_clear_is_deleted() -> None:
    below = tier()
    below.write(KEY, 0)
    below.clear()
    done(below, Action.CLEAR)
    assert take(below) == [(Action.WRITE, KEY), (Action.CLEAR, b"")]
    done(below, Action.WRITE, KEY)
    assert not below.has(KEY)
    assert take(below) == [(Action.DELETE, KEY)]
    done(below, Action.DELETE, KEY)
    assert below.wants(KEY)


def test_a_delete_waits_for_the_write_and_is_tried_again_when_the_chunk_is_wanted() -> None:
    below = tier()
    below.write(KEY, 0)
    below.drop(KEY)
    assert take(below) == [(Action.WRITE, KEY)]
    done(below, Action.WRITE, KEY)
    assert take(below) == [(Action.DELETE, KEY)]
    done(below, Action.DELETE, KEY, FAILED)
    assert not below.has(KEY)
    assert not below.wants(KEY)
    assert take(below) == [(Action.DELETE, KEY)]


def test_a_late_chunk_is_not_found_until_its_read_has_returned() -> None:
    below = tier(KEY)
    below.reading()
    below.late(KEY)
    assert not below.has(KEY)
    below.was_read(KEY, "", 1.0)
    assert below.has(KEY)


class Once(Hints):
    """Says once that it has a chunk."""

    def __contains__(self, key: bytes) -> bool:
        there = super().__contains__(key)
        self.discard(key)
        return there


def test_a_chunk_that_has_just_gone_is_not_read_from_where_it_is_barred() -> None:
    chain = [b"c" * 32]
    key = chunk_key(chain[0], 0)
    hints = Once()
    hints.add(key)
    near, far = Below("near", hints), Below("far", Hints())
    far.drop(key)
    manager = OffloadManager(HostSlots(1), 1, below=[near, far])
    assert manager.has(0, chain, 0)
    ((load,),) = manager.load(chain, [(0, 0, [7])])
    assert load.tier == "near"


def test_what_a_tier_that_stalls_was_to_bring_is_given_up_once() -> None:
    chain = [bytes([n]) * 32 for n in range(3)]
    below = tier(*(chunk_key(digest, 0) for digest in chain))
    manager = OffloadManager(HostSlots(2), 1, below=[below])
    manager.tick(0.0)
    ((first, second),) = manager.load(chain, [(0, 0, [5, 6])])
    at = manager.next_deadline()
    assert at is not None
    manager.tick(at - 0.01)
    assert manager.take_given_up() == []
    manager.finished(TransferResult(first, seconds=0.01))  # it goes on
    manager.tick(at)
    assert manager.take_given_up() == []
    later = manager.next_deadline()
    assert later is not None
    assert later > at
    manager.tick(later)
    assert manager.take_given_up() == [second.id]
    assert not manager.has(0, chain, 1)
    manager.tick(later + 1)
    assert manager.take_given_up() == []
    assert manager.next_deadline() is None
    manager.finished(TransferResult(second, seconds=5.0))
    assert manager.slots.in_use == 1  # the first one's: nobody expects the other


def test_what_is_called_back_is_found_again_and_makes_a_silent_tier_a_slow_one() -> None:
    chain = [bytes([n]) * 32 for n in range(2)]
    below = tier(*(chunk_key(digest, 0) for digest in chain))
    manager = OffloadManager(HostSlots(2), 1, below=[below])
    manager.computed(1, 0.01)
    manager.tick(0.0)
    ((first, second),) = manager.load(chain, [(0, 0, [5, 6])])
    manager.tick(3.0)
    assert manager.take_given_up() == [first.id, second.id]
    manager.finished(TransferResult(second, "called back", tried=False))
    assert below.has(second.key)
    assert not below.has(first.key)
    assert below.chunk_seconds is None  # the other read will tell
    manager.finished(TransferResult(first, "called back", tried=False))
    assert below.chunk_seconds == 3.0
    assert not manager.has(0, chain, 0)  # it is there, and does not pay
    assert manager.take_jobs() == []  # nothing is wrong with it
    assert manager.slots.in_use == 0
    assert below.counters.read_failed == manager.counters.load_failed == 0


def test_what_has_come_while_a_step_ran_is_no_silence() -> None:
    chain = [bytes([n]) * 32 for n in range(2)]
    below = tier(*(chunk_key(digest, 0) for digest in chain))
    manager = OffloadManager(HostSlots(2), 1, below=[below])
    manager.tick(0.0)
    ((first, _),) = manager.load(chain, [(0, 0, [5, 6])])
    manager.finished(TransferResult(first, seconds=0.01))  # the engine looks after a long step
    manager.tick(9.0)
    assert manager.take_given_up() == []
    manager.tick(9.1)
    assert manager.take_given_up() == []
    manager.tick(18.0)
    assert len(manager.take_given_up()) == 1
