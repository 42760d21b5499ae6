"""The scheduler's own book-keeping. What it does for requests is in test_scenarios and its neighbours."""

from __future__ import annotations

import pytest

from ebbtide.core.ledger import COMPUTED, DEVICE, HOST
from ebbtide.core.plan import StepOutcome, TokenLogprob
from ebbtide.core.request import FinishReason

from .harness import Harness, tokens


def test_repr_tells_how_full_it_is() -> None:
    h = Harness(num_blocks=10, length_max=40, batch_max=1)
    h.add("a", tokens(9))
    h.add("b", tokens(9, start=1))
    h.schedule()
    assert repr(h.scheduler) == (
        "<Scheduler 1 running, 0 loading, 1 waiting, 0 draining, "
        "<BlockPool 3 in use, 0 cached, 7 blank>>"
    )


def test_gauges_follow_a_request() -> None:
    h = Harness()
    h.warm("x", tokens(9), device=False)
    scheduler = h.scheduler
    h.add("a", tokens(9))
    assert (scheduler.waiting, scheduler.loading, scheduler.running) == (1, 0, 0)
    h.schedule()
    assert (scheduler.waiting, scheduler.loading, scheduler.running) == (0, 1, 0)
    h.move(*h.loads)
    h.schedule()
    assert (scheduler.waiting, scheduler.loading, scheduler.running) == (0, 0, 1)
    h.end("a")
    assert (scheduler.waiting, scheduler.loading, scheduler.running) == (0, 0, 1)  # it drains
    h.apply()
    assert (scheduler.waiting, scheduler.loading, scheduler.running) == (0, 0, 0)


def test_counters_are_the_sums_of_the_reports() -> None:
    h = Harness(num_blocks=12, length_max=44)
    for name in "abc":
        h.add(name, tokens(9, start=ord(name) % 2), max_tokens=12)
    h.run()
    counters = h.scheduler.counters
    for source in (DEVICE, HOST, COMPUTED):
        total = sum(h.report(name)[source] for name in "abc")
        assert counters.prompt_tokens[source] == total
    assert counters.generated_tokens == 36
    assert counters.finished[FinishReason.LENGTH] == 3
    recomputed = sum(h.report(name)["preempted"] for name in "abc")
    assert sum(counters.recomputed_tokens.values()) == recomputed


def test_nothing_to_do_is_no_plan() -> None:
    h = Harness()
    assert h.schedule() is None
    assert h.scheduler.next_deadline() is None
    assert h.scheduler.counters.steps == 0


def test_ending_an_unknown_request_is_nothing() -> None:
    h = Harness()
    h.end("nobody")
    assert h.heard == []


def test_logprobs_reach_the_request_that_asked() -> None:
    h = Harness()
    h.add("a", tokens(3), max_tokens=2)
    h.add("b", tokens(3, start=1), max_tokens=2)
    h.schedule()
    logprob = TokenLogprob(5, -0.5, ())
    outputs = h.scheduler.apply(h.plans.popleft(), StepOutcome([4, 5], {1: logprob}))
    assert [(o.request_id, o.token, o.logprob) for o in outputs] == [
        ("a", 4, None),
        ("b", 5, logprob),
    ]


def test_a_failed_load_keeps_its_place_in_the_queue() -> None:
    h = Harness(batch_max=1)
    h.warm("x", tokens(9), device=False)
    h.add("a", tokens(9))
    h.add("b", tokens(9, start=4))
    h.schedule()
    h.move(h.loads[0], error="gone")
    h.move(*h.loads)
    h.run()
    assert [o.request_id for o in h.heard if o.finish] == ["x", "a", "b"]


def test_one_that_does_not_fit_is_matched_again_only_when_something_became_free() -> None:
    h = Harness(num_blocks=10, length_max=40, host_slots=0)
    h.add("a", tokens(20), max_tokens=16)
    h.step()
    h.add("b", tokens(30, start=3), max_tokens=4)
    matched: list[str] = []
    original = h.scheduler.kv.match
    h.scheduler.kv.match = lambda r: (matched.append(r.id), original(r))[1]  # type: ignore[method-assign]
    while "a" in h.scheduler.requests:
        h.step()
    assert matched == ["b"]
    h.run()
    h.check_drained()


def test_without_a_cap_the_output_is_as_long_as_the_model_or_the_pool_allows() -> None:
    h = Harness(length_max=30)
    h.add("a", tokens(9), max_tokens=None)
    h.run()
    assert len(h.output("a")) == 21
    small = Harness(num_blocks=4, length_max=30)
    small.add("a", tokens(9), max_tokens=None)
    small.run()
    assert len(small.output("a")) == 8  # 16 positions have KV, the last token needs none
    assert small.finish("a") is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [1, 2])
def test_more_requests_than_step_tokens(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=3, batch_max=8)
    for number in range(8):
        h.add(f"r{number}", tokens(4, start=number))
    h.run()
    assert all(h.finish(f"r{number}") for number in range(8))
    h.check_drained()
