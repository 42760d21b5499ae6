"""Each policy against a slow model: lists that are searched and sorted, written from the paper.

A model keeps one record per chunk, and a stamp that says where it stands in its queue. What is in a
queue, and in which order, is looked up anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import InputError
from ebbtide.offload.policies import DEFAULT_POLICY, MQ, POLICIES, EvictionPolicy, make_policy

ALL = sorted(POLICIES)


@dataclass
class Record:
    queue: str
    stamp: int
    number: int = 0
    fresh: bool = True
    pinned: bool = False


class Model:
    """What all have in common: pins, and the first touch that only ends the add."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.records: dict[bytes, Record] = {}
        self.stamps = 0

    def stamp(self) -> int:
        self.stamps += 1
        return self.stamps

    def queue(self, name: str) -> list[bytes]:
        """The evictable chunks of a queue, next to go first."""
        free = [k for k, r in self.records.items() if r.queue == name and not r.pinned]
        return sorted(free, key=lambda key: self.records[key].stamp)

    def touch(self, key: bytes) -> None:
        record = self.records.get(key)
        if record is None:
            return
        if record.fresh:
            record.fresh = False
            record.stamp = self.stamp()
        else:
            self.used(record)

    def pin(self, key: bytes) -> None:
        self.records[key].pinned = True

    def unpin(self, key: bytes) -> None:
        self.records[key].pinned = False
        self.records[key].stamp = self.stamp()

    def remove(self, key: bytes) -> None:
        del self.records[key]

    def used(self, record: Record) -> None:
        raise NotImplementedError

    def add(self, key: bytes) -> None:
        raise NotImplementedError

    def victim(self) -> bytes | None:
        raise NotImplementedError


class LRUModel(Model):
    def add(self, key: bytes) -> None:
        self.records[key] = Record("all", self.stamp())

    def used(self, record: Record) -> None:
        record.stamp = self.stamp()

    def victim(self) -> bytes | None:
        for key in self.queue("all"):
            del self.records[key]
            return key
        return None


class ARCModel(Model):
    """Figure 4 of the paper, with REPLACE before the request instead of within it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0

    def used(self, record: Record) -> None:
        record.queue, record.stamp = "T2", self.stamp()

    def add(self, key: bytes) -> None:
        queue = "T2"
        if key in self.b1:
            delta = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.capacity)
            self.b1.remove(key)
        elif key in self.b2:
            delta = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.b2.remove(key)
        else:
            queue = "T1"
        self.records[key] = Record(queue, self.stamp())
        t1, t2 = len(self.queue("T1")), len(self.queue("T2"))
        self.b1 = self.b1[max(0, min(len(self.b1), t1 + len(self.b1) - self.capacity)) :]
        over = t1 + t2 + len(self.b1) + len(self.b2) - 2 * self.capacity
        self.b2 = self.b2[max(0, min(len(self.b2), over)) :]

    def victim(self) -> bytes | None:
        t1, t2 = self.queue("T1"), self.queue("T2")
        if not t1 and not t2:
            return None
        from_t1 = bool(t1) and (len(t1) > self.p or not t2)
        key = (t1 if from_t1 else t2)[0]
        (self.b1 if from_t1 else self.b2).append(key)
        del self.records[key]
        return key


class S3FIFOModel(Model):
    """Algorithm 1 of the paper; the number of a record is its frequency."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small_max = max(1, capacity // 10)
        self.ghosts: list[bytes] = []

    def used(self, record: Record) -> None:
        record.number = min(record.number + 1, 3)

    def add(self, key: bytes) -> None:
        queue = "M" if key in self.ghosts else "S"
        self.ghosts = [ghost for ghost in self.ghosts if ghost != key]
        self.records[key] = Record(queue, self.stamp())

    def victim(self) -> bytes | None:
        small, main = self.queue("S"), self.queue("M")
        if not small and not main:
            return None
        from_small = not main or len(small) >= self.small_max
        key = (small if from_small else main)[0]
        record = self.records[key]
        if from_small and record.number > 1:
            record.queue, record.number, record.stamp = "M", 0, self.stamp()
            return self.victim()
        if not from_small and record.number > 0:
            record.number, record.stamp = record.number - 1, self.stamp()
            return self.victim()
        if from_small:
            self.ghosts.append(key)
            main_max = self.capacity - self.small_max
            self.ghosts = self.ghosts[-main_max:] if main_max else []
        del self.records[key]
        return key


class MQModel(Model):
    """Section 4 of the paper with two queues; the number of a record is the time of its last use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.ghosts: list[tuple[bytes, int]] = []
        self.lifetime = float(max(1, capacity))
        self.now = 0

    def distance(self, last: int) -> None:
        up = self.lifetime < self.now - last
        self.lifetime = max(1.0, self.lifetime * (1.009 if up else 0.999))

    def adjust(self) -> None:
        for key in self.queue("Q1")[:1]:
            record = self.records[key]
            if record.number + self.lifetime < self.now:
                record.queue, record.stamp = "Q0", self.stamp()

    def used(self, record: Record) -> None:
        self.now += 1
        self.distance(record.number)
        record.queue, record.number, record.stamp = "Q1", self.now, self.stamp()
        self.adjust()

    def add(self, key: bytes) -> None:
        self.now += 1
        known = [last for ghost, last in self.ghosts if ghost == key]
        for last in known:
            self.distance(last)
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != key]
        self.records[key] = Record("Q1" if known else "Q0", self.stamp(), self.now)
        self.adjust()

    def victim(self) -> bytes | None:
        for key in self.queue("Q0") + self.queue("Q1"):
            self.ghosts.append((key, self.records.pop(key).number))
            self.ghosts = self.ghosts[max(0, len(self.ghosts) - 4 * self.capacity) :]
            return key
        return None


MODELS: dict[str, Callable[[int], Model]] = {
    "lru": LRUModel,
    "arc": ARCModel,
    "s3fifo": S3FIFOModel,
    "mq": MQModel,
}
KEYS = [bytes([i]) for i in range(40)]
# "bring" is what a store does: it makes room if need be, then adds
OPERATIONS = ["bring"] * 4 + ["touch"] * 4 + ["pin", "unpin", "remove", "victim"]
steps_of = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, len(KEYS) - 1)), min_size=60, max_size=300
)


def apply(policy: EvictionPolicy, model: Model, operation: str, key: bytes) -> None:
    record = model.records.get(key)
    if operation == "bring" and record is None:
        if len(model.records) >= model.capacity:
            assert policy.victim() == model.victim()
        policy.add(key)
        model.add(key)
    elif operation in ("bring", "touch"):
        policy.touch(key)
        model.touch(key)
    elif operation == "victim":
        assert policy.victim() == model.victim()
    elif record is not None and (operation == "remove" or record.pinned == (operation == "unpin")):
        getattr(policy, operation)(key)
        getattr(model, operation)(key)


@pytest.mark.parametrize("name", ALL)
@given(capacity=st.integers(1, 20), spread=st.integers(4, len(KEYS)), steps=steps_of)
def test_a_policy_equals_its_definition(
    name: str, capacity: int, spread: int, steps: list[tuple[str, int]]
) -> None:
    policy, model = make_policy(name, capacity), MODELS[name](capacity)
    for operation, number in steps:
        apply(policy, model, operation, KEYS[number % spread])
    left = len(model.records) - sum(record.pinned for record in model.records.values())
    for _ in range(left):
        assert policy.victim() == model.victim()
    assert policy.victim() is None


def full(name: str, count: int = 10) -> tuple[EvictionPolicy, list[bytes]]:
    """A policy whose chunks came and were touched in this order, so that the first goes first."""
    policy, keys = make_policy(name, count), KEYS[:count]
    for key in keys:
        policy.add(key)
    for key in keys:
        policy.touch(key)
    return policy, keys


def drained(policy: EvictionPolicy) -> list[bytes]:
    victims = []
    while (key := policy.victim()) is not None:
        victims.append(key)
    return victims


@pytest.mark.parametrize("name", ALL)
def test_a_pinned_chunk_is_no_victim_even_where_all_others_are_gone(name: str) -> None:
    policy, keys = full(name)
    policy.pin(keys[0])
    policy.touch(keys[0])
    policy.pin(keys[5])
    assert sorted(drained(policy)) == sorted({*keys} - {keys[0], keys[5]})
    policy.unpin(keys[5])
    assert policy.victim() == keys[5]
    policy.remove(keys[0])
    assert policy.victim() is None


@pytest.mark.parametrize("name", ALL)
def test_a_chunk_that_was_unpinned_goes_after_its_equals(name: str) -> None:
    policy, keys = full(name)
    policy.pin(keys[0])
    policy.unpin(keys[0])
    assert drained(policy) == [*keys[1:], keys[0]]


@pytest.mark.parametrize("name", ["arc", "s3fifo", "mq"])
def test_a_pin_is_no_use_and_a_touch_under_a_pin_is_one(name: str) -> None:
    """One that was used twice outlives a flood of newcomers; one that was only read twice does not."""
    policy, keys = full(name)
    read, used = keys[0], keys[1]
    for key in (read, used, read, used):
        policy.pin(key)
        if key == used:
            policy.touch(key)
        policy.unpin(key)
    gone = []
    for key in KEYS[10:22]:
        gone.append(policy.victim())
        policy.add(key)
    assert read in gone
    assert used not in gone


@pytest.mark.parametrize("name", ALL)
def test_the_touch_of_the_request_that_brought_them_lines_up_a_chain_from_its_end(
    name: str,
) -> None:
    policy = make_policy(name, 10)
    for key in KEYS[:10]:
        policy.add(key)
    for key in reversed(KEYS[:10]):
        policy.touch(key)
    assert drained(policy) == KEYS[9::-1]


@pytest.mark.parametrize("name", ["arc", "s3fifo", "mq"])
def test_an_evicted_chunk_that_comes_back_is_known_and_a_removed_one_is_not(name: str) -> None:
    policy, keys = full(name)
    assert policy.victim() == keys[0]
    policy.remove(keys[1])
    policy.add(keys[1])
    policy.add(keys[0])
    policy.add(KEYS[10])
    gone = drained(policy)
    assert gone.index(keys[1]) < gone.index(keys[0])


def test_mq_learns_how_long_to_wait_for_a_chunk() -> None:
    """Chunks that return every 75 uses are kept in 20 places, where 4 of 5 uses are of some that do not."""
    policy = MQ(20)
    held: set[bytes] = set()
    hits: list[bool] = []
    for time in range(6000):
        key = b"again %d" % (time // 5 % 15) if time % 5 == 0 else b"once %d" % time
        if time % 5 == 0:
            hits.append(key in held)
        if key not in held:
            if len(held) == 20:
                held.remove(policy.victim() or b"")
            policy.add(key)
            held.add(key)
        policy.touch(key)
    assert all(hits[200:])


def test_the_names() -> None:
    assert set(MODELS) == set(POLICIES)
    assert make_policy(DEFAULT_POLICY, 3).victim() is None
    with pytest.raises(InputError, match=r"'fifo'.*lru, arc, s3fifo, mq") as error:
        make_policy("fifo", 3)
    assert error.value.field == "policy"
