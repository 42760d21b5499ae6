"""Asking the tiers that take time: what is asked, who waits for how long, and who is not waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.engine import lookups as module
from ebbtide.engine.lookups import Chunking, Lookups
from ebbtide.keys import chunk_key
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.tiers.base import TierContext
from ebbtide.testing.tiers import MemoryTier

from .harness import params

CHUNKING = Chunking(bytes(32), block_size=4, blocks_per_chunk=2, num_groups=1)
CHUNK = CHUNKING.chunk_tokens
SOON_S = 20.0  # a test that waits so long for what should come has failed
NEVER_S = 1000.0


class Slow(MemoryTier):
    """Answers a lookup when it is let through: ``gate.release()`` for each call."""

    immediate = False

    def __init__(self, name: str = "slow", *, calls: int = 0) -> None:
        super().__init__(TierContext(bytes(32), 4096))
        self.name = name
        self.gate = threading.Semaphore(calls)
        self.asked: queue.Queue[list[bytes]] = queue.Queue()
        self.has: Callable[[bytes], bool] = lambda key: True
        self.error: Exception | None = None

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.put(list(keys))
        assert self.gate.acquire(timeout=SOON_S)
        if self.error:
            raise self.error
        return [self.has(key) for key in keys]


class Asking:
    """``Lookups``, and what it tells."""

    def __init__(self, tiers: Sequence[Slow], deadline_s: float, chunking: Chunking) -> None:
        self.found: queue.Queue[tuple[str, list[bytes]]] = queue.Queue()
        self.answered: queue.Queue[tuple[str, ...]] = queue.Queue()
        self.lookups = Lookups(
            tiers,
            chunking,
            deadline_s,
            lambda tier, keys: self.found.put((tier, keys)),
            self.answered.put,
        )

    def ask(self, name: str, tokens: int = 3 * CHUNK, salt: str = "") -> bool:
        return self.lookups.ask([name], prompt(tokens), salt)


Start = Callable[..., Asking]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time stands still unless a test moves it."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[tuple[Asking, Sequence[Slow]]] = []

    def start(*tiers: Slow, deadline_s: float = NEVER_S, chunking: Chunking = CHUNKING) -> Asking:
        asking = Asking(tiers, deadline_s, chunking)
        started.append((asking, tiers))
        return asking

    yield start
    for asking, tiers in started:
        for tier in tiers:
            tier.gate.release(1000)
        asking.lookups.close(SOON_S)
        assert not any(thread.is_alive() for thread in asking.lookups._threads)


def prompt(tokens: int) -> list[int]:
    return [i * i % 97 for i in range(tokens)]


def keys(tokens: int, salt: str = "", chunking: Chunking = CHUNKING) -> list[bytes]:
    return list(chunking.keys(prompt(tokens), salt))


def accepted(asking: Asking, name: str) -> bool:
    """Ask until a tier takes the question: it may need a moment to see that it is done with the last."""
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        if asking.ask(name):
            return True
        time.sleep(0.001)
    return False


class TestChunking:
    @pytest.mark.parametrize("salt", ["", "someone", "\ud800"])
    @pytest.mark.parametrize("num_groups", [1, 2])
    @pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 40])
    def test_its_keys_are_those_of_the_scheduler_and_the_offload(
        self, tokens: int, num_groups: int, salt: str
    ) -> None:
        chunking = Chunking(b"n" * 32, 4, 2, num_groups)
        groups = (KVGroup(), KVGroup(window=6))[:num_groups]
        offload = OffloadManager(HostSlots(4), 2, num_groups)
        config = SchedulerConfig(
            num_blocks=32, block_size=4, length_max=100, namespace=b"n" * 32, groups=groups
        )
        scheduler = Scheduler(config, offload)
        scheduler.add("a", prompt(tokens), params(1), cache_salt=salt)
        chain = scheduler.requests["a"].digest_upto(tokens // 4, 4)
        expected = [
            chunk_key(chain[2 * chunk + 1], group)
            for chunk in range(tokens // 8)
            for group in range(num_groups)
        ]
        assert keys(tokens, salt, chunking) == expected
        assert all(
            offload._key(group, chain, chunk) in expected
            for chunk in range(tokens // 8)
            for group in range(num_groups)
        )

    def test_another_salt_or_namespace_has_other_keys(self) -> None:
        other = Chunking(b"x" * 32, 4, 2, 1)
        all_of_them = [*keys(40), *keys(40, "salt"), *keys(40, "", other)]
        assert len(set(all_of_them)) == 15

    def test_they_are_made_as_they_are_wanted(self) -> None:
        long = range(10**9)  # hashing all of it would take hours
        assert len(next(CHUNKING.keys(long, ""))) == 34


class TestAnswers:
    def test_what_a_tier_has_is_told_and_then_that_it_has_answered(self, start: Start) -> None:
        tier = Slow(calls=1)
        mine = keys(3 * CHUNK)
        tier.has = lambda key: key != mine[1]
        asking = start(tier)
        assert asking.ask("a")
        assert asking.answered.get(timeout=SOON_S) == ("a",)
        assert asking.found.get_nowait() == ("slow", [mine[0], mine[2]])
        assert asking.lookups.next_deadline() is None
        assert asking.lookups.expired(time.monotonic() + 2 * NEVER_S) == []

    def test_a_miss_is_an_answer(self, start: Start) -> None:
        tier = Slow(calls=1)
        tier.has = lambda key: False
        asking = start(tier)
        assert asking.ask("a")
        assert asking.answered.get(timeout=SOON_S) == ("a",)
        assert asking.found.empty()

    def test_all_tiers_are_waited_for(self, start: Start) -> None:
        fast, slow = Slow("fast", calls=1), Slow("slow")
        asking = start(fast, slow)
        assert asking.ask("a")
        assert asking.found.get(timeout=SOON_S) == ("fast", keys(3 * CHUNK))
        assert asking.answered.empty()
        slow.gate.release()
        assert asking.answered.get(timeout=SOON_S) == ("a",)
        assert asking.found.get_nowait() == ("slow", keys(3 * CHUNK))

    def test_requests_of_one_prompt_are_one_question(self, start: Start) -> None:
        tier = Slow(calls=10)
        asking = start(tier)
        assert asking.lookups.ask(["a", "b"], prompt(CHUNK), "")
        assert asking.answered.get(timeout=SOON_S) == ("a", "b")
        assert tier.asked.qsize() == 1

    def test_a_prompt_without_a_full_chunk_waits_for_nothing(self, start: Start) -> None:
        tier = Slow()
        asking = start(tier)
        assert not asking.ask("a", CHUNK - 1)
        assert asking.lookups.next_deadline() is None
        assert tier.asked.empty()

    def test_a_long_prompt_is_asked_in_growing_parts(self, start: Start, monkeypatch) -> None:
        monkeypatch.setattr(module, "FIRST_KEYS", 2)
        monkeypatch.setattr(module, "BATCH_KEYS_MAX", 6)
        tier = Slow(calls=100)
        asking = start(tier)
        assert asking.ask("a", 20 * CHUNK)
        asking.answered.get(timeout=SOON_S)
        parts = [tier.asked.get_nowait() for _ in range(tier.asked.qsize())]
        assert [len(part) for part in parts] == [2, 4, 6, 6, 2]
        assert [key for part in parts for key in part] == keys(20 * CHUNK)

    def test_nothing_is_asked_behind_a_part_that_is_missing(
        self, start: Start, monkeypatch
    ) -> None:
        monkeypatch.setattr(module, "FIRST_KEYS", 2)
        there = keys(20 * CHUNK)[:2]
        tier = Slow(calls=100)
        tier.has = lambda key: key in there
        asking = start(tier)
        assert asking.ask("a", 20 * CHUNK)
        asking.answered.get(timeout=SOON_S)
        assert tier.asked.qsize() == 2
        assert asking.found.qsize() == 1

    def test_a_tier_that_raises_is_a_miss_and_is_asked_again(self, start: Start) -> None:
        tier = Slow(calls=10)
        tier.error = RuntimeError("somebody else's")
        asking = start(tier)
        assert asking.ask("a")
        assert asking.answered.get(timeout=SOON_S) == ("a",)
        assert asking.found.empty()
        tier.error = None
        assert asking.ask("b")
        assert asking.answered.get(timeout=SOON_S) == ("b",)
        assert asking.found.qsize() == 1


class TestDeadlines:
    def test_a_request_waits_no_longer_than_that_and_is_told_once(
        self, start: Start, clock: Clock
    ) -> None:
        tier = Slow()
        asking = start(tier)
        assert asking.ask("a")
        tier.asked.get(timeout=SOON_S)
        deadline = asking.lookups.next_deadline()
        assert deadline == clock.now + NEVER_S
        assert asking.lookups.expired(deadline - 0.001) == []
        assert asking.lookups.expired(deadline) == ["a"]
        assert asking.lookups.expired(deadline) == []
        tier.gate.release()
        asking.found.get(timeout=SOON_S)  # a hint for the next one
        assert asking.ask("b")
        tier.gate.release()
        assert asking.answered.get(timeout=SOON_S) == ("b",)

    def test_the_first_to_arrive_is_the_first_to_expire(self, start: Start, clock: Clock) -> None:
        asking = start(Slow())
        assert all(asking.ask(name) for name in "abc")
        end = clock.now + 2 * NEVER_S
        assert asking.lookups.expired(end) == ["a", "b", "c"]

    def test_a_tier_that_is_behind_is_not_waited_for(self, start: Start, clock: Clock) -> None:
        """Neither by those who come while it is asked, nor behind a row of those who wait for it."""
        stuck = Slow()
        asking = start(stuck, deadline_s=0.1)
        assert asking.ask("a")
        stuck.asked.get(timeout=SOON_S)
        clock.now += 0.06
        assert asking.ask("b")  # waits in the row
        clock.now += 0.06
        assert not asking.ask("c")  # the first is overdue, though the one in the row is not
        assert asking.lookups.expired(clock.now + 1) == ["a", "b"]

    def test_another_tier_is_waited_for_all_the_same(self, start: Start, clock: Clock) -> None:
        stuck, fast = Slow("stuck"), Slow("fast", calls=10)
        asking = start(stuck, fast, deadline_s=0.1)
        assert asking.ask("a")
        stuck.asked.get(timeout=SOON_S)
        asking.found.get(timeout=SOON_S)
        clock.now += 0.11
        assert asking.lookups.expired(clock.now) == ["a"]
        assert accepted(asking, "b")
        assert asking.answered.get(timeout=SOON_S) == ("b",)

    def test_when_it_has_caught_up_it_is_waited_for_again(self, start: Start, clock: Clock) -> None:
        """What became too late in the row is passed over without asking."""
        tier = Slow()
        asking = start(tier, deadline_s=0.1)
        assert asking.ask("a")
        tier.asked.get(timeout=SOON_S)
        assert asking.ask("b")
        clock.now += 0.11
        assert asking.lookups.expired(clock.now) == ["a", "b"]
        tier.gate.release(2)
        asking.found.get(timeout=SOON_S)
        assert accepted(asking, "c")
        assert asking.answered.get(timeout=SOON_S) == ("c",)
        assert tier.asked.qsize() == 1

    def test_no_more_of_a_long_prompt_is_asked_after_it(
        self, start: Start, clock: Clock, monkeypatch
    ) -> None:
        monkeypatch.setattr(module, "FIRST_KEYS", 2)
        tier = Slow()
        asking = start(tier, deadline_s=0.1)
        assert asking.ask("a", 20 * CHUNK)
        tier.asked.get(timeout=SOON_S)
        clock.now += 0.11
        tier.gate.release(1)
        assert len(asking.found.get(timeout=SOON_S)[1]) == 2
        asking.lookups.close(SOON_S)
        assert tier.asked.empty()


class TestClosing:
    def test_what_waits_in_the_row_is_not_asked_any_more(self, start: Start) -> None:
        tier = Slow()
        asking = start(tier)
        assert asking.ask("a")
        assert asking.ask("b")
        tier.asked.get(timeout=SOON_S)
        closer = threading.Thread(target=asking.lookups.close, args=(SOON_S,))
        closer.start()
        while not asking.lookups._closing:
            time.sleep(0.001)
        tier.gate.release(10)
        closer.join(SOON_S)
        assert tier.asked.empty()
        assert not asking.ask("c")

    def test_a_tier_that_hangs_is_left_behind(self, start: Start) -> None:
        tier = Slow()
        asking = start(tier)
        assert asking.ask("a")
        tier.asked.get(timeout=SOON_S)
        before = time.monotonic()
        asking.lookups.close(0.02)
        assert time.monotonic() - before < 5
