"""The line to a server, and the settings in a URL: what all remote tiers share."""

from __future__ import annotations

import logging
import threading
from typing import ClassVar

import pytest

from ebbtide.errors import InputError
from ebbtide.offload.tiers.breaker import BreakerConfig
from ebbtide.offload.tiers.remote import (
    Down,
    Line,
    RisingTotal,
    count,
    flag,
    one_line,
    seconds,
    settings,
)

CONFIG = BreakerConfig(failures_max=2, wait_s=1.0, wait_s_max=8.0, probe_s=5.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail() -> str:
    raise OSError("no route\nto host")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def line(clock: Clock) -> Line:
    return Line("the server", (OSError,), CONFIG, clock)


class TestLine:
    def test_an_answer_comes_as_it_is(self, line) -> None:
        assert line.ask(lambda: "answer") == "answer"
        assert line.state() == "up"

    def test_a_failure_is_a_value_in_one_line(self, line) -> None:
        assert line.ask(fail) == Down("the server: no route")
        assert line.state() == "up"  # after the first of two

    def test_our_own_bugs_are_not_taken_for_the_servers_failures(self, line) -> None:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                line.ask(lambda: 1 / 0)
        assert line.state() == "up"
        line.close()  # waits for none of them

    def test_a_server_that_is_down_is_not_asked_until_the_wait_is_over(self, line, clock) -> None:
        asked = []
        line.ask(fail)
        line.ask(fail)
        assert line.state() == "down: no route"
        answer = line.ask(lambda: asked.append(1))
        assert answer == Down("the server is down: no route")
        assert not asked
        clock.now += 1.0
        assert line.ask(lambda: "back") == "back"
        assert line.state() == "up"

    def test_one_call_finds_out_while_the_others_are_told_at_once(self, line, clock) -> None:
        line.trip("said so")
        clock.now += 1.0
        inner = line.ask(lambda: line.ask(lambda: "a second call"))
        assert isinstance(inner, Down)

    def test_it_goes_and_comes_back_in_the_log_once(self, line, clock, caplog) -> None:
        caplog.set_level(logging.WARNING)
        for _ in range(4):
            line.ask(fail)
        clock.now += 1.0
        line.ask(fail)
        clock.now += 2.0
        line.ask(lambda: "back")
        line.ask(lambda: "still there")
        (gone, back) = (record.getMessage() for record in caplog.records)
        assert "is down" in gone
        assert "no route" in gone
        assert "answers again" in back

    def test_a_late_failure_of_before_does_not_close_the_door_again(self, line, clock) -> None:
        """A call that hung while the server went, and came back, is old news."""

        def slow() -> str:
            line.trip("meanwhile")
            clock.now += 1.0
            assert line.ask(lambda: "back") == "back"
            raise OSError("timed out")

        line.ask(slow)
        line.ask(fail)
        assert line.state() == "up"

    def test_closing_waits_for_what_is_under_way_and_refuses_the_rest(self, line) -> None:
        entered, go_on, ended = threading.Event(), threading.Event(), []

        def work() -> None:
            entered.set()
            go_on.wait(10)
            ended.append("work")

        worker = threading.Thread(target=lambda: line.ask(work))
        worker.start()
        entered.wait(10)
        closer = threading.Thread(target=lambda: (line.close(), ended.append("close")))
        closer.start()
        closer.join(0.05)
        assert not ended
        go_on.set()
        closer.join(10)
        worker.join(10)
        assert ended == ["work", "close"]
        assert line.ask(lambda: "answer") == Down("the server was closed")
        assert line.state() == "down: it was closed"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("one\ntwo"), "one"),
        (OSError("\n one"), "one"),
        (TimeoutError(), "TimeoutError"),
        (OSError("x" * 1000), "x" * 300),
    ],
)
def test_what_a_client_says_is_put_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


class TestSettings:
    KNOWN: ClassVar = {"ttl": count, "timeout": seconds, "verify": flag}

    def test_all_kinds(self) -> None:
        found = settings("ttl=3&timeout=0.5&verify=TRUE", self.KNOWN)
        assert found == {"ttl": 3, "timeout": 0.5, "verify": True}
        assert settings("", self.KNOWN) == {}

    @pytest.mark.parametrize(
        ("query", "says"),
        [
            ("tll=3", "did you mean 'ttl'"),
            ("x=3", "there are ttl, timeout, verify"),
            ("ttl=3&ttl=3", "twice"),
            ("ttl=", "give a number"),
            ("ttl=1.5", "whole number"),
            ("ttl=-1", "0 or more"),
            ("ttl=inf", "give a number"),
            ("ttl=1e99", "whole number"),
            ("timeout=0", "more than 0"),
            ("timeout=3601", "up to 3600"),
            ("timeout=nan", "give a number"),
            ("verify=1", "true or false"),
        ],
    )
    def test_what_is_no_good_is_one_sentence(self, query: str, says: str) -> None:
        with pytest.raises(InputError, match=says):
            settings(query, self.KNOWN)


def test_a_total_rises_though_the_counter_that_it_follows_starts_again() -> None:
    total = RisingTotal()
    assert [total.read(count) for count in (3, 3, 7, 0, 2, 1)] == [3, 3, 7, 7, 9, 10]
    assert total.total == 10
