from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.offload.tiers.breaker import LEGAL, Breaker, BreakerConfig, State, Ticket

CONFIG = BreakerConfig(failures_max=3, wait_s=1.0, wait_s_max=10.0, probe_s=5.0)


def fail(breaker: Breaker, now: float) -> None:
    ticket = breaker.admit(now)
    assert ticket is not None
    breaker.failed(ticket, now)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        fail(breaker, now)
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(CONFIG)
    fail(breaker, 0.0)
    fail(breaker, 0.0)
    ticket = breaker.admit(0.0)
    assert ticket is not None
    breaker.succeeded(ticket, 0.0)
    fail(breaker, 0.0)
    fail(breaker, 0.0)
    assert breaker.state is State.CLOSED
    fail(breaker, 0.0)
    assert breaker.state is State.OPEN
    assert breaker.admit(0.99) is None


def test_one_call_goes_through_when_the_wait_is_over() -> None:
    breaker = opened()
    ticket = breaker.admit(1.0)
    assert ticket is not None
    assert breaker.state is State.HALF_OPEN
    assert breaker.admit(1.0) is None
    breaker.succeeded(ticket, 1.1)
    assert breaker.state is State.CLOSED
    assert breaker.admit(1.1) is not None


def test_waits_double_up_to_the_limit_while_it_fails() -> None:
    breaker, now = opened(), 0.0
    for wait_s in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        assert breaker.admit(now + wait_s - 0.01) is None
        now += wait_s
        fail(breaker, now)


def test_a_short_recovery_does_not_shorten_the_wait() -> None:
    breaker = opened()
    fail(breaker, 1.0)  # the next wait is 2 s
    ticket = breaker.admit(3.0)
    assert ticket is not None
    breaker.succeeded(ticket, 3.0)
    for _ in range(3):
        fail(breaker, 4.0)
    assert breaker.admit(4.0 + 3.99) is None
    assert breaker.admit(4.0 + 4.0) is not None


def test_a_long_recovery_does() -> None:
    breaker = opened()
    fail(breaker, 1.0)
    ticket = breaker.admit(3.0)
    assert ticket is not None
    breaker.succeeded(ticket, 3.0)
    for _ in range(3):
        fail(breaker, 13.0)
    assert breaker.admit(14.0) is not None


def test_what_comes_late_is_ignored() -> None:
    breaker = Breaker(CONFIG)
    late = [breaker.admit(0.0) for _ in range(4)]
    for _ in range(3):
        fail(breaker, 0.0)
    probe = breaker.admit(1.0)
    for ticket in late:
        assert ticket is not None
        breaker.failed(ticket, 1.0)
        breaker.succeeded(ticket, 1.0)
    assert breaker.state is State.HALF_OPEN
    assert probe is not None
    breaker.succeeded(probe, 1.0)
    assert breaker.state is State.CLOSED


def test_a_lost_try_is_followed_by_another() -> None:
    breaker = opened()
    lost = breaker.admit(1.0)
    assert breaker.admit(5.99) is None
    again = breaker.admit(6.0)
    assert lost is not None
    assert again is not None
    breaker.failed(lost, 6.0)
    assert breaker.state is State.HALF_OPEN


def test_it_can_be_tripped() -> None:
    breaker = Breaker(CONFIG)
    breaker.trip(0.0)
    breaker.trip(0.5)
    assert breaker.admit(0.99) is None
    assert breaker.admit(1.0) is not None


@pytest.mark.parametrize("wrong", [{"failures_max": 0}, {"wait_s": 0.0}, {"wait_s": 99.0}])
def test_a_config_that_makes_no_sense_is_a_bug(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        BreakerConfig(**wrong)


EVENTS = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.sampled_from(["admit", "succeeded", "failed", "trip"])),
    max_size=80,
)


@given(EVENTS, st.randoms(use_true_random=False))
def test_properties(events: list[tuple[float, str]], rng) -> None:
    """At any time: legal moves only; while it is not closed, at most one call per wait or lost try; and once
    all calls succeed it is closed after the longest wait at most."""
    breaker, now, out, admitted_at = Breaker(CONFIG), 0.0, [], float("-inf")
    for gap, event in events:
        now += gap
        before = breaker.state
        if event == "trip":
            breaker.trip(now)
        elif event == "admit":
            ticket = breaker.admit(now)
            if ticket is not None:
                out.append(ticket)
                if before is State.HALF_OPEN:
                    assert now - admitted_at >= CONFIG.probe_s
                admitted_at = now
            else:
                assert before is not State.CLOSED
        elif out:
            ticket: Ticket = out.pop(rng.randrange(len(out)))
            getattr(breaker, event)(ticket, now)
        assert breaker.state is before or breaker.state in LEGAL[before]
    now += max(CONFIG.wait_s_max, CONFIG.probe_s)
    ticket = breaker.admit(now)
    assert ticket is not None
    breaker.succeeded(ticket, now)
    assert breaker.state is State.CLOSED
