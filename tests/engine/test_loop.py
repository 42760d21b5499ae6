"""The step loop with real threads, the witness in place of a model, and the oracle as its judge."""

from __future__ import annotations

import threading
import time

import pytest

from ebbtide.core.output import Output
from ebbtide.core.plan import Direction, StepOutcome, StepPlan, Transfer
from ebbtide.core.request import FinishReason
from ebbtide.core.scheduler import Scheduler
from ebbtide.errors import EngineStopped, QueueFull

from .harness import Heard, expected, params, prompt, running, wait_until_stored


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("sync_max", [0, 100])
def test_many_requests_through_a_small_pool_get_their_tokens(overlap: int, sync_max: int) -> None:
    heard = Heard()
    with running(heard, overlap=overlap, blocks=24, sync_max=sync_max) as loop:
        for turn in range(3):
            for number in range(8):
                loop.add([(f"{turn}/{number}", prompt(number), params(12))])
        ids = [f"{turn}/{number}" for turn in range(3) for number in range(8)]
        heard.wait(*ids)
    for name in ids:
        assert heard.tokens[name] == expected(int(name[2:]), 12)


def test_kv_comes_back_from_the_host_tier() -> None:
    heard = Heard()
    with running(heard, blocks=24) as loop:
        for number in (1, 2, 3, 4):
            loop.add([(f"a{number}", prompt(number, 60), params(4))])
            heard.wait(f"a{number}")
        loop.add([("again", prompt(1, 60), params(4))])
        heard.wait("again")
    report = heard.ends["again"].report
    assert report is not None
    counts = dict(report.sources)
    assert counts["host"] > 0
    assert sum(counts.values()) == 60
    assert heard.tokens["again"] == expected(1, 4, 60)


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_stop_from_the_listener_ends_the_request_with_that_token(overlap: int) -> None:
    heard = Heard(stop=lambda output: output.token is not None and len(heard.tokens["a"]) == 3)
    with running(heard, overlap=overlap) as loop:
        loop.add([("a", prompt(1), params(50))])
        heard.wait("a")
    assert heard.ends["a"].finish is FinishReason.STOP
    assert heard.tokens["a"] == expected(1, 3)
    report = heard.ends["a"].report
    assert report is not None
    assert report.output_tokens == 3


def test_a_failed_load_on_the_thread_is_recomputed() -> None:
    def fault(transfer: Transfer) -> str:
        return "the memory is gone" if transfer.direction is Direction.LOAD else ""

    heard = Heard()
    with running(heard, blocks=24, fault=fault) as loop:
        for number in (1, 2, 3, 4):
            loop.add([(f"a{number}", prompt(number, 60), params(4))])
            heard.wait(f"a{number}")
        loop.add([("again", prompt(1, 60), params(4))])
        heard.wait("again")
    assert heard.tokens["again"] == expected(1, 4, 60)


def test_a_load_past_its_deadline_wakes_the_idle_engine() -> None:
    release = threading.Event()

    def fault(transfer: Transfer) -> str:
        if transfer.direction is Direction.LOAD:
            release.wait(20)
        return ""

    heard = Heard()
    with running(heard, blocks=40, fault=fault, load_deadline_s=0.05) as loop:
        for number in (1, 2, 3, 4):
            loop.add([(f"a{number}", prompt(number, 60), params(4))])
            heard.wait(f"a{number}")
        wait_until_stored(loop)  # behind the load that hangs, stores would keep their blocks
        try:
            loop.add([("again", prompt(1, 60), params(4))])
            heard.wait("again")
        finally:
            release.set()
    assert heard.tokens["again"] == expected(1, 4, 60)


def test_a_step_that_keeps_failing_ends_its_requests_and_the_engine_lives_on() -> None:
    def step_fault(plan: StepPlan) -> BaseException | None:
        bad = any(row.request_id == "bad" for row in plan.rows)
        return RuntimeError("out of memory") if bad else None

    heard = Heard()
    with running(heard, step_fault=step_fault, max_step_retries=2) as loop:
        loop.add([("bad", prompt(1), params(5))])
        heard.wait("bad")
        loop.add([("good", prompt(2), params(5))])
        heard.wait("good")
    assert heard.ends["bad"].finish is FinishReason.ERROR
    assert "out of memory" in heard.ends["bad"].message
    assert heard.tokens["good"] == expected(2, 5)


def test_abort_from_another_thread() -> None:
    heard = Heard()
    with running(heard) as loop:
        loop.add([("a", prompt(1), params(150))])
        heard.wait_for_token("a")
        loop.end(["a"])
        heard.wait("a")
        loop.end(["a", "unknown"])
    count = len(heard.tokens["a"])
    assert heard.ends["a"].finish in (FinishReason.ABORT, FinishReason.LENGTH)
    assert heard.tokens["a"] == expected(1, count)


def test_add_is_all_or_nothing_and_a_full_queue_says_so() -> None:
    gate = threading.Event()

    def step_fault(plan: StepPlan) -> None:
        gate.wait(20)

    heard = Heard()
    with running(heard, step_fault=step_fault, waiting_max=3) as loop:
        loop.add([("first", prompt(1), params(2))])
        time.sleep(0.05)
        with pytest.raises(QueueFull, match="3 requests are waiting"):
            loop.add((f"b{number}", prompt(number), params(2)) for number in range(5))
        gate.set()
        heard.wait("first")
    assert {name: end.finish for name, end in heard.ends.items() if name != "first"} == {
        "b0": FinishReason.ABORT,
        "b1": FinishReason.ABORT,
        "b2": FinishReason.ABORT,
    }


def test_closing_aborts_what_is_unfinished_and_refuses_what_comes_later() -> None:
    heard = Heard()
    with running(heard) as loop:
        loop.add([("a", prompt(1), params(150))])
        heard.wait_for_token("a")
        loop.close()
        assert "a" in heard.ends
        with pytest.raises(EngineStopped, match="it was closed"):
            loop.add([("b", prompt(1), params(2))])


def test_a_bug_in_the_engine_leaves_nobody_waiting() -> None:
    heard = Heard()
    with running(heard) as loop:

        def broken(now: float) -> None:
            raise ZeroDivisionError("a bug")

        loop.inspect(lambda scheduler: setattr(scheduler, "schedule", broken))
        loop.add([("a", prompt(1), params(5))])
        heard.wait("a")
        assert heard.ends["a"].finish is FinishReason.ERROR
        assert "a bug" in heard.ends["a"].message
        with pytest.raises(EngineStopped, match="a bug"):
            loop.add([("b", prompt(1), params(2))])
        with pytest.raises(EngineStopped, match="a bug"):
            loop.inspect(lambda scheduler: scheduler.running)


def test_a_bug_behind_an_end_that_nobody_has_heard_of_yet() -> None:
    heard = Heard()
    with running(heard) as loop:

        def broken(now: float) -> None:
            raise ZeroDivisionError("a bug")

        def break_after_the_end(scheduler: Scheduler) -> None:
            apply = scheduler.apply

            def applying(plan: StepPlan, outcome: StepOutcome) -> list[Output]:
                outputs = apply(plan, outcome)
                if any(output.finish for output in outputs):
                    setattr(scheduler, "schedule", broken)  # noqa: B010
                return outputs

            setattr(scheduler, "apply", applying)  # noqa: B010

        loop.inspect(break_after_the_end)
        loop.add([("a", prompt(1), params(2)), ("b", prompt(2), params(50))])
        heard.wait("a", "b")
    assert heard.ends["a"].finish is heard.ends["b"].finish is FinishReason.ERROR


def test_a_listener_that_raises_for_one_request_silences_no_other() -> None:
    def raises(output: Output) -> bool:
        if output.request_id == "b":
            raise ZeroDivisionError("a bug")
        return False

    heard = Heard(raises)
    with running(heard) as loop:
        loop.add([(name, prompt(number), params(50)) for number, name in enumerate("abc", 1)])
        heard.wait("a", "b", "c")
    assert "a bug" in heard.ends["a"].message
    assert "a bug" in heard.ends["c"].message


def test_a_reset_wakes_requests_that_waited_for_what_it_forgot() -> None:
    release = threading.Event()

    def fault(transfer: Transfer) -> str:
        if transfer.direction is Direction.LOAD:
            release.wait(20)
        return ""

    heard = Heard()
    with running(heard, blocks=60, slots=80, fault=fault) as loop:
        for number in range(1, 10):  # enough to push the first one off the device
            loop.add([(f"a{number}", prompt(number, 60), params(4))])
            heard.wait(f"a{number}")
        loop.add([("loads", prompt(1, 60), params(4))])
        loop.add([("parked", prompt(1, 60), params(4))])
        deadline = time.monotonic() + 20
        while loop.inspect(lambda scheduler: (scheduler.loading, scheduler.waiting)) != (1, 1):
            assert time.monotonic() < deadline, "nothing had to be loaded"
            time.sleep(0.01)
        loop.reset()
        heard.wait("parked")
        assert "loads" not in heard.ends
        release.set()
        heard.wait("loads")
    assert heard.tokens["loads"] == heard.tokens["parked"] == expected(1, 4, 60)


def test_requests_may_come_from_any_iterable() -> None:
    with running(heard := Heard()) as loop:
        loop.add((f"a{number}", prompt(number), params(3)) for number in range(3))
        heard.wait("a0", "a1", "a2")
    assert [heard.tokens[f"a{number}"] for number in range(3)] == [expected(n, 3) for n in range(3)]
