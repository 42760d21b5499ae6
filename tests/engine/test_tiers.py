"""The step loop with tiers below the host tier: what they keep comes back, and nothing waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from ebbtide.engine.loop import EngineLoop
from ebbtide.engine.tiers import OpenTiers
from ebbtide.offload import below
from ebbtide.offload.below import WritePolicy
from ebbtide.offload.tiers.base import Result, TierStats
from ebbtide.testing.tiers import Fault, FaultyTier, MemoryPlace, MemoryTier

from .harness import CONTEXT, Heard, expected, params, prompt, running, wait_until_stored

LONG = 60  # tokens of a prompt: 7 full chunks of 8 tokens


class Remote(MemoryTier):
    """A tier whose lookups take time; ``gate`` holds them back while it is not set."""

    immediate = False

    def __init__(self, place: MemoryPlace) -> None:
        super().__init__(CONTEXT, place)
        self.gate = threading.Event()
        self.gate.set()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self.gate.wait(20)
        return super().lookup(keys)


def say(loop: EngineLoop, heard: Heard, name: str, number: int, count: int = 4) -> dict[str, int]:
    """Ask for a prompt; check its tokens; return where the prompt came from."""
    loop.add([(name, prompt(number, LONG), params(count))])
    heard.wait(name)
    assert heard.tokens[name] == expected(number, count, LONG)
    report = heard.ends[name].report
    assert report is not None
    assert sum(report.sources.values()) == LONG
    return report.sources


def wait_for_jobs(loop: EngineLoop) -> None:
    wait_until_stored(loop)
    end = time.monotonic() + 20
    while loop.inspect(lambda scheduler: loop._offload.jobs_in_flight):
        assert time.monotonic() < end, "jobs that never end"
        time.sleep(0.001)


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("immediate", [True, False])
@pytest.mark.parametrize("write", [WritePolicy.WRITE_THROUGH, WritePolicy.ON_EVICT])
def test_a_prompt_is_not_computed_again_after_a_restart(
    overlap: int, immediate: bool, write: WritePolicy
) -> None:
    place = MemoryPlace()
    for life in range(2):
        heard = Heard()
        tier = MemoryTier(CONTEXT, place) if immediate else Remote(place)
        with running(heard, overlap=overlap, tiers=[tier], write=write) as loop:
            sources = say(loop, heard, "a", 1)
        assert sources["computed"] == (LONG if life == 0 else LONG - 56)
        assert sources.get("memory", 0) == (0 if life == 0 else 56)


def test_what_the_host_tier_has_no_room_for_comes_back_from_below() -> None:
    heard = Heard()
    with running(heard, blocks=24, slots=8, tiers=[MemoryTier(CONTEXT)]) as loop:
        for number in (1, 2, 3, 4):
            say(loop, heard, f"a{number}", number)
            wait_for_jobs(loop)
        assert say(loop, heard, "again", 1)["computed"] < 20


def test_a_tier_that_is_off_is_only_read() -> None:
    place = MemoryPlace()
    with running(
        heard := Heard(), tiers=[MemoryTier(CONTEXT, place)], write=WritePolicy.OFF
    ) as loop:
        say(loop, heard, "a", 1)
    assert not place.chunks


def test_a_lookup_that_takes_too_long_is_a_miss() -> None:
    place = MemoryPlace()
    with running(heard := Heard(), tiers=[MemoryTier(CONTEXT, place)]) as loop:
        say(loop, heard, "a", 1)
    remote = Remote(place)
    remote.gate.clear()
    with running(heard := Heard(), tiers=[remote], lookup_deadline_s=0.05) as loop:
        assert say(loop, heard, "a", 1)["computed"] == LONG
        start = time.monotonic()
        say(loop, heard, "b", 2)  # nobody waits for a tier that is behind
        remote.gate.set()
        assert time.monotonic() - start < 20


def test_a_request_can_be_aborted_while_its_lookup_is_under_way() -> None:
    remote = Remote(MemoryPlace())
    remote.gate.clear()
    with running(heard := Heard(), tiers=[remote]) as loop:
        loop.add([("a", prompt(1, LONG), params(4))])
        loop.end(["a"])
        heard.wait("a")
        remote.gate.set()
        say(loop, heard, "b", 2)


def test_a_reset_empties_the_tiers_too() -> None:
    place = MemoryPlace()
    with running(heard := Heard(), tiers=[MemoryTier(CONTEXT, place)]) as loop:
        say(loop, heard, "a", 1)
        wait_for_jobs(loop)
        assert place.chunks
        loop.reset()
        assert say(loop, heard, "again", 1)["computed"] == LONG


def test_one_tier_can_be_emptied_alone() -> None:
    place = MemoryPlace()
    with running(heard := Heard(), tiers=[MemoryTier(CONTEXT, place)]) as loop:
        say(loop, heard, "a", 1)
        wait_for_jobs(loop)
        loop.reset(["memory"])
        wait_for_jobs(loop)
        assert not place.chunks
        assert say(loop, heard, "again", 1)["computed"] < LONG


def test_a_slow_tier_is_left_alone_until_it_is_fast_again() -> None:
    place = MemoryPlace()
    with running(heard := Heard(), tiers=[MemoryTier(CONTEXT, place)]) as loop:
        for number in range(1, 13):
            say(loop, heard, f"a{number}", number)
    is_slow = True
    reads: list[bytes] = []

    def fault(method: str, key: bytes) -> Fault | None:
        reads.extend([key] if method == "read" else [])
        return Fault.SLOW if method == "read" and is_slow else None

    tier = FaultyTier(MemoryTier(CONTEXT, place), fault, delay_s=0.05)
    # a chunk takes 0.01 s to compute, and 0.05 s to read on each of two threads
    with running(heard := Heard(), blocks=20, slots=2, tiers=[tier], step_seconds=0.04) as loop:
        say(loop, heard, "warm", 20)  # now the speed of computing is known
        assert say(loop, heard, "first", 1).get("memory", 0) > 0
        tried = len(reads)
        for number in (2, 3, 4):
            assert say(loop, heard, f"b{number}", number)["computed"] == LONG
        assert len(reads) <= tried + 1  # but for a probe
        is_slow = False
        for turn in range(400):
            if say(loop, heard, f"c{turn}", 5 + turn % 8).get("memory"):
                return
            time.sleep(0.01)
        raise AssertionError("the tier is never asked again")


def test_a_tier_that_hangs_does_not_keep_the_engine_from_closing() -> None:
    hanging = threading.Event()

    class Hanging(MemoryTier):
        def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
            hanging.wait(20)
            return super().write(keys, buffers)

    with running(heard := Heard(), tiers=[Hanging(CONTEXT)]) as loop:
        say(loop, heard, "a", 1)
        start = time.monotonic()
        loop.close(0.2)
        assert time.monotonic() - start < 10
        hanging.set()
        loop._mover.close()
        loop._take_in()


class Panic(BaseException):
    """What a client that is written in another language may raise."""


def breaking(method: str, answer: object) -> type[MemoryTier]:
    """A kind of tier one of whose methods raises, or answers what it must not."""

    def broken(self: MemoryTier, *arguments: object) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return type("Broken", (MemoryTier,), {method: broken})


@pytest.mark.parametrize("immediate", [True, False])
@pytest.mark.parametrize(
    "answer", [RuntimeError("a bug"), Panic(), None, [], [None], [True] * 9], ids=str
)
@pytest.mark.parametrize("method", ["lookup", "read", "write", "delete", "clear"])
def test_a_tier_that_breaks_its_contract_harms_nobody(
    method: str, answer: object, immediate: bool
) -> None:
    if method == "lookup" and immediate and isinstance(answer, Panic):
        pytest.skip("it runs on the engine's own thread, which lets what is no Exception through")
    place = MemoryPlace()
    with running(heard := Heard(), tiers=[MemoryTier(CONTEXT, place)]) as loop:
        say(loop, heard, "a", 1)
    tier = breaking(method, answer)(CONTEXT, place)
    tier.immediate = immediate
    close_s = 0.05 if method == "clear" else 1.0  # it is tried again and again
    with running(heard := Heard(), blocks=20, slots=4, tiers=[tier], close_s=close_s) as loop:
        loop._offload.below[0].try_out()
        say(loop, heard, "b", 1)
        say(loop, heard, "c", 2)
        loop.reset()
        say(loop, heard, "d", 1)
        wait_for_jobs(loop)
    assert loop._failure is None


class Named(MemoryTier):
    def __init__(self, name: str) -> None:
        super().__init__(CONTEXT)
        self.name = name


@pytest.mark.parametrize("method", ["stats", "close"])
@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_does_not_depend_on_what_a_tier_does_then(method: str, hangs: bool) -> None:
    near, far = Named("near"), Named("far")
    go_on = threading.Event()

    def bad() -> TierStats:
        if hangs:
            go_on.wait(20)
        raise RuntimeError("a bug")

    setattr(near, method, bad)
    start = time.monotonic()
    kept = OpenTiers((near, far)).close(0.5)
    assert time.monotonic() - start < 5
    assert kept.keys() == ({"far"} if hangs else {"near", "far"})
    assert far._is_closed
    go_on.set()


def test_a_tier_that_cannot_say_how_it_is_is_down() -> None:
    near, odd, far = Named("near"), Named("odd"), Named("far")
    near.stats = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    odd.stats = lambda: None  # type: ignore[method-assign,assignment,return-value]
    states = {name: stats.state for name, stats in OpenTiers((near, odd, far)).stats().items()}
    assert states["near"].startswith("down: ZeroDivisionError")
    assert states["odd"].startswith("down: ")
    assert states["far"] == "up"


@pytest.mark.parametrize("failures", [1, 10**9])
def test_the_end_waits_for_what_a_reset_has_to_empty(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stayed would be found by the next engine."""
    monkeypatch.setattr(below, "RETRY_S", 0.01)
    place = MemoryPlace()
    left = iter(range(failures))

    def fault(method: str, key: bytes) -> Fault | None:
        return Fault.FAIL if method == "clear" and next(left, None) is not None else None

    tier = FaultyTier(MemoryTier(CONTEXT, place), fault)
    with running(heard := Heard(), tiers=[tier], close_s=0.2 if failures > 1 else 10.0) as loop:
        say(loop, heard, "a", 1)
        wait_for_jobs(loop)
        loop.reset()
    assert bool(place.chunks) == (failures > 1)
    assert loop._offload.uncleared == (["memory"] if failures > 1 else [])


def test_loads_of_a_tier_that_stalls_are_not_waited_for() -> None:
    place = MemoryPlace()
    with running(heard := Heard(), tiers=[MemoryTier(CONTEXT, place)]) as loop:
        say(loop, heard, "a", 1)
    going_on = threading.Event()

    class Stalling(MemoryTier):
        def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
            going_on.wait(20)
            return super().read(keys, buffers)

    start = time.monotonic()
    with running(heard := Heard(), tiers=[Stalling(CONTEXT, place)], fail_on_lost_kv=True) as loop:
        assert say(loop, heard, "a", 1)["computed"] == LONG  # and it is no lost KV
        assert say(loop, heard, "b", 2)["computed"] == LONG
        assert time.monotonic() - start < 15
        going_on.set()
        wait_for_jobs(loop)
